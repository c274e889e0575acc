"""Pipelines: each component of a merge is what that component alone would be.

The pipelines are diffusers' own, tiny, with every file that `save_pretrained` writes (shards, their
indexes and fp16 variants among them), and are read by `from_pretrained`, also through a mount.
Weighted sums are computed a second time by torch; other methods are compared with mstore's merge of
the component as a model alone, which other tests compare with mergekit's.
"""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pipelines
import pytest
import torch
from generated import Tensors

from mstore import MergeRequest, Store, Vocabulary
from mstore.api.reports import AddReport, MergeReport
from mstore.terms.errors import Unavailable
from mstore_fuse.fuse_driver import require_fuse
from mstore_fuse.mounts import mount, unmount

BLOCK = 1 << 16
SHARD = "150KB"
MEMBERS = ("base", "one", "two")
WEIGHTS = (0.75, 1.5)
HALF = "@fp16"

Merge = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
Everything = Mapping[str, Tensors]
"""The weights of each component."""


def linear(base: torch.Tensor, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean by weights, each product added with one rounding; what nobody changed, stays."""
    total = torch.zeros(base.shape)
    for expert, weight in zip(experts, WEIGHTS, strict=True):
        total = (total.double() + expert.double() * weight).float()
    still = torch.stack([expert == base for expert in experts]).all(0)
    return torch.where(still, base, (total / sum(WEIGHTS)).to(base.dtype))


def task_arithmetic(base: torch.Tensor, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The base and half the weighted differences."""
    first, second = (
        weight * (expert.float() - base.float())
        for expert, weight in zip(experts, WEIGHTS, strict=True)
    )
    return (base.float() + (first + second) * 0.5).to(base.dtype)


BY_TORCH: Mapping[str, tuple[Merge, dict[str, Any]]] = {
    "linear": (linear, {}),
    "task_arithmetic": (task_arithmetic, {"lambda": 0.5}),
}
ALONE: Mapping[str, tuple[int, dict[str, Any]]] = {
    "ties": (2, {"density": 0.4}),
    "slerp": (1, {"t": 0.3}),
    "model_stock": (2, {}),
}
"""How many experts, and parameters, of methods that are not computed a second time."""


@dataclass
class Shape:
    """A pipeline, two fine-tunes of all its components, and a store with the three."""

    kind: str
    root: Path
    store: Store
    weights: dict[str, Everything] = field(default_factory=dict, repr=False)
    added: dict[str, AddReport] = field(default_factory=dict, repr=False)
    merged: dict[str, MergeReport] = field(default_factory=dict, repr=False)

    @property
    def parts(self) -> list[str]:
        return list(self.weights["base"])

    def load(self, folder: Path, variant: str | None = None) -> Everything:
        return pipelines.weights_of(pipelines.load(folder, variant=variant))

    def request(self, method: str, part: str | None = None) -> MergeRequest:
        """A merge of the pipelines, or of one component that was added alone."""
        at = f"alone/{part}/" if part else ""
        count, parameters = ALONE.get(method) or (2, BY_TORCH[method][1])
        weights = WEIGHTS if method in BY_TORCH else (1.0, 1.0)
        experts = [(at + name, w) for name, w in zip(MEMBERS[1:], weights, strict=True)]
        return MergeRequest(
            base=f"{at}base", experts=experts[:count], method=method, parameters=parameters
        )

    def add_alone(self, part: str) -> None:
        """Add one component of each pipeline as a model alone, once."""
        for name in MEMBERS:
            ref = f"alone/{part}/{name}"
            if ref not in self.added:
                base = None if name == "base" else f"alone/{part}/base"
                self.added[ref] = self.store.add(self.root / name / part, name=ref, base=base)

    def merge(self, method: str) -> str:
        """Merge the pipelines by a method, once; return the ref."""
        if method not in self.merged:
            plan = self.store.plan(self.request(method))
            self.merged[method] = self.store.merge(plan, name=f"merged/{method}")
        return f"merged/{method}"


class Shapes:
    """Each shape, made when it is asked for."""

    def __init__(self, root: Callable[[str], Path]) -> None:
        self._root = root
        self.made: dict[str, Shape] = {}

    def __call__(self, kind: str) -> Shape:
        if kind not in self.made:
            root = self._root(kind)
            shape = Shape(kind, root, Store.init(root / "store", block_size=BLOCK))
            torch.manual_seed(1 + len(kind))
            for number, name in enumerate(MEMBERS):
                pipeline = pipelines.load(root / "base") if number else pipelines.SHAPES[kind]()
                # Biases begin as zeros, all alike.
                pipelines.tune(pipeline, number, by=0.001 if number else 0.02)
                pipelines.save(pipeline, root / name, shard=SHARD)
                shape.weights[name] = pipelines.weights_of(pipeline)
                base = "base" if name == "one" else None
                added = shape.store.add(root / name, name=name, base=base, detect_base=True)
                shape.added[name] = added
            self.made[kind] = shape
        return self.made[kind]


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shapes]:
    """The shapes of this process."""
    torch.set_num_threads(1)
    pipelines.be_quiet()
    found = Shapes(tmp_path_factory.mktemp)
    yield found
    for one in found.made.values():
        one.store.close()


