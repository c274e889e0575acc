"""Mix: one operation in the form that the compiled passes take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mstore.merge.arithmetic.tiles import ADDITIVE, CONSENSUS, DIRECT
from mstore.merge.methods.method import Operation


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """One operation in the form that the kernel takes.

    `weights` is float32[K], or float32[K + 1] with the base first if that is a summand itself
    (`has_base`); `factors` is float32[3]: fixed divisor, lambda, rescale factor; `flags` is
    int64[4]: kind, normalize (for DIRECT: keeps the base), cuts per expert, random; `mask_limit`
    is as in `Operation`.
    """

    weights: npt.NDArray[np.float32]
    factors: npt.NDArray[np.float32]
    flags: npt.NDArray[np.int64]
    mask_limit: int
    has_base: bool = False

    @classmethod
    def of(cls, operation: Operation) -> Mix:
        """Convert a settled `Operation`."""
        assert not operation.needs_facts
        kind = ADDITIVE
        if operation.is_whole:
            kind = DIRECT
        elif operation.is_elected:
            kind = CONSENSUS
        keeps = operation.keeps_base if operation.is_whole else operation.normalizes
        cuts = operation.is_trimmed + operation.is_band
        flags = (kind, keeps, cuts, operation.is_drawn)
        factors = (operation.divisor, operation.scale, operation.rescale)
        has_base = operation.mixture is not None
        weights = (operation.base_weight, *operation.weights) if has_base else operation.weights
        return cls(
            weights=np.array(weights, dtype=np.float32),
            factors=np.array(factors, dtype=np.float32),
            flags=np.array(flags, dtype=np.int64),
            mask_limit=operation.mask_limit,
            has_base=has_base,
        )

    @property
    def experts(self) -> int:
        """How many experts it mixes, K."""
        return self.weights.size - self.has_base

    def signature(self) -> bytes:
        """Return canonical bytes of all that affects the arithmetic here, except the weights.

        flags (4 x int64), factors (3 x float32), mask_limit (uint64), little-endian: 52 bytes, the
        same on every machine.  Two mixes of equal signature give equal bytes for equal chunks,
        weights, thresholds, quotas and keys.
        """
        return (
            self.flags.astype("<i8").tobytes()
            + self.factors.astype("<f4").tobytes()
            + self.mask_limit.to_bytes(8, "little")
        )
