"""Tied tensors: names that stand for one tensor in the base and in every expert alike.

A model whose output layer is its embedding may store both.  They are surveyed, planned and
merged once, under the first of their names, so that they stay one tensor whatever a method draws
by name and whatever a budget leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstore.ids import TensorId


def first_names(
    base: Mapping[str, TensorId], experts: Sequence[Mapping[str, TensorId]]
) -> dict[str, str]:
    """Each tensor of the base -> the first one, in its order, that is the same in all members.

    A tensor that an expert lacks is tied to nothing.
    """
    found: dict[tuple[TensorId | None, ...], str] = {}
    first = {}
    for name, id in base.items():
        members = (id, *(expert.get(name) for expert in experts))
        first[name] = name if None in members else found.setdefault(members, name)
    return first
