"""The meter: counts bytes where they are read, and refuses reads beyond the plan."""

from __future__ import annotations

from threading import Lock

from mstore.errors import BudgetExceeded
from mstore.sizes import exact_size, format_size


class Meter:
    """Bytes read from packs for one purpose, over all threads.

    Invariant: `total` never exceeds `limit`. The charge precedes the `pread`, so no read beyond the
    limit happens.
    """

    def __init__(self, purpose: str, limit: int | None = None) -> None:
        self.purpose = purpose
        self.limit = limit
        self._total = 0
        self._lock = Lock()

    @property
    def total(self) -> int:
        """Bytes charged so far."""
        return self._total

    def charge(self, length: int) -> None:
        """Charge `length` bytes before they are read. Raises BudgetExceeded."""
        with self._lock:
            if self.limit is not None and self._total + length > self.limit:
                raise BudgetExceeded(
                    f"reading {format_size(length)} more from {self.purpose}s would make "
                    f"{exact_size(self._total + length)}; the plan allows {exact_size(self.limit)}"
                )
            self._total += length
