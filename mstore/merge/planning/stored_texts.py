"""Texts that plans keep at rest: why a tensor stays the base's own, and where thresholds lie.

A plan's id covers these bytes.  They never change, so that a request keeps its plan: they name
options as the command line does.  Reports say them with `phrased`, in the words of each face.
"""

from __future__ import annotations

from typing import Final

from mstore.terms.phrases import Option, phrase

NOT_AMONG_ONLY: Final = "not among --only"
"""The cause for a tensor that none of the patterns of `only` names."""
AT_EDGES: Final = (
    "some trim thresholds are bin edges of the magnitude histograms, which keep more than k "
    "elements (--no-analyze); the estimate counts them"
)
"""The remark of a plan that was made without reading what exact thresholds need."""
_SKIP: Final = "--skip "
_TOLD: Final = {
    NOT_AMONG_ONLY: phrase("not among {only}", only=Option("only")),
    AT_EDGES: phrase(
        "some trim thresholds are bin edges of the magnitude histograms, which keep more than k "
        "elements ({off}); the estimate counts them",
        off=Option("analyze", False),
    ),
}


def skipped(pattern: str) -> str:
    """Return the cause for a tensor that a pattern of `skip` names."""
    return f"{_SKIP}{pattern}"


def phrased(stored: str) -> str:
    """Return a remark or cause for a report: a phrase where it names an option."""
    if stored.startswith(_SKIP):
        return phrase("{skip}", skip=Option("skip", (stored.removeprefix(_SKIP),)))
    return _TOLD.get(stored, stored)
