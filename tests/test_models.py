"""Models: which files a loader loads together, and what tensors are called."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import independent_reader
import numpy as np
import pytest
from cli_runs import Program
from families import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from mstore import MergeRequest, Store
from mstore.checkpoint.models import full_name, models_of, own_name, single_of, split_name
from mstore.store.models import paired
from mstore.terms.errors import BadRequest, Incompatible, NotFound

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
HALF = "model.safetensors.index.fp16.json"
OLD = "model-00001-of-00003.safetensors"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def named(
    paths: list[str], maps: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, tuple[str, ...]]:
    """The files of each model."""
    found = models_of(paths, lambda index: (maps or {}).get(index, {}))
    return {one.name: one.files for one in found}


SHARDED = {INDEX: {"a": ONE, "b": TWO}, HALF: {"a": "h.safetensors"}}


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["model.safetensors"], {"": 1}),
        (["mix.safetensors"], {"": 1}),
        (["model.safetensors", "model.fp16.safetensors"], {"": 1, "@fp16": 1}),
        ([f"unet/{WEIGHTS}", "vae/model.safetensors"], {"unet": 1, "vae": 1}),
        (
            ["u/diffusion_pytorch_model.non_ema.safetensors", f"u/{WEIGHTS}"],
            {"u": 1, "u@non_ema": 1},
        ),
        (["mix_v1.safetensors", "mix_v2.safetensors"], {"mix_v1": 1, "mix_v2": 1}),
        (["flux.sft"], {"": 1}),
        (["flux.sft", "flux.safetensors", "vae.sft"], {"flux": 1, "flux.sft": 1, "vae": 1}),
        (["model.sft", "model.safetensors"], {"": 1, "model": 1}),
        (
            ["x/model.safetensors", "x.safetensors", "y.safetensors"],
            {"x": 1, "x.safetensors": 1, "y": 1},
        ),
        ([ONE, TWO], {"": 2}),
        ([ONE, TWO, INDEX], {"": 2}),
        ([ONE, TWO, INDEX, OLD], {"": 2}),
        ([ONE, TWO, INDEX, "model.safetensors"], {"": 2, "model": 1}),
        ([ONE, INDEX, "model.safetensors"], {"": 1}),
        ([ONE, TWO, INDEX, "extra.safetensors"], {"": 2, "extra": 1}),
        ([ONE, TWO, INDEX, "consolidated.safetensors"], {"": 2, "consolidated": 1}),
        (["consolidated.00.safetensors", "consolidated.01.safetensors"], {"": 2}),
        (
            ["model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"],
            {"@fp16": 2},
        ),
        (
            ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"],
            {"@fp16": 2},
        ),
        (["adapter_model.safetensors", "0-math/adapter_model.safetensors"], {"": 1, "0-math": 1}),
        (["model.safetensors", "adapter_model.safetensors"], {"": 1, "adapter_model": 1}),
        (["a:b%/model.safetensors"], {"a%3Ab%25": 1}),
        (["u@x/model.safetensors", "u/model.x.safetensors"], {"u%40x": 1, "u@x": 1}),
        ([HALF, "h.safetensors", "model.fp16.safetensors"], {"@fp16": 1, "model.fp16": 1}),
        (["config.json", "README.md"], {}),
    ],
)
def test_which_files_make_a_model(paths: list[str], names: dict[str, int]) -> None:
    """Each model has its name, and the number of files that a loader reads."""
    found = named(paths, SHARDED)
    assert {name: len(files) for name, files in found.items()} == names


@pytest.mark.parametrize(
    "half",
    [
        "model.safetensors.index.fp16.json",
        "model.safetensors.fp16.index.json",
        "model.fp16.safetensors.index.json",
    ],
)
def test_an_index_names_its_shards_whatever_they_are_called(half: str) -> None:
    """Shards are those of the index, and a variant's index is that of the variant."""
    plain = "model.safetensors.index.json"
    maps = {plain: {"a": "part-a.safetensors"}, half: {"a": "half.safetensors"}}
    found = named(["part-a.safetensors", "half.safetensors", plain, half], maps)
    assert found == {"": ("part-a.safetensors",), "@fp16": ("half.safetensors",)}
    assert single_of(half) == "model.fp16.safetensors"


