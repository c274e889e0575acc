"""What a user of mergekit stumbled over in recipes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import small_layers
from cli_runs import Program

from mstore import Store
from mstore.merge.methods import registry
from mstore.merge.methods.registry import METHODS
from mstore.merge.planning import warnings
from mstore.terms.errors import BadRequest

ALONE = """\
merge_method: passthrough
models:
  - model: code
    parameters:
      scale:
        - {filter: mlp, value: 0.0}
        - value: 1.0
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_layers.write(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Store]:
    with Store.init(root / "store", block_size=1 << 16) as made:
        for name in ("base", "math", "code"):
            made.add(root / name, name=name)
        yield made


def test_the_scale_of_a_model(store: Store) -> None:
    """passthrough takes its scale from the model, as published recipes give it, with filters."""
    found = store.read_recipe(ALONE)
    assert found.remarks == ()
    store.merge(store.plan(found.request), name="scaled")
    for name in small_layers.NAMES:
        tensor = np.asarray(store["scaled"].tensor(name), dtype=np.float32)
        own = np.asarray(store["code"].tensor(name), dtype=np.float32)
        assert np.array_equal(tensor, own * (0 if "mlp" in name else 1)), name


PAIRED = (
    "merge_method: {method}\nbase_model: base\nmodels:\n  - {{model: math{weight}}}\n"
    "  - {{model: code{weight}}}\nparameters:\n"
)


def test_what_would_change_the_result_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter that a method lacks is refused by line, unless its value changes nothing."""
    stock = msgspec.structs.replace(METHODS["model_stock"], refuses=(("wide", False, "too wide"),))
    monkeypatch.setattr(registry, "METHODS", {**METHODS, "model_stock": stock})
    text = PAIRED.format(method="model_stock", weight="") + "  wide: "
    assert store.read_recipe(text + "false").request.method == "model_stock"
    with pytest.raises(BadRequest, match="no parameter wide: too wide") as caught:
        store.read_recipe(text + "true", where="r.yml")
    assert caught.value.where == "r.yml, line 7"


@pytest.mark.parametrize(
    ("method", "given", "parameters"),
    [
        ("model_stock", {"filter_wise": "true"}, {"filter_wise": True}),
        ("nuslerp", {"nuslerp_flatten": "false"}, {"nuslerp_flatten": False}),
        ("nuslerp", {"nuslerp_row_wise": "true"}, {"nuslerp_row_wise": True}),
    ],
)
def test_factors_of_rows(
    store: Store, method: str, given: dict[str, str], parameters: dict[str, object]
) -> None:
    """mergekit's options for rows are the method's; columns are refused."""
    weight = "" if method == "model_stock" else ", parameters: {weight: 0.5}"
    text = PAIRED.format(method=method, weight=weight)
    text += "".join(f"  {name}: {value}\n" for name, value in given.items())
    request = store.read_recipe(text).request
    assert request.parameters == parameters
    store.plan(request)
    if method == "nuslerp":
        other = "nuslerp_row_wise: true" if "nuslerp_flatten" in given else "nuslerp_flatten: false"
        with pytest.raises(BadRequest, match="turns columns"):
            store.plan(store.read_recipe(f"{text}  {other}\n").request)


@pytest.mark.parametrize(
    ("method", "models", "rest", "told"),
    [
        ("della", ("math",), "parameters: {density: 0.95, weight: 1}", "density - epsilon"),
        ("slerp", ("base", "math", "code"), "parameters: {t: 0.5}", "one expert"),
        ("slerp", ("base", "math", "code"), "parameters: {t: 0.5}", "/math}]\n"),
        ("nuslerp", ("math",), "parameters: {weight: 0.5}", "/math}, {model: MODEL}]\n"),
        ("model_stock", ("math",), "", "at least 2 experts"),
    ],
)
def test_nothing_is_added_for_what_no_method_can_do(
    root: Path, tmp_path: Path, method: str, models: tuple[str, ...], rest: str, told: str
) -> None:
    """A recipe whose numbers cannot be is refused with its line before a model is added."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    lines = [f"merge_method: {method}", f"base_model: {root}/base", "models:"]
    lines += [f"  - model: {root}/{name}" for name in models]
    recipe = tmp_path / "r.yml"
    recipe.write_text("\n".join([*lines, rest]) + "\n")
    done = mstore("merge", "--recipe", recipe, "--name", "m")
    assert done.status == 2
    assert told in done.err
    assert "line 1" in done.err
    assert mstore.succeed("refs", "-q").lines == []


def test_a_weight_that_is_missing(store: Store) -> None:
    """The refusal says what to write."""
    text = "merge_method: linear\nmodels: [{model: math}, {model: code}]\n"
    with pytest.raises(BadRequest, match="needs the weight of math") as caught:
        store.read_recipe(text)
    assert caught.value.hint == "parameters: {weight: 0.5}"


def test_a_wrong_option_beside_a_recipe(tmp_path: Path) -> None:
    """It is the option that is told, and not that a recipe follows --recipe."""
    mstore = Program(tmp_path / "store")
    done = mstore("merge", "--recipe", "r.yml", "--buget", "40%", "--name", "q")
    assert "--buget" in done.err
    assert "follows --recipe" not in done.err


def test_a_mean_of_models_warns_of_no_base(store: Store) -> None:
    """In a mean of whole models as vectors the base is a model like the others."""
    text = (
        "merge_method: karcher\nbase_model: base\nmodels:\n"
        "  - model: base\n  - model: math\n  - model: code\n"
    )
    plan = store.plan(store.read_recipe(text).request)
    assert [one for one in plan.warnings if one.kind == warnings.IS_BASE] == []


def test_the_seed_has_its_place(store: Store) -> None:
    """random_seed at the top of a recipe is told, or refused, with its place."""
    text = ALONE + "random_seed: 0\n"
    assert any("parameters, then seed" in remark for remark in store.read_recipe(text).warnings)
    with pytest.raises(BadRequest, match="random_seed") as caught:
        store.read_recipe(text, strict=True)
    assert "parameters, then seed" in (caught.value.hint or "")


def test_the_card_names_the_recipe(store: Store) -> None:
    """The card of a merge with filters says that the recipe beside it makes it again."""
    text = ALONE.replace("value: 0.0", "value: 0.5")
    store.merge(store.plan(store.read_recipe(text).request), name="half")
    card = store["half"].read("README.md").decode()
    assert "mstore merge --recipe mergekit_config.yml --name NEW" in card
    printed = store.recipe("half")
    again = store.plan(store.read_recipe(printed).request)
    assert again.plan == store.plan(store.read_recipe(text).request).plan
