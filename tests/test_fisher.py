"""fisher: averages by diagonal Fishers, which are checkpoints beside the experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
from cli_runs import Program
from families import BLOCK, Arrays, Family
from msgspec import structs
from test_budget import Place, make

from mstore import MergeRequest, Store, TensorRule, Vocabulary
from mstore.merge.methods.fisher import ROLE, sums_of
from mstore.merge.planning.validate import check_fits
from mstore.store.models import tensors_of
from mstore.store.objects.plan import (
    BELOW,
    EQUAL,
    OMITTED,
    READ,
    SHARED,
    Plan,
    PlanInput,
    PlanTensor,
)
from mstore.terms.errors import BadRequest, Incompatible

SHAPES = {"a": (70, 1024), "b": (50, 1000), "still": (40, 1000), "tiny": (7,)}
MOVED = ("a", "b", "tiny")
WEIGHTS = (1.0, 0.5, 0.75)
FISHERS = ("f0", "f1", "f2")
TOLD = tuple((f"fisher:e{k}", f"f{k}") for k in range(3))


def asked(**options: Any) -> MergeRequest:
    given: dict[str, Any] = {
        "base": "base",
        "experts": list(zip(("e0", "e1", "e2"), WEIGHTS, strict=True)),
        "fishers": FISHERS,
        "method": "fisher",
    }
    given |= options
    given["companions"] = families.fishers_for(given["experts"], given.pop("fishers"))
    return MergeRequest(**given)


def informations(rng: np.random.Generator, dtype: str, sizes: dict[str, tuple[int, ...]]) -> Arrays:
    """As they are: over many powers of ten, and zero in places."""
    found = {}
    for name, shape in sizes.items():
        values = 10.0 ** rng.uniform(-14, -4, shape) * (rng.random(shape) < 0.8)
        found[name] = families.cast(values, dtype)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Three experts of two types, and Fishers of two.  Expert 0 has the base's second chunk of b,
    and only expert 1 moves what lies at the end of a."""
    rng = np.random.default_rng(4)
    base = {name: families.cast(rng.standard_normal(one), "BF16") for name, one in SHAPES.items()}
    experts = []
    for own in ("BF16", "F32", "BF16"):
        moved = {"still": base["still"]}
        for name in MOVED:
            step = 0.05 * rng.standard_normal(SHAPES[name])
            moved[name] = families.cast(base[name].astype(np.float32) + step, own)
        experts.append(moved)
    experts[0]["b"][32:] = base["b"][32:]
    for k in (0, 2):
        experts[k]["a"][64:] = base["a"][64:]
    fishers = tuple(informations(rng, own, SHAPES) for own in ("F32", "BF16", "F32"))
    # Nobody knows anything of the last elements.
    for one in fishers:
        one["tiny"][5:] = 0
    made = make(tmp_path_factory.mktemp("family"), Family(base, tuple(experts), fishers))
    with made.store:
        yield made


def wanted(place: Place, name: str, weights: Any = WEIGHTS, floor: float = 0.0, **more: Any) -> Any:
    sides = [one[name] for one in (*place.family.experts, *place.family.fishers)]
    return reference.merge(
        "fisher", {"floor": floor}, weights, place.family.base[name], sides, out_dtype="F32", **more
    )


def absent_in(place: Place, tensor: PlanTensor) -> list[Any]:
    """The elements of each expert, and of each Fisher, that a plan does not read."""
    n = place.family.base[tensor.name].size
    return [
        np.repeat(np.frombuffer(states, np.uint8) > SHARED, tensor.chunk_elements)[:n]
        for states in tensor.states
    ]


def same(found: Any, exact: Any) -> bool:
    return np.array_equal(found.view(np.uint32), exact.view(np.uint32))


