"""Recipes as requests: values of each tensor, what is refused, and merges of real checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import families
import numpy as np
import pytest
import reference
import small_layers
from hypothesis import given
from hypothesis import strategies as st
from small_layers import LAYERS, NAMES, member

from mstore import MergeRequest, Store
from mstore.merge.methods.registry import METHODS
from mstore.merge.planning.recipes import checked
from mstore.merge.planning.request import Rule, Rules
from mstore.merge.recipes.layers import ModelLayers, layers_of
from mstore.merge.recipes.recipe import Condition, NotThatKind, Setting
from mstore.store.objects.shapes import literal_name, literal_pattern, matching
from mstore.terms.errors import BadRequest, NotFound

Q, UP, LN = "self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A base and two fine-tunes with four layers."""
    root = tmp_path_factory.mktemp("recipes")
    small_layers.write(root)
    with Store.init(root / "store", block_size=1 << 16) as made:
        made.add(root / "base", name="base")
        for name in ("math", "code"):
            made.add(root / name, name=name, base="base")
        yield made


def values(request: MergeRequest) -> dict[str, tuple[dict[str, Any], tuple[float, ...]]]:
    """Parameters and weights of every tensor, from the request's own and its rules."""
    own = tuple(weight for _, weight in request.weighted())
    found = {name: (dict(request.parameters), own) for name in NAMES}
    for rule in request.rules:
        for name in matching(NAMES, rule.patterns()):
            weights = own if rule.weights is None else tuple(rule.weights)
            found[name] = ({**request.parameters, **rule.parameters}, weights)
    return found


def layer(number: int, part: str) -> str:
    return f"model.layers.{number}.{part}"


# -- settings ------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=6),
    st.integers(1, 40),
)
def test_gradients_meet_their_points(points: list[float], count: int) -> None:
    """A gradient has its first value at the first layer, its last at the last, and in between it
    is on the line between its neighbours."""
    setting = Setting((Condition(tuple(points), None, 1),), 1)
    for number in range(count):
        t = number / (count - 1) if count > 1 else 1.0
        found, _ = setting.value("x", t, "float") or (None, 0)
        wanted = np.interp(t * (len(points) - 1), range(len(points)), points)
        assert found == pytest.approx(wanted, abs=1e-12)
    assert setting.value("x", 0.0, "float") == (points[0], 1)
    assert setting.value("x", 1.0, "float") == (points[-1], 1)


def test_kinds() -> None:
    """Text that is a number is one; true is 1; a bool never interpolates; what is neither is
    refused."""

    def at(value: Any, t: float, kind: Any) -> object:
        found = Setting((Condition(value, None, 3),), 3).value("x", t, kind)
        return None if found is None else found[0]

    assert at("1e-3", 0, "float") == 0.001
    assert at(True, 0, "float") == 1.0
    assert at((0, "1"), 0.25, "float") == 0.25
    assert at((True, False, True), 0.6, "bool") is False
    assert at(1, 0, "bool") is True
    assert at("no", 0, "bool") is False
    assert at(3.0, 0, "int") == 3
    assert at((), 0.5, "float") is None
    for value, kind in (("x", "float"), (0.5, "bool"), ("maybe", "bool"), (0.5, "int")):
        with pytest.raises(NotThatKind):
            at(value, 0, kind)


def test_the_first_filter_counts() -> None:
    """A filter is part of a name, "*" or nothing; the first that matches counts."""
    setting = Setting(
        (
            Condition(1, "mlp", 1),
            Condition(2, "layers.1.", 2),
            Condition((), "norm", 3),
            Condition(3, "*", 4),
            Condition(4, None, 5),
        ),
        1,
    )
    found = {name: setting.value(name, 0, "float") for name in (*NAMES, "")}
    assert found[layer(1, UP)] == (1, 1)
    assert found[layer(1, Q)] == (2, 2)
    assert found["model.norm.weight"] is None
    assert found["lm_head.weight"] == found[""] == (3, 4)


