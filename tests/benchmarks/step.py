"""A training step on fixed work: ours and TRL's in turn, with the same split, and the ratios.

    python tests/benchmarks/step.py --model FOLDER --data train.parquet --trl-python TRL_VENV/bin/python
    python tests/benchmarks/step.py --table tests/benchmarks/results

FOLDER is a Hugging Face folder of SmolLM2-135M-Instruct, train.parquet GSM8K's training split. Each run is a
process of its own. Without --trl-python only our side runs. On a shared machine read the CPU seconds.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from fixed_work import MEASURED, PHASES, SHAPES

HERE = Path(__file__).resolve().parent
GOALS = {"grpo_short": 1 / 2, "grpo_long": 1 / 5}


def run_in_turn(args: argparse.Namespace) -> None:
    """A B A B: our side, TRL's, our side, TRL's, ... for each shape."""
    for shape in args.shapes:
        for turn in range(args.turns):
            run(sys.executable, "step_ours.py", args, shape, turn, "--", *args.overrides)
            if args.trl_python is None:
                continue
            kept = args.out / f"{shape}.losses.pt"
            run(args.trl_python, "step_trl.py", args, shape, turn, "--losses", str(kept))
            if turn == 0:
                command = [sys.executable, str(HERE / "step_losses.py"), str(kept), "--shape", shape]
                subprocess.run([*command, "--model", args.model], check=False)


def run(python: str, script: str, args: argparse.Namespace, shape: str, turn: int, *more: str) -> None:
    side = script.removeprefix("step_").removesuffix(".py")
    out = args.out / f"{shape}.{side}.{turn}.json"
    command = [python, str(HERE / script), "--shape", shape, "--model", args.model, "--data", args.data]
    command += ["--steps", str(args.steps), "--threads", str(args.threads), "--out", str(out), *more]
    print(" ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def results(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Reports by shape and side."""
    found: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("*.json")):
        shape, side, _ = path.name.split(".", 2)
        found[shape][side].append(json.loads(path.read_text()))
    return found


def table(folder: Path) -> str:
    """CPU seconds a step by phase, and ours over TRL's."""
    lines = []
    found = results(folder)
    for shape in (name for name in SHAPES if name in found):
        sides = found[shape]
        lines += [f"\n{shape}", f"{'CPU s a step':<18}" + "".join(f"{side:>10}" for side in sides)]
        for phase in (*PHASES, "other"):
            values = [median(r["phases_cpu_s"].get(phase, 0.0) for r in runs) for runs in sides.values()]
            if any(value >= 0.005 for value in values):
                lines.append(f"{phase:<18}" + "".join(f"{value:10.2f}" for value in values))
        whole = {side: median(r["step_cpu_s"] for r in runs) for side, runs in sides.items()}
        peak = {side: max(r["peak_rss_bytes"] for r in runs) / 1e9 for side, runs in sides.items()}
        lines.append(f"{'step':<18}" + "".join(f"{value:10.2f}" for value in whole.values()))
        lines.append(f"{'peak memory, GB':<18}" + "".join(f"{value:10.2f}" for value in peak.values()))
        counts = {side: runs[0]["counts_per_step"] for side, runs in sides.items()}
        lines.append(f"tokens: {counts}")
        if {"ours", "trl"} <= whole.keys():
            goal = GOALS.get(shape, 1 / 2)
            lines.append(f"ours / TRL: {whole['ours'] / whole['trl']:.3f} (goal {goal:.3f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, help="print what lies in this folder and stop")
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--trl-python")
    parser.add_argument("--shapes", nargs="+", default=MEASURED, choices=SHAPES)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="per run, a warm-up step included")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("overrides", nargs="*", help="further settings of train.py for our side, after --")
    args = parser.parse_args()
    if args.table is None:
        if args.model is None or args.data is None:
            parser.error("--model and --data are needed to run")
        args.out.mkdir(parents=True, exist_ok=True)
        run_in_turn(args)
    print(table(args.table or args.out))


if __name__ == "__main__":
    main()
