"""A model gets the order of another's neurons, and stays the same function."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from cli_runs import Program
from hypothesis import given, settings
from hypothesis import strategies as st
from permutable_models import (
    ARCHITECTURES,
    DTYPES,
    Array,
    Planted,
    Shape,
    shape_for,
    tensors_for,
    write,
)
from safetensors.numpy import load_file, save_file
from small_models import BLOCK, files_of

from mstore import Store
from mstore.models.neurons import matching
from mstore.models.neurons.symmetries import ARCHITECTURES as KNOWN
from mstore.models.neurons.symmetries import symmetries_of
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import BadRequest, Incompatible, Unavailable


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store with small blocks."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as opened:
        yield opened


class Pair:
    """A model in a store, and the same in another order."""

    def __init__(
        self, store: Store, root: Path, kind: str = "llama", dtype: str = "bfloat16", **sizes: int
    ) -> None:
        self.store = store
        self.root = root
        self.kind = kind
        self.shape = shape_for(kind, **sizes)
        self.tensors = tensors_for(kind, self.shape, dtype, seed=1)
        self.planted = Planted(kind, self.shape, seed=2)
        self.add("model", self.tensors)
        self.add("other", self.planted.of(self.tensors))

    def add(self, name: str, tensors: Mapping[str, Array], base: str | None = None) -> None:
        place = write(self.root / name, self.kind, self.shape, tensors)
        self.store.add(place, name=name, base=base)

    def files(self, name: str) -> dict[str, bytes]:
        return files_of(self.root / name)

    def out(self, name: str) -> dict[str, bytes]:
        self.store.checkout(name, self.root / f"out-{name}")
        return files_of(self.root / f"out-{name}")


@pytest.fixture
def pair(store: Store, tmp_path: Path) -> Pair:
    return Pair(store, tmp_path)


def test_the_models_here_are_those_that_are_known() -> None:
    """Every architecture of the library's table is tested."""
    assert ARCHITECTURES.keys() == KNOWN.keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_planted_permutation_comes_back(
    store: Store, tmp_path: Path, kind: str, dtype: str
) -> None:
    """A model whose channels, neurons and heads were moved gets all its files back, bit for bit."""
    pair = Pair(store, tmp_path, kind, dtype)
    assert pair.files("other") != pair.files("model")
    report = store.permute("other", to="model", name="back")
    assert pair.out("back") == pair.files("model")
    assert report.cosine == pytest.approx(1)
    assert report.cosine_before is not None
    assert report.cosine_before < 0.9
    residual, neurons, heads = report.kinds
    assert (residual.total, neurons.total, heads.total) == (16, 28, 8)
    assert residual.moved
    assert neurons.moved
    is_signed = kind not in ("gpt2", "vit")
    assert (residual.flipped > 0, neurons.flipped, heads.flipped) == (is_signed, 0, 0)


PARTS = st.frozensets(st.sampled_from(["residual", "neurons", "heads", "signs"]), min_size=1)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(ARCHITECTURES)),
    sizes=st.builds(
        dict,
        layers=st.integers(1, 3),
        width=st.integers(1, 4),
        keys=st.integers(1, 3),
        group=st.integers(1, 3),
        neurons=st.integers(1, 12),
        tied=st.booleans(),
    ),
    parts=PARTS,
    seed=st.integers(0, 1 << 30),
)
def test_any_permutation_of_any_part_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    sizes: dict[str, int],
    parts: frozenset[str],
    seed: int,
) -> None:
    """Whatever was moved, the model comes back; where nothing was, there is nothing to permute."""
    root = tmp_path_factory.mktemp("any")
    shape = shape_for(kind, **sizes)
    tensors = tensors_for(kind, shape, "float32", seed)
    moved = Planted(kind, shape, seed, parts).of(tensors)
    with Store.init(root / "store", block_size=BLOCK) as store:
        both = {"model": tensors, "other": moved}
        places = [write(root / name, kind, shape, one) for name, one in both.items()]
        for place in places:
            store.add(place, name=place.name)
        if all(np.array_equal(one, moved[name]) for name, one in tensors.items()):
            with pytest.raises(Incompatible, match="there is nothing to permute"):
                store.permute("other", to="model", name="back")
        else:
            store.permute("other", to="model", name="back")
            store.checkout("back", root / "out")
            assert files_of(root / "out") == files_of(places[0])


