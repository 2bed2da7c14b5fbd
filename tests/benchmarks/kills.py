"""Kill a run in every phase, resume it, compare all bits: `python tests/benchmarks/kills.py`.

A run is stopped by SIGKILL at moments spread evenly over each phase of an iteration, in the middle of a
write too, then resumed with the same command, and compared with a run that nobody killed: weights, moments,
teacher, schedule, counters, data position, logged numbers, completions. Each run is a process of its own,
forked from one that has imported everything. At the kill the process is proven to be alive and in its phase:
it has announced the place and waits there. Prints a Markdown table, which `callbacks/README.md` holds.
"""

import argparse
import csv
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

PHASES = ("generate", "score", "update", "save", "validate")
STEPS = 4
SMALL = (
    "trainer=cpu",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=2",
    "trainer.enable_progress_bar=false",
    "checkpoint.save_freq=1",
    "checkpoint.max_to_keep=2",
    "data.train_batch_size=2",
    "algo.num_generations=2",
    "algo.sampling.max_completion_length=4",
    "data.val_max_samples=4",
    "data.train_max_samples=3",
    "callbacks.curves=null",
    "callbacks.log_completions.num_rows=4",
    "logger=[csv]",
)
CASES = {
    "grpo": ("algo=grpo", "algo.num_iterations=2"),
    "sdpo": ("algo=sdpo",),
}


def run(folder: Path, overrides: Sequence[str], point: dict[str, Any] | None = None) -> tuple[int, int]:
    """Start a run in a process of its own.

    Args:
        folder: `run_dir`.
        overrides: as on the command line.
        point: arguments of `KillPoint`, without the pipe; None leaves it out.

    Returns:
        Process id, and the descriptor on which a `KillPoint` speaks.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    code = 1
    try:
        output = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        words = [*SMALL, *overrides, f"run_dir={folder}"]
        if point is not None:
            words.append("+callbacks.kill_point._target_=kill_points.KillPoint")
            given = {"pipe": writer, **point}
            words += [f"+callbacks.kill_point.{name}={value}" for name, value in given.items()]
        sys.argv[1:] = words
        import train
        from lit_rl.configuration.compose import Source
        from lit_rl.configuration.job import checked

        train.run(checked(Source(ROOT / "conf"), words))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def finished(folder: Path, overrides: Sequence[str], point: dict[str, Any] | None = None) -> str:
    """Run to the end; what the `KillPoint` said."""
    child, reader = run(folder, overrides, point)
    said = _read_line(reader, child) if point is not None else ""
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(Path(f"{folder}.log").read_text()[-3000:])
    return said


def killed(folder: Path, overrides: Sequence[str], point: dict[str, Any]) -> dict[str, Any]:
    """Run until the process says that it is at the point, see that it lives, and kill it.

    Returns:
        What it said, and the state of the process when the signal was sent.
    """
    child, reader = run(folder, overrides, point)
    said = json.loads(_read_line(reader, child))
    assert said["pid"] == child
    state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "the process had ended before it was killed"
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reader)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {**said, "state": state}


def _read_line(reader: int, child: int, timeout: float = 600.0) -> str:
    """The first line on a pipe; empty when it is closed without one."""
    text, deadline = b"", time.monotonic() + timeout
    while not text.endswith(b"\n") and time.monotonic() < deadline:
        if select.select([reader], [], [], 1.0)[0]:
            piece = os.read(reader, 1 << 16)
            if not piece:
                break
            text += piece
    return text.decode().strip()


def differences(ours: Path, theirs: Path) -> list[str]:
    """What two finished runs differ in, times left out."""
    from lit_rl.checkpoint import encode_tree
    from lit_rl.checkpoint.codec import read_tree

    found = []
    for name in ("model", "optimizer", "state"):
        (a, x), (b, y) = (
            encode_tree(_without_times(read_tree(f / f"checkpoints/step_{STEPS:08d}", name)))
            for f in (ours, theirs)
        )
        same = a == b and x.keys() == y.keys() and all(_bits(x[key]) == _bits(y[key]) for key in x)
        found += [] if same else [name]
    found += [] if logged(ours) == logged(theirs) else ["metrics"]
    found += [] if completions(ours) == completions(theirs) else ["completions"]
    return found


def logged(folder: Path) -> list[tuple]:
    """Logged numbers by step, a row for each time something was logged; times left out."""
    with (folder / "csv/metrics.csv").open(newline="") as file:
        rows = [
            {
                k: v
                for k, v in row.items()
                if v and not k.startswith(("time/", "checkpoint/", "rollout/tokens_p"))
            }
            for row in csv.DictReader(file)
        ]
    return sorted({tuple(sorted(row.items())) for row in rows if len(row) > 2})


def completions(folder: Path) -> dict[tuple, str]:
    """Every completion that was written to the table, by step, row and number."""
    lines = (folder / "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {(r["step"], r["prompt_row"], r["generation"]): r["completion"] for r in rows}


def _without_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            k: _without_times(v) for k, v in tree.items() if "seconds" not in str(k) and "rss" not in str(k)
        }
    return tree


def _bits(tensor: Any) -> bytes:
    return tensor.contiguous().reshape(-1).view(__import__("torch").uint8).numpy().tobytes()


def table(case: str, kills: int, root: Path) -> tuple[list[str], int]:
    """Rows of the table for one case, and how many kills ended differently."""
    straight = root / "straight"
    finished(straight, CASES[case])
    counts = json.loads(finished(root / "counted", CASES[case], {"phase": "null"}))
    rows, wrong = [], 0
    for phase in PHASES:
        steps = sorted(int(name.split()[1]) for name in counts if name.split()[0] == phase)
        alive, places, bad = [], [], []
        for number in range(kills):
            step = steps[number % len(steps)]
            call = max(1, round(counts[f"{phase} {step}"] * (number + 0.5) / kills))
            folder = root / f"{phase}_{number}"
            said = killed(folder, CASES[case], {"phase": phase, "step": step, "call": call})
            assert (said["phase"], said["step"]) == (phase, step)
            alive.append(said["state"])
            places.append(f"{said['place']}")
            finished(folder, CASES[case])
            bad += [f"{said['place']}: {what}" for what in differences(straight, folder)]
            shutil.rmtree(folder)
            print(f"{case} {phase} {number + 1}/{kills} at {said['place']}", file=sys.stderr, flush=True)
        wrong += len(bad)
        rows.append(
            f"| {case} | {phase} | {kills} | {len(alive)} (state {', '.join(sorted(set(alive)))}) | "
            f"{', '.join(dict.fromkeys(places))} | {'; '.join(bad) or 'none'} |"
        )
    return rows, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=8, help="in each phase (default 8)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["grpo"])
    given = parser.parse_args()
    import lightning
    import torch
    import transformers

    assert lightning and transformers  # imported once, before any fork
    torch.set_num_threads(1)
    lines = ["| run | phase | kills | alive at the kill | killed in | bits that differ |", "| --- " * 6 + "|"]
    wrong, begin = 0, time.monotonic()
    for case in given.cases:
        with tempfile.TemporaryDirectory() as folder:
            rows, bad = table(case, given.kills, Path(folder))
        lines, wrong = [*lines, *rows], wrong + bad
    print("\n".join(lines))
    print(f"{time.monotonic() - begin:.0f} s; {wrong} differences.", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
