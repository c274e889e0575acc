"""What a thread of this machine does for a slice: each part alone, by the library's own code.

The slices are real ones, of a real plan of a store of `near` fine-tunes (`generate.py`). `Here`
stands for a cluster: it computes a slice in this process when it is handed out, and keeps it.
"""

from __future__ import annotations

import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from cluster_events import BLOCK, Rates, Work

import mstore.merge.running.engine
from mstore import MergeRequest, Store, fs
from mstore.blocks import codecs
from mstore.blocks.codecs import Encoded
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import PackWriter
from mstore.blocks.reader import Meter
from mstore.merge.arithmetic.kernels import UNLIMITED, mix_chunk
from mstore.merge.methods import registry
from mstore.merge.running.compute import Computer
from mstore.merge.running.loading import LoadBuffers, load
from mstore.merge.running.runners import Cutter, execute
from mstore.merge.running.slices import Receipt, Slice, batches
from mstore.terms.ids import BlockId

DENSITY = 0.2
CALIBRATED = "50%"
"""The budget of the plan whose slices are measured; validation has another one."""
Figures = dict[str, Any]


class Here(Executor):
    """Computes slices in this process, one at a time, and keeps them with their receipts.

    most: slices to keep.
    """

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self.kept: list[tuple[Slice, Receipt]] = []
        self._max_workers = 1

    def submit(self, run: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(run(*given, **named))
        if run is execute and len(self.kept) < self.most:
            self.kept.append((given[0], future.result()))
        return future


@contextmanager
def cut_at(slice_bytes: int) -> Iterator[None]:
    """Have merges cut slices of so many bytes."""
    engine: Any = mstore.merge.running.engine
    engine.Cutter = lambda first, _, work: Cutter(first, slice_bytes, work)
    try:
        yield
    finally:
        engine.Cutter = Cutter


def asked(experts: int, budget: str, method: str = "ties") -> MergeRequest:
    """The merge that is measured."""
    names = [f"expert{number}" for number in range(experts)]
    return MergeRequest(
        base="base", experts=names, method=method, parameters={"density": DENSITY}, budget=budget
    )


def named(what: str) -> str:
    """A name that no merge had."""
    return f"{what}-{time.time_ns()}"


def work_of(slice: Slice) -> Work:
    """A slice as the simulation sees it. Requests are the kernel's here."""
    tasks = [task for run in slice.runs for task in run.chunks]
    blocks = sum(task.out_bytes for task in tasks) / BLOCK
    reads = sum(task.n * 2 * len(task.rows) for task in tasks) / BLOCK
    return Work(blocks, reads)


def timed(call: Callable[..., object], *given: object) -> float:
    """Processor seconds of this thread."""
    began = time.thread_time()
    call(*given)
    return time.thread_time() - began


# The parts ----------------------------------------------------------------------------------------


def parts(slices: Sequence[Slice], store: Path, scratch: Path) -> Figures:
    """Seconds for each MiB of a side, and bytes at rest of plain ones: medians over batches."""
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float, size: float) -> None:
        found.setdefault(name, []).append(seconds * BLOCK / size)

    shares = {"base": [0, 0], "delta": [0, 0], "out": [0, 0]}
    room = LoadBuffers()
    with closing(PackFiles(store / "packs")) as packs:
        for slice in slices:
            writer = PackWriter(scratch / f"{slice.number}.pack")
            for batch in batches(slice, slice.bounds.together):
                tasks = batch.tasks
                plain = sum(task.out_bytes for task in tasks)
                if plain < BLOCK:
                    continue
                alone = [_without_experts(task) for task in tasks]
                meters = Meter("expert"), Meter("base")
                base = timed(load, alone, packs, room, *meters)
                note("base", base, plain)
                rows = sum(len(task.rows) for task in tasks)
                if rows:
                    seconds = timed(load, tasks, packs, room, *meters) - base
                    note("delta", seconds, plain * rows / len(tasks))
                loaded = load(tasks, packs, room, *meters)
                for task in tasks:
                    _share(shares["base"], task.base.sources)
                    for row in task.rows:
                        _share(shares["delta"], row.sources)
                one, task = loaded[0], tasks[0]
                data = bytes(one.sides[0][: task.out_bytes])
                note("hash", timed(lambda d=data: blake3(d).digest()), task.out_bytes)
                done = Computer(packs, *meters).batch(batch)
                outputs = [o for o in done.outputs if o.encoded is not None]
                for output in outputs:
                    assert output.encoded is not None
                    stored = len(output.encoded.payload)
                    shares["out"][0] += stored
                    shares["out"][1] += BLOCK
                    note("write", _append(writer, output.id, output.encoded), BLOCK)
                pieces = done.buffer[:BLOCK].data
                if outputs and batch.slice.policy is not None:
                    elements = codecs.elements_of(task.tensor.out_dtype)
                    policy, of = batch.slice.policy, one.delta_base(0)
                    if len(of[1]) == BLOCK:
                        encode = timed(codecs.encode, pieces, elements, policy, of)
                        note("encode", encode, BLOCK)
            began = time.perf_counter()
            writer.seal()
            found.setdefault("seal", []).append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return medians | {f"{name}_share": at / plain for name, (at, plain) in shares.items()}


