"""Interrupted merges: what was finished is taken over, what is damaged is not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from families import BLOCK, Family

from mstore import MergeRequest
from mstore.api import Store
from mstore.merge.running.commit import Merged, run_merge
from mstore.merge.running.leftovers import rows_of
from mstore.store.objects.plan import Plan
from mstore.store.plans import sources_of
from mstore.terms.errors import Incompatible

SMALL = 2 * BLOCK

PROGRAM = """
import os, signal, sys
from mstore.api import Store
from mstore.merge.running.commit import run_merge
from mstore.merge.running.runners import LocalRunner
from mstore.store.objects.plan import Plan
from mstore.store.plans import find, sources_of

root, plan, how, size = sys.argv[1:]
honest = LocalRunner._publish
sealed = 0

def publish(runner, pack):
    # Two packs are whole: now, in the middle of the third.
    global sealed
    honest(runner, pack)
    sealed += 1
    if sealed == 2:
        os.kill(os.getpid(), getattr(signal, how))

LocalRunner._publish = publish
with Store.open(root) as store:
    catalog = store._catalog
    record = catalog.record(Plan, find(catalog, plan))
    sources = sources_of(catalog, record.id(), record)
    run_merge(catalog, record, sources, name="m", message="", threads=1, slice_bytes=int(size))
