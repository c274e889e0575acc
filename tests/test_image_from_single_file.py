"""Files that a merge makes of single-file models: diffusers reads them as its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from small_models import BLOCK
from test_image_adapters import kohya, lora
from test_image_adapters_diffusers import pipeline, unet_layers, weights

from mstore import MergeRequest, Store
from mstore.models.adapters.modules import _unet_names

Array = npt.NDArray[np.float32]
PREFIX = "model.diffusion_model."
_OURS = re.compile(r"(down_blocks|up_blocks|mid_block|conv_|time_embedding|add_embedding)")


def unet_of_authors(found: Mapping[str, Array]) -> dict[str, Array]:
    """The UNet of diffusers by the names of its authors."""
    named = {}
    for full, values in found.items():
        path, _, end = full.removeprefix("unet:").rpartition(".")
        # The first of two: an upsampler follows attention only where there is one.
        own = min(one for one in _unet_names(path) if not _OURS.match(one))
        named[f"{PREFIX}{own}.{end}"] = values
    return named


@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_a_baked_file_is_what_diffusers_fuses(tmp_path: Path, kind: str) -> None:
    """A LoRA that is baked into one file is, as `from_single_file` reads it, the fused model.

    Not Flux: diffusers cuts its fused matrices at the sizes of the published model.
    """
    import diffusers

    rng = np.random.default_rng(4)
    pipe = pipeline(kind)
    pipe.save_pretrained(tmp_path / "pipe")
    before = {one: v for one, v in weights(pipe).items() if one.startswith("unet:")}
    named = unet_layers(before)
    parts: dict[str, Array] = {}
    for name in named:
        layer = lora(before[f"{name}.weight"].shape, rng)
        parts |= layer.named(kohya(name.partition(":")[2]))
    save_file(parts, tmp_path / "lora.safetensors")
    pipe.load_lora_weights(tmp_path / "lora.safetensors")
    pipe.fuse_lora(components=["unet"])
    pipe.unload_lora_weights()
    save_file(unet_of_authors(before), tmp_path / "base.safetensors")
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "base.safetensors", name="base")
        store.add(tmp_path / "lora.safetensors", name="lora", base="base")
        request = MergeRequest(base="base", experts=["lora"], method="task_arithmetic")
        store.merge(store.plan(request), name="baked")
        store.checkout("baked", tmp_path / "baked.safetensors")
    read = diffusers.UNet2DConditionModel.from_single_file(
        str(tmp_path / "baked.safetensors"),
        config=str(tmp_path / "pipe"),
        subfolder="unet",
        local_files_only=True,
    )
    changed = 0
    for name, values in read.state_dict().items():
        wanted = weights(pipe)[f"unet:{name}"]
        assert np.allclose(values.numpy(), wanted, rtol=1e-4, atol=1e-4), name
        changed += int((wanted != before[f"unet:{name}"]).any())
    assert changed == len(named)
