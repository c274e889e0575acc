"""Packs that the index does not name."""

from __future__ import annotations

from pathlib import Path

from small_models import BLOCK, small_model

from mstore.api import Store
from mstore.store.generation import unknown_packs


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
        assert [pack.hex() for pack in unknown_packs(store._catalog.packs, index)] == [stray.stem]
