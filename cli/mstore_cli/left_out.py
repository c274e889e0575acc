"""What truncation leaves out of the matrices of an adapter, as a table of the worst ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mstore_cli.output import Column, Screen
from mstore_cli.sizes import format_percent

if TYPE_CHECKING:
    from mstore.reports import TruncatedTensor

COLUMNS = (Column("TENSOR", style="yellow"), Column("LEFT OUT", right=True))
_SHOWN = 5
_LEAST = 0.001
"""A smaller share is not worth a line."""


def show_worst(screen: Screen, tensors: Sequence[TruncatedTensor]) -> None:
    """Print those of which most is left out; tensors: those with the largest errors first."""
    worst = [
        (one.tensor, format_percent(one.relative_error))
        for one in tensors[:_SHOWN]
        if one.relative_error >= _LEAST
    ]
    if worst:
        screen.line()
    screen.table(COLUMNS, worst)
