"""One word for one idea: the names of classes and modules, and the words of the glossary."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from mstore_cli.keys import DOCUMENTS, OBJECTS, SERVED, keys_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mstore", "fuse/mstore_fuse", "serve/mstore_serve")
# A step on the disk is always written `fs.Operation`; the other is the glossary's.
TWICE = {"Operation"}
# Words that stood for several ideas.
DOUBLED = ("run", "group", "source", "file", "layout", "plan", "threshold", "form")
# How a kernel's arguments lie in memory; compiled passes name this file.
LEFT = {"mstore/merge/arithmetic/arguments.py"}
KEYS = {
    # Of a user's group on the machine, not of blocks.
    "group": {"init"},
    # What a method or a copy came from.
    "source": {"method", "clone"},
}


@cache
def _classes() -> list[tuple[str, str]]:
    """(name, file) of each class at the top of a module."""
    return [
        (name, str(path.relative_to(ROOT)))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in re.findall(r"^class (\w+)", path.read_text(), re.M)
    ]


def _homes(*, private: bool) -> dict[str, set[str]]:
    """The files of the classes of each name; private: an underscore does not tell two apart."""
    homes: dict[str, set[str]] = defaultdict(set)
    for name, home in _classes():
        if home not in LEFT and (private or not name.startswith("_")):
            homes[name.lstrip("_")].add(home)
    return homes


def test_two_public_classes_have_two_names() -> None:
    """No two public classes of the library, the mount and the server are called the same."""
    assert {name for name, homes in _homes(private=False).items() if len(homes) > 1} == TWICE


def test_words_that_were_doubled_name_one_class() -> None:
    """A class that is called just `Run`, `Plan` and the like, public or not, is the only one."""
    homes = _homes(private=True)
    for word in DOUBLED:
        assert len(homes.get(word.capitalize(), set())) <= 1, homes[word.capitalize()]


def test_words_that_were_doubled_are_in_the_glossary() -> None:
    """Each of these words has one row of the glossary, which names the class of that name."""
    rows = re.findall(
        r"^\| ([^|]+) \| .* \| ([^|]*) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M
    )
    homes = _homes(private=True)
    for word in DOUBLED:
        (found,) = (where for names, where in rows if word in names.split(", "))
        for home in homes.get(word.capitalize(), set()):
            assert f"`{home.removeprefix('mstore/')}`" in found, word


def test_each_word_has_one_row() -> None:
    """No word is explained twice."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    words = [
        word for names in re.findall(r"^\| ([^|]+) \| ", text, re.M) for word in names.split(", ")
    ]
    assert sorted(words) == sorted(set(words))


def test_words_that_were_doubled_name_one_key() -> None:
    """JSON keys of these words are in the documents that give them their one meaning."""
    documents = dict(DOCUMENTS)
    documents |= {name: keys_of(one) for name, one in {**OBJECTS, **SERVED}.items()}
    for word in ("run", "group", "source", "layout", "threshold", "form"):
        found = {name for name, keys in documents.items() if any(key.name == word for key in keys)}
        assert found == KEYS.get(word, set()), word


def test_glossary_names_files_that_exist() -> None:
    """Each file or folder that the glossary names is there."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    for name in re.findall(r"`([\w/]+/[\w/]*\w\.py)`", text):
        tops = ("", "mstore", "cli", "fuse", "serve")
        assert any((ROOT / top / name).is_file() for top in tops), name