# -- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "layers", "stacks"),
    [
        (NAMES, None, {"model.layers": 4}),
        (NAMES, 3, {"model.layers": 3}),
        (["h.0.attn.weight", "h.11.mlp.weight", "wte.weight"], None, {"h": 12}),
        (["model.layers.0.mlp.experts.7.w1.weight"], None, {"model.layers": 1}),
        (["encoder.layers.1.a.w", "decoder.layers.2.a.w"], 9,
         {"encoder.layers": 2, "decoder.layers": 3}),
        (["model.layers.3.a.w", "projector.2.weight"], None, {"model.layers": 4}),
        (["net.0.weight", "net.2.weight"], None, {"net": 3}),
        (["a.weight"], None, {}),
    ],
)  # fmt: skip
def test_layers_by_name(
    names: Sequence[str], layers: int | None, stacks: Mapping[str, int]
) -> None:
    """The first number in a name is the layer; a config may say that there are fewer."""
    layout = ModelLayers.of(names, layers)
    assert layout.stacks == stacks
    for name in names:
        place = layout.layer(name)
        assert place is None or place[0] < place[1]
    assert layout.layer("lm_head.weight") is None


SEEING = ["visual.blocks.4.a.w", "visual.post_layernorm.w", "model.layers.3.a.w", "mtp.layers.0.w"]


@pytest.mark.parametrize(
    ("names", "layers", "main", "further"),
    [
        (NAMES, None, "model.layers", 0),
        (NAMES, 3, "model.layers", 1),
        (SEEING, 4, "model.layers", 0),
        (SEEING, 3, "model.layers", 1),
        # Neither names nor config alone are enough.
        (SEEING, None, None, 0),
        (SEEING, 5, None, 0),
        (["encoder.block.1.a.w", "decoder.block.1.a.w"], 2, None, 0),
        (["vision_model.encoder.layers.1.w"], None, "vision_model.encoder.layers", 0),
        (["a.weight"], 4, None, 0),
    ],
)
def test_the_stack_that_slices_are_of(
    names: Sequence[str], layers: int | None, main: str | None, further: int
) -> None:
    """It is the only one, or the text model's if names and config say so."""
    layout = ModelLayers.of(names, layers)
    assert (layout.main, layout.further) == (main, further)


def test_what_stands_after_the_layers() -> None:
    """Heads, the norm beside the layers and what predicts further tokens; nothing of a tower."""
    layout = ModelLayers.of(SEEING, 3)
    last = ["model.norm.w", "head.w", "final_norm.w", "mtp.fc.w", "model.layers.3.a.w"]
    first = ["visual.post_layernorm.w", "visual.head.w", "model.embed.norm.w", "norm", "x.norm.w"]
    assert [name for name in (*last, *first) if layout.is_last(name)] == last
    alone = ModelLayers.of(["visual.blocks.4.a.w"])
    assert alone.is_last("visual.post_layernorm.w")


def test_loose_tensors_and_configs() -> None:
    """Norm and head come after the last layer; a config names its layers in several ways."""
    layout = ModelLayers.of(NAMES)
    last = [name for name in NAMES if layout.layer(name) is None and layout.is_last(name)]
    assert last == ["model.norm.weight", "lm_head.weight"]
    assert layers_of({"num_hidden_layers": 4}) == 4
    for key in ("text_config", "llm_config", "language_config"):
        assert layers_of({key: {"n_layer": 5}}) == 5
    assert layers_of({"num_hidden_layers": True, "text_config": 3}) is None


# -- rules ---------------------------------------------------------------------------------------


@given(st.text(alphabet="a*?[]!.", max_size=8), st.text(alphabet="a*?[]!.", max_size=8))
def test_a_literal_pattern_matches_its_name_alone(name: str, other: str) -> None:
    """A name as a pattern matches itself and nothing else, and gives the name back."""
    pattern = literal_pattern(name)
    assert literal_name(pattern) == name
    assert matching([name, other], [pattern]) == {name}
    found = literal_name(other)
    assert found is None or matching([name, found], [other]) == {found}


