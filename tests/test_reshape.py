"""`cast` beside types: tensors that are left out, taken, renamed, or get other input channels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoints import write_safetensors
from cli_runs import Program
from families import BLOCK, Array, Arrays, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore import MergeRequest, Store
from mstore.store.models import tensors_of as tensors_of_manifest
from mstore.terms.errors import BadRequest, Incompatible

UNET, VAE = "model.diffusion_model.", "first_stage_model."
FIRST = f"{UNET}input_blocks.0.0.weight"


def array(seed: int, *shape: int, dtype: str = "f2") -> Array:
    values: Array = (np.random.default_rng(seed).standard_normal(shape) / 50).astype(dtype)
    return values


def vae(seed: int, dtype: str = "f2") -> Arrays:
    """A VAE in a file of its own, with bare names."""
    return {
        "encoder.conv_in.weight": array(seed, 16, 3, 3, 3, dtype=dtype),
        "decoder.conv_out.weight": array(seed + 1, 3, 16, 3, 3, dtype=dtype),
        "quant_conv.bias": array(seed + 2, 8, dtype=dtype),
    }


def weights(seed: int, *, channels: int = 4) -> Arrays:
    """A stand-in of a checkpoint in one file: more than one block, in all its parts."""
    return {
        FIRST: array(seed, 32, channels, 3, 3),
        f"{UNET}out.0.weight": array(seed + 1, 300, 256),
        "model_ema.out0weight": array(seed + 2, 300, 256),
        **{f"{VAE}{name}": values for name, values in vae(seed + 3).items()},
    }


class Models:
    """Single files, each added under its own name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store.init(root / "store", block_size=BLOCK)

    def add(self, name: str, arrays: Arrays) -> None:
        path = self.root / f"{name}.safetensors"
        write_safetensors(path, tensors_of(arrays), metadata={"format": "pt"})
        self.store.add(path, name=name)

    def arrays(self, name: str) -> Arrays:
        return {one.name: self.store[name].tensor(one.name) for one in self.store.tensors(name)}

    def ids(self, name: str) -> dict[str, object]:
        catalog = self.store._catalog
        manifest = catalog.manifest(catalog.snapshot(catalog.resolve(name)).manifest_id())
        return dict(tensors_of_manifest(catalog, manifest))


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Models]:
    found = Models(tmp_path)
    with found.store:
        yield found


def same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype, name
        assert np.array_equal(families.bits(found[name]), families.bits(values)), name


def loaded(models: Models, name: str) -> Arrays:
    """What the safetensors library reads of a checkout."""
    from safetensors.numpy import load_file

    models.store.checkout(name, models.root / "out")
    [path] = (models.root / "out").glob("*.safetensors")
    return dict(load_file(path))


# -- what stays costs nothing ----------------------------------------------------------------------


def test_tensors_are_left_out_and_renamed(models: Models) -> None:
    """The safetensors library reads the rest under the new names, and no tensor is stored again."""
    start = weights(1)
    models.add("a", start)
    report = models.store.cast(
        "a", without=["model_ema.*", f"{VAE}*"], strip_prefix=UNET, prefix="net."
    )
    assert report.name == "cast/a-reshaped"
    assert (report.left_out, report.renamed, report.cast, report.dtype) == (4, 2, 0, None)
    wanted = {f"net.{name[len(UNET) :]}": start[name] for name in start if name.startswith(UNET)}
    same(loaded(models, report.name), wanted)
    assert models.ids(report.name).items() >= {
        (f"net.{name[len(UNET) :]}", id)
        for name, id in models.ids("a").items()
        if name.startswith(UNET)
    }
    # A header, a manifest and a snapshot.
    assert report.bytes_written < 10_000
    again = models.store.cast(
        "a", without=["model_ema.*", f"{VAE}*"], strip_prefix=UNET, prefix="net."
    )
    assert not again.new_snapshot
    assert [parent.role for parent in models.store.show(report.name).parents] == ["base"]
    assert models.store.fsck(read_data=True).problems == ()


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    found = Models(tmp_path_factory.mktemp("models"))
    found.add("a", weights(1))
    with found.store:
        yield found


