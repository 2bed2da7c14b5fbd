"""Programs that try to get out of the sandbox: `python tests/benchmarks/escapes.py` prints what came of each.

The table in lit_rl/rewards/README.md is made by it. A try counts as an escape when the program could do it:
it says so by the word ESCAPED, or it shows from the outside.
"""

import argparse
import os
import platform
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lit_rl.rewards.code import Code
from lit_rl.rewards.reward import Sample
from lit_rl.rewards.sandbox import Limits, Ran, Sandbox

LIMITS = Limits(seconds=5.0, cpu_seconds=3)
SLEEP = 71 + os.getpid() / 1e8  # seconds of a process that is looked for afterwards
PRELUDE = """
import ctypes, glob, mmap, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(): print("ESCAPED", flush=True)
def reads(path):
    with open(path, "rb") as file: return file.read(1)
"""


class Try(NamedTuple):
    """One attempt.

    Attributes:
        topic: files, network, processes, resources, machine or score.
        what: in words.
        program: after PRELUDE; `FACTS[...]` is replaced by its value.
        shows: from the outside, whether it got out: (facts, how it ended, seconds) -> bool.
    """

    topic: str
    what: str
    program: str
    shows: Callable[[dict[str, Any], Ran, float], bool] = lambda facts, ran, seconds: False


def _late(facts: dict[str, Any], ran: Ran, seconds: float) -> bool:
    return seconds > LIMITS.seconds + 10  # a busy machine needs time to begin and to end


