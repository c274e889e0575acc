"""Command lines parsed without typer mean what they mean to typer."""

from __future__ import annotations

import os
import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore_cli import lines, tree
from mstore_cli.command import GLOBALS, Verb, command, find
from mstore_cli.declared import Argument, Option
from mstore_cli.errors import Ended, UsageError
from mstore_cli.lines import Line
from mstore_cli.session import Session
from mstore_cli.verbs import VERBS


class By(Enum):
    """Two words."""

    FILE = "file"
    MEMBER = "member"


def _half(text: str) -> float:
    try:
        return float(text) / 2
    except ValueError:
        raise UsageError("not a number", hint="7") from None


@command(example="mstore init", bare={"--text": "bare"})
def init(
    session: Session,
    first: Annotated[str, Argument(help="A word.")],
    paths: Annotated[list[Path] | None, Argument(help="Some.")] = None,
    text: Annotated[str | None, Option("--text", "-t")] = None,
    path: Annotated[Path | None, Option("--path")] = None,
    count: Annotated[int | None, Option("--count", "-n", least=1)] = None,
    any_count: Annotated[int, Option("--any-count")] = 7,
    share: Annotated[float, Option("--share", least=0)] = 0.5,
    parsed: Annotated[float | None, Option("--parsed", parser=_half)] = None,
    by: Annotated[By, Option("--by")] = By.FILE,
    flag: Annotated[bool, Option("--flag/--no-flag")] = True,
    dry: Annotated[bool, Option("--dry", "-d")] = False,
    many: Annotated[list[str] | None, Option("--many")] = None,
    numbers: Annotated[list[int] | None, Option("--numbers")] = None,
) -> None:
    """A command with every kind of parameter."""


VALUES = (
    *("", "x", "7", "007", "-1", "0", "20001", "1.0", ".5", "1.", " 7 ", "1_0", "+7", "\u0667"),
    *("9" * 9, "9" * 30, "1" * 20 + ".5", "file", "FILE", "FILE=file", "nan", "inf", "1e3", "true"),
    *("a b", "a=b", "\U0001f999", "\udcff", ".", "/", "no/such", "-", "--", "-n5", "--dry", "x,y"),
)
NAMES = tuple(
    name
    for one in (*init.parameters, *GLOBALS)
    for names in one.shown.names
    for name in names.split("/")
)


def meant(line: Line) -> object:
    """All that a parsed line says, with the types of its values."""
    return line.verb.name, repr(line.choices), sorted((k, repr(v)) for k, v in line.values.items())


def check(words: list[str]) -> bool:
    """Compare both parsers; return whether the line was parsed without typer."""
    quick = lines.parse(words)
    if quick is None:
        return False
    assert meant(quick) == meant(checked(tree.parse(words))), words
    return True


def checked(line: Line | None) -> Line:
    """A line that is a command."""
    assert line is not None
    return line


