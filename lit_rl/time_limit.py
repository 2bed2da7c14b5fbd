"""Calls within a limit of time: reward functions, environments and their tools."""

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class OutOfTime(Exception):
    """A call took longer than its limit."""


def limited(function: Callable[[], Any], seconds: float, key: str = "reward.timeout") -> Any:
    """What the function returns, in any thread.

    Args:
        function: of nothing.
        seconds: > 0.
        key: of the limit, for the message.

    Raises:
        OutOfTime: it took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        return in_thread(function, seconds, key)
    with time_limit(seconds, key):
        return function()


@contextmanager
def time_limit(seconds: float, key: str = "reward.timeout") -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds; in the main thread, which alone gets signals.

    By an alarm signal, so it interrupts Python code and most waiting. A function that sets an alarm of its
    own takes this one away.

    Args:
        seconds: > 0.
        key: of the limit, for the message.
    """

    def ring(signum: int, frame: Any) -> None:
        raise OutOfTime(f"took longer than {key}, {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_thread(function: Callable[[], Any], seconds: float, key: str = "reward.timeout") -> Any:
    """What the function returns in a thread of its own, or what it raises.

    Args:
        function: of nothing.
        seconds: after which OutOfTime is raised here, and in the thread as soon as it runs Python code again.
            A thread that never does is left behind; it does not keep the process alive.
        key: of the limit, for the message.
    """
    box: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            box.append((True, function()))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=run, name="lit_rl_limited", daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        assert thread.ident is not None
        stop = ctypes.py_object(OutOfTime)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), stop)
        raise OutOfTime(f"took longer than {key}, {seconds:g} s")
    is_done, value = box[0]
    if not is_done:
        raise value
    return value
