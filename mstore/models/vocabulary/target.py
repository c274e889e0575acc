"""The vocabulary of an alignment: its tokens, its rows, and what was asked for single tokens.

Of the tokens that all models have, the base's order counts: a token that one of the models lacks is
dropped, and those that follow move up.  Some must stay, or the tokenizer would not be one any more,
or would lose text:

- what is named: by the tokenizer itself (unknown, padding, what it puts around a text), by configs,
  or in a chat template;
- single characters and bytes, and whatever cannot be written by those that stay;
- what a token that stays is merged from.

So a text in which no dropped token occurs is encoded to the same tokens as before, and any other
one to smaller ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from mstore.checkpoint.strict_json import json_bytes, json_object
from mstore.models.vocabulary.members import CONFIGS, TOKENIZER_CONFIG, Member, template_of
from mstore.models.vocabulary.tokenizer import (
    TOKENIZER,
    Tokenizer,
    merges_of,
    union,
    with_tokens,
)
from mstore.store.models import Input
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Option
from mstore.terms.requests import AUTO, COMMON, Vocabulary

Read = Callable[[str], bytes | None]
"""Returns a file of a model by its path, None if there is none."""

SPECIAL_TOKENS: Final = "special_tokens_map.json"

_BPE, _UNIGRAM, _WORD_PIECE, _WORD_LEVEL = "BPE", "Unigram", "WordPiece", "WordLevel"
_BYTE: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_OF_TOKENS: Final = re.compile(r"(^|_)tokens?_(ids?|index|indices)$")
_MORE_OF_TOKENS: Final = frozenset({"suppress_tokens", "begin_suppress_tokens", "bad_words_ids"})
_UNREAD: Final = frozenset({"forced_decoder_ids", "sequence_bias", "lang_to_id", "task_to_id"})
"""Settings that name tokens in forms of their own."""
_PLAIN_PROCESSORS: Final = frozenset({"ByteLevel"})
_PAIRS: Final = ("sep", "cls")


class Common(msgspec.Struct, frozen=True):
    """tokenizer: of the tokens that stay. needed: those of them that not all models have."""

    tokenizer: Tokenizer
    needed: tuple[str, ...]


def common_of(
    base: Tokenizer, rows: int, others: Sequence[Collection[str]], read: Read
) -> Common | None:
    """Return the base's tokenizer with the tokens that all have; None if it stays as it is.

    rows: of the base's embeddings. others: the tokens of the other models. read: of the base.
    Raises Incompatible for a tokenizer or a config whose tokens cannot be told or renumbered.
    """
    own = [token for token, id in base.ids.items() if id < rows]
    shared = {token for token in own if all(token in one for one in others)}
    if len(shared) == len(own):
        return None
    try:
        kept = kept_tokens(base, shared, read)
        if kept.issuperset(own):
            return None
        return Common(reduced(base, kept), tuple(token for token in own if token in kept - shared))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _impossible(f"it has an unknown form ({error!r})") from error


def kept_tokens(base: Tokenizer, shared: Collection[str], read: Read) -> frozenset[str]:
    """Return the tokens of the base that stay.

    shared: those that all models have. read: of the base.  Raises Incompatible for a tokenizer or a
    config whose tokens cannot be told.
    """
    document = base.document
    kept = set(shared) | named_tokens(base, read)
    model = document["model"]
    kind = _kind(model)
    vocabulary = _texts(model["vocab"])
    if kind == _WORD_LEVEL:
        # No word can be written by others.
        return frozenset(base.ids)
    prefix = str(model.get("continuing_subword_prefix") or "")
    pieces = {token: _pieces(token, prefix) for token in vocabulary}
    alphabet = {token for token in vocabulary if len(pieces[token]) == 1 or _BYTE.fullmatch(token)}
    kept |= alphabet
    # With tokens of bytes, any text can be written.
    if not (model.get("byte_fallback") and all(f"<0x{n:02X}>" in alphabet for n in range(256))):
        kept |= {token for token, own in pieces.items() if not alphabet.issuperset(own)}
    if kind == _BPE:
        _close(kept, list(merges_of(model)), prefix)
    return frozenset(kept)


def _close(kept: set[str], merges: Sequence[tuple[str, str]], prefix: str) -> None:
    """Add the tokens that those are merged from, and so on."""
    sources: dict[str, list[tuple[str, str]]] = {}
    for pair in merges:
        sources.setdefault(_merged(pair, prefix), []).append(pair)
    todo = list(kept)
    while todo:
        for pair in sources.get(todo.pop(), ()):
            for part in pair:
                if part not in kept:
                    kept.add(part)
                    todo.append(part)


def named_tokens(base: Tokenizer, read: Read) -> set[str]:
    """Return the tokens that tokenizer, configs and chat template name."""
    found = set(_around(base.document.get("post_processor")))
    model, padding = base.document["model"], base.document.get("padding")
    if isinstance(model.get("unk_token"), str):
        found.add(model["unk_token"])
    if type(model.get("unk_id")) is int:
        found |= {token for token, id in base.ids.items() if id == model["unk_id"]}
    if isinstance(padding, dict):
        found.add(str(padding.get("pad_token")))
    for path in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        fields = json_object(read(path) or b"")
        named = {key: one for key, one in fields.items() if not key.startswith("added_tokens")}
        found |= set(_strings(named))
    texts = {id: token for token, id in base.ids.items()}
    for path in sorted(CONFIGS):
        for where, id in _ids_in(json_object(read(path) or b""), path):
            if id >= 0:
                found.add(_token_at(texts, id, where))
    template = template_of(read) or ""
    found |= {token for token in base.added if token in template}
    return found & base.ids.keys()


def reduced(base: Tokenizer, kept: Collection[str]) -> Tokenizer:
    """Return the base's tokenizer with these of its tokens, in its order, numbered from 0 on.

    Raises Incompatible for a tokenizer that cannot be numbered so.
    """
    order = sorted(kept, key=lambda token: base.ids[token])
    ids = {token: number for number, token in enumerate(order)}
    model = dict(base.document["model"])
    own = [token for token in _texts(model["vocab"]) if token in ids]
    if isinstance(model["vocab"], list):
        model["vocab"] = [one for one in model["vocab"] if one[0] in ids]
        if type(model.get("unk_id")) is int:
            model["unk_id"] = ids[base.document["model"]["vocab"][model["unk_id"]][0]]
    else:
        model["vocab"] = {token: ids[token] for token in own}
    if "merges" in model:
        prefix = str(model.get("continuing_subword_prefix") or "")
        model["merges"] = [
            told
            for told, pair in zip(model["merges"], merges_of(model), strict=True)
            if {*pair, _merged(pair, prefix)} <= ids.keys()
        ]
    added = {
        token: {**entry, "id": ids[token]} for token, entry in base.added.items() if token in ids
    }
    # Added tokens that are none of the model's get the numbers after these.
    after = sorted(ids[token] for token in added if token not in set(own))
    numbers = {ids[token] for token in own}
    if numbers != set(range(len(own))) or after != list(range(len(own), len(ids))):
        raise _impossible("its added tokens do not follow the others")
    document = {**base.document, "model": model, "added_tokens": list(added.values())}
    if document.get("post_processor") is not None:
        document["post_processor"] = _renumbered(document["post_processor"], ids)
    if isinstance(document.get("padding"), dict):
        token = document["padding"].get("pad_token")
        document["padding"] = {**document["padding"], "pad_id": ids.get(str(token), 0)}
    return Tokenizer(ids, added, document)


def with_new_ids(raw: bytes, numbers: Callable[[str, int], int], path: str) -> bytes | None:
    """Return a config with other ids of tokens, None if it has none.

    numbers: the new id of a setting's id; where the setting is, for errors, comes first.
    """
    before = json_object(raw)
    changed = _with_ids(before, numbers, path)
    return None if changed == before else json_bytes(changed)


def with_new_decoder(raw: bytes, added: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return a tokenizer_config.json with other ids of added tokens, and only these."""
    fields = json_object(raw)
    listed = fields.get("added_tokens_decoder")
    if isinstance(listed, dict):
        fields["added_tokens_decoder"] = {
            str(added[one["content"]]["id"]): one
            for one in listed.values()
            if isinstance(one, dict) and one.get("content") in added
        }
    return json_bytes(fields)


