"""A tokenizer.json: its tokens, and the union with another, or refused."""

from __future__ import annotations

import json

from mutation import Form

from mstore.models.vocabulary.members import renumbered, with_added
from mstore.models.vocabulary.tokenizer import parse, union

FORM = Form.TEXT
_BPE = {
    "version": "1.0",
    "added_tokens": [
        {"id": 3, "content": "<|end|>", "special": True, "lstrip": False, "normalized": False}
    ],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}
_UNIGRAM = {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["a", -1.5], ["é", -2.0]]}}
_OTHER = parse(json.dumps(_UNIGRAM).encode(), "other")


def seeds() -> list[bytes]:
    return [json.dumps(one).encode() for one in (_BPE, _UNIGRAM)]


def target(data: bytes) -> None:
    found = parse(data, "fuzzed")
    for both in (union(found, [_OTHER]), union(_OTHER, [found])):
        again = parse(both.encode(), "union")
        assert again.ids == both.ids
        assert found.ids.keys() | _OTHER.ids.keys() == both.ids.keys()
        assert len(set(both.ids.values())) >= len(set(_OTHER.ids.values()))
        with_added(b'{"added_tokens_decoder": {"0": {"content": "a"}}}', both.added)
    renumbered(data, 10, data)
    renumbered(b'{"text_config": {"eos_token_id": 1}}', 10, data)
