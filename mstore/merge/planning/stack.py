"""Stacks: plans whose output has layers of several models, each taken as it is.

A stack reads nothing: a tensor of the output is a tensor that an input has.  Loose tensors before
the layers (embeddings) are from the model of the first run, those after them (norm, head) from that
of the last run, as in mergekit 0.1.5.  Which tensors are in which layer follows from their names
(`recipes.layers`).  Of a model with several stacks, the text model's is stacked; its other parts
are before or after it as a whole.  Layers that a config does not count (they predict further
tokens) follow the last one, whatever its number is.

The config of a stack says of its layers what the configs of its models say of theirs.  A config
speaks of layers in several forms: a list with an entry for each, the numbers of some, how many come
first, every so many.  `TABLE` names the entries of each form.  Such an entry is read as one value
for each layer, the values of the stack's layers are picked, and they are written in the same form,
if that form can state them.  What cannot be stated, and lists that nobody knows, stay as they are,
and are named.

Few merges are stacks: the others do not import this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from mstore.checkpoint.strict_json import entries_between
from mstore.merge.planning.request import Request
from mstore.merge.recipes.layers import COUNTS, TEXT_CONFIGS, ModelLayers, layers_of
from mstore.models.adapters.inputs import Inputs
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, whole_config_of
from mstore.store.objects.plan import Criteria, Plan, PlanInput, PlanOperation, Score, Taken
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import ManifestId, TensorId
from mstore.terms.phrases import few


class _Member(msgspec.Struct, frozen=True):
    """An input: its tensors, and the stack of its layers.

    layers: the names of each layer's tensors, by what follows the layer's number. first, last: the
    other tensors, before and after the layers.
    """

    name: str
    tensors: Mapping[str, TensorId]
    layout: ModelLayers
    stack: str
    layers: tuple[Mapping[str, str], ...]
    first: tuple[str, ...]
    last: tuple[str, ...]

    def moved(self, name: str, count: int) -> str:
        """Return what a tensor outside of the layers is called in a model of so many."""
        place = self.layout.part(name)
        if place is None:
            return name
        number, rest = place
        return f"{self.stack}.{number - len(self.layers) + count}.{rest}"


def stacked(catalog: Catalog, request: Request) -> Plan:
    """Return the plan of a request for layers.

    Raises BadRequest for layers that a model does not have, Incompatible for models that do not
    fit, NotFound, Corrupt, StorageFailed.
    """
    sides = (request.base, *request.experts)
    manifests = [catalog.snapshot(side.snapshot).manifest_id() for side in sides]
    names = [side.name for side in sides]
    inputs = Inputs(catalog, manifests[0], manifests[1:], names, choice=request.choice)
    members = [
        _member(catalog, name, id, tensors)
        for name, id, tensors in zip(names, manifests, inputs.members, strict=True)
    ]
    base = members[0]
    found: dict[str, tuple[int, str]] = {}
    layers: list[tuple[int, int]] = []
    for number, first, end in request.layers:
        one = members[number]
        _require_same_stack(base, one)
        if end > len(one.layers):
            raise BadRequest(f"{one.name} has {len(one.layers)} layers, not {end}", where="layers")
        for layer in range(first, end):
            for rest, source in one.layers[layer].items():
                found[f"{base.stack}.{len(layers)}.{rest}"] = (number, source)
            layers.append((number, layer))
    before, after = request.layers[0][0], request.layers[-1][0]
    found |= {name: (before, name) for name in members[before].first}
    one = members[after]
    found |= {one.moved(name, len(layers)): (after, name) for name in one.last}
    _require_shapes(inputs, members, found, len(layers))
    configs = [whole_config_of(catalog, catalog.manifest(id)) for id in manifests]
    own = base.tensors
    taken = {
        name: (number, source)
        for name, (number, source) in found.items()
        if members[number].tensors[source] != own.get(name)
    }
    return assembly(
        catalog,
        PlanOperation(
            request.operation.method.name,
            tuple(sorted(request.operation.parameters.items())),
            (1.0,) * len(request.experts),
        ),
        request.inputs(manifests[0], manifests[1:]),
        [Taken(name, *source) for name, source in taken.items()],
        own.keys() - found.keys(),
        config=entries_between(configs[0], stacked_config(configs, layers).fields),
        layers=layers,
        score=request.score,
    )


def assembly(
    catalog: Catalog,
    operation: PlanOperation,
    inputs: tuple[PlanInput, ...],
    taken: Iterable[Taken],
    dropped: Iterable[str],
    *,
    config: str,
    layers: Sequence[tuple[int, int]] = (),
    score: Score = "norm",
    remarks: tuple[str, ...] = (),
) -> Plan:
    """Return a plan that takes tensors as they are, and reads nothing of any."""
    return Plan(
        operations=(operation,),
        inputs=inputs,
        dtype=None,
        block_size=catalog.block_size,
        budget=None,
        criteria=Criteria(score=score),
        allow_missing=False,
        full_expert_bytes=0,
        planned_expert_bytes=0,
        error_bound=0.0,
        error_estimate=0.0,
        tensors=(),
        copied=(),
        remarks=remarks,
        layers=tuple(layers),
        taken=tuple(sorted(taken, key=lambda one: one.name)),
        dropped=tuple(sorted(dropped)),
        config=config,
    )


def _member(
    catalog: Catalog, name: str, id: ManifestId, tensors: Mapping[str, TensorId]
) -> _Member:
    manifest = catalog.manifest(id)
    config = config_of(catalog, manifest)
    counted = layers_of(config)
    layout = ModelLayers.of(tensors, counted)
    stack = layout.main
    if stack is None:
        raise Incompatible(
            "layers are stacked of models with one stack of layers, or whose config.json counts "
            f"those of the text model; this one has: {layout.listed()}",
            where=name,
        )
    if counted is not None and counted > layout.stacks[stack]:
        # Layers that share weights.
        raise Incompatible(
            f"its config.json counts {counted} layers, and its tensors have {layout.stacks[stack]}",
            where=name,
        )
    entry = unstackable(config)
    if entry is not None:
        raise Incompatible(
            f"its config.json has {entry}, so tensors outside of its layers hold values of every "
            "layer, and a stack takes tensors as they are",
            where=name,
        )
    layers: list[dict[str, str]] = [{} for _ in range(layout.stacks[stack])]
    first: list[str] = []
    last: list[str] = []
    for tensor in tensors:
        place = layout.part(tensor)
        if place is not None and place[0] < len(layers):
            layers[place[0]][place[1]] = tensor
        else:
            (last if layout.is_last(tensor) else first).append(tensor)
    return _Member(name, tensors, layout, stack, tuple(layers), tuple(first), tuple(last))


def _require_same_stack(base: _Member, one: _Member) -> None:
    if one.stack != base.stack:
        raise Incompatible(
            f"the layers of {one.name} are called {one.stack}, those of {base.name} {base.stack}",
            where="layers",
        )


def _require_shapes(
    inputs: Inputs, members: list[_Member], found: Mapping[str, tuple[int, str]], count: int
) -> None:
    """Raise Incompatible unless each tensor has the shape and the type of the base's like it."""
    base = members[0]
    known: dict[str, str] = {}
    for layer in base.layers:
        for rest, name in layer.items():
            known.setdefault(rest, name)
    loose = {base.moved(name, count): name for name in (*base.first, *base.last)}
    wanted: list[tuple[str, str, int, str]] = []
    for name, (number, source) in found.items():
        place = base.layout.part(name)
        is_layer = place is not None and place[0] < count
        like = known.get(place[1]) if place is not None and is_layer else loose.get(name)
        if like is None:
            raise Incompatible(
                f"{members[number].name} has {source}, and {base.name} nothing like it",
                where="layers",
            )
        wanted.append((like, name, number, source))
    ours = inputs.records([base.tensors[like] for like, _, _, _ in wanted])
    theirs = inputs.records([members[number].tensors[source] for _, _, number, source in wanted])
    for (like, _, number, source), one, other in zip(wanted, ours, theirs, strict=True):
        if isinstance(other, AppliedTensor):
            raise Incompatible(
                f"{members[number].name} is an adapter: merge it into its base first (in a "
                "recipe: MODEL+ADAPTER), and stack the layers of the result",
                where="layers",
            )
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            raise Incompatible(
                f"{source} of {members[number].name} is {_told(other)}, {like} of {base.name} "
                f"{_told(one)}",
                where="layers",
            )


