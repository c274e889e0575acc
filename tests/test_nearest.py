"""The nearest base: who may be it, which of them is, and when none is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import Adapter
from checkpoints import Tensor, write_safetensors
from families import Arrays, cast, tensors_of, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from mstore import MergeRequest, Store
from mstore.api.reports import AddReport
from mstore.blocks.schema import PRUNED
from mstore.checkpoint.directory import scan
from mstore.snapshots.nearest import SearchLimits, bases_first, closeness, nearest
from mstore.terms.ids import SnapshotId

BLOCK = 1 << 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as opened:
        yield opened


def weights(seed: int, dtype: str = "BF16") -> Arrays:
    """A model of a dozen blocks: four matrices, a norm and a mask that every model shares."""
    rng = np.random.default_rng(seed)
    made = {
        f"layers.{n}.weight": cast(rng.standard_normal((128, 700)) / 50, dtype) for n in range(4)
    }
    made["norm.weight"] = cast(np.ones(700), dtype)
    made["mask"] = np.tril(np.ones((300, 300), dtype=np.uint8))
    return made


def moved(base: Arrays, seed: int, share: float, *, frozen: int = 0) -> Arrays:
    """A fine-tune: each matrix moved by `share` of its size, but for the first `frozen`."""
    rng = np.random.default_rng(seed)
    made = dict(base)
    for number, (name, array) in enumerate(base.items()):
        if name.startswith("layers") and number >= frozen:
            values = array.astype(np.float32)
            noise = rng.standard_normal(values.shape, dtype=np.float32) / 50
            made[name] = (values + share * noise).astype(array.dtype)
    return made


class Models:
    """Writes checkpoints below a directory and adds them."""

    def __init__(self, root: Path, store: Store) -> None:
        self._root = root
        self._store = store

    def write(self, name: str, arrays: Arrays, *, config: object = None, card: str = "") -> Path:
        directory = write_checkpoint(self._root / name, arrays, shards=2, note=name)
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))
        if card:
            (directory / "README.md").write_text(f"---\n{card}\n---\n# {name}\n")
        return directory

    def add(
        self,
        name: str,
        arrays: Arrays,
        *,
        config: object = None,
        card: str = "",
        base: str | None = None,
    ) -> AddReport:
        path = self.write(name, arrays, config=config, card=card)
        return self._store.add(path, name=name, base=base, detect_base=base is None)


@pytest.fixture
def models(tmp_path: Path, store: Store) -> Models:
    return Models(tmp_path / "models", store)


def base_of(report: AddReport) -> str | None:
    """The ref of the base that was recorded."""
    return None if report.base is None else report.base.refs[0]


def test_an_empty_store_has_none(models: Models) -> None:
    """The first model has no base, and is told so."""
    report = models.add("a/base", weights(1))
    assert report.base is None
    assert report.base_reason == "the store holds no other model"


def test_the_nearest_family_wins(store: Store, models: Models) -> None:
    """Of two families of one shape each fine-tune finds its own base, which is then recorded."""
    for seed, family in ((1, "a"), (2, "b")):
        report = models.add(f"{family}/base", weights(seed))
        assert report.base is None
    for seed, family in ((1, "a"), (2, "b")):
        report = models.add(f"{family}/tuned", moved(weights(seed), 7, 0.01, frozen=1))
        assert base_of(report) == f"{family}/base"
        assert report.base_reason is not None
        assert report.base_reason.startswith("it has the same tensors; ")
        assert "sampled blocks are equal, nearness 0." in report.base_reason
        assert report.blocks_equal_base == 6
        told = {parent.role: parent.refs for parent in store.show(report.name).parents}
        assert told == {"base": (f"{family}/base",)}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_unrelated_models_are_no_base(models: Models, dtype: str) -> None:
    """A model of the same shape but another training is none, in spite of a shared mask."""
    models.add("a", weights(1, dtype))
    report = models.add("b", weights(2, dtype))
    assert report.base is None
    assert report.base_reason is not None
    assert "none with values near these" in report.base_reason


def single(directory: Path, name: str, arrays: Arrays) -> Path:
    """A file of weights alone, as image models are shared."""
    path = directory / f"{name}.safetensors"
    write_safetensors(path, tensors_of(arrays))
    return path


EMA = {"model_ema.weight": cast(np.random.default_rng(4).standard_normal(9000), "BF16")}
POSITIONS = {"text_model.embeddings.position_ids": np.arange(77)}


def with_channels(arrays: Arrays, shape: tuple[int, ...]) -> Arrays:
    values = np.random.default_rng(5).standard_normal(shape) / 50
    return arrays | {"input_blocks.0.0.weight": cast(values, "BF16")}


@pytest.mark.parametrize("is_base", [False, True])
@pytest.mark.parametrize(
    "kind", ["positions", "marks", "ema", "channels", "name", "shape", "dtype"]
)
def test_a_base_that_has_most_of_the_tensors_is_found(
    store: Store, tmp_path: Path, kind: str, is_base: bool
) -> None:
    """What one side lacks, or has in another shape or type, hides no base: the others are stored
    as differences to it, and that tensor by itself; the file comes back as it was."""
    plain, other = weights(1), moved(weights(1), 2, 0.01, frozen=1)
    match kind:
        case "positions":
            other |= POSITIONS
        case "marks":
            other |= {"v_pred": np.zeros(0, "f4"), "ztsnr": np.zeros(0, "f4")}
        case "ema":
            other |= EMA
        case "channels":
            plain, other = (
                with_channels(plain, (700, 4, 3, 3)),
                with_channels(other, (700, 9, 3, 3)),
            )
        case "name":
            other["other"] = other.pop("norm.weight")
        case "shape":
            other["layers.3.weight"] = other["layers.3.weight"].reshape(700, 128)
        case "dtype":
            other["layers.3.weight"] = other["layers.3.weight"].view(np.float16)
    models = [plain, other][:: -1 if is_base else 1]
    first, second = (single(tmp_path, f"m{n}", one) for n, one in enumerate(models))
    store.add(first, name="a/base")
    report = store.add(second, name="a/tuned", detect_base=True)
    assert base_of(report) == "a/base"
    assert report.base_reason is not None
    assert f" of the {len(models[1])} tensors; " in report.base_reason
    assert report.blocks_equal_base is not None
    assert report.blocks_equal_base >= 3
    assert report.bytes_written < 0.75 * second.stat().st_size
    store.checkout("a/tuned", tmp_path / "out")
    assert (tmp_path / "out" / second.name).read_bytes() == second.read_bytes()
    assert store.fsck(read_data=True).problems == ()


@pytest.mark.parametrize("kind", ["name", "shape", "dtype", "size"])
def test_a_model_that_has_the_lesser_part_is_no_base(models: Models, kind: str) -> None:
    """Where most bytes are in tensors of other names, shapes (of equal size) or types, it is none,
    whatever the rest holds."""
    models.add("a", weights(1))
    other = weights(1)
    for n in range(1, 4):
        name = f"layers.{n}.weight"
        match kind:
            case "name":
                other[f"other.{n}"] = other.pop(name)
            case "shape":
                other[name] = other[name].reshape(700, 128)
            case "dtype":
                other[name] = other[name].view(np.float16)
            case "size":
                other[name] = other[name][1:]
    assert models.add("b", other).base is None


def test_the_base_with_more_of_the_tensors_wins(store: Store, models: Models) -> None:
    """A base that lacks compared blocks ranks below one that has them, though what it has is nearer
    than the mean of all."""
    base = weights(1)
    few = {name: array for name, array in base.items() if name != "layers.0.weight"}
    models.add("whole", base)
    store.add(models.write("part", few), name="part")
    tuned = moved(base, 7, 0.01)
    tuned["layers.0.weight"] = moved(base, 8, 0.1)["layers.0.weight"]
    assert base_of(models.add("tuned", tuned)) == "whole"


def test_the_root_of_the_family_is_preferred(models: Models) -> None:
    """A later version of a fine-tune, nearest to the one before, gets the family's root as base."""
    base = weights(1)
    tuned = moved(base, 2, 0.01)
    models.add("base", base)
    models.add("tuned", tuned)
    report = models.add("tuned", moved(tuned, 3, 0.0001))
    assert base_of(report) == "base"
    assert report.base_reason is not None
    assert report.base_reason.startswith("tuned is nearest (it has the same tensors; ")
    assert "), and base is the root of its family (" in report.base_reason
    # Each says its own: what was sampled of the fine-tune, and what of the root.
    assert report.base_reason.count("sampled blocks are equal") == 2


