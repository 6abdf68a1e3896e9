"""
Runs one side as a process of its own: how long it took, how much memory its processes held, what it said, and how much of the cores others had
meanwhile. PyTorch's and llama.cpp's threads wait for each other by spinning, so a neighbour on the machine that costs the program a tenth can
make those ten times slower: such runs must be seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).resolve().parents[1]
SAMPLE_SECONDS = 0.1
QUIET_CORES = 0.1
TICKS = os.sysconf("SC_CLK_TCK")


class SideFailed(Exception):
    """A side ended with an error; says which one and its last words."""


@dataclass(frozen=True)
class Outcome:
    """A process that has ended well."""

    seconds: float
    """From its start to its end."""
    peak_bytes: int
    """Largest sum of the resident sets of it and its children; pages that they share count in each."""
    others_cores: float
    """How many of its cores were busy with something else, in the mean."""
    lines: list[tuple[float, str]]
    """Its lines on stdout with the second at which each came."""

    def result(self) -> dict[str, Any]:
        """The JSON on the last line."""
        parsed: dict[str, Any] = json.loads(self.lines[-1][1])
        return parsed


def tree(pid: int) -> tuple[int, float]:
    """Resident bytes of a process and of all below it, and the seconds that they have computed; nothing for one that has ended meanwhile."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        below = [tree(int(child)) for task in tasks for child in (task / "children").read_text().split()]
    except (OSError, IndexError):
        return 0, 0.0
    own = pages * os.sysconf("SC_PAGE_SIZE"), sum(map(int, ticks)) / TICKS
    return own[0] + sum(held for held, _ in below), own[1] + sum(seconds for _, seconds in below)


def busy_seconds(cores: Iterable[int]) -> float:
    """Seconds that these cores have been busy with anything, a virtual machine's neighbours included."""
    names = {f"cpu{core}" for core in cores}
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _idle, _waiting, *rest = map(int, ticks)
            busy += user + nice + system + sum(rest[:3])
    return busy / TICKS


def wait_for_quiet(patience: float) -> None:
    """Until others leave the cores alone for half a second, or as long as that."""
    deadline, cores = time.monotonic() + patience, os.sched_getaffinity(0)
    while time.monotonic() < deadline:
        before = busy_seconds(cores)
        time.sleep(0.5)
        if busy_seconds(cores) - before < 0.5 * QUIET_CORES:
            return


def run(name: str, command: list[str], cores: int, env: dict[str, str] | None = None) -> Outcome:
    """Runs a command on so many cores, the first ones that this process may use."""
    allowed = os.sched_getaffinity(0)
    its_own = sorted(allowed)[:cores]
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryFile() as errors:
        # a process gets the cores of the thread that starts it
        os.sched_setaffinity(0, its_own)
        try:
            start, busy_before = time.perf_counter(), busy_seconds(its_own)
            everything = {**os.environ, **(env or {})}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=everything)
        finally:
            os.sched_setaffinity(0, allowed)

        def listen() -> None:
            assert process.stdout is not None
            lines.extend((time.perf_counter() - start, line.rstrip("\n")) for line in process.stdout)

        listener = threading.Thread(target=listen)
        listener.start()
        peak, computed, ended = 0, 0.0, threading.Event()

        def watch() -> None:
            nonlocal peak, computed
            while not ended.wait(SAMPLE_SECONDS):
                held, seconds = tree(process.pid)
                peak, computed = max(peak, held), max(computed, seconds)

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds, busy = time.perf_counter() - start, busy_seconds(its_own) - busy_before
        process.returncode = os.waitstatus_to_exitcode(status)
        ended.set()
        watcher.join()
        listener.join()
        if process.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip() or "\n".join(line for _, line in lines)
            print(f"{name}: exit status {process.returncode}\n{said[-4000:]}", file=sys.stderr)
            last = said.splitlines()[-1] if said else "it said nothing"
            raise SideFailed(f"exit status {process.returncode}: {last[:200]}")
    # what it was at its largest, and what it computed, also after the last look at it
    peak, computed = max(peak, usage.ru_maxrss * 1024), max(computed, usage.ru_utime + usage.ru_stime)
    return Outcome(seconds, peak, max(0.0, (busy - computed) / seconds), lines)


def script(name: str, module: str, spec: dict[str, Any], cores: int, threads: int = 1) -> Outcome:
    """Runs a script of `sides`, whose libraries compute with so many threads per process."""
    env = {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    # no library looks for anything in a network, and none tells anybody that it runs
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-P", "-m", f"peers.sides.{module}", json.dumps(spec)]
    return run(name, command, cores, env)
