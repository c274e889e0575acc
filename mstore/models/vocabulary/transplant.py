"""Transplant: a model gets the tokens of another (the donor), and keeps its body.

Rows of tokens that both have are the model's own.  The others are made of the model's rows: by
orthogonal matching pursuit (`omp`), as the donor's row is made of the donor's; or of the pieces
that the model writes the token with (`subword`).  What they are made of is stored as a small
checkpoint and used from there: a pursuit on another machine may choose otherwise, while the result
of what is stored is the same everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore import fs
from mstore.checkpoint.strict_json import json_bytes
from mstore.models.made import Publication
from mstore.models.vocabulary import combinations
from mstore.models.vocabulary.align import file_of, rewritten, set_template
from mstore.models.vocabulary.combinations import Combinations, Matrix, Numbers, Singles
from mstore.models.vocabulary.matching import MISSING, Matches, Tokens, matches
from mstore.models.vocabulary.members import (
    CONFIGS,
    SINGLE_TOKENS,
    TOKENIZER_FILES,
    Member,
    member,
    renumbered,
)
from mstore.models.vocabulary.pursuit import pursue
from mstore.models.vocabulary.target import padded, with_new_ids
from mstore.store.catalog import Catalog
from mstore.store.models import Input, config_of
from mstore.store.objects import snapshot as kinds
from mstore.store.objects.manifest import File
from mstore.store.objects.snapshot import ALIGN, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.tied import HEAD, KEY, ties
from mstore.store.transaction import Transaction, branch_to_move
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import SnapshotId, TensorId
from mstore.terms.phrases import Option, few, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report
from mstore.terms.requests import (
    APPROXIMATIONS,
    MEAN,
    MODEL,
    OMP,
    PREPARED,
    SUBWORD,
    TEMPLATES_OF,
    Transplant,
)

INPUT, OUTPUT = "input", "output"
_BIAS: Final = ".bias"
_OWN_TOKENIZERS: Final = ("qwen2",)
"""Kinds of models for which transformers 5 takes no other tokenizer, whatever the files say."""
GENERATION_CONFIG: Final = "generation_config.json"
_DTYPES: Final = ("BF16", "F16", "F32")
_HELD_OUT: Final = 256
"""Tokens of both that are made as if the model lacked them."""
_WORST: Final = 20
_LEAST_K, _MOST_K, _WIDTHS = 4, 64, 32
"""Of 64 rows of a wide model (Goddard and Fernandes Neto 2025); a 32nd of narrow ones is as good or
better (bench/draft.py)."""
_SLAB_BYTES: Final = 4 << 20


class TokenClass(Report, frozen=True):
    """New tokens of one class.

    Cosines are means over its tokens: of the donor's row, and what the same combination makes in
    the donor.  None: new rows are not made of others, or the output is tied to the input.
    """

    name: str
    """the class: words, parts of words, numbers, ..."""
    tokens: int
    """how many tokens of it the model lacked"""
    input: float | None
    """cosine of the rows of the input embedding"""
    output: float | None
    """cosine of the rows of the output"""


class NewToken(Report, frozen=True):
    """A token that the model lacked."""

    token: str
    """the token, as the donor's tokenizer spells it"""
    cosine: float
    """the lowest cosine of its rows"""


class StandIn(Report, frozen=True):
    """A token of the donor that the model has as another, by what it is for."""

    token: str
    """the donor's token"""
    row_of: str
    """the model's token whose row it gets"""


class TransplantReport(Report, frozen=True):
    """What a transplant stored."""

    ref: str
    """the branch of the result"""
    snapshot: SnapshotId
    """the result"""
    new_snapshot: bool
    """false if the branch already was this"""
    previous: SnapshotId | None
    """what the branch pointed at before; None: it is new"""
    k: int | None
    """of `omp`, how many rows one is made of at most"""
    rows: int
    """rows of its embeddings"""
    tokens: int
    """tokens of the donor"""
    shared: int
    """those of them that the model has, by what they write"""
    stand_ins: tuple[StandIn, ...]
    """those that are the model's by what they are for, or as asked for"""
    classes: tuple[TokenClass, ...]
    """those that the model lacked, by class"""
    worst: tuple[NewToken, ...]
    """the new tokens whose rows are made worst"""
    held_out_input: float | None
    """mean cosine, to their own rows, of tokens that the model has and that were made as if it
    lacked them; of the input embedding; null unless by `omp`"""
    held_out_output: float | None
    """the same of the output; null if it is tied to the input"""
    combinations: str | None
    """the branch with what new rows are made of; None: of no others"""
    bytes_written: int
    """bytes added to the store"""
    remarks: tuple[str, ...]
    """what else is worth knowing, as text"""
    seconds: float
    """how long it took"""