TRIES = [
    Try("files", "read /etc/passwd", "reads('/etc/passwd'); escaped()"),
    Try("files", "see what is in the home folder", "os.lstat(FACTS['home']); escaped()"),
    Try("files", "read a file of the trainer by its path", "reads(FACTS['secret']); escaped()"),
    Try("files", "the same by ../../..", "reads('../' * 12 + FACTS['secret'].lstrip('/')); escaped()"),
    Try(
        "files",
        "write a file outside",
        "open(FACTS['outside'], 'w').write('x')",
        lambda facts, ran, seconds: Path(facts["outside"]).exists(),
    ),
    Try("files", "link to a file outside", "os.link(FACTS['secret'], 'mine'); reads('mine'); escaped()"),
    Try("files", "change the standard library", "open(os.__file__, 'a').close(); escaped()"),
    Try(
        "files",
        "make the standard library writable and change it",
        "libc.mount(None, FACTS['base'].encode(), None, ctypes.c_ulong(4096 | 32), None)\n"
        "open(os.__file__, 'a').close(); escaped()",
    ),
    Try(
        "files",
        "leave a changed root by another one",
        "os.mkdir('d'); fd = os.open('/', os.O_RDONLY); os.chroot('d'); os.fchdir(fd)\n"
        "for _ in range(20): os.chdir('..')\n"
        "os.chroot('.'); reads(FACTS['secret']); escaped()",
    ),
    Try("files", "use an open file of the trainer", "[os.fstat(fd) for fd in [3]]; escaped()"),
    Try("files", "make a device", "os.mknod('disk', 0o60666, os.makedev(8, 0)); reads('disk'); escaped()"),
    Try("files", "read kernel memory and log", "any(reads(p) for p in ['/dev/kmsg', '/dev/mem']); escaped()"),
    Try("files", "leave something in /dev/shm", "open('/dev/shm/lit_rl_escape', 'w').close(); escaped()"),
    Try(
        "network",
        "connect to a port of this machine",
        "socket.create_connection(('127.0.0.1', FACTS['port']), 1); escaped()",
    ),
    Try(
        "network",
        "send a datagram to it",
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', FACTS['port']))\n"
        "time.sleep(0.3)",
        lambda facts, ran, seconds: bool(facts["datagrams"]),
    ),
    Try(
        "network",
        "connect to an abstract socket",
        "s = socket.socket(socket.AF_UNIX); s.connect(FACTS['abstract']); escaped()",
    ),
    Try(
        "network",
        "connect to a socket file",
        "s = socket.socket(socket.AF_UNIX); s.connect(FACTS['socket']); escaped()",
    ),
    Try(
        "network",
        "find a network device",
        "assert set(dict(socket.if_nameindex()).values()) - {'lo'}; escaped()",
    ),
    Try(
        "network",
        "find a route to the outside",
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('192.0.2.1', 9)); escaped()",
    ),
    Try("network", "open a raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); escaped()"),
    Try("processes", "see the trainer", "os.kill(FACTS['pid'], 0); escaped()"),
    Try("processes", "read the trainer's environment", "reads('/proc/%d/environ' % FACTS['pid']); escaped()"),
    Try(
        "processes",
        "trace the trainer",
        "assert libc.ptrace(0x4206, FACTS['pid'], None, None) == 0; escaped()",
    ),
    Try(
        "processes",
        "fork 200 times",
        "n = 0\nfor _ in range(200):\n    if os.fork() == 0: time.sleep(60)\n    n += 1\nescaped()",
    ),
    Try(
        "processes",
        "start 200 threads",
        "for _ in range(200): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "escaped()",
    ),
    Try(
        "processes",
        "outlive the run as a daemon",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep({SLEEP})'])\n"
        "    os._exit(0)\n"
        "time.sleep(1)",
        lambda facts, ran, seconds: bool(_left()),
    ),
    Try(
        "processes",
        "ignore every signal and go on",
        "for n in set(signal.valid_signals()) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        _late,
    ),
    Try("processes", "stop its whole group", "os.killpg(0, signal.SIGSTOP); time.sleep(60)", _late),
    Try("processes", "close its output and stay", "os.close(1); os.close(2); time.sleep(60)", _late),
    Try("resources", "take 4 GB", "x = bytearray(4 * 2**30); escaped()"),
    Try("resources", "map 4 GB in pieces", "x = [mmap.mmap(-1, 2**26) for _ in range(64)]; escaped()"),
    Try(
        "resources",
        "take 2 GB by ten processes",
        "r, w = os.pipe()\nfor _ in range(10):\n    if os.fork() == 0:\n"
        "        x = bytearray(200 * 2**20); os.write(w, b'x'); time.sleep(60)\n"
        "got = 0\nwhile got < 10: got += len(os.read(r, 1))\nescaped()",
    ),
    Try(
        "resources",
        "write 1 GB",
        "f = open('f', 'wb')\nfor _ in range(1024): f.write(bytes(2**20))\nf.flush(); escaped()",
    ),
    Try(
        "resources",
        "write 100 files of 10 MB",
        "for i in range(100): open(f'f{i}', 'wb').write(bytes(10 * 2**20))\nescaped()",
    ),
    Try("resources", "make 10000 files", "for i in range(10000): open(f'f{i}', 'w').close()\nescaped()"),
    Try("resources", "open 1000 files", "x = [open(os.devnull) for _ in range(1000)]; escaped()"),
    Try(
        "resources",
        "write 1 GB of output",
        "while True: os.write(1, bytes(2**16))",
        lambda facts, ran, seconds: len(ran.output) > LIMITS.output,
    ),
    Try("resources", "compute for a minute", "while True: pass", _late),
    Try("resources", "raise its limits", "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)); escaped()"),
    Try("machine", "go before other processes", "os.nice(-5); escaped()"),
    Try("machine", "set the clock", "time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped()"),
    Try("machine", "name the machine", "n = socket.gethostname(); socket.sethostname(n); escaped()"),
    Try("machine", "mount a file system", "assert libc.mount(b'x', b'.', b'tmpfs', 0, None) == 0; escaped()"),
    Try(
        "machine", "make a user namespace with all rights", "assert libc.unshare(0x10000000) == 0; escaped()"
    ),
    Try(
        "machine",
        "become root by su or sudo",
        "for command in (['su', '-c', 'id -u'], ['sudo', '-n', 'id', '-u']):\n"
        "    if os.path.exists('/usr/bin/' + command[0]):\n"
        "        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)\n"
        "        if said.stdout.strip() == '0': escaped()",
    ),
    Try("machine", "be root", "os.setuid(0); escaped()"),
]


