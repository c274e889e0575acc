"""One flipped byte in the statistics or the memo table: the same plan, the same merge, or an error.

As in test_flips.py a nursery process forks a worker for each flip, because LMDB trusts its file.
What the worker plans and merges must be what the sound store gives; a worker that a signal ends
gave no wrong answer.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import lmdb
import numpy as np
import pytest
from checkpoints import write_safetensors
from test_flips import PATIENCE, Flip, turn

from mstore import MergeRequest
from mstore.api import Store
from mstore.blocks.tables import CHECK_BYTES
from mstore.terms.errors import MstoreError

BLOCK = 1 << 16
ELEMENTS = 40_000
DATABASES = {
    "stats": ("pairs", "tables", "squares", "digests", "cuts", "thresholds", "ties"),
    "memo": ("outputs", "requests", "outcomes"),
}


def small_store(root: Path) -> Path:
    """A base and two experts, and TIES merges of them; both tables have rows of each kind."""
    draw = np.random.default_rng(7)
    base = draw.standard_normal(ELEMENTS, dtype=np.float32)
    with Store.init(root / "store", block_size=BLOCK, codec="raw") as store:
        for name, scale in (("base", 0.0), ("one", 0.01), ("two", 0.02)):
            values = base + np.float32(scale) * draw.standard_normal(ELEMENTS, dtype=np.float32)
            write_safetensors(
                root / name / "model.safetensors", [("w", "F32", (ELEMENTS,), values.tobytes())]
            )
            store.add(root / name, name=name, threads=1)
        _plan_and_merge(store, "merged")
    for name in DATABASES:
        _compact(root / "store" / name)
    return root / "store"


def _compact(path: Path) -> None:
    """Leave only pages that are in use: a flip elsewhere proves nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as copy:
        with lmdb.open(str(path), readonly=True, lock=False, max_dbs=16) as env:
            env.copy(copy, compact=True)
        (Path(copy) / "data.mdb").replace(path / "data.mdb")
    (path / "lock.mdb").unlink()


def _plan_and_merge(store: Store, name: str) -> list[str]:
    ids = []
    # Without a budget it takes exact thresholds, with one the norms of chunks.
    for budget in (None, 300_000):
        plan = store.plan(
            MergeRequest(
                base="base",
                experts=["one", "two"],
                method="ties",
                parameters={"density": 0.2},
                budget=budget,
            ),
            threads=1,
        )
        merged = store.merge(plan, name=f"{name}-{budget or 'all'}", threads=1)
        ids += [str(plan.plan), str(merged.manifest)]
    return ids


def outcome(root: Path) -> str:
    """PlanIds and ManifestIds, or the error."""
    try:
        with Store.open(root) as store:
            return " ".join(_plan_and_merge(store, "again"))
    except MstoreError as error:
        return f"error: {type(error).__name__}: {error.where}: {error.what}"


def nursery(pristine: str) -> None:
    """Read lines `[file, offset, bits]` to the end of stdin; answer each with a line."""
    tasks = [json.loads(line) for line in sys.stdin]
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "store"
        for task in (None, *tasks):
            shutil.copytree(pristine, root)
            if task is None:
                # Here and not in a child, so that the children find the kernels loaded.
                print(json.dumps(outcome(root)), flush=True)
            else:
                print(json.dumps(_in_a_child(root, Flip(*task))), flush=True)
            shutil.rmtree(root)


def _in_a_child(root: Path, flip: Flip) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(PATIENCE)
        if not flip.file.startswith("memo"):
            # It knows the plan of this request, and would ask no statistics.
            shutil.rmtree(root / "memo")
        turn(root / flip.file, flip.offset, flip.bits)
        os.write(writer, outcome(root).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read()
    _, status = os.waitpid(child, 0)
    if not status:
        return told
    return f"died: {signal.Signals(status & 127).name if status & 127 else status}"


def ask(store: Path, flips: list[Flip]) -> tuple[str, list[str]]:
    """What the sound store gives, and what comes of each flip."""
    code = "import sys, test_flips_at_rest; test_flips_at_rest.nursery(sys.argv[1])"
    processes = []
    for share in (flips[::2], flips[1::2]):
        with tempfile.TemporaryFile("w+") as lines:
            for flip in share:
                print(json.dumps([flip.file, flip.offset, flip.bits]), file=lines)
            lines.seek(0)
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code, str(store)],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                    stdin=lines,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
    answers = [""] * len(flips)
    for number, process in enumerate(processes):
        assert process.stdout is not None
        with process:
            truth, *told = [json.loads(line) for line in process.stdout]
        assert process.returncode == 0
        answers[number::2] = told
    return truth, answers


