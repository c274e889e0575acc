"""Checkpoints on disk: what is found, what is followed, what is refused."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors
from checkpoints import (
    BITS,
    Tensor,
    await_tick,
    every_dtype_checkpoint,
    safetensors_bytes,
    write_index,
    write_safetensors,
)

from mstore.checkpoint.directory import Checkpoint, CheckpointLimits, SourceFile, scan
from mstore.checkpoint.exclusion import Exclusion
from mstore.checkpoint.reading import open_regular, open_stamped
from mstore.terms.errors import BadCheckpoint, MstoreError, NotFound, StorageFailed
from mstore.terms.phrases import Phrase
from mstore_cli.spelling import Typed

A: Tensor = ("a", "U8", (2,), b"aa")
B: Tensor = ("b", "U8", (3,), b"bbb")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound checkpoint of two indexed shards and a config."""
    root = tmp_path / "model"
    write_safetensors(root / "one.safetensors", [A])
    write_safetensors(root / "two.safetensors", [B])
    write_index(
        root / "model.safetensors.index.json", {"a": "one.safetensors", "b": "two.safetensors"}
    )
    (root / "config.json").write_text("{}")
    return root


def paths(checkpoint: Checkpoint) -> list[str]:
    return [file.path for file in checkpoint.files]


def refusal_of(path: Path, **limits: int) -> BadCheckpoint:
    """The error that `scan` must raise."""
    with pytest.raises(BadCheckpoint) as refusal:
        scan(path, limits=CheckpointLimits(**limits))
    return refusal.value


def test_every_file_is_found(tmp_path: Path) -> None:
    """Nested, hidden, empty and oddly named files are there, sorted, with size and header."""
    root = every_dtype_checkpoint(tmp_path / "every")
    checkpoint = scan(root)
    on_disk = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
    assert paths(checkpoint) == sorted(on_disk)
    assert checkpoint.root == root
    for file in checkpoint.files:
        assert file.absolute == on_disk[file.path]
        assert file.size == on_disk[file.path].stat().st_size
        assert (file.header is not None) == file.path.endswith(".safetensors")
        if file.header is not None:
            assert file.header.data_start + file.header.data_bytes == file.size


def test_the_checkpoint_of_every_dtype_is_sound(tmp_path: Path) -> None:
    """safetensors reads the hand-made checkpoint as we do, and it holds what it promises."""
    root = every_dtype_checkpoint(tmp_path / "every")
    slots = []
    for file in scan(root).files:
        if file.header is None:
            continue
        content = (root / file.path).read_bytes()
        theirs = {name: bytes(t["data"]) for name, t in safetensors.deserialize(content)}
        data = content[file.header.data_start :]
        assert theirs == {s.name: data[s.begin : s.end] for s in file.header.tensors}
        slots += file.header.tensors
    assert {slot.dtype for slot in slots} == set(BITS)
    assert any(slot.shape == () for slot in slots)
    assert any(0 in slot.shape for slot in slots)
    assert any(not slot.name.isascii() for slot in slots)
    assert any(slot.nbytes > 9 * 65536 for slot in slots)
    starts = {file.header.data_start % 8 for file in scan(root).files if file.header}
    assert len(starts) > 1


def test_the_checkpoint_of_every_dtype_never_changes(tmp_path: Path) -> None:
    """Two hand-made checkpoints are equal byte for byte."""
    one, two = every_dtype_checkpoint(tmp_path / "1"), every_dtype_checkpoint(tmp_path / "2")
    for file in scan(one).files:
        assert (one / file.path).read_bytes() == (two / file.path).read_bytes()


def test_a_single_file_is_a_checkpoint(model: Path) -> None:
    """A .safetensors file alone is a checkpoint of one file; its neighbours are not read."""
    (model / "model.safetensors.index.json").write_text("broken")
    checkpoint = scan(model / "one.safetensors")
    assert paths(checkpoint) == ["one.safetensors"]
    assert checkpoint.root == model
    assert checkpoint.files[0].header is not None


def test_a_link_that_the_user_names_is_followed(model: Path, tmp_path: Path) -> None:
    """The path given may itself be a link, to a directory or to a file."""
    (tmp_path / "link").symlink_to(model)
    assert paths(scan(tmp_path / "link")) == paths(scan(model))
    (tmp_path / "x.safetensors").symlink_to(model / "one.safetensors")
    assert paths(scan(tmp_path / "x.safetensors")) == ["x.safetensors"]


