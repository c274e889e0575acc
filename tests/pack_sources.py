"""What every `PackSource` promises, as tests: inherit `PackSourceContract` and give it a source."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

import pytest

from mstore.blocks.packs import PackGone
from mstore.blocks.reader import PackSource
from mstore.errors import Corrupt, MstoreError
from mstore.ids import PackId


class PackSourceContract(ABC):
    """Inherit it in a class whose name begins with Test, and make a source in `stored`."""

    @pytest.fixture
    @abstractmethod
    def stored(self) -> tuple[PackSource, PackId, bytes]:
        """A source, one of its packs, and all bytes of that, more than 10,000."""

    def test_any_part_is_read(self, stored: tuple[PackSource, PackId, bytes]) -> None:
        """A read gives the bytes that were asked for, wherever they lie, none at all too."""
        source, pack, data = stored
        for offset, length in ((0, 1), (0, len(data)), (4097, 5000), (len(data) - 1, 1), (7, 0)):
            assert bytes(source.read(pack, offset, length)) == data[offset : offset + length]

    def test_neighbours_are_read_into_several_targets(
        self, stored: tuple[PackSource, PackId, bytes]
    ) -> None:
        """Targets are filled one after the other, empty ones and thousands of them too."""
        source, pack, data = stored
        for lengths in ((100, 0, 4096, 1), (1,) * 5000):
            room = [memoryview(bytearray(length)) for length in lengths]
            source.read_scattered(pack, 33, room)
            assert b"".join(room) == data[33 : 33 + sum(lengths)]

    def test_what_is_not_there_is_refused(self, stored: tuple[PackSource, PackId, bytes]) -> None:
        """A pack that the source lacks raises PackGone; beyond a pack's end, and at places that no
        file has, Corrupt; and no read gives fewer bytes than were asked for."""
        source, pack, data = stored
        with pytest.raises(PackGone):
            source.read(PackId.of(b"no such pack"), 0, 1)
        for offset, length in ((len(data), 1), (len(data) - 1, 2), (2**40, 1), (2**63, 1)):
            with pytest.raises(Corrupt):
                source.read(pack, offset, length)
            with pytest.raises(Corrupt):
                source.read_scattered(pack, offset, [memoryview(bytearray(length))])

    def test_advice_is_never_an_error(self, stored: tuple[PackSource, PackId, bytes]) -> None:
        """`will_need` takes any place of any pack, there or not."""
        source, pack, data = stored
        for one in (pack, PackId.of(b"no such pack")):
            for offset, length in ((0, len(data)), (2**40, 10), (0, 0)):
                source.will_need(one, offset, length)

    def test_threads_read_at_once(self, stored: tuple[PackSource, PackId, bytes]) -> None:
        """Reads of many threads do not disturb each other."""
        source, pack, data = stored
        places = [int.from_bytes(os.urandom(2), "big") % 9000 for _ in range(400)]

        def read(offset: int) -> bool:
            try:
                return bytes(source.read(pack, offset, 1000)) == data[offset : offset + 1000]
            except MstoreError:
                return False

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, places))
