"""Small families of checkpoints for tests: a base and experts of it, made with numpy alone.

Owns the arrays (`Family`, its kinds below), how they are written to disk (sharded, with config,
index and tokenizer), how a checkpoint is read back, and what a merge of a family must be
(`expected`, from the reference).  Nothing here imports the code under test.

Sizes are chosen for blocks of 64 KiB: a few tensors of several blocks, some a whole number of
blocks and some not, and some smaller than one.  The embedding alone is larger than 1 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import gram_reference
import numpy as np
import numpy.typing as npt
import reference
from checkpoints import Tensor, write_index, write_safetensors

BLOCK = 1 << 16
"""The block size that the sizes below are made for."""

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

_DTYPES = reference.DTYPES | {"F64": np.dtype("f8"), "I64": np.dtype("i8"), "U8": np.dtype("u1")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


FACTS = {"fisher": "f", "gram": "g", "mask": "f"}
"""How companions of experts are called, by their role: f0 is of e0.  Fishers are masks, too: many
of their elements are 0."""
OF_MERGE = {"aligned": "e2", "unaligned": "base"}
"""Companions of the merge."""
READ = ("fisher", "masked")
"""Methods that read a Fisher with each expert."""
INPUTS = "activation"
"""The one companion of the base."""
WIDTHS = {"g": 64, "h": 250}
"""Inputs of a block of the Gram matrices g0 and h0."""


def companions_for(
    roles: Sequence[str], experts: Sequence[Any], called: Mapping[str, str] = FACTS
) -> dict[str, Any]:
    """The companions of a request, in the roles that its method asks for."""
    names = [one if isinstance(one, str) else one[0] for one in experts]
    found: dict[str, Any] = {}
    before = "turned-" if any(name.startswith("turned-") for name in names) else ""
    for role in roles:
        if role == INPUTS:
            found[f"{role}:base"] = before + INPUTS
            continue
        if role in OF_MERGE:
            found[role] = before + OF_MERGE[role]
            continue
        found |= {f"{role}:{name}": companion_of(name, called[role]) for name in names}
    return found


def companion_of(name: str, letter: str) -> str:
    """f1 for e1, and f0 for what is none of the family's experts."""
    return f"{name[:-2]}{letter}{name[-1]}" if name[-1].isdigit() else f"{letter}0"


def fishers_for(experts: Sequence[Any], fishers: Sequence[Any]) -> dict[str, Any]:
    """The companions of a request: a Fisher for each expert, in their order."""
    names = [one if isinstance(one, str) else one[0] for one in experts]
    return {f"fisher:{name}": one for name, one in zip(names, fishers, strict=False)}