def test_a_link_inside_counts_as_its_file(model: Path) -> None:
    """A link to a regular file of the checkpoint, relative or absolute, is one more such file."""
    (model / "sub").mkdir()
    (model / "sub" / "again.safetensors").symlink_to("../one.safetensors")
    (model / "config2.json").symlink_to(model / "config.json")
    found = {file.path: file for file in scan(model).files}
    assert found["sub/again.safetensors"].header == found["one.safetensors"].header
    assert found["sub/again.safetensors"].absolute == model / "one.safetensors"
    assert found["config2.json"].size == 2


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "../nowhere", "../model2/x"])
def test_a_link_out_is_refused(model: Path, target: str) -> None:
    """A link out of the checkpoint is refused by name, wherever it leads, with a way to add it."""
    (model.parent / "secret").write_text("s")
    (model.parent / "model2").mkdir()
    (model.parent / "model2" / "x").write_text("s")
    (model / "link.bin").symlink_to(target)
    refusal = refusal_of(model)
    assert "is a symlink out of the checkpoint" in refusal.what
    assert refusal.where == str(model / "link.bin")
    assert refusal.hint is not None
    assert refusal.hint.startswith("cp -rL")


def test_a_link_out_by_way_of_a_link_is_refused(model: Path) -> None:
    """A link is judged by where it ends, not by its own text."""
    (model.parent / "secret").write_text("s")
    (model / "hop").symlink_to("../secret")
    (model / "a-link").symlink_to("hop")
    assert refusal_of(model).where == str(model / "a-link")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("sub", "is a symlink to a directory"),
        (".", "is a symlink to a directory"),
        ("gone", "is a symlink that leads nowhere"),
        ("link", "is a symlink that leads nowhere"),
        ("fifo", "is a symlink to a fifo, socket or device"),
    ],
)
def test_other_links_are_refused(model: Path, target: str, problem: str) -> None:
    """Links to directories, to nothing, to themselves and to special files are refused by name."""
    (model / "sub").mkdir()
    if target == "fifo":
        os.mkfifo(model / "zz-fifo")
        target = "zz-fifo"
    (model / "link").symlink_to(target)
    refusal = refusal_of(model)
    assert refusal.what == problem
    assert refusal.where == str(model / "link")


def test_special_files_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifo or a socket is refused by name, without being opened, even if named like weights."""
    os.mkfifo(model / "pipe.safetensors")
    assert refusal_of(model).where == str(model / "pipe.safetensors")
    (model / "pipe.safetensors").unlink()
    # Socket addresses are short: bind by a relative name.
    monkeypatch.chdir(model)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("sock")
        refusal = refusal_of(model)
    assert "fifo, socket or device" in refusal.what
    assert refusal.where == str(model / "sock")
    refusal = refusal_of(Path("/dev/null"))
    assert refusal.what == "is neither a directory nor a regular file"


def test_a_missing_path_is_not_found(tmp_path: Path) -> None:
    """A path that is not there, or cannot be a path, is NotFound."""
    for path in (tmp_path / "gone", tmp_path / "nul\0"):
        with pytest.raises(NotFound):
            scan(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(model: Path) -> None:
    """What the system does not let us read is StorageFailed, with the path and errno."""
    (model / "one.safetensors").chmod(0)
    with pytest.raises(StorageFailed, match=r"one\.safetensors") as refusal:
        scan(model)
    assert refusal.value.errno is not None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (b"new\nline", "control character"),
        (b"escape\x1b[2J", "control character"),
        (b"latin-1 \xe9", "not valid UTF-8"),
    ],
)
def test_bad_file_names_are_refused(model: Path, name: bytes, problem: str) -> None:
    """A file whose name is not printable UTF-8 is refused, in a printable line."""
    (model / os.fsdecode(name)).write_text("")
    refusal = refusal_of(model)
    assert problem in refusal.what
    assert str(refusal).isprintable()


@pytest.mark.parametrize("twins", [("README.md", "Readme.md"), ("sub/x", "SUB/y")])
def test_case_twins_are_refused(model: Path, twins: tuple[str, str]) -> None:
    """Files or directories that differ only in case are refused, both named."""
    for twin in twins:
        (model / twin).parent.mkdir(exist_ok=True)
        (model / twin).write_text("")
    refusal = refusal_of(model)
    assert "differ only in case" in refusal.what
    assert all(repr(twin.split("/")[0]) in refusal.what for twin in twins)
    assert refusal.where == str(model)


def test_a_bad_shard_is_named(model: Path) -> None:
    """A header that cannot be accepted names its file and tensor as the user reaches them."""
    whole = safetensors_bytes([B])
    (model / "two.safetensors").write_bytes(whole[:-1])
    refusal = refusal_of(model)
    assert refusal.where == str(model / "two.safetensors")
    assert "truncated: tensor 'b'" in refusal.what


def test_limits_reach_every_header(model: Path) -> None:
    """The caller's limits hold for shards and for the index."""
    assert "too long" in refusal_of(model, max_header_bytes=20).what
    assert "the index is longer than the limit" in refusal_of(model, max_index_bytes=20).what