def test_the_formula_is_that_of_the_paper(place: Place) -> None:
    """sum w F theta / sum w F, of whole experts, in exact enough arithmetic."""
    place.store.merge(place.store.plan(asked(dtype="F32")), name="merged")
    for name in MOVED:
        above, below = np.zeros(SHAPES[name]), np.zeros(SHAPES[name])
        for weight, one, fisher in zip(
            WEIGHTS, place.family.experts, place.family.fishers, strict=True
        ):
            factor = weight * fisher[name].astype(np.float64)
            above += factor * one[name].astype(np.float64)
            below += factor
        known = below > 0
        found = place.store["merged"].tensor(name)[known]
        assert np.allclose(found, above[known] / below[known], rtol=3e-7, atol=0)
        assert known.mean() > 0.9 or name == "tiny"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "limits",
    [
        {"budget": "20%"},
        {"budget": "80%"},
        {"top_p": 0.5},
        {"expert_budget": "20%"},
        {"max_error": 0.01},
    ],
    ids=str,
)
def test_an_expert_is_read_with_its_fisher_or_not_at_all(
    place: Place, limits: dict[str, Any]
) -> None:
    """Whatever limits it, what is left out of an expert is left out of both sums, stored and
    computed on read."""
    plan = place.store.plan(asked(dtype="F32", **limits))
    assert 0 < plan.planned_expert_bytes < plan.full_expert_bytes
    done = place.store.merge(plan, name="part", memo=False)
    assert done.expert_bytes_read == plan.planned_expert_bytes
    place.store.merge(plan, name="virtual", virtual=True)
    left = 0
    for tensor in place.store._catalog.record(Plan, plan.plan).tensors:
        for expert, fisher in zip(tensor.states[:3], tensor.states[3:], strict=True):
            for own, theirs in zip(expert, fisher, strict=True):
                assert (theirs in (READ, SHARED)) == (own in (READ, SHARED)) or own == EQUAL
                left += theirs not in (READ, SHARED)
        exact = wanted(place, tensor.name, absent=absent_in(place, tensor))
        for ref in ("part", "virtual"):
            assert same(place.store[ref].tensor(tensor.name), exact), tensor.name
    assert left
    if "max_error" in limits:
        assert (plan.error_estimate or 0) <= limits["max_error"]


def test_what_cannot_count_is_not_read(place: Place) -> None:
    """Where no expert moves, no Fisher is read; an expert that is the base's is read as its Fisher
    alone; one without weight or without information there not at all."""
    rng = np.random.default_rng(9)
    nothing = informations(rng, "F32", SHAPES)
    nothing["a"][:32] = 0
    families.write_checkpoint(place.root / "nothing", nothing)
    place.store.add(place.root / "nothing", name="nothing")
    plan = place.store.plan(
        asked(experts=["e0", "e1", ("e2", 0.0)], fishers=["nothing", "f1", "f2"])
    )
    found = {one.name: one for one in place.store._catalog.record(Plan, plan.plan).tensors}
    assert "still" not in found
    a, b = found["a"].states, found["b"].states
    # 16 rows of a are a block of Fisher, 32 one of bfloat16.
    assert list(a[0][:2]) == [BELOW, READ]
    assert list(a[3][:2]) == [BELOW, READ]
    assert list(a[0][2:]) == [EQUAL]
    assert list(a[3][2:]) == [READ]
    assert set(a[2] + b[2]) <= {BELOW, EQUAL}
    assert set(a[5] + b[5]) == {BELOW}


@pytest.mark.rest
def test_shared_halves_are_read_once(place: Place) -> None:
    """Experts that share their own blocks or those of Fishers pay for these once, at any budget,
    and a full budget in bytes is a merge without one."""
    cases = (
        (["e0", "same", "e2"], ["f0", "f1", "f2"]),
        (["e0", "e1", "e2"], ["f0", "f0", "f0"]),
        (["e0", "same", "e2"], ["f0", "f2", "f2"]),
        (["e0", "same", "e2"], ["f0", "f0", "f2"]),
    )
    place.store.tag("same", "e0")
    shares = ("30%", "70%", "30%", "70%")
    for (experts, fishers), share in zip(cases, shares, strict=True):
        own = asked(experts=experts, fishers=fishers, dtype="F32")
        full = place.store.plan(own)
        whole = place.store.merge(full, name="whole", memo=False)
        assert whole.expert_bytes_read == full.planned_expert_bytes
        again = place.store.plan(own)
        assert again.full_expert_bytes == full.full_expert_bytes
        exact = dataclasses.replace(own, budget=full.full_expert_bytes)
        limited = place.store.merge(place.store.plan(exact), name="exact", memo=False)
        assert limited.manifest == whole.manifest
        plan = place.store.plan(dataclasses.replace(own, budget=share))
        assert plan.planned_expert_bytes <= (plan.budget_bytes or 0)
        done = place.store.merge(plan, name="part", memo=False)
        assert done.expert_bytes_read == plan.planned_expert_bytes