@pytest.fixture(params=pipelines.SHAPES)
def shape(request: pytest.FixtureRequest, shapes: Shapes) -> Shape:
    """Each shape in turn."""
    return shapes(request.param)


def assert_equal(found: Everything, wanted: Everything, *, cast: bool = False) -> None:
    """Both have the same components with the same tensors, bit for bit.

    cast: a loader may have made wider what it keeps in float32.
    """
    assert found.keys() == wanted.keys()
    for part, tensors in wanted.items():
        assert found[part].keys() == tensors.keys(), part
        for name, value in tensors.items():
            own = found[part][name]
            assert cast or own.dtype == value.dtype, (part, name)
            assert torch.equal(_bits(own), _bits(value.to(own.dtype))), (part, name)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def computed(shape: Shape, merge: Merge, *, half: bool = False) -> Everything:
    """What torch makes of each component."""
    of = torch.Tensor.half if half else torch.Tensor.clone
    base, *experts = (shape.weights[name] for name in MEMBERS)
    return {
        part: {
            name: merge(of(value), [of(expert[part][name]) for expert in experts])
            for name, value in tensors.items()
        }
        for part, tensors in base.items()
    }


# -- add -----------------------------------------------------------------------------------------


def test_a_pipeline_is_stored_byte_for_byte(shape: Shape) -> None:
    """A checkout has every file of the directory, of the scheduler and the tokenizers too."""
    out = shape.root / "checkout"
    shape.store.checkout("one", out)
    assert same_files(out, shape.root / "one")
    shutil.rmtree(out)


def same_files(one: Path, other: Path) -> bool:
    """Whether two directories hold the same files."""
    below = [sorted(p.relative_to(d) for p in d.rglob("*") if p.is_file()) for d in (one, other)]
    names = [str(path) for path in below[0]]
    return below[0] == below[1] and filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def test_models_are_the_components_and_their_variants(shape: Shape) -> None:
    """Each component is a model, and so is its variant."""
    wanted = [name for part in shape.parts for name in (part, part + HALF)]
    assert shape.store["base"].models() == sorted(wanted)


def test_the_base_of_a_pipeline_is_found(shape: Shape) -> None:
    """Without a named base `add` finds the pipeline that it was tuned from; a pipeline that it has
    changes nothing."""
    for name in MEMBERS:
        added = shape.added[name]
        assert (added.warnings, added.excluded) == ((), ())
        if name != "base":
            assert added.base is not None
            assert "base" in added.base.refs
    again = shape.store.add(shape.root / "two", name="two", detect_base=True)
    assert (again.new_snapshot, again.blocks_new) == (False, 0)


# -- diff ----------------------------------------------------------------------------------------


