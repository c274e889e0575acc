"""Comparing tensors bit by bit; a difference names tensor, index and both values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from generated import Tensors
from torch import Tensor

_SHOWN = 5


def bits(tensor: Tensor) -> Tensor:
    """The elements' bit patterns, flat."""
    return tensor.reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def differing(found: Tensor, wanted: Tensor) -> Tensor:
    """Flat bool: where one bit or more differs."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    return bits(found) != bits(wanted)


def assert_same(
    found: Tensors, wanted: Tensors, allowed: Mapping[str, Tensor] | None = None
) -> int:
    """Both hold the same tensors, bit for bit, but where `allowed` (flat bool) says otherwise.

    Returns how many elements differ where they may.
    """
    assert found.keys() == wanted.keys()
    complaints, tolerated = [], 0
    for name, theirs in wanted.items():
        ours = found[name]
        different = differing(ours, theirs)
        if allowed is not None and name in allowed:
            tolerated += int((different & allowed[name]).sum())
            different &= ~allowed[name]
        where = different.nonzero().reshape(-1)
        if not len(where):
            continue
        complaints.append(f"{name}: {len(where)} of {ours.numel()} elements differ")
        for index in where[:_SHOWN].tolist():
            pair = [_value(tensor, index) for tensor in (ours, theirs)]
            complaints.append(f"    index {index}: mstore {pair[0]}, mergekit {pair[1]}")
    assert not complaints, "\n".join(complaints)
    return tolerated


def _value(tensor: Tensor, index: int) -> str:
    digits = 2 * tensor.element_size()
    pattern = int(bits(tensor)[index]) & (16**digits - 1)
    return f"{float(tensor.reshape(-1)[index])!r} (0x{pattern:0{digits}x})"
