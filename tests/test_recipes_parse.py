"""Recipes as text: what is read, what is refused, and that every error names its line."""

from __future__ import annotations

import pytest
import yaml

from mstore.merge.recipes.documents import Entries, Items, Node, read_documents
from mstore.merge.recipes.parse import parse
from mstore.merge.recipes.recipe import YamlLimits
from mstore.terms.errors import BadRequest

SLERP = """\
slices:
  - sources:
      - model: org/base
        layer_range: [0, 32]
      - model: org/tuned
        layer_range: [0, 32]
merge_method: slerp
base_model: org/base
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # fallback for the rest
dtype: bfloat16
"""


def test_a_published_recipe() -> None:
    """The slerp recipe that everyone publishes: all its values, each with its line."""
    (recipe,) = parse(SLERP, "r.yml")
    assert (recipe.method.text, recipe.method.line) == ("slerp", 7)
    assert (str(recipe.base), str(recipe.dtype)) == ("org/base", "bfloat16")
    (part,) = recipe.slices
    assert [(str(one.model), one.layers) for one in part.sources] == [
        ("org/base", (0, 32)),
        ("org/tuned", (0, 32)),
    ]
    conditions = recipe.settings["t"].conditions
    assert [(one.filter, one.line) for one in conditions] == [
        ("self_attn", 12),
        ("mlp", 14),
        (None, 15),
    ]
    assert conditions[0].value == (0, 0.5, 0.3, 0.7, 1)
    assert conditions[2].value == 0.5
    assert [str(one) for one in recipe.named()] == ["org/base", "org/tuned"]


def test_several_documents() -> None:
    """Each document is a recipe, and knows where it begins."""
    one = "merge_method: linear\nmodels: [{model: a}]\n"
    assert [recipe.line for recipe in parse(f"{one}---\n{one}---\n{one}", "r")] == [1, 4, 7]


