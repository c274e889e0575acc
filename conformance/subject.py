"""mstore, run as its users run it (add, plan, merge, checkout), and its kernel with given masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from case import Case
from generated import BLOCK, Family, Tensors
from oracle import Draw
from safetensors.torch import load_file
from torch import Tensor

from mstore import MergeRequest, Store
from mstore.merge.arithmetic.kernels import Mix, mix_chunk
from mstore.merge.methods import registry
from mstore.store.objects.plan import Mixture

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class Stored:
    """A family in a store of its own."""

    def __init__(self, family: Family, root: Path) -> None:
        self._family = family
        self._root = root
        self._runs = 0
        self._store = Store.init(root / "store", block_size=BLOCK)
        self._store.add(family.path("base"), name="base")
        for name in family.members:
            if name != "base":
                self._store.add(family.path(name), name=name, base="base")

    def merge(self, case: Case, *, out_dtype: str) -> Tensors:
        """The merged tensors, read back from a checkout."""
        self._runs += 1
        plan = self._store.plan(
            MergeRequest(
                base="base",
                experts=list(zip(case.experts, case.weights, strict=True)),
                method=case.method,
                parameters=case.parameters(),
                dtype=None if out_dtype == self._family.dtype else out_dtype,
            ),
            # slerp with t = 0 is the base, on both sides.
            allow_noop=True,
        )
        # mergekit publishes what overflows; so it is compared.
        self._store.merge(plan, name="merged", allow_nonfinite=True)
        out = self._root / f"out{self._runs}"
        self._store.checkout("merged", out)
        return load_file(out / "model.safetensors")

    def close(self) -> None:
        self._store.close()


def replay(
    family: Family, case: Case, draws: dict[str, list[Draw]], *, out_dtype: torch.dtype
) -> Tensors:
    """Every tensor from the kernel, block by block, with masks and factors from elsewhere."""
    own = registry.operation(case.method, case.parameters(), case.weights)
    if own.selection.needs_facts:
        # The factors come with the masks.
        own = own.settled(Mixture(0.0, (1.0,) * len(case.weights), keeps_base=True))
    mix = own.mix()
    return {
        name: _replay(mix, base, [family.members[e][name] for e in case.experts], drawn, out_dtype)
        for name, base in family.base.items()
        for drawn in [draws[name]]
    }


def _replay(
    mix: Mix, base: Tensor, experts: list[Tensor], draws: list[Draw], out_dtype: torch.dtype
) -> Tensor:
    count, n = len(experts), base.numel()
    masks = np.ones((count, n), dtype=np.uint8)
    rescales = np.ones(count, dtype=np.float32)
    for k, draw in enumerate(draws):
        masks[k] = draw.mask.reshape(-1).numpy()
        rescales[k] = draw.factor
    out = torch.empty(base.shape, dtype=out_dtype)
    rows = np.stack([_bytes(expert) for expert in experts])
    own, target = _bytes(base), _bytes(out)
    width, out_width = base.element_size(), out.element_size()
    size = BLOCK // width
    for start in range(0, n, size):
        stop = min(n, start + size)
        mix_chunk(
            mix,
            own[start * width : stop * width],
            _NAMES[base.dtype],
            np.ascontiguousarray(rows[:, start * width : stop * width]),
            [_NAMES[expert.dtype] for expert in experts],
            np.arange(count),
            stop - start,
            start,
            np.zeros(count, dtype=np.float32),
            np.zeros(count, dtype=np.int64),
            np.zeros((count, 2), dtype=np.uint32),
            target[start * out_width : stop * out_width],
            _NAMES[out_dtype],
            masks=np.ascontiguousarray(masks[:, start:stop]),
            rescales=rescales,
        )
    return out


def _bytes(tensor: Tensor) -> np.ndarray:
    """The tensor's own memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
