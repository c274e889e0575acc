"""Recipes of merges: what is written, and that reading it gives the same plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_layers
import yaml
from cli_runs import Program
from hypothesis import given, settings
from hypothesis import strategies as st
from printed import by_ids
from safetensors.numpy import save_file
from small_layers import NAMES

from mstore import MergeRequest, Store, TensorRule
from mstore.merge.methods import registry
from mstore.merge.planning.recipe_text import known_method
from mstore.merge.recipes.parse import parse
from mstore.merge.recipes.resolve import resolve
from mstore.merge.recipes.write import HEAD, named, recipe_of
from mstore.store.objects.canonical import decode
from mstore.store.objects.plan import Criteria, Plan, PlanInput, PlanOperation, PlanTensor
from mstore.terms.errors import BadRequest

FILE = "mergekit_config.yml"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_layers.write(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Store]:
    """A base and two fine-tunes with four layers; the base brings another merge's recipe."""
    (root / "base" / FILE).write_text("merge_method: other\n")
    with Store.init(root / "store", block_size=1 << 16) as made:
        made.add(root / "base", name="base")
        for name in ("math", "code"):
            made.add(root / name, name=name, base="base")
        yield made


BY_OPTIONS = {
    "nuslerp around the base": MergeRequest(
        base="base", experts={"math": 0.7, "code": 0.1}, method="nuslerp"
    ),
    "nuslerp of two models": MergeRequest(
        base="math",
        experts={"math": 0.25, "code": 0.5},
        method="nuslerp",
        parameters={"around_base": False},
    ),
    "multislerp with the files of another": MergeRequest(
        base="base",
        experts=["math", "code"],
        method="multislerp",
        parameters={"around_base": False},
    ),
    "karcher with the base": MergeRequest(
        base="base", experts=["base", "math", "code"], method="karcher"
    ),
    "linear": MergeRequest(base="base", experts={"math": 0.7, "code": 0.1}, method="linear"),
    "linear of the base": MergeRequest(
        base="base", experts=[("math", 0.3), ("base", 0.7)], method="linear", dtype="float32"
    ),
    "ties": MergeRequest(
        base="base",
        experts={"math": 1e-5, "code": -0.5},
        method="ties",
        parameters={"density": 1e-5, "normalize": False},
        only=["model.layers.*"],
        skip=["*norm*"],
    ),
    "dare": MergeRequest(
        base="base",
        experts=["math"],
        method="dare_linear",
        parameters={"density": 0.5, "seed": 7, "rescale": False},
    ),
    "dare l1": MergeRequest(
        base="base",
        experts=["math", "code"],
        method="dare_ties",
        parameters={"density": (0.5, 0.25), "rescale": "l1"},
        rules=[TensorRule(tensors="*.mlp.*", parameters={"density": 0.75, "rescale": "density"})],
    ),
    "dare of the paper": MergeRequest(
        base="base", experts=["math"], method="dare_ties", parameters={"density": 0.5}
    ),
    "della": MergeRequest(
        base="base",
        experts=["math", "code"],
        method="della",
        parameters={"density": (0.5, 0.25), "epsilon": 0.1},
    ),
    "slerp": MergeRequest(base="base", experts=["math"], method="slerp", parameters={"t": 0.25}),
    "sce": MergeRequest(
        base="base", experts=["math", "code"], method="sce", parameters={"select_topk": 0.25}
    ),
    "consensus": MergeRequest(
        base="base",
        experts={"code": 1.0, "math": 0.5},
        method="consensus",
        parameters={"k": 1, "tall_mask_lambda": (0.25, 0.5)},
    ),
    "arcee_fusion": MergeRequest(base="base", experts=["code"], method="arcee_fusion"),
    "guarded": MergeRequest(
        base="base",
        experts=["code", "math"],
        method="guarded",
        parameters={"threshold": 0.25, "alpha": 0.5},
    ),
    "nearswap": MergeRequest(
        base="base", experts=["code"], method="nearswap", parameters={"t": 0.001}
    ),
    "ramplus_tl": MergeRequest(
        base="base", experts=["math", "code"], method="ramplus_tl", parameters={"epsilon": 1e-3}
    ),
    "breadcrumbs": MergeRequest(
        base="base", experts=["code"], method="breadcrumbs", parameters={"gamma": 0.02}, budget=0.5
    ),
    "rules": MergeRequest(
        base="base",
        experts=["math", "code"],
        method="ties",
        parameters={"density": 0.5},
        rules=[
            TensorRule(tensors="*.mlp.*", weights=[0.25, 1]),
            TensorRule(tensors="model.layers.[01].*", parameters={"density": 0.75}),
            TensorRule(tensors="lm_head.weight", parameters={"lambda": 0.5}, weights=[2, 1]),
        ],
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("request_name", BY_OPTIONS)
def test_a_recipe_gives_its_plan_again(request_name: str, store: Store) -> None:
    """The recipe of a merge by options, rules included, is read back to the same plan; it is a file
    of the snapshot, and replay and a virtual merge have the same."""
    asked = BY_OPTIONS[request_name]
    plan = store.plan(asked)
    merged = store.merge(plan, name="merged")
    text = store.recipe("merged")
    again = dataclasses.replace(
        store.read_recipe(text).request, budget=asked.budget, only=asked.only, skip=asked.skip
    )
    assert store.plan(again).plan == plan.plan
    assert store["merged"].read(FILE).decode() == by_ids(text)
    assert store.replay("merged").same
    store.merge(plan, name="virtual", virtual=True)
    assert store["virtual"].read(FILE).decode() == by_ids(text)
    assert store.materialize("virtual").manifest == merged.manifest
    assert yaml.safe_load(text)["merge_method"] == asked.method


def test_what_is_written(store: Store) -> None:
    """The text: models by content, values of each, conditions where tensors differ."""
    store.merge(store.plan(BY_OPTIONS["rules"]), name="written")
    ids = {name: store[name].manifest.hex() for name in ("base", "math", "code")}
    assert yaml.safe_load(store["written"].read(FILE)) == {
        "merge_method": "ties",
        "base_model": ids["base"],
        "models": [
            {"model": ids["math"], "parameters": {"weight": [
                *({"filter": f"model.layers.{n}.mlp.", "value": 0.25} for n in range(4)),
                {"filter": "lm_head.", "value": 2.0},
                {"value": 1.0},
            ]}},
            {"model": ids["code"], "parameters": {"weight": 1.0}},
        ],
        "parameters": {
            "density": [
                *(
                    {"filter": f"model.layers.{n}.{part}.", "value": 0.75}
                    for n in range(2)
                    for part in ("self_attn", "input_layernorm")
                ),
                {"value": 0.5},
            ],
            "lambda": [{"filter": "lm_head.", "value": 0.5}, {"value": 1.0}],
            "normalize": True,
        },
    }  # fmt: skip


def test_a_recipe_of_a_recipe(store: Store) -> None:
    """A merge by recipe, with gradients, has a recipe that gives the same plan."""
    found = store.read_recipe(
        """
        slices:
          - sources: [{model: base, layer_range: [0, 4]}, {model: math, layer_range: [0, 4]}]
        merge_method: slerp
        base_model: base
        parameters:
          t: [{filter: self_attn, value: [0, 1]}, {filter: mlp, value: [1, 0]}, {value: 0.5}]
        dtype: bfloat16
        """
    )
    assert found.request.dtype is None
    plan = store.plan(found.request)
    store.merge(plan, name="spherical")
    text = store.recipe("spherical")
    assert store.plan(store.read_recipe(text).request).plan == plan.plan
    # It is the base's type already.
    assert "dtype" not in text


NESTED = ("a.w", "b.a.w", "a.b.w", "w", "x.a.b.w", "a.bb.w", "b.a.ww", "a")


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(NESTED), st.integers(0, 2)),
    st.lists(st.sampled_from([0.25, 0.5, 0.75]), min_size=3, max_size=3, unique=True),
)
def test_filters_name_no_other_tensor(chosen: Mapping[str, int], density: list[float]) -> None:
    """Whatever names are parts of each other, each tensor has the plan's value again."""
    used = sorted({number for number in chosen.values() if number})
    plan = Plan(
        operations=tuple(
            PlanOperation(
                "ties", (("density", density[n]), ("lambda", 1.0), ("normalize", True)), (0.5,)
            )
            for n in (0, *used)
        ),
        inputs=(PlanInput("base", None, b"\1" * 32), PlanInput("expert", None, b"\2" * 32)),
        dtype=None,
        block_size=1 << 16,
        budget=None,
        criteria=Criteria("trimmed"),
        allow_missing=False,
        full_expert_bytes=0,
        planned_expert_bytes=0,
        error_bound=None,
        error_estimate=None,
        tensors=tuple(
            PlanTensor(name, 1, (b"\0",), (), (0.0,), 1 + used.index(n) if n else 0)
            for name, n in chosen.items()
        ),
        copied=(),
        remarks=(),
    )
    assert decode(Plan, plan.encode(), "the plan") == plan
    method = known_method(registry.find("ties"))
    (recipe,) = parse(recipe_of(plan, method, NESTED), "r")
    models = {one.text: one.text for one in recipe.named()}
    request = resolve(recipe, NESTED, method, models=models).request
    found: dict[str, Any] = dict.fromkeys(NESTED, request.parameters["density"])
    for rule in request.rules:
        for name in rule.patterns():
            found[name] = rule.parameters["density"]
    assert found == {name: density[chosen.get(name, 0)] for name in NESTED}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"outputs": {"new": NAMES[0]}}, "tensors that the base does not have"),
        ({"rules": [TensorRule(tensors=NAMES[0], method="linear")]}, "a method of their own"),
        ({"rules": [TensorRule(tensors=NAMES[0], dtype="float32")]}, "a type of their own"),
        ({"experts": ["math", "math"]}, "two experts are one model"),
        ({"experts": ["math", "base"]}, "an expert is the base"),
    ],
)
def test_what_no_recipe_can_state(change: dict[str, Any], why: str, store: Store) -> None:
    """Such a merge has no recipe, not even that of its base; asking for one says why."""
    asked = dataclasses.replace(BY_OPTIONS["rules"], **({"rules": ()} | change))
    store.merge(store.plan(asked), name="unstated")
    with pytest.raises(BadRequest, match=why):
        store.recipe("unstated")
    assert FILE not in {file.path for file in store["unstated"].files()}
    assert store.replay("unstated").same


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["linear", "fisher"])
def test_models_of_any_name(method: str, tmp_path: Path) -> None:
    """A model's name, whatever is in it, stands in the recipe beside the ref; but for a +."""
    models = ("plain", "ün et", 'x #y: "z"', "a+b")
    rng = np.random.default_rng(0)
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name in ("base", "tuned", "fisher"):
            for model in models:
                (tmp_path / name / model).mkdir(parents=True)
                values = np.abs(rng.standard_normal(100, dtype=np.float32))
                save_file({"w": values}, tmp_path / name / model / "model.safetensors")
            store.add(tmp_path / name, name=name)
        for number, model in enumerate(model.replace(":", "%3A") for model in models):
            asked = MergeRequest(
                base=f"base:{model}",
                experts=[(f"tuned:{model}", 0.5)],
                method=method,
                companions={f"fisher:tuned:{model}": f"fisher:{model}"}
                if method == "fisher"
                else {},
            )
            plan, name = store.plan(asked), f"merged-{number}"
            store.merge(plan, name=name)
            if "+" in model:
                with pytest.raises(BadRequest, match=r"a \+ in its name"):
                    store.recipe(name)
                continue
            for text in (store.recipe(name), store[name].read(FILE).decode()):
                assert store.plan(store.read_recipe(text).request).plan == plan.plan
            assert f"tuned:{model}" in str(yaml.safe_load(store.recipe(name))["models"])


