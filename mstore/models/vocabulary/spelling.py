"""What the tokens of a tokenizer write, as bytes, and how its model writes bytes with tokens.

Tokenizers spell a space as `Ġ`, with letters for all bytes (GPT-2, Llama 3, Qwen), or as `▁`
(SentencePiece).  Bytes are what tokens of different tokenizers are compared by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from mstore.models.vocabulary.tokenizer import Tokenizer, merges_of
from mstore.terms.errors import Incompatible

_SPACE: Final = "▁"
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level tokenizer is (Radford 2019, GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTES: Final = _letters()
_LETTERS: Final = {byte: letter for letter, byte in _BYTES.items()}


class TokenSpelling:
    """How a tokenizer spells text: in letters for bytes, or with `▁` for spaces, or as it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        parts = [tokenizer.document.get(part) for part in ("decoder", "pre_tokenizer")]
        types = {step.get("type") for part in parts for step in _steps(part)}
        self._in_bytes = "ByteLevel" in types
        told = str([*parts, tokenizer.document.get("normalizer")])
        self._has_mark = not self._in_bytes and ("Metaspace" in types or _SPACE in told)

    def written(self, token: str) -> bytes:
        """Return the bytes that a token writes."""
        if token not in self._tokenizer.added:
            if self._in_bytes and all(letter in _BYTES for letter in token):
                return bytes(_BYTES[letter] for letter in token)
            byte = None if self._in_bytes else _BYTE.fullmatch(token)
            if byte is not None:
                return bytes([int(byte[1], 16)])
            if self._has_mark:
                token = token.replace(_SPACE, " ")
        return token.encode(errors="surrogatepass")

    def is_byte(self, token: str) -> bool:
        """Return whether a token is one of the 256 that spell whatever no other token does."""
        if self._in_bytes:
            return len(token) == 1 and token in _BYTES
        return _BYTE.fullmatch(token) is not None

    def pieces(self, text: bytes) -> list[int]:
        """Return the ids of the tokens that the model writes a text with.

        The text is not cut into words first, and gets no space before it.  What no token writes is
        left out.  Raises Incompatible for a model that is neither BPE nor Unigram.
        """
        model = self._tokenizer.document["model"]
        symbols = list(self._symbols(text))
        if "merges" in model:
            symbols = _merged(symbols, self._ranks)
        elif model.get("type") == "Unigram":
            symbols = _likeliest(symbols, self._scores)
        else:
            raise Incompatible(f"its tokenizer is a {model.get('type')!r}, neither BPE nor Unigram")
        ids = self._tokenizer.ids
        return [ids[symbol] for symbol in symbols if symbol in ids]

    def _symbols(self, text: bytes) -> Iterator[str]:
        """Yield the smallest parts that a text is written with."""
        if self._in_bytes:
            yield from (_LETTERS[byte] for byte in text)
            return
        for letter in text.decode(errors="surrogateescape"):
            symbol = _SPACE if letter == " " and self._has_mark else letter
            if symbol in self._tokenizer.ids:
                yield symbol
            else:
                yield from (f"<0x{b:02X}>" for b in letter.encode(errors="surrogateescape"))

    @cached_property
    def _ranks(self) -> Mapping[tuple[str, str], int]:
        return {
            pair: rank for rank, pair in enumerate(merges_of(self._tokenizer.document["model"]))
        }

    @cached_property
    def _scores(self) -> Mapping[str, float]:
        return {str(one[0]): float(one[1]) for one in self._tokenizer.document["model"]["vocab"]}


def _steps(part: object) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a decoder or a pre-tokenizer, those within sequences too."""
    if isinstance(part, dict):
        yield part
        for key in ("decoders", "pretokenizers"):
            for step in part.get(key) or ():
                yield from _steps(step)


def _merged(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Return symbols after the merges of BPE (Sennrich 2016), the first of the list first."""
    found = list(symbols)
    while len(found) > 1:
        pairs = list(pairwise(found))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        at = pairs.index(best)
        found[at : at + 2] = ["".join(best)]
    return found


def _likeliest(symbols: Sequence[str], scores: Mapping[str, float]) -> list[str]:
    """Return the pieces of a unigram model whose scores have the largest sum (Kudo 2018)."""
    longest = max(map(len, scores), default=1)
    lowest = min(scores.values(), default=0.0) - 10.0
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(symbols) + 1):
        found = (best[end - 1][0] + lowest, end - 1)
        for start in range(max(0, end - longest), end):
            score = scores.get("".join(symbols[start:end]))
            if score is not None and best[start][0] + score > found[0]:
                found = (best[start][0] + score, start)
        best.append(found)
    pieces: list[str] = []
    end = len(symbols)
    while end:
        start = best[end][1]
        pieces.append("".join(symbols[start:end]))
        end = start
    return pieces[::-1]
