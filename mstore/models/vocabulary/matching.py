"""Which tokens of two tokenizers are the same: by what they write, and by what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.checkpoint.strict_json import json_object
from mstore.models.vocabulary.members import SINGLE_TOKENS, TOKENIZER_CONFIG, Member
from mstore.models.vocabulary.spelling import TokenSpelling
from mstore.models.vocabulary.target import NO_TOKENIZER_HINT, SPECIAL_TOKENS
from mstore.models.vocabulary.tokenizer import TOKENIZER, Tokenizer
from mstore.store.catalog import Catalog
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Option

MISSING: Final = -1

_ROLES: Final = {
    "bos_token": ("bos_token", "eos_token"),
    "eos_token": ("eos_token",),
    "pad_token": ("pad_token", "eos_token"),
    "unk_token": ("unk_token",),
}
"""What stands for a token of the donor with this role: the model's token of the first it has."""
_EOS: Final = "eos_token_id"
_MAX_CONFIG: Final = 1 << 24

SPECIAL, BYTES, SPACES, NUMBERS, SIGNS = "special", "bytes", "white space", "numbers", "signs"
WORDS, PARTS, SCRIPTS, MIXED = "words", "parts of words", "other scripts", "mixed"


class Tokens(msgspec.Struct, frozen=True):
    """The tokens of a member that have rows.

    ids: by token. roles: tokens by what they are for, such as `eos_token`. stated: the fields of
    the model's configs, by file.
    """

    name: str
    tokenizer: Tokenizer
    spelling: TokenSpelling
    ids: Mapping[str, int]
    roles: Mapping[str, str]
    stated: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, catalog: Catalog, one: Member) -> Tokens:
        """Return the tokens of a member.  Raises Incompatible if it has no tokenizer.json."""
        if one.tokenizer is None:
            raise Incompatible(
                f"has no {TOKENIZER}, so its tokens are not known",
                where=one.name,
                hint=NO_TOKENIZER_HINT,
            )

        def fields(path: str) -> Mapping[str, Any]:
            return json_object(catalog.read_small(one.manifest.file(path), _MAX_CONFIG) or b"")

        ids = one.tokens({})
        roles: dict[str, str] = {}
        for path in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
            for role, told in fields(path).items():
                text = told.get("content") if isinstance(told, dict) else told
                if role in _ROLES and isinstance(text, str) and text in ids:
                    roles[role] = text
        stated = {path: fields(path) for path in ("config.json", "generation_config.json")}
        return cls(one.name, one.tokenizer, TokenSpelling(one.tokenizer), ids, roles, stated)

    def single_tokens(self, path: str) -> dict[str, Any]:
        """Return ids of single tokens for a config of this name: its own, else another's, else
        those of the tokenizer.
        """
        found: dict[str, Any] = {f"{role}_id": self.ids[text] for role, text in self.roles.items()}
        for other in sorted(self.stated, key=lambda one: one == path):
            told = self.stated[other]
            found |= {key: told[key] for key in SINGLE_TOKENS if told.get(key) is not None}
        return found

    def ends(self) -> set[int]:
        """Return the ids of the tokens that end a text."""
        found: set[int] = set()
        for path in self.stated:
            told = self.single_tokens(path).get(_EOS)
            found |= {id for id in (told if isinstance(told, list) else [told]) if type(id) is int}
        return found

    def is_special(self, token: str) -> bool:
        """Return whether a token is an added one that text is never written with."""
        return bool(self.tokenizer.added.get(token, {}).get("special"))

    def kind(self, token: str) -> str:
        """Return which class of tokens one belongs to, for reports."""
        if self.is_special(token):
            return SPECIAL
        if self.spelling.is_byte(token):
            return BYTES
        text = self.spelling.written(token).decode(errors="ignore")
        bare = text.strip()
        if not bare:
            return SPACES if text else BYTES
        if bare.isdigit():
            return NUMBERS
        if not any(letter.isalnum() for letter in bare):
            return SIGNS
        if not bare.isascii():
            return SCRIPTS
        if bare.isalpha():
            return WORDS if text[0].isspace() else PARTS
        return MIXED


class Matches(msgspec.Struct, frozen=True):
    """Which row of the model each row of the donor is.

    tokens: the donor's, by row. rows: int64[rows of the donor's tokens], MISSING where the model
    has none. is_first: bool, of all tokens that are one row of the model, the one that it is in the
    output: of rows that are equal there, a token would be drawn by chance. alike: those that are
    the same by what they are for, with the model's.
    """

    tokens: Mapping[int, str]
    rows: npt.NDArray[np.int64]
    is_first: npt.NDArray[np.bool_]
    alike: Mapping[str, str]

    def for_output(self) -> npt.NDArray[np.int64]:
        """Return the rows with each row of the model once."""
        return np.where(self.is_first, self.rows, MISSING)

    def atoms(self) -> npt.NDArray[np.int64]:
        """Return the donor's rows of tokens that the model has by what they write, each row of the
        model once: of these others are made.
        """
        is_said = np.zeros(len(self.rows), np.bool_)
        is_said[[row for row, token in self.tokens.items() if token in self.alike]] = True
        return np.flatnonzero(self.is_first & ~is_said)


def matches(model: Tokens, donor: Tokens, asked: Mapping[str, str]) -> Matches:
    """Find the tokens of the donor in the model.

    asked: the model's token for a token of the donor, where a request says so. Raises BadRequest
    for one that is no token.
    """
    for own, tokens in ((donor, asked), (model, asked.values())):
        unknown = next((token for token in tokens if token not in own.ids), None)
        if unknown is not None:
            raise BadRequest(
                f"{unknown!r} is no token of {own.name} that has a row", where=Option("tokens")
            )
    special = {token: id for token, id in model.ids.items() if model.is_special(token)}
    texts: dict[bytes, int] = {}
    # A letter that is a byte, too, is written with the letter.
    for token, id in sorted(model.ids.items(), key=lambda one: model.spelling.is_byte(one[0])):
        if token not in special:
            texts.setdefault(model.spelling.written(token), id)
    texts.pop(b"", None)
    roles = {token: role for role, token in donor.roles.items()}
    ends = donor.ends()
    rows = np.full(max(donor.ids.values(), default=-1) + 1, MISSING, np.int64)
    alike: dict[str, str] = {}
    # Of several tokens for one row, which comes first.
    ranked: list[tuple[int, bool, int]] = []
    for token, id in donor.ids.items():
        rank = 1
        if token in asked:
            rank, alike[token] = 0, asked[token]
            found: int | None = model.ids[asked[token]]
        elif donor.is_special(token):
            found = special.get(token, texts.get(token.encode(errors="surrogatepass")))
        else:
            found = texts.get(donor.spelling.written(token), special.get(token))
        if found is None:
            role = roles.get(token, "eos_token" if id in ends else "")
            stand_in = next((one for one in _ROLES.get(role, ()) if one in model.roles), None)
            if stand_in is not None:
                alike[token] = model.roles[stand_in]
                found = model.ids[alike[token]]
                rank = 2 if token == donor.roles.get(stand_in) else 3 if id in ends else 4
        if found is not None:
            rows[id] = found
            ranked.append((rank, donor.spelling.is_byte(token), id))
    is_first = np.zeros(len(rows), np.bool_)
    given: set[int] = set()
    for _, _, id in sorted(ranked):
        is_first[id] = int(rows[id]) not in given
        given.add(int(rows[id]))
    return Matches({id: token for token, id in donor.ids.items()}, rows, is_first, alike)
