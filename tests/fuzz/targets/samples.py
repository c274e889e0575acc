"""Small sound records and a small store, which several targets begin with."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import families
import msgspec
from families import BLOCK

from mstore import Store
from mstore.store.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.store.objects.note import ED25519, REMOVAL, SIGNATURE, VALUE, Note, packed
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
    Threshold,
)
from mstore.store.objects.snapshot import (
    BASE,
    COMPANION,
    EXPERT,
    PREVIOUS,
    Origin,
    Parent,
    SnapshotRecord,
)
from mstore.store.objects.tensor import BYTES, Tensor, VirtualTensor

A, B, C = (bytes([n]) * 32 for n in (0xAA, 0xBB, 0xCC))

TENSORS = (
    Tensor("BF16", (3, 300), 1800, A),
    Tensor("F4", (2,), 1, A),
    Tensor("F32", (0, 7), 0, b""),
    Tensor(BYTES, (70_000,), 70_000, A + B),
)
MANIFESTS = (
    Manifest(()),
    Manifest(
        (
            File("config.json", OPAQUE, 2, (Part(None, A, 2),)),
            File("deep/er/m.safetensors", SAFETENSORS, 3, (Part(None, A, 2), Part("w", B, 1))),
        )
    ),
)
PARENTS = (Parent(PREVIOUS, B), Parent(BASE, C), Parent(EXPERT, A), Parent(COMPANION, B))
ORIGIN = Origin("https://huggingface.co/o/m", "main", "c0")
SNAPSHOTS = (
    SnapshotRecord(A, (), "add", ORIGIN, "ada", None, None, "why", 1, "mstore"),
    SnapshotRecord(A, PARENTS, "merge", None, "", B, C, "", 1, "mstore"),
)
PLANS = (
    Plan(
        operations=(
            PlanOperation(
                "ties", (("density", 0.5), ("normalize", True), ("seed", -1)), (1.0, 0.5)
            ),
        ),
        inputs=(
            PlanInput(BASE, None, A),
            PlanInput(EXPERT, None, B, "unet"),
            PlanInput(EXPERT, None, C),
        ),
        dtype=None,
        block_size=65536,
        budget=1000,
        criteria=Criteria("norm", 0.5, None, ("a*",), (), None),
        allow_missing=True,
        full_expert_bytes=2,
        planned_expert_bytes=1,
        error_bound=None,
        error_estimate=0.25,
        tensors=(PlanTensor("w", 128, (b"\0\4", b"\1\2"), (Threshold(0.5, -1),) * 2, (-1.0, 0.0)),),
        copied=(("t", "other dtype"),),
        remarks=("a remark",),
        without=("text", "text@fp16"),
    ),
)
PLANS += (
    msgspec.structs.replace(
        PLANS[0],
        tensors=(
            PlanTensor("w", 128, (b"\0\4", b"\1\2"), (Threshold(0.5, 3),) * 4, (-1.0, 0.0), 1),
            PlanTensor("new", 128, (b"\0", b"\0"), (), (0.0, 0.0), 0, ("w", "w", "v"), "F16"),
            PlanTensor(
                "v", 9, (b"\0", b"\2"), (), (0.0, 0.0), mixture=Mixture(0.5, (1.0, 0.0), True)
            ),
        ),
        operations=(
            *PLANS[0].operations,
            PlanOperation("breadcrumbs", (("gamma", (0.5, 0.25)),), (1.0, 0.5)),
        ),
    ),
    msgspec.structs.replace(
        PLANS[0],
        inputs=(
            *PLANS[0].inputs,
            PlanInput("fisher", None, C),
            PlanInput("fisher", 0, A),
            PlanInput("fisher", 2, B, ""),
        ),
        tensors=(PlanTensor("w", 128, (b"\0",) * 5, (), (-1.0,) * 5),),
    ),
    msgspec.structs.replace(
        PLANS[0],
        tensors=(),
        layers=((0, 0), (2, 1), (1, 1)),
        taken=(Taken("v", 2, "w"), Taken("w", 1, "w")),
        dropped=("t", "u"),
    ),
)
COVERED = (TensorCoverage("w", 9, b"\1\0", (b"\xfe\1", b"\0\0")),)
COVERAGES = (Coverage(A, COVERED, ()), Coverage(A, COVERED, (("w", 3),)))
VIRTUALS = (VirtualTensor("BF16", (2, 3), 12, A, "w"),)
SIGNED = packed({"key": B.hex(), "signature": C.hex() * 2})
NOTES = (
    Note(A, (), VALUE, "mmlu", packed({"a": [0.5, None, True], "b": "text", "c": 300}), "ada", 5),
    Note(A, (B, C), REMOVAL, "", packed(None), "", 6),
    Note(A, (), SIGNATURE, ED25519, SIGNED, "alice@example.org", 5),
    Note(A, (C,), SIGNATURE, ED25519, SIGNED, "", 5),
)


@cache
def scratch() -> Path:
    """A directory of this process's own."""
    # Kept alive by the cache until the interpreter ends.
    return Path(_directory().name)


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mstore-fuzz-")


@cache
def store() -> Store:
    """A base and two fine-tunes."""
    family = families.layered(rows=8).write(scratch() / "family")
    made = Store.init(scratch() / "store", block_size=BLOCK)
    for name in ("base", "e0", "e1"):
        made.add(family / name, name=name)
    return made