# -- details --------------------------------------------------------------------------------------


def _merged(pair: tuple[str, str], prefix: str) -> str:
    return pair[0] + pair[1].removeprefix(prefix)


def _pieces(token: str, prefix: str) -> list[str]:
    """Return the tokens of single characters that a token is written with."""
    inside = bool(prefix) and token.startswith(prefix) and token != prefix
    text = token.removeprefix(prefix) if inside else token
    return [one if number == 0 and not inside else prefix + one for number, one in enumerate(text)]


def _kind(model: Mapping[str, Any]) -> str:
    kind = model.get("type")
    if kind is None and "merges" in model:
        kind = _BPE
    if kind not in (_BPE, _UNIGRAM, _WORD_PIECE, _WORD_LEVEL):
        raise _impossible(f"its model is of the type {kind!r}")
    return str(kind)


def _texts(vocabulary: Any) -> list[str]:
    return [one[0] for one in vocabulary] if isinstance(vocabulary, list) else list(vocabulary)


def _around(processor: object) -> Iterator[str]:
    """Yield the tokens that a post-processor puts around a text."""
    for one in _processors(processor):
        if one["type"] == "TemplateProcessing":
            for entry in one.get("special_tokens", {}).values():
                yield from entry["tokens"]
        for key in _PAIRS:
            if isinstance(one.get(key), list):
                yield one[key][0]


