"""What mixtures of experts of dense models are called: tensors, entries of configs, and defaults.

Facts of transformers 5's configurations and of published checkpoints: the layout with a tensor for
each expert, which transformers, vLLM, SGLang and llama.cpp read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from mstore.terms.errors import BadRequest, Incompatible, did_you_mean

PARTS: Final = ("gate_proj", "up_proj", "down_proj")
"""The matrices of a dense MLP, `model.layers.N.mlp.PART.weight`."""

BIASES: Final = ("q_proj", "k_proj", "v_proj")
"""Projections that have a bias in Qwen2."""

DOWN: Final = "down_proj"

Fields = Mapping[str, Any]


class Architecture(msgspec.Struct, frozen=True):
    """One kind of mixture.

    name: as mergekit's `architecture` may begin. made_of: model_type of the dense models. back:
    model_type and class of what an expert is by itself. parts: what each matrix of an expert is
    called, by its name in a dense MLP. expert, router, shared, shared_router: names in a layer;
    the last two None where no expert is shared. has_biases: whether attention needs biases. counts:
    the entry of configs with the number of experts.
    """

    name: str
    model_type: str
    class_name: str
    made_of: tuple[str, ...]
    back: tuple[str, str]
    parts: Mapping[str, str]
    expert: str
    router: str
    counts: str
    shared: str | None = None
    shared_router: str | None = None
    has_biases: bool = False

    def expert_part(self, number: int, part: str) -> str:
        """Return the name in a layer of a matrix of an expert, without `.weight`."""
        return f"{self.expert}.{number}.{self.parts[part]}"

    def config(self, base: Fields, experts: int, per_token: int) -> dict[str, Any]:
        """Return the config of a mixture.  base: the config of the dense base."""
        dense = _with_defaults(base)
        inner = dense["intermediate_size"]
        fields = {
            **dense,
            "architectures": [self.class_name],
            "model_type": self.model_type,
            self.counts: experts,
            "num_experts_per_tok": per_token,
            "output_router_logits": False,
        }
        if self.counts == "num_local_experts":
            fields |= {"sliding_window": None}
        else:
            fields |= {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": inner,
                "norm_topk_prob": True,
            }
        if self.shared is not None:
            fields |= {
                "qkv_bias": True,
                "shared_expert_intermediate_size": inner,
                "sliding_window": None,
                "use_sliding_window": False,
            }
        # What another class of model reads of its own.
        for name in ("auto_map", "pretraining_tp", "mlp_bias"):
            fields.pop(name, None)
        return fields

    def dense_config(self, mixture: Fields) -> dict[str, Any]:
        """Return the config of one expert by itself, from that of a mixture."""
        model_type, class_name = self.back
        if model_type == "mistral" and "sliding_window" not in mixture:
            # A Mixtral has no window then, and a Mistral one of 4096 tokens; a Llama has none.
            model_type, class_name = "llama", "LlamaForCausalLM"
        fields = {**mixture, "architectures": [class_name], "model_type": model_type}
        inner = fields.get("moe_intermediate_size")
        if inner is not None:
            fields["intermediate_size"] = inner
        for name in (
            *(self.counts, "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
            *("router_jitter_noise", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"),
            *("moe_intermediate_size", "shared_expert_intermediate_size", "qkv_bias"),
        ):
            fields.pop(name, None)
        return fields


_LLAMA: Final = ("llama", "mistral")
_OWN: Final = {part: part for part in PARTS}

ARCHITECTURES: Final = (
    Architecture(
        name="mixtral",
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        made_of=_LLAMA,
        back=("mistral", "MistralForCausalLM"),
        parts={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
        expert="block_sparse_moe.experts",
        router="block_sparse_moe.gate.weight",
        counts="num_local_experts",
    ),
    Architecture(
        name="qwen moe",
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        made_of=(*_LLAMA, "qwen2"),
        back=("qwen2", "Qwen2ForCausalLM"),
        parts=_OWN,
        expert="mlp.experts",
        router="mlp.gate.weight",
        counts="num_experts",
        shared="mlp.shared_expert",
        shared_router="mlp.shared_expert_gate.weight",
        has_biases=True,
    ),
    Architecture(
        name="qwen3 moe",
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        made_of=("qwen3",),
        back=("qwen3", "Qwen3ForCausalLM"),
        parts=_OWN,
        expert="mlp.experts",
        router="mlp.gate.weight",
        counts="num_experts",
    ),
)

_REFUSED: Final = {
    "deepseek": "transformers 5 has no class for DeepSeek's first mixtures, and mergekit's need "
    "code of a remote repository"
}

_ATTENTION: Final = 32
_DEFAULTS: Final[Mapping[str, Fields]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "vocab_size": 151936},
    "qwen3": {"max_position_embeddings": 32768, "vocab_size": 151936, "head_dim": 128},
}
"""What a config means that does not say it; a mixture's config means something else."""


def _with_defaults(base: Fields) -> dict[str, Any]:
    """Return a dense config with all that it means; what it says keeps its place."""
    heads = base.get("num_attention_heads") or _ATTENTION
    is_llama = base.get("model_type") in _LLAMA
    meant = {
        "bos_token_id": 1 if is_llama else None,
        "eos_token_id": 2 if is_llama else None,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
        **_DEFAULTS[str(base.get("model_type"))],
    }
    if not any(name in base for name in ("rope_theta", "rope_parameters")):
        meant["rope_theta"] = 10000.0
    if "head_dim" not in meant and isinstance(base.get("hidden_size"), int):
        meant["head_dim"] = base["hidden_size"] // heads
    said = {name: one for name, one in base.items() if one is not None or name not in meant}
    return {**said, **{name: one for name, one in meant.items() if name not in said}}


def architecture_of(
    asked: str | None, types: Collection[str], shared: int, *, where: str
) -> Architecture:
    """Return the kind of mixture of dense models of these types, as mergekit-moe chooses.

    asked: how its name begins, None for any. shared: how many experts are shared. Raises BadRequest
    for a kind that is none, Incompatible for models that no kind is made of.
    """
    wanted = (asked or "").lower()
    for name, why in _REFUSED.items():
        if wanted and name.startswith(wanted):
            raise BadRequest(f"mixtures of this architecture are not made: {why}", where=where)
    named = [one for one in ARCHITECTURES if one.name.startswith(wanted)]
    if not named:
        names = [one.name for one in ARCHITECTURES]
        raise BadRequest(
            f"no architecture of mixtures is called {wanted[:40]!r}; there are {', '.join(names)}",
            where=where,
            hint=did_you_mean(wanted, names),
        )
    if len(set(types)) != 1:
        raise Incompatible(
            f"a mixture is made of models of one type, and these are {', '.join(sorted(types))}",
            where=where,
        )
    (only,) = set(types)
    fits = [one for one in named if only in one.made_of]
    if not fits:
        known = sorted({name for one in named for name in one.made_of})
        raise Incompatible(
            f"mixtures are made of {', '.join(known)}, and these models are {only}", where=where
        )
    found = [one for one in fits if shared == (0 if one.shared is None else 1)]
    if not found:
        needs = "exactly one shared expert" if fits[0].shared else "no shared expert"
        raise BadRequest(
            f"a {fits[0].name} has {needs}, and the recipe names {shared}",
            where=where,
            hint="a shared expert is one of a list:\nshared_experts:\n- source_model: MODEL"
            if fits[0].shared
            else None,
        )
    return found[0]


def mixture_of(config: Fields) -> Architecture | None:
    """Return the kind of mixture that a config is of, or None."""
    return next((one for one in ARCHITECTURES if one.model_type == config.get("model_type")), None)
