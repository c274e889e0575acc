"""Compatibility: whether models can be merged, and what is risky about it, before a byte is read.

Compares what headers, configs, tokenizers and cards say of each expert with what they say of the
base.  Reads no weights, but the statistics that there are.  An error makes the merge impossible or
meaningless, a warning risky.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from mstore.checkpoint.declared import CARD, CONFIG, front_matter
from mstore.checkpoint.models import split_name
from mstore.checkpoint.strict_json import json_object
from mstore.merge.planning.request import Request
from mstore.merge.planning.tensors import (
    first_names,
    hint_for_channels,
    hint_for_scales,
    hint_for_types,
    odd_types,
    own_head_text,
)
from mstore.merge.planning.warnings import far_experts, moved_tokens_text, swapped
from mstore.models.adapters.config import CONFIG as ADAPTER_CONFIG
from mstore.models.adapters.inputs import Inputs, ModelChoice, ModelPairs, stand_ins
from mstore.models.adapters.targets import is_adapter, is_any_adapter
from mstore.models.compare import ComparedPart, ComparedSums, Measure, comparable
from mstore.models.made import conflicts, stated_licence
from mstore.models.optional import is_optional
from mstore.models.stats.pairs import known_rows
from mstore.models.stats.store import StatsStore
from mstore.models.vocabulary.members import PARTS, chat_template, rows_of
from mstore.models.vocabulary.tokenizer import TOKENIZER, Tokenizer, differences, tokenizer_of
from mstore.store.catalog import Catalog
from mstore.store.models import Models, models_in
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.shapes import (
    EMBEDDINGS,
    chosen,
    differ_in_channels,
    matching,
    require_matches,
)
from mstore.store.objects.tensor import Tensor
from mstore.store.tied import own_head, sizes_of, ties_embeddings
from mstore.terms.errors import Incompatible
from mstore.terms.ids import TensorId
from mstore.terms.phrases import Option, call, few, joined, phrase
from mstore.terms.report import Report

ERROR: Final = "error"
WARNING: Final = "warning"

_MAX_FILE: Final = 1 << 20
_NAMED: Final = 4
_KINDS: Final = ("architectures", "model_type", "_class_name")
"""Keys of a config that say what the weights mean."""
_SHAPES: Final = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers"),
    *("num_local_experts", "num_experts", "num_experts_per_tok"),
)
"""Keys that say how weights are divided: of equal shapes, other parts mean other things."""
_RISKY: Final = (
    "rope_theta",
    *("hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps", "norm_eps"),
    *("rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("sliding_window", "max_position_embeddings", "attention_bias", "logit_scale"),
    *("tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id"),
)
"""Keys that change what is computed with the weights: the result is computed as the base is."""


class CompatibilityFinding(Report, frozen=True):
    """Something about an expert that differs from the base."""

    expert: str | None
    """the expert, as it was named; None: several models"""
    aspect: str
    """names, shapes, vocabulary, dtypes, architecture, settings, tokenizer, chat template,
    values, size of the change, order, licences, or adapter"""
    severity: str
    """error: the merge is impossible or meaningless; warning: it is risky"""
    text: str
    """what differs, as text"""
    hint: str | None
    """what to do about it, as text; None: nothing in particular"""


class CompatibilityReport(Report, frozen=True):
    """Whether experts can be merged into a base."""

    base: str
    """the base, as it was named"""
    experts: tuple[str, ...]
    """the experts, as they were named"""
    mergeable: bool
    """whether there is no error"""
    tensors: int
    """number of tensors that are compared, of each model"""
    findings: tuple[CompatibilityFinding, ...]
    """what differs, expert by expert, errors first"""
    changes: ComparedPart | None
    """how far the experts moved and in which directions, as far as statistics know; null if there
    is an error"""
    seconds: float
    """how long it took"""


class _Model(msgspec.Struct, frozen=True):
    """What a model's files say, without its weights."""

    name: str
    manifest: Manifest
    tensors: Mapping[str, TensorId]
    configs: Mapping[str, Mapping[str, Any]]
    """of its models, by the directory of the base's"""
    tokenizer: Tokenizer | None
    template: str | None
    licence: str | None


