"""Stores on machines with pages of 4, 16 and 64 KiB, and stores that move from one to another.

A small library, loaded before the others, answers for the C library how large a page is: LMDB and
Python ask it.  The kernel's pages stay what they are.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from lmdb_page import page_shim
from small_models import BLOCK, files_of, small_model

from mstore.blocks.lmdb_pages import LmdbFile
from mstore.terms.errors import Corrupt

SIZES = (4096, 16384, 65536)
LARGEST = 32768

INIT = f"""
Store.init(store, block_size={BLOCK}).close()
"""
ADD = """
import mmap
from mstore import MergeRequest
assert mmap.PAGESIZE == int(os.environ["PAGE_BYTES"])
round, base, expert = sys.argv[2:5]
with Store.open(store) as opened:
    opened.add(base, name="base" + round, threads=1)
    opened.add(expert, name="expert" + round, base="base" + round, threads=1)
    request = MergeRequest(base="base" + round, experts=["expert" + round], method="ties")
    opened.merge(opened.plan(request), name="merged" + round, threads=1)
    opened.checkout("expert" + round, sys.argv[5], threads=1)
    opened.gc(dead_share=0)
    assert opened.fsck(read_data=True).problems == ()
    assert opened.remarks == ()
"""
REINDEX = """
with Store.open(store) as opened:
    refs = {ref.name: ref.snapshot for ref in opened.refs()}
Store.reindex(store)
with Store.open(store) as opened:
    assert {ref.name: ref.snapshot for ref in opened.refs()} == refs
    assert opened.fsck(read_data=True).problems == ()
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that answers how large a page is."""
    try:
        return page_shim(tmp_path_factory.mktemp("shim"))
    except OSError as error:
        pytest.skip(str(error))


def on(machine: int, shim: Path, program: str, store: Path, *words: str | Path) -> None:
    """Run a program on a machine with pages of so many bytes."""
    head = "import os, sys\nfrom mstore import Store\nstore = sys.argv[1]\n"
    done = subprocess.run(
        [sys.executable, "-c", head + program, store, *words],
        env={
            **os.environ,
            "LD_PRELOAD": str(shim),
            "PAGE_BYTES": str(machine),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def pages(store: Path) -> int:
    """The size of the index's pages."""
    with LmdbFile(store / "index" / "data.mdb") as file:
        return file.page


@pytest.mark.rest
@pytest.mark.parametrize("second", SIZES)
@pytest.mark.parametrize("first", SIZES)
def test_a_store_works_with_pages_of_any_machine(
    shim: Path, tmp_path: Path, first: int, second: int
) -> None:
    """What a machine with pages of one size has made, one with another reads, writes, collects and
    checks; `reindex` gives the index the pages of the machine that runs it."""
    store = tmp_path / "store"
    # Each process imports the library: what one machine does in a row is one program.
    rounds = [(first, INIT + ADD, first), (second, ADD, first), (first, ADD + REINDEX, first)]
    for round_, (machine, program, whose) in enumerate(rounds):
        base = small_model(tmp_path / f"base{round_}", f"seed {round_}")
        expert = small_model(tmp_path / f"expert{round_}", f"seed {round_}", changed="by a little")
        out = tmp_path / f"out{round_}"
        on(machine, shim, program, store, str(round_), base, expert, out)
        assert files_of(out) == files_of(expert)
        assert pages(store) == min(whose, LARGEST)
    on(second, shim, REINDEX, store)
    assert pages(store) == min(second, LARGEST)


@pytest.mark.parametrize("size", [0, 256, 5000, 65536, 1 << 31])
def test_pages_that_lmdb_cannot_have_are_told(tmp_path: Path, size: int) -> None:
    """A head that names a size that no LMDB of this version has is damage, told with both sizes."""
    import lmdb

    lmdb.open(str(tmp_path), map_size=1 << 24).close()
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    struct.pack_into("<I", data, 40, size)
    (tmp_path / "data.mdb").write_bytes(data)
    with pytest.raises(Corrupt, match=f"pages of {size} bytes, .* 512 to 32768") as refused:
        LmdbFile(tmp_path / "data.mdb")
    assert "reindex" in (refused.value.hint or "")
