"""Checkpoints of differences: added to their base, they are experts like any other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from checkpoints import write_safetensors
from families import Arrays

from mstore import MergeRequest, Store
from mstore.api.reports import AddReport
from mstore.terms.errors import BadCheckpoint, BadRequest, Incompatible

DTYPES = {"BF16": "BF16", "F16": "F16", "F32": "F32"}


def whole(dtype: str) -> Arrays:
    """A base of several blocks of 64 KiB, with special values, integers and a tensor of none."""
    rng = np.random.default_rng(1)
    base: Arrays = {
        "model.embed_tokens.weight": rng.standard_normal((300, 512)),
        "model.layers.0.mlp.weight": rng.standard_normal((100, 1000)),
        "model.layers.0.norm.weight": np.ones(64),
        "model.empty": np.zeros((0, 4)),
    }
    base = {name: families.cast(value, dtype) for name, value in base.items()}
    own = base["model.layers.0.mlp.weight"]
    own[0, :6] = [-0.0, np.nan, np.inf, -np.inf, 3.0, 0.0]
    base["model.ids"] = np.arange(20, dtype=np.int64)
    return base


def moved(base: Arrays, dtype: str, *, share: float = 1.0) -> Arrays:
    """Differences to some of the base, a share of them not 0."""
    rng = np.random.default_rng(2)
    found: Arrays = {}
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.empty"):
        step = 0.01 * rng.standard_normal(base[name].shape)
        step = np.where(rng.random(step.shape) < share, step, 0)
        found[name] = families.cast(step, dtype)
    found["model.layers.0.mlp.weight"][0, :6] = [0.0, 0.0, 0.0, np.inf, np.nan, -0.0]
    return found


def summed(base: Arrays, differences: Arrays) -> Arrays:
    """base + difference in float32, rounded once; the base's bits where nothing is added."""
    found = dict(base)
    for name, step in differences.items():
        own = base[name]
        with np.errstate(all="ignore"):
            total = (own.astype(np.float32) + step.astype(np.float32)).astype(own.dtype)
        found[name] = np.where(step == 0, own, total)
    return found


def write(root: Path, tensors: Arrays, *, shards: int = 1, **texts: str) -> Path:
    families.write_checkpoint(root, tensors, shards=shards)
    for path in root.iterdir():
        if "safetensors" not in path.name:
            path.unlink()
    for name, text in texts.items():
        (root / name.replace("__", ".")).write_text(text)
    return root


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as made:
        yield made


def add(store: Store, path: Path, name: str = "tuned", **options: Any) -> AddReport:
    return store.add(path, name=name, base="base", kind="delta", **options)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("difference", DTYPES)
@pytest.mark.parametrize("share", [1.0, 0.05])
def test_the_sum_is_stored(
    store: Store, tmp_path: Path, dtype: str, difference: str, share: float
) -> None:
    """base + difference, rounded once to the base's type, in the base's files; what has no
    difference, or one of 0, is the base's bit for bit."""
    base = whole(dtype)
    steps = moved(base, difference, share=share)
    store.add(write(tmp_path / "base", base, shards=3), name="base")
    report = add(store, write(tmp_path / "steps", steps, shards=1))
    assert report.remarks == ("2 of 5 tensors are the base's: there is no difference of them",)
    wanted = summed(base, steps)
    for name, value in wanted.items():
        found = np.asarray(store["tuned"].tensor(name))
        assert found.dtype == value.dtype
        finite = ~np.isnan(value.astype(np.float32)) if value.dtype != np.int64 else value == value
        assert np.array_equal(families.bits(found)[finite], families.bits(value)[finite]), name
        assert np.array_equal(~finite, found != found)
    own = [file for file in store["base"].files() if file.path.endswith("safetensors")]
    assert [(f.path, f.size) for f in store["tuned"].files() if f.path.endswith("safetensors")] == [
        (f.path, f.size) for f in own
    ]
    # A file that is read as any program reads it.
    store.checkout("tuned", tmp_path / "out")
    read = families.read_checkpoint(tmp_path / "out")
    for name, value in wanted.items():
        assert np.array_equal(read[name], value, equal_nan=value.dtype != np.int64), name