@pytest.fixture
def every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mstore init` has every kind of parameter."""

    def found(name: str) -> Verb:
        return init if name == "init" else find(name)

    monkeypatch.setattr(lines, "find", found)
    monkeypatch.setattr(tree, "find", found)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("every_kind")
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("--")])
def test_every_option_with_every_value(name: str) -> None:
    """A value in the next word, in the same, twice, or none: it means the same to both."""
    for value in VALUES:
        check(["init", "first", name, value])
        check(["init", f"{name}={value}", "first"])
        check(["init", "first", f"{name}=7", name, value, "more"])
    check(["init", "first", name])


def taken(*words: str) -> str:
    """What is wrong with a line, or nothing."""
    try:
        assert lines.parse(words) or tree.parse(words)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("every_kind")
def test_an_option_is_given_once() -> None:
    """An option of one value that is given twice is refused, whatever its form, before the command
    or after it; lists and switches are not."""
    for twice in (
        *(["--text", "a", "--text", "b"], ["--text=a", "-tb"], ["-t", "a", "-dt", "b"]),
        *(["-n5", "--count", "5"], ["--share", "1", "--path", "x", "--share=2"]),
        ["--store", "a", "--store", "b"],
    ):
        assert "given twice" in taken("init", "x", *twice), twice
    assert taken("init", "x", "-n5", "-n6") == "--count is given twice"
    assert taken("--store", "a", "--store=b", "init", "x") == "--store is given twice"
    assert taken("init", "x", "--many", "a", "--many", "b", "-d", "-d", "--flag", "--flag") == ""
    assert taken("init", "--text", "a", "--", "x", "--text", "b") == ""


@pytest.mark.usefixtures("every_kind")
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["init", *NAMES]),
            st.sampled_from(VALUES),
            st.builds("{}={}".format, st.sampled_from(NAMES), st.sampled_from(VALUES)),
        ),
        max_size=9,
    ),
    st.integers(0, 9),
)
def test_any_line(words: list[str], place: int) -> None:
    """A line of any options, values and words means the same, if it is parsed without typer."""
    check([*words[:place], "init", *words[place:]])


@pytest.mark.usefixtures("every_kind")
def test_ordinary_forms_need_no_typer() -> None:
    """Options before and after the command, short and long, and words after -- are parsed here."""
    ordinary = (
        "init a",
        "--json init a b -n5 -t x",
        "init a --count 7",
        "--store s -q init --no-flag a --store=t",
        "init a --any-count 0 --share 2.5 --parsed 0.5 --by member -d",
        "init --many x --many=-y a --numbers 1 --numbers 2 -- -b --json",
        "init a --text --path .",
    )
    for line in ordinary:
        assert check(shlex.split(line)), line


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_needs_no_typer(verb: str) -> None:
    """The example that the help of a command gives is parsed without typer."""
    example = find(verb).epilog.splitlines()[2]
    # The shell's part is not for the program.
    words = shlex.split(example.partition(" > ")[0])
    assert words[0] == "mstore"
    assert words[1] == verb
    assert check(words[1:])


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_with_all_its_options(verb: str) -> None:
    """All parameters of a command at once mean the same to both."""
    words = [verb]
    for one in find(verb).parameters:
        value = {int: "3", float: "3", bool: ""}.get(one.kind, "1")
        value = next(iter(one.kind)).value if issubclass(one.kind, Enum) else value
        for names in one.shown.names or ("",):
            for name in names.split("/"):
                words += [word for word in (name, value) if word]
    check(words)


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is there and cannot be read is left to typer, which refuses it."""
    (tmp_path / "shut").mkdir()
    # Nothing is shut to root.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert check(["--store", str(tmp_path / "missing"), "refs"])
    words = ["--store", str(tmp_path / "shut"), "refs"]
    assert not check(words)
    with pytest.raises(UsageError, match="not readable"):
        tree.parse(words)


def test_no_parameter_asks_more_of_a_path() -> None:
    """No parameter asks of a path what only typer checks: that it exists, what it is, its form."""
    group: Any = tree.build()
    for parameter in [
        *group.params,
        *(one for n in group.commands for one in group.commands[n].params),
    ]:
        asked = parameter.type_descriptor.parameter_info
        more = (asked.exists, asked.writable, asked.resolve_path, asked.allow_dash)
        assert (*more, asked.file_okay, asked.dir_okay) == (False,) * 4 + (True, True)
        assert asked.path_type is None


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["refs", "-h"],
        ["--version", "refs"],
        ["commit"],
        ["--json"],
        ["log", "-qn5"],
    ],
)
def test_the_rest_is_left_to_typer(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help, rare forms, and what is no command are typer's: it prints, parses or refuses."""
    assert lines.parse(words) is None
    try:
        found = tree.parse(words)
    except (Ended, UsageError):
        return
    assert found is not None or capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("merge --name --base base", "--name"),
        ("add x -m --name y", "-m"),
        ("refs --store --json", "--store"),
        ("--store --json refs", "--store"),
        ("--store= refs", "--store"),
        ("refs --store ''", "--store"),
        ("du --svg=", "--svg"),
    ],
)
def test_an_option_is_no_value(line: str, option: str) -> None:
    """An option without its value does not take the next option for it; joined by = it may.  No
    path is empty."""
    words = shlex.split(line)
    assert lines.parse(words) is None
    with pytest.raises(UsageError, match=f"option '{option}' requires an argument"):
        tree.parse(words)
    assert check(["add", "x", "--name", "y", "--message=--name"])


@pytest.mark.parametrize("line", ["help merge", "--json help merge", "--store s help merge -q"])
def test_help_stands_where_commands_stand(line: str) -> None:
    """`mstore help merge` is `mstore merge --help`, also after global options."""
    words = list(lines.without_help_word(line.split()))
    assert words[-2:] == ["merge", "--help"]
    assert words[:-2] == line.partition("help")[0].split()


@pytest.mark.parametrize("line", ["--json", "--store s", "-q"])
def test_options_without_a_command(line: str) -> None:
    """Global options alone are an error that says so."""
    with pytest.raises(UsageError, match="no command was given"):
        tree.parse(line.split())


@pytest.mark.parametrize("words", [["--version"], ["--json", "--version"], ["--version", "-q"]])
def test_the_version_is_the_same(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Both parsers print the same for --version."""
    checked(lines.parse(words)).run()
    ours = capsys.readouterr().out
    assert tree.parse(words) is None
    assert capsys.readouterr().out == ours != ""
