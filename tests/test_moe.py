"""Mixtures of experts: exact where they must be, by hash, and back to dense models."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import Program
from moe_models import CONFIGS, logits, with_words, write
from safetensors.numpy import load_file, save_file
from small_models import files_of

from mstore import MergeRequest, Store
from mstore.merge.moe.noise import Noise
from mstore.merge.moe.recipe import parse_moe
from mstore.merge.running.commit import MergeReport
from mstore.store.models import tensors_of
from mstore.terms.errors import BadRequest, Incompatible, NotFound
from mstore_cli.keys import keys_of

MIXTURES = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
CLOSE = 2e-6
"""How far logits in float32 may lie apart: sums of the same numbers in another order."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store with small blocks."""
    with Store.init(tmp_path / "store", block_size=1 << 16, codec="raw") as opened:
        yield opened


def tensors(store: Store, revision: str) -> Any:
    """The ids of a snapshot's tensors by name."""
    catalog = store._catalog
    return tensors_of(catalog, catalog.manifest(store[revision].manifest))


def recipe(experts: list[dict[str, Any]], **more: Any) -> str:
    """A recipe of mergekit-moe; JSON is YAML."""
    return json.dumps({"base_model": "base", "gate_mode": "random", "experts": experts} | more)


def made(store: Store, text: str, routers: str | None = None, **options: Any) -> Any:
    """The mixture, merged."""
    store.prepare_moe(text)
    return store.merge(store.plan_moe(text, routers=routers), name="moe", **options)


@pytest.mark.parametrize("kind", CONFIGS)
def test_copies_of_one_expert_are_the_dense_model(kind: str, store: Store, tmp_path: Path) -> None:
    """Whatever the routers are, tokens go through the same MLP; only routers are new bytes."""
    dense = write(tmp_path / "base", kind, 1)
    store.add(dense, name="base")
    shared = [{"source_model": "base", "residual_scale": 0.0}] if kind == "qwen2" else []
    text = recipe([{"source_model": "base"}] * 3, **({"shared_experts": shared} if shared else {}))
    report = made(store, text)
    store.checkout("moe", tmp_path / "moe")
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert config["model_type"] == MIXTURES[kind]
    np.testing.assert_allclose(logits(tmp_path / "moe"), logits(dense), rtol=0, atol=CLOSE)
    assert report.expert_bytes_read == 0
    assert report.blocks_total - report.blocks_reused <= 16
    assert store.replay("moe").same
    assert store.fsck(read_data=True).problems == ()


def test_experts_come_back(store: Store, tmp_path: Path) -> None:
    """A mixture taken apart gives models with the experts' tensors, block for block."""
    base = write(tmp_path / "base", "mistral", 1)
    code = write(tmp_path / "code", "mistral", 2, like=base)
    for one in (base, code):
        store.add(one, name=one.name)
    made(store, recipe([{"source_model": "base"}, {"source_model": "code"}]))
    assert store.experts_of("moe") == 2
    for number, name in enumerate(("base", "code")):
        report = store.merge(store.plan_dense("moe", number), name=f"back/{number}")
        assert report.bytes_written < 30_000
        assert tensors(store, f"back/{number}") == tensors(store, name)
        store.checkout(f"back/{number}", tmp_path / f"back{number}")
        ours, theirs = (logits(tmp_path / one) for one in (f"back{number}", name))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=CLOSE)
    with pytest.raises(BadRequest, match="experts 0 to 1, not 2"):
        store.plan_dense("moe", 2)
    with pytest.raises(Incompatible, match="no mixture"):
        store.experts_of("base")


@pytest.mark.parametrize("form", ["llama", "llama as qwen", "mistral", "qwen2", "qwen3"])
def test_an_expert_is_of_its_family_again(form: str, store: Store, tmp_path: Path) -> None:
    """An expert of a mixture that was made here has the config and the tensors of its base, and can
    go into a mixture of it.  One of a mixture that was added, or whose base is gone, computes the
    same; a Mixtral without a window gives no model with one.
    """
    kind, _, is_qwen = form.partition(" as ")
    more = {"sliding_window": 8} if kind == "mistral" else {}
    base = write(tmp_path / "base", kind, 1, **more)
    store.add(base, name="base")
    silent = {"source_model": "base", "residual_scale": 0.0}
    fields: dict[str, Any] = {"shared_experts": [silent]}
    fields = fields | {"architecture": "qwen"} if is_qwen else fields if kind == "qwen2" else {}
    made(store, recipe([{"source_model": "base"}] * 2, **fields))
    store.checkout("moe", tmp_path / "moe")
    store.merge(store.plan_dense("moe", 1), name="dense")
    assert tensors(store, "dense") == tensors(store, "base")
    store.checkout("dense", tmp_path / "dense")
    ours, theirs = (
        json.loads((one / "config.json").read_text()) for one in (tmp_path / "dense", base)
    )
    assert ours == theirs
    text = recipe([{"source_model": one} for one in ("base", "dense")], **fields)
    assert store.plan_moe(text).remarks == ()

    store.add(tmp_path / "moe", name="again")
    store.merge(store.plan_dense("again", 1), name="alone")
    store.checkout("alone", tmp_path / "alone")
    alone = json.loads((tmp_path / "alone" / "config.json").read_text())
    if MIXTURES[kind] == "mixtral" and not is_qwen:
        assert (alone["model_type"], "sliding_window" in alone) == ("llama", False)
    long = [[1 + n % 90 for n in range(40)]]
    np.testing.assert_allclose(
        logits(tmp_path / "alone", long), logits(tmp_path / "moe", long), rtol=0, atol=CLOSE
    )
    prepared = [one.ref for one in store.prepare_moe(text)]
    store.remove("base", "dense", *prepared)
    store.prune(keep_last=1, unnamed_inputs=True)
    store.gc(reflog_days=0)
    gone = store.merge(store.plan_dense("moe", 1), name="gone")
    assert gone.manifest == store["alone"].manifest


