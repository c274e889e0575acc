"""Terminals that are narrow: every command fits 60 columns and 80, and nothing is lost."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
from cli_runs import Program
from hypothesis import given
from hypothesis import strategies as st
from test_cli_commands import GOING_ON, WITH_LINES, lines_for, write_models

from mstore_cli.groups import Group, draw_groups
from mstore_cli.output import Screen
from mstore_cli.tables import lay_out, wrapped

WIDTHS = (40, 60)
RUN = "llama-3.1-8b-instruct/tuned-on-{}-2026-11/run-1"
"""Names that differ in the middle, and leave no room in 60 columns for anything else."""
MATH, CODE = (RUN.format(subject) for subject in ("math", "code"))
MESSAGE = "a message of many words that nobody would want to read in a single line of a terminal"
MORE = {
    "explain sums": ["explain", "tiny/merged", "--by", "tensor"],
    "blame sums": ["blame", "tiny/merged", "--by", "expert"],
    "graph": ["log", "--graph"],
    "tensors": ["ls", "tiny/merged", "--tensors"],
    "tags": ["tag"],
    "moves": ["reflog"],
    "sweep": ["plan", "--sweep", "--measure", "--method", "linear", "--base", "tiny/base"],
    "shares": ["du", MATH, CODE],
    "files": ["diff", "tiny/base", "tiny/merged"],
}
VERBS_WITH_OUTPUT = [verb for verb in WITH_LINES if verb != "mounts"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two experts of it, as directories."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def family(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store whose experts have long names that are nearly alike."""
    mstore = Program(tmp_path_factory.mktemp("narrow") / "store")
    mstore.succeed("init", "--block-size", "64KiB")
    mstore.succeed("add", models / "base", "--name", "tiny/base", "-m", MESSAGE)
    for name, ref in (("math", MATH), ("code", CODE)):
        mstore.succeed("add", models / name, "--name", ref, "--base", "tiny/base")
    mstore.succeed("add", models / "adapter", "--name", "tiny/adapter")
    experts = ("--base", "tiny/base", "--expert", MATH, "--expert", f"{CODE}=0.5")
    mstore.succeed("merge", "--name", "tiny/merged", "--method", "task_arithmetic", *experts)
    mstore.succeed("tag", "v1", MATH)
    mstore.succeed("tag", "tiny/math", MATH)
    mstore.succeed("tag", "tiny/code", CODE)
    mstore.succeed("sign", CODE, "--key", models / "key")
    mstore.succeed("pin", MATH, "--raw")
    mstore.succeed("remote", "add", "origin", tmp_path_factory.mktemp("remote").as_uri())
    mstore.succeed("push", "origin", MATH, CODE)
    mstore.succeed("fetch", "origin", "--lazy")
    return mstore


def line_for(what: str, models: Path, out: Path) -> list[str]:
    if what == "sweep":
        return [*MORE[what], "--expert", MATH, "--expert", CODE]
    if what in MORE:
        return MORE[what]
    line = lines_for(models, out)[what]
    # What changes a branch takes one, and here these have long names.
    if what in {"reset", "rename"}:
        return [what, MATH, "tiny/base" if what == "reset" else f"{MATH}/again"]
    if what == "tag":
        return ["tag", "v2", "tiny/merged"]
    return [what, {"rm": MATH, "drop": CODE}[what]] if what in {"rm", "drop"} else line


@pytest.mark.sampled(16)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("what", [*VERBS_WITH_OUTPUT, *MORE])
def test_no_line_is_wider_than_the_terminal(
    what: str, width: int, family: Program, models: Path, tmp_path: Path
) -> None:
    """Whatever a command prints fits 60 columns, and even 40."""
    line = line_for(what, models, tmp_path)
    mstore = Program(Path(shutil.copytree(family.store, tmp_path / "store")))
    if what == "gate drop":
        merge = ("merge", "--plan", "tiny/merged", "--name", "tiny/merged")
        mstore.succeed(*merge, "--candidate", "run")
    if what in GOING_ON:
        mstore.succeed("bisect", "start", "tiny/merged", "--experts")
    done = (Program(Path(line[1])) if what == "init" else mstore).on_terminal(width, *line)
    assert done.status == 0, done.err
    assert done.lines
    assert max(map(len, done.lines)) <= width


