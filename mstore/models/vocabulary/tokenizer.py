"""A tokenizer's tokens and their ids, from `tokenizer.json`, and the union of several.

The file is that of the `tokenizers` library: a model with a vocabulary (a mapping, or for Unigram a
list), and added tokens, which count where both name a token.  Everything else in it is kept as it
is.  Untrusted: sizes are limited, and anything unexpected is Incompatible.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import Manifest
from mstore.terms.errors import Incompatible

TOKENIZER: Final = "tokenizer.json"
_MAX_BYTES: Final = 128 << 20
_MAX_CONTAINERS: Final = 4 << 20
"""Merges of a large vocabulary are some hundred thousand lists."""
_MAX_ID: Final = 1 << 30
_PLAIN: Final = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
"""How a token is added that was no added token before."""


class Tokenizer(msgspec.Struct, frozen=True):
    """ids: by token. added: entries of added tokens, by token. document: the whole file."""

    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, Any]]
    document: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """How many rows an embedding of these tokens has at least."""
        return max(self.ids.values(), default=-1) + 1

    def encode(self) -> bytes:
        """Return the file, in ASCII: a token may be no Unicode."""
        return json.dumps(self.document, indent=1).encode()


def tokenizer_of(catalog: Catalog, model: Manifest, where: str) -> Tokenizer | None:
    """Return the tokenizer of a model, None if it has no tokenizer.json.

    Raises Incompatible for a file that is none, Corrupt, StorageFailed.
    """
    file = model.file(TOKENIZER)
    if file is None:
        return None
    raw = catalog.read_small(file, _MAX_BYTES)
    if raw is None:
        raise _unusable(f"has more than {_MAX_BYTES >> 20} MiB", where)
    return parse(raw, where)


def parse(raw: bytes, where: str) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json.  Raises Incompatible."""
    if raw.count(b"[") + raw.count(b"{") > _MAX_CONTAINERS:
        raise _unusable("has too many lists and objects", where)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _unusable("is not JSON", where) from error
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise _unusable("has no model", where)
    ids = _vocabulary(document["model"].get("vocab"), where)
    added: dict[str, Mapping[str, Any]] = {}
    entries = document.get("added_tokens", ())
    if not isinstance(entries, list | tuple):
        raise _unusable("has added tokens that are no list", where)
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise _unusable("has an added token without a text", where)
        added[entry["content"]] = entry
        ids[entry["content"]] = entry.get("id")
    for token, id in ids.items():
        if type(id) is not int or not 0 <= id < _MAX_ID:
            raise _unusable(f"has no number for the token {token[:40]!r}", where)
    return Tokenizer(ids, added, document)


def merges_of(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the merges, in order.  Raises ValueError or TypeError for one that is none."""
    for one in model.get("merges", ()):
        left, right = one.split(" ") if isinstance(one, str) else one
        yield str(left), str(right)


def union(base: Tokenizer, others: Sequence[Tokenizer]) -> Tokenizer:
    """Return the base's tokenizer with the tokens of the others added to it.

    Tokens of the base keep their ids.  New ones follow: those of vocabularies first, then added
    ones with their settings, each in the order of models and of their ids, as mergekit 0.1.5 adds
    them (within a model its order is that of a hash table).  A token that several models have is
    added as the first of them has it.
    """
    plain: dict[str, Mapping[str, Any]] = {}
    special: dict[str, Mapping[str, Any]] = {}
    for other in others:
        for token, _ in sorted(other.ids.items(), key=lambda one: one[1]):
            if token in base.ids:
                continue
            if token in other.added:
                special.setdefault(token, other.added[token])
            else:
                plain.setdefault(token, _PLAIN)
    new = {token: entry for token, entry in plain.items() if token not in special} | special
    return _extended(base, new)


def with_tokens(base: Tokenizer, tokens: Sequence[str], others: Sequence[Tokenizer]) -> Tokenizer:
    """Return the base's tokenizer with new tokens after its own, in this order.

    Each is added as the first of `others` has it that has it as an added token; else without
    settings, as mergekit 0.1.5 adds all of them.
    """
    entries = {
        token: next((one.added[token] for one in others if token in one.added), _PLAIN)
        for token in tokens
    }
    return _extended(base, entries)


def _extended(base: Tokenizer, new: Mapping[str, Mapping[str, Any]]) -> Tokenizer:
    """Return the tokenizer with new tokens after its own."""
    ids, added = dict(base.ids), dict(base.added)
    for number, (token, entry) in enumerate(new.items(), start=base.rows):
        ids[token] = number
        added[token] = {"id": number, "content": token, **_settings(entry)}
    document = {**base.document, "added_tokens": list(added.values())}
    return Tokenizer(ids, added, document)


def _settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("id", "content")}


def _vocabulary(found: object, where: str) -> dict[str, Any]:
    if isinstance(found, dict):
        return dict(found)
    if isinstance(found, list):
        tokens = [one[0] if isinstance(one, list) and one else None for one in found]
        if all(isinstance(token, str) for token in tokens):
            return {str(token): number for number, token in enumerate(tokens)}
    raise _unusable("has no vocabulary", where)


def _unusable(why: str, where: str) -> Incompatible:
    return Incompatible(f"its {TOKENIZER} {why}", where=where)


class TokenDifferences(msgspec.Struct, frozen=True):
    """How the tokens of a model differ from those of a base.

    moved: how many tokens of both have other rows. example: one of them. new: how many the base
    lacks. lacking: how many the model lacks.
    """

    moved: int
    example: str | None
    new: int
    lacking: int


def differences(base: Tokenizer, other: Tokenizer) -> TokenDifferences:
    """Compare two tokenizers token by token."""
    moved = [token for token, id in other.ids.items() if base.ids.get(token, id) != id]
    return TokenDifferences(
        moved=len(moved),
        example=moved[0] if moved else None,
        new=len(other.ids.keys() - base.ids.keys()),
        lacking=len(base.ids.keys() - other.ids.keys()),
    )
