"""Canonical records: one value, one byte string, one id; golden bytes of each kind."""

from __future__ import annotations

import math
import resource
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.blocks.packs import Kind
from mstore.store.objects.canonical import DEFAULT_LIMITS, Record, RecordLimits, decode
from mstore.store.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.store.objects.note import KINDS, LINK, REMOVAL, SIGNATURE, VALUE, Note, packed
from mstore.store.objects.plan import (
    Coverage,
    Criteria,
    Mixture,
    Plan,
    PlanInput,
    PlanOperation,
    PlanTensor,
    Taken,
    TensorCoverage,
    TrimThreshold,
    bit,
    bitmap,
)
from mstore.store.objects.snapshot import BASE, MADE, PREVIOUS, Origin, Parent, SnapshotRecord
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.terms.errors import BadRequest, Corrupt
from mstore.terms.ids import (
    BlockId,
    CoverageId,
    Id,
    ManifestId,
    NoteId,
    PackId,
    PlanId,
    SnapshotId,
    TensorId,
    VirtualId,
)

A, B, C = (bytes([n]) * 32 for n in (0xAA, 0xBB, 0xCC))

SIGNED = packed({"signature": "cc" * 64, "key": "bb" * 32})
PARTS = (Part(None, A, 100), Part("w", B, 69_900))
PARENTS = (Parent(PREVIOUS, B), Parent(BASE, C))

