"""Who may read and write what mstore makes: the table of docs/security.md."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import families
import pytest
from families import BLOCK

from mstore import MergeRequest, Store, fs


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(params=[0o022, 0o077, 0o000], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


@pytest.mark.sampled(3)
def test_modes_of_a_store(umask: int, tmp_path: Path) -> None:
    """Packs are 0444 less the umask; tmp/, what lies in it and locks are for those whom the umask
    lets write; the umask decides the rest."""
    root = families.layered(rows=8).write(tmp_path / "family")
    private: set[int] = set()

    def look(operation: fs.Operation) -> None:
        path = Path(operation.path)
        if operation.kind == "write" and path.suffix == ".pack":
            private.update((mode(path) & 0o066, mode(path.parent) & 0o077))

    with Store.init(tmp_path / "store", block_size=BLOCK) as store, fs.observed(look):
        store.add(root / "base", name="base")
        store.add(root / "e0", name="e0", base="base")
        store.merge(
            store.plan(MergeRequest(base="base", experts=["e0"], method="linear")), name="merged"
        )
    packs = list((tmp_path / "store" / "packs").rglob("*.pack"))
    assert packs
    assert {mode(path) for path in packs} == {0o444 & ~umask}
    everybody = umask == 0
    assert private == ({0o066, 0o077} if everybody else {0})
    assert mode(tmp_path / "store" / "tmp") == (0o777 if everybody else 0o700)
    assert mode(tmp_path / "store" / "lock") == (0o666 if everybody else 0o600)
    for path in {tmp_path / "store", *(tmp_path / "store").rglob("*")} - set(packs):
        assert not mode(path) & umask & 0o077, path
        if path.name in ("data.mdb", "lock.mdb", "mirror", "format"):
            assert mode(path) == 0o666 & ~umask, path