def check_merge(catalog: Catalog, statistics: StatsStore, request: Request) -> CompatibilityReport:
    """Compare the experts of a request with its base; see `Store.check_merge`."""
    began = time.monotonic()
    # Companions are no models: whether they fit, planning says.
    experts = request.models
    manifests = [catalog.manifest_of(one.snapshot) for one in (request.base, *experts)]
    called = [one.name for one in (request.base, *experts)]
    members = [models_in(catalog, one) for one in manifests]
    choice = ModelChoice(request.base.model, tuple(one.model for one in experts))
    pairs = ModelPairs(
        *(members[0], members[1:], choice, called), only=request.only, skip=request.skip
    )
    tensors = (pairs.base, *(pairs.own(k) for k in range(len(experts))))
    stands = ({name: name for name in members[0].named}, *pairs.pairs)
    base, *others = models = [
        _model(catalog, name, one, own, {members[0].named[k].directory: v for k, v in pair.items()})
        for name, one, own, pair in zip(called, members, tensors, stands, strict=True)
    ]
    every = {tensor for one in members for tensor in one.tensors}
    require_matches(every, request.only, request.skip, request.base.name)
    names = chosen(dict.fromkeys(base.tensors, ()), request.only, request.skip).keys()
    found = list(_head(catalog, base, base.name, base.tensors, request))
    for other in others:
        found += sorted(
            _differences(catalog, statistics, base, other, request),
            key=lambda one: one.severity != ERROR,
        )
    licences = [one.licence for one in models]
    for who, text in conflicts(licences):
        told = ", ".join(dict.fromkeys(models[n].name for n in who))
        single = models[who[0]].name if len(who) == 1 and who[0] else None
        found.append(CompatibilityFinding(single, "licences", WARNING, f"{told}: {text}", None))
    mergeable = all(one.severity != ERROR for one in found)
    changes = None
    if mergeable:
        sums = _sums(catalog, statistics, request, models)
        found += _senses(catalog, request, [one.name for one in experts], sums)
        if sums:
            changes = ComparedSums.total(list(sums.values())).part(
                None, [one.name for one in experts]
            )
    return CompatibilityReport(
        base=base.name,
        experts=tuple(expert.name for expert in experts),
        mergeable=mergeable,
        tensors=len(names),
        findings=tuple(found),
        changes=changes,
        seconds=time.monotonic() - began,
    )


def _model(
    catalog: Catalog,
    name: str,
    own: Models,
    tensors: Mapping[str, TensorId],
    places: Mapping[str, str],
) -> _Model:
    """places: its models by the directories of the base's that they stand for."""
    manifest = own.manifest
    files = {place: manifest.file(own.config(model)) for place, model in places.items()}
    card = catalog.read_small(manifest.file(CARD), _MAX_FILE)
    return _Model(
        name=name,
        manifest=manifest,
        tensors=tensors,
        configs={
            place: json_object(catalog.read_small(file, _MAX_FILE) or b"")
            for place, file in files.items()
        },
        tokenizer=tokenizer_of(catalog, manifest, name),
        template=chat_template(catalog, manifest),
        licence=stated_licence(front_matter(card)),
    )


