"""Plans whose tensors differ: other methods, weights and types, and new tensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import independent_reader
import numpy as np
import numpy.typing as npt
import pytest
import reference
from checkpoints import write_safetensors

from mstore import MergeRequest, Store, TensorRule
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest, Incompatible

BLOCK = 1 << 16
N = 100_000
NAMES = ("a", "b", "c", "d")
Singles = npt.NDArray[np.float32]


@dataclasses.dataclass
class Family:
    """A store with a base and two experts of four tensors, and what is in them."""

    store: Store
    base: dict[str, Singles]
    experts: list[dict[str, Singles]]

    def reference(self, method: str, given: dict[str, Any], name: str, source: str = "") -> Any:
        """The merge of one tensor by the reference, with weights 1."""
        source = source or name
        base, *sides = (side[source].reshape(-1, 100) for side in (self.base, *self.experts))
        weights = [1.0] * len(sides)
        return reference.merge(method, given, weights, base, sides, tensor=name).reshape(-1)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """Two shards with an index, as large models have them."""
    root = tmp_path_factory.mktemp("rules")
    rng = np.random.default_rng(11)
    base = {name: rng.normal(0, 1, N).astype(np.float32) for name in NAMES}
    experts = [
        {
            name: (value + rng.normal(0, 0.2 + 0.1 * k, N)).astype(np.float32)
            for name, value in base.items()
        }
        for k in range(2)
    ]
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name, tensors in (("base", base), ("e0", experts[0]), ("e1", experts[1])):
            directory = root / name
            directory.mkdir()
            for number, shard in enumerate((NAMES[:2], NAMES[2:]), start=1):
                write_safetensors(
                    directory / f"model-{number:05}-of-00002.safetensors",
                    [(one, "F32", (N // 100, 100), tensors[one].tobytes()) for one in shard],
                )
            index = {
                "metadata": {"total_size": 4 * N * len(NAMES), "total_parameters": N * len(NAMES)},
                "weight_map": {
                    one: f"model-{1 + (one in 'cd'):05}-of-00002.safetensors" for one in NAMES
                },
            }
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
            (directory / "config.json").write_text('{"dtype": "float32"}')
            store.add(directory, name=name)
        yield Family(store, base, experts)


ASKED = MergeRequest(
    base="base",
    experts=["e0", "e1"],
    method="task_arithmetic",
    rules=[
        TensorRule(tensors="b", method="ties", parameters={"density": 0.3}),
        TensorRule(tensors=["c", "new"], method="breadcrumbs", parameters={"density": 0.5}),
    ],
    outputs={"new": "a"},
)
"""Three methods for three tensors, and one tensor whose name the base has not."""


def test_three_methods_and_a_new_tensor(family: Family) -> None:
    """Each tensor is merged by its own method, and a new one is made of another's sources."""
    store = family.store
    plan = store.plan(ASKED)
    merged = store.merge(plan, name="rules")
    own = store["rules"]
    assert merged.expert_bytes_read == plan.planned_expert_bytes
    found = {name: own.tensor(name).reshape(-1) for name in (*NAMES, "new")}
    wanted = {
        "a": family.reference("task_arithmetic", {}, "a"),
        "b": family.reference("ties", {"density": 0.3}, "b"),
        "c": family.reference("breadcrumbs", {"density": 0.5}, "c"),
        "d": family.reference("task_arithmetic", {}, "d"),
        "new": family.reference("breadcrumbs", {"density": 0.5}, "new", "a"),
    }
    for name, value in wanted.items():
        assert np.array_equal(found[name].view(np.uint32), value.view(np.uint32)), name


