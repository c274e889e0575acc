"""Damaged versions of the library: each leaves out a sync, or swaps two steps of an order.

The crash tests must catch every one of them, or they prove nothing.  A mutant patches the library
through pytest's `monkeypatch`; `MUTANTS` pairs it with a story in which it does harm.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.pack_files import PackFiles
from mstore.blocks.packs import Kind
from mstore.fs import files
from mstore.store import pack_list
from mstore.store.publishing import NewPacks
from mstore.store.transaction import Transaction
from mstore.terms.ids import PackId
from mstore.upkeep.gc.collect import Collector
from mstore.upkeep.pins.rewriting import Rewriting
from mstore.upkeep.reachability import Reach

Mutant = Callable[[pytest.MonkeyPatch], None]


def _without_syncs(patch: pytest.MonkeyPatch, skip: Callable[[Path], bool]) -> None:
    sync = fs.NewFile.sync
    patch.setattr(fs.NewFile, "sync", lambda self: None if skip(self.path) else sync(self))


def _without_directory_syncs(patch: pytest.MonkeyPatch, skip: Callable[[Path], bool]) -> None:
    sync = fs.sync_directory
    for module in (fs, files):
        patch.setattr(module, "sync_directory", lambda path: None if skip(path) else sync(path))


def packs_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Packs are renamed into place without an fsync."""
    _without_syncs(patch, lambda path: path.suffix == ".pack")


def texts_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Format file and mirror are renamed into place without an fsync."""
    _without_syncs(patch, lambda path: path.parent.name == "tmp")


def no_directory_synced(patch: pytest.MonkeyPatch) -> None:
    """No directory is ever synced."""
    _without_directory_syncs(patch, lambda path: True)


def pack_directory_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A pack's name is not synced before the index tells of it."""
    _without_directory_syncs(patch, lambda path: path.parent.name == "packs")


def packs_root_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The name of a new directory of packs is not synced before the index tells of it."""
    _without_directory_syncs(patch, lambda path: path.name == "packs")


def index_directory_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The name of the index's file is not synced when it is made."""
    _without_directory_syncs(patch, lambda path: path.name == "index")


def store_directory_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The store's directories are not synced before its format file says that they are there."""
    _without_directory_syncs(patch, lambda path: path.name == "store")


