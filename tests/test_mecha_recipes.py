"""Recipes of sd-mecha: each is one merge, with the weights that its nodes come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cli_runs import Program
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from small_models import BLOCK

from mstore import Store
from mstore.merge.recipes import mecha
from mstore.merge.recipes.mecha import parse_mecha
from mstore.merge.recipes.mecha_lines import MAX_NODES
from mstore.terms.errors import BadRequest, MstoreError, NotFound

Array = npt.NDArray[Any]
D = "model.diffusion_model."
TENSORS = (
    *(f"{D}input_blocks.{n}.0.w.weight" for n in range(9)),
    f"{D}input_blocks.4.1.proj_in.weight",
    f"{D}middle_block.1.w.weight",
    *(f"{D}output_blocks.{n}.0.w.weight" for n in range(9)),
    *(f"{D}out.2.weight", f"{D}time_embed.0.weight"),
    *("first_stage_model.decoder.conv_in.weight", "conditioner.embedders.0.w.weight"),
)
NAMES = ("a", "b", "c", "anime v3")

# -- what sd-mecha 1.1.8 writes ------------------------------------------------------------------

WEIGHTED = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
dict key=0.3
literal &2 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &3
merge "weighted_sum" &0 &1 &4
"""
DIFFERENCE = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/c.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &1 &2
dict key=0.7
literal &4 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &5
merge "add_difference" &0 &3 &6
merge "fallback" &7 &0
"""
AVERAGE = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/c.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "n_average" &0 &1 &2
"""
OPERATORS = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/c.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &1 &2
dict key=0.5
literal &4 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &5
merge "scale" &3 &6
dict key=1.0
literal &8 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &9
merge "add_difference" &0 &7 &10
model "/models/anime v3.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &12 &2
dict key=0.2
literal &14 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &15
merge "scale" &13 &16
merge "add_difference" &11 &17 &10
"""
BLOCKS = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
dict BASE=0.1 VAE=0.0 IN00=0.0 IN01=0.1 IN02=0.2 IN03=0.3 IN04=0.4 IN05=0.5 \
IN06=0.6 IN07=0.7 IN08=0.8 M00=0.5 OUT00=0.9 OUT01=0.8 OUT02=0.7 OUT03=0.6 \
OUT04=0.5 OUT05=0.4 OUT06=0.3 OUT07=0.2 \
OUT08=0.1
literal &2 model_config="sdxl-supermerger_blocks" merge_space="param"
merge "convert_sdxl_blocks_to_sgm" &3
merge "weighted_sum" &0 &1 &4
"""
TIES = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &1 &0
model "/models/c.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &3 &0
model "/models/anime v3.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &5 &0
dict key=1.0
literal &7 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &8
dict key=true
literal &10 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &11
merge "ties_sum" &2 &4 &6 k=&9 vote_sgn=&12
dict key=0.6
literal &14 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &15
merge "scale" &13 &16
merge "add_difference" &0 &17 &9
"""
DROPOUT = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &1 &0
dict key=0.5
literal &3 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &4
dict key=1.0
literal &6 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &7
dict key=0.0
literal &9 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &10
dict key=3
literal &12 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &13
merge "dropout" &2 probability=&5 rescale=&8 overlap=&8 overlap_emphasis=&11 seed=&14
merge "add_difference" &0 &15 &8
"""
STOCK = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &1 &0
model "/models/c.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &3 &0
dict key=1e-06
literal &5 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &6
merge "model_stock" &2 &4 cos_eps=&7
dict key=1.0
literal &9 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &10
merge "add_difference" &0 &8 &11
"""
SLERP = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
dict key=0.3
literal &2 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &3
merge "slerp" &0 &1 &4
"""
NESTED = """\
version 0.1.0
model "/models/a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/b.safetensors" model_config="sdxl-sgm" merge_space="weight"
dict key=0.25
literal &2 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &3
merge "weighted_sum" &0 &1 &4
model "/models/c.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/anime v3.safetensors" model_config="sdxl-sgm" merge_space="weight"
merge "subtract" &1 &0
dict key=1.0
literal &9 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &10
merge "add_difference" &7 &8 &11
merge "fallback" &12 &7
merge "n_average" &6 &13
dict key=0.5
literal &15 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &16
merge "weighted_sum" &5 &14 &17
"""