def test_recipes_of_bakllama() -> None:
    """Layer slices are slices of one source, whose scale is that of the down projections."""
    slices = "layer_slices:\n- {model: a, start: 0, end: 2, scale: 0.5}\n"
    slices += "- {model: b, start: '1', end: 3, scale: null}\n"
    sources = "embedding_source: a\nlm_head_source: b\n"
    (recipe,) = parse(slices + sources + "int_space: 1\n", "r")
    assert (recipe.method.text, recipe.base) == ("passthrough", None)
    (first,), (second,) = (part.sources for part in recipe.slices)
    assert (first.model.text, first.layers) == ("a", (0, 2))
    (condition,) = first.settings["scale"].conditions
    assert (condition.value, condition.filter) == (0.5, "down_proj")
    assert (second.model.text, second.layers, second.settings) == ("b", (1, 3), {})
    assert [one.line for one in recipe.ignored] == [6]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("layer_slices: []\n", 1, "has layer_slices"),
        ("layer_slices:\n- {model: a, start: 0}\n", 2, "needs its end"),
        ("layer_slices:\n- {model: a, start: 2, end: 2}\n", 2, "two whole numbers"),
        ("layer_slices:\n- {model: a, start: 0, end: 2, scale: []}\n", 2, "scale"),
        (
            "layer_slices:\n- {model: a, start: 0, end: 2}\nlm_head_source: b\n",
            3,
            "lm_head_source of a stack is a, not b",
        ),
        ("", None, "empty"),
        ("# only a comment\n", None, "empty"),
        ("models: [", 1, "not YAML"),
        ("a: 1\nmerge_method: x\na: 2\n", 3, "given twice"),
        ("merge_method: ties\nmodel: []\n", 2, "has no key 'model'"),
        ("merge_method: ties\nmodels:\n- a\n", 3, "a model is a mapping"),
        ("merge_method: ties\nmodels: [{model: a}]\ntokenizer_source: a+b\n", 3, "no tokens"),
        ("merge_method: ties\nmodels:\n- model: a+b+c\n", 3, "one adapter"),
        ("merge_method: ties\nmodels:\n- model: a+\n", 3, "MODEL+ADAPTER"),
        ("merge_method: ties\nmodels:\n- model:\n    model: a\n    lora: []\n", 5, "adapter"),
        ("merge_method: ties\nmodels:\n- model: 7\n", 3, "in quotes"),
        ("merge_method: ties\nmodels:\n- model: a\n  weight: 1\n", 4, "no key 'weight'"),
        ("merge_method: ties\n", 1, "one of models, slices and modules"),
        ("merge_method: ties\nmodels: [{model: a}]\nmodules: {a: {models: [{model: a}]}}\n", 1,
         "one of models, slices and modules"),
        ("models:\n- model: a\n", 1, "merge_method"),
        ("merge_method: ties\nmodules:\n  a: {}\n", 3, "the module a has either"),
        ("merge_method: ties\nmodules:\n- a\n", 3, "modules are parts"),
        ("merge_method: ties\nmodules:\n  a: 1\n", 3, "the module a is a mapping"),
        ("merge_method: ties\nmodels: [{model: a}]\nchat_template: vicuna\n", 3, "write the"),
        ("merge_method: ties\nmodels: [{model: a}]\nchat_template: [a]\n", 3, "is text"),
        *(
            (f"merge_method: ties\nmodels: [{{model: a}}]\ntokenizer:\n  {more}\n", 4, what)
            for more, what in (
                ("pad_to_multiple_of: 0", "whole number of 1 or more"),
                ("pad_to_multiple_of: true", "whole number of 1 or more"),
                ("tokens: [x]", "a mapping of tokens"),
                ("tokens: {x: {force: true}}", "needs a source"),
                ("tokens: {x: {source: a, force: 1}}", "true or false"),
                ("tokens: {x: {source: a, weight: 1}}", "no key 'weight'"),
                ("tokens: {x: {source: {kind: mean}}}", "kind of source"),
                ("tokens: {x: {source: {kind: zero, model: a}}}", "no key 'model'"),
                ("tokens: {x: {source: {kind: model_token, model: a}}}", "a token or a token_id"),
                ("tokens: {x: {source: {kind: model_token, token: b}}}", "a token or a token_id"),
                ("tokens: {x: {source: {kind: model_token, model: a, token: b, token_id: 1}}}",
                 "a token or a token_id"),
                ("more: 1", "no key 'more'"),
            )
        ),
        ("merge_method: s\nslices:\n- sources:\n  - model: a\n", 4, "layer_range"),
        ("merge_method: s\nslices:\n- sources:\n  - model: a\n    layer_range: [3, 1]\n",
         5, "two whole numbers"),
        ("merge_method: s\nslices:\n- sources:\n  - model: a\n    layer_range: [0, true]\n",
         5, "two whole numbers"),
        ("merge_method: s\nslices:\n- {sources: [], residual_weight: 1}\n", 3, "does nothing"),
        ("merge_method: t\nmodels: [{model: a}]\nparameters:\n  weight:\n", 4, "weight is"),
        ("merge_method: t\nmodels: [{model: a}]\nparameters:\n  weight: [1, {value: 2}]\n",
         4, "condition"),
        ("merge_method: t\nmodels: [{model: a}]\nparameters:\n  weight:\n  - filter: x\n",
         5, "has a value"),
        ("merge_method: t\nmodels: [{model: a}]\nparameters:\n  weight: [[1]]\n", 4, "weight is"),
        ("merge_method: !!python/object:os.system t\n", 1, "tag"),
        ("merge_method: !!binary aGk=\n", 1, "tag"),
        ("merge_method: !!int x\n", 1, "type int"),
        ("models: !!set {a}\n", 1, "tag"),
        ("a: &x 1\n<<: *x\n", 2, "merge keys"),
        ("a: *x\n", 1, "no anchor"),
        ("a: &x [*x]\n", 1, "no anchor"),
        ("1: a\n", 1, "a key is text"),
        ("[a]: b\n", 1, "a key is text"),
        ("a: b\n\x07: c\n", 2, "not printable"),
        ("- a\n- b\n", 1, "a recipe is a mapping"),
        ("a: " + "9" * 5000 + "\n", 1, "type int"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, line: int | None, what: str) -> None:
    """A recipe that is not one, or asks for what is not supported, is refused by name and line."""
    with pytest.raises(BadRequest) as caught:
        parse(text, "r.yml", strict="no key" in what or "does nothing" in what)
    assert what in caught.value.what
    assert caught.value.where == ("r.yml" if line is None else f"r.yml, line {line}")


def test_what_mergekit_ignores() -> None:
    """Keys that mergekit ignores are ignored, noted with their lines and what they may have meant,
    wherever they are; an error about a key that is missing names one that it may have been."""
    text = (
        "merge_method: linear\nrandom_seed: 1\nint8_mask: true\nmodels:\n"
        "- model:\n    model: {path: a, revision: main}\n    override_architecture: L\n"
        "  revision: main\n  paramters: {weight: [x]}\n"
        "- {model: b, parameters: {weight: [{filter: '', value: 1, note: x}]}}\n"
        "tokenizer: {more: 1, tokens: {x: {source: a, weight: 1}}}\n"
    )
    (recipe,) = parse(text, "r.yml")
    assert [str(one) for one in recipe.named()] == ["a", "b"]
    assert recipe.models[1].settings["weight"].value("any", 0.0, "float") == (1.0, 10)
    assert [(one.line, one.what) for one in recipe.ignored] == [
        (2, "a recipe has no key 'random_seed'"),
        (3, "a recipe has no key 'int8_mask'"),
        (6, "revision is not looked up: the model is that of this store"),
        (7, "override_architecture is not needed: layers are known by the names of tensors"),
        (8, "a model has no key 'revision'"),
        (9, "a model has no key 'paramters'"),
        (10, "a condition of weight has no key 'note'"),
        (11, "tokenizer has no key 'more'"),
        (11, "the token 'x' has no key 'weight'"),
    ]
    assert recipe.ignored[5].warning() == (
        "a model has no key 'paramters', and it is ignored, as in mergekit "
        "(did you mean parameters?)"
    )
    with pytest.raises(BadRequest, match="no key 'random_seed'; its keys"):
        parse(text, "r.yml", strict=True)
    with pytest.raises(BadRequest, match="one of models") as caught:
        parse("merge_method: ties\nmodel: []\n", "r.yml")
    assert "line 2" in str(caught.value.hint)
    assert "did you mean models?" in str(caught.value.hint)


