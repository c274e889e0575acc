"""Align: store models again with the rows of their embeddings in the order of one vocabulary.

Models that were tuned from one base may have tokens of their own.  A merge adds row to row, so it
needs the same token in the same row of every model.  Each model that has another vocabulary is
stored as a new snapshot, on a branch below `aligned/`: embeddings are rewritten, all other tensors
are the model's own blocks.  Models that fit stay as they are.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import structs
from msgspec.structs import replace

from mstore.models.adapters.inputs import ModelChoice, ModelPairs
from mstore.models.adapters.targets import is_adapter
from mstore.models.made import Publication, assembled, branch_below, slots_of, texts_of
from mstore.models.vocabulary.embeddings import Embeddings, wishes_of
from mstore.models.vocabulary.members import (
    CONFIGS,
    OLD_TEMPLATE,
    OTHER_FORMS,
    PARTS,
    SINGLE_TOKENS,
    TEMPLATE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    WITHOUT_NEW_TOKENS,
    Member,
    member,
    renumbered,
    template_of,
    with_added,
    without_template,
)
from mstore.models.vocabulary.target import (
    Target,
    with_new_decoder,
    with_new_ids,
)
from mstore.models.vocabulary.tokenizer import TOKENIZER
from mstore.store.catalog import Catalog
from mstore.store.models import Input, models_in
from mstore.store.objects import snapshot as kinds
from mstore.store.objects.manifest import OPAQUE, File, Manifest, Part
from mstore.store.objects.snapshot import ALIGN, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction, branch_to_move
from mstore.terms.errors import BadName, BadRequest, Incompatible, NotFound
from mstore.terms.ids import Revision, SnapshotId, TensorId
from mstore.terms.phrases import Option, phrase
from mstore.terms.report import ProgressCallback, Report
from mstore.terms.requests import BASE, COMMON, UNION, MergeRequest, Vocabulary

_MAX_FILE: Final = 1 << 24
BRANCHES: Final = "aligned"
"""Aligned models are branches below this name."""


class AlignedModel(Report, frozen=True):
    """A model of an alignment."""

    name: str
    """the model, as it was asked for"""
    ref: str | None
    """the branch of the aligned model; None: the model fits as it is"""
    snapshot: SnapshotId
    """the aligned model, or the model itself"""
    new_snapshot: bool
    """false if the branch already was this, or the model fits"""
    tokens_before: int
    """tokens that the model has"""
    tokens_missing: int
    """tokens of the vocabulary that the model lacks"""
    rows_before: int
    """rows of its embeddings before"""

    def aligned(self) -> str | None:
        """Return the revision of the aligned model; None: it fits as it is."""
        _, colon, model = self.name.partition(":")
        return None if self.ref is None else f"{self.ref}{colon}{model}"


class AlignReport(Report, frozen=True):
    """What an alignment stored."""

    base: AlignedModel
    """the base"""
    experts: tuple[AlignedModel, ...]
    """the experts, in their order"""
    tokens: int
    """tokens of the vocabulary"""
    rows: int
    """rows of embeddings"""
    bytes_written: int
    """bytes added to the store"""
    remarks: tuple[str, ...]
    """what was taken for granted, as text"""
    seconds: float
    """how long it took"""

    def applied(self, request: MergeRequest) -> MergeRequest:
        """Return the request with the aligned models in place of those that were aligned."""

        def revision(one: AlignedModel, given: Revision) -> Revision:
            return one.aligned() or given

        weighted = request.weighted()
        pairs = list(zip(self.experts, weighted, strict=True))
        known: dict[Revision, Revision] = {
            given: revision(one, given) for one, (given, _) in pairs
        } | {request.base: revision(self.base, request.base)}
        return dataclasses.replace(
            request,
            base=known[request.base],
            experts=tuple((known[given], weight) for given, weight in weighted),
            layers=tuple((known[name], first, end) for name, first, end in request.layers),
        )


def align(
    catalog: Catalog,
    asked: Vocabulary,
    models: Sequence[Input],
    input_of: Callable[[Revision], Input],
    *,
    progress: ProgressCallback | None = None,
) -> AlignReport:
    """Store the aligned models.

    models: the base, then the experts. input_of: returns the model that a revision names.

    Raises Incompatible for models that cannot be aligned, BadRequest, Corrupt, StorageFailed; then
    nothing is published.
    """
    began = time.monotonic()
    wishes = {
        token: (None if row.model is None else input_of(row.model), row.token, row.force)
        for token, row in asked.tokens.items()
    }
    source = _source(asked, models[0], input_of)
    models = _chosen(catalog, models)
    base = models[0]
    members: list[Member] = []
    adapters: list[Input] = []
    for one in models:
        own = models_in(catalog, catalog.manifest_of(one.snapshot))
        tensors = own.tensors if one.model is None else own.in_model(one.model)
        if is_adapter(tensors):
            adapters.append(one)
        elif not any(other.is_meant(one) for other in members):
            members.append(member(catalog, one, members[0] if members else None))
    if base in adapters:
        raise Incompatible("is an adapter: it has no vocabulary", where=base.name)
    own_source = next((one for one in members if source and one.is_meant(source)), None)
    if source is not None and own_source is None:
        raise BadRequest(
            f"{asked.source} is neither the base nor an expert that is a model",
            where=Option("vocabulary"),
        )
    base_files = members[0].manifest

    def read(path: str) -> bytes | None:
        return catalog.read_small(base_files.file(path), _MAX_FILE)

    target = Target.of(asked, members, own_source, read)
    embeddings = Embeddings(
        catalog, asked, members, target, wishes_of(wishes, members, target), progress
    )
    made = [_unchanged(one, target) for one in members]
    written = 0
    other_template = target.template is not None and target.template != members[0].template
    if (
        embeddings.changed
        or other_template
        or any(one.tokenizer != target.tokenizer for one in members)
    ):
        if adapters and embeddings.changes(0):
            raise Incompatible(
                f"is an adapter of {base.name}, whose vocabulary changes",
                where=adapters[0].name,
                hint="merge the adapter into its base first, and align the result",
            )
        with Transaction(catalog, "align") as transaction:
            made = _Models(catalog, transaction, members, target).publish(embeddings)
        written = transaction.bytes_written

    def told(one: Input) -> AlignedModel:
        if one in adapters:
            return AlignedModel(one.name, None, one.snapshot, False, 0, 0, 0)
        pairs = zip(members, made, strict=True)
        return replace(next(own for k, own in pairs if k.is_meant(one)), name=one.name)

    return AlignReport(
        base=told(base),
        experts=tuple(map(told, models[1:])),
        tokens=len(target.ids),
        rows=target.rows,
        bytes_written=written,
        remarks=target.remarks,
        seconds=time.monotonic() - began,
    )


def _source(asked: Vocabulary, base: Input, input_of: Callable[[Revision], Input]) -> Input | None:
    """Return the model whose tokens are wanted, None for the union.  Raises BadRequest."""
    if asked.source == UNION:
        return None
    if asked.source in (BASE, COMMON):
        return base
    try:
        return input_of(asked.source)
    except (NotFound, BadName) as error:
        raise BadRequest(
            f"{asked.source} is neither the base nor an expert",
            where=Option("vocabulary"),
            hint=phrase(
                "{all}, {base}, {common}, or one of the models",
                all=Option("vocabulary", UNION),
                base=Option("vocabulary", BASE),
                common=Option("vocabulary", COMMON),
            ),
        ) from error


def _chosen(catalog: Catalog, models: Sequence[Input]) -> Sequence[Input]:
    """Return the base, and the models of experts that stand for that of the base, if it is named.

    Raises Incompatible.
    """
    base, *experts = models
    if base.model is None:
        return models
    ours, *own = (models_in(catalog, catalog.manifest_of(one.snapshot)) for one in models)
    choice = ModelChoice(base.model, tuple(one.model for one in experts))
    pairs = ModelPairs(ours, own, choice, [one.name for one in models]).pairs
    found = zip(experts, pairs, strict=True)
    return [base, *(structs.replace(one, model=pair[base.model]) for one, pair in found)]


def _unchanged(one: Member, target: Target) -> AlignedModel:
    tokens = one.tokens(target.ids)
    missing = len(target.ids.keys() - tokens.keys())
    return AlignedModel(one.name, None, one.given.snapshot, False, len(tokens), missing, one.rows)


class _Models:
    """The aligned models as manifests and snapshots, put into a transaction."""

    def __init__(
        self, catalog: Catalog, transaction: Transaction, members: Sequence[Member], target: Target
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._members = members
        self._target = target

    def publish(self, embeddings: Embeddings) -> list[AlignedModel]:
        """Put all that changes into the transaction and commit it."""
        written = embeddings.written(self._transaction)
        publication = Publication(self._catalog, self._transaction)
        published = [
            self._model(one, tensors, branch, publication)
            for one, tensors, branch in zip(self._members, written, self._branches(), strict=True)
        ]
        publication.commit()
        return published

    def _branches(self) -> list[str]:
        """Return a branch for each member that changes, named after it."""
        found: list[str] = []
        for one in self._members:
            own = name = branch_below(BRANCHES, one.name)
            number = 1
            while name in found:
                number += 1
                name = f"{own}-{number}"
            found.append(name)
        return found

    def _model(
        self, one: Member, tensors: Mapping[str, Tensor], branch: str, publication: Publication
    ) -> AlignedModel:
        """Return a member as aligned; put it, if it is another than before."""
        model = _unchanged(one, self._target)

        def retokenize(files: dict[str, File]) -> None:
            self._retokenize(one, files)
            if one is self._members[0]:
                set_template(self._catalog, self._transaction, files, self._target.template)

        manifest = rewritten(self._catalog, self._transaction, one, tensors, retokenize)
        if manifest == one.manifest:
            return model
        told = f"{one.name} with {len(self._target.ids)} tokens, {self._target.told}"
        record, is_new = publication.put(
            branch,
            branch_to_move(self._catalog, branch),
            one.restored(manifest),
            ALIGN,
            (Parent(kinds.BASE, one.given.snapshot),),
            message=told,
            action=f"align: {told}",
        )
        return replace(model, ref=branch, snapshot=record.id(), new_snapshot=is_new)

    def _retokenize(self, one: Member, files: dict[str, File]) -> None:
        """Replace tokenizer and configs in `files`."""
        target = self._target
        if target.tokenizer is None:
            return
        own = None if one.tokenizer is None else one.tokenizer.ids
        theirs: dict[str, File] = {}
        is_base = one is self._members[0]
        if own is not None and (own != target.tokenizer.ids or is_base):
            theirs = {file.path: file for file in target.source.manifest.files}
        if theirs and target.source is not one:
            for path in TOKENIZER_FILES & files.keys():
                del files[path]
            for path in TOKENIZER_FILES & theirs.keys():
                files[path] = theirs[path]
        if target.is_reduced:
            self._drop_tokens(files)
        if theirs and target.is_new:
            self._add_tokens(files)
        for path in CONFIGS & files.keys():
            before = self._catalog.read_parts(files[path].parts)
            source = self._catalog.read_parts(theirs[path].parts) if path in theirs else None
            if source is None and theirs and target.is_reduced:
                # A config that the source lacks states no tokens.
                source = b"{}"
            raw = renumbered(before, target.rows, source)
            if target.is_reduced:
                raw = self._with_new_ids(raw or before, one, path, copied=source is not None) or raw
            if raw is not None:
                files[path] = self._file(path, raw)

    def _with_new_ids(self, raw: bytes, one: Member, path: str, *, copied: bool) -> bytes | None:
        """Return a config with the ids that the tokens of its settings have now; None if it stays.

        copied: whether settings of single tokens are those of the vocabulary's source.
        """
        target = self._target
        assert target.tokenizer is not None
        assert target.source.tokenizer is not None
        now = target.tokenizer.ids
        own = target.source.tokenizer if one.tokenizer is None else one.tokenizer
        mine = {id: token for token, id in own.ids.items()}
        theirs = {id: token for token, id in target.source.tokenizer.ids.items()}

        def number(place: str, id: int) -> int:
            _, *parents, key = place.split(": ")
            is_copied = copied and key in SINGLE_TOKENS and {*parents} <= {*PARTS}
            token = (theirs if is_copied else mine).get(id)
            if token is None or token not in now:
                told = "no token" if token is None else f"{token}, which not all models have"
                raise Incompatible(
                    f"{place} is {id}: {told}",
                    where=one.name,
                    hint=Option("vocabulary", "base"),
                )
            return now[token]

        return with_new_ids(raw, number, path)

    def _drop_tokens(self, files: dict[str, File]) -> None:
        """Replace the files of the source's tokenizer, of which some tokens were dropped."""
        tokenizer = self._target.tokenizer
        assert tokenizer is not None
        for path in OTHER_FORMS & files.keys():
            del files[path]
        files[TOKENIZER] = self._file(TOKENIZER, tokenizer.encode())
        if TOKENIZER_CONFIG in files:
            raw = self._catalog.read_parts(files[TOKENIZER_CONFIG].parts)
            files[TOKENIZER_CONFIG] = self._file(
                TOKENIZER_CONFIG, with_new_decoder(raw, tokenizer.added)
            )

    def _add_tokens(self, files: dict[str, File]) -> None:
        tokenizer = self._target.tokenizer
        assert tokenizer is not None
        files[TOKENIZER] = self._file(TOKENIZER, tokenizer.encode())
        for path in WITHOUT_NEW_TOKENS & files.keys():
            del files[path]
        if TOKENIZER_CONFIG in files:
            raw = self._catalog.read_parts(files[TOKENIZER_CONFIG].parts)
            changed = with_added(raw, tokenizer.added)
            if changed is not None:
                files[TOKENIZER_CONFIG] = self._file(TOKENIZER_CONFIG, changed)

    def _file(self, path: str, raw: bytes) -> File:
        return file_of(self._transaction, path, raw)