_STEM = st.sampled_from(
    ["model", "diffusion_pytorch_model", "adapter_model", "consolidated", "mix"]
)
_FILE = st.builds(
    lambda stem, variant, shard, suffix: f"{stem}{variant}{shard}.{suffix}",
    _STEM,
    st.sampled_from(["", ".fp16", ".ema"]),
    st.sampled_from(["", "-00001-of-00002", "-00002-of-00002", "-00001-of-00001"]),
    st.sampled_from(["safetensors", "sft"]),
)
_FOLDER = st.sampled_from(["", "unet/", "a:b/", "unet/x/", "unet@fp16/"])
_PATH = st.builds(lambda folder, file: f"{folder}{file}", _FOLDER, _FILE)


@given(st.lists(_PATH, unique=True, max_size=12), st.randoms(use_true_random=False))
def test_a_file_is_of_one_model_at_most(paths: list[str], draw: Any) -> None:
    """Models share no file and no name, each has one file at least, the order of paths does not
    matter, and a reader that shares no line with the library finds the same."""
    found = models_of(paths, lambda _: {})
    files = [file for one in found for file in one.files]
    assert len(files) == len(set(files))
    assert set(files) <= set(paths)
    assert len({one.name for one in found}) == len(found)
    assert all(one.files for one in found)
    read = independent_reader.models_of(paths, lambda _: b"{}")
    assert {one.name: list(one.files) for one in found} == {
        name: one.files for name, one in read.items()
    }
    draw.shuffle(paths)
    assert models_of(paths, lambda _: {}) == found


@given(st.text(max_size=8), st.text(max_size=8))
def test_what_a_tensor_is_called_tells_model_and_name(directory: str, name: str) -> None:
    """MODEL:NAME is read back as both, whatever characters they have."""
    model = own_name(directory)
    assert split_name(full_name(model, name)) == (model, name)


@pytest.mark.parametrize(
    ("base", "own", "chosen", "pairs"),
    [
        ([""], [""], (None, None), {"": ""}),
        ([""], ["@fp16"], (None, None), {"": "@fp16"}),
        (["unet", "vae"], ["vae", "x"], (None, None), {"vae": "vae"}),
        (["unet", "vae"], ["mix"], (None, None), {}),
        (["unet", "vae"], ["mix"], ("unet", None), {"unet": "mix"}),
        (["unet", "vae"], ["unet", "x"], ("unet", None), {"unet": "unet"}),
        (["unet", "unet_2"], ["unet", "unet_2"], ("unet", "unet_2"), {"unet": "unet_2"}),
        (["unet"], ["a", "b"], (None, "b"), {"unet": "b"}),
        (["unet"], ["a", "b"], ("unet", "c"), {}),
        (["u@fp16", "v@fp16"], ["u", "v"], (None, None), {"u@fp16": "u", "v@fp16": "v"}),
        (["u", "v"], ["u@fp16", "v", "v@fp16"], (None, None), {"u": "u@fp16", "v": "v"}),
        (["u", "u@fp16", "v"], ["u", "v"], (None, None), {"u": "u", "v": "v"}),
        (["u", "v"], ["u@fp16", "u@ema", "v"], (None, None), {"v": "v"}),
        (["u", "u@fp16", "v"], ["u@fp16", "v"], ("u", None), {"u": "u@fp16"}),
        (["u@fp16", "v@fp16"], ["u", "v"], (None, "u"), {"u@fp16": "u"}),
        (["u", "u@fp16", "v"], ["", "@fp16"], ("u", None), {"u": ""}),
        (["u", "u@fp16", "v"], ["", "@fp16"], ("u@fp16", None), {"u@fp16": "@fp16"}),
        (["", "@fp16"], ["u", "u@fp16", "v"], (None, "u@fp16"), {"@fp16": "u@fp16"}),
    ],
)
def test_which_model_stands_for_which(
    base: list[str], own: list[str], chosen: tuple[str | None, str | None], pairs: dict[str, str]
) -> None:
    """Namesakes stand for each other, or the only forms of a model, or those that are named, or the
    only ones."""
    assert paired(base, own, chosen) == pairs


# -- in a store --------------------------------------------------------------------------------