def test_what_is_not_read_is_not_shared(place: Place) -> None:
    """Experts that are both the base's in a block have their Fishers chosen one by one."""
    found = set()
    for percent in range(5, 100, 10):
        plan = place.store.plan(asked(budget=f"{percent}%"), allow_noop=True)
        (tensor,) = (
            one for one in place.store._catalog.record(Plan, plan.plan).tensors if one.name == "a"
        )
        assert (tensor.states[0][-1], tensor.states[2][-1]) == (EQUAL, EQUAL)
        found.add((tensor.states[3][-1], tensor.states[5][-1]))
    assert found & {(READ, OMITTED), (OMITTED, READ)}


def test_one_expert_is_that_expert(place: Place) -> None:
    """Where it has any information, whatever its weight; else the base."""
    plan = place.store.plan(asked(experts=[("e1", 0.3)], fishers=["f1"], dtype="F32"))
    place.store.merge(plan, name="one")
    for name in MOVED:
        known = place.family.fishers[1][name].astype(np.float32) > 0
        base = place.family.base[name].astype(np.float32)
        exact = np.where(known, place.family.experts[1][name], base)
        assert same(place.store["one"].tensor(name), exact)


@pytest.mark.rest
def test_a_fisher_may_lack_what_no_expert_moves(place: Place) -> None:
    """And what one moves if that is allowed: then the expert has no part in it, with any floor."""
    short = {name: one for name, one in place.family.fishers[0].items() if name != "still"}
    families.write_checkpoint(place.root / "short", short)
    place.store.add(place.root / "short", name="short")
    names = ["short", "f1", "f2"]
    merged = place.store.merge(place.store.plan(asked(fishers=names)), name="short-merged")
    usual = place.store.merge(place.store.plan(asked()), name="usual")
    found, exact = (place.store._catalog.manifest(one.manifest) for one in (merged, usual))
    catalog = place.store._catalog
    assert tensors_of(catalog, found) == tensors_of(catalog, exact)
    # Tensors that are only converted need none, either.
    place.store.merge(place.store.plan(asked(fishers=names, dtype="F32")), name="wide")
    base = place.family.base["still"].astype(np.float32)
    assert same(place.store["wide"].tensor("still"), base)
    families.write_checkpoint(place.root / "shorter", {"a": short["a"], "tiny": short["tiny"]})
    place.store.add(place.root / "shorter", name="shorter")
    names[0] = "shorter"
    with pytest.raises(Incompatible, match="lacks b: a Fisher has the tensors"):
        place.store.plan(asked(fishers=names))
    for floor in (0.0, 1e-6):
        own = asked(fishers=names, allow_missing=True, parameters={"floor": floor}, dtype="F32")
        plan = place.store.plan(own)
        told = [one.text for one in plan.warnings if one.kind == "other tensors"]
        assert told == ["shorter lacks b: its expert has no part in them"]
        place.store.merge(plan, name="lacking")
        gone = np.ones(SHAPES["b"], dtype=bool)
        here = np.zeros(SHAPES["b"], dtype=bool)
        exact = wanted(place, "b", floor=floor, absent=[gone, here, here, gone, here, here])
        assert same(place.store["lacking"].tensor("b"), exact)
        assert place.store.replay("lacking").same


