"""A training step on fixed work: ours and TRL's in turn, with the same split, and the ratios, in Markdown.

    python tests/benchmarks/step.py --model FOLDER --data train.parquet --trl-python TRL_VENV/bin/python
    python tests/benchmarks/step.py --table tests/benchmarks/results

FOLDER is a Hugging Face folder of SmolLM2-135M-Instruct, train.parquet GSM8K's training split. Each run is a
process of its own. Without --trl-python only our sides run, all with `use_fused_kernels`: `ours` in float32
as TRL's; `ours_bf16`, which writes with a copy in bfloat16, updates under bf16-mixed and corrects for the
gap; `ours_checkpointed`, which is `ours` with gradient checkpointing, for long prompts. On a shared machine
read the CPU seconds.
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
OURS = {
    "ours": ("model.kernels.use_fused_kernels=true",),
    "ours_bf16": (
        "model.kernels.use_fused_kernels=true",
        "trainer.precision=bf16-mixed",
        "rollout.engine.dtype=bfloat16",
        "rollout.calculate_log_probs=true",
        "algo.rollout_correction.rollout_is=true",
        "algo.rollout_correction.rollout_is_threshold=2",
    ),
    "ours_checkpointed": ("model.kernels.use_fused_kernels=true", "model.gradient_checkpointing=true"),
}
IN_FULL = ("ours", "ours_bf16")
GOALS = {
    "ours": defaultdict(lambda: 1 / 2, grpo_long=1 / 5),
    "ours_bf16": {"grpo_short": 1 / 3.5, "grpo_long": 1 / 8},
}
TRL = "trl"


def run_in_turn(args: argparse.Namespace) -> None:
    """A B C A B C: our sides and TRL's for each shape."""
    for shape in args.shapes:
        for turn in range(args.turns):
            for side in args.sides:
                run(
                    sys.executable,
                    "step_ours.py",
                    args,
                    shape,
                    side,
                    turn,
                    "--",
                    *OURS[side],
                    *args.overrides,
                )
            if args.trl_python is None:
                continue
            kept = args.out / f"{shape}.losses.pt"
            run(args.trl_python, "step_trl.py", args, shape, TRL, turn, "--losses", str(kept))
            if turn == 0:
                out = args.out / "losses" / f"{shape}.json"
                command = [sys.executable, str(HERE / "step_losses.py"), str(kept), "--shape", shape]
                subprocess.run([*command, "--model", args.model, "--out", str(out)], check=True)


def run(
    python: str, script: str, args: argparse.Namespace, shape: str, side: str, turn: int, *more: str
) -> None:
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
    """CPU seconds a step by phase, memory, and ours over TRL's."""
    found = results(folder)
    return "\n".join(line for shape in SHAPES if shape in found for line in part(shape, found[shape], folder))


def part(shape: str, sides: dict[str, list[dict[str, Any]]], folder: Path) -> list[str]:
    """The lines of one shape."""
    rows = {}
    for phase in (*PHASES, "other"):
        values = {s: median(r["phases_cpu_s"].get(phase, 0.0) for r in runs) for s, runs in sides.items()}
        if any(value >= 0.005 for value in values.values()):
            rows[phase] = values
    rows["step"] = step = {side: median(r["step_cpu_s"] for r in runs) for side, runs in sides.items()}
    rows["peak memory, GB"] = {s: max(r["peak_rss_bytes"] for r in runs) / 1e9 for s, runs in sides.items()}
    rows["above the floor, GB"] = above = {
        s: rows["peak memory, GB"][s] - runs[0]["floor_bytes"] / 1e9 for s, runs in sides.items()
    }
    ours = [side for side in sides if side != TRL]
    rows["products at their fastest"] = floor = {s: median(r["floor_s"] for r in sides[s]) for s in ours}
    rows["step over that"] = {side: step[side] / floor[side] for side in ours}
    if TRL in sides:
        rows["step over TRL's"] = {side: step[side] / step[TRL] for side in ours}
        goals = {side: GOALS[side] for side in ours if side in GOALS}
        rows["goal"] = {side: of[shape] for side, of in goals.items() if shape in of or side == "ours"}
        rows["above the floor over TRL's"] = {side: above[side] / above[TRL] for side in ours}
    counts = next(iter(sides.values()))[0]["counts_per_step"]
    spread = "; ".join(
        f"{side} {min(steps):.1f} to {max(steps):.1f} ({len(steps)} steps)"
        for side, runs in sides.items()
        for steps in [[value for r in runs for value in r["step_cpu_s_all"][-r["steps_kept"] :]]]
    )
    lines = [f"\n### {shape}\n", f"| CPU s a step | {' | '.join(sides)} |", "| --- " * (len(sides) + 1) + "|"]
    for name, values in rows.items():
        cells = [f"{values[side]:.2f}" if side in values else "" for side in sides]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"\nTokens: {', '.join(f'{n} {name}' for name, n in counts.items())}. Steps: {spread}.")
    losses = folder / "losses" / f"{shape}.json"
    if losses.exists():
        loss = json.loads(losses.read_text())
        lines.append(f"Loss on TRL's rollouts: {loss['ours']:.7f}, TRL's {loss['trl']:.7f}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, help="print what lies in this folder and stop")
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--trl-python")
    parser.add_argument("--shapes", nargs="+", default=MEASURED, choices=SHAPES)
    parser.add_argument("--sides", nargs="*", default=IN_FULL, choices=OURS, help="of ours")
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
