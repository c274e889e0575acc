"""Whether a fine-tune and its base are the same architecture: equal tensor names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

from mstore.errors import Incompatible

Shapes = Mapping[str, tuple[int, ...]]
_LISTED = 8


def require_same_shapes(base: Shapes, other: Shapes, *, what: str, where: str, hint: str) -> None:
    """Raise Incompatible listing the tensors that are missing, extra, or of another shape."""
    problems = []
    for name, shape in base.items():
        if name not in other:
            problems.append(f"{name} is missing")
        elif other[name] != shape:
            problems.append(f"{name} has shape {list(other[name])}, the base {list(shape)}")
    problems += [f"{name} is not in the base" for name in other if name not in base]
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise Incompatible(f"{what}: {'; '.join(problems[:_LISTED])}{more}", where=where, hint=hint)
