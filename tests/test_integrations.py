"""Models of transformers from a store, without files: what transformers makes of the directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_safetensors
from later import Later

from mstore import Store
from mstore.api.integrations.pretrained import from_pretrained
from mstore.api.load import TensorSlice
from mstore.store import leases
from mstore.terms.errors import BadRequest, Corrupt, NotFound

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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_the_model_of_the_directory(store: Store, name: str) -> None:
    """Class, parameters, types and outputs are those of the directory, bit for bit."""
    kind = getattr(transformers, models()[name][0])
    theirs = kind.from_pretrained(store.path.parent / name, dtype=torch.bfloat16)
    ours = from_pretrained(kind, store[name], dtype=torch.bfloat16)
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


def changed(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Configs with infinities, as JSON spells them and as transformers does; and without a type."""
    plain = {key: value for key, value in config.items() if "dtype" not in key}
    limit = [0.0, float("inf")]
    return [
        config | {"time_step_limit": limit},
        config | {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
        plain,
    ]


def of_config(model: Any) -> dict[str, Any]:
    """What a model's config says, but for the place that it comes from."""
    return {**model.config.to_dict(), "_name_or_path": None}


@pytest.mark.sampled(17)
@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"output_attentions": True, "attn_implementation": "eager"},
        {"output_loading_info": True},
        {"num_hidden_layers": 1, "output_loading_info": True},
        {"dtype": "auto"},
        {"dtype": "float32"},
        {"torch_dtype": "float16"},
        {"subfolder": "part"},
        {"variant": "fp16"},
        {"config": {}},
        {"generation_config": 5},
        {"infinite": 0},
        {"infinite": 1},
        {"infinite": 2},
        {"labels": 5},
        {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}},
    ],
    ids=str,
)
def test_options(auto: bool, options: dict[str, Any], store: Store, tmp_path: Path) -> None:
    """Options and configs do what they do with the directory: model, config, settings, report."""
    folder = tmp_path / "m"
    shutil.copytree(store.path.parent / "tied", folder)
    given = dict(options)
    head = "LlamaForCausalLM"
    if "config" in given:
        given["config"] = transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=True)
    if "generation_config" in given:
        given["generation_config"] = transformers.GenerationConfig(max_new_tokens=5)
    if "subfolder" in given:
        folder.rename(tmp_path / "part")
        folder.mkdir()
        (tmp_path / "part").rename(folder / "part")
    if "variant" in given:
        (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    if "infinite" in given:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(changed(config)[given.pop("infinite")]))
    if "labels" in given:
        given["num_labels"] = given.pop("labels")
    if {"num_labels", "id2label"} & given.keys():
        head = "LlamaForSequenceClassification"
    kind = getattr(transformers, head.replace("Llama", "AutoModel", 1) if auto else head)
    store.add(folder, name="options", base=None)
    theirs, ours = (
        kind.from_pretrained(folder, **given),
        from_pretrained(kind, store["options"], **given),
    )
    if "output_loading_info" in given:
        assert ours[1] == theirs[1]
        ours, theirs = ours[0], theirs[0]
    assert type(ours) is type(theirs)
    assert of_config(ours) == of_config(theirs)
    assert ours.config._attn_implementation == theirs.config._attn_implementation
    mine, other = ours.state_dict(), theirs.state_dict()
    assert {n: (t.dtype, t.shape) for n, t in mine.items()} == {
        n: (t.dtype, t.shape) for n, t in other.items()
    }
    assert all(torch.equal(mine[name], other[name]) for name in mine if name != "score.weight")
    if ours.can_generate():
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def test_only_what_is_needed_is_read(store: Store, tmp_path: Path) -> None:
    """A damaged tensor that the model does not need is not read; one that it needs is Corrupt."""
    shutil.copytree(store.path.parent / "tied", tmp_path / "m")
    with Store.init(tmp_path / "store", block_size=1 << 16, codec="raw") as own:
        own.add(tmp_path / "m", name="m")
        opened = own["m"].safe_open("np", file="model.safetensors")
        lost = opened.get_tensor("model.layers.2.mlp.up_proj.weight").tobytes()
    (pack,) = [one for one in tmp_path.rglob("*.pack") if lost in one.read_bytes()]
    raw = bytearray(pack.read_bytes())
    raw[raw.index(lost)] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(raw)
    kind = transformers.LlamaForCausalLM
    with Store.open(tmp_path / "store") as own:
        assert len(from_pretrained(kind, own["m"], num_hidden_layers=2).model.layers) == 2
        with pytest.raises(Corrupt):
            from_pretrained(kind, own["m"])


