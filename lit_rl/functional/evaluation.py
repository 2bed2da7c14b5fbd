"""Numbers of an evaluation: pass@k, maj@k, and intervals by resampling prompts."""

from collections.abc import Hashable, Sequence
from math import comb, sqrt
from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """A mean with the bounds that hold 95 % of resampled means."""

    mean: float
    low: float
    high: float


def pass_at_k(right: int, drawn: int, k: int) -> float:
    """Probability that at least one of k answers is right, without bias from n >= k answers.

    1 - C(n - c, k) / C(n, k). Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv
    2107.03374, eq. 1.

    Args:
        right: c, right answers.
        drawn: n, answers.
        k: at most n.
    """
    assert 1 <= k <= drawn and 0 <= right <= drawn
    return 1.0 - comb(drawn - right, k) / comb(drawn, k)


def majority_at_k(
    answers: Sequence[Hashable | None], is_right: Sequence[bool], k: int, *, draws: int, seed: int
) -> float:
    """Probability that the most frequent of k answers is right; ties go to the answer that came first.

    Exact for k = n (one subset); else the mean over random subsets. An answer that is None has no vote.

    Args:
        answers: n extracted answers.
        is_right: n truths.
        k: at most n.
        draws: random subsets.
        seed: of the subsets.
    """
    assert 1 <= k <= len(answers) == len(is_right)
    generator = torch.Generator().manual_seed(seed)
    count = 1 if k == len(answers) else draws
    subsets = [sorted(torch.randperm(len(answers), generator=generator)[:k].tolist()) for _ in range(count)]
    return sum(_majority_is_right(answers, is_right, subset) for subset in subsets) / count


def bootstrap_mean(values: Tensor, *, draws: int = 2000, seed: int = 0) -> Interval:
    """Mean of values of independent prompts, with its 95 % interval by the percentile bootstrap.

    Source: Efron, "Bootstrap Methods", Annals of Statistics 7 (1979).

    Args:
        values: (P,) float, one per prompt.
        draws: resamples.
        seed: of the resamples.
    """
    values = values.double()
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(values), (draws, len(values)), generator=generator)
    means = values[index].mean(1)  # (draws,)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return Interval(float(values.mean()), low, high)


def sign_flip_p(differences: Tensor, *, draws: int = 10_000, seed: int = 0) -> float:
    """Two-sided p of a paired difference: how often random signs give a mean as far from 0.

    Exact over all 2^P signs for up to 12 pairs that differ, else by draws, the observed signs counted as one.
    Source: Fisher, "The Design of Experiments" (1935), section 21.

    Args:
        differences: (P,) float, one per pair.
        draws: random signs.
        seed: of the draws.
    """
    values = differences.double()
    values = values[values != 0]
    count = len(values)
    if count == 0:
        return 1.0
    reached = values.sum().abs() * (1 - 1e-9)
    if count <= 12:
        bits = torch.arange(2**count)[:, None] >> torch.arange(count) & 1
        return float(((bits * 2 - 1).double() @ values).abs().ge(reached).double().mean())
    generator = torch.Generator().manual_seed(seed)
    hits = 0
    for start in range(0, draws, 500):
        signs = torch.randint(2, (min(500, draws - start), count), generator=generator) * 2 - 1
        hits += int(((signs.double() @ values).abs() >= reached).sum())
    return (hits + 1) / (draws + 1)


def wilson(successes: int, trials: int) -> Interval:
    """A share with its 95 % score interval, which stays sensible at 0 and 1.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22 (1927).

    Args:
        successes: between 0 and trials.
        trials: independent ones, at least 1.
    """
    assert 0 <= successes <= trials and trials >= 1
    z = 1.959964
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def _majority_is_right(
    answers: Sequence[Hashable | None], is_right: Sequence[bool], subset: list[int]
) -> bool:
    votes: dict[Hashable, int] = {}
    for i in subset:
        if (answer := answers[i]) is not None:
            votes[answer] = votes.get(answer, 0) + 1
    if not votes:
        return False
    winner = max(votes, key=lambda answer: votes[answer])  # dictionaries keep the order of arrival
    return next(is_right[i] for i in subset if answers[i] == winner)
