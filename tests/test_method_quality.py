"""bench/candidates.py and bench/method_quality.py: every method is compared, and as it says."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import fmean

import families
import gram_reference
import numpy as np
import pytest
from checkpoints import size_of, write_safetensors
from family_fixture import family
from later import Later

import mstore
from mstore.merge.methods.registry import METHODS

pytest_plugins = ["family_fixture"]

BENCH = Path(__file__).resolve().parent.parent / "bench"
if str(BENCH) not in sys.path:
    sys.path.append(str(BENCH))

candidates = Later("candidates")
method_quality = Later("method_quality")
RANGE = {"min": 0.5, "max": 2.0, "log": True}
EXPERTS = ("one", "two", "three")


def model(directory: Path, byte: int) -> Path:
    """A matrix and a norm, of a family whose hidden size is 16."""
    shapes = {"model.layers.0.mlp.down_proj.weight": (16, 16), "model.norm.weight": (16,)}
    rows = [
        (name, "BF16", shape, bytes([byte, 0x3E]) * (size_of("BF16", shape) // 2))
        for name, shape in shapes.items()
    ]
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", rows, metadata={"format": "pt"})
    (directory / "config.json").write_text('{"model_type": "llama", "hidden_size": 16}')
    return directory


def test_every_method_is_a_candidate_or_is_left_out_with_a_reason() -> None:
    """The candidates that are no adapters are the methods that are not left out, each once."""
    methods = [one.method for one in candidates.candidates() if not one.name.startswith("adapters")]
    assert sorted([*set(methods), *candidates.left_out()]) == sorted(METHODS)
    assert all(reason for reason in candidates.left_out().values())
    names = [one.name for one in candidates.candidates()]
    assert len(set(names)) == len(names)


def test_a_candidate_is_a_recipe_whose_scale_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is prepared once, has the scale as its one free number, and is a merge without one."""
    rng = np.random.default_rng(0)
    known = {
        "fisher": (np.ones((16, 16), np.float32), np.ones(16, np.float32)),
        "gram": (gram_reference.packed(rng, 16, 16),),
        "activation": (np.ones(16, np.float32),),
    }
    assert known.keys() == candidates.COMPANIONS.keys()
    made = set()

    def companion(role: str, family: Path, of: str, _: object) -> Path:
        made.add((role, of))
        path = family / f"{of}-{role}"
        names = ("model.layers.0.mlp.down_proj.weight", "model.norm.weight")
        if not path.exists():
            families.write_checkpoint(path, dict(zip(names, known[role], strict=False)))
        return path

    for role in candidates.COMPANIONS:
        monkeypatch.setitem(candidates.COMPANIONS, role, partial(companion, role))
    with mstore.Store.init(tmp_path / "store") as store:
        for byte, name in enumerate(("base", *EXPERTS)):
            store.add(model(tmp_path / name, byte), name=name)
        inputs = candidates.Inputs(store, tmp_path)
        for one in candidates.candidates():
            prepared = one.prepare(inputs, EXPERTS)
            if one.name.startswith("adapters"):
                assert len(prepared.experts) == 1
            assert one.prepare(inputs, EXPERTS) == prepared
            template = store.read_template(one.recipe(prepared, RANGE))
            assert [free.name for free in template.free] == ["scale"]
            scaled = store.read_recipe(template.fill((0.5,))).request
            assert scaled.parameters["scale"] == 0.5
            store.plan(scaled, allow_noop=True)
            whole = store.read_recipe(one.recipe(prepared)).request
            assert whole.parameters.get("scale", 1.0) == 1.0
            assert {k: v for k, v in scaled.parameters.items() if k != "scale"} == {
                k: v for k, v in whole.parameters.items() if k != "scale"
            }
    experts = {(role, of) for role in ("fisher", "gram") for of in EXPERTS}
    assert made == experts | {("activation", "base")}


@pytest.mark.rest
def test_losses_are_those_of_the_family_and_the_best_scale_is_kept(
    quick_family: family.Family, tmp_path: Path
) -> None:
    """Parts A and B are the held-out excerpts; the scale is the best of those tried by part A."""
    (tmp_path / "family8quick").symlink_to(quick_family.root)
    experts = ("code", "prose", "arithmetic")
    bench = method_quality.Bench(tmp_path, quick=True, experts=experts)
    judge = bench.judge
    known = quick_family.members["base"].losses
    for domain in experts:
        halves = [judge.losses("base", [domain], part)[domain] for part in method_quality.PARTS]
        # Part A may be in bf16.
        assert fmean(halves) == pytest.approx(known[domain], abs=0.02)
    (asked,) = (one for one in candidates.candidates() if one.name == "task_arithmetic")
    group = bench.group(experts[:2], [asked])
    bench.close()
    assert set(group["base"]) == set(group["experts"]) == set(experts[:2])
    found = group["candidates"]["task_arithmetic"]
    assert (found["scale"], min(dict(found["tried"]).values())) in found["tried"]
    assert len(found["tried"]) == 9
    assert fmean(found["tuned"].values()) < fmean(group["base"].values())