def test_an_index_that_names_missing_shards_is_refused(model: Path) -> None:
    """Every missing shard is named, at the index that names it, with what to do."""
    index = model / "model.safetensors.index.json"
    write_index(index, {"a": "one.safetensors", "b": "three.safetensors", "c": "four.safetensors"})
    refusal = refusal_of(model)
    assert refusal.where == str(index)
    assert refusal.what == (
        "the index names a missing shard: 'four.safetensors', 'three.safetensors'"
    )
    assert "download or copy what is missing" in (refusal.hint or "")
    write_index(index, {str(n): f"{n}.safetensors" for n in range(40)})
    assert refusal_of(model).what.endswith("'11.safetensors', '12.safetensors' and 35 more")


def test_an_index_without_any_shard_names_them(tmp_path: Path) -> None:
    """A directory where only the index arrived says which shard is missing."""
    write_index(tmp_path / "model.safetensors.index.json", {"a": "one.safetensors"})
    assert "missing shard: 'one.safetensors'" in refusal_of(tmp_path).what


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "../model/one.safetensors"}, "has a '..' component"),
        ({"a": "/one.safetensors"}, "is absolute"),
        ({"a": "one.safetensors\0"}, "control character"),
        ({"a": ""}, "is empty"),
        ({"a": "\ud800"}, "not valid UTF-8"),
        ({"a": "config.json"}, "the shard 'config.json' is not a .safetensors file"),
        ({"a": "sub"}, "missing shard: 'sub'"),
        ({"a": 1}, "tensor 'a' is not mapped to a file name"),
        ({"a": ["one.safetensors"]}, "tensor 'a' is not mapped to a file name"),
        (["one.safetensors"], "no weight_map object"),
        (None, "no weight_map object"),
    ],
)
def test_a_false_index_is_refused(model: Path, weight_map: object, problem: str) -> None:
    """Bad or opaque shard names and maps of other types are refused at the index."""
    (model / "sub").mkdir()
    (model / "sub" / "x").write_text("")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    refusal = refusal_of(model)
    assert problem in refusal.what
    assert refusal.where == str(index)
    assert str(refusal).isprintable()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "the index is not JSON"),
        (b"\xff", "the index is not UTF-8"),
        (b"[]", "the index is not a JSON object"),
        (b"{}", "no weight_map object"),
        (b'{"weight_map":{},"weight_map":{}}', "has the key 'weight_map' twice"),
        (b'{"weight_map":{"a":"x","a":"y"}}', "has the key 'a' twice in 'weight_map'"),
        (b'{"a":' * 5000, "nested too deeply"),
        (b"[" * 1_000_000, "opens 1000000 objects"),
    ],
)
def test_an_index_that_is_no_index_is_refused(model: Path, text: bytes, problem: str) -> None:
    """An index must be one JSON object without repeated keys."""
    (model / "model.safetensors.index.json").write_bytes(text)
    assert problem in refusal_of(model).what


@pytest.mark.parametrize(
    ("weight_map", "remark"),
    [
        ({"a": "two.safetensors"}, "tensor 'a' is not in the shard 'two.safetensors'"),
        ({"zz": "one.safetensors"}, "tensor 'zz' is not in the shard 'one.safetensors'"),
        (
            {"y": "one.safetensors", "x": "one.safetensors", "z": "two.safetensors"},
            "tensor 'x' is not in the shard 'one.safetensors', and so 2 more",
        ),
    ],
)
def test_an_index_may_name_tensors_that_are_not_there(
    model: Path, weight_map: dict[str, str], remark: str
) -> None:
    """No loader needs them: the files are kept, with a remark that names the first one."""
    write_index(model / "model.safetensors.index.json", weight_map)
    assert scan(model).remarks == (f"'model.safetensors.index.json': {remark}",)


