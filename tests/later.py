"""Modules that take seconds to import, left until a test uses them: listing the tests needs none.

Each worker lists all tests, and most run none that needs torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Later:
    """A module by its name, imported when something of it is asked for."""

    module: str

    def __getattr__(self, name: str) -> Any:
        # pytest looks for marks of its own in whatever a test module holds.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.module), name)