def test_it_is_an_expert_like_any_other(store: Store, tmp_path: Path) -> None:
    """The same bytes added whole are the same content; statistics are there, and blocks are stored
    as differences to the base; a merge of it is that of the whole model."""
    base = families.layered(3, rows=100).base
    steps = {
        name: families.cast(0.01 * np.random.default_rng(4).standard_normal(value.shape), "F32")
        for name, value in base.items()
        if value.dtype.itemsize == 2
    }
    store.add(write(tmp_path / "base", base), name="base")
    report = add(store, write(tmp_path / "steps", steps))
    assert report.base is not None
    assert report.base.refs == ("base",)
    assert report.bytes_written < 0.75 * report.plain_bytes
    tuned = tmp_path / "whole"
    store.checkout("tuned", tuned)
    again = store.add(tuned, name="again", base="base")
    assert again.manifest == report.manifest
    assert again.blocks_new == 0
    asked = MergeRequest(
        base="base", experts=["tuned"], method="ties", parameters={"density": 0.5}, analyze=False
    )
    plan = store.plan(asked)
    assert plan.analyze_bytes_read == 0
    other = store.plan(dataclasses.replace(asked, experts=["again"]))
    assert plan.plan == other.plan
    store.merge(plan, name="merged")


def test_the_same_again_changes_nothing(store: Store, tmp_path: Path) -> None:
    """The second time nothing is new, with any number of threads; other differences move the
    branch."""
    base = whole("BF16")
    store.add(write(tmp_path / "base", base), name="base")
    first = add(store, write(tmp_path / "steps", moved(base, "F16")), threads=1)
    second = add(store, tmp_path / "steps", threads=3)
    assert (first.new_snapshot, second.new_snapshot) == (True, False)
    assert second.bytes_written == second.blocks_new == 0
    assert (second.snapshot, second.manifest) == (first.snapshot, first.manifest)
    third = add(store, write(tmp_path / "sparse", moved(base, "F16", share=0.1)))
    assert third.new_snapshot
    assert third.previous == first.snapshot


def test_other_files_are_its_own(store: Store, tmp_path: Path) -> None:
    """Config and tokenizer are the checkpoint's where it has them, else the base's; tokenizers are
    not mixed; the base's model card is no card of the sum, and an index of the differences is
    none."""
    base = whole("BF16")
    texts = {"config__json": "{}", "LICENSE": "of the base", "README__md": "the base"}
    tokenizer = {"tokenizer__json": "base", "special_tokens_map__json": "{}", "notes__txt": "n"}
    store.add(write(tmp_path / "base", base, shards=3, **texts, **tokenizer), name="base")

    def of(name: str, path: str) -> str | None:
        file = next((one for one in store[name].files() if one.path == path), None)
        return None if file is None else bytes(store[name].read(path)).decode()

    steps = moved(base, "BF16")
    add(store, write(tmp_path / "one", steps, shards=2, config__json='{"a": 1}'), name="one")
    assert of("one", "config.json") == '{"a": 1}'
    assert of("one", "tokenizer.json") == "base"
    assert of("one", "LICENSE") == "of the base"
    assert of("one", "README.md") is None
    assert of("one", "model.safetensors.index.json") == of("base", "model.safetensors.index.json")
    own = {"tokenizer__model": "own", "README__md": "mine"}
    add(store, write(tmp_path / "two", steps, **own), name="two")
    assert of("two", "tokenizer.model") == "own"
    assert of("two", "tokenizer.json") is None
    assert of("two", "special_tokens_map.json") is None
    assert of("two", "README.md") == "mine"
    template = {"chat_template__jinja": "{{ x }}"}
    add(store, write(tmp_path / "three", steps, **template), name="three")
    assert of("three", "tokenizer.json") == "base"
    assert of("three", "chat_template.jinja") == "{{ x }}"