def test_one_tensor_in_two_shards_of_an_index(model: Path) -> None:
    """The files are kept; a remark says which shard counts, and what transformers does."""
    write_safetensors(model / "two.safetensors", [B, A])
    (remark,) = scan(model).remarks
    assert "'a' is in 'one.safetensors' and in 'two.safetensors', of which 'one.s" in remark
    assert "transformers reads 'two.safetensors'" in remark
    write_index(
        model / "model.safetensors.index.json", {"a": "two.safetensors", "b": "two.safetensors"}
    )
    assert scan(model).remarks == ()
    index = {"a": "two.safetensors", "b": "two.safetensors", "c": "one.safetensors"}
    write_safetensors(model / "one.safetensors", [A, ("c", "U8", (1,), b"c")])
    write_index(model / "model.safetensors.index.json", index)
    (remark,) = scan(model).remarks
    assert "of which 'two.safetensors' counts; the model" in remark


def test_an_old_index_beside_the_whole_model(model: Path) -> None:
    """Beside model.safetensors an index may name shards that are gone, or that repeat it."""
    write_safetensors(model / "model.safetensors", [A, B])
    (remark,) = scan(model).remarks
    assert "'model.safetensors' is not in 'model.safetensors.index.json': they are two" in remark
    (model / "two.safetensors").unlink()
    (remark,) = scan(model).remarks
    assert "the index names a missing shard: 'two.safetensors'; loaders read 'model.s" in remark


SHARD = "model-00002-of-00003.safetensors"


def test_some_of_several_shards_are_refused(tmp_path: Path) -> None:
    """One shard of three without an index is refused: in a directory, in one of a pipeline's, and
    alone; beside an index that names others, or the whole model, it may stay."""
    for place in ("m", "pipeline/unet"):
        write_safetensors(tmp_path / place / SHARD, [A])
        top = tmp_path / place.split("/")[0]
        for path in (top, tmp_path / place / SHARD):
            refusal = refusal_of(path)
            assert "is not whole: it has 1 of 3 shards, and no index" in refusal.what
            assert SHARD in refusal.what
            assert refusal.where == str(path)
    write_safetensors(tmp_path / "m" / "model.safetensors", [A])
    (remark,) = scan(tmp_path / "m").remarks
    assert "1 of 3 shards" in remark
    (tmp_path / "m" / "model.safetensors").unlink()
    write_safetensors(tmp_path / "m" / "x.safetensors", [A])
    write_index(tmp_path / "m" / "model.safetensors.index.json", {"a": "x.safetensors"})
    assert scan(tmp_path / "m").remarks == ()
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    for number in (1, 3):
        write_safetensors(tmp_path / "m" / SHARD.replace("2", str(number), 1), [A])
    assert scan(tmp_path / "m").remarks == ()


