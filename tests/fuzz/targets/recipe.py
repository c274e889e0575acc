"""A recipe of mergekit: parsed, prepared, and resolved for a model, or refused."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form
from small_layers import LAYERS, NAMES

from mstore.merge.methods import registry
from mstore.merge.planning.recipe_text import known_method
from mstore.merge.recipes.modular import resolve
from mstore.merge.recipes.parse import parse
from mstore.merge.recipes.prepared import prepare
from mstore.terms.errors import MstoreError

FORM = Form.TEXT
SEEING = [*NAMES, "visual.blocks.0.w", "visual.blocks.1.w", "visual.merger.w", "visual.norm.w"]
"""A model with several modules."""


def target(data: bytes) -> None:
    """Each document by itself; one that is refused says where."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    for recipe in parse(text, "input"):
        method = known_method(registry.find(recipe.method.text))
        is_seeing = any(module.name.text != "default" for module in recipe.modules)
        try:
            prepared, _ = prepare(
                recipe,
                method,
                same=lambda one, other: one.text == other.text,
                layers=lambda model: LAYERS if len(model.text) < 3 else None,
                dtypes=lambda model: ("bfloat16",) if len(model.text) < 3 else (),
            )
            method = known_method(registry.find(prepared.method.text))
            models = {one.text: one.text for one in prepared.named()}
            names = SEEING if is_seeing else NAMES
            found = resolve(prepared, names, method, models=models, layers=4)
        except MstoreError as error:
            if not (error.where or "").startswith("input, line "):
                raise AssertionError(f"no line: {error}") from error
            raise
        named = [name for rule in found.request.rules for name in rule.patterns()]
        assert len(set(named)) == len(named)


def seeds() -> Iterable[bytes]:
    yield b"""\
slices:
  - sources:
      - {model: a, layer_range: [0, 4]}
      - model: b
        layer_range: [0, 4]
merge_method: slerp
base_model: a
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 1e-3]}
    - value: 0.5
dtype: bfloat16
"""
    yield b"""\
models:
  - model: a
  - model: &b org/b
    parameters: {density: [0.5, 1], weight: 0.5}
  - model: c
    parameters: {density: 0.53, weight: '0.5'}
merge_method: ties
base_model: a
parameters: {normalize: yes, int8_mask: true}
tokenizer_source: base
---
merge_method: passthrough
slices:
- sources: [{model: a, layer_range: [0, 3]}]
- sources:
  - model: a+l
    layer_range: [2, 4]
    parameters: {scale: [{filter: o_proj, value: 0.0}, {value: 1}]}
---
merge_method: passthrough
slices:
- sources: [{model: a, layer_range: [0, 3]}]
- sources: [{model: a+l, layer_range: [2, 4]}]
---
merge_method: task_arithmetic
base_model: a+l
slices:
- sources: [{model: a+l, layer_range: [0, 2]}, {model: b+m, layer_range: [1, 3]}]
- {base_model: c, sources: [{model: d, layer_range: [1, 3]}, {model: c, layer_range: [0, 2]}]}
parameters: {weight: 0.5}
tokenizer_source: b
---
merge_method: linear
models: [{model: *b, parameters: {weight: .5}}, {model: c, parameters: {weight: !!float 1}}]
""".replace(b"*b", b"b")
    yield b"""\
merge_method: ties
base_model: a
modules:
  default:
    models: [{model: b, parameters: {weight: 1, density: [0.5, 1]}}, {model: c}]
    parameters: {density: {filter: mlp, value: 0.5}, weight: 0.3}
"""
    yield b"""\
merge_method: linear
modules:
  text_decoder: {models: [{model: a, parameters: {weight: [0, 1]}}, {model: b}]}
  vision_tower: {slices: [{sources: [{model: b, layer_range: [0, 2]}]}], parameters: {weight: 2}}
  multi_modal_projector: {models: [{model: a}]}
parameters: {weight: 1}
---
merge_method: passthrough
modules:
  model.layers: {slices: [{sources: [{model: a, layer_range: [0, 3]}]}]}
  visual.blocks: {models: [{model: a}]}
  default: {models: [{model: a}]}
"""
