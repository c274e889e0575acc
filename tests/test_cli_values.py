"""Values of the command line: what converts plain ones quickly gives what typer gives."""

from __future__ import annotations

import inspect
import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from mstore_cli.main import build
from mstore_cli.values import convert_plain


class By(Enum):
    """Two words."""

    FILE = "file"
    MEMBER = "member"


Arguments = Annotated[list[Path] | None, typer.Argument()]
ONE = {
    "text": Annotated[str | None, typer.Option("--text")],
    "named": Annotated[str, typer.Option("--named")],
    "path": Annotated[Path | None, typer.Option("--path")],
    "count": Annotated[int | None, typer.Option("--count", min=1, max=20_000)],
    "any_count": Annotated[int, typer.Option("--any-count")],
    "share": Annotated[float, typer.Option("--share", min=0)],
    "parsed": Annotated[
        float | None, typer.Option("--parsed", parser=lambda text: float(text) / 2)
    ],
    "by": Annotated[By, typer.Option("--by")],
    "flag": Annotated[bool, typer.Option("--flag/--no-flag")],
    "many": Annotated[list[str] | None, typer.Option("--many")],
    "numbers": Annotated[list[int] | None, typer.Option("--numbers")],
}
DEFAULTS: dict[str, Any] = {
    "named": "x",
    "any_count": 7,
    "share": 0.5,
    "by": By.FILE,
    "flag": False,
}
WORDS = (
    *(
        "",
        "x",
        "7",
        "007",
        "-1",
        "0",
        "20000",
        "20001",
        "1.0",
        " 7 ",
        "1_0",
        "+7",
        "\u0667",
        "9" * 30,
    ),
    *(
        "file",
        "FILE",
        "nan",
        "1e3",
        "true",
        "a b",
        "\U0001f999",
        "\udcff",
        ".",
        "/",
        "no/such",
        "-",
    ),
)


def answer(name: str, annotation: Any, line: list[str], *, quick: bool) -> object:
    """What a program with this one parameter makes of a command line: a value, or a complaint."""
    given: list[object] = []

    def entry(**values: object) -> None:
        given.append(values[name])

    default = DEFAULTS.get(name, None if "None" in str(annotation) else inspect.Parameter.empty)
    own = inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )
    entry.__dict__["__signature__"] = inspect.Signature([own])
    entry.__annotations__ = {name: annotation}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(entry)
    command: Any = typer.main.get_command(app)
    if quick:
        convert_plain(command.params, {name: own})
    try:
        with command.make_context("program", list(line)) as context:
            command.invoke(context)
    except typer.TyperException as error:
        return type(error), error.format_message()
    (value,) = given
    return type(value), repr(value)


@pytest.mark.parametrize("name", ONE)
def test_both_give_the_same(name: str) -> None:
    """Each kind of option gives the value or the complaint that typer alone gives."""
    option = f"--{name.replace('_', '-')}"
    lines = [[], [option], *([f"{option}={word}"] for word in WORDS)]
    lines += [[f"{option}={one}", f"{option}=7"] for one in WORDS]
    for line in lines:
        alone = answer(name, ONE[name], line, quick=False)
        assert answer(name, ONE[name], line, quick=True) == alone, line


@pytest.mark.parametrize(
    "annotation",
    [
        *(Annotated[str, typer.Argument()], Annotated[str | None, typer.Argument()]),
        *(Annotated[Path, typer.Argument()], Annotated[list[Path], typer.Argument()]),
        *(Annotated[list[str] | None, typer.Argument()], Arguments),
    ],
    ids=("text", "text or none", "path", "paths", "texts", "arguments"),
)
def test_arguments_are_the_same(annotation: Any) -> None:
    """Each kind of argument gives the value or the complaint that typer alone gives."""
    for line in [[], *([word] for word in WORDS), ["a", "b"], ["a", "\udcff"], ["", ""]]:
        alone = answer("it", annotation, line, quick=False)
        assert answer("it", annotation, line, quick=True) == alone, line


def test_what_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is there and cannot be read is refused in typer's words."""
    (tmp_path / "shut").mkdir()
    # Nothing is shut to root.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for path in (tmp_path / "shut", tmp_path / "missing"):
        alone = answer("path", ONE["path"], [f"--path={path}"], quick=False)
        assert answer("path", ONE["path"], [f"--path={path}"], quick=True) == alone
    assert "not readable" in str(answer("path", ONE["path"], [f"--path={tmp_path}"], quick=True))


def test_no_option_asks_more_of_a_path() -> None:
    """No parameter asks of a path what only typer checks: that it exists, what it is, its form."""
    group: Any = build()
    for parameter in [
        *group.params,
        *(one for n in group.commands for one in group.commands[n].params),
    ]:
        asked = parameter.type_descriptor.parameter_info
        more = (asked.exists, asked.writable, asked.resolve_path, asked.allow_dash)
        assert (*more, asked.file_okay, asked.dir_okay) == (False,) * 4 + (True, True)
        assert asked.path_type is None
