"""Packs on their way: how they are cut, what becomes of damaged ones, and of those not sent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_models import BLOCK, files_of

from mstore.api import Store
from mstore.blocks.location import Key, Location
from mstore.blocks.packs import NO_BASE, Kind, read_footer
from mstore.remotes.fetch import PIECE_BYTES, pieces
from mstore.remotes.shared_directory import SharedDirectory
from mstore.terms.errors import Corrupt, Unavailable
from mstore.terms.ids import PackId

PACK = PackId(bytes(32))


def at(offset: int, length: int, number: int) -> tuple[Key, Location]:
    """A raw block there."""
    place = Location(PACK, offset, length, length, 0, 1, NO_BASE)
    return (Kind.BLOCK, number.to_bytes(32, "big")), place


@pytest.mark.parametrize("length", [1, 1000, 1 << 20, PIECE_BYTES, PIECE_BYTES + 1, 16 << 20])
def test_pieces_cover_a_pack_and_cut_no_payload_that_fits(length: int) -> None:
    """Pieces are the whole pack in order, and each payload lies in one, if it fits in one."""
    count = min(2000, (40 << 20) // length)
    needed = [at(4096 + number * length, length, number) for number in range(count)]
    size = 4096 + count * length + 8192
    found = list(pieces(size, needed))
    assert [one.start for one in found] == [0, *(one.end for one in found[:-1])]
    assert found[-1].end == size
    assert all(0 < one.end - one.start <= PIECE_BYTES for one in found)
    whole = [one for span in found for one in span.entries]
    assert whole == (needed if length <= PIECE_BYTES else [])
    for span in found:
        for _, place in span.entries:
            assert span.start <= place.offset
            assert place.offset + place.stored_length <= span.end


def test_damaged_pack_is_not_kept(tmp_path: Path) -> None:
    """A fetch of a damaged pack fails, and works once the remote has the right bytes again."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(BLOCK, np.float32)
    for name, moved in (("base", weights), ("tuned", weights * np.float32(1 + 1e-6))):
        (tmp_path / name).mkdir()
        save_file({"weight": moved}, tmp_path / name / "model.safetensors")
    url = (tmp_path / "remote").as_uri()
    with Store.init(tmp_path / "one", block_size=BLOCK, codec="dense") as store:
        store.add(tmp_path / "base", name="base")
        store.add(tmp_path / "tuned", name="tuned", base="base")
        store.add_remote("origin", url)
        store.push("origin", every=True)
    [pack] = (tmp_path / "remote" / "packs").glob("*/*.pack")
    right = pack.read_bytes()
    entries = read_footer(pack).entries
    delta = next(one for one in entries if one.base != NO_BASE)
    alone = next(one for one in entries if one.id == delta.base)
    pack.chmod(0o600)
    with Store.init(tmp_path / "two", block_size=BLOCK) as store:
        store.add_remote("origin", url)
        # One is looked at while it comes, the other after the pack was kept.
        for entry in (alone, delta):
            wrong = bytearray(right)
            wrong[entry.offset + entry.stored_length // 2] ^= 1
            pack.write_bytes(wrong)
            with pytest.raises(Corrupt):
                store.pull("origin")
            assert list(store) == []
        pack.write_bytes(right)
        store.pull("origin")
        store.checkout("tuned", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "tuned")


def test_push_that_fails_at_one_of_many_packs_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push of many packs tells what one of them met, and the next puts only those not there."""
    monkeypatch.setattr("mstore.remotes.outgoing.PACK_BYTES", BLOCK)
    model = tmp_path / "model"
    model.mkdir()
    rng = np.random.default_rng(0)
    save_file({"weight": rng.standard_normal(4 * BLOCK, np.float32)}, model / "model.safetensors")
    put: list[str] = []
    sick = [True]
    really = SharedDirectory.put

    def counted(self: SharedDirectory, name: str, *words: object, **options: object) -> None:
        if name.startswith("packs/") and len(put) >= 5 and sick:
            sick.clear()
            raise Unavailable("no more room")
        really(self, name, *words, **options)  # type: ignore[arg-type]
        if name.startswith("packs/"):
            put.append(name)

    monkeypatch.setattr(SharedDirectory, "put", counted)
    url = (tmp_path / "remote").as_uri()
    with Store.init(tmp_path / "one", block_size=BLOCK, codec="raw") as store:
        store.add(model, name="a")
        store.add_remote("origin", url)
        with pytest.raises(Unavailable, match="no more room"):
            store.push("origin", ["a"])
        assert 5 <= len(put) < 16
        store.push("origin", ["a"])
    assert len(put) == len(set(put)) >= 16
    Store.clone(url, tmp_path / "two")
    with Store.open(tmp_path / "two") as clone:
        clone.checkout("a", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(model)