def _differences(
    catalog: Catalog, statistics: StatsStore, base: _Model, other: _Model, request: Request
) -> Iterator[CompatibilityFinding]:
    tensors = base.tensors
    has_config = other.manifest.file(ADAPTER_CONFIG) is not None
    own_tensors = other.tensors
    if is_any_adapter(own_tensors, tensors, has_config) and not is_adapter(tensors):
        try:
            id, own = base.manifest.id(), other.manifest.id()
            given = {one.name: one.model for one in request.experts}
            choice = ModelChoice(request.base.model, (given[other.name],))
            inputs = Inputs(catalog, id, [own], [base.name, other.name], choice=choice)
            (applied,) = inputs.experts
        except Incompatible as error:
            yield _finding(other, "adapter", ERROR, error.what, error.hint)
        else:
            yield from _head(catalog, base, other.name, applied, request)
        return
    yield from _head(catalog, base, other.name, own_tensors, request)
    yield from _tensors(catalog, base, other, request)
    yield from _values(catalog, statistics, base, other, request)
    yield from _configs(base, other)
    yield from _tokenizers(base, other)
    if base.template != other.template:
        text = "another than the base's; the result has the base's"
        if other.template is None:
            text = "none, but the base has one; the result has the base's"
        elif base.template is None:
            text = "one, but the base has none; the result has none"
        yield _finding(other, "chat template", WARNING, text)


def _head(
    catalog: Catalog, base: _Model, name: str, tensors: Mapping[str, TensorId], request: Request
) -> Iterator[CompatibilityFinding]:
    ours = base.tensors
    merged = chosen(dict.fromkeys(tensors, ()), request.only, request.skip).keys()
    own = {**ours, **{one: tensors[one] for one in merged}}
    head = own_head(sizes_of(catalog, base.manifest), own)
    if head is not None and split_name(head[0])[0] in ties_embeddings(catalog, base.manifest):
        yield CompatibilityFinding(name, "settings", WARNING, own_head_text(*head), None)


def _finding(
    other: _Model, aspect: str, severity: str, text: object, hint: object = None
) -> CompatibilityFinding:
    # A phrase is told in the words of whoever shows it.
    told = hint if hint is None or isinstance(hint, str) else str(hint)
    return CompatibilityFinding(other.name, aspect, severity, str(text), told)


# -- changes -----------------------------------------------------------------------------------


def _sums(
    catalog: Catalog, statistics: StatsStore, request: Request, models: Sequence[_Model]
) -> dict[str, ComparedSums]:
    """Return what statistics know of the changes of whole models; nothing for adapters of one."""
    base, *experts = (model.manifest.id() for model in models)
    if is_adapter(models[0].tensors):
        return {}
    given = request.experts[: len(experts)]
    inputs = Inputs(
        *(catalog, base, experts, [model.name for model in models]),
        choice=ModelChoice(request.base.model, tuple(one.model for one in given)),
        fill=request.allow_missing,
    )
    names, _ = comparable(inputs, request.only, request.skip)
    return dict(Measure(catalog, statistics, inputs).tensors(names))


def _senses(
    catalog: Catalog, request: Request, names: Sequence[str], sums: Mapping[str, ComparedSums]
) -> Iterator[CompatibilityFinding]:
    far = far_experts(sums, names)
    more = call("compare", *far, base=request.base.name)
    for name, why in far.items():
        hint = phrase("{more} shows where", more=more)
        yield CompatibilityFinding(name, "size of the change", WARNING, why, hint)
    experts = request.experts[: len(names)]
    manifests = [catalog.snapshot(one.snapshot).manifest_id() for one in experts]
    for k, why in swapped(catalog, request.base, manifests, names):
        yield CompatibilityFinding(names[k], "order", WARNING, why, None)


# -- tensors -----------------------------------------------------------------------------------


