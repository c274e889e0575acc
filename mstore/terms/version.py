"""The version, in one place."""

from __future__ import annotations

__version__ = "0.1.0"
TOOL = f"mstore {__version__}"
