"""Methods: parameters parsed strictly, coefficients rounded upward, scalars exact."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from checkpoints import write_safetensors
from cli_runs import Program
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mstore import MergeRequest, Store
from mstore.merge.methods.method import Operation
from mstore.merge.methods.model import coefficients
from mstore.merge.methods.parameters import Value, single
from mstore.merge.methods.registry import METHODS, find, names, operation
from mstore.terms.errors import BadRequest, Corrupt, Unavailable
from mstore_cli import reference
from mstore_cli.merging import method_names

PAGE = Path(__file__).resolve().parent.parent / "docs" / "merge-methods.md"

DARE = {"density": 1.0, "lambda": 1.0, "normalize": False, "rescale": True, "seed": 0}
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("method", "defaults"),
    [
        ("linear", {"normalize": True}),
        ("task_arithmetic", {"lambda": 1.0, "normalize": False}),
        ("ties", {"density": 1.0, "lambda": 1.0, "normalize": True, "by_count": False}),
        ("dare_linear", DARE),
        ("dare_ties", DARE),
        ("breadcrumbs", {"density": 1.0, "gamma": 0.01, "lambda": 1.0, "normalize": False}),
        ("breadcrumbs_ties", {"density": 1.0, "gamma": 0.01, "lambda": 1.0, "normalize": False}),
        ("karcher", {"max_iter": 10, "tol": 1e-5}),
        ("model_stock", {"filter_wise": False}),
        ("multislerp", {"around_base": True, "normalize_weights": True, "eps": 1e-8}),
        (
            "nuslerp",
            {"around_base": True, "nuslerp_flatten": True, "nuslerp_row_wise": False},
        ),
        ("passthrough", {"scale": 1.0}),
        ("arcee_fusion", {}),
        ("consensus", {"k": 2, "tall_mask_lambda": 1.0, "lambda": 1.0}),
        ("fisher", {"floor": 0.0}),
        ("safe_merge", {"threshold": 0.35, "alpha": 0.8}),
        ("emr", {}),
        ("masked", {}),
        ("pcb", {"ratio": 0.1}),
        ("add_perpendicular", {"alpha": 1.0}),
        ("train_difference", {"alpha": 1.0}),
        ("clamp", {"stiffness": 0.0}),
        ("add_cosine_a", {"alpha": 1.0}),
        ("add_cosine_b", {"alpha": 1.0}),
        ("tensor_sum", {"width": 0.5, "offset": 0.0}),
        ("geometric_median", {"max_iter": 100, "eps": 1e-6}),
        ("ram", {"epsilon": 1e-5}),
        ("sce", {"select_topk": 1.0}),
        ("ramplus_tl", {"r": 0.1, "alpha": 0.2, "epsilon": 1e-5}),
    ],
)
def test_defaults_are_filled_in(method: str, defaults: dict[str, Value]) -> None:
    """Without a word from the user, a method has exactly its documented parameters, and scale."""
    parsed = find(method).parse({})
    defaults = defaults | {"scale": 1.0}
    assert parsed == defaults
    assert {name: type(value) for name, value in parsed.items()} == {
        name: type(value) for name, value in defaults.items()
    }


def test_the_registry_names_each_method() -> None:
    """Every method is found under its own name, and the registry cannot be changed."""
    assert all(find(name) is method and name == method.name for name, method in METHODS.items())
    with pytest.raises(TypeError):
        METHODS["mine"] = METHODS["ties"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("method", "name", "given_value", "value"),
    [
        ("ties", "density", "0.2", 0.2),
        ("ties", "density", 1, 1.0),
        ("ties", "density", "1e-3", 0.001),
        ("ties", "density", np.float32(0.25), 0.25),
        ("ties", "lambda", "-0.0", 0.0),
        ("ties", "normalize", "False", False),
        ("ties", "normalize", "1", True),
        ("ties", "normalize", 1, True),
        ("ties", "normalize", 0, False),
        ("ties", "normalize", " yes ", True),
        ("dare_ties", "seed", "18446744073709551615", 2**64 - 1),
        ("dare_ties", "seed", np.int64(7), 7),
        ("dare_ties", "density", 2.0**-32, 2.0**-32),
    ],
)
def test_values_are_made_canonical(
    method: str, name: str, given_value: object, value: Value
) -> None:
    """Text and Python numbers that mean the same give the same value of the same type."""
    parsed = find(method).parse({name: given_value})[name]
    assert parsed == value
    assert type(parsed) is type(value)
    assert math.copysign(1, parsed) == math.copysign(1, value)


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        *(("ties", "density", bad) for bad in (0, "0", -0.1, 1.5, "nan", "inf", "x", None, True)),
        *(("ties", "lambda", bad) for bad in ("inf", "nan", 1e39, "", [1.0], 10**400)),
        *(("ties", "normalize", bad) for bad in ("maybe", 2, 0.0, None)),
        *(("dare_ties", "seed", bad) for bad in (-1, 2**64, 1.0, "1.0", "x", False)),
        ("dare_ties", "density", 2.0**-33),
    ],
)
def test_senseless_values_are_refused(method: str, name: str, value: object) -> None:
    """A value of the wrong kind or out of range is refused by name."""
    with pytest.raises(BadRequest, match=name):
        find(method).parse({name: value})


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    """An unknown method lists the methods; an unknown parameter lists that method's own."""
    with pytest.raises(BadRequest) as refused:
        find("tie")
    assert all(name in str(refused.value) for name in METHODS)
    with pytest.raises(BadRequest, match="normalize") as refused:
        find("linear").parse({"density": 0.5})
    assert "lambda" not in str(refused.value)
    with pytest.raises(BadRequest) as refused:
        find("linear").parse({"weight": 0.5})
    assert refused.value.hint == "experts={REF: WEIGHT}"


