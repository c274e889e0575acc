"""The meter: counts bytes where they are read, and refuses reads beyond the plan."""

from __future__ import annotations

from threading import Lock

from mstore.errors import BudgetExceeded


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
                    f"reading {length} more {self.purpose} bytes would make "
                    f"{self._total + length}; the plan allows {self.limit}"
                )
            self._total += length
