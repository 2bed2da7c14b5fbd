"""Teacher: which weights score the completions for the student to follow."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.models.roles import AveragedCopy, Live, reference_of
from lit_rl.models.scorer import Scorer
from lit_rl.models.trust_region import TrustRegion


@dataclass(frozen=True)
class Teacher:
    """The teacher's weights (source: TRL SDPOConfig; "trust_region": the code of the SDPO paper).

    Args:
        teacher_model_kind: "ema" averages the policy, "live" is the policy itself, "base" the initial policy,
            "trust_region" mixes the logits of the last two.
        teacher_update_rate: ema: teacher = (1 - rate) * teacher + rate * policy, in float32.
        teacher_sync_steps: ema: steps between two updates.
        trust_region_mix: trust_region: logits = (1 - mix) * initial + mix * current.
        use_teacher_server: live: take the teacher's log-probabilities from the rollout server, once per step
            and so before its first update, at temperature 1; with top-k, over the teacher's own top entries.
            Needs rollout=vllm_server.

    Raises:
        ConfigError: a value is out of range, or the server is asked for another teacher than the policy it
            holds.
    """

    key: ClassVar[str] = "algo.teacher"

    teacher_model_kind: Literal["ema", "live", "base", "trust_region"] = "ema"
    teacher_update_rate: float = 0.05
    teacher_sync_steps: int = 1
    trust_region_mix: float = 0.5
    use_teacher_server: bool = False

    def __post_init__(self) -> None:
        checks = [
            ("teacher_update_rate", 0 <= self.teacher_update_rate <= 1, "must be in [0, 1]"),
            ("teacher_sync_steps", self.teacher_sync_steps >= 1, "must be >= 1"),
            ("trust_region_mix", 0 <= self.trust_region_mix <= 1, "must be in [0, 1]"),
        ]
        for name, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")
        if self.use_teacher_server and self.teacher_model_kind != "live":
            raise ConfigError(
                f"{self.key}.use_teacher_server needs {self.key}.teacher_model_kind 'live' (found "
                f"{self.teacher_model_kind!r}): the server holds the current policy and no other weights."
            )

    def scorer(self, policy: nn.Module) -> Scorer:
        """The teacher of this policy, as it stands before training."""
        makers = {
            "ema": AveragedCopy,
            "live": Live,
            "base": reference_of,
            "trust_region": partial(TrustRegion, mix=self.trust_region_mix),
        }
        return makers[self.teacher_model_kind](policy)  # type: ignore[operator]

    def follow(self, scorer: Scorer, step: int) -> None:
        """Move an averaged teacher toward the policy.

        Args:
            scorer: what `scorer` made.
            step: iterations done, this one included.
        """
        if isinstance(scorer, AveragedCopy) and step % self.teacher_sync_steps == 0:
            scorer.move_(self.teacher_update_rate)

    def moves(self, step: int) -> int:
        """How often an averaged teacher has moved after this many iterations; 0 for one that does not."""
        return step // self.teacher_sync_steps if self.teacher_model_kind == "ema" else 0

    @property
    def is_fixed_in_step(self) -> bool:
        """Whether its log-probabilities stay the same while a step updates the policy."""
        return self.teacher_model_kind in ("ema", "base") or self.use_teacher_server
