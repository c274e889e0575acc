"""Merges on Slurm that take long enough to be disturbed: what tests do, and as a program, too.

As a program: STORE PLAN NAME ADDRESS; it says when each slice has come. A module of its own,
because pilots import what they run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mstore.api import Store
from mstore.blocks.packs import PackWriter
from mstore.clusters import engine, slurm
from mstore.clusters.pilots import Pace
from mstore.merge.running.commit import run_merge
from mstore.merge.running.runners import execute
from mstore.merge.running.slices import Receipt, Slice
from mstore.terms.report import Progress

SLICE_BYTES = 1 << 20
PACE = Pace(poll=(0.05, 0.5), beat=0.5, lost=10.0, look=1.0, rest=60.0)
BLOCK_SECONDS = 0.05
"""How long the packs of slow slices take for a block."""
_append = PackWriter.append_encoded


def slowly(slice: Slice) -> Receipt:
    """Compute a slice, with a pack that is half written for most of the time."""
    return _slowed(slice, BLOCK_SECONDS)


def in_minutes(slice: Slice) -> Receipt:
    """The same, but all slices together take longer than a job of two minutes computes."""
    return _slowed(slice, 15 * BLOCK_SECONDS)


def _slowed(slice: Slice, seconds: float) -> Receipt:
    def append(self: PackWriter, *given: Any) -> None:
        _append(self, *given)
        time.sleep(seconds)

    PackWriter.append_encoded = append  # type: ignore[method-assign,assignment]
    return execute(slice)


def prepare(patch: Any) -> None:
    """Have merges of this process small and slow slices. patch: setattr and setitem."""
    patch.setattr(engine, "execute", slowly)
    patch.setattr(slurm, "PACE", PACE)
    patch.setitem(run_merge.__kwdefaults__, "slice_bytes", SLICE_BYTES)


class _Patch:
    setattr = staticmethod(setattr)

    @staticmethod
    def setitem(target: dict[str, Any], key: str, value: Any) -> None:
        target[key] = value


def main() -> None:
    """Merge."""
    path, plan, name, address = sys.argv[1:]
    prepare(_Patch)
    import slurm_merge

    # By its own name, which pilots know, too.
    engine.execute = slurm_merge.slowly

    def tell(progress: Progress) -> None:
        print("came", progress.done, flush=True)

    print("begins", flush=True)
    with Store.open(Path(path)) as store:
        report = store.merge(
            plan, name=name, cluster=address, remote="origin", memo=False, progress=tell
        )
        print("merged", report.manifest.hex(), report.resumed_expert_bytes, flush=True)


if __name__ == "__main__":
    main()
