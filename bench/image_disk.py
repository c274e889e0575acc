"""A disk of image models: 6 originals and 50 mixes, one file each, beside other programs.

    python bench/image_disk.py WORK [--divide 12] [--rounds 3] [--mecha FOLDER] [--peers PYTHON]

Writes and prints bench/results/image_disk.json.  The models have SDXL's 2,515 tensors, widths
divided, float16 (image_models.py); the mixes are made as a plain script makes them
(image_mixes.py).  WORK needs twice the disk, 6 GB; all is removed at the end.

Bytes: the files; the store after `add` of all files, in the order of their names and with the base
first; after `merge` of the mixes, stored and virtual.  Beside them restic, borg and hf-xet, as in
density.py.  Seconds: a mix as a process of each program in turn, page cache warm, each time another
weight; the store is the one with the originals.  `wide` is one kind of mix of larger models: what a
tensor takes whatever its size, as its name and records do, weighs nine times less there.  sd-mecha
is imported from FOLDER (`pip install --target FOLDER sd-mecha`), or where it is installed; without
it, it is left out and named.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import image_models as models
from density import BorgZstd, Restic, Xet, Zstd, missing, size_of, versions
from image_mixes import BASE, LORAS, Mix, mixes, write
from measure import Run, keep, machine, median, options, ready, run, spread
from store import Store as Program

from mstore import MergeRequest, Store

HERE = Path(__file__).parent
Figures = dict[str, Any]
KINDS = ("sum", "difference", "blocks", "lora")
BESIDE = (Restic, BorgZstd, Xet, Zstd)
MECHA = """
import json, sys
import sd_mecha, torch
mix, folder, base, out = json.loads(sys.argv[1]), *sys.argv[2:]
def model(name):
    return sd_mecha.model(f"{folder}/{name}.safetensors", config="sdxl-sgm")
one, other = model(mix["one"]), model(mix["other"])
if mix["kind"] == "sum":
    made = sd_mecha.weighted_sum(one, other, alpha=mix["weight"])
else:
    made = sd_mecha.add_difference(one, other, model(base), alpha=mix["weight"])
sd_mecha.merge(made, output=out, merge_device="cpu", merge_dtype=torch.float32,
               output_dtype=torch.float16)
