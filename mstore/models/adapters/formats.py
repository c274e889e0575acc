"""Formats of adapter files: what programs call the layers of a base, and the files that they read.

    peft        adapter_model.safetensors with PEFT's names, and adapter_config.json
    kohya       one file: lora_unet_..., lora_te_..., with `_` for `.`, and alpha
    diffusers   one file: unet...., transformer...., text_encoder...., and alpha

kohya's names are those of diffusers for Stable Diffusion 1.x and 2.x, and the authors' for SDXL and
Flux, as sd-scripts has them.  A product of one tensor of the base may be several layers of a
format, and products of several one layer; then the factors are put together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mstore.models.adapters.forms import stacked
from mstore.models.adapters.keys import DENOISER, TEXT, TEXT_2, TEXT_3
from mstore.models.adapters.modules import Modules, Place, named_modules
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.phrases import Option, few

Singles = npt.NDArray[np.float32]

PEFT, KOHYA, DIFFUSERS = "peft", "kohya", "diffusers"
FORMATS: Final = (PEFT, KOHYA, DIFFUSERS)

_AUTHORS: Final = re.compile(
    r"(input_blocks|middle_block|output_blocks|out|time_embed|label_emb|double_blocks|single_blocks"
    r"|img_in|txt_in|time_in|vector_in|guidance_in|final_layer|joint_blocks|x_embedder\.proj"
    r"|[ty]_embedder|blocks\.\d+\.((self|cross)_attn|ffn\.\d|norm3)|(time|text)_embedding\.\d"
    r"|time_projection|img_emb|head)(\.|$)"
)
_BLOCKS: Final = re.compile(r"(double_|joint_|(single_)?transformer_)?blocks\.\d")
_BLOCKS_OF_AUTHORS: Final = re.compile(r"(double|joint)_blocks\.|blocks\.\d+\.self_attn\.")
_UP: Final = re.compile(r"output_blocks\.(\d+)\.([12])\.conv$")
_PREFIXES: Final = {
    KOHYA: {DENOISER: "lora_unet_", TEXT_2: "lora_te2_", TEXT_3: "lora_te3_"},
    DIFFUSERS: {TEXT: "text_encoder.", TEXT_2: "text_encoder_2.", TEXT_3: "text_encoder_3."},
}
_ENDS: Final = {
    KOHYA: (".lora_down.weight", ".lora_up.weight", ".dora_scale"),
    DIFFUSERS: (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"),
}


class LayerProduct(NamedTuple):
    """A product of a tensor of the base.

    left: float32[rows, rank]. right: float32[rank, ...], as a convolution has it. scale: what the
    product is multiplied by. magnitude: float32[rows] for DoRA, else None.
    """

    left: Singles
    right: Singles
    scale: float
    magnitude: Singles | None = None

    @property
    def up(self) -> Singles:
        """Left, with as many dimensions as right: a convolution's factors are convolutions."""
        return self.left.reshape(*self.left.shape, *([1] * (self.right.ndim - 2)))


def require_format(format: str) -> None:
    """Raise BadRequest for a format that is none."""
    if format not in FORMATS:
        raise BadRequest(f"{format} is none of {', '.join(FORMATS)}", where=Option("format"))


