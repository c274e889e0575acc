"""`pin`, `unpin` and `checkout --reflink` on the command line."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
from cli_runs import Program
from small_models import files_of


@pytest.fixture
def mstore(tmp_path: Path) -> Program:
    """A dense store of a base and an expert."""
    families.layered(rows=40).write(tmp_path)
    mstore = Program(tmp_path / "store")
    mstore.succeed("init", "--block-size", "64KiB", "--codec", "dense")
    mstore.succeed("add", tmp_path / "base", "--name", "m/base")
    mstore.succeed("add", tmp_path / "e0", "--name", "m/e0", "--base", "m/base")
    return mstore


def test_a_pin_and_back(mstore: Program) -> None:
    """pin says how large the blocks were and are, refs and show say what is pinned, unpin undoes
    it; a second unpin is an error that says where to look."""
    done = mstore.succeed("pin", "m/e0", "--raw")
    assert "pinned" in done.lines[0]
    assert done.lines[-1].startswith("to free what they replace: ")
    assert [one["pinned"] for one in mstore.succeed("refs", "--json").document["refs"]] == [
        False,
        True,
    ]
    assert "pinned    raw" in mstore.succeed("show", "m/e0").lines
    assert "pinned" not in mstore.succeed("show", "m/base").out
    again = mstore.succeed("pin", "m/e0", "--raw")
    assert "0 copied" in again.out
    assert "free" not in again.out
    assert mstore.succeed("unpin", "m/e0").lines[0].startswith("unpinned ")
    refused = mstore("unpin", "m/e0")
    assert refused.status == 2
    assert "not pinned" in refused.err
    assert " refs says which" in refused.err


@pytest.mark.rest
def test_a_merge_that_is_only_tried_is_not_compressed(mstore: Program) -> None:
    """merge --codec raw writes the blocks as they are, and pin and unpin compress them; another
    word is refused."""
    words = ("merge", "--base", "m/base", "--method", "task_arithmetic", "--expert")
    refused = mstore(*words, "m/e0=0.5", "--name", "m/try", "--codec", "zip")
    assert refused.status == 2
    assert "auto" in refused.err
    loose = mstore.succeed(*words, "m/e0=0.5", "--name", "m/try", "--codec", "raw", "--json")
    packed = mstore.succeed(*words, "m/e0=0.25", "--name", "m/kept", "--json")
    written, least = (one.document["bytes_written"] for one in (loose, packed))
    assert written > 2 * least
    mstore.succeed("pin", "m/try", "--raw")
    coded = mstore.succeed("unpin", "m/try", "--json").document
    assert coded["bytes_before"] - coded["bytes_after"] > written / 2


def test_raw_has_to_be_said(mstore: Program) -> None:
    """Without --raw, pin changes nothing, and its hint is the command with it."""
    refused = mstore("pin", "m/e0")
    assert refused.status == 2
    assert "pin m/e0 --raw" in refused.err
    assert not mstore.succeed("show", "m/e0", "--json").document["pinned"]


def test_reflink_has_the_words_of_cp(mstore: Program, tmp_path: Path) -> None:
    """--reflink always says what to do where blocks are not raw."""
    refused = mstore("checkout", "m/e0", tmp_path / "out", "--reflink", "always")
    assert refused.status == 2
    assert "--raw" in refused.err
    assert "--reflink auto" in refused.err
    wrong = mstore("checkout", "m/e0", tmp_path / "out", "--reflink=sometimes")
    assert "auto, always, never" in wrong.err
    for word in ("auto", "never"):
        done = mstore.succeed(
            *("checkout", "m/e0", tmp_path / word, f"--reflink={word}", "--json")
        ).document
        assert done["bytes_shared"] == 0 or word == "auto"
        assert files_of(tmp_path / word) == files_of(tmp_path / "e0")
