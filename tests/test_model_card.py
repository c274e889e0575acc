"""A merge's papers: its own model card, and the licence texts of all parents."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from cli_runs import Program
from families import BLOCK

from mstore import MergeRequest, Store, TensorRule
from mstore.checkpoint.declared import front_matter, values
from mstore.merge.planning import costs as planning_costs
from mstore.merge.running import model_card

Make = Callable[..., Store]
CARDS = {
    "base": "license: apache-2.0\nlibrary_name: transformers\nbase_model: org/before",
    "e0": "license: apache-2.0\nmodel_name: org/math\nbase_model: org/base",
    "e1": "license: apache-2.0\nbase_model: org/base",
}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A store of a base and two experts with these cards and licence files."""

    def made(cards: dict[str, str] = CARDS, *, block: int = BLOCK, **options: Any) -> Store:
        rng = np.random.default_rng(1)
        base = {"w": families.cast(rng.standard_normal((96, 1024)), "BF16")}
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        store = Store.init(root / "store", block_size=block, **options)
        for number, (name, card) in enumerate(cards.items()):
            arrays = {"w": families.cast(base["w"].astype(np.float32) + number / 8, "BF16")}
            where = families.write_checkpoint(root / name, arrays)
            (where / "README.md").write_text(f"---\n{card}\n---\n# {name}\n" if card else name)
            (where / "LICENSE").write_text(f"terms of {name}\n")
            store.add(where, name=name, base=None if name == "base" else "base", threads=1)
        return store

    return made


def merged(store: Store, **options: Any) -> str:
    """Merge into `m`; the text of its card."""
    name = options.pop("name", "m")
    virtual = options.pop("virtual", False)
    asked = {"base": "base", "experts": ["e0", ("e1", 0.3)], "method": "ties"} | options
    store.merge(store.plan(MergeRequest(**asked)), name=name, virtual=virtual)
    return b"".join(store.read_file(name, "README.md")).decode()


def files(store: Store, name: str = "m") -> dict[str, bytes]:
    return {file.path: b"".join(store.read_file(name, file.path)) for file in store.files(name)}


def test_the_card_is_of_the_merge(make: Make) -> None:
    """Parents, relation, licence, tags and the command stand in it, and nothing of the base's."""
    with make() as store:
        text = merged(store, parameters={"density": 0.5})
        matter = front_matter(text.encode())
        id = {name: store[name].manifest.hex() for name in ("base", "e0", "e1")}
        assert values(matter, "base_model") == ["org/base", "org/math", id["e1"]]
        assert values(matter, "base_model_relation") == ["merge"]
        assert values(matter, "license") == ["apache-2.0"]
        assert values(matter, "library_name") == ["transformers"]
        assert values(matter, "tags") == ["merge", "mstore"]
        assert "# base" not in text
        assert "org/before" not in text
        assert all(one in text for one in id.values())
        [command] = [line for line in text.splitlines() if line.startswith("mstore merge")]
        assert "--param density=0.5" in command
        assert f"{id['e1']}=0.3" in command
        assert "left out" not in text
        # One licence for all: the base's text speaks for the whole.
        assert [path for path in files(store) if "LICENSE" in path] == ["LICENSE"]
        manifest = store["m"].manifest
        path = store.path
    # The command of the card makes the same content again.
    Program(path).succeed(*shlex.split(command.replace("REF", "again"))[1:])
    with Store.open(path) as store:
        assert store["again"].manifest == manifest


