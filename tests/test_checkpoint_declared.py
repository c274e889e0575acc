"""Declared bases: which names config, card and merge recipe give, and what gives none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.checkpoint.declared import Declared, DeclaredLimits, declared_bases


def names(limits: DeclaredLimits | None = None, **files: bytes | str) -> list[str]:
    """The names declared by a checkpoint with these files (config, card, mergekit)."""
    raw = {
        {"config": "config.json", "card": "README.md", "mergekit": "mergekit_config.yml"}[key]: (
            value.encode() if isinstance(value, str) else value
        )
        for key, value in files.items()
    }

    def read(path: str, length: int) -> bytes | None:
        return raw[path][:length] if path in raw else None

    found = declared_bases(read, limits=limits or DeclaredLimits())
    return [each.name for each in found]


def test_every_source_is_read_in_order() -> None:
    """Each name is given once, with its first source; what is called the base comes first."""
    files = {
        "config.json": json.dumps({"_name_or_path": "org/b", "base_model": "org/a"}).encode(),
        "README.md": b"---\nbase_model: org/c\n---\n# card\n",
        "mergekit_config.yml": b"merge_method: ties\nbase_model: org/a\n",
    }
    found = declared_bases(lambda path, length: files[path][:length])
    assert found == (
        Declared("org/a", "config.json", is_base=True),
        Declared("org/c", "README.md", is_base=True),
        Declared("org/b", "config.json", is_base=False),
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("base_model: org/a", ["org/a"]),
        ("base_model:   org/a   # why", ["org/a"]),
        ("base_model: 'org/a'", ["org/a"]),
        ('base_model: "org/a"  # why', ["org/a"]),
        ("base_model: [org/a, 'org/b']", ["org/a", "org/b"]),
        ("base_model:\n- org/a\n- 'org/b'\ntags:\n- c", ["org/a", "org/b"]),
        ("base_model:\n  # two\n  - org/a\n\n  - org/b\nlicense: mit", ["org/a", "org/b"]),
        ("license: mit\nbase_model: org/a\nbase_model_relation: finetune", ["org/a"]),
        ("base_model: org/a\nbase_model_relation: adapter", []),
        ("base_model: org/a\nbase_model_relation: quantized", []),
        ("x:\n  base_model: org/a", []),
        ("base_model:", []),
        ("base_model: |\n  org/a", []),
        ("base_model: &anchor org/a", []),
        ("base_model: !!python/object:os.system org/a", []),
        ("base_model: {model: org/a}", []),
        ("base_model: a: b", []),
        ('base_model: "org\\x2fa"', []),
        ("base_model: 'org/a", []),
        ("base_model: org/\x1b[31ma", []),
    ],
)
def test_front_matter(written: str, meant: list[str]) -> None:
    """A scalar or a list at the key is read; any other YAML declares nothing."""
    assert names(card=f"---\n{written}\n---\n# card\nbase_model: not/this\n") == meant


@pytest.mark.parametrize(
    "card", ["# card\nbase_model: a\n", "---\nbase_model: a\n", " ---\nbase_model: a\n---\n", ""]
)
def test_a_card_without_front_matter_declares_nothing(card: str) -> None:
    """Only what stands between two fences at the very beginning counts."""
    assert names(card=card) == []


@pytest.mark.parametrize(
    "config",
    ["", "[]", "{", '{"_name_or_path": 7}', '{"_name_or_path": ""}', '{"base_model": ["a"]}'],
)
def test_a_config_that_is_none_declares_nothing(config: str) -> None:
    """A config that is not JSON, no object, or has something else there is no error."""
    assert names(config=config) == []


def test_limits_hold_and_can_be_raised() -> None:
    """What lies beyond a limit declares nothing; with a higher limit it does."""
    config = json.dumps({"pad": "x" * 2000, "base_model": "org/a"})
    assert names(DeclaredLimits(max_config_bytes=1000), config=config) == []
    assert names(DeclaredLimits(max_config_bytes=3000), config=config) == ["org/a"]
    card = "---\nbase_model: [a, b, c]\nlong: " + "x" * 2000 + "\n---\n"
    assert names(DeclaredLimits(max_card_bytes=1000), card=card) == []
    assert names(DeclaredLimits(max_names=2), card=card) == ["a", "b"]
    assert names(DeclaredLimits(max_name_bytes=3), config='{"base_model": "long"}') == []
    nested = '{"a": [' + "[]," * 50 + '[]], "base_model": "a"}'
    assert names(DeclaredLimits(max_containers=20), config=nested) == []


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_are_read(raw: bytes) -> None:
    """No content of the three files raises, and every name that comes of it is printable."""
    for name in names(config=raw, card=b"---\nbase_model:" + raw + b"\n---\n", mergekit=raw):
        assert name
        assert not any(ord(c) < 32 for c in name)
