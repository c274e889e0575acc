"""Facts about whole tensors that cannot be had: the error says which, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest

from mstore import MergeRequest, Store
from mstore.terms.errors import BadRequest

SICK = {
    "high": np.full((8, 64), 3e38, "f4"),
    "low": np.full((8, 64), -3e38, "f4"),
    "nan": np.full((8, 64), np.nan, "f4"),
}
METHODS: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    ("slerp", {"t": 0.5}, 1, "its angles cannot be measured"),
    ("nuslerp", {}, 2, "its angles cannot be measured"),
    ("multislerp", {}, 2, "its angles cannot be measured"),
    ("multislerp", {"around_base": False}, 2, "its angles cannot be measured"),
    ("karcher", {}, 2, "its angles cannot be measured"),
    ("model_stock", {}, 2, "its angles cannot be measured"),
    ("guarded", {"threshold": 0.5}, 2, "its angles cannot be measured"),
    ("safe_merge", {}, 2, "its change cannot be projected"),
    ("sce", {}, 2, "its experts cannot be weighed by squares of deltas"),
    ("sce", {"select_topk": 0.5}, 2, "its experts cannot be weighed by squares of deltas"),
    ("arcee_fusion", {}, 1, "importance has no quartiles"),
    (
        "dare_ties",
        {"density": 0.5, "rescale": "l1"},
        1,
        "the L1 norm of a delta cannot be restored",
    ),
    ("della", {"density": 0.5}, 1, "the L1 norm of a delta cannot be restored"),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("facts")
    with Store.init(root / "store") as made:
        for name, tensor in SICK.items():
            families.write_checkpoint(root / name, {"w": tensor})
            made.add(root / name, name=name)
        yield made


@pytest.mark.parametrize(("method", "parameters", "count", "lacks"), METHODS)
def test_the_reason_is_the_true_one(
    store: Store, method: str, parameters: dict[str, Any], count: int, lacks: str
) -> None:
    """Elements that are finite are never called infinite: the error says that a difference is
    beyond float32; where an element is NaN, it says that, and in which model; and what
    the method would have needed."""
    for expert, says, never in (
        ("low", "all elements of the tensor are finite, but", "has infinite"),
        ("nan", "the tensor has infinite or NaN elements in nan, so", "finite, but"),
    ):
        asked = MergeRequest(
            base="high",
            experts=[expert, "high"][:count],
            method=method,
            parameters=parameters,
            companions={"aligned": "high", "unaligned": "low"} if method == "safe_merge" else {},
        )
        with pytest.raises(BadRequest) as refused:
            store.plan(asked, allow_noop=True)
        assert says in str(refused.value)
        assert never not in str(refused.value)
        assert str(refused.value).endswith(f", so {lacks}")
        assert refused.value.where == "w"


def test_what_was_not_read_is_not_named_as_the_reason(store: Store, tmp_path: Path) -> None:
    """Where nothing may be read, a difference that is known not to be finite names both reasons."""
    with Store.init(tmp_path / "store") as other:
        for name in ("high", "low"):
            families.write_checkpoint(tmp_path / name, {"w": SICK[name]})
            other.add(tmp_path / name, name=name, base=None if name == "high" else "high")
        asked = MergeRequest(base="high", experts=["low"], method="sce", analyze=False)
        with pytest.raises(BadRequest, match="NaN elements, or a difference of two inputs is bey"):
            other.plan(asked)