def weights(value: float, dtype: str = "f4") -> dict[str, np.ndarray[Any, Any]]:
    return {"blocks.0.weight": np.full((64, 64), value, dtype)}


def write(folder: Path, values: Mapping[str, float], half: bool = False) -> Path:
    """A directory with one model for each path of a file, all of the same tensor names."""
    for path, value in values.items():
        made = folder.parent / "made"
        write_checkpoint(made, weights(value, "f2" if half and "fp16" in path else "f4"))
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (made / "model.safetensors").rename(folder / path)
        shutil.rmtree(made)
    return folder


PARTS = ("transformer", "transformer_2")


def pipeline(folder: Path, first: float, second: float) -> Path:
    write(folder, {f"{PARTS[0]}/{WEIGHTS}": first, f"{PARTS[1]}/{WEIGHTS}": second})
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    return folder


def build(root: Path) -> None:
    """A pipeline of two components with equal names, a fine-tune of it, a model alone, and a store
    that has them, closed."""
    with Store.init(root / "store", block_size=1 << 16) as store:
        store.add(pipeline(root / "base", 1.0, 10.0), name="base")
        store.add(pipeline(root / "tuned", 2.0, 30.0), name="tuned", base="base")
        store.add(write(root / "alone", {"mix.safetensors": 5.0}), name="alone", base=None)


@pytest.fixture
def store(copied: Path) -> Iterator[Store]:
    with Store.open(copied / "store") as store:
        yield store


def merge(store: Store, base: str, *experts: str, **more: Any) -> dict[str, float]:
    """The first element of each tensor of a merge."""
    plan = store.plan(MergeRequest(base=base, experts=experts, method="linear", **more))
    store.merge(plan, name="merged")
    snapshot = store["merged"]
    return {name: float(snapshot.tensor(name)[0, 0]) for name in snapshot}


FIRST, SECOND = (f"{part}:blocks.0.weight" for part in PARTS)


def test_each_component_is_merged_with_its_namesake(store: Store) -> None:
    """A tensor of one component is never that of another, though they have one name."""
    assert merge(store, "base", "base", "tuned") == {FIRST: 1.5, SECOND: 20.0}


def test_a_named_model_alone_is_merged(store: Store) -> None:
    """`REF:MODEL` merges one model; the others are the base's."""
    assert merge(store, f"base:{PARTS[0]}", "tuned") == {FIRST: 2.0, SECOND: 10.0}
    assert merge(store, f"base:{PARTS[0]}", f"tuned:{PARTS[1]}") == {FIRST: 30.0, SECOND: 10.0}
    assert merge(store, f"base:{PARTS[1]}", "alone") == {FIRST: 1.0, SECOND: 5.0}
    assert merge(store, "base", f"tuned:{PARTS[1]}") == {FIRST: 1.0, SECOND: 30.0}
    assert merge(store, "alone", f"tuned:{PARTS[1]}") == {"blocks.0.weight": 30.0}


@pytest.mark.parametrize("model", ["", f":{PARTS[0]}"])
def test_a_mask_is_of_each_component_that_is_merged(model: str, store: Store) -> None:
    """Of one expert the model of its mask is the expert: in all components, or in the named one."""
    request = MergeRequest(base=f"base{model}", experts=["tuned"], method="emr")
    store.emr(request, name="one")
    found = store["one/tuned"]
    wanted = {FIRST: 2.0, SECOND: 10.0 if model else 30.0}
    assert {name: float(found.tensor(name)[0, 0]) for name in found} == wanted


def test_models_that_say_not_which_are_refused(store: Store) -> None:
    """A model that is not there, or one model against several, is an error that lists them."""
    with pytest.raises(NotFound, match="no such model; it has transformer, transformer_2"):
        merge(store, "base:unet", "tuned")
    with pytest.raises(Incompatible, match="has no model of base"):
        merge(store, "base", "alone")
    with pytest.raises(BadRequest, match="which of the base's models"):
        merge(store, "base", f"tuned:{PARTS[0]}", f"tuned:{PARTS[1]}")


