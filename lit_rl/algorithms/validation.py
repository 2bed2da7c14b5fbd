"""ValidationScores: numbers of the validation rows over all ranks, each row counted once."""

from collections.abc import Sequence

from lit_rl.batch import RolloutBatch
from lit_rl.distributed import gather_objects
from lit_rl.rewards.base import RewardSum, Sample
from lit_rl.rewards.scored import Scored, by_source, mean_of, prompt_numbers, scored

COUNTED = ("error_frac", "missing_frac")


class ValidationScores:
    """Numbers of the validation rows, by the code of `python -m lit_rl.evaluate`.

    | metric | formula |
    | --- | --- |
    | `val/accuracy`, `val/accuracy/<source>` | right rows / rows |
    | `val/reward` | mean weighted reward; a row without one counts 0 |
    | `val/reward/<function>` | mean over rows on which the function applied |
    | `val/<function>/<metric>` | mean over rows that have it, such as `val/by_source/no_answer` |
    | `val/error_frac`, `val/missing_frac` | rows on which a function failed, rows without a reward / rows |
    | `val/completion_len` | tokens / rows |
    | `val/pass_at_<k>`, `val/maj_at_<k>`, `.../<source>` | with `rollout.val_kwargs.n` > 1 |

    A row is right when the score of the function `by_source` reaches 1; without that function, when the
    weighted reward does.

    Attributes:
        is_scored: False: rows are kept, and nothing is scored.
        rollouts: the batches of this rank.
    """

    def __init__(self) -> None:
        self.is_scored = True
        self.rollouts: list[RolloutBatch] = []
        self._rows: list[Scored] = []

    def add(
        self, rollout: RolloutBatch, samples: Sequence[Sample], sources: list | None, reward: RewardSum
    ) -> None:
        """Score the rows of one batch, and fill in what came of it.

        Args:
            rollout: B rows with completions, those of a prompt adjacent.
            samples: the same rows as text.
            sources: B names; None is one source called "all".
            reward: scores.
        """
        size = rollout.num_generations
        names = [str(source) for source in sources or ["all"] * len(rollout)][::size]
        rows, scores = scored(samples, names, [size] * len(names), reward)
        rollout.rewards, rollout.rewards_per_func = scores.rewards, scores.rewards_per_func
        rollout.feedback = scores.feedback
        self._rows += rows
        self.rollouts.append(rollout)

    def compute(self, seed: int) -> dict[str, float]:
        """Every number over the rows of all ranks, by name. Collective.

        Args:
            seed: of the subsets for maj@k.
        """
        gathered = [row for rows in gather_objects(self._rows) for row in rows]
        rows = sorted(gathered, key=lambda row: row.row)
        if not rows:
            return {}
        out = {
            "val/accuracy": mean_of([float(right) for row in rows for right in row.is_right]),
            "val/reward": mean_of([0.0 if r != r else r for row in rows for r in row.rewards]),
            "val/completion_len": mean_of([float(length) for row in rows for length in row.lengths]),
        }
        for name in rows[0].parts:
            out[f"val/reward/{name}"] = mean_of([s for row in rows for s in row.parts[name] if s == s])
        for source, own in by_source(rows).items():
            out[f"val/accuracy/{source}"] = mean_of([float(right) for row in own for right in row.is_right])
            out.update(_at_k(prompt_numbers(own, seed=seed), f"/{source}"))
        numbers = prompt_numbers(rows, seed=seed)
        out.update(_at_k(numbers, ""))
        out.update({f"val/{n}": mean_of(v) for n, v in numbers.items() if "/" in n or n in COUNTED})
        return out

    def reset(self) -> None:
        """Forget the rows."""
        self._rows.clear()
        self.rollouts.clear()


def _at_k(numbers: dict[str, list[float]], suffix: str) -> dict[str, float]:
    """pass@k and maj@k for k > 1, in a spelling that every tracker takes."""
    return {
        f"val/{name.replace('@', '_at_')}{suffix}": mean_of(values)
        for name, values in numbers.items()
        if "@" in name and name != "pass@1"
    }