def test_one_file_and_copies_of_a_tensor(store: Store, tmp_path: Path) -> None:
    """A single file of differences has a base of several; each copy of a tensor is summed."""
    base = whole("F32")
    write(tmp_path / "base", base, shards=2)
    name = "model.layers.0.mlp.weight"
    (tmp_path / "base" / "original").mkdir()
    copied = [(name, "F32", base[name].shape, base[name].tobytes())]
    write_safetensors(tmp_path / "base" / "original" / "model.safetensors", copied)
    store.add(tmp_path / "base", name="base")
    steps = {name: moved(base, "F32")[name]}
    path = tmp_path / "steps.safetensors"
    write_safetensors(path, [(name, "F32", steps[name].shape, steps[name].tobytes())])
    add(store, path)
    store.checkout("tuned", tmp_path / "out")
    found = (tmp_path / "out" / "original" / "model.safetensors").read_bytes()
    wanted = summed(base, steps)[name]
    own = np.frombuffer(found[-wanted.nbytes :], np.float32).reshape(wanted.shape)
    assert np.array_equal(own, wanted, equal_nan=True)


def test_patterns_leave_tensors_to_the_base(store: Store, tmp_path: Path) -> None:
    """--skip and --only say which differences are added; others need not fit."""
    base = whole("F32")
    store.add(write(tmp_path / "base", base), name="base")
    steps = moved(base, "F32")
    steps["lm_head.weight"] = np.zeros((3, 3), np.float32)
    path = write(tmp_path / "steps", steps)
    for options in ({"skip": ["lm_head.*", "*mlp*"]}, {"only": ["*embed*", "model.empty"]}):
        add(store, path, **options)
        mlp, embed = "model.layers.0.mlp.weight", "model.embed_tokens.weight"
        assert np.array_equal(store["tuned"].tensor(mlp), base[mlp], equal_nan=True)
        added = summed(base, {embed: steps[embed]})[embed]
        assert np.array_equal(store["tuned"].tensor(embed), added)


# -- what does not fit ---------------------------------------------------------------------------

