"""Recipes that need models first: layers scaled in stacks, layers of different numbers merged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_layers
from cli_runs import Program
from families import Arrays, cast
from printed import by_ids
from small_layers import NAMES, member

from mstore import Store
from mstore.merge.methods import registry
from mstore.merge.planning.recipe_text import known_method
from mstore.merge.recipes.parse import parse
from mstore.merge.recipes.prepared import prepare
from mstore.terms.errors import BadRequest, NotFound

MODELS = ("base", "math", "code")

EXPANDED = """\
merge_method: passthrough
slices:
- sources: [{model: base, layer_range: [0, 3]}]
- sources:
  - model: base
    layer_range: [2, 3]
    parameters:
      scale:
      - {filter: q_proj, value: 0.0}
      - {filter: up_proj, value: 0.5}
      - {value: 1.0}
- sources: [{model: base, layer_range: [3, 4]}]
"""
APART = """\
merge_method: task_arithmetic
base_model: base
slices:
- sources:
  - {model: base, layer_range: [0, 2]}
  - {model: math, layer_range: [1, 3]}
- sources:
  - {model: code, layer_range: [3, 4], parameters: {weight: 0.5}}
  - {model: base, layer_range: [0, 1]}
parameters: {weight: 1.0}
"""


def build(root: Path) -> None:
    """Small models, and a store of them."""
    small_layers.write(root)
    with Store.init(root / "store", block_size=1 << 16) as store:
        for name in MODELS:
            store.add(root / name, name=name)


@pytest.fixture
def store(copied: Path) -> Iterator[Store]:
    with Store.open(copied / "store") as store:
        yield store


def stack(*runs: tuple[int, int, int]) -> Arrays:
    """The tensors of a stack in float32, from its definition: (member, first layer, end)."""
    members = [{name: wide(value) for name, value in member(n).items()} for n in range(3)]
    found: Arrays = {NAMES[0]: members[runs[0][0]][NAMES[0]]}
    place = 0
    for number, first, end in runs:
        for layer in range(first, end):
            for name, value in members[number].items():
                if f".layers.{layer}." in name:
                    found[name.replace(f".{layer}.", f".{place}.")] = value
            place += 1
    return found | {name: members[runs[-1][0]][name] for name in NAMES[-2:]}


def wide(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32)


def made(store: Store, text: str) -> Arrays:
    """Merge by a recipe; return the result in float32."""
    store.prepare_recipe(text)
    store.merge(store.plan(store.read_recipe(text).request), name="made")
    return {one.name: wide(store["made"].tensor(one.name)) for one in store.tensors("made")}


def test_layers_are_scaled(store: Store) -> None:
    """A block expansion: a layer twice, with some of its tensors times a number, others shared."""
    found = made(store, EXPANDED)
    wanted = stack((0, 0, 3), (0, 2, 4))
    for part, scale in (("self_attn.q_proj", 0.0), ("mlp.up_proj", 0.5)):
        wanted[f"model.layers.3.{part}.weight"] = scale * wanted[f"model.layers.3.{part}.weight"]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name
    report = store.explain("made")
    read = [one.name for one in report.tensors if one.treatment == "merged"]
    assert sorted(read) == [
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
    ]


def test_layers_of_different_numbers_are_merged(store: Store) -> None:
    """Each slice merges layers of its sources, whatever their numbers and whatever their models."""
    found = made(store, APART)
    base, other = stack((0, 0, 2), (0, 0, 1)), stack((1, 1, 3), (2, 3, 4))
    assert found.keys() == base.keys()
    for name, value in base.items():
        last = "layers.2." in name or name in NAMES[-2:]
        weight = np.float32(0.5 if last else 1.0)
        wanted = value + weight * (other[name] - value)
        assert np.array_equal(found[name], wide(cast(wanted, "BF16"))), name
    again = store.plan(store.read_recipe(store.recipe("made")).request)
    assert again.plan == store.show("made").plan


def test_models_are_made_once(store: Store) -> None:
    """A stack is a branch named by what it is made of; it is found again, and costs headers."""
    with pytest.raises(NotFound) as caught:
        store.read_recipe(APART, where="r.yml")
    assert caught.value.where == "r.yml"
    assert "base[0:2], base[0:1]" in caught.value.what
    first = store.prepare_recipe(APART)
    assert [one.name for one in first] == ["base[0:2], base[0:1]", "math[1:3], code[3:4]"]
    assert all(one.ref.startswith("prepared/stack-") and one.new_snapshot for one in first)
    assert sum(one.bytes_written for one in first) < 40_000
    again = store.prepare_recipe(APART)
    assert [one.snapshot for one in again] == [one.snapshot for one in first]
    assert not any(one.new_snapshot for one in again)
    # Other contents are other stacks, also under the same names.
    other = store.prepare_recipe(APART, models={"math": "code", "code": "math"})
    assert {one.ref for one in other}.isdisjoint([first[1].ref])
    assert store.prepare_recipe(EXPANDED.replace("0.5", "1.5"))[0].name == "base[0:3], base[2:4]"


def test_a_branch_that_was_moved_is_made_again(store: Store) -> None:
    """Whatever stands under a stack's name, the recipe gets the stack."""
    (one, _) = store.prepare_recipe(APART)
    store.reset(one.ref, "code")
    (again, _) = store.prepare_recipe(APART)
    assert again.new_snapshot
    assert store[again.ref].manifest == store.show(again.ref).manifest
    assert store.show(again.snapshot).plan == store.show(one.snapshot).plan


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("weight: 1.0", "weights: 1.0"), "needs the weight"),
        (("[3, 4]", "[4, 5]"), "code has 4 layers, not 5"),
        (("weight: 0.5", "weight: x"), "takes a number"),
        (("base_model: base\n", ""), "needs a base_model"),
    ],
)
def test_nothing_is_made_for_a_wrong_recipe(
    store: Store, change: tuple[str, str], what: str
) -> None:
    """A recipe that cannot be merged is refused before anything is stored."""
    with pytest.raises(BadRequest, match=what):
        store.prepare_recipe(APART.replace(*change))
    assert {ref.name for ref in store.refs()} == set(MODELS)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("base_model: base\nmodels: [{model: code+math}]", 3, "math is no adapter"),
        ("base_model: base\nmodels: [{model: base+math}]", 3, "math is no adapter"),
        ("base_model: code+math\nmodels: [{model: base}]", 2, "math is no adapter"),
    ],
)
def test_what_is_no_adapter(store: Store, text: str, line: int, what: str) -> None:
    """MODEL+MODEL is refused by its line: the first would be lost."""
    text = f"merge_method: task_arithmetic\n{text}\nparameters: {{weight: 1.0}}\n"
    for call in (store.prepare_recipe, store.read_recipe):
        with pytest.raises(BadRequest, match=what) as caught:
            call(text)
        assert f"line {line}" in str(caught.value)


