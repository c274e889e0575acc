"""Recipes as people publish them: all run, and say what of them has no effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_layers
from adapters import Adapter
from cli_runs import Program
from families import cast
from published_recipes import PUBLISHED
from small_layers import LAYERS, member

from mstore import Store
from mstore.terms.errors import BadRequest

MODELS = ("base", "math", "code")
Q = "model.layers.{}.self_attn.q_proj"


@pytest.fixture(scope="module")
def mstore(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store with three models and an adapter of the first."""
    root = small_layers.write(tmp_path_factory.mktemp("published"))
    vocabulary = {"model": {"type": "BPE", "vocab": {f"w{n}": n for n in range(24)}, "merges": []}}
    for name in MODELS:
        (root / name / "tokenizer.json").write_text(json.dumps(vocabulary))
    rng = np.random.default_rng(7)
    factors = {
        Q.format(layer): (
            rng.standard_normal((24, 4), dtype=np.float32),
            rng.standard_normal((4, 32), dtype=np.float32),
        )
        for layer in range(LAYERS)
    }
    lora = Adapter(factors).write(root / "lora")
    program = Program(root / "store")
    program.succeed("init")
    program.succeed("add", root / "base", "--name", "org/base")
    for name in (*MODELS[1:], "lora"):
        path = lora if name == "lora" else root / name
        program.succeed("add", path, "--name", f"org/{name}", "--base", "org/base")
    return program


def run(mstore: Program, tmp_path: Path, name: str, *more: str) -> str:
    """Merge by a recipe, as `merged`; return what was printed beside the result."""
    path = tmp_path / "recipe.yml"
    path.write_text(PUBLISHED[name].format(**{one: f"org/{one}" for one in (*MODELS, "lora")}))
    done = mstore.succeed("merge", "--recipe", path, "--name", "merged", *more)
    return done.err.replace(f"{path}, ", "")


@pytest.mark.sampled(17)
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_runs(mstore: Program, tmp_path: Path, name: str) -> None:
    """Each runs, and the recipe that mstore prints for it gives the same model."""
    run(mstore, tmp_path, name)
    with Store.open(mstore.store) as store:
        before = store["merged"].manifest
        (tmp_path / "again.yml").write_text(store.recipe("merged"))
    mstore.succeed("merge", "--recipe", tmp_path / "again.yml", "--name", "again", "--strict")
    with Store.open(mstore.store) as store:
        assert store["again"].manifest == before


IGNORED = {
    "a revision beside a model": "line 5: a model has no key 'revision', and it is ignored",
    "a revision of a path": "line 3: revision is not looked up",
    "smooth and negative weights": "line 10: ties has no parameter 'smooth', and it is ignored",
    "int_space and int8_mask at the top": "line 10: a recipe has no key 'int_space'",
    "random_seed at the top": "(the seed is a parameter of the method: parameters, then seed)",
    "dtype among parameters": "line 10: ties has no parameter 'dtype'",
    "merge_method in a slice": "line 7: a slice has no key 'merge_method'",
    "residual_weight": "line 5: residual_weight does nothing",
    "misspelt keys": "line 8: a recipe has no key 'paramaters', and it is ignored, as in mergekit "
    "(did you mean parameters?)",
    "a misspelt parameter": "(did you mean normalize?)",
    "conditions of all shapes": "line 7: a condition of weight has no key 'note'",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", IGNORED)
def test_what_is_ignored_is_told(mstore: Program, tmp_path: Path, name: str) -> None:
    """A warning names what has no effect, with its line; --strict refuses it."""
    told = run(mstore, tmp_path, name)
    assert IGNORED[name] in told
    assert "warning: " in told
    refused = mstore("plan", "--recipe", tmp_path / "recipe.yml", "--strict")
    assert refused.status == 2
    assert "recipe.yml, line" in refused.err


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [one for one in PUBLISHED if one not in IGNORED])
def test_what_is_strict(mstore: Program, tmp_path: Path, name: str) -> None:
    """A recipe without anything that is ignored runs with --strict, too."""
    run(mstore, tmp_path, name, "--strict")


def test_strict_is_about_recipes(mstore: Program) -> None:
    """--strict without a recipe is refused."""
    asked = ("--base", "org/base", "--expert", "org/math", "--method", "linear")
    assert "--recipe" in mstore("plan", *asked, "--strict").err


@pytest.fixture
def store(mstore: Program) -> Iterator[Store]:
    with Store.open(mstore.store) as store:
        yield store


