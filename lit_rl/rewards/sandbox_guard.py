"""Runs one program shut in: `python -I sandbox_guard.py FOLDER LIMITS`. Stands alone; see sandbox.py.

From the outside in: namespaces of mounts, network, processes and IPC, and of users where this one is not
root; a root of its own in memory with the interpreter read-only in it; a user that is nobody; limits; no new
privileges. A process with a changed root can make no further user namespace.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path

INSIDE = 1000
FIRST_OF_NOBODY = 1_000_000  # users without a name; one for each program, so that processes are counted apart
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}  # statvfs flag -> mount flag that is locked
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SETUP_FAILED = 253

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    """A function of libc; OSError where it fails."""
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _shut_in(folder: Path, limits: dict) -> None:
    """Namespaces, and a root in memory with what the interpreter needs."""
    uid, gid = os.getuid(), os.getgid()
    spaces = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    _call("unshare", spaces if uid == 0 else spaces | CLONE_NEWUSER)
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{INSIDE} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{INSIDE} {gid} 1")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    root = folder / "root"
    root.mkdir()
    _mount("none", str(root), "tmpfs", MS_NOSUID | MS_NODEV, f"size={limits['disk']},nr_inodes=4096,mode=755")
    for place in dict.fromkeys([sys.base_prefix, "/usr", "/lib", "/lib64", "/bin"]):
        _show(Path(place), root)
    for place in ("/etc/ld.so.cache", "/dev/null", "/dev/urandom"):
        _show(Path(place), root)
    (root / "box").mkdir()
    os.chroot(root)


def _show(place: Path, root: Path) -> None:
    """Make a folder or file of the outside readable at the same place inside."""
    inside = root / str(place).lstrip("/")
    if not place.exists() or inside.exists() or inside.is_symlink():
        return
    inside.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        inside.symlink_to(os.readlink(place))
        return
    if place.is_dir():
        inside.mkdir()
    else:
        inside.touch()
    _mount(str(place), str(inside), None, MS_BIND | MS_REC)
    if not str(place).startswith("/dev/"):
        locked = sum(flag for seen, flag in KEPT.items() if os.statvfs(inside).f_flag & seen)
        _mount(None, str(inside), None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | locked)


def _limit(limits: dict) -> None:
    for name, value in {
        "RLIMIT_CPU": limits["cpu_seconds"],
        "RLIMIT_AS": limits["memory"],
        "RLIMIT_FSIZE": limits["disk"],
        "RLIMIT_NPROC": limits["processes"],
        "RLIMIT_NOFILE": limits["files"],
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
    }.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _exit_as(status: int) -> None:
    """End as a child did."""
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _run(program: str, limits: dict, home: str) -> None:
    """Become the program."""
    os.chdir(home)
    if limits["namespaces"] and os.getuid() == 0:
        os.chown(home, limits["user"], limits["user"])
        os.setgroups([])
        os.setresgid(*[limits["user"]] * 3)
        os.setresuid(*[limits["user"]] * 3)
    Path("program.py").write_text(program, encoding="utf-8", errors="surrogatepass")
    _limit(limits)
    interpreter = limits["interpreter"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8"}
    os.execve(interpreter, [interpreter, "-I", "-B", "program.py"], environment)


def main(folder: Path, limits: dict) -> None:
    """Read the program, shut it in, wait for its end and end the same way."""
    limits["interpreter"] = os.path.realpath(sys.executable)
    program = (folder / "program.txt").read_text(encoding="utf-8", errors="surrogatepass")
    if not limits["namespaces"]:
        (folder / "box").mkdir()
        _run(program, limits, str(folder / "box"))
    limits["user"] = FIRST_OF_NOBODY + os.getpid()
    _shut_in(folder, limits)
    first = os.fork()  # process 1 of its namespace: with it, all others end
    if first:
        _exit_as(os.waitpid(first, 0)[1])
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = os.fork()
    if child == 0:
        _run(program, limits, "/box")
    while True:
        ended, status = os.wait()
        if ended == child:
            _exit_as(status)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(SETUP_FAILED)
