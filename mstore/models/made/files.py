"""The files of a model that is made of another's: which change, and what they then have.

Whoever makes a model says which tensors its files of weights have and puts their bytes. This makes
the headers, the shard indexes, and the manifest of it all. A file whose tensors stay is the same
file.

Owns these forms.  Does not own which tensors a file has, nor what small files say of the model.

Programs write into the header of a safetensors file what the file is: its title, its date, a hash
of its tensors, a picture, how it was trained.  None of that is true of a model that was made of it,
as its README.md is not (docs/design/011-model-cards.md).  What says how to read the tensors stays,
and what nobody here knows.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from mstore.checkpoint.dtypes import nbytes
from mstore.checkpoint.partition import block_count
from mstore.checkpoint.strict_json import (
    LENGTH_BYTES,
    METADATA_KEY,
    header_bytes,
    json_bytes,
    json_object,
)
from mstore.store.catalog import Catalog
from mstore.store.models import models_in
from mstore.store.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.terms.ids import TensorId

NEW: Final[Mapping[str, str]] = {"format": "pt"}
"""The metadata of a file of weights that no model had."""

_FIRST: Final = re.compile(rf'\s*\{{\s*"{METADATA_KEY}"\s*:\s*(?=\{{)')


class Slot(NamedTuple):
    """A tensor's entry in a header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Plain bytes."""
        return nbytes(self.dtype, self.shape)