@pytest.mark.parametrize("value", [-1e-9, np.nan, np.inf])
def test_what_is_no_information_is_refused(place: Place, value: float) -> None:
    """By the plan, which names tensor and Fisher, and without analysis by the merge."""
    bad = {name: one.copy() for name, one in place.family.fishers[0].items()}
    bad["b"][30, 1] = value
    name = f"bad{value}".replace("-", "")
    families.write_checkpoint(place.root / name, bad)
    place.store.add(place.root / name, name=name)
    own = asked(fishers=[name, "f1", "f2"])
    with pytest.raises(Incompatible, match=r"negative, infinite or NaN") as error:
        place.store.plan(own)
    assert error.value.where == f"{name}: b"
    plan = place.store.plan(dataclasses.replace(own, analyze=False))
    before = place.store.refs()
    with pytest.raises(Incompatible, match=r"negative, infinite or NaN"):
        place.store.merge(plan, name="unsound", memo=False)
    assert place.store.refs() == before


def test_what_is_refused(place: Place) -> None:
    """Too few Fishers, other methods, negative weights, other shapes and names, adapters' words."""
    store = place.store
    for options, says in (
        ({"fishers": ["f0"]}, "a Fisher for each expert: e1, e2 have none"),
        ({"fishers": []}, "have none"),
        ({"method": "linear"}, "linear takes no companions"),
        ({"rules": [TensorRule(tensors="a", method="linear")]}, "of all tensors or of none"),
        ({"score": "trimmed"}, "trims nothing"),
    ):
        with pytest.raises(BadRequest, match=says):
            store.plan(asked(**options))
    with pytest.raises(BadRequest, match="of all tensors or of none"):
        store.plan(
            MergeRequest(
                base="base",
                experts=["e0"],
                method="linear",
                rules=[TensorRule(tensors="a", method="fisher")],
            )
        )
    with pytest.raises(BadRequest, match="tokens that they have now"):
        store.align(asked(), Vocabulary())
    for name, change, says in (
        ("shape", {"a": place.family.fishers[0]["a"].T.copy()}, r"a is F32 \[1024, 70\]"),
        ("doubles", {"a": place.family.fishers[0]["a"].astype(np.float64)}, r"a is F64"),
        ("more", {"other": place.family.fishers[0]["a"]}, "has, and the base does not, other"),
    ):
        families.write_checkpoint(place.root / name, place.family.fishers[0] | change)
        store.add(place.root / name, name=name)
        with pytest.raises(Incompatible, match=says):
            store.plan(asked(fishers=[name, "f1", "f2"]))
    families.write_checkpoint(place.root / "alien", {"other": place.family.fishers[0]["a"]})
    store.add(place.root / "alien", name="alien")
    with pytest.raises(Incompatible, match="Fisher of another model"):
        store.plan(asked(fishers=["alien", "f1", "f2"], allow_missing=True))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("n", [1, 7, 65536, 150_001])
def test_sums_are_those_of_all_elements(dtype: str, n: int) -> None:
    """Of the first n elements and of their squares, whatever lies behind them; zero has either
    sign, and of what is no information there is no sum."""
    rng = np.random.default_rng(n)
    values = families.cast(10.0 ** rng.uniform(-7, 4, n + 3), dtype)
    values[0] = -0.0
    data = values.view(np.uint8)
    wide = values[:n].astype(np.float64)
    exact = math.fsum(wide), math.fsum(wide * wide)
    assert sums_of(data, dtype, n) == pytest.approx(exact, rel=1e-14)
    for bad in (-1e-6, np.nan, np.inf):
        values[n - 1] = bad
        assert np.isnan(sums_of(data, dtype, n)).all()


def test_the_weight_of_the_only_expert_has_no_effect(place: Place) -> None:
    """And a plan says so."""
    told = "the weight of e1 has no effect: it is the only one, and the method divides"
    for weight, wanted in ((0.5, 1), (1.0, 0)):
        plan = place.store.plan(asked(experts=[("e1", weight)], fishers=["f1"]))
        assert sum(remark.startswith(told) for remark in plan.remarks) == wanted


