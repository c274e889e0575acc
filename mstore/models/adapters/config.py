"""The config of a PEFT adapter: what of it decides how its tensors change a base.

Owns which adapters mstore can apply; every other kind is refused by the name of its setting.  The
form is that of PEFT's `adapter_config.json` (LoRA: Hu et al. 2021, arXiv 2106.09685; rsLoRA:
Kalajdzievski 2023, arXiv 2312.03732; DoRA: Liu et al. 2024, arXiv 2402.09353).
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from mstore.models.adapters.patterns import Patterns
from mstore.terms.errors import Incompatible

CONFIG: Final = "adapter_config.json"
MAX_CONFIG: Final = 1 << 20
_MAX_PATTERNS: Final = 4096

# Initial values that are taken out of the base's weights: the adapter fits only that changed base.
_CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq", "orthogonal", "lora_ga")
_PLAIN_START: Final = ("gaussian", "eva")

# Settings that change what the tensors mean.
_UNSUPPORTED: Final = {
    "alora_invocation_tokens": "an adapter that acts on some tokens only",
    "arrow_config": "a mixture of adapters",
    "kasa_config": "KaSA",
    "layer_replication": "layers that are repeated",
    "lora_bias": "a bias of the adapter",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "parameters of mixtures of experts",
    "trainable_token_indices": "trainable tokens",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}


class _File(msgspec.Struct, frozen=True):
    """The keys that are read, with PEFT's defaults."""

    peft_type: str = ""
    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str | None = True
    ensure_weight_tying: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


class LoraConfig(msgspec.Struct, frozen=True):
    """How a LoRA adapter scales its products.

    rank, alpha: where no pattern names a module. rank_stabilized: divide by the root of the rank.
    transposed: weights lie as [inputs, outputs], so that products must be transposed. dora: rows
    have magnitudes of their own. tying: products of tied layers are one product.
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    transposed: bool
    dora: bool
    tying: bool
    ranks: Patterns[int]
    alphas: Patterns[float]

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product: alpha / rank, or alpha / sqrt(rank)."""
        rank = self.rank_of(module)
        alpha = self.alphas.value(module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's product."""
        return self.ranks.value(module, self.rank)


def parse_config(raw: bytes, where: str) -> LoraConfig:
    """Parse an adapter_config.json.  Raises Incompatible for what mstore cannot apply."""
    if len(raw) > MAX_CONFIG:
        raise Incompatible(f"{CONFIG} has more than {MAX_CONFIG} bytes", where=where)
    try:
        found = msgspec.json.decode(raw, type=_File)
        every: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Incompatible(f"{CONFIG} is not one of PEFT: {error}", where=where) from error
    if found.peft_type != "LORA":
        kind = found.peft_type[:40] or "unknown"
        raise Incompatible(
            f"an adapter of the kind {kind} (peft_type); mstore applies LORA", where=where
        )
    for key, what in _UNSUPPORTED.items():
        if every.get(key):
            raise Incompatible(f"cannot apply {what} ({key} in {CONFIG})", where=where)
    _require_plain_start(found.init_lora_weights, where)
    ranks, alphas = found.rank_pattern or {}, found.alpha_pattern or {}
    if len(ranks) + len(alphas) > _MAX_PATTERNS:
        raise Incompatible(f"{CONFIG} has more than {_MAX_PATTERNS} patterns", where=where)
    numbers = (found.lora_alpha, *alphas.values())
    if min(found.r, *ranks.values(), 1) < 1 or not all(map(math.isfinite, numbers)):
        raise Incompatible(f"a rank or an alpha in {CONFIG} is out of range", where=where)
    if found.use_dora and found.fan_in_fan_out:
        raise Incompatible("cannot apply DoRA to transposed weights (fan_in_fan_out)", where=where)
    return LoraConfig(
        rank=found.r,
        alpha=found.lora_alpha,
        rank_stabilized=found.use_rslora,
        transposed=found.fan_in_fan_out,
        dora=found.use_dora,
        tying=found.ensure_weight_tying,
        ranks=Patterns(ranks, where),
        alphas=Patterns(alphas, where),
    )


def named_base(raw: bytes | None) -> str | None:
    """Return what an adapter_config.json calls the adapter's base; None if it says nothing."""
    try:
        found = msgspec.json.decode(raw or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    name = found.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _require_plain_start(start: bool | str | None, where: str) -> None:
    if not isinstance(start, str) or start.lower() in _PLAIN_START:
        return
    if start.lower().startswith(_CHANGED_BASE):
        raise Incompatible(
            f"an adapter that began as {start[:40]} fits only the changed base that PEFT made for "
            "it, not the base itself",
            where=where,
            hint="save it again with PEFT's path_initial_model_for_weight_conversion",
        )
    raise Incompatible(
        f"mstore does not know init_lora_weights {start[:40]!r} ({CONFIG})", where=where
    )