@pytest.mark.parametrize("name", ["svd", "cat", "dare_ties_svd"])
def test_a_method_of_adapters_is_elsewhere(name: str) -> None:
    """What only makes one adapter of several is no merge method: the error names what does that."""
    with pytest.raises(BadRequest) as refused:
        find(name)
    assert "combine_adapters" in str(refused.value.hint)


@pytest.mark.parametrize("weights", [[], [1.0, math.nan], [math.inf], [1e39], [1e400]])
def test_weights_are_finite_float32(weights: list[float]) -> None:
    """No weights, or one that is no finite float32, is refused."""
    with pytest.raises(BadRequest):
        operation("ties", {}, weights)


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_weights_that_agree_have_a_sum(method: str) -> None:
    """Where elements divide by weights that may add up beyond float32, the weights are refused: a
    quotient by infinity would leave out what all experts agree on."""
    operation("task_arithmetic", {}, [3e38, 3e38])
    with pytest.raises(BadRequest, match="sum of the weights"):
        operation(method, {}, [3e38, 3e38])


def test_linear_refuses_to_divide_by_zero() -> None:
    """Weights that add up to zero are refused by linear with normalize, and only there."""
    weights = [0.5, -0.25, -0.25]
    with pytest.raises(BadRequest, match="zero"):
        operation("linear", {}, weights)
    assert operation("linear", {"normalize": False}, weights).weights == tuple(weights)
    assert operation("task_arithmetic", {"normalize": True}, weights).divisor == 1


def test_divisor_of_each_method() -> None:
    """Sum of all weights under normalize; 1 without it, under consensus, or near zero."""
    weights = [0.1, 0.2, 0.3]
    total = np.float32(np.float32(np.float32(0.1) + np.float32(0.2)) + np.float32(0.3))
    task = {"normalize": True}
    assert operation("linear", {}, weights).divisor == total
    assert operation("task_arithmetic", task, weights).divisor == total
    assert operation("task_arithmetic", {}, weights).divisor == 1
    assert operation("ties", {}, weights).divisor == 1
    assert operation("task_arithmetic", task, [1.0, -1.0]).divisor == 1
    assert operation("task_arithmetic", task, [9e-9]).divisor == 1
    assert operation("task_arithmetic", task, [-2e-8]).divisor == single(-2e-8)
    assert operation("linear", {}, [9e-9]).divisor == single(9e-9)