@pytest.mark.sampled(2)
@settings(max_examples=20, deadline=None)
@given(prefix=st.text("ab.é", min_size=1, max_size=6).map(lambda text: f"{text}x."), data=st.data())
def test_a_prefix_comes_off_again(once: Models, prefix: str, data: st.DataObject) -> None:
    """Any prefix, put before all names and taken off, gives the tensors back."""
    models = once
    kept = data.draw(st.sets(st.sampled_from(sorted(weights(1))), min_size=1))
    dropped = sorted(weights(1).keys() - kept)
    plain = models.store.cast("a", without=dropped, strip_prefix="", prefix="z.", name="plain")
    put = models.store.cast("plain", prefix=prefix, name="put")
    assert put.renamed == plain.renamed == len(kept)
    models.store.cast("put", strip_prefix=prefix, name="off")
    same(models.arrays("off"), models.arrays("plain"))
    assert models.store.diff("plain", "off").tensors == ()


def test_a_sharded_model_keeps_its_index(models: Models) -> None:
    """Names change in all shards and in the index, whose size follows what is left out."""
    arrays = {f"layer.{n}.weight": array(n, 40, 64) for n in range(5)}
    families.write_checkpoint(models.root / "sharded", arrays, shards=2)
    models.store.add(models.root / "sharded", name="sharded")
    models.store.cast("sharded", without=["layer.2.*"], prefix="model.", name="m")
    same(
        models.arrays("m"),
        {f"model.{name}": one for name, one in arrays.items() if name != "layer.2.weight"},
    )
    models.store.checkout("m", models.root / "m")
    index = json.loads((models.root / "m" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(models.arrays("m"))


def test_one_model_of_several(models: Models) -> None:
    """REF:MODEL reshapes one component; the others stay, and patterns name components."""
    for part in ("unet", "vae"):
        write_safetensors(models.root / "pipe" / part / "model.safetensors", tensors_of(vae(3)))
    (models.root / "pipe" / "model_index.json").write_text("{}")
    models.store.add(models.root / "pipe", name="pipe")
    models.store.cast("pipe:vae", prefix="first.", name="one")
    names = {one.name for one in models.store.tensors("one")}
    assert {name for name in names if name.startswith("unet:")} == {f"unet:{n}" for n in vae(3)}
    assert {name for name in names if name.startswith("vae:")} == {f"vae:first.{n}" for n in vae(3)}
    models.store.cast("pipe", without=["vae:quant*"], name="less")
    assert {f"unet:{n}" for n in vae(3)} < {one.name for one in models.store.tensors("less")}
    assert "vae:quant_conv.bias" not in {one.name for one in models.store.tensors("less")}


# -- tensors of another model ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "loss", "checkpoint"])
def test_a_vae_is_baked_in(models: Models, kind: str) -> None:
    """The tensors of a VAE, bare or out of a checkpoint, take the place of those below a prefix, in
    its own type; what was the loss of its training does not."""
    start, other = weights(1), vae(50, "f4")
    match kind:
        case "file":
            models.add("vae", other)
        case "loss":
            models.add("vae", other | {"loss.logvar": array(1, 1), "loss.d.weight": array(2, 4, 4)})
        case "checkpoint":
            models.add("vae", weights(90) | {f"{VAE}{name}": one for name, one in other.items()})
    models.add("a", start)
    report = models.store.cast("a", take="vae", below=VAE, name="m")
    assert report.taken == 3
    same(loaded(models, "m"), start | {f"{VAE}{name}": one for name, one in other.items()})
    assert {models.ids("m")[f"{VAE}{n}"] for n in other} <= set(models.ids("vae").values())
    assert report.bytes_written < 10_000
    assert [parent.role for parent in models.store.show("m").parents] == ["base", "expert"]
    half = models.store.cast("a", dtype="bfloat16", take="vae", below=VAE, name="half")
    assert half.cast == len(start)
    assert {one.dtype for one in models.store.tensors("half")} == {"BF16"}


def test_what_has_no_place_is_added(models: Models) -> None:
    """Below a prefix that no tensor has, and below one that was cleared, anything goes."""
    bare = {name: one for name, one in weights(1).items() if not name.startswith(VAE)}
    models.add("bare", bare)
    models.add("vae", {"encoder.other.weight": array(4, 8, 8)})
    models.add("a", weights(1))
    with pytest.raises(Incompatible, match=r"cannot take the place of first_stage_model\.\*") as no:
        models.store.cast("a", take="vae", below=VAE)
    assert "without=['first_stage_model.*']" in (no.value.hint or "")
    wanted = bare | {f"{VAE}encoder.other.weight": array(4, 8, 8)}
    models.store.cast("bare", take="vae", below=VAE, name="added")
    same(loaded(models, "added"), wanted)
    models.store.cast("a", without=[f"{VAE}*"], take="vae", below=VAE, name="cleared")
    same(models.arrays("cleared"), wanted)


# -- input channels --------------------------------------------------------------------------------


def request(base: str, expert: str, method: str) -> MergeRequest:
    return MergeRequest(base=base, experts=[(expert, 0.7)], method=method)


@pytest.mark.parametrize("extra", [5, 4])
@pytest.mark.parametrize("method", ["task_arithmetic", "linear"])
def test_a_model_merges_into_one_of_more_channels(models: Models, method: str, extra: int) -> None:
    """For inpainting (9 channels) and instructions (8): the refusal names the command, after which
    the first channels are those of the plain merge, and the others stay the base's."""
    base, expert = weights(1, channels=4 + extra), weights(40)
    models.add("base", base)
    models.add("expert", expert)
    shapes = rf"has shape \[32, 4, 3, 3\], the base \[32, {4 + extra}, 3, 3\]"
    with pytest.raises(Incompatible, match=shapes) as no:
        models.store.plan(request("base", "expert", method))
    assert (
        no.value.hint == "store.cast('expert', channels_of='base') gives them the base's channels"
    )
    found = models.store.check_merge(request("base", "expert", method)).findings
    assert no.value.hint in {one.hint for one in found}
    report = models.store.cast("expert", channels_of="base", name="wide")
    assert (report.resized, report.shared) == (1, len(expert) - 1)
    models.store.merge(models.store.plan(request("base", "wide", method)), name="m")
    merged = models.arrays("m")
    models.add("plain", base | {FIRST: base[FIRST][:, :4].copy()})
    models.store.merge(models.store.plan(request("plain", "expert", method)), name="wanted")
    wanted = models.arrays("wanted")
    first, rest = merged.pop(FIRST), wanted.pop(FIRST)
    same(merged, wanted)
    assert np.array_equal(first[:, :4], rest)
    assert np.array_equal(first[:, 4:], base[FIRST][:, 4:])


def test_a_model_of_more_channels_merges_into_one_of_fewer(models: Models) -> None:
    """The other way round the expert's further channels go; both ways in one's own type."""
    narrow, wide = weights(1), weights(40, channels=9)
    models.add("narrow", narrow)
    models.add("wide", {name: one.astype("f4") for name, one in wide.items()})
    with pytest.raises(Incompatible) as no:
        models.store.plan(request("narrow", "wide", "linear"))
    assert "cast('wide', channels_of='narrow')" in (no.value.hint or "")
    models.store.cast("wide", channels_of="narrow", name="cut")
    assert np.array_equal(models.arrays("cut")[FIRST], wide[FIRST][:, :4].astype("f4"))
    assert models.store.plan(request("narrow", "cut", "linear")).plan
    models.store.cast("narrow", channels_of="wide", dtype="float32", name="both")
    filled = wide[FIRST].astype("f4")
    filled[:, :4] = narrow[FIRST].astype("f4")
    assert np.array_equal(models.arrays("both")[FIRST], filled)
    assert {one.dtype for one in models.store.tensors("both")} == {"F32"}


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "what", "where"),
    [
        ({}, "says nothing to do", None),
        ({"without": ["nothing.*"]}, "no tensor's name matches 'nothing.*'", "without"),
        ({"without": ["*"]}, "the patterns leave no tensor", "without"),
        ({"strip_prefix": "x."}, "no tensor's name begins with 'x.'", "strip_prefix"),
        ({"strip_prefix": FIRST}, "would leave", "strip_prefix"),
        ({"prefix": UNET}, "begin with 'model.diffusion_model.' already", "prefix"),
        ({"prefix": "a\nb"}, "would leave", "strip_prefix"),
        ({"take": "a"}, "take the place of some", "take"),
        ({"below": VAE}, "where the tensors of another model go", "below"),
        ({"channels_of": "a"}, "no tensor has other input channels than in a", "channels_of"),
    ],
)
def test_what_makes_no_sense_is_refused(
    once: Models, asked: dict[str, Any], what: str, where: str | None
) -> None:
    """The error names the option."""
    with pytest.raises(BadRequest) as refused:
        once.store.cast("a", **asked, name="none")
    assert what in refused.value.what
    assert where is None or where in str(refused.value.where)
    assert "none" not in {ref.name for ref in once.store.refs()}


