"""Members of an alignment: the models, their tokens, and the tensors that have a row for each."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Final

from msgspec import structs

from mstore.checkpoint.models import renamed
from mstore.errors import Incompatible
from mstore.frozen import frozen
from mstore.ids import TensorId
from mstore.objects.manifest import Manifest
from mstore.objects.shapes import EMBEDDINGS
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog
from mstore.store.configs import config_of
from mstore.store.models import Input, models_in, paired
from mstore.vocabulary.papers import PARTS, TOKENIZER_FILES, VOCAB_SIZE, template_of
from mstore.vocabulary.tokenizer import Tokenizer, tokenizer_of

_BIAS = ".bias"
_ENCODER: Final = re.compile(r"(?P<above>(?:.*/)?)text_encoder(?P<number>(?:_[0-9]+)?)")
"""Directories of a pipeline beside which the tokenizer has one of its own."""
_MAX_TEMPLATE = 1 << 24


@frozen
class Member:
    """One model, in all its forms: these have one tokenizer.

    given: as it was asked for. whole: the snapshot. manifest: its files, of REF:MODEL those of its
    directory (home), by the paths there, with those of its tokenizer, which may lie elsewhere
    (tokenizers). own: what its tensors are called, by what the base calls them. tokenizer: None if
    it has no tokenizer.json; it may then have no embeddings, either. rows: of its embeddings.
    embeddings: their ids and records, by the base's names. template: its chat template, None if it
    has none.
    """

    given: Input
    whole: Manifest
    manifest: Manifest
    home: str
    tokenizers: str
    own: Mapping[str, str]
    tokenizer: Tokenizer | None
    rows: int
    embeddings: Mapping[str, tuple[TensorId, Tensor]]
    template: str | None

    @property
    def name(self) -> str:
        """The model, as it was asked for."""
        return self.given.name

    def is_meant(self, given: Input) -> bool:
        """Return whether this is what was asked for, if by another name."""
        model = self.given.model
        return self.given.snapshot == given.snapshot and given.model in (None, model)

    def restored(self, manifest: Manifest) -> Manifest:
        """Return the snapshot with other files in place of its `manifest`."""
        before, after = (
            [structs.replace(one, path=self._place(one.path)) for one in each.files]
            for each in (self.manifest, manifest)
        )
        gone = {one.path for one in before}
        files = [*after, *(one for one in self.whole.files if one.path not in gone)]
        return Manifest(tuple(sorted(files, key=lambda one: one.path)))

    def _place(self, path: str) -> str:
        home = self.tokenizers if path in TOKENIZER_FILES else self.home
        return posixpath.join(home, path)

    def tokens(self, otherwise: Mapping[str, int]) -> Mapping[str, int]:
        """Return the row of each token that has one; `otherwise` are the tokens if unknown."""
        ids = otherwise if self.tokenizer is None else self.tokenizer.ids
        return {token: id for token, id in ids.items() if id < self.rows}


def _files(catalog: Catalog, whole: Manifest, model: str | None) -> tuple[Manifest, str, str]:
    """Return manifest, home and tokenizers of a member."""
    if model is None:
        return whole, "", ""
    models = models_in(catalog, whole)
    home = models.named[model].directory
    forms = [one.name for one in models.named.values() if one.directory == home]
    manifest, encoder = models.alone(*forms), _ENCODER.fullmatch(home)
    if encoder is None or any(file.path in TOKENIZER_FILES for file in manifest.files):
        return manifest, home, home
    tokenizers = f"{encoder['above']}tokenizer{encoder['number']}"
    found = {name: whole.file(posixpath.join(tokenizers, name)) for name in TOKENIZER_FILES}
    more = [structs.replace(one, path=name) for name, one in found.items() if one is not None]
    files = sorted((*manifest.files, *more), key=lambda one: one.path)
    return Manifest(tuple(files)), home, tokenizers


def member(catalog: Catalog, given: Input, base: Member | None) -> Member:
    """Return a model as a member; base: None for the base itself.

    Raises Incompatible for one with tokens and without embeddings, or with an unusable tokenizer,
    Corrupt, StorageFailed.
    """
    whole = catalog.manifest_of(given.snapshot)
    manifest, home, tokenizers = _files(catalog, whole, given.model)
    models, name = models_in(catalog, manifest), given.name
    names = {one: one for one in models.named}
    if base is not None:
        pairs = paired(models_in(catalog, base.manifest).named, models.named)
        names |= {theirs: ours for ours, theirs in pairs.items()}
    tensors = renamed(models.tensors, names)
    config = config_of(catalog, manifest)
    named = {
        tensor: id
        for tensor, id in tensors.items()
        if EMBEDDINGS.search(tensor.removesuffix(_BIAS))
    }
    records = dict(zip(named, catalog.tensors(list(named.values())), strict=True))
    told = rows_of(config)
    counts = {one.shape[0] for one in records.values() if len(one.shape) > 1}
    if told is None and len(counts) == 1:
        told = counts.pop()
    found = {
        tensor: (named[tensor], record)
        for tensor, record in records.items()
        if record.shape and record.shape[0] == told
    }
    tokenizer = tokenizer_of(catalog, manifest, name)
    if tokenizer is not None and not found:
        raise Incompatible(
            "has a tokenizer, and no embedding with a row for each token: none has as many rows as "
            f"its config's {VOCAB_SIZE}",
            where=name,
        )
    return Member(
        given=given,
        whole=whole,
        manifest=manifest,
        home=home,
        tokenizers=tokenizers,
        own=renamed({one: one for one in models.tensors}, names),
        tokenizer=tokenizer,
        rows=told or 0,
        embeddings=found,
        template=chat_template(catalog, manifest),
    )


def chat_template(catalog: Catalog, model: Manifest) -> str | None:
    """Return the chat template of a model, None if it has none.  Raises Corrupt, StorageFailed."""
    return template_of(lambda path: catalog.read_small(model.file(path), _MAX_TEMPLATE))


def rows_of(config: Mapping[str, object]) -> int | None:
    """Return the config's vocab_size, None if it says none."""
    parts = (config, *(config.get(part) for part in PARTS))
    for one in parts:
        size = one.get(VOCAB_SIZE) if isinstance(one, dict) else None
        if type(size) is int and size > 0:
            return size
    return None
