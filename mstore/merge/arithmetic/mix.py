"""Mix: one operation in the form that the compiled passes take."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import numpy.typing as npt


class Mix(msgspec.Struct, frozen=True, eq=False):
    """One operation in the form that the kernel takes.

    `weights` is float32[K], or float32[K + 1] with the base first if that is a summand itself
    (`has_base`); with companions that are read, those of K experts, and the same again for each
    role; `factors` is float32[2]: fixed divisor, lambda times scale (NEAR: divisor, its reach;
    INFORMED: scale, the floor); `flags` is int64[4]: kind, normalize (for DIRECT: keeps the base),
    cuts per expert, masked (1: at random, or by variance, 2: by rank, 3: by what experts need, 4:
    by importance; 5 and 6: none, and the weights are those of a turn).
    One per weight:
    `rescales` is float32, the factor of a drawn delta; `mask_limits` are as in `Selection`.
    `chances` are bytes of each expert that say what else its mask follows from.
    """

    weights: npt.NDArray[np.float32]
    factors: npt.NDArray[np.float32]
    flags: npt.NDArray[np.int64]
    rescales: npt.NDArray[np.float32]
    mask_limits: tuple[int, ...]
    has_base: bool = False
    chances: tuple[bytes, ...] = ()

    @property
    def experts(self) -> int:
        """How many experts it mixes, K; companions that are read count, too."""
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
        chances = list(self.chances) or [b""] * self.experts
        if self._alike:
            return chances
        rescales, limits = self.rescales[self.has_base :], self.mask_limits[self.has_base :]
        return [
            struct.pack("<fQ", rescale, limit) + chance
            for rescale, limit, chance in zip(rescales, limits, chances, strict=True)
        ]
