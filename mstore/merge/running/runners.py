"""The runners: compute the slices of a work list, on threads of this process or on an executor.

Here, one slice's pack is sealed while the next is computed.  The last pack stays open for the
records of the output.

On an executor, `execute` computes one slice in any process that sees the store's packs and its tmp
directory.  It needs no index, no lease and no catalog, and publishes nothing: the merge that made
the slice takes the receipt, and the pack is garbage until then.  Receipts come in any order.
Workers share no meter: a slice is charged whole before it is submitted, and refuses to read more
than that.  A worker that dies is the executor's to replace: one that runs the slice again returns a
receipt as if nothing had happened.  If the executor gives up instead, the run ends as Interrupted;
receipts of the slices that were finished lie beside their packs for the next run (`finished`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from typing import Final

from msgspec.structs import replace

from mstore import fs
from mstore.blocks.pack_files import places_of
from mstore.blocks.packs import PackWriter, SealedPack
from mstore.blocks.reader import Meter
from mstore.merge.running.compute import Computed, Computer, computed
from mstore.merge.running.finished import write_receipt
from mstore.merge.running.slices import Bounds, Receipt, Result, Slice
from mstore.merge.running.work_list import WorkList
from mstore.store.transaction import Transaction
from mstore.terms.errors import BadRequest, Interrupted, MstoreError
from mstore.terms.ids import BlockId


class SliceWriter:
    """Takes the chunks of one slice in order and writes the new blocks into its pack.

    written: the blocks in this pack or in another of the same run; grows.  For one thread only.
    """

    def __init__(self, slice: Slice, written: set[BlockId]) -> None:
        self.slice = slice
        self._written = written
        self._writer: PackWriter | None = None
        self.results: list[Result] = []
        self.new: list[BlockId] = []

    def put(self, computed: Computed) -> None:
        """Write a batch's new blocks.  Raises StorageFailed."""
        self.results += computed.results
        for output in computed.outputs:
            encoded = output.encoded
            if encoded is not None and output.id not in self._written:
                self._open().append_encoded(output.id, encoded, output.file, output.offset)
                self._written.add(output.id)
                self.new.append(output.id)

    def _open(self) -> PackWriter:
        if self._writer is None:
            self._writer = PackWriter(self.slice.target)
        return self._writer

    def seal(self) -> SealedPack | None:
        """Finish the pack; None if no block was new.  May be called from another thread."""
        writer, self._writer = self._writer, None
        return None if writer is None else writer.seal()

    def release(self) -> PackWriter | None:
        """Return the unfinished pack for the caller to continue; None if no block was new."""
        writer, self._writer = self._writer, None
        return writer

    def abandon(self) -> None:
        """Remove what was written."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None


_SEALING: Final = 2
"""Number of packs that may be syncing while the next one is filled."""


class LocalRunner:
    """Runs a work list here.

    sink: None to compute without storing. written: the blocks that this run has written; grows.
    """

    def __init__(
        self, computer: Computer, bounds: Bounds, sink: Transaction | None, written: set[BlockId]
    ) -> None:
        self._computer = computer
        self._bounds = bounds
        self._sink = sink
        self._written = written

    def run(self, work: WorkList) -> None:
        """Compute everything.  Raises BudgetExceeded, Corrupt, StorageFailed."""
        with ThreadPoolExecutor(1, "seal") as sealer:
            sealing: deque[Future[SealedPack | None]] = deque()
            writer: SliceWriter | None = None
            stream = computed(self._computer, self._bounds, work.slices())
            try:
                for batch in stream:
                    work.take(batch.results)
                    if self._sink is not None:
                        if writer is None or writer.slice is not batch.slice:
                            full, writer = writer, SliceWriter(batch.slice, self._written)
                            if full is not None:
                                sealing.append(sealer.submit(_seal, full))
                            while len(sealing) > _SEALING:
                                self._publish(sealing.popleft().result())
                        writer.put(batch)
                    self._computer.recycle(batch)
                while sealing:
                    self._publish(sealing.popleft().result())
                if writer is not None:
                    self._keep_open(writer)
            except BaseException:
                stream.close()
                if writer is not None:
                    writer.abandon()
                raise

    def _publish(self, pack: SealedPack | None) -> None:
        if pack is not None:
            assert self._sink is not None
            self._sink.adopt(pack)

    def _keep_open(self, writer: SliceWriter) -> None:
        """Put the records into the last pack, too: one file less to sync and to open."""
        pack = writer.release()
        if pack is not None:
            assert self._sink is not None
            self._sink.go_on_with(pack, writer.new)


def _seal(writer: SliceWriter) -> SealedPack | None:
    """Sync a slice's pack and record its purpose, in a thread of its own."""
    pack = writer.seal()
    if pack is not None:
        write_receipt(pack, writer.results)
    return pack


