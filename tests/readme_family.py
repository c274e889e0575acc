"""The three models that the README's transcript works on, small and always the same.

python tests/readme_family.py PORT     serves them as the Hub does, until it is ended
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import transcripts
from hub import Hub, directory_files
from safetensors.numpy import save_file

SHAPES = {
    "model.embed_tokens.weight": (4096, 512),
    "model.layers.0.mlp.up_proj.weight": (2048, 512),
    "model.layers.1.mlp.up_proj.weight": (2048, 512),
    "model.norm.weight": (512,),
    "lm_head.weight": (4096, 512),
}
# Which tensors a fine-tune changed, and how far: some layers far, others little.
CHANGES = {
    "code": {
        "model.embed_tokens.weight": 1e-4,
        "model.layers.0.mlp.up_proj.weight": 4e-3,
        "lm_head.weight": 1e-4,
    },
    "math": {"model.layers.1.mlp.up_proj.weight": 4e-3, "lm_head.weight": 1e-4},
}


MODELS = {
    "llama": "Qwen/Qwen2.5-0.5B",
    "code": "Qwen/Qwen2.5-Coder-0.5B",
    "math": "Qwen/Qwen2.5-0.5B-Instruct",
}
"""What the README calls them on the Hub."""


def without_hub(page: str) -> list[tuple[str, str]]:
    """The README's commands with what they print, for directories that `write` made."""
    for name, model in MODELS.items():
        page = page.replace(f"hf://{model} ", f"{name} ")
    for name, called in {"llama": "qwen", "code": "coder", "math": "instruct"}.items():
        page = re.sub(rf"\b{called}\b", name, page)
    page = re.sub(r" https://huggingface\.co/\S+ \S+$", "", page, flags=re.MULTILINE)
    return [one for one in transcripts.pairs(page) if not one[0].startswith("mstore export")]


def on_hub(root: Path, port: int = 0) -> Hub:
    """A Hub that has them, with cards; `root` gets their files."""
    root.mkdir(exist_ok=True)
    write(root)
    made = Hub(port)
    made.xet = root / "cas"
    for name, model in MODELS.items():
        card = {"license": "apache-2.0"}
        if name != "llama":
            card["base_model"] = MODELS["llama"]
        matter = "".join(f"{key}: {value}\n" for key, value in card.items())
        (root / name / "README.md").write_text(f"---\n{matter}---\n")
        made.model(model, directory_files(root / name), card=card)
    return made


def write(root: Path) -> None:
    """llama/, code/ and math/ below `root`: the base and two fine-tunes of it."""
    rng = np.random.default_rng(1)
    base = {name: rng.standard_normal(shape) * 0.02 for name, shape in SHAPES.items()}
    _save(root / "llama", base)
    for name, changes in CHANGES.items():
        tensors = {
            tensor: values + rng.standard_normal(values.shape) * changes.get(tensor, 0.0)
            for tensor, values in base.items()
        }
        _save(root / name, tensors)


def _save(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    directory.mkdir()
    stored = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as directory,
        on_hub(Path(directory), int(sys.argv[1])).running(),
    ):
        threading.Event().wait()