def test_a_new_tensor_is_in_files_and_index(family: Family, tmp_path: Path) -> None:
    """A checkout is an ordinary checkpoint: header, shard index and sizes name the new tensor."""
    from safetensors.numpy import load_file

    family.store.merge(family.store.plan(ASKED), name="files")
    family.store.checkout("files", tmp_path / "out")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    tensors = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert sorted(tensors) == ["a", "b", "c", "d", "new"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["new"] == index["weight_map"]["a"] == shards[0].name
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert index["metadata"]["total_parameters"] == 5 * N
    assert np.array_equal(tensors["new"], family.store["files"].tensor("new"))


def test_a_budget_holds_over_all_methods(family: Family) -> None:
    """A budget is kept, errors are estimated over all methods, and another run replays it."""
    store = family.store
    asked = dataclasses.replace(ASKED, budget="40%")
    plan = store.plan(asked)
    assert 0 < plan.planned_expert_bytes <= 0.4 * plan.full_expert_bytes
    assert plan.error_bound is None
    assert plan.error_estimate is not None
    assert plan.error_estimate > 0
    merged = store.merge(plan, name="budget")
    assert merged.expert_bytes_read + merged.memo_expert_bytes == plan.planned_expert_bytes
    assert store.replay("budget").same


def test_additive_methods_share_a_bound(family: Family) -> None:
    """If every operation is additive, the bound holds for the whole of the merge."""
    store = family.store
    asked = dataclasses.replace(
        ASKED,
        rules=[TensorRule(tensors="c", method="breadcrumbs", parameters={"density": 0.5})],
    )
    store.merge(store.plan(asked), name="whole")
    plan = store.plan(dataclasses.replace(asked, budget="50%"))
    store.merge(plan, name="half")
    squares = sum(
        float(((store["half"].tensor(n) - store["whole"].tensor(n)).astype(np.float64) ** 2).sum())
        for n in (*NAMES, "new")
    )
    norm = sum(float((value.astype(np.float64) ** 2).sum()) for value in family.base.values())
    assert plan.error_bound is not None
    assert 0 < (squares / norm) ** 0.5 <= plan.error_bound


def test_a_virtual_merge_has_the_same_bytes(family: Family) -> None:
    """A virtual merge gives the real one's bytes, in any order of reads, and becomes it."""
    store = family.store
    plan = store.plan(dataclasses.replace(ASKED, budget="60%"))
    store.merge(plan, name="real")
    store.merge(plan, name="virtual", virtual=True)
    for name in ("new", "c", "b", "a"):
        assert np.array_equal(store["virtual"].tensor(name), store["real"].tensor(name))
    store.materialize("virtual")
    manifests = {store[name].manifest for name in ("real", "virtual")}
    assert len(manifests) == 1


def test_it_is_explained_tensor_by_tensor(family: Family) -> None:
    """Explain and blame name the new tensor, its sources, and each tensor's own method."""
    store = family.store
    store.merge(store.plan(ASKED), name="told")
    told = {one.name: one for one in store.explain("told").tensors}
    assert told["new"].treatment == "merged"
    assert told["new"].sources == ("a", "a", "a")
    assert [told[name].method for name in ("a", "b", "c", "new")] == [
        "task_arithmetic",
        "ties",
        "breadcrumbs",
        "breadcrumbs",
    ]
    assert told["b"].parameters == {"density": 0.3, "lambda": 1.0, "normalize": True}
    blamed = {one.name: one for one in store.blame("told").tensors}
    assert sorted(blamed) == ["a", "b", "c", "d", "new"]
    for one in blamed.values():
        assert sum(share.share or 0 for share in one.experts) == pytest.approx(1, abs=1e-6)


def test_weights_and_types_of_a_rule(family: Family, tmp_path: Path) -> None:
    """A rule may have its own weights and type; the others keep those of the merge."""
    store = family.store
    asked = MergeRequest(
        base="base",
        experts=[("e0", 0.5), ("e1", 0.25)],
        method="task_arithmetic",
        rules=[TensorRule(tensors="b", weights=[0.0, 1.0], dtype="bfloat16")],
    )
    plan = store.plan(asked)
    store.merge(plan, name="weights")
    assert store.replay("weights").same
    store.merge(plan, name="late", virtual=True)
    found = store["weights"].tensor("b")
    assert found.dtype == reference.DTYPES["BF16"]
    wanted = reference.merge(
        "task_arithmetic",
        {},
        [0.0, 1.0],
        family.base["b"],
        [expert["b"] for expert in family.experts],
        out_dtype="BF16",
    )
    assert np.array_equal(found.reshape(-1).view(np.uint16), wanted.view(np.uint16))
    assert np.array_equal(store["late"].tensor("b"), found)
    assert store["weights"].tensor("a").dtype == np.float32
    store.checkout("weights", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * N * 3 + 2 * N


def test_sources_may_differ_by_input(family: Family) -> None:
    """A tensor may be made of another tensor in each input."""
    store = family.store
    asked = MergeRequest(
        base="base",
        experts=["e0", "e1"],
        method="task_arithmetic",
        only=["a"],
        outputs={"mixed": ["a", "b", "c"]},
    )
    store.merge(store.plan(asked), name="mixed")
    base, (first, second) = family.base["a"], family.experts
    deltas = [first["b"] - base, second["c"] - base]
    found = store["mixed"].tensor("mixed").reshape(-1)
    assert np.array_equal(found, base + (deltas[0] + deltas[1]))


def test_slerp_of_each_tensor(family: Family) -> None:
    """Spherical interpolation takes each tensor as one vector, with a bound under a budget."""
    store = family.store
    asked = MergeRequest(base="base", experts=["e1"], method="slerp", parameters={"t": 0.3})
    store.merge(store.plan(asked), name="slerp")
    assert store.replay("slerp").same
    for name in NAMES:
        base, expert = family.base[name], family.experts[1][name]
        one, other = base.astype(np.float64), expert.astype(np.float64)
        angle = np.arccos(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
        wanted = (np.sin(0.7 * angle) * one + np.sin(0.3 * angle) * other) / np.sin(angle)
        assert np.allclose(store["slerp"].tensor(name).reshape(-1), wanted, rtol=1e-5, atol=1e-6)
    plan = store.plan(dataclasses.replace(asked, budget="50%"))
    store.merge(plan, name="slerp-half")
    error = sum(
        float(((store["slerp-half"].tensor(n) - store["slerp"].tensor(n)) ** 2).sum())
        for n in NAMES
    )
    norm = sum(float((value.astype(np.float64) ** 2).sum()) for value in family.base.values())
    assert plan.error_bound is not None
    assert 0 < (error / norm) ** 0.5 <= plan.error_bound
    blamed = store.blame("slerp")
    assert blamed.base_share is not None
    assert blamed.base_share + (blamed.experts[0].share or 0) == pytest.approx(1, abs=1e-6)


def test_a_rule_that_says_nothing_changes_no_plan(family: Family) -> None:
    """A rule without anything of its own gives the plan without the rule, with one operation."""
    store = family.store
    plain = dataclasses.replace(ASKED, rules=(), outputs={})
    ruled = dataclasses.replace(plain, rules=[TensorRule(tensors="a")])
    plans = [store.plan(asked).plan for asked in (plain, ruled)]
    assert plans[0] == plans[1]
    record = store._catalog.record(Plan, plans[0])
    assert len(record.operations) == 1
    assert {tensor.operation for tensor in record.tensors} == {0}


def test_the_page_describes_the_form(family: Family) -> None:
    """A reader written from docs/format.md alone reads such a plan."""
    store = family.store
    plan = store._catalog.record(Plan, store.plan(ASKED).plan)
    read = independent_reader.read_record(independent_reader.PLAN, plan.encode())
    found = {tensor.name: tensor for tensor in read.tensors}
    assert found["new"].sources == ["a", "a", "a"]
    assert [one.method for one in read.operations] == ["task_arithmetic", "ties", "breadcrumbs"]
    assert read.operations[found["c"].operation].parameters["gamma"] == 0.01
    assert len(found["c"].thresholds) == 4
    slerp = MergeRequest(base="base", experts=["e0"], method="slerp", parameters={"t": 0.5})
    plan = store._catalog.record(Plan, store.plan(slerp).plan)
    (base, [factor], keeps) = (
        independent_reader.read_record(independent_reader.PLAN, plan.encode()).tensors[0].mixture
    )
    assert base == pytest.approx(factor)
    assert not keeps


def test_the_text_of_a_plan_holds_all_of_it(family: Family) -> None:
    """A plan with rules is exported and imported under the same id."""
    store = family.store
    plan = store.plan(ASKED)
    text = store.export_plan(str(plan.plan))
    assert json.loads(text)["format"] == "mstore plan 1"
    assert store.import_plan(text).plan == plan.plan


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rules": [TensorRule(tensors="nothing")]}, "no tensor's name matches"),
        ({"rules": [TensorRule(tensors="a", method="tie")]}, "unknown method"),
        ({"rules": [TensorRule(tensors="a", weights=[1.0])]}, "one weight per expert"),
        ({"rules": [TensorRule(tensors="")]}, "patterns"),
        ({"rules": (), "outputs": {"a": "b"}}, "has a tensor of this name"),
        ({"outputs": {"new": "nothing"}}, "has no tensor nothing"),
        ({"outputs": {"__metadata__": "a"}}, "a tensor's name"),
        ({"outputs": {"": "a"}}, "a tensor's name"),
        ({"outputs": {"a\ud800": "a"}}, "a tensor's name"),
        ({"rules": [TensorRule(tensors=[])]}, "at least one pattern"),
        ({"outputs": {"x" * 5000: "a"}}, "a tensor's name"),
        ({"outputs": {"new": ["a", "b"]}}, "one source in the base"),
        ({"rules": ["a"]}, "TensorRule"),
        ({"method": "slerp", "rules": (), "parameters": {"t": 0.5}}, "one expert"),
    ],
)
def test_bad_rules_are_refused(family: Family, change: dict[str, Any], match: str) -> None:
    """A rule or an output that cannot be meant is refused, and nothing is planned."""
    with pytest.raises(BadRequest, match=match):
        family.store.plan(dataclasses.replace(ASKED, **change))


def test_a_rule_without_a_match_names_the_base(family: Family) -> None:
    """The hint for a rule that no tensor matches lists the tensors of the base."""
    with pytest.raises(BadRequest) as refused:
        family.store.plan(dataclasses.replace(ASKED, rules=[TensorRule(tensors="nothing")]))
    assert refused.value.hint == f"store.tensors({ASKED.base!r})"


def test_an_error_in_a_rule_names_the_rule(family: Family) -> None:
    """Of several rules, the error tells which one is wrong."""
    rules = [TensorRule(tensors="a"), TensorRule(tensors="b", parameters={"densty": 1})]
    with pytest.raises(BadRequest) as refused:
        family.store.plan(dataclasses.replace(ASKED, rules=rules))
    assert refused.value.where == "the rule for b"


def test_reports_and_the_card_tell_of_rules(family: Family) -> None:
    """A plan's remarks count what rules merge; the card's command makes this one, not another."""
    store = family.store
    plan = store.plan(ASKED)
    assert "tensors that a rule merges otherwise: 1 by ties, 2 by breadcrumbs" in plan.remarks
    assert "tensors that the base does not have: new" in plan.remarks
    store.merge(plan, name="card")
    card = store["card"].read("README.md").decode()
    assert "mstore merge --plan REF --name NEW" in card
    assert "--method" not in card
    assert store.explain("card", "b").tensors[0].dtype == "F32"


def test_a_rule_that_no_tensor_follows_is_noted(family: Family) -> None:
    """The first rule that names a tensor counts; a later one that is left with none is told."""
    rules = [*ASKED.rules, TensorRule(tensors=["b", "c"], method="linear")]
    remarks = family.store.plan(dataclasses.replace(ASKED, rules=rules)).remarks
    assert any(remark.startswith("no tensor follows the rule for b, c") for remark in remarks)
    assert not any("no tensor follows" in remark for remark in family.store.plan(ASKED).remarks)


def test_slerp_of_nothing_is_the_base(family: Family) -> None:
    """With t = 0 the result is the base, which a plan refuses like any other such merge."""
    asked = MergeRequest(base="base", experts=["e0"], method="slerp", parameters={"t": 0})
    with pytest.raises(BadRequest, match="the base itself"):
        family.store.plan(asked)


def test_slerp_says_what_it_needs(family: Family) -> None:
    """Slerp without t, or with a weight, is refused with what to give instead."""
    asked = MergeRequest(base="base", experts=["e0"], method="slerp")
    with pytest.raises(BadRequest, match="needs a value for t"):
        family.store.plan(asked)
    with pytest.raises(BadRequest, match="has no weight"):
        family.store.plan(dataclasses.replace(asked, experts=[("e0", 0.5)], parameters={"t": 0.5}))


def test_shapes_of_sources_must_agree(tmp_path: Path) -> None:
    """A new tensor of sources with different shapes is refused."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", "e0"):
            write_safetensors(
                tmp_path / f"{name}.safetensors",
                [
                    (one, "F32", (size,), np.full(size, len(name), dtype=np.float32).tobytes())
                    for one, size in (("a", 100), ("b", 200))
                ],
            )
            store.add(tmp_path / f"{name}.safetensors", name=name)
        with pytest.raises(Incompatible, match="shape"):
            store.plan(
                MergeRequest(
                    base="base", experts=["e0"], method="linear", outputs={"new": ["a", "b"]}
                )
            )


EACH: dict[str, dict[str, Any]] = {
    "ties": {"density": (0.2, 0.7)},
    "breadcrumbs": {"density": (1.0, 0.3), "gamma": (0.1, 0.05)},
    "dare_ties": {"density": (0.3, 1.0), "seed": 3},
    "dare_linear": {"density": (0.25, 0.75), "seed": 3},
    "della": {"density": (0.4, 0.7), "epsilon": (0.1, 0.2), "seed": 3},
    "della_linear": {"density": (0.5, 1.0), "epsilon": (0.2, 0.1), "rescale": False},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("method", EACH)
def test_each_expert_may_have_its_own_values(family: Family, method: str) -> None:
    """A parameter may have a value for each expert: merged, replayed, exported, explained."""
    store, given = family.store, EACH[method]
    asked = MergeRequest(base="base", experts=["e0", "e1"], method=method, parameters=given)
    plan = store.plan(asked)
    assert plan.parameters.items() >= given.items()
    store.merge(plan, name=f"each-{method}")
    for name in NAMES:
        wanted = family.reference(method, given, name)
        found = store[f"each-{method}"].tensor(name).reshape(-1)
        assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32)), name
    assert store.replay(f"each-{method}").same
    assert store.import_plan(store.export_plan(str(plan.plan))).plan == plan.plan
    record = store._catalog.record(Plan, plan.plan)
    (operation,) = independent_reader.read_record(
        independent_reader.PLAN, record.encode()
    ).operations
    assert operation.parameters.items() >= given.items()
    blamed = store.blame(f"each-{method}").tensors[0]
    assert sum(share.share or 0 for share in blamed.experts) == pytest.approx(1, abs=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["breadcrumbs", "dare_linear"])
def test_a_bound_counts_each_density(family: Family, method: str) -> None:
    """Under a budget, the certified bound holds where experts have densities of their own."""
    store = family.store
    asked = MergeRequest(base="base", experts=["e0", "e1"], method=method, parameters=EACH[method])
    store.merge(store.plan(asked), name="all")
    plan = store.plan(dataclasses.replace(asked, budget="40%"))
    store.merge(plan, name="part")
    squares = sum(
        float(((store["part"].tensor(n) - store["all"].tensor(n)).astype(np.float64) ** 2).sum())
        for n in NAMES
    )
    norm = sum(float((value.astype(np.float64) ** 2).sum()) for value in family.base.values())
    error = (squares / norm) ** 0.5
    assert plan.error_bound is not None
    assert plan.error_estimate is not None
    assert 0 < error <= plan.error_bound
    assert 0.5 < error / plan.error_estimate < 2


def test_what_an_expert_has_of_its_own_is_in_memo_keys(family: Family) -> None:
    """Two merges that differ in one expert's density share no result but the other's chunks."""
    store = family.store
    asked = MergeRequest(
        base="base", experts=["e0", "e1"], method="dare_ties", parameters={"density": (0.5, 0.25)}
    )
    other = dataclasses.replace(asked, parameters={"density": (0.25, 0.5)})
    store.merge(store.plan(asked), name="memo")
    merged = store.merge(store.plan(other), name="memo-other")
    assert merged.memo_expert_bytes == 0
    for name in NAMES:
        wanted = family.reference("dare_ties", dict(other.parameters), name)
        assert np.array_equal(store["memo-other"].tensor(name).reshape(-1), wanted), name


def test_equal_values_are_one(family: Family) -> None:
    """The same value for each expert is that value: the plan is the same."""
    store = family.store
    asked = MergeRequest(
        base="base", experts=["e0", "e1"], method="ties", parameters={"density": 0.5}
    )
    plan = store.plan(asked)
    for same in ([0.5, 0.5], "0.5,0.5", (0.5, 0.5)):
        assert (
            store.plan(dataclasses.replace(asked, parameters={"density": same})).plan == plan.plan
        )
    operation = store._catalog.record(Plan, plan.plan).operation
    assert dict(operation.parameters)["density"] == 0.5


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"density": (0.5,) * 3}, "3 values; there are 2 experts"),
        ({"density": (0.5, 2.0)}, "density must be in"),
        ({"density": ()}, "not none"),
        ({"density": "0.5,"}, "takes a number"),
        ({"lambda": (0.5, 1.0)}, "the same for all experts"),
    ],
)
def test_bad_values_of_experts_are_refused(
    family: Family, given: dict[str, Any], match: str
) -> None:
    """As many values as experts, each in range, and only where experts may differ."""
    with pytest.raises(BadRequest, match=match):
        family.store.plan(
            MergeRequest(base="base", experts=["e0", "e1"], method="ties", parameters=given)
        )
