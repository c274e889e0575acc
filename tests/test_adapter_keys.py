"""Keys of adapters: any text is read or refused; what programs write is read as it was meant."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mstore.models.adapters.forms import FORMS, product_shape
from mstore.models.adapters.keys import DENOISER, TEXT, TEXT_2, TEXT_3, key_of, kind_of
from mstore.models.adapters.low_rank import Factors
from mstore.models.adapters.modules import modules_of, named_modules
from mstore.models.adapters.multipliers import MULTIPLIERS
from mstore.models.adapters.targets import check_adapter, has_keys, is_adapter
from mstore.terms.errors import Incompatible

BEGINS = {
    "lora_unet_": DENOISER,
    "lora_transformer_": DENOISER,
    "lycoris_": DENOISER,
    "lora_te1_": TEXT,
    "lora_te2_": TEXT_2,
    "lora_te3_": TEXT_3,
    "lora_te_": TEXT,
    "model.diffusion_model.": DENOISER,
    "diffusion_model.": DENOISER,
    "unet.": DENOISER,
    "transformer.": DENOISER,
    "text_encoder.": TEXT,
    "text_encoder_2.": TEXT_2,
    "text_encoder_3.": TEXT_3,
    "text_encoders.clip_l.transformer.": TEXT,
    "text_encoders.clip_g.transformer.": TEXT_2,
    "text_encoders.t5xxl.transformer.": TEXT_3,
    "": DENOISER,
}
"""What begins a key, and the model that it says."""
IN_BASE = {
    DENOISER: "model.diffusion_model.",
    TEXT: "text_encoders.clip_l.transformer.",
    TEXT_2: "text_encoders.clip_g.transformer.",
    TEXT_3: "text_encoders.t5xxl.transformer.",
}
STYLES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "kohya": {".lora_down.weight": (2, 6), ".lora_up.weight": (4, 2), ".alpha": ()},
    "locon": {".lora_down.weight": (2, 6), ".lora_mid.weight": (2, 2), ".lora_up.weight": (4, 2)},
    "peft": {".lora_A.weight": (2, 6), ".lora_B.weight": (4, 2)},
    "peft with a bias": {".lora_A.weight": (2, 6), ".lora_B.weight": (4, 2), ".lora_B.bias": (4,)},
    "default": {".lora_A.default.weight": (2, 6), ".lora_B.default.weight": (4, 2)},
    "diffusers": {".lora.down.weight": (2, 6), ".lora.up.weight": (4, 2)},
    "layers": {".lora_linear_layer.down.weight": (2, 6), ".lora_linear_layer.up.weight": (4, 2)},
    "dora": {".lora_down.weight": (2, 6), ".lora_up.weight": (4, 2), ".dora_scale": (4, 1)},
    "loha": {
        **{f".hada_w{one}_a": (4, 2) for one in (1, 2)},
        **{f".hada_w{one}_b": (2, 6) for one in (1, 2)},
    },
    "lokr": {".lokr_w1": (2, 2), ".lokr_w2": (2, 3), ".alpha": ()},
    "difference": {".diff": (4, 6), ".diff_b": (4,)},
    "norm": {".w_norm": (4, 6), ".b_norm": (4,)},
}
"""What a program writes for a layer of 4 outputs and 6 inputs: ends of keys, and shapes."""

words = st.sampled_from(
    ["attn1", "to_q", "proj", "blocks", "0", "12", "mlp", "ff", "norm", "conv_in"]
)
paths = st.lists(words, min_size=1, max_size=5).map(".".join)
pieces = st.sampled_from(
    [
        *BEGINS,
        *(end for style in STYLES.values() for end in style),
        *("base_model.model.", ".processor", ".qkv_lora", "qkv_lora1", "_lora", "to_out", ".", "_"),
        *(
            ".oft_blocks",
            ".ia3_l",
            ".oft_R.weight",
            ".vera_lambda_b",
            ".vera_lambda_d",
            ".on_input",
        ),
        *("base_model.vera_A", "base_model.vera_B", ".base_layer.weight", ".base_layer.bias"),
        *("attn", "0", ".weight", ".bias", "in_proj_weight", "blocks.0", "text_model."),
        *("double_blocks.0.img_attn.qkv", "joint_blocks.N.x_block.attn.qkv", "unet:", "vae:"),
    ]
)
texts = st.one_of(st.text(max_size=20), st.lists(pieces, max_size=6).map("".join))
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


class Header(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]


headers = st.builds(Header, st.sampled_from(["F32", "BF16", "I64"]), shapes)


@given(st.lists(texts, max_size=4))
def test_any_text_is_a_key_or_none(names: list[str]) -> None:
    """No text of a key is an error by itself, however odd."""
    for name in names:
        key = key_of(name)
        assert key is None or (name.endswith(key.end) and "." not in key.path)
    kind_of(names)
    has_keys(names)
    is_adapter(names)


@given(st.dictionaries(texts, shapes, max_size=6))
def test_any_base_has_modules(base: dict[str, tuple[int, ...]]) -> None:
    """Names of a base are never an error, and each place is of a tensor of it."""
    for several in (*modules_of(base).values(), *named_modules(base).values()):
        for places in several:
            for place in places:
                assert place.tensor in base
                assert place.at + place.rows <= base[place.tensor][0]


KINDS = ["LORA", "LOHA", "LOKR", "IA3", "OFT", "VERA", "BOFT"]
configs = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"peft_type": st.sampled_from(KINDS)},
        optional={
            "fan_in_fan_out": st.booleans(),
            "use_cayley_neumann": st.booleans(),
            "num_cayley_neumann_terms": st.integers(-1, 9),
            "feedforward_modules": st.lists(words, max_size=2),
            "use_dora": st.booleans(),
        },
    ).map(lambda one: json.dumps(one).encode()),
)


@given(st.dictionaries(texts, headers, max_size=6), st.dictionaries(texts, headers), configs)
def test_any_adapter_fits_or_is_refused(
    adapter: dict[str, Any], base: dict[str, Any], config: bytes | None
) -> None:
    """Whatever keys, shapes and config say, the only error is that it does not fit."""
    with suppress(Incompatible):
        check_adapter(config, adapter, base, "x")


@given(st.sampled_from(sorted(FORMS)), st.data())
def test_factors_have_the_shape_that_was_checked(form: str, data: st.DataObject) -> None:
    """Shapes that are taken make factors of the rows, columns and rank that were told."""
    sizes = st.integers(1, 3)
    own = data.draw(
        st.lists(
            st.lists(sizes, min_size=1, max_size=4).map(tuple),
            min_size=len(FORMS[form].parts),
            max_size=len(FORMS[form].parts),
        )
    )
    try:
        rows, columns, rank = product_shape(form, own)
    except ValueError:
        return
    left, right = FORMS[form].factors(*(np.ones(shape, np.float32) for shape in own))
    assert (left.shape, right.shape) == ((rows, rank), (rank, columns))


@given(
    st.sampled_from(sorted(MULTIPLIERS)),
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    st.data(),
    st.sampled_from([(0.0, 0.0, 1.0), (5.0, 0.0, 1.0), (0.0, 0.1, 0.0)]),
)
def test_what_is_checked_multiplies(
    form: str, base: tuple[int, ...], data: st.DataObject, settings: tuple[float, float, float]
) -> None:
    """Tensors that are taken for a base's shape multiply all rows of that base."""
    sizes = st.sampled_from([*base, math.prod(base[1:]), 0, 1, 2, 3, 6])
    count = len(MULTIPLIERS[form].parts) or 1
    some = st.one_of(st.tuples(sizes, sizes), st.lists(sizes, max_size=4).map(tuple))
    own = data.draw(st.lists(some, min_size=count, max_size=count))
    try:
        MULTIPLIERS[form].require(base, *own)
    except ValueError:
        return
    tensors = [np.ones(shape, np.float32) for shape in own]
    multiplier = MULTIPLIERS[form].made(base, settings, *tensors)
    rows, columns = base[0], math.prod(base[1:])
    left, right = np.empty((rows, 0), np.float32), np.empty((0, columns), np.float32)
    factors = Factors(left, right, np.ones(1, np.float32), None, multiplier)
    values = np.ones(rows * columns, np.float32).view(np.uint8)
    out = np.empty(4 * rows * columns, np.uint8)
    factors.apply(values, "F32", 0, rows * columns, out)
    assert np.isfinite(out.view(np.float32)).all()


