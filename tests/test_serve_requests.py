"""What a request says, without a server: addresses, ranges, conditions."""

from __future__ import annotations

from email.utils import formatdate
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore_serve import addresses, ranges
from mstore_serve.addresses import (
    Files,
    OneSnapshot,
    Refs,
    SnapshotName,
    Snapshots,
    Tensors,
    ThisServer,
    elsewhere,
    parse,
)
from mstore_serve.conditions import Validators, Verdict, evaluate, range_applies
from mstore_serve.ranges import MOST_RANGES, Span, Unsatisfiable

ID = "5e" * 32

# -- addresses ---------------------------------------------------------------------------------

PART = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=8)
# As mstore.store.refs.check_name has it: no part of a name begins with a dash.
NAME = st.lists(PART.filter(lambda part: part[0] not in "-."), min_size=1, max_size=4)
PATH = st.lists(PART, min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("raw", "address"),
    [
        ("/", ThisServer()),
        ("/refs", Refs()),
        ("/refs/", Refs()),
        ("/refs/main", Refs("main")),
        ("/refs/llama/merged", Refs("llama/merged")),
        ("/refs/llama%2Fmerged", Refs("llama/merged")),
        ("/refs/files", Refs("files")),
        ("/refs/a/-", OneSnapshot(SnapshotName("a", is_ref=True))),
        ("/refs/a/b/-/files/", Files(SnapshotName("a/b", is_ref=True), "")),
        ("/refs/a/-/files/-/x", Files(SnapshotName("a", is_ref=True), "-/x")),
        ("/refs/a/%2D/files/x", Files(SnapshotName("a", is_ref=True), "x")),
        ("/snapshots", Snapshots()),
        (f"/snapshots/{ID}", OneSnapshot(SnapshotName(ID, is_ref=False))),
        (f"/snapshots/{ID}/files", Files(SnapshotName(ID, is_ref=False), None)),
        (f"/snapshots/{ID}/files/sub/a%20b", Files(SnapshotName(ID, is_ref=False), "sub/a b")),
        (f"/snapshots/{ID}/files/../../x", Files(SnapshotName(ID, is_ref=False), "../../x")),
        (f"/snapshots/{ID}/tensors/a%2F..%2Fb", Tensors(SnapshotName(ID, is_ref=False), "a/../b")),
        ("http://example.org/refs/a", Refs("a")),
        ("*", None),
        ("/files/x", None),
        (f"/snapshots/{ID}/blocks/x", None),
        ("/refs/%ff", None),
    ],
)
def test_addresses(raw: str, address: object) -> None:
    """Each address names one thing, and others nothing."""
    assert parse(raw.encode()) == address


@given(NAME, PATH, st.booleans())
def test_names_and_paths_come_back(name: list[str], path: list[str], whole: bool) -> None:
    """Whatever the name of a ref and the path, with slashes encoded or not, both come back."""
    safe = "" if whole else "/"
    ref, file = "/".join(name), "/".join(path)
    raw = f"/refs/{quote(ref, safe=safe)}/-/files/{quote(file, safe=safe)}".encode()
    assert parse(raw) == Files(SnapshotName(ref, is_ref=True), file)


@pytest.mark.parametrize("rest", ["", "/files/", "/files/a/b%20c", "/tensors/x"])
def test_elsewhere_is_relative(rest: str) -> None:
    """The address of the same thing in another snapshot leads there below any path of a proxy."""
    from urllib.parse import urljoin

    raw = f"/snapshots/5e5e{rest}"
    there = urljoin(f"http://example.org/models{raw}", elsewhere(raw.encode(), ID))
    assert there == f"http://example.org/models/snapshots/{ID}{rest}"
    # Also if a client encodes what it need not.
    assert elsewhere(raw.replace("/s", "/%73", 1).encode(), ID) == elsewhere(raw.encode(), ID)


def test_a_segment_is_no_url() -> None:
    """A file name with a colon, a slash or a question mark is one segment of a link."""
    assert addresses.segment("a:b/c?d#e") == "a%3Ab%2Fc%3Fd%23e"


# -- ranges ------------------------------------------------------------------------------------

SIZE = 40
NUMBER = st.integers(0, SIZE + 9)
ONE = st.one_of(
    st.builds("{}-{}".format, NUMBER, NUMBER),
    st.builds("{}-".format, NUMBER),
    st.builds("-{}".format, NUMBER),
)


def wanted(spec: str, size: int) -> set[int] | None:
    """The bytes of one spec, by their numbers; None if it is invalid."""
    first, _, last = spec.partition("-")
    if not first:
        return set(range(size)[max(0, size - int(last)) :])
    if last and int(last) < int(first):
        return None
    return set(range(size)[int(first) : int(last) + 1 if last else None])


@given(st.lists(ONE, min_size=1, max_size=6), st.sampled_from([0, 1, SIZE]))
def test_ranges_are_slices(specs: list[str], size: int) -> None:
    """The ranges of a header are the bytes that Python's slices give, each once; a header with an
    invalid range is ignored."""
    bytes_wanted = [wanted(spec, size) for spec in specs]
    header = "bytes=" + ", ".join(specs)
    if None in bytes_wanted:
        assert ranges.parse(header, size) is None
        return
    every: set[int] = set().union(*(one for one in bytes_wanted if one is not None))
    try:
        spans = ranges.parse(header, size)
    except Unsatisfiable:
        assert every == set()
        return
    if spans is None:
        assert size == 0
        return
    numbers = [n for span in spans for n in range(span.start, span.stop)]
    assert len(numbers) == len(set(numbers))
    assert set(numbers) == every
    if len(spans) == len([one for one in bytes_wanted if one]):
        assert [set(range(s.start, s.stop)) for s in spans] == [one for one in bytes_wanted if one]


