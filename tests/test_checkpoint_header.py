"""Safetensors headers: the same reading as safetensors' own, and every bad one refused by name."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
from checkpoints import BITS, Tensor, safetensors_bytes, size_of, with_length
from hypothesis import given
from hypothesis import strategies as st

from mstore.checkpoint.header import Header, HeaderLimits, TensorSlot, parse_header, read_header
from mstore.terms.errors import BadCheckpoint, NotFound


def parse(file: bytes, **limits: int) -> Header:
    """The header of a whole file held in memory."""
    length = int.from_bytes(file[:8], "little")
    return parse_header(
        file[: 8 + length],
        file_size=len(file),
        where="x.safetensors",
        limits=HeaderLimits(**limits),
    )


def file_of(entries: object, data: bytes = b"") -> bytes:
    """A file whose header is any JSON value, or any bytes."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return with_length(text) + data


def entry(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, Any]:
    """One tensor's entry, sound unless told otherwise."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# What every reader takes in a name: no surrogates, no control characters.
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
# Metadata may hold anything that is Unicode.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """Tensors in data order: any dtype, 0-d and empty ones among them, distinct names."""
    made: list[Tensor] = []
    chosen = draw(st.lists(names, unique=True, max_size=6))
    for name in chosen:
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        if size_of(dtype, [*shape, 8]) != 8 * size_of(dtype, shape):
            shape.append(8)
        payload = random.Random(len(made)).randbytes(size_of(dtype, shape))
        if name != "__metadata__":
            made.append((name, dtype, tuple(shape), payload))
    return made


@given(st.data())
def test_agrees_with_safetensors(data: st.DataObject) -> None:
    """On valid files our slots are safetensors' tensors: name, dtype, shape, bytes, metadata."""
    made = data.draw(tensors())
    metadata = data.draw(st.none() | st.dictionaries(texts, texts, max_size=4))
    file = safetensors_bytes(
        made,
        metadata=metadata,
        padding=data.draw(st.integers(0, 9)),
        order=data.draw(st.permutations(range(len(made)))),
    )
    header = parse(file)
    assert header.raw + file[header.data_start :] == file
    assert header.metadata == (metadata or {})
    assert_same(header, file)
    filled = [t for t in made if t[3]]
    assert [slot.name for slot in header.tensors if slot.nbytes] == [name for name, *_ in filled]


def assert_same(header: Header, file: bytes) -> None:
    """The header's slots cut `file` into what safetensors.deserialize gives."""
    theirs = {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(file)
    }
    data = file[header.data_start :]
    ours = {
        slot.name: (slot.dtype, slot.shape, data[slot.begin : slot.end]) for slot in header.tensors
    }
    assert ours == theirs
    assert len(header.tensors) == len(theirs)
    assert header.data_bytes == len(data)


def test_agrees_with_safe_open(tmp_path: Path) -> None:
    """Metadata and data order are those that safe_open reports for the file on disk."""
    made: list[Tensor] = [
        ("z", "F32", (2,), b"a" * 8),
        ("ä", "BF16", (), b"bb"),
        ("m", "I8", (3,), b"ccc"),
    ]
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(made, metadata={"k": "ö"}, padding=3, order=[2, 0, 1]))
    header = read_header(path)
    with safetensors.safe_open(path, framework="numpy") as theirs:
        assert [slot.name for slot in header.tensors] == theirs.offset_keys()
        assert header.metadata == theirs.metadata()