@given(st.lists(singles, min_size=1, max_size=8))
def test_weights_add_up_as_float32_does(weights: list[float]) -> None:
    """The sum of weights is numpy's float32 sum taken in order, or is refused if infinite."""
    total = np.float32(weights[0])
    with np.errstate(over="ignore"):
        for weight in weights[1:]:
            total = np.float32(total + np.float32(weight))
    if not np.isfinite(total) or total == 0:
        with pytest.raises(BadRequest):
            operation("linear", {}, weights)
    else:
        assert operation("linear", {}, weights).divisor == total


@given(
    method=st.sampled_from(["linear", "task_arithmetic", "dare_linear"]),
    weights=st.lists(st.floats(2.0**-10, 2.0**10, width=32), min_size=1, max_size=6),
    density=st.floats(2.0**-32, 1.0),
    lam=singles,
    normalize=st.booleans(),
    rescale=st.booleans(),
)
def test_coefficients_are_the_least_float_above(
    method: str,
    weights: list[float],
    density: float,
    lam: float,
    normalize: bool,
    rescale: bool,
) -> None:
    """c_k is |lambda w_k rescale / divisor| in exact arithmetic, rounded up and no further."""
    options = {"lambda": lam, "normalize": normalize, "rescale": rescale, "density": density}
    names = {p.name for p in find(method).parameters}
    given_parameters = {n: v for n, v in options.items() if n in names}
    exact = Fraction(1)
    if "lambda" in names:
        exact *= abs(Fraction(lam))
    if "rescale" in names and rescale:
        exact *= Fraction(float(np.float32(1 / density)))
    if normalize:
        total = np.float32(weights[0])
        for weight in weights[1:]:
            total = np.float32(total + np.float32(weight))
        exact /= Fraction(float(total))
    op = operation(method, given_parameters, weights)
    for weight, found in zip(weights, coefficients(op), strict=True):
        assert Fraction(found) >= Fraction(weight) * exact
        assert found == 0 or Fraction(math.nextafter(found, 0)) < Fraction(weight) * exact


def test_coefficients_bound_what_omission_changes() -> None:
    """||full - partial|| <= |c_k| ||d_k|| for a linear merge in float64."""
    rng = np.random.default_rng(1)
    base, first, second = rng.standard_normal((3, 1000))
    weights = [0.7, -0.2]
    c = coefficients(operation("linear", {}, weights))
    full = (0.7 * first - 0.2 * second) / 0.5
    without_second = (0.7 * first - 0.2 * base) / 0.5
    change = np.linalg.norm(full - without_second)
    # Weights are used as float32: the last places differ from this float64 sum.
    assert change == pytest.approx(c[1] * np.linalg.norm(second - base), rel=1e-6)


@pytest.mark.parametrize(
    "method", ["ties", "dare_ties", "breadcrumbs_ties", "ram", "sce", "consensus", "fisher", "emr"]
)
def test_what_others_decide_has_no_coefficients(method: str) -> None:
    """A method that elects signs, counts needs or divides by who moves an element has no certified
    bound."""
    with pytest.raises(BadRequest, match="no bound"):
        coefficients(operation(method, {}, [1.0, 1.0, 1.0]))


@pytest.mark.parametrize(
    "method",
    [
        name
        for name, method in METHODS.items()
        if name not in ("karcher", "safe_merge")
        and all(one.default is not None for one in method.parameters)
    ],
)
def test_untouched_chunks_are_the_base(method: str) -> None:
    """Every method leaves a chunk that nobody touches as it is, but sums of whole experts: linear
    without normalize, passthrough with a scale, and what is not around the base."""
    weights = [1.0] * (METHODS[method].experts or 3)
    assert operation(method, {}, weights).keeps_base
    names = {parameter.name for parameter in METHODS[method].parameters}
    for name, value in (("normalize", False), ("scale", 0.5), ("around_base", False)):
        if name in names:
            other = operation(method, {name: value}, weights)
            assert other.keeps_base == (name == "normalize" and method != "linear")


