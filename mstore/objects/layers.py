"""Layers: which part of a model a tensor belongs to, derived from the tensors' names.

Owns the only rule by which sums per layer are made. Pure, no state.

A name is a path of components between dots. If a component (neither the first nor the last) is a
whole number, the layer is the path up to and including the first such number:
`model.layers.12.mlp.up_proj.weight` belongs to `model.layers.12`. Otherwise the layer ends with the
first component after the prefix that precedes the layer numbers, or that all names share:
`model.embed_tokens.weight` belongs to `model.embed_tokens`, `lm_head.weight` to `lm_head`.
"""

from __future__ import annotations

from collections.abc import Iterable


def layers_of(names: Iterable[str]) -> dict[str, str]:
    """Return each tensor's layer, given all tensor names of a model.

    Ordered by layer: kinds of layers by first appearance, numbered ones of a kind by number; within
    a layer in the given order.
    """
    paths = {name: name.split(".") for name in names}
    numbered = {name: number for name, path in paths.items() if (number := _number(path))}
    fronts = {tuple(paths[name][: number - 1]) for name, number in numbered.items()}
    fronts.add(_common(list(paths.values())))
    found = {}
    kinds: dict[str, int] = {}
    order = {}
    for name, path in paths.items():
        if name in numbered:
            end = numbered[name] + 1
            kind, digits = ".".join(path[: end - 1]), path[end - 1].lstrip("0")
        else:
            # A name that consists only of the prefix is a layer of its own.
            front = max((len(f) for f in fronts if tuple(path[: len(f)]) == f), default=0)
            end = min(front + 1, len(path))
            kind, digits = ".".join(path[:end]), ""
        found[name] = ".".join(path[:end])
        # Digits sorted by length and then as text have the order of numbers of any size.
        order[name] = kinds.setdefault(kind, len(kinds)), len(digits), digits
    return {name: found[name] for name in sorted(found, key=lambda name: order[name])}


def _number(path: list[str]) -> int | None:
    """Return the index of the first whole number, ignoring the first and the last component."""
    return next(
        (at for at in range(1, len(path) - 1) if path[at].isascii() and path[at].isdigit()), None
    )


def _common(paths: list[list[str]]) -> tuple[str, ...]:
    """Return the longest common prefix that leaves at least one component in each path."""
    common: list[str] = []
    for components in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(components)) > 1:
            break
        common.append(components[0])
    return tuple(common)
