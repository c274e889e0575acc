"""Plans as text: out of one store, through anybody's hands, into another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import msgspec
import numpy as np
import pytest
from families import BLOCK, Family

from mstore import MergeRequest, Store
from mstore.merge.analysis import exchange
from mstore.merge.analysis.exchange import MAX_TEXT
from mstore.store.objects.plan import Plan, PlanInput, PlanTensor, TrimThreshold
from mstore.terms.errors import BadName, BadRequest, Incompatible, NotFound, Unavailable

FAMILY = families.layered(rows=40)


def make(path: Path, root: Path, names: list[str], block_size: int = BLOCK) -> Store:
    store = Store.init(path, block_size=block_size)
    for name in names:
        store.add(root / name, name=f"model/{name}")
    return store


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILY.write(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Store]:
    with make(root / "store", root, ["base", *FAMILY.names]) as store:
        yield store


@pytest.fixture(scope="module")
def text(store: Store) -> str:
    """A ties plan with quotas, left-out blocks' norms, remarks and a budget, as text."""
    plan = store.plan(
        MergeRequest(
            base="model/base",
            experts=[(f"model/{name}", 0.1 + k) for k, name in enumerate(FAMILY.names)],
            method="ties",
            parameters={"density": 0.3, "lambda": 1 / 3},
            budget=0.6,
            dtype="F32",
        )
    )
    return store.export_plan(str(plan.plan))


# -- round trip ----------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties"])
@pytest.mark.parametrize("budget", [None, 0.5])
def test_round_trip(
    method: str, budget: float | None, store: Store, root: Path, tmp_path: Path
) -> None:
    """A plan that another store exported is the same plan here, and merges to the same content."""
    parameters = {} if method == "linear" else {"density": 0.3}
    parameters |= {"seed": 2**64 - 1} if method == "dare_ties" else {}
    asked: dict[str, Any] = {
        "base": "model/base",
        "experts": [f"model/{name}" for name in FAMILY.names],
        "method": method,
        "parameters": parameters,
        "budget": budget,
    }
    analyzing = store.plan(MergeRequest(**asked))
    told = any("apart from the budget" in remark for remark in analyzing.remarks)
    assert told == (analyzing.analyze_bytes_read > 0)
    plan = store.plan(MergeRequest(**asked))
    assert plan.plan == analyzing.plan
    assert plan.analyze_bytes_read == 0
    first = store.merge(plan, name=f"merged/{method}/{budget}")
    text = store.export_plan(str(plan.plan)[:12])
    with make(tmp_path / "other", root, [*FAMILY.names, "base"]) as other:
        taken = other.import_plan(text)
        assert taken.plan == plan.plan
        kept = [field for field in plan.__slots__ if field not in ("base", "experts", "seconds")]
        kept.remove("analyze_bytes_read")
        # What the full merge changes is kept beside a plan, not in it.
        kept.remove("error_share_estimate")
        kept.remove("memo_expert_bytes")
        kept.remove("bytes_not_here")
        # What statistics say of experts is not in a plan, either.
        kept.remove("warnings")
        assert [getattr(taken, field) for field in kept] == [getattr(plan, f) for f in kept]
        assert [weight for _, weight in taken.experts] == [weight for _, weight in plan.experts]
        second = other.merge(taken, name="merged")
        assert second.manifest == first.manifest
        assert other.export_plan(str(taken.plan)) != text  # names differ,
        assert _nameless(other.export_plan(str(taken.plan))) == _nameless(text)  # nothing else
        parents = [(p.role, p.snapshot) for p in other["merged"].parents]
        assert parents == [
            ("base", other["model/base"].id),
            *(("expert", other[f"model/{name}"].id) for name in FAMILY.names),
        ]