def test_routers_that_are_given_are_taken(store: Store, tmp_path: Path) -> None:
    """Modes with prompts take a checkpoint of routers: the mixture has its numbers."""
    base = write(tmp_path / "base", "llama", 1)
    store.add(base, name="base")
    store.add(write(tmp_path / "code", "llama", 2, like=base), name="code")
    draw = np.random.default_rng(5)
    given = {f"layers.{n}.router": draw.standard_normal((2, 64), np.float32) for n in range(2)}
    (tmp_path / "routers").mkdir()
    save_file(given, tmp_path / "routers" / "model.safetensors")
    store.add(tmp_path / "routers", name="routers")
    experts = [
        {"source_model": "base", "positive_prompts": ["a story"]},
        {"source_model": "code", "positive_prompts": ["def f():"]},
    ]
    text = recipe(experts, gate_mode="hidden", experts_per_token=1)
    with pytest.raises(BadRequest, match="makes routers of what a model makes of the prompts"):
        store.plan_moe(text)
    made(store, text, routers="routers")
    for number in range(2):
        found = store["moe"].tensor(f"model.layers.{number}.block_sparse_moe.gate.weight")
        assert (found == given[f"layers.{number}.router"]).all()
    alike = {name: np.ones_like(one) for name, one in given.items()}
    save_file(alike, tmp_path / "routers" / "model.safetensors")
    store.add(tmp_path / "routers", name="alike")
    with pytest.raises(Incompatible, match="cannot tell experts 0 and 1 apart"):
        store.plan_moe(text, routers="alike")


STORY = {"source_model": "base", "positive_prompts": ["a"], "negative_prompts": ["b"]}
CODE = {"source_model": "code", "positive_prompts": ["def f():"]}
MADE_FROM: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str | None]] = {
    "the same": ([STORY, CODE], {}, None),
    "another name": ([STORY, CODE | {"source_model": "./code"}], {}, None),
    "mode": ([STORY, CODE], {"gate_mode": "lda"}, "gate_mode was hidden; here lda"),
    "order": ([CODE, STORY], {}, "experts were base, code; here code, base"),
    "prompts": ([STORY, CODE | {"positive_prompts": ["x"]}], {}, "the prompts of code were others"),
    "number": ([STORY], {"experts_per_token": 1}, "experts were base, code; here base\n"),
    "base": ([STORY, CODE], {"base_model": "code"}, "its config.json was not that of code"),
}


@pytest.mark.parametrize("case", MADE_FROM)
def test_routers_are_those_of_the_recipe(case: str, store: Store, tmp_path: Path) -> None:
    """Routers that say what they were made from are refused for another mode, other prompts,
    experts or base; models may have other names, and routers that say nothing are taken.
    """
    experts, more, what = MADE_FROM[case]
    base = write(tmp_path / "base", "llama", 1)
    code = write(tmp_path / "code", "llama", 2, like=base, rope_theta=5.0)
    for one in (base, code):
        store.add(one, name=one.name)
    origin = {
        "gate_mode": "hidden",
        "experts": [STORY, CODE | {"negative_prompts": []}],
        "shared_experts": [],
        "base_config_sha256": hashlib.sha256((base / "config.json").read_bytes()).hexdigest(),
    }
    draw = np.random.default_rng(5)
    rows = {f"layers.{n}.router": draw.standard_normal((len(experts), 64)) for n in range(2)}
    for name in ("trained", "routers"):
        (tmp_path / name).mkdir()
        save_file(
            {key: one.astype(np.float32) for key, one in rows.items()},
            tmp_path / name / "model.safetensors",
        )
    (tmp_path / "routers" / "routers.json").write_text(json.dumps(origin))
    for name in ("trained", "routers"):
        store.add(tmp_path / name, name=name)
    text = recipe(experts, **({"gate_mode": "hidden"} | more))
    models = {"./code": "code"}
    store.plan_moe(text, models=models, routers="trained")
    if what is None:
        store.plan_moe(text, models=models, routers="routers")
        return
    with pytest.raises(Incompatible, match=what) as refused:
        store.plan_moe(text, models=models, routers="routers")
    assert refused.value.where == "routers"