def test_recipes_name_companions(place: Place) -> None:
    """A recipe names them by what they are of; that of a merge by this method gives its plan again,
    and so does the command on its card."""
    place.store.merge(place.store.plan(asked()), name="merged")
    recipe = place.store.recipe("merged")
    assert "companions:" in recipe
    assert f'  "fisher:e1": "f1"  # {place.store["f1"].manifest.hex()}\n' in recipe
    again = place.store.read_recipe(recipe).request
    assert place.store.plan(again).plan == place.store.plan(asked()).plan
    stored = place.store["merged"].read("mergekit_config.yml").decode()
    by_ids = place.store.read_recipe(stored).request
    assert place.store.plan(by_ids).plan == place.store.plan(asked()).plan
    card = place.store["merged"].read("README.md").decode()
    assert "# A merge of 3 models by fisher" in card
    ids = [place.store[name].manifest.hex() for name in FISHERS]
    of = [place.store[name].manifest.hex() for name in ("e0", "e1", "e2")]
    assert all(f"fisher:{one}={id}" in card for one, id in zip(of, ids, strict=True))
    assert card.split("---")[1].count('- "') == 4
    command = next(one for one in card.splitlines() if one.startswith("mstore merge"))
    words = command.split()
    experts = [
        one.split("=")
        for one, before in zip(words[1:], words, strict=False)
        if before == "--expert"
    ]
    again = asked(
        base=words[words.index("--base") + 1],
        experts=[(name, float(weight)) for name, weight in experts],
        fishers=ids,
    )
    assert place.store.plan(again).plan == place.store.plan(asked()).plan


def test_rules_may_have_floors_and_weights_of_their_own(place: Place) -> None:
    """A tensor's own parameters and weights count for it alone."""
    rule = TensorRule(tensors="b", parameters={"floor": 1e-5}, weights=(0.0, 2.0, 1.0))
    place.store.merge(place.store.plan(asked(rules=[rule], dtype="F32")), name="ruled")
    assert same(place.store["ruled"].tensor("a"), wanted(place, "a"))
    exact = wanted(place, "b", weights=(0.0, 2.0, 1.0), floor=1e-5)
    gone = np.ones(SHAPES["b"], dtype=bool)
    here = np.zeros(SHAPES["b"], dtype=bool)
    exact = wanted(
        *(place, "b", (0.0, 2.0, 1.0), 1e-5), absent=[gone, here, here, gone, here, here]
    )
    assert same(place.store["ruled"].tensor("b"), exact)
    assert place.store.replay("ruled").same


def test_a_plan_that_reads_one_without_the_other_is_refused(place: Place) -> None:
    """Also one that reads a Fisher that is not there."""
    made = place.store.plan(asked(dtype="F32"))
    plan = place.store._catalog.record(Plan, made.plan)
    check_fits(place.store._catalog, plan)
    (number,) = (n for n, one in enumerate(plan.tensors) if one.name == "b")

    def changed(expert: int, state: int) -> Plan:
        states = list(plan.tensors[number].states)
        states[expert] = bytes([state]) + states[expert][1:]
        tensors = list(plan.tensors)
        tensors[number] = structs.replace(tensors[number], states=tuple(states))
        return structs.replace(plan, tensors=tuple(tensors))

    for expert, state in ((0, OMITTED), (3, OMITTED), (3, EQUAL), (0, BELOW)):
        with pytest.raises(BadRequest, match="does not fit this tensor"):
            check_fits(place.store._catalog, changed(expert, state))
    lacking = {name: one for name, one in place.family.fishers[0].items() if name != "b"}
    families.write_checkpoint(place.root / "lacks-b", lacking)
    place.store.add(place.root / "lacks-b", name="lacks-b")
    other = PlanInput(ROLE, 1, place.store["lacks-b"].manifest)
    inputs = (*plan.inputs[:4], other, *plan.inputs[5:])
    with pytest.raises(BadRequest, match="does not fit this tensor"):
        check_fits(place.store._catalog, structs.replace(plan, inputs=inputs))


def test_a_plan_of_other_companions_is_refused(place: Place) -> None:
    """A Fisher for each expert, and nothing else: that is what the method needs."""
    made = place.store.plan(asked(dtype="F32"))
    plan = place.store._catalog.record(Plan, made.plan)
    base, *experts = plan.inputs[:4]
    fishers = plan.inputs[4:]
    assert [(one.role, one.of) for one in fishers] == [(ROLE, 1), (ROLE, 2), (ROLE, 3)]
    merge, of_base = (structs.replace(fishers[0], of=of) for of in (None, 0))
    for companions in ((), fishers[:2], fishers[1:], (merge, *fishers), (of_base, *fishers)):
        changed = structs.replace(plan, inputs=(base, *experts, *companions))
        with pytest.raises(BadRequest, match="companions are not those of its method"):
            check_fits(place.store._catalog, changed)