def _nameless(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    value["inputs"] = [
        {key: item for key, item in one.items() if key != "name"} for one in value["inputs"]
    ]
    return value


def test_a_text_of_this_store_changes_nothing(store: Store, text: str) -> None:
    """Importing what was exported keeps the names of the inputs and stores no second plan."""
    before = store.stats()
    taken = store.import_plan(text)
    assert (taken.base, taken.experts[0][0]) == ("model/base", "model/e0")
    assert store.export_plan(str(taken.plan)) == text
    after = store.stats()
    assert (after.packs, after.stored_bytes) == (before.packs, before.stored_bytes)


def test_thresholds_that_json_has_no_number_for(tmp_path: Path) -> None:
    """A threshold of infinity, from an expert with infinities, survives the way through text."""
    base = {"w": np.zeros(1000, dtype=np.float32)}
    expert = {"w": np.ones(1000, dtype=np.float32)}
    expert["w"][:500] = np.inf
    Family(base, (expert,)).write(tmp_path)
    with make(tmp_path / "store", tmp_path, ["base", "e0"]) as store:
        plan = store.plan(
            MergeRequest(
                base="model/base", experts=["model/e0"], method="ties", parameters={"density": 0.2}
            )
        )
        text = store.export_plan(str(plan.plan))
        assert json.loads(text)["tensors"][0]["thresholds"] == [["inf", 200]]
        assert store.import_plan(text).plan == plan.plan
        store.merge(plan, name="merged", allow_nonfinite=True)
        assert np.flatnonzero(store["merged"].tensor("w")).tolist() == list(range(200))


# -- texts that are refused ----------------------------------------------------------------------


def _changed(value: Any) -> Any:
    """Something of the same type that is not the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + ("1" if value[-1:] != "1" else "0")
    if isinstance(value, list):
        return [_changed(value[0]), *value[1:]] if value else ["x"]
    if isinstance(value, dict):
        name = next(iter(value))
        return value | {name: _changed(value[name])}
    return 7


FIELDS = [
    *("format", "plan", "dtype", "block_size", "budget_bytes", "allow_missing"),
    *(f"operations.{n}" for n in ("method", "parameters", "weights")),
    *(f"inputs.{n}" for n in ("role", "manifest")),
    *(f"criteria.{n}" for n in ("score", "max_error", "expert_budget_bytes")),
    *(f"criteria.{n}" for n in ("only", "skip", "top_p")),
    *("full_expert_bytes", "planned_expert_bytes", "error_bound", "error_estimate", "copied"),
    *("remarks", "tensors"),
    *(f"tensors.{n}" for n in ("name", "chunk_elements", "states", "thresholds", "omitted")),
]
MORE = {
    "inputs.of": 0,
    "inputs.model": "unet",
    "tensors.operation": 1,
    "tensors.sources": ["model.steps"] * 4,
    "tensors.dtype": "F16",
    "tensors.mixture": {"base": 1.0, "experts": [1.0] * 3, "keeps_base": True},
    "layers": [[0, 0]],
    "taken": [["model.steps", 1, "model.steps"]],
    "dropped": ["model.steps"],
    "without": ["unet"],
    "config": '{"layers": 1}',
}
"""Fields that this plan has no need of, and a value of each."""


def test_fields_are_all_named(text: str) -> None:
    """The lists above have every field of a plan's text but the names of the inputs."""
    value = json.loads(text)
    lists = ("operations", "inputs", "tensors")
    named = {name for name in value if name not in ("operations", "inputs", "criteria")}
    named |= {f"criteria.{name}" for name in value["criteria"]}
    named |= {f"{name}.{field}" for name in lists for field in value[name][0] if field != "name"}
    assert named | {"tensors.name"} == set(FIELDS)
    owners = {
        "": exchange._Text,
        "operations.": exchange._Operation,
        "inputs.": exchange._Input,
        "tensors.": exchange._Tensor,
        "criteria.": exchange._Criteria,
    }
    known = {f"{owner}{one}" for owner, kind in owners.items() for one in kind.__struct_fields__}
    assert known - {"operations", "inputs", "criteria", "inputs.name"} == {*FIELDS, *MORE}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("field", [*FIELDS, *MORE])
def test_a_changed_text_is_refused(field: str, store: Store, text: str) -> None:
    """Whatever was edited, the plan does not match its id any more, and is not kept."""
    value = json.loads(text)
    holder, _, name = field.rpartition(".")
    owner = value[holder] if holder else value
    owner = owner[0] if isinstance(owner, list) else owner
    before = owner.get(name)
    owner[name] = MORE[field] if field in MORE else _changed(before)
    assert owner[name] != before
    stored = store.stats()
    with pytest.raises(BadRequest, match=r"not a plan|does not match its id"):
        store.import_plan(json.dumps(value))
    assert store.stats() == stored


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"remarks"', '"remark"'),
        lambda text: text.replace('"format"', '"more": 1, "format"'),
        lambda text: "[" * 100_000,
        lambda text: text.replace('"states": [\n    "', '"states": [\n    "x'),
        lambda text: " " * (MAX_TEXT + 1),
    ],
    ids=["empty", "list", "object", "half", "renamed", "more", "deep", "states", "long"],
)
def test_what_is_no_plan_is_refused(edit: Callable[[str], str], store: Store, text: str) -> None:
    """Text that is no plan gives a BadRequest that says where a plan comes from."""
    with pytest.raises(BadRequest, match="plan") as refused:
        store.import_plan(edit(text))
    assert refused.value.hint == "store.export_plan(PLAN) writes one"


