"""Thresholds of small tensors: found once, and cut together as each would be alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import families
import numpy as np
from msgspec.structs import replace

from mstore import MergeRequest, Store
from mstore.blocks.reader import Meter
from mstore.merge.methods.registry import operation
from mstore.merge.planning.survey import ExpertTensor, SurveyedTensor
from mstore.merge.planning.thresholds import Found, Thresholds
from mstore.models.stats.histogram import Threshold
from mstore.store.objects.plan import (
    DROPPED,
    EQUAL,
    OMITTED,
    READ,
    SHARED,
    Plan,
    TrimThreshold,
)
from mstore.store.objects.tensor import Tensor
from mstore.terms.ids import TensorId

RECORD = Tensor("BF16", (64,), 128, bytes(32))
LIMITED = Threshold(value=0.5, above=3, needed=2, in_bin=5, inexact=0)
ALL_OF_ITS_BIN = Threshold(value=0.25, above=3, needed=5, in_bin=5, inexact=2)
UNKNOWN = Threshold(value=0.125, above=3, needed=1, in_bin=5, inexact=4)
"""The order within its bin decides, and nobody may look."""


def tensor(name: str, *cuts: Threshold) -> SurveyedTensor:
    """A tensor of one chunk, with an expert for each threshold."""
    one = np.zeros(1, dtype=np.int64)
    experts = tuple(
        ExpertTensor(
            (TensorId(bytes(32)), TensorId((name[:1] * 31).encode() + bytes([k]))),
            RECORD,
            one.astype(bool),
            one + k,
            one + 128,
            None,
            (cut,),
        )
        for k, cut in enumerate(cuts)
    )
    own = operation("ties", {"density": 0.1}, [1.0] * len(cuts))
    return SurveyedTensor(name, RECORD, 64, 1024, experts, 1, own)


def test_together_as_alone(tmp_path: Path) -> None:
    """For any states, the first time and later, a tensor's thresholds are those of each expert."""
    known: Found = {}
    tensors = (tensor("all", LIMITED, ALL_OF_ITS_BIN, LIMITED), tensor("some", LIMITED, UNKNOWN))
    with Store.init(tmp_path / "store") as store, ThreadPoolExecutor(1) as pool:

        def thresholds(known: Found | None) -> Thresholds:
            args = store._catalog, store._statistics
            return Thresholds(*args, analyze=False, pool=pool, meter=Meter("test"), known=known)

        for one in tensors:
            for chosen in product((READ, SHARED, EQUAL, OMITTED, DROPPED), repeat=len(one.experts)):
                states = np.array(chosen, dtype=np.uint8)[:, None]
                together, alone = thresholds(known), thresholds(None)
                together.expect([(one, states)])
                wanted = []
                for expert, own in zip(one.experts, states, strict=True):
                    single = replace(one, experts=(expert,)), own[None]
                    alone.expect([single])
                    wanted += alone.of_tensor(*single)
                assert together.of_tensor(one, states) == tuple(wanted)
                assert together.at_edges == alone.at_edges
    assert known


def test_an_expert_without_weight_does_not_set_anothers_threshold(tmp_path: Path) -> None:
    """Of one model twice, once with weight 0, the other is trimmed as it is alone, in any order."""
    families.layered(seed=3).write(tmp_path)
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        store.add(tmp_path / "base", name="base")
        store.add(tmp_path / "e0", name="e0", base="base")

        def cuts(*weights: float) -> set[tuple[str, TrimThreshold]]:
            experts = [("e0", weight) for weight in weights]
            plan = store.plan(
                MergeRequest(
                    base="base", experts=experts, method="ties", parameters={"density": 0.2}
                )
            )
            tensors = store._catalog.record(Plan, plan.plan).tensors
            number = weights.index(1.0)
            return {(one.name, one.thresholds[number]) for one in tensors}

        alone = cuts(1.0)
        assert cuts(0.0, 1.0) == alone == cuts(1.0, 0.0)
        assert any(cut.value > 0 for _, cut in alone)