def test_two_tensors_never_get_one_name(models: Models) -> None:
    """Where a name without the prefix is there already, nothing is made."""
    models.add("a", {"x.w": array(1, 4), "w": array(2, 4)})
    with pytest.raises(BadRequest, match="would have one name"):
        models.store.cast("a", strip_prefix="x.")


def test_a_header_that_names_layers(models: Models) -> None:
    """Marks in a header name layers: their tensors keep their names unless a cast undoes them."""
    told = json.dumps({"layers": {"l": {"format": "float8_e4m3fn"}}})
    quantized = array(1, 4, 4, dtype="f4").astype(ml_dtypes.float8_e4m3fn)
    tensors = [("l.weight", "F8_E4M3", (4, 4), quantized.tobytes())]
    tensors += tensors_of({"l.scale_weight": np.float32(2).reshape(())})
    path = models.root / "a.safetensors"
    write_safetensors(path, tensors, metadata={"_quantization_metadata": told})
    models.store.add(path, name="a")
    with pytest.raises(Incompatible, match="names layers"):
        models.store.cast("a", prefix="p.")
    report = models.store.cast("a", prefix="p.", dtype="float32")
    same(models.arrays(report.name), {"p.l.weight": quantized.astype("f4") * np.float32(2)})


def test_the_command_line(models: Models) -> None:
    """What users type, and what it tells."""
    models.add("a", weights(1))
    models.add("vae", vae(50))
    mstore = Program(Path(models.store.path))
    line = ("cast", "a", "--without", "model_ema.*", "--take", "vae", "--below", VAE)
    out = " ".join(mstore.succeed(*line, "--name", "m").out.split())
    assert "left out 1 tensor taken 3 tensors" in out
    assert "cast 0" not in out
    out = mstore.succeed("cast", "m", "--strip-prefix", UNET, "--name", "n").out
    assert " ".join(out.split()).count("renamed 2 tensors") == 1
    refused = mstore("cast", "a")
    assert refused.status == 2
    assert "--dtype bfloat16" in refused.err