def index_before_packs(patch: pytest.MonkeyPatch) -> None:
    """The index tells of packs that get their names only then."""
    commit = Transaction.commit

    def reversed_commit(self: Transaction, **what: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(NewPacks, "_give_names", lambda self: None)
            commit(self, **what)
        self._packs._give_names()

    patch.setattr(Transaction, "commit", reversed_commit)


def index_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Index commits are acknowledged before they are on the disk (LMDB's nosync)."""
    announce = files.announce

    def forgetful(kind: str, path: Path | str, target: Path | str = "") -> None:
        if kind != "committed":
            announce(kind, path, target)

    patch.setattr(files, "announce", forgetful)


def nothing_swept(patch: pytest.MonkeyPatch) -> None:
    """Nobody removes what dead writers left in tmp/."""
    patch.setattr("mstore.store.leases.sweep", lambda layout, index: None)


def unlinked_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """gc removes old packs before the index says that nothing lies in them."""
    commit = Collector._commit

    def hasty(self: Any, reach: Any, choice: Any, *rest: Any) -> None:
        for use in (*choice.remove, *choice.rewrite):
            fs.unlink(Path(self._catalog.packs.where(use.pack)))
        commit(self, reach, choice, *rest)

    patch.setattr(Collector, "_commit", hasty)


def bases_of_deltas_forgotten(patch: pytest.MonkeyPatch) -> None:
    """gc takes blocks that live ones are differences to."""

    def forgetful(self: Any, numbers: Any) -> None:
        self.live[Kind.BLOCK][numbers] = True

    patch.setattr(Reach, "_mark_blocks", forgetful)


def ancestors_forgotten(patch: pytest.MonkeyPatch) -> None:
    """gc keeps what refs name, and nothing that it came from."""
    keep = Reach._keep_snapshots

    def forgetful(self: Any, *what: Any) -> None:
        keep(self, *what)
        self.snapshots = {id for id in self.snapshots if id in self._whole}
        for kind in (Kind.SNAPSHOT, Kind.MANIFEST):
            table = self.inventory.tables[kind]
            for number in range(len(table)):
                named = kind == Kind.MANIFEST or table.id(number) in self._whole
                self.live[kind][number] &= named

    patch.setattr(Reach, "_keep_snapshots", forgetful)


def numbers_given_twice(patch: pytest.MonkeyPatch) -> None:
    """A new pack takes the number of the last one that was removed."""

    def careless(self: Index, transaction: Any, pack: Any) -> int:
        with transaction.cursor(db=self.db("packs")) as cursor:
            number = int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 0
        key = number.to_bytes(4, "big")
        size = pack.size.to_bytes(8, "big")
        transaction.put(key, pack.id + size + bytes(4), db=self.db("packs"))
        transaction.put(pack.id, key, db=self.db("pack_ids"))
        return number

    patch.setattr(Index, "_number_pack", careless)


def copies_named_late(patch: pytest.MonkeyPatch) -> None:
    """The rows of pinned blocks point at packs that get their names after the commit."""
    publish = Rewriting.publish

    def backwards(self: Rewriting, also: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(NewPacks, "_give_names", lambda self: None)
            publish(self, also)
        self._packs._give_names()

    patch.setattr(Rewriting, "publish", backwards)


def names_before_the_list(patch: pytest.MonkeyPatch) -> None:
    """Packs get their names before the list has a line for them."""

    def backwards(self: NewPacks) -> None:
        if self.sealed:
            catalog = self._catalog
            catalog.packs.put(self.sealed)
            new = [pack.id for pack in self.sealed]
            pack_list.add(catalog.layout, catalog.index, new, catalog.packs.is_there)

    patch.setattr(NewPacks, "_give_names", backwards)


def list_directory_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The name of the list is not synced before packs get theirs."""
    _without_directory_syncs(patch, lambda path: path.name == "refs")


def condemned_for_ever(patch: pytest.MonkeyPatch) -> None:
    """What is condemned is never removed."""
    patch.setattr("mstore.store.unnamed_packs.sweep", lambda layout, index, packs: [])


def removals_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A removed pack may come back after its line went."""

    def careless(self: PackFiles, pack: PackId) -> None:
        fs.unlink(Path(self.where(pack)), missing_ok=True)

    patch.setattr(PackFiles, "remove", careless)


MUTANTS: list[tuple[str, Mutant]] = [
    ("first_steps", packs_not_synced),
    ("moving_add", packs_not_synced),
    ("plan_and_merge", packs_not_synced),
    ("first_steps", texts_not_synced),
    ("moving_add", texts_not_synced),
    ("first_steps", no_directory_synced),
    ("moving_add", no_directory_synced),
    ("plan_and_merge", no_directory_synced),
    ("moving_add", pack_directory_not_synced),
    ("plan_and_merge", pack_directory_not_synced),
    ("moving_add", packs_root_not_synced),
    ("first_steps", index_directory_not_synced),
    ("first_steps", store_directory_not_synced),
    ("moving_add", index_before_packs),
    ("moving_add", names_before_the_list),
    ("moving_add", list_directory_not_synced),
    ("plan_and_merge", index_before_packs),
    ("moving_add", index_not_synced),
    ("plan_and_merge", nothing_swept),
    ("dense_merge", packs_not_synced),
    ("pruning", packs_not_synced),
    ("pruning", pack_directory_not_synced),
    ("pruning", packs_root_not_synced),
    ("pruning", index_not_synced),
    ("pruning", unlinked_before_the_commit),
    ("collecting", unlinked_before_the_commit),
    ("pruning", bases_of_deltas_forgotten),
    ("pruning", ancestors_forgotten),
    ("collecting", numbers_given_twice),
    ("collecting", condemned_for_ever),
    ("collecting", removals_not_synced),
    ("pinning", packs_not_synced),
    ("pinning", pack_directory_not_synced),
    ("pinning", copies_named_late),
    ("repairing", packs_not_synced),
    ("repairing", pack_directory_not_synced),
]
