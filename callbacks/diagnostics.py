"""Diagnostics: warns when steps in a row have nothing to learn from."""

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rl.errors import ConfigError
from lit_rl.hooks import RLCallback

FEW = 3


class Condition(NamedTuple):
    """One way in which a step can be degenerate.

    Attributes:
        is_met: of the step's metrics and the tolerance; only asked when the metric is there.
        metric: what it reads.
        first: steps in a row before the first warning; None = as many as between two warnings.
        text: what has been the case, and what to look at.
    """

    is_met: Callable[[float, float], bool]
    metric: str
    first: int | None
    text: str


CONDITIONS = {
    "flat_rewards": Condition(
        lambda value, tolerance: value <= tolerance,
        "rollout/reward_std",
        None,
        "no group has had any spread in its rewards: group-relative advantages and the policy gradient are "
        "zero, and so a policy loss of 0 is no sign of a fault. rollout/all_right_frac and "
        "rollout/all_wrong_frac say whether the task is too easy or too hard",
    ),
    "all_cut": Condition(
        lambda value, tolerance: value >= 1 - tolerance,
        "rollout/truncated_frac",
        FEW,
        "all completions have been cut at algo.sampling.max_completion_length, before any end token; raise "
        "it, or look at the completions",
    ),
    "no_tokens": Condition(
        lambda value, tolerance: value <= tolerance,
        "rollout/loss_tokens",
        1,
        "no token has counted in the loss, so that nothing was learned: every completion was cut at "
        "algo.sampling.max_completion_length with algo.mask_truncated_completions on, or has no reward",
    ),
    "no_success": Condition(
        lambda value, tolerance: value <= tolerance,
        "sdpo/success_group_frac",
        None,
        "no group has had a success (a reward of at least algo.reprompt.success_reward_threshold), so that "
        "there are no demonstrations",
    ),
    "no_reprompt": Condition(
        lambda value, tolerance: value <= tolerance,
        "sdpo/reprompted_frac",
        None,
        "no row has had a teacher context, so that the distillation loss is 0: there is neither a "
        "demonstration nor feedback",
    ),
    "no_feedback": Condition(
        lambda value, tolerance: value <= tolerance,
        "sdpo/feedback_available_frac",
        None,
        "no row has had feedback, though algo.reprompt.include_environment_feedback is on: neither the "
        "reward nor the column data.privileged_context_key says anything",
    ),
}


class Diagnostics(RLCallback):
    """Counts, for each kind of degenerate step, how many came in a row, and warns about it.

    A healthy step sets that kind's count back to 0. Kinds: rewards without spread in any group, no row with
    a teacher context, no group with a success, no feedback where it is on (these three with SDPO), every
    completion cut, no token in the loss. Source: TRL SDPO, `diagnostics_*`; the separate counts are ours.

    Args:
        diagnostics_warning_interval: degenerate steps in a row between two warnings; 0 = no warnings. That
            all completions are cut is said after 3 already, that no token counts after 1.
        diagnostics_flat_tolerance: spreads and fractions up to this are zero.

    Raises:
        ConfigError: a value is negative.
    """

    def __init__(
        self, diagnostics_warning_interval: int = 10, diagnostics_flat_tolerance: float = 1e-8
    ) -> None:
        for name, value in (
            ("diagnostics_warning_interval", diagnostics_warning_interval),
            ("diagnostics_flat_tolerance", diagnostics_flat_tolerance),
        ):
            if value < 0:
                raise ConfigError(f"callbacks.diagnostics.{name} must be >= 0 (found {value!r}).")
        self.diagnostics_warning_interval = diagnostics_warning_interval
        self.diagnostics_flat_tolerance = diagnostics_flat_tolerance
        self.counts = dict.fromkeys(CONDITIONS, 0)

    def on_update_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        step: int,
        metrics: dict[str, float],
        **payload: Any,
    ) -> None:
        for name, condition in CONDITIONS.items():
            if condition.metric not in metrics:
                continue
            is_met = condition.is_met(metrics[condition.metric], self.diagnostics_flat_tolerance)
            self.counts[name] = self.counts[name] + 1 if is_met else 0
            if self._is_due(self.counts[name], condition.first):
                self._warn(step, self.counts[name], condition)

    def _is_due(self, count: int, first: int | None) -> bool:
        interval = self.diagnostics_warning_interval
        if interval == 0 or count == 0:
            return False
        return count % interval == 0 or (first is not None and count == min(first, interval))

    def _warn(self, step: int, count: int, condition: Condition) -> None:
        steps = "In this step" if count == 1 else f"For {count} steps in a row"
        rank_zero_warn(
            f"Step {step}: {steps} {condition.text}. ({condition.metric}; "
            f"callbacks.diagnostics.diagnostics_warning_interval=0 silences this.)"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts.update(state_dict["counts"])
