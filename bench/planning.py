"""Planning a merge of 20 experts of an 8 B-parameter model, in a catalog without the data.

    python bench/planning.py WORK [--rounds 5] [--experts 20]

Writes and prints bench/results/planning.json.  What is real: the index rows of all blocks, tensor
records, manifests, snapshots and refs, and the statistics, each written and read by the library's
own code; the shapes are those of Llama 3 8B in bf16.  What is not: the blocks themselves (their
ids and lengths at rest are drawn at random) and the numbers in the statistics.  Planning reads no
block, so it does not notice.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from measure import keep, machine, median, options, run

BLOCK = 1 << 20
VOCABULARY = 128256
BINS = 2000
REQUESTS: dict[str, dict[str, Any]] = {
    "task_arithmetic, 30 %": {"method": "task_arithmetic", "budget": 0.3},
    "ties, 30 %": {"method": "ties", "parameters": {"density": 0.2}, "budget": 0.3},
    "dare_ties by conflict, 30 %": {"method": "dare_ties", "budget": 0.3, "score": "conflict"},
    "linear, error <= half": {"method": "linear", "max_error": 0.5},
}


@dataclass(frozen=True, slots=True)
class Llama:
    """A model of the shapes of Llama 3.  keys: rows of its key and value projections."""

    hidden: int
    inner: int
    layers: int
    keys: int = 1024

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors."""
        hidden, inner, keys = self.hidden, self.inner, self.keys
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            found |= {
                f"{at}.self_attn.q_proj.weight": (hidden, hidden),
                f"{at}.self_attn.k_proj.weight": (keys, hidden),
                f"{at}.self_attn.v_proj.weight": (keys, hidden),
                f"{at}.self_attn.o_proj.weight": (hidden, hidden),
                f"{at}.mlp.gate_proj.weight": (inner, hidden),
                f"{at}.mlp.up_proj.weight": (inner, hidden),
                f"{at}.mlp.down_proj.weight": (hidden, inner),
                f"{at}.input_layernorm.weight": (hidden,),
                f"{at}.post_attention_layernorm.weight": (hidden,),
            }
        return found | {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}


SIZES = {
    "8 B": Llama(4096, 14336, 32),
    "70 B": Llama(8192, 28672, 80),
    "405 B": Llama(16384, 53248, 126),
}