def test_a_plan_elsewhere_is_the_same(place: Place, tmp_path: Path) -> None:
    """Exported and imported, in a store of other codecs: the same plan, the same merge."""
    plan = place.store.plan(asked(budget="60%"))
    merged = place.store.merge(plan, name="here", memo=False)
    with Store.init(tmp_path / "elsewhere", block_size=BLOCK) as other:
        for name in ("base", "e0", "e1", "e2", *FISHERS):
            other.add(place.root / name, name=name)
        taken = other.import_plan(place.store.export_plan(str(plan.plan)))
        assert taken.plan == plan.plan
        named = {name: other[name].id.short for name in ("e0", "e1", "e2", *FISHERS)}
        assert [name for name, _ in taken.experts] == [named[f"e{k}"] for k in range(3)]
        assert taken.companions == tuple(
            (f"fisher:{named[f'e{k}']}", named[f"f{k}"]) for k in range(3)
        )
        assert other.merge(taken, name="there").manifest == merged.manifest


@pytest.mark.rest
def test_tied_names_have_one_fisher(tmp_path: Path) -> None:
    """That of the first name, also if a Fisher says something else of the other, or nothing."""
    family = families.layered(3, rows=70).informed()
    less = [
        {name: one for name, one in fisher.items() if name != "model.tied.embed_out"}
        for fisher in family.fishers
    ]
    made = make(tmp_path, family)
    with made.store as store:
        for k, fisher in enumerate(less):
            families.write_checkpoint(tmp_path / f"less{k}", fisher)
            store.add(tmp_path / f"less{k}", name=f"less{k}")
        exact = families.expected(family, "fisher", {}, WEIGHTS)
        for names in (FISHERS, ["less0", "less1", "less2"]):
            store.merge(store.plan(asked(fishers=names)), name="tied")
            found = {name: store["tied"].tensor(name) for name in exact}
            assert families.differences(found, exact) == []
            assert store.replay("tied").same


def test_what_people_type(place: Place) -> None:
    """`--with` once for each expert; a plan shows them, and one of nothing is refused."""
    mstore = Program(place.store.path)
    words = ["--base", "base", "--method", "fisher"]
    for expert, fisher in zip(("e0", "e1=0.5", "e2"), FISHERS, strict=True):
        words += ["--expert", expert, "--with", f"fisher:{expert.partition('=')[0]}={fisher}"]
    shown = mstore.succeed("plan", *words)
    told = ["with", "fisher:e0=f0,", "fisher:e1=f1,", "fisher:e2=f2"]
    assert any(line.split() == told for line in shown.lines)
    document = mstore.succeed("plan", *words, "--json").document
    assert document["companions"] == list(map(list, TOLD))
    assert document["experts"] == [["e0", 1.0], ["e1", 0.5], ["e2", 1.0]]
    mstore.succeed("merge", *words, "--name", "typed")
    swept = mstore.succeed("plan", *words, "--sweep", "--json").document
    assert swept["companions"] == list(map(list, TOLD))
    mstore.succeed("merge", *words, "--name", "again")
    (place.root / "r.yml").write_text(mstore.succeed("recipe", "again").out)
    mstore.succeed("merge", "--recipe", place.root / "r.yml", "--name", "by-recipe")
    assert place.store["by-recipe"].manifest == place.store["again"].manifest
    for wrong, says in (
        ("fisher:e9=f0", "'e9' is neither base nor one of the experts"),
        ("heat:e0=f0", "no companion has the role 'heat'"),
        ("fisher:base=f0", "and nothing else has one"),
        ("fisher=f0", "and nothing else has one"),
        ("fisher:e0=f1", "given twice"),
        ("f0", "not ROLE=REF"),
    ):
        refused = mstore("plan", *words, "--with", wrong)
        assert refused.status == 2
        assert says in refused.err
        assert "--with" in refused.err
    lost = mstore("plan", *words[:-1], f"fisher:e2={place.root / 'f2'}")
    assert "it is a directory" in lost.err
    assert mstore("merge", "--plan", "typed", "--with", "fisher:e0=f0", "--name", "x").status == 2