class Keys:
    """What a format of one file calls the layers of a base.  shapes: of the base, by name."""

    def __init__(self, format: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._format = format
        self._modules: Modules = named_modules(shapes)
        second = ("conditioner.", "text_encoder_2:", "text_encoders.clip_g.")
        self._has_two = any(name.startswith(second) for name in shapes)
        paths = {path for model, path in self._modules if model == DENOISER}
        self._attended = {
            int(path.split(".")[1])
            for path in paths
            if re.match(r"up_blocks\.\d+\.attentions", path)
        }
        self._is_of_authors = any("output_blocks." in name for name in shapes)
        self._is_transformer = any(map(_BLOCKS.match, paths))
        self._has_authors = any(map(_BLOCKS_OF_AUTHORS.match, paths))
        # Modules of Wan and of Stable Diffusion 3 that diffusers calls as the authors do.
        self._same = {"patch_embedding", *({"context_embedder"} if "txt_in" not in paths else ())}
        self._is_xl = any(path.startswith(("label_emb.", "add_embedding.")) for path in paths)

    def named(self) -> set[str]:
        """Return the tensors of the base that the format has a name for, at least for rows."""
        return {
            place.tensor
            for (model, path), several in self._modules.items()
            if self._is_own(model, path)
            for places in several
            for place in places
        }

    def tensors(
        self, products: Mapping[str, LayerProduct], where: str
    ) -> dict[str, tuple[str, Singles]]:
        """Return the tensors of a file, by name: what each is (`factor`, `alpha`), its numbers.

        Raises Incompatible for a product of a tensor that the format has no name for.
        """
        found: dict[str, tuple[str, Singles]] = {}
        left_out = set(products)
        down_end, up_end, magnitude_end = _ENDS[self._format]
        # Some modules have two names of the same program.
        written: set[tuple[Place, ...]] = set()
        for (model, path), several in self._modules.items():
            if not self._is_own(model, path):
                continue
            for places in several:
                if places in written or not any(place.tensor in products for place in places):
                    continue
                left_out -= {place.tensor for place in places}
                written.add(places)
                key = self._key(model, path)
                product = _of_places(places, products)
                rank = len(product.right)
                found[key + down_end] = ("factor", product.right)
                up = product.up
                if self._format == KOHYA:
                    alpha = np.asarray(product.scale * rank, np.float32)
                    found[f"{key}.alpha"] = ("alpha", alpha)
                elif product.scale != 1:
                    # diffusers takes no file with alphas: they are as large as the rank.
                    up = np.float32(product.scale) * up
                found[key + up_end] = ("factor", up)
                if product.magnitude is not None:
                    ones = [1] * (product.right.ndim - 1)
                    shape = (-1, *ones) if self._format == KOHYA else (-1,)
                    found[key + magnitude_end] = ("factor", product.magnitude.reshape(shape))
        if left_out:
            raise Incompatible(
                f"the format {self._format} has no name for {few(sorted(left_out))}",
                where=where,
                hint=Option("format", PEFT),
            )
        return found

    def _is_own(self, model: str, path: str) -> bool:
        """Return whether a format calls a module so."""
        if model != DENOISER:
            is_layer = "text_model" in path or "text_projection" in path
            # No program trains embeddings.
            return is_layer and ".embeddings." not in path
        if path in self._same or (self._is_transformer and not self._has_authors):
            return True
        is_authors = _AUTHORS.match(path) is not None
        wants_authors = self._format == KOHYA and (self._is_xl or self._has_authors)
        if is_authors != wants_authors or path.startswith("text_model"):
            return False
        up = None if self._is_of_authors else _UP.fullmatch(path)
        # Of two names that an upsampler may have, that after the block's attention, if it has any.
        return up is None or (int(up[1]) // 3 in self._attended) == (up[2] == "2")

    def _key(self, model: str, path: str) -> str:
        if self._format == DIFFUSERS:
            denoiser = "transformer." if self._is_transformer else "unet."
            return _PREFIXES[DIFFUSERS].get(model, denoiser) + path
        text = "lora_te1_" if self._has_two or self._is_transformer else "lora_te_"
        return _PREFIXES[KOHYA].get(model, text) + path.replace(".", "_")


def _of_places(places: Sequence[Place], products: Mapping[str, LayerProduct]) -> LayerProduct:
    """Return the product of a module that is some rows of a tensor, or rows of several."""
    own = [(place, products[place.tensor]) for place in places if place.tensor in products]
    if len(own) == 1 and len(places) == 1:
        [(place, product)] = own
        if not place.rows:
            return product
        rows = slice(place.at, place.at + place.rows)
        magnitude = None if product.magnitude is None else product.magnitude[rows]
        return product._replace(left=product.left[rows], magnitude=magnitude)
    if any(product.magnitude is not None for _, product in own):
        raise Incompatible("DoRA of several tensors is no DoRA of one")
    parts = []
    for place, product in own:
        rows = slice(place.at, place.at + place.rows)
        parts.append((place.first, np.float32(product.scale) * product.left[rows], product.right))
    left, right = stacked(sum(place.rows for place in places), parts)
    return LayerProduct(left, right, 1.0)
