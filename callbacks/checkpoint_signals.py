"""StopSignals: the signals that ask a run to end, noted until the end of the step."""

import os
import shutil
import signal
import subprocess
import threading
from typing import Any

from lit_rl.callbacks.checkpoint_resume import say


class StopSignals:
    """Notes SIGTERM and, in a SLURM job, SIGUSR1 (`sbatch --signal=USR1@90`); a second one ends at once.

    Lightning's own handler for SIGUSR1 would save in the middle of a step; it is replaced while this one is
    installed.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Begin to listen. Does nothing outside the main thread, where Python allows no handlers."""
        self.received = None
        if threading.current_thread() is threading.main_thread():
            watched = [signal.SIGTERM, *([signal.SIGUSR1] if "SLURM_JOB_ID" in os.environ else [])]
            self._before = {number: signal.signal(number, self._note) for number in watched}

    def restore(self) -> None:
        """Put the handlers of before back."""
        for number, handler in self._before.items():
            if signal.getsignal(number) in (self._note, signal.SIG_DFL):
                signal.signal(number, handler)
        self._before = {}

    @property
    def name(self) -> str:
        """Of the signal that was received."""
        return signal.Signals(self.received or 0).name

    def requeue(self) -> None:
        """After SIGUSR1, ask SLURM to run the job again; it resumes if its run_dir is the same."""
        if self.received != signal.SIGUSR1:
            return
        job = os.environ["SLURM_JOB_ID"]
        if "SLURM_ARRAY_JOB_ID" in os.environ:
            job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        if shutil.which("scontrol") is None:
            say(f"SLURM job {job} is not requeued: there is no scontrol here.")
            return
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        say(f"Requeued SLURM job {job}." if done.returncode == 0 else f"scontrol: {done.stderr.strip()}")

    def _note(self, signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)
        self.received = signum
