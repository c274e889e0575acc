"""Stacks: models with layers of several models, which take tensors as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import independent_reader
import numpy as np
import pytest
from checkpoints import write_safetensors
from small_layers import LAYERS, NAMES, member

from mstore import MergeRequest, Store
from mstore.store.objects.canonical import decode
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest, Incompatible

BLOCK = 1 << 16
Arrays = dict[str, Any]


def write(path: Path, tensors: Arrays, *, layers: int = LAYERS) -> Path:
    """A model of two shards, with an index and a config."""
    path.mkdir()
    names = list(tensors)
    shards = {
        f"model-{number:05}-of-00002.safetensors": names[at]
        for number, at in enumerate((slice(None, 8), slice(8, None)), start=1)
    }
    for shard, own in shards.items():
        listed = [(n, "BF16", tensors[n].shape, tensors[n].tobytes()) for n in own]
        write_safetensors(path / shard, listed, metadata={"format": "pt"})
    size = sum(value.nbytes for value in tensors.values())
    index = {
        "metadata": {"total_size": size, "total_parameters": size // 2},
        "weight_map": {name: shard for shard, own in shards.items() for name in own},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"num_hidden_layers": layers, "layer_types": [f"t{n}" for n in range(layers)]}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("stacks")
    with Store.init(root / "store", block_size=BLOCK) as store:
        for number in range(3):
            store.add(write(root / f"m{number}", member(number)), name=f"m{number}")
        yield store


def ask(*layers: tuple[str, int, int], experts: tuple[str, ...] = ("m1", "m2")) -> MergeRequest:
    return MergeRequest(base="m0", experts=experts, method="passthrough", layers=layers)


def expected(*layers: tuple[int, int, int]) -> Arrays:
    """The tensors of a stack, from its definition."""
    found: Arrays = {"model.embed_tokens.weight": member(layers[0][0])[NAMES[0]]}
    place = 0
    for number, first, end in layers:
        own = member(number)
        for layer in range(first, end):
            for name, value in own.items():
                if f".layers.{layer}." in name:
                    found[name.replace(f".{layer}.", f".{place}.")] = value
            place += 1
    last = member(layers[-1][0])
    return found | {name: last[name] for name in ("model.norm.weight", "lm_head.weight")}


CASES: list[tuple[tuple[int, int, int], ...]] = [
    ((0, 0, 4), (0, 2, 4)),
    ((0, 0, 3), (1, 1, 4)),
    ((1, 0, 2), (2, 0, 4), (0, 3, 4)),
    ((0, 0, 2),),
    ((2, 0, 4),),
    ((0, 0, 4), (1, 0, 4), (2, 0, 4)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers", CASES)
def test_a_stack_is_its_layers(
    store: Store, tmp_path: Path, layers: tuple[tuple[int, int, int], ...]
) -> None:
    """Tensors, config and index are those of the stack, nothing is read, and it replays."""
    asked = ask(*((f"m{number}", first, end) for number, first, end in layers))
    plan = store.plan(asked)
    merged = store.merge(plan, name="stack")
    assert (plan.planned_expert_bytes, merged.expert_bytes_read) == (0, 0)
    wanted = expected(*layers)
    own = store["stack"]
    assert {one.name for one in store.tensors("stack")} == wanted.keys()
    for name, value in wanted.items():
        assert own.tensor(name).tobytes() == value.tobytes(), name
    store.checkout("stack", tmp_path / "out")
    total = sum(end - first for _, first, end in layers)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    types = [f"t{layer}" for _, first, end in layers for layer in range(first, end)]
    assert config == {"num_hidden_layers": total, "layer_types": types}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    size = sum(value.nbytes for value in wanted.values())
    assert index["metadata"] == {"total_size": size, "total_parameters": size // 2}
    for name, shard in index["weight_map"].items():
        raw = (tmp_path / "out" / shard).read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        assert header["__metadata__"] == {"format": "pt"}
        start, end = header[name]["data_offsets"]
        data = raw[8 + int.from_bytes(raw[:8], "little") :]
        assert data[start:end] == wanted[name].tobytes()
    assert store.replay("stack").same


def test_a_stack_stores_headers_and_little_else(store: Store) -> None:
    """No block of weights is written: files are headers, config, index and card."""
    plan = store.plan(ask(("m0", 0, 4), ("m1", 0, 4), ("m2", 0, 4)))
    merged = store.merge(plan, name="tall")
    weights = sum(value.nbytes for value in expected((0, 0, 4), (1, 0, 4), (2, 0, 4)).values())
    assert merged.blocks_total - merged.blocks_reused < 12
    assert merged.bytes_written < 24_000 < weights


def test_a_virtual_stack_is_the_real_one(store: Store) -> None:
    """Nothing is left to compute: a virtual stack has the same content."""
    plan = store.plan(ask(("m1", 0, 2), ("m0", 1, 4)))
    store.merge(plan, name="real")
    store.merge(plan, name="virtual", virtual=True)
    assert store["virtual"].manifest == store["real"].manifest
    store.materialize("virtual")
    assert store["virtual"].manifest == store["real"].manifest


def test_a_stack_is_explained(store: Store) -> None:
    """Each tensor says which tensor of which model it is; blame has nothing to share out."""
    store.merge(store.plan(ask(("m0", 0, 2), ("m1", 1, 4))), name="told")
    told = {one.name: one.treatment for one in store.explain("told").tensors}
    assert told["model.layers.2.mlp.up_proj.weight"] == "model.layers.1.mlp.up_proj.weight of m1"
    assert told["lm_head.weight"] == "lm_head.weight of m1"
    assert told["model.layers.0.mlp.up_proj.weight"] == "unchanged"
    (one,) = store.explain("told", "model.layers.4.mlp.up_proj.weight").tensors
    assert one.treatment == "model.layers.3.mlp.up_proj.weight of m1"
    assert store.plan(ask(("m0", 0, 2), ("m1", 1, 4))).layers == (("m0", 0, 2), ("m1", 1, 4))
    assert one.blocks_reused == 0
    with pytest.raises(BadRequest, match="nothing was merged"):
        store.blame("told")


RECIPE = """\
merge_method: passthrough
slices:
- sources:
  - model: m0
    layer_range: [0, 3]
