"""A snapshot as a directory in memory, and what PEFT, diffusers and others make of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_safetensors
from later import Later
from safetensors import safe_open

from mstore import Store
from mstore.api.integrations.directory import as_directory
from mstore.api.integrations.pretrained import from_pretrained
from mstore.store import leases
from mstore.terms.errors import BadRequest, Corrupt, NotFound

pytestmark = pytest.mark.rest

torch = Later("torch")
transformers = Later("transformers")

BLOCK = 1 << 16


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A checkpoint with shards, directories, odd names, and tensors of several blocks."""
    root = tmp_path / "files"
    (root / "part").mkdir(parents=True)
    (root / "config.json").write_text("{}")
    (root / "a[b]*.txt").write_text("odd")
    (root / "empty").touch()
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        data = os.urandom(5 * BLOCK + 6)
        write_safetensors(root / name, [(f"w{number}", "U8", (len(data),), data)])
    write_safetensors(root / "part" / "model.safetensors", [("w", "U8", (4,), b"part")])
    return root


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path there."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_the_files_of_the_snapshot(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file has its bytes; afterwards no directory, no descriptor and no hold is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(files, name="m")
        url = f"mstore://m?store={store.path}"
        before = len(os.listdir("/proc/self/fd"))
        for source in (store["m"], url):
            with as_directory(source) as directory:
                assert contents(directory) == contents(files)
                assert leases.holds(store._catalog.layout) == {store["m"].id}
            assert not [*(tmp_path / "temporary").iterdir()]
            assert not leases.holds(store._catalog.layout)
            assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_mapped_stays(files: Path, tmp_path: Path) -> None:
    """A tensor that a program has mapped is valid when the directory is gone."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(files, name="m")
        with as_directory(store["m"]) as directory:
            name = "model-00001-of-00002.safetensors"
            with safe_open(directory / name, "pt") as file:
                tensor = file.get_tensor("w1")
    assert tensor.numpy().tobytes() in (files / name).read_bytes()


def test_variants(tmp_path: Path) -> None:
    """Models that have the variant show it alone; others, and without one, show the plain form."""
    for path in ("unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text/model"):
        (tmp_path / "m" / path).parent.mkdir(parents=True)
        for variant in ("", ".fp16"):
            if variant == "" or "vae" not in path:
                file = tmp_path / "m" / f"{path}{variant}.safetensors"
                write_safetensors(file, [("w", "U8", (1,), b"x")])
    (tmp_path / "m" / "only").mkdir()
    write_safetensors(tmp_path / "m" / "only" / "model.fp16.safetensors", [("w", "U8", (1,), b"x")])
    (tmp_path / "m" / "model_index.json").write_text("{}")
    with Store.init(tmp_path / "store") as store:
        store.add(tmp_path / "m", name="m")

        def shown(**options: Any) -> set[str]:
            with as_directory(store["m"], **options) as directory:
                return {*contents(directory)}

        assert shown() == {
            "model_index.json",
            "unet/diffusion_pytorch_model.safetensors",
            "vae/diffusion_pytorch_model.safetensors",
            "text/model.safetensors",
            "only/model.fp16.safetensors",
        }
        assert shown(variant="fp16") == {
            "model_index.json",
            "unet/diffusion_pytorch_model.fp16.safetensors",
            "vae/diffusion_pytorch_model.safetensors",
            "text/model.fp16.safetensors",
            "only/model.fp16.safetensors",
        }
        assert shown(weights=False) == {"model_index.json"}


def test_damage(files: Path, tmp_path: Path) -> None:
    """Damaged weights are Corrupt before anything sees the directory."""
    with Store.init(tmp_path / "store", block_size=BLOCK, codec="raw") as store:
        store.add(files, name="m")
        lost = store["m"].tensor("w2").tobytes()
    (pack,) = (one for one in tmp_path.rglob("*.pack") if lost[:99] in one.read_bytes())
    raw = bytearray(pack.read_bytes())
    raw[raw.index(lost[:99])] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(raw)
    with pytest.raises(Corrupt), as_directory(f"mstore://m?store={tmp_path}/store"):
        pytest.fail("it was shown")


def test_what_is_refused(tmp_path: Path) -> None:
    """A path is no URL; a URL names a snapshot that is there, in a store that is there."""
    with Store.init(tmp_path / "store"):
        pass
    for source, kind in (
        (str(tmp_path / "store"), BadRequest),
        (f"mstore://m?store={tmp_path}/store", NotFound),
        (f"mstore://m?store={tmp_path}/none", NotFound),
    ):
        with pytest.raises(kind), as_directory(source):
            pass


# -- other libraries -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A base model and an adapter of PEFT, `base` and `loras/math`, beside their directories."""
    peft = pytest.importorskip("peft")
    root = tmp_path_factory.mktemp("others")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(root / "base")
    tuned = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(root / "base"),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    tuned.save_pretrained(root / "lora")
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        store.add(root / "lora", name="loras/math", base=None)
        yield store


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(torch.arange(8).reshape(1, 8)).logits


def test_peft(store: Store) -> None:
    """PEFT loads an adapter of a URL, and applies it to a base of a URL, as from directories."""
    peft = pytest.importorskip("peft")
    root, kind = store.path.parent, transformers.AutoModelForCausalLM
    theirs = peft.PeftModel.from_pretrained(kind.from_pretrained(root / "base"), root / "lora")
    base = from_pretrained(kind, f"mstore://base?store={store.path}")
    with as_directory(f"mstore://loras/math?store={store.path}") as directory:
        ours = peft.PeftModel.from_pretrained(base, directory)
    assert torch.equal(logits(ours), logits(theirs))
    assert not torch.equal(logits(ours), logits(kind.from_pretrained(root / "base")))
    # It loads the base that the adapter's config names: the directory.
    both = from_pretrained(peft.AutoPeftModelForCausalLM, store["loras/math"])
    assert torch.equal(logits(both), logits(theirs))


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_diffusers(variant: str | None, tmp_path: Path) -> None:
    """A pipeline of a URL has the components and weights of that of the directory."""
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=77))
    pipeline.save_pretrained(tmp_path / "m")
    pipeline.to(torch.float16).save_pretrained(tmp_path / "m", variant="fp16")
    options = {"variant": variant, "dtype": torch.float16 if variant else torch.float32}
    theirs = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "m", **options)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "m", name="m")
    shutil.rmtree(tmp_path / "m")
    ours = from_pretrained(
        diffusers.DiffusionPipeline, f"mstore://m?store={tmp_path}/store", **options
    )
    assert type(ours) is type(theirs)
    assert ours.scheduler.config.num_train_timesteps == 77
    wanted = theirs.unet.state_dict()
    assert wanted.keys() == ours.unet.state_dict().keys()
    for name, tensor in ours.unet.state_dict().items():
        assert tensor.dtype == options["dtype"]
        assert torch.equal(tensor, wanted[name]), name
