"""`mount --models`: models of one file as ComfyUI and A1111 look for them, by real mounts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import write_index, write_safetensors
from cli_runs import Program
from mount_drivers import on_disk
from safetensors import safe_open
from small_models import files_of

from mstore import MergeRequest, Store
from mstore.terms.errors import BadRequest, NotFound, Unavailable
from mstore_fuse.about import AboutStore
from mstore_fuse.driver import EVERY
from mstore_fuse.folders import FolderTree, ModelFolder
from mstore_fuse.fuse_driver import require_fuse
from mstore_fuse.mounts import mount, mounts, unmount
from mstore_fuse.tree import NOTHING

tmp_path_factory = on_disk

try:
    require_fuse()
except Unavailable as missing:
    pytest.skip(f"cannot mount: {missing}", allow_module_level=True)

BESIDE = (".preview.png", ".png", ".jpg", ".civitai.info", ".json", ".txt", ".yaml")


def weights(path: Path, seed: int) -> Path:
    """One file of weights; those of two seeds differ."""
    tensors = [("w", "F32", (4096,), bytes([seed + 1, 0, 0, 0x3F]) * 4096)]
    write_safetensors(path, tensors, metadata={"seed": str(seed)})
    return path


def sharded(directory: Path) -> Path:
    """A model of two files."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        write_safetensors(directory / name, [(f"w{number}", "U8", (1,), b"1")])
    write_index(
        directory / "model.safetensors.index.json", {f"w{n}": name for n, name in enumerate(names)}
    )
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Refs `base` and `mixes/a` of one file, a tag `v1` of `base`, and `llm`, which is sharded."""
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        store.add(weights(tmp_path / "base.safetensors", 0), name="base", base=None)
        store.add(weights(tmp_path / "mix" / "mix_v3.safetensors", 1).parent, name="mixes/a")
        store.add(sharded(tmp_path / "llm"), name="llm", base=None)
        store.tag("v1", "base")
        yield store


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory; what is mounted there ends with the test."""
    made = tmp_path / "mnt"
    made.mkdir()
    yield made
    if os.path.ismount(made):
        unmount(made, lazy=True)


def bytes_of(store: Store, ref: str) -> bytes:
    """The weights of a ref with one file of them."""
    (path,) = (one.path for one in store[ref].files() if one.path.endswith(".safetensors"))
    return store[ref].read(path)


def folder_of(store: Store, pattern: str = EVERY) -> FolderTree:
    """What a mount of the models shows, without the mount."""
    return FolderTree(store, pattern, ModelFolder(), NOTHING)


def walk(tree: FolderTree, path: str = "") -> list[str]:
    """The paths of all files."""
    found = []
    for name, entry in tree.children(path):
        below = f"{path}/{name}" if path else name
        found += walk(tree, below) if entry.is_directory else [below]
    return found


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass
class Comfy:
    """How ComfyUI lists a folder of models: again only if a directory has another time.

    As in the source of ComfyUI 0.3: `recursive_search` and `cached_filename_list_`.
    """

    folder: Path
    times: dict[Path, float] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def listed(self) -> list[str]:
        if not self.times or any(os.path.getmtime(one) != was for one, was in self.times.items()):
            self.times, self.names = {self.folder: os.path.getmtime(self.folder)}, []
            for directory, below, names in os.walk(self.folder, followlinks=True):
                here = [os.path.relpath(Path(directory, name), self.folder) for name in names]
                self.names += [one for one in here if one.endswith(".safetensors")]
                for one in below:
                    self.times[Path(directory, one)] = os.path.getmtime(Path(directory, one))
        return sorted(self.names)


def test_each_model_of_one_file_is_a_file(store: Store, place: Path, tmp_path: Path) -> None:
    """Branches and tags whose model is one file are files of their names, whatever it is called in
    the snapshot, with the bytes of a checkout; what is sharded is left out."""
    mount(store.path, None, place, models=True)
    names = ("base", "mixes/a", "v1")
    assert files_of(place) == {f"{name}.safetensors": bytes_of(store, name) for name in names}
    store.checkout("mixes/a", tmp_path / "out")
    (out,) = (tmp_path / "out").glob("*.safetensors")
    with safe_open(place / "mixes" / "a.safetensors", "np") as ours, safe_open(out, "np") as its:
        assert (ours.metadata(), list(ours.keys())) == (its.metadata(), ["w"])
        assert ours.get_tensor("w").tobytes() == its.get_tensor("w").tobytes()
    assert os.getxattr(place / "mixes" / "a.safetensors", "user.mstore.ref") == b"mixes/a"
    assert [one.revision for one in mounts() if one.mountpoint == place] == ["models *"]


