"""Models made of models: one suite of tests for whoever makes one; each makes its own class of it.

A caller says how it makes its model and what is different about it. All the rest holds for all.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from checkpoints import write_safetensors
from families import Arrays, read_safetensors, tensors_of
from test_vocabulary import tokenizer_json

from mstore import MergeRequest, Store, Vocabulary
from mstore.blocks.packs import PackId
from mstore.models.made import kept_metadata
from mstore.store.transaction import Transaction
from mstore.terms.ids import BlockId, SnapshotId

BLOCK = 1 << 16
LAYERS = 2
NAMES = (
    "model.embed_tokens.weight",
    *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(LAYERS)),
    *(f"model.layers.{n}.input_layernorm.weight" for n in range(LAYERS)),
    "lm_head.weight",
)
FISHER = 4
TOKENS = [f"t{n}" for n in range(8)]
SAID = {
    "format": "pt",
    "modelspec.architecture": "test",
    "modelspec.title": "of another model",
    "modelspec.hash_sha256": "0x12",
    "sshs_model_hash": "34",
    "thumbnail": "data:,",
}
KEPT = {"format": "pt", "modelspec.architecture": "test"}


def arrays(seed: int, tokens: int = len(TOKENS)) -> Arrays:
    """A base (seed 0), or a fine-tune of it; or a Fisher, which has no negative elements."""
    found = {}
    for number, name in enumerate(NAMES):
        rows = tokens if name in (NAMES[0], NAMES[-1]) else 64
        shape = (64,) if "norm" in name else (rows, 48)
        value = np.random.default_rng(number).standard_normal(shape)
        other = np.random.default_rng(100 * seed + number).standard_normal(shape)
        tuned = value + (seed > 0) * other / 16
        found[name] = (np.abs(tuned) if seed == FISHER else tuned).astype(np.float32)
    return found


def write_model(path: Path, seed: int, tokens: list[str]) -> Path:
    """Write a model in two shards with an index, all its papers, and a tokenizer."""
    tensors = tensors_of(arrays(seed, len(tokens)))
    shards = {"model-1-of-2.safetensors": tensors[::2], "model-2-of-2.safetensors": tensors[1::2]}
    for file, own in shards.items():
        write_safetensors(path / file, own, metadata=SAID)
    index = {
        "metadata": {
            "total_size": sum(len(data) for *_, data in tensors),
            "total_parameters": sum(len(data) for *_, data in tensors) // 4,
        },
        "weight_map": {name: file for file, own in shards.items() for name, *_ in own},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "vocab_size": len(tokens),
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(tokenizer_json(tokens))
    licence = "mit" if seed % 2 else "apache-2.0"
    (path / "README.md").write_text(
        f"---\nlicense: {licence}\nmodel_name: m{seed}\n---\n# m{seed}\n"
    )
    (path / "LICENSE").write_text(licence)
    return path


def build(root: Path) -> None:
    """A store with a base, two fine-tunes of it, one that has a token more, and a Fisher."""
    Store.init(root / "store", block_size=BLOCK, codec="raw").close()
    with Store.open(root / "store", author="Ada") as store:
        for seed, name in enumerate(("base", "math", "code", "wide", "fisher")):
            tokens = [*TOKENS, "more"] if name == "wide" else TOKENS
            path = write_model(root / name, seed, tokens)
            store.add(path, name=name, base="base" if name in ("math", "code") else None)


@pytest.fixture(scope="class")
def with_adapters(
    template: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same, with the adapters that a class needs."""
    if not request.cls.adapters:
        return template / "store"
    root = tmp_path_factory.mktemp("adapters")
    shutil.copytree(template / "store", root / "store")
    with Store.open(root / "store", author="Ada") as store:
        for name in request.cls.adapters:
            store.extract_lora(name, "base", name=f"lora/{name}", rank=2, skip=["*norm*"])
    return root / "store"


