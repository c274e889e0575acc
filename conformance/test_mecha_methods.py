"""Methods of image models are sd-mecha's: its functions on tensors, beside merges of a store.

sd-mecha computes in the type of the tensors, here float32; in float64 it is what both should be.
Where a method picks elements, they are equal bit for bit.  Where it adds what it computed, both are
off by what float32 rounds of each term, `UNITS` of 2^-24.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from generated import BLOCK, Tensors
from safetensors.torch import save_file
from sd_mecha.extensions.builtin.merge_methods import cosine, limiting, linear, slicing, ties
from torch import Tensor

from mstore import MergeRequest, Store

SHAPES = {
    "linear": (96, 70),
    "convolution": (24, 16, 3, 3),
    "bias": (300,),
    "number": (),
    "large": (130, 1100),
}
UNITS = 6.0


@dataclass
class Place:
    """A base and three experts, in a store and in memory."""

    store: Store
    models: list[Tensors]

    def merged(self, method: str, given: dict[str, Any], experts: int) -> Tensors:
        names = [f"m{k}" for k in range(1, 1 + experts)]
        request = MergeRequest(
            base="m0", experts=names, method=method, parameters=given, dtype="F32"
        )
        self.store.merge(self.store.plan(request, allow_noop=True), name="merged")
        found = self.store["merged"]
        return {name: torch.from_numpy(np.array(found.tensor(name))) for name in SHAPES}


@pytest.fixture(scope="module", params=["F32", "BF16"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(5)
    base = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    models = [base]
    for k in range(3):
        moved = {}
        for name, own in base.items():
            step = 0.1 * (k + 1) * torch.randn(own.shape, generator=generator)
            moved[name] = own + step * (torch.rand(own.shape, generator=generator) < 0.7)
        models.append(moved)
    if request.param == "BF16":
        models = [{n: one.bfloat16() for n, one in model.items()} for model in models]
    with Store.init(root / "store", block_size=BLOCK) as store:
        for k, model in enumerate(models):
            (root / f"m{k}").mkdir()
            save_file(model, root / f"m{k}" / "model.safetensors")
            store.add(root / f"m{k}", name=f"m{k}", base="m0" if k else None)
        yield Place(store, [{n: one.float() for n, one in model.items()} for model in models])


def called(method: Any, *tensors: Tensor, **options: Any) -> Tensor:
    """sd-mecha's function itself; it may write into what it is given."""
    found: Tensor = method.__wrapped__(*(one.clone() for one in tensors), **options)
    return found


def require_near(found: Tensor, wanted: Tensor, terms: Sequence[Tensor], units: float) -> None:
    """Both are so many roundings of their terms apart, at most."""
    size = sum(one.double().abs() for one in terms)
    gap = (found.double() - wanted.double()).abs()
    assert bool((gap <= units * 2.0**-24 * size + 1e-30).all()), (gap / size).max() * 2.0**24


@pytest.mark.parametrize("alpha", [1.0, 0.6, -0.5])
def test_train_difference(place: Place, alpha: float) -> None:
    """A, and alpha times the scaled difference of B and C."""
    for name, found in place.merged("train_difference", {"alpha": alpha}, 2).items():
        a, b, c = (model[name] for model in place.models[:3])
        mask = called(linear.train_difference_mask, a, b, c, alpha=torch.tensor(alpha))
        wanted = a.addcmul(b - c, mask)
        require_near(found, wanted, [a, mask * (b - a), mask * (c - a)], UNITS)


