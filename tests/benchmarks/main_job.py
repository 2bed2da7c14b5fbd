"""The main job, its controls and its learning-rate margin, as the table in README.

    python tests/benchmarks/main_job.py --out outputs/main_job

Each line is a real run of `train.py` in a process of its own; seconds count from its creation. Lines that
miss their aim are printed as they are, and the script exits with 1.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from runs import mean_accuracy, run

EMPTY_CONTEXT = "algo.reprompt.reprompt_template='{prompt}'"
RATE = 2e-5


@dataclass(frozen=True)
class Case:
    """Runs of one command line over several seeds, and what they have to reach.

    Attributes:
        name: of the line in the table.
        overrides: of train.py.
        seeds: one run each.
        at_least: accuracy at the end, or None.
        at_most_change: distance between start and end, or None.
    """

    name: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    at_least: float | None = None
    at_most_change: float | None = None
    runs: list[dict] = field(default_factory=list)


def cases() -> list[Case]:
    """Every line of the table."""
    lines = []
    for algo in ("grpo", "sdpo"):
        lines.append(Case(algo, (f"algo={algo}",), at_least=0.9))
        for factor in (0.5, 2.0):
            rate = f"optim.lr={RATE * factor}"
            lines.append(Case(f"{algo}, {rate}", (f"algo={algo}", rate), (1,), at_least=0.85))
        lines.append(Case(f"{algo}, reward=random", (f"algo={algo}", "reward=random"), at_most_change=0.05))
    lines.append(Case("sdpo, empty teacher context", ("algo=sdpo", EMPTY_CONTEXT), at_most_change=0.05))
    return lines


def row(case: Case) -> tuple[str, bool]:
    """The table line of a case, and whether it reached its aim."""
    starts = [mean_accuracy(r["val_start"]) for r in case.runs]
    ends = [mean_accuracy(r["val_end"]) for r in case.runs]
    is_met = all(
        (case.at_least is None or end >= case.at_least)
        and (case.at_most_change is None or abs(end - start) <= case.at_most_change)
        for start, end in zip(starts, ends, strict=True)
    )
    aim = f">= {case.at_least}" if case.at_least is not None else f"within {case.at_most_change} of the start"
    cells = [
        case.name,
        f"{starts[0]:.3f}",
        ", ".join(f"{end:.3f}" for end in ends),
        aim,
        "yes" if is_met else "NO",
        ", ".join(f"{r['seconds_to_first_update']:.1f}" for r in case.runs),
        ", ".join(f"{r['seconds_total']:.0f}" for r in case.runs),
    ]
    return f"| {' | '.join(cells)} |", is_met


def main() -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", default="", help="only lines whose name holds this")
    options = parser.parse_args()
    print("| run | accuracy at the start | at the end, by seed | aim | met | s to first update | s in all |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    all_met = True
    for number, case in enumerate(c for c in cases() if options.only in c.name):
        for seed in case.seeds:
            case.runs.append(run(case.overrides, seed, options.out.resolve() / f"{number}_seed{seed}"))
        line, is_met = row(case)
        all_met &= is_met
        print(line, flush=True)
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
