"""How the command line spells the library's phrases."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from mstore.terms.errors import NotFound
from mstore.terms.phrases import Call, Option, Text, as_phrase, call, joined, phrase
from mstore.terms.report import plain
from mstore_cli.errors import report
from mstore_cli.spelling import Typed


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        (call("reindex"), "mstore reindex"),
        (
            call("repair", read_data=True, sources=("PLACE", "/a b")),
            "mstore fsck --read-data --repair --from PLACE --from '/a b'",
        ),
        (call("remove", "m"), "mstore rm m"),
        (call("files", "1234"), "mstore ls 1234"),
        (call("tensors", "1234"), "mstore ls --tensors 1234"),
        (call("read_file", "REF", "PATH"), "mstore cat REF:PATH"),
        (call("configure", "shared", "all"), "mstore config shared all"),
        (call("mounts", all=True), "mstore mounts --all"),
        (call("add_remote", "origin", "URL"), "mstore remote add origin URL"),
        (call("remotes"), "mstore remote"),
        (call("remote_contents", "origin"), "mstore remote show origin"),
        (call("trust", "http://a"), "mstore config --user endpoints http://a"),
        (
            call("push", "origin", refs=("m", "a b"), force_with_lease=True),
            "mstore push origin m 'a b' --force-with-lease",
        ),
        (call("push", "origin", delete=("m",)), "mstore push origin --delete m"),
        (call("push", "origin", every=True), "mstore push origin --all"),
        (call("merge", help=True), "mstore merge --help"),
        (call("fsck", store="/a b"), "mstore --store '/a b' fsck"),
        (
            Call("add", ("PATH",), (("base", None), ("default_excludes", False))),
            "mstore add PATH --base none --no-default-excludes",
        ),
        (call("add", "x", max_sparse_bytes=7), "mstore add x --max-sparse 7"),
        (Option("top_p"), "--top-p"),
        (Option("reflink", "auto"), "--reflink auto"),
        (call("pin", "x", raw=True), "mstore pin x --raw"),
        (Option("skip", ("a b", "c")), "--skip 'a b' --skip c"),
        (phrase("{a}, then {b}", a=call("gc"), b=Option("shared")), "mstore gc, then --shared"),
    ],
)
def test_operations_are_commands(text: Text, typed: str) -> None:
    """Operations are commands with flags, and values are quoted as a shell needs it."""
    assert as_phrase(text).spelled(Typed()) == typed


def test_commands_act_on_the_store_that_was_named() -> None:
    """With `--store`, every command that acts on a store names it, once."""
    told = joined(call("gc"), call("mounts"), call("fsck", store="b"), call("add", help=True))
    assert told is not None
    assert told.spelled(Typed(Path("a b"))).splitlines() == [
        "mstore --store 'a b' gc",
        "mstore mounts",
        "mstore --store b fsck",
        "mstore add --help",
    ]


def test_errors_and_reports_are_spelled() -> None:
    """People and programs read commands, in errors and in the JSON of reports."""
    error = NotFound(phrase("no {it}", it=Option("budget")), hint=call("reindex"))
    told, document = io.StringIO(), io.StringIO()
    report(error, told, store=Path("s"), document=document)
    assert told.getvalue() == "error: no --budget\nhint: mstore --store s reindex\n"
    assert json.loads(document.getvalue())["error"]["hint"] == "mstore --store s reindex"
    typed = plain({"hint": as_phrase(call("gc")), "remarks": ["x"]}, lambda text: f"<{text}>")
    assert typed == {"hint": "<store.gc()>", "remarks": ["x"]}
