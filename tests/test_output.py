"""The merged snapshot as a checkpoint: the base's files and layout, with new tensors in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from checkpoints import every_dtype_checkpoint, write_index, write_safetensors
from families import BLOCK, Family
from safetensors import deserialize
from safetensors.numpy import save_file

from mstore import MergeRequest, Store
from mstore.api.reports import MergeReport
from mstore.store.objects.manifest import SAFETENSORS
from mstore.terms.errors import BadName, Conflict, Incompatible

FAMILY = families.layered(rows=100)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family on disk; the base's config and index have more in them than most."""
    root = FAMILY.write(tmp_path_factory.mktemp("family"))
    base = root / "base"
    config = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "name": "Modell 🦙", "eps": 1e-05}
    config |= {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config, ensure_ascii=False))
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["metadata"] = {"total_size": 17, "note": "kept"}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    (base / "original").mkdir()
    (base / "original" / "params.json").write_text('{"dtype": "bfloat16"}')
    (base / ".gitattributes").write_bytes(b"*.safetensors filter=lfs\r\n")
    return root


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Store]:
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in ("base", *FAMILY.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        yield store


def merge(store: Store, name: str, *, allow_noop: bool = False, **options: Any) -> MergeReport:
    given = {"base": "base", "experts": FAMILY.names, "method": "task_arithmetic"}
    return store.merge(
        store.plan(MergeRequest(**given | options), allow_noop=allow_noop), name=name
    )


def header(data: bytes) -> tuple[dict[str, Any], int]:
    """The JSON of a safetensors file, and where its data begins."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def tensors_in(data: bytes) -> dict[str, dict[str, Any]]:
    """What the safetensors library finds in a file: dtype, shape and data of each tensor."""
    return dict(deserialize(data))  # type: ignore[no-untyped-call]


# -- the base's layout ---------------------------------------------------------------------------


def test_every_file_of_the_base_is_there(store: Store, root: Path, tmp_path: Path) -> None:
    """Config, tokenizer, index and hidden files are the base's, byte for byte; so are the shards'
    headers, and only tensors differ, the card, and the recipe of the merge.
    """
    merge(store, "merged")
    store.checkout("merged", tmp_path / "out")
    base, merged = families.contents(root / "base"), families.contents(tmp_path / "out")
    assert merged.pop("mergekit_config.yml")
    assert list(merged) == list(base)
    changed = {path for path in base if base[path] != merged[path]}
    assert changed == {path for path in base if path.endswith(".safetensors")} | {"README.md"}
    for path in changed - {"README.md"}:
        _, start = header(base[path])
        assert merged[path][:start] == base[path][:start]
        assert len(merged[path]) == len(base[path])


def test_tensors_keep_their_shards(store: Store) -> None:
    """Every tensor is in the file and place where the base has it, whatever the experts' shards."""
    merge(store, "merged")
    views = [store.view(name).manifest for name in ("base", "merged")]
    places = [
        [
            (file.path, [part.name for part in file.parts])
            for file in manifest.files
            if file.path != "mergekit_config.yml"
        ]
        for manifest in views
    ]
    assert places[0] == places[1]
    expert = store.view("e0").manifest
    assert sum(file.form == SAFETENSORS for file in expert.files) == 1


def test_what_is_not_merged_is_the_bases_own(store: Store) -> None:
    """Tensors of other types, which are equal in all experts, are the base's."""
    report = merge(store, "merged", dtype="F32")
    merged, base = store.view("merged").tensors, store.view("base").tensors
    assert merged["model.steps"] == base["model.steps"]
    assert merged["model.inv_freq"] == base["model.inv_freq"]
    assert not [remark for remark in report.remarks if "model." in remark]
    explained = store.explain("merged")
    told = {item.name: item.treatment for item in explained.tensors}
    assert told["model.steps"] == told["model.inv_freq"] == "unchanged"
    assert told["model.tied.embed_out"] == told["model.norm.weight"] == "merged"


# -- another dtype -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "float16"])
def test_dtype_goes_through_the_checkpoint(dtype: str, store: Store, tmp_path: Path) -> None:
    """Headers, config and total size tell of the new type, and the safetensors library agrees."""
    merge(store, "merged", dtype=dtype)
    store.checkout("merged", tmp_path / "out")
    files = families.contents(tmp_path / "out")
    base = {file.path: b"".join(store.read_file("base", file.path)) for file in store.files("base")}
    wanted = families.expected(
        FAMILY, "task_arithmetic", {}, (1, 1, 1), dtype={"float16": "F16"}.get(dtype, dtype)
    )
    total = 0
    for path in files:
        if not path.endswith(".safetensors"):
            continue
        ours, start = header(files[path])
        theirs, _ = header(base[path])
        assert list(ours) == list(theirs)
        assert ours.pop("__metadata__") == theirs.pop("__metadata__")
        assert start % 8 == 0
        for name, tensor in tensors_in(files[path]).items():
            array = wanted[name]
            if not array.size:
                array = families.cast(array, {"float16": "F16"}.get(dtype, dtype))
            assert tuple(tensor["shape"]) == array.shape
            assert bytes(tensor["data"]) == array.tobytes()
            assert tensor["dtype"] == ours[name]["dtype"]
            total += array.nbytes
    assert total == sum(array.nbytes for array in wanted.values())

    spelled = {"F32": "float32"}.get(dtype, dtype)
    config = json.loads(files["config.json"])
    assert config == json.loads(base["config.json"]) | {"dtype": spelled, "torch_dtype": spelled}
    assert "🦙" in files["config.json"].decode()
    index, old = (json.loads(one["model.safetensors.index.json"]) for one in (files, base))
    assert index["metadata"] == {"total_size": total, "note": "kept"}
    assert index["weight_map"] == old["weight_map"]
    assert list(index) == list(old)
    for path in ("tokenizer.json", "original/params.json", ".gitattributes"):
        assert files[path] == base[path]
    tensors = store.view("merged").tensors
    assert tensors["model.tied.embed_in"] == tensors["model.tied.embed_out"]


def test_the_bases_own_dtype_changes_nothing(store: Store) -> None:
    """Asking for the type that the tensors have already is the same merge, headers and all."""
    plain = merge(store, "merged")
    asked = merge(store, "asked", dtype="bfloat16")
    assert asked.plan != plain.plan
    assert asked.manifest == plain.manifest


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["int64", "float64", "bool"])
def test_elements_without_arithmetic_must_be_equal(tmp_path: Path, kind: str) -> None:
    """Integers that differ are an error that names them, before anything is read; a pattern leaves
    them to the base."""
    weight = np.arange(8, dtype=np.float32)
    steps = (np.arange(4) % 2).astype(kind)
    with Store.init(tmp_path / "store") as store:
        for name, more in (("base", 0), ("tuned", 1)):
            moved = (steps + more).astype(kind)
            # Without elements, nothing differs.
            none = np.zeros(0, dtype=kind if more else np.uint8)
            tensors = {"a.weight": weight + more, "a.steps": steps, "b.steps": moved, "none": none}
            folder = tmp_path / name
            folder.mkdir()
            save_file(tensors, folder / "model.safetensors")
            store.add(folder, name=name)
        asked = MergeRequest(base="base", experts=["tuned"], method="linear")
        with pytest.raises(Incompatible, match=r"b\.steps") as refused:
            store.plan(asked)
        assert "a.steps" not in str(refused.value)
        assert "tuned" in str(refused.value)
        told = [one.text for one in store.check_merge(asked).findings if one.severity == "error"]
        assert ["b.steps" in text for text in told] == [True]
        skipping = dataclasses.replace(asked, skip=["b.steps"])
        assert store.check_merge(skipping).mergeable
        report = store.merge(store.plan(skipping), name="merged")
        assert any("b.steps" in remark for remark in report.remarks)
        assert (store["merged"].tensor("b.steps") == steps).all()
        assert (store["merged"].tensor("a.weight") == weight + 1).all()