def test_an_input_that_is_not_here(root: Path, text: str, tmp_path: Path) -> None:
    """A plan for contents that this store lacks is refused, and what is missing is named."""
    with make(tmp_path / "some", root, ["base", "e0", "e2"]) as store:
        missing = json.loads(text)["inputs"][2]["manifest"]
        with pytest.raises(NotFound) as refused:
            store.import_plan(text)
        assert refused.value.where == f"manifest {missing[:12]}"
        assert store.add(root / "e1", name="e1").manifest.hex() == missing
        store.import_plan(text)


def test_a_store_of_another_block_size(text: str, tmp_path: Path) -> None:
    """A plan is for blocks of one size; a store of another one refuses it and says so."""
    with (
        Store.init(tmp_path / "large", block_size=BLOCK * 2) as store,
        pytest.raises(Incompatible, match=r"blocks of 64\.0 KiB, this store has 128\.0 KiB"),
    ):
        store.import_plan(text)


# -- forged plans: well-formed, with an id that fits ---------------------------------------------


def _first(plan: Plan, **changes: Any) -> tuple[PlanTensor, ...]:
    return (msgspec.structs.replace(plan.tensors[0], **changes), *plan.tensors[1:])


def _criteria(plan: Plan, **changes: Any) -> dict[str, Any]:
    return {"criteria": msgspec.structs.replace(plan.criteria, **changes)}


def _operation(plan: Plan, **changes: Any) -> dict[str, Any]:
    return {"operations": (msgspec.structs.replace(plan.operation, **changes),)}


def _input(plan: Plan, number: int, **changes: Any) -> dict[str, Any]:
    inputs = list(plan.inputs)
    inputs[number] = msgspec.structs.replace(inputs[number], **changes)
    return {"inputs": tuple(inputs)}


FORGED: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "method": lambda plan: _operation(plan, method="magic"),
    "parameter": lambda plan: _operation(
        plan, parameters=(("density", 7.0), *plan.operation.parameters[1:])
    ),
    "few parameters": lambda plan: _operation(plan, parameters=plan.operation.parameters[1:]),
    "no operation": lambda plan: {"operations": ()},
    "operation of no tensor": lambda plan: {"operations": plan.operations * 2},
    "dtype": lambda plan: {"dtype": "I8"},
    "negative cost": lambda plan: {"planned_expert_bytes": -1, "budget": None},
    "no experts": lambda plan: {"inputs": plan.inputs[:1]} | _operation(plan, weights=()),
    "weight": lambda plan: _operation(plan, weights=(0.1,) * 3),
    "one weight less": lambda plan: _operation(plan, weights=plan.weights[:-1]),
    "one expert less": lambda plan: {"inputs": plan.inputs[:-1]},
    "no base": lambda plan: {"inputs": plan.inputs[1:]},
    "two bases": lambda plan: _input(plan, 1, role="base"),
    "unknown role": lambda plan: _input(plan, 3, role="mother"),
    "model": lambda plan: _input(plan, 1, model="unet"),
    "model of the base": lambda plan: _input(plan, 0, model="unet"),
    "companion": lambda plan: {"inputs": (*plan.inputs, PlanInput("fisher", 1, bytes(32)))},
    "without a model": lambda plan: {"without": ("unet",)},
    "unknown tensor": lambda plan: {"tensors": _first(plan, name="nobody")},
    "tensor of another type": lambda plan: {"tensors": _first(plan, name="model.steps")},
    "tied name": lambda plan: {"tensors": _first(plan, name="model.tied.embed_out")},
    "twice": lambda plan: {"tensors": (*plan.tensors, plan.tensors[0])},
    "chunk 0": lambda plan: {"tensors": _first(plan, chunk_elements=0)},
    "chunk": lambda plan: {"tensors": _first(plan, chunk_elements=BLOCK)},
    "few states": lambda plan: {
        "tensors": _first(plan, states=tuple(s[1:] for s in plan.tensors[0].states))
    },
    "unknown state": lambda plan: {
        "tensors": _first(plan, states=tuple(b"\x06" * len(s) for s in plan.tensors[0].states))
    },
    "states of fewer": lambda plan: {"tensors": _first(plan, states=plan.tensors[0].states[1:])},
    "dropped without top p": lambda plan: {
        "tensors": _first(plan, states=tuple(b"\x05" * len(s) for s in plan.tensors[0].states))
    },
    "score": lambda plan: _criteria(plan, score="taste"),
    "no error": lambda plan: _criteria(plan, max_error=-1.0),
    "top p of 0": lambda plan: _criteria(plan, top_p=0.0),
    "patterns out of order": lambda plan: _criteria(plan, only=("b", "a")),
    "no thresholds": lambda plan: {"tensors": _first(plan, thresholds=())},
    "quota": lambda plan: {"tensors": _first(plan, thresholds=(TrimThreshold(1.0, -2),) * 3)},
    "no omitted": lambda plan: {"tensors": _first(plan, omitted=())},
}


