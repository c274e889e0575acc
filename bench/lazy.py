"""Lazy stores over a slow link: clone, plan, merge, mount and load, beside s5cmd and mergekit.

    python bench/lazy.py WORK [--rounds 2] [--millions 70] [--packs 8000] [--mergekit PROGRAM]
        [--only loads merges peer scale] [--small]

Writes and prints bench/results/lazy.json. Needs root, for the link (`link.py`), and s5cmd on the
path; without mergekit's `mergekit-yaml`, the peer is s5cmd alone. WORK needs 20 GB; the family and
its store stay there for the next run. The bucket is `bucket_server.py`, in memory, at the far end
of the link. What is there before a measurement was pushed from that end, past the link.

Every step is a process of its own: wall seconds, processor seconds of user and system, and what the
bucket was asked for meanwhile, by the first part of names.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import remote_scale
from generate import BASE, Model, write_family
from link import Link
from measure import Run, keep, machine, options, run, spread
from mergekit import merged_by, peer_versions
from mounts import Mounted
from remote import BUCKET, JOBS, NOISE, Bucket, environment, free_port, s5cmd_down, serving, tune
from remote import versions as peers_there
from store import Store

HERE = Path(__file__).parent
MEGABITS, MILLISECONDS = 200, 20
EXPERTS = 20
DENSITY, BUDGET = 0.5, "10%"
TOKENIZER_BYTES = 2_000_000
TENSOR = "model.layers.0.self_attn.q_proj.weight"
PARTS = ("loads", "merges", "peer", "scale")
URL = f"s3://{BUCKET}/family"
SCALE_URL = f"s3://{BUCKET}/scale"
Figures = dict[str, Any]

LOAD = """
import sys
from mstore import Store
with Store.open(sys.argv[1]) as store:
    store[sys.argv[2]].load()
"""
LOAD_FILES = """
import sys
from pathlib import Path
import ml_dtypes
from safetensors.numpy import load_file
kept = [load_file(path) for path in sorted(Path(sys.argv[1]).glob("*.safetensors"))]
"""
ONE_TENSOR = """
import sys
from mstore import Store
with Store.open(sys.argv[1]) as store, store[sys.argv[2]].safe_open("np") as file:
    file.get_tensor(sys.argv[3])
"""
OPEN_TABLES = """
import sys, time
from pathlib import Path
from mstore.blocks.elsewhere import RemoteBlocks
began = time.perf_counter()
assert RemoteBlocks([("origin", Path(sys.argv[1]))]).locate([bytes(32)]) == [None]
print(time.perf_counter() - began)
"""


class Bench:
    """The bucket at the far end, and the family in it: as a remote, and as plain files."""

    def __init__(self, work: Path, link: Link, place: Bucket, given: Namespace) -> None:
        self.work, self.link, self.place = work, link, place
        self.millions, self.experts = given.millions, given.experts
        self.family = work / f"tunes{self.millions:g}"
        self.store = Store(work / f"lazy-store{self.millions:g}-{self.experts}")
        self.clone = Store(work / "lazy-clone")

    def model(self, number: int) -> Path:
        """The plain files of an expert; the base is -1."""
        return self.family / ("base" if number < 0 else f"expert{number}")

    def make(self) -> None:
        """The family, its store, and one expert more that is in neither."""
        models: list[Model] = [BASE, *map(tune, range(self.experts + 1))]
        write_family(self.family, self.millions, models)
        for model in models:
            words = random.Random(0).randbytes(TOKENIZER_BYTES // 2).hex()
            (self.family / model.name / "tokenizer.json").write_text(words)
        if not self.store.path.exists():
            half = Store(self.store.path.with_name("half"))
            half.make(codec="auto")
            for number in range(-1, self.experts):
                half.add(self.model(number), self.model(number).name)
            half.path.rename(self.store.path)
        pushing = self.store.duplicate(self.work / "lazy-pushing")
        self.pushing = pushing

    def push(self) -> None:
        """What is new in the store goes to the bucket, from the far end."""
        words = ["push", str(self.pushing.path), URL, str(JOBS)]
        command = [sys.executable, "-P", str(HERE / "exchanged.py"), *words]
        run(self.link.beyond(command))
        self.place.requests()

    def put(self, directory: Path, where: str) -> None:
        """Put the files of a directory, from the far end."""
        command = ["s5cmd", "cp", f"{directory}/", f"s3://{BUCKET}/{where}/"]
        run(self.link.beyond(command))
        self.place.requests()

    def plain_names(self, numbers: Sequence[int]) -> list[str]:
        """The objects of models' plain files."""
        return [
            f"{BUCKET}/plain/{self.model(number).name}/{file.name}"
            for number in numbers
            for file in sorted(self.model(number).iterdir())
        ]

    def cloned(self, url: str = URL) -> Figures:
        """A lazy clone, in place of the one that is there."""
        shutil.rmtree(self.clone.path, ignore_errors=True)
        program = [sys.executable, "-P", "-m", "mstore_cli", "--no-progress"]
        return self.told(lambda: run([*program, "clone", "--lazy", url, str(self.clone.path)]))

    def without_cache(self) -> None:
        """The clone as if it had read nothing."""
        shutil.rmtree(self.clone.path / "cache", ignore_errors=True)

    def told(self, call: Callable[[], Run | Figures]) -> Figures:
        """A step, with what the bucket was asked for."""
        self.place.requests()
        done = call()
        found = figures(done) if isinstance(done, Run) else done
        return found | {"traffic": traffic(self.place.requests())}

    @contextmanager
    def mounted(self, ref: str) -> Iterator[Mounted]:
        """A mount of the clone."""
        point = self.work / "lazy-mount"
        point.mkdir(exist_ok=True)
        taken = self.clone.mstore("mount", ref, str(point)).wall
        try:
            every = json.loads(self.clone.mstore("--json", "mounts").output)["mounts"]
            (pid,) = [one["pid"] for one in every if one["mountpoint"] == str(point)]
            yield Mounted(point, taken, pid)
        finally:
            self.clone.mstore("unmount", str(point))


