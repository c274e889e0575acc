"""Conversion: pickled weights as safetensors, in a child that can do little harm."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest
from conversion_here import convert_here
from later import Later

import mstore
from mstore.checkpoint import conversion
from mstore.checkpoint.conversion import (
    Conversion,
    ConversionLimits,
    convert,
    safetensors_path,
)
from mstore.checkpoint.directory import scan
from mstore.terms.errors import BadCheckpoint, Unavailable

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch makes what is converted")
torch = Later("torch")
safetensors_torch = Later("safetensors.torch")
T = TypeVar("T")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def converted(model: Path, scratch: Path, **limits: int) -> Conversion:
    return convert(model, scratch, limits=ConversionLimits(**limits))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing starts a child.

    The child itself is what `family` and the tests of its limits and of its end start.
    """
    convert_here(monkeypatch)


def refusal(model: Path, scratch: Path, **limits: int) -> BadCheckpoint:
    with pytest.raises(BadCheckpoint) as refused:
        converted(model, scratch, **limits)
    return refused.value


def every_tensor() -> dict[str, Any]:
    """Views, tied and strided tensors, odd shapes, and every dtype that both sides have."""
    tied = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    tensors = {
        "embed": tied,
        "head": tied,
        "transposed": tied.T,
        "column": torch.arange(12.0).reshape(3, 4)[:, 1],
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float16)),
        "ünïcödé": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
    }
    for name in ("float64", "int64", "int32", "int16", "int8", "uint8", "uint16", "float8_e5m2"):
        tensors[name] = torch.ones(3).to(getattr(torch, name))
    return tensors


@dataclass(frozen=True)
class Family:
    """A directory of pickles of every kind, and what one child made of it."""

    model: Path
    done: Conversion

    def made(self, folder: str) -> dict[str, Path]:
        """What stands in for the pickles of a folder."""
        replaced = self.done.replacement.made.items()
        return {path: file for path, file in replaced if path.startswith(f"{folder}/")}

    def remarks(self, folder: str) -> list[str]:
        return [
            remark.replace(f"{folder}/", "") for remark in self.done.remarks if folder in remark
        ]

    def scanned(self, folder: str) -> list[str]:
        """The files of a folder, as they are added."""
        files = scan(self.model, replacement=self.done.replacement).files
        return [file.path for file in files if file.path.startswith(f"{folder}/")]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """One child for all: each imports torch first."""
    model = tmp_path_factory.mktemp("family")
    for archive in (True, False):
        folder = model / f"archive={archive}"
        folder.mkdir()
        torch.save(
            pickled(archive),
            folder / "pytorch_model.bin",
            _use_new_zipfile_serialization=archive,
        )
    # One, or they would be several models.
    (model / "archive=True" / "config.json").write_text("{}")
    (model / "shards").mkdir()
    weight_map = {}
    for number in (1, 2):
        shard = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({f"t{number}": torch.full((4,), float(number))}, model / "shards" / shard)
        weight_map[f"t{number}"] = shard
    index = {"metadata": {"total_size": 32}, "weight_map": weight_map}
    (model / "shards" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    trained = model / "trained"
    (trained / "sub").mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, trained / "sub" / "adapter_model.bin")
    torch.save({"a": torch.ones(2)}, trained / "pytorch_model.bin")
    safetensors_torch.save_file({"a": torch.ones(2)}, trained / "model.safetensors")
    torch.save({"state": 1}, trained / "optimizer.pt")
    torch.save({"state": 1}, trained / "rng_state_0.pth")
    (trained / "vocab.bin").write_bytes(b"no pickle")
    (model / "within").mkdir()
    whole = {"state_dict": {"a": torch.ones(2)}, "epoch": 3, "optimizer": {}}
    torch.save(whole, model / "within" / "last.ckpt")
    return Family(model, converted(model, tmp_path_factory.mktemp("scratch")))


def pickled(archive: bool) -> dict[str, Any]:
    """What a form of pickle can hold."""
    tensors = every_tensor()
    if not archive:
        # torch itself does not read these from the older form.
        del tensors["uint16"], tensors["float8_e5m2"]
    return tensors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("archive", [True, False])