def _told(record: Tensor) -> str:
    return f"{record.dtype} {list(record.shape)}"


# -- the config --------------------------------------------------------------------------------

_MOST_LAYERS: Final = 1 << 16
_NAMED: Final = 8
_SHOWN: Final = 40

Layers = Sequence[tuple[int, int]]
"""The layers of a stack: (member, number there)."""
Fields = Mapping[str, Any]


class ConfigForm(msgspec.Struct, frozen=True):
    """How an entry speaks of layers.

    read: the value of each of so many layers, from the entry and the config that it is in; None if
    the entry does not have this form. write: the entry for these values of a stack's layers; None
    if it cannot state them. It is called with the values, the entry as it was, and the layers.
    """

    read: Callable[[Any, int, Fields], list[Any] | None]
    write: Callable[[list[Any], Any, Layers], Any] = lambda *_: None


class ConfigEntry(msgspec.Struct, frozen=True):
    """An entry of configs.

    instead: entries that say the same; a config that has one does not use this. needs: an entry
    without which, or if it is false, a config does not use this.
    """

    name: str
    form: ConfigForm
    instead: tuple[str, ...] = ()
    needs: str | None = None

    def values(self, fields: Fields, count: int) -> list[Any] | None:
        """Return what the config of a model of so many layers says of each; None for nothing."""
        value = fields.get(self.name)
        if value is None or any(fields.get(name) is not None for name in self.instead):
            return None
        if self.needs is not None and not fields.get(self.needs):
            return None
        return self.form.read(value, count, fields)


