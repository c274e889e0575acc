"""Refs: names that point at snapshots, of four kinds; their store and reflogs; and revisions.

    branch       NAME                      an add or merge moves it
    tag          NAME                      never moves
    remote       remotes/REMOTE/NAME       where a branch or tag of another store was last seen
    candidate    candidates/RUN/NAME       what a run made for the branch NAME, before NAME moves

Owns the kinds, their names, and the tables `refs` and `reflog` of the index. A ref moves by
compare-and-swap, with every move in the reflog. `refs_in` alone decides where refs are kept; all
else asks the `RefStore` that it returns. Who publishes decides what else belongs to a commit
(`mstore.store.transaction`); the text mirror is written after it (`mstore.store.mirror`).

A revision is how a person names a snapshot:

    NAME          a branch or tag; another ref by its name in full
    REMOTE/NAME   where no branch or tag has that name: the ref remotes/REMOTE/NAME
    PREFIX        at least four hex digits of a SnapshotId
    MANIFEST      a ManifestId in full: the newest snapshot with that content
    REV~N         N steps along the first parent (parents are in the order previous, base, experts)
    NAME@{N}      where the ref pointed N moves ago; @{0} is now
"""

from __future__ import annotations

import fnmatch
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from mstore.blocks import schema
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.schema import PLANS, REFLOG, REFS
from mstore.store import listing
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.terms.errors import BadName, BadRequest, Conflict, NotFound, did_you_mean
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Text, call, joined, phrase

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
TRIAL = "trial"
"""How the runs of a search begin: trial-N."""
BISECT = "bisect"
"""The run of a bisection."""
DOWNLOAD = "download"
"""The run whose candidates are the files that arrived of a checkpoint from elsewhere."""
_PARTS = {rf"{TRIAL}-[0-9]+": "a search", BISECT: "a bisection", DOWNLOAD: "a download"}
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
    """Raise BadName unless `name` can be a ref of this kind; None: of any."""
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


def branch_of(name: str) -> str:
    """Return the branch or tag that a ref of a remote or a candidate is of; see `below`."""
    return name.split("/", 2)[2]


def below(kind: str, part: str, name: str) -> str:
    """Return the name of the ref of this remote or run for a branch or tag.  Raises BadName."""
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


def part_of(candidate: str) -> str | None:
    """Return what goes on that a candidate is of: a search, a bisection, a download.

    None: it is a model that somebody added or merged to test it.
    """
    run = candidate.split("/", 2)[1]
    return next((what for runs, what in _PARTS.items() if re.fullmatch(runs, run)), None)


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


