"""The nodes of ComfyUI, with stand-ins of what ComfyUI gives them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import BLOCK

from mstore import MergeRequest, Store

NODES = Path(__file__).parent.parent / "integrations" / "comfyui" / "__init__.py"
NAMES = ("model.diffusion_model.out.2.weight", "first_stage_model.encoder.conv_in.weight")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with a base, a fine-tune, a virtual merge, and a LoRA."""
    draw = np.random.default_rng(2)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", "a"):
            tensors = {one: draw.normal(size=(16, 16)).astype("f4") for one in NAMES}
            save_file(tensors, tmp_path / f"{name}.safetensors", {"modelspec.title": name})
            store.add(tmp_path / f"{name}.safetensors", name=name)
        request = MergeRequest(base="base", experts={"a": 0.5}, method="task_arithmetic")
        store.merge(store.plan(request), name="mix", virtual=True)
        key = "lora_unet_output_blocks_2_1_proj"
        lora = {
            f"{key}.lora_down.weight": draw.normal(size=(2, 16)).astype("f4"),
            f"{key}.lora_up.weight": draw.normal(size=(16, 2)).astype("f4"),
        }
        save_file(lora, tmp_path / "lora.safetensors")
        store.add(tmp_path / "lora.safetensors", name="lora")
    return tmp_path / "store"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package as ComfyUI loads it: as a file, beside modules of its own."""
    pytest.importorskip("torch")
    comfy, sd, paths = ModuleType("comfy"), ModuleType("comfy.sd"), ModuleType("folder_paths")
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def stand_in(name: str, result: object) -> None:
        def call(*given: Any, **named: Any) -> object:
            calls.append((name, given, named))
            return result

        setattr(sd, name, call)

    stand_in("load_state_dict_guess_config", ("model", "clip", "vae", "vision"))
    stand_in("load_diffusion_model_state_dict", "model")
    stand_in("load_lora_for_models", ("model+", "clip+"))
    comfy.sd = sd  # type: ignore[attr-defined]
    paths.get_folder_paths = lambda kind: [f"/{kind}"]  # type: ignore[attr-defined]
    for module in (comfy, sd, paths):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("mstore_comfyui", NODES)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.calls = calls  # type: ignore[attr-defined]
    yield loaded
    loaded._opened.cache_clear()


def test_nodes_have_what_comfyui_asks_for(nodes: Any) -> None:
    """Each node names its inputs, its results, the method that runs, and a title."""
    assert nodes.NODE_CLASS_MAPPINGS.keys() == nodes.NODE_DISPLAY_NAME_MAPPINGS.keys()
    for node in nodes.NODE_CLASS_MAPPINGS.values():
        inputs = node.INPUT_TYPES()["required"]
        assert {"store", "ref"} <= inputs.keys()
        assert all(isinstance(kind, str) for kind, *_ in inputs.values())
        assert isinstance(node.RETURN_TYPES, tuple)
        assert callable(getattr(node(), node.FUNCTION))
        assert node.CATEGORY == "mstore"


@pytest.mark.parametrize("ref", ["a", "mix"])
def test_a_checkpoint_is_handed_on(nodes: Any, directory: Path, ref: str, tmp_path: Path) -> None:
    """ComfyUI gets the tensors of the file, and what its header says, virtual or not."""
    node = nodes.NODE_CLASS_MAPPINGS["MstoreCheckpoint"]()
    assert node.load(store=str(directory), ref=ref) == ("model", "clip", "vae")
    [(name, (tensors,), named)] = nodes.calls
    assert name == "load_state_dict_guess_config"
    assert named["embedding_directory"] == ["/embeddings"]
    assert named["output_vae"]
    assert named["output_clip"]
    with Store.open(directory) as store:
        store.checkout(ref, tmp_path / "file.safetensors")
    wanted = load_file(tmp_path / "file.safetensors")
    assert tensors.keys() == wanted.keys()
    assert all(np.array_equal(tensors[key].numpy(), wanted[key]) for key in wanted)
    assert ("sd_merge_recipe" in named["metadata"]) == (ref == "mix")


def test_a_diffusion_model_and_a_lora(nodes: Any, directory: Path) -> None:
    """The other nodes call the loaders for these."""
    alone = nodes.NODE_CLASS_MAPPINGS["MstoreDiffusionModel"]()
    assert alone.load(store=str(directory), ref="base") == ("model",)
    lora = nodes.NODE_CLASS_MAPPINGS["MstoreLora"]()
    given = {"strength_model": 0.5, "strength_clip": 0.25}
    made = lora.load(model="m", clip="c", store=str(directory), ref="lora", **given)
    assert made == ("model+", "clip+")
    name, (model, clip, tensors, *strengths), _ = nodes.calls[-1]
    assert (name, model, clip, strengths) == ("load_lora_for_models", "m", "c", [0.5, 0.25])
    assert all(key.startswith("lora_unet_") for key in tensors)


def test_a_node_runs_again_when_its_ref_moved(nodes: Any, directory: Path) -> None:
    """What ComfyUI compares is the snapshot's id."""
    node = nodes.NODE_CLASS_MAPPINGS["MstoreCheckpoint"]
    before = node.IS_CHANGED(store=str(directory), ref="a")
    assert node.IS_CHANGED(store=str(directory), ref="a") == before
    with Store.open(directory) as store:
        store.reset("a", "base")
    assert node.IS_CHANGED(store=str(directory), ref="a") != before


def test_wrong_inputs_are_told_before_anything_runs(
    nodes: Any, directory: Path, tmp_path: Path
) -> None:
    """An unknown ref and a directory without a store are texts for the user."""
    check = nodes.NODE_CLASS_MAPPINGS["MstoreCheckpoint"].VALIDATE_INPUTS
    assert check(store=str(directory), ref="a") is True
    assert "nothing" in check(store=str(directory), ref="nothing")
    assert "store" in check(store=str(tmp_path / "missing"), ref="a")
