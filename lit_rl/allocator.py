"""How this process gets its memory from the system."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Let freed memory wait for the next step instead of going back to the system.

    A step frees what the next one takes again. By default glibc hands large blocks back at once, and the
    system has to find and clear the same pages for every step. The process then stays as large as it was at
    its peak. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
