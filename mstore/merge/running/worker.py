"""The worker: computes one slice, in any process that sees the store's packs and its tmp directory.

Needs no index, no lease and no catalog.  Publishes nothing: the merge that made the slice takes the
receipt.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import replace

from mstore.blocks.meter import Meter
from mstore.blocks.packs import PackFiles
from mstore.merge.running.batches import Batch, batches
from mstore.merge.running.computer import Computer
from mstore.merge.running.slice_writer import SliceWriter
from mstore.merge.running.slices import Receipt, Slice


def execute(slice: Slice) -> Receipt:
    """Compute a slice and write its pack, in this thread.

    For any concurrent.futures.Executor: needs only the paths that the slice names.  Each attempt
    writes a pack with a unique name, so a slice may run again after a worker died, or twice at
    once: one receipt counts, and the packs of other attempts are garbage in the same directory.
    Raises BudgetExceeded, Corrupt, StorageFailed; then nothing is left behind.
    """
    expert_meter, base_meter = Meter("expert", slice.expert_bytes), Meter("base")
    packs = PackFiles(slice.packs)
    attempt = slice.target.with_name(f"{slice.target.stem}-{secrets.token_hex(4)}.pack")
    writer = SliceWriter(replace(slice, target=attempt), set())
    try:
        computer = Computer(packs, expert_meter, base_meter)
        ahead: deque[Batch] = deque()
        for batch in batches(slice):
            computer.prefetch(batch)
            ahead.append(batch)
            if len(ahead) > 2:
                _pass_on(computer, ahead.popleft(), writer)
        while ahead:
            _pass_on(computer, ahead.popleft(), writer)
        pack = writer.seal()
    except BaseException:
        writer.abandon()
        raise
    finally:
        packs.close()
    return Receipt(pack, tuple(writer.results), expert_meter.total, base_meter.total)


def _pass_on(computer: Computer, batch: Batch, writer: SliceWriter) -> None:
    computed = computer.batch(batch)
    writer.put(computed)
    computer.recycle(computed)
