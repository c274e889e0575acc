"""Adapters as experts: what they make of a base, read block by block, in every merge."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import adapters
import families
import numpy as np
import pytest
import reference
from adapters import Adapter, Array
from hypothesis import given
from hypothesis import strategies as st

from mstore import MergeRequest, Store
from mstore.blocks.reader import Meter
from mstore.merge.arithmetic.adapters import add_up, adds
from mstore.merge.arithmetic.kernels import UNLIMITED, Mix, mix_chunk
from mstore.merge.arithmetic.tiles import ADDITIVE, ALL
from mstore.merge.measures import facts
from mstore.models.adapters import low_rank
from mstore.models.adapters.low_rank import Factors, load_factors
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import AppliedTensor
from mstore.terms.errors import BadRequest, Incompatible, NotFound

BLOCK = 1 << 16
LAYER = "model.layers.{}.{}"
WIDE = (90, 700)
"""Rows of it lie across blocks."""


def _base(dtype: str) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    shapes = {
        "model.embed_tokens.weight": (64, 30),
        LAYER.format(0, "q_proj.weight"): WIDE,
        LAYER.format(0, "up_proj.weight"): (200, 300),
        LAYER.format(1, "q_proj.weight"): WIDE,
        "model.norm.weight": (300,),
        "lm_head.weight": (64, 30),
    }
    return {
        name: rng.normal(0, 0.05, shape).astype(reference.DTYPES[dtype])
        for name, shape in shapes.items()
    }


def _adapter(seed: int, rank: int, modules: list[str], dtype: str = "F32") -> Adapter:
    rng = np.random.default_rng(seed)

    def drawn(shape: tuple[int, int]) -> Array:
        return rng.normal(0, 0.05, shape).astype(reference.DTYPES[dtype])

    shapes = {m: (200, 300) if m.endswith("up_proj") else WIDE for m in modules}
    return Adapter({m: (drawn((s[0], rank)), drawn((rank, s[1]))) for m, s in shapes.items()})


Q0, UP, Q1 = LAYER.format(0, "q_proj"), LAYER.format(0, "up_proj"), LAYER.format(1, "q_proj")


@dataclasses.dataclass
class Family:
    """A store with a base, three adapters and a fine-tune, and what each stands for."""

    store: Store
    base: dict[str, Array]
    sides: dict[str, dict[str, Array]]
    factor_bytes: dict[str, int]

    def reference(
        self, method: str, experts: dict[str, float], given: dict[str, Any], name: str
    ) -> Array:
        """The merge of one tensor, by the reference."""
        sides = [self.sides[expert][name] for expert in experts]
        return reference.merge(
            method, given, list(experts.values()), self.base[name], sides, tensor=name
        )

    def assert_merged(
        self, ref: str, method: str, experts: dict[str, float], given: dict[str, Any]
    ) -> None:
        """Every tensor is the reference's, bit for bit."""
        for name, own in self.base.items():
            found = self.store[ref].tensor(name)
            wanted = self.reference(method, experts, given, name)
            assert found.tobytes() == wanted.tobytes(), name
            assert found.shape == own.shape


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    with _family(tmp_path_factory.mktemp("adapters"), "BF16") as found:
        yield found


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """The same in float32, like the elements of an applied adapter."""
    with _family(tmp_path_factory.mktemp("singles"), "F32") as found:
        yield found


@contextmanager
def _family(root: Path, dtype: str) -> Iterator[Family]:
    base = _base(dtype)
    small = _adapter(1, 8, [Q0, UP], "BF16")
    large = _adapter(2, 21, [Q0, UP, Q1])
    rng = np.random.default_rng(3)
    large.whole["lm_head.weight"] = rng.normal(0, 0.05, (64, 30)).astype(np.float32)
    rows = _adapter(4, 4, [Q0])
    rows.settings["use_dora"] = True
    rows.magnitudes[Q0] = rng.uniform(1, 2, WIDE[0]).astype(np.float32)
    tuned = {
        name: (reference.single(value) + rng.normal(0, 0.01, value.shape)).astype(value.dtype)
        for name, value in base.items()
    }
    with Store.init(root / "store", block_size=BLOCK) as store:
        adapters.write(root / "base", base, {"config.json": {"model_type": "x"}}, "model")
        adapters.write(root / "tuned", tuned, {}, "model")
        store.add(root / "base", name="base")
        store.add(root / "tuned", name="tuned", base="base")
        made = {"small": small, "large": large, "rows": rows}
        for name, one in made.items():
            store.add(one.write(root / name), name=name)
        yield Family(
            store,
            base,
            {"tuned": tuned} | {name: one.applied(base) for name, one in made.items()},
            {n: sum(v.nbytes for v in one.tensors().values()) for n, one in made.items()},
        )