def _tensors(
    catalog: Catalog, base: _Model, other: _Model, request: Request
) -> Iterator[CompatibilityFinding]:
    ours, theirs = (_records(catalog, one.tensors, request) for one in (base, other))
    missing = [name for name in ours if name not in theirs]
    extra = [name for name in theirs if name not in ours]
    if missing and len(missing) == len(ours):
        yield _finding(other, "names", ERROR, f"has no tensor of {base.name}: it is another model")
        return
    skips = phrase("leave them to the base with {skip}", skip=Option("skip"))
    records = {**ours, **theirs}
    is_allowed = request.allow_missing or all(
        is_optional(name, records[name].dtype) for name in (*missing, *extra)
    )
    if is_allowed:
        # Another one may stand for a tied embedding.
        tensors = base.tensors
        filled = stand_ins(tensors, other.tensors)
        missing = [name for name in missing if filled[name] == tensors[name]]
    severity = WARNING if is_allowed else ERROR
    types_of_ours, types_of_theirs = (
        {name: record.dtype for name, record in one.items()} for one in (ours, theirs)
    )
    allow = Option("allow_missing")
    hint = None if is_allowed else phrase("{skips}, or {allow}", skips=skips, allow=allow)
    scales = hint_for_scales(base.name, types_of_ours, other.name, types_of_theirs)
    hint = scales or hint
    if missing:
        told = ": the base's count for them" if is_allowed else ""
        yield _finding(other, "names", severity, f"lacks {few(missing, _NAMED)}{told}", hint)
    if extra:
        out = ": left out" if is_allowed else ""
        yield _finding(
            other, "names", severity, f"has {few(extra, _NAMED)}, and the base has not{out}", hint
        )
    differing = [
        name for name, one in ours.items() if name in theirs and theirs[name].shape != one.shape
    ]
    rows = [
        name
        for name in differing
        if EMBEDDINGS.search(name) and ours[name].shape[1:] == theirs[name].shape[1:]
    ]
    others = [
        f"{name} is {list(theirs[name].shape)}, not {list(ours[name].shape)}"
        for name in differing
        if name not in rows
    ]
    if others:
        shapes = [(ours[name].shape, theirs[name].shape) for name in differing if name not in rows]
        hint = skips
        if all(differ_in_channels(*pair) for pair in shapes):
            hint = hint_for_channels(base.name, other.name)
        yield _finding(other, "shapes", ERROR, few(others, _NAMED), hint)
    if rows:
        one = rows[0]
        yield _finding(
            other,
            "vocabulary",
            ERROR,
            f"{theirs[one].shape[0]} rows of embeddings, the base has {ours[one].shape[0]}",
            "align the vocabularies",
        )
    types = Counter(
        record.dtype
        for name, record in theirs.items()
        if name in ours and record.dtype != ours[name].dtype
    )
    odd = {
        name: kinds
        for name, record in theirs.items()
        if name in ours and (kinds := odd_types(ours[name], record))
    }
    if odd and request.skip:
        # A tied tensor is skipped by any of its names.
        tied = ties_embeddings(catalog, base.manifest)
        names = base.tensors
        first = first_names(names, [other.tensors], tied=tied)
        skipped = {first[name] for name in matching(first, request.skip)}
        odd = {name: kinds for name, kinds in odd.items() if first[name] not in skipped}
    if odd:
        told = ", ".join(sorted(set().union(*odd.values())))
        pairs = [(types_of_ours[name], types_of_theirs[name]) for name in odd]
        yield _finding(
            other,
            "dtypes",
            ERROR,
            f"elements of {told} cannot be merged, and have other values: {few(list(odd), _NAMED)}",
            joined(hint_for_types(base.name, other.name, pairs), skips, between="; or "),
        )
    if types:
        counts = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(types.items()))
        yield _finding(
            other,
            "dtypes",
            WARNING,
            f"another type than the base's: {counts}; the result has the base's",
        )


def _values(
    catalog: Catalog, statistics: StatsStore, base: _Model, other: _Model, request: Request
) -> Iterator[CompatibilityFinding]:
    """Yield a warning if statistics, as far as there are any, have differences that are not finite.

    A base that is not finite itself says nothing of an expert.
    """
    ours, theirs = (one.tensors for one in (base, other))
    names = [
        name
        for name in chosen(dict.fromkeys(ours, ()), request.only, request.skip)
        if theirs.get(name, ours[name]) != ours[name]
    ]
    pairs = [(ours[name], theirs[name]) for name in names]
    squares = statistics.squares_of([one for one, _ in pairs])
    rows = known_rows(statistics, pairs)
    odd = [
        name
        for name, pair, whole in zip(names, pairs, squares, strict=True)
        if pair in rows and not rows[pair].is_finite
        if whole is not None and math.isfinite(whole)
    ]
    if odd:
        told = f"infinite or NaN elements, or differences from the base, in {few(odd, _NAMED)}"
        yield _finding(other, "values", WARNING, f"{told}; the result may have them", None)


