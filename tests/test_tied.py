"""Tied embeddings: one fact of a checkpoint, for adapters, merges, stacks and what is added."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import adapters
import numpy as np
import pytest
from adapters import PREFIX, Array
from cli_runs import Program

from mstore import MergeRequest, Store
from mstore.store.tied import ties, untied
from mstore.terms.errors import Incompatible

EMBED, HEAD, LAYER = "model.embed_tokens.weight", "lm_head.weight", "model.layers.{}.q_proj.weight"


def tensors(seed: int, *, head: str = "both") -> dict[str, Array]:
    """A model of two layers; head: both (stored twice), once, or own."""
    rng = np.random.default_rng(seed)
    found = {name: rng.normal(0, 0.1, (40, 32)).astype("f4") for name in (EMBED, HEAD)}
    found |= {LAYER.format(n): rng.normal(0, 0.1, (32, 32)).astype("f4") for n in (0, 1)}
    if head == "both":
        found[HEAD] = found[EMBED].copy()
    if head == "once":
        del found[HEAD]
    return found


def product(seed: int, module: str) -> dict[str, Array]:
    """The factors of a module's product in PEFT's form; those of an embedding lie transposed."""
    rng = np.random.default_rng(seed)
    up, down = (rng.normal(0, 0.5, shape).astype("f4") for shape in ((40, 4), (4, 32)))
    if module == "lm_head":
        return {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    return {f"{module}.lora_embedding_A": up.T.copy(), f"{module}.lora_embedding_B": down.T.copy()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        yield store


def put(
    store: Store, path: Path, found: Mapping[str, Array], tie: bool | None = True, **more: Any
) -> None:
    """Add a model under the name of its directory."""
    config = {"model_type": "llama", "num_hidden_layers": 2, **more}
    if tie is not None:
        config["tie_word_embeddings"] = tie
    adapters.write(path, found, {"config.json": config}, "model")
    store.add(path, name=path.name)


def lora(store: Store, path: Path, found: Mapping[str, Array], **settings: Any) -> None:
    """Add an adapter of rank 4 under the name of its directory."""
    named = {PREFIX + name: one for name, one in found.items()}
    config = {"adapter_config.json": {"peft_type": "LORA", "r": 4, "lora_alpha": 4, **settings}}
    adapters.write(path, named, config, "adapter_model")
    store.add(path, name=path.name)


def merged(store: Store, *experts: str, base: str = "base", **more: Any) -> dict[str, Array]:
    """Merge under the name `m`, and return its tensors."""
    asked = {"method": "task_arithmetic", **more}
    plan = store.plan(MergeRequest(base=base, experts=experts, **asked))
    report = store.merge(plan, name="m")
    assert report.warnings == plan.warnings
    assert store.replay("m").same
    return {name: store["m"].tensor(name) for name in store["m"].tensor_names()}


def tells(store: Store, ref: str = "m") -> Any:
    return json.loads(store[ref].read("config.json"))["tie_word_embeddings"]


def heads_told(store: Store, *experts: str, **more: Any) -> list[str | None]:
    """The experts that plan and check say have a head of their own, the same of both."""
    request = MergeRequest(base="base", experts=experts, method="linear", **more)
    planned = store.plan(request).warnings
    found = [one.expert for one in planned if one.kind == "head of its own"]
    checked = [one.expert for one in store.check_merge(request).findings if "head of" in one.text]
    assert checked[:1] == found
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
@pytest.mark.parametrize("head", ["both", "once"])
def test_a_product_of_one_name_changes_the_tied_tensor(
    store: Store, tmp_path: Path, module: str, head: str
) -> None:
    """A LoRA of the embedding or of the head of a tied base changes both names, as PEFT's
    merge_and_unload does, whether the base stores one name or both."""
    base = tensors(0, head=head)
    put(store, tmp_path / "base", base)
    pair = product(1, module)
    # PEFT repeats the weights of the base that it had below the product.
    lora(store, tmp_path / "lora", pair | {f"{module}.base_layer.weight": base[EMBED]})
    store.add(tmp_path / "lora", name="again", base="base")
    found = merged(store, "lora")
    first, second = pair.values()
    delta = (second @ first).T if module != "lm_head" else second @ first
    assert found.keys() == base.keys()
    for name in {EMBED, HEAD} & base.keys():
        np.testing.assert_allclose(found[name], base[EMBED] + delta, atol=1e-5)
        assert np.array_equal(found[name], found[EMBED])
    assert tells(store) is True
    assert heads_told(store, "lora") == []
    drawn = merged(store, "lora", method="dare_linear", parameters={"density": 0.5})
    assert head == "once" or np.array_equal(drawn[HEAD], drawn[EMBED])


def test_an_untied_base_has_two_tensors(store: Store, tmp_path: Path) -> None:
    """Where the config ties nothing, a product changes the tensor that it names, and an adapter of
    a head that the base lacks is refused."""
    put(store, tmp_path / "base", tensors(0), tie=False)
    put(store, tmp_path / "headless", tensors(0, head="once"), tie=False)
    lora(store, tmp_path / "lora", product(1, "lm_head"))
    found = merged(store, "lora")
    assert np.array_equal(found[EMBED], tensors(0)[EMBED])
    assert not np.array_equal(found[HEAD], found[EMBED])
    with pytest.raises(Incompatible, match=r"lm_head\.weight is not in"):
        merged(store, "lora", base="headless")


@pytest.mark.rest
def test_tensors_that_an_adapter_saved_whole(store: Store, tmp_path: Path) -> None:
    """Equal copies of both names are the tied tensor. A base that stores both takes copies that
    differ, or one alone, as PEFT does; a base that stores one refuses them and says what to do."""
    put(store, tmp_path / "base", tensors(0))
    put(store, tmp_path / "once", tensors(0, head="once"))
    put(store, tmp_path / "silent", tensors(0, head="once"), tie=None)
    own, other = tensors(1)[EMBED], tensors(2)[EMBED]
    lora(store, tmp_path / "equal", {EMBED: own, HEAD: own, **_layer()})
    for base in ("base", "once", "silent"):
        found = merged(store, "equal", base=base)
        np.testing.assert_allclose(found[EMBED], own, atol=1e-6)
        assert base != "base" or np.array_equal(found[HEAD], found[EMBED])
    assert heads_told(store, "equal") == []
    differing = {
        "both": {EMBED: own, HEAD: other},
        "embedding": {EMBED: own},
        "head": {HEAD: other},
        "mixed": {HEAD: other, **product(1, "model.embed_tokens")},
    }
    for name, saved in differing.items():
        lora(store, tmp_path / name, {**saved, **_layer()})
        found = merged(store, name)
        head = saved.get(HEAD, tensors(0)[HEAD])
        np.testing.assert_allclose(found[HEAD], head, atol=1e-6)
        assert np.array_equal(found[EMBED], tensors(0)[EMBED]) == (name == "head")
        assert (heads_told(store, name), tells(store)) == ([name], False)
        with pytest.raises(Incompatible, match="tie_word_embeddings") as caught:
            merged(store, name, base="once")
        assert "save the base with both tensors" in str(caught.value.hint)


def _layer() -> dict[str, Array]:
    module = LAYER.format(0).removesuffix(".weight")
    zeros = np.zeros((32, 4), "f4")
    return {f"{module}.lora_A.weight": zeros.T.copy(), f"{module}.lora_B.weight": zeros}


def test_products_of_both_names(store: Store, tmp_path: Path) -> None:
    """Two products are those of two tensors, as they were trained, unless the adapter says that
    they are one (`ensure_weight_tying`)."""
    put(store, tmp_path / "base", tensors(0))
    put(store, tmp_path / "once", tensors(0, head="once"))
    pair = product(1, "lm_head")
    lora(store, tmp_path / "two", pair | product(2, "model.embed_tokens"))
    found = merged(store, "two")
    assert not np.array_equal(found[HEAD], found[EMBED])
    assert (heads_told(store, "two"), tells(store)) == (["two"], False)
    with pytest.raises(Incompatible, match="stores one tensor for both"):
        merged(store, "two", base="once")
    lora(store, tmp_path / "one", pair | product(1, "model.embed_tokens"), ensure_weight_tying=True)
    wanted = tensors(0)[EMBED] + pair["lm_head.lora_B.weight"] @ pair["lm_head.lora_A.weight"]
    for base in ("base", "once"):
        found = merged(store, "one", base=base)
        np.testing.assert_allclose(found[EMBED], wanted, atol=1e-5)
        assert tells(store) is True
    assert heads_told(store, "one") == []


def test_a_head_of_its_own_is_told(tmp_path: Path) -> None:
    """A checkpoint whose config ties embeddings that differ is a warning when it is added and when
    it is merged, with the remedy; the config of the merge ties them no longer."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    for name, head in (("base", "both"), ("tuned", "own")):
        config = {"config.json": {"tie_word_embeddings": True, "model_type": "llama"}}
        adapters.write(tmp_path / name, tensors(0, head=head), config, "model")
    mstore.succeed("add", tmp_path / "base", "--name", "base")
    added = mstore.succeed("add", tmp_path / "tuned", "--name", "tuned").out
    assert "warning: its config.json ties lm_head.weight to model.embed_tokens.weight" in added
    assert "set tie_word_embeddings to false" in " ".join(added.split())
    quiet = mstore.succeed("add", tmp_path / "tuned", "--name", "t2", "--quiet")
    assert "tie_word_embeddings" in quiet.err
    models = ("--base", "base", "--expert", "tuned")
    asked = (*models, "--method", "linear")
    for line in (("check-merge", *models), ("plan", *asked), ("merge", *asked, "--name", "m")):
        told = " ".join(mstore.succeed(*line).out.split())
        assert "has a head of its own" in told, line
        assert "tie_word_embeddings is false" in told, line
    for ref in ("m", "v"):
        if ref == "v":
            mstore.succeed("merge", *asked, "--name", "v", "--virtual")
        assert json.loads(mstore.succeed("cat", f"{ref}:config.json").out) == {
            "tie_word_embeddings": False,
            "model_type": "llama",
        }


