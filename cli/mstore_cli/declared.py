"""The parameters of commands as data: what a command line may contain, and what help says of it.

A command declares each parameter once, as `Annotated[KIND, Option(...)]` in the signature of its
function.  `mstore_cli.lines` parses well-formed command lines by these declarations;
`mstore_cli.tree` makes typer's parameters of them, for help, completion and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter as Declaration
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

Completed = Literal[
    "refs",
    "ever",
    "mounted",
    "methods",
    "combinations",
    "scores",
    "codecs",
    "settings",
    "setting_values",
]
"""What the shell completes: a function of `mstore_cli.completion`."""
REQUIRED = Declaration.empty
"""The default of a parameter that has none."""


WHAT, WHICH, HOW_MUCH, RESULT, OPTIONS = GROUPS = (
    *("What to merge", "Which tensors", "How much to read", "The result"),
    "Options",
)
"""The headings of options in help, in their order; OPTIONS is that of options without another."""


class Shown:
    """What help, completion and conversion need of a parameter; see `Option` and `Argument`."""

    __slots__ = (
        "completes",
        "group",
        "help",
        "least",
        "metavar",
        "names",
        "parser",
        "show_default",
    )

    def __init__(
        self,
        *names: str,
        help: str | None = None,
        metavar: str | None = None,
        show_default: bool = True,
        least: int | float | None = None,
        parser: Callable[[str], Any] | None = None,
        completes: Completed | None = None,
        group: str = OPTIONS,
    ) -> None:
        self.names = names
        self.help = help
        self.metavar = metavar
        self.show_default = show_default
        self.least = least
        self.parser = parser
        self.completes = completes
        self.group = group


class Option(Shown):
    """An option by all its names: `--name`, `-n`, or `--name/--no-name` for a bool.

    least: the smallest number. parser: what converts its text; raises UsageError. completes: what
    the shell completes. group: the heading under which help lists it.
    """


class Argument(Shown):
    """A word by its place; has no names."""


class Parameter(NamedTuple):
    """A parameter of a command. default: REQUIRED if it must be given. several: a list of `kind`.

    annotation: the whole type, `Optional` and `list` included.
    """

    name: str
    kind: type
    several: bool
    default: Any
    shown: Shown
    annotation: Any

    @property
    def is_option(self) -> bool:
        return isinstance(self.shown, Option)


def parameters_of(declarations: Iterable[Declaration]) -> tuple[Parameter, ...]:
    """Read the parameters of a function, whose annotations are evaluated.

    Raises TypeError for one that is no Option or Argument.
    """
    return tuple(map(_read, declarations))


def _read(declaration: Declaration) -> Parameter:
    annotation, *about = get_args(declaration.annotation) or (declaration.annotation,)
    if len(about) != 1 or not isinstance(about[0], Shown):
        raise TypeError(f"{declaration.name}: not declared as Annotated[KIND, Option(...)]")
    kinds = [annotation] if get_origin(annotation) is list else get_args(annotation)
    kind = next((one for one in kinds if one is not NoneType), annotation)
    several = get_origin(kind) is list
    if several:
        (kind,) = get_args(kind)
    return Parameter(declaration.name, kind, several, declaration.default, about[0], annotation)
