"""The names of the library's merge methods, for help texts, without importing the library."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_OTHERS = {"__init__", "bounds", "method", "model", "parameters", "registry", "report"}


def listed() -> str:
    """Return the names as a list for a sentence; each method is a file of merge/methods."""
    found = find_spec("mstore")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "merge" / "methods"
    *most, last = sorted({path.stem for path in folder.glob("*.py")} - _OTHERS)
    return f"{', '.join(most)} or {last}"
