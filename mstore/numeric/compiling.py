"""How functions become code for any level of processor: flags and inlining.

Owns the decorators and the flags that make compiled float32 arithmetic bit-equal to numpy's on
every machine. Does not own any arithmetic, nor how machine code is made of it: the build does that
(`scripts/kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

_ARGUMENTS: Final = {"i": numba.types.int64, "p": numba.types.voidptr}

_Function = TypeVar("_Function", bound=Callable[..., Any])

# No fastmath anywhere: LLVM must neither reorder sums nor contract a product and a sum into one
# rounding, and vectorised results equal scalar ones. Division by zero follows IEEE.


def compiled(function: _Function) -> _Function:
    """Compile a step of a kernel together with the kernel that calls it."""
    return cast(_Function, numba.njit(nogil=True, error_model="numpy")(function))


def inlined(function: _Function) -> _Function:
    """Inline a small function into its callers' loops.

    A call, even one that LLVM inlines later, prevents some loops from being vectorised.
    """
    pasted = numba.njit(nogil=True, error_model="numpy", inline="always")
    return cast(_Function, pasted(function))


@intrinsic
def _pointer(_typing: Any, _address: Any) -> Any:
    """Turn an address, an int64, into what `carray` takes."""

    def made(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return numba.types.voidptr(numba.types.int64), made


# The decorator's type shows the typing context as an argument, which calls do not pass.
pointer: Any = _pointer


class Entry:
    """A function of integers and addresses, and its code for any processor."""

    def __init__(self, function: Callable[..., Any], takes: str) -> None:
        self._function = function
        self._arguments = tuple(_ARGUMENTS[letter] for letter in takes)

    def assembly(self) -> str:
        """Return the function and its callees in LLVM's language, for any processor."""
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(self._function)
        dispatcher.compile(self._arguments)
        text: str = dispatcher.inspect_llvm(self._arguments)
        return text


def entry(takes: str, *modules: ModuleType) -> Callable[[Callable[..., Any]], Entry]:
    """Declare a kernel that is run through `passes.Pass`, and returns nothing.

    `takes` is as there. `modules` are all other modules that its steps come from: the `Pass` names
    their files.
    """
    return lambda function: Entry(function, takes)
