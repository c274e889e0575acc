"""safe_merge: matrices are judged by what alignment changed, as the authors of SafeMERGE do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import numpy.typing as npt
import pytest
from adapters import Adapter
from families import Arrays

from mstore import MergeRequest, Store
from mstore.merge.methods import safe_merge
from mstore.models.stats.store import StatsStore
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest, Incompatible

Matrix = npt.NDArray[np.float64]
RNG = np.random.default_rng(7)
SHAPES = {
    "tall.weight": (700, 40),
    "wide.weight": (30, 900),
    "square.weight": (64, 64),
    "norm": (64,),
    "cube": (4, 6, 8),
}
UNLIKE = 1e-5
"""A cosine is changed by so much to be on the other side of the threshold."""


def cosine(change: Matrix, vectors: Matrix) -> float:
    """As the paper writes it, with the projection as a matrix."""
    norm = np.linalg.norm(vectors)
    projected = vectors @ vectors.T / norm @ change if norm else np.zeros_like(change)
    size = float(np.linalg.norm(projected) * np.linalg.norm(change))
    return float((projected * change).sum()) / size if size else 0.0


def low_rank(rows: int, columns: int, rank: int) -> Matrix:
    found: Matrix = RNG.standard_normal((rows, rank)) @ RNG.standard_normal((rank, columns))
    return found


@pytest.fixture(scope="module")
def models() -> dict[str, Arrays]:
    """A base, an aligned model of it, a fine-tune and one that is safe, and two adapters."""
    base = {name: RNG.standard_normal(shape) for name, shape in SHAPES.items()}
    found = {"base": base}
    for name in ("tuned", "safe", "aligned", "elsewhere"):
        found[name] = {
            one: array + 0.1 * RNG.standard_normal(array.shape) for one, array in base.items()
        }
        if name == "aligned":
            for one in ("tall.weight", "wide.weight", "square.weight"):
                found[name][one] = base[one] + 0.1 * low_rank(*base[one].shape, 3)
    return {
        name: {one: families.cast(array, "F32") for one, array in own.items()}
        for name, own in found.items()
    }


@pytest.fixture
def store(models: dict[str, Arrays], tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=1 << 16) as found:
        for name, arrays in models.items():
            families.write_checkpoint(tmp_path / name, arrays)
            found.add(tmp_path / name, name=name)
        for name in ("tuned-lora", "safe-lora"):
            factors = {
                one.removesuffix(".weight"): (
                    families.cast(RNG.standard_normal((SHAPES[one][0], 4)), "F32"),
                    families.cast(RNG.standard_normal((4, SHAPES[one][1])), "F32"),
                )
                for one in ("tall.weight", "wide.weight")
            }
            Adapter(factors).write(tmp_path / name)
            found.add(tmp_path / name, name=name)
        yield found


def asked(**options: Any) -> MergeRequest:
    given: dict[str, Any] = {
        "base": "base",
        "experts": ["tuned", "safe"],
        "method": "safe_merge",
        "companions": {"aligned": "aligned", "unaligned": "base"},
    }
    return MergeRequest(**given | options)


def shares(store: Store, request: MergeRequest, name: str, *only: str) -> tuple[float, ...]:
    """What a plan takes of the two experts in a tensor."""
    plan = store.plan(replace(request, only=[name, *only]), allow_noop=True)
    tensors = {one.name: one for one in store._catalog.record(Plan, plan.plan).tensors}
    mixture = tensors[name].mixture
    assert mixture is not None
    return mixture.experts


STAYS, MIXES = (1.0, 0.0), tuple(float(np.float32(one)) for one in (0.8, 1 - 0.8))


@pytest.mark.parametrize("tile", [1 << 20, 700])
@pytest.mark.parametrize("unaligned", ["base", "elsewhere"])
@pytest.mark.parametrize("name", ["tall.weight", "wide.weight", "square.weight"])
def test_the_threshold_is_the_cosine_of_the_authors(
    name: str,
    unaligned: str,
    tile: int,
    store: Store,
    models: dict[str, Arrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice changes where the threshold passes the cosine of the paper, of tall and of wide
    matrices, with the base as one of the two models or without, in one run of rows or in many; the
    order of the two models counts for nothing."""
    monkeypatch.setattr(safe_merge, "_TILE", tile)
    base, tuned, one, other = (
        models[ref][name].astype(np.float64) for ref in ("base", "tuned", "aligned", unaligned)
    )
    least = cosine(tuned - base, one - other)
    assert 0.05 < least < 0.99
    for pair in (("aligned", unaligned), (unaligned, "aligned")):
        request = asked(companions=dict(zip(("aligned", "unaligned"), pair, strict=True)))
        for gap, wanted in ((-UNLIKE, STAYS), (UNLIKE, MIXES)):
            own = replace(request, parameters={"threshold": least + gap})
            assert shares(store, own, name) == wanted