@pytest.mark.parametrize(
    "header",
    [
        *("", "bytes", "bytes=", "bytes=,", "bytes=-", "bytes=a-b", "bytes=0-1,x", "lines=0-1"),
        *("bytes=1", "bytes=1--2", "bytes=+1-2", "bytes=0x1-2", "bytes=٣-٤", "bytes=2-1"),
    ],
)
def test_what_is_no_range_is_ignored(header: str) -> None:
    """A header that does not name ranges of bytes leads to the whole file."""
    assert ranges.parse(header, SIZE) is None


def test_odd_but_valid_ranges() -> None:
    """Units in any case, blanks, empty elements and numbers of any length are understood."""
    assert ranges.parse(" Bytes = 1-2 ,, 9-9", SIZE) == [Span(1, 3), Span(9, 10)]
    assert ranges.parse(f"bytes=0-{'9' * 5000}", SIZE) == [Span(0, SIZE)]
    assert ranges.parse(f"bytes=-{'9' * 5000}", SIZE) == [Span(0, SIZE)]
    assert ranges.parse(f"bytes={'0' * 5000}1-1", SIZE) == [Span(1, 2)]
    with pytest.raises(Unsatisfiable):
        ranges.parse(f"bytes={'9' * 5000}-", SIZE)


def test_ranges_that_overlap_are_joined() -> None:
    """Ranges that overlap or touch are sent once; apart, they keep their order."""
    assert ranges.parse("bytes=8-9,0-3,2-5,6-6", SIZE) == [Span(0, 7), Span(8, 10)]
    assert ranges.parse("bytes=8-9,0-3", SIZE) == [Span(8, 10), Span(0, 4)]


def test_too_many_ranges() -> None:
    """More ranges than one answer has are refused, not answered with the whole."""
    one_more = ",".join(f"{2 * n}-{2 * n}" for n in range(MOST_RANGES + 1))
    with pytest.raises(Unsatisfiable):
        ranges.parse(f"bytes={one_more}", 10_000)
    assert len(ranges.parse(f"bytes={one_more.rpartition(',')[0]}", 10_000) or ()) == MOST_RANGES


# -- conditions --------------------------------------------------------------------------------

THEN = 1_700_000_000
NOW = Validators('"a"', THEN)
UNDATED = Validators('"a"', None)
DATE, EARLIER, LATER = (formatdate(THEN + d, usegmt=True) for d in (0, -5, 5))


@pytest.mark.parametrize(
    ("headers", "verdict"),
    [
        ({}, Verdict.SEND),
        ({"if-none-match": '"a"'}, Verdict.NOT_MODIFIED),
        ({"if-none-match": '"b", W/"a"'}, Verdict.NOT_MODIFIED),
        ({"if-none-match": "*"}, Verdict.NOT_MODIFIED),
        ({"if-none-match": '"b"'}, Verdict.SEND),
        ({"if-none-match": '"a'}, Verdict.SEND),
        ({"if-match": '"b","a"'}, Verdict.SEND),
        ({"if-match": "*"}, Verdict.SEND),
        ({"if-match": 'W/"a"'}, Verdict.FAILED),
        ({"if-match": '"b"'}, Verdict.FAILED),
        ({"if-modified-since": DATE}, Verdict.NOT_MODIFIED),
        ({"if-modified-since": LATER}, Verdict.NOT_MODIFIED),
        ({"if-modified-since": EARLIER}, Verdict.SEND),
        ({"if-modified-since": "yesterday"}, Verdict.SEND),
        ({"if-unmodified-since": EARLIER}, Verdict.FAILED),
        ({"if-unmodified-since": DATE}, Verdict.SEND),
        # An ETag counts more than a date.
        ({"if-none-match": '"b"', "if-modified-since": DATE}, Verdict.SEND),
        ({"if-match": '"a"', "if-unmodified-since": EARLIER}, Verdict.SEND),
        ({"if-match": '"a"', "if-none-match": '"a"'}, Verdict.NOT_MODIFIED),
        ({"if-match": '"b"', "if-none-match": '"a"'}, Verdict.FAILED),
    ],
)
def test_conditions(headers: dict[str, str], verdict: Verdict) -> None:
    """Conditions are evaluated in the order of RFC 9110: ETags before dates, If-Match first."""
    assert evaluate(headers, NOW) is verdict


def test_dates_of_refs_do_not_count() -> None:
    """Where time does not tell versions apart, no date holds; a range by date gives the whole."""
    assert evaluate({"if-modified-since": LATER}, UNDATED) is Verdict.SEND
    assert evaluate({"if-unmodified-since": EARLIER}, UNDATED) is Verdict.SEND
    assert not range_applies({"if-range": DATE}, UNDATED)


def test_if_range() -> None:
    """A range is followed only if If-Range names exactly this version."""
    assert range_applies({}, NOW)
    assert range_applies({"if-range": '"a"'}, NOW)
    assert range_applies({"if-range": DATE}, NOW)
    for other in ('"b"', 'W/"a"', EARLIER, LATER, "nonsense", "a"):
        assert not range_applies({"if-range": other}, NOW), other
