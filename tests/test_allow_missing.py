"""`allow_missing`: experts that lack tensors of the base, or have tensors that it lacks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from cli_runs import Program
from families import BLOCK, Array, Arrays, Family
from test_every_method import asked

from mstore import MergeRequest, Store
from mstore.merge.methods.registry import METHODS
from mstore.terms.errors import BadRequest, Incompatible

TASK = MergeRequest(
    base="base", experts=["part", "whole"], method="task_arithmetic", allow_missing=True
)
COMPANIONS = ("fisher", "gram", families.INPUTS)
ALL = replace(TASK, experts=["whole"], allow_missing=False)


def tuned(values: Array, seed: int) -> Array:
    noise = np.random.default_rng(seed).standard_normal(values.shape)
    return families.cast(values.astype("f4") + 0.1 * noise, "BF16")


def base() -> Arrays:
    rng = np.random.default_rng(5)
    sizes = {"embed_tokens.weight": 100, "a.w": 300, "b.w": 200, "c.w": 5, "lm_head.weight": 100}
    return {name: families.cast(rng.standard_normal((n, 256)), "BF16") for name, n in sizes.items()}


def expert(of: Arrays, seed: int) -> Arrays:
    return {name: tuned(values, seed + n) for n, (name, values) in enumerate(of.items())}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`part` lacks two tensors and has two more; `filled` is `part` with the base's in their place;
    `whole` has all; `alien` has none of them."""
    directory = tmp_path_factory.mktemp("models")
    models = {"base": base()}
    models["whole"] = expert(models["base"], 20)
    part = expert(models["base"], 30)
    models["filled"] = part | {name: models["base"][name] for name in ("b.w", "c.w")}
    models["part"] = {name: part[name] for name in part if name not in ("b.w", "c.w")}
    models["part"] |= {"b.extra": part["b.w"], "z.extra": part["c.w"]}
    models["alien"] = {"x.w": part["a.w"]}
    known = Family(models["base"], (part,)).informed(dtypes=("F32",))
    models["fisher"], models["gram"] = known.fishers[0], known.facts["g0"]
    models[families.INPUTS] = known.facts[families.INPUTS]
    for name, tensors in models.items():
        families.write_checkpoint(directory / name, tensors)
        (directory / name / "tokenizer.json").unlink()
        # Their heads are their own.
        (directory / name / "config.json").write_text('{"tie_word_embeddings": false}')
    return directory


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Store]:
    with Store.init(root / "store", block_size=BLOCK) as store:
        for name in (*("base", "whole", "filled", "part", "alien"), *COMPANIONS):
            store.add(root / name, name=name)
        yield store


def merged(store: Store, request: MergeRequest, name: str = "m") -> Arrays:
    store.merge(store.plan(request, allow_noop=True), name=name)
    return {one.name: store[name].tensor(one.name) for one in store.tensors(name)}


def same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(families.bits(found[name]), families.bits(values)), name


@pytest.mark.sampled(25)
@pytest.mark.parametrize("name", METHODS)
def test_a_missing_tensor_counts_as_the_bases(name: str, store: Store) -> None:
    """With every method the result is that of the same expert with the base's tensor there; any
    budget, and computed on read."""
    request = asked(METHODS[name], random.Random(name))
    weights = [weight for _, weight in request.weighted()]
    names = ["part", "whole"][: len(weights)] + ["base"] * (len(weights) - 2)
    request = replace(request, experts=list(zip(names, weights, strict=True)))
    if request.companions:
        given: dict[str, Any] = {}
        for one in METHODS[name].companions:
            ref = one.role if one.role in COMPANIONS else "fisher"
            whose = {None: [], "base": ["base"], "expert": names}[one.of]
            given |= {f"{one.role}:{own}": ref for own in whose}
        if name == "safe_merge":
            given = {"aligned": "whole", "unaligned": "base"}
        request = replace(request, companions=given)
    filled = [("filled" if one == "part" else one, weight) for one, weight in request.weighted()]
    for budget in (None, 0.5):
        lacking = replace(request, allow_missing=True, budget=budget)
        own = {key.replace("part", "filled"): one for key, one in request.companions.items()}
        whole = replace(request, experts=filled, companions=own, budget=budget)
        wanted = merged(store, whole, "wanted")
        same(merged(store, lacking), wanted)
        assert store.replay("m").same
    store.merge(store.plan(lacking, allow_noop=True), name="virtual", virtual=True)
    same({one: store["virtual"].tensor(one) for one in wanted}, wanted)


