"""Our loss on rollouts that `step_trl.py --losses FILE` kept, beside TRL's.

    python tests/benchmarks/step_losses.py --model FOLDER --shape grpo_short FILE

Exits with 1 where the two differ by more than 1e-4.
"""

import argparse
import sys
from pathlib import Path

import torch
from fixed_work import SHAPES, TOPK, Shape, write
from torch import Tensor

from lit_rl.functional.distillation import Source, sampled_token_loss
from lit_rl.functional.masking import Totals
from lit_rl.models.load import load_policy
from lit_rl.models.score import Rows, completion_hidden, head_of, score
from lit_rl.objectives.distillation import Distillation
from lit_rl.objectives.policy import ClippedSurrogate, Terms

TOLERANCE = 1e-4


def rows_of(inputs: dict[str, Tensor], prompts: str) -> Rows:
    """TRL's padded rows, with the prompts of this side."""
    completions = inputs["completion_ids"], inputs["completion_mask"].sum(1)
    if prompts == "student":
        return Rows(inputs["prompt_ids"], inputs["prompt_mask"].sum(1), *completions)
    width = inputs["teacher_input_ids"].shape[1] - completions[0].shape[1]
    ids, mask = inputs["teacher_input_ids"][:, :width], inputs["teacher_attention_mask"][:, :width]
    return Rows(ids, mask.sum(1), *completions)


def grpo_loss(model: torch.nn.Module, inputs: dict[str, Tensor]) -> float:
    mask = inputs["completion_mask"].bool()
    logps = score(model, rows_of(inputs, "student")).logps
    loss = ClippedSurrogate(loss_type="dapo")
    log_ratios = loss.log_ratio(logps, inputs["old_per_token_logps"], mask)
    per_token = loss.per_token(Terms(log_ratios, logps, inputs["advantages"], mask, None))
    tokens = inputs["num_items_in_batch"].double()
    return float(loss.mean(per_token, mask, Totals(tokens, torch.tensor(len(mask)), mask.shape[1])))


def sdpo_loss(model: torch.nn.Module, inputs: dict[str, Tensor], shape: Shape) -> float:
    """Before the first update the averaged teacher is the policy itself."""
    mask = inputs["completion_mask"].bool() & inputs["self_distillation_mask"].bool()[:, None]
    student, teacher = rows_of(inputs, "student"), rows_of(inputs, "teacher")
    if shape.mode == "sampled_token":
        per_token = sampled_token_loss(score(model, student).logps, score(model, teacher).logps)
    else:
        topk = TOPK if shape.mode == "topk_logits" else None
        settings = Distillation(distillation_mode=shape.mode, distillation_topk=topk, distillation_alpha=1.0)
        is_token, head = inputs["completion_mask"].bool(), head_of(model)
        source = Source(completion_hidden(model, teacher), head)
        targets = inputs["completion_ids"][is_token]
        flat = settings.gaps(completion_hidden(model, student), head, [source], targets, 1.0).divergence
        per_token = flat.new_zeros(is_token.shape).masked_scatter(is_token, flat)
    return float((per_token * mask).sum() / mask.sum())


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[args.shape]
    kept = torch.load(args.file)
    model = load_policy(args.model)
    inputs = kept["inputs"]
    ours = grpo_loss(model, inputs) if shape.algo == "grpo" else sdpo_loss(model, inputs, shape)
    gap = abs(ours - kept["loss"])
    print(f"{args.shape}: ours {ours:.7f}, TRL {kept['loss']:.7f}, apart by {gap:.1e}")
    if args.out:
        write({"ours": ours, "trl": kept["loss"], "apart": gap}, args.out)
    return int(gap > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