@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "ab", "a*", "?", "*b", "[[]", "c"]), min_size=1),
        max_size=5,
    )
)
def test_the_first_rule_counts(patterns: list[list[str]]) -> None:
    """Names are looked up and patterns tried: the answer is that of trying all rules in order."""
    none: Any = None
    made = [Rule(tuple(one), none, str(number)) for number, one in enumerate(patterns)]
    rules = Rules(made)
    names = ("a", "b", "ab", "[", "c", "zz")
    for name in names:
        wanted = next((one for one in made if matching([name], one.patterns)), None)
        assert rules.of(name) is wanted
    unmatched = [p for one in patterns for p in one if not matching(names, [p])]
    assert rules.unmatched(names) == (unmatched[0] if unmatched else None)


# -- values of tensors ---------------------------------------------------------------------------


def test_published_slerp(store: Store) -> None:
    """Gradients for attention and mlp, a value for the rest; loose tensors are at t = 0."""
    found = store.read_recipe(
        """
        slices:
          - sources:
              - {model: base, layer_range: [0, 4]}
              - {model: math, layer_range: [0, 4]}
        merge_method: slerp
        base_model: base
        parameters:
          t:
            - {filter: self_attn, value: [0, 0.5, 1]}
            - {filter: mlp, value: [1, 0]}
            - value: [0.25, 1]
        dtype: float32
        out_dtype: float16
        """
    )
    assert found.remarks == ()
    assert (found.request.base, found.request.experts) == ("base", (("math", 1.0),))
    assert (found.request.method, found.request.dtype) == ("slerp", "float16")
    t = {name: parameters["t"] for name, (parameters, _) in values(found.request).items()}
    assert [t[layer(n, Q)] for n in range(LAYERS)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert [t[layer(n, UP)] for n in range(LAYERS)] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert [t[layer(n, LN)] for n in range(LAYERS)] == pytest.approx([0.25, 0.5, 0.75, 1])
    assert t["model.embed_tokens.weight"] == t["lm_head.weight"] == 0.25


def test_precedence(store: Store) -> None:
    """Source before slice before recipe, for each tensor alone; an empty answer falls through."""
    found = store.read_recipe(
        """
        slices:
          - sources:
              - {model: base, layer_range: [0, 2]}
              - model: math
                layer_range: [0, 2]
                parameters:
                  weight: [{filter: mlp, value: 1}]
              - {model: code, layer_range: [0, 2]}
            parameters:
              weight: [{filter: mlp, value: 2}, {filter: self_attn, value: 3}]
          - sources:
              - {model: base, layer_range: [2, 4]}
              - {model: math, layer_range: [2, 4]}
              - {model: code, layer_range: [2, 4], parameters: {weight: [5, 6]}}
        merge_method: task_arithmetic
        base_model: base
        parameters: {weight: 4}
        """
    )
    weights = {name: weights for name, (_, weights) in values(found.request).items()}
    assert weights[layer(0, UP)] == (1, 2)
    assert weights[layer(1, Q)] == (3, 3)
    assert weights[layer(0, LN)] == (4, 4)
    assert weights[layer(2, UP)] == (4, 5)
    assert weights[layer(3, UP)] == (4, 6)
    assert weights["model.embed_tokens.weight"] == (4, 4)
    assert weights["lm_head.weight"] == (4, 5)


def test_ties_as_published(store: Store) -> None:
    """The base in `models` is dropped; equal densities are one; int8_mask changes nothing."""
    found = store.read_recipe(
        """
        models:
          - model: base
            # no parameters necessary for base model
          - model: math
            parameters: {density: 0.5, weight: 0.5}
          - model: code
            parameters: {density: 0.5, weight: [{filter: mlp, value: 0.5}, {value: 0.25}]}
        merge_method: ties
        base_model: base
        parameters: {normalize: true, int8_mask: true}
        dtype: float16
        """
    )
    assert found.request.parameters == {"density": 0.5, "normalize": True}
    assert found.request.experts == (("math", 0.5), ("code", 0.25))
    (rule,) = found.request.rules
    assert rule.weights == (0.5, 0.5)
    assert set(rule.patterns()) == {layer(n, UP) for n in range(LAYERS)}
    assert found.request.dtype == "float16"
    assert found.remarks == ()


def test_each_model_its_own_density(store: Store) -> None:
    """Densities that differ between models are a value for each expert, in order."""
    found = store.read_recipe(
        """
        models:
          - {model: math, parameters: {density: 0.5, weight: 1}}
          - {model: base, parameters: {density: 0.9}}
          - {model: code, parameters: {density: 0.53, weight: 1}}
        merge_method: dare_ties
        base_model: base
        """
    )
    assert found.request.parameters["density"] == (0.5, 0.53)
    assert found.remarks == ("the recipe, line 4: density of the base model has no effect",)


def test_each_model_its_own_density_is_planned(store: Store) -> None:
    """A recipe with a density for each model can be planned."""
    found = store.read_recipe(
        """
        models:
          - {model: math, parameters: {density: 0.5, weight: 1}}
          - {model: code, parameters: {density: 0.53, weight: 1}}
        merge_method: ties
        base_model: base
        """
    )
    assert store.plan(found.request).parameters["density"] == (0.5, 0.53)


def test_rescale_is_mergekits(store: Store) -> None:
    """mergekit's `rescale: true`, its default, restores L1 norms; `density` is the paper's."""
    text = "merge_method: dare_ties\nbase_model: base\nmodels: [{model: math}]\n"
    text += "parameters: {weight: 1, density: 0.5"
    for written, wanted in (
        ("", "l1"),
        (", rescale: true", "l1"),
        (", rescale: no", False),
        (", rescale: density", True),
        (", rescale: [1, density]", "l1"),
    ):
        request = store.read_recipe(f"{text}{written}}}").request
        assert request.parameters["rescale"] is wanted or request.parameters["rescale"] == wanted
    text = text.replace("dare_ties", "della")
    assert "rescale" not in store.read_recipe(f"{text}}}").request.parameters
    assert store.read_recipe(f"{text}, rescale: 1}}").request.parameters["rescale"] is True
    with pytest.raises(BadRequest, match="not 'l2'"):
        store.read_recipe(f"{text}, rescale: l2}}")


def test_a_word_stands_for_a_number(store: Store) -> None:
    """Where a parameter takes one, a recipe does, too; another word is refused by the line."""
    text = "merge_method: regmean\nbase_model: base\nmodels: [{model: math}]\n"
    text += "companions: {'gram:math': code}\nparameters: {weight: 1, block: "
    for written, wanted in (("full", 0), ("32", 32)):
        request = store.read_recipe(f"{text}{written}}}").request
        assert METHODS["regmean"].parse(request.parameters)["block"] == wanted
    with pytest.raises(BadRequest, match="line 5: block takes a whole number, not 'half'"):
        store.read_recipe(f"{text}half}}")


def test_linear_counts_its_base(store: Store) -> None:
    """For an average every listed model is an expert, also the base; without base_model the first
    model gives the rest of the files."""
    text = "merge_method: linear\nmodels: [{model: math, parameters: {weight: 2}}, {model: base}]\n"
    found = store.read_recipe(f"{text}parameters: {{weight: 1}}\n")
    assert found.request.base == "math"
    assert found.request.experts == (("math", 2.0), ("base", 1.0))
    found = store.read_recipe(f"{text}parameters: {{weight: 1}}\nbase_model: code\n")
    assert found.request.base == "code"
    assert found.request.experts == (("math", 2.0), ("base", 1.0), ("code", 1.0))


def test_what_has_no_effect_is_told(store: Store) -> None:
    """Parameters of other methods, and of one model where all share them, are named by line."""
    found = store.read_recipe(
        "merge_method: slerp\nbase_model: base\nmodels:\n- model: base\n- model: math\n"
        "  parameters:\n    weight: 0.3\n    t: 0.9\nparameters:\n  t: 0.5\n  density: 0.5\n"
    )
    assert found.request.parameters == {"t": 0.5}
    assert found.remarks == (
        "the recipe, line 11: density has no effect with slerp",
        "the recipe, line 7: weight has no effect with slerp",
        "the recipe, line 8: t has no effect as a parameter of one model",
    )


SLICED = """\
merge_method: {method}
base_model: base
slices:
- sources:
  - {{model: base, layer_range: {first}}}
  - {{model: {other}, layer_range: {second}}}
{more}
parameters: {{{parameters}}}
"""


@pytest.mark.parametrize(
    ("changes", "line", "what"),
    [
        ({"first": "[0, 5]", "second": "[0, 5]"}, 5, "base has 4 layers, not 5"),
        ({"second": "[0, 3]"}, 4, "same number of layers, not 4 of base, 3 of math"),
        ({"other": "base"}, 6, "given twice"),
        ({"more": "- sources: [{model: base, layer_range: [0, 4]}]"}, 7, "and another 2"),
        ({"more": "- sources: [{model: math, layer_range: [0, 4]}]"}, 7, "base is not among"),
        ({"first": "[0, 2]", "second": "[2, 4]", "more": "  - {model: base, layer_range: [2, 4]}"},
         7, "given twice"),
        ({"method": "arcee_fission"}, 1, "unknown method 'arcee_fission'"),
        ({"method": "regression"}, 1, "unknown method"),
        ({"parameters": "s: 1"}, 8, "no parameter 's'"),
        ({"parameters": ""}, 1, "needs the t"),
        ({"parameters": "t: x"}, 8, "takes a number"),
        ({"parameters": "t: 1.5"}, 8, "must be in"),
        ({"parameters": "t: [{filter: mlp, value: 1}]"}, 1, "needs the t for model.embed"),
        ({"more": "tokenizer: {tokens: {x: {source: code}}}"}, 7, "not one of the models"),
        ({"more": "dtype: float64"}, 7, "float64 is not supported"),
        ({"more": "out_dtype: int8"}, 7, "int8 is not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(store: Store, changes: Mapping[str, str], line: int, what: str) -> None:
    """Whatever would give another model than mergekit's is refused by name and line."""
    plain = {"method": "slerp", "first": "[0, 4]", "second": "[0, 4]", "other": "math"}
    plain |= {"parameters": "t: 0.5", "more": ""}
    assert store.read_recipe(SLICED.format(**plain)).request.method == "slerp"
    with pytest.raises(BadRequest) as caught:
        store.read_recipe(SLICED.format(**(plain | changes)), where="r.yml", strict=True)
    assert what in caught.value.what
    assert caught.value.where == f"r.yml, line {line}"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("merge_method: ties\nmodels:\n- model: math\n", "r, line 1", "needs a base_model"),
        ("merge_method: ties\nbase_model: base\nmodels:\n- model: base\n", "r, line 1",
         "no model but the base"),
        ("merge_method: ties\nbase_model: base\nmodels:\n- model: math\n", "r, line 4",
         "needs the weight of math"),
        (("merge_method: ties\nbase_model: base\nmodels:\n- model: math\n"
         "parameters: {weight: 1, rescale: true}\n"), "r, line 5", "does not rescale"),
        ("merge_method: linear\nmodels:\n- model: math\nparameters: {weight: 1}\n---\na: b\n",
         "r, line 6", "names its merge_method"),
        (("merge_method: linear\nmodels:\n- model: math\n---\nmerge_method: ties\nmodels:\n"
         "- model: a\n"), "r, line 5", "there are 2 recipes in it"),
    ],
)  # fmt: skip
def test_more_that_is_refused(store: Store, text: str, where: str, what: str) -> None:
    """What a recipe lacks, and several documents, are refused too."""
    with pytest.raises(BadRequest) as caught:
        store.read_recipe(text, where="r")
    assert what in caught.value.what
    assert caught.value.where == where


DENSE = """
merge_method: dare_ties
base_model: base
models: [{model: math, parameters: {weight: 1, density: 2}}]
"""
MOE = "base_model: base\ngate_mode: hidden\nexperts:\n- {source_model: math}\n"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        (
            MOE,
            "a recipe of a mixture of experts",
            "store.plan_moe(TEXT) makes it at once: it copies no weight, and needs no plan before",
        ),
        (
            DENSE,
            "density must be in (0, 1], and at least 2^-32, not 2",
            None,
        ),
        (
            "merge_method: model_stock\nbase_model: base\nmodels: [{model: math}]\n",
            "takes at least 2 experts, not 1",
            "models: [{model: math}, {model: MODEL}]",
        ),
        (
            "merge_method: linear\nbase_model: base\nmodels: [{model: a, parameters: {weight: 1}}]",
            "linear needs the weight of base",
            "linear averages base_model like the others: remove it, or list it in models",
        ),
    ],
)
def test_the_hint_is_about_the_recipe(text: str, what: str, hint: str | None, strict: bool) -> None:
    """What other programs' recipes, or other methods', have is told in words of a recipe."""
    with pytest.raises(BadRequest) as caught:
        checked(text, where="r", strict=strict)
    assert what in caught.value.what
    assert (caught.value.hint and str(caught.value.hint)) == hint