def places(store: Path) -> dict[str, list[tuple[str, int]]]:
    """Database -> each byte of its rows' values, as file and offset."""
    found: dict[str, list[tuple[str, int]]] = {}
    for area, names in DATABASES.items():
        data = (store / area / "data.mdb").read_bytes()
        with lmdb.open(str(store / area), readonly=True, lock=False, max_dbs=16) as env:
            for name in names:
                database = env.open_db(name.encode(), create=False)
                with env.begin() as reading, reading.cursor(db=database) as cursor:
                    values = [value for _, value in cursor]
                starts = [(data.index(value), len(value)) for value in values]
                found[name] = [
                    (f"{area}/data.mdb", at)
                    for start, n in starts
                    for at in range(start, start + n)
                ]
    return found


def violations(store: Path, flips: list[Flip]) -> tuple[list[str], Counter[str]]:
    """What should not have come of some flips, and how often what came."""
    truth, answers = ask(store, flips)
    assert " " in truth
    assert not truth.startswith("error")
    wrong, counts = [], Counter[str]()
    for flip, answer in zip(flips, answers, strict=True):
        kind = "right" if answer == truth else answer.partition(":")[0]
        counts[f"{flip.file.partition('/')[0]}: {kind}"] += 1
        if kind not in ("right", "error", "died") or "SIGALRM" in answer or ": None: " in answer:
            wrong.append(f"{flip}: {answer}")
    return wrong, counts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory.mktemp("at-rest"))


@pytest.mark.rest
def test_a_flipped_value_changes_nothing(store: Path) -> None:
    """A byte of any value of each database: plans and merges are those of the sound store."""
    seed = random.SystemRandom().randrange(1 << 20)
    draw = random.Random(seed)
    flips = []
    for name, values in places(store).items():
        assert values, name
        for file, at in draw.sample(values, min(8, len(values))):
            flips.append(Flip(file, at, 1 << draw.randrange(8)))
    wrong, counts = violations(store, flips)
    assert wrong == [], f"seed {seed}"
    # Values are no pages: nothing dies of them, and nothing is refused.
    assert sum(n for what, n in counts.items() if what.endswith("right")) == len(flips)


@pytest.mark.rest
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.rest)])
def test_a_flipped_byte_changes_nothing(store: Path, half: int) -> None:
    """A byte anywhere in either file: the same plan and merge, or none."""
    seed = random.SystemRandom().randrange(1 << 20)
    draw = random.Random(seed)
    flips = []
    for area in DATABASES:
        file = f"{area}/data.mdb"
        data = (store / file).read_bytes()
        used = [at for at, byte in enumerate(data) if byte]
        flips += [Flip(file, at, 1 << draw.randrange(8)) for at in draw.sample(used, 24)]
    flips = flips[half::2]
    wrong, counts = violations(store, flips)
    assert wrong == [], f"seed {seed}"
    assert counts["stats: right"] + counts["memo: right"] > len(flips) // 2


@pytest.mark.slow
@pytest.mark.parametrize("area", DATABASES)
def test_many_flipped_bytes_change_nothing(area: str, store: Path) -> None:
    """A quarter of the bytes that are not zero, and some that are, with all their bits at once."""
    start = random.SystemRandom().randrange(4)
    flips = [
        Flip(f"{area}/data.mdb", at, 0xFF)
        for at, byte in enumerate((store / area / "data.mdb").read_bytes())
        if at % (4 if byte else 100) == start
    ]
    wrong, counts = violations(store, flips)
    print(*sorted(counts.items()), sep="\n")
    assert wrong == [], f"start {start}"


def test_a_value_is_checked_with_its_key(store: Path, tmp_path: Path) -> None:
    """Rows whose values changed places count as none, however sound the values are."""
    root = tmp_path / "store"
    shutil.copytree(store, root)
    truth = outcome(root)
    shutil.rmtree(root)
    shutil.copytree(store, root)
    for name in ("outputs", "pairs", "thresholds"):
        area = "memo" if name in DATABASES["memo"] else "stats"
        if area == "stats":
            shutil.rmtree(root / "memo", ignore_errors=True)
        with (
            lmdb.open(str(root / area), max_dbs=16) as env,
            env.begin(write=True) as transaction,
        ):
            database = env.open_db(name.encode(), transaction, create=False)
            with transaction.cursor(db=database) as cursor:
                rows = list(cursor)
            assert len(rows) > 1
            assert all(len(value) > CHECK_BYTES for _, value in rows)
            for (key, _), (_, value) in zip(rows, rows[1:] + rows[:1], strict=True):
                transaction.put(key, value, db=database)
        assert outcome(root) == truth, name
