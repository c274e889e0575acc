"""Models that are made of others: their files, what their cards say of licences, their snapshots.

Whoever makes a model says which tensors its files of weights have and puts their bytes.  This makes
the headers, the shard indexes, the manifest of it all, and the snapshot.  A file whose tensors stay
is the same file.  Does not own which tensors a file has, nor what other small files say.

Programs write into the header of a safetensors file what the file is: its title, its date, a hash
of its tensors, a picture, how it was trained.  None of that is true of a model that was made of it,
as its README.md is not (docs/design/011-model-cards.md).  What says how to read the tensors stays,
and what nobody here knows.  Cards are read with limits, and their statements are repeated, never
interpreted.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.checkpoint.declared import CARD, DEFAULT_LIMITS, front_matter, values
from mstore.checkpoint.dtypes import nbytes
from mstore.checkpoint.origin import Origin
from mstore.checkpoint.strict_json import (
    LENGTH_BYTES,
    METADATA_KEY,
    header_bytes,
    json_bytes,
    json_object,
)
from mstore.store import refs
from mstore.store.catalog import Catalog, now_ns
from mstore.store.models import models_in
from mstore.store.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.store.objects.plan import Coverage, Plan
from mstore.store.objects.snapshot import ADD, PREVIOUS, Parent, SnapshotRecord
from mstore.store.objects.tensor import Tensor, block_count
from mstore.store.transaction import RefMove, Transaction, branch_to_move, tip_of
from mstore.terms import TOOL
from mstore.terms.errors import BadName, BadRequest
from mstore.terms.ids import ManifestId, SnapshotId, TensorId
from mstore.terms.phrases import Option, is_text

if TYPE_CHECKING:
    import numpy.typing as npt

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
    catalog: Catalog,
    before: Manifest,
    weights: Weights,
    without: Collection[str] = (),
    lineage: Callable[[], Mapping[str, str]] = dict,
) -> dict[str, bytes]:
    """Return the headers and shard indexes that change, by path.

    before: what the model is made of. without: keys of metadata that no header keeps. lineage:
    returns the entries of headers of single-file models about what they were made of.
    """
    texts: dict[str, bytes] = {}
    lineage = cache(lineage)
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
        model = models.of_file(path)
        more = lineage() if model is not None and model.is_single_file else {}
        header = _header(raw, slots, without, more)
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
    before: bytes | None,
    slots: Sequence[Slot] | None,
    without: Collection[str],
    lineage: Mapping[str, str],
) -> bytes | None:
    """Return a header, None if it stays.  Names that it had keep their order."""
    told = NEW if before is None else metadata_of(before)
    left = (
        None if told is None and not lineage else {**kept_metadata(told or {}, without), **lineage}
    )
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


_LICENCE_FILE = re.compile(
    r"(licen[cs]es?|copying|notice|use[_-]policy)([._-].*)?|.*[_-]licen[cs]e([._-].*)?",
    re.IGNORECASE,
)
_TEXTS = {"", ".txt", ".md", ".rst", ".html", ".pdf", ".0"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9._-]{1,95})?")
"""A model's name that a card repeats; other text, such as a path, it does not."""
WORD = re.compile(r"[A-Za-z0-9._-]{1,60}")
_FORBIDS = {
    "commercial use": re.compile(r"(^|-)nc(-|$)|non-?commercial|research"),
    "derivatives": re.compile(r"(^|-)nd(-|$)|no-?deriv"),
}


class Said(msgspec.Struct, frozen=True):
    """A model as its own card describes it.

    name, licence: None if it states none, or several.
    """

    content: ManifestId
    name: str | None
    licence: str | None


def said(catalog: Catalog, content: ManifestId) -> Said:
    """Return what a model's card states.  Raises Corrupt, StorageFailed."""
    matter = front_matter(start_of(catalog, content, CARD))
    names = [name for name in values(matter, "model_name") if NAME.fullmatch(name)]
    return Said(content, names[0] if len(names) == 1 else None, stated_licence(matter))


def start_of(
    catalog: Catalog,
    content: ManifestId,
    path: str,
    length: int = DEFAULT_LIMITS.max_card_bytes,
) -> bytes | None:
    """Return the first bytes of a small file, None if it is missing."""
    file = catalog.manifest(content).file(path)
    if file is None or file.form != OPAQUE:
        return None
    data = b""
    for part in file.parts:
        for block in catalog.tensor(part.tensor_id()).block_ids():
            if len(data) >= length:
                break
            data += catalog.read_block(block)
    return data[:length]


