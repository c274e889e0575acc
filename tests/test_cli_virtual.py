"""`merge --virtual` and `materialize` on the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import families
import pytest
from cli_runs import Program

MERGE = (
    *("--base", "base", "--expert", "e0", "--expert", "e1=0.5", "--method", "ties"),
    *("--param", "density=0.4"),
)


def build(root: Path) -> None:
    """A store with a base and two experts."""
    families.layered(rows=100).write(root)
    mstore = Program(root / "store")
    mstore.succeed("init", "--block-size", "64KiB")
    mstore.succeed("add", root / "base", "--name", "base")
    for name in ("e0", "e1"):
        mstore.succeed("add", root / name, "--name", name, "--base", "base")


@pytest.fixture
def mstore(template: Path, tmp_path: Path) -> Program:
    """A copy of it, free to be changed."""
    return Program(Path(shutil.copytree(template / "store", tmp_path / "store")))


def test_from_plan_to_bytes(mstore: Program, tmp_path: Path) -> None:
    """merge --virtual, look, read, materialize: marked until it is stored, the same bytes."""
    made = mstore.succeed("merge", "--virtual", "--name", "m", *MERGE, "--json").document
    assert (made["virtual"], made["expert_bytes_read"], made["base_bytes_read"]) == (True, 0, 0)
    assert "merge ties, virtual" in mstore.succeed("log", "m").out
    assert "merge ties, virtual" in mstore.succeed("log", "m", "--graph").out
    assert "by merge ties, virtual" in mstore.succeed("show", "m").out
    assert mstore.succeed("show", "m", "--json").document["virtual"] is True
    mstore.succeed("merge", "--name", "real", *MERGE)
    listed = mstore.succeed("ls", "--tensors", "m").out
    assert listed == mstore.succeed("ls", "--tensors", "real").out
    for revision in ("m", "real"):
        mstore.succeed("checkout", revision, tmp_path / revision)
    assert families.contents(tmp_path / "m") == families.contents(tmp_path / "real")
    for path, content in families.contents(tmp_path / "real").items():
        assert mstore.succeed("cat", f"m:{path}").raw == content
    assert mstore.succeed("diff", "m", "real", "--json").document["blocks_changed"] == 0
    mstore.succeed("explain", "m")
    mstore.succeed("fsck", "--read-data")
    stored = mstore.succeed("materialize", "m", "--json").document
    assert stored["new_snapshot"]
    real = mstore.succeed("show", "real", "--json").document
    assert stored["manifest"] == real["manifest"]
    assert "virtual" not in mstore.succeed("log", "m", "-n", "1").out


def test_what_it_says(mstore: Program) -> None:
    """For people: the merge names the next command; a second materialize has nothing to do."""
    said = mstore.succeed("merge", "--virtual", "--name", "m", *MERGE).out
    assert "virtual" in said
    assert "materialize m stores it" in said
    assert "nothing new" in mstore.succeed("merge", "--virtual", "--name", "m", *MERGE).out
    assert mstore.succeed("materialize", "m").out.startswith("materialized m ")
    assert "nothing to do" in mstore.succeed("materialize", "m").out
    assert "materialize: ties" in mstore.succeed("reflog", "m").out


def test_what_is_refused(mstore: Program) -> None:
    """A virtual merge as an input, and a tag that shall become real: exit 1 and a way out."""
    mstore.succeed("merge", "--virtual", "--name", "m", *MERGE)
    mstore.succeed("tag", "v1", "m")
    for line in (
        ("plan", "--base", "m", "--expert", "e0", "--method", "linear"),
        ("replay", "m"),
    ):
        refused = mstore(*line)
        assert (refused.status, refused.out) == (2, "")
        assert "materialize m\n" in refused.err
    refused = mstore("materialize", "v1")
    assert refused.status == 1
    assert "reset NAME v1" in refused.err
