"""Idle experts: who gives a merge nothing is named, in the plan, the merge and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from cli_runs import Program
from families import Family
from safetensors.numpy import save_file
from test_budget import Place, make

from mstore import MergeRequest, Store
from mstore.merge.methods.registry import METHODS
from mstore.merge.planning import warnings
from mstore.merge.planning.warnings import FAR
from mstore.terms.errors import BadRequest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """e0 changed much, e1 little; e2 is the base in other files."""
    rng = np.random.default_rng(3)
    base = {"w": families.cast(rng.standard_normal((128, 1024)), "BF16")}
    experts = (
        {"w": families.cast(base["w"].astype(np.float32) + 0.25, "BF16")},
        {"w": families.cast(base["w"].astype(np.float32) + 0.01, "BF16")},
        base,
    )
    made = make(tmp_path_factory.mktemp("family"), Family(base, experts))
    with made.store:
        yield made


CASES: dict[str, tuple[list[Any], dict[str, Any], list[tuple[str, str]]]] = {
    "none": (["e0", "e1"], {}, []),
    "over budget": (["e0", "e1"], {"budget": 0.5}, [(warnings.OVER_BUDGET, "e1")]),
    "outside top-p": (["e0", ("e1", 0.0)], {"top_p": 0.5}, [(warnings.NO_WEIGHT, "e1")]),
    "weight 0": (["e0", ("e1", 0)], {}, [(warnings.NO_WEIGHT, "e1")]),
    "equal to the base": (["e0", "e2"], {}, [(warnings.EQUALS_BASE, "e2")]),
    "the base": (["e0", "base"], {"method": "task_arithmetic"}, [(warnings.IS_BASE, "base")]),
    "the base in an average": (["e0", ("base", 0.5)], {}, []),
    "twice": (["e0", "e0"], {}, [(warnings.REPEATED, "e0")]),
    "the base twice": (
        ["e0", "base", "base"],
        {"method": "task_arithmetic"},
        [(warnings.IS_BASE, "base"), (warnings.REPEATED, "base"), (warnings.IS_BASE, "base")],
    ),
    "twice, once without weight": (
        ["e0", ("e0", 0.0)],
        {},
        [(warnings.NO_WEIGHT, "e0")],
    ),
    "twice, first without weight": (
        [("e0", 0.0), "e0"],
        {},
        [(warnings.NO_WEIGHT, "e0")],
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", CASES)
def test_an_idle_expert_is_named(what: str, place: Place) -> None:
    """Left out whole, without weight, equal to the base, the base itself, given twice: each is a
    warning that names the expert, when planning, when merging, and of the plan as it is kept.
    """
    experts, options, wanted = CASES[what]
    asked = MergeRequest(base="base", experts=experts, **({"method": "linear"} | options))
    plan = place.store.plan(asked)
    found = [(one.kind, one.expert) for one in plan.warnings]
    assert found == wanted
    assert all(str(one.expert) in one.text for one in plan.warnings)
    merged = place.store.merge(plan, name="merged")
    assert merged.warnings == plan.warnings
    told = place.store.explain("merged").plan
    assert told is not None
    assert told.warnings == plan.warnings


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "method",
    [
        name
        for name, one in METHODS.items()
        # In an average of whole models, the base is a model like the others.
        if one.weighted
        and not one.lists_base
        and "normalize" in [own.name for own in one.parameters]
    ],
)
def test_who_takes_weight_from_others(method: str, place: Place) -> None:
    """An expert without a delta is said to take weight from the others exactly where it does: its
    merge with another one is not that one's alone.
    """
    given = {"base": "base", "method": method, "parameters": {"normalize": True}}
    alone = place.store.plan(MergeRequest(experts=["e0"], **given))
    both = place.store.plan(MergeRequest(experts=["e0", "base"], **given))
    [text] = [one.text for one in both.warnings if one.kind == warnings.IS_BASE]
    weights = []
    for plan in (alone, both):
        place.store.merge(plan, name="m")
        weights.append(families.bits(place.store["m"].tensor("w")))
    assert ("take weight from the others" in text) == (not np.array_equal(*weights))


def test_left_out_for_an_error(place: Place) -> None:
    """Where only an error limit leaves an expert out, the warning says so, and names no budget."""
    asked = MergeRequest(base="base", experts=["e0", "e1"], method="task_arithmetic", max_error=9.0)
    plan = place.store.plan(asked, allow_noop=True)
    told = {(one.kind, one.expert) for one in plan.warnings}
    assert {(warnings.LEFT_OUT, "e0"), (warnings.LEFT_OUT, "e1")} <= told
    assert all(
        "the error limit" in one.text for one in plan.warnings if one.kind == warnings.LEFT_OUT
    )


def test_for_people_and_programs(place: Place) -> None:
    """`plan` and `merge` print a line each, and JSON has kind, expert and text."""
    mstore = Program(Path(place.store.path))
    line = ["--base", "base", "--expert", "e0", "--expert", "e1=0", "--method", "task_arithmetic"]
    for command in (["plan"], ["merge", "--name", "m"]):
        said = mstore.succeed(*command, *line)
        assert "warning: e1 has weight 0, so nothing of it is in the merge" in said.lines
        [warning] = mstore.succeed(*command, *line, "--json").document["warnings"]
        assert (warning["kind"], warning["expert"]) == (warnings.NO_WEIGHT, "e1")


def test_two_models_of_one_snapshot_are_two(tmp_path: Path) -> None:
    """What is given twice, or is the base, is a model: two of one snapshot are not the same."""
    rng = np.random.default_rng(4)
    for model in "abc":
        (tmp_path / "whole" / model).mkdir(parents=True)
        values = rng.standard_normal(1000, dtype=np.float32)
        save_file({"w": values}, tmp_path / "whole" / model / "model.safetensors")
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        store.add(tmp_path / "whole", name="whole")

        def kinds(*experts: Any) -> set[str]:
            asked = MergeRequest(base="whole:a", experts=experts, method="task_arithmetic")
            return {one.kind for one in store.plan(asked).warnings} - {FAR}

        assert kinds("whole:b", "whole:c") == set()
        assert kinds("whole:b", "whole:b") == {warnings.REPEATED}
        assert kinds("whole:b", "whole:a") == {warnings.IS_BASE}
        # One less the other is something.
        assert kinds("whole:b", ("whole:c", -1.0)) == set()
        with pytest.raises(BadRequest, match="cancel"):
            kinds("whole:b", ("whole:b", -1.0))
