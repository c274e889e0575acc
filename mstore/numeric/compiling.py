"""How functions become machine code: flags, inlining, and the cache on disk.

Owns the three decorators and the flags that make compiled float32 arithmetic bit-equal to numpy's
on every machine.  Does not own any arithmetic.  Compiled functions run without the GIL; numba
serialises compilation itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

_Function = TypeVar("_Function", bound=Callable[..., Any])

# No fastmath anywhere: LLVM may then neither reorder sums nor contract a product and a sum into
# one rounding, and vectorised results equal scalar ones.  Division by zero follows IEEE.


def compiled(function: _Function) -> _Function:
    """A step of a kernel: compiled together with the kernel that calls it."""
    return cast(_Function, numba.njit(nogil=True, error_model="numpy")(function))


def inlined(function: _Function) -> _Function:
    """A small function called inside loops, pasted into its callers.

    A call, even one that LLVM inlines later, keeps some loops from being vectorised.
    """
    pasted = numba.njit(nogil=True, error_model="numpy", inline="always")
    return cast(_Function, pasted(function))


def cached(*modules: ModuleType) -> Callable[[Callable[..., Any]], Any]:
    """A kernel, a numba dispatcher whose machine code is kept on disk between processes.

    `modules` are all others that its steps come from.  Where nothing can be written (neither
    beside the source nor in the user's cache folder) each process compiles for itself.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
        try:
            dispatcher._cache = _StampedCache(function, modules)
        except (OSError, RuntimeError):
            return dispatcher
        return dispatcher

    return decorate


class _StampedCache(FunctionCache):
    """numba's cache, keyed by all sources and never a reason to fail.

    numba itself notices changes of the kernel's own file only, and lets out what a full disk or a
    file damaged by a power cut raises.
    """

    def __init__(self, function: Callable[..., Any], modules: tuple[ModuleType, ...]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        sources = [inspect.getsource(module) for module in (sys.modules[__name__], *modules)]
        self._stamp = hashlib.sha256("\0".join(sources).encode()).hexdigest()

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        key = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return (*key, self._stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - damaged bytes raise anything; compiling again mends it
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
