"""The model card of a combination: the base, the adapters, their licences, and the command.

A function of the adapters' contents and of what was asked for, as a merge's card is
(docs/design/011-model-cards.md): the same combination has the same bytes in any store.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from mstore.combination.members import Member
from mstore.combination.methods import Setting
from mstore.made.cards import NAME, Said, licence_lines, licence_section, number_text, said
from mstore.store.catalog import Catalog

_BASE: Final = "base_model_name_or_path"
_OF_NAMES: Final = """\
A name is what an adapter's own card says (`model_name`). Content is mstore's id of all of an
adapter's files. Put the name of the base in `base_model`, if it is not there, before you publish
this."""


def card_of(
    catalog: Catalog,
    members: Sequence[Member],
    setting: Setting,
    *,
    rank: int,
    asked: int | None,
    dtype: str | None,
) -> str:
    """Return the text of README.md.

    rank: of the result. asked, dtype: the rank and the type that were asked for.  Raises Corrupt,
    StorageFailed.
    """
    contents = (catalog.snapshot(member.snapshot).manifest_id() for member in members)
    told = [said(catalog, content) for content in contents]
    lines = [
        *_front_matter(members, told),
        "",
        *_body(members, told, setting, rank),
        *("", "## How it was made", "", "```sh", _command(members, told, setting, asked, dtype)),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _base_of(members: Sequence[Member]) -> str | None:
    """Return the base that all configs name, None if they name none, several, or a directory."""
    names = {member.settings.get(_BASE) for member in members}
    name = names.pop() if len(names) == 1 else None
    return name if isinstance(name, str) and NAME.fullmatch(name) else None


def _front_matter(members: Sequence[Member], told: Sequence[Said]) -> Iterator[str]:
    yield "---"
    base = _base_of(members)
    if base is not None:
        yield f"base_model: {json.dumps(base)}"
        yield "base_model_relation: adapter"
    yield "library_name: peft"
    yield from licence_lines([one.licence for one in told])
    yield from ("tags:", "- lora", "- merge", "- mstore", "---")


def _body(
    members: Sequence[Member], told: Sequence[Said], setting: Setting, rank: int
) -> Iterator[str]:
    count = "one adapter" if len(members) == 1 else f"{len(members)} adapters"
    yield f"# A LoRA adapter of rank {rank}, made of {count} by {setting.method.name}"
    yield from ("", "Made by mstore.", "", "## Parents", "")
    yield "| adapter | weight | licence as its card states it | content |"
    yield "|---|---|---|---|"
    for member, one in zip(members, told, strict=True):
        name = one.name or "not named by its card"
        licence = one.licence or "none stated"
        yield f"| {name} | {number_text(member.weight)} | {licence} | `{one.content.hex()}` |"
    base = _base_of(members)
    yield from (
        "",
        f"They are adapters of {base}."
        if base is not None
        else "Their configs do not name one base: they name several, none, or a directory.",
    )
    yield from ("", _OF_NAMES)
    yield from licence_section([one.licence for one in told])


def _command(
    members: Sequence[Member],
    told: Sequence[Said],
    setting: Setting,
    rank: int | None,
    dtype: str | None,
) -> str:
    words = ["mstore", "combine-adapters"]
    for member, one in zip(members, told, strict=True):
        words += ["--expert", f"{one.content.hex()}={number_text(member.weight)}"]
    method, *parameters = str(setting).split(" ")
    words += ["--method", method]
    for parameter in parameters:
        words += ["--param", parameter]
    if rank is not None:
        words += ["--rank", str(rank)]
    if dtype is not None:
        words += ["--dtype", dtype]
    return f"{shlex.join(words)} --name REF"
