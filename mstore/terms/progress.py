"""Progress of long calls: one tick, and the function that takes ticks."""

from __future__ import annotations

from collections.abc import Callable

from mstore.terms.report import Report


class Progress(Report, frozen=True):
    """One tick of a long call: `done` of `total` bytes in the named phase."""

    phase: str
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]
"""Called now and then by a long call, from its own thread or from one of its workers."""
