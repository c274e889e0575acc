"""Layers: which part of a model a tensor belongs to, read from the tensors' names.

Owns the one rule by which sums over layers are made.  Pure, no state.

A name is a path of components between dots.  Where one of them is a whole number, the layer is
the path as far as the first such number: `model.layers.12.mlp.up_proj.weight` is of
`model.layers.12`.  Any other name is of the first component that follows what the layers, or all
names, have in front of them: `model.embed_tokens.weight` is of `model.embed_tokens`,
`lm_head.weight` of `lm_head`.
"""

from __future__ import annotations

from collections.abc import Iterable


def layers_of(names: Iterable[str]) -> dict[str, str]:
    """Each tensor's layer, for all names of a model.

    Ordered by layer: kinds of layers by first appearance, numbered ones of a kind by number;
    within a layer in the order given.
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
            # A name that is all front is a layer of its own.
            front = max((len(f) for f in fronts if tuple(path[: len(f)]) == f), default=0)
            end = min(front + 1, len(path))
            kind, digits = ".".join(path[:end]), ""
        found[name] = ".".join(path[:end])
        # Digits by length and then as text: in the order of numbers, of any size.
        order[name] = kinds.setdefault(kind, len(kinds)), len(digits), digits
    return {name: found[name] for name in sorted(found, key=lambda name: order[name])}


def _number(path: list[str]) -> int | None:
    """Where the first whole number stands, not counting the first and the last component."""
    return next(
        (at for at in range(1, len(path) - 1) if path[at].isascii() and path[at].isdigit()), None
    )


def _common(paths: list[list[str]]) -> tuple[str, ...]:
    """The components that all paths begin with, at least one left over in each."""
    common: list[str] = []
    for components in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(components)) > 1:
            break
        common.append(components[0])
    return tuple(common)
