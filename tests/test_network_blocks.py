"""The blocks of image models: which tensor is in which, and merges that are weighed by them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from cli_runs import Program
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from small_models import BLOCK

from mstore import MergeRequest, Store
from mstore.models.adapters.modules import _unet_blocks
from mstore.models.network_blocks import BASE, VAE, block_of_layer, layout_of, patterns_of
from mstore.terms.errors import BadRequest, Incompatible
from mstore_cli import user_config

D = "model.diffusion_model."
NUMBERS_OF_UNET = {"SD 1": (12, 26), "SDXL": (9, 20)}


def unet(blocks: int, prefix: str = D) -> list[str]:
    """Tensors of a UNet with so many blocks on each side, in the layout of its authors."""
    return [
        *(f"{prefix}time_embed.0.weight", f"{prefix}label_emb.0.0.weight"),
        *(f"{prefix}input_blocks.{n}.0.in_layers.2.weight" for n in range(blocks)),
        f"{prefix}middle_block.1.proj_in.weight",
        *(f"{prefix}output_blocks.{n}.0.in_layers.2.weight" for n in range(blocks)),
        f"{prefix}out.2.weight",
    ]


REST = [
    "cond_stage_model.transformer.text_model.embeddings.position_ids",
    "first_stage_model.encoder.conv_in.weight",
]


# -- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NUMBERS_OF_UNET)
@pytest.mark.parametrize("prefix", [D, "diffusion_model.", ""])
def test_blocks_of_a_unet(kind: str, prefix: str) -> None:
    """The UNets of Stable Diffusion 1 and SDXL have 26 and 20 blocks, in the order of their use."""
    side, count = NUMBERS_OF_UNET[kind]
    layout = layout_of([*REST, *unet(side, prefix)], "m")
    numbers = [f"{n:02}" for n in range(side)]
    names = [BASE, *(f"IN{n}" for n in numbers), "M00", *(f"OUT{n}" for n in numbers)]
    assert [*layout.blocks] == names
    assert len(names) == count
    assert layout.of[f"{prefix}input_blocks.4.0.in_layers.2.weight"] == "IN04"
    assert layout.of[f"{prefix}time_embed.0.weight"] == BASE
    assert layout.of[f"{prefix}label_emb.0.0.weight"] == BASE
    assert layout.of[f"{prefix}out.2.weight"] == names[-1]
    assert [layout.of[name] for name in REST] == [BASE, VAE]


def test_both_layouts_have_the_same_blocks() -> None:
    """A module is in the same block whether its authors or diffusers name it."""
    pairs = [(f"{a.rstrip('.')}.", f"{b.rstrip('.')}.") for a, b in _unet_blocks()]
    assert len(pairs) > 40
    authors = layout_of([f"{theirs}x.weight" for theirs, _ in pairs] + unet(12, ""), "m")
    diffusers = layout_of([f"unet:{ours}x.weight" for _, ours in pairs], "m")
    for theirs, ours in pairs:
        if not theirs.startswith(("out.0", "out.2")):
            assert authors.of[f"{theirs}x.weight"] == diffusers.of[f"unet:{ours}x.weight"], theirs


FLUX = [
    *("img_in.weight", "time_in.in_layer.weight", "final_layer.linear.weight"),
    *(f"double_blocks.{n}.img_attn.qkv.weight" for n in range(19)),
    *(f"single_blocks.{n}.linear1.weight" for n in range(38)),
]
FLUX_DIFFUSERS = [
    *("transformer:x_embedder.weight", "transformer:time_text_embed.x.weight"),
    "transformer:proj_out.weight",
    *(f"transformer:transformer_blocks.{n}.attn.to_q.weight" for n in range(19)),
    *(f"transformer:single_transformer_blocks.{n}.proj_mlp.weight" for n in range(38)),
]


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (FLUX, ("text_encoders.clip_l.transformer.x", "text_encoders.t5xxl.transformer.x")),
        ([f"{D}{name}" for name in FLUX], ()),
        (FLUX_DIFFUSERS, ("text_encoder:x.y", "text_encoder_2:x.y")),
    ],
)
def test_blocks_of_flux(names: list[str], texts: tuple[str, ...]) -> None:
    """Flux has the 61 blocks of supermerger, in one file with or without a prefix, and as parts."""
    layout = layout_of([*names, *texts], "m")
    assert len(layout.blocks) == 61
    assert layout.blocks[:4] == ("CLIP", "T5", "IN", "D00")
    assert layout.blocks[-2:] == ("S37", "OUT")
    assert [layout.of[name] for name in names[:3]] == ["IN", "IN", "OUT"]
    assert layout.of[names[3 + 7]] == "D07"
    assert layout.of[names[-1]] == "S37"
    assert [layout.of[name] for name in texts] == ["CLIP", "T5"][: len(texts)]


@pytest.mark.parametrize(
    ("prefix", "blocks", "end"),
    [(D, "joint_blocks", "final_layer.linear"), ("transformer:", "transformer_blocks", "proj_out")],
)
def test_blocks_of_sd3(prefix: str, blocks: str, end: str) -> None:
    """Stable Diffusion 3 has one block for each joint block, and what is around them."""
    names = [f"{prefix}{blocks}.{n}.x.weight" for n in range(24)]
    rest = [f"{prefix}pos_embed.proj.weight", f"{prefix}{end}.weight"]
    layout = layout_of([*names, *rest, "text_encoders.clip_g.transformer.x"], "m")
    assert len(layout.blocks) == 27
    assert [layout.of[name] for name in (*rest, names[23])] == ["IN", "OUT", "J23"]
    assert layout.of["text_encoders.clip_g.transformer.x"] == BASE


def test_models_beside_each_other() -> None:
    """The name of a file that is one of several models changes no block."""
    names = [f"photo:{name}" for name in unet(12)]
    assert layout_of(names, "m").of[f"photo:{D}middle_block.1.proj_in.weight"] == "M00"


def test_other_models_are_refused() -> None:
    """A language model has no such blocks."""
    with pytest.raises(Incompatible, match="no blocks that are known"):
        layout_of(["model.layers.0.self_attn.q_proj.weight"], "llama")


def test_layers_that_are_blocks() -> None:
    """Reports of layers can say which block each is; layers of other models are none."""
    assert block_of_layer(f"{D}input_blocks.4") == "IN04"
    assert block_of_layer("unet:mid_block") == "M00"
    assert block_of_layer("double_blocks.7") == "D07"
    for layer in ("model.layers.3", "transformer_blocks.3", "first_stage_model.encoder", ""):
        assert block_of_layer(layer) is None


# -- weights -------------------------------------------------------------------------------------


def test_weights_in_order_and_by_name() -> None:
    """Numbers stand in the order of the blocks; by name, what is not named is 1."""
    layout = layout_of(unet(12), "m")
    numbers = [n / 26 for n in range(26)]
    told = layout.weights(",".join(map(str, numbers)))
    assert [told[name] for name in layout.blocks] == numbers
    assert told[VAE] == told[BASE]
    assert layout.weights([*numbers, 0.5])[VAE] == 0.5
    named = layout.weights("in0*=0.25, M00=0,OUT11=-1")
    assert named["IN09"] == 0.25
    assert named["IN10"] == 1
    assert (named["M00"], named["OUT11"], named[VAE]) == (0, -1, 1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("0,1", "2 weights for 26 blocks: BASE IN00..IN11 M00 OUT00..OUT11"),
        ("IN12=1", "no block is called 'IN12'"),
        ("0.5,IN04=1", "no weight of a block"),
        ("IN04=1,0.5", "no weight of a block"),
        ("portrait", "no weight of a block"),
        ("=1", "no weight of a block"),
        ("M00=nan", "no weight of a block"),
        ("M00=inf", "not finite"),
        ("", "no weight of a block"),
    ],
)
def test_wrong_weights_are_named(asked: str, message: str) -> None:
    """A list of another length, an unknown block, and what is no number."""
    with pytest.raises(BadRequest, match=message.replace("(", "\\(")):
        layout_of(unet(12), "m").weights(asked)


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "1", "10", "[x]"]), max_size=3).map(".".join)),
    st.data(),
)
def test_patterns_match_what_they_are_of(names: list[str], data: st.DataObject) -> None:
    """Patterns of some names match these and none of the others."""
    every = sorted(set(filter(None, names)))
    chosen = {one for one in every if data.draw(st.booleans())}
    patterns = patterns_of(chosen, every)
    matched = {one for one in every if any(fnmatch.fnmatchcase(one, p) for p in patterns)}
    assert matched == chosen


# -- merges ----------------------------------------------------------------------------------------

Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Array]]:
    draw = np.random.default_rng(5)
    names = [*unet(12), "first_stage_model.encoder.conv_in.weight"]
    base = {name: draw.normal(size=(8, 8)).astype("f4") for name in names}
    others = {
        one: {name: (value + draw.normal(size=(8, 8))).astype("f4") for name, value in base.items()}
        for one in "ab"
    }
    return {"base": base, **others}


@pytest.fixture
def store(models: Mapping[str, Mapping[str, Array]], tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as made:
        for name, tensors in models.items():
            save_file(dict(tensors), tmp_path / f"{name}.safetensors")
            made.add(tmp_path / f"{name}.safetensors", name=name)
        yield made


def test_a_merge_by_blocks(
    store: Store, models: Mapping[str, Mapping[str, Array]], tmp_path: Path
) -> None:
    """Each tensor is merged with its expert's weight, times that of its block."""
    experts = {"a": 0.5, "b": 0.25}
    asked = [[n / 8 for n in range(26)], {"IN*": 2.0, "OUT03": 0.0}]
    rules = store.block_rules("base", experts, asked)
    request = MergeRequest(base="base", experts=experts, method="task_arithmetic", rules=rules)
    store.merge(store.plan(request), name="mix")
    store.checkout("mix", tmp_path / "mix.safetensors")
    made = load_file(tmp_path / "mix.safetensors")
    layout = layout_of(made, "mix")
    weights = [layout.weights(one) for one in asked]
    for name, value in made.items():
        own = [w * told[layout.of[name]] for w, told in zip((0.5, 0.25), weights, strict=True)]
        base = models["base"][name]
        wanted = base + sum(
            np.float32(w) * (models[one][name] - base) for w, one in zip(own, "ab", strict=True)
        )
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_blocks_of_weight_zero_are_not_read(store: Store) -> None:
    """What has no weight costs no read."""
    one = {"base": "base", "experts": {"a": 1.0}, "method": "task_arithmetic"}
    rules = store.block_rules("base", {"a": 1.0}, ["IN*=0"])
    whole, part = store.plan(MergeRequest(**one)), store.plan(MergeRequest(**one, rules=rules))
    assert part.planned_expert_bytes < whole.planned_expert_bytes


