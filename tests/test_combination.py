"""Combinations: one adapter made of several, against a reference that holds whole matrices."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import adapters
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import reference
import yaml
from adapters import PREFIX, Adapter, Array
from cli_runs import Program
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import BLOCK

from mstore import MergeRequest, Store
from mstore.merge.combination import products
from mstore.merge.combination.methods import METHODS
from mstore.merge.combination.products import Read, joined
from mstore.terms.errors import BadRequest, Incompatible, MstoreError

Single = npt.NDArray[np.float32]
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
SHAPES = {Q: (90, 140), UP: (200, 64)}
SEED = 5
WEIGHTS = {"one": 0.75, "two": -0.5, "three": 1.25}
PEFTS = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
FACTORS = [METHODS[name] for name in PEFTS]
PRODUCTS = [METHODS[name] for name in ("svd", *(f"{name}_svd" for name in PEFTS[1:]))]


def drawn(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def adapter(
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = (Q, UP),
    dtype: Any = np.float32,
    **settings: Any,
) -> Adapter:
    factors = {
        module: (
            drawn(seed + 10 * number, SHAPES[module][0], rank, dtype=dtype),
            drawn(seed + 10 * number + 5, rank, SHAPES[module][1], dtype=dtype),
        )
        for number, module in enumerate(modules)
    }
    return Adapter(factors, settings={"lora_alpha": 3, **settings})


class Family:
    """A store, and the adapters in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        where = root / "store"
        self.store = Store.open(where) if where.exists() else Store.init(where, block_size=BLOCK)
        self.adapters: dict[str, Adapter] = {}

    def add(self, name: str, one: Adapter, base: str | None = None) -> None:
        self.adapters[name] = one
        self.store.add(one.write(self.root / name), name=name, base=base)

    def combine(
        self, method: str, experts: Mapping[str, float] = WEIGHTS, **more: Any
    ) -> dict[str, tuple[Single, Single]]:
        """Combine them as `mixed`, and return (up, down) by module as float32."""
        self.store.combine_adapters(experts, method, name="mixed", **more)
        return factors_of(self.store, "mixed")


def factors_of(store: Store, ref: str) -> dict[str, tuple[Single, Single]]:
    snapshot = store[ref]
    return {
        module: (
            reference.single(snapshot.tensor(f"{PREFIX}{module}.lora_B.weight")),
            reference.single(snapshot.tensor(f"{PREFIX}{module}.lora_A.weight")),
        )
        for module in SHAPES
        if f"{PREFIX}{module}.lora_A.weight" in snapshot.tensor_names()
    }


def product(one: Adapter, module: str) -> npt.NDArray[np.float64]:
    """What an adapter adds to a module's weights."""
    up, down = (reference.single(side).astype(np.float64) for side in one.factors[module])
    config = one.config()
    rank = down.shape[0]
    root = math.sqrt(rank) if config.get("use_rslora") else rank
    return config["lora_alpha"] / root * (up @ down)


def build(root: Path) -> None:
    """A store of three adapters."""
    made = Family(root)
    for number, name in enumerate(WEIGHTS):
        made.add(name, adapter(number))
    made.store.close()


@pytest.fixture
def family(copied: Path) -> Iterator[Family]:
    made = Family(copied)
    made.adapters |= {name: adapter(number) for number, name in enumerate(WEIGHTS)}
    yield made
    made.store.close()


# -- the reference -----------------------------------------------------------------------------


def kept(values: Single, select: str, density: float, position: int, name: str) -> Single:
    """The elements that count, and zeros."""
    flat = values.reshape(-1)
    if select == "largest":
        # Stable: of equal ones the first.
        order = np.argsort(-np.abs(flat), kind="stable")
        found = np.zeros_like(flat)
        chosen = order[: int(density * flat.size)]
        found[chosen] = flat[chosen]
    elif select == "drawn":
        draws = reference.draws(SEED, position, name, flat.size)
        found = np.where(draws < round(density * 2**32), flat, np.float32(0)) / np.float32(density)
    else:
        found = flat
    return found.reshape(values.shape)