def test_odd_headers_are_retyped(tmp_path: Path) -> None:
    """Metadata, order of entries, 0-d and empty tensors, padding, and dtypes that are not merged
    survive a change of type; what the safetensors library reads is what was meant.
    """
    base = every_dtype_checkpoint(tmp_path / "base")
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(base, name="base")
        merge(store, "merged", experts=["base"], dtype="F32")
        found = {file.path: file.size for file in store.files("merged")}
        assert found.pop("README.md")
        # An expert that is the base cannot be in a recipe.
        assert list(found) == [file.path for file in store.files("base")]
        for path in found:
            old, new = (b"".join(store.read_file(name, path)) for name in ("base", "merged"))
            if not path.endswith(".safetensors"):
                assert new == old or path == "model.safetensors.index.json"
                continue
            before, after = (tensors_in(data) for data in (old, new))
            assert list(header(new)[0]) == list(header(old)[0])
            assert header(new)[0].get("__metadata__") == header(old)[0].get("__metadata__")
            assert before.keys() == after.keys()
            for name, tensor in before.items():
                merged = tensor["dtype"] in ("BF16", "F16", "F32")
                assert after[name]["dtype"] == ("F32" if merged else tensor["dtype"])
                assert after[name]["shape"] == tensor["shape"]
                if not merged or tensor["dtype"] == "F32":
                    assert after[name]["data"] == tensor["data"]