def ask(method: str, *experts: str, **more: Any) -> MergeRequest:
    return MergeRequest(base="base", experts=experts, method=method, **more)


MERGES: list[tuple[str, dict[str, float], dict[str, Any]]] = [
    ("task_arithmetic", {"small": 1.0}, {}),
    ("task_arithmetic", {"large": -0.5}, {}),
    ("task_arithmetic", {"small": 1.0, "large": 0.5, "tuned": 0.25}, {"lambda": 0.7}),
    ("linear", {"small": 1.0, "tuned": 2.0}, {}),
    ("ties", {"small": 1.0, "large": 1.0, "tuned": 1.0}, {"density": 0.3}),
    ("dare_ties", {"small": 1.0, "large": 0.5}, {"density": 0.5, "seed": 3}),
    ("breadcrumbs", {"large": 1.0, "tuned": 1.0}, {"density": 0.6, "gamma": 0.05}),
    ("della_linear", {"small": 1.0, "large": 1.0}, {"density": 0.5, "rescale": False}),
    ("passthrough", {"large": 1.0}, {}),
    ("nearswap", {"large": 1.0}, {"t": 0.01}),
    ("ramplus_tl", {"small": 1.0, "large": 1.0, "tuned": 1.0}, {"epsilon": 0.01}),
    ("sce", {"small": 1.0, "large": 1.0, "tuned": 1.0}, {"select_topk": 0.3}),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ["family", "singles"])
@pytest.mark.parametrize(("method", "experts", "given"), MERGES)
def test_an_adapter_is_merged_like_the_model_it_makes(
    request: pytest.FixtureRequest,
    name: str,
    method: str,
    experts: dict[str, float],
    given: dict[str, Any],
) -> None:
    """Each method gives the reference's bits for base + product, beside fine-tunes and alone."""
    family: Family = request.getfixturevalue(name)
    store = family.store
    plan = store.plan(MergeRequest(base="base", experts=experts, method=method, parameters=given))
    merged = store.merge(plan, name="merged")
    assert merged.expert_bytes_read + merged.memo_expert_bytes == plan.planned_expert_bytes
    family.assert_merged("merged", method, experts, given)
    assert store.replay("merged").same


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("karcher", {}),
        ("model_stock", {}),
        ("multislerp", {}),
        ("nuslerp", {}),
        ("guarded", {"threshold": 0.1, "alpha": 0.5}),
    ],
)
def test_adapters_are_compared_with_each_other(
    family: Family, tmp_path: Path, method: str, given: dict[str, Any]
) -> None:
    """Two adapters that change the same modules of a base in 16 bits merge by the methods that
    compare experts with each other as the models do that they make."""
    store, names = family.store, ("small", "large")
    for name in names:
        families.write_checkpoint(tmp_path / name, family.base | family.sides[name])
        store.add(tmp_path / name, name=f"{name}_made", base="base")
    asked = ask(method, *names, parameters=given, dtype="float32")
    made = dataclasses.replace(asked, experts=[f"{name}_made" for name in names])
    for ref, request in (("merged", asked), ("made", made)):
        store.merge(store.plan(request), name=ref)
    for name, value in family.base.items():
        found, wanted = (store[ref].tensor(name) for ref in ("merged", "made"))
        scale = np.abs(reference.single(value)).max()
        assert np.abs(found - wanted).max() <= 2.0**-20 * scale, name


def test_dora_gives_rows_their_norms(family: Family) -> None:
    """A DoRA adapter's rows have the norms that it says; its chunks are whole rows."""
    store = family.store
    store.merge(store.plan(ask("task_arithmetic", "rows", dtype="float32")), name="dora")
    name = f"{Q0}.weight"
    found, wanted = store["dora"].tensor(name), family.sides["rows"][name]
    assert np.abs(found - wanted).max() <= 4 * 2.0**-23 * np.abs(wanted).max()
    assert store.replay("dora").same


