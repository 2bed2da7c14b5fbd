"""Further completions inside a step: fresh prompts for groups that teach nothing, and greedy baselines.

| metric | formula |
| --- | --- |
| `refill/rounds` | refills of the step |
| `refill/prompts` | prompts that replaced a group without spread: as many as groups dropped |
| `refill/tokens` | completion tokens of those prompts; `rollout/tokens` counts the dropped ones too |
| `refill/reward` | mean reward of all rows of the step, dropped ones included |
| `rollout/baseline_reward` | mean reward of the greedy completions |
| `rollout/baseline_tokens` | their tokens; `rollout/tokens` counts them too |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lit_rl.algorithms.reporting import is_flat
from lit_rl.algorithms.rewarding import fill_rewards_
from lit_rl.batch import RolloutBatch
from lit_rl.distributed import gather_objects, rank, world_size
from lit_rl.errors import ConfigError
from lit_rl.objectives.dynamic_sampling import DynamicSampling
from lit_rl.rollout.sampling import Sampling

if TYPE_CHECKING:
    from lit_rl.algorithms.base import RLModule


class Refills:
    """Replaces groups without a reward spread, and knows its place in the order that fresh prompts come from.

    The order and the groups are those of the whole step, so that the result is the same on any number of
    ranks.

    Args:
        settings: how often.
    """

    def __init__(self, settings: DynamicSampling) -> None:
        self.settings = settings
        self.drawn = 0

    @property
    def is_moving(self) -> bool:
        """Whether there are refills, so that a checkpoint must hold the place."""
        return self.settings.max_refills > 0

    def __call__(self, module: RLModule, rollout: RolloutBatch) -> None:
        """Refill in place until every group has a spread or a limit is reached. Collective.

        Args:
            module: generates and scores.
            rollout: scored rows.
        """
        in_use = {row for rows in gather_objects(_rows(rollout)) for row in rows}
        _count_rewards(module, rollout)
        rounds, prompts, tokens = 0, 0, 0
        while rounds < self.settings.max_refills:
            flat = _flat_groups(rollout)
            data = module.trainer.datamodule  # type: ignore[attr-defined]
            rows, self.drawn = data.fresh_rows(self.drawn, len(flat), in_use)
            if not rows:
                break
            in_use.update(rows)
            places = zip(flat[: len(rows)], rows, strict=True)
            own = {group: row for (_, owner, group), row in places if owner == rank()}
            tokens += _replace_(module, rollout, own) if own else 0
            rounds, prompts = rounds + 1, prompts + len(rows)
        module.sums.add("refill/rounds", rounds)
        module.sums.add("refill/prompts", prompts)
        module.sums.add("refill/tokens", tokens, 1.0 / world_size())

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def more_completions(
    module: RLModule, prompts: RolloutBatch, sampling: Sampling, *, n: int, purpose: str
) -> RolloutBatch:
    """Completions made inside the step, by whatever made the rollout.

    Args:
        module: was handed the rollout.
        prompts: rows without completions.
        sampling: how to draw.
        n: completions per prompt.
        purpose: keeps the noise of different uses apart.

    Raises:
        ConfigError: the rollout was not made in this run.
    """
    if module.more is None:
        raise ConfigError(
            "algo.dynamic_sampling and adv_estimator=remax need further completions, and the batch carried "
            "its own: add the callback RolloutGeneration (callbacks.rollout=${rollout}), train on prompts."
        )
    with module.clock("generate"):
        return module.more(prompts, sampling, n, purpose).to(module.device)


def _replace_(module: RLModule, rollout: RolloutBatch, rows: dict[int, int]) -> int:
    """Put fresh prompts, with completions and rewards, in the place of groups of this rank; their tokens.

    Args:
        module: generates and scores.
        rollout: changed in place.
        rows: data row by group.
    """
    size = rollout.num_generations
    prompts = module.trainer.datamodule.train_rows(list(rows.values()))  # type: ignore[attr-defined]
    # a row is in a step at most once, so the noise of the first rollout is not drawn again
    fresh = more_completions(module, prompts, module.sampling, n=size, purpose="train")
    fill_rewards_(module, fresh)
    _count_rewards(module, fresh)
    index = [group * size + i for group in rows for i in range(size)]
    dropped = rollout.select(index).completion_len
    assert fresh.completion_len is not None and dropped is not None
    module.sums.add("rollout/tokens", dropped.sum(), 0.0)
    rollout.put_(index, fresh)
    return int(fresh.completion_len.sum())


def greedy_rewards(module: RLModule, rollout: RolloutBatch) -> Tensor:
    """(B,) the reward of one greedy completion of each row's prompt; it is not trained on.

    Args:
        module: generates and scores.
        rollout: rows with completions.
    """
    assert module.reward is not None
    sampling = module.sampling.greedy()
    greedy = more_completions(module, rollout.prompts(), sampling, n=1, purpose="baseline")
    rewards = module.reward(module.samples(greedy)).rewards.to(module.device)
    assert greedy.completion_len is not None
    tokens = greedy.completion_len.sum()
    module.sums.add("rollout/baseline_reward", rewards.nansum(), (~rewards.isnan()).sum())
    module.sums.add("rollout/baseline_tokens", tokens, 1.0 / world_size())
    module.sums.add("rollout/tokens", tokens, 0.0)
    return rewards.repeat_interleave(rollout.num_generations)


def _rows(rollout: RolloutBatch) -> list[int]:
    return rollout.prompt_row[:: rollout.num_generations].tolist()


def _flat_groups(rollout: RolloutBatch) -> list[tuple[int, int, int]]:
    """(place in the step, rank, group on that rank) of every group without a spread, in order. Collective.

    Rank r of W has every W-th prompt of the step.
    """
    assert rollout.rewards is not None
    flat = is_flat(rollout.rewards.view(-1, rollout.num_generations)).nonzero().flatten().tolist()
    by_rank = gather_objects(flat)
    world = len(by_rank)
    return sorted(
        (group * world + owner, owner, group) for owner, groups in enumerate(by_rank) for group in groups
    )


def _count_rewards(module: RLModule, rollout: RolloutBatch) -> None:
    assert rollout.rewards is not None
    module.sums.add("refill/reward", rollout.rewards.nansum(), (~rollout.rewards.isnan()).sum())
