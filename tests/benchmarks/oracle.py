"""What each estimator estimates: exact bias and noise over all batches of a policy that can be enumerated.

    python tests/benchmarks/oracle.py

Prints the table of lit_rl/functional/README.md; takes seconds. tests/enumerated_policy.py is the policy.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from enumerated_policy import Credit, G, Rows, estimate, expected_best, expected_reward, gradient_of

from lit_rl.functional.advantages import gae, grpo_passk, remax
from lit_rl.objectives.advantage import Advantage
from lit_rl.objectives.policy import ClippedSurrogate

SUM = "seq_mean_token_sum"


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        name: of the estimator, and what differs from its defaults.
        credit: advantages of a batch.
        loss_type: average of the loss.
        estimates_best: whether the truth is the gradient of the best of a group, over G.
        note: why it is biased, or what it needs.
    """

    name: str
    credit: Credit
    loss_type: str = SUM
    estimates_best: bool = False
    note: str = ""


def by(adv_estimator: str, scale_rewards: str = "none") -> Credit:
    """As `algo.advantage` with these settings."""
    advantage = Advantage(adv_estimator=adv_estimator, scale_rewards=scale_rewards)  # type: ignore[arg-type]
    return lambda rows: advantage(rows.scored, G)


def critic(lam: float, *, share: float = 1.0, whiten: bool = False) -> Credit:
    """GAE against that share of the exact values."""

    def credit(rows: Rows) -> torch.Tensor:
        rewards, mask = rows.scored.token_rewards(), rows.scored.mask
        return gae(rewards, share * rows.values, mask, lam=lam, whiten=whiten).advantages

    return credit


def greedy_baseline(rows: Rows) -> torch.Tensor:
    return remax(rows.scored.token_rewards(), rows.scored.mask, rows.greedy)


def unscaled_passk(rows: Rows) -> torch.Tensor:
    return grpo_passk(rows.scored.groups(G), scale="none").flatten()


OWN_BASELINE = "its own reward is in the baseline"
BY_SPREAD = "groups of small spread weigh more"
OF_BATCH = "mean and scale of the batch"
LINES = [
    Line("reward", by("reward")),
    Line("rloo", by("rloo")),
    Line("remax", greedy_baseline),
    Line("gae, exact critic, lam 1", critic(1.0)),
    Line("gae, exact critic, lam 0", critic(0.0)),
    Line("gae, critic at half, lam 1", critic(1.0, share=0.5)),
    Line("gae, critic at half, lam 0", critic(0.0, share=0.5), note="the critic's error"),
    Line("gae, exact critic, lam 1, whitened", critic(1.0, whiten=True), note=OF_BATCH),
    Line("grpo, scale none", by("grpo"), note=f"{OWN_BASELINE}: (G - 1) / G"),
    Line("grpo, scale group", by("grpo", "group"), note=BY_SPREAD),
    Line("grpo, scale batch", by("grpo", "batch"), note="scale of the batch"),
    Line("rloo, scale group", by("rloo", "group"), note=BY_SPREAD),
    Line("opo", by("opo"), note=OWN_BASELINE),
    Line("gpg", by("gpg", "group"), note="scale of the batch"),
    Line("reinforce_plus_plus", by("reinforce_plus_plus", "batch"), note=OF_BATCH),
    Line("reinforce_plus_plus, scale none", by("reinforce_plus_plus"), note="mean of the batch"),
    Line(
        "reinforce_plus_plus_baseline",
        by("reinforce_plus_plus_baseline", "batch"),
        note=f"{OWN_BASELINE}; {OF_BATCH}",
    ),
    Line("grpo_passk", by("grpo_passk", "group"), estimates_best=True, note=BY_SPREAD),
    Line("grpo_passk(scale='none')", unscaled_passk, estimates_best=True),
    Line("rloo", by("rloo"), "dr_grpo", note="divided by max_completion_length, 2"),
    Line("rloo", by("rloo"), "dapo", note="divided by the tokens of the batch"),
    Line("rloo", by("rloo"), "grpo", note="a token of a long row weighs less"),
    Line(
        "grpo, scale group",
        by("grpo", "group"),
        "grpo",
        note=f"a token of a long row weighs less; {BY_SPREAD}",
    ),
    Line("grpo, scale group", by("grpo", "group"), "dapo", note=BY_SPREAD),
]


def row(line: Line) -> str:
    """The line in Markdown."""
    truth = gradient_of(expected_best) / G if line.estimates_best else gradient_of(expected_reward)
    found = estimate(line.credit, ClippedSurrogate(loss_type=line.loss_type))  # type: ignore[arg-type]
    bias = found.bias(truth)
    cells = [
        line.name,
        line.loss_type,
        f"{found.scale(truth):.3f}",
        f"{found.cosine(truth):.4f}",
        "0" if bias < 1e-12 else f"{bias:.3f}",
        f"{found.noise / float(found.mean.norm()):.2f}",
        line.note,
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """All lines in Markdown."""
    head = ["| estimator | loss_type | scale | cosine | bias | noise | why |", "| --- " * 7 + "|"]
    return "\n".join(head + [row(line) for line in LINES])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
