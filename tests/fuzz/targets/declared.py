"""A config, a model card or a merge's config that names a base; silence is no error."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form

from mstore.checkpoint.declared import CARD, CONFIG, DEFAULT_LIMITS, MERGEKIT, declared_bases

FORM = Form.TEXT
FILES = (CONFIG, CARD, MERGEKIT)


def target(data: bytes) -> None:
    """The input is taken for each of the three files."""
    for file in FILES:
        found = declared_bases(lambda path, most, file=file: data[:most] if path == file else None)
        assert len(found) <= DEFAULT_LIMITS.max_names
        assert all(0 < len(one.name) <= DEFAULT_LIMITS.max_name_bytes for one in found)


def seeds() -> Iterable[bytes]:
    yield b'{"base_model": "a/b", "_name_or_path": "c/d"}'
    yield b"---\nlicense: mit\nbase_model:\n- a/b  # first\n- 'c/d'\n---\ntext\n"
    yield b'---\nbase_model: [a/b, "c/d"]\n---\n'
    yield b"base_model: a/b\nmerge_method: ties\n"