def make(
    path: Path,
    experts: int,
    model: Llama = SIZES["8 B"],
    own: Callable[[int, str], bool] = lambda number, tensor: True,
) -> None:
    """A store whose index, records and statistics are those of such a family.

    own: whether expert `number` has a tensor of its own, and not that of the base.
    """
    from mstore.blocks.packs import Kind, PackEntry, SealedPack
    from mstore.models.stats.store import StatsStore
    from mstore.models.stats.table import MeasuredPair, digest
    from mstore.store import refs
    from mstore.store.catalog import Catalog
    from mstore.store.objects.manifest import SAFETENSORS, File, Manifest, Part
    from mstore.store.objects.snapshot import BASE, Parent, SnapshotRecord
    from mstore.store.objects.tensor import Tensor
    from mstore.store.transaction import RefMove, Transaction
    from mstore.terms.ids import PackId

    rng = np.random.default_rng(0)
    catalog = Catalog.create(path, BLOCK)
    statistics = StatsStore(catalog.layout.stats)
    shapes = model.shapes()
    tables = {shape: _table(rng, math.prod(shape)) for shape in set(shapes.values())}
    base: dict[str, Any] = {}
    base_snapshot: Any = None
    for number, name in enumerate(["base", *(f"expert{k}" for k in range(experts))]):
        records = {}
        entries = []
        for tensor, shape in shapes.items():
            if number and not own(number - 1, tensor):
                records[tensor] = base[tensor]
                continue
            size = 2 * math.prod(shape)
            ids = rng.bytes(32 * -(-size // BLOCK))
            records[tensor] = Tensor("BF16", shape, size, ids)
            for at in range(0, len(ids), 32):
                plain = min(BLOCK, size - BLOCK * (at // 32))
                # As lengths would be if blocks were stored packed.
                stored = int(plain * rng.uniform(0.5, 1.0))
                entries.append(PackEntry(ids[at : at + 32], Kind.BLOCK, 1, 2, 4096, stored, plain))
        pack = SealedPack(PackId.of(name.encode()), path, 4096, tuple(entries))
        parents = (Parent(BASE, base_snapshot),) if number else ()
        with Transaction(catalog, "bench") as transaction:
            for record in records.values():
                transaction.put_record(record)
            # Merging reads the header.
            parts = [transaction.put_bytes(_header(records), "model.safetensors")]
            parts += [Part(own, one.id(), one.nbytes) for own, one in records.items()]
            size = sum(part.nbytes for part in parts)
            manifest = Manifest((File("model.safetensors", SAFETENSORS, size, tuple(parts)),))
            transaction.put_record(manifest)
            snapshot = SnapshotRecord(
                manifest.id(), parents, "add", None, "", None, None, "", number, "bench"
            )
            base_snapshot = base_snapshot or snapshot.id()
            transaction.commit(
                snapshots=[snapshot],
                moves=[RefMove(name, None, refs.Ref(refs.BRANCH, snapshot.id()), "bench")],
                also=lambda rows, pack=pack: catalog.index.insert_pack(rows, pack),
            )
        base = base or records
        for tensor, record in records.items():
            if record is not base[tensor]:
                table = _scaled(rng, tables[record.shape])
                row = digest(table.rows, table.elements, table.chunk_elements)
                pair = base[tensor].id(), record.id()
                statistics.put_pair(MeasuredPair(*pair, table.encode(), 1.0, row))
    statistics.flush()
    statistics.close()
    catalog.close()


def _header(records: dict[str, Any]) -> bytes:
    entries, at = {}, 0
    for tensor, record in records.items():
        end = at + record.nbytes
        entries[tensor] = {"dtype": "BF16", "shape": record.shape, "data_offsets": (at, end)}
        at = end
    raw = json.dumps(entries).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _table(rng: np.random.Generator, elements: int) -> Any:
    """Statistics with as many occupied bins as a fine-tune's deltas have."""
    from mstore.models.stats.chunk import CHUNK
    from mstore.models.stats.histogram import Histogram
    from mstore.models.stats.table import DeltaTable

    length = BLOCK // 2
    chunks = -(-elements // length)
    rows = np.zeros(chunks, dtype=CHUNK)
    rows["nonzeros"] = [min(length, elements - length * c) * 4 // 5 for c in range(chunks)]
    total = int(rows["nonzeros"].sum(dtype=np.int64))
    bins = np.arange(0x3500, 0x3500 + BINS, dtype=np.uint16)
    shares = np.exp(-(((np.arange(BINS) - 1300) / 300.0) ** 2))
    counts = np.floor(shares / shares.sum() * total).astype(np.int64)
    counts[1300] += total - counts.sum()
    bins, counts = bins[counts > 0], counts[counts > 0]
    histogram = Histogram(bins, counts.astype(np.uint64), np.zeros(len(bins), dtype=np.uint64))
    return DeltaTable(rows, histogram, elements, length)


def _scaled(rng: np.random.Generator, table: Any) -> Any:
    """The same with sums, maxima and directions drawn anew."""
    from mstore.models.stats.table import DeltaTable

    rows = table.rows.copy()
    size = rng.lognormal(0, 1, len(rows)) * 1e-3
    rows["sum_abs"] = size * rows["nonzeros"]
    rows["sum_squares"] = 2 * size**2 * rows["nonzeros"]
    rows["max_abs"] = 12 * size
    rows["base_squares"] = 1e-3 * rows["nonzeros"]
    rows["sketch"] = rng.normal(0, 20, (len(rows), 32))
    rows["sketch_exponent"] = -21
    return DeltaTable(rows, table.histogram, table.elements, table.chunk_elements)


def plan_once(path: Path, what: str) -> None:
    """Plan in this process, after everything is imported; prints seconds as JSON."""
    from mstore import MergeRequest
    from mstore.merge.planning import session
    from mstore.merge.planning.request import resolve
    from mstore.models.stats.store import StatsStore
    from mstore.store.catalog import Catalog
    from mstore.store.models import Input
    from mstore.store.objects.plan import OMITTED, READ

    catalog = Catalog.open(path)
    statistics = StatsStore(catalog.layout.stats)
    names = sorted(name for name in catalog.refs() if name != "base")
    weighted = [(name, 1 / len(names)) for name in names]
    asked = resolve(
        MergeRequest(base="base", experts=weighted, analyze=False, **REQUESTS[what]),
        base=Input(catalog.resolve("base"), "base"),
        experts=[Input(catalog.resolve(name), name) for name in names],
    )
    marks = [(time.perf_counter(), time.process_time())]

    def mark() -> None:
        marks.append((time.perf_counter(), time.process_time()))

    surveyor = session.Surveyor(catalog, statistics, asked, threads=1)
    survey = surveyor.survey()
    mark()
    planner = session.Planner(survey, asked)
    mark()
    planner.select()
    mark()
    whole = session.Planning(catalog, statistics, asked, threads=1).plan().plan
    mark()
    encoded = whole.encode()
    whole.id()
    mark()
    steps = ("survey", "rank", "select", "all again", "encode")
    print(
        json.dumps(
            {
                "seconds": {
                    step: [after[0] - before[0], after[1] - before[1]]
                    for step, before, after in zip(steps, marks, marks[1:], strict=False)
                },
                "tensors": len(survey.tensors),
                "chunks": sum(tensor.chunks for tensor in survey.tensors),
                "units": sum(
                    states.count(READ) + states.count(OMITTED)
                    for tensor in whole.tensors
                    for states in tensor.states
                ),
                "plan_bytes": len(encoded),
            }
        )
    )


def main() -> None:
    parser = options(__doc__, rounds=5, millions=8030)
    parser.add_argument("--experts", type=int, default=20)
    parser.add_argument("--once", help=argparse_suppressed())
    arguments = parser.parse_args()
    path = arguments.work / f"planning-{arguments.experts}"
    if arguments.once:
        plan_once(path, arguments.once)
        return
    if not path.exists():
        make(path, arguments.experts)
    results: dict[str, Any] = {"machine": machine(), "experts": arguments.experts}
    command = [sys.executable, __file__, str(arguments.work), "--experts", str(arguments.experts)]
    for what in REQUESTS:
        runs = [run([*command, "--once", what]) for _ in range(arguments.rounds)]
        found = [json.loads(one.output) for one in runs]
        steps = found[0]["seconds"]
        results[what] = {
            "process": median(runs),
            "cpu_seconds": {
                step: float(np.median([one["seconds"][step][1] for one in found])) for step in steps
            },
            "wall_seconds": {
                step: float(np.median([one["seconds"][step][0] for one in found])) for step in steps
            },
        } | {name: found[0][name] for name in ("tensors", "chunks", "units", "plan_bytes")}
    keep(arguments.results, "planning", results)


def argparse_suppressed() -> str:
    """Not an option for people."""
    import argparse

    return argparse.SUPPRESS


if __name__ == "__main__":
    main()
