"""Members of an alignment: the models, their tokens, and the tensors that have a row for each.

Also the other files of an aligned model: its own, with the tokenizer and the sizes of the
vocabulary. Owns which files are a tokenizer's, and what a config says of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from mstore.checkpoint.strict_json import json_bytes, json_object
from mstore.errors import Incompatible
from mstore.frozen import frozen
from mstore.ids import SnapshotId, TensorId
from mstore.objects.manifest import Manifest
from mstore.objects.shapes import EMBEDDINGS
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, tensors_of
from mstore.vocabulary.tokenizer import Tokenizer, tokenizer_of

VOCAB_SIZE: Final = "vocab_size"
PARTS: Final = ("text_config", "llm_config")
"""Keys of a config under which the language model's own config may be."""
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
OLD_TEMPLATE: Final = "chat_template.json"
TOKENIZER_FILES: Final = frozenset(
    {
        *("tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
        *("sentencepiece.bpe.model", TEMPLATE, OLD_TEMPLATE),
    }
)
"""Paths of files that belong to a tokenizer."""
TEMPLATES: Final = frozenset({TEMPLATE, OLD_TEMPLATE})
"""Those of them that any tokenizer may have beside it."""
WITHOUT_NEW_TOKENS: Final = frozenset({"added_tokens.json"})
"""Those that a tokenizer with more tokens does without: tokenizer.json says it all."""
OTHER_FORMS: Final = frozenset(
    {
        *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
        *("spiece.model", "sentencepiece.bpe.model"),
    }
)
"""Those that a tokenizer with fewer tokens does without: they have all, with other ids."""
CONFIGS: Final = frozenset({"config.json", "generation_config.json"})
"""Paths of files that state token ids."""

_TEMPLATE_KEY: Final = "chat_template"
_DECODER: Final = "added_tokens_decoder"
SINGLE_TOKENS: Final = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("cls_token_id", "mask_token_id", "decoder_start_token_id", "forced_bos_token_id"),
)
"""Settings that a config takes from the model whose tokenizer it gets."""


def template_of(read: Callable[[str], bytes | None]) -> str | None:
    """Return the chat template of a model, None if it has none.

    read: returns a file of the model by its path, None if there is none.
    """
    raw = read(TEMPLATE)
    if raw is not None:
        return raw.decode(errors="replace")
    for path in (OLD_TEMPLATE, TOKENIZER_CONFIG):
        told = json_object(read(path) or b"").get(_TEMPLATE_KEY)
        if isinstance(told, list):
            # Several, by name.
            named = {one.get("name"): one.get("template") for one in told if isinstance(one, dict)}
            told = named.get("default")
        if isinstance(told, str):
            return told
    return None


def without_template(raw: bytes) -> bytes | None:
    """Return a tokenizer_config.json without a chat template, None if it has none."""
    fields = json_object(raw)
    if _TEMPLATE_KEY not in fields:
        return None
    return json_bytes({key: value for key, value in fields.items() if key != _TEMPLATE_KEY})


def renumbered(raw: bytes, rows: int, source: bytes | None) -> bytes | None:
    """Return a config for so many rows; None if it stays.

    source: the same file of the model whose tokenizer it gets: ids of single tokens, such as the
    one that ends a text, are those that it states. None: the tokenizer stays, and so do they.
    """
    before = json_object(raw)
    changed = _renumbered(before, rows, None if source is None else json_object(source))
    return None if changed == before else json_bytes(changed)


def _renumbered(
    fields: Mapping[str, Any], rows: int, source: Mapping[str, Any] | None
) -> dict[str, Any]:
    changed = dict(fields)
    if isinstance(fields.get(VOCAB_SIZE), int):
        changed[VOCAB_SIZE] = rows
    if source is not None:
        changed = {key: value for key, value in changed.items() if key not in SINGLE_TOKENS}
        changed |= {key: source[key] for key in SINGLE_TOKENS if key in source}
    for key in PARTS:
        if isinstance(fields.get(key), dict):
            other = None if source is None else source.get(key, source)
            own = other if isinstance(other, dict) else {}
            changed[key] = _renumbered(fields[key], rows, None if other is None else own)
    return changed


def with_added(raw: bytes, added: Mapping[str, Mapping[str, Any]]) -> bytes | None:
    """Return a tokenizer_config.json that lists these added tokens, if it lists any; else None."""
    fields = json_object(raw)
    listed = fields.get(_DECODER)
    if not isinstance(listed, dict):
        return None
    more = {
        str(entry["id"]): {
            key: value for key, value in {"content": token, **entry}.items() if key != "id"
        }
        for token, entry in added.items()
    }
    return json_bytes({**fields, _DECODER: {**more, **listed}}) if more.keys() - listed else None


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