def rewritten(
    catalog: Catalog,
    transaction: Transaction,
    one: Member,
    tensors: Mapping[str, Tensor],
    retokenize: Callable[[dict[str, File]], None],
) -> Manifest:
    """Return what a member consists of with other embeddings.

    tensors: the records of those, by the base's names. retokenize: replaces the files of its
    tokenizer, and its configs.
    """
    ids = [TensorId(id) for id in transaction.put_records(list(tensors.values()))]
    new = {one.own[name]: id for name, id in zip(tensors, ids, strict=True)}
    records = dict(zip(ids, tensors.values(), strict=True))
    models = models_in(catalog, one.manifest)
    files = {file.path: file for file in one.manifest.files}
    changed: dict[str, list[Part]] = {}
    for file in files.values():
        named = {part.name: new.get(full) for part, full in models.parts(file)}
        if any(named.values()):
            changed[file.path] = [
                part if id is None else Part(part.name, id, records[id].nbytes)
                for part in file.tensors()
                for id in (named.get(part.name),)
            ]
    weights = {path: slots_of(catalog, own, records) for path, own in changed.items()}
    texts = texts_of(catalog, one.manifest, weights)
    retokenize(files)
    put = transaction.put_bytes
    return assembled(files.values(), texts, changed, changed.__getitem__, put)


def set_template(
    catalog: Catalog, transaction: Transaction, files: dict[str, File], wanted: str | None
) -> None:
    """Give a model a chat template; None: it keeps its own."""

    def read(path: str) -> bytes | None:
        return catalog.read_parts(files[path].parts) if path in files else None

    if wanted is None or template_of(read) == wanted:
        return
    files.pop(OLD_TEMPLATE, None)
    told = read(TOKENIZER_CONFIG)
    changed = None if told is None else without_template(told)
    if changed is not None:
        files[TOKENIZER_CONFIG] = file_of(transaction, TOKENIZER_CONFIG, changed)
    files[TEMPLATE] = file_of(transaction, TEMPLATE, wanted.encode())


def file_of(transaction: Transaction, path: str, raw: bytes) -> File:
    """Store a small file and return it."""
    part = transaction.put_bytes(raw, path)
    return File(path, OPAQUE, part.nbytes, (part,))