# -- scales ----------------------------------------------------------------------------------------

LAYERS = {
    f"{UNET}double_blocks.0.img_attn.qkv.weight": (300, 256),
    f"{UNET}single_blocks.11.linear1.weight": (256, 40),
}
OTHERS = {
    f"{UNET}img_in.weight": (64, 16),
    f"{UNET}double_blocks.0.img_attn.norm.weight": (64,),
    f"{UNET}double_blocks.0.img_attn.qkv.bias": (3,),
    f"{UNET}double_blocks.0.conv.weight": (8, 8, 3, 3),
    f"{UNET}double_blocks.0.pos_embed.weight": (8, 8),
    "text_encoders.t5.encoder.block.0.layer.0.SelfAttention.q.weight": (16, 16),
}


def flux(seed: int, dtype: str = "BF16") -> Arrays:
    rng = np.random.default_rng(seed)
    made = {
        name: families.cast(rng.standard_normal(shape) * 0.03, dtype)
        for name, shape in {**LAYERS, **OTHERS}.items()
    }
    made[next(iter(LAYERS))][:, 0] = 0
    return made


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_weights_get_scales(models: Models, dtype: str) -> None:
    """Matrices of layers are divided by what makes their largest element 448; scales and mark are
    ComfyUI's; others stay; and a cast back gives each element within half a step of fp8."""
    start = flux(1, dtype)
    models.add("a", start)
    report = models.store.cast("a", dtype="float8_e4m3fn", scaled=True, name="m")
    assert (report.cast, report.scaled, report.overflowed) == (len(LAYERS), len(LAYERS), 0)
    models.store.checkout("m", models.root / "out")
    path = models.root / "out" / "a.safetensors"
    with safetensors.safe_open(path, "numpy") as opened:
        names = set(opened.keys())
    scales = {name.removesuffix("weight") + "scale_weight" for name in LAYERS}
    assert names == {*start, *scales, f"{UNET}scaled_fp8"}
    kinds = {one.name: (one.dtype, one.shape) for one in models.store.tensors("m")}
    assert kinds[f"{UNET}scaled_fp8"] == ("F8_E4M3", (0,))
    for name in scales:
        assert kinds[name] == ("F32", ())
    same({name: models.store["m"].tensor(name) for name in OTHERS}, {n: start[n] for n in OTHERS})
    for name in LAYERS:
        values = start[name].astype("f4")
        scale = np.float32(np.abs(values).max() / 448)
        stored = models.store["m"].tensor(name)
        assert models.store["m"].tensor(name.removesuffix("weight") + "scale_weight") == scale
        wanted = (values / scale).astype(ml_dtypes.float8_e4m3fn)
        assert np.array_equal(stored.view("u1"), wanted.view("u1"))
        assert np.abs(stored.astype("f4")).max() == 448
    models.store.cast("m", dtype="float32", name="back")
    assert {one.name for one in models.store.tensors("back")} == set(start)
    for name in LAYERS:
        values, back = start[name].astype("f4"), models.store["back"].tensor(name)
        step = np.maximum(np.abs(values) / 16, np.abs(values).max() / 448 * 2.0**-10)
        assert (np.abs(values - back) <= step * 1.0001).all()
    assert models.store.fsck(read_data=True).problems == ()


