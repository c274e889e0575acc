"""Comparing models: changes and cosines are those of numpy, from statistics or from data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import families
import numpy as np
import pytest
import reference
from cli_runs import Program
from families import BLOCK, Arrays, Family
from msgspec.structs import replace
from test_budget import Place, make

from mstore import MergeRequest, Store
from mstore.api.reports import ComparedPart
from mstore.store.objects.shapes import EMBEDDINGS, layers_of
from mstore.terms.errors import BadRequest, Incompatible

FLOATS = set(reference.DTYPES.values())


@pytest.fixture(scope="module", params=[("BF16", "BF16", "BF16"), ("BF16", "F32", "F16")])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    family = families.layered(rows=120, expert_dtypes=request.param)
    made = make(tmp_path_factory.mktemp("family"), family)
    with made.store:
        yield made


def names_of(family: Family) -> list[str]:
    """Return the tensors that are compared: floats with elements; tied embeddings once."""
    found: dict[object, str] = {}
    for name, array in family.base.items():
        if array.dtype in FLOATS and array.size:
            contents = tuple(one[name].tobytes() for one in (family.base, *family.experts))
            found.setdefault(contents if EMBEDDINGS.search(name) else name, name)
    return list(found.values())


def change(arrays: Arrays, base: Arrays, names: Sequence[str]) -> np.ndarray:
    """Return the differences of these tensors, float64, in one row."""
    return np.concatenate(
        [(arrays[n].astype("f8") - base[n].astype("f8")).reshape(-1) for n in names]
    )


def require(part: ComparedPart, family: Family, names: Sequence[str], *, exact: bool) -> None:
    """Require what numpy says: norms always, products where they are said to be known."""
    zero = {name: np.zeros_like(family.base[name]) for name in names}
    norm = np.linalg.norm(change(family.base, zero, names))
    moved = [change(one, family.base, names) for one in family.experts]
    for model, own in zip(part.models, moved, strict=True):
        assert model.change == (None if norm == 0 else pytest.approx(np.linalg.norm(own) / norm))
    for pair, (one, other) in zip(part.pairs, itertools.combinations(moved, 2), strict=True):
        norms = np.linalg.norm(one) * np.linalg.norm(other)
        if norms == 0:
            assert pair.cosine is None
            continue
        assert pair.cosine is not None
        assert pair.deviation is not None
        true = float(one @ other / norms)
        assert not (exact and pair.deviation)
        assert pair.cosine == pytest.approx(true, abs=1e-5 + 5 * pair.deviation)


def test_equal_contents_are_tensors_of_their_own(tmp_path: Path) -> None:
    """Norms that are all ones count each, and so do equal head and embedding that nothing ties."""
    ones = {f"model.layers.{n}.norm.weight": np.ones(64, "f4") for n in range(6)}
    embedding = np.random.default_rng(0).standard_normal((8, 64)).astype("f4")
    heads = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    with Store.init(tmp_path / "store") as store:
        for name, by in (("base", 0.0), ("tuned", 0.25)):
            arrays = {**ones, **{key: one + np.float32(by) for key, one in heads.items()}}
            families.write_checkpoint(tmp_path / name, arrays)
            (tmp_path / name / "config.json").write_text("{}")
            store.add(tmp_path / name, name=name, base="base" if by else None)
        report = store.compare("tuned", base="base", by="tensor")
    assert {part.name for part in report.parts} == ones.keys() | heads.keys()
    moved, norm = 2 * embedding.size * 0.25**2, 2 * float((embedding**2).sum()) + 6 * 64
    assert report.whole.models[0].change == pytest.approx(math.sqrt(moved / norm), rel=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("by", ["tensor", "layer", "model"])
def test_changes_are_those_of_numpy(by: str, place: Place) -> None:
    """Changes by tensor, by layer and of whole models are those of numpy; a cosine is, too, or is
    within five times the deviation that it states.  No block of what has statistics is read."""
    family, names = place.family, names_of(place.family)
    report = place.store.compare(*family.names, by=by)
    if all(len({one[name].dtype for one in family.experts}) == 1 for name in names):
        assert report.bytes_read == 0
    assert report.base == "base"
    assert report.tensors == len(names)
    require(report.whole, family, names, exact=False)
    groups: dict[str, list[str]] = {}
    for name, layer in layers_of(names).items():
        groups.setdefault(name if by == "tensor" else layer, []).append(name)
    if by == "model":
        groups = {}
    assert {part.name for part in report.parts} == groups.keys()
    for part in report.parts:
        require(part, family, groups[str(part.name)], exact=False)


def test_statistics_say_what_data_say(tmp_path: Path) -> None:
    """Where statistics claim that a number is known, it is the one that the blocks give."""
    family = families.layered(rows=90)
    with make(tmp_path, family).store as store:
        told = store.compare(*family.names, by="tensor")
        exact = store.compare(*family.names, by="tensor", exact=True)
        again = store.compare(*family.names, by="tensor")
    assert told.bytes_read == 0
    assert exact.bytes_read > 0
    known = 0
    for part, read in zip((*told.parts, told.whole), (*exact.parts, exact.whole), strict=True):
        assert part.models == read.models
        for pair, own in zip(part.pairs, read.pairs, strict=True):
            assert own.deviation in (0, None)
            if pair.deviation == 0:
                known += 1
                assert pair.cosine == pytest.approx(own.cosine, abs=1e-6)
    assert known
    require(exact.whole, family, names_of(family), exact=True)
    # What was measured is kept.
    assert replace(again, seconds=0.0) == replace(exact, seconds=0.0, bytes_read=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_a_merge_has_the_direction_of_a_damaged_expert(seed: int, tmp_path: Path) -> None:
    """Where one tensor of one expert outweighs all else, statistics say that the merge goes there:
    the cosines of the whole, of the layer and of the tensor are 1, that of another expert is 0."""
    rng = np.random.default_rng(seed)
    base = {f"model.layers.{n}.w": rng.standard_normal((64, 64), "f4") for n in range(4)}
    experts = []
    for k in range(2):
        own = {name: a + rng.standard_normal(a.shape, "f4") / 50 for name, a in base.items()}
        own["model.layers.2.w"] += 30 * k * rng.standard_normal((64, 64), "f4")
        experts.append(own)
    with make(tmp_path, Family(base, tuple(experts))).store as store:
        request = MergeRequest(base="base", experts=[("e0", 0.3), ("e1", 0.3)], method="linear")
        store.merge(store.plan(request).plan, name="m")
        layers, tensors = (store.compare("m", "e0", "e1", by=by) for by in ("layer", "tensor"))
    damaged = [part for report in (layers, tensors) for part in report.parts if "2" in part.name]
    assert len(damaged) == 2
    for part in (layers.whole, *damaged):
        cosines = {(pair.a, pair.b): pair.cosine for pair in part.pairs}
        assert cosines["m", "e1"] == pytest.approx(1, abs=2e-3)
        assert abs(cosines["m", "e0"]) < 0.5
        assert all(0 < pair.deviation < 0.2 for pair in part.pairs)


def test_blocks_are_read_where_there_are_no_statistics(tmp_path: Path) -> None:
    """Models that were added without a base are read, once."""
    family = families.layered(rows=90)
    with make(tmp_path, family, with_base=False).store as store:
        with pytest.raises(BadRequest, match="no base"):
            store.compare("e0", "e1")
        first = store.compare(*family.names, base="base")
        assert first.bytes_read > 0
        require(first.whole, family, names_of(family), exact=False)
        assert store.compare(*family.names, base="base").bytes_read == 0


def test_equal_blocks(tmp_path: Path) -> None:
    """The share of equal blocks is that of each model with the base, and of each two models."""
    base = {"w": np.arange(4 * BLOCK // 4, dtype="f4")}
    experts = []
    for changed in ([0], [0, 1]):
        own = base["w"].copy()
        for block in changed:
            own[block * BLOCK // 4] += 0.5
        experts.append({"w": own})
    with make(tmp_path, Family(base, tuple(experts))).store as store:
        whole = store.compare("e0", "e1").whole
    assert [model.equal_blocks for model in whole.models] == [0.75, 0.5]
    assert [pair.equal_blocks for pair in whole.pairs] == [0.75]
    assert whole.pairs[0].cosine == pytest.approx(1 / math.sqrt(2))


def test_the_base_that_lineage_knows(tmp_path: Path) -> None:
    """The base is the nearest that all came from: one of the models, or one further up."""
    rng = np.random.default_rng(1)
    made: dict[str, Arrays] = {"root": {"w": rng.standard_normal((300, 64)).astype("f4")}}
    with Store.init(tmp_path / "s", block_size=BLOCK) as store:
        for name, base in (("root", None), ("a", "root"), ("b", "root"), ("aa", "a"), ("ab", "a")):
            own = made["root" if base is None else base]["w"]
            moved = own if base is None else own + 0.01 * rng.standard_normal(own.shape)
            made[name] = {"w": moved.astype("f4")}
            families.write_checkpoint(tmp_path / name, made[name])
            store.add(tmp_path / name, name=name, base=base)
        told = {
            models: store.compare(*models).base
            for models in (("a",), ("a", "b"), ("aa", "ab"), ("aa", "b"), ("a", "aa"), ("aa", "a"))
        }
    assert list(told.values()) == ["root", "root", "a", "root", "a", "a"]


def test_tensors_that_not_all_have(tmp_path: Path) -> None:
    """Tensors of other shapes, or missing ones, are left out, with a remark; models without a
    common tensor are refused."""
    one = {"w": np.ones((8, 8), "f4"), "v": np.ones(8, "f4"), "n": np.ones(4, "i8")}
    other = {"w": 2 * np.ones((8, 8), "f4"), "v": np.ones(9, "f4")}
    with Store.init(tmp_path / "s", block_size=BLOCK) as store:
        for name, arrays in (("one", one), ("other", other), ("third", {"x": np.ones(3, "f4")})):
            families.write_checkpoint(tmp_path / name, arrays)
            store.add(tmp_path / name, name=name)
        report = store.compare("other", base="one")
        with pytest.raises(Incompatible, match="no tensor"):
            store.compare("third", base="one")
        with pytest.raises(BadRequest, match="tensor, part, layer, model"):
            store.compare("other", base="one", by="expert")
        with pytest.raises(BadRequest, match="no model"):
            store.compare(base="one")
    assert report.tensors == 1
    assert report.whole.models[0].change == 1
    assert "not compared: v and 1 more" in report.remarks[0]


def test_patterns(place: Place) -> None:
    """Patterns choose tensors, and must match one."""
    name = names_of(place.family)[0]
    report = place.store.compare("e0", "e1", only=[name], by="tensor")
    assert [part.name for part in report.parts] == [name]
    with pytest.raises(BadRequest, match="no tensor's name"):
        place.store.compare("e0", skip=["nothing"])


def test_for_people(place: Place, tmp_path: Path) -> None:
    """The command prints a row for each model, marks estimates, and draws a matrix."""
    mstore = Program(Path(place.store.path))
    said = mstore.succeed("compare", "e0", "e1", "e2", "--by", "model").out
    assert "3 models and the base base" in said
    rows = [line.split() for line in said.splitlines() if line.startswith("  ")]
    assert [row[1] for row in rows if row[0].isdigit()] == ["e0", "e1", "e2"]
    assert "~: an estimate" in said
    assert "--exact reads the blocks and tells it" in said
    exact = mstore.succeed("compare", "e0", "e1", "--by", "model", "--exact").out
    assert "~" not in exact
    assert "--exact" not in exact
    document = mstore.succeed("compare", "e0", "e1", "--json").document
    assert [one["model"] for one in document["whole"]["models"]] == ["e0", "e1"]
    every = mstore.succeed("compare", "e*", "--base", "base", "--json").document
    assert [one["model"] for one in every["whole"]["models"]] == ["e0", "e1", "e2"]
    assert "no ref matches the pattern" in mstore("compare", "x*").err
    mstore.succeed("compare", "e0", "e1", "--svg", str(tmp_path / "c.svg"))
    assert "cosine of two changes" in (tmp_path / "c.svg").read_text()
