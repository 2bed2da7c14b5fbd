"""Sandbox: runs Python text that nobody has read, without root, within limits.

What it keeps in and what not: `lit_rl/rewards/README.md`.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from lit_rl.errors import ConfigError

GUARD = Path(__file__).with_name("sandbox_guard.py")
ISOLATIONS = ("namespaces", "limits")
PROBE = "print(6 * 7)"


class Ran(NamedTuple):
    """How a program ended.

    Attributes:
        code: exit code; 128 + n where signal n ended it.
        output: what it wrote to standard output, as far as it was read.
        error: likewise to standard error.
        limit: "time" or "output" where that ended it, else None.
    """

    code: int
    output: str
    error: str
    limit: str | None


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Args:
        seconds: from start to end.
        cpu_seconds: of processor time, each process.
        memory: bytes of address space, each process.
        disk: bytes of files, all of them together (in memory); each of them with isolation "limits".
        output: bytes of standard output and error together.
        processes: processes and threads.
        files: open files, each process.
    """

    seconds: float = 5.0
    cpu_seconds: int = 5
    memory: int = 512 * 2**20
    disk: int = 16 * 2**20
    output: int = 2**20
    processes: int = 16
    files: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name} of a sandbox must be > 0 (found {value!r}).")


class Sandbox:
    """Runs programs, each in a process group, and with isolation "namespaces" in a world, of its own.

    Args:
        limits: of each program.
        isolation: "namespaces": no network, no files but the interpreter's (read-only) and its own, no other
            processes; needs a Linux that lets users make namespaces. "limits": the limits alone; the program
            sees the network and every file that this user may read, and may write what this user may.

    Raises:
        ConfigError: an unknown isolation.
    """

    def __init__(self, limits: Limits | None = None, isolation: str = "namespaces") -> None:
        if isolation not in ISOLATIONS:
            raise ConfigError(
                f"isolation of a sandbox must be one of {', '.join(ISOLATIONS)} (found {isolation!r})."
            )
        self.limits, self.isolation = limits or Limits(), isolation
        self._is_tried = False

    def run(self, program: str, stdin: str = "") -> Ran:
        """Run a program to its end, or to that of its limits.

        Args:
            program: Python text; it has the standard library.
            stdin: what it reads.

        Raises:
            ConfigError: the isolation is not to be had here.
        """
        if not self._is_tried:
            probe = self._run(PROBE, "")
            if probe.code != 0 or probe.output.strip() != "42":
                raise ConfigError(
                    f"The sandbox cannot run programs with isolation {self.isolation!r} here "
                    f"({probe.error.strip() or probe}); on a Linux that allows user namespaces it can. "
                    "isolation=limits keeps limits alone: code then reaches files and network."
                )
            self._is_tried = True
        return self._run(program, stdin)

    def _run(self, program: str, stdin: str) -> Ran:
        folder = Path(tempfile.mkdtemp(prefix="lit_rl_sandbox_"))
        try:
            (folder / "program.txt").write_text(program, encoding="utf-8", errors="surrogatepass")
            (folder / "stdin.txt").write_text(stdin, encoding="utf-8", errors="surrogatepass")
            settings = {**asdict(self.limits), "namespaces": self.isolation == "namespaces"}
            command = [sys.executable, "-I", "-S", str(GUARD), str(folder), json.dumps(settings)]
            with (folder / "stdin.txt").open("rb") as read:
                process = subprocess.Popen(
                    command,
                    stdin=read,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    cwd=folder,
                    env={"LANG": "C.UTF-8"},
                )
                return self._finished(process)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _finished(self, process: subprocess.Popen[bytes]) -> Ran:
        """Read until the end or a limit, then end the whole process group."""
        deadline = time.monotonic() + self.limits.seconds
        assert process.stdout is not None and process.stderr is not None
        read = {process.stdout: bytearray(), process.stderr: bytearray()}
        limit = None
        with selectors.DefaultSelector() as selector:
            for pipe in read:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map() and limit is None:
                ready = selector.select(max(deadline - time.monotonic(), 0))
                for key, _ in ready:
                    data = os.read(key.fd, 65536)
                    read[key.fileobj] += data  # type: ignore[index]
                    if not data:
                        selector.unregister(key.fileobj)
                if time.monotonic() >= deadline:
                    limit = "time"
                elif sum(map(len, read.values())) > self.limits.output:
                    limit = "output"
                elif process.poll() is not None and not ready:
                    break
        if limit is None:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                limit = "time"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for pipe in read:
            pipe.close()
        output, error = (
            bytes(data[: self.limits.output]).decode("utf-8", "replace") for data in read.values()
        )
        return Ran(128 - code if code < 0 else code, output, error, limit)
