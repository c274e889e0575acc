"""Generated families of Llama-shaped checkpoints in bfloat16, for timing (not for quality).

    python bench/generate.py OUT [--millions 300] [--experts 4] [--mix dense|mixed|near]

A model is a base and a list of *trainings*: which tensors each one moved, and how far.  Weights are
nearly normal with deviation 0.02 (a sum of four uniform draws); a training adds the same kind of
noise with a deviation drawn for each layer between its bounds, and what it does not touch keeps
its bytes.  Draws are a hash of (seed, index): the same arguments give the same bytes, for any
number of threads.

`dense`: every expert moved every tensor by 1e-3 (the worst case: nothing is free).  `mixed`: five
kinds of expert in turn, with deviations from 1e-4 to 1e-3 (see `mixed`).  `near`: experts as
close to the base as fine-tunes are, two with frozen layers (see `near`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np

VOCABULARY = 32000
SHARDS = 3
BASE_DEVIATION = 0.02
# Names the bytes that the same arguments give: one more whenever those change.
VERSION = 2
# Million parameters from which models are wide.
LARGE = 2000


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the model.  part: embed, attention, mlp, norm or head; depth: 0 lowest, 1 top."""

    number: int
    name: str
    shape: tuple[int, ...]
    part: str
    layer: int
    depth: float


@dataclass(frozen=True, slots=True)
class Training:
    """One fine-tuning: the tensors that it moved, and by which deviations (log-uniform a layer)."""

    name: str
    seed: int
    low: float
    high: float
    touches: Callable[[Place], bool]

    def deviation(self, place: Place) -> float:
        """How far it moved this tensor; all tensors of a layer alike."""
        draw = np.random.default_rng((self.seed, place.layer + 1)).random()
        return float(self.low * (self.high / self.low) ** draw)


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint: the base, or the base after some trainings, one upon the other."""

    name: str
    trainings: tuple[Training, ...] = ()


BASE = Model("base")


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths of a model's layers."""

    hidden: int
    feed_forward: int
    heads: int

    @classmethod
    def of(cls, millions: float) -> Widths:
        """Those of a model of about this many million parameters; large ones as Llama 3.2 3B."""
        return cls(1024, 2816, 16) if millions < LARGE else cls(3072, 8192, 24)

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return self.hidden * (4 * self.hidden + 3 * self.feed_forward + 2)


def layer_count(millions: float) -> int:
    """Layers of a model of about this many million parameters."""
    widths = Widths.of(millions)
    return max(1, round((millions * 1e6 - 2 * VOCABULARY * widths.hidden) / widths.layer))


def places(millions: float) -> list[Place]:
    """The tensors of a model of about this many million parameters."""
    layers = layer_count(millions)
    widths = Widths.of(millions)
    hidden, feed_forward = widths.hidden, widths.feed_forward

    def walk() -> Iterator[tuple[str, tuple[int, ...], str, int]]:
        yield "model.embed_tokens.weight", (VOCABULARY, hidden), "embed", -1
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield f"{prefix}.self_attn.{name}.weight", (hidden, hidden), "attention", layer
            yield f"{prefix}.mlp.gate_proj.weight", (feed_forward, hidden), "mlp", layer
            yield f"{prefix}.mlp.up_proj.weight", (feed_forward, hidden), "mlp", layer
            yield f"{prefix}.mlp.down_proj.weight", (hidden, feed_forward), "mlp", layer
            yield f"{prefix}.input_layernorm.weight", (hidden,), "norm", layer
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,), "norm", layer
        yield "model.norm.weight", (hidden,), "norm", layers
        yield "lm_head.weight", (VOCABULARY, hidden), "head", layers

    return [
        Place(number, name, shape, part, layer, min(1.0, max(0, layer) / max(1, layers - 1)))
        for number, (name, shape, part, layer) in enumerate(walk())
    ]


# Families ----------------------------------------------------------------------------------------


def dense(number: int) -> Model:
    """Expert `number` of a family where all moved everything, equally far."""
    training = Training("everything", 2000 + number, 1e-3, 1e-3, lambda place: True)
    return Model(f"expert{number}", (training,))