@dataclass(frozen=True)
class Family:
    """A base and experts; every expert has the base's tensors.  So has its Fisher, if any.

    facts: other companions, by the name of the checkpoint: g0, g1, ... and `INPUTS`.
    """

    base: Arrays
    experts: tuple[Arrays, ...]
    fishers: tuple[Arrays, ...] = ()
    facts: Mapping[str, Arrays] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        """Write ROOT/base and ROOT/e0, ROOT/e1, ...; the experts in fewer shards than the base."""
        write_checkpoint(root / "base", self.base, shards=3)
        for number, expert in enumerate(self.experts):
            write_checkpoint(root / f"e{number}", expert, shards=1 + number % 2, note=f"e{number}")
        for number, fisher in enumerate(self.fishers):
            write_checkpoint(root / f"f{number}", fisher)
        for name, arrays in self.facts.items():
            write_checkpoint(root / name, arrays)
        return root

    def informed(self, seed: int = 0, dtypes: Sequence[str] = ("F32", "BF16")) -> Family:
        """Return it with all companions that methods ask for.

        Fishers are over some powers of ten, many zero, and all of some blocks.
        """
        rng = np.random.default_rng(seed)
        fishers = []
        for _, dtype in zip(self.experts, cycle(dtypes), strict=False):
            own = {}
            for name, array in self.base.items():
                known = 10.0 ** rng.uniform(-4, 1, array.shape) * (rng.random(array.shape) < 0.8)
                flat = known.reshape(-1)
                flat[: BLOCK // 2 * int(rng.integers(0, 2))] *= float(rng.integers(0, 2))
                own[name] = cast(known, dtype)
            fishers.append(own)
        return replace(self, fishers=tuple(fishers), facts=self.facts | self.of_inputs(rng))

    def of_inputs(self, rng: np.random.Generator) -> dict[str, Arrays]:
        """What is known of the inputs of matrices: Gram matrices, and magnitudes of the base's."""
        matrices = {
            name: array.shape[1]
            for name, array in self.base.items()
            if array.ndim == 2 and array.size and array.dtype in reference.DTYPES.values()
        }
        found: dict[str, Arrays] = {
            f"{letter}{number}": {
                name: gram_reference.packed(rng, inputs, width)
                for name, inputs in matrices.items()
                if "embed" not in name
            }
            for letter, width in WIDTHS.items()
            for number in range(len(self.experts))
        }
        found[INPUTS] = {
            name: cast(rng.random(inputs) * 10.0 ** rng.uniform(-2, 2, inputs), "F32")
            for name, inputs in matrices.items()
            if "embed" not in name
        }
        return found

    @property
    def names(self) -> list[str]:
        """e0, e1, ...: how `write` calls the experts."""
        return [f"e{number}" for number in range(len(self.experts))]

    @property
    def fisher_names(self) -> list[str]:
        """f0, f1, ...: how `write` calls the Fishers."""
        return [f"f{number}" for number in range(len(self.fishers))]


# -- arrays ------------------------------------------------------------------------------------


def cast(values: Array, dtype: str) -> Array:
    """Values in an element type ("BF16", "F16", "F32")."""
    return values.astype(np.float32).astype(_DTYPES[dtype])


def bits(array: Array) -> Array:
    """The elements' bit patterns: equal only where every bit is (NaN, minus zero)."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize > 1 else array


def layered(
    seed: int = 0,
    *,
    base_dtype: str = "BF16",
    expert_dtypes: Sequence[str] = ("BF16", "BF16", "BF16"),
    rows: int = 650,
) -> Family:
    """Three experts, each kind of overlap in a tensor of its own; BLOCK is in 16-bit elements.

    embed       rows x 1024, changed everywhere in all experts
    parts       five blocks: expert k changes block k, expert 0 the fourth too, nobody the last
    shared      three blocks and a bit: experts 1 and 2 are equal (if of one dtype), 0 unchanged
    frozen      two blocks, changed by nobody
    zeros       three blocks of one value; expert 0 has another one, expert 2 changes the last block
    grid        steps of 1/8, so that deltas tie everywhere
    tied.*      two names, one content, in every member
    norm, scale, empty    less than a block, 0-d, no elements
    inv_freq, steps       of dtypes that are not merged, changed by nobody
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    base = {
        "model.embed.weight": cast(normal(rows, 1024), base_dtype),
        "model.parts.weight": cast(normal(160, 1024), base_dtype),
        "model.shared.weight": cast(normal(100, 1000), base_dtype),
        "model.frozen.weight": cast(normal(64, 1024), base_dtype),
        "model.zeros.weight": cast(np.full((96, 1024), 0.25), base_dtype),
        "model.grid.weight": cast(rng.integers(-16, 17, (300, 256)) / 8, base_dtype),
        "model.tied.embed_in": cast(normal(40, 512), base_dtype),
        "model.norm.weight": cast(1 + normal(37) / 16, base_dtype),
        "model.scale": cast(normal(), base_dtype),
        "model.empty": cast(normal(0, 8), base_dtype),
        "model.inv_freq": np.linspace(0, 1, 16),
        "model.steps": np.arange(5),
    }
    base["model.tied.embed_out"] = base["model.tied.embed_in"]
    other = normal(100, 1000) / 64
    experts = []
    for k, dtype in enumerate(expert_dtypes):
        moved = {name: array.astype(np.float32) for name, array in base.items()}
        moved["model.embed.weight"] += normal(rows, 1024) / 32
        rows_of = moved["model.parts.weight"].reshape(5, 32, 1024)
        rows_of[k % 4] += normal(32, 1024) / 16
        if k == 0:
            rows_of[3] += normal(32, 1024) / 128
        if k in (1, 2):
            moved["model.shared.weight"] += other
        if k == 0:
            moved["model.zeros.weight"][:] = 0.5
        if k == 2:
            moved["model.zeros.weight"][64:] += normal(32, 1024) / 8
        moved["model.grid.weight"] += rng.integers(-2, 3, (300, 256)) / 8
        moved["model.tied.embed_in"] += normal(40, 512) / 32
        moved["model.tied.embed_out"] = moved["model.tied.embed_in"]
        moved["model.norm.weight"] += normal(37) / 32
        moved["model.scale"] += np.float32(0.5)
        expert = {name: cast(moved[name], dtype) for name in base}
        expert["model.inv_freq"] = base["model.inv_freq"]
        expert["model.steps"] = base["model.steps"]
        experts.append(expert)
    return Family(base, tuple(experts))


def specials(dtype: str = "BF16") -> Family:
    """Infinities, NaN with payloads, both zeros and subnormals, on every side of a delta."""
    rng = np.random.default_rng(7)
    words = reference.WORDS[dtype]
    n = 50_000
    patterns = rng.integers(0, 1 << (8 * words.itemsize), n, dtype=np.uint64).astype(words)
    one = {"w": patterns.view(_DTYPES[dtype])}
    experts = []
    for k in range(3):
        moved = patterns.copy()
        where = rng.random(n) < 0.5
        drawn = rng.integers(0, 1 << (8 * words.itemsize), n, dtype=np.uint64).astype(words)
        moved[where] = drawn[where]
        sign = np.array(1 << (8 * words.itemsize - 1), dtype=words)
        moved[k::97] = patterns[k::97] ^ sign
        moved[k::101] = sign
        experts.append({"w": moved.view(_DTYPES[dtype])})
    return Family(one, tuple(experts))


# -- disk --------------------------------------------------------------------------------------


def tensors_of(arrays: Mapping[str, Array]) -> list[Tensor]:
    """Arrays as `write_safetensors` takes them."""
    return [
        (name, _NAMES[array.dtype], array.shape, array.tobytes()) for name, array in arrays.items()
    ]


def write_checkpoint(
    directory: Path, arrays: Mapping[str, Array], *, shards: int = 1, note: str = "base"
) -> Path:
    """A checkpoint directory as transformers lays it out, in one file or in several."""
    tensors = tensors_of(arrays)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            mine = tensors[number::shards]
            write_safetensors(directory / file, mine, metadata={"format": "pt"}, padding=number)
            weight_map |= {name: file for name, *_ in mine}
        write_index(directory / "model.safetensors.index.json", weight_map)
    dtypes = {_NAMES[array.dtype] for array in arrays.values()} & reference.DTYPES.keys()
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    config = {
        "model_type": "none",
        "torch_dtype": names[min(dtypes, default="F32")],
        "hidden_size": 1024,
    }
    config |= {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}\n')
    (directory / "README.md").write_text(f"# {note}\n")
    return directory


def read_safetensors(path: Path) -> Arrays:
    """The tensors of one file, read by hand."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        array = np.frombuffer(raw[begin:end], dtype=_DTYPES[entry["dtype"]])
        found[name] = array.reshape(entry["shape"])
    return found


def read_checkpoint(directory: Path) -> Arrays:
    """The tensors of all safetensors files below a directory."""
    found: Arrays = {}
    for path in sorted(directory.rglob("*.safetensors")):
        found |= read_safetensors(path)
    return found


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# -- what a merge must be ------------------------------------------------------------------------


def expected(
    family: Family,
    method: str,
    parameters: Mapping[str, Any],
    weights: Sequence[float],
    *,
    dtype: str | None = None,
    absent: Mapping[str, Sequence[npt.NDArray[np.bool_]]] | None = None,
) -> Arrays:
    """The merged arrays by the reference: whole tensors, full budget unless `absent` says, by
    tensor, which elements of each expert are not read.
    """
    merged = {}
    for name, base in family.base.items():
        others = family.experts + family.fishers if method in READ else family.experts
        sides = [base, *(expert[name] for expert in others)]
        is_merged = {_NAMES[side.dtype] for side in sides} <= reference.DTYPES.keys()
        if not base.size or not is_merged:
            # Without elements there is a type all the same.
            to = reference.DTYPES[dtype] if is_merged and dtype is not None else base.dtype
            merged[name] = base.astype(to) if not base.size else base
            continue
        own = [float(np.float32(weight)) for weight in weights]
        if method == "lines":
            given = parameters["alpha"], parameters["beta"]
            factor = reference.by_depth(*given, name, list(family.base))
            own = [float(np.float32(weight * factor)) for weight in own]
        facts: list[Array | None] = []
        if method == "regmean":
            letter = next(one for one, width in WIDTHS.items() if width == parameters["block"])
            facts = [family.facts[f"{letter}{k}"].get(name) for k in range(len(weights))]
        elif method == "aim":
            facts = [family.facts[INPUTS].get(name)]
        merged[name] = reference.merge(
            "task_arithmetic" if method == "lines" else method,
            {} if method == "lines" else dict(parameters),
            own,
            base,
            sides[1:],
            tensor=name,
            out_dtype=dtype,
            absent=None if absent is None else absent.get(name),
            facts=facts,
        )
    # Tensors of one content are one tensor, under the first of their names.
    if "model.tied.embed_out" in merged:
        merged["model.tied.embed_out"] = merged["model.tied.embed_in"]
    return merged


def differences(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> list[str]:
    """Names of tensors that differ in dtype, shape or any bit."""
    assert found.keys() == wanted.keys()
    return [
        name
        for name, array in wanted.items()
        if (array.dtype, array.shape) != (found[name].dtype, found[name].shape)
        or not np.array_equal(bits(found[name]), bits(array))
    ]


def distance(a: Mapping[str, Array], b: Mapping[str, Array], names: Iterable[str]) -> float:
    """||a - b|| over the named tensors, in float64."""
    total = 0.0
    for name in names:
        gap = a[name].astype(np.float64) - b[name].astype(np.float64)
        total += float(np.sum(gap * gap))
    return float(np.sqrt(total))
