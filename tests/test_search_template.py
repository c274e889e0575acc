"""Recipes with free numbers: names, ranges, filling in, groups; configs of mergekit-evolve."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.merge.recipes.documents import read_documents
from mstore.merge.recipes.parse import parse
from mstore.merge.recipes.recipe import Recipe
from mstore.search.genome import read_template
from mstore.search.template import MOST, Evaluation, Free, Template
from mstore.terms.errors import BadRequest

RECIPE = """\
# how much of each
merge_method: ties
base_model: base
models:
  - model: code
    parameters:
      weight: {min: 0, max: 1}
      density:
        - filter: mlp
          value: {min: 0.1, max: 1, log: true}
        - value: [{min: 0, max: 1, step: 0.3}, 0.7, {min: 0, max: 1}]
  - model: ../models/math
    parameters: {weight: {min: -1, max: 1}, density: 0.5}
  - model: base
parameters:
  normalize: yes
  lambda:
    min: 0.5
    max: 2
tokenizer_source: code
dtype: bfloat16
"""


def template(text: str) -> Template:
    return read_template(text, "r.yml", lambda model: 8)


def recipe_of(text: str) -> Recipe:
    (found,) = parse(text, "r.yml")
    return found


def test_names_and_starts() -> None:
    """Places name free numbers; weights begin with 1/K, the others in the middle."""
    found = template(RECIPE)
    assert dict(zip((one.name for one in found.free), found.start(), strict=True)) == {
        "code.weight": 0.5,
        "code.density[mlp]": pytest.approx(0.3162),
        "code.density[0]": 0.6,
        "code.density[2]": 0.5,
        "math.weight": 0.5,
        "lambda": 1.25,
    }
    assert found.models == ("code", "../models/math")
    assert found.free[2].high == pytest.approx(0.9)


def test_what_is_filled_in_is_the_recipe() -> None:
    """All but the free numbers is as it was written, on the same line."""
    found = template(RECIPE)
    text = found.fill([1, 2, 3, 4, 5, 6])
    written = RECIPE
    for range_, value in (
        ("{min: 0, max: 1}", "1.0"),
        ("{min: 0.1, max: 1, log: true}", "2.0"),
        ("{min: 0, max: 1, step: 0.3}", "3.0"),
        ("{min: 0, max: 1}", "4.0"),
        ("{min: -1, max: 1}", "5.0"),
        ("\n    min: 0.5\n    max: 2", "\n    6.0\n"),
    ):
        written = written.replace(range_, value, 1)
    assert recipe_of(text) == recipe_of(written)


def test_experts_that_are_left_out() -> None:
    """Of a subset of the experts, the recipe has these and the base, and weights are shares."""
    found = template(RECIPE)
    recipe = recipe_of(found.fill(found.start(["code"]), ["code"]))
    assert [str(one.model) for one in recipe.models] == ["code", "base"]
    assert found.start(["code"])[0] == 1
    sliced = template(
        "merge_method: linear\nslices:\n"
        "  - sources:\n"
        "      - {model: a, layer_range: [0, 4], parameters: {weight: {min: 0, max: 1}}}\n"
        "      - {model: b, layer_range: [0, 4], parameters: {weight: 1}}\n"
    )
    assert [one.name for one in sliced.free] == ["a.weight@0-4"]
    (part,) = recipe_of(sliced.fill([0.5], ["b"])).slices
    assert [str(one.model) for one in part.sources] == ["b"]


def test_what_belongs_to_an_expert_goes_with_it() -> None:
    """Companions of experts that are left out are, too; those of others, the base and the merge
    stay."""
    text = "merge_method: regmean\nbase_model: base\nmodels:\n"
    text += "".join(
        f"  - {{model: {name}, parameters: {{weight: {{min: 0, max: 1}}}}}}\n" for name in "ab"
    )
    text += "companions: {'gram:a': ga, 'gram:b': gb, 'activation:base': base, aligned: a}\n"
    kept = recipe_of(template(text).fill([0.5, 0.5], ["b"])).companions
    told = {str(key): str(one) for key, one in kept}
    assert told == {"gram:b": "gb", "activation:base": "base", "aligned": "a"}


@given(
    tree=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp"))),
        lambda inside: (
            st.lists(inside, max_size=3)
            | st.dictionaries(st.text(alphabet="abcxyz", min_size=1), inside, max_size=3)
        ),
        max_leaves=10,
    )
)
def test_any_document_is_written_as_it_was_read(tree: object) -> None:
    """Whatever a document has, filling it in gives the same values."""
    text = json.dumps({"key": tree}, ensure_ascii=True, allow_nan=False, default=str)
    try:
        (before,) = read_documents(text, "r")
    except BadRequest:
        return
    found = template(text)
    if not found.free:
        (after,) = read_documents(found.fill([]), "r")
        assert after == before


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{min: 0}", "lacks max"),
        ("{min: 0, max: 1, steps: 2}", "no 'steps'"),
        ("{min: 1, max: 1}", "min of a.weight must be less than its max"),
        ("{min: 0, max: 1, log: true}", "with log, min of a.weight must be more than 0"),
        ("{min: 0, max: 1, log: 7}", "log of a.weight is true or false"),
        ("{min: 0, max: 1, step: 2}", "step of a.weight is more than 0 and at most"),
        ("{min: zero, max: 1}", "min is a number"),
        ("{min: 0, max: .inf}", "max is a number"),
    ],
)
def test_ranges_that_are_none(written: str, told: str) -> None:
    """What is wrong with a range is told with its line."""
    text = f"merge_method: linear\nmodels:\n  - model: a\n    parameters: {{weight: {written}}}\n"
    with pytest.raises(BadRequest, match=told) as caught:
        template(text)
    assert caught.value.where == "r.yml, line 4"


def test_one_recipe() -> None:
    """A file of several recipes is refused."""
    with pytest.raises(BadRequest, match="one recipe, and there are 2"):
        template("a: 1\n---\nb: 2\n")


def many(models: int, filters: int) -> str:
    conditions = "".join(
        f"        - {{filter: f{number}, value: {{min: 0, max: 1}}}}\n" for number in range(filters)
    )
    return "merge_method: linear\nmodels:\n" + "".join(
        f"  - model: m{number}\n    parameters:\n      weight:\n{conditions}"
        for number in range(models)
    )


def test_above_sixteen_some_become_one() -> None:
    """First the numbers of one model become one, then those of all; a remark says so."""
    few = template(many(4, 4))
    assert few.grouped() is few
    assert len(few.free) == MOST
    by_model = template(many(4, 5)).grouped()
    assert [one.name for one in by_model.free] == [
        "m0.weight",
        "m1.weight",
        "m2.weight",
        "m3.weight",
    ]
    (told,) = by_model.remarks
    assert told.startswith(
        "20 free numbers are too many to search for, so they became 4: m0.weight"
    )
    recipe = recipe_of(by_model.fill([0.1, 0.2, 0.3, 0.4]))
    assert {value for value, _ in recipe.models[2].settings["weight"].values()} == {0.3}
    of_all = template(many(17, 1)).grouped()
    assert [one.name for one in of_all.free] == ["weight"]
    assert of_all.start() == (pytest.approx(1 / 17, abs=1e-4),)


def test_the_digest_is_of_what_is_said() -> None:
    """Comments and layout change nothing; a range does."""
    text = "merge_method: linear\nmodels: [{model: a, parameters: {weight: {min: 0, max: 1}}}]\n"
    spread = text.replace("[{model", "\n  # first\n  [{model").replace("max: 1}", "max: 1.0}")
    assert template(text).digest() == template(spread).digest()
    assert template(text).digest() != template(text.replace("max: 1", "max: 2")).digest()


@given(
    low=st.floats(-10, 10),
    width=st.floats(1e-3, 10),
    step=st.none() | st.floats(0.01, 1),
    value=st.floats(-20, 20),
)
def test_rounded_values_are_in_the_range(
    low: float, width: float, step: float | None, value: float
) -> None:
    """A rounded value is in the range, and on a step."""
    if step is not None and step > width:
        step = None
    one = Free("a", "weight", None, low, low + width, step=step)
    rounded = one.rounded(value)
    assert one.low <= rounded <= one.high
    if step is not None and one.low < rounded < one.high:
        steps = (rounded - low) / step
        assert steps == pytest.approx(round(steps), abs=1e-6)


# Configs of mergekit-evolve


def evolve(**genome: object) -> str:
    own = {"models": ["a", "b"], "merge_method": "ties", "base_model": "base", **genome}
    tasks = [{"name": "sums", "metric": "acc,none"}, "words"]
    return json.dumps({"genome": own, "tasks": tasks, "limit": 100})


def test_a_genome() -> None:
    """Each model has a weight, and a density where the method has one."""
    found = template(evolve())
    assert [(one.name, one.low, one.high) for one in found.free] == [
        *(("a.weight", 0, 1), ("a.density", 0.1, 1)),
        *(("b.weight", 0, 1), ("b.density", 0.1, 1)),
    ]
    recipe = recipe_of(found.fill(found.start()))
    assert (recipe.method.text, str(recipe.base)) == ("ties", "base")
    assert next(recipe.settings["normalize"].values())[0] is True
    assert [one.low for one in template(evolve(allow_negative_weights=True)).free][::2] == [-1, -1]
    soup = template(evolve(merge_method="linear", base_model=None))
    assert [one.name for one in soup.free] == ["a.weight", "b.weight"]


def test_groups_of_layers_and_filters() -> None:
    """Groups of layers are slices, or with `smooth` values over the layers; filters have numbers of
    their own."""
    found = template(evolve(merge_method="task_arithmetic", layer_granularity=4, filters=["mlp"]))
    assert [one.name for one in found.free][:4] == [
        *("a.weight[mlp]@0-4", "a.weight@0-4", "b.weight[mlp]@0-4", "b.weight@0-4")
    ]
    assert len(found.free) == 8
    assert [part.sources[2].layers for part in recipe_of(found.fill(found.start())).slices] == [
        (0, 4),
        (4, 8),
    ]
    smooth = template(evolve(merge_method="task_arithmetic", layer_granularity=4, smooth=True))
    assert [one.name for one in smooth.free] == [
        *("a.weight[0]", "a.weight[1]", "b.weight[0]", "b.weight[1]")
    ]
    slerp = template(evolve(merge_method="slerp", base_model=None, layer_granularity=4))
    assert [one.name for one in slerp.free] == ["t@0-4", "t@4-8"]


@pytest.mark.parametrize(
    ("genome", "told"),
    [
        ({"merge_method": "della"}, "no merge_method della: it has linear"),
        ({"tokenizer_source": "union"}, "tokenizer_source of a genome is not supported"),
        ({"layer_granularity": 3}, "layer_granularity 3 does not divide"),
        ({"merge_method": "slerp", "models": ["a", "b", "c"]}, "slerp among 3 models"),
        ({"models": []}, "a genome has models"),
        ({"sigma": 1}, "a genome has no sigma"),
    ],
)
def test_what_is_not_supported(genome: dict[str, object], told: str) -> None:
    """What is not supported of a genome is named."""
    with pytest.raises(BadRequest, match=told):
        template(evolve(**genome))


def test_tasks_become_a_command() -> None:
    """The tasks of a config are told as options of lm-evaluation-harness, and its score."""
    found = template(evolve())
    assert found.evaluation == Evaluation(
        {"tasks": "sums,words", "limit": "100"}, "**/results_*.json:results.sums.acc,none"
    )
