"""`mstore doctor`: one command whose output belongs into a report of a bug."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_safetensors
from cli_runs import Program

from mstore.numeric.levels import runnable
from mstore.numeric.passes import Pass
from mstore.terms import __version__
from mstore.terms.errors import Unavailable


@pytest.fixture
def mstore(tmp_path: Path) -> Program:
    """A store with one branch, `secret`."""
    write_safetensors(tmp_path / "m" / "model.safetensors", [("t", "U8", (9,), bytes(9))])
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    mstore.succeed("add", tmp_path / "m", "--name", "secret")
    return mstore


def test_what_a_report_needs(mstore: Program) -> None:
    """Versions, the level of the kernels and quick facts of the store are told, and no names of
    models."""
    done = mstore("doctor", "--json")
    told = done.document
    assert (told["mstore"], told["packages"]["numpy"]) == (__version__, np.__version__)
    assert told["kernels"] in [level.name for level in runnable()]
    assert told["store"]["path"] == str(mstore.store)
    assert (told["store"]["refs"], told["store"]["snapshots"]) == (1, 1)
    assert told["store"]["filesystem"]
    assert (done.status, told["problems"]) == (0, [])
    shown = mstore("doctor").out
    assert f"mstore      {__version__}\n" in shown
    assert "secret" not in shown


def test_without_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a store the rest is told; a store that was named and is none is a problem."""
    done = Program(tmp_path / "none")("doctor", "--json")
    assert done.status == 1
    assert done.document["store"] is None
    assert (
        f"{tmp_path / 'none'}: no store here: there is no such directory"
        in done.document["problems"]
    )


def test_without_fuse(mstore: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FUSE the reason is told, and that is no problem."""
    monkeypatch.setattr(import_module("mstore_fuse.fuse_driver"), "DEVICE", tmp_path / "fuse")
    done = mstore.succeed("doctor", "--json")
    assert done.document["fuse"] == f"{tmp_path / 'fuse'}: this machine has no FUSE"


def test_what_does_not_work(mstore: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that cannot be loaded are a problem, which is told in words; the status is 1."""

    def refuse(self: Pass) -> None:
        raise Unavailable("compiled kernels cannot run here: forbidden")

    monkeypatch.setattr(Pass, "level", refuse)
    done = mstore("doctor")
    assert done.status == 1
    assert "kernels     none that run here\n" in done.out
    assert "problem: compiled kernels cannot run here: forbidden\n" in done.out


def test_nothing_slow_is_imported(mstore: Program) -> None:
    """The versions of packages are told without importing torch or transformers."""
    script = (
        "import sys; from mstore_cli.main import run; run(sys.argv[1:]); "
        "sys.stderr.write(' '.join(sys.modules))"
    )
    line = [sys.executable, "-c", script, "--store", str(mstore.store), "doctor"]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    assert {"torch", "transformers"}.isdisjoint(done.stderr.split())
