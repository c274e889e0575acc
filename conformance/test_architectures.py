"""Layers of all architectures: names alone say what mergekit's templates and transformers' modules
say.

mergekit 0.1.5 has a template of tensors' names for each architecture that it knows, and infers the
others.  For each template the layer and the side (before or after the layers) of every tensor is
compared.  Of architectures without a template the modules of transformers are the measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml
from compare import assert_same
from generated import BLOCK, Tensors
from mergekit import merge
from mergekit.architecture.base import ModelArchitecture, ModuleDefinition, WeightInfo
from mergekit.architecture.json_definitions import JSON_ARCHITECTURES
from mergekit.architecture.moe_defs import AfmoeModuleArchitecture, Glm4MoeModuleArchitecture
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file

from mstore import Store
from mstore.merge.recipes.layers import ModelLayers, layers_of
from mstore.merge.recipes.modular import Modules

LAYERS = 3
EXPERTS = 2
FIRST, LAST = "first", "last"
Place = str | tuple[int, int]


# -- mergekit's templates ------------------------------------------------------------------------


def _special(name: str, module: Any) -> ModelArchitecture:
    """An architecture that mergekit defines in code, of a mixture."""
    config = SimpleNamespace(num_experts=EXPERTS, n_routed_experts=EXPERTS)
    modules = {"default": ModuleDefinition(architecture=module.from_config(config))}
    return ModelArchitecture(modules=modules, architectures=[name], model_type=name)


TEMPLATES: dict[str, ModelArchitecture] = {
    **{f"{one.architectures[0]}, {one.expected_model_type}": one for one in JSON_ARCHITECTURES},
    "afmoe": _special("afmoe", AfmoeModuleArchitecture),
    "glm4_moe": _special("glm4_moe", Glm4MoeModuleArchitecture),
}

DIFFERENT: Mapping[tuple[str, str], str] = {
    ("MixFormerSequentialForCausalLM", "layers.0.wte.weight"): (
        "the embedding is layer 0 by its number; in these models the blocks count from 1, and "
        "mergekit's template takes them from 0"
    ),
    **{
        (name, "visual.merger.mlp."): (
            "mergekit counts two layers of which each has both modules of an MLP; here they are "
            "loose, so a gradient has its first value for them"
        )
        for name in ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
    },
}
"""What differs, by architecture and beginning of names, and why."""


def configured(architecture: ModelArchitecture) -> tuple[SimpleNamespace, dict[str, Any]]:
    """A config with each number of layers that the templates ask for, as mergekit and mstore read
    it."""
    config, fields = SimpleNamespace(num_experts=EXPERTS, first_k_dense_replace=1), {}
    for module in architecture.modules.values():
        definition = getattr(module.architecture, "definition", None)
        if getattr(definition, "override_num_layers", None) is not None:
            continue
        *parts, key = module.architecture.num_layers_config_key().split(".")
        one, own = config, fields
        for part in parts:
            if not hasattr(one, part):
                setattr(one, part, SimpleNamespace())
            one, own = getattr(one, part), own.setdefault(part, {})
        setattr(one, key, LAYERS)
        own[key] = LAYERS
    return config, fields


def places(
    module: ModuleDefinition, config: SimpleNamespace, kind: str
) -> Iterator[tuple[str, Place]]:
    """The names of a module's tensors, and where mergekit has each.

    kind: "every" tensor, or without the "optional" ones, or by their "aliases" where they have any.
    """
    own, count = module.architecture, module.architecture.num_layers(config)
    weights: list[tuple[Place, list[WeightInfo]]] = [
        (FIRST, own.pre_weights(config)),
        *(((n, count), list(own.layer_weights(n, config) or ())) for n in range(count)),
        (LAST, own.post_weights(config)),
    ]
    for place, each in weights:
        for weight in each:
            if kind == "optional" and weight.optional:
                continue
            names = weight.aliases if kind == "aliases" and weight.aliases else (weight.name,)
            for name in names:
                yield f"{_prefix(module)}{name}", place


def _prefix(module: ModuleDefinition) -> str:
    """The prefix of a module's tensors; that of Whisper's decoder lacks its dot in mergekit."""
    return f"{module.weight_prefix.removesuffix('.')}." if module.weight_prefix else ""


def place_in(layout: ModelLayers, name: str) -> Place:
    return layout.layer(name) or (LAST if layout.is_last(name) else FIRST)


def reason(architecture: ModelArchitecture, name: str) -> str | None:
    return next(
        (
            why
            for (one, start), why in DIFFERENT.items()
            if one in architecture.architectures and name.startswith(start)
        ),
        None,
    )


@pytest.mark.parametrize("kind", ["every", "optional", "aliases"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_layers_are_those_of_the_template(template: str, kind: str) -> None:
    """Every tensor is in the layer, or on the side of the layers, where mergekit has it."""
    architecture = TEMPLATES[template]
    config, fields = configured(architecture)
    modules = {name: dict(places(one, config, kind)) for name, one in architecture.modules.items()}
    layout = ModelLayers.of([name for own in modules.values() for name in own], layers_of(fields))
    main = next(iter(modules))
    for module, own in modules.items():
        alone = ModelLayers.of(own, LAYERS)
        for name, place in own.items():
            if reason(architecture, name) is not None:
                continue
            if isinstance(place, tuple) or module == main:
                assert place_in(layout, name) == place, name
            elif alone.stacks:
                assert place_in(alone, name) == place, name
            if module != main and layout.main is not None:
                # All of another module is before the text model, as a whole.
                assert not layout.is_last(name), name


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_main_stack_is_the_text_models(template: str) -> None:
    """It is the first module's of each template, and none of an encoder and a decoder."""
    architecture = TEMPLATES[template]
    config, fields = configured(architecture)
    modules = {
        name: [name for name, _ in places(one, config, "every")]
        for name, one in architecture.modules.items()
    }
    layout = ModelLayers.of([name for own in modules.values() for name in own], layers_of(fields))
    if "encoder" in modules:
        assert layout.main is None
        return
    assert layers_of(fields) == LAYERS
    assert layout.main is not None
    assert layout.stacks[layout.main] == LAYERS
    (text, *_) = modules.values()
    assert any(name.startswith(f"{layout.main}.0.") for name in text)


