"""The remote runner: hands slices to an executor and takes their receipts, in any order.

Workers publish nothing and share no meter: a slice is charged whole before it is submitted, and
refuses to read more than that.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Final

from mstore.blocks.meter import Meter
from mstore.merge.running.resume import write_receipt
from mstore.merge.running.sink import Sink
from mstore.merge.running.slices import Receipt
from mstore.merge.running.work_list import WorkList
from mstore.merge.running.worker import execute

_HANDED_OUT: Final = 64
"""Number of slices that an executor has at a time."""


class RemoteRunner:
    """Runs a work list on an executor.  sink: None to compute without storing."""

    def __init__(
        self, executor: Executor, sink: Sink | None, expert_meter: Meter, base_meter: Meter
    ) -> None:
        self._executor = executor
        self._sink = sink
        self._expert_meter = expert_meter
        self._base_meter = base_meter

    def run(self, work: WorkList) -> None:
        """Compute everything.  Raises BudgetExceeded, Corrupt, StorageFailed."""
        waiting: set[Future[Receipt]] = set()
        try:
            for slice in work.slices():
                # Before submission: no worker knows what the others read.
                self._expert_meter.charge(slice.expert_bytes)
                waiting.add(self._executor.submit(execute, slice))
                if len(waiting) >= _HANDED_OUT:
                    self._receive_some(work, waiting)
            while waiting:
                self._receive_some(work, waiting)
        except BaseException:
            for future in waiting:
                future.cancel()
            for future in waiting:
                # The slice writes into a directory that is about to be deleted.
                if not future.cancelled():
                    future.exception()
            raise

    def _receive_some(self, work: WorkList, waiting: set[Future[Receipt]]) -> None:
        """Take all available receipts, at least one."""
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            waiting.remove(future)
            self._receive(work, future.result())

    def _receive(self, work: WorkList, receipt: Receipt) -> None:
        work.take(receipt.results)
        self._base_meter.charge(receipt.base_bytes)
        if receipt.pack is not None:
            assert self._sink is not None
            write_receipt(receipt.pack, receipt.results)
            self._sink.adopt(receipt.pack)