def test_a_model_that_the_other_lacks_is_not_compared(store: Store, tmp_path: Path) -> None:
    """A component saved alone with its variant is compared as the component; a model that the
    other snapshot lacks is an error, which names what to type."""
    values = {"diffusion_pytorch_model.safetensors": 9.0}
    values["diffusion_pytorch_model.fp16.safetensors"] = 9.0
    store.add(write(tmp_path / "part", values), name="part", base=f"base:{PARTS[0]}")
    found = store.diff(f"base:{PARTS[0]}", "part").tensors
    assert [one.name for one in found] == [FIRST]
    store.add(write(tmp_path / "two", {"a.safetensors": 1.0, "b.safetensors": 2.0}), name="two")
    with pytest.raises(Incompatible, match="has no model of base:transformer: it holds a, b") as e:
        store.diff(f"base:{PARTS[0]}", "two")
    assert "two:MODEL" in str(e.value.hint)


def test_a_virtual_merge_is_the_real_one(store: Store) -> None:
    """A merge that is computed on read has the same manifest of names and the same bytes."""
    request = MergeRequest(base="base", experts=["tuned"], method="linear")
    store.merge(store.plan(request), name="virtual", virtual=True)
    store.merge(store.plan(request), name="real")
    assert store["virtual"].load([FIRST, SECOND])[SECOND][0, 0] == 30.0
    files = [one.path for one in store.files("real") if one.path.endswith(".safetensors")]
    assert all(store["virtual"].read(path) == store["real"].read(path) for path in files)


def test_one_model_is_loaded_by_its_own_names(store: Store) -> None:
    """`load` takes a model, and says which there are where none is meant."""
    assert store["tuned"].models() == [*PARTS]
    assert store["tuned"].load(model=PARTS[1])["blocks.0.weight"][0, 0] == 30.0
    assert store["alone"].load()["blocks.0.weight"][0, 0] == 5.0
    with pytest.raises(Incompatible, match="holds 2 models: transformer, transformer_2"):
        store["tuned"].load()


def test_models_are_compared_with_their_namesakes(store: Store) -> None:
    """`diff` tells which component differs; of two models that are named it compares these."""
    store.add(pipeline(store.path.parent / "half", 1.0, 30.0), name="half", base="base")
    assert [one.name for one in store.diff("base", "half").tensors] == [SECOND]
    found = store.diff(f"half:{PARTS[0]}", f"base:{PARTS[0]}")
    assert (found.tensors_equal, found.tensors) == (1, ())
    (changed,) = store.diff(f"tuned:{PARTS[0]}", "alone").tensors
    assert (changed.name, changed.status) == (FIRST, "changed")


def test_explain_and_blame_name_the_component(store: Store) -> None:
    """Where a tensor came from is told for each component by itself."""
    merge(store, "base", "tuned")
    assert [one.name for one in store.explain("merged").tensors] == [FIRST, SECOND]
    assert store.explain("merged", SECOND).tensors[0].blocks_total == 1
    assert {one.name for one in store.blame("merged").tensors} == {FIRST, SECOND}


def test_patterns_name_components(store: Store) -> None:
    """A pattern with the name of a model leaves out, or takes, the tensors of that model."""
    assert merge(store, "base", "tuned", skip=[f"{PARTS[0]}:*"]) == {FIRST: 1.0, SECOND: 30.0}
    assert merge(store, "base", "tuned", only=[f"{PARTS[0]}:*"]) == {FIRST: 2.0, SECOND: 10.0}


def test_a_variant_that_an_expert_lacks_is_left_out(tmp_path: Path) -> None:
    """Each variant is merged in its own type; one that an expert lacks is not in the result, which
    the plan tells: the base's would be the unmerged model under the merge's name."""
    whole = {"model.safetensors": 1.0, "model.fp16.safetensors": 1.0}
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        store.add(write(tmp_path / "base", whole, half=True), name="base")
        both = dict.fromkeys(whole, 3.0)
        store.add(write(tmp_path / "both", both, half=True), name="both", base="base")
        store.add(write(tmp_path / "one", {"model.safetensors": 3.0}), name="one", base="base")
        assert merge(store, "base", "both") == {
            "blocks.0.weight": 3.0,
            "@fp16:blocks.0.weight": 3.0,
        }
        assert store["merged"].tensor("@fp16:blocks.0.weight").dtype == np.float16
        assert merge(store, "base", "one") == {"blocks.0.weight": 3.0}
        plan = store.plan(MergeRequest(base="base", experts=["one"], method="linear"))
        assert "other models" in [one.kind for one in plan.warnings]


