"""Reading blocks: what comes out of a pack is what the id says, or an error that names it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_packs import MemoryPacks

from mstore.blocks import codecs
from mstore.blocks.codecs import Codec, Policy
from mstore.blocks.location import Location
from mstore.blocks.packs import NO_BASE, Kind, PackWriter
from mstore.blocks.reader import BlockReader, located
from mstore.terms.errors import Corrupt, Incompatible, MstoreError
from mstore.terms.ids import BlockId, PackId, SnapshotId

BLOCK = 1 << 16
FLOATS = codecs.elements_of("BF16")


PACK = PackId.of(b"some pack")


def at_rest(plain: bytes, base: bytes | None = None) -> tuple[BlockId, Location, bytes]:
    """A block as a pack would hold it at offset 5."""
    under = None if base is None else (BlockId.of(base), base)
    encoded = codecs.encode(plain, FLOATS, Policy.DENSE, under)
    data = bytes(encoded.payload)
    on = NO_BASE if encoded.base is None else bytes(encoded.base)
    at = Location(PACK, 5, len(data), len(plain), encoded.codec, encoded.width, on)
    return BlockId.of(plain), at, b"12345" + data


def weights(seed: int, moved: float = 0.0) -> bytes:
    rng = np.random.default_rng(seed)
    own = rng.normal(0, 0.02, 8192) + moved * np.random.default_rng(99).normal(0, 1, 8192)
    return (own.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


CASES = {
    "raw": (os.urandom(5001), None),
    "constant": (bytes(4096), None),
    "floats": (weights(1), None),
    "zstd": (bytes(range(256)) * 16, None),
    "delta": (weights(1, 1e-4), weights(1)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_codec_is_undone(case: str) -> None:
    """A block comes out whole, as a value and into a target, whatever codec it is stored with."""
    plain, base = CASES[case]
    id, at, pack = at_rest(plain, base)
    reader = BlockReader(MemoryPacks({PACK: pack}), BLOCK)
    assert bytes(reader.block(id, at, base)) == plain
    target = memoryview(bytearray(len(plain)))
    reader.block_into(id, at, target, base)
    assert bytes(target) == plain


@given(case=st.sampled_from(sorted(CASES)), data=st.data())
def test_wrong_bytes_never_come_out(case: str, data: st.DataObject) -> None:
    """Whatever one bit is flipped to, in the payload or in what the index says of it, the block is
    right or the error names it."""
    plain, base = CASES[case]
    id, at, pack = at_rest(plain, base)
    broken = bytearray(pack)
    bit = data.draw(st.integers(40, 8 * len(pack) - 1))
    broken[bit // 8] ^= 1 << bit % 8
    fields = st.fixed_dictionaries(
        {},
        optional={
            "stored_length": st.integers(0, 2 * BLOCK),
            "raw_length": st.integers(0, 2 * BLOCK),
            "codec": st.integers(0, 6),
            "width": st.integers(0, 9),
        },
    )
    lies = data.draw(fields)
    said = Location(**{name: getattr(at, name) for name in Location.__slots__} | lies)
    reader = BlockReader(MemoryPacks({PACK: bytes(broken)}), BLOCK)
    target = memoryview(bytearray(said.raw_length))
    for read in (
        lambda: bytes(reader.block(id, said, base)),
        lambda: reader.block_into(id, said, target, base) or bytes(target),
    ):
        refused: MstoreError | None = None
        try:
            found = read()
        except (Corrupt, Incompatible) as error:
            refused = error
        if refused is None:
            assert found == plain
        else:
            assert str(id) in str(refused.where) or "pack" in refused.what


def test_a_wrong_base_is_blamed() -> None:
    """Where a delta does not fit because its base is damaged, the error names the base."""
    plain, base = CASES["delta"]
    assert base is not None
    id, at, pack = at_rest(plain, base)
    assert Codec(at.codec).is_delta
    wrong = bytes([base[0] ^ 1]) + base[1:]
    with pytest.raises(Corrupt, match=str(BlockId.of(base))) as caught:
        BlockReader(MemoryPacks({PACK: pack}), BLOCK).block(id, at, wrong)
    assert caught.value.where == f"block {id}"


def test_lengths_are_checked_before_anything_is_read() -> None:
    """A block longer than the block size, or a target of another length, is refused unread."""
    id, at, _ = at_rest(*CASES["floats"])
    nowhere = MemoryPacks({})
    with pytest.raises(Corrupt, match="block size"):
        BlockReader(nowhere, 1024).block(id, at)
    with pytest.raises(Corrupt, match="were expected"):
        BlockReader(nowhere, BLOCK).block_into(id, at, memoryview(bytearray(1)))


def test_records_are_checked(tmp_path: Path) -> None:
    """A record is given where it hashes to its id; a flipped bit, or a codec, is refused."""
    data = b"some record"
    id = SnapshotId.of(data)
    writer = PackWriter(tmp_path / "one.pack")
    writer.append_small(id, Kind.SNAPSHOT, Codec.RAW, 1, data, len(data))
    sealed = writer.seal()
    whole = sealed.path.read_bytes()
    at = located(sealed.id, sealed.entries[0])
    assert BlockReader(MemoryPacks({sealed.id: whole}), BLOCK).record(id, at) == data
    broken = whole.replace(b"some", b"same")
    for pack, place in ((broken, at), (whole, Location(at.pack, at.offset, 11, 11, 2, 1))):
        with pytest.raises(MstoreError) as caught:
            BlockReader(MemoryPacks({sealed.id: pack}), BLOCK).record(id, place)
        assert str(id) in str(caught.value.where)