def stated_licence(matter: list[str]) -> str | None:
    """Return the licence that the front matter of a card states, None for nothing."""
    licences = [one for one in values(matter, "license") if WORD.fullmatch(one)]
    if licences == ["other"]:
        own = [one for one in values(matter, "license_name") if WORD.fullmatch(one)]
        licences = own or licences
    return " and ".join(sorted({one.lower() for one in licences})) or None


def conflicts(stated: Sequence[str | None]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield what models' licences say against a merge: the numbers of the models, and the text."""
    for what, pattern in _FORBIDS.items():
        who = tuple(n for n, one in enumerate(stated) if one and pattern.search(one))
        if who:
            yield who, f"may forbid {what}: {', '.join(sorted({str(stated[n]) for n in who}))}"
    known = sorted({one for one in stated if one is not None})
    if len(known) > 1:
        who = tuple(n for n, one in enumerate(stated) if one is not None)
        yield who, f"licences differ ({', '.join(known)}): all of them bind the merge"
    silent = tuple(n for n, one in enumerate(stated) if one is None)
    if known and silent:
        yield silent, "no licence is stated; nothing says that a merge may be passed on"


def is_one_licence(stated: Sequence[str | None]) -> bool:
    """Return whether all models state one and the same licence, by its name."""
    return stated[0] not in (None, "other") and len({*stated}) == 1


def licence_lines(stated: Sequence[str | None]) -> Iterator[str]:
    """Yield the lines of front matter for a model made of models with these licences."""
    if is_one_licence(stated):
        yield f"license: {json.dumps(stated[0])}"
    elif any(stated):
        yield from ("license: other", 'license_name: "see-parents"')


def licence_section(stated: Sequence[str | None]) -> Iterator[str]:
    """Yield the card's section about them."""
    yield from ("", "## Licences", "")
    warned = [text for _, text in conflicts(stated)]
    yield from [f"- {text}" for text in warned] or ["Every parent's own terms apply."]


def is_licence(file: File) -> bool:
    """Judge by the first part of the path: a file at the top, or all of a directory of texts."""
    top = file.path.split("/")[0]
    is_text = PurePosixPath(top).suffix.lower() in _TEXTS
    return file.form == OPAQUE and is_text and bool(_LICENCE_FILE.fullmatch(top))


def put_array(transaction: Transaction, name: str, values: npt.NDArray[Any], dtype: str) -> Tensor:
    """Store an array, rounded to an element type, and return its record, which is not stored."""
    from mstore.store.view import array_dtype  # late: most of what is made has no arrays

    shape = tuple(map(int, values.shape))
    return transaction.put_tensor(dtype, shape, [values.astype(array_dtype(dtype)).tobytes()], name)


def put_model(
    transaction: Transaction,
    path: str,
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, bytes],
    metadata: Mapping[str, str] = NEW,
) -> Manifest:
    """Store a model of one file of weights whose tensors were put; return what it consists of.

    path: of the weights. texts: other files, by path. metadata: of the header.
    """
    names = sorted(tensors)
    records = [tensors[name] for name in names]
    parts = [
        Part(name, id, record.nbytes)
        for name, record, id in zip(names, records, transaction.put_records(records), strict=True)
    ]
    slots = [Slot(name, tensors[name].dtype, tensors[name].shape) for name in names]
    header = header_bytes({METADATA_KEY: metadata, **_entries(slots)})
    every = {path: header, **texts}
    return assembled((), every, [path], lambda _: parts, transaction.put_bytes)


