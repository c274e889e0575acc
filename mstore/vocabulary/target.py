"""The vocabulary of an alignment: its tokens, its rows, and what was asked for single tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mstore.errors import BadRequest, Incompatible
from mstore.ids import SnapshotId
from mstore.phrases import Option
from mstore.requests import AUTO, Vocabulary
from mstore.vocabulary.members import Member
from mstore.vocabulary.rows import MISSING, ZERO, Wish
from mstore.vocabulary.tokenizer import TOKENIZER, Tokenizer, union

Wishes = Mapping[str, tuple[SnapshotId | None, str | int | None, bool]]
"""By token: the model it is from (None: zeros), the token or row there, whether it is forced."""
_MOST_PADDING = 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """The vocabulary.

    source: whose tokenizer files it has. tokenizer: None if it is not known; then tokens are what
    is in the same row. ids: of its tokens. length: rows for these. rows: with padding. is_new:
    whether the tokenizer has more tokens than its source. template: the chat template that the base
    gets, None if it stays. notes: what was taken for granted.
    """

    source: Member
    tokenizer: Tokenizer | None
    ids: Mapping[str, int]
    length: int
    rows: int
    is_new: bool
    template: str | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, asked: Vocabulary, members: Sequence[Member], source: Member | None) -> Target:
        base = members[0]
        known = [one.tokenizer for one in members if one.tokenizer is not None]
        unknown = [one for one in members if one.tokenizer is None]
        if base.tokenizer is None and known:
            raise Incompatible(
                f"has no {TOKENIZER}, so its tokens are not known",
                where=base.name,
                hint=f"save its tokenizer with transformers once, which writes {TOKENIZER}, and "
                "add it again",
            )
        for one in unknown:
            if known and one.rows != base.rows:
                raise Incompatible(
                    f"has no {TOKENIZER}, and {one.rows} rows, not the base's {base.rows}: which "
                    "tokens they are is not known",
                    where=one.name,
                )
        without = [one.name for one in unknown]
        told = f"{', '.join(without)}: no {TOKENIZER}; the tokens are taken to be the base's"
        notes = (told,) if without else ()
        own = base if source is None else source
        tokenizer = own.tokenizer if own.tokenizer is not None else base.tokenizer
        is_new = False
        if tokenizer is None:
            ids: Mapping[str, int] = {str(number): number for number in range(own.rows)}
        elif source is None:
            before = tokenizer
            others = [
                replace(one.tokenizer, ids=one.tokens({}))
                for one in members[1:]
                if one.tokenizer is not None
            ]
            tokenizer = union(before, others)
            ids = tokenizer.ids
            is_new = len(ids) > len(before.ids)
        else:
            ids = own.tokens(tokenizer.ids)
        length = max(ids.values(), default=-1) + 1
        rows = max(length, base.rows) if asked.keep_padding else length
        if asked.pad_to is not None:
            if not 0 < asked.pad_to <= _MOST_PADDING:
                raise BadRequest(
                    f"rows are rounded up to a multiple of 1 to {_MOST_PADDING}, not "
                    f"{asked.pad_to!r}",
                    where=Option("pad_to"),
                )
            rows = -(-rows // asked.pad_to) * asked.pad_to
        template = _template(asked.chat_template, members)
        return cls(own, tokenizer, ids, length, rows, is_new, template, notes)


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
    numbers = {one.snapshot: number for number, one in enumerate(members)}
    found = {}
    for token, (model, wanted, force) in wishes.items():
        at = target.ids.get(token)
        if at is None:
            raise BadRequest("is no token of the vocabulary", where=f"tokens: {token}")
        if model is None:
            found[at] = Wish(ZERO, MISSING, force)
            continue
        if model not in numbers:
            raise BadRequest(
                "its source is neither the base nor an expert", where=f"tokens: {token}"
            )
        one = members[numbers[model]]
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
        found[at] = Wish(numbers[model], row, force)
    return found