def _records(
    catalog: Catalog, tensors: Mapping[str, TensorId], request: Request
) -> dict[str, Tensor]:
    names = chosen(dict.fromkeys(tensors, ()), request.only, request.skip).keys()
    wanted = [name for name in tensors if name in names]
    return dict(zip(wanted, catalog.tensors([tensors[name] for name in wanted]), strict=True))


# -- configs and tokenizers --------------------------------------------------------------------


def _configs(base: _Model, other: _Model) -> Iterator[CompatibilityFinding]:
    for place, theirs in other.configs.items():
        ours = base.configs[place]
        # Both name what differs in a component by its directory.
        told = f"{place}: " if place else ""
        if ours and theirs:
            for aspect, severity, text in _settings(ours, theirs):
                yield _finding(other, aspect, severity, told + text)
        elif ours or theirs:
            without = other.name if ours else base.name
            text = f"{told}{without} has no {CONFIG}: settings are not compared"
            yield _finding(other, "settings", WARNING, text)


def _settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield aspect, severity and words of each setting that differs."""
    for keys, aspect, severity in (
        (_KINDS, "architecture", WARNING),
        (_SHAPES, "settings", ERROR),
        (_RISKY, "settings", WARNING),
    ):
        for key in keys:
            value = _rope_theta if key == "rope_theta" else partial(_value, key=key)
            before, after = value(ours), value(theirs)
            # A key that one does not have may have that value by default.
            if before is not None and after is not None and before != after:
                yield aspect, severity, f"{key} is {after}, not {before}"


def _value(config: Mapping[str, Any], key: str) -> Any:
    for part in (config, *(config.get(name) for name in PARTS)):
        if isinstance(part, dict) and part.get(key) is not None:
            return part[key]
    return None


def _rope_theta(config: Mapping[str, Any]) -> Any:
    """Return the base of rotary embeddings; newer configs have it among others."""
    own = _value(config, "rope_theta")
    if own is None:
        among = _value(config, "rope_parameters")
        own = among.get("rope_theta") if isinstance(among, dict) else None
    return own


def _tokenizers(base: _Model, other: _Model) -> Iterator[CompatibilityFinding]:
    ours, theirs = base.tokenizer, other.tokenizer
    if ours is None or theirs is None:
        if ours is not theirs:
            without = (base if ours is None else other).name
            text = f"{without} has no {TOKENIZER}: tokens are not compared"
            yield _finding(other, "tokenizer", WARNING, text)
        return
    found = differences(ours, theirs)
    hint = "align the vocabularies"
    if found.moved:
        yield _finding(other, "vocabulary", ERROR, moved_tokens_text(found), hint)
    if found.new or found.lacking:
        has = [f"has {found.new} tokens that the base lacks"] if found.new else []
        has += [f"lacks {found.lacking} of the base's tokens"] if found.lacking else []
        new = theirs.ids.keys() - ours.ids.keys()
        rows = rows_of(base.configs.get("", {}))
        fits = rows is None or all(theirs.ids[token] < rows for token in new)
        if fits and not found.moved:
            yield _finding(other, "vocabulary", WARNING, ", and ".join(has), hint)
    if not (found.moved or found.new or found.lacking) and ours.document != theirs.document:
        yield _finding(
            other,
            "tokenizer",
            WARNING,
            f"{TOKENIZER} has the same tokens and other settings; the result has the base's",
        )