@pytest.mark.parametrize(
    ("density", "elements", "kept"),
    [(0.2, 5, 1), (0.29, 100, 28), (0.2, 3, 1), (0.999, 1, 1), (0.5, 0, 0)],
)
def test_keep_count(density: float, elements: int, kept: int) -> None:
    """max(1, int(density * n)) in float64, at most n; without a density nothing is trimmed."""
    assert operation("ties", {"density": density}, [1.0]).selection.ranks(elements) == (
        (kept,) if density < 1 else ()
    )


@pytest.mark.parametrize(
    ("density", "gamma", "elements", "last", "dropped"),
    [
        (0.5, 0.01, 1000, 510, 10),
        (0.999, 0.01, 1000, 1000, 1),
        (0.5, 0.0, 1000, 500, 0),
        (0.5, 1.0, 1000, 1000, 500),
        (0.001, 0.01, 100, 1, 1),
    ],
)
def test_band_of_kept_elements(
    density: float, gamma: float, elements: int, last: int, dropped: int
) -> None:
    """int(density * n) elements are kept, after the int(gamma * n) largest, or as many as can."""
    made = operation("breadcrumbs", {"density": density, "gamma": gamma}, [1.0])
    assert made.selection.ranks(elements) == (last, dropped)


def test_needs_and_limits_follow_density() -> None:
    """Density 1 asks for no threshold and no mask; otherwise the limit is density * 2^32."""

    def op(method: str, **given: Any) -> Operation:
        return operation(method, given, [1.0])

    assert not op("ties").selection.trims
    assert op("ties", density=0.9).selection.trims
    assert not op("dare_ties", density=0.9).selection.trims
    assert set(op("ties", density=0.5).selection.limits) == {2**32}
    assert set(op("dare_ties").selection.limits) == {2**32}
    assert set(op("dare_ties", density=0.25).selection.limits) == {2**30}
    assert set(op("dare_ties", density=0.3).selection.limits) == {1288490189}
    assert set(op("dare_ties", density=0.3).rescales) == {np.float32(1 / 0.3)}
    assert set(op("dare_ties", density=0.3, rescale=False).rescales) == {1}
    assert set(op("ties", density=0.3).rescales) == {1}


def test_the_page_and_the_help_name_every_method() -> None:
    """The table of docs/merge-methods.md is the methods' own, and --method lists them all."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == reference.renewed("merge-methods.md", text)
    *most, last = METHODS
    words = f"{', '.join(most)} or {last}"
    assert words == method_names()
    assert words in " ".join((PAGE.parent / "cli.md").read_text(encoding="utf-8").split())


def install(site: Path, name: str, lines: str) -> None:
    """A package at `site` that brings what its module calls METHOD as the method `name`."""
    info = site / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[mstore.methods]\n{name} = {name}_module:METHOD\n")
    (site / f"{name}_module.py").write_text(lines)


HALVES = """
from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import LAMBDA, TRIM_DENSITY, normalize
from mstore.merge.methods.selections import Trimmed