def key(begin: str, path: str, end: str) -> str:
    return begin + (path.replace(".", "_") if begin.endswith("_") else path) + end


@given(st.sampled_from(sorted(BEGINS)), paths, st.sampled_from(sorted(STYLES)))
def test_what_a_program_writes_is_read_as_it_was_meant(begin: str, path: str, style: str) -> None:
    """Each begin says the model, what is between the module, and each end the part."""
    parts = set()
    for end in STYLES[style]:
        found = key_of(key(begin, path, end))
        assert found is not None
        assert (found.model, found.path) == (BEGINS[begin], path.replace(".", "_"))
        assert found.end == end
        parts.add(found.part)
    assert len(parts) == len(STYLES[style])


@given(
    st.lists(paths, min_size=1, max_size=4, unique_by=lambda one: one.replace(".", "_")),
    st.sampled_from(sorted(BEGINS)),
    st.sampled_from(sorted(STYLES)),
)
def test_a_file_fits_the_base_that_it_was_made_for(
    modules: list[str], begin: str, style: str
) -> None:
    """A file of any begin and any form fits a base of its modules, and no base that lacks one."""
    ours = IN_BASE[BEGINS[begin]]
    base = {
        f"{ours}{path}.{part}": Header("F32", (4, 6) if part == "weight" else (4,))
        for path in modules
        for part in ("weight", "bias")
    }
    adapter = {
        key(begin, path, end): Header("F32", shape)
        for path in modules
        for end, shape in STYLES[style].items()
    }
    # A difference alone is an adapter's only below a begin of one.
    assert has_keys(adapter) == bool(begin or style != "difference")
    if not has_keys(adapter):
        return
    check_adapter(None, adapter, base, "x")
    for part in ("weight", "bias"):
        del base[f"{ours}{modules[0]}.{part}"]
    refused = False
    try:
        check_adapter(None, adapter, base, "x")
    except Incompatible:
        refused = True
    # All of a text encoder may be missing: then it is left out.
    assert refused or (BEGINS[begin] != DENOISER and len(modules) == 1)