def test_a_clearly_nearer_member_is_taken(models: Models) -> None:
    """Where the root is far off by now, the model between is the base."""
    base = weights(1)
    instruct = moved(base, 2, 0.3)
    models.add("base", base)
    models.add("instruct", instruct, base="base")
    assert base_of(models.add("tuned", moved(instruct, 3, 0.003))) == "instruct"


def test_equal_nearness_goes_to_the_newest(store: Store, models: Models, tmp_path: Path) -> None:
    """Of two models of the same tensors the newer is taken, on every run."""
    base = weights(1)
    models.add("one", base)
    path = models.write("two", base)
    (path / "extra.txt").write_text("so that the snapshots differ")
    store.add(path, name="two")
    tuned = scan(models.write("tuned", moved(base, 2, 0.01)))
    found = {nearest(store._catalog, tuned) for _ in range(3)}
    assert {each.snapshot for each in found} == {store["two"].id}


def test_a_copy_is_not_its_own_base(store: Store, models: Models) -> None:
    """The same bytes under another name get the base of what they copy; a root's get none."""
    base, tuned = weights(1), moved(weights(1), 2, 0.01)
    models.add("base", base)
    models.add("tuned", tuned)
    root = store.add(models.write("base", base), name="again/base", detect_base=True)
    assert root.base is None
    assert root.base_reason == "the store holds these very bytes already"
    assert root.blocks_equal_base is None
    copy = store.add(models.write("tuned", tuned), name="again/tuned", detect_base=True)
    assert base_of(copy) == "base" or copy.base is not None
    assert copy.base is not None
    assert copy.base.snapshot == store["base"].id