def test_a_permutation_is_stored_and_taken_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time nothing is matched, and the result is the same snapshot."""
    first = pair.store.permute("other", to="model", name="back")
    assert first.rounds == 2
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    again = pair.store.permute("other", to="model", name="again")
    assert again.rounds is None
    assert again.permutation == first.permutation
    assert pair.store["again"].manifest == pair.store["back"].manifest
    same = pair.store.permute("other", to="model", name="back")
    assert not same.new_snapshot
    assert same.snapshot == first.snapshot


def test_what_is_stored_counts(pair: Pair) -> None:
    """A permutation that another machine found otherwise is used as it stands."""
    found = pair.store.permute("other", to="model", name="back").permutation
    pair.store.checkout(found, pair.root / "orders")
    orders = load_file(pair.root / "orders" / "model.safetensors")
    orders["residual.order"] = np.arange(16, dtype=np.int32)
    orders["residual.signs"][:] = 1
    save_file(orders, pair.root / "orders" / "model.safetensors")
    pair.store.add(pair.root / "orders", name=found)
    report = pair.store.permute("other", to="model", name="back")
    assert report.kinds[0].moved == report.kinds[0].flipped == 0
    assert pair.out("back") != pair.files("model")


def test_fine_tunes_get_the_permutation_of_their_base(pair: Pair) -> None:
    """A fine-tune of a model that was permuted is moved in the same way, without another model."""
    rng = np.random.default_rng(3)
    tuned = {
        name: (one + 0.5 * rng.standard_normal(one.shape)).astype(one.dtype)
        for name, one in pair.tensors.items()
    }
    pair.add("tuned", tuned)
    pair.add("other-tuned", pair.planted.of(tuned))
    found = pair.store.permute("other", to="model", name="back").permutation
    report = pair.store.permute("other-tuned", permutation=found, name="tuned-back")
    assert pair.out("tuned-back") == pair.files("tuned")
    assert report.cosine is None
    assert report.rounds is None
    roles = [(one.role, one.refs) for one in pair.store["tuned-back"].parents]
    assert roles == [("base", ("other-tuned",)), ("companion", (found,))]


def test_lineage(pair: Pair) -> None:
    """The result is made of the model; the other one and the permutation are its companions."""
    report = pair.store.permute("other", to="model", name="back")
    told = pair.store["back"]
    assert told.made == "align"
    assert [(one.role, one.refs) for one in told.parents] == [
        ("base", ("other",)),
        ("companion", ("model",)),
        ("companion", (report.permutation,)),
    ]


def test_fine_tunes_of_one_base_are_aligned(pair: Pair) -> None:
    """Where each neuron matches itself, there is nothing to permute, and nothing is stored."""
    rng = np.random.default_rng(3)
    tuned = {
        name: (one + 0.1 * rng.standard_normal(one.shape)).astype(one.dtype)
        for name, one in pair.tensors.items()
    }
    pair.add("tuned", tuned)
    before = pair.store.refs()
    with pytest.raises(Incompatible, match="has the same order as model") as caught:
        pair.store.permute("tuned", to="model", name="back")
    assert "merge(base='model', experts=['tuned'], method=" in str(caught.value.hint)
    assert pair.store.refs() == before


@pytest.mark.parametrize("to", ["model", "sibling", "tuned"])
def test_lineage_tells_that_models_are_aligned(
    pair: Pair, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of one base, by their lineage, are not even read."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    for name in ("tuned", "sibling"):
        pair.add(name, pair.planted.of(pair.tensors), base="model")
    with pytest.raises(Incompatible, match="comes of the same base") as caught:
        pair.store.permute("tuned", to=to, name="back")
    # Of two siblings both are experts of their base.
    told = {"sibling": "experts=['sibling', 'tuned']", "model": "experts=['tuned']"}
    assert told.get(to, "merge(") in str(caught.value.hint)


def test_what_is_as_good_stays() -> None:
    """Of assignments that are as good as the present one, none takes its place."""
    now = np.asarray([2, 0, 1])
    assign = matching._assign()
    assert (matching._better(np.ones((3, 3)), assign, now) == now).all()
    assert (matching._better(np.ones((3, 3)) + np.eye(3), assign, now) == np.arange(3)).all()


def test_the_residual_stream_is_found_by_embeddings(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first match is that of tensors without another symmetry, whatever the layers say."""
    monkeypatch.setattr(matching, "ROUNDS", 1)
    order = np.random.default_rng(4).permutation(16)
    ends = {
        name: np.ascontiguousarray(one[:, order]) if one.shape[0] == 60 else one
        for name, one in pair.tensors.items()
    }
    plain = {name: np.ones_like(one) if one.ndim == 1 else one for name, one in ends.items()}
    pair.add("ends", plain)
    report = pair.store.permute("ends", to="model", name="back")
    assert report.kinds[0].moved == (order != np.arange(16)).sum()
    assert report.kinds[0].flipped == 0


