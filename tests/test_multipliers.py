"""Adapters that multiply a base: IA3 and OFT of PEFT and LyCORIS, GLoRA; and VeRA of PEFT."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapters
import numpy as np
import numpy.typing as npt
import pytest
import reference
from safetensors.numpy import load_file, save_file
from small_models import BLOCK

from mstore import MergeRequest, Store
from mstore.models.adapters.low_rank import Factors
from mstore.models.adapters.multipliers import MULTIPLIERS, rotations
from mstore.terms.errors import Incompatible

Array = npt.NDArray[Any]
SHAPES = {"fc.weight": (200, 96), "fc.bias": (200,), "out.weight": (96, 200), "out.bias": (96,)}
NAMES = ("fc", "out")
IA3 = {"peft_type": "IA3", "feedforward_modules": ["out"], "target_modules": list(NAMES)}
OFT = {
    "peft_type": "OFT",
    "oft_block_size": 8,
    "use_cayley_neumann": False,
    "num_cayley_neumann_terms": 5,
}
VERA = {"peft_type": "VERA", "r": 4, "save_projection": True}


def drawn(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


BASE = {name: drawn(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}


def ia3() -> dict[str, Array]:
    """Outputs of `fc`, inputs of `out`."""
    return {"fc.ia3_l": drawn((200, 1), 7) + 1, "out.ia3_l": drawn((1, 200), 8) + 1}


def oft() -> dict[str, Array]:
    """Blocks of 8, those of `out` shared."""
    return {"fc.oft_R.weight": drawn((12, 28), 9, 0.2), "out.oft_R.weight": drawn((1, 28), 10, 0.2)}


def vera() -> dict[str, Array]:
    """Matrices for the widest layer, and vectors for each."""
    found = {"vera_A": drawn((4, 200), 11), "vera_B": drawn((200, 4), 12)}
    for seed, (name, rows) in enumerate((("fc", 200), ("out", 96))):
        found[f"model.{name}.vera_lambda_b"] = drawn((rows,), 13 + seed)
        found[f"model.{name}.vera_lambda_d"] = drawn((4,), 15 + seed)
    return found


def lycoris_ia3() -> dict[str, Array]:
    """Outputs of `fc`, inputs of `out`: LyCORIS has what is added to 1, and says the side."""
    found = {"fc.weight": drawn((200,), 21), "out.weight": drawn((200,), 22)}
    return found | {f"{name}.on_input": np.array(name == "out", np.int64) for name in NAMES}


def lycoris_oft() -> dict[str, Array]:
    """Blocks of 8 rows; those of `out` are held near no rotation, and rescaled."""
    found = {"fc.oft_blocks": drawn((25, 8, 8), 23, 0.2), "fc.alpha": np.zeros((), np.float32)}
    found["out.oft_blocks"] = drawn((12, 8, 8), 24, 0.2)
    found["out.rescale"] = 1 + drawn((96, 1), 25, 0.2)
    return found | {"out.alpha": np.array(0.01, np.float32)}


def glora() -> dict[str, Array]:
    """Rank 3 and alpha 2."""
    found: dict[str, Array] = {}
    for seed, name in enumerate(NAMES):
        rows, columns = SHAPES[f"{name}.weight"]
        for number, (part, shape) in enumerate(
            (("a1", (columns, 3)), ("a2", (3, columns)), ("b1", (rows, 3)), ("b2", (3, columns)))
        ):
            found[f"{name}.{part}.weight"] = drawn(shape, 30 + 5 * seed + number, 0.3)
        found[f"{name}.alpha"] = np.array(2, np.float32)
    return found


def turned_rows(weight: Array, own: dict[str, Array], name: str) -> Array:
    """Each block of rows times its rotation, in float64."""
    found = np.empty(weight.shape)
    skews = own[f"{name}.oft_blocks"].astype(np.float64)
    skews = skews - skews.transpose(0, 2, 1)
    most = float(own[f"{name}.alpha"]) * len(weight)
    norm = float(np.sqrt((skews**2).sum()))
    if 0 < most < norm:
        skews *= most / norm
    one = np.eye(8)
    for at, each in enumerate(skews):
        rotation = (one + each) @ np.linalg.inv(one - each)
        found[8 * at : 8 * at + 8] = rotation.T @ weight[8 * at : 8 * at + 8]
    return found * own.get(f"{name}.rescale", 1)


def skew(numbers: Array) -> Array:
    rows, columns = np.triu_indices(8, 1)
    found = np.zeros((8, 8))
    found[rows, columns] = numbers
    return found - found.T


def turned(weight: Array, numbers: Array) -> Array:
    """W times the transposed rotations, all in float64."""
    blocks = np.zeros((weight.shape[1], weight.shape[1]))
    for at in range(0, weight.shape[1], 8):
        own = skew(numbers[0 if len(numbers) == 1 else at // 8])
        one = np.eye(8)
        blocks[at : at + 8, at : at + 8] = np.linalg.solve((one + own).T, (one - own).T).T
    return weight @ blocks.T


def expected(kind: str) -> dict[str, Array]:
    found = dict(BASE)
    if kind == "ia3":
        own = ia3()
        found["fc.weight"] = BASE["fc.weight"] * own["fc.ia3_l"]
        found["fc.bias"] = BASE["fc.bias"] * own["fc.ia3_l"].reshape(-1)
        found["out.weight"] = BASE["out.weight"] * own["out.ia3_l"]
    elif kind == "oft":
        for name in NAMES:
            found[f"{name}.weight"] = turned(BASE[f"{name}.weight"], oft()[f"{name}.oft_R.weight"])
    elif kind == "lycoris ia3":
        own = lycoris_ia3()
        found["fc.weight"] = BASE["fc.weight"] * (1 + own["fc.weight"][:, None])
        found["out.weight"] = BASE["out.weight"] * (1 + own["out.weight"])
    elif kind == "lycoris oft":
        for name in NAMES:
            found[f"{name}.weight"] = turned_rows(BASE[f"{name}.weight"], lycoris_oft(), name)
    elif kind == "glora":
        for name in NAMES:
            weight, own = BASE[f"{name}.weight"].astype(np.float64), glora()
            a1, a2, b1, b2 = (own[f"{name}.{part}.weight"] for part in ("a1", "a2", "b1", "b2"))
            found[f"{name}.weight"] = weight + 2 / 3 * (weight @ a1 @ a2 + b1 @ b2)
    else:
        own = vera()
        for name in NAMES:
            rows, columns = SHAPES[f"{name}.weight"]
            b, d = own[f"model.{name}.vera_lambda_b"], own[f"model.{name}.vera_lambda_d"]
            delta = (b[:, None] * own["vera_B"][:rows]) @ (d[:, None] * own["vera_A"][:, :columns])
            found[f"{name}.weight"] = BASE[f"{name}.weight"] + delta
    return found


KINDS: dict[str, tuple[dict[str, Any] | None, Any, str]] = {
    "lycoris ia3": (None, lycoris_ia3, "lora_unet_"),
    "lycoris oft": (None, lycoris_oft, "lora_unet_"),
    "glora": (None, glora, "lora_unet_"),
    "ia3": (IA3, ia3, adapters.PREFIX),
    "oft": (OFT, oft, adapters.PREFIX),
    "vera": (VERA, vera, "base_model."),
}


def write(path: Path, kind: str, **settings: Any) -> Path:
    config, made, begin = KINDS[kind]
    tensors = {begin + name: values for name, values in made().items()}
    if config is None:
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter.safetensors")
        return path
    files = {"adapter_config.json": config | settings}
    adapters.write(path, tensors, files, "adapter_model")
    return path


def opened(place: Path, block: int = BLOCK) -> Store:
    """A store with the base, a fine-tune of it and each adapter."""
    tuned = {name: values + drawn(values.shape, 20, 0.1) for name, values in BASE.items()}
    store = Store.init(place / f"store-{block}", block_size=block)
    for name, tensors in (("base", BASE), ("tuned", tuned)):
        path = place / str(block) / name
        adapters.write(path, tensors, {"config.json": {}}, "model")
        store.add(path, name=name)
    for kind in KINDS:
        store.add(write(place / str(block) / kind, kind), name=kind.replace(" ", "-"), base="base")
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path) as found:
        yield found


def ask(*experts: str, method: str = "task_arithmetic", **more: Any) -> MergeRequest:
    named = [one.replace(" ", "-") for one in experts]
    return MergeRequest(base="base", experts=named, method=method, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_what_its_formula_says(store: Store, kind: str) -> None:
    """A merge of one adapter is the base as its authors' formula changes it; it is replayed."""
    plan = store.plan(ask(kind))
    assert store.merge(plan, name="merged").expert_bytes_read == plan.planned_expert_bytes
    for name, values in expected(kind).items():
        assert np.allclose(store["merged"].tensor(name), values, rtol=1e-5, atol=1e-5), name
    assert store.replay("merged").same


