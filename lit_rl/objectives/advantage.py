"""Advantage: how the rewards of a step become credit for its rows or tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lit_rl.distributed import gather_rows
from lit_rl.errors import ConfigError
from lit_rl.functional import advantages as estimators
from lit_rl.functional.masking import masked_whiten


class ScoredRows(NamedTuple):
    """What credit is computed from.

    Attributes:
        rewards: (B,) float, the rows of a prompt adjacent; NaN where no function applied.
        lengths: (B,) long, tokens of each completion.
        mask: (B, T) bool, tokens that count in the loss.
        penalty: (B, T) float, subtracted from the reward of each token; zeros where there is none.
        baselines: (B,) float, reward of the greedy completion of the same prompt, NaN where it has none; only
            remax reads it.
        written: (B,) long, tokens of each completion that the policy wrote; None: all of them; only opo reads
            it.
    """

    rewards: Tensor
    lengths: Tensor
    mask: Tensor
    penalty: Tensor
    baselines: Tensor | None = None
    written: Tensor | None = None

    def groups(self, num_generations: int) -> Tensor:
        """(P, G): the reward of each completion less its penalty."""
        return (self.rewards - self.penalty.sum(1)).view(-1, num_generations)

    def token_rewards(self) -> Tensor:
        """(B, T): the reward on the last token, less the penalty of each."""
        rewards = estimators.terminal_rewards(self.rewards, self.lengths, self.mask.shape[1])
        return rewards - self.penalty


@dataclass(frozen=True)
class Advantage:
    """Estimator of the advantages (source: TRL GRPOConfig; verl `algorithm.adv_estimator`).

    Args:
        adv_estimator: "grpo" centres the rewards in their group; "grpo_passk" credits the best of a group by
            its margin; "rloo" takes the mean of the others as baseline; "remax" the reward of one greedy
            completion, made for it; "opo" the mean weighted by length; "gpg" centres and scales by
            completions / completions of non-zero reward; "reinforce_plus_plus" whitens returns over the
            tokens of the whole batch, "reinforce_plus_plus_baseline" rewards centred in their group; "reward"
            is the discounted return itself; "gae" is generalised advantage estimation against a critic,
            whitened over the tokens of the whole batch; "none" computes nothing, for a loss without a policy
            term.
        scale_rewards: what the centred reward is divided by: the standard deviation of its "group" (true), of
            the whole "batch", or "none" (false). The reinforce_plus_plus pair has a scale of its own, that
            of the whole batch's tokens, unless this is none.
        std_epsilon: added to that deviation; grpo, grpo_passk and rloo.
        gamma: discount per token, in [0, 1]; gae, reinforce_plus_plus and reward.
        lam: gae: trade-off in [0, 1], 0 = one step ahead of the critic, 1 = the whole rest.

    Raises:
        ConfigError: a value is out of range.
    """

    key: ClassVar[str] = "algo.advantage"

    adv_estimator: Literal[
        "gae",
        "grpo",
        "grpo_passk",
        "rloo",
        "remax",
        "opo",
        "gpg",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "reward",
        "none",
    ] = "grpo"
    scale_rewards: Literal["group", "batch", "none", True, False] = "group"
    std_epsilon: float = 1e-6
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        known = (GAE, *ESTIMATORS)
        checks = [
            ("adv_estimator", self.adv_estimator in known, f"must be one of {', '.join(known)}"),
            ("std_epsilon", self.std_epsilon >= 0, "must be >= 0"),
            ("gamma", 0 <= self.gamma <= 1, "must be in [0, 1]"),
            ("lam", 0 <= self.lam <= 1, "must be in [0, 1]"),
        ]
        for name, is_legal, rule in checks:
            if not is_legal:
                raise ConfigError(f"{self.key}.{name} {rule} (found {getattr(self, name)!r}).")

    @property
    def scale(self) -> str:
        """scale_rewards as a word."""
        if isinstance(self.scale_rewards, bool):
            return "group" if self.scale_rewards else "none"
        return self.scale_rewards

    @property
    def is_group_relative(self) -> bool:
        """Whether a group of one has nothing to be compared with."""
        return self.adv_estimator in GROUP_RELATIVE

    @property
    def needs_baselines(self) -> bool:
        """Whether each prompt needs a greedy completion."""
        return self.adv_estimator == "remax"

    def __call__(self, rows: ScoredRows, num_generations: int) -> Tensor:
        """Advantages of this rank's rows. Collective where the whole batch counts.

        Args:
            rows: of this rank.
            num_generations: G.

        Returns:
            (B,), or (B, T) for the estimators over tokens; 0 for rows without a reward and, where the
            estimator is group-relative, in groups of equal rewards.
        """
        estimator = ESTIMATORS[self.adv_estimator]
        is_over_batch = self.scale == "batch" and self.adv_estimator in SCALED_BY_GROUP
        if not is_over_batch and self.adv_estimator not in OVER_THE_BATCH:
            return estimator(rows, num_generations, self)
        everything, own = gather_rows(rows.rewards, rows.lengths, rows.mask, rows.penalty)
        advantages = estimator(ScoredRows(*everything), num_generations, self)[own]
        return advantages if advantages.dim() == 1 else advantages[:, : rows.mask.shape[1]]

    def gae(self, rows: ScoredRows, values: Tensor) -> estimators.Credit:
        """Advantages and returns of this rank's tokens against a critic. Collective: whitens over all ranks.

        Args:
            rows: of this rank.
            values: (B, T) what the critic expects before each token.
        """
        credit = estimators.gae(
            rows.token_rewards(), values, rows.mask, gamma=self.gamma, lam=self.lam, whiten=False
        )
        (advantages, mask), own = gather_rows(credit.advantages, rows.mask)
        whitened = masked_whiten(advantages, mask)[own, : rows.mask.shape[1]]
        return estimators.Credit(whitened, credit.returns)


def _grpo(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    groups = rows.groups(num_generations)
    return estimators.group_advantages(groups, scale=own.scale, std_epsilon=own.std_epsilon).flatten()


def _grpo_passk(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    return estimators.grpo_passk(rows.groups(num_generations), std_epsilon=own.std_epsilon).flatten()


def _rloo(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    groups = rows.groups(num_generations)
    return estimators.rloo(groups, scale=own.scale, std_epsilon=own.std_epsilon).flatten()


def _remax(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    if rows.baselines is None:
        raise ConfigError(
            f"{own.key}.adv_estimator 'remax' needs the reward of a greedy completion for each prompt, and "
            "the rollout has none: train on prompts with a reward, or store baselines beside the rewards."
        )
    baselines = torch.where(rows.baselines.isnan(), rows.rewards, rows.baselines)
    return estimators.remax(rows.token_rewards(), rows.mask, baselines)


def _opo(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    lengths = rows.lengths if rows.written is None else rows.written
    return estimators.opo(rows.groups(num_generations), lengths.view(-1, num_generations)).flatten()


def _gpg(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    return estimators.gpg(rows.groups(num_generations)).flatten()


def _reinforce_plus_plus(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    scale = own.scale != "none"
    return estimators.reinforce_plus_plus(
        rows.token_rewards(), rows.mask, gamma=own.gamma, scale=scale, across_gaps=True
    )


def _reinforce_plus_plus_baseline(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    groups, scale = rows.groups(num_generations), own.scale != "none"
    return estimators.reinforce_plus_plus_baseline(groups, rows.mask, scale=scale)


def _reward(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    return estimators.discounted_returns(rows.token_rewards(), rows.mask, gamma=own.gamma)


def _none(rows: ScoredRows, num_generations: int, own: Advantage) -> Tensor:
    return torch.zeros_like(rows.rewards)


GAE = "gae"  # the one that needs a critic, and a call of its own
ESTIMATORS: dict[str, Callable[[ScoredRows, int, Advantage], Tensor]] = {
    "grpo": _grpo,
    "grpo_passk": _grpo_passk,
    "rloo": _rloo,
    "remax": _remax,
    "opo": _opo,
    "gpg": _gpg,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "reward": _reward,
    "none": _none,
}
GROUP_RELATIVE = ("grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline")
SCALED_BY_GROUP = ("grpo", "rloo")
OVER_THE_BATCH = ("gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
