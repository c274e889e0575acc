"""A model from the Hub: `mstore add hf://...` beside `hf download`, alone and with `mstore add`.

    python bench/hub.py WORK [--gib 2] [--rounds 5]

The Hub is the small one of the tests, in a process of its own: it answers from memory, on loopback
as fast as it can, and then at 1 Gbit/s for all connections together.  Each round runs each way
once, into a new directory or store.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from measure import RESULTS, Run, keep, machine, run, spread
from ml_dtypes import bfloat16
from remote import free_port, serving
from safetensors.numpy import save_file

ROOT = Path(__file__).parent.parent
MODEL = "org/model"
GIGABIT = 125e6
"""Bytes a second."""


SHARDS = 4
ROWS = 1024


def written(directory: Path, gibibytes: float) -> int:
    """Write a model of weights as those of a trained one are spread, in bfloat16; its bytes."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    # A tensor is 8 MiB.
    tensors = max(1, int(gibibytes * 128 / SHARDS))
    weight_map = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        made = {
            f"layer{shard}.part{part}": (
                rng.standard_normal((ROWS, 4096), dtype=np.float32) * np.float32(0.02)
            ).astype(bfloat16)
            for part in range(tensors)
        }
        save_file(made, directory / file)
        weight_map |= dict.fromkeys(made, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "none"}')
    return sum(path.stat().st_size for path in directory.iterdir())


class _Pace:
    """A rate for all threads together."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._lock = threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self._rate
            wait = self._free - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def serve(directory: Path, port: int, rate: float) -> None:
    """Serve a directory as a model, until the end of the process."""
    sys.path.insert(0, str(ROOT / "tests"))
    import hub

    made = hub.Hub(port)
    made.model(MODEL, hub.directory_files(directory))
    made.entries(MODEL)
    if rate:
        made.pace = _Pace(rate)
    with made.running():
        threading.Event().wait()


class _Watch:
    """The most bytes beside the packs, in the store and below other directories, while it runs."""

    def __init__(self, *directories: Path) -> None:
        self._directories = directories
        self.most = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.1):
                self.most = max(self.most, sum(map(_beside, self._directories)))

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _beside(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            if path.is_file() and path.suffix != ".pack" and path.name != "data.mdb":
                total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


def measured(work: Path, url: str, rounds: int) -> dict[str, Any]:
    """Each way, `rounds` times in turn."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(work / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    here = Path(sys.executable).parent
    told: dict[str, list[dict[str, float]]] = {}

    def once(way: str, *commands: Sequence[str], store: Path | None = None) -> None:
        watch = _Watch(work / "hf", *([] if store is None else [store]))
        with watch.on():
            runs: list[Run] = [run(command, env=environment) for command in commands]
        told.setdefault(way, []).append(
            {
                "wall": sum(one.wall for one in runs),
                "cpu": sum(one.cpu for one in runs),
                "anonymous": max(one.anonymous for one in runs),
                "beside": watch.most,
            }
        )

    for _ in range(rounds):
        plain = work / "plain"
        download = [str(here / "hf"), "download", MODEL, "--local-dir", str(plain)]
        once("hf download", download)
        for codec in ("raw", "auto"):
            store = work / f"store-{codec}"
            program = [str(here / "mstore"), "--store", str(store)]
            subprocess.run([*program, "init", "--quiet"], check=True)
            add = [*program, "add", f"hf://{MODEL}", "--name", "x", "--codec", codec, "--quiet"]
            once(f"mstore add, {codec}", add, store=store)
            shutil.rmtree(store)
            subprocess.run([*program, "init", "--quiet"], check=True)
            add = [*program, "add", str(plain), "--name", "x", "--codec", codec, "--quiet"]
            once(f"add of the directory, {codec}", add, store=store)
            shutil.rmtree(store)
        shutil.rmtree(plain)
    return {
        way: {
            "wall": spread([one["wall"] for one in runs]),
            "cpu": spread([one["cpu"] for one in runs]),
            "ratio": spread(
                [
                    one["wall"] / plain["wall"]
                    for one, plain in zip(runs, told["hf download"], strict=True)
                ]
            ),
            "beside": max(one["beside"] for one in runs),
            "anonymous": statistics.median(one["anonymous"] for one in runs),
        }
        for way, runs in told.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="directory on a local disk")
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    model = work / "model"
    size = written(model, arguments.gib)
    results: dict[str, Any] = {"machine": machine(), "bytes": size, "rounds": arguments.rounds}
    results["shard"] = max(path.stat().st_size for path in model.iterdir())
    results["load_average"] = {"before": os.getloadavg()[0]}
    for name, rate in (("loopback", 0.0), ("gigabit", GIGABIT)):
        port = free_port()
        command = [sys.executable, __file__, "--serve", str(model), str(port), str(rate)]
        with serving(command, port):
            results[name] = measured(work, f"http://127.0.0.1:{port}", arguments.rounds)
    results["load_average"]["after"] = os.getloadavg()[0]
    shutil.rmtree(work)
    keep(arguments.results, "hub", results)


if __name__ == "__main__":
    main()
