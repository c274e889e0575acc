"""No-ops: a merge that would read nothing, or be the base, is refused unless it is meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from checkpoints import write_safetensors
from cli_runs import Program
from families import BLOCK, Family
from test_budget import Place, make

from mstore import MergeRequest, Store
from mstore.terms.errors import BadRequest


def family() -> Family:
    """Without a tensor of which 30 bytes buy a block: a scalar, a short norm, one value."""
    whole = families.layered(rows=70)
    cheap = ("model.scale", "model.norm.weight", "model.zeros.weight")
    base, *experts = (
        {name: array for name, array in member.items() if name not in cheap}
        for member in (whole.base, *whole.experts)
    )
    return Family(base, tuple(experts))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = make(tmp_path_factory.mktemp("family"), family())
    with made.store:
        yield made


NOOPS: dict[str, tuple[dict[str, Any], str, str]] = {
    "30 for 30 %": ({"budget": 30}, "would read nothing", "did you mean budget='30%'"),
    "few bytes": ({"budget": 500}, "fits 500 B", "sweep()"),
    "few bytes of each": (
        {"expert_budget": 20},
        "would read nothing",
        "did you mean expert_budget='20%'",
    ),
    "an error that the base keeps": ({"max_error": 10.0}, "allows the base itself", "smaller"),
    "all skipped": ({"skip": ["*"]}, "leave no tensor", "allow_noop=True"),
    "the base": ({"experts": ["base", "base"]}, "no expert differs", "allow_noop=True"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", NOOPS)
def test_a_noop_is_refused(what: str, place: Place) -> None:
    """A plan that reads nothing or whose result is the base is an error that says what to type;
    nothing is kept, the second time neither; who means it gets it.
    """
    options, says, hint = NOOPS[what]
    asked = {"base": "base", "experts": place.family.names, "method": "linear"} | options
    before = len(place.store.plans())
    for _ in range(2):
        with pytest.raises(BadRequest, match=says) as refused:
            place.store.plan(MergeRequest(**asked))
        assert hint in (refused.value.hint or "")
        assert "allow_noop=True merges it" in (refused.value.hint or "")
    assert len(place.store.plans()) == before
    meant = place.store.plan(MergeRequest(**asked), allow_noop=True)
    assert meant.planned_expert_bytes == 0
    # It is remembered, and still nobody gets it by accident.
    with pytest.raises(BadRequest, match=says):
        place.store.plan(MergeRequest(**asked))
    with pytest.raises(BadRequest, match=says):
        place.store.merge(str(meant.plan), name="noop")
    assert place.store.merge(meant, name="noop").expert_bytes_read == 0
    assert place.store.merge(str(meant.plan), name="noop", allow_noop=True).expert_bytes_read == 0
    assert place.store["noop"].manifest == place.store["base"].manifest


def test_what_changes_something_is_no_noop(place: Place) -> None:
    """Another dtype, or a sum that scales the base, is a merge though no expert is read."""
    base = {"base": "base", "method": "linear"}
    place.store.plan(MergeRequest(**base, experts=["base"], dtype="F32"))
    place.store.plan(MergeRequest(**base, experts=[("base", 0.5)], parameters={"normalize": False}))
    with pytest.raises(BadRequest, match="no expert differs"):
        place.store.plan(MergeRequest(**base, experts=["base"], dtype="BF16"))


def test_a_budget_of_few_bytes_is_asked_about(tmp_path: Path) -> None:
    """Also where a compressed block of a small tensor fits it: a share was meant."""
    draw = np.random.default_rng(3)
    for name in ("base", "e0"):
        tensors = [
            (key, "F32", (count,), draw.random(count, np.float32).tobytes())
            for key, count in (("large", 1 << 14), ("small", 4))
        ]
        write_safetensors(tmp_path / name / "model.safetensors", tensors)
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        store.add(tmp_path / "base", name="base")
        store.add(tmp_path / "e0", name="e0", base="base")
        ask: dict[str, Any] = {"base": "base", "experts": ["e0"], "method": "task_arithmetic"}
        with pytest.raises(BadRequest, match="hardly a block") as refusal:
            store.plan(MergeRequest(**ask, budget=40))
        assert "did you mean budget='40%'?" in (refusal.value.hint or "")
        assert (
            store.plan(MergeRequest(**ask, budget=40), allow_noop=True).planned_expert_bytes == 16
        )
        assert store.plan(MergeRequest(**ask, budget=200)).planned_expert_bytes == 16


def test_the_command_line(tmp_path: Path) -> None:
    """`--budget 30` asks whether 30 % was meant; `--allow-noop` says no. A share was meant as one:
    only a larger one helps."""
    family().write(tmp_path)
    mstore = Program(tmp_path / "store")
    mstore.succeed("init", "--block-size", "64KiB")
    mstore.succeed("add", tmp_path / "base", "--name", "base")
    mstore.succeed("add", tmp_path / "e0", "--name", "e0", "--base", "base")
    line = ["--base", "base", "--expert", "e0", "--method", "linear", "--budget", "30"]
    for command in (["plan"], ["merge", "--name", "m"]):
        done = mstore(*command, *line)
        assert (done.status, done.out) == (2, "")
        assert "did you mean --budget 30%?" in done.err
        mstore.succeed(*command, *line, "--allow-noop")
    for share in ("0.0001%", "0.001%"):
        done = mstore("plan", *line[:-1], share)
        assert done.status == 2
        assert "hint: a larger --budget, or " in done.err
    [plan] = mstore.succeed("plans", "-q").lines
    done = mstore("merge", "--name", "n", "--plan", plan)
    assert done.status == 2
    mstore.succeed("merge", "--name", "n", "--plan", plan, "--allow-noop")