@pytest.mark.parametrize("template", TEMPLATES)
def test_modules_are_those_of_the_template(template: str) -> None:
    """Every tensor is in the module where mergekit has it."""
    architecture = TEMPLATES[template]
    config, fields = configured(architecture)
    wanted = {
        name: module
        for module, one in architecture.modules.items()
        for name, _ in places(one, config, "every")
    }
    modules = Modules.of(ModelLayers.of(wanted, layers_of(fields)), list(architecture.modules))
    assert modules is not None
    assert {name: modules.module(name) for name in wanted} == wanted


def test_every_difference_is_one() -> None:
    """Nothing is excused that is equal."""
    for name, start in DIFFERENT:
        (architecture,) = (one for one in TEMPLATES.values() if name in one.architectures)
        config, fields = configured(architecture)
        own = {
            tensor: place
            for module in architecture.modules.values()
            for tensor, place in places(module, config, "every")
        }
        layout = ModelLayers.of(own, layers_of(fields))
        found = [one for one in own if one.startswith(start)]
        assert any(place_in(layout, one) != own[one] for one in found), (name, start)


# -- transformers' modules -----------------------------------------------------------------------

_TEXT = ("lm_head", "model.norm")
_SEEING = ("lm_head", "model.language_model.norm")
_MODEL = "model.layers"
_LANGUAGE = "model.language_model.layers"
MODELS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    **{
        f"{name}ForCausalLM": (_MODEL, _TEXT)
        for name in (
            *("DeepseekV2", "DeepseekV3", "Qwen3Moe", "Qwen3Next", "Gemma3", "Gemma2", "GptOss"),
            *("Olmoe", "MiniMax", "Phimoe", "Ernie4_5_Moe", "Glm4Moe", "Exaone4", "Phi4Multimodal"),
            *("Llama4",),
        )
    },
    **{
        f"{name}ForCausalLM": (_MODEL, ("lm_head", "model.final_layernorm"))
        for name in ("Jamba", "Zamba2", "Bamba", "FalconH1", "Persimmon")
    },
    "Gemma3nForCausalLM": (_MODEL, (*_TEXT, "model.altup_unembed_projections")),
    "RecurrentGemmaForCausalLM": (_MODEL, ("lm_head", "model.final_norm")),
    "GPTJForCausalLM": ("transformer.h", ("lm_head", "transformer.ln_f")),
    "BloomForCausalLM": ("transformer.h", ("lm_head", "transformer.ln_f")),
    "MptForCausalLM": ("transformer.blocks", ("lm_head", "transformer.norm_f")),
    "OPTForCausalLM": ("model.decoder.layers", ("lm_head", "model.decoder.final_layer_norm")),
    "RwkvForCausalLM": ("rwkv.blocks", ("head", "rwkv.ln_out")),
    "BioGptForCausalLM": ("biogpt.layers", ("output_projection", "biogpt.layer_norm")),
    "XLNetLMHeadModel": ("transformer.layer", ("lm_loss",)),
    "WhisperForCausalLM": ("model.decoder.layers", ("proj_out", "model.decoder.layer_norm")),
    "ModernBertForMaskedLM": (_MODEL, ("decoder", "head", "model.final_norm")),
    "ElectraForMaskedLM": (
        "electra.encoder.layer",
        ("generator_lm_head", "generator_predictions"),
    ),
    "ViTForImageClassification": ("vit.layers", ("classifier", "vit.layernorm")),
    "Dinov2ForImageClassification": ("dinov2.encoder.layer", ("classifier", "dinov2.layernorm")),
    "SwinForImageClassification": ("swin.encoder.layers", ("classifier", "swin.layernorm")),
    "ConvNextForImageClassification": (
        "convnext.encoder.stages",
        ("classifier", "convnext.layernorm"),
    ),
    "CLIPForImageClassification": (
        "vision_model.encoder.layers",
        ("classifier", "vision_model.post_layernorm"),
    ),
    **{
        f"{name}ForConditionalGeneration": (_LANGUAGE, _SEEING)
        for name in (
            *("Gemma3", "Llava", "LlavaNext", "PaliGemma", "Mistral3", "InternVL", "Glm4vMoe"),
            *("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Mllama", "Aria", "Qwen2Audio", "Voxtral"),
        )
    },
    "Llama4ForConditionalGeneration": (
        "language_model.model.layers",
        ("language_model.lm_head", "language_model.model.norm"),
    ),
    "Blip2ForConditionalGeneration": (
        "language_model.model.decoder.layers",
        ("language_model.lm_head", "language_model.model.decoder.final_layer_norm"),
    ),
    "Idefics3ForConditionalGeneration": (
        "model.text_model.layers",
        ("lm_head", "model.text_model.norm"),
    ),
    "T5ForConditionalGeneration": (
        None,
        ("lm_head", "encoder.final_layer_norm", "decoder.final_layer_norm"),
    ),
    "BartForConditionalGeneration": (None, ("lm_head",)),
    "WhisperForConditionalGeneration": (
        None,
        ("proj_out", "model.encoder.layer_norm", "model.decoder.layer_norm"),
    ),
}
"""By class: the main stack, and the modules after the layers."""

