"""Where an installed mstore works, and what it says where it does not: a table.

    python tests/places.py [--wheel FILE]

Builds the package (or takes a wheel), installs it with what it needs into new virtual environments
under umask 002 and 077, and runs a row of commands there: plainly, without the right to make
written memory executable, with 60 descriptors, as on a machine with pages of 64 KiB, on a full
btrfs, and in a lower layer of overlayfs. Every command must work or say in words why not, and none
may end by a signal. Places that cannot be made here (not root, no btrfs, no gcc) are named.

Prints the table in Markdown; exits with 1 if a command did neither.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import pytest  # noqa: E402
from lmdb_page import page_shim  # noqa: E402
from loop_disks import fill, loop_disk, overlay  # noqa: E402
from small_models import small_model  # noqa: E402

_MERGE = ("merge", "--base", "base", "--expert", "tuned", "--method", "ties", "--name", "merged")
PREPARE = (
    ("init",),
    ("add", "models/base", "--name", "base"),
    ("add", "models/tuned", "--name", "tuned", "--base", "base"),
    _MERGE,
)
COMMANDS = (
    *(("refs",), ("log", "merged"), ("cat", "merged:config.json"), ("explain", "merged")),
    *(("checkout", "merged", "OUT/files"), ("mount", "merged", "OUT/mount")),
    *(("fsck", "--read-data"), ("tag", "TAG", "merged"), ("backup", "OUT/backup"), ("gc",)),
)


def install(wheel: Path, where: Path, umask: int) -> Path:
    """Install a wheel into a new environment, under this umask; return its program."""
    before = os.umask(umask)
    try:
        subprocess.run([sys.executable, "-m", "venv", where], check=True)
        python = where / "bin" / "python"
        line = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ["--constraint", HERE.parent / "constraints.txt"]
        subprocess.run([*line, *constraints, str(wheel)], check=True)
    finally:
        os.umask(before)
    return where / "bin" / "mstore"


def without_written_code() -> None:
    """What MemoryDenyWriteExecute=yes does: PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN."""
    if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):
        raise OSError("this kernel has no PR_SET_MDWE")


def with_few_files() -> None:
    """What `ulimit -n 60` does."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))


class Place:
    """One way to run the program on one store."""

    def __init__(self, program: Path, work: Path, store: Path, **options: object) -> None:
        self._program, self._work, self._store = program, work, store
        self._options = options

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if "MSTORE" not in name}
        environment |= self._options.get("env", {})  # type: ignore[operator]
        return subprocess.run(
            [self._program, "--store", self._store, *words],
            cwd=self._work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=self._options.get("before"),  # type: ignore[arg-type]
        )

    def row(self, name: str) -> list[str]:
        """What came of each command: "works", or what it said."""
        out = self._work / f"out-{name}"
        (out / "mount").mkdir(parents=True)
        cells = []
        for words in COMMANDS:
            line = [word.replace("OUT", str(out)).replace("TAG", f"t-{name}") for word in words]
            done = self.run(*line)
            cells.append(said(done))
            if words[0] == "mount" and not done.returncode:
                self.run("unmount", line[-1])
        return cells


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Return the result of a command in a cell; one that begins with "!" is a fault."""
    if done.returncode == 0:
        return "works"
    line = next((one for one in done.stderr.splitlines() if one.startswith("error: ")), "")
    if done.returncode < 0 or not line or "internal error" in done.stderr:
        return f"! status {done.returncode}: {done.stderr.strip()[-300:]}"
    return line.removeprefix("error: ").rpartition("/")[2].replace("|", "\\|")


def prepared(place: Place) -> Place:
    """Fill the store of a place; return it."""
    for words in PREPARE:
        done = place.run(*words)
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stderr}")
    return place


def rows(work: Path, plain: Path, closed: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield each place with what runs the commands there."""

    def anywhere(name: str, program: Path, **options: object) -> list[str]:
        place = Place(program, work, work / "stores" / name, **options)
        return prepared(place).row(name)

    def pages() -> list[str]:
        environment = {"LD_PRELOAD": str(page_shim(work)), "PAGE_BYTES": "65536"}
        return anywhere("pages", plain, env=environment)

    def full() -> list[str]:
        (work / "btrfs").mkdir()
        with loop_disk("btrfs", work / "btrfs", 200 << 20) as disk:
            place = prepared(Place(plain, work, disk / "s"))
            fill(disk)
            return place.row("full")

    def lower() -> list[str]:
        (work / "layers" / "lower").mkdir(parents=True)
        prepared(Place(plain, work, work / "layers" / "lower" / "s"))
        with overlay(work / "layers", work / "layers" / "lower") as merged:
            return Place(plain, work, merged / "s").row("overlay")

    yield "installed under umask 002", lambda: anywhere("plain", plain)
    yield "installed under umask 077", lambda: anywhere("closed", closed)
    yield "PR_SET_MDWE", lambda: anywhere("mdwe", plain, before=without_written_code)
    yield "ulimit -n 60", lambda: anywhere("files", plain, before=with_few_files)
    yield "pages of 64 KiB", pages
    yield "full btrfs", full
    yield "lower layer of overlayfs", lower


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheel", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mstore-places-") as directory:
        work = Path(directory)
        wheel = chosen.wheel
        if wheel is None:
            line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", work / "w"]
            subprocess.run([*line, HERE.parent], check=True)
            (wheel,) = (work / "w").glob("*.whl")
        plain = install(wheel, work / "v002", 0o002)
        closed = install(wheel, work / "v077", 0o077)
        for name in ("base", "tuned"):
            small_model(work / "models" / name, name)
        print("| |", " | ".join(words[0] for words in COMMANDS), "|")
        print("|---|" + "---|" * len(COMMANDS))
        faults = 0
        for name, run in rows(work, plain, closed):
            try:
                cells = run()
            except (OSError, pytest.skip.Exception) as error:
                cells = [f"not tried: {error}"]
            faults += sum(cell.startswith("!") for cell in cells)
            print(f"| {name} |", " | ".join(cells), "|", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
