"""Configs of stacks: each form of entries about layers, each model's own, and what is left."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mstore.merge.planning.stack import TABLE, stacked_config, unstackable

LAYERS = 4
STACK = [(0, 0), (0, 1), (0, 2), (0, 1), (0, 2), (0, 3)]
"""The layers [0, 3) and [1, 4) of one model."""


def stacked(config: dict[str, Any], *others: dict[str, Any], layers: Any = STACK) -> Any:
    counted = [{"num_hidden_layers": LAYERS, **one} for one in (config, *others)]
    found = stacked_config(counted, layers)
    assert found.fields.pop("num_hidden_layers") == len(layers)
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"layer_types": list("abcd")}, {"layer_types": list("abcbcd")}),
        ({"hybrid_override_pattern": "ME*-"}, {"hybrid_override_pattern": "ME*E*-"}),
        ({"intermediate_size": [1, 2, 3, 4]}, {"intermediate_size": [1, 2, 3, 2, 3, 4]}),
        ({"intermediate_size": 48}, {"intermediate_size": 48}),
        ({"mlp_only_layers": [1, 3]}, {"mlp_only_layers": [1, 3, 5]}),
        ({"mlp_only_layers": []}, {"mlp_only_layers": []}),
        (
            {"attention_types": [[["g", "l"], 2]]},
            {"attention_types": [[["g", "l", "g", "l", "g", "l"], 1]]},
        ),
        ({"block_types": ["r", "a", "b"]}, {"block_types": ["r", "a", "b", "a", "b", "r"]}),
        ({"first_k_dense_replace": 1}, {"first_k_dense_replace": 1}),
        ({"first_k_dense_replace": 0}, {"first_k_dense_replace": 0}),
        ({"first_k_dense_replace": 4}, {"first_k_dense_replace": 6}),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1},) * 2,
        (
            {"moe_layer_start_index": 1, "moe_layer_end_index": 3},
            {"moe_layer_start_index": 1, "moe_layer_end_index": 5},
        ),
        ({"num_kv_shared_layers": 1}, {"num_kv_shared_layers": 1}),
        ({"num_kv_shared_layers": 4}, {"num_kv_shared_layers": 6}),
        ({"decoder_sparse_step": 1}, {"decoder_sparse_step": 1}),
        ({"max_window_layers": 2, "use_sliding_window": False},) * 2,
        (
            {"linear_attn_config": {"kda_layers": [1, 3], "full": [2, 4], "dim": 8}},
            {"linear_attn_config": {"kda_layers": [1, 3, 5], "full": [2, 4, 6], "dim": 8}},
        ),
        (
            {"per_layer_config": {"1": {"x": 1}, "3": {"x": 3}}},
            {"per_layer_config": {"1": {"x": 1}, "3": {"x": 1}, "5": {"x": 3}}},
        ),
        ({"kv_source_layers": [0, 1, 1, 3]}, {"kv_source_layers": [0, 1, 1, 3, 3, 5]}),
    ],
)
def test_every_form(before: dict[str, Any], after: dict[str, Any]) -> None:
    """An entry says of the stack's layers, in its own form, what it said of them before."""
    found = stacked(before)
    assert found.fields == after
    assert found.left == ()


def test_a_repeated_list_of_runs() -> None:
    """GPT-Neo's runs of kinds become one run, where they are not as they were."""
    layers = [(0, 0), (0, 0), (0, 1)]
    found = stacked({"attention_types": [[["g", "l"], 2]]}, layers=layers)
    assert found.fields == {"attention_types": [[["g", "g", "l"], 1]]}


@pytest.mark.parametrize(
    "config",
    [
        {"first_k_dense_replace": 2},
        {"num_dense_layers": 2},
        {"num_kv_shared_layers": 2},
        {"max_window_layers": 2, "use_sliding_window": True},
        {"moe_layer_end_index": 1},
        {"kv_source_layers": [0, 0, 2, 3]},
        {"sliding_window_pattern": 3},
        {"attn_layer_period": 3, "attn_layer_offset": 1},
    ],
)
def test_what_cannot_be_said(config: dict[str, Any]) -> None:
    """An entry that cannot say what the stack's layers are stays as it is, and is named."""
    found = stacked(config)
    assert found.fields == config
    (told,) = found.left
    assert next(iter(config)) in told


@pytest.mark.parametrize(
    "config",
    [
        {"first_k_dense_replace": 2, "mlp_layer_types": ["d", "d", "s", "s"]},
        {"full_attention_interval": 3, "layer_types": list("lllf")},
        {"model_type": "gemma2", "layer_types": list("abab")},
    ],
)
def test_what_programs_do_not_use(config: dict[str, Any]) -> None:
    """An entry that a list of layers overrides is not named."""
    assert stacked(config).left == ()


