"""Models of transformers from a store, without files: what transformers makes of the directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_safetensors
from later import Later

from mstore import Store
from mstore.errors import BadRequest, NotFound, Unavailable
from mstore.integrations.transformers import from_pretrained

torch = Later("torch")
transformers = Later("transformers")

_LLAMA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def models() -> dict[str, tuple[str, Any, str]]:
    """Classes and configs: sharded, tied, of another architecture, without a head."""
    return {
        "sharded": ("AutoModelForCausalLM", transformers.LlamaConfig(**_LLAMA), "20KB"),
        "tied": (
            "AutoModelForCausalLM",
            transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=True),
            "1GB",
        ),
        "gpt2": (
            "GPT2LMHeadModel",
            transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32),
            "1GB",
        ),
        "bert": (
            "AutoModel",
            transformers.BertConfig(
                vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                intermediate_size=48,
            ),
            "1GB",
        ),
    }  # fmt: skip


NAMES = ("sharded", "tied", "gpt2", "bert")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("integrations")
    with Store.init(root / "store", block_size=1 << 16) as store:
        for name, (kind, config, shard) in models().items():
            torch.manual_seed(5)
            model = getattr(transformers, kind).from_config(config) if "Auto" in kind else None
            model = model or getattr(transformers, kind)(config)
            if name == "sharded":
                model.generation_config.max_new_tokens = 7
            model.to(torch.bfloat16).save_pretrained(root / name, max_shard_size=shard)
            store.add(root / name, name=name)
        yield store


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_model_of_the_directory(store: Store, name: str) -> None:
    """Class, parameters, types and outputs are those of the directory, bit for bit."""
    kind = getattr(transformers, models()[name][0])
    theirs = kind.from_pretrained(store.path.parent / name, dtype=torch.bfloat16)
    ours = from_pretrained(kind, store, name, dtype=torch.bfloat16)
    assert type(ours) is type(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert ours.state_dict()[key].dtype == value.dtype
        assert torch.equal(ours.state_dict()[key], value), key
    tokens = torch.arange(10).reshape(1, 10)
    with torch.inference_mode():
        assert torch.equal(ours(tokens)[0], theirs(tokens)[0])
    if name == "sharded":
        assert ours.generation_config.max_new_tokens == 7


def test_the_store_is_not_changed_by_training(store: Store) -> None:
    """Parameters are the model's own: training changes nothing of the store."""
    before = {name: array.tobytes() for name, array in store["sharded"].load().items()}
    model = from_pretrained(transformers.AutoModelForCausalLM, store, "sharded")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert {name: array.tobytes() for name, array in store["sharded"].load().items()} == before


def test_what_is_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No config, an unknown type, a class that has no such model, no such ref, no transformers."""
    auto = transformers.AutoModelForCausalLM
    for name, config in (("none", None), ("odd", {"model_type": "odd"})):
        folder = tmp_path / name
        folder.mkdir()
        write_safetensors(folder / "model.safetensors", [("w", "BF16", (2,), bytes(4))])
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        store.add(folder, name=name)
    for name, what in (
        ("none", r"no config\.json"),
        ("odd", "no models of type 'odd'"),
        ("bert-as-vision", "no model of type 'bert'"),
    ):
        kind = transformers.AutoModelForImageClassification if "vision" in name else auto
        with pytest.raises(BadRequest, match=what):
            from_pretrained(kind, store, name.partition("-")[0])
    with pytest.raises(NotFound):
        from_pretrained(auto, store, "missing")
    with pytest.raises(BadRequest, match="an open Store, not str"):
        from_pretrained(auto, str(store.path), "tied")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Unavailable) as refused:
        from_pretrained(auto, store, "tied")
    assert refused.value.hint == "pip install transformers"
