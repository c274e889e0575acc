"""Nodes of ComfyUI that load models from an mstore store: without a checkout, a copy or a mount.

Copy or link this directory into ComfyUI's `custom_nodes`, and install mstore into its environment.
A node takes the directory of a store and a ref (REF or REF:MODEL), and hands the tensors to the
loaders of ComfyUI as a state dict.  A virtual merge is computed meanwhile.  A node runs again when
its ref has moved.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from mstore import MstoreError, Store

CATEGORY = "mstore"
_STORE = ("STRING", {"default": os.environ.get("MSTORE_STORE", "")})
_REF = ("STRING", {"default": ""})
_STRENGTH = ("FLOAT", {"default": 1.0, "min": -100.0, "max": 100.0, "step": 0.01})


@lru_cache(maxsize=8)
def _opened(directory: str) -> Store:
    # It stays open, for the next model.
    return Store.open(directory)


def state_dict(store: str, ref: str) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the torch tensors of a model by name, and the metadata of its file if it is one.

    Raises what `Store.open` and `Snapshot.load_torch` raise.
    """
    name, _, model = ref.partition(":")
    snapshot = _opened(str(Path(store).expanduser()))[name]
    with snapshot.safe_open() as opened:
        metadata = opened.metadata()
    return snapshot.load_torch(model=model or None), metadata


class _StoreNode:
    """What all nodes share: inputs that say which model of which store."""

    CATEGORY = CATEGORY
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:  # noqa: N802, ComfyUI's name
        return {"required": {"store": _STORE, "ref": _REF}}

    @classmethod
    def IS_CHANGED(cls, store: str, ref: str, **_: object) -> str:  # noqa: N802
        """Return the id of the snapshot: ComfyUI runs the node again when it is another one."""
        return str(_opened(str(Path(store).expanduser()))[ref.partition(":")[0]].id)

    @classmethod
    def VALIDATE_INPUTS(cls, store: str, ref: str) -> bool | str:  # noqa: N802
        """Return why the inputs are wrong, before anything runs."""
        try:
            _opened(str(Path(store).expanduser()))[ref.partition(":")[0]].models()
        except MstoreError as error:
            return str(error)
        return True


class CheckpointFromStore(_StoreNode):
    """Loads a checkpoint: diffusion model, text encoders and VAE."""

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")

    def load(self, store: str, ref: str) -> tuple[Any, ...]:
        import comfy.sd
        import folder_paths

        tensors, metadata = state_dict(store, ref)
        found = comfy.sd.load_state_dict_guess_config(
            tensors,
            output_vae=True,
            output_clip=True,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            metadata=metadata,
        )
        if found is None:
            raise RuntimeError(f"ComfyUI knows no model of this kind: {ref} of {store}")
        return tuple(found[:3])


class DiffusionModelFromStore(_StoreNode):
    """Loads a diffusion model that is alone in its file, as those of Flux often are."""

    RETURN_TYPES = ("MODEL",)

    def load(self, store: str, ref: str) -> tuple[Any, ...]:
        import comfy.sd

        tensors, metadata = state_dict(store, ref)
        found = comfy.sd.load_diffusion_model_state_dict(tensors, metadata=metadata)
        if found is None:
            raise RuntimeError(f"ComfyUI knows no diffusion model of this kind: {ref} of {store}")
        return (found,)


class LoraFromStore(_StoreNode):
    """Applies a LoRA to a model and its text encoders."""

    RETURN_TYPES = ("MODEL", "CLIP")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:  # noqa: N802
        more = {"strength_model": _STRENGTH, "strength_clip": _STRENGTH}
        own = {"model": ("MODEL",), "clip": ("CLIP",), "store": _STORE, "ref": _REF}
        return {"required": {**own, **more}}

    def load(
        self,
        model: Any,
        clip: Any,
        store: str,
        ref: str,
        strength_model: float,
        strength_clip: float,
    ) -> tuple[Any, ...]:
        import comfy.sd

        tensors, _ = state_dict(store, ref)
        return tuple(
            comfy.sd.load_lora_for_models(model, clip, tensors, strength_model, strength_clip)
        )


NODE_CLASS_MAPPINGS = {
    "MstoreCheckpoint": CheckpointFromStore,
    "MstoreDiffusionModel": DiffusionModelFromStore,
    "MstoreLora": LoraFromStore,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "MstoreCheckpoint": "Load Checkpoint (mstore)",
    "MstoreDiffusionModel": "Load Diffusion Model (mstore)",
    "MstoreLora": "Load LoRA (mstore)",
}
