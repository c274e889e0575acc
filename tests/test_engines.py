"""vLLM and SGLang load models from a store.  The engines are stand-ins (`stand_ins`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_processes
import pytest
from engine_processes import ENGINES, ModelConfig, digest
from later import Later

from mstore import Store
from mstore.api.integrations import engines
from mstore.api.integrations.engines import StoredWeights
from mstore.store import leases
from mstore.terms.errors import BadRequest, Corrupt, MstoreError, NotFound

torch = Later("torch")
transformers = Later("transformers")

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two models: `m` in several shards, `other` of the same config."""
    root = tmp_path_factory.mktemp("engines")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with Store.init(root / "store", block_size=1 << 16) as store:
        for seed, name in enumerate(("m", "other")):
            torch.manual_seed(seed)
            model = transformers.LlamaForCausalLM(config)
            model.save_pretrained(root / name, max_shard_size="20KB")
            store.add(root / name, name=name, base=None)
        # As `mstore checkout` gives an engine its directory.
        store.checkout("m", root / "config", weights=False)
        yield store


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A path on which the engines are, and mstore's entry points, as pyproject.toml has them."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "path" / "mstore-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mstore\nVersion: 1.0\n")
    lines = [f"[{group}]\nmstore = {points[group]['mstore']}\n" for group in GROUPS]
    (info / "entry_points.txt").write_text("\n".join(lines))
    places = [str(info.parent), str(engine_processes.STAND_INS)]
    for one in reversed(places):
        monkeypatch.syspath_prepend(one)
    yield os.pathsep.join(places)
    # The next test has an engine that knows nothing yet.
    for name in list(sys.modules):
        if name.partition(".")[0] in ENGINES or name.rpartition(".")[2] in ENGINES:
            del sys.modules[name]


def told(store: Store, ref: str = "m") -> dict[str, Any]:
    return {"store": str(store.path), "ref": ref}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("plugins")
def test_the_model_of_the_directory(engine: str, store: Store) -> None:
    """An engine with a directory of small files gets the weights of a snapshot, in file order."""
    root = store.path.parent
    assert {*os.listdir(root / "config")} == {"config.json", "generation_config.json"}
    config = ModelConfig(str(root / "config"))
    model = ENGINES[engine](config, told(store))
    theirs = transformers.LlamaForCausalLM.from_pretrained(root / "m")
    assert digest(model.state_dict()) == digest(theirs.state_dict())
    assert config.order == store["m"].tensor_names()
    assert not leases.holds(store._catalog.layout)


