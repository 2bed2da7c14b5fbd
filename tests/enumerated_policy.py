"""A policy small enough to enumerate: true gradients, and the exact mean and spread of an estimate of them.

Vocabulary {end, a, b}, at most two tokens, so seven completions; two prompts of unlike difficulty share the
parameters of a tabular softmax policy in float64. All 44,100 batches of two prompts with G = 4 completions
(each group as a multiset, with its probability) go through the shipped estimators and losses, on-policy.
"""

from collections import Counter
from collections.abc import Callable
from itertools import combinations_with_replacement
from math import factorial, prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from lit_rl.functional.masking import totals_of
from lit_rl.objectives.advantage import ScoredRows
from lit_rl.objectives.policy import PolicyLoss, Terms

END, LETTERS = 0, (1, 2)
COMPLETIONS = [(END,), *((first, second) for first in LETTERS for second in (END, *LETTERS))]
P, G, T = 2, 4, 2
LENGTHS = torch.tensor([len(completion) for completion in COMPLETIONS])
MASK = torch.arange(T) < LENGTHS[:, None]  # (C, T)
TOKENS = torch.tensor([(*completion, END)[:T] for completion in COMPLETIONS])  # (C, T)
PREFIXES = torch.tensor([(0, completion[0]) for completion in COMPLETIONS])  # (C, T): nothing, a, b

THETA = torch.tensor([[0.1, 0.4, -0.2], [0.3, -0.1, 0.2], [-0.3, 0.2, 0.1]], dtype=torch.float64)
OFFSETS = torch.tensor(  # (P, prefixes, V): what a prompt adds to the shared logits
    [
        [[-0.6, 0.5, 0.1], [0.0, 0.8, -0.4], [0.2, 0.0, 0.0]],
        [[0.7, -0.3, 0.0], [0.5, -0.6, 0.3], [0.0, -0.2, 0.4]],
    ],
    dtype=torch.float64,
)
REWARDS = torch.tensor(  # (P, C): often right at the first prompt, seldom at the second
    [[0, 1, 0.5, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 0.5]], dtype=torch.float64
)


class Estimate(NamedTuple):
    """The gradient ascent direction that a batch gives, over all batches.

    Attributes:
        mean: (D,) its expectation.
        noise: standard deviation, as the root of the sum over the D parameters.
    """

    mean: Tensor
    noise: float

    def scale(self, truth: Tensor) -> float:
        """The mean along the truth, in units of the truth."""
        return float(self.mean @ truth / truth.square().sum())

    def cosine(self, truth: Tensor) -> float:
        """Of the angle between mean and truth."""
        return float(torch.nn.functional.cosine_similarity(self.mean, truth, dim=0))

    def bias(self, truth: Tensor) -> float:
        """Distance of the mean from the truth, in units of the truth."""
        return float((self.mean - truth).norm() / truth.norm())


class Rows(NamedTuple):
    """The rows of one batch as an estimator of the tests sees them; B = P * G, prompt by prompt.

    Attributes:
        scored: what `Advantage` takes.
        values: (B, T) exact expected reward before each token.
        greedy: (B,) reward of the greedy completion of the row's prompt.
    """

    scored: ScoredRows
    values: Tensor
    greedy: Tensor


Credit = Callable[[Rows], Tensor]


def token_logps(theta: Tensor) -> Tensor:
    """(P, C, T) log-probability of each token of each completion, 0 behind its end."""
    table = (theta + OFFSETS).log_softmax(-1)
    return torch.where(MASK, table[:, PREFIXES, TOKENS], 0.0)


def probabilities(theta: Tensor) -> Tensor:
    """(P, C) of the completions."""
    return token_logps(theta).sum(-1).exp()


def gradient_of(objective: Callable[[Tensor], Tensor]) -> Tensor:
    """(D,) gradient at THETA of a function of the parameters."""
    return grad(objective)(THETA).flatten()


def expected_reward(theta: Tensor) -> Tensor:
    """Mean over the prompts of the expected reward."""
    return (probabilities(theta) * REWARDS).sum(1).mean()


def expected_best(theta: Tensor) -> Tensor:
    """Mean over the prompts of the best reward among G completions; the rewards are 0, 0.5 and 1."""
    weights = probabilities(theta)
    below = [(weights * (level > REWARDS)).sum(1) for level in (0.5, 1.0)]
    return sum(0.5 * (1 - chance**G) for chance in below).mean()


def greedy_rewards() -> Tensor:
    """(P,) reward of the completion that takes the likeliest token each time."""
    likeliest = (THETA + OFFSETS).argmax(-1)  # (P, prefixes)
    first = likeliest[:, 0]
    second = likeliest.gather(1, first[:, None]).squeeze(1)
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    chosen = [COMPLETIONS.index((a,) if a == END else (a, b)) for a, b in pairs]
    return REWARDS[torch.arange(P), chosen]


def exact_values() -> Tensor:
    """(P, C, T) expected reward before each token."""
    weights = probabilities(THETA)
    starts = PREFIXES[:, 1]
    first = (weights * REWARDS).sum(1, keepdim=True).expand(-1, len(COMPLETIONS))
    same = (starts == starts[:, None]).double()  # completions that begin alike
    second = (weights * REWARDS) @ same / (weights @ same)
    return torch.stack([first, second], -1)


def all_batches() -> tuple[Tensor, Tensor]:
    """(N, P, G) completions of every batch up to the order in a group, and (N,) their probabilities."""
    groups = list(combinations_with_replacement(range(len(COMPLETIONS)), G))
    index = torch.tensor(groups)
    orders = torch.tensor([factorial(G) / prod(map(factorial, Counter(g).values())) for g in groups])
    weights = orders * probabilities(THETA)[:, index].prod(-1)  # (P, groups)
    pairs = torch.cartesian_prod(torch.arange(len(groups)), torch.arange(len(groups)))  # (N, P)
    return index[pairs], weights[0, pairs[:, 0]] * weights[1, pairs[:, 1]]


def gradients(credit: Credit, loss: PolicyLoss, batches: Tensor) -> Tensor:
    """(N, D) on-policy ascent direction of a loss under an estimator of the advantages, batch by batch.

    Args:
        credit: advantages (B,) or (B, T) of one batch.
        loss: averaged over the batch, without micro-batches.
        batches: (N, P, G) completions.
    """
    prompts = torch.arange(P).repeat_interleave(G)
    values, greedy = exact_values(), greedy_rewards()

    def of_batch(theta: Tensor, index: Tensor) -> Tensor:
        chosen = index.flatten()
        mask, rewards = MASK[chosen], REWARDS[prompts, chosen]
        logps = token_logps(theta)[prompts, chosen]
        old_logps = logps.detach()
        scored = ScoredRows(rewards, LENGTHS[chosen], mask, torch.zeros_like(old_logps))
        rows = Rows(scored, values[prompts, chosen], greedy[prompts])
        log_ratios = loss.log_ratio(logps, old_logps, mask)
        per_token = loss.per_token(Terms(log_ratios, logps, credit(rows), mask))
        return -loss.mean(per_token, mask, totals_of(mask, T))

    return vmap(grad(of_batch), in_dims=(None, 0), chunk_size=8192)(THETA, batches).flatten(1)


def estimate(credit: Credit, loss: PolicyLoss) -> Estimate:
    """Mean and noise over all batches. Arguments as in `gradients`."""
    batches, weights = all_batches()
    found = gradients(credit, loss, batches)
    mean = weights @ found
    return Estimate(mean, float((weights @ (found - mean).square()).sum().sqrt()))
