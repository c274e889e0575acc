"""What a family takes on disk, and how fast it goes in and comes out, beside everybody else.

    python bench/density.py WORK [--rounds 3] [--peers PYTHON] [--small]

Writes and prints bench/results/density.json.  Two families of a base and eight experts: one
trained (examples/family.py, as in quality.py) and one generated (`generate.near`: noise of 1e-2,
3e-3 and 1e-3 of the weights' deviation, two experts with frozen layers).  WORK needs 20 GB; the
families stay there.  Every way stores base and experts one after the other and takes each out
again, byte for byte compared.  Page cache warm, all cores, what is stored is synced.

borg, restic and zstd are Debian's (`apt install borgbackup restic zstd`); what is not installed is
left out and named.  zipnn and hf-xet are taken from another Python: `python3 -m venv PEERS`,
`PEERS/bin/pip install zipnn hf_xet`, then `--peers PEERS/bin/python`.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "examples"))

from family import DOMAINS, FULL, QUICK, train_family
from generate import BASE, near, write_family
from measure import Run, keep, machine, options, run, warm_memory
from store import Store

HERE = Path(__file__).parent
WARM_GIGABYTES = 3
BASE_NAME = "base"
Figures = dict[str, Any]


class Way:
    """One way to keep a family.  `store` is where it keeps it, and what is measured.

    `add` and `read` are one command each; both are called in the family's order.
    """

    name: str
    needs: tuple[str, ...] = ()

    def __init__(self, store: Path) -> None:
        self.store = store

    def begin(self) -> None:
        """An empty store."""
        self.store.mkdir(parents=True)

    def add(self, model: Path) -> Run:
        raise NotImplementedError

    def read(self, name: str, out: Path) -> Run:
        """Into `out`, which is not there yet."""
        raise NotImplementedError


def shell(script: str, *words: object, env: dict[str, str] | None = None) -> Run:
    """A script of the shell; $1, $2 are `words`."""
    return run(["sh", "-ec", script, "sh", *map(str, words)], env=env)


class Plain(Way):
    """Copies."""

    name = "plain copies"

    def add(self, model: Path) -> Run:
        return shell('cp -r "$1" "$2" && sync -d "$2"/*', model, self.store / model.name)

    def read(self, name: str, out: Path) -> Run:
        return shell('cp -r "$1" "$2"', self.store / name, out)


class Mstore(Way):
    """A store of one policy."""

    codec: str

    def begin(self) -> None:
        Store(self.store).make(codec=self.codec)

    def add(self, model: Path) -> Run:
        return Store(self.store).add(model, model.name)

    def read(self, name: str, out: Path) -> Run:
        return Store(self.store).mstore("checkout", name, str(out))


class MstoreRaw(Mstore):
    name, codec = "mstore raw", "raw"


class MstoreAuto(Mstore):
    name, codec = "mstore auto", "auto"


class MstoreDense(Mstore):
    name, codec = "mstore dense", "dense"


class Borg(Way):
    """Chunks by content (about 2 MiB); not encrypted."""

    name, needs = "borg (lz4)", ("borg",)
    compression = "lz4"

    def _environment(self) -> dict[str, str]:
        kept = {"BORG_BASE_DIR": str(self.store / "home"), "BORG_REPO": str(self.store / "repo")}
        return {**os.environ, **kept, "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}

    def begin(self) -> None:
        super().begin()
        run(["borg", "init", "--encryption", "none"], env=self._environment())

    def add(self, model: Path) -> Run:
        script = 'cd "$1" && borg create --compression "$2" "::$3" .'
        return shell(script, model, self.compression, model.name, env=self._environment())

    def read(self, name: str, out: Path) -> Run:
        script = 'mkdir "$2" && cd "$2" && borg extract "::$1"'
        return shell(script, name, out, env=self._environment())


class BorgZstd(Borg):
    name, compression = "borg (zstd 3)", "zstd,3"


class Restic(Way):
    """Chunks by content (about 1 MiB), zstd; always encrypted."""

    name, needs = "restic (auto)", ("restic",)
    compression = "auto"

    def _environment(self) -> dict[str, str]:
        own = {"RESTIC_REPOSITORY": str(self.store / "repo"), "RESTIC_PASSWORD": "family"}
        cache = {"RESTIC_CACHE_DIR": str(self.store.parent / "restic-cache")}
        return {**os.environ, **own, **cache, "RESTIC_COMPRESSION": self.compression}

    def begin(self) -> None:
        super().begin()
        run(["restic", "init", "--repository-version", "2"], env=self._environment())

    def add(self, model: Path) -> Run:
        script = 'cd "$1" && restic backup --quiet --tag "$2" .'
        return shell(script, model, model.name, env=self._environment())

    def read(self, name: str, out: Path) -> Run:
        script = 'restic restore --quiet latest --tag "$1" --target "$2"'
        return shell(script, name, out, env=self._environment())


class ResticMax(Restic):
    name, compression = "restic (zstd max)", "max"


class Zstd(Way):
    """Every file for itself."""

    name, needs = "zstd -3", ("zstd",)

    def add(self, model: Path) -> Run:
        script = 'mkdir "$2" && zstd -3 -T0 -q --output-dir-flat "$2" "$1"/* && sync -d "$2"/*'
        return shell(script, model, self.store / model.name)

    def read(self, name: str, out: Path) -> Run:
        script = 'mkdir "$2" && zstd -d -q --output-dir-flat "$2" "$1"/*'
        return shell(script, self.store / name, out)


class Bitx(Way):
    """XOR with the base, byte planes, zstd 1: `bitx.py`."""

    name, level = "BitX (zstd 1)", "1"
    program = (sys.executable, str(HERE / "bitx.py"))

    def __init__(self, store: Path) -> None:
        super().__init__(store)
        self._plain_base: Path | None = None

    def add(self, model: Path) -> Run:
        base: list[str] = []
        if model.name == BASE_NAME:
            self._plain_base = model
        elif self._plain_base is not None:
            base = ["--base", str(self._plain_base)]
        out = str(self.store / model.name)
        return run([*self.program, "pack", str(model), out, "--level", self.level, *base])

    def read(self, name: str, out: Path) -> Run:
        base = [] if name == BASE_NAME else ["--base", str(self.store / BASE_NAME)]
        return run([*self.program, "unpack", str(self.store / name), str(out), *base])


class Bitx3(Bitx):
    name, level = "BitX (zstd 3)", "3"


class Peer(Way):
    """A package of another Python: `peers.py`."""

    python: str
    module: str
    peer: str

    def _run(self, verb: str, directory: Path, name: str) -> Run:
        words = [self.peer, verb, str(directory), str(self.store), name]
        return run([self.python, "-W", "ignore", str(HERE / "peers.py"), *words])

    def add(self, model: Path) -> Run:
        return self._run("pack", model, model.name)

    def read(self, name: str, out: Path) -> Run:
        return self._run("unpack", out, name)


class Zipnn(Peer):
    name, peer, module = "zipnn", "zipnn", "zipnn"


class Xet(Peer):
    name, peer, module = "hf-xet", "xet", "hf_xet"


WAYS: tuple[type[Way], ...] = (
    *(Plain, MstoreRaw, MstoreAuto, MstoreDense, Bitx, Bitx3),
    *(Borg, BorgZstd, Restic, ResticMax, Zstd, Zipnn, Xet),
)


def missing(way: type[Way], peers: str | None) -> str | None:
    """Why a way cannot be measured here, or None."""
    for program in way.needs:
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if issubclass(way, Peer):
        if peers is None:
            return "no --peers"
        way.python = peers
        found = subprocess.run(
            [peers, "-c", f"import {way.module}"], capture_output=True, check=False
        )
        return None if found.returncode == 0 else f"{way.module} cannot be imported"
    return None


def versions(peers: str | None) -> dict[str, str]:
    """Of the programs that are there."""
    asked = {
        "borg": ["borg", "--version"],
        "restic": ["restic", "version"],
        "zstd": ["zstd", "-V"],
    }
    for module in ("zipnn", "hf_xet") if peers else ():
        code = f"from importlib.metadata import version; print('{module}', version('{module}'))"
        asked[module] = [str(peers), "-c", code]
    found = {}
    for name, command in asked.items():
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, check=False, text=True)
            if done.returncode == 0:
                found[name] = done.stdout.strip().strip("*").strip()
    return found


@dataclass
class Told:
    """Stored bytes of a way, and its seconds in each round."""

    stored_bytes: int = 0
    after: list[int] = field(default_factory=list)
    add: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    add_cpu: list[float] = field(default_factory=list)
    read_cpu: list[float] = field(default_factory=list)


def size_of(directory: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def measure_way(made: Way, models: Sequence[Path], scratch: Path, told: Told) -> None:
    """One round of one way: all in, all out, compared."""
    shutil.rmtree(made.store, ignore_errors=True)
    made.begin()
    os.sync()
    told.after.clear()
    spent = [0.0, 0.0, 0.0, 0.0]
    warm_memory(WARM_GIGABYTES)
    for model in models:
        done = made.add(model)
        spent[0] += done.wall
        spent[1] += done.cpu
        told.after.append(size_of(made.store))
    told.stored_bytes = told.after[-1]
    for model in models:
        shutil.rmtree(scratch, ignore_errors=True)
        done = made.read(model.name, scratch)
        spent[2] += done.wall
        spent[3] += done.cpu
        names = [path.name for path in model.iterdir()]
        _, differ, odd = filecmp.cmpfiles(model, scratch, names, shallow=False)
        if differ or odd:
            raise SystemExit(f"{made.name} does not give back {model.name}: {differ + odd}")
    shutil.rmtree(scratch)
    shutil.rmtree(made.store)
    lists = (told.add, told.add_cpu, told.read, told.read_cpu)
    for values, value in zip(lists, spent, strict=True):
        values.append(value)


def family(models: Sequence[Path], work: Path, ways: Sequence[type[Way]], rounds: int) -> Figures:
    """All ways in turn, round by round."""
    plain = sum(size_of(model) for model in models)
    told = {way.name: Told() for way in ways}
    for _ in range(rounds):
        for way in ways:
            measure_way(way(work / "kept"), models, work / "out", told[way.name])
            print(way.name, told[way.name].stored_bytes, flush=True)
    return {
        "models": [model.name for model in models],
        "plain_bytes": plain,
        "ways": {name: figures(one, plain) for name, one in told.items()},
    }


def figures(told: Told, plain: int) -> Figures:
    """Of one way: bytes, and MB/s of plain bytes."""

    def rates(seconds: Sequence[float]) -> dict[str, float]:
        found = [plain / one / 1e6 for one in seconds]
        return {"median": statistics.median(found), "min": min(found), "max": max(found)}

    return {
        "stored_bytes": told.stored_bytes,
        "after_each": told.after,
        "add_mb_s": rates(told.add),
        "read_mb_s": rates(told.read),
        "add_cpu": statistics.median(told.add_cpu),
        "read_cpu": statistics.median(told.read_cpu),
    }


def trained(work: Path, experts: int, *, quick: bool) -> list[Path]:
    """Base and experts of the trained family, trained now if they are not there."""
    directory = work / ("family8quick" if quick else "family8")
    if not (directory / "family.json").exists():
        shutil.rmtree(directory, ignore_errors=True)
        train_family(directory, size=QUICK if quick else FULL, experts=len(DOMAINS))
    return [directory / name for name in (BASE_NAME, *(one.name for one in DOMAINS[:experts]))]


def generated(work: Path, millions: float, experts: int) -> list[Path]:
    """Base and experts of the generated family."""
    directory = work / f"near{millions:g}"
    models = [BASE, *(near(number) for number in range(experts))]
    write_family(directory, millions, models)
    return [directory / model.name for model in models]


def main() -> None:
    parser = options(__doc__, rounds=3, millions=300.0)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--peers", help="a Python that has zipnn and hf_xet")
    parser.add_argument("--only", nargs="*", help="names of ways")
    parser.add_argument(
        "--small", action="store_true", help="one round, one layer, two experts, untrained nearly"
    )
    given = parser.parse_args()
    if given.small:
        given.rounds, given.millions, given.experts = 1, 70.0, 2
    work = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    without = {way.name: missing(way, given.peers) for way in WAYS}
    ways = [w for w in WAYS if without[w.name] is None and (not given.only or w.name in given.only)]
    results: Figures = {
        "machine": machine(),
        "rounds": given.rounds,
        "millions": given.millions,
        "versions": versions(given.peers),
        "left_out": {name: why for name, why in without.items() if why is not None},
        "families": {},
    }
    for name, models in (
        ("trained", trained(work, given.experts, quick=given.small)),
        ("generated", generated(work, given.millions, given.experts)),
    ):
        results["families"][name] = family(models, work, ways, given.rounds)
    keep(given.results, "density", results)


if __name__ == "__main__":
    main()