def test_pointers_of_git_lfs_are_noted(model: Path) -> None:
    """A file that Git LFS has not downloaded is kept, with a remark; others have none."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (model / "tokenizer.json").write_text(pointer)
    (model / "notes.txt").write_text("version 1")
    (model / "long.txt").write_text(pointer + 1024 * " ")
    (remark,) = scan(model).remarks
    assert remark.startswith("'tokenizer.json' is a Git LFS pointer")
    assert remark.endswith("git lfs pull")


def test_files_outside_an_index_may_repeat_its_tensors(model: Path) -> None:
    """A second copy of the weights that no index joins with the first is accepted."""
    write_safetensors(model / "consolidated.safetensors", [A, B])
    write_safetensors(model / "sub" / "one.safetensors", [A])
    assert len(scan(model).files) == 6


def test_an_index_speaks_of_its_own_directory(model: Path) -> None:
    """Shards are looked for beside their index, not at the root."""
    write_index(model / "sub" / "x.safetensors.index.json", {"a": "one.safetensors"})
    assert "missing shard: 'one.safetensors'" in refusal_of(model).what
    write_safetensors(model / "sub" / "one.safetensors", [A])
    assert len(scan(model).files) == 6


@pytest.mark.parametrize("content", [{}, {"readme.txt": b""}])
def test_a_directory_without_weights_is_refused(tmp_path: Path, content: dict[str, bytes]) -> None:
    """No .safetensors file: nothing to add."""
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    refusal = refusal_of(tmp_path)
    assert refusal.what == "holds no .safetensors file"
    assert refusal.where == str(tmp_path)


# A pickle that creates the file "ran" when it is loaded.
HOSTILE = b"cposix\nsystem\n(S'touch ran'\ntR."


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "sub/x.pth", "x.ckpt"])
def test_a_pickle_is_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A pickle-only checkpoint is refused with a conversion command, and is not opened."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(HOSTILE)
    for path in (tmp_path, tmp_path / name):
        refusal = refusal_of(path)
        assert f"has only pickled weights ('{Path(name).name if path.is_file() else name}')" in (
            refusal.what
        )
        assert refusal.told(Typed()).hint == f"mstore add {path} --name {path.name} --convert"
    assert not (tmp_path / "ran").exists()


def test_pickles_beside_weights_are_opaque_files(model: Path) -> None:
    """Optimizer state and training arguments next to safetensors are bytes like any others."""
    (model / "training_args.bin").write_bytes(HOSTILE)
    found = {file.path: file for file in scan(model).files}
    assert found["training_args.bin"].header is None


def beside(root: Path, names: dict[str, str], *, config: bool = True) -> Path:
    """Directories with a tensor of a name each, and a config.json."""
    for directory, tensor in names.items():
        (root / directory).mkdir(parents=True, exist_ok=True)
        weights = safetensors_bytes([(tensor, "U8", (2,), b"aa")])
        (root / directory / "model.safetensors").write_bytes(weights)
        if config:
            (root / directory / "config.json").write_text("{}")
    return root


@pytest.mark.parametrize("bare", [False, True])
def test_models_side_by_side_are_one_snapshot(tmp_path: Path, bare: bool) -> None:
    """Directories with models, and files of weights, are taken alike: as models of one snapshot. A
    remark has the line that adds each as a snapshot of its own."""
    models = beside(tmp_path / "models", {"a": "w", "b b": "w", "c": "v"})
    (models / "README.md").write_text("three models")
    shutil.copy(models / "a" / "model.safetensors", models / "a" / "model.fp16.safetensors")
    end = ""
    if bare:
        end = ".safetensors"
        for name in ("a", "b b", "c"):
            (models / name / "model.safetensors").rename(models / f"{name}{end}")
            shutil.rmtree(models / name)
    found = scan(models)
    assert {name.partition("@")[0] for name in found.named} == {"a", "b b", "c"}
    (remark,) = found.remarks
    assert isinstance(remark, Phrase)
    assert remark.spelled(Typed()) == (
        f"one snapshot of 3 models: 'a{end}' and 'b b{end}' both have the tensor 'w'; "
        f"mstore add {models}/a{end} '{models}/b b{end}' {models}/c{end} --name-prefix models/ "
        "stores each as a snapshot of its own"
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_models_of_several_files_have_no_command(tmp_path: Path, shards: int) -> None:
    """Shards of another stem cannot be added file by file, so the remark has no command."""
    for stem in ("alpha", "beta"):
        for number in range(1, shards + 1):
            path = tmp_path / f"{stem}-0000{number}-of-0000{shards}.safetensors"
            path.write_bytes(safetensors_bytes([(f"w{number}", "U8", (2,), b"aa")]))
    (remark,) = scan(tmp_path).remarks
    assert isinstance(remark, Phrase)
    first, second = (f"{stem}-00001-of-0000{shards}.safetensors" for stem in ("alpha", "beta"))
    told = f"one snapshot of 2 models: '{first}' and '{second}' both have the tensor 'w1'"
    assert remark.spelled(Typed()).startswith(told)
    assert ("mstore add" in remark.spelled(Typed())) == (shards == 1)


def test_models_side_by_side_are_told_by_their_paths(tmp_path: Path) -> None:
    """A remark tells directories as they are called, also where names of models are escaped."""
    models = beside(tmp_path / "m", {"a:b": "w", "v@1": "w", "v@2": "w"})
    (remark,) = scan(models).remarks
    assert isinstance(remark, Phrase)
    assert remark.spelled(Typed()) == (
        "one snapshot of 3 models: 'a:b' and 'v@1' both have the tensor 'w'; "
        f"mstore add {models}/a:b {models}/v@1 {models}/v@2 --name-prefix m/ "
        "stores each as a snapshot of its own"
    )
    shutil.rmtree(models / "a:b")
    (remark,) = scan(models).remarks
    assert remark.startswith("one snapshot of 2 models: 'v@1' and 'v@2' both")


@pytest.mark.parametrize(
    "top", ["config.json", "model_index.json", "modules.json", "model.safetensors", "x.bin"]
)
def test_a_model_in_parts_is_one(tmp_path: Path, top: str) -> None:
    """What has weights or a description at its top may repeat tensors below, as pipelines do."""
    model = beside(tmp_path / "model", {"text_encoder": "w", "text_encoder_2": "w"})
    content = safetensors_bytes([("x", "U8", (2,), b"aa")]) if "safe" in top else b"{}"
    (model / top).write_bytes(content)
    assert len(scan(model).files) == 5


def trained(root: Path, below: Mapping[str, str]) -> Path:
    """A model with the tensor w at the top, and others in directories."""
    beside(root, {".": "w", **below})
    return root


@pytest.mark.parametrize(
    ("below", "options"),
    [
        (["checkpoint-500"], "--exclude checkpoint-500/"),
        (["checkpoint-500", "checkpoint-1000"], "--exclude 'checkpoint-*/'"),
        (["checkpoint-5", "checkpoint-10", "old"], "--exclude 'checkpoint-*/' --exclude old/"),
        (["a/deep one"], "--exclude 'a/deep one/'"),
        (["[a]*"], "--exclude '\\[a]\\*/'"),
        (["!best"], "--exclude '\\!best/'"),
    ],
)
def test_a_model_and_its_earlier_states_are_not_one(
    tmp_path: Path, below: list[str], options: str
) -> None:
    """A model above others with its tensors is refused; the patterns of the hint leave one."""
    model = trained(tmp_path / "run", dict.fromkeys(below, "w"))
    with pytest.raises(BadCheckpoint) as refused:
        scan(model)
    assert refused.value.what == (
        f"holds {len(below) + 1} models, not one: the one at its top and {min(below)!r} "
        "both have the tensor 'w'"
    )
    assert refused.value.where == str(model)
    assert refused.value.told(Typed()).hint == f"mstore add {model} --name run {options}"
    asked = [word for word in shlex.split(options) if word != "--exclude"]
    assert paths(scan(model, exclusion=Exclusion.chosen(asked))) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    ("pickle", "below", "config"),
    [
        ("pytorch_model.bin", ["checkpoint-500"], True),
        ("pytorch_model-00001-of-00002.bin", ["checkpoint-5", "checkpoint-10"], False),
        ("adapter_model.bin", ["best"], True),
        ("model.pt", ["checkpoint-500"], False),
    ],
)
def test_a_pickled_model_and_its_earlier_states_are_not_one(
    tmp_path: Path, pickle: str, below: list[str], config: bool
) -> None:
    """Pickled weights above checkpoints in safetensors, as a trainer leaves them, are refused: what
    is there, the line that adds those below, and the one that adds the one at the top."""
    model = beside(tmp_path / "a run", dict.fromkeys(below, "w"), config=config)
    (model / pickle).write_bytes(HOSTILE)
    (model / "optimizer.pt").write_bytes(HOSTILE)
    (model / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint) as refused:
        scan(model)
    listed = ", ".join(repr(one) for one in sorted(below))
    assert refused.value.what == (
        f"holds {len(below) + 1} models, not one: pickled weights at its top ({pickle!r}), and "
        f"safetensors in {listed}"
    )
    first, second = (refused.value.told(Typed()).hint or "").splitlines()
    lines = [first.split("mstore add ")[1], second.split("mstore add ")[1]]
    each, whole = (shlex.split(line) for line in lines)
    assert each == [*(str(model / one) for one in sorted(below)), "--name-prefix", "a-run/"]
    assert whole[0] == str(model)
    assert "--convert" in whole
    asked = [word for before, word in pairwise(whole) if before == "--exclude"]
    left = Exclusion.chosen(asked)
    with pytest.raises(BadCheckpoint, match="only pickled"):
        scan(model, exclusion=left)
    for one in below:
        assert scan(model / one).files


@pytest.mark.parametrize("top", ["modules.json", "model_index.json", "model.safetensors"])
def test_pickles_above_the_parts_of_a_model(tmp_path: Path, top: str) -> None:
    """A pipeline, and a model that has safetensors at its top too, may have pickles there."""
    model = beside(tmp_path / "model", {"part": "w"})
    (model / "pytorch_model.bin").write_bytes(HOSTILE)
    content = safetensors_bytes([("x", "U8", (2,), b"aa")]) if "safe" in top else b"{}"
    (model / top).write_bytes(content)
    assert len(scan(model).files) == 4


def test_what_a_whole_model_may_have_below_it(tmp_path: Path) -> None:
    """Copies without a config, modules with other tensors or none, and a pipeline's parts stay."""
    model = trained(tmp_path / "model", {"2_Dense": "linear.weight"})
    (model / "original").mkdir()
    shutil.copy(model / "model.safetensors", model / "original" / "model.safetensors")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    assert len(scan(model).files) == 6
    pipeline = trained(tmp_path / "pipeline", {"text_encoder": "w"})
    (pipeline / "model_index.json").write_text("{}")
    assert len(scan(pipeline).files) == 5