@pytest.mark.parametrize("stiffness", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("count", [2, 3])
def test_clamp(place: Place, count: int, stiffness: float) -> None:
    """A held between the bounds; without stiffness, bit for bit."""
    given = {"stiffness": stiffness}
    for name, found in place.merged("clamp", given, count).items():
        a, *bounds = (model[name] for model in place.models[: 1 + count])
        wanted = called(limiting.clamp, a, *bounds, stiffness=stiffness)
        if not stiffness:
            assert torch.equal(found, wanted), name
        require_near(found, wanted, [a, *bounds], UNITS)


def test_geometric_median(place: Place) -> None:
    """Weiszfeld's point, once sd-mecha makes all steps, too; what it stops at by default is as
    near to the least sum of distances."""
    for name, found in place.merged("geometric_median", {}, 3).items():
        models = [model[name] for model in place.models[1:]]
        wide = [model.double() for model in models]
        wanted = called(ties.geometric_median, *wide, ftol=-1.0)
        require_near(found, wanted, [place.models[0][name], *models], 4 * UNITS)
        usual = called(ties.geometric_median, *models)
        sums = [sum(torch.dist(one, p.double()) for one in wide) for p in (found, usual)]
        assert float(sums[0]) <= float(sums[1]) * (1 + 1e-6), name


def test_add_perpendicular(place: Place) -> None:
    """A, and alpha times what of B - C is at right angles to A - C."""
    for name, found in place.merged("add_perpendicular", {"alpha": 0.7}, 2).items():
        a, b, c = (model[name] for model in place.models[:3])
        for dtype, units in ((torch.float64, UNITS), (torch.float32, 40 * UNITS)):
            x, y, z = a.to(dtype), b.to(dtype), c.to(dtype)
            part = called(linear.perpendicular_component, x - z, y - z)
            wanted = x + 0.7 * part
            if torch.equal(x, z) or name == "number":
                continue
            require_near(found, wanted, [a, b - a, c - a, b, c], units)


@pytest.mark.parametrize("by_count", [True, False])
@pytest.mark.parametrize("density", [1.0, 0.3])
def test_ties(place: Place, density: float, *, by_count: bool) -> None:
    """Elections by count and by sum.  sd-mecha trims by a magnitude of another rank, so it gets
    deltas that are trimmed already; with as many positive as negative ones nobody wins in both."""
    given = {"density": density, "by_count": by_count}
    for name, found in place.merged("ties", given, 3).items():
        base, *experts = (model[name] for model in place.models)
        deltas = [expert - base for expert in experts]
        kept = max(1, int(density * base.numel()))
        if kept < base.numel():
            cuts = [d.abs().flatten().sort(descending=True).values[kept - 1] for d in deltas]
            if any(
                int((d.abs() >= cut).sum()) != kept for d, cut in zip(deltas, cuts, strict=True)
            ):
                continue
            deltas = [d * (d.abs() >= cut) for d, cut in zip(deltas, cuts, strict=True)]
        wanted = base + called(ties.ties_sum, *deltas, k=1.0, vote_sgn=not by_count)
        if not by_count:
            # A sum of zero counts as positive in mstore, as in mergekit.
            wanted = torch.where(torch.stack(deltas).sum(dim=0) == 0, found, wanted)
        require_near(found, wanted, [base, *deltas], UNITS)


@pytest.mark.parametrize("count", [2, 3])
def test_model_stock_by_rows(place: Place, count: int) -> None:
    """`filter_wise` is sd-mecha's of two experts; of more, sd-mecha counts the angles of neighbours
    in the list alone, and the paper, mergekit and mstore those of every two."""
    for name, found in place.merged("model_stock", {"filter_wise": True}, count).items():
        base, *experts = (model[name] for model in place.models[: 1 + count])
        deltas = [(expert - base).double() for expert in experts]
        if not base.shape or (name == "convolution"):
            # Rows of one and of three elements: nearly opposite ones divide by nearly nothing.
            continue
        wanted = base.double() + called(ties.model_stock, *deltas)
        gap = float((found.double() - wanted).abs().max())
        assert (gap < 1e-5) == (count == 2), (name, gap)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("method", ["add_cosine_a", "add_cosine_b"])
def test_add_cosine(place: Place, method: str, alpha: float) -> None:
    """From A to B by the angle between their columns."""
    for name, found in place.merged(method, {"alpha": alpha}, 1).items():
        a, b = (model[name] for model in place.models[:2])
        if not a.shape:
            # sd-mecha has no columns of a number.
            continue
        function = getattr(cosine, method)
        for dtype, units in ((torch.float64, UNITS), (torch.float32, 20 * UNITS)):
            wanted = called(function, a.to(dtype), b.to(dtype), alpha=torch.tensor(alpha).to(dtype))
            require_near(found, wanted, [a, b - a], units)


@pytest.mark.parametrize(("width", "offset"), [(0.5, 0.0), (0.3, 0.45), (0.6, 0.7), (1.0, 0.5)])
def test_tensor_sum(place: Place, width: float, offset: float) -> None:
    """Rows of B in A, bit for bit."""
    given = {"width": width, "offset": offset}
    for name, found in place.merged("tensor_sum", given, 1).items():
        wanted = called(slicing.tensor_sum, *(model[name] for model in place.models[:2]), **given)
        assert torch.equal(found, wanted), name