REFUSED_AS = {
    "method": Unavailable,
    "model": Incompatible,
    "model of the base": Incompatible,
}


@pytest.fixture(scope="module")
def plan(store: Store, text: str) -> Plan:
    """The plan of the text."""
    return store._catalog.record(Plan, store.import_plan(text).plan)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_plan_is_refused(kind: str, store: Store, text: str, plan: Plan) -> None:
    """A plan that no planner made, under an id that matches it, is refused before it is run."""
    forged = msgspec.structs.replace(plan, **FORGED[kind](plan))
    assert forged != plan
    value = json.loads(text) | _text_of(forged)
    before = store.stats()
    with pytest.raises(REFUSED_AS.get(kind, BadRequest)):
        store.import_plan(json.dumps(value))
    assert store.stats() == before


def _text_of(plan: Plan) -> dict[str, Any]:
    """The fields of a text that say what this plan says, its id among them."""
    return {
        "plan": plan.id().hex(),
        "operations": [
            {"method": one.method, "parameters": dict(one.parameters), "weights": one.weights}
            for one in plan.operations
        ],
        "inputs": [
            {
                "role": one.role,
                "name": "x",
                "manifest": one.manifest.hex(),
                "of": one.of,
                "model": one.model,
            }
            for one in plan.inputs
        ],
        "dtype": plan.dtype,
        "budget_bytes": plan.budget,
        "criteria": {
            "score": plan.criteria.score,
            "max_error": plan.criteria.max_error,
            "expert_budget_bytes": plan.criteria.expert_budget,
            "only": plan.criteria.only,
            "skip": plan.criteria.skip,
            "top_p": plan.criteria.top_p,
        },
        "planned_expert_bytes": plan.planned_expert_bytes,
        "tensors": [
            {
                "name": tensor.name,
                "chunk_elements": tensor.chunk_elements,
                "states": ["".join(map(str, states)) for states in tensor.states],
                "thresholds": [[cut.value, cut.quota] for cut in tensor.thresholds],
                "omitted": tensor.omitted,
            }
            for tensor in plan.tensors
        ],
        "without": plan.without,
    }


def test_forging_is_what_fails(store: Store, text: str) -> None:
    """The same way through the forger with nothing changed is a plan like any other."""
    plan = store._catalog.record(Plan, store.import_plan(text).plan)
    assert store.import_plan(json.dumps(json.loads(text) | _text_of(plan))).plan == plan.id()


# -- finding plans -------------------------------------------------------------------------------


def test_plans_by_prefix(store: Store, text: str) -> None:
    """A plan is found by its id or the start of it; what is none, or none here, is told apart."""
    id = json.loads(text)["plan"]
    assert store.export_plan(id) == store.export_plan(id[:10]) == text
    with pytest.raises(BadName, match="not a plan id"):
        store.export_plan(id[:3])
    with pytest.raises(BadName, match="not a plan id"):
        store.merge("merged", name="x")
    unknown = "".join("0" if digit != "0" else "1" for digit in id)
    with pytest.raises(NotFound, match="no such plan"):
        store.merge(unknown, name="x")