def test_wide_elements_come_first(models: Models) -> None:
    """Where fp8 has an odd number of bytes, each tensor lies at a multiple of its element's."""
    name = f"{UNET}double_blocks.0.a.weight"
    models.add("a", {name: array(1, 3, 5), f"{UNET}double_blocks.0.a.bias": array(2, 3)})
    models.store.cast("a", dtype="float8_e4m3fn", scaled=True, strip_prefix=UNET, name="m")
    models.store.checkout("m", models.root / "out")
    raw = (models.root / "out" / "a.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__")
    own = {f"double_blocks.0.a.{part}" for part in ("weight", "bias", "scale_weight")}
    assert set(header) == {*own, "scaled_fp8"}
    widths = {"F32": 4, "F16": 2, "F8_E4M3": 1}
    for one in header.values():
        assert (start + one["data_offsets"][0]) % widths[one["dtype"]] == 0


def test_a_merge_in_fp8_takes_two_lines(models: Models) -> None:
    """A merge computes in 16 or 32 bits; its error names the cast that follows."""
    models.add("base", flux(1))
    models.add("expert", flux(2))
    asked = MergeRequest(base="base", experts=["expert"], method="linear", dtype="float8_e4m3fn")
    with pytest.raises(BadRequest) as refused:
        models.store.plan(asked)
    assert "then store.cast(REF, dtype='float8_e4m3fn')" in (refused.value.hint or "")
    mstore = Program(Path(models.store.path))
    mstore.succeed(
        "merge", "--base", "base", "--expert", "expert", "--method", "linear", "--name", "m"
    )
    out = mstore.succeed("cast", "m", "--dtype", "float8_e4m3fn", "--scaled", "--name", "m8").out
    assert "2 tensors, 2 with scales" in out
    mstore.succeed("cast", "m8", "--dtype", "bfloat16", "--name", "m16")


def test_scales_that_make_no_sense_are_refused(models: Models) -> None:
    """In another type, of weights in 8 bits, of what is not finite, and where there is no layer."""
    models.add("a", flux(1))
    with pytest.raises(BadRequest, match="in float8_e4m3fn alone"):
        models.store.cast("a", dtype="bfloat16", scaled=True)
    with pytest.raises(BadRequest, match="nothing is"):
        models.store.cast("a", without=["*bias"], skip=["*norm*"])
    models.store.cast("a", dtype="float8_e4m3fn", scaled=True, name="m")
    with pytest.raises(Incompatible, match="8 bits already"):
        models.store.cast("m", dtype="float8_e4m3fn", scaled=True)
    models.add("none", {"x.weight": array(1, 4, 4)})
    with pytest.raises(Incompatible, match="no matrix of a layer"):
        models.store.cast("none", dtype="float8_e4m3fn", scaled=True)
    odd = flux(1)
    odd[next(iter(LAYERS))][0, 0] = np.nan
    models.add("odd", odd)
    with pytest.raises(Incompatible, match="not finite"):
        models.store.cast("odd", dtype="float8_e4m3fn", scaled=True)