def test_layers_that_take_turns_in_code() -> None:
    """Gemma 2 says nothing of its layers' turns in its config: a stack that breaks them is told."""
    config = {"model_type": "gemma2"}
    assert stacked(config).left == ()
    layers = [(0, 0), (0, 1), (0, 1)]
    assert "model_type gemma2" in stacked(config, layers=layers).left[0]


def test_lists_that_nobody_knows() -> None:
    """Lists with as many entries as layers, whose name is not known, stay, and are named; one whose
    entries would stay the same, or of another length, is not."""
    config = {"odd": [1, 2, 3, 4], "even": ["x"] * 4, "ids": [1, 2, 3], "rope_theta": [1, 2, 3, 4]}
    found = stacked(config)
    assert found.fields == {**config, "rope_theta": [1, 2, 3, 2, 3, 4]}
    assert found.left == ("lists of 4 entries, as many as layers, stay: odd, even",)
    same = [(0, 0), (0, 1), (0, 1), (0, 3)]
    assert stacked(config, layers=same).left == (
        "lists of 4 entries, as many as layers, stay: odd",
    )


def test_layers_of_several_models() -> None:
    """Of each layer the config of its own model speaks; where that says nothing, the base's."""
    base, other = {"layer_types": list("abcd")}, {"layer_types": list("wxyz")}
    layers = [(0, 0), (1, 1), (2, 3)]
    assert stacked(base, other, {}, layers=layers).fields == {"layer_types": list("axd")}
    longer = {"num_hidden_layers": 6}
    found = stacked(base, longer, layers=[(0, 0), (1, 5)])
    assert found.fields == base
    assert "layer_types" in found.left[0]


def test_parts_of_a_config() -> None:
    """The config of a text model is one of its own, and a config may only list its layers."""
    own = {"num_hidden_layers": LAYERS, "layer_types": list("abcd"), "odd": [1, 2, 3, 4]}
    found = stacked_config([{"text_config": own, "vision_config": {"odd": [1]}}], STACK)
    told = found.fields["text_config"]
    assert (told["num_hidden_layers"], told["layer_types"]) == (6, list("abcbcd"))
    assert found.left == ("text_config: lists of 4 entries, as many as layers, stay: odd",)
    alone = stacked_config([{"layers_block_type": list("abcd")}], STACK)
    assert alone.fields == {"layers_block_type": list("abcbcd")}
    assert stacked_config([{}], STACK).fields == {}


def test_hostile_configs() -> None:
    """Counts that no model has cost nothing, and names are shortened and made printable."""
    huge = {"num_hidden_layers": 1 << 40, "attention_types": [[["a"], 1 << 40]]}
    assert stacked_config([huge], STACK).left == ()
    found = stacked({"attention_types": [[["a"], 1 << 40]], "o\nd" * 40: [1, 2, 3, 4]})
    assert found.left[0].isprintable()
    assert len(found.left[0]) < 120


def test_tensors_of_all_layers() -> None:
    """A config by which a tensor outside of layers holds values of every layer is told."""
    name = "hidden_size_per_layer_input"
    assert unstackable({"text_config": {name: 256}}) == name
    assert unstackable({name: 0, "text_config": None}) is None


KINDS = (
    *("gemma3n_text", "glm_moe_dsa", "gpt_neo", "granite_swa", "laguna", "lfm2", "llama4_text"),
    *("mistral_large4_text", "molmo2_text", "reformer", "sapiens2", "zamba2", "mllama_text_model"),
)


@pytest.mark.rest
@pytest.mark.parametrize("kinds", [KINDS, pytest.param((), marks=pytest.mark.slow)])
def test_the_configs_of_transformers_are_known(kinds: tuple[str, ...]) -> None:
    """Of every list in transformers with an entry for each layer, the table knows the name; but of
    those of vision and audio, whose layers are not stacked."""
    transformers = pytest.importorskip("transformers")
    logging.disable(logging.CRITICAL)
    known = {entry.name for entry in TABLE} | {
        *("depths", "dilations", "hidden_sizes", "num_heads", "out_features", "out_indices"),
        *("patch_sizes", "pretrained_window_sizes", "target_layer_ids", "window_block_indexes"),
    }
    unknown = set()
    for kind in set(transformers.CONFIG_MAPPING).intersection(kinds or transformers.CONFIG_MAPPING):
        try:
            config = transformers.CONFIG_MAPPING[kind]().to_dict()
        except Exception:  # noqa: BLE001 - configs without defaults say nothing here
            continue
        parts = [config, *(one for key, one in config.items() if key.endswith("config"))]
        for part in (one for one in parts if isinstance(one, dict)):
            count = part.get("num_hidden_layers") or part.get("num_layers") or part.get("n_layers")
            unknown |= {
                f"{kind}: {name}"
                for name, value in part.items()
                if isinstance(value, list | tuple) and len(value) == count and name not in known
            }
    logging.disable(logging.NOTSET)
    assert unknown == set()
