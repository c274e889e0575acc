"""Plugins of the entry point group `sglang.srt.plugins`, run once in a process."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from sglang.srt.plugins.hook_registry import HookRegistry


@cache
def load_plugins() -> None:
    """Call every plugin, then apply the hooks."""
    for one in entry_points(group="sglang.srt.plugins"):
        one.load()()
    HookRegistry.apply_hooks()