def test_experts_of_the_base_s_snapshot(tmp_path: Path) -> None:
    """Several models of one snapshot are several models, also in a recipe."""
    rng = np.random.default_rng(0)
    for model in "abc":
        (tmp_path / "whole" / model).mkdir(parents=True)
        values = rng.standard_normal(100, dtype=np.float32)
        save_file({"w": values}, tmp_path / "whole" / model / "model.safetensors")
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        store.add(tmp_path / "whole", name="whole")
        for method in ("linear", "task_arithmetic"):
            experts = {"whole:b": 0.5, "whole:c": 0.25}
            plan = store.plan(MergeRequest(base="whole:a", experts=experts, method=method))
            store.merge(plan, name=method)
            text = store.recipe(method)
            assert [one["model"] for one in yaml.safe_load(text)["models"]] == [*experts]
            assert store.plan(store.read_recipe(text).request).plan == plan.plan


def test_models_are_named_by_refs(store: Store) -> None:
    """What is printed names models by refs, and gives their ids as comments: by the ref that the
    merge named, else by a branch, else by a tag. Without a ref, a model has its id. It is read back
    to the same plan."""
    merge = MergeRequest(base="base", experts=["math", "code"], method="task_arithmetic")
    plan = store.plan(merge)
    store.merge(plan, name="named")
    ids = {name: store[name].manifest.hex() for name in ("base", "math", "code")}
    store.tag("m", "math")
    store.reset("co", "code")
    text = store.recipe("named")
    assert f'- model: "code"  # {ids["code"]}\n' in text
    assert text.startswith("# The recipe of this merge. Comments behind names")
    assert f'base_model: "base"  # {ids["base"]}\n' in text
    assert f'- model: "math"  # {ids["math"]}\n' in text
    assert store.plan(store.read_recipe(text).request).plan == plan.plan
    asked = dataclasses.replace(merge, experts=[store["m"].id], parameters={"lambda": 0.5})
    store.merge(store.plan(asked), name="by-id")
    assert f'- model: "math"  # {ids["math"]}\n' in store.recipe("by-id")
    store.remove("m", "co", "by-id")
    store.merge(plan, name="gone")
    store.merge(store.plan(MergeRequest(base="base", experts=["gone"], method="linear")), name="of")
    id = store["gone"].manifest.hex()
    store.remove("gone", "named")
    assert f'- model: "{id}"\n' in store.recipe("of")


