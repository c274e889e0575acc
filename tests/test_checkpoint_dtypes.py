"""Widths of dtypes and sizes of shapes."""

from __future__ import annotations

import re

import checkpoints
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from mstore.checkpoint.dtypes import DTYPES, nbytes
from mstore.terms.errors import BadCheckpoint


def test_every_dtype_of_the_library_is_known() -> None:
    """The table names exactly the dtypes that the installed safetensors lists in its own error."""
    entry = '{"a": {"dtype": "?", "shape": [], "data_offsets": [0, 0]}}'
    with pytest.raises(safetensors.SafetensorError) as refusal:
        safetensors.deserialize(checkpoints.with_length(entry.encode()))
    listed = str(refusal.value).split("expected one of")[1]
    assert set(re.findall(r"`(\w+)`", listed)) == set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_width_is_the_librarys(dtype: str) -> None:
    """Eight elements of a dtype take exactly the bytes that safetensors accepts for them."""
    size = nbytes(dtype, [8])
    tensor = (dtype.lower(), dtype, (8,), bytes(size))
    safetensors.deserialize(checkpoints.safetensors_bytes([tensor]))
    longer = checkpoints.safetensors_bytes([(dtype.lower(), dtype, (8,), bytes(size + 1))])
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(longer)
    assert size == DTYPES[dtype].bits == nbytes(DTYPES[dtype], [2, 2, 2])


def test_scalars_and_empty_tensors() -> None:
    """No dimension is one element; any dimension of zero is no byte."""
    assert nbytes("F32", []) == 4
    assert nbytes("F32", [3, 0, 5]) == 0
    assert nbytes("F4", [0]) == 0


@pytest.mark.parametrize(("dtype", "shape"), [("F4", [3]), ("F6_E2M3", [2]), ("F6_E3M2", [5, 5])])
def test_part_of_a_byte_is_refused(dtype: str, shape: list[int]) -> None:
    """Elements narrower than a byte must fill whole bytes."""
    with pytest.raises(BadCheckpoint, match="whole byte"):
        nbytes(dtype, shape)


@pytest.mark.parametrize(
    "shape",
    [[2**64], [2**62, 2**62], [0, 2**62, 2**62], [2**62, 0, 2**62], [2**40, 2**40, 0]],
)
def test_absurd_shapes_are_refused(shape: list[int]) -> None:
    """A shape whose non-zero dimensions overflow is refused, wherever its zero stands."""
    with pytest.raises(BadCheckpoint, match="absurd"):
        nbytes("BF16", shape)


def test_negative_dimension_and_unknown_dtype_are_refused() -> None:
    """Two negative dimensions do not make a positive size, and a made-up dtype has none."""
    with pytest.raises(BadCheckpoint, match="negative"):
        nbytes("F32", [-2, -2])
    with pytest.raises(BadCheckpoint, match="unknown dtype 'F33'"):
        nbytes("F33", [1])


@given(st.lists(st.integers(0, 2**70), max_size=6), st.sampled_from(sorted(DTYPES)))
def test_size_is_exact_or_refused(shape: list[int], dtype: str) -> None:
    """A size is the exact product, refused only where it is no whole byte or beyond 63 bits."""
    bits = worst = DTYPES[dtype].bits
    for dimension in shape:
        bits *= dimension
        worst *= dimension or 1
    if bits % 8 or worst >= 2**63:
        with pytest.raises(BadCheckpoint):
            nbytes(dtype, shape)
    else:
        assert nbytes(dtype, shape) * 8 == bits