def test_the_arithmetic(root: Path, store: Store) -> None:
    """Task arithmetic adds the deltas of those that have the tensor; what only experts have is not
    in the result."""
    found = merged(store, TASK)
    arrays = {name: store[name] for name in ("base", "part", "whole")}
    for tensor in base():
        start = arrays["base"].tensor(tensor).astype("f4")
        total = start + 0
        for name in ("part", "whole"):
            if any(one.name == tensor for one in store.tensors(name)):
                total += arrays[name].tensor(tensor).astype("f4") - start
        assert np.array_equal(
            families.bits(found[tensor]), families.bits(families.cast(total, "BF16"))
        )
    assert found.keys() == base().keys()
    assert store.fsck(read_data=True).problems == ()


def test_without_it_nothing_may_be_missing(store: Store) -> None:
    """Both kinds of difference are errors otherwise, even after a plan that allowed them, and the
    hint names the option; a model of other tensors, and a stack, is one in any case."""
    store.plan(TASK)
    with pytest.raises(Incompatible, match=r"b\.w is missing; c\.w is missing; b\.extra is") as no:
        store.plan(replace(TASK, allow_missing=False))
    assert "allow_missing=True merges the others" in (no.value.hint or "")
    with pytest.raises(Incompatible, match=r"none of the tensors of base .*another model") as no:
        store.plan(replace(TASK, experts=["whole", "alien"]))
    assert no.value.where == "alien"
    stack = MergeRequest(
        base="base",
        experts=["whole"],
        method="passthrough",
        layers=[("base", 0, 1)],
        allow_missing=True,
    )
    with pytest.raises(BadRequest, match="without allow_missing"):
        store.plan(stack)


def test_a_plan_says_it(root: Path, store: Store) -> None:
    """The plan says it, a warning names the expert and its tensors, and the plan
    runs in another store and from its recipe."""
    plan = store.plan(TASK)
    allowed = "tensors may be missing: the base's count for what an expert lacks"
    assert any(remark.startswith(allowed) for remark in plan.remarks)
    told = (
        "part lacks b.w, c.w: the base's count for them; "
        "has b.extra, z.extra, not in the base and left out"
    )
    [warning] = [one for one in plan.warnings if one.kind == "other tensors"]
    assert (warning.expert, warning.text) == ("part", told)
    assert not store.plan(replace(ALL, allow_missing=True)).warnings
    assert store.plan(replace(ALL, allow_missing=True)).plan == store.plan(ALL).plan
    store.merge(plan, name="m")
    recipe = store.recipe("m")
    assert "# lacks, and what the base lacks is left out." in recipe
    again = store.read_recipe(recipe).request
    with pytest.raises(Incompatible):
        store.plan(again)
    assert store.plan(replace(again, allow_missing=True)).plan == plan.plan
    skipped = store.plan(replace(TASK, skip=["c.*", "*.extra"]))
    [warning] = [one for one in skipped.warnings if one.kind == "other tensors"]
    assert warning.text == "part lacks b.w: the base's count for them"
    with Store.init(root / "other", block_size=BLOCK) as other:
        for name in ("base", "part", "whole"):
            other.add(root / name, name=name)
        imported = other.import_plan(store.export_plan(str(plan.plan)))
        assert imported.plan == plan.plan
        made = other.merge(str(imported.plan), name="m")
        assert made.manifest == store.show("m").manifest


