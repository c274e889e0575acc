"""Tiny pipelines of diffusers, made of its own classes and those of transformers.

Owns their shapes, how fine-tunes differ from a base, and how they are written and read: always by
`save_pretrained` and `from_pretrained` of these classes.  Weights are random, nothing is fetched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from generated import Tensors

Components = dict[str, Any]
"""The parts of a pipeline that its class takes, by name."""

WIDTH = 32


def be_quiet() -> None:
    """Let neither library write what it loads."""
    for library in (diffusers, transformers):
        library.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()


def modules_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """The components that have weights, by name."""
    parts = pipeline.components.items()
    return {name: part for name, part in parts if isinstance(part, torch.nn.Module)}


def weights_of(pipeline: Any) -> dict[str, Tensors]:
    """The weights of each component."""
    return {name: state(part) for name, part in modules_of(pipeline).items()}


def state(module: torch.nn.Module) -> Tensors:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def tune(pipeline: Any, seed: int, parts: Collection[str] | None = None, by: float = 0.001) -> None:
    """Move every weight a little, in these components, or in all."""
    generator = torch.Generator().manual_seed(seed)
    for name, part in modules_of(pipeline).items():
        if parts is None or name in parts:
            for value in part.parameters():
                value.data += by * torch.randn(value.shape, generator=generator)


def save(pipeline: Any, path: Path, *, shard: str = "5GB") -> None:
    """Write it, and then its variant `fp16`: the other way round, diffusers would remove shards."""
    pipeline.save_pretrained(path, max_shard_size=shard)
    half = type(pipeline).from_pipe(pipeline)
    parts = {name: copy.deepcopy(part).half() for name, part in modules_of(half).items()}
    half.register_modules(**parts)
    half.save_pretrained(path, variant="fp16", max_shard_size=shard)


def load(path: Path, *, variant: str | None = None) -> Any:
    """Read a pipeline as its users do, in the type of the variant."""
    # Configs have the type that was saved last.
    dtype = torch.float16 if variant == "fp16" else torch.float32
    read = diffusers.DiffusionPipeline.from_pretrained
    return read(path, variant=variant, dtype=dtype, local_files_only=True)


# -- parts ---------------------------------------------------------------------------------------


def _clip_tokenizer() -> Any:
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)}, merges=[]
    )


def _t5_tokenizer() -> Any:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -3.0), *((one, -2.0) for one in "abcde")]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0)


def _clip(cls: str = "CLIPTextModel") -> Any:
    config = transformers.CLIPTextConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=54,
        projection_dim=WIDTH,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
    )
    return getattr(transformers, cls)(config)


def _t5(kind: str = "T5") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        d_model=WIDTH, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=64
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


def _unet(**more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        attention_head_dim=8,
        sample_size=16,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH,
        **more,
    )


def _vae(channels: int = 4) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=8,
    )


def _wan_transformer() -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=16,
        out_channels=16,
        text_dim=WIDTH,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )


# -- pipelines -----------------------------------------------------------------------------------


def _sd() -> Any:
    return diffusers.StableDiffusionPipeline(
        unet=_unet(),
        vae=_vae(),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        unet=_unet(
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=80,
            transformer_layers_per_block=(1, 2),
            use_linear_projection=True,
        ),
        vae=_vae(),
        text_encoder=_clip(),
        text_encoder_2=_clip("CLIPTextModelWithProjection"),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )


def _sd3() -> Any:
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            pos_embed_max_size=16,
            joint_attention_dim=WIDTH,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=2 * WIDTH,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
        ),
        vae=_vae(),
        text_encoder=_clip("CLIPTextModelWithProjection"),
        text_encoder_2=_clip("CLIPTextModelWithProjection"),
        text_encoder_3=_t5(),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        tokenizer_3=_t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def _flux() -> Any:
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
        vae=_vae(),
        text_encoder=_clip(),
        text_encoder_2=_t5(),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def _wan() -> Any:
    return diffusers.WanPipeline(
        transformer=_wan_transformer(),
        transformer_2=_wan_transformer(),
        boundary_ratio=0.9,
        vae=diffusers.AutoencoderKLWan(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1
        ),
        text_encoder=_t5("UMT5"),
        tokenizer=_t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


SHAPES: Mapping[str, Callable[[], Any]] = {
    "sd": _sd,
    "sdxl": _sdxl,
    "sd3": _sd3,
    "flux": _flux,
    "wan": _wan,
}
