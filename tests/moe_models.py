"""Small dense models that become experts, and what transformers computes of a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(60))]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES | {"rope_theta": 20000.0}),
    "mistral": ("MistralConfig", SIZES),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}),
}
PROMPT = [[1, 5, 9, 20, 33, 7]]


def write(
    directory: Path,
    kind: str,
    seed: int,
    *,
    like: Path | None = None,
    dtype: str = "float32",
    shards: str = "1GB",
    **more: Any,
) -> Path:
    """A small model; `like` another, with other MLPs.  more: entries of its config."""
    import torch
    import transformers

    torch.manual_seed(seed)
    name, sizes = CONFIGS[kind]
    classes = transformers.AutoModelForCausalLM
    config = getattr(transformers, name)(**(sizes | more))
    model = classes.from_config(config, dtype=torch.float32)
    if like is not None:
        other = classes.from_pretrained(like, dtype=torch.float32).state_dict()
        own = model.state_dict()
        model.load_state_dict({k: v if ".mlp." in k else other[k] for k, v in own.items()})
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shards)
    return directory


def with_words(directory: Path, words: Sequence[str] = WORDS) -> Path:
    """The same model with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    return directory


def logits(directory: Path, tokens: Sequence[Sequence[int]] = PROMPT) -> Any:
    """What transformers computes in float32, with no weight missing or left over."""
    import torch
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not told[key], (key, told[key])
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()
