"""Command lines: what they mean, what is refused and with which hint, help and the version."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest

from mstore_cli import tree
from mstore_cli.command import Line, find
from mstore_cli.errors import Ended, UsageError
from mstore_cli.session import Choices
from mstore_cli.verbs import VERBS, verb_of


def parsed(line: str) -> Line:
    """A line that is a command."""
    found = tree.parse(shlex.split(line))
    assert found is not None
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_is_a_command(verb: str) -> None:
    """The example that the help of a command gives is one of its command lines."""
    example = str(find(verb).epilog).splitlines()[2]
    # The shell's part is not for the program.
    first, *words = shlex.split(example.partition(" > ")[0])
    assert (first, verb_of(words)) == ("mstore", verb)
    assert parsed(shlex.join(words)).choices.store is None


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_with_all_its_options(verb: str) -> None:
    """All parameters of a command may be given at once, beside the global options."""
    words = verb.split()
    for one in find(verb).params:
        value = one.type.choices[0] if isinstance(one.type, click.Choice) else "3"
        if isinstance(one, click.Argument):
            words.append(value)
        elif isinstance(one, click.Option) and one.is_flag:
            words += [one.opts[0]] if one.name not in ("json", "quiet") else []
        else:
            words += [one.opts[0], value]
    assert parsed(shlex.join([*words, "--json"])).choices == Choices(Path("3"), True, False, True)


def test_global_options_stand_before_and_after() -> None:
    """Global options may stand on both sides of a command; what stands after it wins."""
    line = parsed("--store a --json log -n5 --store b --no-progress")
    assert line.choices == Choices(Path("b"), json=True, no_progress=True)
    assert parsed("log -qn5").choices == Choices(quiet=True)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--store= refs", "--store"),
        ("refs --store ''", "--store"),
        ("du --html=", "--html"),
        ("checkout m ''", "DIR"),
        ("add x '' --name m", "PATH"),
        ("fsck --repair --from ''", "--from"),
    ],
)
def test_no_path_is_empty(line: str, option: str) -> None:
    """An empty path, as of `--store=$UNSET`, is not the working directory."""
    with pytest.raises(UsageError, match=f"'{option}'.*cannot be empty") as caught:
        tree.parse(shlex.split(line))
    assert str(caught.value.hint).endswith(" --help")


@pytest.mark.parametrize(
    ("line", "option"),
    [
        *(("merge --name", "--name"), ("refs --store", "--store"), ("log -n", "-n")),
        ("merge --name --base base", "--name"),
        ("add x -m --name y", "-m"),
        ("refs --store --json", "--store"),
        ("--store --json refs", "--store"),
    ],
)
def test_an_option_is_no_value(line: str, option: str) -> None:
    """An option without its value does not take the next option for it; joined by = it may."""
    with pytest.raises(UsageError, match=f"[Oo]ption '{option}' requires an argument") as caught:
        tree.parse(line.split())
    assert str(caught.value.hint).endswith(" --help")
    assert parsed("add x --name y --message=--name")


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("add x --name y -ma --message b", "--message"),
        ("log -n5 --limit=6", "--limit"),
        ("--store a --store=b refs", "--store"),
    ],
)
def test_an_option_is_given_once(line: str, option: str) -> None:
    """An option of one value that is given twice is refused, whatever its form, before the command
    or after it; lists and switches are not, nor words behind --."""
    with pytest.raises(UsageError, match=f"^{option} is given twice$"):
        tree.parse(line.split())
    assert parsed("add x y --name a --name b --convert --convert")
    assert parsed("add --name a -m m -- x -m m")


def test_an_unknown_option_of_the_program() -> None:
    """An option before the command that does not exist is refused like a command's own."""
    with pytest.raises(UsageError, match=r"^no such option: --verison$") as caught:
        tree.parse(["--verison"])
    assert str(caught.value.hint).startswith("did you mean --version?")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("log -n x", "a whole number, not 'x'"),
        ("log -n 0", "at least 1, not 0"),
        ("fsck --sample 1 --threads 1.5", "a whole number, not '1.5'"),
        ("explain m --by word", "word"),
    ],
)
def test_a_wrong_value(line: str, message: str) -> None:
    """A wrong number or word is refused, with the help of the command."""
    with pytest.raises(UsageError, match=message) as caught:
        tree.parse(line.split())
    assert caught.value.hint == f"mstore {line.split(maxsplit=1)[0]} --help"


def test_hints_act_on_the_store_that_the_line_names() -> None:
    """A hint for a wrong line names the store that stands before its command."""
    with pytest.raises(UsageError, match="unexpected arguments") as caught:
        tree.parse(["--store", "s", "cat", "m", "config.json"])
    assert caught.value.hint == "mstore --store s cat m:config.json"


@pytest.mark.parametrize("line", ["help merge", "--json help merge", "help", "--help", "merge -h"])
def test_help_stands_where_commands_stand(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`mstore help merge` is `mstore merge --help`, also after global options."""
    assert tree.parse(line.split()) is None
    told = capsys.readouterr().out
    assert told.startswith(f"Usage: mstore{' merge' if 'merge' in line else ''} [OPTIONS]")


@pytest.mark.parametrize("line", ["--json", "--store s", "-q"])
def test_options_without_a_command(line: str) -> None:
    """Global options alone are an error that says so."""
    with pytest.raises(UsageError, match="no command was given"):
        tree.parse(line.split())


def test_nothing_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    """A line without a word prints the help on standard error."""
    with pytest.raises(Ended):
        tree.parse([])
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("Usage: mstore [OPTIONS] COMMAND")


@pytest.mark.parametrize("line", ["--version", "-V", "-q --version", "--version refs"])
def test_the_version(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints what `version` does, also before a command."""
    assert tree.parse(line.split()) is None
    told = capsys.readouterr().out
    parsed("-q version" if "-q" in line else "version").run()
    assert capsys.readouterr().out == told != ""