def test_the_same_again_stays_nothing_new(store: Store, models: Models) -> None:
    """Adding what a branch holds makes no snapshot, whatever base could be found for it by now."""
    tuned = moved(weights(1), 2, 0.01)
    first = models.add("tuned", tuned)
    assert first.base is None
    models.add("base", weights(1))
    again = store.add(
        models.write("tuned", tuned), name="tuned", detect_base=True, message="better words"
    )
    assert not again.new_snapshot
    assert again.snapshot == first.snapshot
    assert again.base is None
    assert again.base_reason is None
    assert len(again.remarks) == 1
    assert "message was not kept" in again.remarks[0]


def test_detection_is_asked_for(store: Store, models: Models) -> None:
    """In Python no base is looked for unless asked; one that is named is taken as it is."""
    models.add("base", weights(1))
    path = models.write("tuned", moved(weights(1), 2, 0.01))
    plain = store.add(path, name="plain")
    assert (plain.base, plain.base_reason) == (None, None)
    named = store.add(path, name="named", base="base", detect_base=True)
    assert base_of(named) == "base"
    assert named.base_reason is None


# Declared


@pytest.mark.parametrize(
    "declared",
    [
        {"config": {"base_model": "./runs/second/"}},
        {"card": "base_model: Org/Second"},
        {"card": "base_model:\n- org/nothing\n- team/SECOND"},
    ],
)
def test_a_declared_base_is_taken(models: Models, declared: dict[str, Any]) -> None:
    """What config or card calls the base is taken, before nearer ones and the family's root."""
    first = weights(1)
    models.add("first", first)
    models.add("team/second", moved(first, 5, 0.05), base="first")
    report = models.add("tuned", moved(first, 2, 0.001), **declared)
    assert base_of(report) == "team/second"
    assert report.base_reason is not None
    assert " names '" in report.base_reason


def test_what_was_loaded_is_only_a_trace(models: Models) -> None:
    """_name_or_path may be an earlier version of the model: it leads to the root of its family."""
    first = weights(1)
    models.add("first", first)
    models.add("team/second", moved(first, 5, 0.05), base="first")
    models.add("third", moved(first, 6, 0.001), base="first")
    config = {"_name_or_path": "./runs/second"}
    report = models.add("tuned", moved(first, 2, 0.001), config=config)
    assert base_of(report) == "first"
    assert report.base_reason is not None
    assert report.base_reason.startswith("team/second is nearest (config")
    assert "), and first is the root of its family (" in report.base_reason


def test_a_declared_stranger_is_not_taken(models: Models) -> None:
    """A name alone makes no base: a model that is called so but has other values is passed over."""
    models.add("right", weights(1))
    models.add("llama/base", weights(2))
    tuned = moved(weights(1), 3, 0.01)
    report = models.add("tuned", tuned, config={"_name_or_path": "org/base"})
    assert base_of(report) == "right"


def test_a_snapshot_that_declares_the_same_name(models: Models) -> None:
    """A stored model whose own config gives the declared name counts as named."""
    models.add("x", weights(1), config={"_name_or_path": "org/llama"})
    report = models.add("y", moved(weights(1), 2, 0.01), card="base_model: org/llama")
    assert base_of(report) == "x"
    assert report.base_reason is not None
    assert report.base_reason.startswith("README.md names 'org/llama'; ")