def figures(done: Run) -> Figures:
    """Of a process."""
    return {"wall": done.wall, "cpu": done.cpu, "anonymous": done.anonymous}


def traffic(requests: Sequence[tuple[str, str, int, int]]) -> dict[str, Figures]:
    """Requests and bytes given, by the first part of the name."""
    found: dict[str, Figures] = {}
    for _, name, _, given in requests:
        kind = name.split("/")[2]
        one = found.setdefault(kind, {"requests": 0, "bytes": 0})
        one["requests"] += 1
        one["bytes"] += given
    return dict(sorted(found.items()))


def python(code: str, *words: str) -> Run:
    """A program of Python, in a process of its own."""
    return run([sys.executable, "-P", "-c", code, *words])


# What is measured ---------------------------------------------------------------------------------


def the_link(bench: Bench) -> Figures:
    """What the link does: a round trip, and one download of 64 MiB by eight ranges."""
    code = """
import json, socket, sys, time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen
host, port, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
trips = []
for _ in range(9):
    began = time.perf_counter()
    socket.create_connection((host, port)).close()
    trips.append(time.perf_counter() - began)
def get(number):
    asked = {"Range": f"bytes={number << 23}-{((number + 1) << 23) - 1}"}
    return len(urlopen(Request(f"http://{host}:{port}/{name}", headers=asked)).read())
began = time.perf_counter()
with ThreadPoolExecutor(8) as pool:
    got = sum(pool.map(get, range(8)))
print(json.dumps({"round_trip": sorted(trips)[4], "rate": got / (time.perf_counter() - began)}))
"""
    name = f"{BUCKET}/plain/probe/probe"
    (bench.work / "probe").mkdir(exist_ok=True)
    (bench.work / "probe" / "probe").write_bytes(bytes(1 << 26))
    bench.put(bench.work / "probe", "plain/probe")
    shutil.rmtree(bench.work / "probe")
    host, port = bench.place.endpoint.removeprefix("http://").split(":")
    found: Figures = json.loads(python(code, host, port, name).output)
    return {"megabits": MEGABITS, "milliseconds": MILLISECONDS, **found}


