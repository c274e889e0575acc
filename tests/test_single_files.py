"""Single files of image models: what merges with what, though its tensors differ in a few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pytest
from checkpoints import write_safetensors
from cli_runs import Program
from conversion_here import convert_here
from families import BLOCK, Arrays, tensors_of

from mstore import MergeRequest, Store
from mstore.api.integrations.directory import as_directory
from mstore.checkpoint.conversion import ConversionLimits
from mstore.models.optional import is_optional
from mstore.terms.errors import Incompatible

UNET = "model.diffusion_model."
POSITIONS = "cond_stage_model.transformer.text_model.embeddings.position_ids"
OPTIONAL: Arrays = {
    POSITIONS: np.arange(77),
    "model_ema.diffusion_modelout0weight": np.ones((8, 8), "f2"),
    "model_ema.decay": np.float32([0.9999]),
    "v_pred": np.zeros(0, "f4"),
    "ztsnr": np.zeros(0, "f4"),
    "alphas_cumprod": np.linspace(0, 1, 20, dtype="f4"),
    "conditioner.embedders.1.model.logit_scale": np.float16(100).reshape(()),
}


def weights(seed: int, *, channels: int = 4) -> Arrays:
    """A stand-in of an SD checkpoint in one file."""
    rng = np.random.default_rng(seed)
    shapes = {
        f"{UNET}input_blocks.0.0.weight": (32, channels, 3, 3),
        f"{UNET}input_blocks.1.0.weight": (64, 300),
        f"{UNET}out.0.weight": (64,),
        "first_stage_model.encoder.conv_in.weight": (16, 3, 3, 3),
        "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1.weight": (64, 64),
    }
    return {name: (rng.standard_normal(one) / 50).astype("f2") for name, one in shapes.items()}


def tuned(base: Arrays, seed: int, *, channels: int = 4) -> Arrays:
    made = weights(seed, channels=channels)
    for name, values in made.items():
        if base[name].shape == values.shape:
            made[name] = (base[name] + values / 20).astype("f2")
    return made


class Files:
    """Single files below a directory, each a model of the store under its own name."""

    def __init__(self, root: Path, store: Store) -> None:
        self.root = root
        self.store = store

    def add(self, name: str, arrays: Arrays) -> Path:
        path = self.root / f"{name}.safetensors"
        write_safetensors(path, tensors_of(arrays), metadata={"format": "pt"})
        self.store.add(path, name=name)
        return path

    def arrays(self, name: str) -> Arrays:
        return {one.name: self.store[name].tensor(one.name) for one in self.store.tensors(name)}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        yield Files(tmp_path, store)


def same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        assert np.array_equal(families.bits(found[name]), families.bits(values)), name


ASKED = MergeRequest(base="base", experts=["one", "two"], method="task_arithmetic")

# -- optional tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["expert", "base"])
def test_optional_tensors_may_be_missing(files: Files, side: str) -> None:
    """A merge with a model that lacks them, or has them alone, is that of the same models where
    both have them: the base's stay, an expert's are left out, and a warning names them."""
    start = weights(1)
    one, two = tuned(start, 2), tuned(start, 3)
    files.add("base", start | OPTIONAL if side == "base" else start)
    files.add("one", one | OPTIONAL if side == "expert" else one)
    files.add("two", two)
    plan = files.store.plan(ASKED)
    files.store.merge(plan, name="m")
    told = [warning.text for warning in plan.warnings if warning.kind == "other tensors"]
    [text, *_] = told
    assert len(told) == (1 if side == "expert" else 2)
    expected = "not in the base and left out" if side == "expert" else "the base's count for them"
    assert expected in text
    assert POSITIONS in text
    found = files.arrays("m")
    if side == "base":
        same({name: found.pop(name) for name in OPTIONAL}, OPTIONAL)
    for name, values in (("base", start), ("one", one), ("two", two)):
        files.add(f"plain-{name}", values)
    asked = replace(ASKED, base="plain-base", experts=["plain-one", "plain-two"])
    files.store.merge(files.store.plan(asked), name="wanted")
    same(found, files.arrays("wanted"))
    assert files.store.replay("m").same
    checked = files.store.check_merge(ASKED)
    assert {one.severity for one in checked.findings if one.aspect == "names"} == {"warning"}


def test_weights_may_not_be_missing_beside_them(files: Files) -> None:
    """A missing or other weight stays an error that lists it, and not what is optional."""
    start = weights(1)
    files.add("base", start | OPTIONAL)
    files.add("two", tuned(start, 3))
    part = tuned(start, 2)
    del part[f"{UNET}out.0.weight"]
    part[f"{UNET}other"] = np.ones(4, "f2")
    files.add("one", part)
    message = f"{UNET}out.0.weight is missing; {UNET}other is not in the base"
    with pytest.raises(Incompatible) as refused:
        files.store.plan(ASKED)
    assert refused.value.what.endswith(f": {message}")
    assert refused.value.where == "one"
    found = files.store.check_merge(ASKED).findings
    assert "error" in {one.severity for one in found if one.expert == "one"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("lm_head.weight", "BF16"),
        ("model.layers.0.self_attn.q_proj.weight_scale", "F32"),
        ("model.layers.0.mlp.up_proj.qweight", "I32"),
        ("layer.comfy_quant", "U8"),
        ("scaled_fp8", "F8_E4M3"),
        ("model.embed_tokens.weight", "BF16"),
        ("sqrt_layer.weight", "F16"),
    ],
)
def test_no_part_of_a_model_is_optional(name: str, dtype: str) -> None:
    """Neither weights nor what quantized weights need."""
    assert not is_optional(name, dtype)


def test_a_base_that_is_named_and_measured(files: Files) -> None:
    """`add` with a base, `analyze` and `extract_lora` look past optional tensors, too."""
    start = weights(1)
    files.add("base", start | OPTIONAL)
    path = files.add("one", tuned(start, 2))
    report = files.store.add(path, name="again", base="base")
    assert report.base is not None
    assert files.store.analyze("again", "base").tensors_measured >= 0
    files.store.extract_lora("again", "base", name="lora", rank=4)


# -- files as they come ----------------------------------------------------------------------------


def test_sft_is_safetensors(files: Files) -> None:
    """A file with the short suffix is kept under its name, byte for byte; its tensors are a model:
    they have a base, merge, and are compared, listed, shown and left out as those of others."""
    start = weights(1)
    files.add("base", start)
    path = files.root / "one.sft"
    write_safetensors(path, tensors_of(tuned(start, 2)), metadata={"format": "pt"})
    report = files.store.add(path, name="one", detect_base=True)
    assert report.base is not None
    assert [one.path for one in files.store.files("one")] == ["one.sft"]
    same(files.arrays("one"), tuned(start, 2))
    files.store.checkout("one", files.root / "out")
    assert (files.root / "out" / "one.sft").read_bytes() == path.read_bytes()
    assert files.store.diff_directory("one", files.root / "out").tensors_equal == len(start)
    files.store.checkout("one", files.root / "bare", weights=False)
    assert not (files.root / "bare" / "one.sft").exists()
    plan = files.store.plan(replace(ASKED, experts=["one"]))
    files.store.merge(plan, name="m")
    same(files.arrays("m"), tuned(start, 2))
    # As the base it gives the merge its file's name.
    files.store.merge(files.store.plan(replace(ASKED, base="one", experts=["base"])), name="n")
    assert [one.path for one in files.store.files("n") if one.path.endswith("t")] == ["one.sft"]
    with as_directory(files.store["one"]) as place:
        assert (place / "one.sft").read_bytes() == path.read_bytes()
    files.store.cast("one", prefix="x.", name="renamed")
    assert {one.file for one in files.store.tensors("renamed")} == {"one.sft"}


def test_a_short_and_a_long_suffix_side_by_side(files: Files) -> None:
    """Two files of one directory that differ in it are two models; a lone one in a directory is
    weights enough."""
    for suffix, seed in ((".safetensors", 1), (".sft", 2)):
        write_safetensors(files.root / "both" / f"flux{suffix}", tensors_of(weights(seed)))
    files.store.add(files.root / "both", name="both")
    assert files.store["both"].models() == ["flux", "flux.sft"]


def test_a_ckpt_of_stable_diffusion(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone .ckpt is refused with the command that converts it; that takes its state_dict, and
    the model merges like any other."""
    import torch

    convert_here(monkeypatch)
    start = weights(1)
    files.add("base", start)
    tensors = {name: torch.from_numpy(one) for name, one in tuned(start, 2).items()}
    path = files.root / "old.ckpt"
    torch.save({"state_dict": tensors, "global_step": 470000, "epoch": 3}, path)
    mstore = Program(Path(files.store.path))
    refused = mstore("add", path, "--name", "one")
    assert refused.status == 1
    assert f"add {path} --name old.ckpt --convert" in refused.err
    report = files.store.add(path, name="one", convert=ConversionLimits(), detect_base=True)
    assert report.base is not None
    assert any("'epoch', 'global_step'" in remark for remark in report.remarks)
    assert [one.path for one in files.store.files("one")] == ["old.safetensors"]
    same(files.arrays("one"), tuned(start, 2))