def test_a_consolidated_copy(tmp_path: Path) -> None:
    """A second file with the same tensors is a model, merged by itself, and does not count in the
    index; another one beside it, which the expert lacks, is left out.
    """
    values = np.arange(3000, dtype=np.float32)
    other = families.tensors_of({"w": families.cast(-values, "BF16")})
    for name, moved in (("base", 0), ("e0", 1)):
        mine = families.tensors_of({"w": families.cast(values + moved, "BF16")})
        write_safetensors(tmp_path / name / "model-1.safetensors", mine)
        write_safetensors(tmp_path / name / "zz" / "consolidated.safetensors", mine)
        write_index(tmp_path / name / "model.safetensors.index.json", {"w": "model-1.safetensors"})
    write_safetensors(tmp_path / "base" / "zz" / "other.safetensors", other)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "base", name="base")
        store.add(tmp_path / "e0", name="e0")
        merge(store, "merged", experts=["e0"], dtype="F32")
        store.checkout("merged", tmp_path / "out")
    first = families.read_safetensors(tmp_path / "out" / "model-1.safetensors")["w"]
    copy = families.read_safetensors(tmp_path / "out" / "zz" / "consolidated.safetensors")["w"]
    assert np.array_equal(first, families.cast(values + 1, "BF16").astype(np.float32))
    assert np.array_equal(first, copy)
    assert not (tmp_path / "out" / "zz" / "other.safetensors").exists()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 3000


def test_dtypes_of_parts_and_of_nothing(root: Path, tmp_path: Path) -> None:
    """Another dtype reaches the configs of parts and tensors without elements, virtual or not; what
    says how weights are quantized, and what --skip names, stays.
    """
    base = tmp_path / "base"
    families.write_checkpoint(base, FAMILY.base)
    config = {
        "text_config": {"torch_dtype": "bfloat16", "deep_config": {"dtype": "torch.float32"}},
        "vision_config": {"dtype": "auto"},
        "quantization_config": {"dtype": "bfloat16"},
        "rope": {"dtype": "bfloat16"},
    }
    (base / "config.json").write_text(json.dumps(config))
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(base, name="base")
        store.add(root / "e0", name="e0")
        for name, skip in (("m", []), ("s", ["model.empty"])):
            plan = store.plan(
                MergeRequest(
                    base="base", experts=["e0"], method="linear", dtype="float16", skip=skip
                )
            )
            store.merge(plan, name=name, virtual=True)
            virtual = {one.name: one.dtype for one in store.tensors(name)}
            manifest = store.materialize(name).manifest
            store.merge(plan, name="real")
            assert store["real"].manifest == manifest
            assert {one.name: one.dtype for one in store.tensors(name)} == virtual
            assert virtual["model.empty"] == ("BF16" if skip else "F16")
            assert store[name].tensor("model.empty").shape == (0, 8)
            assert store.replay(name).same
            told = json.loads(b"".join(store.read_file(name, "config.json")))
            assert told == config | {
                "text_config": {"torch_dtype": "float16", "deep_config": {"dtype": "float16"}}
            }
        store.checkout("m", tmp_path / "out")
        assert store.fsck(read_data=True).problems == ()
    found = tensors_in((tmp_path / "out" / "model.safetensors").read_bytes())
    assert found["model.empty"]["dtype"] == "F16"


# -- publishing ----------------------------------------------------------------------------------


