"""Refs: names that point at snapshots, moved by compare-and-swap, with every move in the reflog.

    branch       NAME                      an add or merge moves it
    tag          NAME                      never moves
    remote       remotes/REMOTE/NAME       where a branch or tag of another store was last seen
    candidate    candidates/RUN/NAME       what a run made for the branch NAME, before NAME moves

Owns the tables `refs` and `reflog` of the index. Functions take an open index transaction, and the
caller decides what else belongs to it. The text mirror is written after the commit
(`mstore.store.mirror`).
"""

from __future__ import annotations

import fnmatch
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from mstore.blocks import schema
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.schema import REFLOG, REFS
from mstore.errors import BadName, Conflict, NotFound, did_you_mean
from mstore.phrases import call, phrase
from mstore.store import listing

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
_MAX_BYTES = 300
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


def get(index: Index, transaction: IndexTransaction, name: str) -> Ref | None:
    """Return the ref of this name, or None. Raises Corrupt if its row is unreadable."""
    if not 0 < len(name.encode(errors="surrogatepass")) <= _MAX_BYTES:
        return None
    return index.get(transaction, REFS, name)


def meant(index: Index, transaction: IndexTransaction, name: str) -> Ref | None:
    """Return the ref that a name in a revision means, or None.

    REMOTE/NAME is a remote's ref if no branch or tag has that name. Raises Corrupt.
    """
    found = get(index, transaction, name)
    return get(index, transaction, of_remote(name)) if found is None else found


def of_remote(name: str) -> str:
    """Return the name in full of what REMOTE/NAME may mean."""
    return f"{DIRECTORIES[REMOTE]}/{name}"


def walk(index: Index, transaction: IndexTransaction) -> Iterator[tuple[str, Ref]]:
    """Return all refs by name. Raises Corrupt if a row is unreadable."""
    return index.walk(transaction, REFS)


def names(index: Index, transaction: IndexTransaction) -> list[str]:
    """Return the names of all refs, for hints: does not read rows, skips unreadable names."""
    return [key.decode(errors="ignore") for key in index.keys(transaction, REFS)]


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


def move(
    index: Index,
    transaction: IndexTransaction,
    name: str,
    *,
    expect: Ref | None,
    new: Ref | None,
    action: str,
    time_ns: int,
) -> None:
    """Compare-and-swap one ref, and append the move to the reflog.

    `new` None removes the ref and keeps its reflog. The reflog line records the index's current
    generation, which the publisher has set in this transaction (`mstore.store.generation`). Raises
    Conflict if the ref is not `expect` any more, or if one of two names would be a directory of the
    other.
    """
    if get(index, transaction, name) != expect:
        raise Conflict(
            "the ref moved while this command was running",
            where=name,
            hint=phrase("{reflog}, then run the command again", reflog=call("reflog", name)),
        )
    if expect is None:
        refuse_nesting(index, transaction, name)
    index.moved.add(name)
    if new is None:
        index.delete(transaction, REFS, name)
    else:
        put(index, transaction, name, new)
    old = None if expect is None else expect.snapshot
    append(index, transaction, name, old=old, new=new, action=action, time_ns=time_ns)


def append(
    index: Index,
    transaction: IndexTransaction,
    name: str,
    *,
    old: bytes | None,
    new: Ref | None,
    action: str,
    time_ns: int,
) -> None:
    """Append a line to the reflog of a name."""
    line = Move(
        old,
        None if new is None else new.snapshot,
        action,
        time_ns,
        index.generation(transaction),
        "" if new is None else new.kind,
    )
    index.put(transaction, REFLOG, (name, next_position(index, transaction, name)), line)


def put(index: Index, transaction: IndexTransaction, name: str, ref: Ref) -> None:
    """Write the row of a ref, without comparing it first and without a reflog line."""
    index.put(transaction, REFS, name, ref)


def refuse_nesting(index: Index, transaction: IndexTransaction, name: str) -> None:
    """Raise Conflict if a new name would be below or above a ref."""
    parts = name.split("/")
    for length in range(1, len(parts)):
        above = "/".join(parts[:length])
        if get(index, transaction, above) is not None:
            raise Conflict(f"{above!r} is a ref, so {name!r} cannot be one below it", where=name)
    below = next(index.keys(transaction, REFS, f"{name}/"), None)
    if below is not None:
        what = f"{below.decode()!r} is a ref, so {name!r} cannot be one above it"
        raise Conflict(what, where=name)


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


def removed(index: Index, transaction: IndexTransaction, name: str) -> Ref | None:
    """Return what a removed name was last; None if it is a ref, never was one, or nobody knows."""
    moves = reflog(index, transaction, name)
    if len(moves) < 2 or moves[-1].new is not None or moves[-2].new is None:
        return None
    return Ref(moves[-2].kind, moves[-2].new)


def reflog(index: Index, transaction: IndexTransaction, name: str) -> list[Move]:
    """Return all moves of a name, oldest first, even if the ref was removed."""
    return [move for _, move in index.walk(transaction, REFLOG, name)]


def walk_reflogs(index: Index, transaction: IndexTransaction) -> Iterator[tuple[str, Move]]:
    """Yield all moves of all names, removed ones too: by name, oldest first."""
    for (name, _), move in index.walk(transaction, REFLOG):
        yield name, move


def next_position(index: Index, transaction: IndexTransaction, name: str) -> int:
    """Return how many moves the reflog of `name` has: the position of its next line."""
    last = index.last(transaction, REFLOG, name)
    return 0 if last is None else last[1] + 1


def require(index: Index, transaction: IndexTransaction, name: str) -> Ref:
    """Return the ref of this name. Raises NotFound with the most similar names."""
    ref = get(index, transaction, name)
    if ref is None:
        raise missing(name, names(index, transaction))
    return ref
