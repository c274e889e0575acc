"""What every `Packs` promises, as tests: inherit `PacksSuite` in a class, and give it an empty one.

An implementation that keeps packs elsewhere adds a class to `test_pack_store.py`; nothing else
proves that it may stand in for a directory.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mstore import fs
from mstore.blocks.codecs import Codec
from mstore.blocks.pack_store import Packs, is_whole
from mstore.blocks.packs import Kind, PackGone, PackWriter, SealedPack
from mstore.terms.errors import Corrupt, MstoreError, StorageFailed, Unavailable
from mstore.terms.ids import BlockId, PackId

NOWHERE = PackId.of(b"no such pack")


def sealed(directory: Path, *payloads: bytes) -> SealedPack:
    """A pack of these raw blocks and a record, under a temporary name."""
    writer = PackWriter(directory / f"{os.urandom(4).hex()}.pack")
    offset = 0
    for payload in payloads:
        writer.append_raw(BlockId.of(payload), payload, 1, "file", offset)
        offset += len(payload)
    writer.append_small(bytes(range(32)), Kind.TENSOR, Codec.RAW, 1, b"a record", 8)
    return writer.seal()


class PacksSuite(ABC):
    """Inherit it in a class whose name begins with Test, and make an empty `packs`."""

    @pytest.fixture
    @abstractmethod
    def packs(self, tmp_path: Path) -> Packs:
        """Packs at a place that has none."""

    @pytest.fixture
    def kept(self, packs: Packs, tmp_path: Path) -> tuple[PackId, bytes]:
        """A pack that was put, and all its bytes."""
        pack = sealed(tmp_path, os.urandom(20_000))
        data = pack.path.read_bytes()
        packs.put([pack])
        return pack.id, data

    # -- reading -----------------------------------------------------------------------------

    def test_any_part_is_read(self, packs: Packs, kept: tuple[PackId, bytes]) -> None:
        """A read gives the bytes that were asked for, wherever they lie, none at all too."""
        pack, data = kept
        for offset, length in ((0, 1), (0, len(data)), (4097, 5000), (len(data) - 1, 1), (7, 0)):
            assert bytes(packs.read(pack, offset, length)) == data[offset : offset + length]
            target = bytearray(length)
            packs.read_scattered(pack, offset, [memoryview(target)])
            assert target == data[offset : offset + length]

    def test_neighbours_are_read_into_several_targets(
        self, packs: Packs, kept: tuple[PackId, bytes]
    ) -> None:
        """Targets are filled one after the other, empty ones and thousands of them too."""
        pack, data = kept
        for lengths in ((100, 0, 4096, 1), (1,) * 5000):
            room = [memoryview(bytearray(length)) for length in lengths]
            packs.read_scattered(pack, 33, room)
            assert b"".join(room) == data[33 : 33 + sum(lengths)]

    def test_each_place_is_read_as_far_as_it_goes(
        self, packs: Packs, kept: tuple[PackId, bytes]
    ) -> None:
        """`read_each` gives the bytes of each place, and fewer where the pack ends."""
        pack, data = kept
        places = [(5, 10), (len(data) - 3, 10), (len(data), 10)]
        found = [bytes(one) for one in packs.read_each(pack, places)]
        assert found == [data[5:15], data[-3:], b""]
        with pytest.raises(PackGone):
            list(packs.read_each(NOWHERE, places))

    def test_what_is_not_there_is_refused(self, packs: Packs, kept: tuple[PackId, bytes]) -> None:
        """A pack that is not there raises PackGone; beyond a pack's end, and at places that no file
        has, Corrupt; and no read gives fewer bytes than were asked for."""
        pack, data = kept
        for missing in (
            lambda: packs.read(NOWHERE, 0, 1),
            lambda: packs.table(NOWHERE),
            lambda: packs.size(NOWHERE),
            lambda: packs.version(NOWHERE),
        ):
            with pytest.raises(PackGone):
                missing()
        assert not packs.is_there(NOWHERE)
        for offset, length in ((len(data), 1), (len(data) - 1, 2), (2**40, 1), (2**63, 1)):
            with pytest.raises(Corrupt):
                packs.read(pack, offset, length)
            with pytest.raises(Corrupt):
                packs.read_scattered(pack, offset, [memoryview(bytearray(length))])

    def test_advice_is_never_an_error(self, packs: Packs, kept: tuple[PackId, bytes]) -> None:
        """`will_need` takes any place of any pack, there or not."""
        pack, data = kept
        for one in (pack, NOWHERE):
            for offset, length in ((0, len(data)), (2**40, 10), (0, 0)):
                packs.will_need(one, offset, length)

    def test_threads_read_at_once(self, packs: Packs, kept: tuple[PackId, bytes]) -> None:
        """Reads of many threads do not disturb each other."""
        pack, data = kept
        places = [int.from_bytes(os.urandom(2), "big") % 9000 for _ in range(400)]

        def read(offset: int) -> bool:
            try:
                return bytes(packs.read(pack, offset, 1000)) == data[offset : offset + 1000]
            except MstoreError:
                return False

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, places))

    def test_nothing_is_read_after_the_close(
        self, packs: Packs, kept: tuple[PackId, bytes]
    ) -> None:
        """Closed packs raise Unavailable; closing twice is no error."""
        packs.close()
        packs.close()
        with pytest.raises(Unavailable):
            packs.read(kept[0], 0, 1)

    # -- tables ------------------------------------------------------------------------------

    def test_a_table_tells_what_was_sealed(self, packs: Packs, tmp_path: Path) -> None:
        """Id, entries and size are those of the sealed pack; dead bytes are those of entries that
        no row has."""
        pack = sealed(tmp_path, b"x" * 100, b"y" * 50)
        packs.put([pack])
        found = packs.table(pack.id)
        assert (found.id, found.entries, found.size) == (pack.id, pack.entries, pack.size)
        assert packs.size(pack.id) == pack.size
        assert is_whole(packs, pack.id, pack.size)
        assert not is_whole(packs, pack.id, pack.size + 1)
        assert not is_whole(packs, NOWHERE, pack.size)
        assert packs.dead_bytes(pack.id, 3, 158) == 0
        assert packs.dead_bytes(pack.id, 1, 100) == 58

    # -- putting, listing, removing ----------------------------------------------------------

    def test_what_was_put_is_listed(self, packs: Packs, tmp_path: Path) -> None:
        """Every pack that was put is listed once, sorted, and its temporary file is gone; a removed
        one is not, and removing it again is no error."""
        assert list(packs.listed()) == []
        made = [sealed(tmp_path, bytes([number])) for number in range(20)]
        packs.put(made[:1])
        packs.put(made[1:])
        packs.put([])
        assert not list(tmp_path.glob("*.pack"))
        ids = sorted(pack.id for pack in made)
        assert list(packs.listed()) == ids
        for _ in range(2):
            packs.remove(ids[3])
        assert list(packs.listed()) == ids[:3] + ids[4:]
        assert not packs.is_there(ids[3])
        assert packs.is_there(ids[4])
        assert list(packs.strays()) == []

    def test_what_was_removed_is_gone(self, packs: Packs, kept: tuple[PackId, bytes]) -> None:
        """A pack that was read before and removed since raises PackGone, once it is let go of."""
        pack, _ = kept
        packs.read(pack, 0, 1)
        packs.remove(pack)
        packs.forget_removed()
        with pytest.raises(PackGone):
            packs.read(pack, 0, 1)

    def test_half_of_the_packs_can_be_put(self, packs: Packs, tmp_path: Path) -> None:
        """Where one of several packs cannot be put, that is an error, and each is there whole or
        not at all."""
        made = [sealed(tmp_path, bytes([number])) for number in range(3)]
        made[1].path.unlink()
        with pytest.raises(StorageFailed):
            packs.put(made)
        assert set(packs.listed()) <= {made[0].id, made[2].id}
        for pack in packs.listed():
            assert is_whole(packs, pack, packs.size(pack))

    def test_there_is_room(self, packs: Packs) -> None:
        """A place tells how many bytes it takes."""
        assert packs.free_bytes() > 0

    # -- abilities ---------------------------------------------------------------------------

    def test_a_mapping_has_the_same_bytes(self, packs: Packs, kept: tuple[PackId, bytes]) -> None:
        """Where packs can be mapped, the mapping has all bytes, and outlives the pack's name."""
        pack, data = kept
        found = packs.mapped(pack, False)
        if found is None:
            pytest.skip("packs of this place cannot be mapped")
        assert isinstance(found, mmap.mmap)
        packs.remove(pack)
        assert found[:] == data

    def test_a_clone_has_the_same_bytes(
        self, packs: Packs, kept: tuple[PackId, bytes], tmp_path: Path
    ) -> None:
        """Where files can share a pack's extents, the file has its bytes."""
        pack, data = kept
        file = fs.NewFile(tmp_path / "file")
        try:
            if not packs.clone(pack, 4096, 4096, file, 0):
                pytest.skip("packs of this place share nothing")
        except StorageFailed:
            pytest.skip("this filesystem shares nothing")
        finally:
            file.close()
        assert (tmp_path / "file").read_bytes() == data[4096:8192]

    def test_a_descriptor_has_the_same_bytes(
        self, packs: Packs, kept: tuple[PackId, bytes]
    ) -> None:
        """Where packs are files, a descriptor reads them after they were removed."""
        pack, data = kept
        try:
            descriptor = packs.descriptor(pack)
        except Unavailable:
            pytest.skip("packs of this place are no files")
        packs.remove(pack)
        try:
            assert os.pread(descriptor, len(data), 0) == data
        finally:
            os.close(descriptor)
