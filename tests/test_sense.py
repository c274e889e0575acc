"""Sense: experts that are no fine-tunes, and weights out of scale, are named; families are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapters
import gram_reference
import numpy as np
import pytest
from cli_runs import Program
from families import BLOCK, OF_MERGE, Arrays

from mstore import MergeRequest, Store
from mstore.api.reports import MergeWarning
from mstore.merge.methods.registry import METHODS
from mstore.merge.planning import warnings

LAYERS = 16
FINE = ["e0", "e1", "e2", "e3"]
ODD = {warnings.FAR, warnings.SWAPPED, warnings.OUT_OF_SCALE}


def moved(base: Arrays, seed: int, by: float, layers: tuple[int, ...] = ()) -> Arrays:
    """Return a model of which some layers, or all, moved by so much of their norm."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, array in base.items():
        is_in = not layers or any(f".{layer}." in name for layer in layers)
        step = by if is_in else 0.01
        found[name] = (array + step * rng.standard_normal(array.shape)).astype("f4")
    return found


COMPANIONS = OF_MERGE | {"gram": "gram", "activation": "activation"}
"""By role; squares stand for the others."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Four fine-tunes that moved by 2 %, and others that did something else."""
    root = tmp_path_factory.mktemp("family")
    rng = np.random.default_rng(1)
    base = {f"m.layers.{n}.w": rng.standard_normal((64, 64)).astype("f4") for n in range(LAYERS)}
    models = {"base": base, **{name: moved(base, n, 0.02) for n, name in enumerate(FINE, 1)}}
    models["noise"] = moved(base, 11, 1.0)
    models["parts"] = moved(base, 12, 1.0, (3, 5, 9))
    models["further"] = moved(base, 13, 0.3)
    models["squares"] = {name: array**2 for name, array in base.items()}
    models["gram"] = {name: gram_reference.packed(rng, 64, 64) for name in base}
    models["activation"] = {name: rng.random(64).astype("f4") for name in base}
    models["pretrained"] = moved(base, 14, 0.15)
    with Store.init(root / "s", block_size=BLOCK) as made:
        for name, arrays in models.items():
            adapters.write(root / name, arrays, {}, "model")
            made.add(root / name, name=name, base=None if name in ("base", *COMPANIONS) else "base")
        yield made


def plan(store: Store, experts: list[Any], **options: Any) -> list[MergeWarning]:
    """Return the warnings of a plan about sense; a merge of it has the same."""
    request = {"base": "base", "method": "task_arithmetic"} | options
    report = store.plan(MergeRequest(experts=experts, **request), allow_noop=True)
    merged = store.merge(report, name="merged")
    assert merged.warnings == report.warnings
    return [one for one in report.warnings if one.kind in ODD]


def test_a_family_of_fine_tunes_draws_no_warning(store: Store) -> None:
    """Fine-tunes that moved by 2 % are merged by any weights that people use without a word; so is
    one that was trained much longer, beside one other."""
    assert plan(store, FINE) == []
    assert plan(store, [(name, 2.5) for name in FINE], parameters={"lambda": 1.5}) == []
    assert plan(store, [("e0", -1.0), "e1"]) == []
    assert plan(store, ["e0", "pretrained"]) == []
    assert plan(store, ["pretrained"], method="ties", parameters={"density": 0.2}) == []
    report = store.check_merge(MergeRequest(base="base", experts=FINE, method="linear"))
    assert report.findings == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties", "dare_linear", "slerp"])
def test_noise_is_named(method: str, store: Store) -> None:
    """An expert that moved as far as the base is long is named, by plan and merge, and by no
    block read."""
    experts: list[Any] = ["noise"] if method == "slerp" else [*FINE, "noise"]
    needs = {"ties": {"density": 0.5}, "dare_linear": {"density": 0.5}, "slerp": {"t": 0.5}}
    found = plan(store, experts, method=method, parameters=needs.get(method, {}))
    assert [(one.kind, one.expert) for one in found] == [(warnings.FAR, "noise")]
    assert "100 % of the base's norm" in found[0].text
    assert "compare('noise', base='base')" in found[0].text


def test_layers_are_named_together(store: Store) -> None:
    """Where single layers moved so far, one line names them."""
    [warning] = plan(store, ["e0", "parts"])
    assert warning.expert == "parts"
    assert "in layers 3, 5 and 9" in warning.text
    assert plan(store, ["e0", "parts"], skip=["m.layers.[359].*"]) == []