def test_an_adapter_alone_is_merged(mstore: Program, tmp_path: Path, store: Store) -> None:
    """MODEL+ADAPTER as the only model, whatever the method calls it, is the model with it."""
    run(mstore, tmp_path, "an adapter alone")
    base = store["org/base"]
    name = Q.format(2) + ".weight"
    assert store["merged"].tensor(name).tobytes() != base.tensor(name).tobytes()
    plan = store.show("merged").plan
    for shape in (
        "merge_method: ties\nbase_model: X\nmodels: [{model: X, parameters: {weight: 0.5}}]\n",
        "merge_method: linear\nmodels: [{model: X, parameters: {weight: 1}}]\n",
        "merge_method: passthrough\nslices: [{sources: [{model: X, layer_range: [0, 4]}]}]\n",
    ):
        text = shape.replace("X", "org/base+org/lora") + "dtype: bfloat16\n"
        assert store.prepare_recipe(text) == ()
        assert store.plan(store.read_recipe(text).request).plan == plan
    scaled = "merge_method: passthrough\nmodels: [{model: org/base+org/lora}]\n"
    found = store.read_recipe(scaled + "parameters: {scale: 0.5}\n").request
    assert (found.method, found.parameters) == ("passthrough", {"scale": 0.5})


def test_nothing_is_left_at_density_0(store: Store) -> None:
    """Where a density is 0, the model has no weight; where its weight would still divide, density
    0 is refused."""
    text = (
        "merge_method: {method}\nbase_model: org/base\nmodels:\n"
        "- {{model: org/math, parameters: {{weight: 1, density: [0, 1]}}}}\n"
        "- {{model: org/code, parameters: {{weight: 1, density: 1}}}}\n"
        "parameters: {{normalize: {normalize}}}\n"
    )
    for method, normalize in (("ties", "true"), ("della", "true"), ("dare_linear", "false")):
        request = store.read_recipe(text.format(method=method, normalize=normalize)).request
        assert [weight for _, weight in request.weighted()] == [0.0, 1.0]
        weights = [rule.weights for rule in request.rules]
        assert (1.0, 1.0) in weights
        assert (
            set(request.parameters["density"]) == {1.0}
            if isinstance(request.parameters["density"], tuple)
            else request.parameters["density"] == 1.0
        )
    with pytest.raises(BadRequest, match="density must be in"):
        store.read_recipe(text.format(method="dare_linear", normalize="true"))


def test_a_slice_with_fewer_models(mstore: Program, tmp_path: Path, store: Store) -> None:
    """Where a slice has fewer models than others, those that it lacks have no weight."""
    run(mstore, tmp_path, "slices of two models and of one")
    name = "model.layers.{}.mlp.up_proj.weight"
    base, math, code = (
        {one: values.astype(np.float32) for one, values in member(n).items()} for n in range(3)
    )
    found = store["merged"]
    mean = (base[name.format(1)] + math[name.format(1)]) / 2
    assert np.array_equal(found.tensor(name.format(1)).astype(np.float32), cast(mean, "F32"))
    for layer in (2, 3, 4):
        assert np.array_equal(found.tensor(name.format(layer)), code[name.format(layer - 1)])


def test_a_stack_in_another_type(mstore: Program, tmp_path: Path, store: Store) -> None:
    """A stack whose recipe asks for another type is a stack, and then a cast of it."""
    run(mstore, tmp_path, "a stack in another type")
    assert {one.dtype for one in store.tensors("merged")} == {"F16"}
    name = "model.layers.{}.mlp.up_proj.weight"
    own = store["org/math"].tensor(name.format(3)).astype(np.float16)
    assert np.array_equal(store["merged"].tensor(name.format(5)), own)
    same = PUBLISHED["a stack in another type"].replace("dtype: float16", "dtype: bfloat16")
    assert store.prepare_recipe(same.format(base="org/base", math="org/math")) == ()


def test_methods_without_weights(store: Store) -> None:
    """A method without weights needs as many models in each slice."""
    one = "{{model: org/{}, layer_range: [{}]}}".format
    text = (
        "merge_method: karcher\nslices:\n"
        f"- sources: [{one('base', '0, 2')}, {one('math', '0, 2')}]\n"
        f"- sources: [{one('code', '2, 4')}]\n"
    )
    with pytest.raises(BadRequest, match="karcher has no weights") as caught:
        store.read_recipe(text, where="r")
    assert caught.value.where == "r, line 4"