@pytest.mark.rest
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks(engine: str, store: Store, plugins: str) -> None:
    """Each rank is a process that opens the store for itself, while others load."""
    line = [sys.executable, "-m", "engine_processes", engine, str(store.path.parent / "config")]
    path = os.pathsep.join((plugins, os.environ.get("PYTHONPATH", ""), str(ROOT / "tests")))
    ranks = [
        subprocess.Popen(
            [*line, json.dumps(told(store))],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    theirs = transformers.LlamaForCausalLM.from_pretrained(store.path.parent / "m").state_dict()
    answers = [rank.communicate()[0].split() for rank in ranks]
    assert answers == [[str(len(theirs)), digest(theirs)]] * 2


@pytest.mark.usefixtures("plugins")
def test_what_sglang_loads_itself(store: Store) -> None:
    """Without a store in its settings SGLang loads as before."""
    from sglang.srt.model_loader import loader as loaders
    from sglang.srt.plugins import load_plugins

    load_plugins()
    config = engine_processes.LoadConfig({"num_threads": 2}, "auto")
    loader = loaders.get_model_loader(load_config=config, model_config=None)
    assert type(loader) is loaders.DefaultModelLoader


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("plugins")
def test_what_is_wrong_is_told_before_a_model_is_made(
    engine: str, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No such ref, model or store, a key too many, one too few: each is named, with what to do."""
    monkeypatch.setattr(ModelConfig, "made", lambda self: pytest.fail("a model was made"))
    cases: tuple[tuple[dict[str, Any], type[MstoreError], str], ...] = (
        (told(store, "missing"), NotFound, "missing"),
        (told(store, "m:unet"), NotFound, "no such model"),
        ({"store": str(tmp_path), "ref": "m"}, MstoreError, str(tmp_path)),
        ({"store": str(store.path)}, BadRequest, "needs store and ref"),
        ({**told(store), "rev": "x"}, BadRequest, "takes nothing else"),
        ({"store": str(store.path), "ref": 1}, BadRequest, "as text"),
    )
    for extra, kind, what in cases:
        with pytest.raises(kind, match=what) as refused:
            ENGINES[engine](ModelConfig("nowhere"), extra)
        assert what not in ("needs store and ref", "takes nothing else") or (
            '{"store": ' in str(refused.value.hint)
            and refused.value.where == "model_loader_extra_config"
        )


@pytest.mark.usefixtures("plugins")
def test_a_directory_of_another_model(store: Store, tmp_path: Path) -> None:
    """If the config needs weights that the snapshot lacks, vLLM gets an error that names them."""
    fields = json.loads((store.path.parent / "config" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 4}))
    with pytest.raises(BadRequest, match=r"model\.layers\.3\.") as refused:
        ENGINES["vllm"](ModelConfig(str(tmp_path)), told(store))
    assert str(tmp_path) in str(refused.value.hint)
    # Quantized models make parameters of their own.
    ENGINES["vllm"](ModelConfig(str(tmp_path), quantization="fp8"), told(store))


def test_memory_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two batches are read and not yet taken, and none is larger than asked for."""
    read: list[list[str]] = []
    load = engines.load

    def noting(catalog: Any, view: Any, names: list[str], **options: Any) -> Any:
        read.append(names)
        assert len(names) == 1 or sum(view.record(name).nbytes for name in names) <= 8192
        return load(catalog, view, names, **options)

    monkeypatch.setattr(engines, "load", noting)
    monkeypatch.setattr(engines, "_BATCH_BYTES", 8192)
    taken = 0
    for name, tensor in StoredWeights.of(told(store), "").tensors():
        taken += 1
        # The reader goes on meanwhile.
        batches = list(read)
        begun = [one for names in batches for one in names]
        assert begun.index(name) == taken - 1
        if taken == 1:
            # Time for a reader that goes on.
            time.sleep(0.3)
        ahead = [names for names in batches if begun.index(names[-1]) >= taken - 1]
        assert len(ahead) <= 2, (name, tensor.shape)
    assert taken == len(store["m"])
    assert len(read) > 4


def test_a_loader_that_stops(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes no more tensors leaves nothing: no hold, no thread at work."""
    monkeypatch.setattr(engines, "_BATCH_BYTES", 4096)
    weights = StoredWeights.of(told(store), "").tensors()
    next(weights)
    assert leases.holds(store._catalog.layout) == {store["m"].id}
    weights.close()  # type: ignore[attr-defined]
    assert not leases.holds(store._catalog.layout)


def test_damage(store: Store, tmp_path: Path) -> None:
    """A damaged block is Corrupt, never a wrong weight."""
    with Store.init(tmp_path / "store", block_size=1 << 16, codec="raw") as own:
        own.add(store.path.parent / "m", name="m")
    (pack,) = tmp_path.rglob("*.pack")
    raw = bytearray(pack.read_bytes())
    lost = store["m"].tensor("model.embed_tokens.weight").tobytes()
    raw[raw.rindex(lost)] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(raw)
    weights = StoredWeights(str(tmp_path / "store"), "m")
    with pytest.raises(Corrupt):
        [tensor.sum() for _, tensor in weights.tensors()]


def test_one_of_several_models(store: Store, tmp_path: Path) -> None:
    """REF:MODEL is one model of a snapshot, by the names that its tensors have in it."""
    for name in ("one", "two"):
        (tmp_path / "both" / name).mkdir(parents=True)
        for file in (store.path.parent / ("m" if name == "one" else "other")).iterdir():
            (tmp_path / "both" / name / file.name).write_bytes(file.read_bytes())
    with Store.init(tmp_path / "store", block_size=1 << 16) as own:
        own.add(tmp_path / "both", name="both")
    for name, ref in (("one", "m"), ("two", "other")):
        found = dict(StoredWeights(str(tmp_path / "store"), f"both:{name}").tensors())
        assert digest(found) == digest(store[ref].load_torch())
