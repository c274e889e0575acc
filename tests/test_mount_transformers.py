"""transformers' own loader on every kind of mount, again and again: equal weights, and no hang.

It loads tensors with a pool of threads, whose page faults of one map meet in the mount.  On mounts
that serve themselves, or whose server needs what the reader holds, that has ended in deadlocks
(transformers#45547); ours is served by a process of its own that needs nothing of the reader.

The loader is a process that all tests share: it imports transformers once, and a hang ends there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from later import Later
from mount_drivers import Driver, Mount, drop_pages, files_below, on_disk

pytestmark = pytest.mark.rest

pytest_plugins = ["mount_drivers"]
tmp_path_factory = on_disk

torch = Later("torch")
transformers = Later("transformers")

PATIENCE = 300.0
"""Seconds for one line of the loader, on a machine that is much too busy."""
THREADS = 8
KINDS = ("sharded", "tied", "adapter")


# -- the loader ---------------------------------------------------------------------------------


def loader() -> None:
    """Obey lines of JSON: a function of this module and its arguments; answer each with its
    result."""
    from transformers import core_model_loading

    core_model_loading.GLOBAL_WORKERS = THREADS
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    answers = os.dup(1)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            answer = globals()[name](*arguments)
        os.write(answers, json.dumps(answer).encode() + b"\n")


def write(root: str) -> None:
    """Make the models: several shards, tied embeddings, and an adapter of the first."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1500,
    }  # fmt: skip
    for name, tied in (("sharded", False), ("tied", True)):
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=tied, dtype="bfloat16")
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(Path(root, name), max_shard_size="500KB" if not tied else "50MB")
    from safetensors.torch import save_file

    adapter = Path(root, "adapter")
    adapter.mkdir()
    told = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "sharded",
        "target_modules": ["up_proj"],
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(told))
    weights = {
        f"base_model.model.model.layers.{layer}.mlp.up_proj.lora_{side}.weight": torch.randn(shape)
        for layer in range(4)
        for side, shape in (("A", (8, 128)), ("B", (256, 8)))
    }
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})


def weights(folder: Path) -> dict[str, Any]:
    """Every weight that transformers finds."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return {name: value.detach() for name, value in model.state_dict().items()}


def adapted(base: Path, adapter: Path) -> dict[str, Any]:
    """The base with the products of an adapter added, as PEFT merges them."""
    from safetensors import safe_open

    found = weights(base)
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            if ".lora_A." in name:
                up, down = file.get_tensor(name.replace("lora_A", "lora_B")), file.get_tensor(name)
                target = name.removeprefix("base_model.model.").replace("lora_A.", "")
                found[target] = found[target] + 2 * (up @ down).to(found[target].dtype)
    return found


def rounds(number: int, kind: str, shown: str, original: str) -> dict[str, object]:
    """Load cold that often from a mount; what differed from the original, and the longest time."""

    def load(root: Path) -> dict[str, Any]:
        if kind == "adapter":
            return adapted(root / "sharded", root / "adapter")
        return weights(root / kind)

    wanted = load(Path(original))
    assert any(value.abs().sum() for value in wanted.values())
    different: list[str] = []
    longest = 0.0
    for _ in range(number):
        for path in files_below(Path(shown)):
            drop_pages(Path(shown, path))
        began = time.monotonic()
        found = load(Path(shown))
        equal = found.keys() == wanted.keys() and all(
            torch.equal(found[name], value) and found[name].dtype == value.dtype
            for name, value in wanted.items()
        )
        longest = max(longest, time.monotonic() - began)
        if not equal:
            different.append(str(found.keys() ^ wanted.keys()) or "values")
        del found
    return {"rounds": number, "different": different, "longest": longest}


# -- the tests ----------------------------------------------------------------------------------

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """`ask("rounds", ...)` calls a function of this module in the loader."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import test_mount_transformers as t; t.loader()"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told, answers = process.stdin, process.stdout

    def call(*line: object) -> Any:
        told.write(json.dumps(line).encode() + b"\n")
        told.flush()
        readable, _, _ = select.select([answers], [], [], PATIENCE)
        assert readable, f"{line[0]} hangs"
        return json.loads(answers.readline())

    yield call
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def models(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directories of the models."""
    root = tmp_path_factory.mktemp("models")
    ask("write", str(root))
    assert len(list((root / "sharded").glob("*.safetensors"))) > 3
    return root


@pytest.fixture(scope="module")
def shown(
    models: Path, driver: Driver, mounted: Mount, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A directory with a mount of each."""
    root = tmp_path_factory.mktemp("shown")
    with driver.store(root / "store") as store:
        for name in KINDS:
            store.add(models / name, name=name, base="sharded" if name == "adapter" else None)
    for name in KINDS:
        mounted(root / "store", name, root / "mnt" / name)
    return root / "mnt"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_load_equal_weights(ask: Ask, models: Path, shown: Path, kind: str) -> None:
    """A sharded model, one with tied embeddings, and an adapter on its base, loaded five times
    by eight threads from cold mounts: each time every weight is the original's."""
    told = ask("rounds", 5, kind, str(shown), str(models))
    assert (told["rounds"], told["different"]) == (5, [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_load_a_hundred_times(ask: Ask, models: Path, shown: Path, kind: str) -> None:
    """The same a hundred times, without a load of more than ten seconds."""
    told = ask("rounds", 100, kind, str(shown), str(models))
    assert (told["rounds"], told["different"]) == (100, [])
    assert told["longest"] < 10