def merges(bench: Bench, rounds: int) -> list[Figures]:
    """A merge under a budget from nothing, and again with one expert more."""
    told: list[Figures] = []
    extra = bench.experts
    for number in range(rounds):
        if number:
            shutil.rmtree(bench.pushing.path)
            bench.place.clear()
            bench.pushing = bench.store.duplicate(bench.work / "lazy-pushing")
            bench.push()
        found: Figures = {"clone": bench.cloned()}
        found |= merged(bench, bench.experts, "merged")
        bench.pushing.add(bench.model(extra), bench.model(extra).name)
        bench.push()
        again: Figures = {"pull": bench.told(lambda: bench.clone.mstore("pull"))}
        again |= merged(bench, extra + 1, "again")
        found["one more"] = again
        told.append(found)
        print(number, found, file=sys.stderr, flush=True)
    return told


def merged(bench: Bench, experts: int, name: str) -> Figures:
    """Plan and merge in the clone."""
    words = [f"--expert=expert{number}" for number in range(experts)]
    words += ["--base=base", "--method=ties", f"--param=density={DENSITY}", f"--budget={BUDGET}"]
    plans: list[str] = []
    reports: list[Figures] = []

    def plan() -> Run:
        done = bench.clone.mstore("--json", "plan", *words)
        plans.append(json.loads(done.output)["plan"])
        return done

    def merge() -> Run:
        done = bench.clone.mstore("--json", "merge", "--plan", plans[0], "--name", name)
        reports.append(json.loads(done.output))
        return done

    found: Figures = {"plan": bench.told(plan), "merge": bench.told(merge)}
    keys = ("budget_bytes", "full_expert_bytes", "expert_bytes_read", "memo_expert_bytes")
    more = ("base_bytes_read", "remote_bytes", "analyze_bytes_read")
    return found | {key: reports[0][key] for key in (*keys, *more)}


def peer(bench: Bench, mergekit: Path | None) -> Figures:
    """s5cmd of all plain files, then mergekit on them, once."""
    names = bench.plain_names(range(-1, bench.experts))
    for number in range(-1, bench.experts):
        bench.put(bench.model(number), f"plain/{bench.model(number).name}")
    fetched = bench.work / "lazy-fetched"
    found: Figures = {"s5cmd": bench.told(lambda: s5cmd_down(names, fetched, bench.place.endpoint))}
    shutil.rmtree(fetched)
    if mergekit is not None:
        experts = [
            {
                "model": str(bench.model(number)),
                "parameters": {"density": DENSITY, "weight": 1.0},
            }
            for number in range(bench.experts)
        ]
        recipe = {
            "merge_method": "ties",
            "dtype": "bfloat16",
            "base_model": str(bench.model(-1)),
            "models": experts,
        }
        found["mergekit"] = figures(merged_by(mergekit, recipe, bench.work, bench.family))
    print(found, file=sys.stderr, flush=True)
    return found


def loads(bench: Bench, rounds: int) -> Figures:
    """A whole expert, and small things, each with an empty cache; beside s5cmd of its files."""
    ref = "expert0"
    bench.put(bench.model(0), f"plain/{ref}")
    names = bench.plain_names([0])
    fetched = bench.work / "lazy-fetched"
    path = str(bench.clone.path)

    def through_mount(read: Callable[[Path], Run]) -> Figures:
        bench.without_cache()
        with bench.mounted(ref) as mount:
            before = mount.cpu()
            found = bench.told(lambda: read(mount.folder))
            return found | {"cpu": found["cpu"] + mount.cpu() - before}

    def plainly() -> Figures:
        down = s5cmd_down(names, fetched, bench.place.endpoint)
        then = figures(python(LOAD_FILES, str(fetched)))
        shutil.rmtree(fetched)
        found = {key: down[key] + then[key] for key in ("wall", "cpu")}
        return found | {"download": down["wall"]}

    def afresh(call: Callable[[], Run]) -> Figures:
        bench.without_cache()
        return bench.told(call)

    cat = 'cat "$1"/*.safetensors > /dev/null'
    works: dict[str, Callable[[], Figures]] = {
        "mount, cat": lambda: through_mount(lambda at: run(["sh", "-ec", cat, "sh", str(at)])),
        "mount, safetensors": lambda: through_mount(lambda at: python(LOAD_FILES, str(at))),
        "Snapshot.load": lambda: afresh(lambda: python(LOAD, path, ref)),
        "s5cmd, safetensors": lambda: bench.told(plainly),
        "cat config.json": lambda: afresh(lambda: bench.clone.mstore("cat", f"{ref}:config.json")),
        "cat tokenizer.json": lambda: afresh(
            lambda: bench.clone.mstore("cat", f"{ref}:tokenizer.json")
        ),
        "safe_open, one tensor": lambda: afresh(lambda: python(ONE_TENSOR, path, ref, TENSOR)),
    }
    told: dict[str, list[Figures]] = {name: [] for name in works}
    bench.cloned()
    for _ in range(rounds):
        for name, work in works.items():
            told[name].append(work())
            print(name, told[name][-1], file=sys.stderr, flush=True)
    return {
        name: {
            key: spread([one[key] for one in runs])
            for key in ("wall", "cpu", "download")
            if key in runs[0]
        }
        | {"traffic": runs[-1]["traffic"]}
        for name, runs in told.items()
    } | {"plain_bytes": sum(file.stat().st_size for file in bench.model(0).iterdir())}


