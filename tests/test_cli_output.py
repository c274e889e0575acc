"""The one output object: for people, as JSON, as ids."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.terms.ids import SnapshotId
from mstore.terms.report import Report, plain
from mstore_cli.output import Column, Mode, Output, Screen, near, printable, short

ONE = SnapshotId(b"\xab" * 32)


class Terminal(io.StringIO):
    """Memory that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Sample(Report):
    """A report like those of the library."""

    snapshot: SnapshotId
    share: float
    pairs: tuple[tuple[str, float], ...]
    nothing: None = None


SAMPLE = Sample(ONE, float("nan"), (("llama/math", 0.5),))


def emitted(mode: Mode) -> str:
    stream = io.StringIO()
    Output(mode, stream).emit(
        SAMPLE, ids=[ONE, "a\nb"], human=lambda screen: screen.line("for people")
    )
    return stream.getvalue()


def test_json_is_one_object() -> None:
    """JSON mode prints one object: ids as hex, tuples as lists, NaN as null."""
    assert json.loads(emitted(Mode.JSON)) == {
        "snapshot": "ab" * 32,
        "share": None,
        "pairs": [["llama/math", 0.5]],
        "nothing": None,
    }


def test_quiet_is_one_id_a_line() -> None:
    """Quiet mode prints ids only, and a line break in a name does not make two of it."""
    assert emitted(Mode.QUIET) == "ab" * 32 + "\na\\nb\n"


def test_human() -> None:
    """Human mode prints what the command draws."""
    assert emitted(Mode.HUMAN) == "for people\n"


def test_plain_values() -> None:
    """Paths, mappings and ids inside them become what JSON has."""
    assert plain({"p": Path("/x"), "ids": (ONE,), "inf": float("inf")}) == {
        "p": "/x",
        "ids": ["ab" * 32],
        "inf": None,
    }


@given(st.text(st.characters()))
def test_nothing_unprintable_is_printed(text: str) -> None:
    """Whatever a checkpoint calls its tensors, a terminal sees printable characters only."""
    assert printable(text).isprintable()


def test_escapes_in_tables_do_not_reach_the_terminal() -> None:
    """A control sequence in a name is shown, not obeyed; square brackets are not markup."""
    stream = io.StringIO()
    Screen(stream).table(
        [Column("NAME")],
        [
            [
                "\x1b[31mred",
            ],
            ["[red]x[/red] :smile:"],
        ],
    )
    assert stream.getvalue() == "NAME\n\\x1b[31mred\n[red]x[/red] :smile:\n"


def test_rows_are_not_folded_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file every row is one line without trailing blanks, even with COLUMNS set."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    long = "model.layers." * 30
    Screen(stream).table([Column("A"), Column("N", right=True)], [[long, "1"], ["b", ""]])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1] == f"{long}  1"
    assert lines[2] == "b"


def test_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets colours, a terminal with NO_COLOR and a file do not."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def line(stream: io.StringIO) -> str:
        Screen(stream).line("done", style="green")
        return stream.getvalue()

    assert "\x1b[32m" in line(Terminal())
    assert "\x1b" not in line(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in line(Terminal())


def test_rows_fold_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal nothing is lost to its edge: long cells go on in the next line."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb-but-wide")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    name = "x" * 100
    Screen(stream).table([Column("NAME")], [[name]])
    cells = [line for line in stream.getvalue().splitlines() if "x" in line]
    assert len(cells) > 1
    assert all(len(line) <= 40 for line in cells)
    assert stream.getvalue().count("x") == len(name)


def test_fields_leave_out_what_is_not_there() -> None:
    """A field without a value is not printed; the others are aligned."""
    stream = io.StringIO()
    Screen(stream).fields([("a", 1), ("nothing", None), ("longer", "2")])
    assert stream.getvalue() == "a       1\nlonger  2\n"


def test_short() -> None:
    """An id is twelve digits for people, none is a dash."""
    assert short(ONE) == "ab" * 6
    assert short(None) == "-"


def test_paths_are_shown_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path below the working directory is relative, another one as it is."""
    monkeypatch.chdir(tmp_path)
    assert near(tmp_path / "a" / "mnt") == "a/mnt"
    assert near(tmp_path.parent) == str(tmp_path.parent)
    assert near("elsewhere") == "elsewhere"
