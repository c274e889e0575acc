"""What the cards of models state, and what the card of a model made of them says of licences.

Statements are read with limits and repeated, never interpreted (docs/design/011-model-cards.md).
Owns these rules and which files are licences.  Does not own the cards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import msgspec
import numpy as np

from mstore.checkpoint.declared import CARD, DEFAULT_LIMITS, front_matter, values
from mstore.store.catalog import Catalog
from mstore.store.objects.manifest import OPAQUE, File
from mstore.terms.ids import ManifestId

_LICENCE_FILE = re.compile(
    r"(licen[cs]es?|copying|notice|use[_-]policy)([._-].*)?|.*[_-]licen[cs]e([._-].*)?",
    re.IGNORECASE,
)
_TEXTS = {"", ".txt", ".md", ".rst", ".html", ".pdf", ".0"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9._-]{1,95})?")
"""A model's name that a card repeats; other text, such as a path, it does not."""
WORD = re.compile(r"[A-Za-z0-9._-]{1,60}")
_FORBIDS = {
    "commercial use": re.compile(r"(^|-)nc(-|$)|non-?commercial|research"),
    "derivatives": re.compile(r"(^|-)nd(-|$)|no-?deriv"),
}


class Said(msgspec.Struct, frozen=True):
    """A model as its own card describes it.

    name, licence: None if it states none, or several.
    """

    content: ManifestId
    name: str | None
    licence: str | None


def said(catalog: Catalog, content: ManifestId) -> Said:
    """Return what a model's card states.  Raises Corrupt, StorageFailed."""
    matter = front_matter(start_of(catalog, content, CARD))
    names = [name for name in values(matter, "model_name") if NAME.fullmatch(name)]
    return Said(content, names[0] if len(names) == 1 else None, stated_licence(matter))


def start_of(
    catalog: Catalog,
    content: ManifestId,
    path: str,
    length: int = DEFAULT_LIMITS.max_card_bytes,
) -> bytes | None:
    """Return the first bytes of a small file, None if it is missing."""
    file = catalog.manifest(content).file(path)
    if file is None or file.form != OPAQUE:
        return None
    data = b""
    for part in file.parts:
        for block in catalog.tensor(part.tensor_id()).block_ids():
            if len(data) >= length:
                break
            data += catalog.read_block(block)
    return data[:length]


def stated_licence(matter: list[str]) -> str | None:
    """Return the licence that the front matter of a card states, None for nothing."""
    licences = [one for one in values(matter, "license") if WORD.fullmatch(one)]
    if licences == ["other"]:
        own = [one for one in values(matter, "license_name") if WORD.fullmatch(one)]
        licences = own or licences
    return " and ".join(sorted({one.lower() for one in licences})) or None


def conflicts(stated: Sequence[str | None]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield what models' licences say against a merge: the numbers of the models, and the text."""
    for what, pattern in _FORBIDS.items():
        who = tuple(n for n, one in enumerate(stated) if one and pattern.search(one))
        if who:
            yield who, f"may forbid {what}: {', '.join(sorted({str(stated[n]) for n in who}))}"
    known = sorted({one for one in stated if one is not None})
    if len(known) > 1:
        who = tuple(n for n, one in enumerate(stated) if one is not None)
        yield who, f"licences differ ({', '.join(known)}): all of them bind the merge"
    silent = tuple(n for n, one in enumerate(stated) if one is None)
    if known and silent:
        yield silent, "no licence is stated; nothing says that a merge may be passed on"


def is_one_licence(stated: Sequence[str | None]) -> bool:
    """Return whether all models state one and the same licence, by its name."""
    return stated[0] not in (None, "other") and len({*stated}) == 1


def licence_lines(stated: Sequence[str | None]) -> Iterator[str]:
    """Yield the lines of front matter for a model made of models with these licences."""
    if is_one_licence(stated):
        yield f"license: {json.dumps(stated[0])}"
    elif any(stated):
        yield from ("license: other", 'license_name: "see-parents"')


def licence_section(stated: Sequence[str | None]) -> Iterator[str]:
    """Yield the card's section about them."""
    yield from ("", "## Licences", "")
    warned = [text for _, text in conflicts(stated)]
    yield from [f"- {text}" for text in warned] or ["Every parent's own terms apply."]


def is_licence(file: File) -> bool:
    """Judge by the first part of the path: a file at the top, or all of a directory of texts."""
    top = file.path.split("/")[0]
    is_text = PurePosixPath(top).suffix.lower() in _TEXTS
    return file.form == OPAQUE and is_text and bool(_LICENCE_FILE.fullmatch(top))


def number_text(value: float) -> str:
    """Return the shortest text of a float32."""
    return str(np.float32(value))
