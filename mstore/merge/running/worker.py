"""The worker: computes one slice, in any process that sees the store's packs and its tmp directory.

Needs no index, no lease and no catalog.  Publishes nothing: the merge that made the slice takes the
receipt.

Memory: a slice says how many threads compute it and how many batches they work ahead
(`slices.Bounds`).  Buffers and outputs then stay within the merge's `memory`, of which
`memory.RESERVE` is for the process itself.
"""

from __future__ import annotations

import secrets
from contextlib import closing

from msgspec.structs import replace

from mstore import fs
from mstore.blocks.pack_files import places_of
from mstore.blocks.reader import Meter
from mstore.merge.running.computer import Computer
from mstore.merge.running.slice_writer import SliceWriter
from mstore.merge.running.slices import Receipt, Slice
from mstore.merge.running.stream import Stream


def execute(slice: Slice) -> Receipt:
    """Compute a slice and write its pack, within the bounds of the slice.

    For any concurrent.futures.Executor: needs only the paths that the slice names.  Each attempt
    writes a pack with a unique name, so a slice may run again after a worker died, or twice at
    once: one receipt counts, and the packs of other attempts are garbage in the same directory.
    Raises BudgetExceeded, Corrupt, StorageFailed; then nothing is left behind.
    """
    # In a process of its own, nobody else has the store open.
    root = fs.Root(slice.store)
    expert_meter, base_meter = Meter("expert", slice.expert_bytes), Meter("base")
    packs = places_of(slice.store)[slice.place]
    attempt = slice.target.with_name(f"{slice.target.stem}-{secrets.token_hex(4)}.pack")
    writer = SliceWriter(replace(slice, target=attempt), set())
    computer = Computer(packs, expert_meter, base_meter)
    try:
        with closing(Stream(computer, slice.bounds).run([slice])) as batches:
            for computed in batches:
                writer.put(computed)
                computer.recycle(computed)
        pack = writer.seal()
    except BaseException:
        writer.abandon()
        raise
    finally:
        packs.close()
        root.close()
    return Receipt(pack, tuple(writer.results), expert_meter.total, base_meter.total)
