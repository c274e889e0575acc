"""gc and packs that the index does not name: a running writer's stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from small_models import BLOCK, files_of, small_model

from mstore import fs
from mstore.api import Store
from mstore.gc import collect
from mstore.store.generation import unknown_packs


class Writer:
    """Adds a model in a thread, and stops between its packs and its commit."""

    def __init__(self, root: Path, model: Path) -> None:
        self.store = Store.open(root)
        self.model = model
        self.published, self.go_on = Event(), Event()
        catalog = self.store._catalog
        committing = catalog.committing

        @contextmanager
        def waiting() -> Iterator[Any]:
            self.published.set()
            self.go_on.wait()
            with committing() as transaction:
                yield transaction

        catalog.committing = waiting  # type: ignore[method-assign]
        self.thread = Thread(target=lambda: self.store.add(model, name="late"))

    def begin(self) -> None:
        """Begin, if there is a lock to be had; returns when the packs lie there."""
        lock = fs.LockFile(self.store._catalog.layout.lock)
        is_free = lock.acquire(blocking=False)
        lock.release()
        if is_free and self.thread.ident is None:
            self.thread.start()
            self.published.wait()

    def end(self) -> None:
        if self.thread.ident is None:
            self.thread.start()
        self.go_on.set()
        self.thread.join()
        self.store.close()


@pytest.mark.parametrize("place", ["leases.live", "generation.listed_packs"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_that_begins_while_gc_looks(
    place: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs that are published between two of gc's looks are not put aside: the commit stands."""
    root = tmp_path / "store"
    Store.init(root, block_size=BLOCK).close()
    model = small_model(tmp_path / "model", "late")
    writer = Writer(root, model)
    module, _, name = place.partition(".")
    look: Callable[..., Any] = getattr(getattr(collect, module), name)

    def looked(*given: Any) -> Any:
        if when == "before":
            writer.begin()
        # A walk is over when it returns.
        found = look(*given)
        found = list(found) if name == "listed_packs" else found
        writer.begin()
        return found

    monkeypatch.setattr(getattr(collect, module), name, looked)
    with Store.open(root) as store:
        report = store.gc()
        monkeypatch.undo()
        writer.end()
        assert report.put_aside == ()
        assert store.fsck(read_data=True).problems == ()
        store.checkout("late", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(model)


def test_a_pack_whose_id_is_damaged_in_the_index_is_known(tmp_path: Path) -> None:
    """A flipped key of `pack_ids` makes no pack unknown: its own row still names it."""
    root = tmp_path / "store"
    with Store.init(root, block_size=BLOCK) as store:
        store.add(small_model(tmp_path / "model", "kept"), name="kept")
        layout, index = store._catalog.layout, store._catalog.index
        stray = layout.packs / "ab" / f"{'ab' * 32}.pack"
        stray.parent.mkdir(exist_ok=True)
        stray.touch()
        with index.env.write() as rows:
            [key] = index.pack_ids(rows)
            row = bytes(rows.get(key, db=index.db("pack_ids")))
            rows.delete(key, db=index.db("pack_ids"))
            rows.put(bytes([key[0] ^ 1]) + key[1:], row, db=index.db("pack_ids"))
        assert unknown_packs(layout, index) == [stray]