def mixed(number: int) -> Model:
    """Expert `number` of a family as teams have them; five kinds in turn.

    0 moved everything; 1 the upper third; 2 attention only; 3 the MLPs of the upper half; 4 went on
    from the last of kind 0, in the upper third, so it shares what lies below with that one.
    """

    def training(name: str, touches: Callable[[Place], bool]) -> Training:
        return Training(name, 3000 + number, 1e-4, 1e-3, touches)

    kind = number % 5
    upper = training("upper third", lambda place: place.depth >= 2 / 3)
    trainings: tuple[Training, ...] = (
        (training("everything", lambda place: True),),
        (upper,),
        (training("attention", lambda place: place.part == "attention"),),
        (training("upper MLPs", lambda place: place.part == "mlp" and place.depth >= 1 / 2),),
        (*(mixed(number - 4).trainings if kind == 4 else ()), upper),
    )[kind]
    return Model(f"expert{number}", trainings)


def near(number: int) -> Model:
    """Expert `number` of a family as close as fine-tunes are: noise against the weights' deviation.

    1e-2, 3e-3 and 1e-3 in turn; 6 and 7 kept their lower half frozen.
    """
    deviation = (1e-2, 3e-3, 1e-3)[number % 3] * BASE_DEVIATION
    frozen = number % 8 >= 6

    def touches(place: Place) -> bool:
        return not frozen or (place.depth >= 1 / 2 and place.part != "embed")

    return Model(
        f"expert{number}", (Training("near", 4000 + number, deviation, deviation, touches),)
    )


MIXES: dict[str, Callable[[int], Model]] = {"dense": dense, "mixed": mixed, "near": near}


# Bytes -------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)
def _add_noise(values: Any, deviation: Any, seed: Any) -> None:
    """values: uint16 patterns of bfloat16, each moved by a draw and rounded to nearest even."""
    single = np.empty(1, dtype=np.float32)
    pattern = single.view(np.uint32)
    scale = np.float32(deviation * np.sqrt(3.0) / 65536.0)
    low = np.uint64(0xFFFF)
    for i in range(values.size):
        # splitmix64 of a counter: any element can be drawn alone.
        x = seed + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
        total = (x & low) + ((x >> np.uint64(16)) & low) + ((x >> np.uint64(32)) & low)
        total += x >> np.uint64(48)
        pattern[0] = np.uint32(values[i]) << np.uint32(16)
        single[0] += scale * (np.float32(total) - np.float32(131070.0))
        bits = pattern[0]
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        values[i] = np.uint16(bits >> np.uint32(16))


def _seed(*parts: int) -> Any:
    return np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]


def tensor(place: Place, model: Model) -> Any:
    """The tensor as uint16 patterns of bfloat16, flat."""
    values = np.zeros(int(np.prod(place.shape)), dtype=np.uint16)
    _add_noise(values, BASE_DEVIATION, _seed(1, place.number))
    for training in model.trainings:
        if training.touches(place):
            _add_noise(values, training.deviation(place), _seed(training.seed, place.number))
    return values


def write_model(directory: Path, millions: float, model: Model) -> None:
    """One checkpoint in three shards, with an index and a configuration."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    everything = places(millions)
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for shard in range(SHARDS):
            mine = everything[shard::SHARDS]
            file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
            made = pool.map(lambda place: tensor(place, model), mine)
            _write_shard(directory / file, mine, made)
            weight_map |= {place.name: file for place in mine}
    total = sum(2 * int(np.prod(place.shape)) for place in everything)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(_config(millions), indent=2))


def _write_shard(path: Path, mine: Sequence[Place], made: Iterator[Any]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for place in mine:
        end = offset + 2 * int(np.prod(place.shape))
        header[place.name] = {
            "dtype": "BF16",
            "shape": place.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for values in made:
            file.write(values.data)


def _config(millions: float) -> dict[str, object]:
    widths = Widths.of(millions)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": widths.hidden,
        "intermediate_size": widths.feed_forward,
        "num_hidden_layers": layer_count(millions),
        "num_attention_heads": widths.heads,
        "num_key_value_heads": widths.heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def write_family(out: Path, millions: float, models: Sequence[Model]) -> None:
    """A directory for each model below `out`; what is there already, made alike, is kept."""
    for model in models:
        trained = [(t.name, t.seed, t.low, t.high) for t in model.trainings]
        recipe = json.dumps({"version": VERSION, "millions": millions, "trainings": trained})
        made = out / f"{model.name}.json"
        if not made.exists() or made.read_text() != recipe:
            write_model(out / model.name, millions, model)
            made.write_text(recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--millions", type=float, default=300.0)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--mix", choices=sorted(MIXES), default="dense")
    arguments = parser.parse_args()
    models = [BASE, *(MIXES[arguments.mix](number) for number in range(arguments.experts))]
    write_family(arguments.out, arguments.millions, models)


if __name__ == "__main__":
    main()