def test_settings_are_compared_component_by_component(store: Store) -> None:
    """check-merge compares the configs of models that stand for each other, and names which."""
    folder = store.path.parent
    for name, heads in (("base", 4), ("tuned", 8)):
        for part in PARTS:
            told = {"_class_name": "Wan", "num_attention_heads": heads if part == PARTS[1] else 2}
            (folder / name / part / "config.json").write_text(json.dumps(told))
        store.add(folder / name, name=name, base=None)
    lone = write(folder / "lone", {WEIGHTS: 3.0})
    (lone / "config.json").write_text(json.dumps(told | {"_class_name": "Flux"}))
    store.add(lone, name="lone", base=None)
    told = f"{PARTS[1]}: num_attention_heads is 8, not 4"
    assert asked(store, "base", "tuned") == [told]
    assert asked(store, f"base:{PARTS[0]}", "tuned") == []
    found = asked(store, f"tuned:{PARTS[1]}", "lone")
    assert found == [f"{PARTS[1]}: _class_name is Flux, not Wan"]


def asked(store: Store, base: str, expert: str) -> list[str]:
    """What check-merge finds of settings."""
    found = store.check_merge(MergeRequest(base=base, experts=[expert], method="linear")).findings
    return [one.text for one in found if one.aspect in ("settings", "architecture")]


def test_a_fine_tune_of_one_component_is_added_to_it(store: Store) -> None:
    """`add` with a base REF:MODEL compares with that model, and stores differences to it."""
    folder = write(store.path.parent / "part", {"model.safetensors": 10.0})
    report = store.add(folder, name="part", base=f"base:{PARTS[1]}")
    assert report.blocks_equal_base == 1


def test_a_recipe_names_a_model(store: Store) -> None:
    """`model: REF:MODEL` of a recipe takes that model, and a plan's recipe says so again."""
    text = f"""
merge_method: task_arithmetic
base_model: base:{PARTS[1]}
models:
- model: tuned:{PARTS[0]}
  parameters: {{weight: 1}}
"""
    plan = store.plan(store.read_recipe(text, where="r.yml").request)
    store.merge(plan, name="merged")
    assert float(store["merged"].tensor(SECOND)[0, 0]) == 2.0
    again = store.read_recipe(store.recipe("merged"), where="r.yml")
    assert store.plan(again.request).plan == plan.plan


def test_one_model_is_cast(store: Store) -> None:
    """A cast of REF:MODEL leaves the other models as they are; one of REF casts them all."""
    store.cast(f"tuned:{PARTS[1]}", dtype="float16", name="half")
    assert {one.name: one.dtype for one in store.tensors("half")} == {FIRST: "F32", SECOND: "F16"}
    store.cast("tuned", dtype="float16", name="halves")
    assert {one.dtype for one in store.tensors("halves")} == {"F16"}
    assert store["halves"].tensor(SECOND)[0, 0] == 30.0


def test_an_adapter_is_extracted_of_one_model(store: Store) -> None:
    """Expert less base, of the models that are named; applied to that model it is the expert."""
    store.extract_lora(f"tuned:{PARTS[1]}", f"base:{PARTS[1]}", name="adapter", rank=1, dtype="F32")
    with pytest.raises(Incompatible, match="holds 2 models"):
        store.extract_lora("tuned", "base", name="x", rank=1)
    request = MergeRequest(base=f"base:{PARTS[1]}", experts=["adapter"], method="passthrough")
    store.merge(store.plan(request), name="merged")
    assert store["merged"].tensor(SECOND)[0, 0] == pytest.approx(30.0, rel=1e-5)
    assert store["merged"].tensor(FIRST)[0, 0] == 1.0


def test_a_snapshot_tells_its_models(store: Store) -> None:
    """`show` names them where there are several."""
    assert store.show("tuned").models == PARTS
    mstore = Program(store.path)
    lines = [line.split() for line in mstore.succeed("show", "tuned").lines]
    assert ["models", f"{PARTS[0]},", PARTS[1]] in lines
    assert not any(line[:1] == ["models"] for line in mstore.succeed("show", "alone").lines if line)


