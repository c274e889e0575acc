"""Samples: of a test with many slow cases `make test` runs a few, and `make test-rest` the others.

A test says `@pytest.mark.sampled(4)` for one case in four.  The names of the cases decide which:
they are the same in every run, and spread over all parameters.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

LANES = ("slow", "rest")
"""Marks of what `make test` leaves out anyway."""


def mark_rest(items: Iterable[pytest.Item]) -> None:
    """Mark as `rest` the cases that no sample has; cases of another lane count in none."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not any(map(item.get_closest_marker, LANES)):
            cases[item.nodeid.partition("[")[0]].append(item)
    for alike in cases.values():
        sampled = alike[0].get_closest_marker("sampled")
        assert sampled is not None
        size = -(-len(alike) // int(sampled.args[0]))
        for item in sorted(alike, key=_drawn)[size:]:
            item.add_marker("rest")


def _drawn(item: pytest.Item) -> tuple[int, str]:
    return zlib.crc32(item.name.encode()), item.name
