"""The arithmetic on elements: compiled passes, and the steps around them."""

from __future__ import annotations

from pathlib import Path

_LIBRARY = Path(__file__).parents[2]
_PLACES = {"codes": "numeric", "floats": "numeric"}


def sources(*names: str) -> tuple[Path, ...]:
    """Return the files that a pass is compiled from: modules of this folder, or of `numeric`."""
    return tuple(_LIBRARY / _PLACES.get(name, "merge/arithmetic") / f"{name}.py" for name in names)
