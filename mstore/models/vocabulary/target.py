"""The vocabulary of an alignment: its tokens, its rows, and what was asked for single tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import structs

from mstore.models.vocabulary.common import Read, common_of
from mstore.models.vocabulary.members import Member
from mstore.models.vocabulary.rows import MISSING, ZERO, Wish
from mstore.models.vocabulary.tokenizer import TOKENIZER, Tokenizer, union, with_tokens
from mstore.store.models import Input
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Option
from mstore.terms.requests import AUTO, COMMON, Vocabulary

Wishes = Mapping[str, tuple[Input | None, str | int | None, bool]]
"""By token: the model it is from (None: zeros), the token or row there, whether it is forced."""
_MOST_PADDING = 1 << 16
_SHOWN = 10
"""New tokens that a remark names."""
_SAVE = f"save its tokenizer with transformers once, which writes {TOKENIZER}, and add it again"


class Target(msgspec.Struct, frozen=True):
    """The vocabulary.

    source: whose tokenizer files it has. tokenizer: None if it is not known; then tokens are what
    is in the same row. ids: of its tokens. length: rows for these. rows: with padding. is_new:
    whether the tokenizer has more tokens than its source. template: the chat template that the base
    gets, None if it stays. is_reduced: whether tokens of the source were dropped, so that others
    have other ids than there. told: whose tokens they are, as text. remarks: what was taken for
    granted.
    """

    source: Member
    tokenizer: Tokenizer | None
    ids: Mapping[str, int]
    length: int
    rows: int
    is_new: bool
    template: str | None
    is_reduced: bool
    told: str
    remarks: tuple[str, ...]

    @classmethod
    def of(
        cls, asked: Vocabulary, members: Sequence[Member], source: Member | None, read: Read
    ) -> Target:
        """Return the vocabulary that is asked for; read: returns files of the base by their paths.

        Raises BadRequest, Incompatible.
        """
        base = members[0]
        known = [one.tokenizer for one in members if one.tokenizer is not None]
        unknown = [one for one in members if one.tokenizer is None]
        if base.tokenizer is None and known:
            raise Incompatible(
                f"has no {TOKENIZER}, so its tokens are not known",
                where=base.name,
                hint=_SAVE,
            )
        for one in unknown:
            if known and one.rows != base.rows:
                raise Incompatible(
                    f"has no {TOKENIZER}, and {one.rows} rows, not the base's {base.rows}: which "
                    "tokens they are is not known",
                    where=one.name,
                    hint=_SAVE,
                )
        without = [one.name for one in unknown]
        told = f"{', '.join(without)}: no {TOKENIZER}; the tokens are taken to be the base's"
        remarks: tuple[str, ...] = (told,) if without else ()
        own = base if source is None else source
        tokenizer = own.tokenizer if own.tokenizer is not None else base.tokenizer
        is_new = is_reduced = False
        if tokenizer is None:
            ids: Mapping[str, int] = {str(number): number for number in range(own.rows)}
        elif source is None:
            before = tokenizer
            others = [
                structs.replace(one.tokenizer, ids=one.tokens({}))
                for one in members[1:]
                if one.tokenizer is not None
            ]
            tokenizer = union(before, others)
            ids = tokenizer.ids
            is_new = len(ids) > len(before.ids)
            new = ids.keys() - before.ids.keys()
            remarks += _told_of_plain([tokenizer.added[token] for token in new])
        else:
            ids = own.tokens(tokenizer.ids)
            if asked.source == COMMON:
                theirs = [one.tokens(tokenizer.ids) for one in members[1:]]
                try:
                    common = common_of(tokenizer, own.rows, theirs, read)
                except Incompatible as error:
                    error.locate(own.name)
                    raise
                if common is not None:
                    tokenizer, is_reduced = common.tokenizer, True
                    ids = tokenizer.ids
                    remarks += _told_of_needed(common.needed)
        if tokenizer is not None:
            tokenizer, ids, told_of_new = _with_asked(asked, tokenizer, ids, members)
            is_new = is_new or bool(told_of_new)
            remarks += told_of_new
        remarks += _told_of_dropped(members, ids)
        length = max(ids.values(), default=-1) + 1
        rows = max(length, own.rows) if asked.keep_padding and not is_reduced else length
        if asked.pad_to is not None:
            if not 0 < asked.pad_to <= _MOST_PADDING:
                raise BadRequest(
                    f"rows are rounded up to a multiple of 1 to {_MOST_PADDING}, not "
                    f"{asked.pad_to!r}",
                    where=Option("pad_to"),
                )
            rows = -(-rows // asked.pad_to) * asked.pad_to
        told = f"those of {own.name}"
        if source is None:
            told = f"those of {', '.join(one.name for one in members)}"
        template = _template(asked.chat_template, members)
        if is_reduced:
            told = f"common to {', '.join(one.name for one in members)}"
        return cls(own, tokenizer, ids, length, rows, is_new, template, is_reduced, told, remarks)


def _with_asked(
    asked: Vocabulary, tokenizer: Tokenizer, ids: Mapping[str, int], members: Sequence[Member]
) -> tuple[Tokenizer, Mapping[str, int], tuple[str, ...]]:
    """Return tokenizer and ids with those of the single tokens that they lack, and remarks."""
    new = [token for token in asked.tokens if token not in tokenizer.ids]
    if not new:
        return tokenizer, ids, ()
    known = [one.tokenizer for one in members if one.tokenizer is not None]
    tokenizer = with_tokens(tokenizer, new, known)
    remark = f"tokens that the vocabulary did not have, and now has: {_few(new)}"
    more = {token: tokenizer.ids[token] for token in new}
    return tokenizer, {**ids, **more}, (remark, *_told_of_plain([tokenizer.added[t] for t in new]))


def _told_of_dropped(members: Sequence[Member], ids: Mapping[str, int]) -> tuple[str, ...]:
    """Return a remark for each model with tokens that the vocabulary has not."""
    remarks = []
    for one in members:
        tokens = [] if one.tokenizer is None else [t for t in one.tokens({}) if t not in ids]
        if tokens:
            remarks.append(
                f"{one.name}: {len(tokens)} of its tokens are not in the vocabulary, and their "
                f"rows are dropped: {_few(tokens)}"
            )
    return tuple(remarks)


def _told_of_needed(needed: Sequence[str]) -> tuple[str, ...]:
    """Return a remark about tokens that stay although not all models have them."""
    if not needed:
        return ()
    remark = (
        f"{len(needed)} tokens that not all models have stay: others are merged from them, or a "
        f"tokenizer, a config or a chat template names them: {_few(needed)}"
    )
    return (remark,)


def _few(tokens: Sequence[str]) -> str:
    return ", ".join(tokens[:_SHOWN]) + (", ..." if len(tokens) > _SHOWN else "")


def _told_of_plain(new: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    """Return a remark about new tokens that are not special."""
    count = sum(not entry.get("special") for entry in new)
    if not count:
        return ()
    remark = (
        f"{count} of the new tokens are not special: text is cut at them before anything else, so "
        "it may be encoded otherwise than by the base"
    )
    return (remark,)


def _template(asked: str | None, members: Sequence[Member]) -> str | None:
    """Return the chat template that was asked for; the most frequent one, the first of them."""
    if asked != AUTO:
        return asked
    found = Counter(one.template.strip() for one in members if one.template)
    return found.most_common(1)[0][0] if found else None


def wishes_of(
    wishes: Wishes,
    members: Sequence[Member],
    target: Target,
) -> dict[int, Wish]:
    """Return what is wished for rows of the vocabulary.  Raises BadRequest."""
    found = {}
    for token, (model, wanted, force) in wishes.items():
        at = target.ids.get(token)
        if at is None:
            raise BadRequest("is no token of the vocabulary", where=f"tokens: {token}")
        if model is None:
            found[at] = Wish(ZERO, MISSING, force)
            continue
        number = next((k for k, one in enumerate(members) if one.is_meant(model)), None)
        if number is None:
            raise BadRequest(
                "its source is neither the base nor an expert", where=f"tokens: {token}"
            )
        one = members[number]
        row: int | None
        if isinstance(wanted, int):
            row = wanted if 0 <= wanted < one.rows else None
        else:
            row = one.tokens(target.ids).get(token if wanted is None else wanted)
        if row is None:
            raise BadRequest(
                f"{one.name} has no row for {token if wanted is None else wanted!r}",
                where=f"tokens: {token}",
            )
        found[at] = Wish(number, row, force)
    return found
