"""Errors about damaged blocks name the ref, the file and the tensor."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_safetensors
from cli_runs import Program

from mstore import Store
from mstore.store.contents import place_of_damage
from mstore.terms.errors import Corrupt
from mstore.terms.ids import BlockId

MERGE = ["--base", "base", "--expert", "expert", "--method", "linear"]


def _model(path: Path, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(4096).astype("<f4")
    own = np.random.default_rng(7).standard_normal(4096).astype("<f4")
    tensors = [("same", "F32", (64, 64), own.tobytes()), ("mine", "F32", (4096,), values.tobytes())]
    write_safetensors(path / "model.safetensors", tensors)


@pytest.fixture
def damaged(tmp_path: Path) -> Program:
    """A store with a base and an expert, whose tensor `mine` no longer matches its id."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init", "--codec", "raw")
    for seed, name in enumerate(("base", "expert")):
        _model(tmp_path / name, seed)
        mstore.succeed("add", tmp_path / name, "--name", name, "--base", "none")
    mstore.succeed("merge", *MERGE, "--virtual", "--name", "virtual")
    with Store.open(mstore.store) as store:
        catalog = store._catalog
        tensor = catalog.tensor(store.view("expert").tensors["mine"])
        at = catalog.locate([tensor.block(0)])[0]
        pack = Path(catalog.packs.where(at.pack))
    pack.chmod(0o644)
    with pack.open("r+b") as file:
        file.seek(at.offset + 100)
        file.write(b"damaged")
    return mstore


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "line",
    [
        ["cat", "expert:model.safetensors"],
        ["checkout", "expert", "DIR"],
        ["merge", *MERGE, "--name", "merged"],
        ["plan", "--base", "expert", "--expert", "base", "--method", "linear"],
        ["analyze", "base", "--base", "expert"],
        ["cat", "virtual:model.safetensors"],
        ["materialize", "virtual"],
        ["blame", "virtual"],
    ],
    ids=lambda line: " ".join(line[:2]),
)
def test_errors_name_file_and_tensor(line: list[str], damaged: Program, tmp_path: Path) -> None:
    """Damage is reported with ref, file, tensor and block, and the next command."""
    done = damaged(*(str(tmp_path / "out") if word == "DIR" else word for word in line))
    assert done.status == 1
    assert "error: expert:model.safetensors, tensor mine, block " in done.err
    assert "fsck --read-data" in done.err
    assert "Traceback" not in done.err


def test_a_lost_pack_is_placed_too(damaged: Program, tmp_path: Path) -> None:
    """A missing pack is reported with the file and tensor that needed it."""
    with Store.open(damaged.store) as store:
        tensor = store._catalog.tensor(store.view("expert").tensors["mine"])
        lost = Path(store._catalog.packs.where(store._catalog.locate([tensor.block(0)])[0].pack))
    # The same block in a tensor of another shape, whose records lie in a pack of their own.
    values = np.random.default_rng(1).standard_normal(4096).astype("<f4")
    other = tmp_path / "other" / "model.safetensors"
    write_safetensors(other, [("reshaped", "F32", (64, 64), values.tobytes())])
    damaged.succeed("add", other.parent, "--name", "other", "--base", "none")
    lost.unlink()
    done = damaged("cat", "other:model.safetensors")
    assert "error: other:model.safetensors, tensor reshaped, block " in done.err
    assert "a pack that the index names is missing" in done.err


def test_a_block_of_none_of_them(damaged: Program) -> None:
    """A block that no file of the snapshots uses keeps its own error."""
    with Store.open(damaged.store) as store:
        ids = [store.show("expert").snapshot]
        error = Corrupt("x", where="block", block=BlockId.of(b"of nobody"))
        assert place_of_damage(store._catalog, ids, error) is None
        assert place_of_damage(store._catalog, ids, Corrupt("x", where="block")) is None


def test_the_block_comes_back_from_a_worker() -> None:
    """An error that another process raised still carries its block."""
    block = BlockId.of(b"x")
    error = pickle.loads(pickle.dumps(Corrupt("what", where="where", hint="hint", block=block)))
    assert (error.what, error.where, error.hint, error.block) == ("what", "where", "hint", block)
