"""The commands that let go: rm, reflog, prune, gc, and what log shows after them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from cli_runs import Program
from msgspec.structs import replace
from test_gc import large_and_small, write

from mstore import Store
from mstore.terms.phrases import as_phrase, call, phrase
from mstore_cli.commands.gc import _print
from mstore_cli.output import Screen
from mstore_cli.spelling import Typed


@pytest.fixture
def mstore(tmp_path: Path) -> Program:
    """A store with two versions of a branch, and a tag on the newer one."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    for seed in (1, 2):
        mstore.succeed("add", str(write(tmp_path / "in", seed)), "--name", "tiny/a")
    mstore.succeed("tag", "v1", "tiny/a")
    return mstore


def test_removed_and_brought_back(mstore: Program) -> None:
    """rm takes several refs and says how each comes back; the words work."""
    out = mstore.succeed("rm", "tiny/a", "v1").out
    assert f"mstore --store {mstore.store} reset tiny/a 'tiny/a@{{1}}'" in out
    assert f"mstore --store {mstore.store} reset v1 'v1@{{1}}'" in out
    assert "2 snapshots have no ref now" in out
    every = mstore.succeed("reflog").out
    assert "tiny/a@{0}" in every
    assert "v1@{0}" in every
    mstore.succeed("gc")
    mstore.succeed("reset", "tiny/a", "tiny/a@{1}")
    mstore.succeed("reset", "v1", "v1@{1}")
    assert mstore.succeed("refs", "-q").out.split() == ["tiny/a", "v1"]


def test_pruned_and_collected(mstore: Program, tmp_path: Path) -> None:
    """prune and gc say first what they would do, then do it; log marks what was pruned, and reading
    it ends in a clear error."""
    would = mstore.succeed("prune", "--keep-last", "1", "--dry-run").out
    assert "would prune 1 snapshot" in would
    assert "(pruned)" not in mstore.succeed("log").out
    told = mstore.succeed("prune", "--keep-last", "1").out
    assert f"mstore --store {mstore.store} gc --reflog-days 0" in told
    assert "their contents stay until gc" in told
    nothing = mstore.succeed("gc").out
    assert "nothing to collect" in nothing
    assert "what holds the rest (refs, lineage, reflogs, virtual merges): mstore " in nothing
    held = mstore.succeed("du").out
    assert "HELD BY" in held
    assert "reflogs: moves of the last 30 days" in held
    assert "would drop 0 snapshots" in mstore.succeed("gc", "-n", "--reflog-days", "0").out
    assert "dropped 0 snapshots" in mstore.succeed("gc", "--reflog-days", "0").out
    assert mstore.succeed("log").out.count("(pruned)") == 1
    assert "(pruned)" in mstore.succeed("log", "--graph").out
    assert "(pruned)" in mstore.succeed("show", "tiny/a~1").out
    assert "config.json" in mstore.succeed("ls", "tiny/a~1").out
    for line in (
        ("ls", "--tensors", "tiny/a~1"),
        ("checkout", "tiny/a~1", str(tmp_path / "out")),
        ("cat", "tiny/a~1:config.json"),
        ("diff", "tiny/a~1", "tiny/a"),
    ):
        done = mstore(*line)
        assert done.status == 1
        assert "its contents were pruned" in done.err
    mstore.succeed("fsck", "--read-data")
    assert mstore.succeed("gc", "-q").out == ""


@pytest.mark.rest
def test_what_gc_does_not_give_back_is_explained(mstore: Program, tmp_path: Path) -> None:
    """What stays dead is told with the word that frees it, and what a killed command left;
    joining small packs is not told as freeing."""
    mstore.succeed("config", "reflog_days", "0")
    for small in (1, 2):
        path = large_and_small(tmp_path / "in.safetensors", small)
        mstore.succeed("add", path, "--name", f"n{small}", "--base", "none")
    mstore.succeed("rm", "n1")
    (tmp_path / "store" / "tmp" / "dead").mkdir()
    (tmp_path / "store" / "tmp" / "dead" / "0.pack").write_bytes(bytes(3 << 20))
    assert "left by interrupted commands" in mstore.succeed("stats").out
    would = mstore.succeed("gc", "-n").out
    assert "1 file that interrupted commands left would be removed: 3.0 MiB" in would
    assert "would free nothing: no pack removed, none rewritten" in would
    assert "dead stay in packs of which less than 30 % is dead" in would
    assert f"mstore --store {mstore.store} gc --all" in mstore.succeed("gc").out
    assert "1 rewritten" in mstore.succeed("gc", "--all").out
    assert "nothing to collect" in mstore.succeed("gc", "--all").out
    for number in range(8):
        path = write(tmp_path / "in", 10 + number)
        mstore.succeed("add", str(path), "--name", f"s{number}", "--base", "none")
    joined = mstore.succeed("gc").out
    assert "small packs put together" in joined
    assert "dropped nothing" in joined
    assert "freed" not in joined


def test_what_gc_leaves_is_told_with_commands(mstore: Program) -> None:
    """A remark of the library names an operation, and gc prints the command for this store."""
    remark = phrase("pack x: damaged; next: {repair}", repair=call("repair"))
    with Store.open(mstore.store) as store:
        report = replace(store.gc(dry_run=True), left=(remark,))
    told = io.StringIO()
    _print(Screen(told, lambda text: as_phrase(text).spelled(Typed(mstore.store))), report)
    command = f"mstore --store {mstore.store} fsck --repair"
    assert f"left: pack x: damaged; next: {command}" in told.getvalue().splitlines()
