"""Expansion: 64 elements at a time to and from where their classes lie, by wide vectors.

Bytes lie ordered by class, and within a class in the order of elements.  For 64 elements in turn,
each class that they have gives, or takes, as many bytes as it has elements there.  Processors with
AVX-512 VBMI2 do that for a class in one instruction (vpexpandb, vpcompressb); IS_WIDE tells whether
code is made for one that has it.  Otherwise these functions must not be called.

The functions are numba intrinsics.  keys: uint8[>= at + 64], the classes of elements.  places:
uint32[>= 256], the place of the next byte of each class; it is advanced.  frequent: uint8[>= most],
classes to try first, each of them once; they change the time that it takes, not the result.  at:
the first element, an int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

TOGETHER: Final = 64
"""Elements at a time."""

_ASKED: Final[Any] = config


def _is_wide() -> bool:
    """Whether the processor that code is made for has VBMI2: numba's variables may name another."""
    if _ASKED.CPU_NAME or _ASKED.CPU_FEATURES:
        return "+avx512vbmi2" in (_ASKED.CPU_FEATURES or "").split(",")
    return bool(_ASKED.ENABLE_AVX and llvm.get_host_cpu_features().get("avx512vbmi2"))


IS_WIDE: Final = _is_wide()

_BIT: Final = ir.IntType(1)
_BYTE: Final = ir.IntType(8)
_PLACE: Final = ir.IntType(32)
_WORD: Final = ir.IntType(64)
_BYTES: Final = ir.VectorType(_BYTE, TOGETHER)
_MASK: Final = ir.VectorType(_BIT, TOGETHER)


def _data(context: Any, builder: Any, kind: Any, value: Any, at: Any = None) -> Any:
    """Return the address of an array's elements, from the one at `at` on."""
    first = context.make_array(kind)(context, builder, value).data
    return first if at is None else builder.gep(first, [at])


def _declared(builder: Any, name: str, returns: Any, takes: Any) -> Any:
    """Return an instruction of LLVM, with 64 bytes for `*`."""
    kind = ir.FunctionType(returns, takes)
    own = name.replace("*", f"v{TOGETHER}i8")
    found: Any = cgutils.get_or_insert_function
    return found(builder.module, kind, own)


