"""docs/cli.md says what the program says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from mstore.api import reports
from mstore.merge.planning import warnings
from mstore_cli import commands, keys, reference
from mstore_cli.command import find
from mstore_cli.verbs import VERBS, verb_of
from mstore_fuse.driver import MountInfo
from mstore_serve.serving import ServeInfo

EXPORTED = [getattr(reports, name) for name in reports.__all__]
# Progress is made by every long call.
REPORTS = [one for one in EXPORTED if inspect.isclass(one) and one is not reports.Progress]
REPORTS += [MountInfo, ServeInfo]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def test_page_is_current() -> None:
    """The page is what the program makes of it: python -m mstore_cli.reference docs/cli.md."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == reference.renewed("cli.md", text)


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_is_complete(verb: str) -> None:
    """Each command's help states an example of itself, its exit statuses and the global options;
    the page says the last two once."""
    text = reference._help(find(verb), verb)
    example = text.split("Example:\n")[1].splitlines()[0].strip()
    assert example.startswith(f"mstore {verb}")
    assert "Exit status:\n    0  success\n    1  " in text
    assert "    2  wrong usage" in text
    page = PAGE.read_text(encoding="utf-8")
    section = page.split(f"## mstore {verb}\n")[1].split("\n## ")[0]
    assert example in section
    for shared in ("--store DIR ", "--no-progress ", "wrong usage"):
        assert shared in text
        assert shared not in section


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: one.__name__)
def test_every_key_has_a_meaning(report: type) -> None:
    """Each field of each report has a meaning, which stands below the field."""
    names = list(keys.fields_of(report))
    assert list(keys.meanings(report)) == names
    told = keys.keys_of(report)
    assert [key.name for key in told] == names
    assert all(key.kind and key.meaning for key in told)


def test_json_says_null() -> None:
    """The meaning of a key says null where that of the field says None."""
    told = next(key for key in keys.keys_of(reports.AddReport) if key.name == "previous")
    assert "null" in told.meaning
    assert "None" in keys.meanings(reports.AddReport)["previous"]


class Left:
    """A class that lost a field, but not its meaning."""

    found: int
    """how many"""
    """how many of what is gone"""


def test_a_text_below_no_field_is_refused() -> None:
    """A text that stands below no field is an error: its field was moved or removed."""
    with pytest.raises(ValueError, match="below no field"):
        keys.meanings(Left)


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: one.__name__)
def test_a_report_stands_beside_what_makes_it(report: type) -> None:
    """The module that defines a report makes it."""
    source = Path(inspect.getfile(report)).read_text(encoding="utf-8")
    assert re.search(rf"(?<!class ){report.__name__}\(", source)


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: one.__name__)
def test_a_count_is_named_for_what_it_counts(report: type) -> None:
    """A key that counts (expert, chunk) pairs is called chunks, and one of blocks is not."""
    counts = [key for key in keys.keys_of(report) if key.name.startswith(("blocks", "chunks"))]
    for key in counts:
        assert key.name.startswith("chunks") == ("chunk" in key.meaning), key.name


def test_every_kind_of_warning_is_named() -> None:
    """The meaning of a warning's kind names every kind."""
    named = {name: kind for name, kind in vars(warnings).items() if name.isupper()}
    kinds = [kind for kind in named.values() if isinstance(kind, str)]
    assert len(kinds) > 5
    told = keys.meanings(warnings.MergeWarning)["kind"]
    assert [kind for kind in kinds if kind not in told] == []


def test_every_command_but_cat_has_keys() -> None:
    """Each command's JSON keys are listed; `cat` alone has no JSON form."""
    assert {verb_of(line.split()) for line in keys.DOCUMENTS} == {*VERBS} - {"cat"}


def test_every_command_is_in_one_group() -> None:
    """The help lists each command in exactly one group, and each module of a command is one."""
    own = Path(commands.__file__).parent.glob("*.py")
    modules = {one.stem for one in own} - {"__init__"}
    assert sorted(modules) == sorted(re.sub("[- ]", "_", verb) for verb in VERBS)
    assert len({*VERBS}) == len(VERBS)


@pytest.mark.parametrize("path", [(), *((verb,) for verb in VERBS)], ids=" ".join)
def test_help_fits(path: tuple[str, ...]) -> None:
    """No line of help is wider than a terminal of 80 columns, no word is broken, and each command
    takes one line of the list."""
    text = reference._help(find(path[0]) if path else reference.build(), *path)
    example = find(path[0]).epilog.split("Exit status")[0] if path else ""
    for line in text.splitlines():
        assert len(line) <= 80 or line.strip() in example, line
        assert not re.search(r"[a-z]-$", line), line
    if not path:
        for verb in VERBS:
            assert re.search(rf"^  {verb} +\S.*\.$", text, re.MULTILINE), verb


def test_options_of_a_merge_are_in_groups() -> None:
    """The help of `merge` lists its options by what they are about, and the rest under Options."""
    text = reference._help(find("merge"), "merge")
    groups = [line for line in text.splitlines() if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert groups == [
        *("What to merge:", "Which tensors:", "How much to read:", "The result:"),
        *("What must hold before the branch moves:",),
        *("Where it is computed:", "Options:", "Global options:"),
    ]
    assert text.index("How much to read:") < text.index("--budget ") < text.index("The result:")
