"""Selections and combinations: values that a method is composed of, and that nothing else names."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
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
from mstore.merge.running.memo_keys import MemoKeys
from mstore.merge.running.task import Tasks
from mstore.store.objects.plan import Plan
from mstore.terms.errors import MstoreError

LIBRARY = Path(mstore.__file__).parent
METHODS_FOLDER = "mstore.merge.methods."
CONTRACTS = (
    *("bounds", "combination", "method", "model", "parameters", "registry", "report"),
    "selection",
)


def applied(name: str) -> Operation:
    """The method with its defaults."""
    method = METHODS[name]
    given = {one.name: 0.5 for one in method.parameters if one.default is None}
    return method.apply(given, [1.0] * (method.experts or 3))


@pytest.mark.parametrize("name", METHODS)
def test_a_selection_travels(name: str) -> None:
    """The selection of an operation is a value, which a worker gets as it is; so is what computes
    a chunk, and what makes factors of rows."""
    operation = applied(name)
    selection = operation.selection
    assert pickle.loads(pickle.dumps(selection)) == selection
    assert selection == applied(name).selection
    kernel = operation.method.combine.kernel
    assert pickle.loads(pickle.dumps(kernel)) is kernel
    assert type(pickle.loads(pickle.dumps(operation.chunk_factors))) is type(
        operation.chunk_factors
    )


@pytest.mark.parametrize("name", METHODS)
def test_what_is_declared_is_what_holds(name: str) -> None:
    """A method has a bound if neither part says why not; what has none says what it does."""
    method, operation = METHODS[name], applied(name)
    assert method.has_bound == (operation.unbounded is None)
    assert operation.needs_facts <= (method.facts is not None)
    assert len(operation.weightless) == len(operation.rescales) == operation.selection.experts
    assert operation.unscored("norm") is None


def test_nothing_else_names_a_selection_or_a_combination() -> None:
    """Outside of merge/methods the library imports what all methods share: no method, no kind of
    selection or combination."""
    named = []
    for path in sorted(LIBRARY.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if (LIBRARY / "merge" / "methods") in path.parents or METHODS_FOLDER not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                own = node.module.removeprefix(METHODS_FOLDER)
                if own != node.module and own not in CONTRACTS:
                    named.append(f"{path.relative_to(LIBRARY)}: {node.module}")
    assert named == []


def test_nothing_else_names_a_role_of_companions() -> None:
    """Outside of merge/methods, and of the passes that compute with what has it, no name and no
    constant of the library is a role of companions, but for words that mean other things, too.
    (Part of a name, "gram" may be of others.)"""
    roles = {one.role for method in METHODS.values() for one in method.companions}
    roles -= {"aligned", "mask"}
    assert roles
    named = []
    for path in sorted(LIBRARY.rglob("*.py")):
        own = path.relative_to(LIBRARY).as_posix()
        if own.startswith(("merge/methods/", "merge/arithmetic/")) or own.endswith("_passes.py"):
            continue
        text = path.read_text(encoding="utf-8")
        if not any(role in text.lower() for role in roles):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [getattr(node, kind, None) or "" for kind in ("id", "attr", "name", "arg")]
            named += [
                f"{own}: {one}"
                for one in names
                if any(role in one.lower() for role in roles - {"gram"})
            ]
            if isinstance(node, ast.Constant) and node.value in roles:
                named.append(f"{own}: {node.value}")
    assert named == []


EVERY_OTHER = '''
import numpy as np

from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import Selection, alike


class EveryOther(Selection, frozen=True):
    """The elements of even index."""

    needs_rows = True

    @property
    def masked(self):
        return 4

    def masks(self, chunk, facts):
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


TRACED = '''
import numpy as np

from mstore.merge.measures.grid import Companion
from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import Delta
from mstore.store.objects.plan import Mixture


def of_inputs(name, shape):
    return (shape[1], shape[1]) if len(shape) == 2 and name != "embed" else None


class Traced(Sum):
    """A delta counts as much as its layer's inputs are large."""

    companions = (Companion("gram", shape=of_inputs),)

    def facts(self, select):
        return "traces of Gram matrices"

    def needs_facts(self, operation):
        return True

    def settle(self, operation, facts, measured):
        sides = facts.companions["gram"]
        traces = [1.0 if one is None else float(np.trace(facts.array(one))) for one in sides]
        factors = [w * one / sum(traces) for w, one in zip(operation.given, traces)]
        return operation.settled(Mixture(1.0, tuple(factors), keeps_base=True))