def test_filters_without_tensors_are_told(store: Store) -> None:
    """A filter that names no tensor, mostly a typing error, has a remark with its line."""
    text = EXPANDED.replace("q_proj", "q_prj")
    store.prepare_recipe(text)
    (remark,) = store.read_recipe(text, where="r.yml").remarks
    assert remark == "r.yml, line 9: no tensor has q_prj in its name"


def test_the_card_and_the_recipe_tell_of_stacks(store: Store) -> None:
    """The recipe says how each stack was made; its base is not called by what it was made of."""
    made(store, APART)
    card, recipe = (store["made"].read(name).decode() for name in CARD_AND_RECIPE)
    assert recipe == by_ids(store.recipe("made"))
    ids = {name: store[name].manifest.hex() for name in MODELS}
    stacks = [one.ref for one in store.prepare_recipe(APART)]
    for ref, runs in zip(
        stacks,
        ((("base", "[0, 2]"), ("base", "[0, 1]")), (("math", "[1, 3]"), ("code", "[3, 4]"))),
        strict=True,
    ):
        told = recipe.partition(f"# {store[ref].manifest.hex()} is a stack of layers:")[2]
        for name, layers in runs:
            assert f'#     - model: "{ids[name]}"\n#       layer_range: {layers}' in told
    assert "| base | not named by its card |" in card
    assert card.startswith("---")
    assert "# A merge of one model by task_arithmetic" in card
    assert store.replay("made").same


CARD_AND_RECIPE = ("README.md", "mergekit_config.yml")


def test_most_recipes_need_nothing(store: Store) -> None:
    """Slices of all layers, and plain stacks, need no other model."""
    whole = APART[: APART.index("- sources")] + (
        "- sources:\n  - {model: base, layer_range: [0, 4]}\n"
        "  - {model: math, layer_range: [0, 4]}\nparameters: {weight: 1.0}\n"
    )
    plain = EXPANDED.replace("0.0", "1.0").replace("0.5", "1.0")
    for text in (whole, plain):
        assert store.prepare_recipe(text) == ()
        assert store.read_recipe(text).request.base == "base"


