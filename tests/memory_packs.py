"""Packs in memory: the plainest place, for tests of what reads from any place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO

from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import Footer, PackGone, SealedPack, footer
from mstore.terms.errors import Corrupt, StorageFailed, Unavailable
from mstore.terms.ids import PackId


class MemoryPacks(Packs):
    """The plainest place: what a place must do, and no more."""

    def __init__(self, packs: dict[PackId, bytes] | None = None) -> None:
        self.packs = {} if packs is None else packs
        self._is_closed = False

    def _data(self, pack: PackId) -> bytes:
        if self._is_closed:
            raise Unavailable("closed", where=self.where(pack))
        if pack not in self.packs:
            raise PackGone("not here", where=self.where(pack))
        return self.packs[pack]

    def read(self, pack: PackId, offset: int, length: int) -> bytes:
        data = self._data(pack)
        if offset + length > len(data):
            raise Corrupt("the pack ends too early", where=self.where(pack))
        return data[offset : offset + length]

    def read_each(self, pack: PackId, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        for offset, length in places:
            yield self._data(pack)[offset : offset + length]

    def table(self, pack: PackId) -> Footer:
        return footer(BytesIO(self._data(pack)), self.where(pack))

    def size(self, pack: PackId) -> int:
        return len(self._data(pack))

    def put(self, packs: Sequence[SealedPack]) -> None:
        for pack in packs:
            try:
                self.packs[pack.id] = pack.path.read_bytes()
            except OSError as error:
                raise StorageFailed("no such file", where=str(pack.path)) from error
            pack.path.unlink()

    def listed(self) -> Iterator[PackId]:
        yield from sorted(self.packs)

    def remove(self, pack: PackId) -> None:
        self.packs.pop(pack, None)

    def where(self, pack: PackId) -> str:
        return f"memory:{pack}"

    def close(self) -> None:
        self._is_closed = True
