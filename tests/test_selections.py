"""Selections and combinations: values that a method is composed of, and that nothing else names."""

from __future__ import annotations

import ast
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_safetensors
from test_methods import install

import mstore
from mstore import MergeRequest, Store
from mstore.merge.methods import registry
from mstore.merge.methods.method import Operation
from mstore.merge.methods.registry import METHODS

LIBRARY = Path(mstore.__file__).parent
FOLDERS = ("mstore.merge.methods.selections.", "mstore.merge.methods.combinations.")
BASES = ("selection",)


def applied(name: str) -> Operation:
    """The method with its defaults."""
    method = METHODS[name]
    given = {one.name: 0.5 for one in method.parameters if one.default is None}
    return method.apply(given, [1.0] * (method.experts or 3))


@pytest.mark.parametrize("name", METHODS)
def test_a_selection_travels(name: str) -> None:
    """The selection of an operation is a value, which a worker gets as it is; so is what computes
    a chunk, and what turns rows."""
    operation = applied(name)
    selection = operation.selection
    assert pickle.loads(pickle.dumps(selection)) == selection
    assert selection == applied(name).selection
    kernel = operation.method.combine.kernel
    assert pickle.loads(pickle.dumps(kernel)) is kernel
    assert type(pickle.loads(pickle.dumps(operation.turn))) is type(operation.turn)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_declared_is_what_holds(name: str) -> None:
    """A method has a bound if neither part says why not; what has none says what it does."""
    method, operation = METHODS[name], applied(name)
    assert method.has_bound == (operation.unbounded is None)
    assert operation.needs_facts <= (method.facts is not None)
    assert len(operation.weightless) == len(operation.rescales) == operation.selection.experts
    assert operation.unscored("norm") is None


def test_nothing_else_names_a_selection_or_a_combination() -> None:
    """Outside of merge/methods the library imports their contracts and none of their kinds."""
    named = []
    for path in sorted(LIBRARY.rglob("*.py")):
        if (LIBRARY / "merge" / "methods") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                place = next((one for one in FOLDERS if f"{node.module}.".startswith(one)), None)
                if place is not None and node.module[len(place) :] not in BASES:
                    named.append(f"{path.relative_to(LIBRARY)}: {node.module}")
    assert named == []


EVERY_OTHER = '''
import numpy as np

from mstore.merge.methods.combinations.sum import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.selections.selection import Selection, alike


class EveryOther(Selection, frozen=True):
    """The elements of even index."""

    needs_rows = True

    @property
    def masked(self):
        return 4

    def masks(self, chunk, *, row_length, weights, cut):
        even = (np.arange(chunk.first_index, chunk.first_index + chunk.n) % 2) == 0
        return alike(even, len(chunk.row_of))

    def place(self, cut, first_index, length):
        return bytes([first_index % 2])


class Halved(Sum):
    """Half of the sum."""

    def normalizes(self, operation):
        return True

    def divisor(self, operation):
        return 2.0


METHOD = Method(
    name="every_other",
    summary="half of the sum of the deltas of even index",
    formula="base + 1/2 sum w_k d_k where the index is even",
    source="a test",
    parameters=(),
    select=EveryOther,
    combine=Halved(),
)
'''


def test_a_package_brings_a_selection_and_a_combination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a package selects and combines by itself plans under a budget with a bound that holds,
    merges as it says in any chunks, and is replayed; nothing of the library knows of it."""
    install(tmp_path, "every_other", EVERY_OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    rng = np.random.default_rng(3)
    base = rng.normal(0, 1, (100, 1001)).astype(np.float32)
    moved = [rng.normal(0, 0.1, base.shape).astype(np.float32) for _ in range(2)]
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, delta in zip(("base", "e0", "e1"), (0, *moved), strict=True):
            path = tmp_path / f"{name}.safetensors"
            write_safetensors(path, [("w", "F32", base.shape, (base + delta).tobytes())])
            store.add(path, name=name)
        request = MergeRequest(base="base", experts=["e0", ("e1", 0.5)], method="every_other")
        store.merge(store.plan(request), name="whole")
        even = (np.arange(base.size) % 2 == 0).reshape(base.shape)
        wanted = base + np.where(even, (moved[0] + 0.5 * moved[1]) / 2, 0)
        whole = store["whole"].tensor("w")
        np.testing.assert_allclose(whole, wanted, atol=1e-5)
        assert np.array_equal(whole[~even], base[~even])
        assert store.replay("whole").same
        part = store.merge(store.plan(replace(request, budget="60%")), name="part")
        assert part.error_bound is not None
        error = np.linalg.norm(store["part"].tensor("w") - whole)
        assert 0 < error <= part.error_bound * np.linalg.norm(base)
    assert registry.find("every_other").has_bound