def test_an_adapter_is_checked_against_the_model_that_is_named(store: Store) -> None:
    """`check-merge` applies REF:MODEL of an expert that is an adapter to REF:MODEL of the base."""
    store.extract_lora(f"tuned:{PARTS[1]}", f"base:{PARTS[1]}", name="adapter", rank=1)
    request = MergeRequest(base=f"base:{PARTS[1]}", experts=["adapter:"], method="passthrough")
    assert store.check_merge(request).mergeable


def test_blame_of_a_merge_of_one_model(store: Store) -> None:
    """Tensors of models that were not merged have no share of experts."""
    merge(store, f"base:{PARTS[1]}", "tuned")
    assert [one.name for one in store.blame("merged").tensors] == [SECOND]
    assert store.blame("merged", FIRST).tensors[0].name == FIRST


def test_the_recipe_of_a_merge_of_one_model_runs(store: Store, tmp_path: Path) -> None:
    """What `recipe` prints is a recipe that `merge --recipe` takes, models of snapshots too."""
    mstore = Program(store.path)
    words = ("--base", f"base:{PARTS[1]}", "--expert", f"tuned:{PARTS[0]}", "--method", "linear")
    first = mstore.succeed("merge", *words, "--name", "one", "--json").document
    (tmp_path / "r.yml").write_text(mstore.succeed("recipe", "one").out)
    again = mstore.succeed(
        "merge", "--recipe", tmp_path / "r.yml", "--name", "two", "--json"
    ).document
    assert again["plan"] == first["plan"]


def test_patterns_decide_which_forms_are_left_out(tmp_path: Path) -> None:
    """A variant that an expert lacks stays the base's where patterns leave it, or its model, to the
    base: nothing is merged that it would contradict."""
    whole = {"model.safetensors": 1.0, "model.fp16.safetensors": 1.0, "x/model.safetensors": 1.0}
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        store.add(write(tmp_path / "base", whole, half=True), name="base")
        own = {"model.safetensors": 3.0, "x/model.safetensors": 3.0}
        store.add(write(tmp_path / "one", own), name="one", base="base")
        top, half, below = "blocks.0.weight", "@fp16:blocks.0.weight", "x:blocks.0.weight"
        assert merge(store, "base", "one") == {top: 3.0, below: 3.0}
        skipped = merge(store, "base", "one", skip=["@fp16:*"])
        assert skipped == {top: 3.0, half: 1.0, below: 3.0}
        assert merge(store, "base", "one", only=["x:*"]) == {top: 1.0, half: 1.0, below: 3.0}
        with pytest.raises(BadRequest, match="no tensor's name matches 'x'") as refused:
            merge(store, "base", "one", only=["x"])
        assert "x:*" in str(refused.value.hint)


# -- one model of a snapshot -------------------------------------------------------------------


def dressed(folder: Path, value: float) -> Path:
    """A pipeline with configs, a scheduler, a variant, and a model in a directory below another."""
    half = f"{PARTS[1]}/diffusion_pytorch_model.fp16.safetensors"
    write(pipeline(folder, value, value), {half: value}, half=True)
    write(folder, {f"{PARTS[0]}/adapter/adapter_model.safetensors": value})
    for path in ("scheduler/config.json", *(f"{part}/config.json" for part in PARTS)):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps({"of": path}))
    (folder / PARTS[0] / "assets").mkdir()
    (folder / PARTS[0] / "assets" / "words.txt").write_text("one\n")
    return folder


FIRST_FILES = [f"{PARTS[0]}/{name}" for name in ("assets/words.txt", "config.json", WEIGHTS)]