def test_a_diff_names_the_component_that_changed(shape: Shape) -> None:
    """Of a fine-tune of one component only its tensors differ, those of its variant too."""
    part = shape.parts[-1]
    folder = shape.root / "partly"
    pipeline = pipelines.load(shape.root / "base")
    pipelines.tune(pipeline, 7, {part})
    pipelines.save(pipeline, folder, shard=SHARD)
    shape.store.add(folder, name="partly", base="base")
    found = shape.store.diff("base", "partly")
    assert {one.name.partition(":")[0] for one in found.tensors} == {part, part + HALF}
    changed = {Path(one.path) for one in found.files}
    # Configs tell where the pipeline was loaded from.
    assert {path.parts[0] for path in changed if path.suffix != ".json"} == {part}
    inside = shape.store.diff(f"base:{part}", f"partly:{part}")
    assert {one.name.partition(":")[0] for one in inside.tensors} == {part}
    on_disk = shape.store.diff_directory("base", folder)
    assert {one.name.partition(":")[0] for one in on_disk.tensors} == {part, part + HALF}


# -- merge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BY_TORCH)
def test_sums_of_components_are_torchs(shape: Shape, method: str) -> None:
    """Each component of the merge, and its variant, is what torch computes of it; `load` and
    `load_torch` take one by its name."""
    snapshot = shape.store[shape.merge(method)]
    for half in (False, True):
        wanted = computed(shape, BY_TORCH[method][0], half=half)
        for part in shape.parts:
            found = snapshot.load_torch(model=part + HALF * half)
            assert_equal({part: found}, {part: {name: wanted[part][name] for name in found}})
            # A tensor with two names is written once.
            lacking = wanted[part].keys() - found.keys()
            assert not lacking or lacking == {"encoder.embed_tokens.weight"}
            arrays = snapshot.load(model=part + HALF * half)
            assert all((arrays[name] == value.numpy()).all() for name, value in found.items())


@pytest.mark.parametrize("method", ALONE)
def test_a_component_is_merged_as_it_is_alone(shape: Shape, method: str) -> None:
    """Each component of the merge is what mstore makes of the component as a model alone."""
    merged = shape.store[shape.merge(method)]
    for part in shape.parts:
        shape.add_alone(part)
        plan = shape.store.plan(shape.request(method, part))
        shape.store.merge(plan, name=f"alone/{part}/merged")
        alone = shape.store[f"alone/{part}/merged"]
        for variant in ("", HALF):
            wanted = {part: alone.load_torch(model=variant)}
            assert_equal({part: merged.load_torch(model=part + variant)}, wanted)


@pytest.mark.parametrize("method", ["task_arithmetic", *ALONE])
def test_a_virtual_merge_has_the_bytes_of_the_real_one(shape: Shape, method: str) -> None:
    """All files of all components are computed on read as the merge would write them."""
    name = shape.merge(method)
    shape.store.merge(shape.merged[method].plan, name="virtual", virtual=True)
    files = [one.path for one in shape.store.files(name)]
    assert files == [one.path for one in shape.store.files("virtual")]
    for path in files:
        assert shape.store["virtual"].read(path) == shape.store[name].read(path), path


# -- mount ---------------------------------------------------------------------------------------


@contextmanager
def mounted(shape: Shape, ref: str) -> Iterator[Path]:
    try:
        require_fuse()
    except Unavailable as missing:
        pytest.skip(f"cannot mount: {missing}")
    where = shape.root / "mnt"
    where.mkdir(exist_ok=True)
    mount(shape.store.path, ref, where)
    try:
        yield where
    finally:
        unmount(where, lazy=True)


@pytest.mark.parametrize("virtual", [False, True])
def test_diffusers_loads_a_merge_from_a_mount(shape: Shape, virtual: bool) -> None:
    """`from_pretrained` of a mounted merge has torch's weights, in both types."""
    plan = shape.store.plan(shape.request("task_arithmetic"))
    shape.store.merge(plan, name="shown", virtual=virtual)
    with mounted(shape, "shown") as folder:
        assert_equal(shape.load(folder), computed(shape, task_arithmetic))
        half = shape.load(folder, variant="fp16")
        assert_equal(half, computed(shape, task_arithmetic, half=True), cast=True)


# -- one component -------------------------------------------------------------------------------


