"""A pytest plugin: passes run as one level of processor has them, and say that they did.

`-p one_level` with LEVEL=NAME and RAN=FILE in the environment.  Code that is not there for the
level is an error, not a reason to compile.  FILE gets the names of the passes that ran.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mstore.numeric import code_cache, images, levels

_RAN: set[str] = set()


def pytest_configure() -> None:
    """Give every pass the level's code."""
    only = levels.named(os.environ["LEVEL"])
    stored = code_cache.Pass._stored

    def at_level(self: code_cache.Pass) -> images.Image:
        found = stored(self)
        assert found is not None, f"{self.name} is not compiled for {only.name}"
        _RAN.add(f"{self.module}.{self.name}")
        return found

    code_cache.runnable = lambda: (only,)
    code_cache.Pass._stored = at_level  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell which passes ran."""
    Path(os.environ["RAN"]).write_text("\n".join(sorted(_RAN)))
