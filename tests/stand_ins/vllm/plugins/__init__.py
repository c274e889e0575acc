"""Plugins of the entry point group `vllm.general_plugins`, run once in a process."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points


@cache
def load_general_plugins() -> None:
    """Call every plugin."""
    for one in entry_points(group="vllm.general_plugins"):
        one.load()()
