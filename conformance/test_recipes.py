"""Recipes as people publish them: mergekit and mstore make the same model of them.

Each recipe is run by mergekit as its users run it, and by mstore from the same text.  mergekit
computes in a recipe's `dtype`, mstore in float32; so where a recipe names another type, mergekit is
given `dtype: float32` and that type as `out_dtype`.  Values of parameters are compared for random
recipes too, tensor by tensor, with those that mergekit's planner passes to its methods.
"""

from __future__ import annotations

import importlib.resources
import json
import random
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from compare import assert_same, bits
from generated import BLOCK, EMBEDDING, HEAD, Family, Tensors, write
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.merge import _model_out_config, run_merge
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from safetensors.torch import load_file

from mstore import MergeRequest, Store
from mstore.merge.recipes.parse import TEMPLATES
from mstore.terms.errors import BadRequest

# Last: names of modules there are also names of modules here.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from published_recipes import PUBLISHED

LAYERS = 4
MEMBERS = ("base", "math", "code")
_PARTS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("up", "gate", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)
NAMES = (
    EMBEDDING,
    *(f"model.layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in _PARTS),
    "model.norm.weight",
    HEAD,
)

LINEAR = """\
models:
  - model: {math}
    parameters:
      weight: 0.6
  - model: {code}
    parameters:
      weight: 0.4
merge_method: linear
dtype: float16
"""
LINEAR_OF_THE_BASE = """\
name: with-the-base
merge_method: linear
base_model: {base}
models:
- model: {math}
  parameters: {{weight: [0.2, 0.5, 1.0]}}
- model: {code}
- model: {base}
parameters:
  weight: 0.25
  normalize: false
out_dtype: float32
dtype: float32
"""
TIES = """\
models:
  - model: {base}
    # no parameters necessary for base model
  - model: {math}
    parameters:
      density: 0.5
      weight: 0.5
  - model: {code}
    parameters:
      density: 0.5
      weight: 0.5
merge_method: ties
base_model: {base}
parameters:
  normalize: true
  int8_mask: true
dtype: float16
"""
TIES_OF_THE_README = """\
models:
  - model: {math}
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: {code}
    parameters:
      density: [1, 0.7, 0.1]
      weight: [0, 0.3, 0.7, 1] # weight gradient
merge_method: ties
base_model: {base}
parameters:
  normalize: true
  int8_mask: true
dtype: float16
"""
TIES_FILTERED = """\
models:
  - model: {math}
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
  - model: {code}
    parameters:
      density: 0.33
      weight:
        - filter: self_attn
          value: [1e-1, 0.9]
        - filter: "*"
          value: 0.4
merge_method: ties
base_model: {base}
parameters: {{normalize: false, lambda: 0.8}}
dtype: bfloat16
"""
EACH_ITS_DENSITY = """\
models:
  - model: {base}
  - model: {math}
    parameters:
      density: 0.53
      weight: 0.4
  - model: {code}
    parameters:
      density: 0.3
      weight: [0.1, 0.6]
merge_method: ties
base_model: {base}
parameters:
  int8_mask: true
dtype: bfloat16
"""
DARE_TIES = """\
models:
  - model: {base}
  - model: {math}
    parameters:
      density: 1
      weight: [0.4, 0.7]
  - model: {code}
    parameters:
      density: 1
      weight: 0.3
merge_method: dare_ties
base_model: {base}
parameters:
  int8_mask: yes
dtype: bfloat16
"""
DARE_LINEAR = """\
merge_method: dare_linear
base_model: {base}
models:
  - {{model: {math}, parameters: {{weight: 0.7}}}}
  - {{model: {code}, parameters: {{weight: [0.1, 0.2, 0.3, 0.4, 0.5]}}}}
parameters: {{density: 1.0, normalize: true, lambda: [1.0, 0.5]}}
dtype: float32
out_dtype: bfloat16
"""
TASK_ARITHMETIC = """\
base_model: {base}
models:
  - model: {math}
    parameters:
      weight: 0.4
  - model: {code}
    parameters:
      weight: -0.35
merge_method: task_arithmetic
tokenizer_source: base
dtype: float16
"""
BREADCRUMBS = """\
models:
  - model: {math}
    parameters:
      weight: 1.0
  - model: {code}
    parameters:
      weight: 0.5
merge_method: breadcrumbs
base_model: {base}
parameters:
  density: 0.9
  gamma: 0.01
dtype: float32
"""
BREADCRUMBS_BY_SLICE = """\
merge_method: breadcrumbs
base_model: {base}
slices:
- sources:
  - {{model: {base}, layer_range: [0, 1]}}
  - {{model: {math}, layer_range: [0, 1]}}
  parameters: {{weight: 0.5, density: 0.6}}
- sources:
  - {{model: {base}, layer_range: [1, 4]}}
  - {{model: {math}, layer_range: [1, 4], parameters: {{density: [0.9, 0.7]}}}}
  parameters: {{weight: [1, 0]}}
parameters: {{gamma: 0.05, density: 0.4}}
out_dtype: bfloat16
dtype: float32
"""
SLERP = """\
slices:
  - sources:
      - model: {base}
        layer_range: [0, 4]
      - model: {math}
        layer_range: [0, 4]
merge_method: slerp
base_model: {base}
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # fallback for rest of tensors
dtype: bfloat16
"""
SLERP_OF_MODELS = """\
models:
  - model: {base}
  - model: {code}
merge_method: slerp
base_model: {base}
dtype: bfloat16
parameters:
  t: [0, 0.25, 0.5, 0.25, 0] # V shaped curve
"""
EXACT = {
    "linear": LINEAR,
    "linear of the base": LINEAR_OF_THE_BASE,
    "ties": TIES,
    "ties of the readme": TIES_OF_THE_README,
    "ties, filtered": TIES_FILTERED,
    "each its density": EACH_ITS_DENSITY,
    "dare_ties": DARE_TIES,
    "dare_linear": DARE_LINEAR,
    "task_arithmetic": TASK_ARITHMETIC,
    "breadcrumbs": BREADCRUMBS,
    "breadcrumbs by slice": BREADCRUMBS_BY_SLICE,
}


class Place:
    """A family of four layers in float32, in which no two deltas are equal, and its store."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(18)
        members: dict[str, Tensors] = {name: {} for name in MEMBERS}
        for name in NAMES:
            shape = (48,) if "norm" in name else (64, 48)
            own = torch.randn(shape, generator=generator) / 16
            members["base"][name] = own
            for other in MEMBERS[1:]:
                members[other][name] = own + torch.randn(shape, generator=generator) / 64
        self.root = root
        self.family: Family = write(root / "members", "float32", "own", members, layers=LAYERS)
        self.store = Store.init(root / "store", block_size=BLOCK)
        self.store.add(self.family.path("base"), name="base")
        for name in MEMBERS[1:]:
            self.store.add(self.family.path(name), name=name, base="base")
        self.runs = 0

    def text(self, recipe: str) -> str:
        return recipe.format(**{name: self.family.path(name) for name in MEMBERS})

    @property
    def models(self) -> dict[str, str]:
        """The refs of the directories."""
        return {str(self.family.path(name)): name for name in MEMBERS}

    def ours(self, text: str) -> Tensors:
        self.runs += 1
        self.store.prepare_recipe(text, models=self.models)
        request = self.store.read_recipe(text, models=self.models).request
        self.store.merge(self.store.plan(request, allow_noop=True), name="merged")
        out = self.root / f"ours{self.runs}"
        self.store.checkout("merged", out)
        return load_file(out / "model.safetensors")

    def theirs(self, text: str) -> Tensors:
        self.runs += 1
        recipe: dict[str, Any] = yaml.safe_load(text)
        recipe["out_dtype"] = recipe.get("out_dtype") or recipe.get("dtype")
        recipe["dtype"] = "float32"
        # Whose tokenizer there would be changes nothing here: there is none.
        recipe.pop("tokenizer_source", None)
        out = self.root / f"theirs{self.runs}"
        options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
        run_merge(MergeConfiguration.model_validate(recipe), str(out), options)
        return {
            name: tensor
            for path in sorted(out.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("recipes"))
    yield made
    made.store.close()


@pytest.mark.parametrize("name", EXACT)
def test_the_same_model(name: str, place: Place) -> None:
    """Of a published recipe both make the same tensors, bit for bit."""
    text = place.text(EXACT[name])
    assert_same(place.ours(text), place.theirs(text))


@pytest.mark.parametrize(
    "name", [name for name, text in PUBLISHED.items() if "lora" not in text and "chat" not in text]
)
def test_the_same_of_what_is_ignored(name: str, place: Place) -> None:
    """What mergekit ignores changes nothing here either, and other recipes as people publish them
    give the same tensors; adapters and tokenizers are compared elsewhere."""
    text = place.text(PUBLISHED[name])
    assert_same(place.ours(text), place.theirs(text))


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates(name: str) -> None:
    """Templates of the same name say the same, but for the white space that the files of mergekit
    have around messages."""
    jinja2 = pytest.importorskip("jinja2")
    files = importlib.resources.files("mergekit._data.chat_templates")
    assert TEMPLATES.keys() == {
        one.name.removesuffix(".jinja") for one in files.iterdir() if one.name.endswith(".jinja")
    }
    talk = [
        {"role": role, "content": f"{role} says"}
        for role in ("system", "user", "assistant", "user")
    ]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    given = {"bos_token": "<s>", "eos_token": "</s>"}
    for messages, asks in ((talk, True), (talk[1:], True), (talk[:3], False)):
        ours, theirs = (
            environment.from_string(text).render(
                messages=messages, add_generation_prompt=asks, **given
            )
            for text in (TEMPLATES[name], (files / f"{name}.jinja").read_text())
        )
        assert "".join(ours.split()) == "".join(theirs.split())
        if name in ("chatml", "mistral"):
            assert ours == theirs


BY_NORMS = {
    "slerp by slices": SLERP,
    "slerp of models": SLERP_OF_MODELS,
    **{
        f"{method}{' with a base' if base else ''}": f"merge_method: {method}\n"
        + ("base_model: {base}\n" if base else "")
        + "models:\n"
        + "".join(f"  - model: {{{one}}}\n{weight}" for one in models)
        + "dtype: bfloat16\n"
        for method, base, models, weight in (
            ("nuslerp", True, ("math", "code"), "    parameters: {{weight: 0.5}}\n"),
            ("nuslerp", False, ("math", "code"), "    parameters: {{weight: 0.3}}\n"),
            ("multislerp", True, ("math", "code"), "    parameters: {{weight: 0.5}}\n"),
            ("multislerp", False, MEMBERS, "    parameters: {{weight: 0.2}}\n"),
            ("karcher", False, MEMBERS, ""),
            ("model_stock", True, ("math", "code"), ""),
        )
    },
}


@pytest.mark.parametrize("recipe", BY_NORMS)
def test_methods_by_norms(recipe: str, place: Place) -> None:
    """Of a recipe whose method takes tensors as vectors both make the same tensors; in bf16 at most
    one element of a hundred is the neighbour, because mergekit's sums are rounded."""
    text = place.text(BY_NORMS[recipe])
    ours, theirs = place.ours(text), place.theirs(text)
    assert ours.keys() == theirs.keys()
    different = sum(int((bits(ours[name]) != bits(theirs[name])).sum()) for name in ours)
    assert different <= sum(tensor.numel() for tensor in ours.values()) / 100
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=2**-7, atol=1e-6)