# -- on an executor ----------------------------------------------------------------------------


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
    attempt = slice.target.with_name(f"{slice.target.stem}-{os.urandom(4).hex()}.pack")
    writer = SliceWriter(replace(slice, target=attempt), set())
    computer = Computer(packs, expert_meter, base_meter)
    try:
        with closing(computed(computer, slice.bounds, [slice])) as batches:
            for one in batches:
                writer.put(one)
                computer.recycle(one)
        pack = writer.seal()
    except BaseException:
        writer.abandon()
        raise
    finally:
        packs.close()
        root.close()
    return Receipt(pack, tuple(writer.results), expert_meter.total, base_meter.total)


_HANDED_OUT: Final = 64
"""Number of slices that an executor has at a time."""


class RemoteRunner:
    """Runs a work list on an executor.  sink: None to compute without storing."""

    def __init__(
        self, executor: Executor, sink: Transaction | None, expert_meter: Meter, base_meter: Meter
    ) -> None:
        self._executor = executor
        self._sink = sink
        self._expert_meter = expert_meter
        self._base_meter = base_meter

    def run(self, work: WorkList) -> None:
        """Compute everything.

        Raises BadRequest (not a usable executor), BudgetExceeded, Corrupt, Interrupted,
        StorageFailed.
        """
        waiting: set[Future[Receipt]] = set()
        try:
            for slice in work.slices():
                # Before submission: no worker knows what the others read.
                self._expert_meter.charge(slice.expert_bytes)
                waiting.add(self._submitted(slice))
                if len(waiting) >= _HANDED_OUT:
                    self._receive_some(work, waiting)
            while waiting:
                self._receive_some(work, waiting)
        except BaseException:
            _end(waiting)
            raise

    def _submitted(self, slice: Slice) -> Future[Receipt]:
        try:
            future = self._executor.submit(execute, slice)
        except MstoreError:
            raise
        except Exception as error:
            raise _lost(error) from error
        if not isinstance(future, Future):
            raise BadRequest(
                f"executor.submit returned a {type(future).__name__}, not a "
                "concurrent.futures.Future",
                hint="for Dask, pass client.get_executor()",
            )
        return future

    def _receive_some(self, work: WorkList, waiting: set[Future[Receipt]]) -> None:
        """Take all available receipts, at least one."""
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            waiting.remove(future)
            try:
                receipt = future.result()
            except Exception as error:
                raised = _raised(error)
                if raised is error and isinstance(error, MstoreError):
                    raise
                raise (raised if isinstance(raised, MstoreError) else _lost(raised)) from error
            self._receive(work, receipt)

    def _receive(self, work: WorkList, receipt: Receipt) -> None:
        work.take(receipt.results)
        self._base_meter.charge(receipt.base_bytes)
        if receipt.pack is not None:
            assert self._sink is not None
            write_receipt(receipt.pack, receipt.results)
            self._sink.adopt(receipt.pack)


def _raised(error: Exception) -> Exception:
    """Return what the slice raised.  Ray puts a class around it whose text is a traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def _lost(error: Exception) -> Interrupted:
    """Return what to raise for an error that is not mstore's own: the executor's, or a bug's."""
    kind = type(error).__name__
    said = str(error).strip().partition("\n")[0]
    return Interrupted(
        "the executor did not return a slice: " + (f"{kind}: {said}" if said else kind),
        hint="check the workers (their memory, their logs), then run the same merge again on a "
        "working executor: it reuses the finished slices",
    )


def _end(waiting: Collection[Future[Receipt]]) -> None:
    """Wait until no slice is running, and keep the receipts of those that were finished.

    An executor whose futures can be cancelled while they run (Dask's) is not waited for: such a
    slice writes a pack without a receipt, which is garbage.
    """
    for future in waiting:
        future.cancel()
    for future in waiting:
        with suppress(Exception):
            receipt = future.result()
            if receipt.pack is not None:
                write_receipt(receipt.pack, receipt.results)
