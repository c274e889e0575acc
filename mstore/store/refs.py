"""Refs: names that point at snapshots: what kinds there are, and which names each may have.

    branch       NAME                      an add or merge moves it
    tag          NAME                      never moves
    remote       remotes/REMOTE/NAME       where a branch or tag of another store was last seen
    candidate    candidates/RUN/NAME       what a run made for the branch NAME, before NAME moves

Owns the kinds and their names. `mstore.store.ref_store` keeps refs and reflogs; the text mirror is
written after the commit (`mstore.store.mirror`).
"""

from __future__ import annotations

import fnmatch
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from mstore.blocks import schema
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.store import listing
from mstore.terms.errors import BadName, NotFound, did_you_mean
from mstore.terms.phrases import call

Ref = schema.Ref
Move = schema.Move
BRANCH = "branch"
TAG = "tag"
REMOTE = "remote"
CANDIDATE = "candidate"
KINDS = (BRANCH, TAG, REMOTE, CANDIDATE)
"""All kinds. Of several refs at one snapshot, people know it by that of the first kind."""
DIRECTORIES = {REMOTE: "remotes", CANDIDATE: "candidates"}
"""Where the names of a kind begin; all other names are of branches and tags."""
MAX_NAME_BYTES = 200
"""Of a branch or tag."""
_MAX_PART_BYTES = 64
"""Of REMOTE and RUN."""
MAX_KEY_BYTES = 300
"""Of any name: what a key of the index may have, and some more."""
_FORBIDDEN = frozenset("~^:@{}\\*?[]=\"'<>|$`")
# Control characters, invisible marks (some reverse the text direction), and every kind of space.
_UNSEEN = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
_HEX_NAME = re.compile(r"[0-9a-f]{16,64}")
# Short enough to be an abbreviated id.
_HEX_PREFIX = re.compile(r"[0-9a-f]{4,15}")


def check(name: str, kind: str | None = None) -> None:
    """Raise BadName unless `name` can be a ref of this kind; None: of any.

    Other stores and files give names, too: it checks all that is ever looked up or stored.
    """
    first, *rest = name.split("/", 2)
    own = next((one for one, directory in DIRECTORIES.items() if directory == first), BRANCH)
    kind = own if kind is None else kind
    if kind not in KINDS:
        raise BadName(f"{kind!r} is no kind of ref")
    if kind not in DIRECTORIES:
        check_name(name)
    elif kind != own or len(rest) != 2:
        raise BadName(f"{name!r} cannot be a {kind}: its name is no {DIRECTORIES[kind]}/.../NAME")
    else:
        _check_part(rest[0])
        check_name(rest[1])


def below(kind: str, part: str, name: str) -> str:
    """Return the name of a remote or candidate ref: of this remote or run, for this branch or tag.

    Raises BadName.
    """
    check_name(name)
    return directory_of(kind, part) + name


def directory_of(kind: str, part: str) -> str:
    """Return what the names of this remote's or run's refs begin with.  Raises BadName."""
    _check_part(part)
    return f"{DIRECTORIES[kind]}/{part}/"


def _check_part(part: str) -> None:
    _check_text(part)
    if "/" in part or len(part.encode()) > _MAX_PART_BYTES:
        raise BadName(
            f"{part!r} cannot be a remote or a run: it has a '/' or more than {_MAX_PART_BYTES} "
            "bytes",
            hint="use letters, digits, '.', '_' and '-', as in run-7",
        )


def check_name(name: str) -> None:
    """Raise BadName unless `name` can be a branch or tag, a path in a mount, a word in a shell."""
    _check_text(name)
    if is_like_id(name):
        raise _refused(name, "it looks like an id")
    first, _, _ = name.partition("/")
    if first in DIRECTORIES.values():
        raise BadName(
            f"{name!r} cannot be a branch or tag: names below {first}/ belong to {first}",
            hint="choose another name",
        )


def _refused(name: object, why: str) -> BadName:
    return BadName(
        f"{name!r} cannot be a ref: {why}",
        hint="use letters, digits, '.', '_', '-' and '/', as in llama/merged",
    )


def _check_text(name: str) -> None:
    if not isinstance(name, str):
        raise _refused(name, "it is no text")
    if not name:
        raise _refused(name, "it is empty")
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise _refused(name, "it is not valid Unicode") from error
    if len(encoded) > MAX_NAME_BYTES:
        raise _refused(name, f"it is longer than {MAX_NAME_BYTES} bytes")
    if unicodedata.normalize("NFC", name) != name:
        raise _refused(name, "it is not in Unicode normal form C")
    for character in name:
        if character in _FORBIDDEN or unicodedata.category(character) in _UNSEEN:
            raise _refused(name, f"it contains {character!r}")
    for part in name.split("/"):
        if not part:
            raise _refused(name, "it has an empty part between slashes")
        if part.startswith((".", "-")) or part.endswith(".lock"):
            raise _refused(name, f"the part {part!r} starts with '.' or '-' or ends with '.lock'")


def is_like_id(text: str) -> bool:
    """Return whether a text is an id, or too long a prefix of one to be the name of a ref."""
    return _HEX_NAME.fullmatch(text) is not None


def is_candidate(name: str) -> bool:
    """Return whether this is the name of a candidate."""
    return name.startswith(f"{DIRECTORIES[CANDIDATE]}/")


def of_remote(name: str) -> str:
    """Return the name in full of what REMOTE/NAME may mean."""
    return f"{DIRECTORIES[REMOTE]}/{name}"


def missing(name: str, known: Iterable[str]) -> NotFound:
    """Build the error for a missing ref, with the most similar known name."""
    return NotFound("no such ref", where=name, hint=did_you_mean(name, known, call("refs")))


def is_pattern(text: str) -> bool:
    """Return whether a text is a pattern (`*`, `?`, `[abc]`); names contain none of these."""
    return any(character in text for character in "*?[")


def chosen(known: Iterable[str], asked: Sequence[str]) -> list[str]:
    """Return the requested names with patterns expanded, each once, in order.

    A pattern must match the whole name; `*` also matches `/`, but only a pattern that begins with
    `remotes/` or `candidates/` matches such names. A plain name is returned whether it is known or
    not. Raises NotFound for a pattern that matches nothing.
    """
    if isinstance(asked, str) or not all(isinstance(one, str) for one in asked):
        raise BadName(f"names are a list of texts, not {asked!r}")
    known = sorted(known)
    found: dict[str, None] = {}
    for one in asked:
        matched = fnmatch.filter(_alike(known, one), one) if is_pattern(one) else [one]
        if not matched:
            raise NotFound("no ref matches the pattern", where=one, hint=call("refs"))
        found.update(dict.fromkeys(matched))
    return list(found)


def _alike(known: Iterable[str], pattern: str) -> Iterator[str]:
    """Yield the names that begin with the same directory of a kind as a pattern, or with none."""
    begun = tuple(f"{directory}/" for directory in DIRECTORIES.values())
    own = next((one for one in begun if pattern.startswith(one)), None)
    for name in known:
        if next((one for one in begun if name.startswith(one)), None) == own:
            yield name


def refuse_shadow(index: Index, transaction: IndexTransaction, name: str) -> None:
    """Raise BadName if a new name would hide a stored snapshot whose id starts with it."""
    if not _HEX_PREFIX.fullmatch(name):
        return
    hidden = listing.with_prefix(index, transaction, name)
    if hidden:
        raise BadName(
            f"{name!r} cannot be a new ref: the id of snapshot {hidden[0].short} begins with it",
            hint="choose another name, as in llama/merged",
        )