def test_one_component_of_a_pipeline_is_merged(shape: Shape) -> None:
    """With REF:MODEL on either side one component is merged, and all others are the base's."""
    part = shape.parts[-1]
    one = f"one:{part}"
    for base, expert in ((f"base:{part}", "one"), ("base", one), (f"base:{part}", one)):
        request = MergeRequest(base=base, experts=[expert], method="linear")
        shape.store.merge(shape.store.plan(request), name="partly")
        shape.store.checkout("partly", shape.root / "out")
        wanted = {**shape.weights["base"], part: shape.weights["one"][part]}
        assert_equal(shape.load(shape.root / "out"), wanted)
        shutil.rmtree(shape.root / "out")


def test_a_fine_tune_of_one_component_is_merged_into_it(shape: Shape) -> None:
    """A component that was tuned and saved alone is an expert of that of the pipeline."""
    part = shape.parts[0]
    pipeline = pipelines.load(shape.root / "base")
    pipelines.tune(pipeline, 9, {part})
    module = pipelines.modules_of(pipeline)[part]
    module.save_pretrained(shape.root / "lone")
    added = shape.store.add(shape.root / "lone", name="lone", base=f"base:{part}")
    assert added.blocks_equal_base is not None
    assert added.warnings == ()
    request = MergeRequest(base=f"base:{part}", experts=["lone"], method="linear")
    shape.store.merge(shape.store.plan(request), name="partly")
    shape.store.checkout("partly", shape.root / "out")
    wanted = {**shape.weights["base"], part: pipelines.state(module)}
    assert_equal(shape.load(shape.root / "out"), wanted)
    shutil.rmtree(shape.root / "out")
    # The variant is another model, and still the base's.
    half = shape.store["partly"].load_torch(model=part + HALF)
    assert_equal({part: half}, {part: shape.store["base"].load_torch(model=part + HALF)})


@pytest.mark.parametrize("half", [False, True])
def test_diffusers_loads_one_component_from_a_mount(shape: Shape, half: bool) -> None:
    """A mount of REF:MODEL is the component's directory: its own class reads it there, and finds
    no other form of it."""
    part = shape.parts[0]
    kind = type(pipelines.modules_of(pipelines.load(shape.root / "one"))[part])
    variant, dtype = ("fp16", torch.float16) if half else (None, torch.float32)
    with mounted(shape, f"one:{part}" + HALF * half) as folder:
        module = kind.from_pretrained(folder, variant=variant, torch_dtype=dtype)
        with pytest.raises((OSError, ValueError)):
            kind.from_pretrained(folder, variant=None if half else "fp16")
    wanted = {name: value.to(dtype) for name, value in shape.weights["one"][part].items()}
    assert_equal({part: pipelines.state(module)}, {part: wanted}, cast=half)


def test_one_component_is_compared(shape: Shape) -> None:
    """The change of REF:MODEL is what torch says of the component; a directory that was saved from
    it has its tensors."""
    for part in shape.parts:
        found = shape.store.compare(f"one:{part}", base=f"base:{part}", by="tensor")
        tensors = [shape.weights[name][part] for name in ("base", "one")]
        base, one = (torch.cat([v.double().ravel() for v in own.values()]) for own in tensors)
        if found.tensors == len(tensors[0]):
            wanted = float((one - base).norm() / base.norm())
            assert found.whole.models[0].change == pytest.approx(wanted, rel=1e-4)
        for one_part in found.parts:
            name = str(one_part.name).removeprefix(f"{part}:")
            base, one = (own[name].double() for own in tensors)
            wanted = float((one - base).norm() / base.norm())
            assert one_part.models[0].change == pytest.approx(wanted, rel=1e-4)
        same = shape.store.diff_directory(f"one:{part}", shape.root / "one" / part)
        # The directory has the variant, too, which is another model.
        assert same.files == ()
        assert (same.tensors, same.tensors_equal) == ((), len(shape.store.tensors(f"one:{part}")))
        other = shape.store.diff_directory(f"base:{part}", shape.root / "one" / part)
        assert other.tensors
        assert {one.name.partition(":")[0] for one in other.tensors} == {part}