MLP = "model.layers.0.mlp.weight"
MISFITS: dict[str, tuple[Arrays, str]] = {
    "a name": (
        {"lm_head.weight": np.zeros((3, 3), np.float32)},
        "lm_head.weight is not in the base",
    ),
    "a shape": (
        {MLP: np.zeros((100, 999), np.float32)},
        f"{MLP} has shape .100, 999., the base .100, 1000.",
    ),
    "a type": ({MLP: np.zeros((100, 1000))}, f"{MLP} has elements of F64, the base of BF16"),
    "integers for floats": (
        {MLP: np.zeros((100, 1000), np.int64)},
        f"{MLP} has elements of I64, the base of BF16",
    ),
    "floats for integers": (
        {"model.ids": np.zeros(20, np.float32)},
        "model.ids has elements of F32",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_named(store: Store, tmp_path: Path, case: str) -> None:
    """A tensor that the base lacks, or that has another shape or type, is refused by name."""
    base = whole("BF16")
    store.add(write(tmp_path / "base", base), name="base")
    more, says = MISFITS[case]
    with pytest.raises(Incompatible, match=says) as refused:
        add(store, write(tmp_path / "steps", moved(base, "BF16") | more))
    assert refused.value.where == "tuned"
    assert "skip" in str(refused.value.hint)
    assert "tuned" not in [one.name for one in store.refs()]


def test_integers_are_taken_as_they_are(store: Store, tmp_path: Path) -> None:
    """They are no differences: a checkpoint that has them has them whole."""
    base = whole("BF16")
    store.add(write(tmp_path / "base", base), name="base")
    ids = np.arange(20, dtype=np.int64)[::-1].copy()
    add(store, write(tmp_path / "steps", moved(base, "BF16") | {"model.ids": ids}))
    assert np.array_equal(store["tuned"].tensor("model.ids"), ids)


def test_a_tensor_twice(store: Store, tmp_path: Path) -> None:
    """A second file with a difference of a tensor is another model, which the base has not."""
    base = whole("F32")
    store.add(write(tmp_path / "base", base), name="base")
    path = write(tmp_path / "steps", moved(base, "F32"))
    step = moved(base, "F32", share=0.5)[MLP]
    write_safetensors(path / "z.safetensors", [(MLP, "F32", step.shape, step.tobytes())])
    with pytest.raises(Incompatible, match=f"z:{MLP} is not in the base"):
        add(store, path)


def test_a_base_is_needed(store: Store, tmp_path: Path) -> None:
    """Without a base nothing is added, and none is looked for."""
    path = write(tmp_path / "steps", moved(whole("F32"), "F32"))
    for options in ({}, {"detect_base": True}):
        with pytest.raises(BadRequest, match="differences are added to a base"):
            store.add(path, name="tuned", kind="delta", **options)
    with pytest.raises(BadRequest, match="no kind of checkpoint is 'diff'"):
        store.add(path, name="tuned", kind="diff")


@pytest.mark.parametrize("tuned", [False, True])
def test_whole_weights_are_refused(store: Store, tmp_path: Path, tuned: bool) -> None:
    """A model, which has the base's direction and size, is no difference."""
    family = families.layered(3, rows=100)
    store.add(write(tmp_path / "base", family.base), name="base")
    other = family.experts[0] if tuned else family.base
    other = {name: value for name, value in other.items() if value.dtype.itemsize == 2}
    with pytest.raises(Incompatible, match="looks like whole weights") as refused:
        add(store, write(tmp_path / "other", other))
    assert "stores weights" in str(refused.value.hint)


def test_large_differences_are_told(store: Store, tmp_path: Path) -> None:
    """Differences that are larger than the base are added, with a remark."""
    base = families.layered(3, rows=100).base
    rng = np.random.default_rng(3)
    steps = {
        name: families.cast(9 * rng.standard_normal(value.shape), "F32")
        for name, value in base.items()
        if value.dtype.itemsize == 2
    }
    store.add(write(tmp_path / "base", base), name="base")
    report = add(store, write(tmp_path / "steps", steps))
    assert any("times as large as the base" in remark for remark in report.remarks)


def test_adapters_are_no_differences(store: Store, tmp_path: Path) -> None:
    """An adapter is refused, on either side, and the hint is how one is added."""
    base = whole("F32")
    store.add(write(tmp_path / "base", base), name="base")
    factors = {
        f"base_model.model.model.layers.0.mlp.lora_{side}.weight": np.zeros(shape, np.float32)
        for side, shape in (("A", (4, 1000)), ("B", (100, 4)))
    }
    path = write(tmp_path / "adapter", factors)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["mlp"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(Incompatible, match="is an adapter") as refused:
        add(store, path)
    assert "recognises adapters" in str(refused.value.hint)
    store.add(path, name="adapter", base="base")
    with pytest.raises(Incompatible, match="the base is an adapter"):
        store.add(write(tmp_path / "s", moved(base, "F32")), name="t", base="adapter", kind="delta")


def test_a_file_that_changes_stops_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences that change while they are read are not added."""
    from mstore.models import differences

    base = whole("F32")
    store.add(write(tmp_path / "base", base), name="base")
    path = write(tmp_path / "steps", moved(base, "F32"))
    block = differences.SummedBlocks.block

    def changing(self: differences.SummedBlocks, *where: Any) -> bytes:
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes())
        return block(self, *where)

    monkeypatch.setattr(differences.SummedBlocks, "block", changing)
    with pytest.raises(BadCheckpoint, match="changed while it was being read"):
        add(store, path)
    assert "tuned" not in [one.name for one in store.refs()]


def test_an_element_that_is_not_finite_hides_no_weights(store: Store, tmp_path: Path) -> None:
    """Whole weights are refused although one element, of theirs or of the base, is no number."""
    family = families.layered(3, rows=100)
    base = dict(family.base)
    base["model.embed.weight"] = base["model.embed.weight"].copy()
    base["model.embed.weight"][0, 0] = np.inf
    store.add(write(tmp_path / "base", base), name="base")
    other = {
        name: value.copy() for name, value in family.experts[0].items() if value.dtype.itemsize == 2
    }
    other["model.embed.weight"][3, 3] = np.nan
    with pytest.raises(Incompatible, match="looks like whole weights"):
        add(store, write(tmp_path / "other", other))
