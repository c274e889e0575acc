"""mergekit, run as its users run it: a recipe in YAML, checkpoints in directories, run_merge.

Owns the recipe, the call, and what is seen of the random methods while they run: their masks and
rescale factors, taken by wrapping two of mergekit's functions.  Not one line of it is mergekit's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from case import Case
from generated import Family, Tensors
from mergekit import sparsify
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods import generalized_task_arithmetic, sce, slerp
from mergekit.merge_methods.api import merge_tensors
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """What a random method did to one delta: a mask of 0 and 1, and the factor after it."""

    mask: Tensor
    factor: float


Draws = dict[str, list[Draw]]
"""By tensor, one for each expert in order; none where nothing was drawn."""

_OF_MODELS = ("density", "gamma", "epsilon")
"""Parameters that a recipe gives to each model."""
_NOT_SHARED = (*_OF_MODELS, "around_base")
"""Parameters that a recipe has nowhere, or not for all models."""


def merge(
    family: Family, case: Case, out: Path, *, dtype: str | None = "float32", out_dtype: str
) -> Tensors:
    """The merged tensors, read back from what mergekit wrote.

    `dtype` is the one that it computes in; None leaves that to mergekit.
    """
    given = case.parameters()
    models = [
        {
            "model": str(family.path(name)),
            "parameters": {"weight": weight}
            | {one: case.of(one, k) for one in _OF_MODELS if one in given},
        }
        for k, (name, weight) in enumerate(zip(case.experts, case.weights, strict=True))
    ]
    if not case.is_weighted:
        base = ["base"] if case.has_base else []
        models = [{"model": str(family.path(name))} for name in (*base, *case.experts)]
    recipe: dict[str, Any] = {
        "merge_method": case.method,
        "out_dtype": out_dtype,
        "parameters": _shared(case),
        "models": models,
    }
    if dtype is not None:
        recipe["dtype"] = dtype
    if case.has_base:
        recipe["base_model"] = str(family.path("base"))
    config = MergeConfiguration.model_validate(yaml.safe_load(yaml.safe_dump(recipe)))
    options = MergeOptions(
        copy_tokenizer=False, write_model_card=False, quiet=True, random_seed=case.seed
    )
    run_merge(config, str(out), options)
    merged: Tensors = {}
    for path in sorted(out.glob("*.safetensors")):
        merged |= load_file(path)
    return merged


def _shared(case: Case) -> dict[str, Any]:
    """The parameters that a recipe has for all models."""
    own = _NOT_SHARED if case.is_weighted else ("around_base",)
    return {name: value for name, value in case.parameters().items() if name not in own}


@contextmanager
def recorded() -> Iterator[Draws]:
    """While open, every mask that mergekit draws is written down, with the factor it applies."""
    draws: Draws = {}
    method = generalized_task_arithmetic.GeneralizedTaskArithmeticMerge
    merge_group, rescale = method.merge_group, sparsify.rescaled_masked_tensor
    current: list[Draw] = []

    def merging(self: Any, group: Any, /, **parameters: Any) -> Tensor:
        nonlocal current
        current = draws.setdefault(group.metadata.name, [])
        result: Tensor = merge_group(self, group, **parameters)
        return result

    def rescaling(tensor: Tensor, mask: Tensor, norm: Any, **others: Any) -> Tensor:
        result: Tensor = rescale(tensor, mask, norm, **others)
        current.append(Draw(mask.clone(), _factor(tensor, mask, result)))
        return result

    with (
        mock.patch.object(method, "merge_group", merging),
        mock.patch.object(sparsify, "rescaled_masked_tensor", rescaling),
    ):
        yield draws


def merged(case: Case, base: Tensor, experts: list[Tensor]) -> Tensor:
    """Call mergekit's method on one tensor, in the type of the tensors: float64 is its exact self.

    Raises ValueError for vectors that mergekit refuses.
    """
    given = _shared(case)
    if case.is_weighted:
        given["weight"] = list(case.weights)
    tensors = [base, *experts] if case.has_base else experts
    return merge_tensors(
        tensors, case.method, parameters=given, base_index=0 if case.has_base else None
    )


@contextmanager
def ties_by_index() -> Iterator[None]:
    """While open, sce selects those of elements of equal variance that come first, as mstore does.

    mergekit's own selection has as many, and differs from this one in nothing else.
    """
    own_mask = sce.sce_mask

    def selecting(deltas: Tensor, density: float, dtype: Any = None) -> Tensor:
        own: Tensor = own_mask(deltas, density, dtype)
        spread = torch.var(deltas, dim=0, unbiased=False)
        order = spread.reshape(-1).argsort(descending=True, stable=True)
        mask = torch.zeros_like(own)
        mask.reshape(-1)[order[: int(own.sum(dtype=torch.float64))]] = 1
        assert int(mask.sum(dtype=torch.float64)) == int(own.sum(dtype=torch.float64))
        assert len(spread[own != mask].unique()) <= 1
        return mask

    with mock.patch.object(sce, "sce_mask", selecting):
        yield


@dataclass(frozen=True)
class Slerp:
    """mergekit's slerp of one tensor: the cosine that it computes, the branch, and the result."""

    cosine: float
    is_linear: bool
    merged: Tensor


@contextmanager
def chances() -> Iterator[list[Tensor]]:
    """While open, every tensor of probabilities that mergekit draws a mask by is written down.

    A row of one element has no rank: mergekit stops at it (0 / 0).  Here it is drawn with 0.5.
    """
    seen: list[Tensor] = []
    bernoulli = torch.bernoulli

    def drawing(probabilities: Tensor) -> Tensor:
        seen.append(probabilities.clone())
        return bernoulli(probabilities.nan_to_num(0.5))

    with mock.patch.object(torch, "bernoulli", drawing):
        yield seen


def slerp_of(t: float, base: Tensor, expert: Tensor) -> Slerp:
    """Call mergekit's function and watch how it chooses between its branches."""
    where = torch.where
    seen: list[tuple[Tensor, Tensor]] = []

    def watching(condition: Tensor, yes: Any, no: Any) -> Tensor:
        if isinstance(yes, int):
            # The cosine, replaced by 0 where the branch is linear.
            seen.append((condition.clone(), no.clone()))
        return where(condition, yes, no)

    with mock.patch.object(torch, "where", watching):
        merged = slerp.slerp(torch.tensor([t]), base.float()[None], expert.float()[None])[0]
    ((linear, cosine),) = seen
    return Slerp(float(cosine), bool(linear), merged)


def _factor(tensor: Tensor, mask: Tensor, result: Tensor) -> float:
    """What the masked delta was multiplied by: nothing, or the ratio of the L1 norms."""
    masked = tensor * mask
    ratio = tensor.abs().sum() / masked.abs().sum()
    for factor in (torch.ones(()), ratio):
        if torch.equal(masked * factor, result):
            return float(factor)
    raise AssertionError("mergekit rescaled by something that is not the ratio of the L1 norms")
