"""Budgets as values: one meaning each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mstore import Budget
from mstore.blocks.reader import Meter
from mstore.terms import sizes
from mstore.terms.errors import BadRequest, BudgetExceeded
from mstore_cli.sizes import format_size


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("30%", Budget.share(0.3)),
        ("100%", Budget.share(1)),
        ("1", Budget.bytes(1)),
        ("2KiB", Budget.bytes(2048)),
        (2048, Budget.bytes(2048)),
        (0.3, Budget.share(0.3)),
        (Budget.share(1), Budget.share(1.0)),
    ],
    ids=str,
)
def test_what_a_budget_means(given: Any, meant: Budget) -> None:
    """Text is as on the command line, whole numbers are bytes, others are shares."""
    found = Budget.of(given, option="--budget")
    assert found == meant
    assert isinstance(found.amount, float) == isinstance(meant.amount, float)


@pytest.mark.parametrize("given", [1, 1.0, np.float64(1), True, None, "much", [2]], ids=repr)
def test_what_could_mean_two_things(given: Any) -> None:
    """Equal numbers never mean two things: 1 and 1.0 are refused, with what to write."""
    with pytest.raises(BadRequest) as refused:
        Budget.of(given, option="--budget")
    if given == 1 and given is not True:
        assert "100%" in (refused.value.hint or "")
        assert "Budget.bytes(1)" in (refused.value.hint or "")


def test_sizes_in_messages() -> None:
    """Messages have the sizes of the tables; where close ones are compared, the number too."""
    assert sizes.format_size(2623440) == format_size(2623440) == "2.5 MiB"
    assert sizes.exact_size(2623440) == "2.5 MiB (2623440 bytes)"
    assert sizes.exact_size(30) == "30 B"
    meter = Meter("expert", 4 << 20)
    with pytest.raises(BudgetExceeded) as refused:
        meter.charge((4 << 20) + 1)
    assert "4.0 MiB (4194305 bytes); the plan allows 4.0 MiB (4194304 bytes)" in str(refused.value)