class StackedConfig(msgspec.Struct, frozen=True):
    """A config with what it says of layers, and sentences about what it cannot say."""

    fields: dict[str, Any]
    left: tuple[str, ...]


def stacked_config(configs: Sequence[Fields], layers: Layers) -> StackedConfig:
    """Return the config of a stack.  configs: those of the members, the base's first."""
    base = configs[0]
    fields, left = _part(configs, layers)
    for key in TEXT_CONFIGS:
        if isinstance(base.get(key), dict):
            own = [one.get(key) for one in configs]
            part, more = _part([one if isinstance(one, dict) else {} for one in own], layers)
            fields[key] = part
            left += [f"{key}: {one}" for one in more]
    return StackedConfig(fields, tuple(left))


def unstackable(fields: Fields) -> str | None:
    """Return the entry of a config by which tensors outside of layers hold values of each layer."""
    parts = [fields, *(fields.get(key) for key in TEXT_CONFIGS)]
    told = {name for part in parts if isinstance(part, dict) for name in part if part[name]}
    return next((name for name in _OF_ALL_LAYERS if name in told), None)


def _part(configs: Sequence[Fields], layers: Layers) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of one part of a config, and what they cannot say."""
    base = configs[0]
    changed = dict(base)
    counts = [_count(one) for one in configs]
    count = counts[0]
    if count is None:
        return changed, []
    for key in COUNTS:
        if _is_count(base.get(key)):
            changed[key] = len(layers)
    left: list[str] = []
    known = set()
    for entry in TABLE:
        own = entry.values(base, count)
        if own is None:
            continue
        known.add(entry.name)
        every = [
            own if other is None else entry.values(one, other)
            for one, other in zip(configs, counts, strict=True)
        ]
        value = base[entry.name]
        values = _picked([own if one is None else one for one in every], layers)
        if values is not None and entry.form.read(value, len(layers), base) == values:
            continue
        written = None if values is None else entry.form.write(values, value, layers)
        if written is None:
            left.append(f"{entry.name} {_shown(value)} cannot say what the layers of the stack are")
        else:
            changed[entry.name] = written
    lists = [
        name
        for name, value in base.items()
        if name not in known and isinstance(value, list) and len(value) == count > 1
        if _picked([value] * len(configs), layers) != value
    ]
    if lists:
        told = few([_shown(name) for name in lists], _NAMED)
        left.append(f"lists of {count} entries, as many as layers, stay: {told}")
    return changed, left


def _picked(every: Sequence[list[Any]], layers: Layers) -> list[Any] | None:
    """Return the values of a stack's layers; None if a member does not say one."""
    if any(layer >= len(every[member]) for member, layer in layers):
        return None
    return [every[member][layer] for member, layer in layers]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _MOST_LAYERS


def _count(fields: Fields) -> int | None:
    """Return how many layers a part of a config is for; some only have a list of them."""
    lengths = (len(fields[key]) for key in _LISTED if isinstance(fields.get(key), list | str))
    return next((fields[key] for key in COUNTS if _is_count(fields.get(key))), next(lengths, None))