def test_further_than_all_others(store: Store) -> None:
    """An expert that moved over ten times as far as the others is named."""
    [warning] = plan(store, [*FINE, "further"])
    assert (warning.kind, warning.expert) == (warnings.FAR, "further")
    assert "15 times as far as the other experts" in warning.text
    assert plan(store, [*[(name, 0.0) for name in FINE], "further"]) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("experts", "options", "named"),
    [
        ([("e0", 60.0), "e1"], {}, ["e0"]),
        ([("e0", 1e38)], {}, ["e0"]),
        ([("e0", -60.0)], {}, ["e0"]),
        ([("e0", 6.0)], {"parameters": {"lambda": 10.0}}, ["e0"]),
        ([("e0", 60.0), ("e1", 60.0)], {"parameters": {"normalize": True}}, []),
        ([("e0", 1.0), ("e1", -0.99)], {"parameters": {"normalize": True}}, ["e0", "e1"]),
        ([("e0", 60.0), "e1"], {"method": "ties", "parameters": {"density": 1.0}}, []),
        ([("e0", 60.0), "e1"], {"method": "linear"}, []),
        ([("e0", 60.0)], {"method": "linear", "parameters": {"normalize": False}}, ["e0"]),
        (["e0", "e1"], {"method": "linear", "parameters": {"normalize": False}}, []),
        (["e0", "e1", "e2"], {"method": "linear", "parameters": {"normalize": False}}, [None]),
        (["e0"], {"method": "passthrough", "parameters": {"scale": 50.0}}, ["e0"]),
        (["e0", "noise"], {"method": "karcher"}, []),
        ([("e0", 30.0), ("e1", 30.0), ("e2", 30.0), ("e3", 30.0)], {}, [None]),
    ],
)
def test_weights_out_of_scale(
    experts: list[Any], options: dict[str, Any], named: list[str | None], store: Store
) -> None:
    """A weight by which an expert changes more than the base's norm is named, after lambda and what
    a method divides by; so are experts that do so together."""
    found = [one for one in plan(store, experts, **options) if one.kind != warnings.FAR]
    assert [(one.kind, one.expert) for one in found] == [
        (warnings.OUT_OF_SCALE, one) for one in named
    ]


def test_base_and_expert_swapped(store: Store) -> None:
    """The base of the base, given as an expert, is named; models mixed as vectors have no order."""
    [warning] = plan(store, ["base", "e1"], base="e0")
    assert (warning.kind, warning.expert) == (warnings.SWAPPED, "base")
    assert plan(store, ["base"], base="e0", method="slerp", parameters={"t": 0.3}) == []
    report = store.check_merge(MergeRequest(base="e0", experts=["base"], method="linear"))
    assert [(one.expert, one.aspect) for one in report.findings] == [("base", "order")]


def test_check_merge_says_the_same(store: Store) -> None:
    """check-merge names noise, and prints how far each expert moved as `compare` does."""
    request = MergeRequest(base="base", experts=[*FINE, "noise"], method="linear")
    report = store.check_merge(request)
    assert [(one.expert, one.aspect) for one in report.findings] == [
        ("noise", "size of the change")
    ]
    assert report.mergeable
    assert report.changes == store.compare(*FINE, "noise", by="model").whole
    said = Program(Path(store.path)).succeed(
        "check-merge", "--base", "base", "--expert", "e0", "--expert", "noise"
    )
    assert "compare noise --base base shows where" in said.out
    assert any(line.split()[:2] == ["2", "noise"] for line in said.lines)


def test_nothing_is_said_of_what_is_not_known(tmp_path: Path) -> None:
    """Without statistics check-merge warns of nothing; the plan, which measures, warns."""
    base = {"w": np.random.default_rng(1).standard_normal((64, 64)).astype("f4")}
    with Store.init(tmp_path / "s", block_size=BLOCK) as store:
        for name, arrays in (("base", base), ("noise", moved(base, 2, 1.0))):
            adapters.write(tmp_path / name, arrays, {}, "model")
            store.add(tmp_path / name, name=name)
        request = MergeRequest(base="base", experts=["noise"], method="linear")
        report = store.check_merge(request)
        assert report.findings == ()
        assert report.changes is not None
        assert report.changes.models[0].change is None
        assert [one.kind for one in plan(store, ["noise"])] == [warnings.FAR]


def test_an_adapter_out_of_scale(tmp_path: Path) -> None:
    """The plan of an adapter warns of its size by its factors, and of no product read."""
    rng = np.random.default_rng(1)
    base = {"model.layers.0.w.weight": rng.standard_normal((64, 64)).astype("f4")}
    adapters.write(tmp_path / "base", base, {}, "model")
    with Store.init(tmp_path / "s", block_size=BLOCK) as store:
        store.add(tmp_path / "base", name="base")
        for name, alpha in (("small", 8.0), ("large", 8e4)):
            left, right = (0.01 * rng.standard_normal(shape) for shape in ((64, 8), (8, 64)))
            factors = {
                "base_model.model.model.layers.0.w.lora_B.weight": left.astype("f4"),
                "base_model.model.model.layers.0.w.lora_A.weight": right.astype("f4"),
            }
            config = {"peft_type": "LORA", "r": 8, "lora_alpha": alpha, "bias": "none"}
            files = {"adapter_config.json": config}
            adapters.write(tmp_path / name, factors, files, "adapter_model")
            store.add(tmp_path / name, name=name, base="base")
        found = plan(store, ["small", "large"])
    assert [(one.kind, one.expert) for one in found] == [(warnings.FAR, "large")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_asked(method: str, store: Store) -> None:
    """Warnings follow from statistics for each method, and stop none."""
    one = METHODS[method]
    experts = FINE[: one.experts or 3]
    companions = {
        f"{own.role}:{name}" if name else own.role: COMPANIONS.get(own.role, "squares")
        for own in one.companions
        for name in {None: [""], "base": ["base"], "expert": experts}[own.of]
    }
    needed = {own.name: 0.5 for own in one.parameters if own.default is None}
    request = MergeRequest(
        base="base",
        experts=experts,
        companions=companions,
        method=method,
        parameters=needed,
    )
    report = store.plan(request, allow_noop=True)
    assert not ODD & {warning.kind for warning in report.warnings}
