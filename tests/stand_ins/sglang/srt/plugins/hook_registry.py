"""Hooks around functions of SGLang."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, ClassVar


class HookType(Enum):
    """What a hook does; the stand-in knows one kind."""

    AROUND = "around"


class HookRegistry:
    """The hooks of this process."""

    _hooks: ClassVar[dict[str, list[Callable[..., Any]]]] = {}
    _patched: ClassVar[set[str]] = set()

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        """Keep a hook: called with the original function and its arguments."""
        assert hook_type is HookType.AROUND
        cls._hooks.setdefault(target, []).append(hook)

    @classmethod
    def apply_hooks(cls) -> None:
        """Put every hook around its function."""
        for target, hooks in cls._hooks.items():
            assert len(hooks) == 1, "SGLang warns: several hooks around one function"
            if target in cls._patched:
                continue
            cls._patched.add(target)
            module, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(module)
            setattr(owner, name, partial(hooks[0], getattr(owner, name)))