def test_hints_name_parameters_of_the_method(store: Store) -> None:
    """A parameter that is none of the method's is no slip for one of another method."""
    text = SLICED.format(
        method="slerp", first="[0, 4]", second="[0, 4]", other="math", more="",
        parameters="t: 0.5, flor: 1",
    )  # fmt: skip
    assert "floor" not in " ".join(store.read_recipe(text).warnings)


def test_unknown_models(store: Store) -> None:
    """A model that is no revision of the store is an error; names can be mapped to revisions."""
    text = "merge_method: linear\nmodels:\n- model: org/m\nparameters: {weight: 1}\n"
    with pytest.raises(NotFound, match="no model org/m") as caught:
        store.read_recipe(text, where="r")
    assert caught.value.where == "r, line 3"
    found = store.read_recipe(text, models={"org/m": "math"})
    assert found.request.experts == (("math", 1.0),)


# -- merges --------------------------------------------------------------------------------------


def test_a_merge_is_what_the_recipe_says(store: Store) -> None:
    """Every tensor of the merge is the reference's with the recipe's values for that tensor."""
    found = store.read_recipe(
        """
        models:
          - model: base
          - model: math
            parameters:
              weight: [0.2, 0.8]
          - model: code
            parameters:
              weight: [{filter: mlp, value: [1, 0.5]}, {value: 0.3}]
        merge_method: ties
        base_model: base
        parameters:
          density: [{filter: self_attn, value: 0.3}, {value: 0.6}]
          lambda: 0.9
        dtype: float32
        """
    )
    plan = store.plan(found.request)
    assert store.merge(plan, name="merged").expert_bytes_read == plan.planned_expert_bytes
    merged = store["merged"].load()
    base, math, code = member(0), member(1), member(2)
    for number in range(LAYERS):
        t = number / (LAYERS - 1)
        for part in (Q, UP, LN):
            name = layer(number, part)
            weights = [0.2 * (1 - t) + 0.8 * t, 1 - t / 2 if part == UP else 0.3]
            wanted = reference.merge(
                "ties",
                {"density": 0.3 if part == Q else 0.6, "lambda": 0.9},
                [float(np.float32(weight)) for weight in weights],
                base[name],
                [math[name], code[name]],
                tensor=name,
                out_dtype="F32",
            )
            assert np.array_equal(families.bits(merged[name]), families.bits(wanted)), name
