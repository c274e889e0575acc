"""Words of 64 bits at any byte of an array, in compiled code.

Little-endian, on the processors that code is made for. The functions are numba intrinsics. They
check nothing: the caller guarantees that the eight bytes are within the array.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

_WORD: Final = ir.IntType(64)


def _place(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Return the address of the word that begins at byte `at`."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), _WORD.as_pointer())


@intrinsic
def _load(_typing: Any, data: Any, at: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_place(context, builder, signature.args[0], *arguments), align=1)

    return types.uint64(data, types.uint64), made


@intrinsic
def _store(_typing: Any, data: Any, at: Any, word: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, first, value = arguments
        builder.store(value, _place(context, builder, signature.args[0], array, first), align=1)
        return context.get_dummy_value()

    return types.void(data, types.uint64, types.uint64), made


@intrinsic
def _leading(_typing: Any, _word: Any) -> Any:
    def made(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), made


# The decorator's type shows the typing context as an argument, which calls do not pass.
load: Final[Any] = _load
"""load(data, at): return the word of which the first byte is data[at]; data is uint8[]."""

store: Final[Any] = _store
"""store(data, at, word): write it there."""

leading: Final[Any] = _leading
"""leading(word): return how many zero bits are above the highest one of a word that is not zero."""
