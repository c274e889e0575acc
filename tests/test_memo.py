"""The memo table at rest: rows go in, come out, and may be thrown away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mstore.store.memo import Memo
from mstore.terms.ids import PlanId


@pytest.fixture
def memo(tmp_path: Path) -> Iterator[Memo]:
    """An empty table."""
    memo = Memo(tmp_path / "memo")
    yield memo
    memo.close()


def key(number: int) -> bytes:
    """The key of a test row."""
    return number.to_bytes(32, "big")


def test_rows_are_found_at_once_and_stay_after_a_flush(memo: Memo, tmp_path: Path) -> None:
    """What is put is found in the order asked for; after `flush` another process finds it too."""
    memo.put_outputs((key(number), b"row %d" % number) for number in range(0, 2000, 2))
    memo.put_plan(key(7), PlanId(key(8)))
    asked = [key(number) for number in (4, 3, 1998, 4, 0)]
    wanted = [b"row 4", None, b"row 1998", b"row 4", b"row 0"]
    assert memo.outputs(asked) == wanted
    assert not (tmp_path / "memo").exists()
    memo.flush()
    memo.close()
    again = Memo(tmp_path / "memo")
    assert again.outputs(asked) == wanted
    assert again.plan(key(7)) == PlanId(key(8))
    assert again.plan(key(4)) is None
    assert again.file_bytes() > 0
    again.close()


def test_without_a_flush_there_is_no_table(memo: Memo, tmp_path: Path) -> None:
    """Looking things up makes nothing, and what was not flushed is gone with the object."""
    assert memo.outputs([key(1)]) == [None]
    assert memo.outputs([]) == []
    assert (memo.plan(key(1)), memo.file_bytes()) == (None, 0)
    memo.put_outputs([(key(1), b"row")])
    memo.close()
    assert Memo(tmp_path / "memo").outputs([key(1)]) == [None]
    assert list(tmp_path.iterdir()) == []


def test_a_row_is_replaced(memo: Memo) -> None:
    """A row put again is the new one, before and after a flush."""
    memo.put_outputs([(key(1), b"old")])
    memo.flush()
    memo.put_outputs([(key(1), b"new")])
    assert memo.outputs([key(1)]) == [b"new"]
    memo.flush()
    assert memo.outputs([key(1)]) == [b"new"]


def test_what_merges_made_is_told_apart_from_requests(memo: Memo) -> None:
    """A table that has only plans of requests remembers no output, before and after a flush."""
    assert not memo.has_outputs()
    memo.put_plan(key(7), PlanId(key(8)))
    assert not memo.has_outputs()
    memo.flush()
    assert not memo.has_outputs()
    memo.put_outputs([(key(1), b"row")])
    assert memo.has_outputs()
    memo.flush()
    assert memo.has_outputs()


def test_a_damaged_table_is_set_aside(tmp_path: Path) -> None:
    """Bytes that are no table are put out of the way and told of; all is well without them."""
    path = tmp_path / "memo"
    path.mkdir()
    damaged = b"damaged" * 2000
    (path / "data.mdb").write_bytes(damaged)
    remarks: list[str] = []
    memo = Memo(path, remarks.append)
    assert memo.outputs([key(1)]) == [None]
    (aside,) = tmp_path.glob("memo.damaged-*")
    assert (aside / "data.mdb").read_bytes() == damaged
    assert [str(aside) in remark for remark in remarks] == [True]
    memo.put_outputs([(key(1), b"row")])
    memo.flush()
    assert memo.outputs([key(1)]) == [b"row"]
    memo.close()