def test_the_files_and_tensors_of_one_model_are_listed(store: Store, tmp_path: Path) -> None:
    """REF:MODEL names the weights of a model and what lies beside them: no other weights, and
    nothing of a model below or above."""
    store.add(dressed(tmp_path / "full", 1.0), name="full", base=None)
    assert [one.path for one in store.files(f"full:{PARTS[0]}")] == FIRST_FILES
    half = f"{PARTS[1]}/diffusion_pytorch_model.fp16.safetensors"
    found = [one.path for one in store.files(f"full:{PARTS[1]}@fp16")]
    assert found == [f"{PARTS[1]}/config.json", half]
    (tensor,) = store.tensors(f"full:{PARTS[1]}@fp16")
    assert (tensor.name, tensor.file) == (f"{PARTS[1]}@fp16:blocks.0.weight", half)
    mstore = Program(store.path)
    listed = mstore.succeed("ls", f"full:{PARTS[0]}", "--json").document["files"]
    assert [one["path"] for one in listed] == FIRST_FILES
    told = mstore.succeed("ls", f"full:{PARTS[0]}", "--tensors", "--json").document["tensors"]
    assert [one["name"] for one in told] == [FIRST]


def test_one_model_is_a_checkpoint_of_its_own(store: Store, tmp_path: Path) -> None:
    """A view and a checkout of REF:MODEL have the files of `files`, by the paths in its
    directory."""
    folder = dressed(tmp_path / "full", 1.0)
    store.add(folder, name="full", base=None)
    view = store.view(f"full:{PARTS[0]}")
    assert [*view.files] == [path.removeprefix(f"{PARTS[0]}/") for path in FIRST_FILES]
    assert [*view.tensors] == ["blocks.0.weight"]
    assert view.read("config.json", 0, 99) == (folder / PARTS[0] / "config.json").read_bytes()
    assert [*store.view("full").tensors] != [*view.tensors]
    store.checkout(f"full:{PARTS[0]}", tmp_path / "out")
    below = sorted(
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")
    )
    assert below == [*view.files]
    with pytest.raises(NotFound, match="no such model"):
        store.view("full:unet")


def test_what_takes_a_whole_snapshot_says_so(store: Store) -> None:
    """Where a model alone means nothing, REF:MODEL is refused with what to write."""
    for ask in (store.show, store.replay, store.recipe, lambda one: store.tag("t", one)):
        with pytest.raises(NotFound) as refused:
            ask(f"base:{PARTS[0]}")
        assert "this takes a whole snapshot: REF" in str(refused.value.hint)


def test_a_model_is_compared_with_a_directory(store: Store, tmp_path: Path) -> None:
    """`diff REF:MODEL DIR` compares the files of the model's directory and its tensors.  Weights of
    other models of DIR do not count."""
    folder = dressed(tmp_path / "full", 1.0)
    store.add(folder, name="full", base=None)
    shutil.rmtree(folder / PARTS[0] / "adapter")
    found = store.diff_directory(f"full:{PARTS[0]}", folder / PARTS[0])
    assert (found.files, found.tensors, found.tensors_equal) == ((), (), 1)
    saved = write(tmp_path / "saved", {WEIGHTS: 2.0, "other.safetensors": 3.0})
    (saved / "notes.txt").write_text("new")
    found = store.diff_directory(f"full:{PARTS[0]}", saved)
    assert {one.path: one.status for one in found.files} == {
        WEIGHTS: "changed",
        "notes.txt": "added",
        "assets/words.txt": "removed",
        "config.json": "removed",
    }
    assert [(one.name, one.status) for one in found.tensors] == [(FIRST, "changed")]
    mstore = Program(store.path)
    told = mstore.succeed("diff", f"full:{PARTS[0]}", saved, "--json").document
    assert [one["name"] for one in told["tensors"]] == [FIRST]


def test_each_model_equals_the_directory_that_it_came_from(store: Store, tmp_path: Path) -> None:
    """`diff REF:MODEL DIR` leaves out what `checkout REF:MODEL` does: other forms, an index that no
    loader reads, and what lies in the directories of other models."""
    folder = dressed(tmp_path / "full", 1.0)
    stale = {"weight_map": {"blocks.0.weight": "gone.safetensors"}}
    half = folder / PARTS[1] / "diffusion_pytorch_model.fp16.safetensors"
    assert half.exists()
    (half.parent / f"{WEIGHTS}.index.json").write_text(json.dumps(stale))
    (folder / PARTS[0] / "adapter" / "adapter_config.json").write_text("{}")
    remarks = store.add(folder, name="full", base=None).remarks
    assert any("index" in one for one in remarks)
    for model in store["full"].models():
        directory = folder / model.partition("@")[0]
        found = store.diff_directory(f"full:{model}", directory)
        assert (found.files, found.tensors, found.tensors_equal) == ((), (), 1)


