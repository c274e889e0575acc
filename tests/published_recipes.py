"""Recipes as people publish them, that need more than the letter of mergekit's documentation.

Each is the shape of a recipe from a model card, with small models in place of its own: {base},
{math} and {code} are models of four layers, {lora} is an adapter of the base.  mergekit 0.1.5 runs
all of them.  The tests of recipes run them, and the conformance tests compare the results.
"""

from __future__ import annotations

from typing import Final

_TWO: Final = """\
models:
- model: {math}
  parameters: {{weight: 0.5}}
- model: {code}
  parameters: {{weight: 0.3}}
merge_method: linear
dtype: float32
"""
_TIES: Final = """\
models:
- model: {base}
- model: {math}
  parameters: {{density: 0.5, weight: 0.5}}
- model: {code}
  parameters: {{density: 0.4, weight: 0.3}}
merge_method: ties
base_model: {base}
dtype: float32
"""


def _sources(*parts: str) -> str:
    """Slices, each of MODEL:FIRST:END, with what follows after a bar."""
    text = "slices:\n"
    for part in parts:
        runs, _, more = part.partition("|")
        text += "- sources:\n"
        for run in runs.split():
            model, first, end = run.split(":")
            text += f"  - model: {{{model}}}\n    layer_range: [{first}, {end}]\n"
        text += f"  {more}\n" if more else ""
    return text


PUBLISHED: Final = {
    "a revision beside a model": _TWO.replace("{code}\n", "{code}\n  revision: main\n"),
    "a revision of a path": _TWO.replace(
        "{math}\n", "\n    model: {{path: {math}, revision: main}}\n    override_architecture: X\n"
    ),
    "smooth and negative weights": _TIES
    + "parameters: {{smooth: true, allow_negative_weights: true, int8_mask: true}}\n",
    "int_space and int8_mask at the top": _TIES + "int_space: 0.1\nint8_mask: true\n",
    "random_seed at the top": _TWO + "random_seed: 42\n",
    "dtype among parameters": _TIES + "parameters: {{normalize: true, dtype: bfloat16}}\n",
    "merge_method in a slice": _sources(
        "base:0:4 math:0:4|merge_method: slerp\n  parameters: {{weight: [0.1, 0.7]}}"
    )
    + "merge_method: task_arithmetic\nbase_model: {base}\ndtype: float32\n",
    "residual_weight": _sources("base:0:3|residual_weight: 0.5", "math:2:4")
    + "merge_method: passthrough\ndtype: float32\n",
    "misspelt keys": _TWO + "paramaters: {{normalize: false}}\nout-dtype: float16\n",
    "a misspelt parameter": _TIES + "parameters: {{normalise: false, lamda: 0.5}}\n",
    "a template of Llama 3": _TWO + "chat_template: llama3\n",
    "a template of Alpaca": _TIES + "chat_template: alpaca\ntokenizer_source: base\n",
    "a stack in another type": _sources("base:0:3", "math:1:4")
    + "merge_method: passthrough\ndtype: float16\n",
    "slices of two models and of one": _sources("base:0:2 math:0:2", "code:1:4")
    + "merge_method: linear\nparameters: {{weight: 1.0}}\ndtype: float32\n",
    "an adapter alone": "models:\n- model: {base}+{lora}\nmerge_method: passthrough\n"
    "dtype: bfloat16\n",
    "a density that begins at 0": _TIES.replace("density: 0.5", "density: [0, 0.25, 0.5, 1]"),
    "conditions of all shapes": """\
models:
- model: {base}
- model: {math}
  parameters:
    density: {{filter: mlp, value: [0.2, 0.9]}}
    weight:
    - {{filter: self_attn.q, value: '0.25', note: more}}
    - {{filter: '', value: [0, 0.5, 1e-1]}}
- model: {code}
  parameters:
    weight: [{{filter: null, value: 1}}]
    density: []
parameters: {{density: 0.6, normalize: [yes, no]}}
merge_method: ties
base_model: {base}
dtype: float32
""",
}
"""By what is special."""