def test_the_file_is_what_safetensors_would_write(family: Family, archive: bool) -> None:
    """Of either form of pickle comes, byte for byte, the file of the format's own library."""
    folder = f"archive={archive}"
    tensors = pickled(archive)
    assert f"{folder}/pytorch_model.bin" in family.done.replacement.gone
    (path, made), *rest = family.made(folder).items()
    assert (path, rest) == (f"{folder}/model.safetensors", [])
    plain = {name: t.detach().clone().resolve_conj().contiguous() for name, t in tensors.items()}
    assert made.read_bytes() == safetensors_torch.save(plain, metadata={"format": "pt"})
    assert family.remarks(folder) == [
        f"converted pytorch_model.bin to model.safetensors: {len(tensors)} tensors"
    ]
    others = [f"{folder}/config.json"] if archive else []
    assert family.scanned(folder) == [*others, f"{folder}/model.safetensors"]


def test_shards_and_their_index(family: Family) -> None:
    """Shards become shards, and the index names them as transformers expects; scan accepts it."""
    assert family.scanned("shards") == [
        "shards/model-00001-of-00002.safetensors",
        "shards/model-00002-of-00002.safetensors",
        "shards/model.safetensors.index.json",
    ]
    written = json.loads(family.made("shards")["shards/model.safetensors.index.json"].read_text())
    assert written["weight_map"] == {
        "t1": "model-00001-of-00002.safetensors",
        "t2": "model-00002-of-00002.safetensors",
    }


def test_what_is_left_out_and_what_stays(family: Family) -> None:
    """Training state and pickles with a twin are left out and told; no pickle stays as it is."""
    assert family.scanned("trained") == [
        "trained/model.safetensors",
        "trained/sub/adapter_model.safetensors",
        "trained/vocab.bin",
    ]
    assert family.remarks("trained") == [
        "left out optimizer.pt: it is of training, not weights",
        "left out pytorch_model.bin: model.safetensors is there",
        "left out rng_state_0.pth: it is of training, not weights",
        "converted sub/adapter_model.bin to sub/adapter_model.safetensors: 1 tensor",
    ]


def test_a_state_dict_within(family: Family) -> None:
    """Of a training checkpoint the state_dict is taken; what stood beside it is told."""
    assert set(family.made("within")) == {"within/last.safetensors"}
    assert family.remarks("within") == [
        "converted last.ckpt to last.safetensors: 1 tensor",
        "left out of last.ckpt: 'epoch', 'optimizer'",
    ]


