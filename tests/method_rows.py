"""What tests of merge methods have in common: one family, and a row for each way to merge it.

Owns the family (every shape of a tensor, and every way in which experts agree), the rows, and what
a row's merge must be.  A new method adds its rows here: `tests/test_every_method.py` asks them all
the same questions.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import families
import mixing_reference as mixing
import numpy as np
import reference
from families import Array, Arrays, Family
from mixing_reference import Definition, Double

from mstore import MergeRequest, Store
from mstore.api.reports import PlanReport
from mstore.merge.methods.registry import METHODS
from mstore.store.objects.plan import SHARED, Plan, PlanTensor

SHAPES: dict[str, tuple[int, ...]] = {
    "blocks": (66, 1024),  # rows of which several make a block
    "parts": (45, 1000),  # rows that end within blocks
    "long": (2, 33_000),  # rows of several blocks
    "flat": (5000,),
    "column": (17_000, 1),
    "cube": (4, 3, 90),
    "number": (),
    "steps": (40, 1024),  # ties nearly everywhere
    "little": (33, 64),  # moves so little that energies do not differ
    "still": (9, 1000),  # nobody moves it
}
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "BF16": ("BF16", ("BF16", "F32", "F16")),
    "F16": ("F16", ("F32", "F16", "BF16")),
    "F32": ("F32", ("F32", "F32", "F32")),
}
"""Element types of the base and of the experts."""
LARGE = 4 * families.BLOCK


@dataclass(frozen=True)
class Row:
    """A merge of the family.

    definition: for what mixes whole vectors, else it is `reference.merge`.  rows: each row of a
    tensor has factors of its own.
    """

    method: str
    given: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[float, ...] = (1.0, 0.5, 0.75)
    definition: Definition | None = None
    rows: bool = False

    def __str__(self) -> str:
        given = (f"{name}={value}" for name, value in self.given.items())
        return " ".join([self.method, *given, "of", *map(str, self.weights)])

    @property
    def experts(self) -> list[str]:
        return [f"e{k}" for k in range(len(self.weights))]

    @property
    def is_whole(self) -> bool:
        """Whether whole experts are mixed, not deltas."""
        named = ("karcher", "guarded", "safe_merge", "slerp")
        return self.method in named or not self.given.get("around_base", True)

    def request(self, **options: Any) -> MergeRequest:
        experts = options.pop("experts", list(zip(self.experts, self.weights, strict=True)))
        own: dict[str, Any] = {
            "base": "base",
            "experts": experts,
            "method": self.method,
            "parameters": self.given,
            "companions": self.companions(experts),
        }
        return MergeRequest(**own | options)

    def companions(self, experts: Sequence[Any]) -> dict[str, Any]:
        """What its method asks for beside base and experts."""
        roles = [one.role for one in METHODS[self.method].companions]
        widths = {width: letter for letter, width in families.WIDTHS.items()}
        gram = widths[self.given.get("block", 64)]
        return families.companions_for(roles, experts, families.FACTS | {"gram": gram})


OF_TWO = ("guarded", "safe_merge")
"""One of two whole experts, by what their deltas are."""
LONE, TWO, SAME = (1.0,), (0.25, 0.5), (1.0, 1.0, 1.0)
SIGNED = (1.0, 0.5, -0.75)
NUSLERP, STOCK = mixing.nuslerp, mixing.model_stock
TURNED, FILTERS = {"nuslerp_flatten": False}, {"filter_wise": True}
ROWS: tuple[Row, ...] = (
    Row("linear"),
    Row("linear", {"normalize": False}, SIGNED),
    Row("task_arithmetic", {"lambda": 0.6, "normalize": True}),
    Row("ties", {"density": 0.3}),
    Row("ties", {"density": 0.6, "by_count": True}, SIGNED),
    Row("breadcrumbs", {"density": 0.6, "gamma": 0.02}, SIGNED),
    Row("breadcrumbs_ties", {"density": 0.5, "gamma": 0.02}),
    Row("dare_linear", {"density": 0.4, "seed": 3}),
    Row("dare_linear", {"density": (0.3, 1.0, 0.7), "rescale": "l1", "seed": 9}),
    Row("dare_ties", {"density": 0.3, "rescale": "l1"}),
    Row("dare_ties", {"density": 0.4, "normalize": True}),
    Row("della", {"density": 0.4, "epsilon": 0.2, "seed": 5}),
    Row("della", {"density": 0.7, "rescale": False, "lambda": 0.6, "normalize": False}),
    Row("della_linear", {"density": (0.3, 0.8, 1.0), "epsilon": (0.1, 0.15, 0)}),
    Row("della_linear", {"density": 0.5, "normalize": True}),
    Row("train_difference", {"alpha": 0.6}, SAME[:2]),
    Row("clamp", {}, SAME),
    Row("clamp", {"stiffness": 0.3}, SAME),
    Row("clamp", {}, SAME[:2]),
    Row("add_cosine_a", {"alpha": 0.8}, LONE),
    Row("add_cosine_b", {"alpha": 0.7}, LONE),
    Row("add_cosine_a", {}, LONE),
    Row("tensor_sum", {"width": 0.6, "offset": 0.7}, LONE),
    Row("tensor_sum", {"width": 0.45, "offset": 0.3}, LONE),
    Row("tensor_sum", {"width": 1.0, "offset": 0.5}, LONE),
    Row("passthrough", {"scale": -0.3}, LONE),
    Row("nearswap", {"t": 0.03}, LONE),
    Row("arcee_fusion", {}, LONE),
    Row("consensus", {}, SIGNED),
    Row("consensus", {"k": 1, "tall_mask_lambda": 2.0}, SIGNED),
    Row("consensus", {"tall_mask_lambda": (0.5, 0.0, 1.5), "lambda": 0.7}, SIGNED),
    Row("consensus", {"k": 3, "tall_mask_lambda": 0.1}, SIGNED),
    Row("ram", {"epsilon": 0.02}, SAME),
    Row("ramplus_tl", {"epsilon": 0.02, "r": 0.5, "alpha": 3.0}, SAME),
    Row("sce", {}, SAME),
    *(Row("sce", {"select_topk": share}, SAME) for share in (0.7, 0.2, 0.003)),
    *(Row("pcb", {"ratio": ratio}, SIGNED) for ratio in (0.1, 0.4, 1.0)),
    *(Row("fisher", {"floor": floor}) for floor in (0.0, 1e-6)),
    *(Row("regmean", {"block": width, "shrink": 0.7}) for width in (64, 250)),
    *(Row("aim", {"omega": omega}, SIGNED) for omega in (0.4, 0.0)),
    Row("lines", {"alpha": 0.4, "beta": 0.8}, SIGNED),
    Row("slerp", {"t": 0.3}, LONE, lambda sides, _, given: mixing.slerp(given["t"], sides, 5e-4)),
    Row("model_stock", {}, SAME, STOCK),
    Row("model_stock", {}, SAME[:2], STOCK),
    Row("nuslerp", {}, TWO, NUSLERP),
    Row("nuslerp", {}, (1.0, -1.0), NUSLERP),
    Row("nuslerp", {}, (-0.5, 1.0), NUSLERP),
    Row("nuslerp", {"around_base": False}, TWO, NUSLERP),
    Row("multislerp", {}, (0.25, 0.5, 1.0), mixing.multislerp),
    Row("multislerp", {}, (1.0, -0.5, 1.0), mixing.multislerp),
    Row("multislerp", {"normalize_weights": False}, (0.25, 0.5, 1.0), mixing.multislerp),
    Row("multislerp", {"around_base": False}, (0.25, 0.5, 1.0), mixing.multislerp),
    Row("karcher", {"max_iter": 100, "tol": 1e-9}, SAME, mixing.karcher),
    *(
        Row("guarded", {"threshold": cut, "alpha": alpha}, SAME[:2], mixing.guarded)
        for cut, alpha in ((-1.0, 0.0), (0.6, 0.0), (0.99, 0.25))
    ),
    *(
        Row("safe_merge", given, SAME[:2], mixing.safe_merge)
        for given in ({}, {"threshold": 0.7, "alpha": 0.4}, {"threshold": 0.0})
    ),
    Row("emr", {}, SAME),
    Row("emr", {}, SAME[:2]),
    Row("masked", {}, SIGNED),
    Row("masked", {}, LONE),
    Row("geometric_median", {}, SAME, mixing.geometric_median),
    Row("geometric_median", {"max_iter": 1, "eps": 20.0}, SAME, mixing.geometric_median),
    Row("add_perpendicular", {"alpha": 0.7}, SAME[:2], mixing.add_perpendicular),
    Row("nuslerp", TURNED, TWO, NUSLERP, rows=True),
    Row("nuslerp", TURNED, (1.0, -1.0), NUSLERP, rows=True),
    Row("nuslerp", TURNED, (-0.5, 1.0), NUSLERP, rows=True),
    Row("nuslerp", TURNED, (0.0, 1.0), NUSLERP, rows=True),
    Row("nuslerp", TURNED | {"around_base": False}, TWO, NUSLERP, rows=True),
    Row("model_stock", FILTERS, SAME, STOCK, rows=True),
    Row("model_stock", FILTERS, SAME[:2], STOCK, rows=True),
)


# -- the family ----------------------------------------------------------------------------------


def family(kind: str) -> Family:
    """Three experts with something in common, which each moves half of most tensors.

    Of every seven rows one is moved by nobody, one by expert 0 alone, in one experts 0 and 1 are
    equal, in one opposite.  The end of `parts` has experts 0 of the base's own blocks, that of
    `blocks` experts 0 and 2; at the front of `blocks` expert 1 moves little.  Fishers are over many
    powers of ten, zero in places; nobody knows anything of the end of `flat`.
    """
    own, types = KINDS[kind]
    rng = np.random.default_rng(4)
    base: Arrays = {}
    moved: list[Arrays] = [{} for _ in types]
    for name, shape in SHAPES.items():
        size = 1e-3 if name == "little" else 1.0
        values = 1 + rng.random(shape) if name == "steps" else size * rng.standard_normal(shape)
        base[name] = families.cast(np.asarray(values), own)
        wide = np.asarray(base[name].astype(np.float32))
        common = 0.06 * size * rng.standard_normal(shape)
        sides: list[Array] = []
        for k in range(len(types)):
            step = np.asarray(common + 0.03 * size * (k + 1) * rng.standard_normal(shape))
            if name == "steps":
                step = rng.integers(-1, 2, shape) * 2.0**-6
            elif name == "still":
                step = 0 * step
            elif name not in ("number", "cube"):
                step *= rng.random(shape) < 0.6
            if name in ("blocks", "parts"):
                step[1::7] = 0
                step[2::7] *= k == 0
                if k == 1:
                    step[3::7], step[4::7] = sides[0][3::7], -sides[0][4::7]
            if name == "blocks":
                step[:33] *= 0.01 if k == 1 else 1
                step[64:] *= k == 1
            if name == "parts":
                step[33:] *= k != 0
            sides.append(step)
            moved[k][name] = families.cast(wide + step, types[k])
    fishers = []
    for dtype in ("F32", "BF16", "F32"):
        known = {
            name: np.asarray(10.0 ** rng.uniform(-14, -4, shape) * (rng.random(shape) < 0.8))
            for name, shape in SHAPES.items()
        }
        known["flat"][4000:] = 0
        fishers.append({name: families.cast(one, dtype) for name, one in known.items()})
    found = Family(base, tuple(moved), tuple(fishers))
    facts = found.of_inputs(rng)
    for own in facts.values():
        # Tensors without inputs are averaged, or summed as they are.
        del own["steps"], own["long"]
    return replace(found, facts=facts)


@dataclass
class Place:
    """A family in two stores of different block sizes."""

    root: Path
    family: Family
    store: Store
    other: Store

    def close(self) -> None:
        self.store.close()
        self.other.close()

    def bare(self, path: Path) -> Store:
        """One more store of base and experts, without statistics: a copy of one that is made
        once."""
        first = self.root / "bare"
        if not first.exists():
            with Store.init(first, block_size=families.BLOCK) as store:
                for name in ("base", *self.family.names):
                    store.add(self.root / name, name=name)
        shutil.copytree(first, path)
        return Store.open(path)

    def add(self, name: str, arrays: Arrays) -> None:
        """Store one more model, once."""
        if not (self.root / name).exists():
            families.write_checkpoint(self.root / name, arrays)
            self.store.add(self.root / name, name=name)

    def tensors(self, ref: str, store: Store | None = None) -> Arrays:
        found = (store or self.store)[ref]
        return {name: np.asarray(found.tensor(name)) for name in self.family.base}

    def record(self, plan: PlanReport) -> Plan:
        return self.store._catalog.record(Plan, plan.plan)

    def error(self, one: Arrays, other: Arrays) -> float:
        """The distance of two merges over the norm of the base."""
        names = list(one)
        zeros = {name: np.zeros(()) for name in names}
        norm = families.distance(self.family.base, zeros, names)
        return families.distance(one, other, names) / norm


def made(root: Path, own: Family) -> Place:
    """A family on disk and in its stores."""
    own.write(root)
    stores = []
    for size in (families.BLOCK, LARGE):
        store = Store.init(root / f"store{size}", block_size=size)
        for name in ("base", *own.names):
            store.add(root / name, name=name, base=None if name == "base" else "base")
        for name in (*own.fisher_names, *own.facts):
            store.add(root / name, name=name)
        stores.append(store)
    return Place(root, own, *stores)


# -- what a merge must be ------------------------------------------------------------------------


def unread(tensor: PlanTensor, elements: int) -> list[Array]:
    """The elements of each expert, and each companion, that a plan does not read."""
    return [
        np.repeat(np.frombuffer(states, np.uint8) > SHARED, tensor.chunk_elements)[:elements]
        for states in tensor.states
    ]


def require(place: Place, row: Row, found: Arrays, plan: Plan, *, dtype: str | None) -> None:
    """Raise AssertionError unless a merge is what its row says of what its plan reads.

    Bit for bit if the reference has it; else within the float32 of the arithmetic, and what nobody
    moves keeps the base's bits.
    """
    count, own = len(row.weights), place.family
    absent = {one.name: unread(one, own.base[one.name].size) for one in plan.tensors}
    if row.definition is None:
        fewer = replace(own, experts=own.experts[:count], fishers=own.fishers[:count])
        wanted = families.expected(
            fewer, row.method, row.given, row.weights, dtype=dtype, absent=absent
        )
        assert families.differences(found, wanted) == []
        return
    for name, base in own.base.items():
        wide = [np.asarray(one[name], dtype=np.float32) for one in (own.base, *own.experts)]
        gone = absent.get(name, [np.ones(base.size, dtype=bool)] * count)
        read = [
            np.where(out.reshape(base.shape), wide[0], side)
            for side, out in zip(wide[1 : count + 1], gone, strict=False)
        ]
        parts = terms(
            row, wide[0], wide[1:] if row.method == "safe_merge" else wide[1 : count + 1], read
        )
        total, size = np.sum(parts, axis=0), np.sum(np.abs(parts), axis=0)
        gap = np.abs(found[name].astype(np.float64) - total.reshape(base.shape))
        assert float((gap / np.maximum(size, 1e-30).reshape(base.shape)).max()) <= 2.0**-21, name
        if not row.is_whole or row.method in OF_TWO:
            still = np.all([families.bits(wide[0]) == families.bits(one) for one in read], axis=0)
            own_bits = families.bits(found[name].astype(np.float32))
            assert np.array_equal(own_bits[still], families.bits(wide[0])[still]), name


def terms(row: Row, base: Array, sides: Sequence[Array], read: Sequence[Array]) -> list[Double]:
    """What base and experts give to the sum: factors follow from whole tensors, or from the rows
    that are read."""
    assert row.definition is not None
    length = reference.row_length(base.shape) if row.rows else base.size

    def rows_of(values: Array) -> Double:
        return values.reshape(-1, length).astype(np.float64)

    known = [rows_of(side) for side in (read if row.rows else sides)]
    given = [rows_of(side) for side in read]
    if row.method == "slerp":
        known, given = [[rows_of(base), *own] for own in (known, given)]
    if row.method == "safe_merge":
        # The subspace that alignment changed follows from the third expert.
        known = [one - base for one in (sides if base.ndim == 2 else sides[:2])]
    elif not row.is_whole or row.method == "guarded":
        known = [rows_of(side - base) for side in (read if row.rows else sides)]
    if not row.is_whole:
        given = [rows_of(side - base) for side in read]
    if not any(one.any() for one in known):
        return [rows_of(base)]
    factors = row.definition(known, row.weights, row.given)
    made = [f * part for f, part in zip(factors, given, strict=True)]
    return made if row.is_whole else [rows_of(base), *made]