METHOD = Method(
    name="halves",
    summary="base plus the sum of the trimmed deltas",
    formula="base + lambda * sum of the trimmed w_k d_k",
    source="a test",
    parameters=(TRIM_DENSITY, LAMBDA, normalize(False)),
    select=Trimmed,
    combine=Sum(),
)
"""


EXAMPLE = PAGE.parent.parent / "examples" / "method"


def test_the_page_shows_the_example() -> None:
    """docs/howto/methods.md has the whole module of the example, and its entry point."""
    page = (PAGE.parent / "howto" / "methods.md").read_text(encoding="utf-8")
    module = (EXAMPLE / "mstore_even.py").read_text(encoding="utf-8")
    assert f"```python\n{module}```" in page
    project = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."mstore.methods"]\neven = "mstore_even:METHOD"\n' in project


@pytest.mark.rest
def test_the_example_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip installs the example; its method plans under a budget with a bound that holds, merges as
    it says, and is replayed."""
    copy = shutil.copytree(EXAMPLE, tmp_path / "method")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(site), str(copy)],
        check=True,
        capture_output=True,
    )
    monkeypatch.syspath_prepend(site)
    rng = np.random.default_rng(0)
    base = rng.standard_normal((64, 700)).astype(np.float32)
    deltas = [scale * rng.standard_normal(base.shape).astype(np.float32) for scale in (0.1, 1.0)]
    norms = [float(np.linalg.norm(delta)) for delta in deltas]
    wanted = base + sum(
        weight * np.mean(norms) / norm * delta
        for weight, norm, delta in zip((1.0, 0.5), norms, deltas, strict=True)
    )
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, tensor in (("base", base), ("a", base + deltas[0]), ("b", base + deltas[1])):
            (tmp_path / name).mkdir()
            save_file({"w": tensor}, tmp_path / name / "model.safetensors")
            store.add(tmp_path / name, name=name)
        request = MergeRequest(base="base", experts=["a", ("b", 0.5)], method="even")
        store.merge(store.plan(request), name="even")
        np.testing.assert_allclose(store["even"].tensor("w"), wanted, atol=1e-5)
        assert store.replay("even").same
        part = store.plan(dataclasses.replace(request, budget="60%"))
        report = store.merge(part, name="part")
        error = np.linalg.norm(store["part"].tensor("w") - store["even"].tensor("w"))
        assert report.error_bound is not None
        assert 0 < error <= report.error_bound * np.linalg.norm(base)
    monkeypatch.delitem(sys.modules, "mstore_even")


def test_another_package_brings_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that an installed package brings is found, plans under a budget with a bound that
    holds, merges, and is replayed; one that does not load, or is none, is refused by name."""
    install(tmp_path, "halves", HALVES)
    install(tmp_path, "broken", "import nothing_of_that_name")
    install(tmp_path, "fake", "METHOD = 3")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("halves").has_bound
    assert "halves" in names()
    for name in ("broken", "fake"):
        with pytest.raises(Unavailable, match=name):
            find(name)
    rng = np.random.default_rng(3)
    base = rng.normal(0, 1, 200_000).astype(np.float32)
    moved = [rng.normal(0, 0.1, base.size).astype(np.float32) for _ in range(2)]
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, delta in zip(("base", "e0", "e1"), (0, *moved), strict=True):
            write_safetensors(
                tmp_path / f"{name}.safetensors",
                [("w", "F32", base.shape, (base + delta).tobytes())],
            )
            store.add(tmp_path / f"{name}.safetensors", name=name)
        asked = MergeRequest(
            base="base", experts=["e0", "e1"], method="halves", parameters={"density": 0.25}
        )
        store.merge(store.plan(asked), name="full")
        plan = store.plan(dataclasses.replace(asked, budget="50%"))
        assert plan.error_bound is not None
        store.merge(plan, name="half")
        full, half = (store[name].tensor("w") for name in ("full", "half"))
        assert store.replay("half").same
    own = [(base + delta) - base for delta in moved]
    kept = [np.where(np.abs(d) >= np.sort(np.abs(d))[-50_000], d, 0) for d in own]
    assert np.array_equal(full, base + (kept[0] + kept[1]))
    error = np.linalg.norm((half - full).astype(np.float64)) / np.linalg.norm(base)
    assert 0 < error <= plan.error_bound


def test_a_broken_package_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods are listed beside one that does not load, which says why; asked for, it fails."""
    install(tmp_path, "halves", HALVES)
    install(tmp_path, "broken", "import nothing_of_that_name")
    monkeypatch.syspath_prepend(tmp_path)
    why = "the method broken of broken cannot be loaded: No module named 'nothing_of_that_name'"
    assert {one.name: one.remarks for one in Store.methods()} == {
        **dict.fromkeys((*METHODS, "halves"), ()),
        "broken": (why,),
    }
    program = Program(tmp_path / "no-store")
    shown = program.succeed("methods")
    assert "halves" in shown.out
    assert "broken" not in shown.out
    assert f"warning: {why}\n" in shown.err
    failed = program("methods", "broken")
    assert failed.status == 1
    assert f"error: broken_module:METHOD: {why}\n" in failed.err