def test_slots_are_in_data_order() -> None:
    """Slots come by (begin, end); empty tensors at one place keep the order of the JSON."""
    file = file_of(
        {
            "late": entry(offsets=(2, 4)),
            "empty b": entry(shape=(0,), offsets=(2, 2)),
            "early": entry(offsets=(0, 2)),
            "empty a": entry(shape=(0, 9), offsets=(2, 2)),
            "end": entry(shape=(0,), offsets=(4, 4)),
        },
        b"data",
    )
    header = parse(file)
    assert [slot.name for slot in header.tensors] == ["early", "empty b", "empty a", "late", "end"]
    assert header.tensors[0] == TensorSlot("early", "U8", (2,), 0, 2)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"{} \n\t  ",
        b"  {}",
        b'{"__metadata__":{}}',
        b'{"":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}',
        b'{"\\ud83e\\udd99":{"data_offsets":[0,0],"shape":[0,3],"dtype":"F64"}}',
        b'{"a":{"dtype":"F64","shape":[0],"data_offsets":[0,0],"later":{"x":[1.5,-1,null]}}}',
    ],
)
def test_odd_but_sound_headers_are_accepted(text: bytes) -> None:
    """No tensors, white space around, an empty or escaped name, and unknown fields are accepted."""
    file = file_of(text)
    header = parse(file)
    assert header.raw == file
    assert header.data_bytes == 0
    assert_same(header, file)


SOUND = safetensors_bytes(
    [
        ("a", "BF16", (2, 2), b"12345678"),
        ("ä.weight", "F32", (1,), b"abcd"),
        ("empty", "F4", (0,), b""),
        ("last", "I8", (), b"z"),
    ],
    metadata={"format": "pt"},
    padding=4,
)


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (b"", "truncated: a safetensors file has at least 8 bytes, this one 0"),
        (b"\x02\0\0", "truncated: a safetensors file has at least 8 bytes, this one 3"),
        (SOUND[:40], "truncated: the header ends at byte"),
        (SOUND[:-1], "truncated: tensor 'last' ends at byte 13 of the data; the file holds 12"),
        (SOUND[:-5], "truncated: tensor 'ä.weight' ends at byte 12"),
        (SOUND + b"!", "trailing bytes: the last tensor ends at byte 13 of the data"),
        (
            struct.pack("<Q", 2**63) + b"{}",
            "the header is too long: 8.0 EiB (9223372036854775808 bytes)",
        ),
        (struct.pack("<Q", 0), "not JSON"),
        (file_of(b"{]"), "the header is not JSON"),
        (file_of(b"{}x"), "the header is not JSON"),
        (file_of(b"{}\0\0"), "the header is not JSON"),
        (file_of(b'{"a\n":1}'), "the header is not JSON"),
        (file_of(b"\xef\xbb\xbf{}"), "the header is not JSON"),
        (file_of('{"ä":1}'.encode("latin-1")), "the header is not UTF-8 (byte 2)"),
        (file_of(b"[]"), "the header is not a JSON object"),
        (file_of(b"null"), "the header is not a JSON object"),
        (file_of(b'{"a":NaN}'), "NaN is not a JSON number"),
        (file_of(b'{"a":-Infinity}'), "-Infinity is not a JSON number"),
        (file_of(b'{"a":' * 100_000), "the header is nested too deeply"),
        (file_of(b"[" * 1_000_000), "opens 1000000 objects and arrays; the limit is"),
    ],
)
def test_a_bad_file_is_refused(file: bytes, problem: str) -> None:
    """Truncation, trailing bytes, and a header that is no JSON object are told apart."""
    with pytest.raises(BadCheckpoint, match=re.escape(problem)) as refusal:
        parse(file)
    assert refusal.value.where == "x.safetensors"