def _shown(value: object) -> str:
    text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# -- forms -------------------------------------------------------------------------------------


def _is_whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_whole(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _each(value: Any, count: int, _: Fields) -> list[Any] | None:
    is_one_each = isinstance(value, list | str) and len(value) == count
    return list(value) if is_one_each else None


def _repeated(value: Any, count: int, _: Fields) -> list[Any] | None:
    if not isinstance(value, list | str) or not value:
        return None
    return [value[n % len(value)] for n in range(count)]


def _as_was(values: list[Any], value: Any, _: Layers) -> Any:
    return "".join(values) if isinstance(value, str) else values


def _runs(value: Any, count: int, _: Fields) -> list[Any] | None:
    """GPT-Neo: lists of kinds, each with how often it is repeated."""
    try:
        kinds = (kind for kinds, times in value for _ in range(times) for kind in kinds)
        # One more is enough to see that there are too many.
        found = list(islice(kinds, count + 1))
    except (TypeError, ValueError):
        return None
    return found if len(found) == count else None


def _numbers(value: Any, count: int, _: Fields) -> list[Any] | None:
    if not _are_whole(value):
        return None
    numbers = set(value)
    return [n in numbers for n in range(count)]


def _named_numbers(value: Any, count: int, _: Fields) -> list[Any] | None:
    """Kimi Linear: numbers of layers from 1, for each kind."""
    if not isinstance(value, dict):
        return None
    lists = {name: set(own) for name, own in value.items() if own and _are_whole(own)}
    return [[name for name in lists if n + 1 in lists[name]] for n in range(count)]


def _to_named_numbers(values: list[Any], value: Any, _: Layers) -> Any:
    numbers = {
        name: [n for n, own in enumerate(values, start=1) if name in own]
        for name, before in value.items()
        if before and _are_whole(before)
    }
    return {**value, **numbers}


def _by_number(value: Any, count: int, _: Fields) -> list[Any] | None:
    return [value.get(str(n)) for n in range(count)] if isinstance(value, dict) else None


def _to_by_number(values: list[Any], value: Any, _: Layers) -> Any:
    others = {key: one for key, one in value.items() if not key.isdecimal()}
    return others | {str(n): one for n, one in enumerate(values) if one is not None}


def _sources(value: Any, count: int, _: Fields) -> list[Any] | None:
    """Numbers of layers that layers take something from, as how far before them these are."""
    if not _are_whole(value) or len(value) != count:
        return None
    return [n - source for n, source in enumerate(value)]


def _to_sources(values: list[Any], _: Any, layers: Layers) -> Any:
    for n, (member, layer) in enumerate(layers):
        source = n - values[n]
        if not 0 <= source < len(layers) or layers[source] != (member, layer - values[n]):
            return None
    return [n - back for n, back in enumerate(values)]


def _first(more: int = 0) -> ConfigForm:
    """The first so many are of a kind. more: 1 if it names the last of them, -1 of all of them."""

    def read(value: Any, count: int, _: Fields) -> list[Any] | None:
        if type(value) is not int or value < -more:
            return None
        is_all = value < 0
        return [is_all or n < value + more for n in range(count)]

    def write(values: list[Any], _: Any, layers: Layers) -> Any:
        first = next((n for n, own in enumerate(values) if not own), len(layers))
        return None if any(values[first:]) or first < more else first - more

    return ConfigForm(read, write)


def _last(value: Any, count: int, _: Fields) -> list[Any] | None:
    return [n >= count - value for n in range(count)] if _is_whole(value) else None


def _to_last(values: list[Any], _: Any, layers: Layers) -> Any:
    first = next((n for n, own in enumerate(values) if own), len(layers))
    return len(layers) - first if all(values[first:]) else None


def _every(place: int | str | None) -> ConfigForm:
    """One of so many: the first (0), the last (-1), where another entry says, or unknown (None)."""

    def read(value: Any, count: int, fields: Fields) -> list[Any] | None:
        if not _is_whole(value) or value == 0:
            return None
        if place is None:
            return [n % value for n in range(count)]
        at = fields.get(place) if isinstance(place, str) else place
        return [(n - at) % value == 0 for n in range(count)] if type(at) is int else None

    return ConfigForm(read)


def _implied(value: Any, count: int, _: Fields) -> list[Any] | None:
    """Kinds of model whose layers take turns, of which their configs say nothing."""
    return [n % 2 for n in range(count)] if value == "gemma2" else None


_EACH: Final = ConfigForm(_each, _as_was)
_NUMBERS: Final = ConfigForm(
    _numbers, lambda values, *_: [n for n, own in enumerate(values) if own]
)
_TYPES: Final = ("layer_types",)
_SPARSE: Final = ("mlp_layer_types",)
_LISTED: Final = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Lists of layers in configs that do not count them."""

_OF_ALL_LAYERS: Final = ("hidden_size_per_layer_input",)
"""Entries by which a tensor outside of layers has rows for each layer (Gemma 3n, Gemma 4)."""


def _table() -> Iterator[ConfigEntry]:
    for name in (
        *("layer_types", "mlp_layer_types", "layers_block_type", "block_configs", "is_moe_layer"),
        *("attention_layers", "attn_layers", "attn_type_list", "indexer_types", "compress_ratios"),
        *("hybrid_override_pattern", "hybrid_layer_pattern", "no_rope_layers", "use_rope_layers"),
        *("activation_sparsity_pattern", "layer_rope_theta", "rope_theta", "sliding_windows"),
        *("partial_rotary_factors", "num_attention_heads_per_layer", "num_query_heads"),
        *("num_key_value_heads_per_layer", "num_attention_heads", "num_key_value_heads"),
        *("num_kv_heads", "ffn_multipliers", "intermediate_size", "moe_intermediate_size"),
        *("moe_layer_freq", "moe_topk", "num_shared_expert"),
    ):
        yield ConfigEntry(name, _EACH)
    for name in (
        *("moe_layers", "mlp_only_layers", "attn_layer_indices", "full_attn_idxs"),
        *("rope_scaling_layers", "cross_attention_layers", "hybrid_layer_ids"),
    ):
        yield ConfigEntry(name, _NUMBERS)
    yield ConfigEntry("linear_attn_config", ConfigForm(_named_numbers, _to_named_numbers))
    yield ConfigEntry("per_layer_config", ConfigForm(_by_number, _to_by_number))
    yield ConfigEntry("kv_source_layers", ConfigForm(_sources, _to_sources))
    yield ConfigEntry("attention_types", ConfigForm(_runs, lambda values, *_: [[values, 1]]))
    yield ConfigEntry("block_types", ConfigForm(_repeated, _as_was))
    yield ConfigEntry("num_kv_shared_layers", ConfigForm(_last, _to_last))
    for name in ("first_k_dense_replace", "num_dense_layers", "num_hash_layers"):
        yield ConfigEntry(name, _first(), _SPARSE)
    yield ConfigEntry("max_window_layers", _first(), _TYPES, "use_sliding_window")
    yield ConfigEntry("moe_layer_start_index", _first())
    yield ConfigEntry("moe_layer_end_index", _first(1))
    yield ConfigEntry("sliding_window_pattern", _every(-1), _TYPES)
    yield ConfigEntry("sliding_window_pattern", ConfigForm(_repeated, _as_was), _TYPES)
    yield ConfigEntry("full_attention_interval", _every(-1), _TYPES)
    yield ConfigEntry("layer_group_size", _every(-1), _TYPES)
    yield ConfigEntry("global_attn_every_n_layers", _every(None), _TYPES)
    yield ConfigEntry("dense_attention_every_n_layers", _every(-1))
    yield ConfigEntry("no_rope_layer_interval", _every(-1), ("no_rope_layers",))
    yield ConfigEntry("interleave_moe_layer_step", _every(-1), ("moe_layers",))
    yield ConfigEntry("moe_layer_freq", _every(0), _SPARSE)
    for name in ("moe_layer_interval", "moe_layer_frequency", "decoder_sparse_step"):
        yield ConfigEntry(name, _every(-1))
    for name in ("cross_layer_interval", "n_layers_per_attn_res_block"):
        yield ConfigEntry(name, _every(0))
    yield ConfigEntry("attn_layer_period", _every("attn_layer_offset"), ("layers_block_type",))
    yield ConfigEntry("expert_layer_period", _every("expert_layer_offset"))
    yield ConfigEntry("model_type", ConfigForm(_implied), _TYPES)


TABLE: Final = tuple(_table())
"""The entries of configs that speak of layers."""
