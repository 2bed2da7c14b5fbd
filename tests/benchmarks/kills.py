"""Kill a run in every phase, resume it, compare all bits: `python tests/benchmarks/kills.py`.

A run is stopped by SIGKILL at moments spread evenly over each phase of an iteration, in the middle of a
write too, then resumed with the same command, and compared with a run that nobody killed: weights, moments,
teacher, schedule, counters, data position, logged numbers, completions. Each run is a process of its own,
forked from one that has imported everything. At the kill the process is proven to be alive and in its phase:
it has announced the place and waits there. Prints the Markdown table in `lit_rl/checkpoint/README.md`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from forked_runs import Run, differences, import_all  # noqa: E402 (needs the path)

PHASES = ("generate", "score", "update", "save", "validate")
CHATS = TESTS / "conf" / "chats_8.parquet"
SOME_CALL = 300
"""A call in the middle of an update, where no counting run says how many there are."""


@dataclass(frozen=True)
class Case:
    """What is trained."""

    overrides: tuple[str, ...]
    num_processes: int = 1


CASES = {
    "grpo": Case(("algo=grpo", "algo.num_iterations=2", "algo.kl.beta=0.04")),
    "sdpo_ema": Case(("algo=sdpo",)),
    "sdpo_lora": Case(("algo=sdpo", "model.lora.lora_rank=2", "optim.lr=1e-2")),
    "sdpo_trust_region": Case(
        ("algo=sdpo", "algo.teacher.teacher_model_kind=trust_region", "algo.num_iterations=2")
    ),
    "ppo": Case(
        (
            *("algo=ppo", "algo.num_iterations=2", "algo.batch.shuffle=true"),
            *("algo.critic.critic_warmup=3", "algo.kl.use_kl_in_reward=true"),
            "algo.kl.kl_ctrl.type=adaptive",
        )
    ),
    "dapo": Case(("algo=dapo",)),
    "lora": Case(("algo=grpo", "model.lora.lora_rank=2")),
    "reference_sync": Case(
        (
            *("algo=grpo", "algo.kl.beta=0.04", "callbacks=[default,reference_sync]"),
            *("callbacks.reference_sync.ref_model_sync_steps=1", "model.lora.lora_rank=2"),
        )
    ),
    "sft": Case(
        (
            *("algo=sft", "data=chat_sft", f"data.train_files={CHATS}", "data.val_files=null"),
            "trainer.val_check_interval=0",
        )
    ),
    "environment": Case(
        (
            *("algo=grpo", "rollout.environment={_target_: conversing.Retry}"),
            "algo.sampling.max_completion_length=24",
        )
    ),
    "async_save": Case(("algo=grpo", "checkpoint.async_save=true")),
    "two_loader_workers": Case(("algo=grpo", "data.loader.num_workers=2")),
    "two_processes": Case(("algo=grpo", "trainer=ddp", "trainer.devices=2"), num_processes=2),
}


def in_every_phase(name: str, kills: int, phases: tuple[str, ...], root: Path) -> tuple[list[str], int]:
    """Rows of the table for one case, and how many resumed runs differ."""
    case = CASES[name]
    Run(root / "straight", case.overrides, None, case.num_processes).finish()
    counted = Run(root / "counted", case.overrides, {"phase": "null"}, case.num_processes).finish()
    calls = json.loads(counted)
    rows, wrong = [], 0
    for phase in phases:
        steps = sorted(int(key.split()[1]) for key in calls if key.split()[0] == phase)
        said, bad = [], []
        for number in range(kills):
            step = steps[number % len(steps)]
            call = max(1, int(calls[f"{phase} {step}"] * (number + 0.5) / kills))
            point = {"phase": phase, "step": step, "call": call}
            said.append(kill_and_resume(case, root / f"{phase}_{number}", point))
            bad += [f"{said[-1]['place']}: {what}" for what in said[-1]["differences"]]
            print(f"{name} {phase} {number + 1}/{kills} at {said[-1]['place']}", file=sys.stderr, flush=True)
        wrong += len(bad)
        states = ", ".join(sorted({s["state"] for s in said}))
        places = ", ".join(dict.fromkeys(s["place"] for s in said))
        rows.append(
            f"| {name} | {phase} | {kills} | {len(said)} (state {states}) | {places} | "
            f"{'; '.join(bad) or 'none'} |"
        )
    return rows, wrong


def once(name: str, root: Path) -> list[str]:
    """Kill a case once, in the update after the data epoch's end; what the resumed run differs in."""
    case = CASES[name]
    Run(root / "straight", case.overrides, None, case.num_processes).finish()
    point = {"phase": "update", "step": 2, "call": SOME_CALL}
    return kill_and_resume(case, root / "killed", point)["differences"]


def kill_and_resume(case: Case, folder: Path, point: dict) -> dict:
    """Where the run was killed, and what it differs in from the one beside it after it was resumed."""
    said = Run(folder, case.overrides, point, case.num_processes).kill()
    assert (said["phase"], said["step"]) == (point["phase"], point["step"])
    Run(folder, case.overrides, None, case.num_processes).finish()
    return {**said, "differences": differences(folder.parent / "straight", folder)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=8, help="in each phase (default 8)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["grpo"])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--once", action="store_true", help="one kill for each case, in an update")
    given = parser.parse_args()
    import_all()
    lines = ["| run | phase | kills | alive at the kill | killed in | bits that differ |", "| --- " * 6 + "|"]
    wrong, begin = 0, time.monotonic()
    for name in given.cases:
        with tempfile.TemporaryDirectory() as folder:
            if given.once:
                bad = once(name, Path(folder))
                lines, wrong = [*lines, f"{name}: {bad or 'equal'}"], wrong + len(bad)
                continue
            rows, count = in_every_phase(name, given.kills, tuple(given.phases), Path(folder))
        lines, wrong = [*lines, *rows], wrong + count
    print("\n".join(lines[2:] if given.once else lines))
    print(f"{time.monotonic() - begin:.0f} s; {wrong} differences.", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