- sources:
  - model: m1
    layer_range: [1, 4]
- sources:
  - {model: m0, layer_range: [3, 4], parameters: {scale: 1.0}}
dtype: bfloat16
"""


def test_a_recipe_of_slices_is_a_stack(store: Store) -> None:
    """passthrough of slices, as people write frankenmerges; a printed recipe says it again."""
    request = store.read_recipe(RECIPE).request
    assert tuple(request.layers) == (("m0", 0, 3), ("m1", 1, 4), ("m0", 3, 4))
    plan = store.plan(request)
    store.merge(plan, name="recipe")
    wanted = expected((0, 0, 3), (1, 1, 4), (0, 3, 4))
    for name, value in wanted.items():
        assert store["recipe"].tensor(name).tobytes() == value.tobytes(), name
    again = store.plan(store.read_recipe(store.recipe("recipe")).request)
    assert again.plan == plan.plan


def test_layers_that_a_model_lacks(store: Store) -> None:
    """A slice of layers that its model does not have is refused by its line."""
    with pytest.raises(BadRequest, match="m1 has 4 layers, not 5") as caught:
        store.read_recipe(RECIPE.replace("[1, 4]", "[1, 5]"))
    assert "line 7" in str(caught.value)


def test_all_layers_in_order_are_no_stack(store: Store) -> None:
    """Slices that keep all layers of one model are that model, as before."""
    text = "merge_method: passthrough\nslices:\n" + "".join(
        f"- sources: [{{model: m1, layer_range: [{first}, {first + 2}]}}]\n" for first in (0, 2)
    )
    assert not store.read_recipe(text).request.layers


@pytest.mark.parametrize(
    ("layers", "word"),
    [
        ([("m0", 0, 5)], "has 4 layers, not 5"),
        ([("m3", 0, 1)], "neither the base"),
        ([("m0", 2, 2)], "the first is 0"),
        ([("m0", 0)], "a run of layers"),
        ([("m0", 0, 4)], "all of the base's"),
    ],
)
def test_layers_that_are_none(store: Store, layers: list[Any], word: str) -> None:
    """A run names a model of the merge and layers that it has."""
    with pytest.raises(BadRequest, match=word):
        store.plan(ask(*layers))


def test_a_stack_has_no_arithmetic(store: Store) -> None:
    """Other methods, scale, budgets and types are refused by name."""
    asked = {"base": "m0", "experts": ["m1"], "layers": [("m0", 0, 2), ("m1", 0, 2)]}
    for more, word in (
        ({"method": "ties"}, "ties merges"),
        ({"method": "passthrough", "parameters": {"scale": 2.0}}, "without scale"),
        ({"method": "passthrough", "budget": "30%"}, "budget"),
        ({"method": "passthrough", "experts": ["m1", ("m2", 0.5)]}, "without scale"),
        ({"method": "passthrough", "dtype": "float32"}, "dtype"),
    ):
        with pytest.raises(BadRequest) as caught:
            store.plan(MergeRequest(**{**asked, **more}))
        assert word in str(caught.value)
    with pytest.raises(BadRequest, match="no budgets"):
        store.sweep(MergeRequest(method="passthrough", **asked))


def test_models_that_do_not_fit(store: Store, tmp_path: Path) -> None:
    """Layers of another shape, type or name, and a model without layers, are refused."""
    wide = {name: np.repeat(value, 2, axis=1) for name, value in member(1).items()}
    other = {name.replace("model.", "gpt."): value for name, value in member(1).items()}
    flat = {name: value for name, value in member(1).items() if "layers" not in name}
    for name, tensors, word in (
        ("wide", wide, r"is BF16 \[24, 64\]"),
        ("other", other, "are called gpt.layers"),
        ("flat", flat, "one stack of layers"),
    ):
        store.add(write(tmp_path / name, tensors), name=name)
        with pytest.raises(Incompatible, match=word):
            store.plan(ask(("m0", 0, 2), (name, 0, 2), experts=(name,)))


TEXT = "language_model.model"
SEEING = (
    f"{TEXT}.embed_tokens.weight",
    *(f"{TEXT}.layers.{n}.mlp.up_proj.weight" for n in range(LAYERS)),
    f"{TEXT}.layers.{LAYERS}.eh_proj.weight",
    f"{TEXT}.norm.weight",
    "language_model.lm_head.weight",
    "language_model.mtp.fc.weight",
    *(f"vision_tower.encoder.layers.{n}.fc1.weight" for n in range(6)),
    "vision_tower.encoder.post_layernorm.weight",
    "multi_modal_projector.norm.weight",
)


def seeing(path: Path, number: int, config: dict[str, Any]) -> Path:
    """A model with a text model, a vision tower, and layers that predict further tokens."""
    rng = np.random.default_rng(number)
    tensors = {name: rng.integers(0, 1 << 14, (24, 32), dtype=np.uint16) for name in SEEING}
    write(path, tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_the_layers_of_a_text_model(store: Store, tmp_path: Path) -> None:
    """Of a model that sees, the text model's layers are stacked; what it sees with is of the first
    run, and what predicts further tokens follows the last layer."""
    per_layer = {"layer_types": list("abcd"), "mlp_layer_types": list("efgh"), "moe_layers": [1, 3]}
    own = {"num_hidden_layers": LAYERS, **per_layer}
    vision = {"num_hidden_layers": 6}
    for number in (0, 1):
        path = seeing(
            tmp_path / f"v{number}", number, {"text_config": own, "vision_config": vision}
        )
        store.add(path, name=f"v{number}")
    layers = [("v0", 0, 3), ("v1", 1, 4)]
    text = "merge_method: passthrough\nslices:\n" + "".join(
        f"- sources: [{{model: {name}, layer_range: [{first}, {end}]}}]\n"
        for name, first, end in layers
    )
    found = store.read_recipe(text, where="r.yml")
    assert tuple(found.request.layers) == tuple(layers)
    (remark,) = found.remarks
    assert "r.yml, line 3: 1 of language_model.model.layers are more than config.json" in remark
    store.merge(store.plan(found.request), name="seen")
    assert len(store.tensors("seen")) == len(SEEING) + 2
    taken = {
        **{name: ("v0", name) for name in (SEEING[0], *SEEING[9:])},
        **{f"{TEXT}.layers.{n}.mlp.up_proj.weight": ("v0", f"{n}.mlp.up") for n in range(3)},
        **{f"{TEXT}.layers.{n + 2}.mlp.up_proj.weight": ("v1", f"{n}.mlp.up") for n in (1, 2, 3)},
        f"{TEXT}.layers.6.eh_proj.weight": ("v1", "4.eh_proj"),
        **{name: ("v1", name) for name in SEEING[6:9]},
    }
    assert {one.name for one in store.tensors("seen")} == taken.keys()
    for name, (model, part) in taken.items():
        (source,) = (one for one in SEEING if part in one)
        assert store["seen"].tensor(name).tobytes() == store[model].tensor(source).tobytes(), name
    store.checkout("seen", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "text_config": {
            "num_hidden_layers": 6,
            "layer_types": list("abcbcd"),
            "mlp_layer_types": list("efgfgh"),
            "moe_layers": [1, 3, 5],
        },
        "vision_config": vision,
    }
    again = store.plan(store.read_recipe(store.recipe("seen")).request)
    assert again.plan == store.plan(found.request).plan


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"text_config": {}, "vision_config": {"num_hidden_layers": 6}}, "counts those"),
        ({"text_config": {"num_hidden_layers": 8}}, "counts those"),
    ],
)
def test_a_config_that_does_not_count_the_text_model(
    store: Store, tmp_path: Path, config: dict[str, Any], word: str
) -> None:
    """Without a config that says how many layers the text model has, it is not guessed."""
    name = f"unsaid{len(str(config))}"
    store.add(seeing(tmp_path / "v", 2, config), name=name)
    layers = [(name, 0, 1), (name, 0, 2)]
    asked = MergeRequest(base=name, experts=[name], method="passthrough", layers=layers)
    with pytest.raises(Incompatible, match=word):
        store.plan(asked)


def test_layers_that_share_weights(store: Store, tmp_path: Path) -> None:
    """A model with fewer layers than its config counts is not stacked."""
    store.add(write(tmp_path / "m", member(1), layers=12), name="shared")
    with pytest.raises(Incompatible, match="counts 12 layers, and its tensors have 4"):
        store.plan(ask(("shared", 0, 2), ("m1", 0, 2), experts=("shared", "m1")))


def test_what_the_config_of_a_stack_cannot_say(store: Store, tmp_path: Path) -> None:
    """Entries of config.json that count layers become those of the stack; what cannot be said of
    its layers is a warning of plan, merge and explanation that names the entry."""
    path = write(tmp_path / "dense", member(1))
    fields = {"no_rope_layers": [1, 1, 1, 0], "first_k_dense_replace": 2, "odd": [1, 2, 3, 4]}
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))
    store.add(path, name="dense")
    plan = store.plan(
        MergeRequest(
            base="dense", experts=["dense"], method="passthrough", layers=[("dense", 0, 3)] * 2
        )
    )
    merged = store.merge(plan, name="denser")
    for report in (plan, merged):
        told = [one.text for one in report.warnings if one.kind == "config of a stack"]
        assert len(told) == 2
        assert "first_k_dense_replace 2 cannot say" in told[0]
        assert "lists of 4 entries, as many as layers, stay: odd" in told[1]
    found = json.loads(store["denser"].read("config.json"))
    assert found == {
        "num_hidden_layers": 6,
        "layer_types": ["t0", "t1", "t2"] * 2,
        **fields,
        "no_rope_layers": [1, 1, 1] * 2,
    }
    assert store.replay("denser").same


def test_layers_of_models_with_other_configs(store: Store, tmp_path: Path) -> None:
    """The config says of a layer what the config of its own model says."""
    path = write(tmp_path / "other", member(1))
    config = json.loads((path / "config.json").read_text()) | {"layer_types": list("wxyz")}
    (path / "config.json").write_text(json.dumps(config))
    store.add(path, name="otherwise")
    asked = ask(("m0", 0, 2), ("otherwise", 1, 3), experts=("otherwise",))
    store.merge(store.plan(asked), name="both")
    assert json.loads(store["both"].read("config.json"))["layer_types"] == ["t0", "t1", "x", "y"]


def test_tensors_of_all_layers_are_not_stacked(store: Store, tmp_path: Path) -> None:
    """A model with a tensor that has rows for every layer is refused: it would not load."""
    path = write(tmp_path / "rows", member(1))
    config = json.loads((path / "config.json").read_text()) | {"hidden_size_per_layer_input": 8}
    (path / "config.json").write_text(json.dumps(config))
    store.add(path, name="rows")
    with pytest.raises(Incompatible, match=r"config\.json has hidden_size_per_layer_input"):
        store.plan(ask(("rows", 0, 2), ("m0", 0, 2), experts=("rows",)))


def test_an_exported_stack_is_the_same_plan(store: Store) -> None:
    """A stack travels as text, and an independent reader reads its record."""
    plan = store.plan(ask(("m0", 0, 2), ("m1", 1, 4)))
    text = store.export_plan(str(plan.plan))
    assert json.loads(text)["format"] == "mstore plan 1"
    assert store.import_plan(text).plan == plan.plan
    changed = json.loads(text)
    changed["taken"][1][2] = changed["taken"][2][2]
    with pytest.raises(BadRequest, match="changed by hand"):
        store.import_plan(json.dumps(changed))
    record = store._catalog.record(Plan, plan.plan)
    assert decode(Plan, record.encode(), "plan") == record
    found = independent_reader.read_record(independent_reader.PLAN, record.encode())
    assert found.layers == [(0, 0), (0, 1), (1, 1), (1, 2), (1, 3)]
    assert found.dropped == []
