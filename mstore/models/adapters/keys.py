"""Keys of adapters as programs for image models write them: which module, and which of its parts.

A key is a prefix that says which model the module is in, the module's path, and what the tensor is:

    lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight     kohya's sd-scripts
    lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha
    unet.down_blocks.0.attentions.0.proj_in.lora_A.weight             diffusers, with PEFT
    unet.mid_block.attentions.0...attn1.processor.to_q_lora.up.weight diffusers, before that
    diffusion_model.double_blocks.0.img_attn.qkv.lora_B.weight        ComfyUI, ai-toolkit
    lycoris_down_blocks_0_resnets_0_conv1.hada_w1_a                   LyCORIS
    double_blocks.0.processor.qkv_lora1.down.weight                   x-flux

kohya writes a path with `_` for `.`, so paths are compared in this form.  Reads no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from mstore.models.adapters.forms import FORMS

DENOISER: Final = "denoiser"
"""A UNet, or a transformer in its place."""
TEXT, TEXT_2, TEXT_3 = "text encoder", "text encoder 2", "text encoder 3"

_PREFIXES: Final[Mapping[str, str]] = {
    "lora_unet_": DENOISER,
    "lora_transformer_": DENOISER,
    "lycoris_": DENOISER,
    "lora_te1_": TEXT,
    "lora_te2_": TEXT_2,
    "lora_te3_": TEXT_3,
    "lora_te_": TEXT,
    "base_model.model.": DENOISER,
    "model.diffusion_model.": DENOISER,
    "diffusion_model.": DENOISER,
    "unet.": DENOISER,
    "transformer.": DENOISER,
    "text_encoder.": TEXT,
    "text_encoder_2.": TEXT_2,
    "text_encoder_3.": TEXT_3,
    "text_encoders.clip_l.transformer.": TEXT,
    "text_encoders.clip_g.transformer.": TEXT_2,
    "text_encoders.t5xxl.transformer.": TEXT_3,
}

_BEGINS: Final = tuple(_PREFIXES)

_DOWN, _UP, _MAGNITUDE, ALPHA = "down", "up", "magnitude", "alpha"
MAGNITUDE: Final = _MAGNITUDE
BIAS, SCALED_BIAS = "bias", "scaled bias"
"""Differences of the module's bias: as it is, and one that is scaled as the module's product."""
_OF_LYCORIS: Final = {
    part for form in FORMS.values() for part in form.parts if part.startswith(("hada_", "lokr_"))
}
_ENDS: Final[Mapping[str, str]] = {
    ".lora_down.weight": _DOWN,
    ".lora_up.weight": _UP,
    ".lora_mid.weight": "mid",
    ".lora_A.weight": _DOWN,
    ".lora_B.weight": _UP,
    ".lora_A.default.weight": _DOWN,
    ".lora_B.default.weight": _UP,
    ".lora.down.weight": _DOWN,
    ".lora.up.weight": _UP,
    "_lora.down.weight": _DOWN,
    "_lora.up.weight": _UP,
    ".lora_linear_layer.down.weight": _DOWN,
    ".lora_linear_layer.up.weight": _UP,
    ".alpha": ALPHA,
    ".dora_scale": _MAGNITUDE,
    ".lora_magnitude_vector": _MAGNITUDE,
    ".lora_magnitude_vector.weight": _MAGNITUDE,
    **{f".{part}": part for part in sorted(_OF_LYCORIS)},
    **{f".{part}": part for part in ("oft_blocks", "rescale", "on_input")},
    **{f".{part}.weight": part for part in ("a1", "a2", "b1", "b2")},
    ".diff": "diff",
    ".w_norm": "diff",
    ".diff_b": BIAS,
    ".b_norm": BIAS,
    ".lora_B.bias": SCALED_BIAS,
}
_STARTS: Final = (
    *(".lora_down.weight", ".lora_A.weight", ".lora_A.default.weight", ".lora.down.weight"),
    *("_lora.down.weight", ".lora_linear_layer.down.weight", ".hada_w1_a", ".lokr_w1"),
    *(".lokr_w1_a", ".w_norm", ".oft_blocks", ".on_input"),
)
"""Ends of which one shows that a file is an adapter."""

_UNKNOWN: Final[Mapping[str, str]] = {
    ".oft_diag": "OFT of this form",
    ".oft_R.weight": "OFT of PEFT without its config",
    ".boft_R": "BOFT",
    ".ia3_l": "IA3 of PEFT without its config",
    ".bm.weight": "GLoRA of Tucker's form",
    ".vera_lambda_b": "VeRA without its config",
    ".set_weight": "weights that replace others",
    ".reshape_weight": "weights of another shape",
}
"""Ends of kinds that mstore cannot apply, and what they are."""

_PROCESSOR: Final = re.compile(r"\.processor(?=[.]|$)")
_X_FLUX: Final = re.compile(r"\.processor\.(qkv|proj)_lora(\d?)$")


class Key(NamedTuple):
    """What a key says.

    model: DENOISER, ... path: the module's, with `_` for `.`. part: what of it. module: the path as
    it is written. end: how the key ends.
    """

    model: str
    path: str
    part: str
    module: str
    end: str


def starts_adapter(name: str) -> bool:
    """Return whether a tensor of this name is in adapters only."""
    return name.endswith(_STARTS) or (
        name.endswith((".diff", ".a1.weight")) and name.startswith(_BEGINS)
    )


def key_of(name: str) -> Key | None:
    """Return what a key says, None for one of no form that is known."""
    end = max((end for end in _ENDS if name.endswith(end)), key=len, default=None)
    if end is None:
        return None
    prefix = max((one for one in _PREFIXES if name.startswith(one)), key=len, default="")
    model = _PREFIXES.get(prefix, DENOISER)
    path = name.removesuffix(end)
    flux = _X_FLUX.search(path)
    if flux is not None:
        # x-flux: the first stream is that of the image, the second that of the text.
        stream = {"": "", "1": "img_attn.", "2": "txt_attn."}.get(flux[2])
        if stream is None:
            return None
        path = f"{path[: flux.start()]}.{stream}{flux[1]}"
    else:
        path = _PROCESSOR.sub("", path.removeprefix(prefix))
        if end.startswith("_lora") and path.endswith("to_out"):
            path += ".0"
    return Key(model, path.replace(".", "_"), _ENDS[end], path, end)


def kind_of(names: Iterable[str]) -> str | None:
    """Return what a kind is called that mstore cannot apply, None if these are none."""
    return next(
        (what for name in names for end, what in _UNKNOWN.items() if name.endswith(end)), None
    )
