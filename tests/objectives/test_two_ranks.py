"""What counts over the whole batch is the same on one and on two ranks."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from lit_rl.batch import length_mask
from lit_rl.distributed import gather_rows
from lit_rl.objectives.advantage import Advantage, ScoredRows
from lit_rl.objectives.covariance_losses import ClipCov, KLCov
from lit_rl.objectives.kl import KLCoefficient, KLControl
from lit_rl.objectives.policy import Terms

SETTINGS = [
    ("grpo", "batch"),
    ("rloo", "batch"),
    ("gpg", "group"),
    ("reinforce_plus_plus", "batch"),
    ("reinforce_plus_plus", "none"),
    ("reinforce_plus_plus_baseline", "batch"),
]
RANKS = (slice(0, 4), slice(4, 6))  # two groups of two, and one


def rows() -> ScoredRows:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(6, generator=generator, dtype=torch.float64)
    rewards[0] = 0.0  # with its penalty: gpg counts it
    lengths = torch.tensor([2, 4, 5, 4, 2, 3])
    mask = length_mask(lengths, 5)
    penalty = torch.rand(6, 5, generator=generator, dtype=torch.float64) * mask
    penalty[0] = 0.0
    return ScoredRows(rewards, lengths, mask, penalty)


def share(rank: int) -> ScoredRows:
    """Of one rank, padded no wider than its own rows are."""
    own = ScoredRows(*(tensor[RANKS[rank]] for tensor in rows()[:4]))
    width = int(own.lengths.max())
    return own._replace(mask=own.mask[:, :width], penalty=own.penalty[:, :width])


def results(own: ScoredRows, noise: Tensor) -> dict[str, Tensor]:
    """Everything that asks all ranks, on the rows of this one. Collective."""
    found = {}
    for name, scale in SETTINGS:
        settings = Advantage(adv_estimator=name, scale_rewards=scale, gamma=0.9)  # type: ignore[arg-type]
        found[f"{name} {scale}"] = settings(own, 2)
    # penalties stand in for log-probabilities
    (*terms, numbers), mine = gather_rows(0 * own.penalty, own.penalty, own.rewards, own.mask, noise)
    for loss in (ClipCov(cov_low=-9.0, cov_high=9.0, cov_ratio=0.5), KLCov(cov_ratio=0.5)):
        found[type(loss).__name__] = loss.picked(Terms(*terms), numbers)[mine, : own.mask.shape[1]]
    coefficient = KLCoefficient(KLControl("adaptive", horizon=10, target_kl=0.6))
    coefficient.follow(own.penalty, own.mask)
    found["coefficient"] = torch.tensor([coefficient.value])
    return found


def noise_of(rank: int | None) -> Tensor:
    noise = torch.rand(6, 5, generator=torch.Generator().manual_seed(6))
    return noise if rank is None else noise[RANKS[rank], : share(rank).mask.shape[1]]


def one_of_two(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.save(results(share(rank), noise_of(rank)), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.field("num/5")
def test_two_ranks_find_what_one_finds(tmp_path: Path) -> None:
    alone = results(rows(), noise_of(None))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(one_of_two, (port, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    for rank, part in enumerate(RANKS):
        for name, found in torch.load(tmp_path / f"{rank}.pt").items():
            whole = alone[name] if name == "coefficient" else alone[name][part]
            wanted = whole if whole.dim() == 1 else whole[:, : found.shape[1]]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=f"{name} on rank {rank}")
    assert alone["ClipCov"].sum() == alone["KLCov"].sum() == int(0.5 * int(rows().mask.sum()))