@contextmanager
def surroundings() -> Iterator[dict[str, Any]]:
    """What there is to be found outside."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        os.chmod(folder, 0o777)
        tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        udp.settimeout(0.2)
        names = (f"\0lit_rl_escape_{os.getpid()}", f"{folder}/socket")
        unix = [socket.socket(socket.AF_UNIX) for _ in names]
        for server, name in zip(unix, names, strict=True):
            server.bind(name)
            server.listen()
        os.chmod(names[1], 0o777)
        facts = {
            "home": _in_home(),
            "secret": str(secret),
            "outside": f"{folder}/outside",
            "base": sys.base_prefix,
            "port": port,
            "abstract": names[0],
            "socket": names[1],
            "pid": os.getpid(),
            "datagrams": [],
        }
        is_over = threading.Event()

        def listen() -> None:
            while not is_over.is_set():
                try:
                    facts["datagrams"].append(udp.recv(10))
                except TimeoutError:
                    continue

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield facts
        finally:
            is_over.set()
            listener.join()
            for server in (tcp, udp, *unix):
                server.close()
            Path("/dev/shm/lit_rl_escape").unlink(missing_ok=True)


def escaped(sandbox: Sandbox, attempt: Try, facts: dict[str, Any]) -> tuple[bool, str]:
    """Whether a try got out, and how it ended."""
    program = PRELUDE + attempt.program
    for name, value in facts.items():
        program = program.replace(f"FACTS['{name}']", repr(value))
    start = time.monotonic()
    ran = sandbox.run(program)
    seconds = time.monotonic() - start
    got_out = "ESCAPED" in ran.output or attempt.shows(facts, ran, seconds)
    for process in _left():
        process.kill()
    last = (ran.error.strip().splitlines() or [""])[-1]
    return got_out, ran.limit or last[:60] or f"code {ran.code}"


def forged(isolation: str) -> list[tuple[str, str, bool, str]]:
    """Tries to score without solving the task."""
    steal = (
        "import os, re\nmark = re.findall(r'[0-9a-f]{32}', open('program.py').read())[-1]\n"
        "print(mark, flush=True)\nos._exit(0)"
    )
    search = (
        "import glob, os\nfor p in glob.glob('/box/*') + glob.glob('/proc/self/fd/*') + glob.glob('../*'):\n"
        "    try: text = open(p).read()\n    except OSError: continue\n"
        "    if 'wan' + 'ted7' in text: print('wan' + 'ted7')\n"
    )
    tries = [
        ("end with code 0 before the tests", "import os; os._exit(0)", ["assert f(1) == 2"]),
        ("read the mark of passed tests from its own text", steal, ["assert f(1) == 2"]),
        (
            "be equal to everything",
            "class X:\n    def __eq__(self, other): return True\ndef f(x): return X()",
            ["assert f(1) == 2"],
        ),
        ("find the wanted output", search, {"inputs": ["1"], "outputs": ["wanted7"]}),
    ]
    reward = Code(isolation, seconds=LIMITS.seconds)
    rows = []
    for what, code, truth in tries:
        sample = Sample("q", f"```python\n{code}\n```", columns={"reward_model": {"ground_truth": truth}})
        result = reward.score(sample)
        rows.append(("score", what, result.score == 1.0, (result.feedback or "")[-60:].replace("\n", " ")))
    return rows


def _in_home() -> str:
    """Something in the home folder that the interpreter does not lie in."""
    entries = [e for e in sorted(Path.home().iterdir()) if not Path(sys.base_prefix).is_relative_to(e)]
    return str(entries[0]) if entries else str(Path.home() / "nothing")


def _left() -> list[psutil.Process]:
    """Processes of a program that outlived its run."""
    found = psutil.process_iter(["cmdline"])
    return [
        process for process in found if f"import time; time.sleep({SLEEP})" in (process.info["cmdline"] or [])
    ]


def results(isolation: str) -> list[tuple[str, str, bool, str]]:
    """(topic, what, whether it got out, how it ended) of every try."""
    sandbox, rows = Sandbox(LIMITS, isolation), []
    for attempt in TRIES:
        with surroundings() as facts:
            rows.append((attempt.topic, attempt.what, *escaped(sandbox, attempt, facts)))
    return rows + forged(isolation)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isolation", nargs="+", default=["namespaces", "limits"])
    isolations = parser.parse_args().isolation
    found = {isolation: results(isolation) for isolation in isolations}
    who = "root" if os.getuid() == 0 else "a user without rights"
    print(f"Linux {platform.release()}, Python {platform.python_version()}, run by {who}.\n")
    print(f"| | try | {' | '.join(isolations)} |\n|{' --- |' * (len(isolations) + 2)}")
    for rows in zip(*found.values(), strict=True):
        marks = ["**out**" if row[2] else "held" for row in rows]
        print(f"| {rows[0][0]} | {rows[0][1]} | {' | '.join(marks)} |")
    for isolation, rows in found.items():
        print(f"\n{isolation}: {sum(not row[2] for row in rows)} of {len(rows)} held.")


if __name__ == "__main__":
    main()