"""
"""What it can do of `KINDS` with whole models: sums and differences."""


def make_disk(disk: Path, loras: Path, by: int, originals: int, made: Sequence[Mix]) -> None:
    """Write so many originals and the mixes, each from those that it is made of."""
    for folder in (disk, loras):
        folder.mkdir(parents=True)
    base = models.base(by)
    models.save(disk / f"{BASE}.safetensors", base, **{"modelspec.title": BASE})
    for tune in models.TUNES[: originals - 1]:
        title = {"modelspec.title": tune.name}
        models.save(disk / f"{tune.name}.safetensors", models.tuned(base, tune), **title)
    for seed, name in enumerate(LORAS):
        models.save(loras / f"{name}.safetensors", models.lora(by, 4, seed))
        # A mix finds all that it names in one folder.
        os.link(loras / f"{name}.safetensors", disk / f"{name}.safetensors")
    for mix in made:
        write(mix, disk, disk / f"{mix.name}.safetensors")
    for name in LORAS:
        (disk / f"{name}.safetensors").unlink()


def experts(mix: Mix) -> list[tuple[str, float]]:
    """The mix as a weighted sum of differences to the base, less those of the base itself."""
    own = 1 - mix.weight if mix.kind == "sum" else 1.0
    theirs = 1.0 if mix.kind == "blocks" else mix.weight
    return [(mix.one, own), (mix.other, theirs)]


def block_weights(mix: Mix) -> list[dict[str, float]]:
    """Those of both models, if the mix has any."""
    if mix.kind != "blocks":
        return []
    theirs = mix.blocks()
    return [{block: 1 - weight for block, weight in theirs.items()}, theirs]


def request(store: Store, mix: Mix) -> MergeRequest:
    """The mix, from Python."""
    given = block_weights(mix)
    rules = store.block_rules(BASE, experts(mix), given) if given else ()
    return MergeRequest(base=BASE, experts=experts(mix), method="task_arithmetic", rules=rules)


def words(mix: Mix) -> list[str]:
    """The mix, on the command line."""
    found = ["merge", "--base", BASE, "--method", "task_arithmetic", "--name", mix.name]
    found += [f"--expert={name}={weight}" for name, weight in experts(mix)]
    for weights in block_weights(mix):
        found.append("--blocks=" + ",".join(f"{name}={one}" for name, one in weights.items()))
    return found


class Bench:
    """The disk, and stores of it."""

    def __init__(
        self, work: Path, by: int, mecha: Path | None, originals: int, made: Sequence[Mix]
    ) -> None:
        self.work = work
        self.disk, self.loras = work / "disk", work / "loras"
        self.mecha = mecha
        self.mixes = made
        shutil.rmtree(work, ignore_errors=True)
        make_disk(self.disk, self.loras, by, originals, made)
        self.originals = [BASE, *(tune.name for tune in models.TUNES)][:originals]

    def file(self, name: str) -> str:
        return str((self.loras if name in LORAS else self.disk) / f"{name}.safetensors")

    def peer_environment(self) -> dict[str, str]:
        """Where sd-mecha is."""
        own = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return own if self.mecha is None else own | {"PYTHONPATH": str(self.mecha)}

    # -- bytes ---------------------------------------------------------------------------------

    def added(self, *more: str) -> Figures:
        """All files by one command, in the order of their names."""
        program = Program(self.work / "added")
        program.make(codec="auto")
        files = sorted(map(str, self.disk.iterdir()))
        ready(1, *self.disk.iterdir())
        done = program.mstore("--json", "add", *more, *files)
        told = json.loads(done.output)["added"]
        written = {one["name"]: one["bytes_written"] for one in told}
        plain = {one["name"]: one["plain_bytes"] for one in told}
        kinds = {mix.name: mix.kind for mix in self.mixes[:40]}
        shares: dict[str, list[float]] = {}
        for name, count in written.items():
            kind = "originals" if name in self.originals else kinds.get(name, "of mixes")
            shares.setdefault(kind, []).append(count / plain[name])
        return {
            "stored_bytes": size_of(program.path),
            "wall": done.wall,
            "cpu": done.cpu,
            "shares": {kind: statistics.fmean(ones) for kind, ones in shares.items()},
            "bases": sorted({ref for one in told if one["base"] for ref in one["base"]["refs"]}),
        }

    def with_originals(self, name: str) -> Program:
        """A store of the originals and LoRAs."""
        program = Program(self.work / name)
        program.make(codec="auto")
        program.mstore("add", "--base", BASE, *map(self.file, self.originals))
        for name in LORAS:
            program.mstore("add", self.file(name), "--base", BASE, "--name", name)
        return program

    def merged(self, *, virtual: bool) -> Figures:
        """The originals added and the mixes merged, in one process of Python."""
        program = self.with_originals("merged")
        before, seconds, cpu = size_of(program.path), list[float](), time.process_time()
        with Store.open(program.path) as store:
            for mix in self.mixes:
                began = time.perf_counter()
                plan = store.plan(request(store, mix), keep=True)
                store.merge(plan, name=mix.name, virtual=virtual)
                seconds.append(time.perf_counter() - began)
        after = size_of(program.path)
        found: Figures = {
            "originals_bytes": before,
            "stored_bytes": after,
            "bytes_a_mix": (after - before) / len(seconds),
            "seconds": spread(seconds),
            "cpu_a_mix": (time.process_time() - cpu) / len(seconds),
        }
        if virtual:
            found["mount"] = self.mounted(program)
        shutil.rmtree(program.path)
        return found

    def mounted(self, program: Program) -> Figures:
        """`mount --models`: the first listing, and reading a stored and a virtual model."""
        point = self.work / "mount"
        point.mkdir()
        done = program.mstore("mount", "--models", str(point))
        try:
            found: Figures = {"mount_wall": done.wall}
            began = time.perf_counter()
            listed = [(one.name, one.stat().st_size) for one in point.iterdir()]
            found["list_seconds"] = time.perf_counter() - began
            found["listed"] = len(listed)
            for key, name in (("original", "photo"), ("sum", "mix04"), ("of mixes", "mix49")):
                for turn in ("first", "again"):
                    began = time.perf_counter()
                    length = len((point / f"{name}.safetensors").read_bytes())
                    found[f"{key}, {turn}"] = time.perf_counter() - began
                found["read_bytes"] = length
        finally:
            program.mstore("unmount", str(point))
        return found

    def beside(self, peers: str | None) -> tuple[Figures, dict[str, str]]:
        """What other programs make of the files; and why some are left out."""
        found: Figures = {}
        left: dict[str, str] = {}
        for way in BESIDE:
            why = missing(way, peers)
            if why is not None:
                left[way.name] = why
                continue
            made = way(self.work / "beside")
            made.begin()
            done = made.add(self.disk)
            found[way.name] = {
                "stored_bytes": size_of(made.store),
                "wall": done.wall,
                "cpu": done.cpu,
            }
            shutil.rmtree(made.store)
        return found, left

    # -- seconds -------------------------------------------------------------------------------

    def mecha_version(self) -> str | None:
        """That of sd-mecha; None if it cannot be imported."""
        code = "import sd_mecha; from importlib.metadata import version; print(version('sd-mecha'))"
        asked, env = [sys.executable, "-c", code], self.peer_environment()
        done = subprocess.run(asked, env=env, check=False, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    def plain(self, mix: Mix) -> Run:
        """The script, as a process."""
        told = json.dumps(asdict(mix))
        script, out = str(HERE / "image_mixes.py"), self.work / "out.safetensors"
        try:
            return run([sys.executable, script, told, str(self.disk), str(out)])
        finally:
            out.unlink(missing_ok=True)

    def with_mecha(self, mix: Mix) -> Run:
        """sd-mecha, as a process."""
        out = self.work / "out.safetensors"
        asked = [json.dumps(asdict(mix)), str(self.disk), BASE, str(out)]
        try:
            return run([sys.executable, "-c", MECHA, *asked], env=self.peer_environment())
        finally:
            out.unlink(missing_ok=True)

    def timed(self, rounds: int, used: Sequence[Mix]) -> Figures:
        """All programs in turn, each of these mixes, another weight in each round.

        Also the bytes that the store grew by.
        """
        program = self.with_originals("timed")
        for name in LORAS:
            os.link(self.file(name), self.disk / f"{name}.safetensors")
        has_mecha = self.mecha_version() is not None
        found: Figures = {}
        for first in used:
            told: dict[str, list[Run]] = {}
            written: dict[str, list[int]] = {"merge": [], "virtual": []}
            for number in range(rounds):
                mix = replace(first, name=f"{first.kind}{number}", weight=0.31 + number / 50)
                virtual = replace(mix, name=f"{mix.name}v", weight=mix.weight + 0.01)
                ready(1, *map(Path, map(self.file, self.originals)))
                told.setdefault("plain", []).append(self.plain(mix))
                for way, asked in (("merge", words(mix)), ("virtual", words(virtual))):
                    before = size_of(program.path)
                    done = program.mstore(*asked, *(["--virtual"] if way == "virtual" else []))
                    written[way].append(size_of(program.path) - before)
                    told.setdefault(way, []).append(done)
                if has_mecha and mix.kind in ("sum", "difference"):
                    told.setdefault("sd-mecha", []).append(self.with_mecha(mix))
            found[first.kind] = {name: median(runs) for name, runs in told.items()}
            for way, counts in written.items():
                found[first.kind][way]["bytes"] = statistics.median(counts)
        for name in LORAS:
            (self.disk / f"{name}.safetensors").unlink()
        shutil.rmtree(program.path)
        return found


def plain_files(disk: Path) -> Sequence[int]:
    """The sizes of all files."""
    return [one.stat().st_size for one in sorted(disk.iterdir())]


def main() -> None:
    parser = options(__doc__, rounds=3, millions=0)
    parser.add_argument("--divide", type=int, default=12, help="the widths, by this")
    parser.add_argument("--wide", type=int, default=4, help="those of the few larger models")
    parser.add_argument("--mecha", type=Path, help="a folder that has sd-mecha")
    parser.add_argument("--peers", help="a Python that has hf_xet")
    given = parser.parse_args()
    work, every = given.work.absolute() / "image-disk", mixes()
    bench = Bench(work, given.divide, given.mecha, 1 + len(models.TUNES), every)
    sizes = plain_files(bench.disk)
    results: Figures = {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "versions": versions(given.peers),
        "divide": given.divide,
        "tensors": len(models.shapes()),
        "originals": len(bench.originals),
        "mixes": len(every),
        "plain_bytes": sum(sizes),
        "model_bytes": statistics.fmean(sizes),
    }
    ways: Figures = {}
    for name, more in (("added", ()), ("added, base first", ("--base", BASE))):
        ways[name] = bench.added(*more)
        shutil.rmtree(bench.work / "added")
    ways["merged"] = bench.merged(virtual=False)
    ways["virtual"] = bench.merged(virtual=True)
    results["ways"] = ways
    kinds = {mix.kind: mix for mix in every[38::-1]}
    results["seconds"] = bench.timed(given.rounds, [kinds[kind] for kind in KINDS])
    results["beside"], results["left_out"] = bench.beside(given.peers)
    shutil.rmtree(bench.work)
    bench = Bench(work, given.wide, given.mecha, 3, ())
    results["wide"] = {
        "divide": given.wide,
        "model_bytes": statistics.fmean(plain_files(bench.disk)),
        **bench.timed(given.rounds, [kinds["sum"]]),
    }
    version = bench.mecha_version()
    told = "left_out" if version is None else "versions"
    results[told]["sd-mecha"] = version or "cannot be imported"
    shutil.rmtree(bench.work)
    keep(given.results, "image_disk", results)


if __name__ == "__main__":
    main()
