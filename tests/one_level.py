"""A pytest plugin: passes run as one level of processor has them, and say that they did.

`-p one_level` with LEVEL=NAME and RAN=FILE in the environment.  FILE gets the names of the passes
that ran.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mstore.numeric import levels, passes

_RAN: set[str] = set()


def pytest_configure() -> None:
    """Give every pass the level's code."""
    only = levels.named(os.environ["LEVEL"])
    found = passes.Pass._found

    def at_level(self: passes.Pass) -> Path:
        _RAN.add(f"{self.module}.{self.name}")
        return found(self)

    passes.runnable = lambda: (only,)
    passes.Pass._found = at_level  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell which passes ran."""
    Path(os.environ["RAN"]).write_text("\n".join(sorted(_RAN)))
