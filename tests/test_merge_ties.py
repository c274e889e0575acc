"""The tie ledger: a quota handed out in the order of chunks, whatever order they report in."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from mstore.merge.kernels import UNLIMITED
from mstore.merge.ties import TieLedger


def test_quota_goes_to_the_first_chunks() -> None:
    """Chunks get what earlier ones left, per expert, though later ones may ask first."""
    ties = [[3, 1], [4, 0], [2, 5], [0, 9], [7, 2]]
    ledger = TieLedger([8, UNLIMITED])
    assert ledger.open == [True, False]
    order = list(range(len(ties)))
    random.Random(1).shuffle(order)
    with ThreadPoolExecutor(len(ties)) as pool:
        asked = {chunk: pool.submit(ledger.take, chunk, ties[chunk]) for chunk in order}
        granted = [asked[chunk].result(timeout=10) for chunk in range(len(ties))]
    assert ledger.open == [False, False]
    assert granted == [
        [UNLIMITED, UNLIMITED],  # all three of them: that is no limit
        [UNLIMITED, UNLIMITED],
        [1, UNLIMITED],
        [0, UNLIMITED],
        [0, UNLIMITED],
    ]


def test_a_failure_stops_only_later_chunks() -> None:
    """Where a chunk fails, the earlier ones are still served and the later ones are woken."""
    ledger = TieLedger([4])
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(ledger.take, 3, [1])
        ledger.fail(2)
        with pytest.raises(RuntimeError):
            late.result(timeout=10)
        assert pool.submit(ledger.take, 0, [3]).result(timeout=10) == [UNLIMITED]
        assert pool.submit(ledger.take, 1, [3]).result(timeout=10) == [1]
        ledger.fail(-1)
        with pytest.raises(RuntimeError):
            pool.submit(ledger.take, 2, [1]).result(timeout=10)
