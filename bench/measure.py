"""Measuring commands as whole processes: wall, CPU, and peak anonymous memory.

CPU is the operating system's account of the finished process and its children.  Peak anonymous
memory is the largest RssAnon seen, sampled every 50 ms: page cache that is mapped does not count.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import resource
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: seconds, seconds, bytes, and what it printed."""

    wall: float
    cpu: float
    anonymous: int
    output: str


def run(command: Sequence[str], *, env: dict[str, str] | None = None) -> Run:
    """Run a command to its end; raises CalledProcessError if it fails."""
    if env is None:
        # A program that must compile its own source at every start is not what people run.
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    peak = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, _anonymous(process.pid))
            stop.wait(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        output, _ = process.communicate()
        wall = time.perf_counter() - began
    finally:
        stop.set()
        watcher.join()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(wall, cpu, peak, output)


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
    return found[0] if found else 0


def median(runs: Sequence[Run]) -> dict[str, float]:
    """Medians of wall, cpu and anonymous, with the extremes of wall."""
    walls = [r.wall for r in runs]
    return {
        "wall": statistics.median(walls),
        "wall_min": min(walls),
        "wall_max": max(walls),
        "cpu": statistics.median(r.cpu for r in runs),
        "anonymous": statistics.median(r.anonymous for r in runs),
        "runs": len(runs),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def options(
    doc: str | None, *, rounds: int, millions: float | Sequence[float]
) -> argparse.ArgumentParser:
    """The options of benchmarks of generated models.  millions: of one size, or of several."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="directory on a local disk")
    parser.add_argument("--rounds", type=int, default=rounds)
    several = None if isinstance(millions, (int, float)) else "+"
    parser.add_argument(
        "--millions", type=float, nargs=several, default=millions, help="parameters of a model"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    return parser


def keep(folder: Path, name: str, results: dict[str, Any]) -> None:
    """Write FOLDER/NAME.json, which `report.py` and `plots.py` read, and print it."""
    path = folder / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(results, indent=1) + "\n"
    path.write_text(text)
    print(text, end="")


def drop_cache(*paths: Path) -> None:
    """Evict the files below these paths from the page cache (they are synced first)."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                try:
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


def warm_memory(gigabytes: float) -> None:
    """Touch and free memory: in a virtual machine, pages that the host took back are slow to touch
    for the first time, and whoever writes first to the page cache would pay for it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, int(gigabytes * (1 << 30)), flags=flags).close()


@dataclass(frozen=True, slots=True)
class Machine:
    """What a figure was measured on.  avx512: whether the processor has it."""

    processor: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    avx512: bool


def machine() -> dict[str, object]:
    """This machine, without its name."""
    processor = platform.processor() or "unknown"
    told = Path("/proc/cpuinfo").read_text()
    for line in told.splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return asdict(
        Machine(
            processor,
            len(os.sched_getaffinity(0)),
            round(memory, 1),
            platform.release().split("-")[0],
            platform.python_version(),
            "avx512f" in told.split(),
        )
    )


def ready(gigabytes: float, *files: Path) -> None:
    """Write what is dirty, have memory at hand, and these files in the page cache."""
    os.sync()
    warm_memory(gigabytes)
    block = bytearray(1 << 20)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(block):
                pass