FAILING = """
from mstore.merge.methods.combinations import Factored, Mixed
from mstore.merge.arithmetic.element_factors import ElementFactors
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import Delta


class Short(ElementFactors):
    def factors(self, base, sides, weights):
        return base[:-1]


def mix(gram, parameters, weights):
    return parameters["x"]


METHOD = Method(
    name="{name}",
    summary="fails",
    formula="none",
    source="a test",
    parameters=(),
    select=Delta,
    combine={combine},
)
"""


def test_a_method_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a package's method, or in what mstore makes of its answer, is told as that of the
    method and the package, with the traceback; in Python it is the error itself."""
    install(tmp_path, "looking", FAILING.format(name="looking", combine="Mixed(mix)"))
    short = FAILING.format(name="short", combine="Factored(lambda _: Short())")
    install(tmp_path, "short", short)
    monkeypatch.syspath_prepend(tmp_path)
    base = np.linspace(-1, 1, 1000, dtype=np.float32)
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, values in (("base", base), ("e", base + 1)):
            path = tmp_path / f"{name}.safetensors"
            write_safetensors(path, [("w", "F32", base.shape, values.tobytes())])
            store.add(path, name=name)
        with pytest.raises(KeyError):
            store.plan(MergeRequest(base="base", experts=["e"], method="looking"))
    program = Program(tmp_path / "store")
    for method, told in (("looking", "KeyError: 'x'"), ("short", "ValueError: could not")):
        line = ("merge", "--base", "base", "--expert", "e", "--method", method, "--name", "m")
        failed = program(*line)
        assert failed.status == 1
        assert f"error: the method {method} of the package {method} failed: {told}" in failed.err
        assert "Traceback" in failed.err
        assert "bug in mstore" not in failed.err
        del sys.modules[f"{method}_module"]


CHANGING = """
import numpy as np

from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import Selection


class Taken(Selection, frozen=True):
    @property
    def masked(self):
        return 4

    def masks(self, chunk, facts):
        return np.full((len(chunk.row_of), chunk.n), 1, dtype=np.uint8)


METHOD = Method(
    name="changing",
    summary="base plus deltas",
    formula="base + sum of w_k d_k",
    source="a test",
    parameters=(),
    select=Taken,
    combine=Sum(),
)
"""


def test_a_method_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a method of a package makes other blocks than before, a virtual merge is refused, and a
    replay differs: both say that the method may have changed."""
    install(tmp_path, "changing", CHANGING)
    monkeypatch.syspath_prepend(tmp_path)
    base = np.linspace(-1, 1, 100_000, dtype=np.float32)
    told = "the method changing of the package changing may have changed since this merge was made"
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, values in (("base", base), ("e", base + 1), ("f", base + 2)):
            path = tmp_path / f"{name}.safetensors"
            write_safetensors(path, [("w", "F32", base.shape, values.tobytes())])
            store.add(path, name=name)
        for name, expert in (("real", "e"), ("virtual", "f")):
            # Half of a delta: no block of the result is one of an expert.
            request = MergeRequest(base="base", experts=[(expert, 0.5)], method="changing")
            store.merge(store.plan(request), name=name, virtual=name == "virtual")
        store.cache_bytes_on_disk = 0
        store["virtual"].tensor("w")
        assert store.replay("real").remarks == ()
    taken = find("changing").select
    monkeypatch.setattr(taken, "masks", lambda _self, chunk, _facts: np.zeros((1, chunk.n), "u1"))
    with Store.open(tmp_path / "store") as store:
        for read in (lambda: store["virtual"].tensor("w"), lambda: store.materialize("virtual")):
            with pytest.raises(Corrupt, match="differs from the memo table") as caught:
                read()
            assert caught.value.hint == told
        replayed = store.replay("real")
        assert not replayed.same
        assert replayed.remarks == (told,)
    del sys.modules["changing_module"]


