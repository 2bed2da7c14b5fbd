"""Discovery: how often a first success was found within k attempts, as numbers, table and picture.

A series is one search: a question, a seed, and for each method the attempt that succeeded first. discovery@k
is the share of series with a success within k attempts (Huebotter et al., Reinforcement Learning via
Self-Distillation, arXiv 2601.20802, test-time self-distillation).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_rl.errors import ConfigError
from lit_rl.functional.evaluation import Interval, pass_at_k, wilson

SDPO, BEST_OF_K, MULTI_TURN = "sdpo", "best_of_k", "multi_turn"
NAMES = {SDPO: "SDPO at test time", BEST_OF_K: "best of k", MULTI_TURN: "multi-turn revision"}


@dataclass(frozen=True)
class Series:
    """One search on one question.

    Attributes:
        seed: number of the repetition.
        row: of the question.
        attempts: by method, the attempt that succeeded first, from 1; None: none within the budget.
        found: the text that SDPO found.
        right, drawn: successes among further samples of the initial policy, which estimate the pass rate.
    """

    seed: int
    row: int
    attempts: dict[str, int | None]
    found: str | None
    right: int
    drawn: int


class Journal:
    """The finished series of a folder: written whole after each, read again by the run that goes on.

    Args:
        folder: of the run.
        settings: what the series depend on; a file with other settings is refused.

    Raises:
        ConfigError: the folder holds series of other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.file, self.settings = folder / "discovery.json", settings
        self.series: list[Series] = []
        if self.file.exists():
            saved = json.loads(self.file.read_text("utf-8"))
            if saved["settings"] != settings:
                raise ConfigError(
                    f"run_dir holds a search with other settings (found {self.file}); take another run_dir, "
                    f"or delete the file."
                )
            self.series = [Series(**entry) for entry in saved["series"]]

    def has(self, seed: int, row: int) -> bool:
        """Whether that series is finished."""
        return any((one.seed, one.row) == (seed, row) for one in self.series)

    def add(self, series: Series) -> None:
        """Keep a finished series, in the file too."""
        self.series.append(series)
        self.write({})

    def write(self, report: dict[str, Any]) -> None:
        """Replace the file.

        Args:
            report: further entries.
        """
        content = {"settings": self.settings, **report, "series": [asdict(one) for one in self.series]}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        os.replace(temporary, self.file)


def discovery_at(series: Sequence[Series], method: str, k: int) -> Interval:
    """Share of series with a success within k attempts, with Wilson's 95 % interval over series."""
    found = [one.attempts[method] for one in series]
    return wilson(sum(n is not None and n <= k for n in found), len(found))


def expected_best_of(series: Sequence[Series], k: int) -> Interval | None:
    """Mean over questions of 1 - (1 - p)^k, without bias from the further samples; None where they are fewer.

    The samples of a question are those of all its series. The interval scales with Wilson's for the pass rate
    over all samples; as 1 - (1 - p)^k is concave in p, it is rather too wide.
    """
    counts: dict[int, tuple[int, int]] = {}
    for one in series:
        right, drawn = counts.get(one.row, (0, 0))
        counts[one.row] = (right + one.right, drawn + one.drawn)
    if not counts or min(drawn for _, drawn in counts.values()) < k:
        return None
    mean = sum(pass_at_k(right, drawn, k) for right, drawn in counts.values()) / len(counts)
    rate = wilson(sum(right for right, _ in counts.values()), sum(drawn for _, drawn in counts.values()))
    if rate.mean == 0:
        return Interval(0.0, 0.0, 1 - (1 - rate.high) ** k)
    return Interval(mean, mean * rate.low / rate.mean, min(1.0, mean * rate.high / rate.mean))


def table(series: Sequence[Series], max_attempts: int) -> list[dict[str, Any]]:
    """One entry for k = 1, 2, 4, ... and the budget: discovery@k of each method, and what theory expects.

    Args:
        series: at least one, all with the same methods.
        max_attempts: the budget.
    """
    ks = sorted({*(2**i for i in range(max_attempts.bit_length()) if 2**i <= max_attempts), max_attempts})
    rows = []
    for k in ks:
        row: dict[str, Any] = {"k": k}
        row |= {method: discovery_at(series, method, k)._asdict() for method in series[0].attempts}
        expected = expected_best_of(series, k)
        if BEST_OF_K in row and expected is not None:
            best = row[BEST_OF_K]
            row["expected_best_of_k"] = expected._asdict()
            row["agrees"] = best["low"] <= expected.high + 1e-9 and expected.low <= best["high"] + 1e-9
        rows.append(row)
    return rows