def _processors(processor: object) -> Iterator[dict[str, Any]]:
    if processor is None:
        return
    kind = processor.get("type") if isinstance(processor, dict) else None
    assert isinstance(processor, dict) or kind is None
    if kind == "Sequence" and isinstance(processor, dict):
        for one in processor.get("processors", ()):
            yield from _processors(one)
    elif kind in ("TemplateProcessing", "BertProcessing", "RobertaProcessing", *_PLAIN_PROCESSORS):
        assert isinstance(processor, dict)
        yield processor
    else:
        raise _impossible(f"its post-processor is of the type {kind!r}")


def _renumbered(processor: dict[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    if processor["type"] == "Sequence":
        own = [_renumbered(one, ids) for one in processor["processors"]]
        return {**processor, "processors": own}
    changed = dict(processor)
    if "special_tokens" in processor:
        changed["special_tokens"] = {
            name: {**entry, "ids": [ids[token] for token in entry["tokens"]]}
            for name, entry in processor["special_tokens"].items()
        }
    for key in _PAIRS:
        if isinstance(processor.get(key), list):
            changed[key] = [processor[key][0], ids[processor[key][0]]]
    return changed


def _strings(found: object) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict | list):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _strings(one)


def _ids_in(fields: Mapping[str, Any], where: str) -> Iterator[tuple[str, int]]:
    """Yield each id of a token in a config, and where it is.  Raises Incompatible."""
    found: list[tuple[str, int]] = []

    def seen(place: str, id: int) -> int:
        found.append((place, id))
        return id

    _with_ids(fields, seen, where)
    yield from found


def _with_ids(
    fields: Mapping[str, Any], numbers: Callable[[str, int], int], where: str
) -> dict[str, Any]:
    changed = {}
    for key, value in fields.items():
        place = f"{where}: {key}"
        if key in _UNREAD and value is not None:
            raise _impossible(f"its {place} names tokens in a way that is not known here")
        if _OF_TOKENS.search(key) or key in _MORE_OF_TOKENS:
            changed[key] = _with_numbers(value, numbers, place)
        elif isinstance(value, dict):
            changed[key] = _with_ids(value, numbers, place)
        else:
            changed[key] = value
    return changed


def _with_numbers(value: Any, numbers: Callable[[str, int], int], place: str) -> Any:
    if type(value) is int:
        return value if value < 0 else numbers(place, value)
    if isinstance(value, list):
        return [_with_numbers(one, numbers, place) for one in value]
    return value


def _token_at(texts: Mapping[int, str], id: int, where: str) -> str:
    if id not in texts:
        raise _impossible(f"{where} is {id}, which is no token")
    return texts[id]


def _impossible(why: str) -> Incompatible:
    return Incompatible(
        f"tokens cannot be dropped from its {TOKENIZER}: {why}", hint=Option("vocabulary", "base")
    )


Wishes = Mapping[str, tuple[Input | None, str | int | None, bool]]
"""By token: the model it is from (None: zeros), the token or row there, whether it is forced."""
_MOST_PADDING = 1 << 16
_SHOWN = 10
"""New tokens that a remark names."""
NO_TOKENIZER_HINT: Final = (
    f"save its tokenizer with transformers once, which writes {TOKENIZER}, and add it again"
)


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
                hint=NO_TOKENIZER_HINT,
            )
        for one in unknown:
            if known and one.rows != base.rows:
                raise Incompatible(
                    f"has no {TOKENIZER}, and {one.rows} rows, not the base's {base.rows}: which "
                    "tokens they are is not known",
                    where=one.name,
                    hint=NO_TOKENIZER_HINT,
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
        rows = padded(rows, asked.pad_to)
        told = f"those of {own.name}"
        if source is None:
            told = f"those of {', '.join(one.name for one in members)}"
        template = _template(asked.chat_template, members)
        if is_reduced:
            told = f"common to {', '.join(one.name for one in members)}"
        return cls(own, tokenizer, ids, length, rows, is_new, template, is_reduced, told, remarks)


def padded(rows: int, multiple: int | None) -> int:
    """Return a number of rows, rounded up to a multiple if one is given.  Raises BadRequest."""
    if multiple is None:
        return rows
    if not 0 < multiple <= _MOST_PADDING:
        raise BadRequest(
            f"rows are rounded up to a multiple of 1 to {_MOST_PADDING}, not {multiple!r}",
            where=Option("pad_to"),
        )
    return -(-rows // multiple) * multiple


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