class Publication:
    """Snapshots of one transaction, and the moves of their branches, or of candidates for them.

    A branch that is there already keeps its snapshot. Whatever a repair dropped of its blocks and
    records is stored again all the same, because the transaction has it as news.
    """

    def __init__(self, catalog: Catalog, transaction: Transaction) -> None:
        self._catalog = catalog
        self.transaction = transaction
        self._snapshots: list[SnapshotRecord] = []
        self._moves: list[RefMove] = []
        self.refs: dict[str, refs.Ref] = {}
        """What each branch or candidate is afterwards."""

    def put(
        self,
        branch: str,
        current: refs.Ref | None,
        content: Manifest,
        made: str,
        parents: Sequence[Parent],
        *,
        message: str,
        action: str,
        plan: Plan | None = None,
        coverage: Coverage | None = None,
        origin: Origin | None = None,
        keeps: Callable[[SnapshotRecord], bool] | None = None,
        relies: bool = True,
        candidate: str | None = None,
    ) -> tuple[SnapshotRecord, bool]:
        """Put a content on a branch; return its snapshot, and whether it is a new one.

        current: what the branch is now. parents: what it was made of, without the previous one.
        action: for the reflog. keeps: whether what is on the branch, of the same content, stays; by
        default, if it was made of the same by the same plan. relies: false if the transaction put
        every block and tensor of the content. candidate: a run whose candidate for the branch moves
        in its place.
        """
        if not is_text(message):
            raise BadRequest(
                f"a message is text that UTF-8 can spell, not {message!r}", where=Option("message")
            )
        transaction = self.transaction
        if relies:
            transaction.rely_on_manifest(content)
        if plan is not None and coverage is None:
            transaction.rely_on_inputs(plan)
        tip, previous = tip_of(self._catalog, current)
        record = SnapshotRecord(
            manifest=transaction.put_record(content),
            parents=(*previous, *parents),
            made=made,
            origin=origin,
            author=self._catalog.author(),
            plan=None if plan is None else transaction.put_record(plan),
            coverage=None if coverage is None else transaction.put_record(coverage),
            message=message,
            time_ns=now_ns(),
            tool=TOOL,
        )
        name, kind, now, tips = branch, refs.BRANCH, current, [tip]
        if candidate is not None:
            name, kind = refs.below(refs.CANDIDATE, candidate, branch), refs.CANDIDATE
            now = self._catalog.ref(name)
            mine, _ = tip_of(self._catalog, now)
            # One that follows another state of the branch is not the one that was asked for.
            tips += [mine] if mine is not None and mine.parents == record.parents else []
        there = next((one for one in tips if one is not None and _stays(one, record, keeps)), None)
        new = refs.Ref(kind, bytes((there or record).id()))
        if there is None:
            self._snapshots.append(record)
        self.refs[name] = new
        if new != now:
            self._moves.append(RefMove(name, now, new, action))
        return there or record, there is None

    def drop_candidate(self, name: str, action: str) -> None:
        """Remove a candidate if it is there, in the same commit."""
        now = self._catalog.ref(name)
        if now is not None:
            self._moves.append(RefMove(name, now, None, action))

    def put_snapshots(self) -> None:
        """Put the records of the snapshots, which `commit` does otherwise."""
        for record in self._snapshots:
            self.transaction.put_record(record)

    def commit(self, also: Callable[[IndexTransaction], None] | None = None) -> None:
        """Publish what was put, and what a repair had dropped.  Raises Conflict, StorageFailed.

        also: adds rows of its own, as in `Transaction.commit`.
        """
        if self._moves or self.transaction.has_news:
            self.transaction.commit(snapshots=self._snapshots, moves=self._moves, also=also)


def made_of(record: SnapshotRecord) -> tuple[Parent, ...]:
    """Return the parents that a snapshot was made of: all but the branch's previous snapshot."""
    return tuple(parent for parent in record.parents if parent.role != PREVIOUS)


def _stays(
    one: SnapshotRecord, new: SnapshotRecord, keeps: Callable[[SnapshotRecord], bool] | None
) -> bool:
    """Return whether a ref's snapshot stays, in place of a new one."""
    if one.manifest != new.manifest:
        return False
    if keeps is None:
        return _is_made_alike(one, new)
    # What is computed on read may have the content of what was added, and is not it.
    return not one.is_virtual and keeps(one)


def _is_made_alike(one: SnapshotRecord, other: SnapshotRecord) -> bool:
    same_plan = one.plan == other.plan and one.is_virtual == other.is_virtual
    return same_plan and made_of(one) == made_of(other)


def branch_below(prefix: str, name: str) -> str:
    """Return the branch below `prefix` for what is made of a model, which the user calls `name`."""
    own = "".join(c if c.isascii() and (c.isalnum() or c in "._-/") else "-" for c in name)
    ref = f"{prefix}/{own.strip('-./')}"
    try:
        refs.check_name(ref)
    except BadName:
        return f"{prefix}/model"
    return ref


def published(
    catalog: Catalog,
    transaction: Transaction,
    branch: str,
    content: Manifest,
    *,
    message: str,
    action: str,
) -> SnapshotId:
    """Publish a checkpoint that a later step takes on a branch; the same content stays."""
    publication = Publication(catalog, transaction)
    current = branch_to_move(catalog, branch)
    record, _ = publication.put(branch, current, content, ADD, (), message=message, action=action)
    publication.commit()
    return record.id()