def united(parts: Sequence[Single], weights: Sequence[float], sign: str | None) -> Single:
    """Element by element, one adapter after the other."""
    total = np.zeros(parts[0].shape, np.float32)
    count = np.zeros(parts[0].shape, np.float32)
    votes = np.zeros(parts[0].shape, np.float32)
    for part in parts:
        votes += np.sign(part) if sign == "frequency" else part
    for part, weight in zip(parts, weights, strict=True):
        counts = part != 0
        if sign is not None:
            counts &= (part > 0) == (votes >= 0)
        total += np.where(counts, np.float32(weight) * part, np.float32(0))
        count += counts
    return total if sign is None else total / np.maximum(count, 1)


def parameters_of(method: Any, sign: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "density" in method.parameters:
        found["density"] = 0.3
    if method.elects:
        found["majority_sign_method"] = sign
    if "seed" in method.parameters:
        found["seed"] = SEED
    return found


# -- factors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["total", "frequency"])
@pytest.mark.parametrize("method", FACTORS, ids=lambda one: one.name)
def test_factors_are_the_references(family: Family, method: Any, sign: str) -> None:
    """Each method of factors gives the reference's bits: A has the sign of the weight."""
    parameters = parameters_of(method, sign)
    found = family.combine(method.name, parameters=parameters)
    for module in SHAPES:
        for side, name in enumerate(("lora_B", "lora_A")):
            roots = [math.sqrt(abs(weight) * 3 / 4) for weight in WEIGHTS.values()]
            if name == "lora_A":
                roots = [
                    math.copysign(root, weight)
                    for root, weight in zip(roots, WEIGHTS.values(), strict=True)
                ]
            parts = [
                kept(
                    family.adapters[expert].factors[module][side],
                    method.select.value,
                    parameters.get("density", 1.0),
                    position,
                    f"{PREFIX}{module}.{name}.weight",
                )
                for position, expert in enumerate(WEIGHTS)
            ]
            wanted = united(parts, roots, sign if method.elects else None)
            assert found[module][side].tobytes() == wanted.tobytes()


def by_lorax(
    factors: Sequence[Array], weights: Sequence[float], method: Any, sign: str, name: str
) -> npt.NDArray[np.float64]:
    """One factor of LoRAX's merge of adapters (server/lorax_server/utils/merges at a7394ba3).

    It gives each factor the whole weight, and does not divide what a draw keeps by the density.
    """
    parts = []
    for position, factor in enumerate(factors):
        one = kept(factor, method.select.value, DENSITY, position, name).astype(np.float64)
        parts.append(one * DENSITY if method.select.value == "drawn" else one)
    weighted = [weight * part for weight, part in zip(weights, parts, strict=True)]
    if not method.elects:
        return np.sum(weighted, axis=0)
    votes = np.sum([np.sign(part) if sign == "frequency" else part for part in parts], axis=0)
    agree = [np.sign(part) == np.where(votes >= 0, 1, -1) for part in parts]
    total = np.sum([one * part for one, part in zip(agree, weighted, strict=True)], axis=0)
    return total / np.maximum(np.sum(agree, axis=0), 1)


DENSITY = 0.4


@pytest.mark.parametrize("sign", ["total", "frequency"])
@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear", "dare_ties"])
def test_lorax(family: Family, method: str, sign: str) -> None:
    """LoRAX's `merge_strategy` is the method of that name, with the weights of docs/howto/adapters:
    the product has LoRAX's numbers, which it scales as its first adapter."""
    family.add("scaled", adapter(20, lora_alpha=7))
    theirs = {"one": 0.75, "scaled": 0.5, "two": 0.25}
    scales = {name: family.adapters[name].config()["lora_alpha"] / 4 for name in theirs}
    known = METHODS[method]
    thinned = DENSITY if known.select.value == "drawn" else 1.0
    weights = {
        name: (weight * thinned) ** 2 * scales["one"] / scales[name]
        for name, weight in theirs.items()
    }
    told = {"density": DENSITY, "majority_sign_method": sign, "seed": SEED}
    found = family.combine(
        method, weights, parameters={name: told[name] for name in known.parameters}
    )
    for module, (up, down) in found.items():
        merged = [
            by_lorax(
                [family.adapters[name].factors[module][side] for name in theirs],
                [*theirs.values()],
                known,
                sign,
                f"{PREFIX}{module}.lora_{'BA'[side]}.weight",
            )
            for side in (0, 1)
        ]
        wanted = scales["one"] * merged[0] @ merged[1]
        assert np.abs(up.astype(np.float64) @ down - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_linear_of_one_is_the_adapter(family: Family) -> None:
    """With a weight of 1, the product is that of the adapter, scale and all."""
    found = family.combine("linear", {"two": 1})
    for module, (up, down) in found.items():
        wanted = product(family.adapters["two"], module)
        np.testing.assert_allclose(up @ down, wanted, atol=1e-5)


def test_equal_magnitudes_keep_the_first(family: Family) -> None:
    """Of equal elements at the threshold the first are kept, as many as the density says."""
    one = adapter(8, modules=[Q])
    one.factors[Q] = (np.ones((90, 4), np.float32), np.ones((4, 140), np.float32))
    family.add("even", one)
    up, down = family.combine("magnitude_prune", {"even": 1}, parameters={"density": 0.35})[Q]
    for side in (up, down):
        count = int(0.35 * side.size)
        assert side.reshape(-1)[:count].all()
        assert not side.reshape(-1)[count:].any()


def test_a_density_below_one_element_keeps_none(family: Family) -> None:
    """As in PEFT, the number of elements is rounded down, to none at last."""
    found = family.combine("magnitude_prune", parameters={"density": 1e-5})
    assert not any(side.any() for pair in found.values() for side in pair)


# -- products ----------------------------------------------------------------------------------


@given(
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    weights=st.lists(st.floats(-4, 4, width=32), min_size=4, max_size=4),
    scale=st.sampled_from([0.25, 1.0, 2.0]),
)
@settings(max_examples=50, deadline=None)
def test_joined_factors_have_the_sum_of_the_products(
    ranks: list[int], weights: list[float], scale: float
) -> None:
    """The product of joined factors is the weighted sum of the products, for any ranks and
    weights: `cat` loses nothing but the rounding of weight times element."""
    read = [
        Read(drawn(2 * k, rank, 7), drawn(2 * k + 1, 6, rank), scale, weight, k)
        for k, (rank, weight) in enumerate(zip(ranks, weights, strict=False))
    ]
    found = joined(read)
    down, up = found.down, found.up
    assert down.shape == (sum(ranks), 7)
    terms = [
        weight * scale * (one.up.astype(np.float64) @ one.down)
        for one, weight in zip(read, weights, strict=False)
    ]
    bound = sum(
        abs(weight) * scale * (np.abs(one.up).astype(np.float64) @ np.abs(one.down))
        for one, weight in zip(read, weights, strict=False)
    )
    # A denormal product of weight and element loses more.
    assert (np.abs(up.astype(np.float64) @ down - sum(terms)) <= 2e-7 * bound + 1e-40).all()


def test_cat_of_other_ranks_scales_and_modules(family: Family) -> None:
    """Ranks, rsLoRA, patterns and modules may differ: the product of each module is the sum of
    those that have it, and every product has one rank."""
    family.add("wide", adapter(20, rank=9, use_rslora=True))
    family.add("some", adapter(21, rank=2, modules=[UP]))
    wide, some, one = (family.adapters[name] for name in ("wide", "some", "one"))
    report = family.store.combine_adapters(
        {"wide": 2, "some": 0.5, "one": -1}, "cat", name="mixed", message="three"
    )
    assert (report.rank, report.products, report.of_some) == (15, 2, 1)
    found = factors_of(family.store, "mixed")
    for module, wanted in {
        Q: 2 * product(wide, Q) - product(one, Q),
        UP: 2 * product(wide, UP) + 0.5 * product(some, UP) - product(one, UP),
    }.items():
        up, down = found[module]
        assert (up.shape[1], down.shape[0]) == (15, 15)
        np.testing.assert_allclose(up @ down, wanted, atol=1e-4)
    assert not found[Q][1][13:].any()
    config = json.loads(family.store["mixed"].read("adapter_config.json"))
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (15, 15, False)
    assert (config["rank_pattern"], config["target_modules"]) == ({}, sorted(SHAPES))


def test_a_rank_is_no_larger_than_a_matrix(family: Family) -> None:
    """A rank that no matrix of the adapters can have becomes the largest that one can, with a
    remark."""
    most = max(min(shape) for shape in SHAPES.values())
    report = family.store.combine_adapters(WEIGHTS, "svd", name="mixed", rank=most + 5)
    assert report.rank == most
    assert report.remarks == (
        f"the rank is {most}: no matrix of the adapters can have the rank {most + 5}",
    )


@pytest.mark.parametrize("rank", [2, 8, 30])
def test_svd_is_the_nearest_and_tells_what_it_leaves(family: Family, rank: int) -> None:
    """The truncated sum is as near as the exact decomposition's, and the report says how near, in
    all and by matrix; a rank above the sum's leaves nothing."""
    report = family.store.combine_adapters(WEIGHTS, "svd", name="mixed", rank=rank)
    found = factors_of(family.store, "mixed")
    squares = left = 0.0
    shares = {}
    for module, (up, down) in found.items():
        total = sum(
            weight * product(family.adapters[name], module) for name, weight in WEIGHTS.items()
        )
        values = np.linalg.svd(total, compute_uv=False)
        assert up.shape[1] == rank
        own = np.linalg.norm(total - up.astype(np.float64) @ down)
        assert own == pytest.approx(np.linalg.norm(values[rank:]), rel=1e-5, abs=1e-5)
        shares[f"{module}.weight"] = own / np.linalg.norm(values)
        squares += float((values**2).sum())
        left += float(own) ** 2
    for one in report.tensors:
        assert one.relative_error == pytest.approx(shares[one.tensor], rel=1e-5, abs=1e-7)
    assert report.relative_error == pytest.approx(math.sqrt(left / squares), rel=1e-5, abs=1e-7)
    assert (report.relative_error < 1e-6) == (rank > 12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sign", ["total", "frequency"])
@pytest.mark.parametrize("method", PRODUCTS, ids=lambda one: one.name)
def test_products_are_the_references(
    family: Family, monkeypatch: pytest.MonkeyPatch, method: Any, sign: str
) -> None:
    """Each method of products truncates the reference's matrix, whatever the runs that it comes
    in, and the report says what that leaves."""
    parameters = parameters_of(method, sign)
    reports = []
    for run in (1 << 22, 1000):
        monkeypatch.setattr(products, "_RUN", run)
        reports.append(
            family.store.combine_adapters(
                WEIGHTS,
                method.name,
                name=f"by {run}".replace(" ", "-"),
                parameters=parameters,
                rank=50,
            )
        )
    assert reports[0].tensors == reports[1].tensors
    found = factors_of(family.store, "by-1000")
    for module, pair in factors_of(family.store, f"by-{1 << 22}").items():
        assert [one.tobytes() for one in pair] == [one.tobytes() for one in found[module]]
    for module, (up, down) in found.items():
        parts = [
            kept(
                adapters.added(
                    np.zeros(SHAPES[module], np.float32),
                    *family.adapters[name].factors[module],
                    0.75,
                ),
                method.select.value,
                parameters.get("density", 1.0),
                position,
                f"{module}.weight",
            )
            for position, name in enumerate(WEIGHTS)
        ]
        wanted = united(parts, list(WEIGHTS.values()), sign if method.elects else None)
        values = np.linalg.svd(wanted.astype(np.float64), compute_uv=False)
        (share,) = [one for one in reports[0].tensors if one.tensor == f"{module}.weight"]
        left = np.linalg.norm(values[50:]) / np.linalg.norm(values)
        assert share.relative_error == pytest.approx(left, rel=1e-4, abs=1e-6)
        own = np.linalg.norm(wanted - up @ down) / np.linalg.norm(values)
        assert own == pytest.approx(left, rel=1e-4, abs=1e-6)


def test_clamp(family: Family) -> None:
    """The factors of the result are clamped to a quantile of their elements, and its negative;
    what that leaves out counts."""
    before = family.combine("svd", rank=3)
    plain = family.store.combine_adapters(WEIGHTS, "svd", name="plain", rank=3)
    found = family.combine("svd", rank=3, parameters={"clamp": 0.9})
    for module, pair in before.items():
        high = np.quantile(np.concatenate([side.reshape(-1) for side in pair]), 0.9)
        for side, one in zip(pair, found[module], strict=True):
            np.testing.assert_allclose(one, np.clip(side, -high, high), rtol=1e-6)
    clamped = family.store.combine_adapters(
        WEIGHTS, "svd", name="mixed", rank=3, parameters={"clamp": "0.9"}
    )
    assert not clamped.new_snapshot
    assert clamped.relative_error is not None
    assert plain.relative_error is not None
    assert clamped.relative_error > plain.relative_error


# -- the result --------------------------------------------------------------------------------


def test_a_merge_applies_the_result(family: Family, tmp_path: Path) -> None:
    """The result is an expert like any other; a combination of it, too, is one."""
    base = {f"{module}.weight": drawn(77, *shape) for module, shape in SHAPES.items()}
    adapters.write(tmp_path / "base", base, {"config.json": {}}, "model")
    family.store.add(tmp_path / "base", name="base")
    family.combine("cat")
    family.store.combine_adapters({"mixed": 2, "one": 1}, "cat", name="again")
    plan = family.store.plan(MergeRequest(base="base", experts=["again"], method="task_arithmetic"))
    family.store.merge(plan, name="applied")
    for module in SHAPES:
        weights = {"one": 2.5, "two": -1.0, "three": 2.5}
        wanted = base[f"{module}.weight"] + sum(
            weight * product(family.adapters[name], module) for name, weight in weights.items()
        )
        np.testing.assert_allclose(
            family.store["applied"].tensor(f"{module}.weight"), wanted, atol=1e-4
        )
    assert family.store.fsck(read_data=True).problems == ()


def test_lineage(family: Family, tmp_path: Path) -> None:
    """Parents are the base that all were added with and the adapters, and the message has the
    weights; the same combination again stores nothing; adapters of two bases are told."""
    base = {f"{module}.weight": drawn(77, *shape) for module, shape in SHAPES.items()}
    for name in ("base", "other"):
        base[f"{Q}.weight"] += 1
        adapters.write(tmp_path / name, base, {"config.json": {}}, "model")
        family.store.add(tmp_path / name, name=name)
    family.add("mine", adapter(50), "base")
    family.add("yours", adapter(51), "base")
    family.add("theirs", adapter(52), "other")
    first = family.store.combine_adapters({"mine": 1, "yours": 0.5}, "cat", name="both")
    shown = family.store.show("both")
    assert [(one.role, one.refs) for one in shown.parents] == [
        ("base", ("base",)),
        ("expert", ("mine",)),
        ("expert", ("yours",)),
    ]
    assert shown.message == "cat, rank 8: mine=1, yours=0.5"
    named = family.store.combine_adapters(["mine"], "svd", name="one", rank=2, message="a try")
    assert family.store.show("one").message == "a try (svd, rank 2: mine=1)"
    assert not named.remarks
    again = family.store.combine_adapters({"mine": 1, "yours": 0.5}, "cat", name="both")
    assert (again.new_snapshot, again.snapshot, first.remarks) == (False, first.snapshot, ())
    odd = [("mine", 1), ("mine", 0), ("yours", 1)]
    assert family.store.combine_adapters(odd, "cat", name="odd").remarks == (
        "mine has weight 0, so nothing of it is in the result",
    )
    (remark,) = family.store.combine_adapters(["mine", "mine"], "cat", name="odd").remarks
    assert remark == "mine is given more than once"
    for make in (
        lambda: family.store.combine_adapters(["mine"], "cat", name="base"),
        lambda: family.store.extract_lora("other", "base", name="a/model"),
    ):
        family.store.add(tmp_path / "base", name="a/model")
        with pytest.raises(BadRequest, match="branch of a model"):
            make()
    (remark,) = family.store.combine_adapters(["mine", "theirs"], "cat", name="all").remarks
    assert "mine of base, theirs of other" in remark
    assert [one.role for one in family.store.show("all").parents] == ["expert", "expert"]


@pytest.mark.parametrize("method", ["linear", "cat", "svd", "ties", "dare_linear"])
def test_without_weight_it_is_not_there(family: Family, method: str) -> None:
    """An adapter of weight 0 gives no rank, no module and no sign: the result is that of the
    others."""
    family.add("wide", adapter(60, rank=9))
    family.add("other", adapter(61, modules=(UP,)))
    more: dict[str, Any] = {}
    if method in ("ties", "dare_linear"):
        more["parameters"] = {"density": 0.4}
    alone = {"one": 0.75} if method == "linear" else {"other": 0.5, "two": -1.0}
    family.store.combine_adapters({**alone, "wide": 0, "three": 0}, method, name="mixed", **more)
    family.store.combine_adapters(alone, method, name="alone", **more)
    assert family.store["mixed"].manifest == family.store["alone"].manifest
    assert len(family.store.show("mixed").parents) == len(alone)


def test_its_card(family: Family, tmp_path: Path) -> None:
    """A combination has a card: its base, its adapters with weights and licences, and a command
    that makes it again; the same in any store."""
    for name, licence, seed in (("math", "mit", 70), ("code", "apache-2.0", 71)):
        path = adapter(seed, base_model_name_or_path="org/llama").write(tmp_path / name)
        card = f"---\nmodel_name: org/{name}\nlicense: {licence}\n---\n"
        (path / "README.md").write_text(card)
        family.store.add(path, name=name)
    family.store.combine_adapters(
        {"math": 1, "code": 0.5}, "ties", name="both", parameters={"density": 0.25}, dtype="float32"
    )
    family.store.checkout("both", tmp_path / "both")
    card = (tmp_path / "both" / "README.md").read_text()
    matter = yaml.safe_load(card.split("---\n")[1])
    assert matter == {
        "base_model": "org/llama",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "license": "other",
        "license_name": "see-parents",
        "tags": ["lora", "merge", "mstore"],
    }
    contents = {name: family.store.show(name).manifest.hex() for name in ("math", "code", "both")}
    assert f"| org/code | 0.5 | apache-2.0 | `{contents['code']}` |" in card
    assert "made of 2 adapters by ties" in card
    assert "licences differ (apache-2.0, mit)" in card
    assert "They are adapters of org/llama." in card
    (command,) = (line for line in card.splitlines() if line.startswith("mstore combine-adapters"))
    mstore = Program(tmp_path / "again")
    mstore.succeed("init", "--block-size", str(BLOCK))
    for name in ("math", "code"):
        mstore.succeed("add", tmp_path / name, "--name", f"mine/{name}")
    mstore.succeed(*shlex.split(command.replace("--name REF", "--name new"))[1:])
    assert mstore.succeed("show", "new", "--json").document["manifest"] == contents["both"]


def test_a_card_without_a_base(family: Family, tmp_path: Path) -> None:
    """A base that configs do not name, or name as a directory, is not in the card; one licence of
    all is that of the result."""
    for name, base in (("math", "/models/llama"), ("code", "/models/llama")):
        path = adapter(len(name), base_model_name_or_path=base).write(tmp_path / name)
        (path / "README.md").write_text("---\nlicense: mit\n---\n")
        family.store.add(path, name=name)
    family.store.combine_adapters(["math", "code"], "svd", name="both", rank=2)
    family.store.checkout("both", tmp_path / "both")
    card = (tmp_path / "both" / "README.md").read_text()
    matter = yaml.safe_load(card.split("---\n")[1])
    assert matter["license"] == "mit"
    assert "base_model" not in matter
    assert "/models" not in card
    assert "--rank 2 --name REF" in card


def test_types(family: Family) -> None:
    """Factors have the adapters' type, float32 if they have two, or the one that is asked for;
    all arithmetic is in float32, rounded once."""
    half = ml_dtypes.bfloat16
    for number in (1, 2):
        family.add(f"half{number}", adapter(30 + number, dtype=half))
    family.add("other", adapter(33, dtype=np.float16))
    for experts, dtype, wanted in (
        ({"half1": 1, "half2": 1}, None, "BF16"),
        ({"half1": 1, "other": 1}, None, "F32"),
        ({"one": 1, "two": 1}, "float16", "F16"),
    ):
        report = family.store.combine_adapters(experts, "linear", name="mixed", dtype=dtype)
        assert report.dtype == wanted
        found = factors_of(family.store, "mixed")
        exact = family.combine("linear", experts, dtype="float32")
        for module, pair in exact.items():
            for side, one in zip(pair, found[module], strict=True):
                rounded = side.astype(reference.DTYPES[wanted]).astype(np.float32)
                assert one.tobytes() == rounded.tobytes()


def test_embeddings_and_transposed_layers(tmp_path: Path) -> None:
    """Products of embeddings keep their names, and those of transposed layers their setting; base
    weights that PEFT repeats below a product stay in the result."""
    unchanged = f"{PREFIX}embed.base_layer.weight"
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "fan_in_fan_out": True}
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        down, up = f"{PREFIX}embed.lora_embedding_A", f"{PREFIX}embed.lora_embedding_B"
        sides = []
        for seed, name in enumerate(("one", "two")):
            own = {down: drawn(seed, 2, 20), up: drawn(seed + 9, 6, 2), unchanged: drawn(5, 20, 6)}
            sides.append(own)
            adapters.write(tmp_path / name, own, {"adapter_config.json": config}, "adapter_model")
            store.add(tmp_path / name, name=name)
        store.combine_adapters(["one", "two"], "cat", name="both")
        found = {name: store["both"].tensor(name) for name in store["both"].tensor_names()}
        assert found.keys() == {down, up, unchanged}
        wanted = sum(own[up] @ own[down] for own in sides)
        np.testing.assert_allclose(found[up] @ found[down], wanted, atol=1e-5)
        assert json.loads(store["both"].read("adapter_config.json"))["fan_in_fan_out"] is True
        own[unchanged] += 1
        adapters.write(tmp_path / "three", own, {"adapter_config.json": config}, "adapter_model")
        store.add(tmp_path / "three", name="three")
        with pytest.raises(Incompatible, match=r"trained on other weights of .*embed\.base_layer"):
            store.combine_adapters(["one", "three"], "cat", name="more")


# -- what is refused ---------------------------------------------------------------------------


def refused(family: Family, error: type[MstoreError], *told: str, **given: Any) -> None:
    """A combination that is refused, in these words, and publishes nothing."""
    experts = given.pop("experts", ["one", "two"])
    method = given.pop("method", "linear")
    with pytest.raises(error) as found:
        family.store.combine_adapters(experts, method, name=given.pop("name", "mixed"), **given)
    text = f"{found.value.where}: {found.value.what} ({found.value.hint})"
    for words in told:
        assert words in text
    assert "mixed" not in family.store


def test_bad_requests(family: Family) -> None:
    """Unknown methods and parameters, missing or impossible values: an error that names them."""
    no = BadRequest
    refused(family, no, "unknown method 'tie'", "did you mean ties?", method="tie")
    refused(family, no, "linear has no parameter 'density'", parameters={"density": 0.5})
    refused(family, no, "ties needs the share of elements", "0.5", method="ties")
    refused(family, no, "density must be in", method="ties", parameters={"density": 0})
    refused(family, no, "clamp must be in", method="svd", parameters={"clamp": 2})
    most = {"density": 0.5, "majority_sign_method": "most"}
    refused(family, no, "total or frequency, not 'most'", method="ties", parameters=most)
    refused(family, no, "della merges models", "methods: cat,", "Store.merge", method="della")
    refused(family, no, "follows from the adapters", "svd", rank=3)
    refused(family, no, "a rank is 1 to 4096, not 0", method="svd", rank=0)
    refused(family, no, "name of its own", name="one")
    refused(family, no, "no adapter", experts=[])
    refused(family, no, "every adapter has weight 0", experts={"one": 0, "two": 0})
    refused(family, no, "the weight of one must be a finite float32", experts={"one": 1e300})
    refused(family, no, "cannot write dtype", dtype="int8")
    refused(family, no, "experts are a list", experts="one")


def test_adapters_that_do_not_combine(family: Family, tmp_path: Path) -> None:
    """What has no meaning is refused by the name of adapter and tensor or setting, with what to do
    instead."""
    no = Incompatible
    family.add("wide", adapter(40, rank=6))
    both: dict[str, Any] = {"experts": ["one", "wide"]}
    refused(family, no, "one, wide", f"{UP} have 4, 6", "cat", "svd", **both)
    dora = adapter(41, use_dora=True)
    dora.magnitudes = {module: np.ones(shape[0], np.float32) for module, shape in SHAPES.items()}
    family.add("dora", dora)
    refused(family, no, "dora", "use_dora", "merge", experts=["one", "dora"])
    biased = adapter(42)
    biased.whole[f"{Q}.lora_B.bias"] = drawn(1, 90)
    family.add("biased", biased)
    refused(family, no, "biased", f"{Q}.lora_B.bias", "lora_bias", experts=["biased"])
    family.add("turned", adapter(43, fan_in_fan_out=True))
    refused(family, no, "turned", "fan_in_fan_out", experts=["one", "turned"])
    family.add("tied", adapter(44, ensure_weight_tying=True))
    refused(family, no, "tied", "ensure_weight_tying", experts=["tied"])
    short = adapter(45, modules=[Q])
    short.factors[Q] = (short.factors[Q][0][:50], short.factors[Q][1])
    family.add("short", short)
    refused(family, no, "short", "[50, 140]", "that of one [90, 140]", experts=["one", "short"])
    family.add("inner", Adapter({"layers.0.self_attn.q_proj": adapter(46).factors[Q]}))
    refused(family, no, "in two ways", experts=["one", "inner"])
    refused(family, no, "in two ways", experts=["inner", "one"])
    nan = adapter(48)
    nan.factors[Q][0][3, 2] = np.nan
    family.add("nan", nan)
    refused(family, no, Q, "nan has elements that are not finite", experts=["one", "nan"])
    large = adapter(49)
    large.factors[UP][1][0, 0] = 1e30
    family.add("large", large)
    refused(family, no, UP, "too large for F16", "float32", experts=["large"], dtype="float16")
    adapters.write(tmp_path / "model", {"x": drawn(0, 3, 3)}, {"config.json": {}}, "model")
    family.store.add(tmp_path / "model", name="model")
    refused(
        family, no, "model", "not a LoRA adapter", "extract_lora('model'", experts=["one", "model"]
    )
    family.add("pattern", adapter(50, rank_pattern={"q_proj": 7}))
    refused(family, no, "rank 4", "says 7", experts=["pattern"])


def test_one_tied_tensor_under_two_names(family: Family, tmp_path: Path) -> None:
    """Adapters of a tied base that change it under different names are refused: each of them
    changes both names, and a combination would have a product of its own for each."""
    base = {name: drawn(0, 40, 30) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    config = {"config.json": {"tie_word_embeddings": True}}
    adapters.write(tmp_path / "tied", base, config, "model")
    family.store.add(tmp_path / "tied", name="tied")
    for name, module in (("head", "lm_head"), ("other", "lm_head"), ("rows", "model.embed_tokens")):
        one = Adapter({module: (drawn(1, 40, 4), drawn(2, 4, 30))})
        family.add(name, one, base="tied")
    refused(family, Incompatible, "head, rows: ", "tied", experts={"head": 1.0, "rows": 1.0})
    family.combine("cat", {"head": 1.0, "other": 0.5})


@pytest.mark.parametrize("method", ["cat", "svd", "linear", "ties_svd"])
def test_no_adapter_of_infinities(
    family: Family, method: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Finite adapters whose combination float32 does not hold are refused by the name of a module,
    without a warning of numpy."""
    huge = adapter(51)
    for module in (Q, UP):
        huge.factors[module] = tuple(one * np.float32(1e30) for one in huge.factors[module])
    family.add("huge", huge)
    given = {"density": 0.5} if method == "ties_svd" else {}
    asked: dict[str, Any] = {"experts": {"huge": 1e30}, "method": method, "parameters": given}
    with pytest.raises(Incompatible, match=r"too large for F32|not finite") as refused:
        family.store.combine_adapters(name="never", **asked)
    assert refused.value.where in (Q, UP)
    assert not [one for one in recwarn if one.category is RuntimeWarning]


def test_on_the_command_line(tmp_path: Path) -> None:
    """It says what was combined and what is left out; a merge takes the result."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    tensors = {f"{module}.weight": drawn(77, *shape) for module, shape in SHAPES.items()}
    adapters.write(tmp_path / "llama", tensors, {"config.json": {}}, "model")
    mstore.succeed("add", tmp_path / "llama", "--name", "llama")
    for seed, name in enumerate(("math", "code")):
        path = adapter(seed).write(tmp_path / name)
        mstore.succeed("add", path, "--name", name, "--base", "llama")
    experts = ("--expert", "math", "--expert", "code=0.5")
    line = ("combine-adapters", *experts, "--method", "svd", "--rank", "3", "--name", "both")
    told = mstore.succeed(*line).out
    assert "combined both" in told
    assert "2 of rank 3" in told
    assert "merge --base llama --expert both" in told
    assert "checkout both DIR" in told
    assert f"{Q}.weight" in told
    document = mstore.succeed(*line, "--json").document
    assert document["new_snapshot"] is False
    assert 0.1 < document["relative_error"] < 0.9
    drawn_ones = ("--method", "dare_ties", "--param", "density=0.5", "--param", "seed=3")
    mstore.succeed("combine-adapters", *experts, *drawn_ones, "--name", "drawn")
    assert "dare_ties density=0.5 majority_sign_method=total seed=3, rank 4: math=1, code=0.5" in (
        mstore.succeed("log", "drawn").out
    )
    words = mstore("combine-adapters", *experts, "--svd-rank", "3", "--name", "wrong")
    assert "hint: --rank 3\n" in words.err
    wrong = mstore("combine-adapters", *experts, "--method", "ties", "--name", "wrong")
    assert wrong.status
    assert "--param density=0.5" in wrong.err
