"""A step's gradient does not depend on how its rows are cut, padded, ordered or spread over processes.

Through the real `training_step`, to 1e-10 in float64, for every loss in every average. `bnpo` and a planted
mean over each micro-batch are what the same comparison must catch.
"""

import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from invariance_cases import (
    AVERAGES,
    CASES,
    CLIPPED,
    CONTROLS,
    LOSSES,
    Case,
    corrected,
    gradient,
    policy,
)
from stored_rollouts import embedded_chat, rows_with_prompts

from lit_rl.algorithms.grpo import GRPO
from lit_rl.batch import RolloutBatch
from lit_rl.data.chat import Chat
from lit_rl.objectives.batch_plan import BatchPlan
from lit_rl.objectives.covariance_losses import ClipCov, KLCov
from lit_rl.objectives.policy import GPG, ClippedSurrogate, PolicyLoss
from lit_rl.objectives.ratio_losses import CISPO, SAPO, GeoMean
from lit_rl.objectives.rollout_correction import RolloutCorrection

TOLERANCE = 1e-10
RANKS = (range(8), range(8, 12))  # two groups of four rows, and one


@dataclass(frozen=True)
class RandomPieces(BatchPlan):
    """Rows drawn into pieces of random sizes."""

    def micro_batches(self, batch: RolloutBatch, *, is_sharing: bool = False) -> Iterator[RolloutBatch]:
        generator = torch.Generator().manual_seed(len(batch))
        order = torch.randperm(len(batch), generator=generator)
        while len(order):
            size = int(torch.randint(1, 6, (1,), generator=generator))
            yield batch.select(order[:size])
            order = order[size:]


def stored_rows() -> RolloutBatch:
    """Three groups of four: two best, no spread, one best."""
    batch = rows_with_prompts()
    assert batch.rewards is not None
    batch.rewards[:] = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0, 1, 0.5, 0, 0])
    return batch


def cut(size: int) -> BatchPlan:
    return BatchPlan(micro_batch_size=size)


def padded_more(batch: RolloutBatch, left: int = 0, right: int = 0) -> RolloutBatch:
    """The rows with more padding before the prompts and behind the completions, full of junk."""
    before, behind = torch.full((len(batch), left), 77), torch.full((len(batch), right), 77)
    batch.prompt_ids = torch.cat([before, batch.prompt_ids], 1)
    batch.completion_ids = torch.cat([batch.completion_ids, behind], 1)
    batch.completion_mask = torch.cat([batch.completion_mask, behind == 0], 1)
    batch.rollout_logps = torch.cat([batch.rollout_logps, behind.double()], 1)
    return batch


def ways() -> dict[str, tuple[RolloutBatch, BatchPlan]]:
    """The same rows, stored and cut in other ways."""
    other_order = [*range(4, 8), *range(8, 12), *range(4)]  # whole groups
    return {
        "pieces of 1, wider prompts": (padded_more(stored_rows(), left=3), cut(1)),
        "pieces of 3, wider completions": (padded_more(stored_rows(), right=2), cut(3)),
        "pieces of 7, groups in another order": (stored_rows().select(other_order), cut(7)),
        "random pieces, padded on both sides": (
            padded_more(stored_rows(), left=1, right=4),
            RandomPieces(),
        ),
        "by length, a token budget": (
            stored_rows(),
            BatchPlan(micro_batch_size=None, micro_batch_tokens=25),
        ),
    }


def distances(case: Case, chat: Chat) -> dict[str, float]:
    """How far the gradient is from that of all rows at once, by way of cutting and storing them."""
    whole = gradient(case, stored_rows(), cut(12), chat)
    assert whole.abs().max() > 1e-6, "the step moved nothing"
    found = {name: gradient(case, batch, plan, chat) for name, (batch, plan) in ways().items()}
    return {name: float((whole - other).abs().max()) for name, other in found.items()}


def in_brief(names: Iterable[str]) -> list[Any]:
    """Cases of which a like one is left are slow: other averages than the first, beyond the first loss's."""
    losses = (*LOSSES, "kl_and_entropy", "truncated", "ppo")
    again = [f"{loss}_{average}" for loss in losses for average in AVERAGES[1:]]
    again += [
        f"sdpo_{mode}_{divisor}" for mode in ("full", "topk") for divisor in ("active_rows", "all_rows")
    ]
    slow = set(again) - {f"clipped_{average}" for average in AVERAGES}
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in names]


@pytest.mark.parametrize("name", in_brief(CASES))
def test_the_cut_the_padding_and_the_order_do_not_matter(name: str, chat: Chat) -> None:
    found = distances(CASES[name], chat)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", CONTROLS)
