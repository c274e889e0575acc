"""Parts: of tests that take long in all, each commit runs some, and several commits all of them.

TEST_PART=K/N in the environment leaves the K-th of N parts of the tests: of those that have
parameters a part of each module, and of the modules that have none, a part.
"""

from __future__ import annotations

import os
import zlib

import pytest


def leave_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the part that was asked for, or all.  A case is always in the same part."""
    # Taken away: a test may start pytest, and means all of what it asks for.
    part, _, parts = os.environ.pop("TEST_PART", "").partition("/")
    if not part:
        return
    number, count = int(part), int(parts)
    if not 1 <= number <= count:
        raise pytest.UsageError(f"TEST_PART={part}/{parts}: write K/N, such as 1/6")
    others = [item for item in items if zlib.crc32(_of_part(item)) % count != number - 1]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]


def _of_part(item: pytest.Item) -> bytes:
    """Return what decides in which part a test is: tests without parameters share fixtures."""
    name = item.name if hasattr(item, "callspec") else item.nodeid.partition("::")[0]
    return name.rpartition("/")[2].encode()