@pytest.mark.parametrize(
    ("pickled", "named"),
    [
        ("pytorch_model.bin", "model.safetensors"),
        ("a/pytorch_model-00001-of-00002.bin", "a/model-00001-of-00002.safetensors"),
        ("pytorch_model.fp16.bin", "model.fp16.safetensors"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
        ("pytorch_model.bin.index.json", "model.safetensors.index.json"),
        ("consolidated.00.pth", "consolidated.00.safetensors"),
    ],
)
def test_names(pickled: str, named: str) -> None:
    """The names are those under which transformers and diffusers look for safetensors."""
    assert safetensors_path(pickled) == named


class Evil:
    """Makes a file when it is unpickled without restraint."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self._mark}",)


def tar_of_pickles(mark: Path) -> bytes:
    """The oldest form of torch.save: a tar archive, which old releases unpickle unrestrained."""
    import tarfile

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for name in ("storages", "tensors", "pickle"):
            content = pickle.dumps(Evil(mark))
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return raw.getvalue()


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["archive", "legacy", "bare", "tar"])
@pytest.mark.parametrize("forced", [True, False])
def test_a_hostile_pickle_runs_nothing(
    tmp_path: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    form: str,
    forced: bool,
) -> None:
    """A pickle that would run a command is refused and does not run it, whatever torch is told."""
    if (form, forced) != ("archive", True):
        # That one is for a child.
        request.getfixturevalue("in_process")
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark = tmp_path / "ran"
    model = tmp_path / "model"
    model.mkdir()
    path = model / "pytorch_model.bin"
    if form in ("archive", "legacy"):
        torch.save({"a": Evil(mark)}, path, _use_new_zipfile_serialization=form == "archive")
    elif form == "bare":
        path.write_bytes(pickle.dumps({"a": Evil(mark)}))
    else:
        path.write_bytes(tar_of_pickles(mark))
    refused = refusal(model, scratch)
    assert refused.where in (str(path), str(model))
    # How to be harmed after all is not for this program to say.
    assert "weights_only" not in str(refused)
    if form in ("archive", "legacy"):
        assert "wants to load posix.system, which is no tensor" in refused.what
        assert refused.hint is not None
    assert not mark.exists()
    # The pickle is one: without restraint it does run.
    if form == "bare":
        pickle.loads(path.read_bytes())
        assert mark.exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([1, 2], "holds a list"),
        ({"a": "text"}, "holds a str under 'a'"),
        ({1: "text"}, "which is not text"),
        (lambda: {"a": torch.eye(3).to_sparse()}, "sparse"),
    ],
)
@pytest.mark.usefixtures("in_process")
def test_what_is_not_tensors_by_name_is_refused(
    tmp_path: Path, scratch: Path, content: Any, problem: str
) -> None:
    """A pickle of anything but dense tensors under names is refused by its path."""
    path = tmp_path / "x.pt"
    torch.save(content() if callable(content) else content, path)
    refused = refusal(path, scratch)
    assert problem in refused.what
    assert refused.where == str(path)


@pytest.mark.usefixtures("in_process")
def test_a_truncated_file_is_refused(tmp_path: Path, scratch: Path) -> None:
    """A file cut short is an error that names it."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:3000])
    assert refusal(path, scratch).where == str(path)


@pytest.mark.usefixtures("in_process")
def test_a_tensor_that_grows_is_refused(tmp_path: Path, scratch: Path) -> None:
    """A few bytes that claim to be terabytes (no stride) are refused before they are laid out."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1).expand(1 << 40)}, path)
    refused = refusal(path, scratch)
    assert "the limit" in refused.what
    assert refused.hint is not None
    assert not list(scratch.glob("*.safetensors"))


def bomb(path: Path, size: int) -> None:
    """A torch archive whose pickle is deflated from `size` zeros."""
    raw = io.BytesIO()
    torch.save({"a": torch.ones(1)}, raw)
    with zipfile.ZipFile(raw) as sound, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name in sound.namelist():
            if not name.endswith("data.pkl"):
                made.writestr(name, sound.read(name), zipfile.ZIP_STORED)
                continue
            with made.open(name, "w", force_zip64=True) as file:
                for _ in range(size >> 20):
                    file.write(bytes(1 << 20))


@pytest.mark.rest
def test_a_bomb_ends_at_the_limit_of_memory(tmp_path: Path, scratch: Path) -> None:
    """A pickle that unpacks to more memory than is allowed ends in an error that says so."""
    path = tmp_path / "x.pt"
    bomb(path, 200 << 20)
    refused = refusal(path, scratch, memory=128 << 20)
    assert "memory" in refused.what
    assert refused.where == str(path)


@pytest.mark.rest
def test_time_has_a_limit(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that does not end is killed after its time, and the error says so."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1)}, path)
    endless = tmp_path / "endless.py"
    endless.write_text("import time\nwhile True: time.sleep(1)\n")
    monkeypatch.setattr(conversion, "PROGRAM", endless)
    assert "longer than the limit of 1 seconds" in refusal(path, scratch, seconds=1).what
    busy = tmp_path / "busy.py"
    # As the kernel ends what has used up RLIMIT_CPU.
    busy.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)\n")
    monkeypatch.setattr(conversion, "PROGRAM", busy)
    assert "processor time" in refusal(path, scratch, seconds=30).what


def test_without_torch_the_hint_installs_it(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch cannot be imported, the error names the command that installs it."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1)}, path)
    # -S: without site-packages, as where torch was never installed.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(Unavailable, match="torch") as refused:
        converted(path, scratch)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("pip install")


def test_nothing_to_convert_is_an_error(tmp_path: Path, scratch: Path) -> None:
    """A directory with neither safetensors nor a pickle of torch's is refused."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "x.bin").write_bytes(b"no pickle")
    assert "no weights" in refusal(tmp_path / "model", scratch).what


def test_two_of_one_name_are_refused(tmp_path: Path, scratch: Path) -> None:
    """Two pickles that would become one file are refused, naming both."""
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "x.bin")
    assert "'x.bin' and 'x.pt' would both become 'x.safetensors'" in refusal(tmp_path, scratch).what


# In a store


def leftovers(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "tmp").iterdir())


@pytest.mark.usefixtures("in_process")
def test_what_is_added_is_what_was_converted(tmp_path: Path) -> None:
    """`add` with conversion stores the safetensors and the other files, and leaves tmp/ empty."""
    model = tmp_path / "model"
    model.mkdir()
    torch.save({"a": torch.arange(5.0)}, model / "pytorch_model.bin")
    (model / "config.json").write_text("{}")
    with mstore.Store.init(tmp_path / "store") as store:
        report = store.add(model, name="m", convert=ConversionLimits())
        assert store["m"].tensor("a").tolist() == [0, 1, 2, 3, 4]
        assert [file.path for file in store.files("m")] == ["config.json", "model.safetensors"]
        assert report.remarks == ("converted pytorch_model.bin to model.safetensors: 1 tensor",)
        again = store.add(model, name="m", convert=ConversionLimits())
        assert not again.new_snapshot
        assert leftovers(store.path) == []


