"""examples/family.py: what it writes is a real family, as transformers and its users have them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from family_fixture import demo, family
from hypothesis import given
from hypothesis import strategies as st
from later import Later

pytestmark = pytest.mark.rest

pytest_plugins = ["family_fixture"]

torch = Later("torch")
transformers = Later("transformers")


def raw_tensors(checkpoint: Path) -> dict[str, tuple[str, bytes]]:
    """Return name -> (dtype, bytes) of every tensor, read without the safetensors library."""
    found = {}
    for shard in checkpoint.glob("*.safetensors"):
        data = shard.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (entry["dtype"], data[start + begin : start + end])
    return found


def test_members_are_sharded_checkpoints(quick_family: family.Family) -> None:
    """Every member has three bf16 shards, an index with metadata, config and tokenizer."""
    for checkpoint in (quick_family.base, *quick_family.experts.values()):
        shards = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
        others = {"model.safetensors.index.json", "config.json", "generation_config.json"}
        tokenizer = {"tokenizer.json", "tokenizer_config.json"}
        assert {path.name for path in checkpoint.iterdir()} == shards | others | tokenizer
        index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
        tensors = raw_tensors(checkpoint)
        assert index["metadata"]["total_size"] == sum(len(data) for _, data in tensors.values())
        assert set(index["weight_map"]) == set(tensors)
        assert set(index["weight_map"].values()) == shards
        assert {dtype for dtype, _ in tensors.values()} == {"BF16"}


def test_tokenizer_keeps_every_text(quick_family: family.Family) -> None:
    """The tokenizer on disk turns any text into its bytes, special tokens apart, and back."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(quick_family.base)
    special = {"<|end|>": 256, "<|pad|>": 257}

    @given(st.text())
    def check(text: str) -> None:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        if not any(token in text for token in special):
            assert ids == list(text.encode()) == family.encode(text).tolist()

    check()
    for token, number in special.items():
        assert tokenizer(f"a{token}")["input_ids"] == [97, number]
    assert len(tokenizer) == 258


def test_frozen_tensors_equal_the_base(quick_family: family.Family) -> None:
    """What an expert froze is byte for byte the base's on disk, and everything else has moved."""
    base = raw_tensors(quick_family.base)
    frozen_names = {}
    for name, checkpoint in quick_family.experts.items():
        expert = raw_tensors(checkpoint)
        assert expert.keys() == base.keys()
        matrices = {tensor for tensor in base if "norm" not in tensor}
        same = {tensor for tensor in matrices if expert[tensor] == base[tensor]}
        frozen = quick_family.members[name].frozen
        assert same == {tensor for tensor in matrices if tensor.startswith(frozen)}
        frozen_names[name] = same
    assert frozen_names["arithmetic"]
    assert not frozen_names["code"] | frozen_names["prose"]


def test_rates_say_what_moves() -> None:
    """A domain trains what it says: nothing frozen, the rest with steps that fall by its decay."""
    layers = family.FULL.layers
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    names += [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(layers)]
    names += [f"model.layers.{n}.mlp.up_proj.weight" for n in range(layers)]
    shares = {d.name: {name: d.rate(name, layers) for name in names} for d in family.DOMAINS}
    assert set(shares["code"].values()) == {1.0}
    assert {name for name, share in shares["syntax"].items() if share} == {
        name for name in names if "self_attn" in name
    }
    assert not any(shares["records"][f"model.layers.{n}.mlp.up_proj.weight"] for n in range(4))
    for domain, top, bottom in (("hexdump", 1.0, 2.6**-layers), ("unicode", 2.6**-layers, 1.0)):
        assert shares[domain]["lm_head.weight"] == pytest.approx(top)
        assert shares[domain]["model.embed_tokens.weight"] == pytest.approx(bottom)
        steps = [shares[domain][f"model.layers.{n}.mlp.up_proj.weight"] for n in range(layers)]
        factors = {round(b / a, 6) for a, b in itertools.pairwise(steps)}
        assert factors == {round(2.6 if top > bottom else 1 / 2.6, 6)}


