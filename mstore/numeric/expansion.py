"""Expansion: 64 elements at a time to and from where their classes lie, by wide vectors.

Bytes lie ordered by class, and within a class in the order of elements.  For 64 elements in turn,
each class that they have gives, or takes, as many bytes as it has elements there.  Processors with
AVX-512 VBMI2 do that for a class in one instruction (vpexpandb, vpcompressb); IS_WIDE tells whether
code is made for one that has it.  Otherwise these functions must not be called.

The functions are numba intrinsics.  `keys`: uint8[>= at + 64], the classes of elements. `places`:
uint32[4 * 256], in every fourth the place of the next byte of a class; it is advanced.  at: the
first element, an int64.
"""

from __future__ import annotations

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
    """The loop over the classes of 64 elements, as code: each is met once, by its first element.

    mask: bool[64], the elements of the class. place: of its next byte, an int64. count: of the
    elements.
    """

    def __init__(self, builder: Any, keys: Any, places: Any) -> None:
        self._builder = builder
        self._places = places
        self._keys = keys
        self._all = builder.load(builder.bitcast(keys, _BYTES.as_pointer()), align=1)
        self._before = builder.block
        self._loop = builder.append_basic_block("class")
        self._done = builder.append_basic_block("done")
        builder.branch(self._loop)
        builder.position_at_end(self._loop)
        self._left = builder.phi(_WORD)
        self._left.add_incoming(ir.Constant(_WORD, -1), self._before)

    def carried(self, kind: Any) -> Any:
        """Return a value that the loop carries, at first zeros; `begin` comes after the last."""
        found = self._builder.phi(kind)
        found.add_incoming(ir.Constant(kind, None), self._before)
        return found

    def begin(self) -> None:
        """Make mask, place and count of the class."""
        builder = self._builder
        first = builder.cttz(self._left, ir.Constant(_BIT, 1))
        key = builder.load(builder.gep(self._keys, [first]))
        lane = builder.insert_element(
            ir.Constant(_BYTES, ir.Undefined), key, ir.Constant(_PLACE, 0)
        )
        everywhere = ir.Constant(ir.VectorType(_PLACE, TOGETHER), None)
        same = builder.shuffle_vector(lane, ir.Constant(_BYTES, ir.Undefined), everywhere)
        self.mask = builder.icmp_unsigned("==", self._all, same)
        self._bits = builder.bitcast(self.mask, _WORD)
        self.count = builder.ctpop(self._bits)
        fourth = builder.shl(builder.zext(key, _WORD), ir.Constant(_WORD, 2))
        self._slot = builder.gep(self._places, [fourth])
        self.place = builder.zext(builder.load(self._slot), _WORD)

    def end(self, carried: Any = ()) -> None:
        """Advance the place of the class, and go on; carried: (value, what it is next)."""
        builder = self._builder
        after = builder.trunc(builder.add(self.place, self.count), _PLACE)
        builder.store(after, self._slot)
        left = builder.and_(self._left, builder.not_(self._bits))
        self._left.add_incoming(left, self._loop)
        for value, following in carried:
            value.add_incoming(following, self._loop)
        is_last = builder.icmp_unsigned("==", left, ir.Constant(_WORD, 0))
        builder.cbranch(is_last, self._done, self._loop)
        builder.position_at_end(self._done)


