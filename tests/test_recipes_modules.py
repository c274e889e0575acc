"""Recipes with modules: each part of a model is made of models of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_layers
from families import Arrays, bits, cast, write_checkpoint

from mstore import Store
from mstore.merge.recipes.layers import ModelLayers
from mstore.merge.recipes.modular import Modules
from mstore.terms.errors import BadRequest

EMBED, NORM = "language_model.model.embed_tokens.weight", "language_model.model.norm.weight"
SEE, BRIDGE = "vision_tower.encoder.post_layernorm.weight", "multi_modal_projector.linear.weight"
NAMES = (
    *(EMBED, NORM, "language_model.lm_head.weight", SEE, BRIDGE),
    *(f"language_model.model.layers.{n}.mlp.up_proj.weight" for n in range(3)),
    *(f"vision_tower.encoder.layers.{n}.fc1.weight" for n in range(2)),
)
TEXT = tuple(name for name in NAMES if name.startswith("language_model."))


def member(number: int) -> Arrays:
    rng = np.random.default_rng(number)
    return {name: cast(rng.standard_normal((24, 32), dtype=np.float32), "BF16") for name in NAMES}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Three models that see (base, one, two), and three of one stack (plain, math, code)."""
    root = tmp_path_factory.mktemp("modules")
    small_layers.write(root / "plain")
    with Store.init(root / "store", block_size=1 << 16) as store:
        for number, name in enumerate(("base", "one", "two")):
            write_checkpoint(root / name, member(number), note=name)
            config = '{"text_config": {"num_hidden_layers": 3}}'
            Path(root, name, "config.json").write_text(config)
            store.add(root / name, name=name)
        for name in ("base", "math", "code"):
            store.add(root / "plain" / name, name={"base": "plain"}.get(name, name))
        yield store


def merged(store: Store, text: str) -> dict[str, Any]:
    """What a recipe makes, which its printed recipe makes, too."""
    plan = store.plan(store.read_recipe(text).request)
    store.merge(plan, name="merged")
    again = store.plan(store.read_recipe(store.recipe("merged")).request)
    assert again.plan == plan.plan
    return {name: bits(store["merged"].tensor(name)) for name in NAMES}


def same(found: dict[str, Any], name: str, model: int) -> bool:
    return bool(np.array_equal(found[name], bits(member(model)[name])))


PLAIN = """\
merge_method: ties
base_model: plain
{begin}models:
{by}- model: math
{by}  parameters: {{weight: [0.2, 0.8], density: 0.5}}
{by}- model: code
{by}  parameters: {{weight: 0.5}}
{by}parameters: {{density: {{filter: mlp, value: 0.3}}}}
{own}
"""


def test_one_module_is_all(store: Store) -> None:
    """A recipe of the only module is the recipe without; its parameters come before the recipe's,
    condition by condition."""
    own = "parameters: {density: 0.7, normalize: false}"
    alone = PLAIN.format(begin="", by="", own="").replace(
        "parameters: {density: {filter: mlp, value: 0.3}}",
        "parameters: {density: [{filter: mlp, value: 0.3}, {value: 0.7}], normalize: false}",
    )
    text = PLAIN.format(begin="modules:\n  default:\n    ", by="    ", own=own)
    assert store.read_recipe(text).request == store.read_recipe(alone).request


LINEAR = """\
merge_method: linear
modules:
  text_decoder:
    models:
    - model: one
      parameters: {weight: [0.0, 1.0]}
    - model: two
      parameters: {weight: 1.0}
  vision_tower:
    models: [{model: two}]
    parameters: {weight: 0.5}
  multi_modal_projector: {models: [{model: one}]}
parameters: {weight: 1.0}
"""