def transplant(
    catalog: Catalog,
    asked: Transplant,
    given: Input,
    donor: Input,
    branch: str,
    *,
    message: str = "",
    threads: int = 1,
    progress: ProgressCallback | None = None,
) -> TransplantReport:
    """Store the model with the donor's tokens on a branch.

    Raises BadRequest, Incompatible, Conflict, Corrupt, StorageFailed; then nothing is published,
    except what new rows are made of.
    """
    began = time.monotonic()
    _require_known(asked)
    if branch in (given.name, donor.name):
        raise BadRequest(
            "is the model or the donor: the result needs a name of its own", where=Option("name")
        )
    current = branch_to_move(catalog, branch)  # before what may take hours
    model, other = member(catalog, given, None), member(catalog, donor, None)
    own, theirs = Tokens.of(catalog, model), Tokens.of(catalog, other)
    found = matches(own, theirs, asked.tokens)
    atoms = found.atoms()
    if not len(atoms):
        raise Incompatible(
            f"has no token that {given.name} has, too: nothing says what its rows are made of",
            where=donor.name,
        )
    _require_output(catalog, other)
    length = len(found.rows)
    rows = padded(max(length, other.rows) if asked.keep_padding else length, asked.pad_to)
    with Transaction(catalog, "align") as transaction:
        places = _places(catalog, transaction, model, other, found)
        k = asked.k or _usual_k(places)
        made, combined = _combined(
            catalog, transaction, asked, k, places, own, theirs, found, atoms, threads, progress
        )
        written = transaction.bytes_written
    with Transaction(catalog, "align") as transaction:
        files = _Files(catalog, transaction, asked, model, other, own, theirs, found, rows)
        tensors = _Tensors(catalog, transaction, asked, places, own, made, rows, progress)
        content = rewritten(catalog, transaction, model, tensors.written(model), files.replace)
        publication = Publication(catalog, transaction)
        how = f"{OMP}, k {k}" if asked.approximation == OMP else asked.approximation
        how += "".join(f", {new}={old}" for new, old in asked.tokens.items())
        told = f"{given.name} with the tokens of {donor.name} ({how})"
        companions = [donor.snapshot, *((combined.snapshot,) if combined else ())]
        record, is_new = publication.put(
            branch,
            branch_to_move(catalog, branch),
            model.restored(content),
            ALIGN,
            (
                Parent(kinds.BASE, given.snapshot),
                *(Parent(kinds.COMPANION, one) for one in companions),
            ),
            message=message or told,
            action=f"align: {told}",
        )
        publication.commit()
        written += transaction.bytes_written
    cosines = {role: _cosines(places[role], one, found) for role, one in made.items()}
    return TransplantReport(
        ref=branch,
        snapshot=record.id(),
        new_snapshot=is_new,
        previous=None if current is None else current.snapshot_id(),
        k=k if asked.approximation == OMP else None,
        rows=rows,
        tokens=len(theirs.ids),
        shared=int((found.rows != MISSING).sum()) - len(found.alike),
        stand_ins=tuple(StandIn(*one) for one in found.alike.items()),
        classes=_classes(theirs, found, places, cosines),
        worst=_worst(found, places, cosines),
        held_out_input=_held_out(INPUT, places, made),
        held_out_output=_held_out(OUTPUT, places, made),
        combinations=combined.branch if combined else None,
        bytes_written=written,
        remarks=files.remarks(),
        seconds=time.monotonic() - began,
    )


def _require_known(asked: Transplant) -> None:
    """Raise BadRequest for options that are none."""
    for given, known, option in (
        (asked.approximation, APPROXIMATIONS, "approximation"),
        (asked.chat_template, TEMPLATES_OF, "chat_template"),
    ):
        if given not in known:
            raise BadRequest(f"{given} is none of {', '.join(known)}", where=Option(option))
    if asked.k is not None and asked.k < 1:
        raise BadRequest(f"{asked.k} is no number of rows", where=Option("k"))


