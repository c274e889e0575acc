"""Tables: a row comes back as it was written, or not at all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.blocks.tables import (
    CHECK_BYTES,
    EMPTY,
    Table,
    ended,
    form,
    id_of,
    many,
    number,
    numbers,
    packed,
    raw,
    word,
)
from mstore.terms.errors import Corrupt
from mstore.terms.ids import ID_BYTES, PlanId, SnapshotId

IDS = st.binary(min_size=ID_BYTES, max_size=ID_BYTES).map(SnapshotId)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


class Two(msgspec.Struct, frozen=True, array_like=True):
    """A struct of two fields."""

    first: int
    second: str | None


FORMS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "id": (form(id_of(SnapshotId)), IDS),
    "number": (form(number(4, "n")), st.integers(0, 2**32 - 1)),
    "numbers": (form(numbers(">dI", "n")), st.tuples(st.floats(allow_nan=False), st.just(7))),
    "text": (form(word("w")), TEXTS),
    "ids": (form(many(id_of(SnapshotId), "ids")), st.lists(IDS).map(tuple)),
    "struct": (form(packed(Two)), st.builds(Two, st.integers(0, 9), st.none() | TEXTS)),
    "text, number": (
        form(ended("w"), number(8, "n")),
        st.tuples(TEXTS, st.integers(0, 2**64 - 1)),
    ),
    "id, number, text": (
        form(id_of(SnapshotId), number(1, "n"), word("w")),
        st.tuples(IDS, st.integers(0, 255), TEXTS),
    ),
    "id, raw": (form(id_of(SnapshotId), raw("r", 16)), st.tuples(IDS, st.just(b"r" * 16))),
    "nothing": (EMPTY, st.none()),
}


@pytest.mark.parametrize("what", FORMS)
@given(data=st.data())
def test_a_value_comes_back(what: str, data: st.DataObject) -> None:
    """Each form reads what it wrote, in a length that it states."""
    made, values = FORMS[what]
    value = data.draw(values)
    encoded = made.encode(value)
    assert made.decode(encoded) == value
    assert made.lengths is None or len(encoded) in made.lengths
    if isinstance(value, tuple) and what not in ("ids", "numbers"):
        assert encoded.startswith(made.begin(value[:1]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", sorted(FORMS.keys() - {"text", "ids"}))
@given(noise=st.binary(max_size=60))
def test_other_bytes_are_no_value(what: str, noise: bytes) -> None:
    """Bytes of another length or form are refused, never read as something else."""
    made, _ = FORMS[what]
    if made.lengths is not None and len(noise) not in made.lengths:
        table = Table("t", form(word("k")), made, proof="none")
        with pytest.raises(Corrupt, match="cannot be read"):
            table.read(b"k", noise)
        assert table.found(b"k", noise) is None


def table(name: str = "t", **more: Any) -> Table[str, int]:
    """A table of numbers by text."""
    return Table(name, form(word("name")), form(number(8, "count")), **more)


@given(st.integers(0, 8 * (8 + CHECK_BYTES) - 1))
def test_no_flipped_bit_is_read(bit: int) -> None:
    """A row with one other bit anywhere is an error where something depends on it, else missing."""
    key, row = table().row("a", 5)
    changed = bytearray(row)
    changed[bit // 8] ^= 1 << bit % 8
    assert table().item(key, row) == ("a", 5)
    with pytest.raises(Corrupt, match="does not match its check"):
        table().read(key, bytes(changed))
    assert table().found(key, bytes(changed)) is None
    assert not table().is_sound(key, bytes(changed))


@pytest.mark.parametrize("row", [b"", b"short", bytes(CHECK_BYTES)])
def test_a_row_without_its_check_is_damaged(row: bytes) -> None:
    """A row that is too short for a check is damaged, as one with another check is."""
    with pytest.raises(Corrupt, match="does not match its check"):
        table().read(b"a", row)


def test_a_check_is_of_one_place() -> None:
    """A row does not count under another key or in another table, nor with a byte moved there."""
    key, row = table().row("ab", 5)
    for other, name in ((b"ac", "t"), (b"a", "t"), (key, "u")):
        assert table(name).opened(other, row) is None
    value = (b"b" * 8, b"b" * 9)
    assert table().check(b"ab", value[0]) != table().check(b"a", value[1])


def test_a_row_of_sound_bytes_and_another_form_is_damaged() -> None:
    """A row may match its check and say nothing: it is an error that names its subject."""
    named = Table("refs", form(word("name")), form(packed(Two)), about="ref")
    row = named.sealed(b"a", b"\xc1")
    with pytest.raises(Corrupt, match="row of this ref cannot be read") as refusal:
        named.read(b"a", row)
    assert refusal.value.where == "a"
    by_id = Table("plans", form(id_of(PlanId)), form(packed(Two)), about="plan")
    assert by_id.damaged(bytes(32)).where == f"plan {'00' * 32}"
    assert table().subject(b"\xff") == ("index", "t ff")


def test_a_row_without_a_check_is_its_value() -> None:
    """What something else proves ends with no check, and states other lengths."""
    bare = table(proof="payload")
    assert bare.row("a", 5) == (b"a", (5).to_bytes(8, "big"))
    assert (bare.row_lengths(), table().row_lengths()) == ({8}, {8 + CHECK_BYTES})