def test_an_id_may_be_declared(store: Store, models: Models) -> None:
    """The beginning of a snapshot's id, of twelve digits or more, names it."""
    models.add("x", weights(1))
    models.add("y", weights(1) | {"norm.weight": weights(1)["norm.weight"] * 2})
    id = str(store["x"].id)[:12]
    report = models.add("z", moved(weights(1), 2, 0.01), card=f"base_model: '{id}'")
    assert report.base_reason is not None
    assert f"names '{id}'" in report.base_reason


# Who is no candidate


def test_virtual_snapshots_are_no_candidates(store: Store, models: Models) -> None:
    """A virtual merge, which has no bytes to compare, is never the base."""
    base = weights(1)
    models.add("base", base)
    models.add("tuned", moved(base, 2, 0.01))
    plan = store.plan(MergeRequest(base="base", experts=["tuned"], method="task_arithmetic"))
    store.merge(plan, name="merged", virtual=True)
    report = models.add("next", moved(base, 3, 0.01), config={"_name_or_path": "merged"})
    assert base_of(report) == "base"


def test_pruned_snapshots_are_no_candidates(store: Store, models: Models) -> None:
    """A pruned snapshot that no ref names is passed over: its bytes may be gone."""
    base = weights(1)
    models.add("base", base)
    tuned = models.add("tuned", moved(base, 2, 0.01))
    assert base_of(tuned) == "base"
    store.remove("base")
    index = store._catalog.index
    root = tuned.base
    assert root is not None
    with index.env.write() as transaction:
        index.put(transaction, PRUNED, SnapshotId(root.snapshot), 0)
    assert base_of(models.add("next", moved(base, 3, 0.01))) == "tuned"


def test_a_base_without_a_ref_is_found(store: Store, models: Models) -> None:
    """The base of a snapshot that a ref names is a candidate, though nothing names it any more."""
    models.add("base", weights(1))
    models.add("tuned", moved(weights(1), 2, 0.01))
    root = store["base"].id
    store.remove("base")
    report = models.add("next", moved(weights(1), 3, 0.01))
    assert report.base is not None
    assert report.base.snapshot == root


