"""DynamicSampling: how often a step may replace prompts that teach nothing."""

from dataclasses import dataclass
from typing import ClassVar

from lit_rl.errors import ConfigError


@dataclass(frozen=True)
class DynamicSampling:
    """Groups without a spread in their rewards are replaced by fresh prompts inside the step.

    A step always has `data.train_batch_size` prompts. Groups that are still without a spread after the last
    refill, or when every row of the data is in the step, stay: they have no gradient, and count in the
    divisors like any other. (verl's `filter_groups` raises there.) Source: DAPO, arXiv 2503.14476, section
    3.2.

    Args:
        max_refills: rollouts in a step beyond the first, each for all groups without a spread; 0 is off.

    Raises:
        ConfigError: a value is out of range.
    """

    key: ClassVar[str] = "algo.dynamic_sampling"

    max_refills: int = 0

    def __post_init__(self) -> None:
        if self.max_refills < 0:
            raise ConfigError(f"{self.key}.max_refills must be >= 0 (found {self.max_refills!r}).")
