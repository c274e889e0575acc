"""Members of an alignment: the models, their tokens, and the tensors that have a row for each."""

from __future__ import annotations

from collections.abc import Mapping

from mstore.errors import Incompatible
from mstore.frozen import frozen
from mstore.ids import SnapshotId, TensorId
from mstore.objects.manifest import Manifest
from mstore.objects.shapes import EMBEDDINGS
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, tensors_of
from mstore.vocabulary.papers import PARTS, VOCAB_SIZE, template_of
from mstore.vocabulary.tokenizer import Tokenizer, tokenizer_of

_BIAS = ".bias"
_MAX_TEMPLATE = 1 << 24


@frozen
class Member:
    """One model.

    name: as it was asked for. tokenizer: None if it has no tokenizer.json; it may then have no
    embeddings, either. rows: of its embeddings. embeddings: their ids and records, by name.
    template: its chat template, None if it has none.
    """

    name: str
    snapshot: SnapshotId
    manifest: Manifest
    tokenizer: Tokenizer | None
    rows: int
    embeddings: Mapping[str, tuple[TensorId, Tensor]]
    template: str | None

    def tokens(self, otherwise: Mapping[str, int]) -> Mapping[str, int]:
        """Return the row of each token that has one; `otherwise` are the tokens if unknown."""
        ids = otherwise if self.tokenizer is None else self.tokenizer.ids
        return {token: id for token, id in ids.items() if id < self.rows}


def member(catalog: Catalog, name: str, snapshot: SnapshotId) -> Member:
    """Return a model as a member.

    Raises Incompatible for one with tokens and without embeddings, or with an unusable tokenizer,
    Corrupt, StorageFailed.
    """
    manifest = catalog.manifest_of(snapshot)
    tensors = tensors_of(catalog, manifest)
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
        name=name,
        snapshot=snapshot,
        manifest=manifest,
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