@intrinsic
def _count(_typing: Any, keys: Any, places: Any, at: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        keys_at = _data(context, builder, signature.args[0], arguments[0], arguments[2])
        places_at = _data(context, builder, signature.args[1], arguments[1])
        classes = _Classes(builder, keys_at, places_at)
        classes.begin()
        classes.end()
        return context.get_dummy_value()

    return types.void(keys, places, at), made


# The decorator's type shows the typing context as an argument, which calls do not pass.
count: Final[Any] = _count
"""count(keys, places, at): add the 64 elements from `at` on to the places of their classes."""


class _Sides:
    """Addresses of what `expand` and `compress` take: keys, places, words, and bytes of planes."""

    def __init__(self, context: Any, builder: Any, kinds: Any, arguments: Any) -> None:
        def data(number: int, at: Any = None) -> Any:
            return _data(context, builder, kinds[number], arguments[number], at)

        *_, self._length, _, at = arguments
        self._builder = builder
        self._planes = data(2)
        self.keys, self.places, self.words = data(0, at), data(1), data(4, at)

    def plane(self, p: int, place: Any) -> Any:
        """Return the address of a byte of plane p."""
        start = self._builder.mul(self._length, ir.Constant(_WORD, p))
        return self._builder.gep(self._planes, [self._builder.add(place, start)])


def expand(width: int) -> Any:
    """Return expand(keys, places, planes, n, words, at), for elements of `width` bytes.

    It writes 64 elements to `words`, from `at` on: byte p of an element is in planes, uint8[width *
    n], from p * n on.
    """

    @intrinsic
    def found(
        _typing: Any, keys: Any, places: Any, planes: Any, n: Any, words: Any, at: Any
    ) -> Any:
        def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            sides = _Sides(context, builder, signature.args, arguments)
            takes = [_BYTE.as_pointer(), _MASK, _BYTES]
            load = _declared(builder, "llvm.masked.expandload.*", _BYTES, takes)
            classes = _Classes(builder, sides.keys, sides.places)
            before = [classes.carried(_BYTES) for _ in range(width)]
            classes.begin()
            after = []
            for p, bytes_before in enumerate(before):
                source = sides.plane(p, classes.place)
                after.append(builder.call(load, [source, classes.mask, bytes_before]))
            classes.end(zip(before, after, strict=True))
            kind = ir.VectorType(ir.IntType(8 * width), TOGETHER)
            whole = ir.Constant(kind, None)
            for p, own in enumerate(after):
                shift = ir.Constant(kind, [8 * p] * TOGETHER)
                wide = own if width == 1 else builder.zext(own, kind)
                whole = builder.or_(whole, builder.shl(wide, shift))
            builder.store(whole, builder.bitcast(sides.words, kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(keys, places, planes, n, words, at), made

    return found


def compress(width: int) -> Any:
    """Return compress(keys, places, planes, n, words, at): the inverse of `expand`."""

    @intrinsic
    def found(
        _typing: Any, keys: Any, places: Any, planes: Any, n: Any, words: Any, at: Any
    ) -> Any:
        def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            sides = _Sides(context, builder, signature.args, arguments)
            takes = [_BYTES, _BYTES, _MASK]
            pack = _declared(builder, "llvm.x86.avx512.mask.compress.*", _BYTES, takes)
            takes = [_BYTES, _BYTES.as_pointer(), _PLACE, _MASK]
            write = _declared(builder, "llvm.masked.store.*.p0", ir.VoidType(), takes)
            kind = ir.VectorType(ir.IntType(8 * width), TOGETHER)
            whole = builder.load(builder.bitcast(sides.words, kind.as_pointer()), align=1)
            own = []
            for p in range(width):
                shifted = builder.lshr(whole, ir.Constant(kind, [8 * p] * TOGETHER))
                own.append(shifted if width == 1 else builder.trunc(shifted, _BYTES))
            classes = _Classes(builder, sides.keys, sides.places)
            classes.begin()
            # The lowest bits, as many as the class has elements: 1 to 64.
            missing = builder.sub(ir.Constant(_WORD, TOGETHER), classes.count)
            written = builder.bitcast(builder.lshr(ir.Constant(_WORD, -1), missing), _MASK)
            for p in range(width):
                packed = builder.call(pack, [own[p], ir.Constant(_BYTES, None), classes.mask])
                target = builder.bitcast(sides.plane(p, classes.place), _BYTES.as_pointer())
                builder.call(write, [packed, target, ir.Constant(_PLACE, 1), written])
            classes.end()
            return context.get_dummy_value()

        return types.void(keys, places, planes, n, words, at), made

    return found