class _Shaped(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


Weights = Mapping[str, Sequence[Slot] | None]
"""By path, the files of weights whose tensors become others: their tensors in data order, or None
if names, types and shapes stay."""


def slots_of(
    catalog: Catalog, parts: Iterable[Part], new: Mapping[TensorId, _Shaped] | None = None
) -> list[Slot]:
    """Return the entries of tensors. new: records of tensors that are not stored yet."""
    parts, new = list(parts), new or {}
    asked = [part.tensor_id() for part in parts if part.tensor_id() not in new]
    records: dict[TensorId, _Shaped] = dict(zip(asked, catalog.tensors(asked), strict=True))
    records |= new
    found = ((str(part.name), records[part.tensor_id()]) for part in parts)
    return [Slot(name, record.dtype, record.shape) for name, record in found]


def texts_of(
    catalog: Catalog, before: Manifest, weights: Weights, without: Collection[str] = ()
) -> dict[str, bytes]:
    """Return the headers and shard indexes that change, by path.

    before: what the model is made of. without: keys of metadata that no header keeps.
    """
    texts: dict[str, bytes] = {}
    models = models_in(catalog, before)
    # A title is that of all files of a model.
    own = filter(None, map(models.of_file, weights))
    changed = {**dict.fromkeys(path for model in own for path in model.files), **weights}
    for path, known in models.indexes.items():
        shards = {posixpath.join(posixpath.dirname(path), shard) for shard in {*known.values()}}
        # Where every entry stays, so does what the index says of them.
        if any(changed.get(shard) is not None for shard in shards):
            text = _index(catalog, before, path, shards, changed)
            texts |= {} if text is None else {path: text}
    for path, slots in changed.items():
        file = before.file(path)
        raw = None if file is None else catalog.read_parts(file.parts[:1])
        header = _header(raw, slots, without)
        texts |= {} if header is None else {path: header}
    return texts


def assembled(
    before: Iterable[File],
    texts: Mapping[str, bytes],
    weights: Collection[str],
    tensors: Callable[[str], Sequence[Part]],
    put: Callable[[bytes, str], Part],
) -> Manifest:
    """Return what a model consists of.

    before: the files that it is made of. texts: headers of files of weights, and whole other files,
    that are new or others than before. weights: paths of files of weights that may have other
    tensors. tensors: stores and returns those of one, after its header. put: stores the bytes of a
    file.
    """
    found: dict[str, File] = {file.path: file for file in before}
    # Headers lie before their tensors, as readers take them.
    for path in (*sorted(weights), *sorted(texts.keys() - set(weights))):
        file = found.get(path)
        first = put(texts[path], path) if path in texts else None
        is_weights = path in weights or (file is not None and file.form == SAFETENSORS)
        header = first if first is not None or file is None else file.parts[0]
        assert header is not None
        rest = tensors(path) if path in weights else () if file is None else file.parts[1:]
        parts = (header, *rest) if is_weights else (header,)
        form = SAFETENSORS if is_weights else OPAQUE
        found[path] = File(path, form, sum(part.nbytes for part in parts), parts)
    return Manifest(tuple(found[path] for path in sorted(found)))


def blocks_of(manifest: Manifest, block_size: int) -> int:
    """Return how many blocks the files of a manifest have."""
    return sum(
        block_count(part.nbytes, block_size) for file in manifest.files for part in file.parts
    )


# -- headers -----------------------------------------------------------------------------------


def _header(
    before: bytes | None, slots: Sequence[Slot] | None, without: Collection[str]
) -> bytes | None:
    """Return a header, None if it stays.  Names that it had keep their order."""
    told = NEW if before is None else metadata_of(before)
    left = None if told is None else kept_metadata(told, without)
    if slots is None and left == told:
        return None
    known: dict[str, Any] = {METADATA_KEY: left}
    if before is not None:
        known = json.loads(before[LENGTH_BYTES:])
    entries = dict(known) if slots is None else _entries(slots)
    entries |= {METADATA_KEY: left}
    found = {key: entries.pop(key) for key in known if key in entries} | entries
    if not left:
        del found[METADATA_KEY]
    return header_bytes(found)


def _entries(slots: Iterable[Slot]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    offset = 0
    for slot in slots:
        ends = [offset, offset + slot.nbytes]
        found[slot.name] = {"dtype": slot.dtype, "shape": list(slot.shape), "data_offsets": ends}
        offset = ends[1]
    return found


def metadata_of(header: bytes) -> dict[str, str] | None:
    """Return the metadata of a header that was read before, None if it has none."""
    if METADATA_KEY.encode() not in header:
        return None
    text = header[LENGTH_BYTES:].decode()
    # Most programs write it first; what follows may be long.
    first = _FIRST.match(text)
    if first is not None:
        found: dict[str, str] = json.JSONDecoder().raw_decode(text, first.end())[0]
        return found
    told: dict[str, str] | None = json.loads(text).get(METADATA_KEY)
    return told


# -- shard indexes -----------------------------------------------------------------------------


def _index(
    catalog: Catalog, before: Manifest, path: str, shards: Collection[str], changed: Weights
) -> bytes | None:
    """Return the shard index at `path`, which names these shards; None if it stays.

    Sizes that it stated are stated again.
    """
    index = before.file(path)
    fields = json_object(catalog.read_parts(index.parts if index else ()))
    known = fields["weight_map"]
    places: dict[str, str] = {}
    every: list[Slot] = []
    for file in before.files:
        if file.path not in shards:
            continue
        shard = posixpath.basename(file.path)
        new = changed.get(file.path)
        slots = slots_of(catalog, file.tensors()) if new is None else new
        every += slots
        for slot in slots:
            # Of a tensor in two shards, the index says which counts.
            if slot.name not in places or known.get(slot.name) == shard:
                places[slot.name] = shard
    found = {**fields, "weight_map": dict(sorted(places.items()))}
    told = fields.get("metadata")
    if isinstance(told, dict):
        found["metadata"] = told = dict(told)
        if "total_size" in told:
            told["total_size"] = sum(slot.nbytes for slot in every)
        if isinstance(told.get("total_parameters"), int):
            told["total_parameters"] = sum(math.prod(slot.shape) for slot in every)
    return None if found == fields else json_bytes(found)


# -- configs -----------------------------------------------------------------------------------


def with_dtype(
    fields: Mapping[str, Any], name: str, *, known: Collection[str], nested: bool = False
) -> dict[str, Any]:
    """Return a config with another "dtype" / "torch_dtype" where it states one.

    Also in configs of the model's parts ("text_config"), if what stands there is one of the `known`
    types.
    """
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        is_dtype = key in ("dtype", "torch_dtype") and isinstance(value, str)
        if is_dtype and (not nested or value.removeprefix("torch.") in known):
            changed[key] = name
        # Keep dtypes of quantization and compression: they are not those of the model's tensors.
        elif isinstance(value, dict) and (key == "config" or key.endswith("_config")):
            is_other = key.startswith(("quantization", "compression"))
            changed[key] = value if is_other else with_dtype(value, name, known=known, nested=True)
        else:
            changed[key] = value
    return changed


_READING: Final[Mapping[str, frozenset[str]]] = {
    # Stability AI's model metadata: what a loader needs.
    "modelspec.": frozenset(
        {
            *("sai_model_spec", "architecture", "implementation", "implementation_version"),
            *("resolution", "prediction_type", "timestep_range", "encoder_layer", "preprocessor"),
            *("is_negative_embedding", "data_format", "format_type", "format_template"),
        }
    ),
    # sd-scripts: what its own merges of adapters keep (SS_METADATA_MINIMUM_KEYS).
    "ss_": frozenset(
        {
            *("v2", "base_model_version", "network_module", "network_dim", "network_alpha"),
            "network_args",
        }
    ),
    "sshs_": frozenset(),
    "sd_merge_": frozenset(),
}
"""Keys that say how to read a file, of each family that is known; its others say what it is."""

_SAYING: Final = re.compile(
    r"(.*[._-])?(hash|sha[0-9]*|md5|crc32|checksum|digest|title|name|description|thumbnail|date"
    r"|created|modified|author|licen[cs]e|prompt|workflow)s?",
    re.IGNORECASE,
)
"""Keys of no known family that say what a file is."""


def kept_metadata(metadata: Mapping[str, str], without: Collection[str] = ()) -> dict[str, str]:
    """Return what is true of any tensors of these names; nothing of the keys `without`."""
    return {
        key: text for key, text in metadata.items() if key not in without and _is_of_reading(key)
    }


def _is_of_reading(key: str) -> bool:
    for family, known in _READING.items():
        if key.startswith(family):
            return key.removeprefix(family) in known
    return not _SAYING.fullmatch(key)