def test_a_mean_over_each_micro_batch_is_caught(name: str, chat: Chat) -> None:
    found = distances(CONTROLS[name], chat)
    assert min(found.values()) > 1e-6, found


BRIEF = (
    "sft",
    "clipped_dapo",
    "gspo_grpo",
    "clip_cov_dapo",
    "kl_cov_dapo",
    "kl_and_entropy_grpo",
    "kl_in_reward_grpo",
    "estimator_reinforce_plus_plus",
    "masked",
    "sdpo_sampled_active_tokens",
    "sdpo_mixed",
    "ppo_dapo",
)


def one_of_two(rank: int, port: int, folder: str, names: tuple[str, ...]) -> None:
    """The cases and controls, as one of two ranks: each has another number of rows, of pieces, of padding."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    torch.set_num_threads(1)
    chat, found = embedded_chat(), {}
    for name in (*names, *CONTROLS):
        rows = padded_more(stored_rows().select(list(RANKS[rank])), right=2 * rank)
        found[name] = gradient((CASES | CONTROLS)[name], rows, cut(3), chat, ranks=2)
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.mark.parametrize(
    "names", [BRIEF, pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=["brief", "all"]
)
def test_two_processes_give_the_gradient_of_one(names: tuple[str, ...], tmp_path: Path, chat: Chat) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pair = mp.spawn(one_of_two, (port, str(tmp_path), names), nprocs=2, join=False)  # type: ignore[no-untyped-call]
    alone = {
        name: gradient((CASES | CONTROLS)[name], stored_rows(), cut(12), chat) for name in (*names, *CONTROLS)
    }
    while not pair.join():
        pass
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        far = {name: float((found[name] - alone[name]).abs().max()) for name in alone}
        assert {name for name, distance in far.items() if distance >= TOLERANCE} == set(CONTROLS), far


@pytest.mark.field("num/2")
@pytest.mark.parametrize("name", [f"clipped_{average}" for average in AVERAGES] + ["gspo_grpo", "sft"])
def test_a_batch_without_counted_tokens_changes_nothing(name: str, chat: Chat) -> None:
    batch = stored_rows()
    batch.completion_mask = torch.zeros_like(batch.completion_mask)
    assert not gradient(CASES[name], batch, cut(5), chat).any()


class EveryRow(GRPO):
    """GRPO that passes every row, whatever its advantage."""

    def rows_in_loss(self, rows: RolloutBatch) -> RolloutBatch:
        return rows


@pytest.mark.parametrize(
    "loss",
    [
        ClippedSurrogate(loss_type="grpo"),
        ClippedSurrogate(loss_type="dapo"),
        ClippedSurrogate(loss_type="dr_grpo"),
        GPG(),
        CISPO(),
        SAPO(),
        GeoMean(),
        ClipCov(cov_low=0.0, cov_ratio=0.3),
        KLCov(cov_ratio=0.3),
    ],
    ids=lambda loss: f"{type(loss).__name__}_{loss.loss_type}",
)
def test_leaving_out_rows_without_credit_changes_nothing(loss: PolicyLoss, chat: Chat) -> None:
    batch = stored_rows()
    batch.rewards[:4] = 1.0  # a group without spread
    some, every = (
        gradient(Case(policy(loss, module=module)), batch, cut(5), chat) for module in (GRPO, EveryRow)
    )
    assert (some - every).abs().max() < TOLERANCE


def test_what_the_engine_s_mismatch_rejects_leaves_the_divisor_too(chat: Chat) -> None:
    """As if the loss mask had been that from the start, over the whole optimizer batch."""
    batch, modules = stored_rows(), []

    def rejecting(**base: Any) -> GRPO:
        correction = corrected(rollout_is_mode="mask")
        modules.append(policy(CLIPPED, rollout_correction=correction, num_iterations=1)(**base))
        return modules[-1]

    rejected = gradient(Case(rejecting), batch, cut(5), chat)
    kept = modules[0].last_rollout.completion_mask
    assert 0 < (batch.completion_mask & ~kept).sum() < batch.completion_mask.sum()
    # the same rows, masked beforehand, with a mode that rejects nothing more
    batch.completion_mask = kept
    nothing_more = RolloutCorrection(rollout_is=True, rollout_is_threshold=1e9)
    plain = Case(policy(CLIPPED, rollout_correction=nothing_more, num_iterations=1))
    assert (rejected - gradient(plain, batch, cut(5), chat)).abs().max() < TOLERANCE
