"""Which paths may become files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.checkpoint.paths import check_case_twins, check_relative
from mstore.terms.errors import BadCheckpoint


@pytest.mark.parametrize(
    "path",
    [
        "config.json",
        ".hidden",
        "...",
        "a/b/c.safetensors",
        "back\\slash",
        "spaces and ünïcödé 🦙",
        "a..b/..c/d..",
        "x" * 255,
        "/".join(["d" * 200] * 20),
    ],
)
def test_plain_paths_are_accepted(path: str) -> None:
    """Dots inside names, backslashes, spaces, any script and long paths are fine."""
    check_relative(path, "here")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("../up", r"'\.\.' component"),
        ("a/../../up", r"'\.\.' component"),
        ("a/..", r"'\.\.' component"),
        (".", r"'\.' component"),
        ("a/./b", r"'\.' component"),
        ("a//b", "empty component"),
        ("a/", "empty component"),
        ("nul\0.txt", "control character"),
        ("new\nline", "control character"),
        ("escape\x1b[2J", "control character"),
        ("\x7f", "control character"),
        ("\x9b2J", "control character"),
        ("half \ud83d pair", "not valid UTF-8"),
        (os.fsdecode(b"latin-1 \xe9"), "not valid UTF-8"),
        ("x" * 256, "component of more than 255 bytes"),
        ("ü" * 128, "component of more than 255 bytes"),
        ("/".join(["d" * 200] * 21), "longer than 4096 bytes"),
        ("/".join(["d"] * 65), "deeper than 64 components"),
    ],
)
def test_bad_paths_are_refused(path: str, problem: str) -> None:
    """Each bad path is refused for its own reason, at the place given, in one printable line."""
    with pytest.raises(BadCheckpoint, match=problem) as refusal:
        check_relative(path, "here")
    assert refusal.value.where == "here"
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 300


@given(st.text())
def test_an_accepted_path_stays_below(path: str) -> None:
    """Whatever is accepted names something strictly below the directory it is joined to."""
    try:
        check_relative(path, "here")
    except BadCheckpoint:
        return
    joined = os.path.normpath(os.path.join("/root/dir", path))
    assert joined == f"/root/dir/{path}"
    os.fsencode(path)
    assert Path(path).parts == tuple(path.split("/"))


@pytest.mark.parametrize(
    "paths",
    [
        ["Readme.md", "README.md"],
        ["a/b/x", "a/B/y"],
        ["A/x", "a/y"],
        ["dir/file", "DIR"],
        ["a/b/c/d", "a/b/c/e", "a/B/c/d"],
        ["ÜBER", "über"],
        ["Σ", "ς"],
    ],
)
def test_case_twins_are_refused(paths: list[str]) -> None:
    """Files or directories that differ only in case are refused, in either order, by name."""
    for arrangement in (paths, paths[::-1]):
        with pytest.raises(BadCheckpoint, match="differ only in case"):
            check_case_twins(arrangement)


def test_twins_are_both_named() -> None:
    """The error names the two spellings, and the directories where those are the twins."""
    with pytest.raises(BadCheckpoint, match="'top/Sub' and 'top/sub'"):
        check_case_twins(["top/Sub/one", "top/sub/two"])


def test_same_names_in_other_directories_are_no_twins() -> None:
    """Equal names under different directories, shared parents and repeats are accepted."""
    check_case_twins(["a/x", "b/X", "a/y", "a/x", "ab", "c/a/x"])


@given(st.lists(st.lists(st.sampled_from("abAB"), min_size=1, max_size=4), max_size=8))
def test_twins_agree_with_a_plain_comparison(parts: list[list[str]]) -> None:
    """Paths are twins exactly if two different prefixes of them fold to the same text."""
    paths = ["/".join(components) for components in parts]
    prefixes = {"/".join(p[: n + 1]) for p in parts for n in range(len(p))}
    twins = len({prefix.casefold() for prefix in prefixes}) != len(prefixes)
    if twins:
        with pytest.raises(BadCheckpoint):
            check_case_twins(paths)
    else:
        check_case_twins(paths)
