"""The plan: what a run is about to do, in words and numbers, before anything is loaded."""

import math
import textwrap
from typing import Any

from lit_rl.configuration import batch_rules
from lit_rl.configuration.secrets import masked
from lit_rl.configuration.settings import Settings
from lit_rl.configuration.tree import ABSENT, at, leaves, link

WIDTH = 110


def plan(settings: Settings, rows: dict[str, int], total_steps: int) -> str:
    """The page that is printed before a run.

    Args:
        settings: the checked configuration.
        rows: data rows by split.
        total_steps: steps of the run.
    """
    sections = [
        ("name", [f"{settings['project_name']}, {settings['experiment_name']}"]),
        ("algorithm", [_algorithm(settings)]),
        ("model", [_model(settings)]),
        ("copies", [_copies(settings)]),
        ("data", [f"{rows['train']:,} training rows, {rows['val']:,} validation rows ({_files(settings)})"]),
        ("batch", batch_arithmetic(settings)),
        ("run", _run(settings, rows["train"], total_steps)),
        ("seed", [str(settings["seed"])]),
        ("written to", [str(settings["run_dir"])]),
        ("set", differences(settings) or ["nothing: every value is its default"]),
    ]
    return page(sections)


def page(sections: list[tuple[str, list[str]]]) -> str:
    """Titles with their sentences, each on lines of its own."""
    lines = []
    for title, texts in sections:
        for i, text in enumerate(texts):
            head = f"{title if i == 0 else '':<11} "
            lines += textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * 14)
    return "\n".join(lines)


def batch_arithmetic(settings: Settings) -> list[str]:
    """Rows, optimizer steps and micro-batches of a step, one sentence each."""
    prompts, world = settings["data.train_batch_size"], batch_rules.ranks(settings)
    rows, size = batch_rules.rows_per_step(settings), batch_rules.rows_per_optimizer_step(settings)
    passes, micro = settings["algo.num_iterations"], settings["algo.batch.micro_batch_size"]
    updates = rows // size
    if "algo.num_generations" in settings:
        group = settings["algo.num_generations"]
        step = f"{prompts} prompts per step * {group} completions each = {rows} completions per step"
    else:
        step = f"{rows} rows per step"
    share = f", {rows // world} on each of {world} ranks" if world > 1 else ""
    lines = [
        f"{step}{share}",
        f"{passes} pass(es) over them * {updates} update(s) of {size} rows = {passes * updates} "
        f"optimizer step(s) per step",
    ]
    if micro is not None:
        count = math.ceil(size // world / micro)
        lines.append(f"{count} micro-batch(es) of at most {micro} rows per optimizer step and rank")
    else:
        tokens = settings["algo.batch.micro_batch_tokens"]
        lines.append(f"micro-batches of at most {tokens:,} tokens, the same number on every rank")
    return lines


def _run(settings: Settings, rows: int, total_steps: int) -> list[str]:
    if settings["task"] == "search":
        search = settings["callbacks.test_time_search"]
        limit, seeds = search["max_attempts"], search["num_seeds"]
        rounds = limit // settings["algo.num_generations"]
        return [
            f"{rows:,} questions * {seeds} seed(s), each at most {limit} attempts in {rounds} steps, "
            f"from the same weights"
        ]
    prompts, limit = settings["data.train_batch_size"], settings["trainer.max_steps"]
    why = f"trainer.max_steps {limit}" if limit >= 0 else f"data.total_epochs {settings['data.total_epochs']}"
    per_epoch = f"{rows / prompts:g} steps per data epoch ({rows:,} rows / {prompts})"
    return [
        f"{total_steps:,} steps ({why}), {per_epoch}, {total_steps * prompts / max(rows, 1):.2f} data epochs"
    ]


def _algorithm(settings: Settings) -> str:
    name = settings["algo._target_"].rsplit(".", 1)[-1]
    if "algo.sampling" not in settings:
        return name
    sampling = settings["algo.sampling"]
    limit, temperature = sampling["max_completion_length"], sampling["temperature"]
    return f"{name}, at most {limit} tokens per completion at temperature {temperature}"


def _model(settings: Settings) -> str:
    rank = settings.get("model.lora.lora_rank", 0)
    trained = f"adapters of rank {rank} trained" if rank else "all weights trained"
    place = settings["trainer.accelerator"]
    return f"{settings['model.path']}, {settings['model.dtype']}, {trained}, on {place}"


def _copies(settings: Settings) -> str:
    """Which weights exist beside the policy's."""
    rank = settings.get("model.lora.lora_rank", 0)
    shared = "the policy without its adapters, no copy" if rank else "a frozen copy"
    copies = ["policy"]
    if settings.get("algo.kl.beta", 0.0) > 0 and settings.get("algo.distillation.distillation_weight", 0) < 1:
        copies.append(f"reference ({shared})")
    if settings.get("algo.distillation.distillation_weight", 0.0) > 0:
        kind = settings["algo.teacher.teacher_model_kind"]
        on_server = settings["algo.teacher.use_teacher_server"]
        words = {
            "ema": "an averaged copy in float32",
            "live": "the policy itself, no copy",
            "base": shared,
            "trust_region": f"{shared}, mixed with the policy itself",
        }
        words["live"] = "the policy on the rollout server" if on_server else words["live"]
        copies.append(f"teacher ({words.get(kind, kind)})")
    if "algo.critic" in settings:
        copies.append(_critic(settings))
    return ", ".join(copies)


def _critic(settings: Settings) -> str:
    model, first = settings["algo.critic.model"], settings["algo.critic.critic_warmup"]
    rank = (model.get("lora") or {}).get("lora_rank", 0)
    trained = f"adapters of rank {rank} and the value head trained" if rank else "all weights trained"
    alone = f", alone in the first {first} steps" if first else ""
    return f"critic ({model['path']}, {trained}{alone})"


def _files(settings: Settings) -> str:
    files = settings["data.train_files"]
    if files is None:
        return "no file"
    text = files if isinstance(files, str) else ", ".join(str(file) for file in files)
    return text if len(text) <= 80 else text[:77] + "..."


def differences(settings: Settings) -> list[str]:
    """Every value that is not its default: `key = value`, and where it comes from."""
    lines = []
    for key, value in leaves(settings.tree):
        default = settings.defaults.get(key, ABSENT)
        preset = at(settings.baseline, key)
        is_preset = value == preset
        is_told = key in ("run_dir", "seed") or (
            is_preset and (default is ABSENT or key.startswith("logger."))
        )
        if link(value) or _plain(value) == _plain(default) or is_told:
            continue
        origin = "preset" if is_preset else "yours"
        told = "" if default is ABSENT else f"; default {_spelled(key, default)}"
        lines.append(f"{key} = {_spelled(key, value)}  ({origin}{told})")
    return lines


def _plain(value: Any) -> Any:
    """A class cannot have a list or map as default, so that none and an empty one are the same."""
    return list(value) if isinstance(value, tuple) else None if value in ([], {}) else value


def _spelled(key: str, value: Any) -> str:
    value = masked(key, value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
