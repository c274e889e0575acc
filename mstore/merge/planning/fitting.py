"""Whether tensors of experts can be merged with the base's: types without arithmetic, and hints.

Owns the words.  `store.objects.shapes` compares names and shapes, `models.cast` owns what a
cast does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mstore.numeric.codes import CASTS, CODES, ITEMSIZES, cast_hint
from mstore.store.objects.shapes import differ_in_vocabulary, told_difference
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Incompatible
from mstore.terms.ids import TensorId
from mstore.terms.phrases import Option, Phrase, Text, call, few, joined, phrase

Records = Mapping[str, tuple[TensorId, Tensor]]
"""Tensors of a model with their records, by name."""


def hint_for(
    base: str,
    expert: str,
    ours: Mapping[str, tuple[int, ...]],
    theirs: Mapping[str, tuple[int, ...]],
    records: Records,
    found: Records,
) -> Text:
    """Return what to do about an expert whose tensors have not the names and shapes of the base's.

    base, expert: their names. ours, theirs: shapes of what is merged. records, found: all tensors.
    """
    hint = told_difference(base, expert)
    if ours.keys() != theirs.keys():
        allowed = Option("allow_missing", True)
        hint = phrase("{told}, {allowed} merges the others", told=hint, allowed=allowed)
    if differ_in_vocabulary(ours, theirs):
        models = {"base": base, "experts": (expert,)}
        hint = phrase("{align} gives them one vocabulary", align=call("align", **models))
    return hint_for_scales(base, _types(records), expert, _types(found)) or hint


def odd_types(base: Tensor, other: Tensor) -> set[str]:
    """Return element types without arithmetic here of tensors that differ; none if they may."""
    types = {base.dtype, other.dtype} - ITEMSIZES.keys()
    return types if types and other != base and 0 not in base.shape else set()


def require_types(
    base_records: Records,
    records: Records,
    names: Sequence[str],
    *,
    base: str,
    where: str,
) -> None:
    """Raise Incompatible if elements differ from the base's that have no arithmetic here."""
    odd = {
        name: types
        for name in names
        if (types := odd_types(base_records[name][1], records[name][1]))
    }
    if odd:
        kinds = sorted(set().union(*odd.values()))
        pairs = [(base_records[name][1].dtype, records[name][1].dtype) for name in odd]
        skip = phrase(
            "{skip} leaves them as they are in the base",
            skip=Option("skip", next(iter(odd)) if len(odd) == 1 else ("PATTERN",)),
        )
        raise Incompatible(
            f"elements of {', '.join(kinds)} cannot be merged, and have other values than "
            f"in {base}: {few(list(odd))}",
            where=where,
            hint=joined(hint_for_types(base, where, pairs), skip, between="; "),
        )


def hint_for_types(base: str, other: str, pairs: Iterable[tuple[str, str]]) -> Phrase | None:
    """Return the hint for tensors whose types cannot be merged; None if casting does not help.

    base, other: names of the models. pairs: the types of both for each such tensor.
    """
    known = list(pairs)
    found: list[Phrase] = []
    for model, own in ((base, 0), (other, 1)):
        odd = {pair[own] for pair in known} - CODES.keys()
        to = sorted({pair[1 - own] for pair in known} & CODES.keys())
        hint = cast_hint(odd, model, *to[:1])
        if hint is None:
            return None
        if odd:
            found.append(hint)
    return joined(*found, between="; ")


def hint_for_scales(
    base: str, ours: Mapping[str, str], other: str, theirs: Mapping[str, str]
) -> Phrase | None:
    """Return the hint for models that differ in scales of weights in fp8; None if not so.

    base, other: names of the models. ours, theirs: types of their tensors, by name.
    """
    from mstore.models.scales import are_scales

    for model, one, two in ((other, theirs, ours), (base, ours, theirs)):
        if are_scales([name for name in one if name not in two], one):
            cast = call("cast", model, dtype=CASTS["BF16"])
            return phrase("{cast} multiplies its weights by their scales", cast=cast)
    return None


def _types(tensors: Records) -> dict[str, str]:
    return {name: record.dtype for name, (_, record) in tensors.items()}
