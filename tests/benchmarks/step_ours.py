"""Our side of `step.py`: a real run of train.py, timed from outside."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from fixed_work import SHAPES, TOPK, Phases, Shape, floor_flops, matmul_rate, questions, report, write

ROOT = Path(__file__).resolve().parents[2]
REWARD = """
from fixed_work import rewards


def by_place(completions, **columns):
    return rewards(len(completions), {generations})
"""


def prompts_file(args: argparse.Namespace, shape: Shape, folder: Path) -> Path:
    """The prompts as a parquet file in verl's schema, once per step."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["answer"].rsplit("#### ", 1)[-1]},
        }
        for row in questions(args.data, shape, tokenizer)
    ]
    parquet.write_table(pa.Table.from_pylist(rows * args.steps), folder / "train.parquet")
    return folder / "train.parquet"


def overrides(args: argparse.Namespace, shape: Shape, folder: Path) -> list[str]:
    """The command line of train.py."""
    (folder / "reward.py").write_text(REWARD.format(generations=shape.generations))
    limit = shape.prompt_tokens or 256
    lines = [
        f"algo={shape.algo}",
        "model=hf",
        f"model.path={args.model}",
        "model.gradient_checkpointing=false",
        "data=gsm8k",
        f"data.train_files={prompts_file(args, shape, folder)}",
        "data.val_files=null",
        f"data.train_batch_size={shape.prompts}",
        f"data.max_prompt_length={limit}",
        "data.shuffle=false",
        f"algo.num_generations={shape.generations}",
        f"algo.batch.micro_batch_size={shape.prompts * shape.generations}",
        f"algo.sampling.max_completion_length={shape.max_completion}",
        "algo.sampling.ignore_eos=true",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "reward.custom_reward_function.name=by_place",
        "optim.lr=1e-6",
        "schedule.lr_scheduler_type=constant",
        "trainer.val_check_interval=0",
        f"trainer.max_steps={args.steps}",
        "checkpoint.save_freq=-1",
        "logger=none",
        f"run_dir={folder / 'run'}",
    ]
    if shape.algo == "grpo":
        lines.append("algo.kl.beta=0")
    if shape.algo == "sdpo":
        lines.append(f"algo.distillation.distillation_mode={shape.mode}")
    if shape.mode == "topk_logits":
        lines.append(f"algo.distillation.distillation_topk={TOPK}")
    return [*lines, *args.overrides]


def patch(phases: Phases) -> list[Any]:
    """Put the timers on. Returns what gets to hold the policy."""
    from lit_rl.algorithms import base, sdpo, student_scores
    from lit_rl.rollout.hf import HFEngine
    from lit_rl.rollout.next_token import NextToken

    def counted(rollout: Any, *_: Any, **__: Any) -> None:
        lens, written = rollout.prompt_len, rollout.completion_len
        phases.counts.update(
            rows=len(rollout), prompt_tokens=int(lens.sum()), generated_tokens=int(written.sum())
        )

    def taught(_: Any, module: Any, rollout: Any) -> None:
        tokens = rollout.teacher_prompt_len + rollout.completion_len
        prompts = zip(rollout.teacher_prompt_ids.tolist(), rollout.teacher_prompt_len.tolist(), strict=True)
        contexts = {tuple(ids[-length:]) for ids, length in prompts}  # left-padded
        phases.counts.update(
            teacher_tokens=int(tokens[rollout.self_distillation_mask].sum()),
            reprompted_rows=int(rollout.self_distillation_mask.sum()),
            teacher_contexts=len(contexts),
            teacher_context_tokens=sum(map(len, contexts)),
        )

    def pass_name(policy: str, other: str) -> Any:
        return lambda *_, **__: policy if torch.is_grad_enabled() else other

    phases.patch(HFEngine, "generate", "gen.sample+cache", counted)
    phases.patch(
        NextToken, "__call__", lambda _, ids, *rest: "gen.prefill" if ids.shape[1] > 1 else "gen.decode"
    )
    phases.patch(base.RLModule, "score_rewards", "reward")
    phases.patch(sdpo.SDPO, "build_teacher_context", "teacher_context", taught)
    phases.patch(base, "score", pass_name("forward", "old_logprob"))
    phases.patch(sdpo.SDPO, "teacher_logps", "teacher_forward")
    phases.patch(sdpo.SDPO, "teacher_sources", "teacher_forward")
    phases.patch(student_scores, "completion_hidden", "forward")
    for module in (sdpo.SDPO, sdpo.GRPO):
        phases.patch(module, "loss", "loss")
    phases.patch(base.RLModule, "backward_locally", "backward")
    phases.patch(base.RLModule, "update_weights", "optimizer")
    phases.patch(sdpo.SDPO, "sync", "teacher_sync")
    phases.patch(base.RLModule, "report", "other", lambda *_: phases.end_step())

    found: list[Any] = []

    def begun(_: None, module: Any) -> None:
        found.append(module.policy)
        phases.begin_step()

    phases.patch(base.RLModule, "on_fit_start", "other", begun)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="further settings of train.py, after --")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape, phases = SHAPES[args.shape], Phases()
    sys.path.insert(0, str(ROOT))
    import train
    from lit_rl.configuration.launch import launch

    rate = matmul_rate(torch.bfloat16 if "trainer.precision=bf16-mixed" in args.overrides else torch.float32)
    found = patch(phases)
    with tempfile.TemporaryDirectory() as name:
        sys.argv = [str(ROOT / "train.py"), *overrides(args, shape, Path(name))]
        if launch(train.main, train.CONF):
            sys.exit("the run failed")
    (policy,) = found
    result = report(
        "ours",
        shape,
        phases,
        warmup=args.warmup,
        parameters=sum(p.numel() for p in policy.parameters()),
        overrides=args.overrides,
        matmul_flop_per_s=rate,
        floor_s=floor_flops(shape, phases.steps[-1]["counts"], policy) / rate,
    )
    print(json.dumps(result, indent=1))
    if args.out:
        write(result, args.out)


if __name__ == "__main__":
    main()
