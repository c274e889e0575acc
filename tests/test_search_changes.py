"""What changed from one position of a branch to the next, in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import families
import numpy as np
import pytest

from mstore import MergeRequest, Store
from mstore.search.changes import changes, what


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with two bases, three experts, and a newer `code`."""
    root = tmp_path_factory.mktemp("changes")
    with Store.init(root / "store", block_size=families.BLOCK) as store:
        for number, name in enumerate(("base", "other", "code", "math", "chat", "newer")):
            arrays = {"model.layers.0.w": np.full((8, 8), 1 + number / 8, np.float32)}
            families.write_checkpoint(root / name, arrays)
            store.add(root / name, name=name, base=None if number < 2 else "base")
        yield store


EXPERTS = [("code", 0.3), ("math", 0.3)]


def merge(store: Store, **request: object) -> None:
    """Add a position to the branch `m`."""
    asked = {"base": "base", "experts": EXPERTS, "method": "task_arithmetic", **request}
    plan = store.plan(MergeRequest(**asked), allow_noop=True).plan  # type: ignore[arg-type]
    store.merge(plan, name="m", allow_noop=True, message=str(request.get("method", "")))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"experts": [("code", 0.3), ("math", 0.7)]}, ["weight of math: 0.7, was 0.3"]),
        ({"experts": [*EXPERTS, ("chat", 0.1)]}, ["weight of chat: 0.1, was none"]),
        ({"experts": [("code", 0.3)]}, ["weight of math: none, was 0.3"]),
        ({"parameters": {"scale": 0.5}}, ["scale: 0.5, was the default"]),
        (
            {"method": "ties", "parameters": {"density": 0.4}},
            [
                "method: ties, was task_arithmetic",
                "density: 0.4, was the default",
                "normalize: True, was False",
                "score: trimmed, was norm",
            ],
        ),
    ],
)
def test_what_changed_between_merges(
    request_: dict[str, object], told: list[str], store: Store
) -> None:
    """Weights, experts, method and parameters that are not as before are told, and nothing else."""
    merge(store)
    merge(store, **request_)
    catalog = store._catalog
    after, before = store["m"].id, store["m~1"].id
    assert list(changes(catalog, before, after)) == told
    assert changes(catalog, after, after) == ()
    assert what(catalog, after).startswith("a merge of code")


def test_what_changed_in_contents(store: Store, tmp_path: Path) -> None:
    """Another base, another content of an expert, and what is no merge are told."""
    catalog = store._catalog
    merge(store)
    merge(store, base="other")
    contents = [store[name].id for name in ("base", "other")]
    ids = [catalog.snapshot(id).manifest_id().short for id in contents]
    told = changes(catalog, store["m~1"].id, store["m"].id)
    assert told == (f"base: other {ids[1]}, was base {ids[0]}",)
    merge(store)
    store.reset("code", "newer")
    merge(store)
    (told,) = changes(catalog, store["m~1"].id, store["m"].id)
    assert told.startswith("content of code: ")
    arrays = {"model.layers.0.w": np.zeros((8, 8), np.float32)}
    families.write_checkpoint(tmp_path / "added", arrays)
    store.add(tmp_path / "added", name="m", message="from the cluster")
    assert changes(catalog, store["m~1"].id, store["m"].id) == ("made by: add, was merge",)
    assert what(catalog, store["m"].id) == "made by add: from the cluster"