def _append(writer: PackWriter, id: BlockId, encoded: Encoded) -> float:
    return timed(writer.append_encoded, id, encoded, "", 0)


def _share(counts: list[int], sources: Sequence[Any]) -> None:
    counts[0] += sum(source.at.stored_length for source in sources)
    counts[1] += sum(source.at.raw_length for source in sources)


def _without_experts(task: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(task, rows=(), row_of=(-1,) * len(task.row_of))


def kernel(experts: Sequence[int] = (1, 4, 8, 20), rounds: int = 9) -> Figures:
    """Seconds of the kernel of ties for a MiB of output: with no expert, and for each more."""
    rng = np.random.default_rng(3)
    elements = BLOCK // 2
    most = max(experts)
    single = rng.normal(0, 0.02, elements).astype(np.float32)
    base = (single.view(np.uint32) >> 16).astype(np.uint16)
    rows = np.empty((most, BLOCK), np.uint8)
    for row in rows:
        moved = single + rng.normal(0, 2e-4, elements).astype(np.float32)
        row.view(np.uint16)[:] = moved.view(np.uint32) >> 16
    out, points = np.empty(BLOCK, np.uint8), []
    for count in experts:
        mix = registry.operation("ties", {"density": DENSITY}, [1.0] * count).mix()
        given = (
            *(mix, base.view(np.uint8), "BF16", rows[:count], ["BF16"] * count),
            *(np.arange(count, dtype=np.int64), elements, 0, np.full(count, 2.5e-4, np.float32)),
            *(np.full(count, UNLIMITED), np.zeros((count, 2), np.uint32), out, "BF16"),
        )
        mix_chunk(*given)
        points.append(statistics.median(timed(mix_chunk, *given) for _ in range(rounds)))
    each, none = np.polyfit(experts, points, 1)
    return {
        "mix": max(0.0, float(none)),
        "mix_each": float(each),
        "ns of an element and expert, 20": points[-1] / elements / most * 1e9,
    }


def starts(some: Slice, rounds: int = 9) -> Figures:
    """Seconds of what a worker does before the first block, and bytes of a pickled slice."""
    found: dict[str, list[float]] = {"unpickle": [], "open": [], "pickle": []}
    data = pickle.dumps(some)
    for _ in range(rounds):
        began = time.perf_counter()
        data = pickle.dumps(some)
        found["pickle"].append(time.perf_counter() - began)
        began = time.perf_counter()
        pickle.loads(data)
        found["unpickle"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with some.workplace.entered():
            pass
        found["open"].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in found.items()} | {
        "bytes": len(data)
    }


def upload(remote: str, size: int = 32 << 20) -> float:
    """Bytes a second of a put at the remote, which is a directory."""
    from mstore.remotes.shared_directory import SharedDirectory

    objects = SharedDirectory(Path(remote.removeprefix("file://")))
    piece, name = os.urandom(1 << 20), "packs/00/" + "0" * 64 + ".pack"
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        objects.put(name, size, [piece] * (size >> 20), jobs=4)
        taken.append(time.perf_counter() - began)
        objects.remove(name)
    return size / statistics.median(taken)


# All ----------------------------------------------------------------------------------------------


def measured(work: Path, experts: int, slice_bytes: int) -> Figures:
    """The rates, and what they are made of."""
    path, url = work / "store", f"file://{work}/remote"
    here = Here()
    with Store.open(path) as store, cut_at(slice_bytes):
        plan = store.plan(asked(experts, CALIBRATED))
        store.merge(
            plan, name=named("rates"), threads=1, memo=False, cluster=here, remote="origin",
            push=True,
        )  # fmt: skip
    kept = here.kept
    # Some in the middle: the first is the embedding, and warms up.
    some = [slice for slice, _ in kept[2 : 2 + 6]]
    with fs.scratch() as scratch:
        found = parts(some, work / "remote", scratch)
        put = upload(url)
    begun, mixed = starts(some[0]), kernel()
    rates = Rates(
        **{name: found[name] for name in ("base", "delta", "hash", "encode", "write", "seal")},
        **{name: mixed[name] for name in ("mix", "mix_each")},
        **{name: found[name] for name in ("base_share", "delta_share", "out_share")},
        block=0.0,
        start=begun["open"],
        start_source=begun["unpickle"] / work_of(some[0]).sources(),
    )
    # What the parts do not explain of whole slices, for each block of output.
    left = [
        (one.seconds - work_of(slice).seconds(rates) - rates.seal - rates.start
         - work_of(slice).put(rates) / put) / work_of(slice).blocks
        for slice, one in kept[1:]
    ]  # fmt: skip
    block = statistics.median(left)
    return {
        "calibrated at": CALIBRATED,
        "slices": len(kept),
        "rates": {
            name: getattr(rates, name) for name in Rates.__dataclass_fields__
        } | {"block": block},
        "put_bytes_s": put,
        "kernel": mixed,
        "start": begun | {"bytes for a source": begun["bytes"] / work_of(some[0]).sources()},
        "unexplained share": block * sum(work_of(s).blocks for s, _ in kept)
        / sum(one.seconds for _, one in kept),
    }  # fmt: skip
