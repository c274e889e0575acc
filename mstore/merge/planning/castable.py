"""Hints for models whose elements have no arithmetic here, and can be cast.

Owns the words.  `mstore.casting` owns what a cast does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mstore.casting.scales import are_scales
from mstore.numeric.codes import CASTS, CODES, cast_hint
from mstore.phrases import Phrase, call, joined, phrase


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
    for model, one, two in ((other, theirs, ours), (base, ours, theirs)):
        if are_scales([name for name in one if name not in two], one):
            cast = call("cast", model, dtype=CASTS["BF16"])
            return phrase("{cast} multiplies its weights by their scales", cast=cast)
    return None