LISTS = {
    "refs": (["refs"], [MATH, CODE, "tiny/merged"]),
    "du": (["du"], [MATH, CODE, "FREED BY RM"]),
    "log": (["log"], [MATH, CODE, "merge task_arithmetic", MESSAGE]),
    "graph": (["log", "--graph"], [MATH, CODE, MESSAGE]),
    "reflog": (["reflog"], [f"{MATH}@{{0}}", f"{CODE}@{{0}}"]),
    "explain": (["explain", "tiny/merged"], [f"{MATH}=1", f"{CODE}=0.5", "NORM LEFT OUT"]),
    "blame": (["blame", "tiny/merged"], ["2026-11/run-1=0.5", "MOVED"]),
    "verify": (["verify", MATH, CODE], [MATH, CODE]),
    "plans": (["plans"], [f"{MATH}=1,", f"{CODE}=0.5"]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("what", LISTS)
def test_names_ids_and_numbers_stay_whole(what: str, width: int, family: Program) -> None:
    """On a narrow terminal stands what stands in a file, no name, id or number cut or broken; only
    where it stands differs.
    """
    line, words = LISTS[what]
    narrow = family.on_terminal(width, *line)
    shown = " ".join(narrow.out.split())
    shown_plain = re.sub(r" [|+*' -]+ ", " ", shown)
    # In a list of names each has a line; where several stand in one cell they may part between.
    for word in words:
        assert word in shown or word in shown_plain, word
    wide = family(*line)
    assert (narrow.status, narrow.err) == (wide.status, wide.err)
    assert max(map(len, narrow.lines)) <= width
    for token in set(wide.out.split()):
        if len(token) <= width - 4 and re.search(r"\d", token) and not re.search(r"\ds$|\.", token):
            assert token in shown, token


@pytest.mark.sampled(3)
@pytest.mark.parametrize("width", [40, 60, 65, 66, 72, 80])
@pytest.mark.parametrize(
    "line", [["show", "tiny/merged"], ["replay", "tiny/merged"], ["show", CODE]]
)
def test_an_id_is_never_broken(width: int, line: list[str], family: Program) -> None:
    """However narrow the terminal, no part of an id goes on in another line: it stands whole, or
    its first twelve digits do."""
    ids = set(re.findall(r"\b[0-9a-f]{64}\b", family(*line).out))
    assert len(ids) >= 2
    narrow = family.on_terminal(width, *line)
    words = set(narrow.out.split())
    assert all(one[: 64 if width >= 66 else 12] in words for one in ids)
    for word in words:
        if re.fullmatch(r"[0-9a-f]{13,}", word):
            assert word in ids
    assert max(map(len, narrow.lines)) <= width


def test_what_is_no_terminal_stays_wide(family: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has one row a line, whatever COLUMNS says."""
    monkeypatch.setenv("COLUMNS", "40")
    rows = family.succeed("refs").lines
    # A heading before them, and behind them how many remote refs there are.
    assert len(rows) == 2 + len(family.succeed("refs", "-q").lines)
    [row] = [row for row in rows if row.startswith(MATH)]
    told = rf"{re.escape(MATH)} +branch  [0-9a-f]{{12}} \(pinned\)  \d{{4}}-.*"
    assert re.fullmatch(told, row)


def test_a_graph_goes_on_beside_its_bars(family: Program) -> None:
    """In a graph the second line of a message stands beside the bars, not under them."""
    lines = family.on_terminal(60, "log", "--graph").lines
    [place] = [n for n, line in enumerate(lines) if "*" in line and "a message" in line]
    beside = lines[place].index(lines[place].split("*")[1].split()[0])
    assert lines[place + 1][:beside].strip(" |") == ""
    assert lines[place + 1][beside] != " "


def test_rows_never_read_alike() -> None:
    """Where shortening would make two names one, they stand in full."""

    class Narrow(io.StringIO):
        def isatty(self) -> bool:
            return True

    names = [f"{'a' * 40}{middle}{'z' * 40}" for middle in "mn"]
    for stream in (io.StringIO(), Narrow()):
        rows = tuple((name, "1") for name in names)
        draw_groups(Screen(stream), "T", ("COUNT",), [Group("heading", "", rows)])
        told = "".join(stream.getvalue().split())
        assert all(name in told for name in names)


CELLS = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=50)


@given(st.data())
def test_nothing_is_lost_in_a_layout(data: st.DataObject) -> None:
    """Whatever the cells and the width: no line is longer, and each cell is in its column."""
    count = data.draw(st.integers(1, 6))
    rows = data.draw(st.lists(st.tuples(*[CELLS] * count), min_size=1, max_size=5))
    flags = st.tuples(*[st.booleans()] * count)
    right, sentences = data.draw(flags), data.draw(flags)
    width = data.draw(st.integers(8, 90))
    laid_out = lay_out(rows, right=right, sentences=sentences, width=width)
    for row, lines in zip(rows, laid_out, strict=True):
        assert all(sum(len(piece.text) for piece in line) <= width for line in lines)
        for number, cell in enumerate(row):
            pieces = [piece.text for line in lines for piece in line if piece.column == number]
            assert "".join("".join(pieces).split()) == "".join(cell.split())


@given(st.text(st.sampled_from("ab 漢"), max_size=60), st.integers(2, 20))
def test_sentences_break_between_words(text: str, width: int) -> None:
    """A sentence loses no letter, and a word that fits a line is never broken."""
    lines = wrapped(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    words = {word for line in lines for word in line.split()}
    assert all(word in words for word in text.split() if 2 * len(word) <= width)