def test_ia3_has_the_bits_of_a_product_in_float32(store: Store) -> None:
    """A scaled element is rounded once; a sum of half of it is base + half of the difference."""
    store.merge(store.plan(ask("ia3", method="passthrough")), name="merged")
    for name, values in expected("ia3").items():
        assert store["merged"].tensor(name).tobytes() == values.tobytes(), name


@pytest.mark.parametrize("method", ["ties", "task_arithmetic", "dare_linear", "della_linear"])
def test_they_merge_as_the_models_that_they_make(store: Store, tmp_path: Path, method: str) -> None:
    """Beside a fine-tune, each method gives the reference's bits for what an adapter makes."""
    given: dict[str, Any] = {} if method == "task_arithmetic" else {"density": 0.5}
    for kind in ("ia3", "oft", "lycoris-oft", "glora"):
        store.merge(store.plan(ask(kind, method="passthrough")), name="alone")
        plan = store.plan(
            MergeRequest(
                base="base", experts={kind: 0.7, "tuned": 0.4}, method=method, parameters=given
            )
        )
        store.merge(plan, name="merged")
        for name, own in BASE.items():
            sides = [store[ref].tensor(name) for ref in ("alone", "tuned")]
            wanted = reference.merge(method, given, [0.7, 0.4], own, sides, tensor=name)
            assert store["merged"].tensor(name).tobytes() == wanted.tobytes(), (kind, name)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_threads_change_no_bit(tmp_path: Path, kind: str) -> None:
    """Elements do not depend on how the base is cut, nor on how many threads compute."""
    made = []
    for block, threads in ((BLOCK, 1), (BLOCK * 4, 3)):
        with opened(tmp_path, block) as store:
            store.merge(store.plan(ask(kind)), name="merged", threads=threads)
            made.append({name: store["merged"].tensor(name).tobytes() for name in BASE})
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", ["30%", "70%"])
def test_a_budget_and_its_bound_hold(store: Store, kind: str, share: str) -> None:
    """A budget is kept to the byte, and the merge is no further off than the plan certifies."""
    asked = ask(kind, "tuned")
    store.merge(store.plan(asked), name="full")
    plan = store.plan(dataclasses.replace(asked, budget=share))
    assert plan.planned_expert_bytes <= float(share[:-1]) / 100 * plan.full_expert_bytes
    store.merge(plan, name="part")
    assert plan.error_bound is not None
    off, norm = (
        sum(float((values.astype("f8") ** 2).sum()) for values in some)
        for some in (
            [store["part"].tensor(n) - store["full"].tensor(n) for n in BASE],
            list(BASE.values()),
        )
    )
    assert off**0.5 <= plan.error_bound * norm**0.5 * (1 + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_virtual_merge_computes_the_same(store: Store, kind: str) -> None:
    """Committed as a plan, an applied adapter has the bytes of one that is stored."""
    plan = store.plan(ask(kind))
    store.merge(plan, name="real")
    store.merge(plan, name="virtual", virtual=True)
    for name in BASE:
        assert store["virtual"].tensor(name).tobytes() == store["real"].tensor(name).tobytes()
    store.materialize("virtual")
    assert store["virtual"].manifest == store["real"].manifest


def test_rotations_are_orthogonal() -> None:
    """Cayley's form of any skew matrix is a rotation, large ones and zero too."""
    for scale in (0.0, 1e-3, 1.0, 1e3):
        found = rotations(drawn((3, 28), 1, scale).astype(np.float64), 0, 0.0)
        assert np.allclose(found @ found.transpose(0, 2, 1), np.eye(8), atol=1e-9)


@pytest.mark.parametrize("size", [2, 3, 8, 64, 96])
def test_runs_of_rows_have_the_same_bits(size: int) -> None:
    """What rows become does not depend on which others are computed with them."""
    base = drawn((10, 192), 3)
    numbers = drawn((192 // size, size * (size - 1) // 2), 4, 0.1)
    multiplier = MULTIPLIERS["oft"].made(base.shape, (0, 0.0, 1.0), numbers)
    empty = np.empty((0, 192), np.float32)
    factors = Factors(empty.T[:0], empty, np.ones(1, np.float32), None, multiplier)

    def applied(first: int, rows: int) -> Array:
        out = np.empty(4 * rows * 192, np.uint8)
        data = base[first : first + rows].copy().reshape(-1).view(np.uint8)
        factors.apply(data, "F32", first * 192, rows * 192, out)
        return out.view(np.float32).reshape(rows, 192)

    whole = applied(0, 10)
    for first, rows in ((0, 1), (3, 4), (9, 1)):
        assert applied(first, rows).tobytes() == whole[first : first + rows].tobytes()


def multiplied(form: str, base: Array, scale: float, *tensors: Array) -> Array:
    """What a form makes of a whole tensor."""
    multiplier = MULTIPLIERS[form].made(base.shape, (scale,), *tensors)
    rows, columns = len(base), base[0].size
    left, right = np.empty((rows, 0), np.float32), np.empty((0, columns), np.float32)
    factors = Factors(left, right, np.ones(1, np.float32), None, multiplier)
    out = np.empty(base.nbytes, np.uint8)
    factors.apply(base.reshape(-1).view(np.uint8), "F32", 0, base.size, out)
    return out.view(np.float32).reshape(base.shape)


def test_chunks_are_whole_blocks_of_rows(tmp_path: Path) -> None:
    """A rotation of three rows never has one of them in another chunk, beside any other expert."""
    base, blocks = drawn((1800, 64), 50), drawn((600, 3, 3), 51, 0.3)
    vector = drawn((1800,), 52)
    wanted = multiplied("oft of lycoris", base, 0.0, blocks)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name, tensors in (
            ("base", {"fc.weight": base}),
            ("oft", {"lora_unet_fc.oft_blocks": blocks}),
            ("ia3", {"lora_unet_fc.weight": vector, "lora_unet_fc.on_input": np.array(0)}),
        ):
            save_file(tensors, tmp_path / f"{name}.safetensors")
            store.add(tmp_path / f"{name}.safetensors", name=name)
        plan = store.plan(ask("oft", method="passthrough"))
        store.merge(plan, name="merged")
        assert store["merged"].tensor("fc.weight").tobytes() == wanted.tobytes()
        store.merge(store.plan(ask("oft", "ia3")), name="both")
        scaled = multiplied("ia3 of lycoris", base, 1.0, vector, np.zeros((), np.float32))
        both = store["both"].tensor("fc.weight")
        assert np.allclose(both, wanted + scaled - base, rtol=1e-5, atol=1e-5)


def test_convolutions_are_multiplied_at_each_place() -> None:
    """An input of LyCORIS' IA3 and GLoRA is all places of a channel, an output all of its row."""
    base = drawn((6, 4, 3, 3), 40)
    vector, side = drawn((1, 4, 1, 1), 41), np.ones((), np.float32)
    found = multiplied("ia3 of lycoris", base, 1.0, vector, side)
    assert np.allclose(found, base * (1 + vector), atol=1e-6)
    outputs = drawn((1, 6, 1, 1), 42)
    found = multiplied("ia3 of lycoris", base, 1.0, outputs, 0 * side)
    assert np.allclose(found, base * (1 + outputs.transpose(1, 0, 2, 3)), atol=1e-6)
    a1, a2, b1 = drawn((4, 2, 1, 1), 43), drawn((2, 4, 1, 1), 44), drawn((6, 2, 1, 1), 45)
    b2 = drawn((2, 4, 3, 3), 46)
    inputs = np.einsum("oixy,ir,rj->ojxy", base, a1[:, :, 0, 0], a2[:, :, 0, 0])
    beside = np.einsum("or,rixy->oixy", b1[:, :, 0, 0], b2)
    found = multiplied("glora", base, 0.5, a1, a2, b1, b2)
    assert np.allclose(found, base + 0.5 * (inputs + beside), atol=1e-5)
    blocks = drawn((2, 3, 3), 47, 0.3)
    skews = (blocks - blocks.transpose(0, 2, 1)).astype(np.float64)
    turns = [(np.eye(3) + one) @ np.linalg.inv(np.eye(3) - one) for one in skews]
    wanted = np.einsum("knm,knixy->kmixy", turns, base.reshape(2, 3, 4, 3, 3)).reshape(base.shape)
    assert np.allclose(multiplied("oft of lycoris", base, 0.0, blocks), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("vera", {"save_projection": False}, "only torch draws them again"),
        ("oft", {"use_cayley_neumann": None}, "an older version of PEFT"),
        ("oft", {"fan_in_fan_out": True}, "does not apply an OFT with these"),
        ("oft", {"use_cayley_neumann": True, "num_cayley_neumann_terms": 0}, "with these"),
        ("ia3", {"feedforward_modules": ".*out"}, "as a list of names only"),
        ("ia3", {"feedforward_modules": ["fc"]}, "which it cannot multiply"),
        ("ia3", {"peft_type": "BOFT"}, "kind BOFT"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    store: Store, tmp_path: Path, kind: str, settings: dict[str, Any], told: str
) -> None:
    """Settings that would be guessed at are named before any weight is read."""
    with pytest.raises(Incompatible, match=told):
        store.add(write(tmp_path / "odd", kind, **settings), name="odd", base="base")


def test_shapes_that_do_not_fit_are_refused(store: Store, tmp_path: Path) -> None:
    """Vectors and blocks of other layers are named with both shapes."""
    for number, (name, shape, told) in enumerate(
        (
            ("fc.oft_R.weight", (12, 27), "no skew matrix"),
            ("fc.oft_R.weight", (11, 28), "11 blocks of 8 for 96 columns"),
            ("fc.oft_R.weight", (1, 1023 * 512), "blocks of 1024; the limit is 512"),
            ("fc.oft_r", (12, 8, 8), "is not in the base"),
        )
    ):
        tensors = {adapters.PREFIX + name: np.zeros(shape, np.float32)}
        files = {"adapter_config.json": OFT}
        adapters.write(tmp_path / str(number), tensors, files, "adapter_model")
        with pytest.raises(Incompatible, match=told):
            store.add(tmp_path / str(number), name="odd", base="base")


def test_a_multiplied_base_is_no_lora(store: Store) -> None:
    """Other formats have products only: what multiplies is refused with a way out; VeRA is one."""
    for kind in ("oft", "ia3", "glora"):
        with pytest.raises(Incompatible, match=r"multiplies the base|are not products"):
            store.convert_adapter(kind, "base", name="x", format="peft")
    with pytest.raises(Incompatible, match="is glora, and mstore combines products of LoRA"):
        store.combine_adapters(["glora", "vera"], "cat", name="x")
    assert store.convert_adapter("vera", "base", name="x", format="peft").rank == 4


class _Case:
    """A config of PEFT, and the numbers to draw for what it trains."""

    def __init__(self, name: str, scale: float = 0.3, transposed: bool = False, **given: Any):
        self.name, self.scale, self.transposed, self.given = name, scale, transposed, given


EVERY = ["conv", "fc", "out"]
CASES = {
    "ia3": _Case("IA3Config", feedforward_modules=["out"], target_modules=EVERY),
    "ia3 inputs": _Case("IA3Config", feedforward_modules=EVERY, target_modules=EVERY),
    "ia3 transposed": _Case(
        "IA3Config",
        transposed=True,
        fan_in_fan_out=True,
        feedforward_modules=["out"],
        target_modules=["fc", "out"],
    ),
    "oft": _Case("OFTConfig", oft_block_size=4, target_modules=[*EVERY, "emb"]),
    "oft exact": _Case(
        "OFTConfig", oft_block_size=6, use_cayley_neumann=False, target_modules=EVERY
    ),
    "oft of 2 blocks": _Case("OFTConfig", r=2, oft_block_size=0, target_modules=["fc", "out"]),
    "oft shared": _Case("OFTConfig", oft_block_size=4, block_share=True, target_modules=EVERY),
    "coft": _Case("OFTConfig", oft_block_size=4, coft=True, eps=0.5, target_modules=EVERY),
    "coft within": _Case(
        "OFTConfig", 1e-4, oft_block_size=4, coft=True, eps=0.5, target_modules=EVERY
    ),
    **{
        f"oft of {n} terms": _Case(
            "OFTConfig", oft_block_size=4, num_cayley_neumann_terms=n, target_modules=["fc"]
        )
        for n in (2, 3, 4, 7)
    },
    "lora with biases": _Case("LoraConfig", r=3, lora_bias=True, target_modules=EVERY),
    "vera": _Case("VeraConfig", r=3, target_modules=["fc", "out"]),
    "vera transposed": _Case(
        "VeraConfig", r=3, transposed=True, fan_in_fan_out=True, target_modules=["fc", "out"]
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_peft_merges_the_same(tmp_path: Path, case: str) -> None:
    """What PEFT 0.21 saves and merges is what a merge makes of the file."""
    import peft
    import torch
    from transformers.pytorch_utils import Conv1D

    own = CASES[case]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(8, 12, 3)
            self.emb = torch.nn.Embedding(10, 8)
            self.fc = Conv1D(16, 24) if own.transposed else torch.nn.Linear(24, 16)
            self.out = Conv1D(24, 16) if own.transposed else torch.nn.Linear(48, 16)

    torch.manual_seed(6)
    net = Net()
    before = {k: v.numpy().copy() for k, v in net.state_dict().items()}
    save_file(before, tmp_path / "net.safetensors")
    model: Any = peft.get_peft_model(net, getattr(peft, own.name)(**own.given))
    with torch.no_grad():
        for name, values in model.named_parameters():
            if any(part in name for part in ("ia3_l", "oft", "vera_lambda", "lora_B")):
                values.normal_(0, own.scale)
    model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    merged = model.merge_and_unload().state_dict()
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "net.safetensors", name="base")
        store.add(tmp_path / "adapter", name="adapter", base="base")
        request = MergeRequest(base="base", experts=["adapter"], method="task_arithmetic")
        store.merge(store.plan(request), name="baked")
        store.checkout("baked", tmp_path / "baked")
    [file] = (tmp_path / "baked").glob("*.safetensors")
    found = load_file(file)
    changed = [name for name, values in merged.items() if (values.numpy() != before[name]).any()]
    assert len(changed) >= len(own.given["target_modules"])
    for name, values in merged.items():
        assert np.allclose(found[name], values.numpy(), atol=2e-6, rtol=1e-5), name
