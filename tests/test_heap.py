"""The heap of programs that read many blocks."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

import families
import pytest

from mstore import Store

pytestmark = pytest.mark.rest


def _faults(store: Path, *words: object) -> int:
    """Page faults of a command that read no file from a disk."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    program = [sys.executable, "-m", "mstore_cli", "--store", str(store), *map(str, words)]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before


@pytest.mark.sampled(3)
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize(
    "words",
    [("fsck", "--read-data"), ("checkout", "e0", "OUT"), ("diff", "base", "e0", "--exact")],
)
def test_reading_does_not_fault_in_each_buffer(words: tuple[str, ...], tmp_path: Path) -> None:
    """Commands that decode block after block reuse memory: no page fault for each page decoded."""
    families.layered(rows=20_000).write(tmp_path)
    with Store.init(tmp_path / "store", codec="dense") as store:
        store.add(tmp_path / "base", name="base")
        store.add(tmp_path / "e0", name="e0", base="base")
    pages = (tmp_path / "e0" / "model.safetensors").stat().st_size // resource.getpagesize()
    named = [tmp_path / "out" if word == "OUT" else word for word in words]
    start = _faults(tmp_path / "store", "log", "e0")
    found = _faults(tmp_path / "store", *named) - start
    # Code that is loaded, and a few buffers for each thread, but none for each block.
    assert found < 2 * pages
