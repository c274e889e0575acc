"""extract-lora: a fine-tune's difference as an adapter, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from cli_runs import Program
from safetensors.numpy import save_file
from small_models import BLOCK

from mstore import MergeRequest, Store
from mstore.models.adapters.truncation import truncated
from mstore.terms.errors import BadRequest, Incompatible

Array = npt.NDArray[Any]
Q = "model.layers.0.self_attn.q_proj"
WIDE = "model.layers.0.mlp.up_proj"
EMBED = "model.embed_tokens"
NORM = "model.norm"
SHAPES = {EMBED: (200, 60), Q: (90, 700), WIDE: (600, 800), "lm_head": (200, 60)}
CONFIG = {"model_type": "llama", "vocab_size": 200}


def base_tensors() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    found = {f"{name}.weight": rng.standard_normal(one) for name, one in SHAPES.items()}
    found |= {f"{NORM}.weight": np.ones(60), f"{Q}.bias": rng.standard_normal(90)}
    return {name: one.astype(np.float32) for name, one in found.items()}


def low_rank(rank: int, shape: tuple[int, ...], seed: int) -> Array:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((shape[0], rank)), rng.standard_normal((rank, shape[1]))
    return (left @ right * 0.02).astype(np.float32)


def save(path: Path, tensors: Mapping[str, Array], config: Mapping[str, Any] = CONFIG) -> Path:
    path.mkdir(parents=True)
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(save(tmp_path / "base", base_tensors()), name="base")
        yield store


def add(store: Store, tmp_path: Path, changes: Mapping[str, Array], **more: Any) -> None:
    tensors = base_tensors()
    for name, delta in changes.items():
        tensors[name] = (tensors[name] + delta).astype(tensors[name].dtype)
    store.add(save(tmp_path / "expert", tensors, **more), name="expert")


def applied(store: Store, adapter: str = "lora") -> Mapping[str, Array]:
    request = MergeRequest(base="base", experts=[adapter], method="task_arithmetic")
    store.merge(store.plan(request), name="applied")
    return {name: store["applied"].tensor(name) for name in base_tensors()}


def test_what_has_low_rank_comes_back(store: Store, tmp_path: Path) -> None:
    """Of a difference of this rank nothing is left out, linear layers, head and embeddings alike;
    norms and biases come back as they are."""
    changes = {
        f"{name}.weight": low_rank(4, shape, seed)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }
    changes |= {f"{NORM}.weight": np.full(60, 0.5), f"{Q}.bias": np.full(90, -0.25)}
    add(store, tmp_path, changes)
    report = store.extract_lora("expert", "base", name="lora", rank=4, dtype="float32")
    assert (report.products, report.whole, report.left_out) == (4, 2, ())
    assert report.relative_error < 1e-5
    found, wanted = applied(store), store["expert"]
    for name, one in found.items():
        np.testing.assert_allclose(one, wanted.tensor(name), atol=2e-6, err_msg=name)
    for name in (f"{NORM}.weight", f"{Q}.bias"):
        assert found[name].tobytes() == wanted.tensor(name).tobytes()
    config = json.loads(store["lora"].read("adapter_config.json"))
    assert set(config["target_modules"]) == set(SHAPES)
    assert f"base_model.model.{Q}.base_layer.bias" in store["lora"].tensor_names()
    assert config["modules_to_save"] == [NORM]
    assert [(one.role, one.refs) for one in store["lora"].parents] == [
        ("base", ("base",)),
        ("expert", ("expert",)),
    ]
    assert store.fsck(read_data=True).problems == ()
    again = store.extract_lora("expert", "base", name="lora", rank=4, dtype="float32")
    assert (again.new_snapshot, again.snapshot) == (False, report.snapshot)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_error_is_what_is_left(store: Store, tmp_path: Path, dtype: str) -> None:
    """The error that the report states is that of the applied adapter, in all and by matrix; it is
    that of the nearest matrix of this rank, and smaller for a larger rank."""
    rng = np.random.default_rng(1)
    changes = {
        f"{name}.weight": low_rank(6, SHAPES[name], 1) + 0.002 * rng.standard_normal(SHAPES[name])
        for name in (Q, WIDE)
    }
    add(store, tmp_path, changes)
    before = 1.0
    for rank in (2, 5):
        report = store.extract_lora("expert", "base", name="lora", rank=rank, dtype=dtype)
        found = applied(store)
        squares, least, total = {}, 0.0, 0.0
        for name in changes:
            base = store["base"].tensor(name).astype(np.float64)
            delta = store["expert"].tensor(name).astype(np.float64) - base
            rest = store["expert"].tensor(name).astype(np.float64) - found[name]
            values = np.linalg.svd(delta, compute_uv=False)
            squares[name] = float((rest**2).sum()), float((delta**2).sum())
            least += float((values[rank:] ** 2).sum())
            total += float((delta**2).sum())
        for one in report.tensors:
            left, own = squares[one.tensor]
            assert one.relative_error == pytest.approx((left / own) ** 0.5, rel=1e-3)
        assert report.relative_error < before
        assert report.relative_error == pytest.approx((least / total) ** 0.5, rel=0.02)
        before = report.relative_error


@pytest.mark.rest
def test_large_matrices_are_as_near(tmp_path: Path) -> None:
    """Where only the range of the largest vectors is found, the product is as near as that of the
    whole decomposition, to a thousandth; the same draws give the same factors."""
    rng = np.random.default_rng(3)
    values = 1 / (1 + np.arange(700))
    left, _ = np.linalg.qr(rng.standard_normal((900, 700)))
    right, _ = np.linalg.qr(rng.standard_normal((800, 700)))
    matrix = (left * values @ right.T).astype(np.float32)
    for rank in (1, 8, 64):
        one, other = truncated(matrix, rank, seed=7)
        rest = np.linalg.norm(matrix - one @ other)
        assert rest <= 1.001 * np.sqrt((values[rank:] ** 2).sum())
        again, _ = truncated(matrix, rank, seed=7)
        assert again.tobytes() == one.tobytes()


def test_types_may_differ(store: Store, tmp_path: Path) -> None:
    """Differences of models in other element types are those of their values."""
    tensors = {name: one.astype(ml_dtypes.bfloat16) for name, one in base_tensors().items()}
    store.add(save(tmp_path / "half", tensors), name="half")
    report = store.extract_lora("half", "base", name="lora", rank=60, dtype="float32")
    found = applied(store)
    # Embedding and head have no larger rank.
    for name in (f"{EMBED}.weight", "lm_head.weight"):
        wanted = store["half"].tensor(name).astype(np.float32)
        np.testing.assert_allclose(found[name], wanted, atol=1e-5)
    assert 0 < report.relative_error < 1


def test_a_rank_is_no_larger_than_its_matrix(store: Store, tmp_path: Path) -> None:
    """A larger rank makes factors of the size of the matrix, and nothing is left out."""
    add(store, tmp_path, {f"{name}.weight": low_rank(4, SHAPES[name], 1) for name in (EMBED, Q)})
    report = store.extract_lora("expert", "base", name="lora", rank=200, dtype="float32")
    assert report.relative_error < 1e-5
    factors = [name for name in store["lora"].tensor_names() if "lora_" in name]
    assert {min(store["lora"].tensor(name).shape) for name in factors} == {60, 90}
    found = applied(store)
    for name in (EMBED, Q):
        wanted = store["expert"].tensor(f"{name}.weight")
        np.testing.assert_allclose(found[f"{name}.weight"], wanted, atol=2e-6)


def test_notes_on_peft(store: Store, tmp_path: Path) -> None:
    """What PEFT does otherwise is told: no product at all, and tied embeddings."""
    add(store, tmp_path, {f"{NORM}.weight": np.full(60, 0.5)})
    (remark,) = store.extract_lora("expert", "base", name="lora").remarks
    assert "PEFT does not load" in remark
    tied = CONFIG | {"tie_word_embeddings": True}
    tensors = {name: one for name, one in base_tensors().items() if name != "lm_head.weight"}
    store.add(save(tmp_path / "b2", tensors, tied), name="b2")
    tensors[f"{EMBED}.weight"] = tensors[f"{EMBED}.weight"] + low_rank(2, SHAPES[EMBED], 1)
    store.add(save(tmp_path / "e2", tensors, tied), name="e2")
    (remark,) = store.extract_lora("e2", "b2", name="lora").remarks
    assert "merge_and_unload" in remark


@pytest.mark.parametrize("own_head", [False, True])
def test_tied_embeddings_come_back(store: Store, tmp_path: Path, own_head: bool) -> None:
    """Of a tied base that is stored twice, one product gives both names back; a fine-tune that has
    a head of its own gets it back, too, as tensors that are stored whole."""
    tied = CONFIG | {"tie_word_embeddings": True}
    tensors = base_tensors()
    head, embedding = "lm_head.weight", f"{EMBED}.weight"
    tensors[head] = tensors[embedding].copy()
    store.add(save(tmp_path / "tied", tensors, tied), name="base")
    tensors[embedding] = tensors[embedding] + low_rank(4, SHAPES[EMBED], 1)
    tensors[head] = tensors[embedding] + own_head
    store.add(save(tmp_path / "tuned", tensors, tied), name="expert")
    report = store.extract_lora("expert", "base", name="lora", rank=4, dtype="float32")
    assert (report.products, report.whole) == ((0, 2) if own_head else (1, 0))
    assert any("stored whole" in remark for remark in report.remarks) == own_head
    found = applied(store)
    for name in (head, embedding):
        np.testing.assert_allclose(found[name], tensors[name], atol=2e-6)


def test_what_no_adapter_states_is_told(store: Store, tmp_path: Path) -> None:
    """Tensors of other forms stay out, and are named; so are those that patterns leave out not."""
    more = {"experts": np.zeros((2, 3, 4), np.float32), "steps": np.zeros(3, np.int64)}
    tensors = base_tensors()
    store.add(save(tmp_path / "b2", tensors | more), name="b2")
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"] + 1
    changed = tensors | {name: one + 1 for name, one in more.items()}
    store.add(save(tmp_path / "e2", changed), name="e2")
    report = store.extract_lora("e2", "b2", name="lora", rank=1)
    assert set(report.left_out) == {"experts", "steps"}
    only = store.extract_lora("e2", "b2", name="lora", rank=1, only=["*q_proj*"])
    assert (only.left_out, only.products) == ((), 1)


def test_what_is_refused(store: Store, tmp_path: Path) -> None:
    """No rank, another model, an adapter, and what is not finite: an error, and nothing is
    stored."""
    add(store, tmp_path, {f"{Q}.weight": np.full(SHAPES[Q], np.inf)})
    store.add(save(tmp_path / "other", {"x.weight": np.ones((2, 2), np.float32)}), name="other")
    gpt2 = save(tmp_path / "gpt2", base_tensors(), {"model_type": "gpt2"})
    store.add(gpt2, name="gpt2")
    for expert, base, rank, error, told in (
        ("expert", "base", 0, BadRequest, "a rank is 1 to"),
        ("expert", "base", 2, Incompatible, "not finite"),
        ("other", "base", 2, Incompatible, "is missing"),
        ("expert", "gpt2", 2, Incompatible, "transposed"),
        ("base", "base", 2, BadRequest, "does not differ from base"),
    ):
        with pytest.raises(error, match=told):
            store.extract_lora(expert, base, name="lora", rank=rank)
    with pytest.raises(BadRequest, match="cannot write dtype"):
        store.extract_lora("gpt2", "base", name="lora", dtype="int8")
    assert "lora" not in store
    with pytest.raises(BadRequest, match="a name of its own"):
        store.extract_lora("expert", "base", name="expert")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", [f"{Q}.weight", f"{WIDE}.weight"])
def test_no_adapter_of_infinities(
    store: Store, tmp_path: Path, name: str, dtype: str, recwarn: pytest.WarningsRecorder
) -> None:
    """A difference of finite elements that no finite factors can hold is refused by the name of its
    tensor, without a warning of numpy: nothing is published."""
    add(store, tmp_path, {name: np.full(base_tensors()[name].shape, np.float32(3e38))})
    with pytest.raises(Incompatible, match="too large for factors of") as refused:
        store.extract_lora("expert", "base", name="lora", rank=4, dtype=dtype)
    assert refused.value.where == name
    assert "lora" not in store
    assert not [one for one in recwarn if one.category is RuntimeWarning]


def test_the_error_is_finite_beside_a_huge_vector(store: Store, tmp_path: Path) -> None:
    """A vector that is stored whole may differ by more than float32 holds; one with a NaN is
    refused by its name."""
    tensors = base_tensors()
    tensors[f"{NORM}.weight"] = np.full(60, -3e38, np.float32)
    store.add(save(tmp_path / "low", tensors), name="low")
    tensors[f"{NORM}.weight"] = np.full(60, 3e38, np.float32)
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"] + low_rank(3, SHAPES[Q], 1)
    store.add(save(tmp_path / "high", tensors), name="high")
    report = store.extract_lora("high", "low", name="lora", rank=2)
    assert report.relative_error == 0 or report.relative_error < 1e-30
    tensors[f"{NORM}.weight"][3] = np.nan
    store.add(save(tmp_path / "nan", tensors), name="nan")
    with pytest.raises(Incompatible, match="not finite") as refused:
        store.extract_lora("nan", "low", name="other", rank=2)
    assert refused.value.where == f"{NORM}.weight"


def test_on_the_command_line(tmp_path: Path) -> None:
    """It says what is left out, and how to apply what there is."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    tensors = base_tensors()
    mstore.succeed("add", save(tmp_path / "base", tensors), "--name", "base")
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"] + low_rank(3, SHAPES[Q], 1)
    mstore.succeed("add", save(tmp_path / "math", tensors), "--name", "math")
    line = ("extract-lora", "math", "--base", "base", "--rank", "2", "--name", "lora")
    told = mstore.succeed(*line).out
    assert "extracted lora" in told
    assert "1 of rank 2" in told
    assert f"{Q}.weight" in told
    document = mstore.succeed(*line, "--json").document
    assert document["new_snapshot"] is False
    assert 0.1 < document["relative_error"] < 0.9
    applied = ("--base", "base", "--expert", "lora", "--method", "task_arithmetic", "--virtual")
    mstore.succeed("merge", *applied, "--name", "applied")
