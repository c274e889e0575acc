"""Packs at the places that there are: each keeps the contract of `Packs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_packs import MemoryPacks
from packs_suite import PacksSuite, sealed

from mstore.blocks.pack_files import PackFiles, ScatteredPacks
from mstore.blocks.pack_store import HERE, Packs, Places
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import PackId


class TestPackFiles(PacksSuite):
    """A directory."""

    @pytest.fixture
    def packs(self, tmp_path: Path) -> Iterator[Packs]:
        (tmp_path / "packs").mkdir()
        packs = PackFiles(tmp_path / "packs")
        yield packs
        packs.close()


class TestMemoryPacks(PacksSuite):
    """A place that can do the least."""

    @pytest.fixture
    def packs(self) -> Packs:
        return MemoryPacks()


def test_packs_that_are_not_in_place_yet(tmp_path: Path) -> None:
    """Packs elsewhere are read from their files, and the others from the directory."""
    (tmp_path / "packs").mkdir()
    first, second = sealed(tmp_path, b"1"), sealed(tmp_path, b"2")
    PackFiles(tmp_path / "packs").put([first])
    packs = PackFiles(tmp_path / "packs", staged={second.id: second.path})
    assert [packs.table(one.id).id for one in (first, second)] == [first.id, second.id]
    assert list(packs.listed()) == [first.id]
    packs.close()


def test_packs_are_moved_out_and_found_again(tmp_path: Path) -> None:
    """What is moved into a directory is no more listed here, and is there in whatever directory."""
    for name in ("packs", "aside", "aside/now"):
        (tmp_path / name).mkdir()
    made = [sealed(tmp_path, bytes([number])) for number in range(3)]
    packs = PackFiles(tmp_path / "packs")
    packs.put(made)
    gone = [made[0].id, PackId.of(b"no such pack"), made[2].id]
    assert packs.move_out(gone, tmp_path / "aside" / "now") == [made[0].id, made[2].id]
    assert list(packs.listed()) == [made[1].id]
    aside = ScatteredPacks(tmp_path / "aside")
    assert list(aside.listed()) == sorted([made[0].id, made[2].id])
    assert aside.table(made[2].id).entries == made[2].entries
    assert list(ScatteredPacks(tmp_path / "nowhere").listed()) == []
    packs.close()
    aside.close()


def test_what_is_no_pack_is_told(tmp_path: Path) -> None:
    """Files that have no name of a pack are strays, not packs."""
    (tmp_path / "packs" / "ab").mkdir(parents=True)
    (tmp_path / "packs" / "ab" / "notes").touch()
    packs = PackFiles(tmp_path / "packs")
    assert list(packs.listed()) == []
    assert list(packs.strays()) == [f"{tmp_path}/packs/ab/notes"]


def test_a_pack_under_another_name_is_refused(tmp_path: Path) -> None:
    """A table is that of the pack that was asked for, or an error."""
    (tmp_path / "packs").mkdir()
    first, second = sealed(tmp_path, b"1"), sealed(tmp_path, b"2")
    packs = PackFiles(tmp_path / "packs")
    packs.put([first, second])
    Path(packs.where(first.id)).unlink()
    Path(packs.where(second.id)).rename(packs.where(first.id))
    with pytest.raises(Corrupt, match=f"those of {second.id.short}"):
        packs.table(first.id)


def test_only_known_places_are_opened(tmp_path: Path) -> None:
    """Packs that lie here are those of the store's directory; another place is refused."""
    (tmp_path / "packs").mkdir()
    places = Places({HERE: PackFiles(tmp_path / "packs")})
    packs = places[HERE]
    pack = sealed(tmp_path, b"1")
    packs.put([pack])
    assert (tmp_path / "packs" / pack.id.hex()[:2] / f"{pack.id.hex()}.pack").exists()
    packs.close()
    with pytest.raises(Incompatible, match=r"(?s)place 1.*pip install -U mstore"):
        places[1]