"""


def build(root: Path) -> None:
    """Two experts that differ everywhere, in tensors of six blocks, and a store of them."""
    rng = np.random.default_rng(0)
    size = 6 * BLOCK // 2
    base = {name: families.cast(rng.standard_normal(size), "BF16") for name in ("a", "b", "c")}
    experts = [
        {
            n: families.cast(x.astype("f4") + rng.standard_normal(size) / 8, "BF16")
            for n, x in base.items()
        }
        for _ in range(2)
    ]
    Family(base, tuple(experts)).write(root)
    with Store.init(root / "store", block_size=BLOCK, codec="raw") as store:
        store.add(root / "base", name="base")
        for name in ("e0", "e1"):
            store.add(root / name, name=name, base="base")


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of the store; `tmp_path` has its checkpoints, too."""
    for name in ("base", "e0", "e1"):
        (tmp_path / name).symlink_to(template / name)
    shutil.copytree(template / "store", tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield store


def plan_of(store: Store, method: str = "linear") -> Plan:
    """A plan of both experts."""
    parameters = {"density": 0.3} if method in ("ties", "breadcrumbs") else {}
    # A cut in the middle of the ties, in a later chunk.
    parameters |= {"gamma": 0.2} if method == "breadcrumbs" else {}
    report = store.plan(
        MergeRequest(base="base", experts=["e0", "e1"], method=method, parameters=parameters)
    )
    return store._catalog.record(Plan, report.plan)


def merge(store: Store, plan: Plan, name: str = "m") -> Merged:
    """Run it with small slices."""
    catalog = store._catalog
    sources = sources_of(catalog, plan.id(), plan)
    return run_merge(catalog, plan, sources, name=name, message="", threads=1, slice_bytes=SMALL)


def interrupt(store: Store, plan: Plan, how: str) -> list[Path]:
    """A merge in another process that ends so; the packs with whole receipts that it leaves."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store.path), str(plan.id()), how, str(SMALL)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (-getattr(signal, how), 1), done.stderr
    assert store.fsck().problems == ()
    return sorted(
        path
        for path in (store.path / "tmp").rglob("*.pack")
        # The last may have been cut short.
        if rows_of(path.with_suffix(".receipt"))
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("how", "method"), [("SIGKILL", "ties"), ("SIGKILL", "breadcrumbs"), ("SIGINT", "linear")]
)
def test_a_merge_goes_on_where_it_was_interrupted(how: str, method: str, store: Store) -> None:
    """The second run reads only what the first had not finished, and makes the same content."""
    plan = plan_of(store, method)
    left = interrupt(store, plan, how)
    assert len(left) >= 2
    assert any(left[0].parent.name in path for path in store.fsck().garbage)
    merged = merge(store, plan)
    outcome = merged.outcome
    assert outcome.resumed_expert_bytes > 0
    read = outcome.expert_bytes_read
    assert read == outcome.costs.planned - outcome.resumed_expert_bytes
    assert read < outcome.costs.planned
    assert merged.manifest == merge(store, plan, "fresh").manifest
    assert store.replay("m").same
    assert list((store.path / "tmp").iterdir()) == []
    assert store.fsck(read_data=True).problems == ()
    assert merge(store, plan, "later").outcome.resumed_expert_bytes == 0


@pytest.mark.rest
def test_elements_that_are_not_finite_are_known_of_what_was_finished(
    store: Store, tmp_path: Path
) -> None:
    """A merge that goes on counts those of chunks that it takes over, and refuses alike those that
    no expert has."""
    for expert in ("e0", "e1"):
        read = families.read_checkpoint(tmp_path / expert)
        large = {name: tensor.copy() for name, tensor in read.items()}
        for name in ("a", "c"):
            large[name][:3] = 3e38
        families.write_checkpoint(tmp_path / f"large-{expert}", large)
        store.add(tmp_path / f"large-{expert}", name=expert, base="base")
    plan = plan_of(store, "task_arithmetic")
    assert len(interrupt(store, plan, "SIGKILL")) >= 2
    catalog = store._catalog
    sources = sources_of(catalog, plan.id(), plan)
    given: dict[str, Any] = {"message": "", "threads": 1, "slice_bytes": SMALL}
    merged = run_merge(catalog, plan, sources, name="m", allow_nonfinite=True, **given)
    assert merged.outcome.resumed_expert_bytes > 0
    assert [(one.tensor, one.elements) for one in merged.not_finite] == [("a", 3), ("c", 3)]
    with pytest.raises(Incompatible, match="6 of"):
        run_merge(catalog, plan, sources, name="other", **given)


@pytest.mark.rest
def test_an_add_leaves_them_and_a_merge_takes_them(store: Store, tmp_path: Path) -> None:
    """What a merge left outlives an add and is garbage to fsck; another merge that has no use for
    it removes it.
    """
    left = interrupt(store, plan_of(store), "SIGKILL")
    store.add(tmp_path / "e0", name="again")
    assert all(path.exists() for path in left)
    assert not list((store.path / "tmp").glob("*.lock"))
    assert store.fsck().garbage != ()
    other = merge(store, plan_of(store, "ties"))
    assert other.outcome.resumed_expert_bytes == 0
    assert store.fsck().garbage == ()
    assert list((store.path / "tmp").iterdir()) == []


@pytest.mark.rest
def test_leftovers_survive_a_second_interruption(store: Store) -> None:
    """Killed twice, the third run has what both finished."""
    plan = plan_of(store)
    first = interrupt(store, plan, "SIGKILL")
    second = interrupt(store, plan, "SIGKILL")
    assert len(second) > len(first)
    merged = merge(store, plan)
    assert merged.outcome.resumed_expert_bytes > 2 * len(first) * SMALL
    assert store.replay("m").same
    assert list((store.path / "tmp").iterdir()) == []


@pytest.mark.rest
@pytest.mark.parametrize("where", ["payload", "footer", "receipt", "missing", "cut", "link"])
def test_damaged_leftovers_are_not_taken(where: str, store: Store) -> None:
    """A pack or receipt that is not what it was is not used; the rest is, and all is sound."""
    plan = plan_of(store)
    left = interrupt(store, plan, "SIGKILL")
    for path in left[:1] if where != "receipt" else []:
        path.chmod(0o644)
    damaged = left[0] if where != "receipt" else left[0].with_suffix(".receipt")
    if where == "missing":
        damaged.unlink()
    elif where == "link":
        damaged.rename(store.path.parent / "elsewhere.pack")
        damaged.symlink_to(store.path.parent / "elsewhere.pack")
    elif where == "cut":
        os.truncate(damaged, damaged.stat().st_size - 4096)
    else:
        at = {"payload": 4096 + BLOCK // 2, "footer": -40, "receipt": 60}[where]
        data = bytearray(damaged.read_bytes())
        data[at] ^= 1
        damaged.write_bytes(data)
    merged = merge(store, plan)
    assert store.replay("m").same
    assert merged.outcome.resumed_expert_bytes == 2 * (len(left) - 1) * SMALL
    assert store.fsck(read_data=True).problems == ()
    assert list((store.path / "tmp").iterdir()) == []


def test_a_failure_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is no interruption removes all that was written."""

    def refuse(self: object, pack: object) -> None:
        raise OSError("no")

    monkeypatch.setattr("mstore.merge.running.runners.LocalRunner._publish", refuse)
    with pytest.raises(OSError, match="no"):
        merge(store, plan_of(store))
    assert list((store.path / "tmp").iterdir()) == []