def test_words_are_no_refs() -> None:
    """A ref that a recipe would read as a word is not put in the place of an id."""
    one, other = "1" * 64, "2" * 64
    text = f'{HEAD[0]}\ntokenizer_source: "{one}"\nmodels:\n- model: "{one}"\n'
    assert named(text, {other: "x"}) == text
    told = named(text, {one: "base"})
    assert f'tokenizer_source: "{one}"\nmodels:\n- model: "base"  # {one}\n' in told
    adapted = f'- model: "{one}+{other}"\n'
    assert named(adapted, {other: "lora"}) == f'- model: "{one}+lora"  # {one}+{other}\n'


def test_what_was_added_has_no_recipe(store: Store) -> None:
    """A snapshot that no merge made is refused."""
    with pytest.raises(BadRequest, match="there is no recipe"):
        store.recipe("math")


def test_on_the_command_line(store: Store, tmp_path: Path) -> None:
    """`mstore recipe` prints it, exactly, and `--recipe` runs what it prints."""
    store.merge(store.plan(BY_OPTIONS["rules"]), name="printed")
    mstore = Program(store.path)
    text = store.recipe("printed")
    assert mstore.succeed("recipe", "printed").out == text
    assert mstore.succeed("recipe", "printed", "-q").out == text
    assert mstore.succeed("recipe", "printed", "--json").document == {"recipe": text}
    (tmp_path / "r.yml").write_text(text)
    done = mstore.succeed("merge", "--recipe", tmp_path / "r.yml", "--name", "printed")
    assert "nothing new: printed holds this merge already" in done.out