def test_a_snapshot_is_held_while_its_model_is_made(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hold lasts from the config to the last tensor."""
    held = []
    read = TensorSlice.__getitem__

    def noting(part: TensorSlice, index: Any) -> Any:
        held.append(leases.holds(store._catalog.layout))
        return read(part, index)

    monkeypatch.setattr(TensorSlice, "__getitem__", noting)
    from_pretrained(transformers.AutoModelForCausalLM, store["tied"])
    assert held
    assert all(one == {store["tied"].id} for one in held)
    assert not leases.holds(store._catalog.layout)


def test_the_store_is_not_changed_by_training(store: Store) -> None:
    """Parameters are the model's own: training changes nothing of the store."""
    before = {name: array.tobytes() for name, array in store["sharded"].load().items()}
    model = from_pretrained(transformers.AutoModelForCausalLM, store["sharded"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert {name: array.tobytes() for name, array in store["sharded"].load().items()} == before


def test_what_is_refused(store: Store, tmp_path: Path) -> None:
    """No config, an unknown type, a class that has no such model, no such ref, another URL."""
    auto = transformers.AutoModelForCausalLM
    for name, config in (("none", None), ("odd", {"model_type": "odd"})):
        folder = tmp_path / name
        folder.mkdir()
        write_safetensors(folder / "model.safetensors", [("w", "BF16", (2,), bytes(4))])
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        store.add(folder, name=name)
    shutil.copytree(store.path.parent / "tied", tmp_path / "unnamed")
    (tmp_path / "unnamed" / "model.safetensors").rename(tmp_path / "unnamed" / "w.safetensors")
    shutil.copytree(store.path.parent / "tied", tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{")
    for name in ("unnamed", "broken"):
        store.add(tmp_path / name, name=name, base=None)
    for name, what in (
        ("none", r"no config\.json"),
        ("odd", "no models of type 'odd'"),
        ("bert-as-vision", "no model of type 'bert'"),
        ("broken", "not JSON"),
        ("unnamed", r"neither model\.safetensors nor model\.safetensors\.index\.json"),
    ):
        kind = transformers.AutoModelForImageClassification if "vision" in name else auto
        with pytest.raises(BadRequest, match=what):
            from_pretrained(kind, store[name.partition("-")[0]])
    with pytest.raises(BadRequest, match="neither"):
        from_pretrained(auto, store["tied"], variant="fp16")
    with pytest.raises(NotFound):
        from_pretrained(auto, f"mstore://missing?store={store.path}")
    for url in (str(store.path), "https://host/tied"):
        with pytest.raises(BadRequest, match="not a URL of one"):
            from_pretrained(auto, url)
    with pytest.raises(BadRequest, match="nothing else"):
        from_pretrained(auto, f"mstore://tied?stroe={store.path}")


def test_urls(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL names the same model as its snapshot, for Auto and for concrete classes; without a
    store it is that of the current directory."""
    theirs = from_pretrained(transformers.AutoModelForCausalLM, store["tied"]).state_dict()
    (tmp_path / ".mstore").symlink_to(store.path)
    monkeypatch.chdir(tmp_path)
    for kind in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        for url in (f"mstore://tied?store={store.path}", "mstore://tied", "mstore://tied@{0}"):
            ours = from_pretrained(kind, url).state_dict()
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_reads_files(store: Store) -> None:
    """A class of transformers that makes no model gets a directory without weights."""
    config = from_pretrained(transformers.AutoConfig, store["tied"])
    assert config.vocab_size == _LLAMA["vocab_size"]