def _slices(*runs: tuple[str, int, int]) -> str:
    return (
        "merge_method: passthrough\nslices:\n"
        + "".join(
            f"- sources:\n  - model: {{{model}}}\n    layer_range: [{first}, {end}]\n"
            for model, first, end in runs
        )
        + "dtype: float32\n"
    )


STACKS = {
    "of one": _slices(("base", 0, 4), ("base", 2, 4)),
    "of two": _slices(("math", 0, 3), ("code", 1, 4)),
    "of three": _slices(("code", 1, 2), ("base", 0, 4), ("math", 3, 4)),
    "shorter": _slices(("math", 0, 1), ("math", 3, 4)),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_layers(name: str, place: Place) -> None:
    """Both stack the same tensors, and as many layers, also by the recipe that mstore prints."""
    theirs = _same_model(place, STACKS[name])
    printed = place.store.recipe("merged")
    for member in MEMBERS:
        printed = printed.replace(f'"{member}"', f'"{place.family.path(member)}"')
    assert_same(place.theirs(printed), theirs)


def _sources(*parts: str, more: str = "") -> str:
    """A recipe of slices: each a list of MODEL:FIRST:END, with what follows."""
    text = "slices:\n"
    for part in parts:
        runs, _, settings = part.partition("|")
        text += "- sources:\n"
        for run in runs.split():
            model, first, end = run.split(":")
            text += f"  - model: {{{model}}}\n    layer_range: [{first}, {end}]\n"
        text += f"{settings}\n"
    return text + more + "dtype: float32\n"


EXPANDED = """\
    parameters:
      scale:
      - filter: o_proj
        value: 0.0
      - filter: down_proj
        value: 0.0
      - value: 1.0"""
HALVED = "    parameters: {{scale: 0.7071067811865475}}"
LAYERS_APART = {
    "block expansion": _sources(
        "base:0:2", f"base:1:2|{EXPANDED}", "base:2:4", f"base:3:4|{EXPANDED}",
        more="merge_method: passthrough\n",
    ),
    "scaled layers of two": _sources(
        "math:0:3", f"code:1:4|{HALVED}", more="merge_method: passthrough\n"
    ),
    "scale of all": _sources(
        "math:0:3", "math:2:4", more="merge_method: passthrough\nparameters: {{scale: 0.5}}\n"
    ),
    "other layers": _sources(
        "base:0:3 math:1:4",
        more="merge_method: task_arithmetic\nbase_model: {base}\nparameters: {{weight: 0.3}}\n",
    ),
    "other models": _sources(
        "base:0:2 math:0:2|  parameters: {{weight: 0.25}}",
        "code:0:2 base:2:4|  parameters: {{weight: [0.5, 1.0]}}",
        more="merge_method: task_arithmetic\nbase_model: {base}\n",
    ),
    "in another order": _sources(
        "math:0:2 code:0:2|  parameters: {{weight: 0.25}}",
        "code:2:4 math:1:3|  parameters: {{weight: 0.5}}",
        more="merge_method: linear\nparameters: {{normalize: false}}\n",
    ),
    "fewer layers": _sources(
        "math:0:3 code:0:3", more="merge_method: linear\nparameters: {{weight: 0.5}}\n"
    ),
    "a stack with ties": _sources(
        "base:0:3 math:0:3 code:0:3",
        "base:2:4 math:2:4 code:2:4",
        more="merge_method: ties\nbase_model: {base}\n"
        "parameters: {{weight: 0.5, density: 0.6, normalize: true}}\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS_APART)
def test_slices_with_layers_apart(name: str, place: Place) -> None:
    """Slices that scale layers, or merge layers of different numbers, give the same tensors."""
    _same_model(place, LAYERS_APART[name])


def test_slerp_of_layers_apart(place: Place) -> None:
    """slerp of layers with different numbers, with a gradient in each slice."""
    text = place.text(
        _sources(
            "base:0:3 math:1:4|  parameters: {{t: [0.1, 0.9]}}",
            "base:2:4 math:2:4|  parameters: {{t: 0.5}}",
            more="merge_method: slerp\nbase_model: {base}\n",
        )
    )
    ours, theirs = place.ours(text), place.theirs(text)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)


def _same_model(place: Place, recipe: str) -> Tensors:
    """Both make the same tensors of a recipe, and state as many layers; return the tensors."""
    text = place.text(recipe)
    theirs = place.theirs(text)
    config = _config(place.root / f"theirs{place.runs}")
    assert_same(place.ours(text), theirs)
    assert _config(place.root / f"ours{place.runs}") == config
    return theirs


def _config(path: Path) -> int:
    count: int = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    return count


@pytest.mark.parametrize("name", [*EXACT, "slerp"])
def test_what_mstore_prints_mergekit_runs(name: str, place: Place) -> None:
    """mergekit makes the same model of the recipe that mstore prints for the merge."""
    text = place.text(EXACT.get(name, SLERP))
    ours = place.ours(text)
    printed = place.store.recipe("merged")
    for member in MEMBERS:
        printed = printed.replace(f'"{member}"', f'"{place.family.path(member)}"')
    if "out_dtype" not in printed:
        printed += "out_dtype: float32\n"
    theirs = place.theirs(printed)
    if name == "slerp":
        for tensor in ours:
            torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=2**-7, atol=1e-6)
    else:
        assert_same(ours, theirs)


# -- values --------------------------------------------------------------------------------------

METHODS = {
    "linear": ("weight", "normalize"),
    "task_arithmetic": ("weight", "lambda", "normalize"),
    "ties": ("weight", "density", "lambda", "normalize"),
    "dare_ties": ("weight", "density", "lambda", "normalize", "rescale"),
    "breadcrumbs": ("weight", "density", "gamma", "lambda"),
    "della": ("weight", "density", "epsilon", "normalize", "rescale"),
    "slerp": ("t",),
}
_FILTERS = ("self_attn", "mlp", "layers.1.", "norm", "*", "q_proj", EMBEDDING, "lm_head", None)


class Writer:
    """Writes random recipes; some lack a value, or a base among the sources."""

    def __init__(self, seed: int, place: Place) -> None:
        self._draw = random.Random(seed)
        self._path = {name: str(place.family.path(name)) for name in MEMBERS}

    def recipe(self) -> dict[str, Any]:
        draw = self._draw
        method = draw.choice(list(METHODS))
        members = ["base", "math"] if method == "slerp" else list(MEMBERS)
        draw.shuffle(members)
        recipe: dict[str, Any] = {"merge_method": method, "dtype": "float32"}
        if method != "linear" or draw.random() < 0.5:
            recipe["base_model"] = self._path["base"]
        recipe["parameters"] = self._parameters(method, 0.7)
        if draw.random() < 0.5:
            if draw.random() < 0.5 and "base_model" in recipe:
                members.remove("base")
            recipe["models"] = [
                {"model": self._path[name], "parameters": self._parameters(method, 0.4)}
                for name in members
            ]
            return recipe
        cuts = sorted({0, LAYERS, *draw.sample(range(1, LAYERS), draw.randint(0, 2))})
        recipe["slices"] = [
            {
                "sources": [
                    {
                        "model": self._path[name],
                        "layer_range": [first, last],
                        "parameters": self._parameters(method, 0.4),
                    }
                    for name in members
                ],
                "parameters": self._parameters(method, 0.4),
            }
            for first, last in pairwise(cuts)
        ]
        return recipe

    def _parameters(self, method: str, share: float) -> dict[str, Any]:
        return {
            name: self._setting(name) for name in METHODS[method] if self._draw.random() < share
        }

    def _setting(self, name: str) -> Any:
        draw = self._draw
        if draw.random() < 0.5:
            return self._value(name)
        return [
            {"value": self._value(name)}
            | ({} if (part := draw.choice(_FILTERS)) is None else {"filter": part})
            for _ in range(draw.randint(1, 4))
        ]

    def _value(self, name: str) -> Any:
        if self._draw.random() < 0.6:
            return self._single(name)
        return [self._single(name) for _ in range(self._draw.randint(1, 5))]

    def _single(self, name: str) -> Any:
        draw = self._draw
        if name in ("normalize", "rescale"):
            return draw.choice([True, False, 1, 0, "yes"])
        # As text, too: YAML reads 1e-1 so.
        value = round(draw.uniform(0.05, 1.0), 3)
        return draw.choice([value, value, value, f"{value}", 1])


@pytest.mark.parametrize("seed", range(300))
def test_values_of_random_recipes(seed: int, place: Place) -> None:
    """For every tensor, parameters and weights are those that mergekit's planner resolves; what it
    refuses is refused."""
    recipe = Writer(seed, place).recipe()
    text = yaml.safe_dump(recipe)
    try:
        theirs = planned(recipe)
    except (RuntimeError, ValueError):
        with pytest.raises(BadRequest):
            place.store.read_recipe(text, models=place.models)
        return
    ours = of_request(place.store.read_recipe(text, models=place.models).request)
    paths = {name: path for path, name in place.models.items()}
    assert ours.keys() == theirs.keys()
    for name, (parameters, weights) in ours.items():
        shared, each = theirs[name]
        for expert, weight in weights.items():
            own = each[paths[expert]]
            assert own.get("weight", 1.0) == weight, (name, expert)
        assert set(weights) == {place.models[path] for path, own in each.items() if own} or (
            recipe["merge_method"] == "slerp"
        )
        for parameter, value in parameters.items():
            if parameter in shared:
                # What mergekit's `rescale: true` does is called so here.
                assert shared[parameter] == (value == "l1" or value), (name, parameter)
                continue
            values = value if isinstance(value, tuple) else (value,) * len(weights)
            for expert, one in zip(weights, values, strict=True):
                assert each[paths[expert]][parameter] == one, (name, parameter, expert)


def planned(recipe: dict[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """By tensor: shared parameters, and parameters by model, as mergekit's planner has them."""
    config = MergeConfiguration.model_validate(recipe)
    options = MergeOptions(quiet=True)
    info = get_architecture_info(config, options)
    planner = MergePlanner(config, info, options, _model_out_config(config, info))
    planner._plan()
    return {
        weight.name: (
            dict(task.parameters.items()),
            {str(model): dict(own.items()) for model, own in task.input_parameters.items()},
        )
        for weight, task in planner._tensors
    }


def of_request(request: MergeRequest) -> dict[str, tuple[dict[str, Any], dict[str, float]]]:
    """By tensor: parameters, and weights by expert, of the request and its rules."""
    own = {str(name): weight for name, weight in request.weighted()}
    found: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
        name: (dict(request.parameters), own) for name in NAMES
    }
    for rule in request.rules:
        for name in rule.patterns():
            weights = own if rule.weights is None else dict(zip(own, rule.weights, strict=True))
            found[name] = ({**request.parameters, **rule.parameters}, weights)
    return found