# -- what each is --------------------------------------------------------------------------------


def number(name: str) -> float:
    """The number of BLOCKS for a tensor."""
    if "input_blocks" in name:
        return int(name.split(".")[3]) / 10
    if "output_blocks" in name:
        return (9 - int(name.split(".")[3])) / 10
    return {"middle": 0.5, "out.2.": 0.1, "first_": 0.0}.get(name.removeprefix(D)[:6], 0.1)


def consensus(*deltas: Array) -> Array:
    """The mean of those of the sign of the sum."""
    wins = np.where(sum(deltas) >= 0, 1.0, -1.0)
    agree = np.array([np.sign(delta) == wins for delta in deltas])
    found: Array = np.where(agree, deltas, 0).sum(axis=0) / np.maximum(agree.sum(axis=0), 1)
    return found


def rows(b: Array, c: Array) -> Array:
    """Model stock by rows."""
    cosine = (b * c).sum(-1) / (np.linalg.norm(b, axis=-1) * np.linalg.norm(c, axis=-1))
    found: Array = (2 * cosine / (1 + cosine))[:, None] * (b + c) / 2
    return found


FORMULAS: Mapping[str, Callable[[str, SimpleNamespace], Array]] = {
    WEIGHTED: lambda _, m: 0.7 * m.a + 0.3 * m.b,
    DIFFERENCE: lambda _, m: m.a + 0.7 * (m.b - m.c),
    AVERAGE: lambda _, m: (m.a + m.b + m.c) / 3,
    OPERATORS: lambda _, m: m.a + 0.5 * (m.b - m.c) + 0.2 * (m.d - m.c),
    BLOCKS: lambda name, m: (1 - number(name)) * m.a + number(name) * m.b,
    TIES: lambda _, m: m.a + 0.6 * consensus(m.b - m.a, m.c - m.a, m.d - m.a),
    STOCK: lambda _, m: m.a + rows(m.b - m.a, m.c - m.a),
    NESTED: lambda _, m: 0.5 * (0.75 * m.a + 0.25 * m.b) + 0.25 * m.c + 0.25 * (m.d + m.b - m.a),
}


@pytest.fixture(scope="module")
def models() -> Mapping[str, Mapping[str, Array]]:
    draw = np.random.default_rng(5)
    return {name: {key: draw.normal(size=(6, 8)).astype("f4") for key in TENSORS} for name in NAMES}