@pytest.mark.parametrize("name", ["tall.weight", "wide.weight"])
@pytest.mark.parametrize("tile", [1 << 20, 700])
def test_adapters_are_judged_by_their_factors(
    name: str, tile: int, store: Store, models: dict[str, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters are the experts: the cosine is that of the product, and the matrix that was
    judged is 0.8 of the one and 0.2 of the other; an adapter may be the aligned model, too."""
    monkeypatch.setattr(safe_merge, "_TILE", tile)
    base = models["base"][name].astype(np.float64)
    store.merge(
        store.plan(asked(experts=["tuned-lora"], method="linear", companions={}, dtype="F32")),
        name="applied",
    )
    change = np.asarray(store["applied"].tensor(name)).astype(np.float64) - base
    request = asked(experts=["tuned-lora", "safe-lora"])
    least = cosine(change, models["aligned"][name].astype(np.float64) - base)
    for gap, wanted in ((-UNLIKE, STAYS), (UNLIKE, MIXES)):
        assert (
            shares(store, replace(request, parameters={"threshold": least + gap}), name) == wanted
        )
    itself = replace(request, companions={"aligned": "tuned-lora", "unaligned": "base"})
    own = cosine(change, change)
    for gap, wanted in ((-UNLIKE, STAYS), (UNLIKE, MIXES)):
        assert shares(store, replace(itself, parameters={"threshold": own + gap}), name) == wanted


CASES = {
    "unrelated": (0.26, lambda v: RNG.standard_normal(v.shape)),
    "the same column space": (0.94, lambda v: v @ RNG.standard_normal((v.shape[1],) * 2)),
    "equal": (0.94, lambda v: v),
    "opposite": (0.94, lambda v: -v),
}


@pytest.mark.parametrize("case", CASES)
def test_what_counts_is_the_subspace(case: str, tmp_path: Path) -> None:
    """A change in the subspace of alignment is safe whatever its direction there: the opposite of
    alignment, too, which `guarded` tells from it; an unrelated one is not."""
    wanted, make = CASES[case]
    vectors = families.cast(low_rank(96, 128, 8), "F32").astype(np.float64)
    change = families.cast(np.asarray(make(vectors)), "F32").astype(np.float64)
    assert cosine(change, vectors) == pytest.approx(wanted, abs=0.04)
    zeros = np.zeros((96, 128))
    with Store.init(tmp_path / "store") as store:
        for name, array in {
            "base": zeros,
            "tuned": change,
            "safe": zeros + 1,
            "aligned": vectors,
        }.items():
            families.write_checkpoint(tmp_path / name, {"w": families.cast(array, "F32")})
            store.add(tmp_path / name, name=name)
        for least, kept in ((wanted - 0.05, STAYS), (wanted + 0.05, MIXES)):
            assert shares(store, asked(parameters={"threshold": least}), "w") == kept
        if case == "opposite":
            plain = asked(
                experts=["tuned", "aligned"],
                method="guarded",
                parameters={"threshold": -0.9},
                companions={},
            )
            assert shares(store, plain, "w") == (0.0, 1.0)


def test_what_has_no_cosine(store: Store, models: dict[str, Arrays], tmp_path: Path) -> None:
    """Tensors that are no matrices stay, as does a matrix that the first expert did not change; one
    that alignment did not change has the cosine 0, as with the authors, and is mixed unless the
    threshold is 0."""
    for name in ("norm", "cube"):
        assert shares(store, asked(parameters={"threshold": 1.0}), name) == STAYS
    still = models["tuned"] | {"tall.weight": models["base"]["tall.weight"]}
    families.write_checkpoint(tmp_path / "still", still)
    store.add(tmp_path / "still", name="still")
    assert shares(store, asked(experts=["still", "safe"]), "tall.weight") == STAYS
    tall = "tall.weight"
    alike = models["safe"] | {tall: models["aligned"][tall]}
    families.write_checkpoint(tmp_path / "alike", alike)
    store.add(tmp_path / "alike", name="alike")
    nothing = asked(companions={"aligned": "alike", "unaligned": "aligned"})
    assert shares(store, nothing, tall, "wide.weight") == MIXES
    freely = replace(nothing, parameters={"threshold": 0.0})
    assert shares(store, freely, tall, "wide.weight") == STAYS
    part = {name: array for name, array in models["aligned"].items() if name != "tall.weight"}
    families.write_checkpoint(tmp_path / "part", part)
    store.add(tmp_path / "part", name="part")
    lacking = asked(companions={"aligned": "part", "unaligned": "base"})
    with pytest.raises(Incompatible, match=r"lacks tall\.weight: an aligned model has the tensors"):
        store.plan(lacking)
    assert (
        shares(store, replace(lacking, allow_missing=True), "tall.weight", "wide.weight") == STAYS
    )


@pytest.mark.parametrize("aligned", ["aligned", "tuned"])
def test_a_model_in_two_roles_costs_nothing_twice(
    aligned: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the base is the unaligned model, and even where the fine-tune is the aligned one, no
    block is read twice; and what is known is not measured again."""
    measure, read_blocks, read = safe_merge._measured, Catalog.read_blocks, []

    def counting(catalog: Catalog, ids: Any, *more: Any) -> Any:
        read.extend(ids)
        return read_blocks(catalog, ids, *more)

    def measured(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Catalog, "read_blocks", counting)
            return measure(*given)

    monkeypatch.setattr(safe_merge, "_measured", measured)
    request = asked(companions={"aligned": aligned, "unaligned": "base"})
    for _ in range(2):
        shares(store, request, "tall.weight")
        assert len(set(read)) == len(read) == (4 if aligned == "tuned" else 6)


def test_what_is_missing_is_asked_for(store: Store) -> None:
    """Both models must be given, and their elements be finite."""
    with pytest.raises(BadRequest, match="takes an unaligned model: none is given") as refused:
        store.plan(asked(companions={"aligned": "aligned"}))
    assert "unaligned" in str(refused.value.hint)
    with pytest.raises(BadRequest, match="takes no companions in the role fisher"):
        store.plan(
            asked(companions={"aligned": "base", "unaligned": "aligned", "fisher:tuned": "base"})
        )


def test_a_sick_aligned_model_is_named(
    store: Store, models: dict[str, Arrays], tmp_path: Path
) -> None:
    """A NaN in one of the two models is said to be there, and not in the experts."""
    sick = {name: array.copy() for name, array in models["aligned"].items()}
    sick["tall.weight"][3, 3] = np.nan
    families.write_checkpoint(tmp_path / "sick", sick)
    store.add(tmp_path / "sick", name="sick")
    with pytest.raises(BadRequest, match="the aligned or the unaligned model has") as refused:
        store.plan(asked(companions={"aligned": "sick", "unaligned": "base"}))
    assert refused.value.where == "tall.weight"


def test_two_models_that_are_equal_say_nothing(
    store: Store, models: dict[str, Arrays], tmp_path: Path
) -> None:
    """The aligned and the unaligned model with one content are refused, also under two names; equal
    matrices of them are counted in a warning."""
    for name, changes in {
        "copy": {},
        "alike": {"tall.weight": models["safe"]["tall.weight"]},
    }.items():
        families.write_checkpoint(tmp_path / name, models["aligned"] | changes)
        store.add(tmp_path / name, name=name)
    for pair in (("aligned", "aligned"), ("aligned", "copy")):
        given = dict(zip(("aligned", "unaligned"), pair, strict=True))
        with pytest.raises(Incompatible, match="as the unaligned model equals aligned") as refused:
            store.plan(asked(companions=given))
        assert "unaligned" in str(refused.value.hint)
    plan = store.plan(asked(companions={"aligned": "aligned", "unaligned": "alike"}))
    [warning] = [one for one in plan.warnings if one.kind == "equal models"]
    assert "are equal in 2 of 3 tensors" in warning.text
    assert "tall.weight" not in warning.text
    plan = store.plan(asked())
    assert "equal models" not in [one.kind for one in plan.warnings]


def test_another_architecture_is_said_to_be_one(
    store: Store, models: dict[str, Arrays], tmp_path: Path
) -> None:
    """Where the unaligned model lacks tensors, the hint is one of the base's architecture; where it
    lacks all, it is said to be another model. Neither proposes to leave an expert out."""
    for name, arrays in {
        "part": {one: models["base"][one] for one in ("tall.weight", "norm")},
        "other": {"a.weight": models["base"]["square.weight"]},
    }.items():
        families.write_checkpoint(tmp_path / name, arrays)
        store.add(tmp_path / name, name=name)
        with pytest.raises(Incompatible) as refused:
            store.plan(asked(companions={"aligned": "aligned", "unaligned": name}))
        told = f"{refused.value.what} {refused.value.hint}"
        wanted = "architecture of base" if name == "part" else "of another model"
        assert wanted in told
        assert "allow_missing" not in told


@pytest.mark.parametrize("method", ["safe_merge", "guarded"])
def test_explain_tells_the_cosine(
    method: str, store: Store, models: dict[str, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An explanation has the cosine of each tensor that was judged, the factors of the experts, and
    no rows for models that only planning read; what statistics do not know it leaves out."""
    parameters, given = {"threshold": 0.3}, {"aligned": "aligned", "unaligned": "base"}
    request = asked(
        method=method,
        parameters=parameters,
        companions=given if method == "safe_merge" else {},
    )
    plan = store.plan(request)
    assert plan.chunks_total == 2 * sum(
        -(-one.nbytes // (1 << 16)) for one in models["base"].values()
    )
    store.merge(plan, name="made")
    found = {one.name: one for one in store.explain("made").tensors}
    base, tuned, safe, aligned = (models[one] for one in ("base", "tuned", "safe", "aligned"))
    for name, one in found.items():
        change = tuned[name].astype(np.float64) - base[name]
        if method == "safe_merge" and change.ndim != 2:
            assert one.cosine is None
            assert one.mixture == STAYS
            continue
        if method == "safe_merge":
            wanted = cosine(change, aligned[name].astype(np.float64) - base[name])
        else:
            other = safe[name].astype(np.float64) - base[name]
            wanted = (change * other).sum() / np.linalg.norm(change) / np.linalg.norm(other)
        assert one.cosine == pytest.approx(wanted, abs=1e-5)
        mixed = MIXES if method == "safe_merge" else (0.0, 1.0)
        assert one.mixture == (STAYS if wanted >= 0.3 else mixed)
        assert [share.role for share in one.experts] == ["expert", "expert"]
    assert {share.role for share in store.explain("made").experts} == {"expert"}
    monkeypatch.setattr(StatsStore, "facts", lambda self, keys: [None] * len(list(keys)))
    monkeypatch.setattr(StatsStore, "pair", lambda *_: None)
    monkeypatch.setattr("mstore.merge.measures.facts.known_apart", lambda *_: {})
    assert {one.cosine for one in store.explain("made").tensors} <= {None}


def test_a_merge_that_mixes_nothing_says_by_how_much(store: Store) -> None:
    """Where every cosine reaches the threshold, the warning names the least of them."""
    plan = store.plan(asked(parameters={"threshold": 0.01}))
    [warning] = [one for one in plan.warnings if one.expert == "safe"]
    assert warning.kind == "expert trimmed away"
    told = store.merge(plan, name="made").warnings
    assert warning in told
    cosines = {one.name: one.cosine for one in store.explain("made").tensors if one.cosine}
    name = min(cosines, key=cosines.__getitem__)
    assert f"the least of 3 is {cosines[name]:.3f}, that of {name}" in warning.text
    assert "below the threshold 0.01" in warning.text
    assert "expert trimmed away" not in [one.kind for one in store.plan(asked()).warnings]
