"""ReasoningGymDataModule: questions that the package reasoning-gym makes; no file is read."""

import importlib
import json
from collections.abc import Iterator
from typing import Any

from lit_rl.data.prompts import PromptDataModule
from lit_rl.errors import ConfigError
from lit_rl.seeding import derived_seed

INSTRUCTION = "Give the final answer between <answer> and </answer>."
NOT_SERVED = ("composite", "arc_agi", "rearc")
"""Tasks whose verifier needs more than the plain values that a row can hold."""


class Questions:
    """Rows of one task in verl's schema, each made when it is asked for; the same for equal arguments.

    The verifier's view of a question travels as JSON in `extra_info`.

    Args:
        task: of reasoning-gym, such as chain_sum.
        split: train or test; their questions are drawn apart, but a small task may draw some twice.
        size: number of rows.
        seed: of the draw.

    Raises:
        ConfigError: an unknown task, or the package is not installed.
    """

    def __init__(self, task: str, split: str, size: int, seed: int) -> None:
        self.task, self.split, self.size, self.seed = task, split, size, seed
        self._made = _dataset(task, size, derived_seed(seed, "reasoning_gym", task, split))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        entry = self._made[index]
        return {
            "data_source": f"reasoning_gym/{self.task}",
            "prompt": [{"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTION}"}],
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
            "extra_info": {"split": self.split, "index": index, "entry": json.dumps(entry, default=str)},
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(self.size))

    def __reduce__(self) -> tuple[Any, ...]:
        return Questions, (self.task, self.split, self.size, self.seed)


class ReasoningGymDataModule(PromptDataModule):
    """Prompts of one task of reasoning-gym, whose own verifier is the reward (`reasoning_gym/<task>`).

    Args:
        task: of reasoning-gym, such as chain_sum.
        train_size: training questions.
        val_size: validation questions; 0 is no validation.
        base: the arguments of `PromptDataModule`; `train_files` and `val_files` have no place here.

    Raises:
        ConfigError: an unknown task, a size out of range, or the package is not installed.
    """

    def __init__(
        self, *, task: str | None = None, train_size: int = 2000, val_size: int = 128, **base: Any
    ) -> None:
        if task is None:
            raise ConfigError("data.task must name a task of reasoning-gym (found None), such as chain_sum.")
        for name, size, low in (("train_size", train_size, 1), ("val_size", val_size, 0)):
            if size < low:
                raise ConfigError(f"data.{name} must be >= {low} (found {size!r}).")
        for name in ("train_files", "val_files"):
            if base.get(name) is not None:
                raise ConfigError(
                    f"data.{name} (found {base[name]!r}) has no effect with data=reasoning_gym, which makes "
                    "its questions; leave it out."
                )
        super().__init__(**{**base, "train_files": None, "val_files": None})
        self.train_files = Questions(task, "train", train_size, self.data_seed)
        self.val_files = Questions(task, "test", val_size, self.data_seed) if val_size else None


def _dataset(task: str, size: int, seed: int) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise ConfigError(
            f"data.task needs the package reasoning-gym ({error}): `pip install 'lit_rl[reasoning-gym]'`."
        ) from error
    tasks = sorted(known.keys() - set(NOT_SERVED))
    if task not in tasks:
        raise ConfigError(f"data.task must be one of {', '.join(tasks)} (found {task!r}).")
    return gym.create_dataset(task, size=size, seed=seed)
