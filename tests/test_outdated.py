"""`outdated`: which models have newer revisions where they are from."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Program
from hub import Hub
from test_exports import merged
from test_hub import hub, sharded, store

from mstore import Store

__all__ = ["hub", "store"]


def states(store: Store, *names: str) -> dict[str, str]:
    return {f"{one.name} {one.address}": one.state for one in store.outdated(names)}


def test_states(hub: Hub, store: Store, tmp_path: Path) -> None:
    """A branch that moved is outdated, one that did not is up to date, a commit is pinned."""
    tiny = hub.model("org/tiny", sharded(1))
    tiny.commit(sharded(1, "v"), "v1")
    several = {f"small/{path}": data for path, data in sharded(1).items()}
    hub.model("org/several", several)
    first = tiny.refs["main"]
    store.add("hf://org/tiny", name="tiny")
    store.add("hf://org/tiny@v1", name="v1")
    store.add(f"hf://org/tiny@{first}", name="commit")
    store.add("hf://org/several/small", name="small")
    newest = tiny.commit(sharded(1, "new"))
    hub.models["org/several"].commit({**several, "small/new.txt": b"new"})
    assert states(store) == {
        "commit hf://org/tiny@" + first: "pinned",
        "small hf://org/several@main/small": "outdated",
        "tiny hf://org/tiny@main": "outdated",
        "v1 hf://org/tiny@v1": "up to date",
    }
    (found,) = store.outdated(["tiny"])
    assert (found.commit, found.newest) == (first, newest)
    store.add(found.address, name="tiny")
    assert states(store, "tiny") == {"tiny hf://org/tiny@main": "up to date"}


@pytest.mark.rest
def test_origins_of_what_was_made_here(hub: Hub, store: Store, tmp_path: Path) -> None:
    """The origins of a merge are those of what it was made of; without names it is not listed."""
    merged(hub, store, tmp_path)
    hub.models["org/math"].commit({"config.json": b"{}"})
    assert states(store, "merged") == {
        "merged hf://org/base@main": "up to date",
        "merged hf://org/math@main": "outdated",
        "merged hf://org/code@main": "up to date",
    }
    assert {one.name for one in store.outdated()} == {"base", "math", "code"}


def test_each_line_says_what_is_wrong(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is gone, or a Hub that refuses, is one line; the others are told all the same,
    and the exit status is 1."""
    for name in ("gone", "tiny", "closed"):
        hub.model(f"org/{name}", sharded(1, name))
        store.add(f"hf://org/{name}", name=name)
    del hub.models["org/gone"]
    hub.models["org/closed"].private = True
    done = Program(store.path)("outdated")
    assert done.status == 1
    lines = {line.split()[0]: line for line in done.lines}
    assert "no such model" in lines["gone"]
    assert "unknown" in lines["closed"]
    assert lines["tiny"].endswith("up to date")
    assert done.err == ""
    document = Program(store.path)("outdated", "--json").document
    assert [one["state"] for one in document["origins"]] == ["unknown", "unknown", "up to date"]


def test_a_hub_that_does_not_answer(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, each origin is told to be unknown, and why."""
    hub.model("org/tiny", sharded(1))
    store.add("hf://org/tiny", name="tiny")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.fail("/api/models/", 503, 100)
    (found,) = store.outdated()
    assert (found.state, found.newest) == ("unknown", None)
    assert "503" in str(found.reason)


def test_another_hub(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of another Hub than HF_ENDPOINT names is not compared with its namesake there."""
    from huggingface_hub import constants

    hub.model("org/tiny", sharded(1))
    store.add("hf://org/tiny", name="tiny")
    other = Hub()
    other.model("org/tiny", sharded(1, "other"))
    with other.running():
        monkeypatch.setattr(constants, "ENDPOINT", other.url)
        (found,) = store.outdated()
    assert (found.state, found.newest) == ("unknown", None)
    assert not other.requests


def test_the_command(hub: Hub, store: Store) -> None:
    """`outdated` prints a table and the command that adds what is new; quiet, the refs to renew."""
    mstore = Program(store.path)
    assert mstore.succeed("outdated").lines == ["no model came from elsewhere"]
    tiny = hub.model("org/tiny", sharded(1))
    store.add("hf://org/tiny", name="tiny")
    newest = tiny.commit(sharded(1, "new"))
    done = mstore.succeed("outdated")
    assert newest[:12] in done.out
    assert done.lines[-1].endswith("add hf://org/tiny@main --name tiny")
    assert mstore.succeed("outdated", "--quiet").lines == ["tiny"]