def test_what_a_plan_has_found_a_merge_does_not_look_up_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards are read for their licences once for a plan and its merge, and what a virtual merge
    costs is what its plan said; a merge by a plan's id finds the same by itself.
    """
    asked: list[str] = []
    warnings, costs = model_card.ModelCard.licence_warnings, planning_costs.costs_to_report

    def seen_warnings(self: Any) -> Any:
        asked.append("licences")
        return warnings(self)

    def seen_costs(*given: Any) -> Any:
        asked.append("costs")
        return costs(*given)

    monkeypatch.setattr(model_card.ModelCard, "licence_warnings", seen_warnings)
    monkeypatch.setattr(planning_costs, "costs_to_report", seen_costs)
    with make({"base": "license: llama3", "e0": "license: mit"}) as store:
        plan = store.plan(MergeRequest(base="base", experts=["e0"], method="linear"))
        assert asked == ["licences"]
        report = store.merge(plan, name="m", virtual=True)
        assert asked == ["licences"]
        path = store.path
    asked.clear()
    with Store.open(path) as store:
        again = store.merge(str(plan.plan), name="n", virtual=True)
        assert sorted(asked) == ["costs", "licences"]
    for one in (report, again):
        assert [w.text for w in one.warnings] == [w.text for w in plan.warnings] != []
        assert one.planned_expert_bytes == plan.planned_expert_bytes > 0
        assert one.full_expert_bytes == plan.full_expert_bytes


def test_licences_that_differ(make: Make) -> None:
    """Where parents' licences differ, forbid or are not stated, plan, merge and card say so, and
    who, and no parent's text stands for the whole.
    """
    cards = {
        "base": "license: llama3",
        "e0": "license: other\nlicense_name: my-terms",
        "e1": "license: cc-by-nc-nd-4.0",
        "e2": "",
    }
    with make(cards) as store:
        plan = store.plan(MergeRequest(base="base", experts=["e0", "e1", "e2"], method="linear"))
        report = store.merge(plan, name="m")
        assert report.warnings == plan.warnings
        texts = [one.text for one in plan.warnings if one.kind == "licences"]
        assert texts == [
            "e1: may forbid commercial use: cc-by-nc-nd-4.0",
            "e1: may forbid derivatives: cc-by-nc-nd-4.0",
            (
                "base, e0, e1: licences differ (cc-by-nc-nd-4.0, llama3, my-terms): "
                "all of them bind the merge"
            ),
            "e2: no licence is stated; nothing says that a merge may be passed on",
        ]
        found = files(store)
        assert {path: data for path, data in found.items() if "LICENSE" in path} == {
            "licenses/base/LICENSE": b"terms of base\n",
            **{f"licenses/expert-{n + 1}/LICENSE": f"terms of e{n}\n".encode() for n in range(3)},
        }
        text = found["README.md"].decode()
        assert values(front_matter(text.encode()), "license") == ["other"]
        assert "may forbid commercial use" in text


def test_one_merge_one_card(make: Make) -> None:
    """The content is the same for names, codecs and threads, virtual and made real, again and by
    replay; a full budget is no other merge, and what was left out is said.
    """
    with make(codec="raw") as store:
        text = merged(store)
        manifest = store["m"].manifest
        assert merged(store, name="full", budget="100%") == text
        assert store["full"].manifest == manifest
        store.reset("other", "e0")
        assert merged(store, name="renamed", experts=["other", ("e1", 0.3)]) == text
        assert merged(store, name="v", virtual=True) == text
        assert store.materialize("v").manifest == manifest
        assert store.replay("m").same
        assert store.blame("m").experts
        half = merged(store, name="half", budget=0.5)
        assert "chunks of experts that matter were left out" in half
        assert store.replay("half").same
        assert store.fsck(read_data=True).problems == ()
    with make(codec="dense") as dense:
        assert merged(dense) == text
        assert dense["m"].manifest == manifest


def test_the_card_of_a_budgeted_merge_makes_it_again(make: Make) -> None:
    """Where chunks were left out, the first command of the card makes the same content again, and
    the second the whole merge.
    """
    with make() as store:
        merged(store, name="full")
        text = merged(store, name="half", budget=0.5)
        first, second = [line for line in text.splitlines() if line.startswith("mstore merge")]
        manifests = {name: store[name].manifest for name in ("half", "full")}
        path = store.path
    assert manifests["half"] != manifests["full"]
    Program(path).succeed(*shlex.split(first.replace("REF", "half").replace("NEW", "again"))[1:])
    Program(path).succeed(*shlex.split(second.replace("REF", "whole"))[1:])
    with Store.open(path) as store:
        assert store["again"].manifest == manifests["half"]
        assert store["whole"].manifest == manifests["full"]
        store.rename("again", "bc40")
    # A name of hex digits is still a name.
    Program(path).succeed("merge", "--plan", "bc40", "--name", "once-more")
    refused = Program(path)("merge", "--plan", "base", "--name", "x")
    assert "base: no merge made it, so it has no plan" in refused.err
    refused = Program(path)("merge", "--plan", "nowhere", "--name", "x")
    assert "nowhere: neither a plan's id, nor a file, nor a merged snapshot" in refused.err
    assert refused.err.endswith(" plans lists the plans\n")


def test_merges_without_a_recipe_replay(make: Make) -> None:
    """A merge of one expert that no recipe can state is replayed to its own papers; a virtual one
    is stored with them.
    """
    with make() as store:
        rule = TensorRule(tensors="w", method="linear")
        asked = MergeRequest(base="base", experts=["e0"], method="task_arithmetic", rules=[rule])
        plan = store.plan(asked)
        store.merge(plan, name="m")
        assert "mergekit_config.yml" not in files(store)
        assert store.replay("m").same
        store.merge(plan, name="v", virtual=True)
        before = store["v"].read("README.md")
        store.materialize("v")
        assert store["v"].read("README.md") == before
        assert b"merge of one model by" in before


def test_cards_that_are_none(make: Make) -> None:
    """What a parent's card says is text: what is no name or licence is left out, not repeated."""
    cards = {
        "base": 'license: "<b>\\"|x"\nmodel_name: "a\\nb"',
        "e0": "license: [mit, mit]\nmodel_name: 'x|<script>'",
        "e1": "license:\n- mit\nlibrary_name: [a, b]",
    }
    with make(cards) as store:
        text = merged(store)
        assert "<" not in text
        matter = front_matter(text.encode())
        assert values(matter, "base_model") == [
            store[name].manifest.hex() for name in ("base", "e0", "e1")
        ]
        assert values(matter, "license") == ["other"]
        assert "library_name" not in text


def test_a_merge_that_is_the_base_keeps_its_papers(make: Make) -> None:
    """Nothing was merged, so the base's card is true."""
    with make() as store:
        plan = store.plan(
            MergeRequest(base="base", experts=["base"], method="linear"), allow_noop=True
        )
        store.merge(plan, name="m")
        assert store["m"].manifest == store["base"].manifest
        assert store.replay("m").same