@pytest.fixture(scope="class")
def directory(
    with_adapters: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The model that a class makes, checked out."""
    root = tmp_path_factory.mktemp("made")
    shutil.copytree(with_adapters, root / "store")
    with Store.open(root / "store", author="Ada") as store:
        store.checkout(request.cls().make(store), root / "out")
    return root / "out"


class Making(ABC):
    """What holds for every command that makes a model of models.

    made: the word of its snapshot. metadata: what the headers of its weights say. is_adapter:
    whether it is one. card: the title of its README.md, None for that of its source. licences:
    paths of its licence files. roles: of its parents. layers, dtype: of its config. adapters: of
    which fine-tunes it needs adapters.
    """

    made: ClassVar[str]
    metadata: ClassVar[dict[str, str]] = KEPT
    is_adapter: ClassVar[bool] = False
    adapters: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[str | None] = None
    licences: ClassVar[tuple[str, ...]] = ("LICENSE",)
    roles: ClassVar[tuple[str, ...]]
    layers: ClassVar[int] = LAYERS
    dtype: ClassVar[str] = "float32"

    @abstractmethod
    def make(self, store: Store) -> str:
        """Make the model; return its branch."""

    @pytest.fixture
    def store(self, with_adapters: Path, tmp_path: Path) -> Iterator[Store]:
        """A store that a test may change."""
        shutil.copytree(with_adapters, tmp_path / "store")
        with Store.open(tmp_path / "store", author="Ada") as store:
            yield store

    def test_headers(self, directory: Path) -> None:
        """No header has metadata that names other bytes; what says how to read the file stays."""
        for path in directory.glob("*.safetensors"):
            header = _header(path)
            assert header["__metadata__"] == self.metadata

    def test_tensors(self, directory: Path) -> None:
        """Tensors lie one after the other, in the order that they had; every reader finds them."""
        for path in directory.glob("*.safetensors"):
            header = _header(path)
            header.pop("__metadata__")
            places = [one["data_offsets"] for one in header.values()]
            assert places == sorted(places)
            assert [begin for begin, _ in places[1:]] == [end for _, end in places[:-1]]
            assert list(read_safetensors(path)) == [*header]
            assert path.stat().st_size == places[-1][1] + _length(path)
            known = [name for name in NAMES if name in header] if not self.is_adapter else []
            assert [name for name in header if name in known] == sorted(known, key=NAMES.index)

    def test_shard_index(self, directory: Path) -> None:
        """The index names every tensor in its shard, and states what they take together."""
        path = directory / "model.safetensors.index.json"
        assert path.exists() != self.is_adapter
        if self.is_adapter:
            return
        index = json.loads(path.read_text())
        headers = {path.name: _header(path) for path in directory.glob("*.safetensors")}
        entries = {
            name: (file, entry)
            for file, header in headers.items()
            for name, entry in header.items()
            if name != "__metadata__"
        }
        assert index["weight_map"] == {name: file for name, (file, _) in entries.items()}
        sizes = [entry["data_offsets"] for _, entry in entries.values()]
        assert index["metadata"] == {
            "total_size": sum(end - begin for begin, end in sizes),
            "total_parameters": sum(int(np.prod(one["shape"])) for _, one in entries.values()),
        }

    def test_config(self, directory: Path) -> None:
        """The config says what the tensors are: their type, layers and rows."""
        if self.is_adapter:
            config = json.loads((directory / "adapter_config.json").read_text())
            assert config["peft_type"] == "LORA"
            return
        config = json.loads((directory / "config.json").read_text())
        (rows,) = {
            entry["shape"][0]
            for path in directory.glob("*.safetensors")
            for name, entry in _header(path).items()
            if name == NAMES[0]
        }
        told = config["torch_dtype"], config["num_hidden_layers"], config["vocab_size"]
        assert told == (self.dtype, self.layers, rows)

    def test_card_and_licences(self, directory: Path) -> None:
        """A model of several has a card of its own, and every licence; a model stored again keeps
        its papers."""
        found = {
            str(path.relative_to(directory))
            for path in directory.rglob("*")
            if "LICENSE" in path.name
        }
        assert found == {*self.licences}
        card = directory / "README.md"
        if self.card is None:
            assert not card.exists() or card.read_text().startswith("---\nlicense: ")
        else:
            assert f"\n# {self.card}" in card.read_text()

    def test_snapshot(self, store: Store) -> None:
        """Its snapshot says by what it was made, of what, and by whom."""
        shown = store.show(self.make(store))
        assert (shown.made, shown.author, shown.origin) == (self.made, "Ada", None)
        assert tuple(one.role for one in shown.parents) == self.roles
        assert (shown.plan is not None) == (self.made in ("merge", "prepare"))

    def test_again(self, store: Store) -> None:
        """Made again, it is the same snapshot, and the store is as it was."""
        name = self.make(store)
        before = store[name].id, store.reflog(name), {*store.snapshot_ids()}, _blocks(store)
        assert self.make(store) == name
        after = store[name].id, store.reflog(name), {*store.snapshot_ids()}, _blocks(store)
        assert after == before

    def test_heals(self, store: Store) -> None:
        """Made again after a repair, it has every block that the repair dropped."""
        before = _blocks(store)
        name = self.make(store)
        id = store[name].id
        new = _blocks(store).items() - before.items()
        assert new
        for _, (pack, offset) in new:
            _flip(Path(store._catalog.packs.where(pack)), offset)
        store.repair(read_data=True)
        assert store.fsck(read_data=True).problems
        assert self.make(store) == name
        assert store.fsck(read_data=True).problems == ()
        assert store[name].id == id

    def test_stopped(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stopped before its commit, it leaves nothing but what a new attempt may use."""
        before = store.ref_ids(), {*store.snapshot_ids()}, _blocks(store)

        def stop(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "commit", stop)
            with pytest.raises(KeyboardInterrupt):
                self.make(store)
        assert (store.ref_ids(), {*store.snapshot_ids()}, _blocks(store)) == before
        self.make(store)
        assert store.fsck(read_data=True).problems == ()


def _header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    found: dict[str, Any] = json.loads(raw[8 : _length(path)])
    return found


def _length(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _blocks(store: Store) -> dict[BlockId, tuple[PackId, int]]:
    index = store._catalog.index
    with index.env.read() as rows:
        return {id: (place.pack, place.offset) for id, place in index.blocks(rows)}


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(raw)


class TestMerge(Making):
    """A merge of two experts."""

    made = "merge"
    roles = ("base", "expert", "expert")
    card = "A merge of 2 models by linear"
    licences = tuple(f"licenses/{one}/LICENSE" for one in ("base", "expert-1", "expert-2"))

    def make(self, store: Store) -> str:
        plan = store.plan(MergeRequest(base="base", experts=["math", "code"], method="linear"))
        return store.merge(plan, name="out", memo=False).name


class TestRetyped(TestMerge):
    """A merge in another type."""

    dtype = "bfloat16"

    def make(self, store: Store) -> str:
        request = MergeRequest(
            base="base", experts=["math", "code"], method="linear", dtype="bfloat16"
        )
        return store.merge(store.plan(request), name="out", memo=False).name


class TestVirtual(TestMerge):
    """A merge whose blocks are computed when they are read."""

    def make(self, store: Store) -> str:
        plan = store.plan(MergeRequest(base="base", experts=["math", "code"], method="linear"))
        return store.merge(plan, name="out", virtual=True).name


class TestInformed(TestMerge):
    """A merge in which Fishers weigh: companions, which are parents and no experts."""

    roles = ("base", "expert", "expert", "companion", "companion")
    card = "A merge of 2 models by fisher"
    licences = (
        *TestMerge.licences,
        *(f"licenses/fisher-{one}/LICENSE" for one in (1, 2)),
    )

    def make(self, store: Store) -> str:
        request = MergeRequest(
            base="base",
            experts=["math", "code"],
            method="fisher",
            companions={"fisher:math": "fisher", "fisher:code": "fisher"},
        )
        return store.merge(store.plan(request), name="out", memo=False).name


class TestStack(Making):
    """Layers of two models, one after the other."""

    made = "merge"
    roles = ("base", "expert")
    card = "A stack of 3 layers of 2 models"
    licences = tuple(f"licenses/{one}/LICENSE" for one in ("base", "expert-1"))
    layers = 3

    def make(self, store: Store) -> str:
        request = MergeRequest(
            base="base",
            experts=["math"],
            method="passthrough",
            layers=[("base", 0, 2), ("math", 1, 2)],
        )
        return store.merge(store.plan(request), name="out").name


class TestPrepared(TestStack):
    """The same stack, made because a recipe scales its layers."""

    made = "prepare"
    recipe = (
        "merge_method: passthrough\nslices:\n"
        "- sources:\n  - {model: base, layer_range: [0, 2]}\n"
        "- sources:\n  - {model: math, layer_range: [1, 2], parameters: {scale: 0.5}}\n"
    )

    def make(self, store: Store) -> str:
        (one,) = store.prepare_recipe(self.recipe)
        return one.ref


class TestCast(Making):
    """A model in another type."""

    made = "cast"
    roles = ("base",)
    dtype = "bfloat16"

    def make(self, store: Store) -> str:
        return store.cast("math", dtype="bfloat16", name="out").name


class TestAlign(Making):
    """A model with the tokens of another."""

    made = "align"
    roles = ("base",)

    def make(self, store: Store) -> str:
        request = MergeRequest(base="base", experts=["wide"], method="linear")
        name = store.align(request, Vocabulary(source="union")).base.ref
        assert name is not None
        return name


class TestExtract(Making):
    """An adapter of a fine-tune."""

    made = "extract"
    roles = ("base", "expert")
    metadata: ClassVar[dict[str, str]] = {"format": "pt"}
    is_adapter = True
    licences = ()

    def make(self, store: Store) -> str:
        return store.extract_lora("math", "base", name="out", rank=2).name


class TestCombine(TestExtract):
    """An adapter of two."""

    made = "combine"
    roles = ("base", "expert", "expert")
    adapters = ("math", "code")
    card = "A LoRA adapter of rank 4, made of 2 adapters by cat"

    def make(self, store: Store) -> str:
        return store.combine_adapters(["lora/math", "lora/code"], "cat", name="out").name


def test_a_cast_of_nothing_changes_nothing(tmp_path: Path) -> None:
    """A model that has the type already is cast to its own content, header and all."""
    with Store.init(tmp_path / "store") as store:
        store.add(write_model(tmp_path / "m", 0, TOKENS), name="m")
        store.cast("m", dtype="float32", name="out")
        assert store["out"].manifest == store["m"].manifest


def test_a_merge_that_is_the_base_keeps_its_headers(tmp_path: Path) -> None:
    """Nothing was merged, so what the headers say is true, and the content is the base's."""
    with Store.init(tmp_path / "store") as store:
        store.add(write_model(tmp_path / "m", 0, TOKENS), name="m")
        request = MergeRequest(base="m", experts=["m"], method="linear")
        store.merge(store.plan(request, allow_noop=True), name="out")
        assert store["out"].manifest == store["m"].manifest


def test_all_shards_of_a_model_that_changes(tmp_path: Path) -> None:
    """A title is that of all files: a shard that stays has no title that is no longer true, and a
    model beside it keeps its own."""
    other = tensors_of({"decoder.weight": np.zeros((4, 4), np.float32)})
    with Store.init(tmp_path / "store") as store:
        write_model(tmp_path / "m", 0, TOKENS)
        write_safetensors(tmp_path / "m" / "vae" / "model.safetensors", other, metadata=SAID)
        store.add(tmp_path / "m", name="m")
        store.cast("m", dtype="bfloat16", only=["lm_head.weight"], name="out")
        store.checkout("out", tmp_path / "out")
    found = [
        _header(path)["__metadata__"] for path in sorted((tmp_path / "out").rglob("*.safe*rs"))
    ]
    assert found == [KEPT, KEPT, SAID]


@pytest.mark.parametrize(
    ("key", "stays"),
    [
        ("format", True),
        ("_quantization_metadata", True),
        ("config", True),
        ("modelspec.prediction_type", True),
        ("modelspec.date", False),
        ("modelspec.license", False),
        ("modelspec.of_a_later_version", False),
        ("ss_network_module", True),
        ("ss_output_name", False),
        ("sshs_legacy_hash", False),
        ("sd_merge_recipe", False),
        ("model_sha256", False),
        ("Title", False),
        ("hash_function", True),
    ],
)
def test_metadata(key: str, stays: bool) -> None:
    """Keys that say what a file is go; those that say how to read it stay, and unknown ones."""
    assert kept_metadata({key: "x"}) == ({key: "x"} if stays else {})
    assert kept_metadata({key: "x"}, without=[key]) == {}


def test_sums_of_differences(tmp_path: Path) -> None:
    """A checkpoint of differences becomes its sums with the base, and has no header of the base."""
    with Store.init(tmp_path / "store") as store:
        store.add(write_model(tmp_path / "m", 0, TOKENS), name="m")
        write_safetensors(
            tmp_path / "delta" / "model.safetensors",
            tensors_of({name: np.ones_like(value) for name, value in arrays(0).items()}),
        )
        store.add(tmp_path / "delta", name="out", base="m", kind="delta")
        store.checkout("out", tmp_path / "out")
        for path in (tmp_path / "out").glob("*.safetensors"):
            assert _header(path)["__metadata__"] == KEPT
        assert not store.add(tmp_path / "delta", name="out", base="m", kind="delta").new_snapshot


def test_parents_decide_what_is_the_same(tmp_path: Path) -> None:
    """The same content made of another model is another snapshot: its lineage is another."""
    ids: set[SnapshotId] = set()
    with Store.init(tmp_path / "store") as store:
        store.add(write_model(tmp_path / "m", 0, TOKENS), name="m")
        store.add(tmp_path / "m", name="n", message="again", base="m")
        for name in ("m", "n", "n"):
            ids.add(store.cast(name, dtype="bfloat16", name="out").snapshot)
    assert len(ids) == 2