def test_an_adapter_costs_its_own_bytes(family: Family) -> None:
    """A merge reads each of an adapter's tensors once, and no more than that."""
    store = family.store
    plan = store.plan(ask("task_arithmetic", "large"))
    assert plan.full_expert_bytes == plan.planned_expert_bytes
    assert 0 < plan.planned_expert_bytes <= family.factor_bytes["large"]
    assert store.merge(plan, name="whole").expert_bytes_read <= plan.planned_expert_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", ["20%", "50%", "80%"])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_a_budget_takes_products_whole_or_not_at_all(
    family: Family, method: str, share: str
) -> None:
    """A budget is kept to the byte, its bound holds, and a product is read whole or not."""
    store = family.store
    asked = ask(method, "small", "large", "tuned", parameters=_density(method))
    store.merge(store.plan(asked), name="full")
    plan = store.plan(dataclasses.replace(asked, budget=share))
    assert 0 < plan.planned_expert_bytes <= float(share[:-1]) / 100 * plan.full_expert_bytes
    merged = store.merge(plan, name="part")
    assert merged.expert_bytes_read + merged.memo_expert_bytes == plan.planned_expert_bytes
    for tensor in store.explain("part", f"{Q0}.weight").tensors:
        for expert in tensor.experts[:2]:
            assert {"over budget"} == set(expert.chunks) or "over budget" not in expert.chunks
    if plan.error_bound is not None:
        off = sum(
            float(((_double(store, "part", n) - _double(store, "full", n)) ** 2).sum())
            for n in family.base
        )
        norm = sum(
            float((reference.single(v).astype("f8") ** 2).sum()) for v in family.base.values()
        )
        # Rounding to the output's type is not part of the bound.
        assert off**0.5 <= plan.error_bound * norm**0.5 * 1.05


def _density(method: str) -> dict[str, Any]:
    return {"density": 0.5} if method == "ties" else {}


def _double(store: Store, ref: str, name: str) -> Array:
    return reference.single(store[ref].tensor(name)).astype(np.float64)


def test_a_budget_below_the_smallest_product(family: Family) -> None:
    """A budget that no product fits is refused like any other that reads nothing."""
    with pytest.raises(BadRequest, match="fits"):
        family.store.plan(ask("task_arithmetic", "large", budget=1000))


def test_a_virtual_merge_applies_an_adapter(family: Family) -> None:
    """The applied model is committed as a plan, reads the same bytes, and becomes real."""
    store = family.store
    plan = store.plan(ask("ties", "small", "large", parameters={"density": 0.4}))
    store.merge(plan, name="real")
    store.merge(plan, name="virtual", virtual=True)
    for name in reversed(family.base):
        assert store["virtual"].tensor(name).tobytes() == store["real"].tensor(name).tobytes()
    store.materialize("virtual")
    assert store["virtual"].manifest == store["real"].manifest


def test_shares_of_adapters_add_up(family: Family) -> None:
    """Blame measures an adapter's share as any expert's."""
    store = family.store
    store.merge(store.plan(ask("task_arithmetic", "small", "tuned")), name="blamed")
    for one in store.blame("blamed").tensors:
        assert sum(share.share or 0 for share in one.experts) == pytest.approx(1, abs=1e-6)
    report = store.blame("blamed", f"{Q1}.weight")
    assert [expert.moved > 0 for expert in report.tensors[0].experts] == [False, True]


def test_the_same_adapter_twice_is_read_once(family: Family) -> None:
    """Two experts of one content share what is read, whatever their weights."""
    store = family.store
    once = store.plan(ask("task_arithmetic", "large"))
    twice = store.plan(
        MergeRequest(
            base="base", experts=[("large", 1.0), ("large", 0.5)], method="task_arithmetic"
        )
    )
    assert twice.planned_expert_bytes == once.planned_expert_bytes
    merged = store.merge(twice, name="twice")
    assert merged.expert_bytes_read + merged.memo_expert_bytes == once.planned_expert_bytes


