"""Several forms of one model in a directory: what transformers writes and reads is what is merged.

The models are tiny ones of transformers.  What a merge should hold is computed by torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generated import BLOCK, Tensors
from safetensors.torch import load_file, save_file

from mstore import MergeRequest, Store

WEIGHTS = (0.25, 0.75)
Experts = tuple[str, str]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        yield store


def tuned(model: torch.nn.Module, seed: int) -> None:
    """Move every weight a little."""
    generator = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        value.data += 0.01 * torch.randn(value.shape, generator=generator)


def mean(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """The weighted mean of two experts."""
    total = (one.double() * WEIGHTS[0]).float()
    return (total.double() + two.double() * WEIGHTS[1]).float().to(one.dtype)


def merged(store: Store, base: str = "base") -> tuple[str, ...]:
    """Merge `one` and `two`; return the kinds of warnings."""
    experts = [("one", WEIGHTS[0]), ("two", WEIGHTS[1])]
    plan = store.plan(MergeRequest(base=base, experts=experts, method="linear"))
    store.merge(plan, name="merged")
    return tuple(one.kind for one in plan.warnings)


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    """Both have the same tensors, bit for bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].contiguous().view(torch.uint8), value.view(torch.uint8)), (
            name
        )


def weights_in(folder: Path, files: str) -> Tensors:
    """The tensors of all files of a directory that have such a name."""
    paths = sorted(folder.glob(files))
    assert paths
    return {name: value for path in paths for name, value in load_file(path).items()}


# -- variants ------------------------------------------------------------------------------------


def whisper() -> Any:
    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=300,
        num_mel_bins=8,
        max_source_positions=40,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def write_both(model: Any, folder: Path, *, shard: str = "50GB") -> None:
    """Save a model and its variant in half precision."""
    model.save_pretrained(folder, max_shard_size=shard)
    half = whisper()
    half.load_state_dict(model.state_dict())
    half.half().save_pretrained(folder, variant="fp16", max_shard_size=shard)


@pytest.mark.parametrize("shard", ["50GB", "60KB"])
def test_a_variant_is_merged_in_its_own_type(store: Store, tmp_path: Path, shard: str) -> None:
    """transformers loads the merge of both files, `variant="fp16"` that of the fp16 ones, and each
    is the mean that torch computes in this type."""
    torch.manual_seed(3)
    model = whisper()
    for number, name in enumerate(("base", "one", "two")):
        tuned(model, number)
        write_both(model, tmp_path / name, shard=shard)
        store.add(tmp_path / name, name=name, base="base" if number else None)
    assert store["base"].models() == ["", "@fp16"]
    assert merged(store) == ()
    store.checkout("merged", tmp_path / "out")
    for variant, dtype in ((None, torch.float32), ("fp16", torch.float16)):
        one, two, found = (loaded(tmp_path / name, variant) for name in ("one", "two", "out"))
        assert {value.dtype for value in found.values()} == {dtype}
        assert_equal(found, {name: mean(one[name], two[name]) for name in one})
        again = store["merged"].load_torch(model="@fp16" if variant else "")
        assert_equal(again, {name: found[name] for name in again})


def loaded(folder: Path, variant: str | None) -> Tensors:
    dtype = torch.float16 if variant else torch.float32
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, variant=variant, dtype=dtype
    )
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_a_model_in_one_form_stands_for_the_other(store: Store, tmp_path: Path) -> None:
    """Fine-tunes with fp16 files alone are merged into a base of full precision, in its type."""
    torch.manual_seed(4)
    model = whisper()
    model.save_pretrained(tmp_path / "base")
    store.add(tmp_path / "base", name="base")
    for number, name in enumerate(("one", "two"), 1):
        tuned(model, number)
        half = whisper()
        half.load_state_dict(model.state_dict())
        half.half().save_pretrained(tmp_path / name, variant="fp16")
        store.add(tmp_path / name, name=name, base="base")
    merged(store)
    store.checkout("merged", tmp_path / "out")
    one, two = (loaded(tmp_path / name, "fp16") for name in ("one", "two"))
    wanted = {name: mean(one[name].float(), two[name].float()) for name in one}
    assert_equal(loaded(tmp_path / "out", None), wanted)


# -- a consolidated copy -------------------------------------------------------------------------

_RENAMED = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""What Mistral's own files call the tensors of transformers."""


def renamed(tensors: Tensors) -> Tensors:
    """The tensors by the names of a consolidated file."""
    found = {}
    for name, value in tensors.items():
        own = name
        for theirs, ours in _RENAMED.items():
            own = own.replace(theirs, ours)
        found[own] = value.clone()
    return found


def write_mistral(folder: Path, seed: int, *, consolidated: bool) -> None:
    """Save a fine-tune in shards with an index, and in one consolidated file beside them."""
    torch.manual_seed(5)
    config = transformers.MistralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=400,
    )
    model = transformers.MistralForCausalLM(config)
    tuned(model, seed)
    model.save_pretrained(folder, max_shard_size="50KB")
    shards = weights_in(folder, "model-*.safetensors")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    if consolidated:
        save_file(renamed(shards), folder / "consolidated.safetensors", metadata={"format": "pt"})
        (folder / "params.json").write_text(json.dumps({"dim": 32, "n_layers": 2}))


def write_mistrals(store: Store, root: Path, of: Callable[[str], bool]) -> None:
    for seed, name in enumerate(("base", "one", "two")):
        write_mistral(root / name, seed, consolidated=of(name))
        store.add(root / name, name=name, base="base" if seed else None)


def test_a_consolidated_copy_is_merged_beside_the_shards(store: Store, tmp_path: Path) -> None:
    """Where all have both forms, both are merged, and hold the same."""
    write_mistrals(store, tmp_path, lambda _: True)
    assert store["base"].models() == ["", "consolidated"]
    assert merged(store) == ()
    store.checkout("merged", tmp_path / "out")
    shards = weights_in(tmp_path / "out", "model-*.safetensors")
    one, two = (weights_in(tmp_path / name, "model-*.safetensors") for name in ("one", "two"))
    assert_equal(shards, {name: mean(one[name], two[name]) for name in one})
    assert_equal(weights_in(tmp_path / "out", "consolidated.safetensors"), renamed(shards))


@pytest.mark.parametrize("who", [{"base"}, {"base", "one"}])
def test_a_consolidated_copy_that_an_expert_lacks_is_left_out(
    store: Store, tmp_path: Path, who: set[str]
) -> None:
    """The result has no consolidated file, a warning says so, and transformers loads the rest."""
    write_mistrals(store, tmp_path, lambda name: name in who)
    assert "other models" in merged(store)
    store.checkout("merged", tmp_path / "out")
    assert not list((tmp_path / "out").glob("consolidated*"))
    one, two = (weights_in(tmp_path / name, "model-*.safetensors") for name in ("one", "two"))
    model = transformers.MistralForCausalLM.from_pretrained(tmp_path / "out")
    found = {name: value.detach() for name, value in model.state_dict().items()}
    assert_equal(found, {name: mean(one[name], two[name]) for name in one})