METHOD = Method(
    name="traced",
    summary="sum of the deltas, weighed by the traces of Gram matrices",
    formula="base + sum w_k tr(G_k) d_k / sum tr(G_k)",
    source="a test",
    parameters=(),
    select=Delta,
    combine=Traced(),
)
'''
HEATED = '''
import numpy as np

from mstore.merge.measures.grid import Companion
from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import Delta
from mstore.numeric.casts import singles


def run(mix, chunk, out, out_dtype, masks=None, row_weights=None):
    base = singles(chunk.base, chunk.base_dtype, chunk.n)
    total = base.copy()
    half = len(chunk.row_of) // 2
    for own, heat, weight in zip(chunk.row_of, chunk.row_of[half:], mix.weights):
        if own >= 0 and heat >= 0:
            moved, by = (
                singles(chunk.rows[row], chunk.row_dtypes[row], chunk.n) for row in (own, heat)
            )
            total += weight * by * (moved - base)
    out[: 4 * chunk.n] = total.view(np.uint8)
    return ()


class Heated(Sum):
    """Each element times the heat that a companion has there."""

    companions = (Companion("heat", is_read=True),)
    kernel = staticmethod(run)
    unbounded = "weighs elements by their heat"


METHOD = Method(
    name="heated",
    summary="sum of the deltas, each element times its heat",
    formula="base + sum w_k h_k d_k",
    source="a test",
    parameters=(),
    select=Delta,
    combine=Heated(),
)
'''
SUMS = """
import numpy as np

from mstore.merge.arithmetic import chunk_sums
from mstore.merge.arithmetic.chunk_sums import ChunkSums
from mstore.merge.arithmetic.tiles import SUMMED
from mstore.merge.methods.aim import OMEGA, Held, Holding
from mstore.merge.methods.combinations import Sum
from mstore.merge.methods.method import Method
from mstore.merge.methods.selection import Delta


class Half(Held):
    def bound(self, given, facts):
        ((found,),) = facts
        return Half(self._omega, found, given)

    def sums(self, chunk, shape, weights):
        return 0.5 * super().sums(chunk, shape, weights)


class Quarter(ChunkSums):
    def sums(self, chunk, shape, weights):
        # Narrower ones are widened.
        return np.float32(0.25 * Held(1.0).sums(chunk, shape, weights))


class HalfHolding(Holding):
    def chunk_factors(self, parameters):
        return Half(parameters["omega"])


class Quartered(Sum):
    kind = SUMMED
    kernel = staticmethod(chunk_sums.run)

    def chunk_factors(self, parameters):
        return Quarter()


METHOD = Method(
    name="{name}",
    summary="a part of the sum of the deltas",
    formula="base + a part of sum w_k d_k",
    source="a test",
    parameters=({parameters}),
    select=Delta,
    combine={combine},
)
"""
WEIGHTS = (1.0, 0.5)


def test_what_a_package_derives_is_remembered_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors that derive from a built-in method's, and those without a code, are remembered under
    the names of the package's methods, and of one version of the package."""
    halved = SUMS.format(name="halved", parameters="OMEGA,", combine="HalfHolding()")
    install(tmp_path, "halved", halved)
    quartered = SUMS.format(name="quartered", parameters="", combine="Quartered()")
    install(tmp_path, "quartered", quartered)
    monkeypatch.syspath_prepend(tmp_path)
    base = np.linspace(-1, 1, 40_000, dtype=np.float32).reshape(200, 200)
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        models = {"base": base, "e": base + np.float32(0.25), "idle": np.zeros_like(base[0])}
        for name, array in models.items():
            path = tmp_path / f"{name}.safetensors"
            write_safetensors(path, [("w", "F32", array.shape, array.tobytes())])
            store.add(path, name=name)
        for method, part in (("aim", 1.0), ("halved", 0.5), ("quartered", 0.25)):
            request = MergeRequest(base="base", experts=["e"], method=method)
            if method != "quartered":
                request = replace(request, companions={"activation:base": "idle"})
            plan = store.plan(request)
            store.merge(plan, name=method)
            wanted = base + np.float32(0.25 * part)
            np.testing.assert_allclose(store[method].tensor("w"), wanted, atol=1e-6)

        def keys() -> list[bytes]:
            tasks = Tasks(store._catalog, store._catalog.record(Plan, plan.plan))
            return MemoKeys(tasks).chunks(tasks.tensor("w"), [0])

        before = keys()
        assert keys() == before
        place = tmp_path / "quartered-1.dist-info" / "METADATA"
        place.write_text(place.read_text().replace("Version: 1", "Version: 2"))
        assert keys() != before


@pytest.fixture
def family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Store, dict[str, np.ndarray]]]:
    """A base and two experts of a matrix and a vector, and for each a Gram matrix and heat."""
    install(tmp_path, "traced", TRACED)
    install(tmp_path, "heated", HEATED)
    monkeypatch.syspath_prepend(tmp_path)
    rng = np.random.default_rng(5)
    shapes = {"w": (450, 160), "v": (160,), "embed": (30, 160)}
    models: dict[str, dict[str, np.ndarray]] = {
        "base": {name: rng.normal(0, 1, shape) for name, shape in shapes.items()}
    }
    for k in range(2):
        moved = {name: one + rng.normal(0, 0.1, one.shape) for name, one in models["base"].items()}
        inputs = rng.normal(0, 1 + k, (50, 160))
        models[f"e{k}"], models[f"g{k}"] = moved, {"w": inputs.T @ inputs}
        models[f"h{k}"] = {name: rng.random(shape) for name, shape in shapes.items()}
    models["odd"], models["none"] = {"w": np.ones((160, 200))}, {"v": np.ones(160)}
    found = {}
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name, arrays in models.items():
            path = tmp_path / f"{name}.safetensors"
            stored = {one: array.astype(np.float32) for one, array in arrays.items()}
            write_safetensors(path, [(n, "F32", a.shape, a.tobytes()) for n, a in stored.items()])
            store.add(path, name=name)
            found |= {f"{name}.{one}": array for one, array in stored.items()}
        yield store, found


def asking(method: str, **companions: str) -> MergeRequest:
    role = {"traced": "gram", "heated": "heat"}[method]
    return MergeRequest(
        base="base",
        experts=[(f"e{k}", weight) for k, weight in enumerate(WEIGHTS)],
        method=method,
        companions={f"{role}:{name}": one for name, one in companions.items()},
    )


def same_everywhere(store: Store, request: MergeRequest, wanted: dict[str, np.ndarray]) -> None:
    """Whole, virtual, replayed, and with all of a budget."""
    plan = store.plan(request)
    store.merge(plan, name="whole", memo=False)
    store.merge(plan, name="virtual", virtual=True)
    for name, one in wanted.items():
        whole = store["whole"].tensor(name)
        np.testing.assert_allclose(whole, one, atol=1e-5)
        assert np.array_equal(store["virtual"].tensor(name), whole)
    assert store.replay("whole").same
    again = store.merge(store.plan(request), name="again")
    assert again.manifest == store["whole"].manifest


@pytest.mark.rest
def test_a_package_asks_for_companions_that_are_facts(
    family: tuple[Store, dict[str, np.ndarray]],
) -> None:
    """A method gets matrices of other shapes than the model's, one for each expert, by their role:
    it reads them as it plans; nothing of the library knows of them."""
    store, arrays = family
    request = asking("traced", e0="g0", e1="g1")
    traces = [float(np.trace(arrays[f"g{k}.w"])) for k in range(2)]
    wanted = {}
    for name, sizes in (("w", traces), ("v", [1.0, 1.0]), ("embed", [1.0, 1.0])):
        shares = [w * own / sum(sizes) for w, own in zip(WEIGHTS, sizes, strict=True)]
        base = arrays[f"base.{name}"]
        moved = [arrays[f"e{k}.{name}"] - base for k in range(2)]
        wanted[name] = base + sum(own * one for own, one in zip(shares, moved, strict=True))
    same_everywhere(store, request, wanted)
    assert store.plan(request).companions == (("gram:e0", "g0"), ("gram:e1", "g1"))
    part = store.merge(store.plan(replace(request, budget="60%")), name="part")
    assert part.error_bound is not None
    error = np.linalg.norm(store["part"].tensor("w") - store["whole"].tensor("w"))
    norm = np.linalg.norm(np.concatenate([arrays[f"base.{n}"].ravel() for n in wanted]))
    assert 0 < error <= part.error_bound * norm
    blamed = store.blame("whole")
    assert [share.expert for share in blamed.experts] == ["e0", "e1"]
    assert sum(share.share or 0 for share in blamed.experts) == pytest.approx(1, abs=1e-6)
    # Another process knows nothing of what planning looked up.
    plan = store.plan(request)
    later = (
        "import sys; from mstore import Store\n"
        "with Store.open(sys.argv[1]) as store:\n"
        "    merged = store.merge(sys.argv[2], name='later')\n"
        "    print(merged.manifest, store.plans()[0].full_expert_bytes)"
    )
    line = [sys.executable, "-c", later, str(store.path), str(plan.plan)]
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(line, check=True, capture_output=True, text=True, env=env)
    assert done.stdout.split() == [str(store["whole"].manifest), str(plan.full_expert_bytes)]
    for given, told in (
        ({"e0": "g0"}, "traced takes a Gram for each expert: e1 has none"),
        ({"e0": "g0", "e1": "none"}, "none: has none of the tensors of base"),
        ({"e0": "g0", "e1": "odd"}, "w is F32 [160, 200]: a Gram has the shape [160, 160]"),
    ):
        with pytest.raises(MstoreError, match=re.escape(told)):
            store.plan(asking("traced", **given))


@pytest.mark.rest
def test_a_package_asks_for_companions_that_are_read(
    family: tuple[Store, dict[str, np.ndarray]],
) -> None:
    """The kernel gets a side of each chunk for each expert, read with the expert's or not at all,
    within the budget; whose it is counts in what is remembered."""
    store, arrays = family
    request = asking("heated", e0="h0", e1="h1")
    wanted = {}
    for name in ("w", "v"):
        base = arrays[f"base.{name}"]
        wanted[name] = base + sum(
            weight * arrays[f"h{k}.{name}"] * (arrays[f"e{k}.{name}"] - base)
            for k, weight in enumerate(WEIGHTS)
        )
    same_everywhere(store, request, wanted)
    swapped = asking("heated", e0="h1", e1="h0")
    store.merge(store.plan(swapped), name="swapped")
    assert store["swapped"].manifest != store["whole"].manifest
    plan = store.plan(replace(request, budget="50%"))
    assert 0 < plan.planned_expert_bytes <= plan.full_expert_bytes / 2
    assert store.merge(plan, name="part", memo=False).expert_bytes_read == plan.planned_expert_bytes
    record = store._catalog.record(Plan, plan.plan)
    for tensor in record.tensors:
        assert tensor.states[:2] == tensor.states[2:]