def test_modules_of_different_models(store: Store) -> None:
    """Each module is made of its own models; a gradient runs over its layers."""
    found = merged(store, LINEAR)
    assert same(found, BRIDGE, 1)
    assert same(found, SEE, 2)
    assert same(found, "vision_tower.encoder.layers.1.fc1.weight", 2)
    assert same(found, NORM, 2)
    assert same(found, "language_model.model.layers.0.mlp.up_proj.weight", 2)
    one, two = (
        member(number)["language_model.model.layers.2.mlp.up_proj.weight"] for number in (1, 2)
    )
    mean = cast((one.astype(np.float32) + two.astype(np.float32)) / np.float32(2), "BF16")
    last = found["language_model.model.layers.2.mlp.up_proj.weight"]
    assert np.array_equal(last, bits(mean))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear", "breadcrumbs"])
def test_a_module_of_the_base_stays(store: Store, method: str) -> None:
    """A module in which only the base is stays as it is there."""
    text = f"""\
merge_method: {method}
base_model: base
modules:
  text_decoder:
    models: [{{model: one}}, {{model: two}}]
  vision_tower: {{models: [{{model: base}}]}}
  multi_modal_projector: {{models: [{{model: two}}]}}
parameters: {{weight: 1.0}}
"""
    found = merged(store, text)
    assert all(same(found, name, 0) == name.startswith("vision_tower.") for name in NAMES)


def test_modules_by_stack(store: Store) -> None:
    """A module may be called by its stack, as mergekit calls those that it infers."""
    text = """\
merge_method: linear
modules:
  language_model.model.layers: {models: [{model: one}]}
  vision_tower.encoder.layers: {models: [{model: two}]}
  default: {models: [{model: base}]}
parameters: {weight: 1.0}
"""
    found = merged(store, text)
    for name in NAMES:
        model = 0 if ".layers." not in name else 1 if name in TEXT else 2
        assert same(found, name, model), name


STACK = """\
merge_method: passthrough
modules:
  vision_tower: {models: [{model: one}]}
  text_decoder:
    slices:
    - sources: [{model: one, layer_range: [0, 3]}]
    - sources: [{model: two, layer_range: [1, 3]}]
  multi_modal_projector: {models: [{model: one}]}
"""


def test_a_stack_in_a_module(store: Store) -> None:
    """Slices of the text model in a module are those of a recipe without modules."""
    slices = """\
merge_method: passthrough
slices:
- sources: [{model: one, layer_range: [0, 3]}]
- sources: [{model: two, layer_range: [1, 3]}]
"""
    alone, found = (store.read_recipe(text).request for text in (slices, STACK))
    assert found == alone
    assert len(found.layers) == 2


SLICES = """\
merge_method: slerp
base_model: base
modules:
  text_decoder:
    slices:
    - sources: [{model: base, layer_range: [0, 1]}, {model: one, layer_range: [0, 1]}]
      parameters: {t: 0.25}
    - sources: [{model: base, layer_range: [1, 3]}, {model: one, layer_range: [1, 3]}]
  vision_tower:
    models: [{model: base}, {model: one}]
    parameters: {t: 1.0}
  multi_modal_projector:
    models: [{model: base}, {model: one}]
parameters: {t: 0.5}
"""


def test_slices_and_parameters_of_modules(store: Store) -> None:
    """A slice says first, then its module, then the recipe."""
    request = store.read_recipe(SLICES).request
    found = dict.fromkeys(NAMES, request.parameters["t"])
    for rule in request.rules:
        found |= dict.fromkeys(rule.patterns(), rule.parameters["t"])
    for name in NAMES:
        first = (EMBED, "language_model.model.layers.0.mlp.up_proj.weight")
        wanted = 1.0 if name.startswith("vision") else 0.25 if name in first else 0.5
        assert found[name] == wanted, name