def test_blocks_on_the_command_line(store: Store, tmp_path: Path) -> None:
    """`--blocks` takes weights, or a name of the user's; the result's recipe says the same."""
    mstore = Program(tmp_path / "store")
    line = ("merge", "--base", "base", "--expert", "a=0.5", "--method", "task_arithmetic")
    mstore.succeed(*line, "--blocks", "IN*=0.4,M00=0,OUT*=0.7", "--name", "one")
    settings = tmp_path / "config.toml"
    settings.write_text('[blocks]\nportrait = "IN*=0.4,M00=0,OUT*=0.7"\n')
    with mock.patch.object(user_config, "path", return_value=settings):
        mstore.succeed(*line, "--blocks", "portrait", "--name", "two")
        user_config.add("author", ["Ada"])
        assert user_config.block_presets() == {"portrait": "IN*=0.4,M00=0,OUT*=0.7"}
    mstore.succeed("recipe", "one")
    store.checkout("one", tmp_path / "one")
    recipe = tmp_path / "one" / "mergekit_config.yml"
    mstore.succeed("merge", "--recipe", recipe, "--name", "three")
    made = {name: store.show(name).manifest for name in ("one", "two", "three")}
    assert len(set(made.values())) == 1
    for verb in ("explain", "blame"):
        told = mstore.succeed(verb, "one", "--by", "layer").lines
        assert any(one.startswith(f"{D}output_blocks.3  OUT03, ") for one in told)
    refused = mstore(*line, "--blocks", "0,1", "--name", "x")
    assert refused.status == 2
    assert "BASE IN00..IN11 M00 OUT00..OUT11" in refused.err
    told = mstore("merge", "--recipe", recipe, "--blocks", "0", "--name", "x")
    assert "--blocks" in told.err


def test_wrong_presets_name_their_line(tmp_path: Path) -> None:
    """A preset is a text."""
    settings = tmp_path / "config.toml"
    settings.write_text("[blocks]\nportrait = 3\n")
    with (
        mock.patch.object(user_config, "path", return_value=settings),
        pytest.raises(BadRequest, match="blocks"),
    ):
        user_config.block_presets()