def test_unrelated_models_get_nearer(store: Store, tmp_path: Path) -> None:
    """Matching makes the cosine of two models larger, whatever they are."""
    pair = Pair(store, tmp_path, dtype="float32")
    pair.add("far", tensors_for("llama", pair.shape, "float32", seed=9))
    report = store.permute("far", to="model", name="near")
    assert report.cosine is not None
    assert report.cosine_before is not None
    assert report.cosine > report.cosine_before + 0.1
    assert not report.remarks


def test_models_of_two_types(store: Store, tmp_path: Path) -> None:
    """The two may have other element types; the result has the model's own."""
    pair = Pair(store, tmp_path, dtype="float32")
    half = {name: one.astype(np.float16) for name, one in pair.tensors.items()}
    pair.add("half", half)
    pair.add("half-other", pair.planted.of(half))
    store.permute("half-other", to="model", name="back")
    assert pair.out("back") == pair.files("half")


def test_shards_and_small_files_stay(store: Store, tmp_path: Path) -> None:
    """Each tensor stays in its file; index, config and tokenizer are the model's own."""
    pair = Pair(store, tmp_path)
    for name, tensors in (("one", pair.tensors), ("two", pair.planted.of(pair.tensors))):
        place = tmp_path / f"sharded-{name}"
        place.mkdir()
        shards: dict[str, dict[str, Array]] = {"a.safetensors": {}, "b.safetensors": {}}
        for number, (key, value) in enumerate(tensors.items()):
            shards[("a", "b")[number % 2] + ".safetensors"][key] = value
        for path, own in shards.items():
            save_file(own, place / path, metadata={"format": "pt"})
        told = {key: path for path, own in shards.items() for key in own}
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": told}))
        (place / "config.json").write_bytes(pair.files("model")["config.json"])
        (place / "notes.txt").write_text("what the model is")
        store.add(place, name=f"sharded-{name}")
    store.permute("sharded-two", to="sharded-one", name="back")
    assert pair.out("back") == files_of(tmp_path / "sharded-one")


def test_a_model_in_two_pieces_of_one_snapshot(store: Store, tmp_path: Path) -> None:
    """Of REF:MODEL that model is permuted, and the others of the snapshot stay."""
    pair = Pair(store, tmp_path)
    for name in ("model", "other"):
        place = tmp_path / f"pipe-{name}"
        for part in ("one", "two"):
            write(place / part, "llama", pair.shape, pair.tensors)
        if name == "other":
            save_file(
                pair.planted.of(pair.tensors),
                place / "two" / "model.safetensors",
                metadata={"format": "pt"},
            )
        store.add(place, name=f"pipe-{name}")
    store.permute("pipe-other:two", to="pipe-model:two", name="back")
    assert pair.out("back") == files_of(tmp_path / "pipe-model")