@pytest.mark.parametrize(
    ("text", "made", "slices"),
    [
        ("passthrough a[0:3]; passthrough a+l[2:4]", ["a with l"], "a[0:3]; a with l[2:4]"),
        ("linear a[0:4] a+l[0:4]", [], "a[0:4] a+l[0:4]"),
        ("linear b+l[0:4] c[0:4]", [], "b+l[0:4] c[0:4]"),
        ("linear c[0:4] b+l[0:4]", ["b with l"], "c[0:4] b with l[0:4]"),
        (
            "linear a[0:1] b+l[0:1]; b+l[1:4] a[1:4]",
            ["b with l"],
            "a[0:1] b with l[0:1]; a[1:4] b with l[1:4]",
        ),
        (
            "linear a+l[0:1] b[0:1]; c[1:4] a+l[0:3]",
            ["a with l", "(a with l)[0:1], c[1:4]", "b[0:1], (a with l)[0:3]"],
            (
                "(a with l)[0:1], c[1:4][0:1] b[0:1], (a with l)[0:3][0:1]; "
                "(a with l)[0:1], c[1:4][1:4] b[0:1], (a with l)[0:3][1:4]"
            ),
        ),
    ],
)
def test_what_is_made_and_what_is_left(text: str, made: list[str], slices: str) -> None:
    """Only adapters of other models are applied, and only models of other layers stacked."""
    method, _, runs = text.partition(" ")
    parts = [
        [re.fullmatch(r"(.*)\[(.):(.)\]", run) for run in part.split()] for part in runs.split("; ")
    ]
    (recipe,) = parse(
        f"merge_method: {method}\nslices:\n"
        + "".join(
            "- sources:\n"
            + "".join(f"  - {{model: {m[1]}, layer_range: [{m[2]}, {m[3]}]}}\n" for m in part if m)
            for part in parts
        ),
        "recipe",
    )
    found, needed = prepare(
        recipe,
        known_method(registry.find(method)),
        same=lambda one, other: one.text == other.text,
        layers=lambda _: 4,
        dtypes=lambda _: (),
    )
    assert [one.name for one in needed] == made
    assert slices == "; ".join(
        " ".join(
            f"{one.model}[{one.layers[0]}:{one.layers[1]}]" for one in part.sources if one.layers
        )
        for part in found.slices
    )


def test_words_are_no_models() -> None:
    """`tokenizer_source: base` stays what it is, although a model is called base."""
    for source, wanted in (("base", "base"), ("code", "code[3:4], math[0:3]")):
        (recipe,) = parse(
            "merge_method: linear\nslices:\n"
            "- sources: [{model: base, layer_range: [0, 1]}, {model: code, layer_range: [3, 4]}]\n"
            "- sources: [{model: code, layer_range: [1, 4]}, {model: math, layer_range: [0, 3]}]\n"
            f"tokenizer_source: {source}\n",
            "recipe",
        )
        method = known_method(registry.find("linear"))
        found, _ = prepare(
            recipe,
            method,
            same=lambda a, b: a.text == b.text,
            layers=lambda _: 4,
            dtypes=lambda _: (),
        )
        assert found.tokenizer is not None
        assert found.tokenizer.source.text == wanted


def test_on_the_command_line(store: Store, tmp_path: Path) -> None:
    """`merge --recipe` makes them, and says so; directories are added first."""
    del store
    mstore = Program(tmp_path / "other")
    mstore.succeed("init")
    (tmp_path / "recipe.yml").write_text(APART)
    run = mstore.succeed("merge", "--recipe", tmp_path / "recipe.yml", "--name", "made")
    assert ": math[1:3], code[3:4]" in run.err
    told = mstore.succeed("explain", "made").lines
    assert [one for one in told if "is base[0:2], base[0:1]: mstore explain " in one]
    assert [one for one in told if "is math[1:3], code[3:4]: mstore explain " in one]
    again = mstore.succeed("merge", "--recipe", tmp_path / "recipe.yml", "--name", "made")
    assert "prepared/" not in again.err
    names = [ref["name"] for ref in mstore.succeed("refs", "--json").document["refs"]]
    assert len([name for name in names if name.startswith("prepared/stack-")]) == 2


def test_the_recipe_of_a_stack(store: Store) -> None:
    """The ids in a printed recipe lead to the recipes of its stacks, also without the branches."""
    made(store, APART)
    for one in store.prepare_recipe(APART):
        store.remove(one.ref)
    base = store.read_recipe(store.recipe("made")).request.base
    printed = store.recipe(base)
    layers = store.read_recipe(printed).request.layers
    assert layers == (("base", 0, 2), ("base", 0, 1))
