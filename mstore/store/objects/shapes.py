"""Whether a fine-tune and its base have the same architecture: equal tensor names and shapes.

Patterns (the options `only` and `skip`) select the tensors to compare; others may be missing, extra
or of another shape.

The only rule by which sums per layer are made is here, too: a name is a path of components between
dots. If a component (neither the first nor the last) is a whole number, the layer is the path up to
and including the first such number: `model.layers.12.mlp.up_proj.weight` belongs to
`model.layers.12`. Otherwise the layer ends with the first component after the prefix that precedes
the layer numbers, or that all names share: `model.embed_tokens.weight` belongs to
`model.embed_tokens`, `lm_head.weight` to `lm_head`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Option, Phrase, Text, call, phrase

Shapes = Mapping[str, tuple[int, ...]]
_LISTED = 8
_SPECIAL = re.compile(r"[*?\[]")
_QUOTED = re.compile(r"\[([*?\[])\]")
EMBEDDINGS = re.compile(
    r"(^|[.:])(embed_tokens|embed_in|embed_out|embeddings?|tok_embeddings|word_embeddings|"
    r"token_embedding|shared|wte|lm_head|output|decoder|output_projection)(\.weight)?$"
)
"""Finds the names that models use for their input and output word embeddings."""
CHANNELS = 1
"""The dimension of input channels; of a matrix, that of its inputs."""
# Name parts of all common adapter formats (PEFT, diffusers, kohya).
_ADAPTER = (".lora_A.", ".lora_B.", ".lora_down.", ".lora_up.", ".lora_embedding_A")


class Globs:
    """Patterns of names (fnmatch, case-sensitive), in order.

    There may be thousands: plain names are looked up, and the others are one expression.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.names: dict[str, int] = {}
        self._numbers: list[int] = []
        expressions = []
        for number, pattern in enumerate(patterns):
            name = literal_name(pattern)
            if name is not None:
                self.names.setdefault(name, number)
            else:
                self._numbers.append(number)
                # The empty group says which one matched.
                expressions.append(fnmatch.translate(pattern) + "()")
        self._match = re.compile("|".join(expressions)).match if expressions else None

    def first(self, name: str) -> int | None:
        """Return the number of the first pattern that matches a name."""
        first = self.names.get(name)
        found = None if self._match is None else self._match(name)
        if found is None:
            return first
        number = self._numbers[(found.lastindex or 1) - 1]
        return number if first is None else min(first, number)


def matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that one of the patterns matches (fnmatch, case-sensitive)."""
    first = Globs(patterns).first
    return {name for name in names if first(name) is not None}


def unmatched(names: Collection[str], patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches none of the names."""
    known = set(names)
    for pattern in patterns:
        name = literal_name(pattern)
        if (not matching(known, [pattern])) if name is None else name not in known:
            return pattern
    return None


def literal_pattern(name: str) -> str:
    """Return the pattern that matches this name alone."""
    return _SPECIAL.sub(r"[\g<0>]", name)


def literal_name(pattern: str) -> str | None:
    """Return the only name that a pattern matches, None if it may match several."""
    name = _QUOTED.sub(r"\g<1>", pattern)
    return name if literal_pattern(name) == pattern else None


def chosen(shapes: Shapes, only: Sequence[str], skip: Sequence[str]) -> Shapes:
    """Return the tensors that the patterns do not leave out."""
    kept = matching(shapes, only) if only else shapes.keys()
    wanted = kept - matching(shapes, skip)
    return {name: shape for name, shape in shapes.items() if name in wanted}


def require_patterns(patterns: Sequence[str], option: Option) -> None:
    """Raise BadRequest unless this is a list of patterns without empty ones."""
    if isinstance(patterns, str) or not all(one and isinstance(one, str) for one in patterns):
        raise BadRequest(
            "patterns of tensor names are a list of texts that are not empty",
            where=option,
            hint=Option(option.name, ("model.layers.*.mlp.*",)),
        )


def require_matches(
    names: Collection[str], only: Sequence[str], skip: Sequence[str], model: str
) -> None:
    """Raise BadRequest for a pattern that is empty, or that matches none of the names.

    model: what to list, to see names that it could match.
    """
    for option, patterns in ((Option("only"), only), (Option("skip"), skip)):
        require_patterns(patterns, option)
        if (pattern := unmatched(names, patterns)) is not None:
            hint: Text = call("tensors", model)
            if any(name.startswith(f"{pattern}:") for name in names):
                hint = Option(option.name, (f"{pattern}:*",))
            raise BadRequest(f"no tensor's name matches {pattern!r}", where=option, hint=hint)


def difference_hint(base: str, other: str) -> Phrase:
    """Return the hint for models that differ: what shows the difference, and what ignores it."""
    return phrase(
        "{diff}; {skip} leaves tensors out",
        diff=call("diff", base, other),
        skip=Option("skip", ("PATTERN",)),
    )


def differ_in_vocabulary(base: Shapes, other: Shapes) -> bool:
    """Return whether only the numbers of rows of embeddings differ."""
    if base.keys() != other.keys():
        return False
    differing = [name for name, shape in base.items() if other[name] != shape]
    return bool(differing) and all(
        EMBEDDINGS.search(name) and base[name][1:] == other[name][1:] for name in differing
    )


def differ_in_channels(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes differ in the number of input channels, and in nothing else."""
    if one == other or len(one) != len(other) or len(one) <= CHANNELS:
        return False
    return [*one[:CHANNELS], *one[CHANNELS + 1 :]] == [*other[:CHANNELS], *other[CHANNELS + 1 :]]


def require_same_shapes(base: Shapes, other: Shapes, *, what: str, where: str, hint: Text) -> None:
    """Raise Incompatible listing the tensors that are missing, extra, or of another shape.

    The error says so if `other` is an adapter.
    """
    if any(mark in name for name in other for mark in _ADAPTER) and not other.keys() & base.keys():
        raise Incompatible(
            f"{what}: it is a LoRA adapter, not a whole model",
            where=where,
            hint="merge it into its base and store the result: PeftModel.from_pretrained(base, "
            "adapter).merge_and_unload().save_pretrained(DIRECTORY)",
        )
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


def parts_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return each tensor's layer and its part in it, ordered as by `layers_of`.

    A part is the rest of the name with every whole number as `*`, so that the experts of a layer
    are one part: `mlp.experts.*.up_proj.weight`.  Empty where the name is that of the layer.
    """
    return {
        name: (layer, ".".join(map(_starred, name[len(layer) + 1 :].split("."))))
        for name, layer in layers_of(names).items()
    }


def _starred(component: str) -> str:
    return "*" if component.isascii() and component.isdigit() else component


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