@pytest.mark.parametrize("config", [True, False])
def test_parts_with_other_tensors_are_one_model(tmp_path: Path, config: bool) -> None:
    """Directories that share no tensor, or that nothing calls models, are parts of one."""
    names = {"unet": "w", "vae": "v" if config else "w"}
    assert len(scan(beside(tmp_path / "model", names, config=config)).files) == (4 if config else 2)


@pytest.mark.parametrize("place", [".", ".mstore", "deep/er/store"])
def test_a_store_inside_is_refused(model: Path, place: str) -> None:
    """A checkpoint that is an mstore store, or holds one at any depth, is refused at the store."""
    (model / place).mkdir(parents=True, exist_ok=True)
    (model / place / "format").write_text("mstore 1 00000000 1048576\n")
    refusal = refusal_of(model)
    assert "is an mstore store" in refusal.what
    assert refusal.where is not None
    assert Path(refusal.where) == model / place
    assert refusal.hint is not None


def test_a_file_called_format_is_no_store(model: Path) -> None:
    """Only the first words of a store's format file make a store."""
    (model / "format").write_text("safetensors")
    assert "format" in paths(scan(model))


def dig(directory: Path, name: str, depth: int) -> None:
    """Make `depth` directories below each other, and a file at the bottom."""
    descriptor = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=descriptor)
        below = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(os.open("leaf", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)


def test_depth_has_a_limit(model: Path) -> None:
    """A file 64 components deep is found, a directory deeper than that is refused."""
    dig(model, "d", 63)
    assert max(file.path.count("/") for file in scan(model).files) == 63
    dig(model, "e", 65)
    with pytest.raises(BadCheckpoint, match="deeper than 64 components"):
        scan(model)


def test_a_path_too_long_is_refused(model: Path) -> None:
    """A path beyond what the system takes in one call is refused in the library's own words."""
    dig(model, "d" * 250, 18)
    with pytest.raises(MstoreError, match=r"too long|longer than"):
        scan(model)


def test_a_change_is_seen(model: Path) -> None:
    """A file opens by its stamp until it is written, touched, replaced, gone or no longer one."""
    path = model / "one.safetensors"
    content = path.read_bytes()

    def listed() -> SourceFile:
        return next(file for file in scan(model).files if file.path == path.name)

    def touch() -> None:
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    def rewrite() -> None:
        path.write_bytes(content)
        os.utime(path, ns=(0, file.stamp.mtime_ns))

    def replace() -> None:
        (model / "new").write_bytes(content)
        (model / "new").rename(path)

    def become_a_directory() -> None:
        path.unlink()
        path.mkdir()

    for change in (touch, rewrite, replace, become_a_directory, path.rmdir):
        if path.is_file():
            file = listed()
            with open_regular(file.absolute, file.stamp):
                pass
            await_tick(path)
        change()
        with pytest.raises(BadCheckpoint, match="changed while"):
            os.close(open_stamped(file.absolute, file.stamp))


def test_a_change_is_seen_afterwards(model: Path) -> None:
    """A file that is written meanwhile is refused at the end, though its time was set back."""
    path = model / "one.safetensors"
    file = next(file for file in scan(model).files if file.path == path.name)
    opened = open_regular(file.absolute, file.stamp)
    opened.__enter__()
    await_tick(path)
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, file.stamp.mtime_ns))
    with pytest.raises(BadCheckpoint, match="changed while"):
        opened.__exit__(None, None, None)