@pytest.mark.rest
def test_the_package_of_a_method_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans by a method whose package is not installed are listed with the method's name, beside
    the others; what has to run or to read one says which method it lacks.  A recipe is told."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "halves", HALVES)
    base = np.arange(200_000, dtype=np.float32)
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, values in (("base", base), ("e", base + 1)):
            path = tmp_path / f"{name}.safetensors"
            write_safetensors(path, [("w", "F32", base.shape, values.tobytes())])
            store.add(path, name=name)
        request = MergeRequest(
            base="base", experts=["e"], method="halves", parameters={"density": 0.25}
        )
        with monkeypatch.context() as installed:
            installed.syspath_prepend(site)
            plan = store.plan(request)
            store.merge(plan, name="m")
            recipe = store.recipe("m")
        other = store.plan(dataclasses.replace(request, method="ties"))
        assert {(one.plan, one.method) for one in store.plans()} == {
            (plan.plan, "halves"),
            (other.plan, "ties"),
        }
        told = f"plan {plan.plan.short} uses the method halves, of a package that is not installed"
        [listed] = [one for one in store.plans() if one.method == "halves"]
        assert listed.remarks == (f"it cannot be run here: {told}",)
        for call in (
            *(store.explain, store.blame, store.replay),
            lambda _: store.merge(plan.plan, name="again"),
        ):
            with pytest.raises(Unavailable) as caught:
                call("m")
            assert caught.value.what == told
            assert (
                caught.value.hint
                == "install the package that brings halves, where mstore is installed"
            )
        assert store.recipe("m") == recipe
        assert "merge_method: halves" in recipe
        assert store.show("m").plan == plan.plan
        assert store.usage().refs
    del sys.modules["halves_module"]


@pytest.mark.rest
def test_the_page_shows_a_method_with_companions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second example of docs/howto/methods.md merges as its formula says, keeps what it
    measured apart for each value of its parameter, and has a bound that holds."""
    page = (PAGE.parent / "howto" / "methods.md").read_text(encoding="utf-8")
    _, module = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert max(map(len, module.splitlines())) <= 100
    install(tmp_path, "trusted", module)
    monkeypatch.syspath_prepend(tmp_path)
    rng = np.random.default_rng(6)
    shapes = {"w": (300, 200), "u": (100, 200), "v": (200,)}
    base = {name: rng.normal(0, 1, shape) for name, shape in shapes.items()}
    models = {"base": base, "trust": {"w": np.array([0.25, 0.75])}}
    for k in range(2):
        models[f"e{k}"] = {name: one + rng.normal(0, 0.1, one.shape) for name, one in base.items()}
    models["none"] = {"u": np.array([0.1])}
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, arrays in models.items():
            path = tmp_path / f"{name}.safetensors"
            stored = {one: array.astype(np.float32) for one, array in arrays.items()}
            write_safetensors(path, [(n, "F32", a.shape, a.tobytes()) for n, a in stored.items()])
            store.add(path, name=name)
        request = MergeRequest(
            base="base",
            experts=["e0", ("e1", 0.5)],
            method="trusted",
            companions={"trust:e0": "trust", "trust:e1": "none"},
        )
        # Nothing is known of u of e0 and of w of e1, and a vector needs none.
        for least, share in ((0.2, 1.0), (0.5, 0.5)):
            asked = dataclasses.replace(request, parameters={"least": least})
            store.merge(store.plan(asked), name="m")
            for name, first, other in (("w", share, 0.5), ("u", 1.0, 0.0), ("v", 1.0, 0.5)):
                moved = [models[f"e{k}"][name] - base[name] for k in range(2)]
                wanted = base[name] + first * moved[0] + other * moved[1]
                np.testing.assert_allclose(store["m"].tensor(name), wanted, atol=1e-5)
        assert store.replay("m").same
        assert store.plan(asked).analyze_bytes_read == 0
        report = store.merge(store.plan(dataclasses.replace(asked, budget="60%")), name="part")
        norm = np.linalg.norm(np.concatenate([one.ravel() for one in base.values()]))
        error = np.linalg.norm(store["part"].tensor("w") - store["m"].tensor("w"))
        assert report.error_bound is not None
        assert 0 < error <= report.error_bound * norm
    del sys.modules["trusted_module"]


PAIRED = """
from mstore.merge.methods.combinations import Mixed
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import Whole
from mstore.store.objects.plan import Mixture