def scale(bench: Bench, packs: int) -> Figures:
    """A lazy clone of a simulated remote, of packs that do not exist."""
    work = bench.work / "lazy-scale"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    there = work / "remote"
    real = Store(work / "real")
    real.make(block_size=remote_scale.BLOCK)
    real.mstore("add", str(remote_scale.model(work / "model", 0)), "--name", "real")
    real.mstore("remote", "add", "origin", there.as_uri())
    real.mstore("push", "origin", "real")
    remote_scale.simulate(there.as_uri(), work / "simulating", packs, refs=0)
    # In a bucket the newest root has a name of its own.
    newest = max((there / "roots").iterdir())
    (work / "root").mkdir()
    newest.rename(work / "root" / "mstore-remote")
    for name in ("lists", "tables", "packs", "stats"):
        if (there / name).exists():
            bench.put(there / name, f"scale/{name}")
    bench.put(work / "root", "scale")
    done = bench.cloned(SCALE_URL)
    tables = bench.clone.path / "remotes" / "origin" / "places"
    opens = [float(python(OPEN_TABLES, str(tables)).output) for _ in range(5)]
    found = {
        "packs": packs,
        "blocks": packs * remote_scale.PACK_BLOCKS,
        "clone": done,
        "open": spread(opens),
        "segments_bytes": sum(one.stat().st_size for one in tables.iterdir()),
    }
    shutil.rmtree(work)
    return found


def main() -> None:
    parser = options(__doc__, rounds=2, millions=70.0)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--packs", type=int, default=8000, help="of 125 blocks each")
    parser.add_argument("--mergekit", type=Path, help="its mergekit-yaml")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--small", action="store_true", help="four experts, 400 packs, one round")
    given = parser.parse_args()
    if given.small:
        given.rounds, given.experts, given.packs = 1, 4, 400
    work = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    kept = given.results / "lazy.json"
    results: Figures = json.loads(kept.read_text()) if kept.exists() else {}
    results |= {"machine": machine(), "noise": NOISE}
    results.setdefault("versions", {}).update(peers_there(None))
    if given.mergekit is not None:
        results["versions"] |= peer_versions(given.mergekit)
    with Link(MEGABITS, MILLISECONDS).up() as link:
        port = free_port()
        server = [sys.executable, str(HERE / "bucket_server.py"), str(port), link.host]
        with serving(link.beyond(server), port, link.host):
            place = Bucket(port, link.host)
            os.environ.update(environment(place.endpoint))
            bench = Bench(work, link, place, given)
            bench.make()
            bench.push()
            results["link"] = the_link(bench)
            stored = [path.stat().st_size for path in bench.store.path.rglob("*.pack")]
            results["family"] = {
                "experts": given.experts,
                "millions": given.millions,
                "plain_bytes": sum(
                    file.stat().st_size
                    for number in range(-1, given.experts)
                    for file in bench.model(number).iterdir()
                ),
                "stored_bytes": sum(stored),
            }
            parts: dict[str, Callable[[], Any]] = {
                "loads": lambda: loads(bench, given.rounds),
                "merges": lambda: merges(bench, given.rounds),
                "peer": lambda: peer(bench, given.mergekit),
                "scale": lambda: scale(bench, given.packs),
            }
            for name in given.only:
                results.setdefault("load_average", {})[name] = os.getloadavg()[0]
                results[name] = parts[name]()
            for one in (bench.pushing, bench.clone):
                shutil.rmtree(one.path, ignore_errors=True)
    keep(given.results, "lazy", results)


if __name__ == "__main__":
    main()
