"""Reading a snapshot through mounts and from Python, beside the plain files, in turn in one run.

    python bench/mounts.py WORK [--rounds 5] [--millions 300]

Writes and prints bench/results/mounts.json.  WORK needs about 8 GB; the family in it is kept.  What
is read is a fine-tune whose every element differs from its base, in bf16: as plain files, from a
store without compression and from a dense one, where it is coded as differences to its base;
through FUSE and, where the kernel can, EROFS; and from restic and borg, where they are installed
(each with the fine-tune alone, as it backs it up by default).

    cold    nothing is in the page cache, and a mount is new
    cached  the plain files or the packs are in the page cache; a mount is new
    warm    what the mount showed was read before

Ways of reading: bench/reading.py.  For each mount also the seconds until it is ready, until the
first byte of a new one, and what its process takes: seconds of a processor a GiB that was read in
front of a cold pack, and its anonymous memory then.  And `ls -l` of a mount of a whole store.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generate import BASE, dense, write_family
from growth import simulate
from measure import drop_cache, keep, machine, options, spread
from store import Store

READING = Path(__file__).parent / "reading.py"
WAYS = ("read", "mmap", "random", "load", "safe_open", "from_pretrained")
IN_PYTHON = ("load", "safe_open", "from_pretrained")
CACHED = ("read", "load", "from_pretrained")
PEERS = ("restic", "borg")
PARTLY = {"checkout": ("read", "from_pretrained"), **dict.fromkeys(PEERS, ("read",))}
"""Places that are not read in every way."""
BLOCKS, SNAPSHOTS = 100_000, 10_000
TICKS = os.sysconf("SC_CLK_TCK")
REPOSITORY = {
    **os.environ,
    "RESTIC_PASSWORD": "bench",
    "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
}


def seconds(way: str, *place: str | Path) -> float:
    """Read in a fresh process; return the seconds that it prints."""
    command = [sys.executable, str(READING), way, *map(str, place)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return float(
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        ).stdout.splitlines()[-1]
    )


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount that answers: where, after how many seconds, and which process serves it."""

    folder: Path
    ready: float
    pid: int | None

    def cpu(self) -> float:
        """Seconds of a processor that its process took so far."""
        if self.pid is None:
            return 0.0
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self) -> int:
        """The anonymous memory of its process, bytes."""
        if self.pid is None:
            return 0
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (line,) = [line for line in status if line.startswith("RssAnon:")]
        return int(line.split()[1]) * 1024


@dataclass(frozen=True, slots=True)
class Place:
    """One way to have the model: the files at rest behind it, and how to mount it."""

    name: str
    at_rest: Callable[[], list[Path]]
    mounted: Callable[[], AbstractContextManager[Mounted]]