def test_a_directory_in_another_form_is_compared_with_a_model(store: Store, tmp_path: Path) -> None:
    """Where each side has one form of a model, a directory is compared as a snapshot is."""
    half = "model.fp16.safetensors"
    store.add(write(tmp_path / "half", {half: 1.0}, half=True), name="half", base=None)
    plain = write(tmp_path / "plain", {"model.safetensors": 1.0})
    found = store.diff_directory("half", plain)
    assert [(one.name, one.status) for one in found.tensors] == [
        ("@fp16:blocks.0.weight", "changed")
    ]
    (found_again,) = store.diff_directory("half:@fp16", plain).tensors
    assert (found_again.name, found_again.status) == ("@fp16:blocks.0.weight", "changed")


def test_one_model_is_compared(store: Store) -> None:
    """`compare REF:MODEL` measures one model against that of the base."""
    found = store.compare(f"tuned:{PARTS[0]}", base=f"base:{PARTS[0]}", by="tensor")
    assert [(one.name, one.models[0].change) for one in found.parts] == [(FIRST, 1.0)]
    whole = store.compare("tuned", base="base", by="tensor")
    assert [one.name for one in whole.parts] == [FIRST, SECOND]
    # The base's model is that of the experts; a model alone stands for the one that is named.
    assert store.compare(f"tuned:{PARTS[1]}", base="base").tensors == 1
    assert store.compare("alone", base=f"base:{PARTS[1]}").whole.models[0].change == 0.5
    mstore = Program(store.path)
    told = mstore.succeed("compare", f"tuned:{PARTS[0]}", "--base", "base", "--json").document
    assert told["tensors"] == 1


def test_a_merge_tells_which_models_it_took(store: Store) -> None:
    """`show`, the graph and the card name the component that was merged, and those of experts."""
    merge(store, f"base:{PARTS[0]}", f"tuned:{PARTS[1]}")
    parents = store.show("merged").parents
    assert [(one.role, one.model) for one in parents] == [("base", PARTS[0]), ("expert", PARTS[1])]
    assert [one.model for one in store["merged"].parents] == [*PARTS]
    card = store["merged"].read("README.md").decode()
    assert f'Only the base\'s "{PARTS[0]}" was merged' in card
    mstore = Program(store.path)
    for command in (("show", "merged"), ("log", "merged", "--graph")):
        told = mstore.succeed(*command).out
        assert f"{store['base'].id.short}:{PARTS[0]}" in told
        assert f"{store['tuned'].id.short}:{PARTS[1]}" in told
    merge(store, "base", "tuned")
    told = store.show("merged").parents
    assert [(one.role, one.model) for one in told] == [
        ("previous", None),
        ("base", None),
        ("expert", None),
    ]
    assert "Only the base's" not in store["merged"].read("README.md").decode()


def test_forms_that_a_budget_tells_apart_are_told(tmp_path: Path) -> None:
    """Blocks of a model and of its variant are chosen by themselves: where some are left out, the
    plan says that the two may differ."""
    rng = np.random.default_rng(1)

    def both(name: str, step: float) -> Path:
        for path, dtype in (("model.safetensors", "f4"), ("model.fp16.safetensors", "f2")):
            values = np.random.default_rng(0).standard_normal((4, 40_000)).astype("f4")
            moved = values + step * rng.standard_normal(values.shape)
            write_checkpoint(tmp_path / "made", {"a": moved.astype(dtype)})
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / "made" / "model.safetensors").rename(tmp_path / name / path)
            shutil.rmtree(tmp_path / "made")
        return tmp_path / name

    told = "the model at the top and @fp16 are forms of one model"
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        store.add(both("base", 0.0), name="base", base=None)
        store.add(both("one", 0.01), name="one", base="base")
        request = MergeRequest(base="base", experts=["one"], method="linear")
        assert not any(told in one for one in store.plan(request).remarks)
        half = dataclasses.replace(request, budget="50%")
        assert any(told in one for one in store.plan(half).remarks)
        only = dataclasses.replace(half, skip=["@fp16:*"])
        assert not any(told in one for one in store.plan(only).remarks)
