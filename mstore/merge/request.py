"""The request: what a person asked a merge to do, checked and resolved, before any planning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mstore.errors import BadRequest
from mstore.ids import SnapshotId
from mstore.merge.operators import Value, check_weights, parse_parameters
from mstore.numeric.floats import CODES

_SPELLINGS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class Input:
    """A snapshot to merge, and what it was called."""

    snapshot: SnapshotId
    name: str


@dataclass(frozen=True, slots=True)
class Request:
    """One merge to plan.

    budget: bytes (int), share of the full cost in (0, 1] (float), or None.  max_error: bound on
    the relative error, or None.  dtype: output dtype, None for the base's.  analyze: whether
    missing statistics may be taken now.
    """

    base: Input
    experts: tuple[Input, ...]
    weights: tuple[float, ...]
    method: str
    parameters: Mapping[str, Value]
    budget: int | float | None
    max_error: float | None
    dtype: str | None
    analyze: bool


def request(
    *,
    base: Input,
    experts: Sequence[tuple[Input, float]],
    method: str,
    parameters: Mapping[str, object],
    budget: float | None,
    max_error: float | None,
    dtype: str | None,
    analyze: bool,
) -> Request:
    """Check everything that can be checked without looking at a tensor.  Raises BadRequest."""
    complete = parse_parameters(method, parameters)
    weights = check_weights(method, complete, [weight for _, weight in experts])
    if budget is not None:
        _check_budget(budget)
    if max_error is not None and not (math.isfinite(max_error) and max_error >= 0):
        raise BadRequest(f"--max-error must be a number of 0 or more, not {max_error!r}")
    return Request(
        base=base,
        experts=tuple(expert for expert, _ in experts),
        weights=weights,
        method=method,
        parameters=complete,
        budget=budget,
        max_error=max_error,
        dtype=None if dtype is None else _output_dtype(dtype),
        analyze=analyze,
    )


def _check_budget(budget: int | float) -> None:
    hint = "--budget 2GiB or --budget 30%"
    if not isinstance(budget, int | float):
        raise BadRequest(
            f"a budget is a number of bytes or a share, not {budget!r}",
            hint="budget=2 * 2**30 or budget=0.3",
        )
    if isinstance(budget, int):
        if budget <= 0:
            raise BadRequest(
                "a budget of 0 reads no expert: that merge is the base itself", hint=hint
            )
    elif not 0 < budget <= 1:
        raise BadRequest(
            f"a budget as a share must be above 0 % and at most 100 %, not {budget:.6g}", hint=hint
        )


def _output_dtype(dtype: str) -> str:
    name = _SPELLINGS.get(dtype.lower(), dtype.upper())
    if name not in CODES:
        raise BadRequest(
            f"cannot write dtype {dtype!r}", hint="--dtype bfloat16, float16 or float32"
        )
    return name