@pytest.mark.parametrize("written", ["['0', '2']", "[0.0, 2.0]", "[0, 2]"])
def test_numbers_of_layers(written: str) -> None:
    """A layer_range may be written as text or as numbers with a point, as for mergekit."""
    text = f"merge_method: s\nslices:\n- sources: [{{model: a, layer_range: {written}}}]\n"
    assert parse(text, "r")[0].slices[0].sources[0].layers == (0, 2)


def test_limits() -> None:
    """Size, depth, count and documents are limited, and so is what aliases stand for."""
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
    )
    for text, what in (
        ("x" * 1000, "at most 100 bytes"),
        ("[" * 9 + "]" * 9, "more than 8 deep"),
        ("[" + "1, " * 30 + "]", "more than 20 values"),
        ("a\n---\n" * 5, "more than 4 documents"),
    ):
        limits = YamlLimits(max_bytes=100, max_depth=8, max_nodes=20, max_documents=4)
        with pytest.raises(BadRequest, match=what):
            read_documents(text, "r", limits=limits)
    with pytest.raises(BadRequest, match="more than 100000 values"):
        read_documents(bomb, "r")
    with pytest.raises(BadRequest, match="more than 32 deep"):
        read_documents("[" * 100_000, "r")


@pytest.mark.parametrize(
    "text",
    [
        "[1, 1e-3, 1.0e-3, .5, 1_000, 0x1F, 017, 0b11, 1:30, -.inf, +1]",
        "[yes, no, on, off, true, False, y, n, ~, null, '', '0.5', \"1\", NULL]",
        "{a: &x [1, 2], b: *x}",
        "a: |\n  two\n  lines\nb: >\n  folded\n  text\n",
        "!!str 5",
        "!!float 5",
        "! 5",
    ],
)
def test_values_are_those_of_a_safe_loader(text: str) -> None:
    """Values are what mergekit's loader makes of them, in value and in type."""
    (node,) = read_documents(text, "r")
    assert repr(_plain(node)) == repr(yaml.safe_load(text))


def _plain(node: Node) -> object:
    if isinstance(node, Items):
        return [_plain(one) for one in node.items]
    if isinstance(node, Entries):
        return {key.value: _plain(value) for key, value in node.entries}
    return node.value


def test_dates_are_text() -> None:
    """A name that looks like a date is a name."""
    text = "merge_method: linear\nmodels: [{model: 2024-01-02}]\n"
    assert [str(one) for one in parse(text, "r")[0].named()] == ["2024-01-02"]


def test_a_model_written_as_mappings() -> None:
    """Models as mergekit itself writes some of them: mappings with a path."""
    text = "merge_method: linear\nmodels:\n- model: {model: {path: a/b}}\n- model: {model: c}\n"
    assert [str(one) for one in parse(text, "r")[0].named()] == ["a/b", "c"]


def test_tokenizers() -> None:
    """A tokenizer has a source, sources of single tokens, and a multiple for its rows."""
    (recipe,) = parse(
        """
merge_method: ties
models: [{model: a}]
tokenizer:
  tokens:
    <x>: {source: a}
    y: {source: {kind: zero}, force: true}
    z: {source: {kind: model_token, model: a, token: <x>}}
    '7': {source: {kind: model_token, model: a, token_id: 3}}
  pad_to_multiple_of: 8
""",
        "r.yml",
    )
    asked = recipe.tokenizer
    assert asked is not None
    assert (asked.source.text, asked.model, asked.pad_to) == ("union", None, 8)
    assert [
        (one.token.text, one.model and one.model.text, one.other, one.force) for one in asked.tokens
    ] == [
        ("<x>", "a", None, False),
        ("y", None, None, True),
        ("z", "a", "<x>", False),
        ("7", "a", 3, False),
    ]
    (plain,) = parse("merge_method: t\nmodels: [{model: a}]\ntokenizer_source: a\n", "r.yml")
    assert plain.tokenizer is not None
    assert plain.tokenizer.model == plain.tokenizer.source