def verdict(series: Sequence[Series], rows: list[dict[str, Any]]) -> list[str]:
    """Sentences: against each baseline at the budget, and whether best of k is what theory says."""
    last = rows[-1]
    ours, lines = last[SDPO], []
    for method in [name for name in series[0].attempts if name != SDPO]:
        theirs = last[method]
        if ours["low"] > theirs["high"]:
            outcome = "SDPO finds more: the intervals do not overlap"
        elif ours["high"] < theirs["low"]:
            outcome = "SDPO finds less: the intervals do not overlap"
        else:
            outcome = "no difference is shown: the intervals overlap (a null result)"
        reached = _attempts_to_reach(series, theirs["mean"])
        sooner = f"; SDPO is there after {reached} attempts" if reached is not None else ""
        lines.append(
            f"Within {last['k']} attempts, SDPO {_shown(ours)}, {NAMES[method]} {_shown(theirs)}: "
            f"{outcome}{sooner}."
        )
    checks = [(row["k"], row["agrees"]) for row in rows if "agrees" in row]
    if checks:
        off = ", ".join(str(k) for k, agrees in checks if not agrees)
        found = f"not at k = {off}" if off else "at every k"
        lines.append(f"Best of k and 1 - (1 - p)^k, with p from other samples, agree {found}.")
    return lines


def markdown(series: Sequence[Series], rows: list[dict[str, Any]], sentences: list[str]) -> str:
    """The table, what it is over, and the sentences."""
    methods = list(series[0].attempts)
    has_expected = any("agrees" in row for row in rows)
    heads = [
        "k",
        *(NAMES[name] for name in methods),
        *(["1 - (1 - p)^k", "agrees"] if has_expected else []),
    ]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in rows:
        cells = [str(row["k"]), *(_shown(row[name]) for name in methods)]
        if has_expected:
            is_known = "agrees" in row
            cells += (
                [_shown(row["expected_best_of_k"]), "yes" if row["agrees"] else "NO"]
                if is_known
                else ["", ""]
            )
        lines.append(f"| {' | '.join(cells)} |")
    questions, seeds = len({one.row for one in series}), len({one.seed for one in series})
    over = (
        f"Share of {len(series)} series ({questions} questions, {seeds} seeds) with a success within k "
        f"attempts; in brackets Wilson's 95 % interval for these questions."
    )
    return "\n".join([over, "", *lines, "", *(f"- {sentence}" for sentence in sentences), ""])


def draw(series: Sequence[Series], max_attempts: int, file: Path) -> None:
    """discovery@k by method, with intervals, and 1 - (1 - p)^k.

    Args:
        series: at least one.
        max_attempts: the budget.
        file: the picture to write.
    """
    from matplotlib.figure import Figure  # takes half a second to import, and only the end needs it

    figure = Figure(figsize=(6.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    ks = list(range(1, max_attempts + 1))
    for method in series[0].attempts:
        points = [discovery_at(series, method, k) for k in ks]
        axes.plot(ks, [point.mean for point in points], label=NAMES[method], drawstyle="steps-post")
        lows, highs = [point.low for point in points], [point.high for point in points]
        axes.fill_between(ks, lows, highs, alpha=0.15, step="post")
    expected = [(k, value) for k in ks if (value := expected_best_of(series, k)) is not None]
    if BEST_OF_K in series[0].attempts and expected:
        axes.plot(*zip(*((k, value.mean) for k, value in expected), strict=True), "k:", label="1 - (1 - p)^k")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("attempts k")
    axes.set_ylabel("share of series with a success")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)


def _attempts_to_reach(series: Sequence[Series], share: float) -> int | None:
    """Fewest attempts after which SDPO has found at least that share, None where it never does."""
    if share == 0:
        return None
    found = sorted(n for one in series if (n := one.attempts[SDPO]) is not None)
    for count, attempts in enumerate(found, 1):
        if count / len(series) >= share - 1e-9:
            return attempts
    return None


def _shown(interval: dict[str, float]) -> str:
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"