NO_LAYERS = ("altup_projections", "altup_unembed_projections")
"""Lists of modules that are no layers."""


def built(name: str) -> transformers.PreTrainedModel:
    """A model with weights of no size in memory, by its class's default config."""
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model: transformers.PreTrainedModel = cls(cls.config_class())
    return model


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_the_modules_of_lists(name: str) -> None:
    """Every tensor of the n-th module of a list of layers is in layer n, and no other is in one."""
    model = built(name)
    lists: dict[str, int] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{one}.") for one in lists)
        if isinstance(module, torch.nn.ModuleList) and not is_inside:
            lists[path] = len(module)
    lists = {path: n for path, n in lists.items() if path.rpartition(".")[2] not in NO_LAYERS}
    names = list(model.state_dict())
    layout = ModelLayers.of(names, layers_of(model.config.to_dict()))
    assert layout.stacks == lists
    for tensor in names:
        path = next((path for path in lists if tensor.startswith(f"{path}.")), None)
        if path is None:
            assert layout.layer(tensor) is None, tensor
        else:
            number = int(tensor.removeprefix(f"{path}.").partition(".")[0])
            assert layout.layer(tensor) == (number, lists[path]), tensor


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_after_the_layers(name: str) -> None:
    """The final norm and the head come after the main stack, and nothing else does."""
    main, after = MODELS[name]
    model = built(name)
    layout = ModelLayers.of(model.state_dict(), layers_of(model.config.to_dict()))
    assert layout.main == main
    found = {one for one in model.state_dict() if layout.layer(one) is None and layout.is_last(one)}
    starts = tuple(f"{one}." for one in after)
    more = {"final_logits_bias"}
    assert {one for one in model.state_dict() if one.startswith(starts)} == found - more
    assert all(any(one.startswith(start) for one in found) for start in starts)


def test_layers_that_predict_further_tokens() -> None:
    """DeepSeek V3 has them as a layer more than its config counts, Qwen3-Next beside the model."""
    model = built("DeepseekV3ForCausalLM")
    more = [f"model.layers.61.{name}.weight" for name in ("eh_proj", "enorm", "mlp.gate")]
    layout = ModelLayers.of([*model.state_dict(), *more], layers_of(model.config.to_dict()))
    assert (layout.stacks, layout.further) == ({"model.layers": 61}, 1)
    assert all(layout.layer(name) is None and layout.is_last(name) for name in more)
    model = built("Qwen3NextForCausalLM")
    more = ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "mtp.norm.weight"]
    layout = ModelLayers.of([*model.state_dict(), *more], layers_of(model.config.to_dict()))
    assert layout.main == "model.layers"
    assert all(layout.is_last(name) for name in more)


# -- both programs -------------------------------------------------------------------------------