def mix(gram, parameters, weights):
    own = gram[1][2] / gram[0][0]
    return Mixture(1.0 - 2.0 * own, (own, own), keeps_base=False)


METHOD = Method(
    name="paired",
    summary="a sum whose factors follow from the angle between two experts",
    formula="(1 - 2 c) base + c (expert_0 + expert_1), c = <expert_0, expert_1> / |base|^2",
    source="a test",
    parameters=(),
    select=Whole,
    combine=Mixed(mix, pairs=True),
    weighted=False,
)
"""


@pytest.mark.rest
def test_a_method_may_need_products_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inner products of experts with each other are measured once, and the plan keeps what follows
    from them.
    """
    install(tmp_path, "paired", PAIRED)
    monkeypatch.syspath_prepend(tmp_path)
    rng = np.random.default_rng(4)
    base = rng.normal(0, 1, 100_000).astype(np.float32)
    experts = [base + rng.normal(0, 0.5, base.size).astype(np.float32) for _ in range(2)]
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, values in zip(("base", "e0", "e1"), (base, *experts), strict=True):
            path = tmp_path / f"{name}.safetensors"
            write_safetensors(path, [("w", "F32", base.shape, values.tobytes())])
            store.add(path, name=name)
        asked = MergeRequest(base="base", experts=["e0", "e1"], method="paired")
        plan = store.plan(asked)
        assert plan.analyze_bytes_read > 0
        store.merge(plan, name="merged")
        assert store.replay("merged").same
        assert store.plan(dataclasses.replace(asked, budget="40%")).analyze_bytes_read == 0
        found = store["merged"].tensor("w")
    b, e, f = (values.astype(np.float64) for values in (base, *experts))
    own = (e @ f) / (b @ b)
    assert np.allclose(found, (1 - 2 * own) * b + own * (e + f), rtol=1e-5, atol=1e-5)


def test_a_delta_checkpoint_is_applied(tmp_path: Path) -> None:
    """The sum of a base and a delta checkpoint, by `linear` without normalizing, is the fine-tune:
    each element added in float32 and rounded once, without a warning."""
    rng = np.random.default_rng(4)
    base = {"w": families.cast(rng.standard_normal((300, 200)), "BF16")}
    delta = {"w": families.cast(0.01 * rng.standard_normal((300, 200)), "F16")}
    families.write_checkpoint(tmp_path / "base", base)
    families.write_checkpoint(tmp_path / "delta", delta)
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        for name in ("base", "delta"):
            store.add(tmp_path / name, name=name)
        asked = MergeRequest(
            base="base", experts=["base", "delta"], method="linear", parameters={"normalize": False}
        )
        plan = store.plan(asked)
        store.merge(plan, name="tuned")
        found = store["tuned"].tensor("w")
    wanted = families.cast(base["w"].astype("f4") + delta["w"].astype("f4"), "BF16")
    assert np.array_equal(families.bits(found), families.bits(wanted))
    assert plan.warnings == ()