@pytest.mark.parametrize(("kind", "number"), [("sdxl", "_2"), ("wan", "")])
def test_a_text_encoder_is_aligned(shapes: Shapes, kind: str, number: str) -> None:
    """A token that a fine-tune has is in the aligned pipelines' tokenizer and, in its row, in the
    text encoder of both, in both forms; diffusers loads them, and they merge."""
    shape = shapes(kind)
    part = f"text_encoder{number}"
    pipeline = pipelines.load(shape.root / "one")
    tokenizer, encoder = (pipeline.components[one] for one in (f"tokenizer{number}", part))
    tokenizer.add_tokens(["<cat>"], special_tokens=True)
    encoder.resize_token_embeddings(encoder.config.vocab_size + 2)
    pipelines.save(pipeline, shape.root / "cat", shard=SHARD)
    shape.store.add(shape.root / "cat", name="cat", base=None)
    request = MergeRequest(base=f"base:{part}", experts=[f"cat:{part}"], method="linear")
    report = shape.store.align(request, Vocabulary())
    assert report.base.ref is not None
    own = encoder.get_input_embeddings().weight.detach()
    at = tokenizer.convert_tokens_to_ids("<cat>")
    shape.store.checkout(report.base.ref, shape.root / "out")
    for variant, dtype in ((None, torch.float32), ("fp16", torch.float16)):
        aligned = pipelines.load(shape.root / "out", variant=variant)
        rows = aligned.components[part].get_input_embeddings().weight.detach()
        now = aligned.components[f"tokenizer{number}"].convert_tokens_to_ids("<cat>")
        assert len(rows) == report.rows
        assert torch.equal(rows[now].to(dtype), own[at].to(dtype))
        if variant is None:
            wanted = {one: value for one, value in shape.weights["base"].items() if one != part}
            found = pipelines.weights_of(aligned)
            assert_equal({one: found[one] for one in wanted}, wanted)
    shape.store.merge(shape.store.plan(report.applied(request)), name="partly")
    shutil.rmtree(shape.root / "out")


# -- variants ------------------------------------------------------------------------------------


def test_variants_that_a_fine_tune_lacks_are_left_out(shape: Shape) -> None:
    """Without fp16 files in an expert the merge has none: a loader that asks for them is told so,
    and gets no unmerged weights."""
    pipeline = pipelines.load(shape.root / "one")
    pipeline.save_pretrained(shape.root / "plain", max_shard_size=SHARD)
    shape.store.add(shape.root / "plain", name="plain", base="base")
    plan = shape.store.plan(MergeRequest(base="base", experts=["plain"], method="linear"))
    assert "other models" in [one.kind for one in plan.warnings]
    shape.store.merge(plan, name="partly")
    assert shape.store["partly"].models() == sorted(shape.parts)
    shape.store.checkout("partly", shape.root / "out")
    assert_equal(shape.load(shape.root / "out"), shape.weights["one"])
    with pytest.raises((OSError, ValueError)):
        shape.load(shape.root / "out", variant="fp16")
    shutil.rmtree(shape.root / "out")


def test_a_component_stands_for_its_only_form(shape: Shape) -> None:
    """A base of fp16 files alone, as one downloads it, is merged with fine-tunes that were saved
    without a variant."""
    for name in MEMBERS[:2]:
        pipeline = pipelines.load(shape.root / name, variant="fp16")
        variant = "fp16" if name == "base" else None
        pipeline.save_pretrained(shape.root / f"half-{name}", variant=variant)
        base = None if name == "base" else "half/base"
        shape.store.add(shape.root / f"half-{name}", name=f"half/{name}", base=base)
    request = MergeRequest(base="half/base", experts=["half/one"], method="linear")
    shape.store.merge(shape.store.plan(request), name="half/merged")
    shape.store.checkout("half/merged", shape.root / "out")
    wanted = {
        part: {name: value.half() for name, value in tensors.items()}
        for part, tensors in shape.weights["one"].items()
    }
    assert_equal(shape.load(shape.root / "out", variant="fp16"), wanted, cast=True)
    shutil.rmtree(shape.root / "out")