def make_picot5(path: Path) -> None:
    """Write a T5 of three layers in its encoder, and of two in its decoder."""
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "vocab_size": 64}
    counts = {"num_layers": 3, "num_decoder_layers": 2}
    config = transformers.T5Config(feed_forward_proj="gated-gelu", **counts, **sizes)
    transformers.T5ForConditionalGeneration(config).save_pretrained(path)


def make_picogemma3(path: Path) -> None:
    """Write a Gemma 3 of three layers and a vision tower of two, with the names of published
    ones."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    vision = {"num_hidden_layers": 2, "image_size": 32, "patch_size": 16, "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config=sizes | text, vision_config=sizes | vision, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


GRADIENT = """\
merge_method: linear
models:
- model: {one}
  parameters: {{weight: [0.1, 0.9]}}
- model: {two}
  parameters: {{weight: [0.9, 0.1]}}
parameters: {{normalize: false}}
dtype: float32
"""


class Pair:
    """Two models of one architecture, and what each program makes of them."""

    def __init__(self, root: Path, make: Callable[[Path], None]) -> None:
        torch.manual_seed(20)
        self.root = root
        self.paths = {name: root / name for name in ("one", "two")}
        self.store = Store.init(root / "store", block_size=BLOCK)
        for name, path in self.paths.items():
            make(path)
            self.store.add(path, name=name)
        self.remarks: tuple[str, ...] = ()

    def ours(self, recipe: str) -> Tensors:
        models = {str(path): name for name, path in self.paths.items()}
        found = self.store.read_recipe(recipe.format(**self.paths), models=models)
        self.remarks = found.remarks
        self.store.merge(self.store.plan(found.request), name="merged")
        self.store.checkout("merged", self.root / "ours")
        return tensors_of(self.root / "ours")

    def theirs(self, recipe: str) -> Tensors:
        asked = MergeConfiguration.model_validate(yaml.safe_load(recipe.format(**self.paths)))
        options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
        merge.run_merge(asked, str(self.root / "theirs"), options)
        return tensors_of(self.root / "theirs")


@pytest.mark.parametrize("make", [make_picot5, make_picogemma3])
def test_a_gradient_runs_over_each_stack(make: Callable[[Path], None], tmp_path: Path) -> None:
    """In a model with several stacks both count the layers of each from 0 to 1."""
    pair = Pair(tmp_path, make)
    assert_same(pair.ours(GRADIENT), pair.theirs(GRADIENT))
    (remark,) = pair.remarks
    assert "a gradient runs over each of" in remark


SLICES = """\
slices:
- sources: [{{model: {one}, layer_range: [0, 3]}}]
- sources: [{{model: {two}, layer_range: [1, 3]}}]
"""
MODULES = f"""\
modules:
  text_decoder:
    {SLICES.rstrip().replace(chr(10), chr(10) + "    ")}
  vision_tower: {{{{models: [{{{{model: "{{one}}"}}}}]}}}}
  multi_modal_projector: {{{{models: [{{{{model: "{{one}}"}}}}]}}}}
"""
MIXED = """\
modules:
  text_decoder:
    models:
    - model: {one}
      parameters: {{weight: [0.2, 0.8]}}
    - model: {two}
      parameters: {{weight: 0.5}}
    parameters: {{normalize: false}}
  vision_tower: {{models: [{{model: "{two}"}}], parameters: {{weight: 0.5}}}}
  multi_modal_projector:
    models: [{{model: "{one}"}}]
dtype: float32
parameters: {{weight: 1.0}}
"""
PASSTHROUGH = "merge_method: passthrough\ndtype: float32\n"


@pytest.mark.parametrize(
    "head", ["merge_method: linear", "merge_method: task_arithmetic\nbase_model: {one}"]
)
def test_modules_of_different_models(head: str, tmp_path: Path) -> None:
    """Both make each module of its own models."""
    recipe = f"{head}\n{MIXED}"
    pair = Pair(tmp_path, make_picogemma3)
    assert_same(pair.ours(recipe), pair.theirs(recipe))


def test_a_stack_in_a_module(tmp_path: Path) -> None:
    """Both stack the slices of a module."""
    pair = Pair(tmp_path, make_picogemma3)
    assert_same(pair.ours(MODULES + PASSTHROUGH), pair.theirs(MODULES + PASSTHROUGH))


def test_a_stack_of_a_text_model(tmp_path: Path) -> None:
    """Slices of a model that sees are those of its text model: what mergekit makes of modules, and
    transformers loads it."""
    pair = Pair(tmp_path, make_picogemma3)
    assert_same(pair.ours(SLICES + PASSTHROUGH), pair.theirs(MODULES + PASSTHROUGH))
    cls = transformers.Gemma3ForConditionalGeneration
    model, told = cls.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(model.model.language_model.layers) == 5


def tensors_of(path: Path) -> Tensors:
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
