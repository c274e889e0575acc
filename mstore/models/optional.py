"""Optional tensors: those that a model may lack, or have beside its weights, and be the same model.

Programs that save one model differ in them: buffers that code makes again, marks for loaders, and a
copy of the weights averaged over training.  Whatever else is missing is a part of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from mstore.checkpoint.models import name_in_model

_COUNTED: Final = frozenset({"I64", "BOOL"})
"""Types of positions, counters and masks; no format of quantized weights has them."""

_NAMES: Final = re.compile(
    # Stable Diffusion: weights averaged over training, and what was the loss of its VAE.
    r"model_ema\..*|first_stage_model\.loss\..*"
    # Its schedule of noise, which each loader computes.
    r"|(alphas|betas|logvar|posterior|sqrt|log_one_minus|lvlb)(_\w+)?|denoiser\.\w+"
    # Marks for ComfyUI and others: how to sample, not what to compute.
    r"|v_pred|ztsnr|edm_(mean|std)|edm_vpred\.sigma_(min|max)"
    # Buffers, where a program rounded them with the weights, and what only training reads.
    r"|(.*\.)?(position_ids|inv_freq|logit_scale)"
)


def is_optional(name: str, dtype: str) -> bool:
    """Return whether a model is the same with and without a tensor of this name and type."""
    return dtype in _COUNTED or _NAMES.fullmatch(name_in_model(name)) is not None


def optional_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
    """Return the tensors that only one of two models has, and may; given are types by name."""
    both = {**ours, **theirs}
    return {name for name in ours.keys() ^ theirs.keys() if is_optional(name, both[name])}
