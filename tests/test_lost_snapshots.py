"""Snapshots that are lost: what is left is listed, logged and counted, and there is a way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Program
from small_models import BLOCK
from test_repair import sources

from mstore import MergeRequest
from mstore.api import Store
from mstore.blocks.packs import Kind
from mstore.store.catalog import Catalog
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import SnapshotId


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of a base and two fine-tunes of it, whose base's pack was removed."""
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        for name, directory in sources(tmp_path).items():
            base = None if name == "base" else "m/base"
            store.add(directory, name=f"m/{name}", base=base, threads=1)
        lost = store["m/base"].id
        with store._catalog.index.env.read() as rows:
            place = store._catalog.index.record(rows, Kind.SNAPSHOT, lost)
        assert place is not None
        Path(store._catalog.packs.where(place.pack)).unlink()
    return tmp_path / "store"


def drop(path: Path, *, sources: tuple[Path, ...] = ()) -> str:
    """Repair, which drops the base's snapshot; what is to be done next."""
    with Store.open_checked(path) as store:
        report = store.repair(sources=sources)
    assert report.after.hint is not None
    return str(report.after.hint)


def missing(store: Store) -> dict[str, bool]:
    return {ref.name: ref.missing for ref in store.refs()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("repaired", [False, True])
def test_what_is_left_is_told(path: Path, tmp_path: Path, *, repaired: bool) -> None:
    """With a pack lost, before and after its rows are dropped, refs and log tell of the rest."""
    if repaired:
        drop(path, sources=(tmp_path / "base",))
    with Store.open(path) as store:
        assert missing(store) == {"m/base": True, "m/expert": False, "m/second": False}
        assert store.ref_ids() == {ref.name: ref.snapshot for ref in store.refs()}
        lost = next(ref.snapshot for ref in store.refs() if ref.missing)
        told = {one.snapshot: one for one in store.log()}
        assert len(told) == 3
        assert [id for id, one in told.items() if one.missing] == [lost]
        assert told[lost].refs == ("m/base",)
        assert store.log()[-1].snapshot == lost
        assert store.stats().refs == 3
        assert {ref.name for ref in store.usage(["m/expert", "m/second"]).refs}
        with pytest.raises(NotFound, match="missing") as caught:
            store.usage(["m/base"])
        assert caught.value.hint == "store.fsck()"
        assert store.usage().refs


def test_fsck_names_the_way_out_and_gc_waits_for_it(path: Path, tmp_path: Path) -> None:
    """While a ref names a missing snapshot gc refuses, with what to do; after that it goes on."""
    hint = drop(path, sources=(tmp_path / "base",))
    assert "with none left: store.remove('m/base')" in hint
    with Store.open(path) as store:
        with pytest.raises(Corrupt, match="m/base") as caught:
            store.gc()
        assert caught.value.hint == "store.remove('m/base'), or store.reset('m/base', OTHER)"
        report = store.remove("m/base")
        assert report.removed == ("m/base",)
        # A parent that is missing ends the history there, and nothing else.
        store.gc(reflog_days=0)
        assert missing(store) == {"m/expert": False, "m/second": False}
        assert sum(one.missing for one in store.log()) == 1
        store["m/expert"].read("config.json")


def test_a_lost_ref_is_reset(path: Path, tmp_path: Path) -> None:
    """A branch whose snapshot is missing can be pointed elsewhere."""
    drop(path, sources=(tmp_path / "base",))
    with Store.open(path) as store:
        store.reset("m/base", "m/expert")
        assert not any(missing(store).values())
        store.gc()


def test_a_lost_ref_is_added_to(path: Path, tmp_path: Path) -> None:
    """Adding the files again makes the branch whole; it begins anew, and its reflog knows."""
    drop(path)
    with Store.open(path) as store:
        lost = next(ref.snapshot for ref in store.refs() if ref.missing)
        report = store.add(tmp_path / "base", name="m/base", base=None, threads=1)
        assert report.new_snapshot
        assert store["m/base"].parents == ()
        assert [move.old for move in store.reflog("m/base")][:1] == [lost]
        assert not any(missing(store).values())
        store.gc()
        store.prune(keep_last=1, unnamed_inputs=True, dry_run=True)
        plan = store.plan(
            MergeRequest(base="m/base", experts=["m/expert"], method="linear"), threads=1
        )
        store.merge(plan, name="merged", threads=1)


def test_a_lost_ref_is_merged_over(path: Path, tmp_path: Path) -> None:
    """A merge, virtual or not, under a name whose snapshot is missing begins the branch anew."""
    drop(path)
    with Store.open(path) as store:
        store.add(tmp_path / "base", name="good", base=None, threads=1)
        plan = store.plan(
            MergeRequest(base="good", experts=["good"], method="linear"), allow_noop=True
        )
        store.merge(plan, name="m/base", threads=1, virtual=True)
        assert all(parent.role != "previous" for parent in store["m/base"].parents)


def test_the_command_line_says_missing(path: Path, tmp_path: Path) -> None:
    """refs and log mark it, the graph too; rm works by what fsck --repair said."""
    mstore = Program(path)
    told = mstore("fsck", "--repair", "--from", str(tmp_path / "base")).out
    assert "rm m/base" in told
    assert "missing" in mstore.succeed("refs").out
    assert mstore.succeed("log").out.count("missing") == 1
    assert "missing" in mstore.succeed("log", "--graph").out
    assert "missing" in mstore.succeed("log", "m/expert").out
    mstore.succeed("stats")
    mstore.succeed("du")
    mstore.succeed("rm", "m/base")
    mstore.succeed("gc")


def test_a_missing_snapshot_has_no_contents(path: Path) -> None:
    """Reading it stays an error."""
    with Store.open(path) as store, pytest.raises((NotFound, Corrupt)):
        store.show("m/base")


def test_log_lists_what_no_ref_reaches(tmp_path: Path) -> None:
    """With no ref left, log says how many snapshots there are and how to list them."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    mstore.succeed("add", str(sources(tmp_path)["base"]), "--name", "a")
    id = mstore.succeed("log", "-q").out.strip()
    SnapshotId.parse(id)
    mstore.succeed("rm", "a")
    assert "1 snapshot that no ref reaches" in mstore.succeed("log").out
    assert mstore.succeed("log", "--all", "-q").out.strip() == id
    assert mstore("log", "--all", "a").status == 2


def test_refs_need_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refs are told from the index; only where it is in doubt, a snapshot's record is read."""
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        for name, directory in sources(tmp_path).items():
            store.add(directory, name=name, threads=1)
        told = store.refs()
    asked: list[SnapshotId] = []
    record = Catalog.snapshot_if_there

    def counted(self: Catalog, id: SnapshotId) -> SnapshotRecord | None:
        asked.append(id)
        return record(self, id)

    monkeypatch.setattr(Catalog, "snapshot_if_there", counted)
    with Store.open(tmp_path / "store") as store:
        assert store.refs() == told
        assert all(ref.manifest == store[ref.name].manifest for ref in told)
        assert asked == []
    with Store.open(tmp_path / "store") as store:
        index = store._catalog.index
        doubted = told[0].snapshot
        with index.env.write() as rows:
            rows.put(bytes(doubted), b"damaged row", db=index.db("snapshots"))
        assert store.refs() == told
        assert asked == [doubted]
