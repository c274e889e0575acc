"""DELTA: d_k itself; or, where a parameter says not to go from the base, e_k."""

from __future__ import annotations

from collections.abc import Mapping

from mstore.merge.methods.parameters import AROUND_BASE, Value
from mstore.merge.methods.selections.selection import Selection
from mstore.merge.methods.selections.whole import Whole


class Delta(Selection, frozen=True):
    """The deltas as they are."""

    @classmethod
    def of(cls, parameters: Mapping[str, Value], experts: int) -> Selection:
        """Return `Whole` with around_base=false."""
        return cls(experts) if parameters.get(AROUND_BASE.name, True) else Whole(experts)