class _Classes:
    """The loops over the classes of 64 elements, as code.

    The first loop takes the frequent classes, whether the elements have them or not: what it does
    next does not wait for what it finds, nor does it end at a place that the processor cannot
    guess. The second loop, mostly empty, takes each class that is left, by its first element.
    mask: bool[64], the elements of the class. place: of its next byte, an int64. count: of the
    elements.
    """

    def __init__(self, builder: Any, keys: Any, places: Any, frequent: Any, most: Any) -> None:
        self._builder = builder
        self._places = places
        self._keys = keys
        self._frequent = frequent
        self._most = most
        self._all = builder.load(builder.bitcast(keys, _BYTES.as_pointer()), align=1)

    def each(self, first: Sequence[Any], made: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Make the code of one class, for each class; return what it carries after the last.

        first: what it carries at first. made: takes what it carries, and returns the next.
        """
        builder = self._builder
        before = builder.block
        often, middle = builder.append_basic_block("often"), builder.append_basic_block("middle")
        seldom, done = builder.append_basic_block("seldom"), builder.append_basic_block("done")
        zero = ir.Constant(_WORD, 0)
        all_left = ir.Constant(_WORD, -1)
        are_none = builder.icmp_signed("==", self._most, zero)
        builder.cbranch(are_none, middle, often)

        builder.position_at_end(often)
        number, left, *carried = self._phis((_WORD, _WORD), first)
        key = builder.load(builder.gep(self._frequent, [number]))
        bits = self._begin(key)
        after = made(carried)
        self._advance()
        still = builder.and_(left, builder.not_(bits))
        following = builder.add(number, ir.Constant(_WORD, 1))
        self._join(before, (number, left, *carried), (zero, all_left, *first))
        self._join(often, (number, left, *carried), (following, still, *after))
        builder.cbranch(builder.icmp_signed("==", following, self._most), middle, often)

        builder.position_at_end(middle)
        left, *carried = self._phis((_WORD,), first)
        self._join(before, (left, *carried), (all_left, *first))
        self._join(often, (left, *carried), (still, *after))
        builder.cbranch(builder.icmp_unsigned("==", left, zero), done, seldom)
        of_middle = (left, *carried)

        builder.position_at_end(seldom)
        left, *carried = self._phis((_WORD,), first)
        own = builder.cttz(left, ir.Constant(_BIT, 1))
        bits = self._begin(builder.load(builder.gep(self._keys, [own])))
        after = made(carried)
        self._advance()
        still = builder.and_(left, builder.not_(bits))
        self._join(middle, (left, *carried), of_middle)
        self._join(seldom, (left, *carried), (still, *after))
        builder.cbranch(builder.icmp_unsigned("==", still, zero), done, seldom)

        builder.position_at_end(done)
        carried = self._phis((), first)
        self._join(middle, carried, of_middle[1:])
        self._join(seldom, carried, after)
        return carried

    def _phis(self, kinds: Sequence[Any], first: Sequence[Any]) -> list[Any]:
        return [self._builder.phi(kind) for kind in (*kinds, *(one.type for one in first))]

    @staticmethod
    def _join(block: Any, phis: Sequence[Any], values: Sequence[Any]) -> None:
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, block)

    def _begin(self, key: Any) -> Any:
        """Make mask, place and count of a class; return the mask as an integer."""
        builder = self._builder
        lane = builder.insert_element(
            ir.Constant(_BYTES, ir.Undefined), key, ir.Constant(_PLACE, 0)
        )
        everywhere = ir.Constant(ir.VectorType(_PLACE, TOGETHER), None)
        same = builder.shuffle_vector(lane, ir.Constant(_BYTES, ir.Undefined), everywhere)
        self.mask = builder.icmp_unsigned("==", self._all, same)
        bits = builder.bitcast(self.mask, _WORD)
        self.count = builder.ctpop(bits)
        self._slot = builder.gep(self._places, [builder.zext(key, _WORD)])
        self.place = builder.zext(builder.load(self._slot), _WORD)
        return bits

    def _advance(self) -> None:
        builder = self._builder
        after = builder.trunc(builder.add(self.place, self.count), _PLACE)
        builder.store(after, self._slot)


@intrinsic
def _count(_typing: Any, keys: Any, places: Any, frequent: Any, most: Any, at: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        keys_at = _data(context, builder, kinds[0], arguments[0], arguments[4])
        places_at = _data(context, builder, kinds[1], arguments[1])
        frequent_at = _data(context, builder, kinds[2], arguments[2])
        classes = _Classes(builder, keys_at, places_at, frequent_at, arguments[3])
        classes.each((), lambda _: ())
        return context.get_dummy_value()

    return types.void(keys, places, frequent, most, at), made


# The decorator's type shows the typing context as an argument, which calls do not pass.
count: Final[Any] = _count
"""count(keys, places, frequent, most, at): add the 64 elements from `at` on to the places of their
classes."""


class _Sides:
    """Addresses of what `expand` and `compress` take: words, bytes of planes; and the classes."""

    def __init__(self, context: Any, builder: Any, kinds: Any, arguments: Any) -> None:
        def data(number: int, at: Any = None) -> Any:
            return _data(context, builder, kinds[number], arguments[number], at)

        most, self._length, at = arguments[3], arguments[5], arguments[7]
        self._builder = builder
        self._planes = data(4)
        self.words = data(6, at)
        self.classes = _Classes(builder, data(0, at), data(1), data(2), most)

    def plane(self, p: int) -> Any:
        """Return the address of the next byte of plane p."""
        start = self._builder.mul(self._length, ir.Constant(_WORD, p))
        return self._builder.gep(self._planes, [self._builder.add(self.classes.place, start)])


def _moving(made: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """Return what `made` makes as a function that numba knows: of `expand` and `compress`."""

    @intrinsic
    def found(
        _typing: Any,
        keys: Any,
        places: Any,
        frequent: Any,
        most: Any,
        planes: Any,
        n: Any,
        words: Any,
        at: Any,
    ) -> Any:
        return types.void(keys, places, frequent, most, planes, n, words, at), made

    return found


def expand(width: int) -> Any:
    """Return expand(keys, places, frequent, most, planes, n, words, at): elements of `width` bytes.

    It writes 64 elements to `words`, from `at` on: byte p of an element is in planes, uint8[width *
    n], from p * n on.
    """

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sides = _Sides(context, builder, signature.args, arguments)
        takes = [_BYTE.as_pointer(), _MASK, _BYTES]
        load = _declared(builder, "llvm.masked.expandload.*", _BYTES, takes)

        def expanded(before: Sequence[Any]) -> list[Any]:
            return [
                builder.call(load, [sides.plane(p), sides.classes.mask, own])
                for p, own in enumerate(before)
            ]

        nothing = [ir.Constant(_BYTES, None)] * width
        kind = ir.VectorType(ir.IntType(8 * width), TOGETHER)
        whole = ir.Constant(kind, None)
        for p, own in enumerate(sides.classes.each(nothing, expanded)):
            shift = ir.Constant(kind, [8 * p] * TOGETHER)
            wide = own if width == 1 else builder.zext(own, kind)
            whole = builder.or_(whole, builder.shl(wide, shift))
        builder.store(whole, builder.bitcast(sides.words, kind.as_pointer()), align=1)
        return context.get_dummy_value()

    return _moving(made)


def compress(width: int) -> Any:
    """Return compress(keys, places, frequent, most, planes, n, words, at): inverse of `expand`."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sides = _Sides(context, builder, signature.args, arguments)
        takes = [_BYTES, _BYTES, _MASK]
        pack = _declared(builder, "llvm.x86.avx512.mask.compress.*", _BYTES, takes)
        takes = [_BYTES, _BYTES.as_pointer(), _PLACE, _MASK]
        write = _declared(builder, "llvm.masked.store.*.p0", ir.VoidType(), takes)
        lowest = _declared(builder, "llvm.x86.bmi.bzhi.64", _WORD, [_WORD, _WORD])
        kind = ir.VectorType(ir.IntType(8 * width), TOGETHER)
        whole = builder.load(builder.bitcast(sides.words, kind.as_pointer()), align=1)
        own = []
        for p in range(width):
            shifted = builder.lshr(whole, ir.Constant(kind, [8 * p] * TOGETHER))
            own.append(shifted if width == 1 else builder.trunc(shifted, _BYTES))

        def compressed(_: Sequence[Any]) -> Sequence[Any]:
            # As many of the lowest bits as the class has elements: 0 to 64.
            all_of = ir.Constant(_WORD, -1)
            ones = builder.call(lowest, [all_of, sides.classes.count])
            written = builder.bitcast(ones, _MASK)
            for p in range(width):
                mask = sides.classes.mask
                packed = builder.call(pack, [own[p], ir.Constant(_BYTES, None), mask])
                target = builder.bitcast(sides.plane(p), _BYTES.as_pointer())
                builder.call(write, [packed, target, ir.Constant(_PLACE, 1), written])
            return ()

        sides.classes.each((), compressed)
        return context.get_dummy_value()

    return _moving(made)
