"""RolloutDump: every row of every step, for reading, and for scoring again."""

import json
import math
import os
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq

from lit_rl.callbacks.log_completions import completion_rows
from lit_rl.distributed import rank, world_size
from lit_rl.errors import ConfigError
from lit_rl.hooks import RLCallback

FORMATS = ("jsonl", "parquet")


class RolloutDump(RLCallback):
    """Writes one file per step and rank, whole or not at all: `step_00000001.jsonl`.

    A row holds what was generated from and trained on: token ids of prompt and completion, reward and its
    parts, advantage, feedback, the teacher's prompt, the policy version, and the data row's columns but its
    images, so that `python -m lit_rl.rescore` can score it again; with an environment also the messages after
    the prompt, its reward, and the places of its tokens (`foreign`). A step that is trained again after a
    resume is written again, with the same rows.

    Args:
        rollout_dump_dir: folder.
        format: "jsonl" or "parquet".

    Raises:
        ConfigError: an unknown format.
    """

    def __init__(self, rollout_dump_dir: str, format: str = "jsonl") -> None:
        if format not in FORMATS:
            raise ConfigError(
                f"callbacks.rollout_dump.format must be one of {', '.join(FORMATS)} (found {format!r})."
            )
        self.folder, self.format = Path(rollout_dump_dir), format

    def on_update_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        step: int,
        metrics: dict[str, float],
        **payload: Any,
    ) -> None:
        suffix = f".rank{rank()}" if world_size() > 1 else ""
        file = self.folder / f"step_{step:08d}{suffix}.{self.format}"
        rows = dumped_rows(pl_module, step)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".tmp")
        if self.format == "jsonl":
            lines = (json.dumps(row, allow_nan=False) + "\n" for row in rows)
            temporary.write_text("".join(lines), encoding="ascii")
        else:
            plain = [{**row, "columns": json.dumps(row["columns"])} for row in rows]
            pq.write_table(pa.Table.from_pylist(plain), temporary)
        os.replace(temporary, file)


def dumped_rows(pl_module: Any, step: int) -> list[dict[str, Any]]:
    """This rank's rows of the step as plain values.

    Args:
        pl_module: the algorithm, with `last_rollout`.
        step: written into each row.
    """
    rollout = pl_module.last_rollout
    rows = completion_rows(rollout, pl_module.chat, pl_module.reward_names, step)
    images = getattr(pl_module.trainer.datamodule, "image_key", None) if rollout.images is not None else None
    for b, row in enumerate(rows):
        width, length = rollout.prompt_ids.shape[1], int(rollout.prompt_len[b])
        row["prompt_ids"] = rollout.prompt_ids[b, width - length :].tolist()
        row["completion_ids"] = rollout.completion_ids[b, : row["length"]].tolist()
        row["policy_version"] = None if rollout.policy_version is None else int(rollout.policy_version[b])
        row["baseline"] = None if rollout.baselines is None else _number(float(rollout.baselines[b]))
        row["teacher_prompt"] = _teacher_prompt(rollout, b, pl_module.chat)
        if rollout.conversations is not None:
            talk = rollout.conversations[b]
            row["opening"], row["messages"] = talk.prompt, talk.messages
            row["environment_reward"] = talk.reward
            row["foreign"] = rollout.foreign_mask[b, : row["length"]].nonzero()[:, 0].tolist()
        row["columns"] = {name: values[b] for name, values in rollout.columns.items() if name != images}
    return rows


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _teacher_prompt(rollout: Any, b: int, chat: Any) -> str | None:
    """None for a row without a teacher."""
    if rollout.teacher_prompt_ids is None or not rollout.self_distillation_mask[b]:
        return None
    width, length = rollout.teacher_prompt_ids.shape[1], int(rollout.teacher_prompt_len[b])
    return chat.decode(rollout.teacher_prompt_ids[b, width - length :].tolist())