U8 = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f'{{"a":{U8},"b":1,"a":{U8}}}', "has the key 'a' twice"),
        (f'{{"a":{U8},"\\u0061":{U8}}}', "has the key 'a' twice"),
        ('{"__metadata__":{},"__metadata__":{}}', "has the key '__metadata__' twice"),
        ('{"m":{"dtype":"U8","dtype":"I8","shape":[]}}', "has the key 'dtype' twice in 'm'"),
        ('{"m":{"shape":[0],"shape":[2]}}', "has the key 'shape' twice in 'm'"),
        ('{"__metadata__":{"k":"1","k":"1"}}', "has the key 'k' twice in '__metadata__'"),
        ('{"m":{"x":{"k":1,"k":2}}}', "has the key 'k' twice in one object"),
    ],
)
def test_repeated_keys_are_refused(text: str, problem: str) -> None:
    """A key repeated at any level is refused, with its name and the tensor's."""
    with pytest.raises(BadCheckpoint, match=re.escape(problem)):
        parse(file_of(text.encode(), b"12"))


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (1, "its entry is not an object"),
        (["U8", [2], [0, 2]], "its entry is not an object"),
        ({}, "its dtype is missing"),
        (entry(dtype=None), "its dtype is missing"),
        (entry(dtype="U9"), "unknown dtype 'U9'"),
        (entry(dtype="u8"), "unknown dtype 'u8'"),
        (entry(shape=None), "its shape is missing"),
        (entry(shape="2"), "its shape is missing"),
        (entry(shape=[-2]), "its shape has a negative dimension, -2"),
        (entry(shape=[-1, -2]), "its shape has a negative dimension, -1"),
        (entry(shape=[True, 2]), "its shape is not made of whole numbers"),
        (entry(shape=[2.0]), "its shape is not made of whole numbers"),
        (entry(shape=["2"]), "its shape is not made of whole numbers"),
        (entry(shape=[None]), "its shape is not made of whole numbers"),
        (entry(shape=[2**64]), "its shape is not made of whole numbers"),
        (entry(shape=[2**62, 2**62]), "its shape is absurd"),
        (entry(shape=[0, 2**62, 2**62], offsets=[0, 0]), "its shape is absurd"),
        (entry(shape=[1] * 65), "its shape has 65 dimensions; the limit is 64"),
        (entry(offsets=None), "its data_offsets are missing"),
        (entry(offsets=[0]), "its data_offsets are missing or not a pair"),
        (entry(offsets=[0, 2, 2]), "its data_offsets are missing or not a pair"),
        (entry(offsets=[False, 2]), "its data_offsets overflow 64 bits or are not whole"),
        (entry(offsets=[0.0, 2]), "its data_offsets overflow 64 bits or are not whole"),
        (entry(offsets=[0, 2**64]), "its data_offsets overflow 64 bits or are not whole"),
        (entry(offsets=[-2, 0]), "its data_offsets are negative: [-2, 0]"),
        (entry(offsets=[2, 0]), "its data_offsets run backwards: [2, 0]"),
        (entry(offsets=[0, 1]), "its offsets span 1 bytes; U8 [2] takes 2"),
        (entry(offsets=[2**64 - 2, 2**64 - 1]), "its offsets span 1 bytes"),
        (entry(offsets=[2**64 - 3, 2**64 - 1]), "leaves a hole"),
        (entry(dtype="F4", shape=[3]), "its F4 elements do not end on a whole byte"),
    ],
)
def test_a_bad_tensor_is_refused_by_name(bad: object, problem: str) -> None:
    """Unknown dtypes, bad shapes and bad offsets are refused, and the error names the tensor."""
    with pytest.raises(BadCheckpoint) as refusal:
        parse(file_of({"fine": entry(), "the.bad.one": bad}, b"12"))
    assert "'the.bad.one'" in str(refusal.value)
    assert problem in str(refusal.value)
    assert refusal.value.where == "x.safetensors"


@pytest.mark.parametrize("number", ["-0", "0e0", "9" * 5000, "-" + "9" * 5000, "1" + "0" * 10**6])
def test_odd_numbers_are_no_offsets(number: str) -> None:
    """-0 (which Python reads as 0) and numbers of a million digits are refused like fractions."""
    text = U8.replace("[0,2]", f"[{number},2]")
    with pytest.raises(BadCheckpoint, match=r"'a': its data_offsets .* not whole numbers"):
        parse(file_of(f'{{"a":{text}}}'.encode(), b"12"))