@pytest.mark.rest
def test_other_processes_apply_adapters(family: Family) -> None:
    """Slices that other processes compute give the same snapshot, for the same bytes."""
    store = family.store
    request = ask("task_arithmetic", "large", "small", parameters={"lambda": 0.9})
    plan = store.plan(request)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        merged = store.merge(plan, name="elsewhere", cluster=pool, memo=False)
    assert merged.expert_bytes_read == plan.planned_expert_bytes
    assert store.merge(plan, name="here", memo=False).manifest == merged.manifest


def test_any_run_of_elements_is_the_same() -> None:
    """An element does not depend on where a run of elements begins or ends."""
    rng = np.random.default_rng(0)
    for rows, columns, rank in ((7, 5, 3), (3, 2050, 6), (1, 1, 1), (40, 1, 4)):
        up = rng.standard_normal((rows, rank)).astype(np.float32)
        down = rng.standard_normal((rank, columns)).astype(np.float32)
        base = rng.standard_normal((rows, columns)).astype(np.float32)
        factors = Factors(up, down, np.array([0.3], dtype=np.float32), None)
        wanted = adapters.added(base, up, down, 0.3).reshape(-1)
        for first in range(0, base.size, max(1, base.size // 7)):
            for n in {1, (base.size - first + 1) // 2, base.size - first}:
                raw = base.reshape(-1)[first : first + n].view(np.uint8)
                out = np.empty(4 * n, dtype=np.uint8)
                factors.apply(raw, "F32", first, n, out)
                assert out.tobytes() == wanted[first : first + n].tobytes()


def test_numbers_that_are_not_finite() -> None:
    """Infinity and NaN in a factor come out as the one quiet NaN, or infinity."""
    up = np.array([[np.inf], [np.nan], [-0.0]], dtype=np.float32)
    down = np.array([[1.0, 0.0]], dtype=np.float32)
    factors = Factors(up, down, np.array([1], dtype=np.float32), None)
    out = np.empty(24, dtype=np.uint8)
    factors.apply(np.zeros(24, dtype=np.uint8), "F32", 0, 6, out)
    words = out.view(np.uint32).tolist()
    assert words == [0x7F800000, 0x7FC00000, 0x7FC00000, 0x7FC00000, 0, 0]


ODD = {
    "BF16": [0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81],
    "F16": [0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01],
    "F32": [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001],
}
"""Zeros, infinities and NaNs of either sign, and a NaN that signals."""


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 9), st.integers(1, 150)),
    experts=st.lists(st.sampled_from([1.0, -0.3, 0.0, 1e30, None]), min_size=1, max_size=6).filter(
        lambda weights: any(one is not None for one in weights)
    ),
    dtypes=st.tuples(*[st.sampled_from(["BF16", "F16", "F32"])] * 2),
    share=st.floats(0, 1),
    factors=st.sampled_from([(1.0, 1.0, 0), (3.0, 0.7, 1), (0.5, 1.0, 1), (2.0, -1.0, 0)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_sum_of_products_is_that_of_rows_in_memory(
    shape: tuple[int, int, int],
    experts: list[float | None],
    dtypes: tuple[str, str],
    share: float,
    factors: tuple[float, float, int],
    seed: int,
) -> None:
    """What is added up while it is computed has the bits of what is computed and then added up,
    for any run of elements and any bit patterns; weight None stands for an absent expert."""
    rng = np.random.default_rng(seed)
    rows, rank, columns = shape
    first = int(share * (rows * columns - 1))
    n = 1 + int(rng.integers(rows * columns - first))
    base_dtype, out_dtype = dtypes
    base = rng.integers(0, 256, n * ITEMSIZES[base_dtype], dtype=np.uint8)
    bits, odd = base.view(f"<u{ITEMSIZES[base_dtype]}"), rng.random(n) < 0.1
    bits[odd] = rng.choice(ODD[base_dtype], int(odd.sum()))
    weights = [1.0 if one is None else one for one in experts]
    mix = Mix(
        weights=np.array(weights, dtype=np.float32),
        factors=np.array(factors[:2], dtype=np.float32),
        flags=np.array([ADDITIVE, factors[2], 0, 0], dtype=np.int64),
        rescales=np.ones(len(experts), dtype=np.float32),
        mask_limits=(ALL,) * len(experts),
    )
    assert adds(mix)
    own: list[Factors | None] = []
    for one in experts:
        left = rng.standard_normal((rows, rank)).astype(np.float32)
        right = rng.standard_normal((rank, columns)).astype(np.float32)
        right[rng.random(right.shape) < 0.1] = rng.choice([0, np.inf, np.nan, 1e38])
        scale = np.array([rng.choice([2.0, 0.0, 1e-3])], dtype=np.float32)
        own.append(None if one is None else Factors(left, right, scale, None))
    there = [one for one in own if one is not None]
    made = np.empty((len(there), 4 * n), dtype=np.uint8)
    for row, one in zip(made, there, strict=True):
        one.apply(base, base_dtype, first, n, row)
    numbers = iter(range(len(there)))
    row_of = [-1 if one is None else next(numbers) for one in own]
    nothing = np.zeros(len(own), dtype=np.float32)
    keys = np.zeros((len(own), 2), dtype=np.uint32)
    wanted, found = np.zeros((2, n * ITEMSIZES[out_dtype]), dtype=np.uint8)
    mix_chunk(
        *(mix, base, base_dtype, made, ["F32"] * len(there), row_of, n, first, nothing),
        *([UNLIMITED] * len(own), keys, wanted, out_dtype),
    )
    add_up(mix, own, base, base_dtype, first, n, found, out_dtype)
    assert found.tobytes() == wanted.tobytes()


RECIPE = """\
merge_method: ties
base_model: base
models:
- model: base+small
  parameters: {density: 0.5}
- model: {model: base, lora: large}
  parameters: {density: 0.25, weight: 0.5}
- model: tuned
  parameters: {density: 1.0}
parameters: {weight: 1.0}
"""


def test_a_recipe_names_adapters(family: Family) -> None:
    """MODEL+ADAPTER in a recipe is the adapter as an expert, and printed recipes say it again."""
    store = family.store
    plan = store.plan(store.read_recipe(RECIPE).request)
    assert [name for name, _ in plan.experts] == ["small", "large", "tuned"]
    store.merge(plan, name="recipe")
    family.assert_merged(
        "recipe", "ties", {"small": 1.0, "large": 0.5, "tuned": 1.0}, {"density": (0.5, 0.25, 1.0)}
    )
    again = store.plan(store.read_recipe(store.recipe("recipe")).request)
    assert again.plan == plan.plan


def test_a_recipe_without_a_base_starts_from_the_adapters_model(family: Family) -> None:
    """An average of MODEL+ADAPTER takes files from the model, which is not averaged."""
    text = "merge_method: linear\nmodels:\n- {model: base+small, parameters: {weight: 1.0}}\n"
    request = family.store.read_recipe(text).request
    assert (request.base, tuple(request.experts)) == ("base", (("small", 1.0),))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change", [("base+small", "tuned+small"), ("base_model: base", "base_model: tuned+small")]
)
def test_an_adapter_of_another_model_in_a_recipe(family: Family, change: tuple[str, str]) -> None:
    """An adapter of another model than the base, or of the base itself, is applied to it first."""
    store = family.store
    text = RECIPE.replace(*change)
    with pytest.raises(NotFound, match="is not made yet"):
        store.read_recipe(text)
    made = {one.name: one for one in store.prepare_recipe(text)}["tuned with small"]
    request = store.read_recipe(text).request
    assert made.ref in (request.base, *(name for name, _ in request.weighted()))
    tuned = store.plan(MergeRequest(base="tuned", experts=["small"], method="task_arithmetic"))
    merged = store.merge(tuned, name="tuned-small")
    assert store[made.ref].manifest == merged.manifest
    assert store.merge(store.plan(request), name="of-applied").new_snapshot
    assert not any(one.new_snapshot for one in store.prepare_recipe(text))


# -- what is refused ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, as a directory and in a store."""
    root = tmp_path_factory.mktemp("alone")
    adapters.write(root / "base", _base("F32"), {}, "model")
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
    return root


@pytest.fixture
def store(alone: Path, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(alone, tmp_path, dirs_exist_ok=True)
    with Store.open(tmp_path / "store") as store:
        yield store


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "BOFT"}, "BOFT"),
    ({"peft_type": "VERA"}, "lora_A.weight is not in the base"),
    ({"peft_type": ["LORA"]}, "peft_type"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"target_parameters": ["experts.up"]}, "target_parameters"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    ({"init_lora_weights": "loftq"}, "loftq"),
    ({"init_lora_weights": "news"}, "news"),
    ({"r": 0}, "rank"),
    ({"r": 5}, "has rank 4"),
    ({"lora_alpha": "16"}, "lora_alpha"),
    ({"rank_pattern": {"(a+)+": 4}}, r"\(a\+\)\+"),
    ({"use_dora": True}, "magnitudes"),
    ({"use_dora": True, "fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"fan_in_fan_out": True}, "shape"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("settings", "word"), REFUSED, ids=lambda one: str(one)[:40])
def test_settings_that_cannot_be_applied(
    store: Store, tmp_path: Path, settings: dict[str, Any], word: str
) -> None:
    """A setting that mstore does not apply is refused by its name, before anything is read."""
    one = _adapter(1, 4, [Q0])
    one.settings |= settings
    store.add(one.write(tmp_path / "lora"), name="lora")
    with pytest.raises(Incompatible, match=word) as caught:
        store.plan(ask("linear", "lora"))
    assert caught.value.texts[1] == "lora"


def _without(name: str) -> Adapter:
    one = _adapter(1, 4, [Q0])
    return dataclasses.replace(one, whole={name: np.zeros(3, dtype=np.float32)})


MISFITS: list[tuple[Adapter, str]] = [
    (_adapter(1, 4, ["model.layers.7.q_proj"]), "layers.7.q_proj.weight is not in the base"),
    (_without("model.other.weight"), "model.other.weight is not in the base"),
    (_without(f"{Q0}.weight"), "a product and new weights"),
    (_without("model.norm.weight"), r"\[3\]"),
    (
        Adapter({Q0: (np.zeros((90, 4), "f4"), np.zeros((4, 699), "f4"))}),
        r"\[90, 699\]",
    ),
    (Adapter({Q0: (np.zeros((90, 4), "f4"), np.zeros((3, 700), "f4"))}), "matrices"),
    (
        Adapter({"model.norm": (np.zeros((300, 4), "f4"), np.zeros((4, 1), "f4"))}),
        "matrices",
    ),
]


@pytest.mark.parametrize(("one", "word"), MISFITS, ids=lambda one: str(one)[:30])
def test_an_adapter_of_another_model(store: Store, tmp_path: Path, one: Adapter, word: str) -> None:
    """An adapter that does not fit the base is refused by the tensor that does not."""
    store.add(one.write(tmp_path / "lora"), name="lora")
    with pytest.raises(Incompatible, match=word):
        store.plan(ask("linear", "lora"))


def test_an_adapter_without_its_config(store: Store, tmp_path: Path) -> None:
    """Factors alone do not say how they are scaled."""
    path = _adapter(1, 4, [Q0]).write(tmp_path / "lora")
    (path / "adapter_config.json").unlink()
    store.add(path, name="lora")
    with pytest.raises(Incompatible, match="without its adapter_config"):
        store.plan(ask("linear", "lora"))


def test_other_names_of_one_model(store: Store, tmp_path: Path) -> None:
    """An adapter of the model without its head, or inside another, finds its tensors."""
    for number, prefix in enumerate(("layers.0", "vlm.model.layers.0")):
        one = _adapter(1, 4, [Q0])
        factors = {f"{prefix}.q_proj": pair for pair in one.factors.values()}
        store.add(Adapter(factors).write(tmp_path / f"l{number}"), name="lora")
        store.merge(store.plan(ask("task_arithmetic", "lora")), name=f"m{number}")
        name = f"{Q0}.weight"
        wanted = one.applied(_base("F32"))[name]
        assert np.allclose(store[f"m{number}"].tensor(name), wanted, atol=1e-7)


def test_adapters_merge_into_an_adapter(store: Store, tmp_path: Path) -> None:
    """Where the base is an adapter, experts are adapters as they are, not what they make."""
    made = [_adapter(seed, 4, [Q0]) for seed in (1, 2)]
    for number, one in enumerate(made):
        store.add(one.write(tmp_path / f"l{number}"), name=f"l{number}")
    plan = store.plan(MergeRequest(base="l0", experts=["l1"], method="linear"))
    store.merge(plan, name="both")
    for name, value in made[1].tensors().items():
        assert store["both"].tensor(name).tobytes() == value.tobytes()


def test_an_adapter_remembers_its_base(store: Store, tmp_path: Path) -> None:
    """`add --base` of an adapter checks that it fits, and records where it came from."""
    report = store.add(_adapter(1, 4, [Q0]).write(tmp_path / "lora"), name="lora", base="base")
    (entry, *_) = store.log("lora")
    assert report.name == "lora"
    assert [parent.role for parent in entry.parents] == ["base"]
    other = _adapter(1, 4, ["model.layers.9.q_proj"]).write(tmp_path / "other")
    with pytest.raises(Incompatible, match=r"layers\.9"):
        store.add(other, name="other", base="base")
    assert "other" not in {ref.name for ref in store.refs()}


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "lora_A.weight is not in the base"),
    ({"r": 5}, "has rank 4"),
    ({"init_lora_weights": "olora"}, "olora"),
]


@pytest.mark.parametrize(("settings", "word"), BROKEN, ids=lambda one: str(one)[:30])
def test_adding_with_a_base_checks_all_of_an_adapter(
    store: Store, tmp_path: Path, settings: dict[str, Any], word: str
) -> None:
    """What a merge would refuse is refused when an adapter is added as one of a base."""
    one = _adapter(1, 4, [Q0])
    one.settings |= settings
    with pytest.raises(Incompatible, match=word):
        store.add(one.write(tmp_path / "lora"), name="lora", base="base")
    wide = Adapter({Q0: (np.zeros((90, 4), "f4"), np.zeros((4, 699), "f4"))})
    with pytest.raises(Incompatible, match=r"\[90, 699\]"):
        store.add(wide.write(tmp_path / "wide"), name="wide", base="base")
    (tmp_path / "wide" / "adapter_config.json").unlink()
    with pytest.raises(Incompatible, match="without its adapter_config"):
        store.add(tmp_path / "wide", name="wide", base="base")


def test_an_adapter_of_another_kind_is_named(store: Store, tmp_path: Path) -> None:
    """An adapter whose tensors are called otherwise is known by its config."""
    tensors = {f"base_model.model.{Q0}.boft_R": np.ones((300, 1), dtype=np.float32)}
    config = {"adapter_config.json": {"peft_type": "BOFT"}}
    adapters.write(tmp_path / "boft", tensors, config, "adapter_model")
    store.add(tmp_path / "boft", name="boft")
    with pytest.raises(Incompatible, match="BOFT"):
        store.plan(ask("linear", "boft"))


def test_an_adapter_on_another_base_warns(store: Store, tmp_path: Path) -> None:
    """A merge says if an adapter was added as one of another model than the base."""
    adapters.write(tmp_path / "other", {n: -v for n, v in _base("F32").items()}, {}, "model")
    store.add(tmp_path / "other", name="other")
    store.add(_adapter(1, 4, [Q0]).write(tmp_path / "lora"), name="lora", base="base")
    asked = ask("task_arithmetic", "lora")
    kinds = [
        [one.kind for one in store.plan(dataclasses.replace(asked, base=base)).warnings]
        for base in ("base", "other")
    ]
    assert kinds == [[], ["adapter of another base"]]


def test_the_only_weight_of_an_average(store: Store, tmp_path: Path) -> None:
    """A plan says if a weight is divided by itself."""
    store.add(_adapter(1, 4, [Q0]).write(tmp_path / "lora"), name="lora")
    half = {"base": "base", "experts": [("lora", 0.5)]}
    told = [
        any(
            "has no effect" in remark
            for remark in store.plan(MergeRequest(**half, method=m)).remarks
        )
        for m in ("linear", "task_arithmetic")
    ]
    assert told == [True, False]


def test_base_and_adapter_swapped(store: Store, tmp_path: Path) -> None:
    """A model as the expert of an adapter is most likely the base."""
    store.add(_adapter(1, 4, [Q0]).write(tmp_path / "lora"), name="lora")
    with pytest.raises(Incompatible, match="the base is an adapter") as caught:
        store.plan(MergeRequest(base="lora", experts=["base"], method="linear"))
    assert "expert" in str(caught.value.hint)


def test_an_adapter_has_no_nearest_model(store: Store, tmp_path: Path) -> None:
    """Another adapter with the same tensors is not taken for the base."""
    store.add(_adapter(1, 4, [Q0]).write(tmp_path / "one"), name="one")
    report = store.add(_adapter(1, 4, [Q0]).write(tmp_path / "two"), name="two", detect_base=True)
    assert report.base is None
    assert "adapter" in str(report.base_reason)


def test_statistics_of_an_adapter(store: Store, tmp_path: Path) -> None:
    """`analyze` measures what an adapter changes, once."""
    store.add(_adapter(1, 4, [Q0, UP]).write(tmp_path / "lora"), name="lora")
    first = store.analyze("lora", base="base")
    assert (first.tensors_measured, first.tensors_equal) == (2, 4)
    again = store.analyze("lora", base="base")
    assert (again.tensors_measured, again.expert_bytes_read) == (0, 0)
    plan = store.plan(ask("ties", "lora", parameters={"density": 0.5}, analyze=False))
    assert plan.planned_expert_bytes == first.expert_bytes_read


def test_what_a_store_knows_changes_no_plan_of_a_sum(store: Store, tmp_path: Path) -> None:
    """Norms of products follow from the factors, whether statistics are there or not; a budget and
    its bound, too.  What is read for them counts as analysis."""
    for seed, name in ((1, "one"), (2, "two")):
        store.add(_adapter(seed, 4, [Q0, Q1, UP]).write(tmp_path / name), name=name)
    asked = ask("task_arithmetic", "one", "two", budget="50%")
    before = store.plan(asked)
    assert before.error_bound
    assert before.analyze_bytes_read == before.full_expert_bytes
    store.analyze("one", base="base")
    # Another request, so that the plan is made again.
    changed = dataclasses.replace(asked, experts=["two", "one"])
    store.plan(changed)
    store.analyze("two", base="base")
    with Store.init(tmp_path / "other", block_size=BLOCK) as other:
        for name in ("base", "one", "two"):
            other.add(tmp_path / name, name=name)
        for name in ("one", "two"):
            other.analyze(name, base="base")
        again = other.plan(asked)
    assert (again.plan, again.error_bound) == (before.plan, before.error_bound)


def test_planning_reads_all_factors_at_once_and_no_base(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sum of adapters needs of its base is known since that was added."""
    for seed, name in ((1, "one"), (2, "two")):
        store.add(_adapter(seed, 4, [Q0, Q1, UP]).write(tmp_path / name), name=name)
    read: list[int] = []

    def counted(catalog: Catalog, records: Sequence[AppliedTensor], meter: Meter) -> list[Factors]:
        read.append(len(records))
        return load_factors(catalog, records, meter)

    def refused(*_: object) -> float:
        raise AssertionError("a tensor of the base is read")

    monkeypatch.setattr(low_rank, "load_factors", counted)
    monkeypatch.setattr(facts, "measure_squares", refused)
    assert store.plan(ask("task_arithmetic", "one", "two")).analyze_bytes_read
    assert read == [6]


def test_a_new_tensor_is_not_made_of_another_product(store: Store, tmp_path: Path) -> None:
    """A product belongs to its own tensor of the base: no other can stand below it."""
    store.add(_adapter(1, 4, [Q0]).write(tmp_path / "lora"), name="lora")
    asked = ask("linear", "lora", outputs={"new": [f"{Q1}.weight", f"{Q0}.weight"]})
    with pytest.raises(Incompatible, match="is an adapter"):
        store.plan(asked)


def test_a_bias_below_a_product(store: Store, tmp_path: Path) -> None:
    """A trained bias of a layer that has a product, too, replaces the base's: PEFT calls it the
    bias of the base layer."""
    rng = np.random.default_rng(0)
    biased = _base("F32") | {f"{Q0}.bias": np.zeros(WIDE[0], np.float32)}
    adapters.write(tmp_path / "biased", biased, {"config.json": {}}, "model")
    store.add(tmp_path / "biased", name="biased")
    one = _adapter(1, 4, [Q0])
    bias = rng.standard_normal(WIDE[0]).astype(np.float32)
    one.whole = {f"{Q0}.base_layer.bias": bias}
    store.add(one.write(tmp_path / "lora"), name="lora")
    request = MergeRequest(base="biased", experts=["lora"], method="task_arithmetic")
    store.merge(store.plan(request), name="merged")
    assert store["merged"].tensor(f"{Q0}.bias").tobytes() == bias.tobytes()
