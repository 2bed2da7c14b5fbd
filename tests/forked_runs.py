"""Whole runs of train.py, each in a process of its own that is forked from one that has imported everything.

Not for a process that has used several threads: torch's would be missing after the fork.
"""

import csv
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4
SMALL = (
    "trainer=cpu",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=2",
    "trainer.enable_progress_bar=false",
    "checkpoint.save_freq=1",
    "checkpoint.max_to_keep=2",
    "data.train_batch_size=2",
    "data.val_max_samples=4",
    "data.train_max_samples=4",
    "callbacks.curves=null",
    "logger=[csv]",
)
ROLLOUTS = (
    "algo.num_generations=2",
    "algo.sampling.max_completion_length=4",
    "callbacks.log_completions.num_rows=4",
)


def import_all(overrides: Sequence[str] = ("algo=grpo",)) -> None:
    """Import, in this process and on one thread, what a run needs, so that each fork begins with it."""
    import lightning

    import train
    from lit_rl.configuration.compose import Source
    from lit_rl.configuration.job import checked
    from lit_rl.models.load import load_policy

    assert lightning and train
    torch.set_num_threads(1)
    checked(Source(ROOT / "conf"), [*SMALL, *ROLLOUTS, *overrides, "run_dir=unused"])
    load_policy()


class Run:
    """A run that has been started.

    Args:
        folder: `run_dir`; what is printed goes to `<folder>.log`.
        overrides: as on the command line, after SMALL and, but for algo=sft, ROLLOUTS.
        point: arguments of `KillPoint`, without the pipe, on the first rank; None leaves it out.
        num_processes: ranks; more than one need `trainer.devices` and a strategy in the overrides.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        point: dict[str, Any] | None = None,
        num_processes: int = 1,
    ) -> None:
        self.log = Path(f"{folder}.log")
        self.reader, writer = os.pipe()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sizes = SMALL if "algo=sft" in overrides else (*SMALL, *ROLLOUTS)
        words = [*sizes, *overrides, f"run_dir={folder}"]
        self.pids = []
        for rank in range(num_processes):
            mine = list(words)
            if point is not None and rank == 0:
                mine.append("+callbacks.kill_point._target_=kill_points.KillPoint")
                given = {"pipe": writer, **point}
                mine += [f"+callbacks.kill_point.{name}={value}" for name, value in given.items()]
            child = os.fork()
            if child == 0:
                os.close(self.reader)
                _be(rank, num_processes, port, mine, self.log)
            self.pids.append(child)
        os.close(writer)

    def said(self, timeout: float = 600.0) -> str:
        """The first line from the `KillPoint`; empty when there is none before the run ends."""
        text, deadline = b"", time.monotonic() + timeout
        while not text.endswith(b"\n") and time.monotonic() < deadline:
            if select.select([self.reader], [], [], 1.0)[0]:
                piece = os.read(self.reader, 1 << 16)
                if not piece:
                    break
                text += piece
        return text.decode().strip()

    def finish(self) -> str:
        """Wait for the end; what the `KillPoint` said.

        Raises:
            RuntimeError: a process failed; with the end of what it printed.
        """
        said = self.said()
        os.close(self.reader)
        statuses = [os.waitpid(child, 0)[1] for child in self.pids]
        if any(statuses):
            raise RuntimeError(self.log.read_text()[-3000:])
        return said

    def fail(self) -> str:
        """Wait for an end with an error; what it printed.

        Raises:
            AssertionError: it ended well.
        """
        os.close(self.reader)
        statuses = [os.waitpid(child, 0)[1] for child in self.pids]
        assert any(statuses), "the run ended well"
        return self.log.read_text()

    def kill(self) -> dict[str, Any]:
        """Wait until it says where it is, see that it lives, and kill it.

        Returns:
            What it said, and the state of the process when the signal was sent, as /proc has it.
        """
        line = self.said()
        assert line, f"the run ended before it came to the point: {self.log.read_text()[-3000:]}"
        said = json.loads(line)
        assert said["pid"] == self.pids[0]
        state = Path(f"/proc/{self.pids[0]}/stat").read_text().rpartition(")")[2].split()[0]
        assert os.waitpid(self.pids[0], os.WNOHANG) == (0, 0), "the process had ended before it was killed"
        for child in self.pids:
            os.kill(child, signal.SIGKILL)
        for child in self.pids:
            status = os.waitpid(child, 0)[1]
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        os.close(self.reader)
        return {**said, "state": state}


def _be(rank: int, num_processes: int, port: int, words: list[str], log: Path) -> None:
    """Become one rank of a run; does not return."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if num_processes > 1:  # as torchrun starts them
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": num_processes}
            os.environ.update({name: str(value) for name, value in ranks.items()})
            os.environ.update(LOCAL_WORLD_SIZE=str(num_processes), TORCHELASTIC_RUN_ID="forked")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
        sys.stderr.flush()
        os._exit(code)


def differences(ours: Path, theirs: Path) -> list[str]:
    """What two finished runs differ in, times left out; nothing is rounded."""
    from lit_rl.checkpoint import encode_tree
    from lit_rl.checkpoint.codec import read_tree

    found = []
    for name in ("model", "optimizer", "state"):
        trees = [read_tree(f / f"checkpoints/step_{STEPS:08d}", name) for f in (ours, theirs)]
        for tree in trees if name == "state" else ():
            del tree["loops"]["validate_loop"]  # of the validation before training, which is not repeated
        (a, x), (b, y) = (encode_tree(_without_times(tree)) for tree in trees)
        same = a == b and x.keys() == y.keys() and all(_bits(x[key]) == _bits(y[key]) for key in x)
        found += [] if same else [name]
    found += [] if logged(ours) == logged(theirs) else ["metrics"]
    found += [] if completions(ours) == completions(theirs) else ["completions"]
    return found


def logged(folder: Path) -> list[tuple]:
    """Logged numbers by step, times left out."""
    timed = ("time/", "memory/", "checkpoint/", "rollout/tokens_per_second")
    with (folder / "csv/metrics.csv").open(newline="") as file:
        rows = [
            {name: float(value) for name, value in row.items() if value and not name.startswith(timed)}
            for row in csv.DictReader(file)
        ]
    return sorted({tuple(sorted(row.items())) for row in rows if len(row) > 2})


def completions(folder: Path) -> dict[tuple, str]:
    """Every completion that was written to the table, by step, row and number."""
    file = folder / "completions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(r["step"], r["prompt_row"], r["generation"]): r["completion"] for r in rows}


def _without_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        timed = [key for key in tree if "seconds" in str(key) or "rss" in str(key)]
        return {key: _without_times(value) for key, value in tree.items() if key not in timed}
    return tree


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
