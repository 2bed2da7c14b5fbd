"""Switches of speed and memory, each on and off: CPU seconds by phase and peak memory of a step.

    python tests/benchmarks/switches.py --model FOLDER --data train.parquet
    python tests/benchmarks/switches.py --model FOLDER --data train.parquet --shape grpo_smoke --turns 1

Work, model and data are those of `step.py`. Each run is a process of its own, on, off, on, off. That a switch
changes nothing else is what tests/models/test_kernels.py, test_shared_prefix.py and test_load.py hold; the
decoding copy in bfloat16 alone changes which tokens are drawn. Activation offload and Liger need a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from fixed_work import MEASURED, SHAPES

HERE = Path(__file__).resolve().parent
SWITCHES = {  # name: settings with it, settings without it
    "share_prefix": ("model.kernels.share_prefix=true", "model.kernels.share_prefix=false"),
    "gradient_checkpointing": ("model.gradient_checkpointing=true", "model.gradient_checkpointing=false"),
    "use_fused_kernels": ("model.kernels.use_fused_kernels=true", "model.kernels.use_fused_kernels=false"),
    "torch_compile": ("model.kernels.torch_compile=true", "model.kernels.torch_compile=false"),
    "micro_batch_of_1": ("algo.batch.micro_batch_size=1", ""),
    "fused_optimizer": ("optim.fused=true", "optim.fused=false"),
    "bfloat16_decoding": ("rollout.engine.dtype=bfloat16", "rollout.engine.dtype=auto"),
}
ON_A_GPU = {
    "activation_offload": ("model.enable_activation_offload=true", "model.enable_activation_offload=false"),
    "liger": ("model.kernels.use_liger_kernel=true", "model.kernels.use_liger_kernel=false"),
}
PHASES = {
    "decode": ("gen.prefill", "gen.decode", "gen.sample+cache"),
    "update": ("forward", "loss", "backward"),
    "optimizer": ("optimizer",),
}


def run(args: argparse.Namespace, name: str, setting: str, turn: int) -> dict[str, Any]:
    """The report of our side of `step.py` with one setting more."""
    out = args.out / f"{name}.{setting.rpartition('=')[2] or 'without'}.{turn}.json"
    command = [sys.executable, str(HERE / "step_ours.py"), "--shape", args.shape, "--model", args.model]
    command += ["--data", args.data, "--steps", str(args.steps), "--out", str(out), "--"]
    subprocess.run([*command, *([setting] if setting else [])], check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def cells(runs: list[dict[str, Any]]) -> list[str]:
    """Medians over the runs: CPU seconds by phase and of the step, and the peak in GB."""
    found = [
        median(sum(r["phases_cpu_s"].get(p, 0.0) for p in names) for r in runs) for names in PHASES.values()
    ]
    found.append(median(r["step_cpu_s"] for r in runs))
    return [*(f"{value:.2f}" for value in found), f"{max(r['peak_rss_bytes'] for r in runs) / 1e9:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--shape", default=MEASURED[0], choices=SHAPES)
    parser.add_argument("--only", nargs="+", default=list(SWITCHES), choices={**SWITCHES, **ON_A_GPU})
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="per run, a warm-up step included")
    parser.add_argument("--out", type=Path, default=Path("outputs/switches"))
    args = parser.parse_args()
    print(f"{args.shape}; load average {', '.join(f'{load:.1f}' for load in os.getloadavg())}\n")
    print(f"| switch | | {' | '.join(f'{phase}, CPU s' for phase in (*PHASES, 'step'))} | peak memory, GB |")
    print("| --- " * (len(PHASES) + 4) + "|", flush=True)
    for name in args.only:
        pair = {**SWITCHES, **ON_A_GPU}[name]
        turns = [[run(args, name, setting, turn) for setting in pair] for turn in range(args.turns)]
        for word, runs in zip(("on", "off"), zip(*turns, strict=True), strict=True):
            print(f"| {name} | {word} | {' | '.join(cells(list(runs)))} |", flush=True)


if __name__ == "__main__":
    main()
