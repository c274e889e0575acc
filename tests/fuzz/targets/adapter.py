"""An adapter of PEFT: its config, and the names of its tensors against a base, or refused."""

from __future__ import annotations

from collections.abc import Iterable

from mutation import Form
from small_layers import NAMES

from mstore.models.adapters.config import parse_config
from mstore.models.adapters.targets import targets_of

FORM = Form.TEXT

CONFIG = parse_config(b'{"peft_type": "LORA"}', "here")


def target(data: bytes) -> None:
    """A config, an empty line, and names; every tensor of the base is changed once at most."""
    raw, _, rest = data.partition(b"\n\n")
    config = parse_config(raw, "input")
    found = targets_of(rest.decode(errors="replace").splitlines(), NAMES, "input", CONFIG)
    changed = [one.tensor for one in found.products] + [name for name, _ in found.replaced]
    assert len(set(changed)) == len(changed)
    assert set(changed) <= set(NAMES)
    for one in found.products:
        assert config.rank_of(one.module) >= 1
        assert config.scale_of(one.module) == config.scale_of(one.module)


def seeds() -> Iterable[bytes]:
    prefix = "base_model.model."
    linear = next(name for name in NAMES if "layers.0" in name).removesuffix(".weight")
    names = [f"{prefix}{linear}.lora_{side}.weight" for side in "AB"]
    loose = [name for name in NAMES if "layers" not in name]
    yield (
        b'{"peft_type": "LORA", "r": 8, "lora_alpha": 16.5, "use_rslora": true, '
        b'"rank_pattern": {"q_proj": 4, "^a.layers.[0-9]+.b": 2}, "alpha_pattern": {"v.*": 1}, '
        b'"init_lora_weights": "gaussian", "fan_in_fan_out": false, "bias": "none"}\n\n'
        + "\n".join([*names, *(prefix + name for name in loose[:1])]).encode()
    )
    yield (
        b'{"peft_type": "LORA", "use_dora": true}\n\n'
        + "\n".join([*names, f"{prefix}{linear}.lora_magnitude_vector"]).encode()
    )