def test_slices_without_modules(store: Store) -> None:
    """Slices are of the text model; all else before its layers is as in the first slice, and a
    gradient there runs over the other stack."""
    text = """\
merge_method: slerp
base_model: base
slices:
- sources: [{model: base, layer_range: [0, 1]}, {model: one, layer_range: [0, 1]}]
  parameters: {t: [{filter: fc1, value: [0.1, 0.9]}, {value: 0.25}]}
- sources: [{model: base, layer_range: [1, 3]}, {model: one, layer_range: [1, 3]}]
parameters: {t: 0.5}
"""
    request = store.read_recipe(text).request
    found = dict.fromkeys(NAMES, request.parameters["t"])
    for rule in request.rules:
        found |= dict.fromkeys(rule.patterns(), rule.parameters["t"])
    assert [found[f"vision_tower.encoder.layers.{n}.fc1.weight"] for n in (0, 1)] == [0.1, 0.9]
    ups = [f"language_model.model.layers.{n}.mlp.up_proj.weight" for n in range(3)]
    assert [found[name] for name in ups] == [0.25, 0.5, 0.5]
    assert [found[name] for name in (EMBED, SEE, BRIDGE, NORM)] == [0.25, 0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    ("text", "change", "line", "what"),
    [
        (LINEAR, ("  vision_tower:", "  vision_towr:"), 9, "no module vision_towr"),
        (LINEAR, ("  multi_modal_projector: {models: [{model: one}]}\n", ""), 3, "lacks multi"),
        (LINEAR, ("{models: [{model: one}]}", "{}"), 12, "either models or slices"),
        (LINEAR, ("{models: [{model: one}]}", "{model: one}"), 12, "has either models or slices"),
        (LINEAR.replace("merge_method: linear", "merge_method: model_stock\nbase_model: base"),
         ("{models: [{model: one}]}", "{models: [{model: base}]}"), 13, "another model"),
        (SLICES, ("[{model: base}, {model: one}]", "[{model: base}, {model: two}]"), 9, "same"),
        (STACK, ("vision_tower: {models: [{model: one}", "vision_tower: {models: [{model: two}"),
         3, "every other module is of the model of the first layer, one"),
        (STACK, ("vision_tower: {models: [{model: one}]}",
                 "vision_tower: {slices: [{sources: [{model: two, layer_range: [0, 1]}]}]}"),
         3, "in the text model only"),
    ],
)  # fmt: skip
def test_what_is_refused(
    store: Store, text: str, change: tuple[str, str], line: int, what: str
) -> None:
    """Modules that a model does not have, that are left out, or that a method cannot have."""
    assert change[0] in text
    changed = text.replace(*change, 1)
    with pytest.raises(BadRequest) as caught:
        store.read_recipe(changed, where="r.yml")
    assert what in str(caught.value)
    assert f"r.yml, line {line}" in str(caught.value)


def test_a_model_of_one_stack_has_one_module(store: Store) -> None:
    """It is called default."""
    text = "merge_method: linear\nmodules: {text_decoder: {models: [{model: math}]}}\n"
    with pytest.raises(BadRequest, match="its modules: default"):
        store.read_recipe(text + "parameters: {weight: 1}\n")


def test_modules_by_role() -> None:
    """A text model, a tower and a projector; an encoder, a decoder and what they share."""
    found = Modules.of(ModelLayers({"encoder.block": 1, "decoder.block": 1}, None, 0), ["encoder"])
    assert found is not None
    assert found.known(["encoder.block.0.w", "decoder.norm.w", "shared.w", "lm_head.w"]) == (
        *("decoder", "encoder", "shared"),
    )
    names = ("audio_tower.layers.0.w", "model.layers.0.w", "audio_projection.w", "mtp.fc.w")
    hearing = Modules.of(ModelLayers({"audio_tower.layers": 1, "model.layers": 1}, None, 0), [])
    assert hearing is not None
    assert [hearing.module(name) for name in names] == [
        *("audio_tower", "text_decoder", "multi_modal_projector", "text_decoder"),
    ]
    assert Modules.of(ModelLayers({"one.layers": 1, "two.layers": 1}, None, 0), ["default"]) is None
