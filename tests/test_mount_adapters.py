"""`mount --adapters`: the adapters of a store as vLLM and LoRAX look for them, by real mounts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import Adapter
from cli_runs import Program
from mount_drivers import on_disk
from small_models import files_of, small_model

from mstore import Store
from mstore.terms.errors import BadRequest, Corrupt, Unavailable
from mstore_fuse.driver import EVERY
from mstore_fuse.folders import AdapterFolder, FolderTree
from mstore_fuse.fuse_driver import require_fuse
from mstore_fuse.mounts import mount, mounts, unmount
from mstore_fuse.tree import NOTHING

tmp_path_factory = on_disk

try:
    require_fuse()
except Unavailable as missing:
    pytest.skip(f"cannot mount: {missing}", allow_module_level=True)

BASE = "/mnt/base"
"""The name by which an engine serves the base."""


def adapter(seed: int, **settings: object) -> Adapter:
    draw = np.random.default_rng(seed)
    up, down = draw.standard_normal((8, 2)), draw.standard_normal((2, 8))
    factors = {"model.layers.0.self_attn.q_proj": (up.astype("f4"), down.astype("f4"))}
    return Adapter(factors, settings={"base_model_name_or_path": "org/base", **settings})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Adapters `loras/math`, `loras/code` and `other`, a tag of one, and what is no adapter."""
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for seed, name in enumerate(("loras/math", "loras/code", "other")):
            store.add(adapter(seed).write(tmp_path / str(seed)), name=name, base=None)
        small_model(tmp_path / "plain", "plain")
        store.add(tmp_path / "plain", name="loras/plain", base=None)
        store.tag("v1", "other")
        yield store


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory; what is mounted there ends with the test."""
    made = tmp_path / "mnt"
    made.mkdir()
    yield made
    if os.path.ismount(made):
        unmount(made, lazy=True)


def found_by_vllm(directory: Path, name: str, base: str) -> Path | None:
    """The directory that vLLM's `lora_filesystem_resolver` takes for a model of this name.

    As in the source of vLLM 0.33: NAME below the directory, with a config that names this base.
    """
    path = Path(os.path.realpath(directory / name))
    config = path / "adapter_config.json"
    if not path.is_relative_to(directory) or not config.exists():
        return None
    fields = json.loads(config.read_text())
    is_it = fields["peft_type"] == "LORA" and fields["base_model_name_or_path"] == base
    return path if is_it else None


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_adapters_by_the_names_of_their_refs(store: Store, place: Path) -> None:
    """Branches and tags that are adapters are shown with all their bytes, and nothing else is."""
    mount(store.path, None, place, adapters=True)
    names = ("loras/math", "loras/code", "other", "v1")
    expected = {
        f"{name}/{file.path}": store[name].read(file.path)
        for name in names
        for file in store[name].files()
    }
    assert files_of(place) == expected
    assert sorted(os.listdir(place)) == ["loras", "other", "v1"]
    assert [one.revision for one in mounts() if one.mountpoint == place] == ["adapters *"]


@pytest.mark.rest
def test_vllm_finds_them(store: Store, place: Path) -> None:
    """The configs name the base as it is served: vLLM's resolver takes each by its ref's name."""
    mount(store.path, "loras/*", place, adapters=True, served_base=BASE)
    assert os.listdir(place) == ["loras"]
    for name in ("loras/math", "loras/code"):
        assert found_by_vllm(place, name, BASE) == place / name
    for name in ("loras/plain", "loras", "other", "../store"):
        assert found_by_vllm(place, name, BASE) is None
    config = place / "loras" / "math" / "adapter_config.json"
    own = json.loads(store["loras/math"].read("adapter_config.json"))
    assert json.loads(config.read_text()) == {**own, "base_model_name_or_path": BASE}
    assert config.stat().st_size == len(config.read_bytes())
    # Only the config differs, and its label does not say that it has the content of the snapshot.
    weights = place / "loras" / "math" / "adapter_model.safetensors"
    assert weights.read_bytes() == store["loras/math"].read("adapter_model.safetensors")
    assert b"user.mstore.file" not in {os.fsencode(one) for one in os.listxattr(config)}
    assert "user.mstore.file" in os.listxattr(weights)
    assert os.getxattr(config, "user.mstore.ref") == b"loras/math"


@pytest.mark.rest
def test_without_a_served_base_configs_stay(store: Store, place: Path) -> None:
    """The configs are as they were added, so vLLM's resolver takes them for their own base."""
    mount(store.path, None, place, adapters=True)
    assert found_by_vllm(place, "other", BASE) is None
    assert found_by_vllm(place, "other", "org/base") == place / "other"


