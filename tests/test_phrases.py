"""Phrases: one text, in the words of Python and of other faces."""

from __future__ import annotations

import json
import pickle
import re
import traceback
from pathlib import Path

import pytest

from mstore import Store
from mstore.terms.errors import NotFound, did_you_mean
from mstore.terms.phrases import (
    Call,
    Option,
    Phrase,
    Text,
    as_phrase,
    call,
    from_json,
    joined,
    phrase,
    to_json,
)
from mstore_fuse import mounts

ROOT = Path(__file__).resolve().parent.parent
_CALLED = re.compile(r"\b[Cc]all\(\s*\"([a-z_]+)\"")


class Shouted:
    """A face that writes operations and options in capitals."""

    def call(self, call: Call) -> str:
        """Return the operation."""
        return call.operation.upper()

    def option(self, option: Option) -> str:
        """Return the option."""
        return option.name.upper()


TEXTS: list[Text] = [
    "free some {space}",
    call("fsck"),
    call("repair", read_data=True, sources=("PLACE", "a b"), store="/x y"),
    Call("add", ("PATH",), (("base", None), ("default_excludes", False))),
    Option("budget"),
    Option("parameters", {"density": 0.5, "normalize": True}),
    phrase("{rm}, or {reset}", rm=call("remove", "m"), reset=call("reset", "m", "OTHER")),
    phrase(
        "{inner}: {count}", inner=phrase("{it} of {name}", it=Option("skip"), name="{x}"), count=3
    ),
]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (call("fsck", read_data=True, repair=False, seed=None), "store.fsck(read_data=True)"),
        (call("reset", "NAME", "old/m"), "store.reset(NAME, 'old/m')"),
        (TEXTS[2], "mstore.Store.open('/x y').repair(read_data=True, sources=[PLACE, 'a b'])"),
        (TEXTS[3], "store.add(PATH, base=None, default_excludes=False)"),
        (call("merge", help=True), "help(mstore.Store.merge)"),
        (call("reset", "V1", "OTHER"), "store.reset('V1', OTHER)"),
        (call("init", store="nope"), "mstore.Store.init('nope')"),
        (call("init", block_size=1 << 20), "mstore.Store.init(PATH, block_size=1048576)"),
        (call("migrate"), "mstore.Store.migrate(PATH)"),
        (call("methods", "ties"), "mstore.Store.methods('ties')"),
        (call("mount", "REF", "DIR"), "mstore_fuse.mounts.mount(PATH, REF, DIR)"),
        (Option("budget"), "budget"),
        (Option("budget", "30%"), "budget='30%'"),
        (TEXTS[6], "store.remove('m'), or store.reset('m', OTHER)"),
        (TEXTS[7], "skip of {x}: 3"),
    ],
)
def test_a_text_reads_in_the_words_of_python(text: Text, words: str) -> None:
    """As a string, an operation is a call and an option a keyword."""
    assert str(text) == words


def test_a_face_spells_the_parts() -> None:
    """Every operation and option of a phrase, also of a phrase in it, is the face's to spell."""
    told = joined("first", TEXTS[6], TEXTS[7], between=" / ")
    assert told is not None
    assert told.spelled(Shouted()) == "first / REMOVE, or RESET / SKIP of {x}: 3"
    error = NotFound(
        phrase("no {it}", it=Option("x")), hint=did_you_mean("ab", ["abc"], call("refs"))
    )
    assert error.told(Shouted()) == ("no X", None, "did you mean abc?\nREFS")
    assert (error.what, error.hint) == ("no x", "did you mean abc?\nstore.refs()")


def test_a_traceback_shows_the_hint() -> None:
    """The hint follows the error in a traceback, once: also of a changed hint, of a pickled error,
    and where somebody else made a text of the traceback."""
    error = NotFound("no such ref", where="cod", hint=joined("did you mean code?", call("refs")))
    want = ["mstore.terms.errors.NotFound: cod: no such ref", *_HINTS]
    assert _told(error) == _told(pickle.loads(pickle.dumps(error))) == want
    assert _told(NotFound(error.what)) == ["mstore.terms.errors.NotFound: no such ref"]
    error.add_note("of the caller")
    error.advise("look")
    assert _told(error) == [want[0], "of the caller", "hint: look"]
    error.advise(None)
    assert _told(pickle.loads(pickle.dumps(error))) == [want[0], "of the caller"]


_HINTS = ["hint: did you mean code?", "hint: store.refs()"]


def _told(error: Exception) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


@pytest.mark.parametrize("text", TEXTS, ids=str)
def test_a_text_crosses_processes_whole(text: Text) -> None:
    """As JSON and pickled in an error, a text is equal on the other side."""
    heard = from_json(json.loads(json.dumps(to_json(text))))
    _, where, hint = pickle.loads(pickle.dumps(NotFound("what", where=text, hint=text))).texts
    for other in (heard, where, hint):
        assert (type(other), other) == (type(text), text)
        assert as_phrase(other).spelled(Shouted()) == as_phrase(text).spelled(Shouted())


def test_what_json_lacks_becomes_text() -> None:
    """A value of another type reads the same on the other side."""
    told = phrase("{path} of {call}", path=Path("/a"), call=call("reset", "m", store=Path("/b")))
    assert str(from_json(to_json(told))) == "/a of mstore.Store.open('/b').reset('m')"


@pytest.mark.parametrize(
    "value",
    [None, 3, [], {}, {"call": "gc"}, {"template": "{x}", "parts": {"x": {"no": "part"}}}],
)
def test_other_json_is_refused(value: object) -> None:
    """What is not a text from `to_json` raises ValueError."""
    with pytest.raises(ValueError, match="not a"):
        from_json(value)


def test_no_text_is_none() -> None:
    """Joining nothing gives nothing, and one text stays itself."""
    assert joined(None, None) is None
    assert str(joined(None, call("gc"))) == "store.gc()"
    assert isinstance(joined("a"), Phrase)


def test_every_operation_of_a_hint_is_there() -> None:
    """Each operation that a hint names is a function, where the hint says that it is."""
    sources = [path for top in ("mstore", "fuse") for path in (ROOT / top).rglob("*.py")]
    named = {name for path in sources for name in _CALLED.findall(path.read_text())}
    assert len(named) > 20
    for name in sorted(named):
        home = str(call(name)).partition(f".{name}(")[0]
        owner = mounts if home == "mstore_fuse.mounts" else Store
        assert home in ("store", "mstore.Store", "mstore_fuse.mounts")
        assert callable(getattr(owner, name)), name
