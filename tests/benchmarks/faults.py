"""Let something go wrong in a run, resume it, compare all bits: `python tests/benchmarks/faults.py`.

Each line is one fault in the third of four steps (or before the first): what the run said, how it ended, and
what the same command came to afterwards, compared with a run without the fault as in `kills.py`. Prints the
Markdown table in `lit_rl/checkpoint/README.md`. Full disk and read-only folder need the right to mount; where
it is missing they say so.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from fault_points import REWARD  # noqa: E402 (needs the path)
from forked_runs import STEPS, Run, differences, import_all  # noqa: E402

GRPO = ("algo=grpo",)
STEP = 2
Said = tuple[str, str]
"""How the run ended, and the line in which it said why."""


def at_step(kind: str, *settings: str) -> tuple[str, ...]:
    """Overrides that put a `FaultPoint` into a run."""
    point = ("_target_=fault_points.FaultPoint", f"kind={kind}", f"step={STEP}", *settings)
    return tuple(f"+callbacks.fault_point.{setting}" for setting in point)


def nan(folder: Path, overrides: tuple[str, ...]) -> Said:
    log = Run(folder, (*overrides, *at_step("nan_gradient"))).fail()
    return "error", found(r"FloatingPointError: (.*?\.) Set", log)


def raising_reward(folder: Path, overrides: tuple[str, ...]) -> Said:
    log = Run(folder, (*overrides, *at_step("raising_reward"))).fail()
    return "error", found(r"(?:DataError|ConfigError): (.*sandbox is gone[^\n]*)", log)


def dead_worker(folder: Path, overrides: tuple[str, ...]) -> Said:
    log = Run(folder, (*overrides, *at_step("dead_worker"))).fail()
    return "error", found(r"(DataLoader worker \(pid[^)]*\)[^\n.]*)", log)


def vanished_remote(folder: Path, overrides: tuple[str, ...]) -> Said:
    place = folder.parent / "remote"
    log = Run(folder, (*overrides, *at_step("vanished_remote", f"place={place}"))).fail()
    os.remove(place)
    os.rename(f"{place}.gone", place)
    return "error", found(r"StorageError: (checkpoint\.default_hdfs_dir[^\n]*)", log)


def full_disk(folder: Path, overrides: tuple[str, ...]) -> Said:
    with mounted(folder, "size=24m") as again:
        log = Run(folder, overrides).fail()
        left = sorted(p.name for p in (folder / "checkpoints").iterdir())
        assert left == ["step_00000001"], left
        again("size=200m")
        Run(folder, overrides).finish()
        keep(folder)
    return "error", found(r"StorageError: (The checkpoint[^\n]*)", log)


def read_only(folder: Path, overrides: tuple[str, ...]) -> Said:
    with mounted(folder, "size=200m") as again:
        again("ro")
        log = Run(folder, overrides).fail()
        again("rw")
        Run(folder, overrides).finish()
        keep(folder)
    return "error before the first step", found(r"StorageError: ([^\n]*)", log)


def corrupt_file(folder: Path, overrides: tuple[str, ...]) -> Said:
    Run(folder, overrides, {"phase": "update", "step": STEP, "call": 300}).kill()
    newest = folder / f"checkpoints/step_{STEP:08d}/model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(bytes(content))
    Run(folder, overrides).finish()
    return "goes on from the one before", found(
        r"(Passed over: [^\n]*)", folder.with_suffix(".log").read_text()
    )


def killed_in_save(folder: Path, overrides: tuple[str, ...]) -> Said:
    said = Run(folder, overrides, {"phase": "save", "step": STEP, "call": 2000}).kill()
    log = folder.with_suffix(".log")
    Run(folder, overrides).finish()
    return f"dead in {said['place']}", found(r"(Resuming from [^\n]*)", log.read_text())


def sigterm(folder: Path, overrides: tuple[str, ...]) -> Said:
    Run(folder, (*overrides, *at_step("sigterm"))).finish()
    log = folder.with_suffix(".log").read_text()
    return "ends well after the step", found(r"(SIGTERM: [^\n]*)", log)


def second_process(folder: Path, overrides: tuple[str, ...]) -> Said:
    first = Run(folder, overrides, {"phase": "update", "step": STEP, "call": 300})
    assert first.said()
    with_log = Run(folder, overrides)
    with_log.fail()
    os.kill(first.pids[0], 9)
    os.waitpid(first.pids[0], 0)
    log = folder.with_suffix(".log").read_text()
    return "the second ends with an error, the first goes on", found(r"ConfigError: ([^\n]*)", log)


FAULTS: dict[str, tuple[Callable[[Path, tuple[str, ...]], Said], tuple[str, ...]]] = {
    "NaN in a gradient": (nan, GRPO),
    "reward function raises": (
        raising_reward,
        (*GRPO, "reward.custom_reward_function.path={root}/rewards.py"),
    ),
    "loader worker is killed": (dead_worker, (*GRPO, "data.loader.num_workers=1")),
    "remote folder vanishes": (vanished_remote, (*GRPO, "checkpoint.default_hdfs_dir={root}/remote")),
    "disk is full": (full_disk, GRPO),
    "folder is read-only": (read_only, GRPO),
    "newest checkpoint is corrupt": (corrupt_file, GRPO),
    "killed while saving": (killed_in_save, GRPO),
    "SIGTERM": (sigterm, GRPO),
    "second process in the folder": (second_process, GRPO),
}


def found(pattern: str, log: str) -> str:
    """The part of a log that the pattern finds."""
    match = re.search(pattern, log)
    assert match, f"{pattern} is not in: {log[-3000:]}"
    return match.group(1)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Callable[[str], None]]:
    """A small file system at a run's folder of checkpoints; a function that mounts it with other options."""
    place = folder / "checkpoints"
    place.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", options, "tmpfs", str(place))
    try:
        yield lambda other: mount("-o", f"remount,{other}", str(place))
    finally:
        subprocess.run(["umount", str(place)], check=True)


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"mounting is not allowed here: {done.stderr.strip()}")


def keep(folder: Path) -> None:
    """Copy the last checkpoint out of the file system that goes away."""
    name = f"step_{STEPS:08d}"
    subprocess.run(["cp", "-r", folder / "checkpoints" / name, folder / name], check=True)


def outcome(name: str, root: Path) -> tuple[str, str, list[str]]:
    """How the run ended, what it said, and what it differs in from one without the fault, after a resume."""
    fault, template = FAULTS[name]
    (root / "rewards.py").write_text(REWARD)
    overrides = tuple(text.format(root=root) for text in template)
    Run(root / "straight", overrides).finish()
    if any("default_hdfs_dir" in text for text in overrides):
        subprocess.run(["rm", "-r", root / "remote"], check=True)
    folder = root / "faulty"
    ended, said = fault(folder, overrides)
    kept = folder / f"step_{STEPS:08d}"
    if kept.exists():
        os.rename(kept, folder / "checkpoints" / kept.name)
    Run(folder, overrides).finish()
    return ended, said.replace(str(root), "...").replace("|", "\\|"), differences(root / "straight", folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    given = parser.parse_args()
    import_all()
    print(
        "| fault | how the run ends | what it says | lost after the same command again |",
        "| --- " * 4 + "|",
        sep="\n",
    )
    wrong = 0
    for name in given.faults:
        with tempfile.TemporaryDirectory() as folder:
            try:
                ended, said, bad = outcome(name, Path(folder))
            except PermissionError as error:
                print(f"| {name} | not shown | {error} | |", flush=True)
                continue
        wrong += len(bad)
        print(f"| {name} | {ended} | {said} | {', '.join(bad) or 'nothing'} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