def test_a_broken_candidate_fails_no_add(store: Store, models: Models) -> None:
    """A model whose blocks cannot be read is passed over."""
    models.add("base", weights(1))
    for pack in (store.path / "packs").rglob("*.pack"):
        raw = bytearray(pack.read_bytes())
        for at in range(8192, len(raw) // 2, 97):
            raw[at] ^= 0xFF
        pack.chmod(0o644)
        pack.write_bytes(raw)
    path = models.write("tuned", moved(weights(1), 2, 0.01))
    assert nearest(store._catalog, scan(path)).snapshot is None


# What it costs


def test_the_search_is_bounded(
    store: Store, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not more candidates are compared, nor more blocks of each read, than the limits say."""
    base = weights(1)
    for number in range(6):
        store.add(models.write(f"m{number}", moved(base, number, 0.01)), name=f"m{number}")
    path = models.write("tuned", moved(base, 99, 0.01))
    checkpoint = scan(path)
    reads = []
    catalog = store._catalog
    read = catalog.read_block
    monkeypatch.setattr(
        catalog, "read_block", lambda block, *rest: (reads.append(block), read(block, *rest))[1]
    )
    limits = SearchLimits(blocks=10, unequal=2, candidates=3)
    assert nearest(catalog, checkpoint, limits=limits).snapshot is not None
    # The small files that may declare a name are not counted: nothing is declared here.
    assert 0 < len(reads) <= 3 * 2


def test_old_refs_are_found_by_name_or_through_their_kin(store: Store, models: Models) -> None:
    """Beyond the newest refs that are looked at, declared names and bases are found."""
    base = weights(1)
    models.add("old", base)
    models.add("kin", moved(base, 2, 0.01))
    models.add("lone", weights(3))
    limits = SearchLimits(manifests=2)

    def found(name: str, arrays: Arrays, card: str = "") -> str | None:
        checkpoint = scan(models.write(name, arrays, card=card))
        id = nearest(store._catalog, checkpoint, limits=limits).snapshot
        return next((name for name in ("old", "kin", "lone") if store[name].id == id), None)

    assert found("a", moved(base, 4, 0.01)) == "old"
    models.add("newer", weights(4))
    models.add("newest", weights(5))
    assert found("a", moved(base, 4, 0.01)) is None
    assert found("b", moved(base, 4, 0.01), "base_model: org/old") == "old"


# Closeness


def scaled(seed: int, noise: float, dtype: str) -> tuple[bytes, bytes]:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(20_000)
    b = a + noise * rng.standard_normal(20_000)
    return cast(a, dtype).tobytes(), cast(b, dtype).tobytes()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_closeness_falls_with_the_noise(dtype: str) -> None:
    """1 for equal values, less for more noise, and next to nothing for unrelated ones."""
    steps = [closeness(*scaled(1, noise, dtype), dtype) for noise in (0, 1e-3, 1e-2, 0.1, 0.5, 50)]
    assert steps[0] == 1
    assert steps == sorted(steps, reverse=True)
    assert steps[1] > 0.9
    assert steps[2] > 0.6
    assert steps[-1] < 0.05


@given(st.binary(min_size=64, max_size=64), st.binary(min_size=64, max_size=64), st.data())
def test_closeness_is_a_share_and_symmetric(a: bytes, b: bytes, data: st.DataObject) -> None:
    """Of any bits of any dtype: from 0 to 1, the same both ways, and 1 with itself."""
    from mstore.checkpoint.dtypes import DTYPES

    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    assert 0 <= closeness(a, b, dtype) == closeness(b, a, dtype) <= 1
    assert closeness(a, a, dtype) == 1


def test_zeros_of_both_signs_are_equal() -> None:
    """Minus zero and zero are one apart at most."""
    zero, minus = np.zeros(8, "<u2").tobytes(), np.full(8, 0x8000, "<u2").tobytes()
    assert closeness(zero, minus, "BF16") == 1


def test_integer_models_are_compared_too(store: Store, tmp_path: Path) -> None:
    """Where no tensor is floating, equal elements decide."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**31, (100, 500), dtype=np.int32)
    tuned = base.copy()
    tuned[:30] += 1
    for name, array in (("base", base), ("tuned", tuned), ("other", base[::-1].copy())):
        packed: list[Tensor] = [("q", "I32", array.shape, array.tobytes())]
        write_safetensors(tmp_path / name / "q.safetensors", packed)
    assert tensors_of({}) == []
    store.add(tmp_path / "base", name="base")
    assert base_of(store.add(tmp_path / "tuned", name="tuned", detect_base=True)) == "base"
    assert store.add(tmp_path / "other", name="other", detect_base=True).base is None


def lora(path: Path, base: str | None, *, rows: int = 128) -> Path:
    """An adapter of the first matrix, whose config names the base."""
    factors = np.ones((rows, 2), np.float32), np.ones((2, 700), np.float32)
    settings = {} if base is None else {"base_model_name_or_path": base}
    return Adapter({"layers.0": factors}, settings=settings).write(path)


def test_the_base_of_an_adapter_is_the_one_that_its_config_names(
    store: Store, models: Models, tmp_path: Path
) -> None:
    """An adapter is of the ref that its config names, if it fits; else the reason says why not."""
    models.add("team/base", weights(1))
    found = store.add(lora(tmp_path / "a", "team/base"), name="a", detect_base=True)
    assert base_of(found) == "team/base"
    assert found.base_reason == "adapter_config.json names 'team/base'"
    # As people have it: the path of a directory. The ref above is one of an adapter, too.
    models.add("other/a", weights(2))
    found = store.add(lora(tmp_path / "b", "/models/A"), name="b", detect_base=True)
    assert base_of(found) == "other/a"
    models.add("more/base", weights(3))
    for name, base, rows, told in (
        ("c", None, 128, "it is an adapter, and its config names no model"),
        ("d", "org/elsewhere", 128, "'org/elsewhere', which is not in the store"),
        ("e", "team/base", 64, "'team/base', which it does not fit"),
        ("f", "org/base", 128, "'org/base', which may be more/base or team/base"),
    ):
        found = store.add(lora(tmp_path / name, base, rows=rows), name=name, detect_base=True)
        assert (base_of(found), told in str(found.base_reason)) == (None, True), found.base_reason


# The order of several


def test_bases_come_first(tmp_path: Path) -> None:
    """A checkpoint comes after those that it declares; the others keep their order, rings too."""

    def write(name: str, declares: str | None) -> tuple[Path, str]:
        path = tmp_path / name
        path.mkdir()
        if declares is not None:
            (path / "config.json").write_text(json.dumps({"_name_or_path": declares}))
        return path, f"team/{name}-v1"

    tuned = write("tuned", "org/instruct")
    instruct = write("instruct", "org/base")
    lone = write("lone", "org/elsewhere")
    base = write("base", None)
    assert bases_first([tuned, instruct, lone, base]) == [lone, base, instruct, tuned]
    ring = [write("x", "y"), write("y", "x"), write("z", "y")]
    assert bases_first(ring) == ring
    adapter = lora(tmp_path / "lora", "org/base"), "lora"
    assert bases_first([adapter, base]) == [base, adapter]
    missing = (tmp_path / "missing", "m")
    assert bases_first([missing, base]) == [missing, base]
