"""Mix: one operation in the form that the compiled passes take."""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.tiles import (
    ADDITIVE,
    ALONE,
    AVERAGED,
    CONSENSUS,
    DIRECT,
    FUSED,
    INFORMED,
    NEAR,
)
from mstore.merge.methods.method import Operation, Rows

_NEEDED: Final = 3
_IMPORTANT: Final = 4
_TURNED: Final = {Rows.SLERP: 5, Rows.STOCK: 6}


class Mix(msgspec.Struct, frozen=True, eq=False):
    """One operation in the form that the kernel takes.

    `weights` is float32[K], or float32[K + 1] with the base first if that is a summand itself
    (`has_base`); INFORMED: K of experts and K of their Fishers, the same again; `factors` is
    float32[2]: fixed divisor, lambda times scale (NEAR: divisor, its reach; INFORMED: scale, the
    floor); `flags` is
    int64[4]: kind, normalize (for DIRECT: keeps the base), cuts per expert, masked (1: at random,
    or by variance, 2: by rank, 3: by what experts need, 4: by importance; 5 and 6: none, and the
    weights are those of `rows`).
    One per weight:
    `rescales` is float32, the factor of a drawn delta; `mask_limits` are as in `Operation`.
    `ranked` has density and epsilon of each expert if masks follow from ranks (`masks`), `needed`
    the ratio of each expert, and how many must need an element, if masks follow from that
    (`agreement`).  With `rows` each row has weights of its own (`turns`), which follow from these.
    """

    weights: npt.NDArray[np.float32]
    factors: npt.NDArray[np.float32]
    flags: npt.NDArray[np.int64]
    rescales: npt.NDArray[np.float32]
    mask_limits: tuple[int, ...]
    has_base: bool = False
    ranked: tuple[tuple[float, float], ...] = ()
    needed: tuple[tuple[float, int], ...] = ()
    rows: Rows | None = None

    @classmethod
    def of(cls, operation: Operation) -> Mix:
        """Convert a settled `Operation`."""
        assert not operation.needs_facts
        kind = ADDITIVE
        if operation.is_whole:
            kind = ALONE if operation.is_alone else DIRECT
        elif operation.is_elected:
            kind = FUSED if operation.is_fused else CONSENSUS
        elif operation.is_averaged:
            kind = AVERAGED
        elif operation.is_informed:
            kind = INFORMED
        if operation.is_near:
            kind = NEAR
        scale = operation.reach if operation.is_near else operation.factor
        divisor = operation.divisor
        if operation.is_informed:
            divisor, scale = operation.factor, operation.floor
        keeps = operation.keeps_base if operation.is_whole else operation.normalizes
        cuts = operation.is_trimmed + operation.is_band + operation.is_above
        random = operation.is_drawn + operation.is_ranked + operation.is_varied
        random += _NEEDED * operation.is_agreed + _IMPORTANT * operation.is_important
        random = random if operation.rows is None else _TURNED[operation.rows]
        flags = (kind, keeps, cuts, random)
        has_base = operation.has_base
        both = zip(operation.densities, operation.epsilons, strict=True)
        weights = (operation.base_weight, *operation.weights) if has_base else operation.weights
        rescales, limits = operation.rescales, operation.mask_limits
        if operation.is_informed:
            weights, rescales, limits = weights * 2, rescales * 2, limits * 2
        return cls(
            weights=np.array(weights, dtype=np.float32),
            factors=np.array((divisor, scale), dtype=np.float32),
            flags=np.array(flags, dtype=np.int64),
            rescales=np.array((1.0,) * has_base + rescales, dtype=np.float32),
            mask_limits=(2**32,) * has_base + limits,
            has_base=has_base,
            ranked=tuple(both) if operation.is_ranked else (),
            needed=tuple((ratio, operation.least_needed) for ratio in operation.need_ratios)
            if operation.is_agreed
            else (),
            rows=operation.rows,
        )

    @property
    def is_important(self) -> bool:
        """Whether masks follow from importance (`importance`)."""
        return bool(self.flags[3] == _IMPORTANT)

    @property
    def is_informed(self) -> bool:
        """Whether it averages by Fishers (`informed`)."""
        return bool(self.flags[0] == INFORMED)

    @property
    def is_direct(self) -> bool:
        """Whether whole experts are summed, not their deltas."""
        return bool(self.flags[0] == DIRECT)

    @property
    def experts(self) -> int:
        """How many experts it mixes, K; Fishers count as experts."""
        return self.weights.size - self.has_base

    def signature(self) -> bytes:
        """Return canonical bytes of all that affects the arithmetic here, except the weights.

        flags (4 x int64), factors (2 x float32), rescale factor (float32), mask limit (uint64),
        little-endian: 52 bytes, the same on every machine.  The last two are 0 where experts differ
        in them; `own` then has them.  Two mixes of equal signature give equal bytes for equal
        chunks, weights, thresholds, quotas, keys and `own` parts.
        """
        one = self._alike
        rescale, limit = (self.rescales[:1], self.mask_limits[0]) if one else (np.zeros(1), 0)
        return (
            self.flags.astype("<i8").tobytes()
            + self.factors.astype("<f4").tobytes()
            + rescale.astype("<f4").tobytes()
            + limit.to_bytes(8, "little")
        )

    @property
    def _alike(self) -> bool:
        """Whether all experts have the same mask limit and rescale factor."""
        return len(set(self.mask_limits)) == 1 and len(set(self.rescales.tolist())) == 1

    def own(self) -> list[bytes]:
        """Return canonical bytes of what each expert has of its own, nothing if all are alike."""
        chances = [struct.pack("<2d", *one) for one in self.ranked]
        chances = chances or [struct.pack("<dq", *one) for one in self.needed]
        chances = chances or [b""] * self.experts
        if self._alike:
            return chances
        rescales, limits = self.rescales[self.has_base :], self.mask_limits[self.has_base :]
        return [
            struct.pack("<fQ", rescale, limit) + chance
            for rescale, limit, chance in zip(rescales, limits, chances, strict=True)
        ]
