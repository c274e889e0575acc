"""Packs that come back: what was collected here is fetched again, under the names that it had."""

from __future__ import annotations

from pathlib import Path

from small_models import BLOCK, files_of, small_model

from mstore import Store
from mstore.store.leases import Lease


def test_a_condemned_pack_does_not_take_the_fetched_one_with_it(tmp_path: Path) -> None:
    """While the file of a collected pack waits for a reader, the pack is fetched again; when the
    file is removed at last, what was fetched stays."""
    model = small_model(tmp_path / "model", "1")
    url = (tmp_path / "remote").as_uri()
    with Store.init(tmp_path / "author", block_size=BLOCK) as author:
        author.add(model, name="base", threads=1)
        author.add_remote("origin", url)
        author.push("origin", ["base"])
    Store.clone(url, tmp_path / "clone")
    with Store.open(tmp_path / "clone") as store:
        reader = Lease(store._catalog.layout, store._catalog.index, "a reader")
        store.remove("base")
        store.remove_remote("origin")
        store.gc(reflog_days=0)
        waiting = store._catalog.index
        with waiting.env.read() as transaction:
            assert waiting.condemned(transaction)
        store.add_remote("origin", url)
        store.pull("origin")
        reader.release()
        store.gc(reflog_days=0)
        assert store.fsck(read_data=True).problems == ()
        found = {name: b"".join(store.read_file("base", name)) for name in store.view("base").files}
        assert found == files_of(model)