@pytest.mark.usefixtures("in_process")
def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    """After an error, which names what is no tensor, neither a ref nor a file is left."""
    torch.save({"a": torch.ones(1), "b": "text"}, tmp_path / "x.pt")
    with mstore.Store.init(tmp_path / "store") as store:
        with pytest.raises(BadCheckpoint, match="holds a str under 'b'"):
            store.add(tmp_path / "x.pt", name="m", convert=ConversionLimits())
        assert store._catalog.refs() == {}
        assert leftovers(store.path) == []


def children(pid: int) -> list[int]:
    """The processes that `pid` started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def waited(look: Callable[[], T], what: str) -> T:
    """What `look` gives as soon as that is something."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        found = look()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(what)


def test_a_killed_child_leaves_nothing(tmp_path: Path) -> None:
    """Killing the child ends the add with an error that says so; nothing is left behind."""
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    me = os.getpid()
    before = set(children(me))

    def kill() -> None:
        new = waited(lambda: set(children(me)) - before, "no child came")
        os.kill(new.pop(), signal.SIGKILL)

    with mstore.Store.init(tmp_path / "store") as store:
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(BadCheckpoint, match="was killed"):
            store.add(tmp_path / "x.pt", name="m", convert=ConversionLimits())
        killer.join()
        assert store._catalog.refs() == {}
        assert leftovers(store.path) == []


def has_ended(status: Path) -> bool:
    """Whether the process of this /proc/PID/status is gone, or waits to be buried."""
    try:
        return "State:\tZ" in status.read_text()
    except OSError:
        return True


SLOW = """
import importlib.util, time
spec = importlib.util.spec_from_file_location("program", {program!r})
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
program.run = lambda request: time.sleep(600)
program.main()
"""
PARENT = """
import pathlib, sys, mstore
from mstore.checkpoint import conversion
conversion.PROGRAM = pathlib.Path(sys.argv[3])
with mstore.Store.open(sys.argv[1]) as store:
    store.add(sys.argv[2], name="m", convert=conversion.ConversionLimits())
"""


@pytest.mark.rest
def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed takes the child along; the next writer removes what they left."""
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    with mstore.Store.init(tmp_path / "store"):
        pass
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW.format(program=str(conversion.PROGRAM)))
    arguments = [str(tmp_path / "store"), str(tmp_path / "x.pt"), str(slow)]
    with subprocess.Popen([sys.executable, "-c", PARENT, *arguments]) as parent:
        (child,) = waited(lambda: children(parent.pid), "no child came")
        status = Path(f"/proc/{child}/status")
        waited(lambda: "NoNewPrivs:\t1" in status.read_text(), "the child was not confined")
        parent.kill()
    waited(lambda: has_ended(status), "the child lives on")
    assert leftovers(tmp_path / "store")
    (tmp_path / "other").mkdir()
    safetensors_torch.save_file({"b": torch.ones(1)}, tmp_path / "other" / "x.safetensors")
    with mstore.Store.open(tmp_path / "store") as store:
        store.add(tmp_path / "other", name="other")
        assert leftovers(store.path) == []
        assert set(store._catalog.refs()) == {"other"}


@pytest.mark.rest
def test_nothing_imports_the_child(tmp_path: Path) -> None:
    """A child converts what is added; the library never loads its program, nor torch, into its own
    process."""
    torch.save({"a": torch.arange(5.0)}, tmp_path / "x.pt")
    program = (
        "import sys, mstore\n"
        "from mstore.checkpoint.conversion import ConversionLimits\n"
        "with mstore.Store.init(sys.argv[1]) as store:\n"
        "    store.add(sys.argv[2], name='m', convert=ConversionLimits())\n"
        "    assert store['m'].tensor('a').tolist() == [0, 1, 2, 3, 4]\n"
        "assert not {'torch', 'mstore.checkpoint.conversion_program'} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store"), str(tmp_path / "x.pt")]
    subprocess.run(command, check=True)
    assert leftovers(tmp_path / "store") == []