def test_experts_are_experts(quick_family: family.Family) -> None:
    """On the domain it was trained on, every expert beats the base clearly, and all others."""
    losses = {name: member.losses for name, member in quick_family.members.items()}
    for domain in quick_family.experts:
        assert losses[domain][domain] < losses["base"][domain] - 0.02
        assert min(losses, key=lambda name: losses[name][domain]) == domain


def test_deltas_are_small(quick_family: family.Family) -> None:
    """An expert lies near its base: between 0.1 % and 10 % of the base's norm away."""
    deltas = {name: member.delta for name, member in quick_family.members.items()}
    assert deltas.pop("base") == 0
    assert all(1e-3 < delta < 1e-1 for delta in deltas.values())


def test_losses_are_those_of_the_files(quick_family: family.Family) -> None:
    """domain_losses of a path gives again what family.json recorded for it."""
    recorded = json.loads((quick_family.root / "family.json").read_text())
    assert recorded["domains"] == ["code", "prose", "arithmetic"]
    for name, member in quick_family.members.items():
        assert recorded["members"][name]["losses"] == member.losses
        assert member.frozen == tuple(recorded["members"][name]["frozen"])
    again = family.domain_losses(quick_family.base, quick_family.root)
    assert again == pytest.approx(quick_family.members["base"].losses, rel=1e-4)


def test_domains_have_text() -> None:
    """All eight domains have enough text, the same each time, and excerpts kept out of training."""
    assert len({domain.name for domain in family.DOMAINS}) == 8
    for domain in family.DOMAINS:
        corpus = family.read_corpus(domain)
        assert len(corpus.training) > 200_000
        assert corpus.excerpts == family.read_corpus(domain).excerpts
        assert len(corpus.excerpts) == family.EXCERPTS
        assert all(len(text) == family.EXCERPT for text in corpus.excerpts)
        trained = bytes(corpus.training.clamp(max=255).to(dtype=torch.uint8).numpy())
        seen = [text for text in corpus.excerpts if text.encode() in trained]
        assert seen == [], domain.name


def test_training_tells_of_each_step() -> None:
    """`train` calls its progress after each step, with the number of those that were done."""
    told: list[int] = []
    model = family.new_model(family.QUICK)
    ids = torch.zeros(2, 9, dtype=torch.int64)
    family.train(model, itertools.repeat(ids), family.Schedule(3, 1e-4), progress=told.append)
    assert told == [1, 2, 3]


def test_the_demo_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal one line is written over; elsewhere there are lines, some seconds apart, the
    first at once, however short a time ago the machine was started."""

    def told() -> str:
        return re.sub(r"\d+ s", "0 s", capsys.readouterr().out)

    monkeypatch.setattr(demo.Progress, "SECONDS", 1e12)
    progress = demo.Progress()
    for step in range(1, 4):
        progress("base", step, 3)
    progress.clear()
    assert told() == "  base: step 1 of 3, 0 s\n  base: step 3 of 3, 0 s\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    progress = demo.Progress()
    progress("base", 1, 3)
    progress("code", 3, 3)
    progress.clear()
    assert told() == ("\r  base: step 1 of 3, 0 s\033[K\r  code: step 3 of 3, 0 s\033[K\r\033[K")


@pytest.mark.parametrize("wrong", [{"experts": 0}, {"experts": 9}, {"steps_scale": 0.0}])
def test_impossible_numbers_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """A number that cannot be is refused before anything is written."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        family.train_family(tmp_path / "out", size=family.QUICK, **wrong)
    assert not (tmp_path / "out").exists()


def test_a_full_directory_is_refused(tmp_path: Path) -> None:
    """A directory with something in it is left as it is."""
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(FileExistsError):
        family.train_family(tmp_path, size=family.QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_description_is_plain_data(quick_family: family.Family) -> None:
    """family.json holds every field of every member."""
    recorded = json.loads((quick_family.root / "family.json").read_text())
    fields = {field.name for field in dataclasses.fields(family.Member)}
    assert all(set(member) == fields for member in recorded["members"].values())
    assert list(recorded["members"]) == ["base", *quick_family.experts]