def _require_output(catalog: Catalog, donor: Member) -> None:
    """Raise Incompatible for a donor whose output is missing: its input would stand for it."""
    if OUTPUT not in _matrices(donor) and ties(config_of(catalog, donor.manifest)) is False:
        raise Incompatible(
            f"has no output layer, and its config says that none is tied to the input ({KEY})",
            where=donor.name,
            hint="add the model with the file that has it (lm_head.weight)",
        )


def _usual_k(places: Mapping[str, _Place]) -> int:
    """Return how many rows one is made of: few beside the width, or the sum fits anything."""
    return min(_MOST_K, max(_LEAST_K, places[INPUT].donor.width // _WIDTHS))


class _Place(msgspec.Struct, frozen=True):
    """One of the embeddings that have rows of their own: that of the input, or of the output.

    rows: int64[tokens of the donor], the rows of the model. missing: rows of the result that are
    tokens of the donor and no row of the model. model, donor: what they have there. model_id,
    donor_id: of these tensors.
    """

    rows: Numbers
    missing: Numbers
    model: Matrix
    donor: Matrix
    model_id: TensorId
    donor_id: TensorId


def _places(
    catalog: Catalog, transaction: Transaction, model: Member, donor: Member, found: Matches
) -> dict[str, _Place]:
    """Return the embeddings by what they are.  That of the output is not there if it is tied."""
    own, other = _matrices(model), _matrices(donor)
    tokens = np.asarray(sorted(found.tokens), np.int64)
    places = {}
    for role, name in own.items():
        # Of rows that are equal in the output, none is the token.
        is_output = role == OUTPUT or OUTPUT not in own
        rows = found.for_output() if is_output else found.rows
        # Rows of a tied model are its output, too, which is the more sensitive of the two.
        model_id, tensor = model.embeddings[name]
        donor_id, source = donor.embeddings[other.get(OUTPUT if is_output else INPUT, other[INPUT])]
        places[role] = _Place(
            rows,
            tokens[rows[tokens] == MISSING],
            _read(catalog, transaction, tensor, model.name),
            _read(catalog, transaction, source, donor.name),
            model_id,
            donor_id,
        )
    return places


def _matrices(one: Member) -> dict[str, str]:
    """Return the names of a member's embeddings: of the input, and of an output that is not tied.

    Raises Incompatible if it has none.
    """
    found: dict[str, str] = {}
    for name in one.embeddings:
        if not name.endswith(_BIAS):
            found.setdefault(OUTPUT if HEAD.search(name) else INPUT, name)
    if not found:
        raise Incompatible("has no embedding with a row for each token", where=one.name)
    if INPUT not in found:
        return {INPUT: found[OUTPUT]}
    if OUTPUT in found and one.embeddings[found[OUTPUT]][0] == one.embeddings[found[INPUT]][0]:
        del found[OUTPUT]
    return found


def _read(catalog: Catalog, transaction: Transaction, record: Tensor, where: str) -> Matrix:
    """Return an embedding, read to a file without a name.  Raises Incompatible."""
    if record.dtype not in _DTYPES or len(record.shape) > 2:
        raise Incompatible(
            f"has embeddings of {record.dtype} {list(record.shape)}, not of BF16, F16 or F32",
            where=where,
        )
    blocks = (catalog.read_block(block) for block in record.block_ids())
    return Matrix(fs.unnamed(transaction.directory, blocks), record.dtype, record.shape[0])


# -- what new rows are made of -------------------------------------------------------------------


class _Stored(msgspec.Struct, frozen=True):
    """Combinations as they are stored."""

    branch: str
    snapshot: SnapshotId


def _combined(
    catalog: Catalog,
    transaction: Transaction,
    asked: Transplant,
    k: int,
    places: Mapping[str, _Place],
    own: Tokens,
    theirs: Tokens,
    found: Matches,
    atoms: Numbers,
    threads: int,
    progress: ProgressCallback | None,
) -> tuple[dict[str, Combinations], _Stored | None]:
    """Return what new rows are made of, by embedding, and where that is stored.

    atoms: `found.atoms()`. What is stored already is taken.
    """
    if asked.approximation not in (OMP, SUBWORD):
        return {}, None

    def texts(place: _Place) -> list[bytes]:
        written = theirs.spelling.written
        return [written(found.tokens[at]) for at in place.missing.tolist()]

    key = blake3(f"{asked.approximation} {k if asked.approximation == OMP else ''}".encode())
    for role, place in places.items():
        key.update(role.encode() + place.rows.tobytes() + place.missing.tobytes())
        if asked.approximation == OMP:
            key.update(bytes(place.donor_id) + atoms.tobytes())
        else:
            key.update(b"".join(b"%r" % text for text in texts(place)))
            key.update(own.tokenizer.encode())
    branch = f"{PREPARED}combinations-{key.hexdigest()[:16]}"
    there = branch_to_move(catalog, branch)
    if there is not None:
        snapshot = there.snapshot_id()
        counts = {role: len(place.model.raw) for role, place in places.items()}
        known = combinations.read(catalog, snapshot, branch, counts)
        return known, _Stored(branch, snapshot)
    made: dict[str, Combinations] = {}
    total = sum(one.donor.raw.shape[1] * len(one.missing) for one in places.values())
    tick = ProgressCounter("pursue", total, progress)
    for role, place in places.items():
        if asked.approximation == SUBWORD:
            pieces = map(own.spelling.pieces, texts(place))
            rows = [[id for id in one if id < len(place.model.raw)] for one in pieces]
            made[role] = combinations.of_pieces(place.missing, rows)
        else:
            made[role] = _pursued(k, place, atoms, threads, tick)
    snapshot = combinations.stored(catalog, transaction, branch, made)
    return made, _Stored(branch, snapshot)


def _pursued(
    k: int, place: _Place, theirs: Numbers, threads: int, tick: ProgressCounter
) -> Combinations:
    """Return new rows as the donor's are made of the donor's, and some that are not new.

    theirs: the donor's rows that they are made of.
    """
    atoms = place.donor.singles(theirs)
    # Not more of them than one in eight, which would say little about the others.
    held = np.unique(np.linspace(0, len(theirs) - 1, min(_HELD_OUT, len(theirs) // 8)).astype(int))
    tokens = np.concatenate([place.missing, theirs[held]])
    excluded = np.concatenate([np.full(len(place.missing), MISSING), held])
    targets = place.donor.singles(tokens)
    if not (np.isfinite(atoms).all() and np.isfinite(targets).all()):
        raise Incompatible("the donor's embeddings have numbers that are not finite")
    made: list[tuple[Numbers, Singles]] = []
    for taken, factors in pursue(targets, atoms, k, excluded, threads):
        made.append((taken, factors))
        tick(len(taken) * place.donor.raw.shape[1])
    rows = np.concatenate([one for one, _ in made]) if made else np.zeros((0, 1), np.int64)
    factors = np.concatenate([one for _, one in made]) if made else np.zeros((0, 1), np.float32)
    return Combinations(tokens, place.rows[theirs][rows], factors, len(held))


# -- tensors -------------------------------------------------------------------------------------


class _Tensors:
    """The embeddings of the result."""

    def __init__(
        self,
        catalog: Catalog,
        transaction: Transaction,
        asked: Transplant,
        places: Mapping[str, _Place],
        own: Tokens,
        made: Mapping[str, Combinations],
        rows: int,
        progress: ProgressCallback | None,
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._asked = asked
        self._places = places
        self._own = np.asarray(sorted(own.ids.values()), np.int64)
        self._made = made
        self._rows = rows
        self._progress = progress

    def written(self, model: Member) -> dict[str, Tensor]:
        """Store the embeddings; return their records by name."""
        sizes = [tensor.nbytes // model.rows for _, tensor in model.embeddings.values()]
        tick = ProgressCounter("align", sum(sizes) * self._rows, self._progress)
        found: dict[str, Tensor] = {}
        known: dict[tuple[TensorId, str], Tensor] = {}
        for name, (id, tensor) in model.embeddings.items():
            is_output = HEAD.search(name.removesuffix(_BIAS)) and OUTPUT in self._places
            role = OUTPUT if is_output else INPUT
            if (id, role) not in known:
                place = self._places[role]
                is_known = id == place.model_id
                own = place.model if is_known else self._read(tensor, model.name)
                shape = (self._rows, *tensor.shape[1:])
                pieces = self._pieces(place, self._made.get(role), own, tick)
                put = self._transaction.put_tensor
                known[id, role] = put(tensor.dtype, shape, pieces, name)
            found[name] = known[id, role]
        return found

    def _read(self, tensor: Tensor, where: str) -> Matrix:
        return _read(self._catalog, self._transaction, tensor, where)

    def _pieces(
        self, place: _Place, made: Combinations | None, own: Matrix, tick: ProgressCounter
    ) -> Iterator[bytes]:
        """Yield the bytes of the rows, a few MiB at a time."""
        step = max(1, _SLAB_BYTES // (4 * own.width))
        mean = own.mean(self._own)
        source = np.full(self._rows, MISSING, np.int64)
        source[: len(place.rows)] = place.rows
        # Rows that are no tokens are the mean, which is never the likeliest token.
        for start in range(0, self._rows, step):
            at = source[start : start + step]
            out = np.repeat(own.rounded(mean[None]), len(at), axis=0)
            out[at != MISSING] = own.raw[at[at != MISSING]]
            first, end = np.searchsorted(place.missing, (start, start + step)).tolist()
            if self._asked.approximation != MEAN and end > first:
                values = np.zeros((end - first, own.width), np.float32)
                if made is not None:
                    values = made.made_of(slice(first, end), own)
                out[place.missing[first:end] - start] = own.rounded(values)
            tick(out.nbytes)
            yield out.tobytes()


# -- tokenizer and configs -----------------------------------------------------------------------


class _Files:
    """The other files of the result: the donor's tokenizer, the model's configs with its ids."""

    def __init__(
        self,
        catalog: Catalog,
        transaction: Transaction,
        asked: Transplant,
        model: Member,
        donor: Member,
        own: Tokens,
        theirs: Tokens,
        found: Matches,
        rows: int,
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._wanted = model.template if asked.chat_template == MODEL else None
        self._model = model
        self._donor = donor
        self._own = own
        self._theirs = theirs
        self._rows = rows
        self._names = {id: token for token, id in own.ids.items()}
        self._ids = {int(found.rows[at]): int(at) for at in np.flatnonzero(found.is_first)}

    def replace(self, files: dict[str, File]) -> None:
        """Replace the files of the tokenizer, and the configs."""
        for path in TOKENIZER_FILES:
            files.pop(path, None)
            own = self._donor.manifest.file(path)
            if own is not None:
                files[path] = own
        set_template(self._catalog, self._transaction, files, self._wanted)
        for path in sorted(CONFIGS & files.keys()):
            before = self._catalog.read_parts(files[path].parts)
            source = json_bytes(self._theirs.single_tokens(path))
            raw = renumbered(before, self._rows, source) or before
            raw = with_new_ids(raw, self._number, path) or raw
            if raw != before:
                files[path] = file_of(self._transaction, path, raw)
        told = self._theirs.single_tokens(GENERATION_CONFIG)
        if told and GENERATION_CONFIG not in files and self._theirs.stated[GENERATION_CONFIG]:
            files[GENERATION_CONFIG] = file_of(
                self._transaction, GENERATION_CONFIG, json_bytes(told)
            )

    def _number(self, place: str, id: int) -> int:
        """Return the id that a setting's token has now.  Raises Incompatible."""
        if place.rpartition(": ")[2] in SINGLE_TOKENS:
            return id
        if id not in self._ids:
            told = "no token" if id not in self._names else f"{self._names[id]}, which it lacks"
            raise Incompatible(
                f"{place} of {self._model.name} is {id}: {told}",
                where=self._donor.name,
                hint=phrase(
                    "{tokens} gives its row to a token NEW of the donor",
                    tokens=Option("tokens", f"NEW={self._names.get(id, 'OLD')}"),
                ),
            )
        return self._ids[id]

    def remarks(self) -> tuple[str, ...]:
        """Return what is worth knowing about template, rows and how the tokenizer is loaded."""
        found: list[str] = []
        template = self._model.template or ""
        if self._wanted is not None:
            special = filter(self._own.is_special, self._own.ids)
            lost = [one for one in special if one in template and one not in self._theirs.ids]
            if lost:
                found.append(
                    f"the chat template names tokens that it has not any more: {few(lost)}"
                )
        elif template and not self._donor.template:
            found.append(f"{self._donor.name} has no chat template, and so the result has none")
        if self._rows != self._donor.rows:
            found.append(
                f"the result has {self._rows} rows, and {self._donor.name} has "
                f"{self._donor.rows}: as a draft model it needs as many"
            )
        kinds = [one.stated["config.json"].get("model_type") for one in (self._own, self._theirs)]
        if kinds[0] in _OWN_TOKENIZERS and kinds[0] != kinds[1]:
            found.append(
                f"transformers 5 loads a {kinds[0]} with a tokenizer of its own, which may write "
                f"other ids: load the tokenizer of {self._donor.name}"
            )
        return tuple(found)


# -- how good new rows are -----------------------------------------------------------------------


def _cosines(place: _Place, made: Combinations, found: Matches) -> npt.NDArray[np.float64]:
    """Return, for each new row, the cosine of the donor's and what the same makes of the donor.

    NaN where the donor lacks a row that it is made of.
    """
    theirs = np.flatnonzero(found.is_first)
    other = np.full(len(place.model.raw), MISSING, np.int64)
    other[found.rows[theirs]] = theirs
    rows = other[made.rows]
    is_lost = ((rows == MISSING) & (made.factors != 0)).any(axis=1)
    alike = Combinations(made.tokens, np.maximum(rows, 0), made.factors, made.held_out)
    cosines = _compared(alike, slice(0, len(made)), place.donor, place.donor, made.tokens)
    cosines[is_lost[: len(made)]] = np.nan
    return cosines


def _held_out(
    role: str, places: Mapping[str, _Place], made: Mapping[str, Combinations]
) -> float | None:
    """Return the mean cosine of rows that the model has and those made in their place."""
    one = made.get(role)
    if one is None or not one.held_out:
        return None
    place, span = places[role], slice(len(one), len(one.tokens))
    cosines = _compared(one, span, place.model, place.model, place.rows[one.tokens])
    known = cosines[~np.isnan(cosines)]  # rows of zeros have none
    return float(known.mean()) if len(known) else None


def _compared(
    made: Combinations, span: slice, matrix: Matrix, truth: Matrix, rows: Numbers
) -> npt.NDArray[np.float64]:
    """Return the cosine of each row made of `matrix` and these rows of `truth`."""
    found = []
    step = max(1, _SLAB_BYTES // (4 * matrix.width))
    for start in range(span.start, span.stop, step):
        each = slice(start, min(start + step, span.stop))
        one = made.made_of(each, matrix).astype(np.float64)
        other = truth.singles(rows[each]).astype(np.float64)
        lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        products = np.einsum("rd,rd->r", one, other)
        found.append(products / np.where(lengths > 0, lengths, np.nan))
    return np.concatenate(found) if found else np.zeros(0)


def _classes(
    theirs: Tokens,
    found: Matches,
    places: Mapping[str, _Place],
    cosines: Mapping[str, npt.NDArray[np.float64]],
) -> tuple[TokenClass, ...]:
    """Return the new tokens by class, the largest class first."""
    members: dict[str, list[int]] = {}
    for at in np.flatnonzero(found.rows == MISSING).tolist():
        if at in found.tokens:
            members.setdefault(theirs.kind(found.tokens[at]), []).append(at)

    def mean(role: str, own: Sequence[int]) -> float | None:
        if role not in cosines:
            return None
        values = cosines[role][np.isin(places[role].missing, own)]
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else None

    classes = [
        TokenClass(name, len(own), mean(INPUT, own), mean(OUTPUT, own))
        for name, own in members.items()
    ]
    return tuple(sorted(classes, key=lambda one: (-one.tokens, one.name)))


def _worst(
    found: Matches, places: Mapping[str, _Place], cosines: Mapping[str, npt.NDArray[np.float64]]
) -> tuple[NewToken, ...]:
    """Return the new tokens with the lowest cosines."""
    lowest: dict[int, float] = {}
    for role, values in cosines.items():
        for at, value in zip(places[role].missing.tolist(), values.tolist(), strict=True):
            if value == value and found.rows[at] == MISSING:
                lowest[at] = min(value, lowest.get(at, value))
    worst = sorted(lowest, key=lambda at: (lowest[at], at))[:_WORST]
    return tuple(NewToken(found.tokens[at], lowest[at]) for at in worst)