def test_the_same_merge_again_is_no_new_snapshot(store: Store) -> None:
    """The second time nothing is written and the ref does not move; another plan makes a child."""
    first = merge(store, "again")
    assert first.new_snapshot
    assert first.bytes_written > 0
    second = merge(store, "again")
    assert (second.new_snapshot, second.bytes_written) == (False, 0)
    assert (second.snapshot, second.manifest) == (first.snapshot, first.manifest)
    assert len(store.reflog("again")) == 1
    third = merge(store, "again", parameters={"lambda": 0.5})
    assert third.new_snapshot
    assert [(p.role, p.snapshot) for p in store["again"].parents] == [
        ("previous", first.snapshot),
        ("base", store["base"].id),
        *(("expert", store[name].id) for name in FAMILY.names),
    ]
    # The same content from another plan is another snapshot, and costs no block.
    other = merge(store, "again", parameters={"lambda": 0.5}, budget="100%")
    assert other.new_snapshot
    assert other.manifest == third.manifest
    assert other.blocks_reused == other.blocks_total
    assert other.bytes_written < BLOCK


def test_a_merge_has_its_say_in_the_log(store: Store) -> None:
    """Message, plan and method are in the snapshot; the reflog names the method."""
    report = merge(store, "told", method="dare_ties", parameters={"density": 0.5})
    store.merge(
        store.plan(MergeRequest(base="base", experts=["e1"], method="ties")),
        name="told",
        message="why",
    )
    shown = store.show("told")
    assert (shown.message, shown.method, shown.made) == ("why", "ties", "merge")
    assert [move.action for move in store.reflog("told")] == [
        "merge: ties: why",
        "merge: dare_ties",
    ]
    assert store.show("told~1").plan == report.plan


def test_names_that_cannot_be_merged_into(store: Store) -> None:
    """A tag does not move, a bad name is none; nothing is published and nothing is left in tmp/."""
    store.tag("v1", "base")
    before = store.refs()
    with pytest.raises(Conflict, match="tags do not move"):
        merge(store, "v1")
    with pytest.raises(BadName):
        merge(store, "a b")
    with pytest.raises(Conflict, match="is a ref, so"):
        merge(store, "base/child")
    assert store.refs() == before
    assert list((store.path / "tmp").iterdir()) == []


def test_experts_must_fit_the_base(tmp_path: Path) -> None:
    """Missing tensors, extra ones and other shapes are listed by name, as many as fit a line."""
    base: families.Arrays = {
        f"t{number:02}": np.zeros((2, 3), dtype=np.float32) for number in range(12)
    }
    odd = {name: array for name, array in base.items() if name not in ("t03", "t04")}
    odd["t05"] = np.zeros((3, 2), dtype=np.float32)
    odd["extra"] = np.zeros(1, dtype=np.float32)
    few = {"t00": base["t00"]}
    for name, arrays in (("base", base), ("odd", odd), ("few", few)):
        families.write_checkpoint(tmp_path / name, arrays)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", "odd", "few"):
            store.add(tmp_path / name, name=name)
        with pytest.raises(Incompatible) as refused:
            store.plan(MergeRequest(base="base", experts=["base", "odd"], method="linear"))
        assert refused.value.where == "odd"
        assert refused.value.what == (
            "cannot be merged into base: t03 is missing; t04 is missing; "
            "t05 has shape [3, 2], the base [2, 3]; extra is not in the base"
        )
        assert refused.value.hint == (
            "store.diff('base', 'odd'); skip=[PATTERN] leaves tensors out, allow_missing=True "
            "merges the others"
        )
        with pytest.raises(Incompatible, match="t08 is missing; and 3 more"):
            store.plan(MergeRequest(base="base", experts=["few"], method="linear"))


def test_a_base_without_changes(tmp_path: Path) -> None:
    """Experts that are the base merge to the base: the same ManifestId, nothing read or written."""
    families.write_checkpoint(tmp_path / "base", FAMILY.base, shards=2)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        added = store.add(tmp_path / "base", name="base")
        for method in ("linear", "ties", "dare_ties"):
            report = merge(
                store, "merged", experts=["base", "base"], method=method, allow_noop=True
            )
            assert report.manifest == added.manifest
            assert (report.expert_bytes_read, report.base_bytes_read) == (0, 0)
            assert report.blocks_reused == report.blocks_total == added.blocks_total
        # Without normalize, linear scales: every tensor is computed, though no expert is read.
        scaled = merge(
            store,
            "merged",
            experts=[("base", 0.5), ("base", 0.25)],
            method="linear",
            parameters={"normalize": False},
        )
        assert (scaled.expert_bytes_read, scaled.full_expert_bytes) == (0, 0)
        found = store["merged"].tensor("model.norm.weight")
    family = Family(FAMILY.base, (FAMILY.base, FAMILY.base))
    wanted = families.expected(family, "linear", {"normalize": False}, (0.5, 0.25))
    assert np.array_equal(found, wanted["model.norm.weight"])