@pytest.fixture
def store(models: Mapping[str, Mapping[str, Array]], tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as made:
        for name, tensors in models.items():
            save_file(dict(tensors), tmp_path / f"{name}.safetensors")
            made.add(tmp_path / f"{name}.safetensors", name=name.replace(" ", "-"))
        yield made


def merged(store: Store, text: str, out: Path) -> dict[str, Array]:
    """The tensors of the merge of a recipe."""
    store.merge(store.plan(store.read_recipe(text).request), name="made")
    store.checkout("made", out)
    found: dict[str, Array] = load_file(out)
    return found


@pytest.mark.parametrize("text", FORMULAS)
def test_recipes_of_the_program_are_what_its_formulas_say(
    store: Store, models: Mapping[str, Mapping[str, Array]], tmp_path: Path, text: str
) -> None:
    """Sums of sums, differences, averages, numbers by block, and methods that do not add up."""
    for name, value in merged(store, text, tmp_path / "made.safetensors").items():
        own = [models[one][name].astype("f8") for one in NAMES]
        wanted = FORMULAS[text](name, SimpleNamespace(**dict(zip("abcd", own, strict=True))))
        np.testing.assert_allclose(value, wanted, rtol=2e-6, atol=2e-6, err_msg=name)


def test_a_sum_of_sums_is_one_merge(store: Store) -> None:
    """Its base is the first model, and each other one is an expert, with the product of its
    weights."""
    request = store.read_recipe(NESTED).request
    assert (request.base, request.method, request.rules) == ("a", "task_arithmetic", ())
    assert dict(request.weighted()) == {"b": 0.375, "c": 0.25, "anime-v3": 0.25}
    assert store.read_recipe(DIFFERENCE).request.weighted() == [("b", 0.7), ("c", -0.7)]


def test_tensors_of_one_block_are_one_rule(store: Store) -> None:
    """Numbers by block make as many rules as there are other numbers."""
    request = store.read_recipe(BLOCKS).request
    # 0 to 0.9 by tenths; some numbers are off by a bit: 0.3 and 0.7 are not exact.
    assert len(request.rules) + 1 == len({number(name) for name in TENSORS})


def test_random_methods_draw_of_one_difference(store: Store) -> None:
    """`dropout` of one model is DARE; of several it divides otherwise, and is refused."""
    request = store.read_recipe(DROPOUT).request
    assert (request.base, request.experts, request.method) == ("a", (("b", 1.0),), "dare_linear")
    assert request.parameters == {"density": 0.5, "rescale": True, "seed": 3, "scale": 1.0}
    two = DROPOUT.replace('"dropout" &2', '"dropout" &2 &2')
    refused(two, "line 17: dare_linear is like dropout of 1, and these are 2")


def test_what_is_only_nearly_the_same_is_told(store: Store) -> None:
    """slerp of models that differ in norm is another one; --strict refuses it."""
    found = store.read_recipe(SLERP, where="r.mecha")
    assert found.request.parameters == {"t": 0.3, "scale": 1.0}
    (told,) = found.warnings
    assert told.startswith("r.mecha, line 7: slerp turns the models themselves")
    with pytest.raises(BadRequest, match="line 7: slerp turns"):
        store.read_recipe(SLERP, strict=True)
    fewer = TIES.replace("dict key=1.0", "dict key=0.5", 1)
    (told,) = store.read_recipe(fewer).warnings
    assert "k = 0.5: sd-mecha keeps one element more" in told
    assert store.read_recipe(TIES, strict=True).warnings == ()


def test_tensors_that_models_lack_are_those_of_the_fallback(
    store: Store, models: Mapping[str, Mapping[str, Array]], tmp_path: Path
) -> None:
    """`a + (b - c) | a` is a where b or c lacks the tensor, not a - c."""
    first, *others = TENSORS
    save_file({name: models["b"][name] for name in others}, tmp_path / "less.safetensors")
    store.add(tmp_path / "less.safetensors", name="less")
    text = DIFFERENCE.replace("/models/b.", "less.")
    assert store.read_recipe(text).request.allow_missing
    found = merged(store, text, tmp_path / "made.safetensors")
    assert np.array_equal(found[first], models["a"][first])
    a, b, c = (models[name][others[0]].astype("f8") for name in "abc")
    np.testing.assert_allclose(found[others[0]], a + 0.7 * (b - c), rtol=2e-6, atol=2e-6)
    without = text[: text.index('merge "fallback"')]
    with pytest.raises(MstoreError, match="missing"):
        store.plan(store.read_recipe(without).request)


def between(a: Array, b: Array, t: float) -> Array:
    """From a to b by an angle."""
    angle = np.arccos((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    found: Array = (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)
    return found


@pytest.mark.parametrize(
    ("text", "number", "formula"),
    [
        (TIES, "0.6", lambda t, a, b, c, d: a + t * consensus(b - a, c - a, d - a)),
        (SLERP, "0.3", lambda t, a, b, c, d: between(a, b, t)),
    ],
)
def test_methods_by_block_and_with_a_fallback(
    store: Store,
    models: Mapping[str, Mapping[str, Array]],
    tmp_path: Path,
    text: str,
    number: str,
    formula: Callable[..., Array],
) -> None:
    """A method may have other numbers in each block, and is none where its models lack a tensor."""
    first, *others = TENSORS
    save_file({name: models["b"][name] for name in others}, tmp_path / "less.safetensors")
    store.add(tmp_path / "less.safetensors", name="less")
    names = ["BASE", "VAE", *(f"{side}{n:02}" for side in ("IN", "OUT") for n in range(9))]
    blocks = " ".join(f"{name}=0.25" for name in names)
    lines = text.replace("/models/b.", "less.").rstrip().split("\n")
    lines = [f"dict {blocks} M00=0.5" if one == f"dict key={number}" else one for one in lines]
    lines.append(f'merge "fallback" &{len(lines) - 2} &0')
    for name, value in merged(store, "\n".join(lines), tmp_path / "made.safetensors").items():
        own = [models[one][name].astype("f8") for one in NAMES]
        wanted = formula(0.5 if "middle" in name else 0.25, *own)
        wanted = own[0] if name == first else wanted
        np.testing.assert_allclose(value, wanted, rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("nodes", "method", "experts"),
    [
        (('merge "clamp" &0 &1 &2',), "clamp", ["b", "c"]),
        (('merge "tensor_sum" &0 &1 0.25',), "tensor_sum", ["b"]),
        (('merge "geometric_median" &0 &1 &2',), "geometric_median", ["a", "b", "c"]),
        (
            (
                *('merge "subtract" &0 &2', 'merge "subtract" &1 &2'),
                'merge "perpendicular_component" &3 &4',
                'merge "add_difference" &0 &5 0.5',
            ),
            *("add_perpendicular", ["b", "c"]),
        ),
        (
            (
                *('merge "subtract" &1 &2', 'merge "train_difference_mask" &0 &1 &2 0.5'),
                'merge "add_difference" &0 &3 &4',
            ),
            *("train_difference", ["b", "c"]),
        ),
    ],
)
def test_methods_and_their_models(
    store: Store, nodes: tuple[str, ...], method: str, experts: list[str]
) -> None:
    """Which models are base and experts follows from how a method is told them."""
    request = store.read_recipe(of(*nodes)).request
    assert (request.base, request.method) == ("a", method)
    assert [name for name, _ in request.weighted()] == experts
    store.plan(request)


LORA = """\
version 0.1.0
model "a.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "b.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "lora.safetensors" model_config="sdxl-kohya_kohya_lora" merge_space="weight"
merge "convert_'sdxl-kohya_kohya_lora'_to_base" &2
merge "convert_sdxl_kohya_to_original" &3
merge "weighted_sum" &0 &1 alpha=0.5
merge "add_difference" &5 &4 alpha=0.4
"""


def test_loras_are_differences(
    store: Store, models: Mapping[str, Mapping[str, Array]], tmp_path: Path
) -> None:
    """A LoRA is added to a sum of models; one that is called a model is refused."""
    draw = np.random.default_rng(3)
    down, up = draw.normal(size=(2, 8)).astype("f4"), draw.normal(size=(6, 2)).astype("f4")
    name = "lora_unet_input_blocks_4_1_proj_in"
    parts = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    save_file(parts, tmp_path / "lora.safetensors")
    store.add(tmp_path / "lora.safetensors", name="lora", base="a")
    found = merged(store, LORA, tmp_path / "made.safetensors")
    for key in TENSORS:
        wanted = 0.5 * models["a"][key] + 0.5 * models["b"][key]
        if "proj_in" in key:
            wanted = wanted + 0.4 * up @ down
        np.testing.assert_allclose(found[key], wanted, rtol=2e-5, atol=2e-5)
    with pytest.raises(BadRequest, match="line 5: lora is a LoRA, and by its model_config a model"):
        store.read_recipe(of('model "lora"', 'merge "weighted_sum" &0 &3'))
    text = of('model "b" model_config="x-y_lora"', 'merge "add_difference" &0 &3')
    with pytest.raises(BadRequest, match="line 5: b is a model, and by its model_config a LoRA"):
        store.read_recipe(text)


def test_models_of_other_names(store: Store) -> None:
    """`models` gives revisions by the names of the recipe; what is not there is told with its
    line."""
    text = WEIGHTED.replace("/models/b.", "/models/other.")
    with pytest.raises(NotFound, match=r"line 3: no model /models/other.safetensors"):
        store.read_recipe(text)
    found = store.read_recipe(text, models={"/models/other.safetensors": "c"})
    assert found.request.experts == (("c", 0.3),)


def test_what_is_not_used_is_not_read(store: Store) -> None:
    """Nodes that the result is not made of may be anything; comments and blank lines are none."""
    text = WEIGHTED.replace("version 0.1.0", '# no\nmodel "x"', 1)
    text = f"version 0.1.0\n# a note\n\n{text.partition(chr(10))[2]}"
    for number in (4, 3, 2, 1, 0):
        text = text.replace(f"&{number}", f"&{number + 1}")
    text = text.replace('\nmodel "/models/a', '\nmodel "gone"\nmodel "/models/a', 1)
    text = text.replace('model "x"\n', "", 1)
    assert store.read_recipe(text).request == store.read_recipe(WEIGHTED).request


# -- what is refused -----------------------------------------------------------------------------


def refused(text: str, why: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_mecha(text, "r.mecha")
    assert why in f"{error.value} {error.value.hint}"


def of(*lines: str) -> str:
    return "\n".join(("version 0.1.0", 'model "a"', 'model "b"', 'model "c"', *lines))


ALL = "".join(f"&{n} " for n in range(900))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("version 0.2.0\n", "line 1: 'version 0.2.0' of sd-mecha's format"),
        ("version 0.1.0\n", "it has no nodes"),
        (of("merge &0"), "line 5: a merge has a name, in quotes, first"),
        (of("literal 1"), "line 5: a literal names a dict"),
        (of("call x"), "line 5: no command 'call'"),
        (of('merge "weighted_sum" &0 &3'), "line 5: &3 is no earlier node"),
        (of('merge "weighted_sum" &0 &1 alpha=1e999'), "line 5: not a value: '1e999'"),
        (of('merge "weighted_sum" &0 &1 alpha="'), "line 5: not a value"),
        (of('merge "weighted_sum" &0 &1 alpha=1 alpha=2'), "'alpha' is given twice"),
        (of('merge "weighted_sum" &0 &1 beta=1'), "weighted_sum has no parameter 'beta'"),
        (of('merge "weighted_sum" &0'), "line 5: weighted_sum takes a, b, alpha, and here are 1"),
        (of('merge "weighted_sum" &0 &1 1 1'), "here are 4"),
        (of('merge "weighted_sum" &0 0.5'), "line 5: a number or word stands in place of a model"),
        (of('merge "weighted_sum" &0 &1 &1'), "what is made of models stands in place of a number"),
        (of('merge "weighted_sum" &0 &1 "x"'), "'x' stands in place of a number"),
        (of('merge "subtract" &0 &1'), "the result is a difference of models, and no model"),
        (
            of('merge "add_difference" &0 &1 0.5'),
            "the weights of the models add up to 1.5, not to 1",
        ),
        (of('merge "crossover" &0 &1 0.5'), "line 5: mstore has no method like 'crossover'"),
        (of('merge "weighted_sun" &0 &1'), "did you mean weighted_sum"),
        (of('merge "ties_sum" &0 &1 vote_sgn=true'), "ties_sum takes differences of two models"),
        (
            of('merge "slerp" &0 &1 0.5', 'merge "slerp" &3 &2 0.5'),
            "slerp takes what slerp makes (line 5)",
        ),
        (
            of('merge "slerp" &0 &1 0.5', 'merge "weighted_sum" &3 &2 0.5'),
            "what slerp makes (line 5) is added to others",
        ),
        (of('merge "slerp" &0 &0 0.5'), "slerp has a model twice"),
        (
            of(
                *('merge "subtract" &1 &0', 'merge "subtract" &2 &1'),
                'merge "ties_sum" &3 &4 vote_sgn=true',
            ),
            "line 7: ties_sum of differences to several models: a, b",
        ),
        (of('merge "cast" &0 dtype="float16"'), "a type in a recipe"),
        (of('merge "convert_x" &0'), "convert_x gives a model's tensors other names"),
        (of('model "d" merge_space="delta"'), "d is in the space delta"),
        (of("dict BASE=0.5", 'merge "scale" &0 &0 &3'), "line 6"),
        (of("dict x.y=0.5", 'merge "weighted_sum" &0 &1 &3'), "line 6: numbers by tensor"),
        (
            of('model "x/a.safetensors"', 'model "y/a.safetensors"', 'merge "n_average" &3 &4'),
            "would be one branch, a",
        ),
        (of(*["dict key=1"] * MAX_NODES), f"more than {MAX_NODES} nodes"),
        (of('model "' + "x" * (1 << 20) + '"'), "a recipe has at most 1048576 bytes"),
        (
            of(*(f'model "{n}"' for n in range(900)), f'merge "n_average" {ALL * 30}'),
            "a recipe of 901 nodes, 900 models and 1 kinds of tensors is too large",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, why: str) -> None:
    """Texts that are no recipes, and recipes that mstore cannot merge."""
    refused(text, why)


def test_deep_sums_are_computed_without_recursion(store: Store) -> None:
    """A chain as long as a recipe may be is one merge."""
    chain = [f'merge "weighted_sum" &{n} &1 0.001' for n in (0, *range(3, MAX_NODES - 4))]
    request = store.read_recipe(of(*chain)).request
    ((name, weight),) = request.weighted()
    assert (name, weight) == ("b", pytest.approx(1 - 0.999 ** len(chain)))


def test_one_model_is_no_merge(store: Store) -> None:
    """A recipe without an expert is refused before anything is added."""
    with pytest.raises(BadRequest, match="no model but the base takes part"):
        store.read_recipe('version 0.1.0\nmodel "a"')


def test_blocks_that_the_model_has_not(store: Store) -> None:
    """Numbers for the blocks of another kind of model are refused with those that are there."""
    text = of("dict BASE=0.1 IN00=0.2 M00=0.5", 'merge "weighted_sum" &0 &1 &3')
    with pytest.raises(BadRequest, match="line 6: no number for the block"):
        store.read_recipe(text)


WORDS = st.one_of(
    st.sampled_from(
        [
            *("model", "dict", "literal", "merge", "&0", "&1", "&2", "&3", "0.5", "true", "null"),
            *('"a"', '"b.safetensors"', "key=0.3", "IN04=0.1", "alpha=&2", "k=0.5", "-1", "1e308"),
            *(f'"{name}"' for name in (*mecha._SUMS, *mecha._METHODS, "fallback", "cast")),
            *('"convert_x"', "vote_sgn=true", "#", "\n", "\n", 'model "a"\n', 'model "b"\n'),
        ]
    ),
    st.text(max_size=8),
)


@given(st.lists(WORDS, max_size=40))
def test_any_text_is_read_or_refused(words: list[str]) -> None:
    """Whatever a file says, it is a recipe, or BadRequest says what is wrong."""
    text = f'version 0.1.0\nmodel "a"\nmodel "b"\nmerge {" ".join(words)}'
    found = ""
    try:
        parse_mecha(text, "r.mecha").warnings()
    except BadRequest as error:
        found = error.where or "?"
    assert found[:7] in ("", "r.mecha")


# -- the command line ----------------------------------------------------------------------------


def test_files_of_the_folder_are_added(
    models: Mapping[str, Mapping[str, Array]], tmp_path: Path
) -> None:
    """Models are branches by the names of the files, wherever the recipe's author had them, or
    files beside the recipe, with or without their suffix; a warning is told, --strict refuses."""
    program = Program(tmp_path / "store")
    program.succeed("init")
    for name in NAMES:
        save_file(dict(models[name]), tmp_path / f"{name}.safetensors")
    program.succeed("add", tmp_path / "a.safetensors")
    file = tmp_path / "recipe.mecha"
    file.write_text(SLERP.replace("/models/b.", "b."))
    done = program.succeed("merge", "--recipe", file, "--name", "turned")
    assert f"added {tmp_path / 'b.safetensors'} as b" in done.err
    assert f"warning: {file}, line 7: slerp turns" in done.err
    assert program("merge", "--recipe", file, "--strict", "--name", "x").status == 2
    file.write_text(DIFFERENCE.replace("/models/", "").replace("c.safetensors", "anime v3"))
    plan = program.succeed("plan", "--recipe", file, "--json").document
    assert plan["experts"] == [["b", pytest.approx(0.7)], ["anime-v3", pytest.approx(-0.7)]]
    done = program("plan", "--recipe", tmp_path / "recipe.mecha", "--base", "a")
    assert "the recipe already says what to merge" in done.err
    file.write_text(WEIGHTED.replace("/b.", "/gone."))
    done = program("merge", "--recipe", file, "--name", "x")
    assert "line 3: /models/gone.safetensors is neither a ref of this store nor a file" in done.err
    assert "add /models/gone.safetensors" in done.err
