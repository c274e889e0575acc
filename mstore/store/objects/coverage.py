"""The coverage record: which experts contributed to which block, and what is not finite."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from mstore.blocks.packs import Kind
from mstore.store.objects.canonical import Count, IdBytes, Record, RecordLimits, too_long, too_many
from mstore.terms.ids import CoverageId


class TensorCoverage(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One merged tensor.  Bit i of a bitmap (least significant first) is output block i.

    reused: blocks that are the base's own. contributed: per expert, the blocks it contributed to.
    """

    name: str
    blocks: Count
    reused: bytes
    contributed: tuple[bytes, ...]

    def problem(self, limits: RecordLimits) -> str | None:
        """Return what is wrong with its bitmaps, or None."""
        if any(not _is_bitmap(bits, self.blocks) for bits in (self.reused, *self.contributed)):
            return "a bitmap that does not fit the blocks"
        return too_many("experts", len(self.contributed), limits.experts) or too_long(
            "a tensor name", self.name, limits.name_bytes
        )


class Coverage(Record, frozen=True, array_like=True, tag="coverage/1"):
    """The outcome of one plan; tensors as in the plan, all others are the base's own.

    not_finite: tensors with elements that are infinite or NaN, and are finite in the base, and how
    many, in the order of `tensors`.
    """

    kind: ClassVar[Kind] = Kind.COVERAGE
    id_type: ClassVar[type[CoverageId]] = CoverageId

    plan: IdBytes
    tensors: tuple[TensorCoverage, ...]
    not_finite: tuple[tuple[str, Count], ...]

    def id(self) -> CoverageId:
        return CoverageId.of(self.encode())

    def problem(self, limits: RecordLimits) -> str | None:
        if len({len(tensor.contributed) for tensor in self.tensors}) > 1:
            return "tensors with different numbers of experts"
        odd = dict(self.not_finite)
        named = tuple((t.name, odd[t.name]) for t in self.tensors if odd.get(t.name))
        if named != self.not_finite:
            return "counts of elements that are not finite, and not of its tensors"
        problems = (tensor.problem(limits) for tensor in self.tensors)
        return too_many("tensors", len(self.tensors), limits.tensors) or next(
            filter(None, problems), None
        )


def bitmap(flags: list[bool]) -> bytes:
    """Pack flags into bits, least significant first."""
    data = bytearray(-(-len(flags) // 8))
    for number, flag in enumerate(flags):
        if flag:
            data[number >> 3] |= 1 << (number & 7)
    return bytes(data)


def bit(data: bytes, number: int) -> bool:
    """Bit `number` of a bitmap."""
    return bool(data[number >> 3] >> (number & 7) & 1)


def _is_bitmap(data: bytes, count: int) -> bool:
    """Return whether these are `count` flags with zero spare bits."""
    return len(data) == -(-count // 8) and not (count & 7 and data[-1] >> (count & 7))