@pytest.mark.parametrize(
    ("entries", "data", "problem"),
    [
        ({"a": entry(), "b": entry(offsets=(1, 3))}, b"123", "'b' overlaps tensor 'a'"),
        ({"a": entry(), "b": entry()}, b"12", "'b' overlaps tensor 'a'"),
        ({"a": entry(), "b": entry(shape=[0], offsets=(1, 1))}, b"12", "'b' overlaps tensor 'a'"),
        (
            {"a": entry(), "b": entry(offsets=(3, 5))},
            b"12345",
            "'b' leaves a hole in the data before it, from byte 2 to 3",
        ),
        ({"a": entry(offsets=(1, 3))}, b"123", "'a' leaves a hole"),
        ({"a": entry(shape=[0], offsets=(1, 1))}, b"1", "'a' leaves a hole"),
        ({"a": entry()}, b"123", "trailing bytes"),
        ({}, b"123", "trailing bytes: the last tensor ends at byte 0"),
    ],
)
def test_data_must_be_covered_once(entries: object, data: bytes, problem: str) -> None:
    """Overlaps, holes and bytes that belong to no tensor are refused."""
    with pytest.raises(BadCheckpoint, match=re.escape(problem)):
        parse(file_of(entries, data))


def test_metadata_may_be_null() -> None:
    """Null is no metadata, as for safetensors; the header's bytes stay."""
    raw = file_of({"__metadata__": None})
    header = parse(raw)
    assert header.metadata == {}
    assert raw.startswith(header.raw)


@pytest.mark.parametrize(
    "metadata",
    [[], "text", {"a": 1}, {"a": None}, {"a": {}}, {"a": "\ud800"}, {"\udfff": ""}],
)
def test_metadata_maps_text_to_text(metadata: object) -> None:
    """Metadata that is not an object of valid strings is refused."""
    with pytest.raises(BadCheckpoint, match="__metadata__"):
        parse(file_of({"__metadata__": metadata}))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nul\0", "control character"),
        ("\x1b[31mred", "control character"),
        ("ü\x9b", "control character"),
        ("\ud800", "not valid UTF-8"),
        ("x" * 4097, "longer than 4096 bytes"),
        ("ü" * 2049, "longer than 4096 bytes"),
    ],
)
def test_unprintable_names_are_refused_printably(name: str, problem: str) -> None:
    """A tensor name that would break a terminal or a table is refused in one printable line."""
    with pytest.raises(BadCheckpoint, match=problem) as refusal:
        parse(file_of({name: entry()}, b"12"))
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 300


def test_limits_are_arguments() -> None:
    """Each limit is inclusive, refuses one beyond, and is the caller's to choose."""
    two = {"a": entry(), "bb": entry(shape=[1, 2], offsets=(2, 4))}
    file = file_of(two, b"1234")
    length = int.from_bytes(file[:8], "little")
    exact = {"max_header_bytes": length, "max_tensors": 2, "max_name_bytes": 2, "max_rank": 2}
    assert len(parse(file, **exact).tensors) == 2
    for limit, value in exact.items():
        with pytest.raises(BadCheckpoint, match=r"limit is|longer than"):
            parse(file, **{**exact, limit: value - 1})


def test_metadata_is_no_tensor() -> None:
    """The metadata entry does not count against the limit of tensors."""
    file = file_of({"__metadata__": {"a": "b"}, "a": entry()}, b"12")
    assert len(parse(file, max_tensors=1).tensors) == 1


def test_a_header_cut_in_transit_is_refused() -> None:
    """Header bytes that are fewer or more than their length says are refused, with what to do."""
    for raw in (SOUND[:30], SOUND):
        with pytest.raises(BadCheckpoint, match="truncated") as refusal:
            parse_header(raw, file_size=len(SOUND), where="x")
        assert "download or copy it again" in (refusal.value.hint or "")