def test_an_adapter_of_mlps_is_an_expert(store: Store, tmp_path: Path) -> None:
    """MODEL+ADAPTER is the model with the adapter applied, which is made first; nothing is lost."""
    store.add(write(tmp_path / "base", "llama", 1), name="base")
    draw = np.random.default_rng(3)
    at = "base_model.model.model.layers.1.mlp.gate_proj"
    left, right = (
        draw.standard_normal((96, 4), np.float32),
        draw.standard_normal((4, 64), np.float32),
    )
    (tmp_path / "lora").mkdir()
    save_file(
        {f"{at}.lora_A.weight": right, f"{at}.lora_B.weight": left},
        tmp_path / "lora" / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["gate_proj"]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    store.add(tmp_path / "lora", name="lora")
    text = recipe([{"source_model": "base"}, {"source_model": "base+lora"}])
    with pytest.raises(NotFound, match="is not made yet"):
        store.plan_moe(text)
    assert made(store, text).remarks == ()
    for wrong, what in (
        ("lora", "lora is an adapter: name it with its model"),
        ("base+base", "a model and an adapter of it, and base is no adapter"),
        ("lora+lora", "a model and an adapter of it, and lora is an adapter"),
    ):
        with pytest.raises(BadRequest, match=what) as refused:
            store.prepare_moe(recipe([{"source_model": "base"}, {"source_model": wrong}]))
        assert refused.value.where == "the recipe, line 1"
    # Recipes may call models otherwise than the store.
    named = text.replace('"base', '"org/m').replace("org/m_model", "base_model")
    models = {"org/m": "base"}
    store.prepare_moe(named, models=models)
    assert store.plan_moe(named, models=models).remarks == ()
    gates = [
        store["moe"].tensor(f"model.layers.1.block_sparse_moe.experts.{number}.w1.weight")
        for number in range(2)
    ]
    np.testing.assert_allclose(gates[1] - gates[0], left @ right, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("own", "asked"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_another_type_is_a_cast_first(own: str, asked: str, store: Store, tmp_path: Path) -> None:
    """Every model is cast once; elements are those that torch makes of the models' own."""
    import torch

    base = write(tmp_path / "base", "llama", 1, dtype=own)
    code = write(tmp_path / "code", "llama", 2, like=base, dtype=own)
    for one in (base, code):
        store.add(one, name=one.name)
    text = recipe(EXPERTS, dtype=asked)
    with pytest.raises(NotFound, match=f"base in {asked}, which is not made yet"):
        store.plan_moe(text)
    assert [one.name for one in store.prepare_moe(text)] == [
        f"base in {asked}",
        f"code in {asked}",
    ]
    assert made(store, text).remarks == ()
    assert not any(one.new_snapshot or one.bytes_written for one in store.prepare_moe(text))
    store.checkout("moe", tmp_path / "moe")
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["dtype"] == asked
    found = torch_tensors(tmp_path / "moe")
    assert {one.dtype for one in found.values()} == {getattr(torch, asked)}
    for number, name in enumerate(("base", "code")):
        theirs = torch_tensors(tmp_path / name)["model.layers.1.mlp.up_proj.weight"]
        ours = found[f"model.layers.1.block_sparse_moe.experts.{number}.w3.weight"]
        assert torch.equal(ours, theirs.to(ours.dtype))


def test_experts_of_other_types_get_that_of_the_base(store: Store, tmp_path: Path) -> None:
    """Without a dtype in the recipe the mixture has the base's."""
    base = write(tmp_path / "base", "llama", 1, dtype="bfloat16")
    store.add(base, name="base")
    store.add(write(tmp_path / "code", "llama", 2, like=base), name="code")
    made(store, recipe(EXPERTS))
    store.checkout("moe", tmp_path / "moe")
    assert {str(one.dtype) for one in torch_tensors(tmp_path / "moe").values()} == {
        "torch.bfloat16"
    }


def torch_tensors(directory: Path) -> dict[str, Any]:
    """All tensors of a checkpoint."""
    from safetensors.torch import load_file as load

    found: dict[str, Any] = {}
    for file in directory.glob("*.safetensors"):
        found |= load(file)
    return found


def test_noise_makes_copies_differ(store: Store, tmp_path: Path) -> None:
    """Each MLP of each expert has noise of its own, of the deviation that the recipe says and near
    to a normal one, and nothing else has any; a residual_scale is applied after it.
    """
    base = write(tmp_path / "base", "llama", 1)
    store.add(base, name="base")
    expert = {"source_model": "base", "noise_scale": 0.25}
    made(store, recipe([expert, expert | {"residual_scale": 0.5}]))
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    found = []
    for layer in range(2):
        for number in range(2):
            for part, name in parts.items():
                at = f"model.layers.{layer}"
                own = store["base"].tensor(f"{at}.mlp.{name}.weight")
                ours = store["moe"].tensor(f"{at}.block_sparse_moe.experts.{number}.{part}.weight")
                scale = 0.5 if number and part == "w2" else 1
                found.append((ours / scale - own).ravel() / 0.25)
    numbers = np.stack(found).astype(np.float64)
    off = 4 / np.sqrt(numbers.size)
    assert abs(numbers.mean()) < off
    assert abs(numbers.std() - 1) < off
    assert abs((numbers**4).mean() - 3) < 0.2
    correlations = np.corrcoef(numbers) - np.eye(len(found))
    assert np.abs(correlations).max() < 5 / np.sqrt(numbers.shape[1])
    neighbours = np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < off
    at = "model.layers.0.self_attn.q_proj.weight"
    assert (store["moe"].tensor(at) == store["base"].tensor(at)).all()
    assert store.fsck(read_data=True).problems == ()


def test_noise_follows_from_the_seed(tmp_path: Path) -> None:
    """The same seed gives the same blocks in any store, of any block size, with any number of
    threads; another one gives others.
    """
    write(tmp_path / "base", "llama", 1, dtype="bfloat16", shards="60KB")
    expert = {"source_model": "base", "noise_scale": 0.1}
    text = recipe([expert, expert])
    found = {}
    for name, seed, threads, size in (("a", 0, 1, 16), ("b", 0, 4, 18), ("c", 1, 1, 16)):
        with Store.init(tmp_path / name, block_size=1 << size) as store:
            store.add(tmp_path / "base", name="base")
            first, second = store.prepare_moe(text, seed=seed, threads=threads)
            assert not any(one.new_snapshot for one in store.prepare_moe(text, seed=seed))
            assert (first.name, first.new_snapshot) == ("base with noise 0.1", True)
            store.checkout(first.ref, tmp_path / f"{name}0")
            store.checkout(second.ref, tmp_path / f"{name}1")
    for number in range(2):
        found = {name: files_of(tmp_path / f"{name}{number}") for name in "abc"}
        assert found["a"] == found["b"] != found["c"]
        assert len(found["a"]) > 4
    assert files_of(tmp_path / "a0") != files_of(tmp_path / "a1")
    with Store.open(tmp_path / "a") as store, pytest.raises(BadRequest, match="a seed is a number"):
        store.prepare_moe(text, seed=-1)


def test_noise_is_part_of_the_format() -> None:
    """The draws of a seed are these numbers for ever."""
    values = Noise(0.5, 7, 3).added("model.layers.0.mlp.up_proj.weight", np.zeros(4, np.float32), 5)
    wanted = [0.5474319458007812, 0.12087249755859375, -0.7674026489257812, -0.6645965576171875]
    assert values.tolist() == wanted


def test_what_is_lost_is_told(store: Store, tmp_path: Path) -> None:
    """An expert that changed attention, too, is named with the tensors that stay the base's."""
    store.add(write(tmp_path / "base", "llama", 1), name="base")
    store.add(write(tmp_path / "other", "llama", 2), name="other")
    plan = store.plan_moe(recipe([{"source_model": "base"}, {"source_model": "other"}]))
    assert any("other differs from the base in" in one for one in plan.remarks)
    store.merge(plan, name="lossy")
    assert store.plan_dense("lossy", 0).remarks == ()
    (told,) = store.plan_dense("lossy", 1).remarks
    assert told.startswith("expert 1 lacks what other changed in 10 tensors outside of its MLPs")
    assert not any("shared expert" in one for one in plan.remarks)
    # mergekit chooses another architecture then, without a word.
    shared = {"shared_experts": [{"source_model": "base"}]}
    text = recipe([{"source_model": "base"}] * 2, **shared)
    assert any(
        "the shared expert makes this a qwen moe" in one for one in store.plan_moe(text).remarks
    )
    silent = store.plan_moe(recipe([{"source_model": "base"}] * 2, architecture="qwen", **shared))
    assert silent.remarks == ()
    store.merge(silent, name="qwen")
    (told,) = store.plan_dense("qwen", 1).remarks
    assert told == "the mixture's shared expert is in none of its experts"
    with pytest.raises(BadRequest, match="exactly one") as refused:
        store.plan_moe(recipe([{"source_model": "base"}] * 2, architecture="qwen"))
    assert "shared_experts:\n- source_model: MODEL" in str(refused.value.hint)


def test_draws_are_the_same_again(store: Store, tmp_path: Path) -> None:
    """The same seed gives the same mixture, another one another."""
    store.add(write(tmp_path / "base", "qwen3", 1), name="base")
    text = recipe([{"source_model": "base"}] * 2)
    plans = [store.plan_moe(text, seed=seed).plan for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]
    uniform = recipe([{"source_model": "base"}] * 2, gate_mode="uniform_random")
    made(store, uniform)
    weights = store["moe"].tensor("model.layers.1.mlp.gate.weight")
    assert 0.08 < np.abs(weights).max() <= 1 / 8


EXPERTS = [{"source_model": "base"}, {"source_model": "code"}]
WRONG = {
    "a key that is none": (recipe(EXPERTS, gate_mdoe="random"), "no key 'gate_mdoe'"),
    "a mode that is none": (recipe(EXPERTS, gate_mode="rnd"), "no gate_mode is called 'rnd'"),
    "prompts that lack": (recipe(EXPERTS, gate_mode="hidden"), "has no positive_prompts"),
    "equal prompts": (
        recipe([one | {"positive_prompts": ["a"]} for one in EXPERTS], gate_mode="hidden"),
        "all experts have the same prompts",
    ),
    "too few experts": (
        recipe(EXPERTS[:1]),
        r"experts_per_token is 2 \(the default\), and the recipe has 1 expert$",
    ),
    "fewer experts": (
        recipe(EXPERTS, experts_per_token=3),
        "experts_per_token is 3, and the recipe has 2 experts",
    ),
    "no base": (json.dumps({"experts": EXPERTS}), "needs its base_model"),
    "a prompt that is none": (
        recipe([{"source_model": "a", "positive_prompts": [1]}]),
        "list of texts",
    ),
    "a scale that is none": (recipe([{"source_model": "a", "residual_scale": "x"}]), "is a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_recipe_that_is_wrong_is_refused_by_line(case: str) -> None:
    """The error says what is wrong, and in which line."""
    text, what = WRONG[case]
    with pytest.raises(BadRequest, match=what) as refused:
        parse_moe(text, "moe.yml")
    assert str(refused.value.where).startswith("moe.yml")


def test_models_that_do_not_fit_are_refused(store: Store, tmp_path: Path) -> None:
    """Other shapes, other types, a shared expert too many or too few, a model that is not there."""
    base = write(tmp_path / "base", "llama", 1)
    store.add(base, name="base")
    store.add(write(tmp_path / "qwen", "qwen3", 2), name="qwen")
    cases: list[tuple[str, type[Exception], str]] = [
        (recipe([{"source_model": "base"}, {"source_model": "qwen"}]), Incompatible, "of one type"),
        (recipe([{"source_model": "base"}, {"source_model": "none"}]), NotFound, "none"),
        (recipe(EXPERTS[:1] * 2, architecture="qwen"), BadRequest, "exactly one shared expert"),
        (recipe(EXPERTS[:1] * 2, architecture="deepseek"), BadRequest, "are not made"),
        (recipe(EXPERTS[:1] * 2, architecture="xyz"), BadRequest, "no architecture of mixtures"),
        (recipe(EXPERTS[:1] * 2, dtype="int8"), BadRequest, "cannot write dtype 'int8'"),
    ]
    for text, error, what in cases:
        with pytest.raises(error, match=what):
            store.plan_moe(text)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_base_of_another_form(kind: str, store: Store, tmp_path: Path) -> None:
    """Tied embeddings stay tied, several shards are as good as one, and directories may have
    spaces in their names; the same with another type.
    """
    folder = tmp_path / "my models"
    folder.mkdir()
    base = write(folder / "the base", kind, 1, shards="60KB", tie_word_embeddings=True)
    assert len(list(base.glob("*.safetensors"))) > 2
    experts = [{"source_model": "./the base"}] * 2
    more: dict[str, Any] = {"base_model": "./the base", "experts_per_token": 1}
    more |= {"shared_experts": [experts[0] | {"residual_scale": 0}]} if kind == "qwen2" else {}
    mstore = Program(store.path)
    for name, dtype in (("plain", {}), ("cast", {"dtype": "bfloat16"})):
        (folder / "the recipe.yml").write_text(recipe(experts, **more, **dtype))
        mstore.succeed("moe", "--recipe", str(folder / "the recipe.yml"), "--name", name)
        store.checkout(name, tmp_path / name)
    ours, theirs = logits(tmp_path / "plain"), logits(base)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(logits(tmp_path / "cast"), theirs, rtol=0, atol=0.02)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert not any("lm_head" in name for name in store["plain"].tensor_names())


def test_what_is_no_expert_yet_is_told(store: Store, tmp_path: Path) -> None:
    """A model that is computed on read must be stored first, and a mixture is no dense model."""
    base = write(tmp_path / "base", "llama", 1)
    store.add(base, name="base")
    store.add(write(tmp_path / "code", "llama", 2, like=base), name="code")
    plan = store.plan(MergeRequest(base="base", experts=["code"], method="task_arithmetic"))
    store.merge(plan, name="virtual", virtual=True)
    with pytest.raises(BadRequest, match="virtual") as refused:
        store.plan_moe(recipe([{"source_model": "base"}, {"source_model": "virtual"}]))
    assert "materialize" in str(refused.value.hint)
    store.materialize("virtual")
    assert (
        made(store, recipe([{"source_model": "base"}, {"source_model": "virtual"}])).remarks == ()
    )

    with pytest.raises(Incompatible, match="of one type"):
        store.plan_moe(recipe([{"source_model": "base"}, {"source_model": "moe"}]))
    with pytest.raises(Incompatible, match="these models are mixtral"):
        store.plan_moe(recipe([{"source_model": "moe"}] * 2, base_model="moe"))


def test_from_the_command_line(store: Store, tmp_path: Path) -> None:
    """`moe --recipe` adds directories and makes the mixture, `--unpack` its experts."""
    base = write(tmp_path / "base", "llama", 1)
    write(tmp_path / "code", "llama", 2, like=base)
    (tmp_path / "moe.yml").write_text(recipe(EXPERTS))
    mstore = Program(store.path)
    shown = mstore.succeed("moe", "--recipe", str(tmp_path / "moe.yml"), "--name", "m")
    assert "m" in shown.out
    names = mstore.succeed("moe", "--unpack", "m", "--name", "back", "--json").document
    assert [one["name"] for one in names["made"]] == ["back/0", "back/1"]
    assert [list(one) for one in names["made"]] == 2 * [[key.name for key in keys_of(MergeReport)]]
    for ref in ("m", "back/0"):
        for command in ("log", "show", "explain", "plans"):
            told = mstore.succeed(command, *([] if command == "plans" else [ref])).out
            assert "passthrough" not in told
            assert "moe" in told
        mstore.succeed("report", ref, "-o", str(tmp_path / "r.html"))
        page = (tmp_path / "r.html").read_text()
        said = "A mixture of 2 experts with" if ref == "m" else "An expert of m, as a dense model"
        assert said in page
    assert "9 of base, 3 of code, 1 of routers" in mstore.succeed("explain", "m").out
    assert "w1.weight  model.layers" in mstore.succeed("explain", "m", "--by", "tensor").out
    told = mstore.succeed("merge", "--plan", "m", "--name", "n").out
    told += mstore.succeed("explain", "m").out
    assert re.search(r"^experts +base, code$", told, re.MULTILINE)
    assert not re.search("change lost|error bound|budget|experts (to )?read|=1", told)
    wrong = mstore("moe", "--name", "x")
    assert (wrong.status, "--recipe FILE, or --unpack" in wrong.err) == (2, True)


def typed(kind: str, **more: Any) -> dict[str, Any]:
    """A recipe of directories of this kind, and its options on the command line."""
    experts = [{"source_model": f"./{kind}"}] * 2
    return {"base_model": f"./{kind}", "gate_mode": "random", "experts": experts} | more


SHARED = {"shared_experts": [{"source_model": "./llama"}]}
SAID = [{"source_model": "./llama", "positive_prompts": [one]} for one in "ab"]
NOTHING_ADDED = {
    "no routers": (typed("llama", gate_mode="lda", experts=SAID), [], "makes routers of what"),
    "both": (typed("llama"), ["--routers", "x"], "draws the routers"),
    "other routers": (
        typed("llama", gate_mode="lda", experts=SAID),
        ["--routers", "none"],
        "no such ref",
    ),
    "a type": (typed("gemma2"), [], "and these models are gemma2"),
    "two types": (typed("llama", base_model="./gemma2"), [], "these are gemma2, llama"),
    "qwen": (typed("llama", architecture="qwen"), [], "exactly one shared expert"),
    "mixtral": (typed("llama", architecture="mixtral", **SHARED), [], "has no shared expert"),
    "dtype": (typed("llama", dtype="int8"), [], "a mixture is made in bfloat16, float16 or"),
}


@pytest.mark.parametrize("case", NOTHING_ADDED)
def test_nothing_is_added_for_a_recipe_that_is_wrong(
    case: str, store: Store, tmp_path: Path
) -> None:
    """What the recipe and the models' configs say is checked before any directory is added."""
    fields, options, what = NOTHING_ADDED[case]
    write(tmp_path / "llama", "llama", 1)
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    shutil.copytree(tmp_path / "llama", tmp_path / "gemma2")
    (tmp_path / "gemma2" / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    (tmp_path / "moe.yml").write_text(json.dumps(fields))
    done = Program(store.path)(
        "moe", "--recipe", str(tmp_path / "moe.yml"), "--name", "m", *options
    )
    assert done.status != 0
    assert what in " ".join(done.err.split())
    assert "--dtype" not in done.err
    assert store.refs() == []


def test_an_expert_with_more_tokens_is_added(store: Store, tmp_path: Path) -> None:
    """A directory that is no fine-tune of the base, as it has more rows, is added without one."""
    write(tmp_path / "base", "llama", 1)
    write(tmp_path / "code", "llama", 2, vocab_size=100)
    experts = [{"source_model": "./base"}, {"source_model": "./code"}]
    (tmp_path / "moe.yml").write_text(recipe(experts, base_model="./base"))
    mstore = Program(store.path)
    done = mstore.succeed("moe", "--recipe", str(tmp_path / "moe.yml"), "--name", "m")
    assert "code differs from the base" in " ".join((done.out + done.err).split())


def test_a_model_of_the_hub_is_one_command_away(store: Store, tmp_path: Path) -> None:
    """A model that is not there and has a name of the Hub is added from there."""
    experts = [{"source_model": "org/model"}, {"source_model": "other"}]
    (tmp_path / "moe.yml").write_text(recipe(experts, base_model="org/model"))
    refused = Program(store.path)("moe", "--recipe", str(tmp_path / "moe.yml"), "--name", "m").err
    assert "add hf://org/model --name org/model" in refused
    assert "add DIRECTORY --name other" in refused


def test_the_recipe_goes_with_the_mixture(store: Store, tmp_path: Path) -> None:
    """The result has the recipe as it was written, as mergekit-moe writes it, and a card that says
    what it is; an expert that is taken out has neither.
    """
    base = write(tmp_path / "base", "llama", 1)
    (base / "mergekit_config.yml").write_text("merge_method: linear\n")
    store.add(base, name="base")
    text = recipe([{"source_model": "base"}] * 2)
    made(store, text)
    store.merge(store.plan_dense("moe", 0), name="dense")
    head, *ids = store.recipe("moe").removesuffix(text).splitlines()
    assert head.startswith("# Base, experts and routers")
    assert ids[:-1] == [f"# {store['base'].manifest.hex()} base"]
    assert ids[-1].endswith(" routers")
    assert parse_moe(store.recipe("moe"), "r").experts
    assert store.merge(str(store.show("moe").plan), name="again").manifest == store["moe"].manifest
    found = {}
    for name in ("moe", "dense"):
        store.checkout(name, tmp_path / name)
        found[name] = files_of(tmp_path / name)
        assert "mergekit_config.yml" not in found[name]
    assert found["moe"]["mergekit_moe_config.yml"].decode() == text
    assert "mergekit_moe_config.yml" not in found["dense"]
    assert b"# A mixture of 2 experts" in found["moe"]["README.md"]
    assert b"# Expert 0 of a mixture, as a dense model" in found["dense"]["README.md"]
    with pytest.raises(BadRequest, match="no recipe takes one out") as refused:
        store.recipe("dense")
    assert refused.value.where == "dense"
    with pytest.raises(BadRequest, match="nothing was merged"):
        store.blame("moe")


PREPARED = {"noise_scale": 0.1, "residual_scale": 0.5}
FORMS = {
    "mixtral": ("llama", {"experts": EXPERTS}),
    "qwen2": ("qwen2", {"experts": EXPERTS, "shared_experts": [{"source_model": "code"}]}),
    "qwen3": ("qwen3", {"experts": EXPERTS[:1], "experts_per_token": 1}),
    "prepared": ("llama", {"experts": [one | PREPARED for one in EXPERTS], "dtype": "bfloat16"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_is_a_function_of_its_inputs(form: str, tmp_path: Path) -> None:
    """Any number of threads, any block size, with a memo table and without, stored or computed on
    read, run again from its plan: the same bits; and so are the dense models of its experts.
    """
    kind, fields = FORMS[form]
    base = write(tmp_path / "base", kind, 1)
    write(tmp_path / "code", kind, 2, like=base, shards="100KB")
    text = recipe(fields["experts"], **{k: v for k, v in fields.items() if k != "experts"})
    files = []
    for size in (16, 18):
        with Store.init(tmp_path / str(size), block_size=1 << size, codec="raw") as store:
            for name in ("base", "code"):
                store.add(tmp_path / name, name=name)
            first = made(store, text, memo=False, threads=1)
            assert made(store, text).snapshot == first.snapshot
            store.merge(store.plan_dense("moe", 0), name="dense")
            for name in ("moe", "dense"):
                plan = str(store.show(name).plan)
                assert store.replay(name, threads=2).same
                assert str(store.import_plan(store.export_plan(plan)).plan) == plan
                for options in ({"memo": False, "threads": 3}, {"threads": 2}):
                    again = store.merge(plan, name="again", allow_noop=True, **options)
                    assert again.manifest == store[name].manifest
                store.merge(plan, name="virtual", virtual=True, allow_noop=True)
                for tensor in store[name].tensor_names():
                    assert (store["virtual"].tensor(tensor) == store[name].tensor(tensor)).all()
                store.materialize("virtual")
                assert store["virtual"].manifest == store[name].manifest
                store.checkout(name, tmp_path / f"{size}-{name}")
            files.append([files_of(tmp_path / f"{size}-{name}") for name in ("moe", "dense")])
            assert store.fsck(read_data=True).problems == ()
    assert files[0] == files[1]


# -- examples/routers.py -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer of words."""
    return with_words(write(tmp_path_factory.mktemp("prompted") / "base", "llama", 1))


def routers_py(*words: Any) -> None:
    """Run the program."""
    path = Path(__file__).parent.parent / "examples" / "routers.py"
    spec = importlib.util.spec_from_file_location("routers", path)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # What it sets for itself would stay for the tests after this one.
        for name in ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
            patch.setenv(name, "1")
        spec.loader.exec_module(program)
        program.main(list(map(str, words)))


def computed(
    base: Path, out: Path, prompts: list[list[str]], mode: str, per_token: int = 2
) -> dict[str, Any]:
    """What the program writes for experts with these prompts."""
    experts = [{"source_model": "m", "positive_prompts": one} for one in prompts]
    out.mkdir()
    (out / "moe.yml").write_text(recipe(experts, gate_mode=mode, experts_per_token=per_token))
    routers_py(out / "moe.yml", base, out / "routers")
    origin = json.loads((out / "routers" / "routers.json").read_text())
    assert origin["gate_mode"] == mode
    assert [one["positive_prompts"] for one in origin["experts"]] == prompts
    found: dict[str, Any] = load_file(out / "routers" / "model.safetensors")
    return found


def test_routers_tell_the_load(
    prompted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each expert: the share of all prompts' tokens, and of its own prompts'."""
    computed(
        prompted, tmp_path / "one", [["w1 w2"], ["w40 w41 w42 w43 w44 w45"]], "lda", per_token=1
    )
    first, *rows = capsys.readouterr().out.splitlines()[1:]
    assert "1 for each token" in first
    # Few tokens in many dimensions: a discriminant tells them, but for the first one, which is the
    # same in all prompts.
    found = [[int(one) for one in re.findall(r"(\d+) %", row)] for row in rows]
    assert [row.split()[-1] for row in rows] == ["m", "m"]
    assert sum(share for share, _ in found) == 100
    assert all(own >= 66 for _, own in found)
    computed(prompted, tmp_path / "all", [["w1 w2"], ["w40 w41"]], "hidden", per_token=2)
    assert capsys.readouterr().out.count("100 % (100 to 100)") == 4


@pytest.mark.parametrize("mode", ["hidden", "hidden_avg", "cheap_embed", "lda"])
def test_routers_of_prompts(mode: str, prompted: Path, tmp_path: Path) -> None:
    """Each layer has a row for each expert, of (mean) length 1, and padding counts for nothing: a
    prompt beside a longer one gives what it gives alone.
    """
    short, long = ["w1 w2"], ["w40 w41 w42 w43 w44 w45"]
    alone = computed(prompted, tmp_path / "alone", [short, long], mode)
    beside = computed(prompted, tmp_path / "beside", [short * 2 + long, long], mode)
    assert sorted(alone) == ["layers.0.router", "layers.1.router"]
    for name, rows in alone.items():
        assert rows.shape == (2, 64)
        lengths = np.linalg.norm(rows, axis=1)
        np.testing.assert_allclose(lengths.mean() if mode == "lda" else lengths, 1, atol=1e-5)
        assert not np.allclose(rows[0], rows[1])
        if mode != "lda":
            np.testing.assert_allclose(beside[name][1], rows[1], atol=1e-5)
    if mode == "hidden_avg":
        # The mean of three prompts, two of which are the short one.
        wide = computed(prompted, tmp_path / "wide", [short * 2, long], mode)
        np.testing.assert_allclose(
            wide["layers.0.router"][0], alone["layers.0.router"][0], atol=1e-5
        )


UNFIT: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "no prompts": (
        [STORY, {"source_model": "code"}],
        {},
        "expert 1, code, has no positive_prompts",
    ),
    "a misspelt key": ([STORY, CODE | {"negative_prompt": ["x"]}], {}, "no key 'negative_prompt'"),
    "a number": ([STORY, CODE | {"positive_prompts": [7]}], {}, "no list of texts"),
    "a mode": ([STORY, CODE], {"gate_mode": "hiden"}, "no gate_mode is called 'hiden'"),
    "drawn": ([STORY, CODE], {"gate_mode": "random"}, "takes no prompts"),
    "deepseek": ([STORY, CODE], {"architecture": "deepseek"}, "no architecture 'deepseek'"),
    "one expert": ([STORY], {}, "experts_per_token is 2 (2 if not given), and the recipe has 1"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_routers_py_refuses_a_recipe_before_it_computes(case: str, tmp_path: Path) -> None:
    """One line says what is wrong, before any model is looked for."""
    experts, more, what = UNFIT[case]
    (tmp_path / "moe.yml").write_text(recipe(experts, **({"gate_mode": "hidden"} | more)))
    with pytest.raises(SystemExit, match=re.escape(what)) as refused:
        routers_py(tmp_path / "moe.yml", tmp_path / "none", tmp_path / "out")
    assert "\n" not in str(refused.value)


def test_routers_py_refuses_files_before_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ref in place of the base's files, a directory that is there, a device that is not, a recipe
    that is not, torch that is missing: one line each.
    """
    good = tmp_path / "moe.yml"
    good.write_text(recipe([STORY, CODE], gate_mode="hidden"))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    out = tmp_path / "out"
    for words, what in (
        ((good, "llama", out), "llama has no config.json: BASE is a directory"),
        ((good, base, base), "base is there already"),
        ((good, base, out, "--device", "cuda:99"), "torch has no device 'cuda:99' here"),
        ((base / "none.yml", base, out), "none.yml cannot be read"),
        ((base / "config.json", base, out), "no recipe of a mixture of experts"),
    ):
        with pytest.raises(SystemExit, match=re.escape(what)):
            routers_py(*words)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="pip install torch transformers"):
        routers_py(good, base, out)