@pytest.mark.rest
def test_a_virtual_merge_is_a_file(store: Store, place: Path) -> None:
    """A merge whose weights are not stored is read like any other."""
    plan = store.plan(MergeRequest(base="base", experts=[("mixes/a", 0.5)], method="linear"))
    store.merge(plan, name="mixes/b", virtual=True)
    store.merge(plan, name="real")
    mount(store.path, "mixes/*", place, models=True)
    assert sorted(os.listdir(place / "mixes")) == ["a.safetensors", "b.safetensors"]
    assert (place / "mixes" / "b.safetensors").read_bytes() == bytes_of(store, "real")


def test_what_is_told_of_a_model_lies_beside_it(store: Store, tmp_path: Path) -> None:
    """Previews and texts of the file's stem are shown under the name of the ref, nothing else."""
    home = weights(tmp_path / "m" / "mix_v4.safetensors", 4).parent
    for end in (*BESIDE, ".vae.pt", ".preview.gif"):
        (home / f"mix_v4{end}").write_text(end)
    for other in ("README.md", "config.json", "other.png", "sub/mix_v4.png"):
        (home / other).parent.mkdir(exist_ok=True)
        (home / other).write_text(other)
    store.add(home, name="told/it", base=None)
    tree = folder_of(store, "told/*")
    assert walk(tree) == sorted(f"told/it{end}" for end in (*BESIDE, ".safetensors"))
    for end in BESIDE:
        file = tree.open(f"told/it{end}")
        assert b"".join(file.view.pieces(file.path, 0, file.size)) == end.encode()
        tree.release(file)


def test_several_models_are_files_of_a_folder(store: Store, tmp_path: Path) -> None:
    """Of a snapshot with several models each of one file is REF/MODEL, and that of its top REF."""
    home = sharded(tmp_path / "flux" / "transformer").parent
    for number, path in enumerate(("vae/diffusion_pytorch_model", "clip/model", "clip/model.fp16")):
        weights(home / f"{path}.safetensors", number)
    (home / "clip" / "model.json").write_text("{}")
    store.add(home, name="flux", base=None)
    weights(home / "model.safetensors", 9)
    store.add(home, name="x/flux", base=None)
    inside = ["clip.json", "clip.safetensors", "clip@fp16.safetensors", "vae.safetensors"]
    assert walk(folder_of(store, "flux")) == [f"flux/{name}" for name in inside]
    shown = [*(f"x/flux/{name}" for name in inside), "x/flux.safetensors"]
    assert walk(folder_of(store, "x/*")) == shown


def test_one_path_of_two_refs(store: Store, tmp_path: Path) -> None:
    """A path that two refs give is shown once, as that of the first by name."""
    home = weights(tmp_path / "m" / "m.safetensors", 4).parent
    for end in (".png", ".preview.png"):
        (home / f"m{end}").write_text(end)
    for name in ("a.preview", "a", "base.safetensors/x"):
        store.add(home, name=name, base=None)
    tree = folder_of(store)
    assert walk(tree).count("a.preview.png") == 1
    file = tree.open("a.preview.png")
    assert file.path == "m.preview.png"
    tree.release(file)
    # A folder with the name of a file is not found, and hides no file.
    assert not dict(tree.children(""))["base.safetensors"].is_directory
    with pytest.raises(NotFound):
        tree.entry("base.safetensors/x.safetensors")


def test_comfyui_sees_what_comes_moves_and_goes(store: Store, place: Path, tmp_path: Path) -> None:
    """A list that is kept while directories have their times is right without a remount."""
    mount(store.path, None, place, models=True)
    comfy = Comfy(place)
    assert comfy.listed() == ["base.safetensors", "mixes/a.safetensors", "v1.safetensors"]
    times = {path: path.stat().st_mtime_ns for path in (place, place / "mixes")}

    def has_changed(path: Path) -> bool:
        was, times[path] = times[path], path.stat().st_mtime_ns
        return times[path] > was

    store.add(weights(tmp_path / "b.safetensors", 2), name="mixes/b", base=None)
    await_that(lambda: "mixes/b.safetensors" in comfy.listed())
    assert has_changed(place / "mixes")
    assert not has_changed(place), "nothing came there"
    store.add(weights(tmp_path / "c.safetensors", 3), name="base", base=None)
    await_that(lambda: has_changed(place))
    assert not has_changed(place / "mixes")
    for name in ("mixes/a", "mixes/b"):
        store.remove(name)
    await_that(lambda: comfy.listed() == ["base.safetensors", "v1.safetensors"])
    assert has_changed(place)