def test_checks_compare_models_only(place: Place) -> None:
    """A Fisher has no config and no tokenizer, and needs none."""
    for name, tensors in (("plain", place.family.base), ("tuned", place.family.experts[0])):
        families.write_checkpoint(place.root / name, tensors)
        (place.root / name / "tokenizer.json").unlink()
        place.store.add(place.root / name, name=name)
    report = place.store.check_merge(asked(base="plain", experts=["tuned"], fishers=["f0"]))
    assert report.experts == ("tuned",)
    assert report.findings == ()


def test_outputs_have_the_fishers_of_their_sources(place: Place) -> None:
    """A new tensor is made of a named one, whose Fisher counts."""
    plan = place.store.plan(asked(outputs={"again": "a"}, dtype="F32"))
    place.store.merge(plan, name="more")
    assert same(place.store["more"].tensor("again"), wanted(place, "a"))


def test_shares_of_the_change_add_up(place: Place) -> None:
    """Blame is of experts only, their shares add up to one, and are those of the definition."""
    plan = place.store.plan(asked(dtype="F32"))
    place.store.merge(plan, name="merged")
    told = place.store.blame("merged")
    assert [one.expert for one in told.experts] == ["e0", "e1", "e2"]
    assert told.base_share == 0
    assert sum(one.share or 0 for one in told.experts) == pytest.approx(1, abs=1e-12)
    (of_a,) = (one for one in told.tensors if one.name == "a")
    base = place.family.base["a"].astype(np.float64)
    factors = [
        weight * one["a"].astype(np.float64)
        for weight, one in zip(WEIGHTS, place.family.fishers, strict=True)
    ]
    total = sum(factors)
    parts = [
        factor * (one["a"].astype(np.float64) - base) / np.where(total > 0, total, 1)
        for factor, one in zip(factors, place.family.experts, strict=True)
    ]
    whole = sum(parts)
    for part, one in zip(parts, of_a.experts, strict=True):
        assert one.norm == pytest.approx(np.linalg.norm(part), rel=1e-9)
        assert one.share == pytest.approx((part * whole).sum() / (whole * whole).sum(), rel=1e-9)
    told_by_plan = place.store.explain("merged")
    assert told_by_plan.plan.companions == TOLD
    sides = [(one.expert, one.role, one.weight) for one in told_by_plan.experts]
    of_experts = [(f"e{k}", "expert", weight) for k, weight in enumerate(WEIGHTS)]
    assert sides == [*of_experts, *((name, role, None) for role, name in TOLD)]
    (of_tensor,) = place.store.explain("merged", "a").tensors
    assert [(one.role, one.weight) for one in of_tensor.experts] == [one[1:] for one in sides]


def test_a_larger_share_of_the_budget_goes_to_who_knows_more(place: Place) -> None:
    """Of two experts that move alike, the one whose Fisher is larger is read first."""
    base = place.family.base
    rng = np.random.default_rng(1)
    for k in range(2):
        step = 0.05 * rng.standard_normal(SHAPES["a"])
        moved = base | {"a": families.cast(base["a"].astype(np.float32) + step, "BF16")}
        size = 1e-6 if k else 1e-9
        known = {"a": families.cast(size * (1 + rng.random(SHAPES["a"])), "F32")}
        families.write_checkpoint(place.root / f"m{k}", moved)
        families.write_checkpoint(place.root / f"k{k}", known)
        place.store.add(place.root / f"m{k}", name=f"m{k}", base="base")
        place.store.add(place.root / f"k{k}", name=f"k{k}")
    plan = place.store.plan(
        asked(experts=["m0", "m1"], fishers=["k0", "k1"], budget="50%", allow_missing=False)
    )
    (tensor,) = place.store._catalog.record(Plan, plan.plan).tensors
    assert set(tensor.states[1]) == {READ}
    assert set(tensor.states[0]) == {OMITTED}
    # Little is lost with who knows little.
    assert plan.error_share_estimate is not None
    assert plan.error_share_estimate < 0.01
