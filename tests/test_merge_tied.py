"""Tied tensors: which names stand for one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import families
import numpy as np
import pytest

from mstore import MergeRequest, Store
from mstore.merge.planning.tensors import first_names
from mstore.terms.errors import Corrupt
from mstore.terms.ids import TensorId


def _ids(**names: str) -> dict[str, TensorId]:
    return {name: TensorId.of(content.encode()) for name, content in names.items()}


def test_tied_in_every_member() -> None:
    """Embeddings are tied to the first of them where config, base and all experts say so."""
    base = _ids(**{"m.embed_tokens.weight": "E", "lm_head.weight": "E", "wte": "F"})
    experts = [base | _ids(**{"m.embed_tokens.weight": "G", "lm_head.weight": "G"}), base]
    assert first_names(base, experts, tied={""}) == {
        "m.embed_tokens.weight": "m.embed_tokens.weight",
        "lm_head.weight": "m.embed_tokens.weight",
        "wte": "wte",
    }
    assert first_names(base, experts, tied=()) == {name: name for name in base}


def test_equal_values_tie_nothing() -> None:
    """Norms that are all ones are tensors of their own, whatever config says of embeddings."""
    base = _ids(**{"model.norm.weight": "1", "model.layers.0.input_layernorm.weight": "1"})
    assert first_names(base, [base], tied={""}) == {name: name for name in base}


def test_an_untied_expert_unties() -> None:
    """Names that one expert tells apart, or does not have, are tensors of their own."""
    base = _ids(wte="E", lm_head="E")
    for other in (_ids(wte="E", lm_head="H"), _ids(lm_head="E")):
        assert first_names(base, [base, other], tied={""})["lm_head"] == "lm_head"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Two norms that are equal in base and expert, and two equal embeddings that no config ties."""
    rng = np.random.default_rng(0)
    values = families.cast(rng.standard_normal((64, 64)), "F32")
    ones = np.ones(64, dtype=np.float32)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    base = dict.fromkeys(names, values) | {"a.norm.weight": ones, "b.norm.weight": ones}
    expert = {name: array + np.float32(0.5) for name, array in base.items()}
    families.write_checkpoint(tmp_path / "base", base)
    families.write_checkpoint(tmp_path / "expert", expert)
    config = tmp_path / "base" / "config.json"
    config.write_text('{"tie_word_embeddings": false}')
    with Store.init(tmp_path / "store", block_size=families.BLOCK) as store:
        for name in ("base", "expert"):
            store.add(tmp_path / name, name=name)
        config.write_text('{"text_config": {"tie_word_embeddings": true}}')
        store.add(tmp_path / "base", name="tying")
        yield store


def test_what_config_says(store: Store) -> None:
    """Untied embeddings and equal norms are merged, drawn for and told of one by one; where config
    ties embeddings, those are one, and the norms are still two.
    """
    for base, tied in (("base", None), ("tying", "model.embed_tokens.weight")):
        asked = {"base": base, "experts": ["expert"], "method": "dare_linear"}
        store.merge(store.plan(MergeRequest(**asked, parameters={"density": 0.5})), name="m")
        told = {item.name: item.tied_to for item in store.explain("m").tensors}
        assert told["b.norm.weight"] is None
        assert told["lm_head.weight"] == tied
        drawn = {name: store["m"].tensor(name) for name in told}
        assert not np.array_equal(drawn["a.norm.weight"], drawn["b.norm.weight"])
        both = drawn["model.embed_tokens.weight"], drawn["lm_head.weight"]
        assert np.array_equal(*both) == (tied is not None)
        assert store.replay("m").same
        skipped = store.plan(MergeRequest(**asked, skip=["a.norm.weight"]))
        store.merge(skipped, name="m")
        assert np.array_equal(store["m"].tensor("a.norm.weight"), np.ones(64))
        assert np.array_equal(store["m"].tensor("b.norm.weight"), np.full(64, 1.5))


def test_explain_reads_no_config(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tied is told also where the base's config cannot be read any more."""
    asked = {"base": "tying", "experts": ["expert"], "method": "linear"}
    store.merge(store.plan(MergeRequest(**asked)), name="m")
    wanted = store.explain("m")

    def gone(*_given: object) -> bytes:
        raise Corrupt("the store does not have this block")

    monkeypatch.setattr(type(store._catalog), "read_block", gone)
    assert store.explain("m") == wanted