class RefStore(ABC):
    """Refs and their reflogs, as one reader or one commit sees them.

    An implementation promises:

    state    All answers are of one moment, and know the moves made through the same object.
    commit   These moves become visible together, or none does: with the commit that the object was
             made for, and never before the snapshots that they name are durable. So an index that
             holds the refs commits them with its rows; another store of refs moves them after the
             commit of the index. What a crash leaves between the two is garbage, not a loss.
    swap     Nobody else moves a ref between an answer and the commit, or the commit raises
             Conflict. So what `move` compared still holds when the move becomes visible.
    reflog   A move adds one line; a removal keeps the lines. Positions count from 0, without gaps.
    order    Refs come in the order of the bytes of their names, lines oldest first.
    damage   What cannot be read raises Corrupt, and is never another value; `names` reads no ref.

    Used by one thread.
    """

    @abstractmethod
    def get(self, name: str) -> Ref | None:
        """Return the ref of this name; None if there is none, or no ref can have it."""

    @abstractmethod
    def walk(self) -> Iterator[tuple[str, Ref]]:
        """Yield all refs by name."""

    @abstractmethod
    def names(self, begin: str = "") -> Iterator[str]:
        """Yield the names that begin so, also of unreadable refs; skips unreadable names."""

    @abstractmethod
    def reflog(self, name: str) -> list[Move]:
        """Return all moves of a name, oldest first, even if the ref was removed."""

    @abstractmethod
    def reflogs(self) -> Iterator[tuple[str, Move]]:
        """Yield all moves of all names, removed ones too: by name, oldest first."""

    @abstractmethod
    def count_moves(self, name: str) -> int:
        """Return how many lines the reflog of a name has: the position of the next one."""

    @abstractmethod
    def _generation(self) -> int:
        """Return the generation of the commit, which the publisher has set."""

    @abstractmethod
    def _set(self, name: str, ref: Ref | None) -> None:
        """Write or remove a ref."""

    @abstractmethod
    def _append(self, name: str, line: Move) -> None:
        """Write the next line of a reflog."""

    # -- what all stores do alike --------------------------------------------------------------

    def move(
        self, name: str, *, expect: Ref | None, new: Ref | None, action: str, time_ns: int
    ) -> None:
        """Compare-and-swap one ref, and append the move to the reflog.

        `new` None removes the ref and keeps its reflog. Raises Conflict if the ref is not `expect`
        any more, or if one of two names would be a directory of the other.
        """
        if self.get(name) != expect:
            raise Conflict(
                "the ref moved while this command was running",
                where=name,
                hint=phrase("{reflog}, then run the command again", reflog=call("reflog", name)),
            )
        if expect is None:
            self.refuse_nesting(name)
        self._set(name, new)
        self._log(name, None if expect is None else expect.snapshot, new, action, time_ns)

    def restore(
        self, name: str, new: Ref | None, *, old: bytes | None, action: str, time_ns: int
    ) -> None:
        """Write what others say of a ref, without comparing it first.

        old: where the last line of the reflog moved it; if that is where it is, there is no line.
        """
        self._set(name, new)
        if old != (None if new is None else new.snapshot):
            self._log(name, old, new, action, time_ns)

    def _log(
        self, name: str, old: bytes | None, new: Ref | None, action: str, time_ns: int
    ) -> None:
        snapshot, kind = (None, "") if new is None else (new.snapshot, new.kind)
        self._append(name, Move(old, snapshot, action, time_ns, self._generation(), kind))

    def meant(self, name: str) -> Ref | None:
        """Return the ref that a name in a revision means, or None.

        REMOTE/NAME is a remote's ref if no branch or tag has that name.
        """
        found = self.get(name)
        return self.get(of_remote(name)) if found is None else found

    def require(self, name: str) -> Ref:
        """Return the ref of this name. Raises NotFound with the most similar names."""
        ref = self.get(name)
        if ref is None:
            raise self.missing(name)
        return ref

    def missing(self, name: str) -> NotFound:
        """Build the error for a missing ref, with the most similar name."""
        return missing(name, self.names())

    def removed(self, name: str) -> Ref | None:
        """Return what a removed name was last; None if it is a ref, or never was, or who knows."""
        moves = self.reflog(name)
        if len(moves) < 2 or moves[-1].new is not None or moves[-2].new is None:
            return None
        return Ref(moves[-2].kind, moves[-2].new)

    def refuse_nesting(self, name: str) -> None:
        """Raise Conflict if a new name would be below or above a ref."""
        parts = name.split("/")
        for length in range(1, len(parts)):
            above = "/".join(parts[:length])
            if self.get(above) is not None:
                what = f"{above!r} is a ref, so {name!r} cannot be one below it"
                joined = "-".join((above, *parts[length:]))
                raise Conflict(what, where=name, hint=self._another(joined))
        below = next(self.names(f"{name}/"), None)
        if below is not None:
            what = f"{below!r} is a ref, so {name!r} cannot be one above it"
            raise Conflict(what, where=name, hint=self._another(f"{name}-1"))

    def _another(self, name: str) -> str | None:
        """Return the hint at another name, if it is free."""
        is_free = self.get(name) is None and next(self.names(f"{name}/"), None) is None
        return f"choose another name, as in {name}" if is_free else None


class IndexRefs(RefStore):
    """Refs as rows of the index, in an open transaction of it: they commit with its other rows."""

    def __init__(self, index: Index, transaction: IndexTransaction) -> None:
        self._index = index
        self._transaction = transaction

    def get(self, name: str) -> Ref | None:
        if not 0 < len(name.encode(errors="surrogatepass")) <= MAX_KEY_BYTES:
            return None
        return self._index.get(self._transaction, REFS, name)

    def walk(self) -> Iterator[tuple[str, Ref]]:
        return self._index.walk(self._transaction, REFS)

    def names(self, begin: str = "") -> Iterator[str]:
        keys = self._index.keys(self._transaction, REFS, *([begin] if begin else []))
        return (key.decode(errors="ignore") for key in keys)

    def reflog(self, name: str) -> list[Move]:
        return [move for _, move in self._index.walk(self._transaction, REFLOG, name)]

    def reflogs(self) -> Iterator[tuple[str, Move]]:
        for (name, _), move in self._index.walk(self._transaction, REFLOG):
            yield name, move

    def count_moves(self, name: str) -> int:
        last = self._index.last(self._transaction, REFLOG, name)
        return 0 if last is None else last[1] + 1

    def _generation(self) -> int:
        return self._index.generation(self._transaction)

    def _set(self, name: str, ref: Ref | None) -> None:
        # For the mirror, which follows the commit.
        self._index.moved.add(name)
        if ref is None:
            self._index.delete(self._transaction, REFS, name)
        else:
            self._index.put(self._transaction, REFS, name, ref)

    def _append(self, name: str, line: Move) -> None:
        self._index.put(self._transaction, REFLOG, (name, self.count_moves(name)), line)


def refs_in(index: Index, transaction: IndexTransaction) -> RefStore:
    """Return the refs of a store, as this transaction of its index sees and moves them."""
    return IndexRefs(index, transaction)