GOLDEN: dict[str, tuple[Record, str, str]] = {
    "tensor": (
        Tensor("BF16", (3, 300), 1800, A + B),
        "95a874656e736f722f31a442463136" + "9203cd012c" + "cd0708" + "c440" + "aa" * 32 + "bb" * 32,
        "mstore 1 tensor record",
    ),
    "manifest": (
        Manifest(
            (
                File("z", OPAQUE, 0, (Part(None, C, 0),)),
                File("ü.safetensors", SAFETENSORS, 70_000, PARTS),
            )
        ),
        "92aa6d616e69666573742f31" + "92"
        + "94a17a000091" + "93c0c420" + "cc" * 32 + "00"
        + "94aec3bc2e73616665" + "74656e736f7273" + "01ce00011170" + "92"
        + "93c0c420" + "aa" * 32 + "64"
        + "93a177c420" + "bb" * 32 + "ce0001110c",
        "mstore 1 manifest",
    ),
    "snapshot": (
        SnapshotRecord(
            A, PARENTS, "merge", Origin("u", "main", "c"), "ada", B, A, "", 1 << 60, "t/1"
        ),
        "9baa736e617073686f742f31" + "c420" + "aa" * 32 + "92"
        + "92a870726576696f7573c420" + "bb" * 32
        + "92a462617365c420" + "cc" * 32
        + "a56d65726765" + "93" + "a175" + "a46d61696e" + "a163" + "a3616461"
        + "c420" + "bb" * 32 + "c420" + "aa" * 32
        + "a0" + "cf1000000000000000" + "a3742f31",
        "mstore 1 snapshot",
    ),
    "plan": (
        Plan(
            operations=(
                PlanOperation(
                    "ties", (("density", 0.5), ("normalize", True), ("seed", -1)), (1.0,)
                ),
            ),
            inputs=(PlanInput("base", None, A), PlanInput("expert", None, B)),
            dtype=None,
            block_size=65536,
            budget=None,
            criteria=Criteria("norm", 0.5, None, ("a*",), (), None),
            allow_missing=False,
            full_expert_bytes=2,
            planned_expert_bytes=1,
            error_bound=None,
            error_estimate=0.25,
            tensors=(PlanTensor("w", 128, (b"\x00\x04",), (TrimThreshold(0.5, -1),), (-1.0,)),),
            copied=(("t", "other dtype"),),
            remarks=(),
        ),
        "dc0014" + "a6706c616e2f31"
        + "91" + "93a474696573"
        + "93" + "92a764656e73697479cb3fe0000000000000"
        + "92a96e6f726d616c697a65c3" + "92a473656564ff"
        + "91cb3ff0000000000000"
        + "92" + "94a462617365c0c420" + "aa" * 32 + "c0"
        + "94a6657870657274c0c420" + "bb" * 32 + "c0"
        + "c0" + "ce00010000" + "c0"
        + "96a46e6f726dcb3fe0000000000000c091a2612a90c0" + "c2" + "02" + "01" + "c0"
        + "cb3fd0000000000000"
        + "91" + "99a177cc80" + "91c4020004" + "9192cb3fe0000000000000ff" + "91cbbff0000000000000"
        + "00" + "90" + "c0" + "c0"
        + "91" + "92a174ab6f74686572206474797065" + "90" + "90" + "90" + "90" + "90" + "a0",
        "mstore 1 plan",
    ),
    "plan of companions": (
        Plan(
            operations=(
                PlanOperation("linear", (), (1.0, 0.0)),
                PlanOperation("m", (("p", (1.0, 0.5)), ("t", "x")), (0.5, -1.0)),
            ),
            inputs=(
                PlanInput("base", None, A, "u"),
                PlanInput("expert", None, B),
                PlanInput("expert", None, C, ""),
                PlanInput("fisher", None, A),
                PlanInput("fisher", 2, B, "v@w"),
            ),
            dtype="BF16",
            block_size=65536,
            budget=128,
            criteria=Criteria("norm", None, 255, (), ("b",), 1.0),
            allow_missing=True,
            full_expert_bytes=2,
            planned_expert_bytes=1,
            error_bound=0.5,
            error_estimate=None,
            tensors=(
                PlanTensor(
                    *("n", 128, (b"\x00",) * 4, (TrimThreshold(0.5, 1),) * 8, (0.0,) * 4),
                    *(1, ("a", "b", "n", "n", "n"), "F16"),
                ),
                PlanTensor(
                    *("s", 128, (b"\x05",) * 4, (), (0.0,) * 4),
                    mixture=Mixture(0.5, (1.0, 0.0), True),
                ),
            ),
            copied=(),
            remarks=("r", ""),
            without=("a", "b"),
        ),
        "dc0014" + "a6706c616e2f31"
        + "92" + "93a66c696e656172" + "90" + "92cb3ff0000000000000cb0000000000000000"
        + "93a16d" + "92" + "92a170" + "92cb3ff0000000000000cb3fe0000000000000" + "92a174a178"
        + "92cb3fe0000000000000cbbff0000000000000"
        + "95" + "94a462617365c0c420" + "aa" * 32 + "a175"
        + "94a6657870657274c0c420" + "bb" * 32 + "c0"
        + "94a6657870657274c0c420" + "cc" * 32 + "a0"
        + "94a6666973686572c0c420" + "aa" * 32 + "c0"
        + "94a666697368657202c420" + "bb" * 32 + "a3764077"
        + "a442463136" + "ce00010000" + "cc80" + "96a46e6f726dc0ccff9091a162cb3ff0000000000000"
        + "c3" + "02" + "01" + "cb3fe0000000000000" + "c0"
        + "92"
        + "99a16ecc80" + "94" + "c40100" * 4 + "98" + "92cb3fe000000000000001" * 8
        + "94" + "cb0000000000000000" * 4 + "01" + "95a161a162a16ea16ea16e" + "a3463136" + "c0"
        + "99a173cc80" + "94" + "c40105" * 4 + "90" + "94" + "cb0000000000000000" * 4
        + "00" + "90" + "c0" + "93cb3fe0000000000000"
        + "92cb3ff0000000000000" + "cb0000000000000000" + "c3"
        + "90" + "92a172a0" + "90" + "90" + "90" + "92a161a162" + "a0",
        "mstore 1 plan",
    ),
    "plan of layers": (
        Plan(
            operations=(PlanOperation("passthrough", (), (1.0,)),),
            inputs=(PlanInput("base", None, A), PlanInput("expert", None, B)),
            dtype=None,
            block_size=65536,
            budget=None,
            criteria=Criteria("norm", None, None, (), (), None),
            allow_missing=False,
            full_expert_bytes=0,
            planned_expert_bytes=0,
            error_bound=None,
            error_estimate=None,
            tensors=(),
            copied=(),
            remarks=(),
            layers=((0, 0), (1, 300)),
            taken=(Taken("w", 1, "v"),),
            dropped=("t", "u"),
            config='{"num_hidden_layers": 2}',
        ),
        "dc0014" + "a6706c616e2f31"
        + "91" + "93ab706173737468726f756768" + "90" + "91cb3ff0000000000000"
        + "92" + "94a462617365c0c420" + "aa" * 32 + "c0"
        + "94a6657870657274c0c420" + "bb" * 32 + "c0"
        + "c0" + "ce00010000" + "c0" + "96a46e6f726dc0c09090c0" + "c2" + "00" + "00" + "c0" + "c0"
        + "90" + "90" + "90"
        + "92" + "920000" + "9201cd012c" + "91" + "93a17701a176" + "92a174a175" + "90"
        + "b8" + "7b226e756d5f68696464656e5f6c6179657273223a20327d",
        "mstore 1 plan",
    ),
    "coverage": (
        Coverage(A, (TensorCoverage("w", 9, b"\x01\x00", (b"\xfe\x01", b"\x00\x00")),), ()),
        "94aa636f7665726167652f31" + "c420" + "aa" * 32 + "91"
        + "94a17709c4020100" + "92c402fe01c4020000" + "90",
        "mstore 1 coverage",
    ),
    "coverage of what is not finite": (
        Coverage(A, (TensorCoverage("w", 1, b"\x01", ()),), (("w", 300),)),
        "94aa636f7665726167652f31" + "c420" + "aa" * 32 + "91" + "94a17701c4010190"
        + "91" + "92a177cd012c",
        "mstore 1 coverage",
    ),
    "virtual": (
        VirtualTensor("BF16", (2, 3), 12, A, "w"),
        "96a97669727475616c2f31" + "a442463136" + "920203" + "0c" + "c420" + "aa" * 32 + "a177",
        "mstore 1 virtual tensor",
    ),
    "note of a value": (
        Note(A, (), VALUE, "mmlu", packed({"b": [None, True, 300], "a": 0.5}), "ada", 5),
        "98a66e6f74652f31" + "c420" + "aa" * 32 + "90" + "a576616c7565" + "a46d6d6c75"
        + "c414" + "82" + "a161" + "cb3fe0000000000000" + "a162" + "93c0c3cd012c"
        + "a3616461" + "05",
        "mstore 1 note",
    ),
    "note of a removal": (
        Note(A, (B, C), REMOVAL, "", packed(None), "", 5),
        "98a66e6f74652f31" + "c420" + "aa" * 32 + "92" + "c420" + "bb" * 32 + "c420" + "cc" * 32
        + "a772656d6f76616c" + "a0" + "c401c0" + "a0" + "05",
        "mstore 1 note",
    ),
    "note of a signature": (
        Note(A, (B,), SIGNATURE, "ed25519", SIGNED, "", 5),
        "98a66e6f74652f31" + "c420" + "aa" * 32 + "91" + "c420" + "bb" * 32
        + "a97369676e6174757265" + "a765643235353139"
        + "c4d3" + "82" + "a36b6579" + "d940" + "6262" * 32
        + "a97369676e6174757265" + "d980" + "6363" * 64 + "a0" + "05",
        "mstore 1 note",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_bytes(kind: str) -> None:
    """These values have these bytes and so this id for ever: they are format version 1."""
    record, golden, context = GOLDEN[kind]
    data = bytes.fromhex(golden)
    assert record.encode() == data
    assert decode(type(record), data, "here") == record
    assert record.id() == blake3(data, derive_key_context=context).digest()
    assert type(record.id()) is record.id_type
    assert record.kind.name.lower() == kind.split(maxsplit=1)[0]


def test_kinds_and_codes() -> None:
    """The kind byte of each record in packs and index is part of the format."""
    assert {kind.name: int(kind) for kind in Kind} == {
        "BLOCK": 0, "TENSOR": 1, "MANIFEST": 2, "SNAPSHOT": 3, "PLAN": 4, "COVERAGE": 5,
        "VIRTUAL": 6, "NOTE": 7,
    }  # fmt: skip
    assert {type(record).kind for record, *_ in GOLDEN.values()} == set(Kind) - {Kind.BLOCK}


def test_each_kind_has_its_own_hash_domain() -> None:
    """The same bytes have another id as each kind; a BlockId is the plain BLAKE3."""
    kinds: list[type[Id]] = [
        BlockId, TensorId, ManifestId, SnapshotId, PlanId, CoverageId, PackId, VirtualId,
        NoteId,
    ]  # fmt: skip
    assert len({bytes(kind.of(b"data")) for kind in kinds}) == len(kinds)
    assert BlockId.of(b"data") == blake3(b"data").digest()


# -- any record --------------------------------------------------------------------------------

IDS = st.binary(min_size=32, max_size=32)
COUNTS = st.integers(0, (1 << 63) - 1)
TEXT = st.text(max_size=12)
FLOATS = st.floats(allow_nan=False)
VALUES = st.booleans() | st.integers(-(1 << 63), 1 << 63) | FLOATS | TEXT
# True nine times of ten.
MOSTLY = st.integers(0, 9).map(bool)


NOTED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(TEXT, some, max_size=3),
    max_leaves=6,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of up to two experts; about half of them are sound."""
    experts = draw(st.integers(0, 2))
    belongs = draw(st.lists(st.none() | st.integers(0, 3), max_size=2))
    if draw(MOSTLY):
        belongs = sorted(
            {of for of in belongs if of is None or of <= experts},
            key=lambda of: -1 if of is None else of,
        )
    roles = [("base", None), *[("expert", None)] * experts, *(("fisher", of) for of in belongs)]
    if not draw(MOSTLY):
        roles = draw(st.permutations(roles))
    inputs = [PlanInput(*one, *draw(st.tuples(IDS, st.none() | TEXT))) for one in roles]
    others = len(inputs) - 1
    values = VALUES | st.just((0.5, 0.25)) if experts == 2 else VALUES
    operation = st.builds(
        PlanOperation,
        TEXT,
        st.lists(st.tuples(TEXT, values), max_size=3).map(tuple),
        st.tuples(*[FLOATS] * experts),
    )
    tensor = st.builds(
        PlanTensor,
        TEXT,
        COUNTS,
        st.lists(st.integers(0, 5) | st.integers(0, 255), max_size=9).map(
            lambda states: (bytes(states),) * others
        ),
        st.sampled_from((0, 1, 2)).flatmap(
            lambda sides: st.tuples(
                *[st.builds(TrimThreshold, FLOATS, st.integers(-1, 99))] * (sides * others)
            )
        ),
        st.tuples(*[FLOATS] * others),
        st.integers(0, 1),
        st.just(()) | st.tuples(*[TEXT] * (1 + others)),
        st.none() | TEXT,
        st.none() | st.builds(Mixture, FLOATS, st.tuples(*[FLOATS] * others), st.booleans()),
    )
    names = st.lists(TEXT, max_size=2).map(tuple)
    ordered = st.lists(TEXT, max_size=2, unique=True).map(lambda found: tuple(sorted(found)))
    taken = st.tuples(st.builds(Taken, TEXT, st.integers(0, 2), TEXT))
    layers = draw(st.just(()) | st.tuples(st.tuples(st.integers(0, 2), COUNTS)))
    tensors = [] if layers and draw(MOSTLY) else draw(st.lists(tensor, max_size=2))
    count = 1 + any(one.operation for one in tensors) if draw(MOSTLY) else draw(st.integers(0, 2))
    return Plan(
        operations=tuple(draw(operation) for _ in range(count)),
        inputs=tuple(inputs),
        dtype=draw(st.none() | TEXT),
        block_size=draw(COUNTS),
        budget=draw(st.none() | COUNTS),
        criteria=draw(
            st.builds(
                *(Criteria, TEXT, st.none() | FLOATS, st.none() | COUNTS),
                *(names, names, st.none() | FLOATS),
            )
        ),
        allow_missing=draw(st.booleans()),
        full_expert_bytes=draw(COUNTS),
        planned_expert_bytes=draw(COUNTS),
        error_bound=draw(st.none() | FLOATS),
        error_estimate=draw(st.none() | FLOATS),
        tensors=tuple(tensors),
        copied=draw(st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple)),
        remarks=draw(names),
        layers=layers,
        taken=draw(st.just(()) | taken) if layers else (),
        dropped=draw(ordered) if layers or not draw(MOSTLY) else (),
        without=draw(ordered if draw(MOSTLY) else names),
    )


RECORDS: dict[type[Record], st.SearchStrategy[Record]] = {
    Tensor: st.builds(
        Tensor, TEXT, st.lists(COUNTS, max_size=3).map(tuple), COUNTS, st.binary(max_size=70)
    ),
    Manifest: st.builds(
        Manifest,
        st.lists(
            st.builds(
                File,
                TEXT,
                st.integers(0, 1),
                COUNTS,
                st.lists(st.builds(Part, st.none() | TEXT, IDS, COUNTS), max_size=3).map(tuple),
            ),
            max_size=3,
        ).map(tuple),
    ),
    SnapshotRecord: st.builds(
        SnapshotRecord,
        IDS,
        st.lists(st.builds(Parent, TEXT, IDS), max_size=3).map(tuple),
        st.sampled_from(MADE) | TEXT,
        st.none() | st.builds(Origin, TEXT, TEXT, TEXT),
        TEXT,
        st.none() | IDS,
        st.none() | IDS,
        TEXT,
        COUNTS,
        TEXT,
    ),
    Plan: plans(),
    VirtualTensor: st.builds(
        VirtualTensor, TEXT, st.lists(COUNTS, max_size=3).map(tuple), COUNTS, IDS, TEXT
    ),
    Note: st.builds(
        Note,
        IDS,
        st.just(()) | st.lists(IDS, max_size=2).map(lambda ids: tuple(sorted(ids))),
        st.sampled_from(KINDS) | TEXT,
        st.sampled_from(("", "ed25519")) | TEXT,
        st.just(packed(None)) | st.just(SIGNED) | NOTED.map(packed) | st.binary(max_size=9),
        TEXT,
        COUNTS,
    ),
    Coverage: st.builds(
        Coverage,
        IDS,
        st.lists(
            st.builds(
                TensorCoverage,
                TEXT,
                COUNTS,
                st.binary(max_size=9),
                st.lists(st.binary(max_size=9), max_size=2).map(tuple),
            ),
            max_size=3,
        ).map(tuple),
        st.lists(st.tuples(TEXT, COUNTS), max_size=2).map(tuple),
    ),
}
ANY_RECORD = st.one_of(*RECORDS.values())


@settings(max_examples=50)
@given(ANY_RECORD)
def test_records_come_back(record: Record) -> None:
    """Decoding gives the record that was encoded, and encodes to the same bytes again; it is
    Corrupt exactly if the record is unsound."""
    data = record.encode()
    if record.problem(DEFAULT_LIMITS) is not None:
        with pytest.raises(Corrupt):
            decode(type(record), data, "here")
        return
    again = decode(type(record), data, "here")
    assert again == record
    assert again.encode() == data


@given(ANY_RECORD, ANY_RECORD)
def test_different_records_have_different_bytes(one: Record, other: Record) -> None:
    """Two records have equal bytes exactly if they are equal, also across kinds."""
    same = type(one) is type(other) and one == other and repr(one) == repr(other)
    assert (one.encode() == other.encode()) == same


@settings(max_examples=60)
@given(record=ANY_RECORD, data=st.data())
def test_random_damage_is_refused_or_another_record(record: Record, data: st.DataObject) -> None:
    """Damaged bytes are Corrupt, or the canonical bytes of some other record: never a second
    spelling, never another exception."""
    raw = bytearray(record.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw)))
        new = data.draw(st.binary(max_size=9))
        raw[place : place + data.draw(st.integers(0, 9))] = new
    for kind in RECORDS:
        try:
            found = decode(kind, bytes(raw), "here")
        except Corrupt as error:
            assert error.where == "here"  # noqa: PT017 -- damage may also leave a sound record
            continue
        assert found.encode() == raw


@given(st.binary(max_size=40))
def test_any_bytes_are_corrupt_or_canonical(raw: bytes) -> None:
    """The same for bytes that never were a record."""
    for kind in RECORDS:
        try:
            assert decode(kind, raw, "here").encode() == raw
        except Corrupt:
            continue


# -- other spellings ---------------------------------------------------------------------------

TENSOR_HEAD = "95a874656e736f722f31"


@pytest.mark.parametrize(
    ("what", "spelled"),
    [
        ("an integer longer than it need be", TENSOR_HEAD + "a255389100cd0000c400"),
        ("another integer longer than it need be", TENSOR_HEAD + "a255389100cc00c400"),
        ("a signed integer for a small one", TENSOR_HEAD + "a255389100d000c400"),
        ("a string longer than it need be", TENSOR_HEAD + "d9025538910000c400"),
        ("a string of another length form", "95d90874656e736f722f31a25538910000c400"),
        ("a list of another length form", TENSOR_HEAD + "a25538dc00010000c400"),
        ("bytes of another length form", TENSOR_HEAD + "a25538910000c50000"),
        ("a float for an integer", TENSOR_HEAD + "a2553891cb000000000000000000c400"),
        ("a string for bytes", TENSOR_HEAD + "a25538910000a0"),
        ("a map", "8101"),
        ("a record of maps", TENSOR_HEAD + "a25538810000c400"),
        ("a field too many", "96a874656e736f722f31a25538910000c40000"),
        ("a field too few", "94a874656e736f722f31a25538910000"),
        ("something behind it", TENSOR_HEAD + "a25538910000c40000"),
        ("half of it", TENSOR_HEAD + "a2553891"),
        ("nothing", ""),
        ("another tag", "95a874656e736f722f32a25538910000c400"),
        ("no tag", "94a25538910000c400"),
        ("bytes that are no UTF-8", TENSOR_HEAD + "a2ff38910000c400"),
        ("a timestamp", TENSOR_HEAD + "a255389100d6ff00000000c400"),
    ],
)
def test_other_spellings_are_refused(what: str, spelled: str) -> None:
    """MessagePack that means the same, or nearly, is not a record."""
    sound = bytes.fromhex(TENSOR_HEAD + "a25538910000c400")
    assert decode(Tensor, sound, "here") == Tensor("U8", (0,), 0, b"")
    with pytest.raises(Corrupt) as refusal:
        decode(Tensor, bytes.fromhex(spelled), "here")
    assert refusal.value.where == "here", what


def test_a_record_of_one_kind_is_none_of_another() -> None:
    """The tag says what a record is."""
    for record, golden, _ in GOLDEN.values():
        for kind in RECORDS:
            if kind is not type(record):
                with pytest.raises(Corrupt):
                    decode(kind, bytes.fromhex(golden), "here")


def test_deep_nesting_is_corrupt() -> None:
    """A bomb of nested lists is an error like any other."""
    for depth in (50, 100_000):
        with pytest.raises(Corrupt):
            decode(Tensor, bytes.fromhex(TENSOR_HEAD) + b"\x91" * depth, "here")


def test_ids_are_stored_as_plain_bytes() -> None:
    """A record built with typed ids has the bytes of one built with plain ones."""
    typed = SnapshotRecord(
        ManifestId(A),
        (Parent(BASE, SnapshotId(B)),),
        "add",
        None,
        "",
        PlanId(C),
        CoverageId(C),
        "",
        1,
        "",
    )
    plain = SnapshotRecord(A, (Parent(BASE, B),), "add", None, "", C, C, "", 1, "")
    assert typed.encode() == plain.encode()


def test_floats_keep_every_bit() -> None:
    """Zero and minus zero, the smallest and the largest are told apart; infinities are kept."""
    values = [0.0, -0.0, 5e-324, 1.7976931348623157e308, math.inf, 0.1]
    seen = set()
    for value in values:
        data = msgspec.msgpack.encode(TrimThreshold(value, 0))
        assert math.copysign(1, msgspec.msgpack.decode(data, type=TrimThreshold).value) == (
            math.copysign(1, value)
        )
        seen.add(data)
    assert len(seen) == len(values)


# -- sound records -----------------------------------------------------------------------------


def _file(path: str, form: int = OPAQUE, size: int = 1, *parts: Part) -> Manifest:
    return Manifest((File(path, form, size, parts or (Part(None, A, size),)),))


def _files(*paths: str) -> Manifest:
    return Manifest(tuple(File(path, OPAQUE, 0, (Part(None, A, 0),)) for path in paths))


def _snapshot(*roles: str, **fields: Any) -> SnapshotRecord:
    plain = SnapshotRecord(
        A, tuple(Parent(r, B) for r in roles), "add", None, "", None, None, "", 1, "t"
    )
    return msgspec.structs.replace(plain, **fields)


def _plan(tensor: PlanTensor | None = None, **fields: Any) -> Plan:
    plan = GOLDEN["plan"][0]
    assert isinstance(plan, Plan)
    return msgspec.structs.replace(plan, **({"tensors": (tensor,)} if tensor else {}), **fields)


def _inputs(*roles: str | tuple[str, int], **fields: Any) -> Plan:
    """A plan of no tensors with these inputs: sound but for them."""
    named = [(role, None) if isinstance(role, str) else role for role in roles]
    weights = tuple(1.0 for role, _ in named if role == "expert")
    return _plan(
        operations=(PlanOperation("ties", (), weights),),
        inputs=tuple(PlanInput(role, of, A) for role, of in named),
        tensors=(),
        **fields,
    )


def _operations(*operations: PlanOperation, tensor: PlanTensor | None = None) -> Plan:
    return _plan(tensor, operations=operations)


LONG = "x" * 4097
OTHER = PlanTensor("w", 1, (b"",), (), (0.0,), 1)
TIES = PlanOperation("ties", (), (1.0,))
CUT = (TrimThreshold(0.5, -1),)


def _note(
    form: str = VALUE, key: str = "k", notes: tuple[bytes, ...] = (), data: bytes = b"\xc0"
) -> Note:
    return Note(A, notes, form, key, data, "", 5)


def _signed(key: object, signature: object) -> Note:
    return _note(SIGNATURE, "ed25519", (), packed({"key": key, "signature": signature}))


UNSOUND: dict[str, Record] = {
    "half an id": Tensor("U8", (1,), 1, A[:31]),
    "an unknown dtype": Tensor("I3", (1,), 1, A),
    "a length that is not its shape's": Tensor("F32", (2,), 4, A),
    "plain bytes of another length": Tensor("BYTES", (2,), 1, A),
    "plain bytes of two dimensions": Tensor("BYTES", (1, 1), 1, A),
    "a shape beyond 63 bits": Tensor("U8", (1 << 62, 1 << 62, 0), 0, b""),
    "65 dimensions": Tensor("U8", (1,) * 65, 1, A),
    "plain bytes that are virtual": VirtualTensor("BYTES", (1,), 1, A, "w"),
    "a virtual tensor of another length": VirtualTensor("F32", (2,), 4, A, "w"),
    "a long virtual name": VirtualTensor("U8", (1,), 1, A, LONG),
    "files out of order": _files("b", "a"),
    "a file twice": _files("a", "a"),
    "a file that is a directory": _files("a", "a.b", "a/b/c"),
    "a path upward": _file("a/../b"),
    "an absolute path": _file("/a"),
    "a NUL in a path": _file("a\0b"),
    "an empty part of a path": _file("a//b"),
    "a long part of a path": _file("x" * 256),
    "a deep path": _file("a/" * 64 + "b"),
    "an unknown form": _file("a", 2),
    "a file without parts": Manifest((File("a", OPAQUE, 0, ()),)),
    "a file longer than its parts": Manifest((File("a", OPAQUE, 2, (Part(None, A, 1),)),)),
    "a tensor in a plain file": _file("a", OPAQUE, 1, Part(None, A, 0), Part("w", A, 1)),
    "two headers": _file("a", SAFETENSORS, 1, Part(None, A, 0), Part(None, A, 1)),
    "no header": _file("a", SAFETENSORS, 1, Part("w", A, 1)),
    "a long tensor name": _file("a", SAFETENSORS, 1, Part(None, A, 1), Part(LONG, A, 0)),
    "an unknown role": _snapshot("mother"),
    "parents out of order": _snapshot("expert", "base"),
    "two bases": _snapshot("base", "base"),
    "many parents": _snapshot(*["expert"] * 4097),
    "a base after a companion": _snapshot("companion", "base"),
    "an unknown way to be made": _snapshot(made="found"),
    "a long author": _snapshot(author=LONG),
    "a long address": _snapshot(origin=Origin(LONG, "", "")),
    "a merge without a plan": _snapshot(made="merge"),
    "a cast with a plan": _snapshot(made="cast", plan=A),
    "a plan of what was added": _snapshot(plan=A),
    "coverage without a plan": _snapshot(coverage=A),
    "a long message": _snapshot(message="x" * ((1 << 20) + 1)),
    "states of two experts for one": _plan(PlanTensor("w", 1, (b"", b""), (), (0.0, 0.0))),
    "norms of two experts for one": _plan(PlanTensor("w", 1, (b"",), (), (0.0, 0.0))),
    "thresholds of one expert for two": msgspec.structs.replace(
        _inputs("base", "expert", "expert"),
        tensors=(PlanTensor("w", 1, (b"", b""), CUT, (0.0, 0.0)),),
    ),
    "an unknown state": _plan(PlanTensor("w", 1, (b"\x06",), CUT, (0.0,))),
    "a negative quota": _plan(PlanTensor("w", 1, (b"",), (TrimThreshold(0.5, -2),), (0.0,))),
    "a quota beyond 63 bits": _plan(
        PlanTensor("w", 1, (b"",), (TrimThreshold(0.5, 1 << 63),), (0.0,))
    ),
    "no operation": _operations(),
    "an operation that is not there": _plan(OTHER),
    "an operation that no tensor has": _operations(TIES, TIES),
    "weights of two experts for one": _operations(PlanOperation("ties", (), (1.0, 1.0))),
    "weights of two experts for one tensor": _operations(
        *(TIES, PlanOperation("ties", (), (1.0, 1.0))), tensor=OTHER
    ),
    "values of two experts for one": _operations(
        PlanOperation("ties", (("density", (0.5, 0.25)),), (1.0,))
    ),
    "values that are equal": _operations(PlanOperation("ties", (("density", (0.5,)),), (1.0,))),
    "a long method": _operations(PlanOperation(LONG, (), (1.0,))),
    "a long parameter": _operations(PlanOperation("ties", ((LONG, 1),), (1.0,))),
    "no inputs": _inputs(),
    "no base": _inputs("expert"),
    "a plan of two bases": _inputs("base", "base", "expert"),
    "an input of a role that is none": _inputs("base", "expert", "Mother"),
    "an expert before the base": _inputs("expert", "base"),
    "a companion before an expert": _inputs("base", ("fisher", 0), "expert"),
    "a base of another input": _inputs(("base", 0), "expert"),
    "an expert of another input": _inputs("base", ("expert", 0)),
    "a companion of no input": _inputs("base", "expert", ("fisher", 2)),
    "a companion of a companion": _inputs("base", "expert", ("fisher", 1), ("fisher", 2)),
    "a companion twice": _inputs("base", "expert", ("fisher", 1), ("fisher", 1)),
    "companions out of order": _inputs("base", "expert", ("fisher", 1), ("fisher", 0)),
    "a companion of the merge behind others": _inputs("base", "expert", ("fisher", 0), "fisher"),
    "many inputs": _inputs("base", *["expert"] * 4097),
    "a long model": _plan(inputs=(PlanInput("base", None, A, LONG), PlanInput("expert", None, B))),
    "models out of order": _plan(without=("b", "a")),
    "a model twice": _plan(without=("a", "a")),
    "a long model that is left out": _plan(without=(LONG,)),
    "tensors that are taken, and no layers": _plan(taken=(Taken("v", 0, "w"),)),
    "tensors that are dropped, and no layers": _plan(dropped=("w",)),
    "layers, and tensors that are merged": _plan(layers=((0, 0),)),
    "a layer of no input": _inputs("base", "expert", layers=((2, 0),)),
    "a tensor that is taken of no input": _inputs(
        "base", "expert", layers=((0, 0),), taken=(Taken("w", 2, "w"),)
    ),
    "taken tensors out of order": _inputs(
        "base", "expert", layers=((0, 0),), taken=(Taken("b", 0, "w"), Taken("a", 0, "w"))
    ),
    "dropped tensors out of order": _inputs("base", "expert", layers=((0, 0),), dropped=("b", "a")),
    "a tensor that is taken and dropped": _inputs(
        "base", "expert", layers=((0, 0),), taken=(Taken("w", 0, "v"),), dropped=("w",)
    ),
    "sources of two experts for one": _plan(
        PlanTensor("w", 1, (b"",), (), (0.0,), sources=("a", "b", "c"))
    ),
    "sources of its own name": _plan(PlanTensor("w", 1, (b"",), (), (0.0,), sources=("w", "w"))),
    "factors of two experts for one": _plan(
        PlanTensor("w", 1, (b"",), (), (0.0,), mixture=Mixture(1.0, (1.0, 1.0), False))
    ),
    "a long source": _plan(PlanTensor("w", 1, (b"",), (), (0.0,), sources=("w", LONG))),
    "a long remark": _plan(remarks=("x" * ((1 << 20) + 1),)),
    "many remarks": _plan(remarks=("",) * 10_001),
    "many patterns": _plan(criteria=Criteria("norm", skip=("",) * 10_001)),
    "many parameters": _operations(
        PlanOperation("ties", tuple((f"p{n}", n) for n in range(257)), (1.0,))
    ),
    "a short bitmap": Coverage(A, (TensorCoverage("w", 9, b"\0", ()),), ()),
    "a long bitmap": Coverage(A, (TensorCoverage("w", 9, b"\0\0", (bytes(3),)),), ()),
    "a count of another tensor": Coverage(A, (), (("w", 1),)),
    "a count of nothing": Coverage(A, (TensorCoverage("w", 1, b"\0", ()),), (("w", 0),)),
    "a spare bit": Coverage(A, (TensorCoverage("w", 9, b"\0\2", ()),), ()),
    "an unknown kind of note": _note("opinion"),
    "a value without a key": _note(key=""),
    "a value of a note": _note(notes=(B,)),
    "a long key": _note(key=LONG),
    "a note of a long author": Note(A, (), VALUE, "k", packed(1), LONG, 5),
    "a value of two": _note(data=packed(1) * 2),
    "no value": _note(data=b""),
    "bytes as a value": _note(data=b"\xc4\x00"),
    "an extension as a value": _note(data=b"\xd4\x01\x00"),
    "a time as a value": _note(data=b"\xd6\xff" + bytes(4)),
    "a value that is not a number": _note(data=b"\xcb\x7f\xf8" + bytes(6)),
    "an infinite value": _note(data=b"\xcb\x7f\xf0" + bytes(6)),
    "a narrow float": _note(data=b"\xca" + bytes(4)),
    "keys out of order": _note(data=b"\x82\xa1b\x00\xa1a\x00"),
    "a key twice": _note(data=b"\x82\xa1a\x00\xa1a\x00"),
    "a key that is a number": _note(data=b"\x81\x00\x00"),
    "a key that is a list": _note(data=b"\x81\x91\x80\x00"),
    "a text that is not UTF-8": _note(data=b"\xa1\xff"),
    "a deep value": _note(data=b"\x91" * 17 + b"\xc0"),
    "a very deep value": _note(data=b"\x91" * 60_000 + b"\xc0"),
    "a long value": _note(data=b"\xda\xff\xfe" + b"x" * 0xFFFE),
    "a removal of nothing": _note(REMOVAL, "", (), packed(None)),
    "a removal of a note twice": _note(REMOVAL, "", (B, B), packed(None)),
    "a removal out of order": _note(REMOVAL, "", (C, B), packed(None)),
    "a removal of a key": _note(REMOVAL, "k", (B,), packed(None)),
    "a removal with a value": _note(REMOVAL, "", (B,), packed(0)),
    "a removal of many": _note(
        REMOVAL, "", tuple(n.to_bytes(32, "big") for n in range(1001)), packed(None)
    ),
    "an unknown algorithm": _note(SIGNATURE, "rsa", (), SIGNED),
    "a signature of two notes": _note(SIGNATURE, "ed25519", (B, C), SIGNED),
    "a signature without a key": _note(SIGNATURE, "ed25519", (), packed({"signature": "cc" * 64})),
    "a signature that is a text": _note(SIGNATURE, "ed25519", (), packed("cc" * 64)),
    "a short key": _signed("bb" * 31, "cc" * 64),
    "a short signature": _signed("bb" * 32, "cc" * 63),
    "digits of another case": _signed("BB" * 32, "cc" * 64),
    "no digits": _signed("gg" * 32, "cc" * 64),
    "a number as a key": _signed(1, "cc" * 64),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_an_unsound_record_is_corrupt(what: str) -> None:
    """Canonical bytes are not enough: what contradicts itself or breaks a limit is refused."""
    record = UNSOUND[what]
    with pytest.raises(Corrupt, match="not a sound") as refusal:
        decode(type(record), record.encode(), "here")
    assert refusal.value.where == "here"


def test_plans_are_unsound_by_one_thing() -> None:
    """The plans above are sound but for what they are named after."""
    one, other = ("fisher", 0), ("fisher", 1)
    sound = [
        _plan(),
        _plan(without=("a", "b")),
        _operations(TIES, TIES, tensor=OTHER),
        _inputs("base"),
        _inputs("base", "expert", "fisher", one, other),
        _inputs("base", "expert", other, layers=((0, 0), (2, 7)), taken=(Taken("w", 2, "v"),)),
    ]
    for plan in sound:
        assert decode(Plan, plan.encode(), "here") == plan


def test_notes_are_unsound_by_one_thing() -> None:
    """The notes above are sound but for what they are named after."""
    deep: object = None
    for _ in range(16):
        deep = [deep]
    sound = [
        _note(),
        _note(LINK, data=packed("x" * 65_533)),
        _note(data=packed(deep)),
        _note(REMOVAL, "", (B, C), packed(None)),
        _note(SIGNATURE, "ed25519", (B,), SIGNED),
        _signed("bb" * 32, "cc" * 64),
    ]
    for note in sound:
        assert decode(Note, note.encode(), "here") == note


@given(NOTED)
def test_values_come_back(value: Any) -> None:
    """A value has one byte string, whatever the order of its keys, and comes back from it."""
    data = packed(value)
    assert packed(_turned(value)) == data
    assert packed(msgspec.msgpack.decode(data)) == data
    assert msgspec.msgpack.decode(data) == value


def _turned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _turned(value[key]) for key in reversed(value)}
    return tuple(map(_turned, value)) if isinstance(value, list) else value


@pytest.mark.parametrize(
    "value",
    [
        math.nan, math.inf, 1 << 64, -(1 << 63) - 1, b"bytes", {1: 2}, {"a": {1}}, object(),
        "\udc80", {"\udc80": 1}, "x" * 65_534,
    ],
)  # fmt: skip
def test_what_json_has_not_is_no_value(value: Any) -> None:
    """A value that JSON cannot say, or that is too long, is refused before anything is written."""
    with pytest.raises(BadRequest, match="the value is"):
        packed(value, "k")


def test_numbers_are_counts() -> None:
    """A negative number or one beyond 63 bits is no length."""
    head = bytes.fromhex(TENSOR_HEAD) + b"\xa2U8\x91"
    for number in (b"\xff", b"\xcf\x80" + bytes(7), b"\xcf" + b"\xff" * 8):
        with pytest.raises(Corrupt):
            decode(Tensor, head + number + b"\x00\xc4\x00", "here")


def test_limits_can_be_raised() -> None:
    """Who trusts a record passes larger limits; the bytes are bounded before they are read."""
    record = _plan(remarks=("",) * 10_001)
    assert decode(Plan, record.encode(), "here", RecordLimits(remarks=20_000)) == record
    with pytest.raises(Corrupt, match="the limit is 10"):
        decode(Plan, record.encode(), "here", RecordLimits(record_bytes=10))


def test_a_lying_length_costs_nothing() -> None:
    """Four billion elements that are not there are refused without room being made for them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for head in (TENSOR_HEAD + "a25538dd", "92aa6d616e69666573742f31dd", TENSOR_HEAD + "dbff"):
        with pytest.raises(Corrupt):
            decode(Tensor, bytes.fromhex(head) + b"\xff" * 4, "here")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


# -- what records say --------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=70))
def test_bitmaps(flags: list[bool]) -> None:
    """Bit i of a bitmap is flag i, least significant first, in as few bytes as that takes."""
    data = bitmap(flags)
    assert len(data) == -(-len(flags) // 8)
    assert [bit(data, number) for number in range(len(flags))] == flags
    assert int.from_bytes(data, "little") == sum(1 << n for n, flag in enumerate(flags) if flag)


def test_a_tensor_must_fit_its_blocks() -> None:
    """A block list too short or too long for the length is Corrupt; an empty tensor has none."""
    size = 1 << 16
    for nbytes, count in ((0, 0), (1, 1), (size, 1), (size + 1, 2), (3 * size, 3)):
        tensor = Tensor("U8", (nbytes,), nbytes, A * count)
        tensor.check(size, "here")
        lengths = [tensor.block_length(n, size) for n in range(tensor.block_count())]
        assert sum(lengths) == nbytes
        assert list(tensor.block_ids()) == [BlockId(A)] * count
        for wrong in (count - 1, count + 1):
            if wrong >= 0:
                with pytest.raises(Corrupt):
                    Tensor("U8", (nbytes,), nbytes, A * wrong).check(size, "here")
    with pytest.raises(Corrupt):
        Tensor("U8", (1,), 1, A[:31]).check(size, "here")


def test_a_manifest_finds_its_files() -> None:
    """By path, and knows what a checkout of them takes."""
    files = (
        File("a", SAFETENSORS, 2, (Part(None, A, 1), Part("w", A, 1))),
        File("b", SAFETENSORS, 3, (Part(None, A, 1), Part("w", B, 1), Part("v", C, 1))),
    )
    manifest = Manifest(files)
    assert decode(Manifest, manifest.encode(), "") == manifest
    assert manifest.plain_bytes() == 5
    assert manifest.file("b") == files[1]
    assert manifest.file("c") is None


@pytest.mark.parametrize("kind", [BlockId, TensorId, SnapshotId])
def test_ids_are_parsed_strictly(kind: type[Id]) -> None:
    """An id is 64 lowercase hex digits and prints as such; anything else is refused."""
    id = kind(bytes(range(32)))
    assert kind.parse(str(id)) == id
    assert str(id).startswith(id.short)
    wrong: list[Any] = ["", "0" * 63, "0" * 65, "G" + "0" * 63, str(id).upper(), " " + "0" * 63]
    for text in wrong:
        with pytest.raises(Exception, match="not a") as refusal:
            kind.parse(text)
        assert type(refusal.value).__name__ == "BadName"
    for raw in (b"", bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="32 bytes"):
            kind(raw)
