"""Members of an alignment: the models, their tokens, and the tensors that have a row for each.

Also the other files of an aligned model: its own, with the tokenizer and the sizes of the
vocabulary. Owns which files are a tokenizer's, and what a config says of tokens.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import structs

from mstore.checkpoint.models import renamed
from mstore.checkpoint.strict_json import json_bytes, json_object
from mstore.models.vocabulary.tokenizer import Tokenizer, tokenizer_of
from mstore.store.catalog import Catalog
from mstore.store.models import Input, config_of, models_in, paired
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.shapes import EMBEDDINGS
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Incompatible
from mstore.terms.ids import TensorId

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
        template = json_object(read(path) or b"").get(_TEMPLATE_KEY)
        if isinstance(template, list):
            several = [one for one in template if isinstance(one, dict)]
            named = {one.get("name"): one.get("template") for one in several}
            template = named.get("default")
        if isinstance(template, str):
            return template
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
_ENCODER: Final = re.compile(r"(?P<above>(?:.*/)?)text_encoder(?P<number>(?:_[0-9]+)?)")
"""Directories of a pipeline beside which the tokenizer has one of its own."""
_MAX_TEMPLATE = 1 << 24


class Member(msgspec.Struct, frozen=True):
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
    rows = rows_of(config)
    counts = {one.shape[0] for one in records.values() if len(one.shape) > 1}
    if rows is None and len(counts) == 1:
        rows = counts.pop()
    found = {
        tensor: (named[tensor], record)
        for tensor, record in records.items()
        if record.shape and record.shape[0] == rows
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
        rows=rows or 0,
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