_SUFFIX = re.compile(r"(?P<name>.+?)(?:@\{(?P<back>[0-9]{1,9})\})?(?P<steps>(?:~[0-9]{0,9})*)")
_ODD_SUFFIX = re.compile(r".(~|@\{)")
_MAX_REVISION = 1000
_PREFIX = re.compile(r"[0-9a-f]{4,64}")
_TOO_SHORT = re.compile(r"[0-9a-f]{1,3}")
_HINT: Final = phrase(
    "{refs} lists the names, {log} the snapshots", refs=call("refs"), log=call("log")
)


class Revision(msgspec.Struct, frozen=True):
    """A parsed revision: a name or id prefix, a reflog position, steps to the first parent."""

    name: str
    back: int | None
    steps: int


def parse_revision(text: str) -> Revision:
    """Split a revision into its parts. Raises BadName, and BadRequest if it is not text."""
    if not isinstance(text, str):
        raise BadRequest(
            f"a revision is text, a SnapshotId or a Snapshot, not {type(text).__name__}"
        )
    found = _SUFFIX.fullmatch(text) if len(text) <= _MAX_REVISION else None
    if found is None:
        raise BadName(f"{text[:_MAX_REVISION]!r} does not name a snapshot", hint=_HINT)
    steps = sum(int(step or "1") for step in found["steps"].split("~")[1:])
    back = None if found["back"] is None else int(found["back"])
    return Revision(found["name"], back, steps)


def named_snapshot(index: Index, transaction: IndexTransaction, revision: Revision) -> SnapshotId:
    """Resolve name and reflog position.  Raises NotFound or BadName (ambiguous prefix)."""
    if revision.back is not None:
        return _from_reflog(index, transaction, revision)
    ref = refs_in(index, transaction).meant(revision.name)
    if ref is not None:
        return ref.snapshot_id()
    is_prefix = _PREFIX.fullmatch(revision.name) is not None
    ids = listing.with_prefix(index, transaction, revision.name) if is_prefix else []
    if not ids and is_prefix and any(index.keys_with(transaction, PLANS, revision.name)):
        raise NotFound(
            "no such ref or snapshot",
            where=revision.name,
            hint=phrase(
                "this is a plan\n{merge} runs it\n{plans} lists all",
                merge=call("merge", plan=revision.name, name="REF"),
                plans=call("plans"),
            ),
        )
    if not ids:
        if refs_in(index, transaction).removed(revision.name) is not None:
            back = f"{revision.name}@{{1}}"
            raise NotFound(
                "no such ref: it was removed",
                where=revision.name,
                hint=call("reset", revision.name, back),
            )
        hint: Text | None
        if ":" in revision.name:
            hint = "REF:MODEL names one model, and this takes a whole snapshot: REF"
        elif _ODD_SUFFIX.search(revision.name):
            hint = "REF~N and REF@{N} take a whole number"
        else:
            hint = did_you_mean(revision.name, refs_in(index, transaction).names(), _HINT)
        if _TOO_SHORT.fullmatch(revision.name):
            hint = joined("the beginning of an id has at least 4 digits", hint)
        raise NotFound("no such ref or snapshot", where=revision.name, hint=hint)
    if len(ids) > 1:
        listed = ", ".join(id.short for id in ids[:5])
        raise BadName(f"{revision.name!r} is the prefix of several snapshots: {listed}", hint=_HINT)
    return ids[0]


def _from_reflog(index: Index, transaction: IndexTransaction, revision: Revision) -> SnapshotId:
    moves = refs_in(index, transaction).reflog(revision.name)
    moves = moves or refs_in(index, transaction).reflog(of_remote(revision.name))
    assert revision.back is not None
    if not moves:
        raise refs_in(index, transaction).missing(revision.name)
    if revision.back >= len(moves):
        raise NotFound(
            f"the reflog has only {len(moves)} entries",
            where=f"{revision.name}@{{{revision.back}}}",
            hint=call("reflog", revision.name),
        )
    new = moves[-1 - revision.back].new
    if new is None:
        raise NotFound(
            "the ref was removed at that move",
            where=f"{revision.name}@{{{revision.back}}}",
            hint=call("reflog", revision.name),
        )
    if not listing.is_listed(index, transaction, SnapshotId(new)):
        raise NotFound(
            f"snapshot {SnapshotId(new).short}, where the ref was then, was collected",
            where=f"{revision.name}@{{{revision.back}}}",
            hint=call("reflog", revision.name),
        )
    return SnapshotId(new)


def walk_back(
    snapshot: SnapshotId, steps: int, load: Callable[[SnapshotId], SnapshotRecord], text: str
) -> SnapshotId:
    """Return the `steps`-th ancestor along first parents. Raises NotFound if there are fewer."""
    for _ in range(steps):
        parents = load(snapshot).parents
        if not parents:
            raise NotFound(
                "the lineage ends before that", where=text, hint=call("log", text.partition("~")[0])
            )
        snapshot = parents[0].snapshot_id()
    return snapshot