class Bench:
    """One fine-tune and its base, in every place."""

    def __init__(self, work: Path, millions: float) -> None:
        self.work = work
        self.point = work / "mounted"
        models = [BASE, dense(0)]
        family = work / f"family{millions:g}"
        write_family(family, millions, models)
        self.folder = family / models[1].name
        self.name = models[1].name
        self.files = sorted(self.folder.glob("*.safetensors"))
        self.nbytes = sum(file.stat().st_size for file in self.files)
        self.stores = {codec: Store(work / f"mounts-{codec}") for codec in ("raw", "dense")}
        for codec, store in self.stores.items():
            store.make(codec=codec)
            for model in models:
                store.add(family / model.name, model.name)
        checkout = work / "mounts-checkout"
        shutil.rmtree(checkout, ignore_errors=True)
        self.stores["dense"].mstore("checkout", self.name, str(checkout))
        self.places = [
            self.directory("plain", self.folder),
            self.directory("checkout", checkout),
            self.store("raw", "raw"),
            self.store("dense", "dense"),
        ]
        if self.has_erofs():
            self.places.append(self.store("erofs", "raw", "--driver", "erofs"))
        if shutil.which("restic"):
            self.places.append(self.restic())
        if shutil.which("borg"):
            self.places.append(self.borg())

    def directory(self, name: str, folder: Path) -> Place:
        """Plain files."""

        @contextmanager
        def mounted() -> Iterator[Mounted]:
            yield Mounted(folder, 0.0, None)

        return Place(name, lambda: sorted(folder.glob("*.safetensors")), mounted)

    def store(self, name: str, codec: str, *options: str) -> Place:
        """A mount of one of the stores."""
        store = self.stores[codec]

        @contextmanager
        def mounted() -> Iterator[Mounted]:
            self.point.mkdir(exist_ok=True)
            began = time.perf_counter()
            store.mstore("mount", self.name, str(self.point), *options)
            taken = time.perf_counter() - began
            try:
                yield Mounted(self.point, taken, self.pid())
            finally:
                store.mstore("unmount", str(self.point))

        return Place(name, lambda: sorted(store.path.rglob("*.pack")), mounted)

    def pid(self) -> int | None:
        """The process behind the mount; EROFS has none."""
        command = [sys.executable, "-m", "mstore_cli", "mounts", "--json"]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        every = json.loads(told.stdout)["mounts"]
        (mine,) = [one for one in every if one["mountpoint"] == str(self.point)]
        pid = mine["pid"]
        return None if pid is None else int(pid)

    def has_erofs(self) -> bool:
        """Whether the raw store mounts through EROFS here."""
        place = self.store("erofs", "raw", "--driver", "erofs")
        try:
            with place.mounted():
                return True
        except subprocess.CalledProcessError:
            return False

    def repository(self, name: str, make: list[list[str]], mount: list[str], inside: str) -> Place:
        """The fine-tune in a repository of a backup program, mounted by it in the foreground."""
        path = self.work / f"mounts-{name}"
        shutil.rmtree(path, ignore_errors=True)
        for command in make:
            subprocess.run(command, check=True, env=REPOSITORY, stdout=subprocess.DEVNULL)
        folder = self.point / inside / str(self.folder).lstrip("/")

        @contextmanager
        def mounted() -> Iterator[Mounted]:
            self.point.mkdir(exist_ok=True)
            began = time.perf_counter()
            process = subprocess.Popen(
                mount, env=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                while not folder.is_dir():
                    time.sleep(0.01)
                yield Mounted(folder, time.perf_counter() - began, process.pid)
            finally:
                subprocess.run(["umount", str(self.point)], check=True)
                process.wait()

        return Place(name, lambda: [p for p in path.rglob("*") if p.is_file()], mounted)

    def restic(self) -> Place:
        path = str(self.work / "mounts-restic" / "repository")
        restic = ["restic", "-q", "-r", path, "--cache-dir", str(self.work / "mounts-restic/cache")]
        make = [[*restic, "init"], [*restic, "backup", str(self.folder)]]
        return self.repository(
            "restic", make, [*restic, "mount", str(self.point)], "snapshots/latest"
        )

    def borg(self) -> Place:
        path = str(self.work / "mounts-borg")
        make = [
            ["borg", "init", "-e", "none", path],
            ["borg", "create", f"{path}::one", str(self.folder)],
        ]
        mount = ["borg", "mount", "-f", f"{path}::one", str(self.point)]
        return self.repository("borg", make, mount, "")

    def listings(self, rounds: int) -> dict[str, dict[str, float]]:
        """Seconds of `ls -l` in a new mount of a whole store of many snapshots, simulated."""
        path = self.work / "mounts-many"
        simulate(path, BLOCKS, SNAPSHOTS)
        store = Store(path)
        found: dict[str, list[float]] = {"root": [], "snapshots": []}
        for _ in range(rounds):
            store.mstore("mount", "--all", str(self.point))
            try:
                for name, folder in (("root", self.point), ("snapshots", self.point / "snapshots")):
                    began = time.perf_counter()
                    subprocess.run(["ls", "-l", str(folder)], check=True, stdout=subprocess.DEVNULL)
                    found[name].append(time.perf_counter() - began)
            finally:
                store.mstore("unmount", str(self.point))
        return {name: spread(values) for name, values in found.items()}

    def state(self, state: str, files: list[Path]) -> None:
        """Bring files at rest into a state."""
        if state == "cold":
            drop_cache(*files)
        else:
            for file in files:
                file.read_bytes()

    def round(self) -> dict[str, float]:
        """Every way in every place and state: MB/s, and what mounts took."""
        found: dict[str, float] = {}
        for state in ("cold", "cached"):
            for way in WAYS:
                if state == "cached" and way not in CACHED:
                    continue
                for place in self.places:
                    if way in PARTLY.get(place.name, WAYS):
                        self.one(found, way, place, state)
                if way in IN_PYTHON:
                    for codec, store in self.stores.items():
                        self.state(state, sorted(store.path.rglob("*.pack")))
                        taken = seconds(way, store.path, self.name)
                        found[f"{way} python {codec} {state}"] = self.nbytes / 1e6 / taken
        for place in self.places[2:]:
            self.state("cold", place.at_rest())
            with place.mounted() as mount:
                found[f"ready {place.name}"] = mount.ready
                found[f"first byte {place.name}"] = seconds("first byte", mount.folder)
        return found

    def one(self, found: dict[str, float], way: str, place: Place, state: str) -> None:
        """Note how fast one way reads one place in one state, and again when it is warm."""
        self.state(state, place.at_rest())
        megabytes = self.nbytes / 1e6 / (3 if way == "random" else 1)
        with place.mounted() as mount:
            before = mount.cpu()
            found[f"{way} {place.name} {state}"] = megabytes / seconds(way, mount.folder)
            if way == "read" and mount.pid is not None:
                taken = (mount.cpu() - before) / (self.nbytes / (1 << 30))
                found[f"cpu {place.name} {state}"] = taken
                found[f"memory {place.name} {state}"] = float(mount.memory())
            if state == "cold":
                if way == "random":
                    # It read a third: the rest must be there, too.
                    seconds("read", mount.folder)
                found[f"{way} {place.name} warm"] = megabytes / seconds(way, mount.folder)


def shares(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Median over the rounds of each speed as a share of that of the plain files."""
    found = {}
    for name in rounds[0]:
        way, *place, state = name.split()
        plain = f"{way} plain {state}"
        if way in WAYS and plain in rounds[0] and place != ["plain"]:
            found[name] = statistics.median(one[name] / one[plain] for one in rounds)
    return found


def main() -> None:
    arguments = options(__doc__, rounds=5, millions=300.0).parse_args()
    bench = Bench(arguments.work.absolute(), arguments.millions)
    rounds = [bench.round() for _ in range(arguments.rounds)]
    results: dict[str, Any] = {
        "machine": machine(),
        "millions": arguments.millions,
        "plain_bytes": bench.nbytes,
        "rounds": len(rounds),
        "versions": {name: version(name) for name in PEERS if shutil.which(name)},
        "figures": {name: spread([one[name] for one in rounds]) for name in rounds[0]},
        "of_plain": shares(rounds),
        "snapshots": SNAPSHOTS,
        "listings": bench.listings(arguments.rounds),
    }
    for path in arguments.work.glob("mounts-*"):
        shutil.rmtree(path)
    keep(arguments.results, "mounts", results)


def version(program: str) -> str:
    """What a program says of its version."""
    flag = "version" if program == "restic" else "--version"
    told = subprocess.run([program, flag], check=True, stdout=subprocess.PIPE, text=True).stdout
    return " ".join(told.split()[:2])


if __name__ == "__main__":
    main()
