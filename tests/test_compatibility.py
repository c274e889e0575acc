"""Tensors that patterns leave out may be missing, extra or of another shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import families
import numpy as np
import pytest
from cli_runs import Program
from families import BLOCK

from mstore import MergeRequest, Store
from mstore.terms.errors import BadRequest, Incompatible

SKIP = ["*embed_tokens*", "lm_head.*", "*.inv_freq"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An expert with a padded vocabulary, a stray buffer, and without its tied head."""
    rng = np.random.default_rng(2)
    embedding = families.cast(rng.standard_normal((100, 256)), "BF16")
    base = {
        "model.embed_tokens.weight": embedding,
        "model.layers.0.w": families.cast(rng.standard_normal((200, 256)), "BF16"),
        "lm_head.weight": embedding,
    }
    expert = {
        "model.embed_tokens.weight": families.cast(rng.standard_normal((128, 256)), "BF16"),
        "model.layers.0.w": families.cast(base["model.layers.0.w"].astype("f4") + 0.5, "BF16"),
        "model.layers.0.inv_freq": np.ones(8, dtype=np.float32),
    }
    families.write_checkpoint(tmp_path / "base", base)
    families.write_checkpoint(tmp_path / "expert", expert)
    return tmp_path


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        yield store


@pytest.mark.sampled(2)
@pytest.mark.parametrize("patterns", [{"skip": SKIP}, {"only": ["model.layers.*.w"]}])
@pytest.mark.parametrize("with_base", [True, False])
def test_what_is_left_out_is_not_judged(
    patterns: dict[str, list[str]], with_base: bool, root: Path, store: Store
) -> None:
    """`add --base` and `plan` compare what is to be merged, and say what they left to the base; the
    rest of the expert is stored byte for byte.
    """
    given = {"base": "base", **patterns} if with_base else {}
    store.add(root / "expert", name="expert", **given)
    plan = store.plan(MergeRequest(base="base", experts=["expert"], method="linear", **patterns))
    assert (plan.analyze_bytes_read > 0) == (not with_base)
    assert any("model.embed_tokens.weight is the base's own" in remark for remark in plan.remarks)
    store.merge(plan, name="m")
    assert [one.name for one in store.tensors("m")] == [one.name for one in store.tensors("base")]
    found, base, expert = (store[name] for name in ("m", "base", "expert"))
    moved = found.tensor("model.layers.0.w")
    assert np.array_equal(moved, expert.tensor("model.layers.0.w"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert np.array_equal(families.bits(found.tensor(name)), families.bits(base.tensor(name)))
    assert store.replay("m").same
    assert store.explain("m").tensors
    store.checkout("expert", root / "out")
    assert families.contents(root / "out") == families.contents(root / "expert")
    assert store.fsck(read_data=True).problems == ()


@pytest.mark.parametrize("patterns", [{"skip": SKIP}, {"only": ["model.layers.*.w"]}])
def test_analysis_leaves_out_what_a_plan_does(
    patterns: dict[str, list[str]], root: Path, store: Store
) -> None:
    """`analyze` takes the patterns of `plan`: it compares and reads only what they leave in, and
    the plan with the same patterns then reads no expert for statistics.
    """
    store.add(root / "expert", name="expert", base=None)
    with pytest.raises(Incompatible, match="has shape") as refused:
        store.analyze("expert", "base")
    assert "skip=[PATTERN] leaves" in (refused.value.hint or "")
    report = store.analyze("expert", "base", **patterns)
    assert report.tensors_measured == 1
    [own] = [one for one in store.tensors("expert") if one.name == "model.layers.0.w"]
    assert 0 < report.expert_bytes_read <= own.nbytes
    plan = store.plan(MergeRequest(base="base", experts=["expert"], method="linear", **patterns))
    assert plan.analyze_bytes_read == 0
    with pytest.raises(BadRequest, match=r"no tensor's name matches 'nothing\.\*'"):
        store.analyze("expert", "base", skip=[*SKIP, "nothing.*"])
    for odd in ("lm_head.*", [""]):
        with pytest.raises(BadRequest, match="list of texts"):
            store.analyze("expert", "base", skip=odd)
    mstore = Program(Path(store.path))
    assert mstore("analyze", "expert", "--base", "base").status == 1
    words = [w for key, given in patterns.items() for one in given for w in (f"--{key}", one)]
    assert "is known" in mstore.succeed("analyze", "expert", "--base", "base", *words).out


def test_what_is_merged_is_judged(root: Path, store: Store) -> None:
    """A tensor that no pattern leaves out must be there; the error says how to leave it out, and a
    pattern that matches nothing anywhere is still refused.
    """
    with pytest.raises(Incompatible, match=r"lm_head.weight is missing(\n|$)") as refused:
        store.add(root / "expert", name="expert", base="base", skip=[SKIP[0], SKIP[2]])
    assert "skip=[PATTERN]" in (refused.value.hint or "")
    store.add(root / "expert", name="expert")
    asked = {"base": "base", "experts": ["expert"], "method": "linear"}
    with pytest.raises(Incompatible, match=r"lm_head.weight is missing(\n|$)") as refused:
        store.plan(MergeRequest(**asked, skip=[SKIP[0], SKIP[2]]))
    assert "skip=" in (refused.value.hint or "")
    with pytest.raises(BadRequest, match="no tensor's name matches"):
        store.plan(MergeRequest(**asked, skip=[*SKIP, "nothing.*"]))


def test_the_command_line(root: Path, store: Store) -> None:
    """`add --base --skip`, then `merge --skip`."""
    mstore = Program(Path(store.path))
    skip = [word for pattern in SKIP for word in ("--skip", pattern)]
    line = ["add", root / "expert", "--name", "expert", "--base", "base"]
    assert mstore(*line).status == 1
    mstore.succeed(*line, *skip)
    merge = ["merge", "--base", "base", "--expert", "expert", "--method", "linear", "--name", "m"]
    assert "--skip PATTERN" in mstore(*merge).err
    mstore.succeed(*merge, *skip)
