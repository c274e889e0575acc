"""The tie ledger: a quota handed out in the order of chunks, whatever order they report in."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from mstore.merge.arithmetic.kernels import COUNTED, UNLIMITED
from mstore.merge.running.slices import TieLedger


def test_quota_goes_to_the_first_chunks() -> None:
    """Chunks get what earlier ones left, per expert, though later ones may ask first."""
    ties = [[3, 1], [4, 0], [2, 5], [0, 9], [7, 2]]
    ledger = TieLedger([8, UNLIMITED], range(5))
    assert ledger.open == [True, False]
    order = list(range(len(ties)))
    random.Random(1).shuffle(order)
    with ThreadPoolExecutor(len(ties)) as pool:
        asked = {chunk: pool.submit(ledger.take, chunk, ties[chunk]) for chunk in order}
        granted = [asked[chunk].result(timeout=600) for chunk in range(len(ties))]
    taken = [grant.taken for grant in granted]
    assert ledger.open == [False, False]
    assert taken == [(3, 0), (4, 0), (1, 0), (0, 0), (0, 0)]
    assert [list(grant.quotas) for grant in granted] == [
        [UNLIMITED, UNLIMITED],  # all three of them: that is no limit
        [UNLIMITED, UNLIMITED],
        [1, UNLIMITED],
        [0, UNLIMITED],
        [0, UNLIMITED],
    ]


def test_a_failure_stops_only_later_chunks() -> None:
    """Where a chunk fails, the earlier ones are still served and the later ones are woken."""
    ledger = TieLedger([4], range(4))
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(ledger.take, 3, [1])
        ledger.fail(2)
        with pytest.raises(RuntimeError):
            late.result(timeout=600)
        assert pool.submit(ledger.take, 0, [3]).result(timeout=600).quotas == (UNLIMITED,)
        assert pool.submit(ledger.take, 1, [3]).result(timeout=600).quotas == (1,)
        ledger.fail(-1)
        with pytest.raises(RuntimeError):
            pool.submit(ledger.take, 2, [1]).result(timeout=600)


def test_known_chunks_are_booked_in_their_place() -> None:
    """What chunks that need not report took counts before later ones, and not before earlier."""
    ledger = TieLedger(
        [10, UNLIMITED], [1, 4], [(0, (2, 0)), (2, (5, 0)), (3, (1, 0)), (6, (9, 0))]
    )
    assert ledger.take(1, [1, 7]).taken == (1, 0)
    last = ledger.take(4, [3, 7])
    assert (last.quotas, last.taken) == ((1, UNLIMITED), (1, 0))
    assert ledger.open == [False, False]


def test_the_next_chunk_is_told_what_is_left() -> None:
    """A chunk waits for the only one before it and then gets the rest; with more before it, not."""
    ledger = TieLedger([5, 2, UNLIMITED], range(4))
    assert ledger.asked(2) == (COUNTED, COUNTED, UNLIMITED)
    assert ledger.asked(0) == (5, 2, UNLIMITED)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ledger.asked, 1)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.05)
        ledger.take(0, [3, 0, 0])
        assert second.result(timeout=600) == (2, 2, UNLIMITED)
    ledger.take(1, [2, 2, 0])
    # Nothing is left: no chunk needs to wait.
    assert ledger.asked(3) == (0, 0, UNLIMITED)


def test_a_failure_wakes_who_waits_for_what_is_left() -> None:
    """A chunk does not wait for what a failed one would have left."""
    ledger = TieLedger([5], range(2))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ledger.asked, 1)
        ledger.fail(0)
        assert second.result(timeout=600) == (COUNTED,)
