"""What the commands that only look import: each module is time before the first line."""

from __future__ import annotations

import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from cli_runs import Program

# The parser of command lines, index, hashes, and records with what they import themselves.
PACKAGES = {"blake3", "click", "lmdb", "msgspec", "typing_extensions"}
MODULES = {
    "mstore": "fs snapshots store terms",
    "mstore.snapshots": "lineage notes",
    "mstore.terms": "errors ids phrases report sizes",
    "mstore.api": (
        "adding assembling exchanging exporting judging keeping merging naming open_store reading "
        "searching "
        "snapshot"
    ),
    "mstore.blocks": (
        "codecs index lmdb_check lmdb_copy lmdb_env lmdb_files lmdb_pages lmdb_table "
        "lmdb_types location meter pack_files pack_store packs reader schema tables"
    ),
    "mstore.checkpoint": "dtypes models origin paths",
    "mstore.fs": "disks files locks rights roots trees",
    "mstore.store.objects": "canonical manifest note plan snapshot tensor",
    "mstore.store": (
        "catalog config contents generation layout leaning leases listing mirror models not_finite "
        "objects pack_list payloads refs remembered sealed_text"
    ),
    "mstore_cli": (
        "command commands completion errors graph main options output session signers sizes "
        "spelling tables tree verbs"
    ),
}
LOOKING = {"refs": ("refs",), "log": ("log",), "show": ("show", "m"), "ls": ("ls", "m")}
# Standard libraries that take milliseconds, and that none of the packages above needs.
SLOW = {"asyncio", "logging", "multiprocessing", "tomllib"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store with a base, an expert, and their merge `m`."""
    root = tmp_path_factory.mktemp("start")
    mstore = Program(root / "store")
    mstore.succeed("init")
    for name, value in (("base", 1.0), ("expert", 2.0)):
        content = struct.pack("<4f", *[value] * 4)
        write_safetensors(root / name / "model.safetensors", [("t", "F32", (4,), content)])
        mstore.succeed("add", root / name, "--name", name)
    mstore.succeed(
        "merge", "--base", "base", "--expert", "expert", "--method", "linear", "--name", "m"
    )
    return mstore


@cache
def imported(*arguments: str | Path) -> set[str]:
    """Every module that the program has loaded when a command ends, and Python alone has not."""
    script = (
        "import sys; before = {*sys.modules}; from mstore_cli.main import run\n"
        "status = run(sys.argv[1:])\n"
        "sys.stderr.write(' '.join({*sys.modules} - before)); sys.exit(status)"
    )
    line = [sys.executable, "-c", script, *(str(one) for one in arguments)]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    assert done.stdout
    return set(done.stderr.split())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", LOOKING)
def test_looking_imports_only_what_it_uses(command: str, store: Program) -> None:
    """refs, log, show and ls import their own module and those listed here, and nothing else."""
    found = imported("--store", store.store, *LOOKING[command])
    # Python's own module of build settings has the platform in its name.
    top = {name.partition(".")[0] for name in found if not name.startswith("_sysconfigdata")}
    own = {
        *MODULES,
        *(f"{package}.{name}" for package in MODULES for name in MODULES[package].split()),
    }
    assert {name for name in found if name.startswith("mstore")} - own == {
        f"mstore_cli.commands.{command}"
    }
    assert top - sys.stdlib_module_names - {"mstore", "mstore_cli"} <= PACKAGES
    assert found & SLOW == set()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", LOOKING)
def test_json_imports_no_more(command: str, store: Program) -> None:
    """With --json, they import no more of the library."""
    words = ("--store", store.store, *LOOKING[command])
    both = imported(*words, "--json"), imported(*words)
    of_library = [{name for name in found if name.startswith("mstore.")} for found in both]
    assert of_library[0] == of_library[1]


# What merges by options do not need: each is milliseconds.
NOT_FOR_A_MERGE = {
    *("mstore.snapshots.add", "mstore.models.scales", "mstore.models.stats.analysis"),
    *("mstore.checkpoint.directory", "mstore.checkpoint.header", "mstore.checkpoint.tree"),
    *("mstore.merge.methods.spherical", "mstore.merge.measures.facts"),
    *("mstore.merge.planning.recipes", "mstore.merge.planning.stack", "mstore.merge.recipes.parse"),
    "tomllib",
}


def test_a_merge_imports_only_what_it_uses(store: Program, tmp_path: Path) -> None:
    """A merge of a model with statistics imports its method, and no reader of other inputs."""
    content = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)
    write_safetensors(tmp_path / "model.safetensors", [("t", "F32", (4,), content)])
    store.succeed("add", tmp_path, "--base", "base", "--name", "tuned")
    words = ("--base", "base", "--expert", "tuned", "--method", "ties", "--name", "n")
    found = imported("--store", store.store, "merge", *words)
    assert "mstore.merge.methods.sums" in found
    assert found & NOT_FOR_A_MERGE == set()