@pytest.mark.rest
def test_refs_come_and_go(store: Store, place: Path, tmp_path: Path) -> None:
    """A new adapter is found at once, a moved one changes, a removed one is gone; no remount."""
    mount(store.path, "loras/*", place, adapters=True, served_base=BASE)
    assert found_by_vllm(place, "loras/new", BASE) is None
    store.add(adapter(7, r=2).write(tmp_path / "new"), name="loras/new", base=None)
    assert found_by_vllm(place, "loras/new", BASE) == place / "loras" / "new"
    store.add(adapter(8, r=2).write(tmp_path / "newer"), name="loras/new", base=None)
    weights = place / "loras" / "new" / "adapter_model.safetensors"
    newer = (tmp_path / "newer" / weights.name).read_bytes()
    # A name that is there may be a tenth of a second old.
    await_that(lambda: weights.read_bytes() == newer)
    store.remove("loras/code")
    await_that(lambda: not (place / "loras" / "code").exists())
    assert found_by_vllm(place, "loras/code", BASE) is None
    assert sorted(os.listdir(place / "loras")) == ["math", "new"]


@pytest.mark.rest
def test_one_that_cannot_be_read_hides_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ref whose snapshot is damaged is left out, and the log says so."""
    lost, view = store["other"].id, store.view

    def damaged(revision: Any) -> Any:
        if revision == lost:
            raise Corrupt("flipped", where="a manifest")
        return view(revision)

    monkeypatch.setattr(store, "view", damaged)
    tree = FolderTree(store, EVERY, AdapterFolder(None), NOTHING)
    assert [name for name, _ in tree.children("")] == ["loras"]
    assert [name for name, _ in tree.children("loras")] == ["code", "math"]
    assert "other is not shown: a manifest: flipped" in caplog.text


@pytest.mark.rest
def test_an_odd_config_is_shown_as_it_is(store: Store, place: Path, tmp_path: Path) -> None:
    """A config that is no JSON object is not rewritten."""
    for name, text in (("list", "[1]"), ("torn", "{")):
        directory = adapter(4).write(tmp_path / name)
        (directory / "adapter_config.json").write_text(text)
        store.add(directory, name=name, base=None)
    mount(store.path, None, place, adapters=True, served_base=BASE)
    assert (place / "list" / "adapter_config.json").read_text() == "[1]"
    assert (place / "torn" / "adapter_config.json").read_text() == "{"


def test_what_is_refused(store: Store, place: Path) -> None:
    """Options that say nothing about adapters, and a driver that cannot show them."""
    for options, what in (
        ({"adapters": True, "follow": True}, "follows all"),
        ({"served_base": "x"}, "only the configs of adapters"),
        ({"adapters": True, "driver": "erofs"}, "not the adapters"),
    ):
        with pytest.raises(BadRequest, match=what):
            mount(store.path, "*", place, **options)  # type: ignore[arg-type]


def test_from_the_command_line(store: Store, place: Path) -> None:
    """`--adapters` takes a directory, or a pattern and a directory, and says what vLLM needs."""
    program = Program(store.path)
    for words in (["loras/*", place], [place]):
        done = program.succeed("mount", "--adapters", *words, "--served-base", BASE)
        assert f"VLLM_LORA_RESOLVER_CACHE_DIR={place}" in done.out
        assert found_by_vllm(place, "loras/math", BASE)
        assert ("other" in os.listdir(place)) == (len(words) == 1)
        assert f"adapters {words[0] if len(words) == 2 else '*'}" in program("mounts").out
        unmount(place)
    assert program("mount", "--adapters", "--all", place).status == 2