def test_an_absent_tied_head(tmp_path: Path) -> None:
    """An expert that stores its embedding once, of a base that stores it twice: both stay one."""
    start = base()
    start["lm_head.weight"] = start["embed_tokens.weight"]
    part = expert(start, 7)
    whole = expert(start, 9)
    whole["lm_head.weight"] = whole["embed_tokens.weight"]
    del part["lm_head.weight"]
    for name, tensors in (("base", start), ("part", part), ("whole", whole)):
        # With a config that ties them.
        families.write_checkpoint(tmp_path / name, tensors)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", "part", "whole"):
            store.add(tmp_path / name, name=name)
        # Draws follow from a tensor's name.
        for method, parameters in (("linear", {}), ("dare_linear", {"density": 0.5})):
            asked = replace(TASK, method=method, parameters=parameters)
            # The embedding stands for it, so nothing of it is missing.
            assert not store.plan(asked).warnings
            found = merged(store, asked)
            head, embedding = (
                families.bits(found[n]) for n in ("lm_head.weight", "embed_tokens.weight")
            )
            assert np.array_equal(head, embedding)
            assert not np.array_equal(embedding, families.bits(start["embed_tokens.weight"]))


def test_a_plan_without_it_means_what_it_did(tmp_path: Path) -> None:
    """A head that an expert lacks, and a pattern leaves out, is the base's own, although base and
    expert would tie it: only a plan that allows missing tensors lets another stand for it."""
    start = base()
    start["lm_head.weight"] = start["embed_tokens.weight"]
    part = expert(start, 7)
    del part["lm_head.weight"]
    for name, tensors in (("base", start), ("part", part)):
        families.write_checkpoint(tmp_path / name, tensors)
    asked = replace(TASK, experts=["part"], allow_missing=False, skip=["lm_head.*"])
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in ("base", "part"):
            store.add(tmp_path / name, name=name)
        found = merged(store, asked)
        same({"head": found["lm_head.weight"]}, {"head": start["lm_head.weight"]})
        same({"in": found["embed_tokens.weight"]}, {"in": part["embed_tokens.weight"]})
        # Of one tensor, a pattern leaves out all names.
        both = merged(store, replace(asked, allow_missing=True))
        for name in ("lm_head.weight", "embed_tokens.weight"):
            same({name: both[name]}, {name: start[name]})


def test_the_command_line(store: Store) -> None:
    """`--allow-missing` of check-merge, plan and merge; the hint without it; it is in the plan."""
    mstore = Program(Path(store.path))
    models = ["--base", "base", "--expert", "part", "--expert", "whole"]
    line = [*models, "--method", "task_arithmetic"]
    checked = mstore("check-merge", *models)
    assert checked.status == 1
    assert "or --allow-missing" in checked.out
    other = mstore("check-merge", "--base", "base", "--expert", "alien", "--allow-missing")
    assert "has no tensor of base: it is another model" in " ".join(other.out.split())
    assert "hint" not in other.out
    allowed = mstore.succeed("check-merge", *models, "--allow-missing").out
    assert "the base's count for them" in allowed
    refused = mstore("plan", *line)
    assert refused.status == 1
    assert "--allow-missing merges the others" in refused.err
    plan = mstore.succeed("plan", *line, "--allow-missing", "-q").out.strip()
    out = mstore.succeed("merge", *line, "--allow-missing", "--name", "m").out
    assert "warning: part lacks b.w, c.w: the base's count for them" in out
    assert "remark: tensors may be missing: the base's count" in " ".join(out.split())
    assert "--allow-missing --name REF" in mstore.succeed("cat", "m:README.md").out
    assert mstore("merge", "--plan", plan, "--allow-missing", "--name", "n").status == 2
    mstore.succeed("merge", "--plan", plan, "--name", "n")
