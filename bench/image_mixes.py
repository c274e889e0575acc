"""Mixes of image models as a plain script makes them: safetensors and numpy, and nothing else.

    python bench/image_mixes.py MIX FOLDER OUT

MIX is JSON, FOLDER has the files that it names.  Arithmetic is float32, rounded once to float16.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from image_models import DENOISER, TUNES, VAE, Tensors, load, save

BASE = "sdxl"
LORAS = ("ink", "neon")
BLOCKS = ("BASE", *(f"IN{n:02}" for n in range(9)), "M00", *(f"OUT{n:02}" for n in range(9)))


@dataclass(frozen=True, slots=True)
class Mix:
    """A recipe of two models.

    kind: `sum`, one to the other by `weight`; `difference`, one and what the other has beyond the
    base; `blocks`, a sum with a weight for each block, up to `weight`; `lora`, one and a LoRA.
    """

    name: str
    kind: str
    one: str
    other: str
    weight: float

    def blocks(self) -> dict[str, float]:
        """The other's weight in each block: most in the middle of the network, none at its ends."""
        half = (len(BLOCKS) - 1) / 2
        return {
            block: round(self.weight * max(0.0, 1 - abs(at - half) / (half - 2)), 3)
            for at, block in enumerate(BLOCKS)
        }


def mixes() -> list[Mix]:
    """The 50 mixes of a disk, in the order in which they were made; the last ones are of mixes."""
    tunes = [tune.name for tune in TUNES]

    def pairs() -> Iterator[tuple[str, str]]:
        while True:
            for step in (1, 2, 3, 4):
                for at, one in enumerate(tunes):
                    yield one, tunes[(at + step) % len(tunes)]

    pair, made = pairs(), list[Mix]()
    for kind, count in (("sum", 16), ("difference", 8), ("blocks", 10)):
        for number in range(count):
            weight = (0.3, 0.5, 0.25, 0.7, 0.4)[number % 5]
            made.append(Mix(f"mix{len(made):02}", kind, *next(pair), weight))
    for number in range(6):
        one, other = tunes[number % len(tunes)], LORAS[number % 2]
        made.append(Mix(f"mix{len(made):02}", "lora", one, other, (0.8, 0.6)[number % 2]))
    for number in range(10):
        one = made[-1 if number % 3 else 30 + number].name
        other = made[5 * number].name if number % 2 else tunes[number % len(tunes)]
        made.append(Mix(f"mix{len(made):02}", "sum", one, other, 0.4))
    return made


def block_of(name: str) -> str:
    """The block of a tensor, by supermerger's names."""
    path = name.removeprefix(DENOISER)
    found = re.match(r"(input|output)_blocks\.(\d+)\.", path)
    if found:
        return f"{'IN' if found[1] == 'input' else 'OUT'}{int(found[2]):02}"
    if path.startswith("middle_block."):
        return "M00"
    # The last layers are of the last block.
    return BLOCKS[-1] if path.startswith("out.") and path != name else BLOCKS[0]


def mixed(mix: Mix, one: Tensors, other: Tensors, base: Tensors) -> Tensors:
    """Mix two models.  base: only for differences."""
    blocks = mix.blocks()

    def product(name: str) -> Any:
        key = "lora_unet_" + name.removeprefix(DENOISER).removesuffix(".weight").replace(".", "_")
        if f"{key}.alpha" not in other:
            return None
        down, up = (other[f"{key}.lora_{part}.weight"].astype("f4") for part in ("down", "up"))
        return up @ down * np.float32(float(other[f"{key}.alpha"]) / len(down))

    made: Tensors = {}
    for name, values in one.items():
        weight = np.float32(mix.weight)
        if values.dtype != np.float16 or name.startswith(VAE):
            made[name] = values
            continue
        own = values.astype(np.float32)
        if mix.kind == "lora":
            added = product(name)
            new = own if added is None else own + weight * added
        elif mix.kind == "difference":
            theirs = other[name].astype(np.float32)
            new = own + weight * (theirs - base[name].astype(np.float32))
        else:
            if mix.kind == "blocks":
                weight = np.float32(blocks[block_of(name)])
            new = (np.float32(1) - weight) * own + weight * other[name].astype(np.float32)
        made[name] = new.astype(np.float16)
    return made


def write(mix: Mix, folder: Path, out: Path) -> None:
    """Make a mix of the files of a folder; its header tells the recipe, as those of A1111 do."""
    models = [load(folder / f"{name}.safetensors") for name in (mix.one, mix.other)]
    base = load(folder / f"{BASE}.safetensors") if mix.kind == "difference" else {}
    save(out, mixed(mix, *models, base), sd_merge_recipe=json.dumps(asdict(mix)))


def read(text: str) -> Mix:
    """Of JSON."""
    told: Mapping[str, Any] = json.loads(text)
    return Mix(**told)


if __name__ == "__main__":
    write(read(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
