"""What each algorithm learns of the embedded task, and that none learns it from coins.

    python tests/benchmarks/learning.py --out outputs/learning
    python tests/benchmarks/learning.py --out outputs/learning --only grpo,ppo --seeds 1

Every conf/algo/*.yaml that has rollouts, with three seeds, and once more with `reward=random`; two runs side
by side with a thread each. Each is a real run of `train.py` in a process of its own, and its seconds count
from the creation of that. Writes learning.md and learning.json into the folder after every run; the same
folder again goes on where it stopped. Lines that miss their aim and runs that fail are printed as they are,
and the script exits with 1.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from runs import ROOT, RunFailed, mean_accuracy, run

AT_LEAST, WITHIN_SECONDS = 0.85, 120.0
AT_MOST_CHANGE = 0.1
SIDE_BY_SIDE = 2


@dataclass
class Line:
    """An algorithm under a reward, over several seeds.

    Attributes:
        algo: name in conf/algo.
        is_random: whether the reward is a coin.
        seeds: one run each.
        more: overrides beside the reward.
        runs: summary by seed, of those that ended well.
        errors: what the others wrote last, by seed.
    """

    algo: str
    is_random: bool
    seeds: tuple[int, ...]
    more: tuple[str, ...] = ()
    runs: dict[int, dict] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.algo}, reward=random" if self.is_random else self.algo

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of train.py."""
        return (f"algo={self.algo}", *(["reward=random"] if self.is_random else []), *self.more)

    def folder(self, seed: int) -> str:
        return f"{self.algo}{'_random' if self.is_random else ''}_seed{seed}"

    def numbers(self) -> list[dict[str, float]]:
        """Seed, accuracy at start and end, and seconds of each run that ended well."""
        return [
            {
                "seed": seed,
                "start": round(mean_accuracy(found["val_start"]), 4),
                "end": round(mean_accuracy(found["val_end"]), 4),
                "seconds": found["seconds_total"],
            }
            for seed, found in sorted(self.runs.items())
        ]

    @property
    def is_met(self) -> bool:
        """Whether every seed has run and reached the aim."""
        return len(self.runs) == len(self.seeds) and all(map(self._is_reached, self.numbers()))

    def _is_reached(self, found: dict[str, float]) -> bool:
        if self.is_random:
            return abs(found["end"] - found["start"]) <= AT_MOST_CHANGE
        return found["end"] >= AT_LEAST and found["seconds"] < WITHIN_SECONDS

    def row(self) -> str:
        """In Markdown."""
        numbers = self.numbers()
        learned = f">= {AT_LEAST} in under {WITHIN_SECONDS:.0f} s"
        cells = [
            self.name,
            f"{numbers[0]['start']:.3f}" if numbers else "",
            ", ".join(f"{found['end']:.3f}" for found in numbers),
            f"within {AT_MOST_CHANGE} of the start" if self.is_random else learned,
            "yes" if self.is_met else "NO",
            ", ".join(f"{found['seconds']:.0f}" for found in numbers),
        ]
        return f"| {' | '.join(cells)} |"


def algorithms() -> Iterator[str]:
    """Names of the conf/algo/*.yaml that learn from rollouts."""
    for file in sorted((ROOT / "conf" / "algo").glob("*.yaml")):
        callbacks = yaml.safe_load(file.read_text()).get("callbacks") or {}
        if callbacks.get("rollout", "from base") is not None:
            yield file.stem


def write(lines: list[Line], folder: Path) -> str:
    """Table and numbers so far; returns the table."""
    head = "| run | accuracy at the start | at the end, by seed | aim | met | s in all |"
    table = "\n".join([head, "| --- " * 6 + "|", *(line.row() for line in lines if line.runs or line.errors)])
    (folder / "learning.md").write_text(table + "\n")
    numbers = [
        {"run": line.name, "met": line.is_met, "runs": line.numbers(), "errors": line.errors}
        for line in lines
    ]
    (folder / "learning.json").write_text(json.dumps(numbers, indent=2) + "\n")
    return table


def run_all(lines: list[Line], folder: Path) -> str:
    """Fill in every line, two runs at a time; returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        waiting = {
            pool.submit(run, line.overrides, seed, folder / line.folder(seed), threads=1): (line, seed)
            for line in lines
            for seed in line.seeds
        }
        for future in as_completed(waiting):
            line, seed = waiting[future]
            try:
                line.runs[seed] = future.result()
                print(line.name, line.numbers()[sorted(line.runs).index(seed)], file=sys.stderr, flush=True)
            except RunFailed as error:
                line.errors[seed] = str(error)
                print(f"{line.name}, seed {seed}, failed:\n{error}", file=sys.stderr, flush=True)
            write(lines, folder)
    return write(lines, folder)


def main() -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", default="", help="algorithms, separated by commas; all unless given")
    parser.add_argument("--seeds", default="1,2,3", help="of the runs with the real reward")
    parser.add_argument("--random-seeds", default="1", help="of the control; empty leaves it out")
    parser.add_argument("overrides", nargs="*", help="of every run, such as trainer.max_steps=4")
    options = parser.parse_args()
    known = list(algorithms())
    names = [name for name in options.only.split(",") if name] or known
    if unknown := set(names) - set(known):
        parser.error(f"--only must be of {', '.join(known)} (found {', '.join(sorted(unknown))})")
    seeds, random_seeds = (
        tuple(int(seed) for seed in text.split(",") if seed) for text in (options.seeds, options.random_seeds)
    )
    kinds = [(False, seeds), (True, random_seeds)]
    more = tuple(options.overrides)
    lines = [Line(name, is_random, chosen, more) for name in names for is_random, chosen in kinds if chosen]
    print(run_all(lines, options.out.resolve()))
    return 0 if lines and all(line.is_met for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