def test_reading_a_file(tmp_path: Path) -> None:
    """A header read from disk is the header parsed from memory."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(SOUND)
    assert read_header(path) == parse(SOUND)


def test_reading_names_the_file(tmp_path: Path) -> None:
    """What cannot be read is named: missing, a directory, a fifo (without waiting), truncated."""
    with pytest.raises(NotFound, match="gone"):
        read_header(tmp_path / "gone")
    with pytest.raises(BadCheckpoint, match="not a regular file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadCheckpoint, match="not a regular file"):
        read_header(tmp_path / "fifo")
    (tmp_path / "cut").write_bytes(SOUND[:-1])
    with pytest.raises(BadCheckpoint, match="truncated") as refusal:
        read_header(tmp_path / "cut")
    assert refusal.value.where == str(tmp_path / "cut")
    assert "download or copy it again" in (refusal.value.hint or "")


def test_a_git_lfs_pointer_has_a_hint(tmp_path: Path) -> None:
    """The text file that git-lfs leaves in place of weights is refused with the way out."""
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    with pytest.raises(BadCheckpoint) as refusal:
        read_header(path)
    assert refusal.value.hint == "git lfs pull"


TOKENS = [
    *(b"-1", b"0", b"1", b"3", b"1e3", b"1.5", b"18446744073709551616", b"9" * 5000, b"-0"),
    *(b"NaN", b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"', b'"a"', b'"F4"', b"\xff", b"\0"),
    *(b"[" * 2000, b'{"a":' * 2000, b",", b":", b'"', b"]", b"}", b'"__metadata__"', b'"dtype"'),
]


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """A sound file with one to three things wrong: bytes, tokens, length, ends."""
    file = SOUND
    for _ in range(draw(st.integers(1, 3))):
        length = int.from_bytes(file[:8], "little")
        text, data = file[8 : 8 + length], file[8 + length :]
        match draw(st.sampled_from(["flip", "token", "insert", "length", "cut", "grow", "bytes"])):
            case "flip" if text:
                place = draw(st.integers(0, len(text) - 1))
                flipped = text[place] ^ (1 << draw(st.integers(0, 7)))
                file = with_length(text[:place] + bytes([flipped]) + text[place + 1 :]) + data
            case "token":
                spots = list(re.finditer(rb'-?[0-9]+|"[^"]*"|[\[\]{}:,]', text))
                if spots:
                    spot = draw(st.sampled_from(spots))
                    token = draw(st.sampled_from([*TOKENS, spot.group() * 2, b""]))
                    file = with_length(text[: spot.start()] + token + text[spot.end() :]) + data
            case "insert":
                place = draw(st.integers(0, len(text)))
                token = draw(st.sampled_from(TOKENS))
                file = with_length(text[:place] + token + text[place:]) + data
            case "length":
                file = struct.pack("<Q", draw(st.integers(0, 2**64 - 1))) + file[8:]
            case "cut":
                file = file[: draw(st.integers(0, len(file)))]
            case "grow":
                file += draw(st.binary(min_size=1, max_size=3))
            case "bytes":
                file = draw(st.binary(max_size=40))
    return file


@given(mutants())
def test_a_mutant_is_refused_or_read_as_safetensors_reads_it(file: bytes) -> None:
    """Nothing but BadCheckpoint is ever raised, and what is accepted safetensors reads the same."""
    outcome = attempt(file)
    if isinstance(outcome, Header):
        assert outcome.raw == file[: outcome.data_start]
        assert_same(outcome, file)
    else:
        assert outcome.where == "x.safetensors"
        assert len(str(outcome)) < 500
        assert str(outcome).isprintable()


def attempt(file: bytes) -> Header | BadCheckpoint:
    """The header, or the refusal; any other error goes through."""
    try:
        return parse(file)
    except BadCheckpoint as refusal:
        return refusal


def test_every_flipped_header_bit_is_harmless() -> None:
    """Each of the header's bits, flipped alone, gives BadCheckpoint or safetensors' own reading."""
    refused = 0
    for bit in range(8 * (8 + int.from_bytes(SOUND[:8], "little"))):
        file = bytearray(SOUND)
        file[bit // 8] ^= 1 << (bit % 8)
        outcome = attempt(bytes(file))
        if isinstance(outcome, Header):
            assert_same(outcome, bytes(file))
        else:
            refused += 1
    assert refused > 1000


def test_every_truncation_is_refused() -> None:
    """No prefix of a file with data passes for a file."""
    for end in range(len(SOUND)):
        with pytest.raises(BadCheckpoint):
            parse(SOUND[:end])