# -- what is refused -----------------------------------------------------------------------------


def test_without_scipy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """If scipy is missing, the error says what to install, and nothing is stored."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(Unavailable, match="needs the package scipy") as caught:
        pair.store.permute("other", to="model", name="back")
    assert caught.value.hint == "pip install 'mstore[align]'"
    assert {one.name for one in pair.store.refs()} == {"model", "other"}


def test_other_architectures(pair: Pair) -> None:
    """An architecture that is not known is refused by name, and the known ones are listed."""
    place = pair.root / "model"
    (place / "config.json").write_text('{"model_type": "gemma3"}')
    pair.store.add(place, name="gemma")
    with pytest.raises(Incompatible, match="is a gemma3, and model a llama"):
        pair.store.permute("gemma", to="model", name="back")
    with pytest.raises(Incompatible, match=r"it is a gemma3: .* gpt2, llama, mistral"):
        pair.store.permute("gemma", permutation="model", name="back")
    (place / "config.json").unlink()
    pair.store.add(place, name="none")
    with pytest.raises(Incompatible, match=r"its config.json states no architecture"):
        pair.store.permute("none", permutation="model", name="back")


def test_other_sizes(store: Store, tmp_path: Path) -> None:
    """Models of other sizes are refused, and the error names the tensors."""
    pair = Pair(store, tmp_path)
    pair.shape = Shape(neurons=15)
    pair.add("wide", tensors_for("llama", pair.shape, "bfloat16", 1))
    with pytest.raises(Incompatible, match=r"cannot get the order of model: .*gate_proj.*15, 16"):
        store.permute("wide", to="model", name="back")
    pair.shape = Shape(layers=3)
    pair.add("deep", tensors_for("llama", pair.shape, "bfloat16", 1))
    with pytest.raises(Incompatible, match=r"layers.2.* is not in the base"):
        store.permute("deep", to="model", name="back")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.0.adaptive.weight": (16, 16)},
            "adaptive.weight of 2 dimensions has no",
        ),
        ({"model.norm.weight": (1, 16)}, "norm.weight of 2 dimensions has no place in a llama"),
        ({"model.norm.weight": (15,)}, "norm.weight has 15 in a place of 16 residual"),
        (
            {"model.layers.0.self_attn.k_proj.weight": (7, 16)},
            "has 7 in a place of 4 layers.0",
        ),
    ],
)
def test_tensors_that_fit_nowhere(change: dict[str, tuple[int, ...]], message: str) -> None:
    """A tensor that the architecture has no place for is refused, never left as it is."""
    shape = Shape()
    shapes = {name: one.shape for name, one in tensors_for("llama", shape, "float32", 1).items()}
    shapes |= change
    tensors = {name: Tensor("F32", one, 4 * int(np.prod(one)), b"") for name, one in shapes.items()}
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(Incompatible, match=message):
        symmetries_of(config, tensors, "model")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "states no num_attention_heads"),
        ({"num_attention_heads": "4"}, "states no num_attention_heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads are no groups of 3"),
    ],
)
def test_configs_that_say_too_little(config: dict[str, object], message: str) -> None:
    """Heads are those of the config; one that states none is refused."""
    with pytest.raises(Incompatible, match=message):
        symmetries_of({"model_type": "llama", **config}, {}, "model")


def test_types_and_numbers(store: Store, tmp_path: Path) -> None:
    """Types that cannot be moved, and elements that cannot be compared, are refused."""
    pair = Pair(store, tmp_path, dtype="float32")
    pair.add("wide", {name: one.astype(np.float64) for name, one in pair.tensors.items()})
    with pytest.raises(Incompatible, match="is of F64, not of BF16, F16, F32"):
        store.permute("wide", to="model", name="back")
    bad = pair.planted.of(pair.tensors)
    bad["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    pair.add("bad", bad)
    with pytest.raises(Incompatible, match=r"layers.1.mlp.up_proj.weight has elements that are no"):
        store.permute("bad", to="model", name="back")


def test_adapters(pair: Pair) -> None:
    """An adapter is refused."""
    place = pair.root / "adapter"
    place.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": (2, 16), f"{name}.lora_B.weight": (16, 2)}
    save_file(
        {key: np.ones(shape, np.float32) for key, shape in factors.items()},
        place / "adapter_model.safetensors",
    )
    (place / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    pair.store.add(place, name="adapter", base="model")
    with pytest.raises(Incompatible, match="is an adapter"):
        pair.store.permute("adapter", to="model", name="back")


def test_what_is_asked_for(pair: Pair) -> None:
    """One of a model and a permutation is named, and the result has a name of its own."""
    with pytest.raises(BadRequest, match="that of a model, or of a stored permutation"):
        pair.store.permute("other", name="back")
    with pytest.raises(BadRequest, match="that of a model, or of a stored permutation"):
        pair.store.permute("other", to="model", permutation="model", name="back")
    for name in ("other", "model"):
        with pytest.raises(BadRequest, match="a name of its own"):
            pair.store.permute("other", to="model", name=name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.0.neurons.order", np.arange(13, dtype=np.int32)),
        ("layers.0.neurons.order", np.zeros(14, np.int32)),
        ("layers.0.neurons.order", np.arange(14, dtype=np.int64)),
        ("layers.0.neurons.order", np.arange(1, 15, dtype=np.int32)),
        ("layers.1.heads.order", np.asarray([0, 2, 1, 3], np.int32)),
        ("residual.signs", np.zeros(16, np.int8)),
        ("residual.signs", None),
    ],
)
def test_permutations_that_are_none(pair: Pair, name: str, value: Array | None) -> None:
    """Only what moves each thing once, and groups of heads as a whole, is a permutation."""
    found = pair.store.permute("other", to="model", name="back").permutation
    pair.store.checkout(found, pair.root / "orders")
    orders = load_file(pair.root / "orders" / "model.safetensors")
    if value is None:
        del orders[name]
    else:
        orders[name] = value
    save_file(orders, pair.root / "orders" / "model.safetensors")
    pair.store.add(pair.root / "orders", name="orders")
    with pytest.raises(Incompatible, match="is no permutation of this model"):
        pair.store.permute("other", permutation="orders", name="again")


# -- what is told --------------------------------------------------------------------------------


def test_remarks(pair: Pair) -> None:
    """If most stays where it is, the report says what that means."""
    planted = Planted("llama", pair.shape, 5, frozenset({"heads"})).of(pair.tensors)
    pair.add("near", planted)
    [remark] = pair.store.permute("near", to="model", name="back").remarks
    assert "stay where they are, as in fine-tunes of one base" in remark


def test_progress(pair: Pair) -> None:
    """Matching and writing tell how far they are, and neither goes beyond its total."""
    seen: dict[str, tuple[int, int]] = {}
    pair.store.permute(
        "other",
        to="model",
        name="back",
        progress=lambda one: seen.update({one.phase: (one.done, one.total)}),
    )
    assert seen["permute"][0] == seen["permute"][1]
    assert seen["match"][0] == seen["match"][1]


def test_the_command(pair: Pair) -> None:
    """`mstore permute` tells what was moved, and needs either a model or a permutation."""
    program = Program(pair.root / "store")
    done = program("permute", "other", "--to", "model", "--name", "back")
    assert done.status == 0, done.err
    assert done.lines[0].startswith("permuted to back ")
    assert "1.000 with model, over tensors; before " in done.out
    assert any(line.split()[:2] == ["heads", "8"] for line in done.lines)
    found = program("--json", "permute", "other", "--to", "model", "--name", "back").document
    assert found["new_snapshot"] is False
    again = program("permute", "other", "--permutation", found["permutation"], "--name", "again")
    assert again.status == 0
    assert "cosine" not in again.out
    done = program("permute", "other", "--name", "back")
    assert done.status == 2
    assert "--to" in done.err
    done = program("permute", "model", "--to", "model", "--name", "back")
    assert done.status != 0
    assert "merge --base model --expert model" in done.err