@pytest.mark.rest
def test_the_time_of_a_file_is_that_of_its_snapshot(
    store: Store, place: Path, tmp_path: Path
) -> None:
    """A file has a new time when its ref moves, as A1111's cache of hashes needs it."""
    mount(store.path, "base", place, models=True)
    path = place / "base.safetensors"
    assert path.stat().st_mtime_ns == store.view("base").time_ns
    store.add(weights(tmp_path / "c.safetensors", 3), name="base", base=None)
    await_that(lambda: path.stat().st_mtime_ns == store.view("base").time_ns)


def test_an_open_file_keeps_its_bytes(store: Store, place: Path, tmp_path: Path) -> None:
    """A file that is open stays what it is when its ref moves; opened after that, it is the new
    one, also if it was called otherwise, and back again."""
    mount(store.path, None, place, models=True)
    path = place / "base.safetensors"
    old = path.read_bytes()
    before = store["base"].id
    store.add(weights(tmp_path / "other_name.safetensors", 3), name="base", base=None)
    new = bytes_of(store, "base")
    assert len(new) == len(old) != 0
    await_that(lambda: path.read_bytes() == new)
    with path.open("rb") as file:
        store.reset("base", str(before))
        await_that(lambda: (place / "v1.safetensors").stat().st_size == len(old))
        time.sleep(0.2)
        assert file.read() == new
        was = place.stat().st_mtime_ns
    # What was kept for the open file has moved now.
    await_that(lambda: path.read_bytes() == old)
    await_that(lambda: place.stat().st_mtime_ns > was)


def test_each_snapshot_is_looked_at_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the store reads the snapshots that are new, not those that are known; and what a
    file takes at rest is counted once, however many there are."""
    views: list[object] = []
    view = store.view
    monkeypatch.setattr(store, "view", lambda revision: views.append(revision) or view(revision))
    tree = FolderTree(store, EVERY, ModelFolder(), AboutStore(store))
    walk(tree)
    assert len(views) == len(set(store.ref_ids().values()))
    views.clear()
    store.tag("v2", "base")
    new = store.add(weights(tmp_path / "b.safetensors", 2), name="mixes/b", base=None).snapshot
    assert "mixes/b.safetensors" in walk(tree)
    assert views == [new]
    tree.stored("mixes/b.safetensors")
    tree._trees.clear()
    views.clear()
    tree.stored("mixes/b.safetensors")
    assert views == []


@dataclass
class Hostile:
    """A store in memory with one snapshot, whose files a manifest from elsewhere names."""

    paths: list[str]

    def view(self, revision: str) -> Any:
        named = {path: SimpleNamespace(files=(path,)) for path in self.paths}
        sizes = dict.fromkeys(self.paths, 1)
        models = SimpleNamespace(named=named)
        return SimpleNamespace(id=revision, files=sizes, time_ns=1, models=models)

    def ref_ids(self) -> dict[str, str]:
        return {"x": "a" * 64}

    def generation(self) -> int:
        return 1


def test_names_that_no_folder_has(caplog: pytest.LogCaptureFixture) -> None:
    """A snapshot with paths that lead out of it is left out, and so is a name that is too long."""
    source: Any = Hostile(["a.safetensors", "../b.safetensors"])
    assert walk(folder_of(source)) == []
    assert "x is not shown" in caplog.text
    source = Hostile(["a.safetensors", "b" * 240 + ".safetensors"])
    assert walk(folder_of(source)) == ["x/a.safetensors.safetensors"]


def test_what_is_refused(store: Store, place: Path) -> None:
    """Options that say nothing about models, and a driver that cannot show them."""
    for options, what in (
        ({"follow": True}, "a mount of models follows all"),
        ({"served_base": "x"}, "only the configs of adapters"),
        ({"show_meta": True}, "no directories of snapshots"),
        ({"driver": "erofs"}, "not the models"),
        ({"adapters": True}, "not both"),
    ):
        with pytest.raises(BadRequest, match=what):
            mount(store.path, "*", place, models=True, **options)  # type: ignore[arg-type]


def test_from_the_command_line(store: Store, place: Path) -> None:
    """`--models` takes a directory, or a pattern and a directory, and says how to use it."""
    program = Program(store.path)
    done = program.succeed("mount", "--models", "mixes/*", place)
    assert f"--ckpt-dir {place}" in done.out
    assert list(files_of(place)) == ["mixes/a.safetensors"]
    assert "models mixes/*" in program("mounts").out
    for wrong in (("--models", "--all", place), ("--models", "--adapters", place), ("--models",)):
        assert program("mount", *wrong).status == 2
