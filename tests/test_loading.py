"""Real readers on real mounts: what transformers computes from a mount is what it computes
from the original directory."""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from adapters import Adapter
from checkpoints import every_dtype_checkpoint
from family_fixture import family
from later import Later
from safetensors import safe_open

from mstore import MergeRequest, Store
from mstore_fuse.mounts import mount, unmount

pytest_plugins = ["family_fixture"]

torch = Later("torch")
safetensors_torch = Later("safetensors.torch")
transformers = Later("transformers")

# That a mount shows what was added, to programs and to safetensors, is proved by tests of mounts;
# that transformers loads it, by test_mount_transformers.
pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="no FUSE here"),
]
PROMPT = "def add(a, b): return"


@pytest.fixture(scope="module")
def stored(
    quick_family: family.Family, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Path]]:
    """A store with every member of the trained family and the hand-made checkpoint."""
    root = tmp_path_factory.mktemp("loading")
    sources = {"base": quick_family.base, **quick_family.experts}
    with Store.init(root / "store", block_size=1 << 16) as store:
        for name, path in sources.items():
            store.add(path, name=name, base=None if name == "base" else "base")
        odd = every_dtype_checkpoint(root / "odd")
        store.add(odd, name="odd")
        plan = store.plan(
            MergeRequest(
                base="base",
                experts=list(quick_family.experts),
                method="ties",
                parameters={"density": 0.5},
            )
        )
        store.merge(plan, name="merged")
        store.checkout("merged", root / "merged")
    return root / "store", sources | {"odd": odd, "merged": root / "merged"}


@pytest.fixture
def point(tmp_path: Path) -> Iterator[Path]:
    """An empty directory that is no mount any more afterwards."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    if os.path.ismount(path):
        unmount(path)


MEMBERS = ("base", "code", "prose", "arithmetic", "merged", "odd")


@pytest.mark.parametrize("name", MEMBERS)
def test_every_file_is_the_same(
    stored: tuple[Path, dict[str, Path]], point: Path, tmp_path: Path, name: str
) -> None:
    """Checkout and mount of each member have exactly the original's files, byte for byte."""
    store, sources = stored
    with Store.open(store) as opened:
        opened.checkout(name, tmp_path / "out")
    mount(store, name, point)
    wanted = sorted(p.relative_to(sources[name]) for p in sources[name].rglob("*") if p.is_file())
    assert wanted
    for copy in (tmp_path / "out", point):
        found = sorted(p.relative_to(copy) for p in copy.rglob("*") if p.is_file())
        assert found == wanted
        for path in wanted:
            assert filecmp.cmp(copy / path, sources[name] / path, shallow=False), path


def logits(directory: Path) -> torch.Tensor:
    """Next-token logits of one prompt, in the checkpoint's own dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    with torch.inference_mode():
        output: torch.Tensor = model(**tokenizer(PROMPT, return_tensors="pt")).logits
    return output


@pytest.mark.parametrize("name", ["base", "code", "prose", "arithmetic", "merged"])
def test_logits_are_the_same(stored: tuple[Path, dict[str, Path]], point: Path, name: str) -> None:
    """Logits from the mount equal those from the original directory, bit for bit."""
    store, sources = stored
    mount(store, name, point)
    mounted, original = logits(point), logits(sources[name])
    assert mounted.dtype == original.dtype
    assert torch.equal(mounted, original)
    assert not torch.equal(mounted, torch.zeros_like(mounted))


def test_an_applied_adapter_generates_from_a_mount(
    stored: tuple[Path, dict[str, Path]], point: Path, tmp_path: Path
) -> None:
    """A virtual merge of one adapter stores no block of weights, and loads like its checkout."""
    store, sources = stored
    base, tuned = (
        {
            name: value.float().numpy()
            for shard in sorted(sources[member].glob("*.safetensors"))
            for name, value in safetensors_torch.load_file(shard).items()
        }
        for member in ("base", "code")
    )
    factors = {}
    for name, value in base.items():
        if value.ndim == 2 and "layers" in name:
            left, sizes, right = np.linalg.svd(tuned[name] - value, full_matrices=False)
            factors[name.removesuffix(".weight")] = (left[:, :8] * sizes[:8], right[:8])
    Adapter(factors, settings={"r": 8, "lora_alpha": 8}).write(tmp_path / "lora")
    with Store.open(store) as opened:
        opened.add(tmp_path / "lora", name="lora", base="base")
        plan = opened.plan(MergeRequest(base="base", experts=["lora"], method="task_arithmetic"))
        written = opened.merge(plan, name="applied", virtual=True).bytes_written
        assert written < 0.02 * sum(value.nbytes for value in base.values())
        opened.merge(plan, name="real")
        opened.checkout("real", tmp_path / "real")
    mount(store, "applied", point)
    mounted = logits(point)
    assert torch.equal(mounted, logits(tmp_path / "real"))
    assert not torch.equal(mounted, logits(sources["base"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(point)
    tokenizer = transformers.AutoTokenizer.from_pretrained(point)
    told = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=8)
    assert len(told[0]) > len(tokenizer(PROMPT)["input_ids"])


def test_a_stack_generates_from_a_mount(stored: tuple[Path, dict[str, Path]], point: Path) -> None:
    """Layers of two trained models make one that loads and generates, and store no weights."""
    store, sources = stored
    config = json.loads((sources["base"] / "config.json").read_text())
    layers = config["num_hidden_layers"]
    runs = [("base", 0, layers), ("code", 0, layers), ("prose", layers - 1, layers)]
    with Store.open(store) as opened:
        plan = opened.plan(
            MergeRequest(base="base", experts=["code", "prose"], method="passthrough", layers=runs)
        )
        written = opened.merge(plan, name="tall").bytes_written
        plain = opened.show("tall").plain_bytes
    assert written <= 0.02 * plain
    mount(store, "tall", point)
    model = transformers.AutoModelForCausalLM.from_pretrained(point)
    assert model.config.num_hidden_layers == 2 * layers + 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(point)
    told = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=8)
    assert len(told[0]) > len(tokenizer(PROMPT)["input_ids"])


def test_safe_open_maps_the_mount(stored: tuple[Path, dict[str, Path]], point: Path) -> None:
    """safetensors' own reader maps every shard of a mount and finds every tensor."""
    store, sources = stored
    mount(store, "merged", point)
    for shard in sorted(sources["merged"].glob("*.safetensors")):
        with safe_open(point / shard.name, "pt") as ours, safe_open(shard, "pt") as theirs:
            assert set(ours.keys()) == set(theirs.keys())
            for name in theirs.keys():  # noqa: SIM118 - safe_open is no mapping
                assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name))
