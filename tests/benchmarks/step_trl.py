"""TRL's side of `step.py`, with the same work and the same split; runs where TRL is installed.

Nothing of lit_rl is imported, so that TRL's environment need not hold it.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from fixed_work import SHAPES, TOPK, Phases, Shape, questions, report, rewards, write
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class StepEnds(TrainerCallback):
    """Books TRL's optimizer and tells the timers where a step ends."""

    def __init__(self, phases: Phases) -> None:
        self.phases = phases

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.phases.patch(optimizer, "step", "optimizer")
        self.phases.patch(model, "zero_grad", "optimizer")
        self.phases.begin_step()

    def on_step_end(self, args, state, control, **kwargs):
        self.phases.end_step()


def settings(shape: Shape, steps: int, folder: str) -> dict[str, Any]:
    """What both trainers are given."""
    rows = shape.prompts * shape.generations
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": steps,
        "per_device_train_batch_size": shape.micro_batch,
        "gradient_accumulation_steps": rows // shape.micro_batch,
        "num_generations": shape.generations,
        "max_completion_length": shape.max_completion,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
        "dataloader_pin_memory": False,
        "generation_kwargs": {"min_new_tokens": shape.max_completion},
    }


def grpo(shape: Shape, phases: Phases, common: dict[str, Any], kept: list, **parts: Any) -> Any:
    """A GRPOTrainer with the timers on."""
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(args=GRPOConfig(**common), **parts)
    phases.patch(
        trainer,
        "_generate_single_turn",
        "gen.sample+cache",
        lambda result, prompt_ids, *_, **__: counted(phases, prompt_ids, result[0]),
    )
    keep_losses(trainer, "_compute_loss", kept, moved_policy)
    phases.patch(
        trainer,
        "_get_per_token_logps_and_entropies",
        lambda *_, **__: "forward" if torch.is_grad_enabled() else "old_logprob",
    )
    return trainer


def sdpo(shape: Shape, phases: Phases, common: dict[str, Any], kept: list, **parts: Any) -> Any:
    """An SDPOTrainer with the timers on."""
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    config = SDPOConfig(
        **common,
        max_prompt_length=shape.prompt_tokens or 256,
        distillation_mode=shape.mode,
        distillation_topk=TOPK if shape.mode == "topk_logits" else None,
        distillation_alpha=1.0,
        teacher_model_kind="ema",
    )
    trainer = SDPOTrainer(args=config, **parts)
    phases.patch(
        trainer,
        "_generate",
        "gen.sample+cache",
        lambda result, prompt_ids, *_, **__: counted(phases, prompt_ids, result[1]),
    )
    phases.patch(
        trainer.teacher_context_builder,
        "build",
        "teacher_context",
        lambda result, *_, **__: phases.counts.update(
            teacher_tokens=int(result["teacher_attention_mask"].sum()),
            reprompted_rows=int(result["self_distillation_mask"].sum()),
        ),
    )
    keep_losses(trainer, "compute_loss", kept, lambda trainer, inputs: {})
    phases.patch(trainer, "_compute_rollout_logps", "old_logprob")
    phases.patch(
        trainer,
        "_forward_logits",
        lambda *_, **__: "forward" if torch.is_grad_enabled() else "teacher_forward",
    )
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "SyncTeacherModelCallback":
            phases.patch(callback, "on_step_end", "teacher_sync")
    return trainer


def counted(phases: Phases, prompt_ids: list, completion_ids: list) -> None:
    phases.counts.update(
        rows=len(prompt_ids),
        prompt_tokens=sum(map(len, prompt_ids)),
        generated_tokens=sum(map(len, completion_ids)),
    )


def moved_policy(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Old log-probabilities as if the policy had moved since, so that ratios leave 1 and are clipped."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    steps = torch.arange(logps.numel(), dtype=torch.float32).view(logps.shape)
    return {"old_per_token_logps": logps + 0.4 * torch.sin(steps)}


def keep_losses(trainer: Any, method: str, kept: list, changes: Any) -> None:
    """Before the first update, compute the loss of the first micro-batch once more and keep it.

    It falls into the warm-up step.
    """
    inner = getattr(trainer, method)

    def call(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(None)
            with torch.no_grad():
                given = {**inputs, **changes(trainer, inputs)}
                scale = trainer.current_gradient_accumulation_steps if method == "compute_loss" else 1
                loss = float(inner(model, given)) * scale
            tensors = {name: value.cpu() for name, value in given.items() if isinstance(value, torch.Tensor)}
            kept[0] = {"inputs": tensors, "loss": loss}
        return inner(model, inputs, *args, **kwargs)

    setattr(trainer, method, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--losses", type=Path, help="keep the first micro-batch and its loss here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    shape, phases, kept = SHAPES[args.shape], Phases(), []
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)

    def by_place(completions: list, **columns: Any) -> list[float]:
        return rewards(len(completions), shape.generations)

    with tempfile.TemporaryDirectory() as folder:
        trainer = {"grpo": grpo, "sdpo": sdpo}[shape.algo](
            shape,
            phases,
            settings(shape, args.steps, folder),
            kept,
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(questions(args.data, shape, tokenizer) * args.steps),
            reward_funcs=by_place,
        )
        phases.patch(trainer, "_calculate_rewards", "reward")
        phases.patch(trainer, "compute_loss", "loss")
        phases.patch(trainer.accelerator, "backward", "backward")
        phases.patch(trainer.accelerator, "clip_grad_norm_", "optimizer")

        def pass_name(*_: Any, input_ids: Any = None, **__: Any) -> str | None:
            if phases.is_in("gen.sample+cache"):
                return "gen.prefill" if input_ids.shape[1] > 1 else "gen.decode"
            return None

        phases.patch(trainer.model, "forward", pass_name)
        trainer.add_callback(StepEnds(phases))
        trainer.train()
    import trl

    parameters = sum(p.numel() for p in model.parameters())
    result = report("trl", shape, phases, warmup=args.warmup, parameters=parameters, trl=trl.__version__)
    print(json.dumps(result, indent=1))
    if args.out:
        write(result, args.out)
    if args.losses:
        torch.save(kept[0], args.losses)


if __name__ == "__main__":
    main()