@pytest.mark.parametrize(
    ("base", "expert", "head"),
    [("both", "both", False), ("both", "own", True), ("own", "own", True)],
)
def test_the_config_of_a_merge_describes_its_tensors(
    store: Store, tmp_path: Path, base: str, expert: str, head: bool
) -> None:
    """It ties embeddings if they are one tensor in the merge, whatever the expert's config says;
    also beside another output type, and where patterns leave the two to the base."""
    put(store, tmp_path / "base", tensors(0, head=base))
    put(store, tmp_path / "expert", tensors(1, head=expert), tie=False)
    named = ["base" if base == "own" else "expert"] if head else []
    assert heads_told(store, "expert") == named
    for more in ({}, {"dtype": "bfloat16"}):
        found = merged(store, "expert", method="linear", **more)
        assert np.array_equal(found[HEAD], found[EMBED]) is not head
        assert tells(store) is not head
    skip = [HEAD, EMBED]
    merged(store, "expert", method="linear", skip=skip)
    assert tells(store) is (base == "both")
    assert heads_told(store, "expert", skip=skip) == ([] if base == "both" else ["base"])


def test_a_stack_of_tied_models_has_a_head_of_its_own(store: Store, tmp_path: Path) -> None:
    """The embedding is of the first model, the head of the last: a warning, and a config that ties
    them no longer; a stack of one tied model stays tied."""
    for number, name in enumerate(("base", "other")):
        put(store, tmp_path / name, tensors(number))
    for last, warned in (("base", []), ("other", ["head of its own"])):
        request = MergeRequest(
            base="base",
            experts=["other"],
            method="passthrough",
            layers=[("base", 0, 2), ("other", 0, 1), (last, 1, 2)],
        )
        plan = store.plan(request)
        assert [one.kind for one in plan.warnings if one.kind != "licences"] == warned
        store.merge(plan, name="m")
        assert tells(store) is (not warned)
        assert json.loads(store["m"].read("config.json"))["num_hidden_layers"] == 4


def test_what_configs_say() -> None:
    """A config ties, does not, or says nothing, also that of a part of the model; a config that
    ties is changed where it says so."""
    part = {"text_config": {"tie_word_embeddings": True, "x": 1}, "y": 2}
    assert [ties(one) for one in ({"tie_word_embeddings": False}, {}, part)] == [False, None, True]
    assert ties({"tie_word_embeddings": ["odd"]}) is None
    assert untied(part) == {
        "text_config": {"tie_word_embeddings": False, "x": 1},
        "y": 2,
        "tie_word_embeddings": False,
    }
