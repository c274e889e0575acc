"""Combinations by spectra, against formulas on whole matrices; fine-tunes, extracted and combined.

The references hold whole matrices and follow the papers step by step.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import adapters
import numpy as np
import numpy.typing as npt
import pytest
from adapters import PREFIX, Adapter
from cli_runs import Program
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import BLOCK
from test_combination import SEED, kept, united
from transcripts import shell_lines

from mstore import MergeRequest, Store
from mstore.merge.combination.methods import METHODS, setting_of
from mstore.merge.combination.products import ModuleProducts, Read
from mstore.terms.errors import BadRequest, Incompatible

ROOT = Path(__file__).parent.parent
Matrix = npt.NDArray[np.float64]
SPECTRA = ["tsv", "svc", "iso_c", "iso_cts", "wudi_ridge"]
CORES = ["ties_core", "dare_linear_core", "dare_ties_core", "magnitude_prune_core"]


def reads(seed: int, ranks: Sequence[int], weights: Sequence[float], shape: Any = (12, 17)) -> Any:
    rng = np.random.default_rng(seed)
    rows, columns = shape
    return [
        Read(
            rng.standard_normal((rank, columns)).astype(np.float32),
            rng.standard_normal((rows, rank)).astype(np.float32),
            0.5,
            weight,
            position,
        )
        for position, (rank, weight) in enumerate(zip(ranks, weights, strict=False))
    ]


def terms_of(read: Sequence[Read]) -> list[Matrix]:
    """The whole differences, times their weights."""
    return [one.weight * one.scale * (one.up.astype(np.float64) @ one.down) for one in read]


def combined(read: Sequence[Read], method: str, rank: int | None = None, **given: Any) -> Matrix:
    """The whole combined product, and a check that the report of what is left out is right."""
    module = ModuleProducts("layer", read, ("layer.lora_A.weight", "layer.lora_B.weight"), Path())
    rank = min(rank or sum(len(one.down) for one in read), *read[0].shape)
    found = METHODS[method].combined(module, rank, setting_of(method, given))
    assert found.up.shape[1] == len(found.down) <= rank
    return found.up.astype(np.float64) @ found.down


def near(found: Matrix, wanted: Matrix, share: float = 2e-6) -> None:
    assert np.linalg.norm(found - wanted) <= share * max(np.linalg.norm(wanted), 1e-30)


RANKS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
WEIGHTS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, -1.0, -0.75]), min_size=4, max_size=4)


# -- the formulas ------------------------------------------------------------------------------


def polar(columns: Matrix) -> Matrix:
    """The nearest matrix with orthonormal columns, by the root of the Gram matrix."""
    values, vectors = np.linalg.eigh(columns.T @ columns)
    return columns @ (vectors / np.sqrt(values)) @ vectors.T


def by_tsv(terms: Sequence[Matrix], share: int, ranks: Sequence[int]) -> Matrix:
    lefts, values, rights = [], [], []
    for term, rank in zip(terms, ranks, strict=False):
        u, s, v = np.linalg.svd(term)
        count = min(share, rank)
        lefts.append(u[:, :count])
        values.append(s[:count])
        rights.append(v[:count].T)
    u, v = polar(np.hstack(lefts)), polar(np.hstack(rights))
    return u @ np.diag(np.concatenate(values)) @ v.T


def by_svc(terms: Sequence[Matrix], alpha: float, rank: int) -> Matrix:
    total = sum(terms)
    u, s, v = np.linalg.svd(total)
    found = np.zeros_like(terms[0])
    for r in range(rank):
        a = u[:, r] @ total
        counts = [max(alpha, (a @ own) / (own @ own)) for own in (u[:, r] @ one for one in terms)]
        found += len(terms) / sum(counts) * s[r] * np.outer(u[:, r], v[r])
    return found


def by_iso_c(terms: Sequence[Matrix], rank: int) -> Matrix:
    u, s, v = np.linalg.svd(sum(terms))
    return s[:rank].mean() * u[:, :rank] @ v[:rank]


def by_iso_cts(terms: Sequence[Matrix], rank: int, share: float) -> Matrix:
    count = len(terms)
    each = round((rank - int(rank * share)) / count)
    common = rank - each * count
    u, s, v = np.linalg.svd(sum(terms))
    lefts, values, rights = [u[:, :common]], [s[:common]], [v[:common].T]
    for term in terms:
        rest = term - u[:, :common] @ u[:, :common].T @ term
        own_u, own_s, own_v = np.linalg.svd(rest)
        lefts.append(own_u[:, :each])
        values.append(own_s[:each])
        rights.append(own_v[:each].T)
    mean = np.concatenate(values).mean()
    return mean * polar(np.hstack(lefts)) @ polar(np.hstack(rights)).T


@pytest.mark.parametrize("share", [1, 2, 4])
def test_tsv_is_the_papers(share: int) -> None:
    """The largest triples of each, whitened: an equal share of the rank each, unless it has
    less."""
    read = reads(1, (3, 4, 1), (1.0, -0.5, 2.0))
    rank = sum(min(share, len(one.down)) for one in read)
    near(combined(read, "tsv", rank), by_tsv(terms_of(read), share, (3, 4, 1)))
    # One more that none of them can have alone.
    near(combined(read, "tsv", rank + (share < 3)), by_tsv(terms_of(read), share, (3, 4, 1)))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 1.5])
def test_svc_is_the_papers(alpha: float) -> None:
    """Each singular value of the sum is divided by how often its direction was counted."""
    read = reads(2, (3, 4, 2), (1.0, 0.5, 2.0))
    near(combined(read, "svc", alpha=alpha), by_svc(terms_of(read), alpha, 9))


@pytest.mark.parametrize("rank", [5, 9])
def test_iso_is_the_papers(rank: int) -> None:
    """Iso-C and Iso-CTS of the directions that the result has."""
    read = reads(3, (3, 4, 2), (1.0, -0.5, 2.0))
    near(combined(read, "iso_c", rank), by_iso_c(terms_of(read), rank))
    for share in (0.8, 0.3):
        found = combined(read, "iso_cts", rank, common_space_fraction=share)
        near(found, by_iso_cts(terms_of(read), rank, share))


@pytest.mark.parametrize("ridge", [0.01, 1.0, 10.0])
def test_wudi_ridge_is_the_minimum(ridge: float) -> None:
    """The gradient of interference and ridge, as they are defined on whole matrices, is zero."""
    read = reads(4, (3, 4, 2), (1.0, -0.5, 2.0))
    terms = terms_of(read)
    found = combined(read, "wudi_ridge", ridge=ridge)
    span = np.linalg.matrix_rank(np.vstack(terms))
    rho = ridge * len(terms) / span
    gradient = rho * (found - sum(terms)) + sum(
        (found - term) @ term.T @ term / np.linalg.norm(term) ** 2 for term in terms
    )
    assert np.linalg.norm(gradient) < 1e-5 * (1 + rho) * np.linalg.norm(sum(terms))


@pytest.mark.parametrize("sign", ["total", "frequency"])
@pytest.mark.parametrize("name", CORES)
def test_cores_are_combined_by_their_elements(name: str, sign: str) -> None:
    """The method of elements, on each difference in the joint bases of all factors."""
    read = reads(5, (3, 4, 2), (1.0, -0.5, 2.0))
    method = METHODS[name]
    told = {"density": 0.4, "majority_sign_method": sign, "seed": SEED}
    u = positive(np.linalg.svd(np.hstack([one.up for one in read]).astype(float))[0][:, :9])
    v = positive(np.linalg.svd(np.vstack([one.down for one in read]).astype(float))[2][:9].T)
    parts = [
        kept(
            (u.T @ (one.scale * one.up.astype(float) @ one.down) @ v).astype(np.float32),
            method.select.value,
            told["density"],
            one.position,
            "layer.core",
        )
        for one in read
    ]
    weights = [one.weight for one in read]
    wanted = u @ united(parts, weights, sign if method.elects else None) @ v.T
    near(combined(read, name, **{key: told[key] for key in method.parameters}), wanted)


def positive(columns: Matrix) -> Matrix:
    """The same columns, with the sign that makes the largest element of each positive."""
    return columns * [math.copysign(1, max(column, key=abs)) for column in columns.T]


# -- what holds for all ------------------------------------------------------------------------


@given(seed=st.integers(0, 99), ranks=RANKS, weights=WEIGHTS, name=st.sampled_from(CORES))
@settings(max_examples=60, deadline=None)
def test_a_core_of_all_elements_is_the_sum(
    seed: int, ranks: list[int], weights: list[float], name: str
) -> None:
    """With a density of 1, what elects nothing is the weighted sum: nothing is lost on the way."""
    read = reads(seed, ranks, weights)
    if not METHODS[name].elects:
        terms = terms_of(read)
        bound = sum(np.linalg.norm(term) for term in terms)
        assert np.linalg.norm(combined(read, name, density=1) - sum(terms)) < 2e-6 * bound


@given(seed=st.integers(0, 99), rank=st.integers(1, 4), weight=st.sampled_from([1.0, 0.5, -2.0]))
@settings(max_examples=30, deadline=None)
def test_of_one_adapter(seed: int, rank: int, weight: float) -> None:
    """tsv of one adapter is the nearest of its rank, svc and wudi_ridge are the adapter, and iso_c
    and iso_cts make its singular values equal."""
    read = reads(seed, [rank], [weight])
    (term,) = terms_of(read)
    u, s, v = np.linalg.svd(term)
    for asked in range(1, rank + 1):
        near(combined(read, "tsv", asked), u[:, :asked] @ np.diag(s[:asked]) @ v[:asked])
    for name in ("svc", "wudi_ridge"):
        near(combined(read, name), term)
    for name in ("iso_c", "iso_cts"):
        near(combined(read, name), s[:rank].mean() * u[:, :rank] @ v[:rank])


@given(seed=st.integers(0, 99), ranks=RANKS, weights=WEIGHTS)
@settings(max_examples=30, deadline=None)
def test_singular_values_of_iso_are_equal(
    seed: int, ranks: list[int], weights: list[float]
) -> None:
    """All singular values of iso_c and iso_cts are one number, as many as the rank."""
    read = reads(seed, ranks, weights)
    for name in ("iso_c", "iso_cts"):
        values = np.linalg.svd(combined(read, name), compute_uv=False)
        rank = min(sum(len(one.down) for one in read), 12)
        np.testing.assert_allclose(values[:rank], values[0], rtol=1e-5)
        assert (values[rank:] < 1e-5 * values[0]).all()


@given(
    seed=st.integers(0, 99), ranks=RANKS, weights=WEIGHTS, order=st.randoms(use_true_random=False)
)
@settings(max_examples=30, deadline=None)
def test_order_says_nothing(seed: int, ranks: list[int], weights: list[float], order: Any) -> None:
    """Adapters in another order give the same, but for rounding and draws."""
    read = reads(seed, ranks, weights)
    turned = [*read]
    order.shuffle(turned)
    asked = {"ties_core": {"density": 0.5}, "magnitude_prune_core": {"density": 0.5}}
    for name in [*SPECTRA, *asked]:
        more = asked.get(name, {})
        near(combined(turned, name, **more), combined(read, name, **more), 2e-5)


@given(seed=st.integers(0, 99), weights=WEIGHTS)
@settings(max_examples=20, deadline=None)
def test_what_does_not_overlap_is_added(seed: int, weights: list[float]) -> None:
    """Differences without a row or column space in common are added: by tsv, by svc and by
    wudi_ridge none disturbs another."""
    read = []
    for number, one in enumerate(reads(seed, (2, 3, 2), weights)):
        up, down = one.up.copy(), one.down.copy()
        up[np.arange(12) // 4 != number] = 0
        down[:, np.arange(17) // 6 != number] = 0
        read.append(Read(down, up, one.scale, one.weight, number))
    for name in ("tsv", "svc", "wudi_ridge"):
        near(combined(read, name), sum(terms_of(read)))


def test_equal_adapters_count_once() -> None:
    """tsv of two equal adapters is one of them, and svc halves what their sum counts twice: no
    direction is made of rounding."""
    (one,) = reads(6, [3], [1.0])
    pair = [one, Read(one.down, one.up, one.scale, one.weight, 1)]
    (term,) = terms_of([one])
    near(combined(pair, "tsv"), term)
    near(combined(pair, "svc"), term)
    u, s, v = np.linalg.svd(term)
    near(combined(pair, "iso_c", 3), 2 * s[:3].mean() * u[:, :3] @ v[:3])


def test_a_direction_that_two_adapters_share_counts_once() -> None:
    """Where the largest directions are one, no other takes the place of the second."""
    pair = reads(6, [2, 2], [1.0, 1.0])
    for number, one in enumerate(pair):
        # Row and column 0 are the first direction of both; each has a small one of its own.
        for side in (one.up, one.down.T):
            side[:] = 0
            side[0, 0], side[1 + number, 1] = 4, 1
    wanted = np.zeros((12, 17))
    wanted[0, 0] = 8
    near(combined(pair, "tsv", 2), wanted)


def test_adapters_that_cancel_and_adapters_of_zeros() -> None:
    """A sum of nothing is nothing, and an adapter that was never trained disturbs none."""
    (one,) = reads(7, [3], [1.0])
    against = Read(one.down, one.up, one.scale, -1.0, 1)
    for name in ("svc", "iso_c", "wudi_ridge"):
        assert np.linalg.norm(combined([one, against], name)) < 1e-5
    empty = Read(one.down, np.zeros_like(one.up), one.scale, 1.0, 1)
    (term,) = terms_of([one])
    for name in ("tsv", "svc", "wudi_ridge"):
        near(combined([one, empty], name), term)
        assert not combined([empty], name).any()
    assert not combined([empty], "iso_c").any()
    assert not combined([empty], "iso_cts").any()
    assert not combined([empty], "ties_core", density=0.5).any()


def test_a_large_ridge_is_the_sum() -> None:
    """wudi_ridge goes to the sum as the ridge grows, whatever the size of the differences, and a
    small one leaves less interference."""
    read = reads(8, (3, 4, 2), (1.0, 0.5, 2.0))
    terms = terms_of(read)

    def interference(found: Matrix) -> float:
        shares = ((np.linalg.norm((found - t) @ t.T) / np.linalg.norm(t)) ** 2 for t in terms)
        return float(sum(shares))

    near(combined(read, "wudi_ridge", ridge=1e9), sum(terms))
    found = [combined(read, "wudi_ridge", ridge=ridge) for ridge in (0.1, 1, 10, 100)]
    assert sorted(map(interference, found)) == [*map(interference, found)]
    assert interference(found[-1]) < interference(sum(terms))
    small = [Read(one.down, one.up, 1e-3 * one.scale, one.weight, k) for k, one in enumerate(read)]
    near(combined(small, "wudi_ridge", ridge=1), 1e-3 * found[1])


# -- fine-tunes --------------------------------------------------------------------------------

LAYER, NORM = "model.layers.0.self_attn.q_proj", "model.norm"
SHAPES: dict[str, tuple[int, ...]] = {
    f"{LAYER}.weight": (60, 40),
    f"{NORM}.weight": (40,),
    f"{LAYER}.bias": (60,),
}
TASKS = {"math": 1.0, "code": 0.5, "law": -0.25}


def tuned(seed: int) -> dict[str, Any]:
    """A model; seed 0 is the base, and others differ from it by a matrix of rank 2."""
    rng = np.random.default_rng(0)
    found = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    if seed:
        rng = np.random.default_rng(seed)
        for values in found.values():
            left = rng.standard_normal((len(values), 2))
            values[...] += 0.1 * left @ rng.standard_normal((2, *values.shape[1:]))
    return {name: values.astype(np.float32) for name, values in found.items()}


def changes(task: str) -> dict[str, Any]:
    base, own = tuned(0), tuned(1 + [*TASKS].index(task))
    return {name: own[name].astype(np.float64) - base[name] for name in base}


def build(root: Path) -> None:
    """A store of a base and three fine-tunes, each extracted."""
    with Store.init(root / "store", block_size=BLOCK) as store:
        for number, name in enumerate(("base", *TASKS)):
            adapters.write(root / name, tuned(number), {"config.json": {}}, "model")
            store.add(root / name, name=name)
        for name in TASKS:
            store.extract_lora(name, "base", name=f"lora/{name}", rank=2, dtype="float32")


@pytest.fixture
def store(copied: Path) -> Iterator[Store]:
    with Store.open(copied / "store") as store:
        yield store


EXPERTS = {f"lora/{name}": weight for name, weight in TASKS.items()}


def applied(store: Store, adapter: str) -> dict[str, Any]:
    request = MergeRequest(base="base", experts=[adapter], method="task_arithmetic")
    store.merge(store.plan(request), name="applied")
    return {name: store["applied"].tensor(name) for name in SHAPES}


@pytest.mark.parametrize("method", ["cat", "svd", "tsv", "ties_core"])
def test_fine_tunes_are_extracted_and_combined(store: Store, method: str) -> None:
    """Norms and biases are the base's and the weighted sum of their differences, their mean for
    methods of spectra, or what the method makes of elements; a merge of the result has them."""
    more: dict[str, Any] = {"parameters": {"density": 1.0}} if method == "ties_core" else {}
    if method == "svd":
        more["rank"] = 6
    report = store.combine_adapters(EXPERTS, method, name="all", **more)
    assert (report.whole, report.products, report.remarks) == (2, 1, ())
    assert [one.role for one in store.show("all").parents] == ["base", *["expert"] * 3]
    config = json.loads(store["all"].read("adapter_config.json"))
    assert (config["bias"], config["modules_to_save"]) == ("all", [NORM])
    assert f"{PREFIX}{LAYER}.base_layer.bias" in store["all"].tensor_names()
    found, base = applied(store, "all"), tuned(0)
    for name in (f"{NORM}.weight", f"{LAYER}.bias"):
        parts = [changes(task)[name].astype(np.float32) for task in TASKS]
        if method == "ties_core":
            wanted = united(parts, [*TASKS.values()], "total")
        else:
            wanted = sum(w * part for w, part in zip(TASKS.values(), parts, strict=True))
            wanted = wanted / (3 if method == "tsv" else 1)
        np.testing.assert_allclose(found[name], base[name] + wanted, atol=1e-6)
    if method in ("cat", "svd"):
        name = f"{LAYER}.weight"
        total = sum(weight * changes(task)[name] for task, weight in TASKS.items())
        np.testing.assert_allclose(found[name], base[name] + total, atol=1e-5)
    assert store.fsck(read_data=True).problems == ()


def test_of_one_fine_tune_the_tensors_are_its(store: Store) -> None:
    """What one adapter has whole comes back with its bits, to the rounding of a difference."""
    store.combine_adapters(["lora/math"], "tsv", name="one")
    found, own = applied(store, "one"), tuned(1)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], own[name], atol=2e-6)


def test_only_some_have_a_tensor_whole(store: Store, copied: Path) -> None:
    """Who left a tensor as it was counts with a difference of zero; a bias below a product of
    another adapter gets the name that PEFT has for it there."""
    base = tuned(0)
    plain = {**base, f"{LAYER}.bias": base[f"{LAYER}.bias"] + np.float32(0.5)}
    plain[f"{NORM}.weight"] = base[f"{NORM}.weight"]
    extra = Adapter({"model.layers.0.mlp": (np.ones((4, 1), "f4"), np.ones((1, 4), "f4"))})
    with_mlp = {**base, "model.layers.0.mlp.weight": np.zeros((4, 4), np.float32)}
    adapters.write(copied / "wide", with_mlp, {"config.json": {}}, "model")
    store.add(copied / "wide", name="wide")
    extra.whole[f"{LAYER}.bias"] = plain[f"{LAYER}.bias"]
    store.add(extra.write(copied / "extra"), name="extra", base="wide")
    experts = {"extra": 1.0, "lora/math": 1.0}
    report = store.combine_adapters(experts, "svd", name="both", base="wide")
    assert (report.whole, report.of_some) == (2, 2)
    (remark,) = report.remarks
    assert remark == "lora/math was added as an adapter of base"
    names = store["both"].tensor_names()
    assert f"{PREFIX}{LAYER}.base_layer.bias" in names
    assert f"{PREFIX}{LAYER}.bias" not in names
    found = store["both"].tensor(f"{PREFIX}{LAYER}.base_layer.bias")
    wanted = base[f"{LAYER}.bias"] + 0.5 + changes("math")[f"{LAYER}.bias"]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_base_must_be_known(store: Store, copied: Path) -> None:
    """Whole tensors are refused without their base, with several, with a base that they do not
    fit, and beside a product for the same tensor; the error says what to give."""

    def fails(error: Any, *told: str, experts: Any, **more: Any) -> None:
        with pytest.raises(error) as found:
            store.combine_adapters(experts, "cat", name="mixed", **more)
        text = f"{found.value.where}: {found.value.what} ({found.value.hint})"
        for words in told:
            assert words in text
        assert "mixed" not in store

    store.checkout("lora/math", copied / "out")
    config = json.loads((copied / "out/adapter_config.json").read_text())
    (copied / "out/adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "nobody/knows"})
    )
    store.add(copied / "out", name="alone")
    fails(Incompatible, "alone: has tensors", "is not known", "base=REF", experts=["alone"])
    store.combine_adapters({"alone": 1.0, "lora/code": 1.0}, "cat", name="given", base="base")
    other = tuned(0)
    other[f"{NORM}.weight"] = other[f"{NORM}.weight"] + np.float32(1)
    adapters.write(copied / "other", other, {"config.json": {}}, "model")
    store.add(copied / "other", name="other")
    store.extract_lora("law", "other", name="lora/other", rank=2)
    two = ["lora/math", "lora/other"]
    fails(Incompatible, "lora/math of base, lora/other of other", "base=REF", experts=two)
    product = Adapter({LAYER: (np.ones((60, 1), "f4"), np.ones((1, 40), "f4"))})
    store.add(product.write(copied / "product"), name="product", base="base")
    short = Adapter(
        {LAYER: (np.ones((60, 1), "f4"), np.ones((1, 40), "f4"))},
        whole={f"{NORM}.weight": np.ones(3, np.float32)},
    )
    store.add(short.write(copied / "short"), name="short")
    fails(Incompatible, "short", "[3]", "[40]", experts=["short"], base="base")
    fits = {**tuned(0), "extra.weight": np.ones((5, 4), np.float32)}
    adapters.write(copied / "fits", fits, {"config.json": {}}, "model")
    store.add(copied / "fits", name="fits")
    one = Adapter({"extra": (np.ones((5, 1), "f4"), np.ones((1, 4), "f4"))})
    one.whole[f"{LAYER}.weight"] = tuned(1)[f"{LAYER}.weight"]
    store.add(one.write(copied / "one"), name="one")
    both = ["one", "product"]
    fails(Incompatible, f"has {LAYER}.weight whole, and product", experts=both, base="fits")
    huge = Adapter({LAYER: (np.ones((60, 1), "f4"), np.ones((1, 40), "f4"))})
    huge.whole[f"{NORM}.weight"] = np.full(40, 3e38, np.float32)
    store.add(huge.write(copied / "huge"), name="huge")
    fails(Incompatible, "not finite", experts={"huge": 4.0}, base="base")
    plan = store.plan(MergeRequest(base="base", experts=["math"], method="task_arithmetic"))
    store.merge(plan, name="virtual", virtual=True)
    fails(BadRequest, "is a virtual merge", experts=["lora/math"], base="virtual")


def test_a_rank_that_is_part_of_the_formula_leaves_nothing_out(store: Store) -> None:
    """tsv keeps fewer directions of each: that is another result, and not one that lacks some."""
    shared = store.combine_adapters(EXPERTS, "tsv", name="shared", rank=3)
    assert (shared.relative_error, shared.tensors) == (None, ())
    cut = store.combine_adapters(EXPERTS, "svc", name="cut", rank=3)
    assert cut.relative_error is not None
    assert cut.relative_error > 0.01


def test_a_card_says_the_base_that_was_read(store: Store) -> None:
    """The command of the card makes the same adapter of the same contents."""
    store.combine_adapters(EXPERTS, "tsv", name="all", rank=3)
    card = store["all"].read("README.md").decode()
    content = store.show("base").manifest.hex()
    assert f"--method tsv --rank 3 --base {content} --name REF" in card


def test_on_the_command_line(store: Store, copied: Path) -> None:
    """It says what was made by which linear algebra, and takes the parameters of each method."""
    store.close()
    mstore = Program(copied / "store")
    experts = [word for name in EXPERTS for word in ("--expert", name)]
    told = mstore.succeed("combine-adapters", *experts, "--method", "tsv", "--name", "all").out
    assert "made with" in told
    assert "numpy" in told
    assert "stored whole" in told
    for method, word in (
        ("svc", "alpha=0.5"),
        ("iso_cts", "common_space_fraction=0.5"),
        ("wudi_ridge", "ridge=2.0"),
        ("ties_core", "density=0.5"),
    ):
        line = ("combine-adapters", *experts, "--method", method, "--param", word, "--name", "all")
        assert word in mstore.succeed(*line, "--json").document["method"]
    line = ("combine-adapters", *experts, "--method", "tsv", "--rank", "2", "--name", "all")
    few = mstore(*line)
    assert few.status
    assert "3 adapters cannot share a rank of 2" in few.err
    assert "--rank 3" in few.err


@pytest.mark.rest
def test_the_page(store: Store, copied: Path) -> None:
    """The commands of docs/howto/spectra.md work, in the page's order."""
    store.close()
    mstore = Program(copied / "store")
    lines = [*shell_lines((ROOT / "docs" / "howto" / "spectra.md").read_text())]
    assert len(lines) == 5
    for line in lines:
        mstore.succeed(*shlex.split(line)[1:])


def test_bad_parameters(store: Store) -> None:
    """Values out of range are refused by name."""
    for method, wrong in (
        ("svc", {"alpha": 0}),
        ("iso_cts", {"common_space_fraction": 1.5}),
        ("wudi_ridge", {"ridge": 0}),
        ("tsv", {"ridge": 1}),
    ):
        with pytest.raises(BadRequest, match=next(iter(wrong))):
            store.combine_adapters(EXPERTS, method, name="no", parameters=wrong)


# -- machines ----------------------------------------------------------------------------------

_EXTRACT = """
import sys
from mstore import Store
with Store.open(sys.argv[1]) as store:
    report = store.extract_lora("math", "base", name=sys.argv[2], rank=2, dtype="float32")
    print(report.linear_algebra)
"""


def test_another_processor_says_so(store: Store, copied: Path) -> None:
    """Factors of two kinds of processors are near each other, and each report says which it was;
    their bits may differ, so what is stored is what counts."""
    store.close()
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    if platform.machine() != "x86_64" or "openblas" not in blas:
        pytest.skip("no OpenBLAS that can be told which of these processors to compute for")
    said = {}
    for kind in ("Haswell", "Prescott"):
        done = subprocess.run(
            [sys.executable, "-c", _EXTRACT, str(copied / "store"), f"by/{kind}"],
            env={**os.environ, "OPENBLAS_CORETYPE": kind},
            capture_output=True,
            text=True,
            check=True,
        )
        said[kind] = done.stdout.strip()
    assert "(Haswell, " in said["Haswell"]
    assert said["Haswell"] != said["Prescott"]
    with Store.open(copied / "store") as opened:
        one, other = (applied(opened, f"by/{kind}") for kind in said)
    for name in SHAPES:
        np.testing.assert_allclose(one[name], other[name], atol=1e-5)


def test_a_merge_by_one_of_them_is_told_where_it_is() -> None:
    """The names that only adapters have are known to merges, which say what to call."""
    from mstore.merge.methods import registry

    assert set(METHODS) - set(registry.METHODS) == registry.OF_ADAPTERS
    for name in ("tsv", "ties_core"):
        with pytest.raises(BadRequest, match="unknown method") as refused:
            registry.find(name)
        assert "combine_adapters" in str(refused.value.hint)
