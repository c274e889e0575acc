"""Recipes of sd-mecha: what it merges itself, beside the merge that its recipe is here.

Its models have every tensor of SDXL, of two elements a side at most.  sd-mecha rounds each node to
float32, mstore the sum alone, so they differ by what is rounded of each term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sd_mecha
import torch
from safetensors.torch import save_file
from sd_mecha.extensions import model_configs
from sd_mecha.extensions.builtin.merge_methods import linear
from sd_mecha.extensions.builtin.model_configs.convert_sdxl_blocks import convert_sdxl_blocks_to_sgm

from mstore import Store
from mstore.models.network_blocks import layout_of

CONFIG = "sdxl-sgm"
NAMES = ("a", "b", "c", "d")
STEPS = {"b": 1.0, "c": 1.0, "d": 0.0}
"""How far all elements of a model are from those of a, beside noise."""
UNITS = 60.0
Recipe = Callable[..., Any]


def by_block() -> Any:
    """Another number for each block."""
    names = ["BASE", *(f"IN{n:02}" for n in range(9)), "M00", *(f"OUT{n:02}" for n in range(9))]
    numbers = {name: n / 32 for n, name in enumerate([*names, "VAE"])}
    blocks = sd_mecha.literal(numbers, config="sdxl-supermerger_blocks")
    return sd_mecha.convert(blocks, CONFIG)


RECIPES: dict[str, Recipe] = {
    "weighted sum": lambda a, b, c, d: sd_mecha.weighted_sum(a, b, alpha=0.3),
    "difference": lambda a, b, c, d: sd_mecha.add_difference(a, b, c, alpha=0.7),
    "operators": lambda a, b, c, d: a + (b - c) * 0.5 + (d - c) * 0.25,
    "blocks": lambda a, b, c, d: sd_mecha.weighted_sum(a, b, alpha=by_block()),
    "blocks of a difference": lambda a, b, c, d: (
        sd_mecha.n_average(a, d, b) + (b - c) * by_block() | a
    ),
    "ties": lambda a, b, c, d: (
        a + sd_mecha.ties_sum(b - a, c - a, d - a, k=1.0, vote_sgn=True) * 0.5
    ),
    "model stock": lambda a, b, c, d: sd_mecha.n_model_stock(a, b, c),
    "ties by count": lambda a, b, c, d: a + sd_mecha.ties_sum(b - a, c - a, d - a) * 0.5,
    "tensor sum": lambda a, b, c, d: sd_mecha.tensor_sum(a, b, width=0.5, offset=0.25),
    "clamp": lambda a, b, c, d: sd_mecha.clamp(a, b, c),
    "perpendicular": lambda a, b, c, d: sd_mecha.add_perpendicular(a, b, c, alpha=0.5),
    "train difference": lambda a, b, c, d: linear.add_difference(
        a, b - c, sd_mecha.train_difference_mask(a, b, c, alpha=1.0)
    ),
    "fallback": lambda a, b, c, d: sd_mecha.weighted_sum(a, b, alpha=0.5) | c,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Path]]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(3)
    keys = model_configs.resolve(CONFIG).keys()
    with Store.init(root / "store") as store:
        base: dict[str, torch.Tensor] = {}
        for name in NAMES:
            tensors = {}
            for key, own in keys.items():
                shape = [min(side, 2) for side in own.shape]
                noise = torch.randn(shape, generator=generator)
                # b and c are at a small angle, as seen from a: others make ratios of nothing.
                tensors[key] = base[key] + STEPS[name] + 0.25 * noise if base else noise
            base = base or tensors
            save_file(tensors, root / f"{name}.safetensors")
            store.add(root / f"{name}.safetensors", name=name)
        yield store, root


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_the_program_merges(place: tuple[Store, Path], name: str) -> None:
    """The merge of the recipe, as the program writes it, is the program's merge."""
    store, root = place
    models = [sd_mecha.model(root / f"{one}.safetensors", config=CONFIG) for one in NAMES]
    recipe = RECIPES[name](*models)
    wanted: Any = sd_mecha.merge(recipe, output_dtype=torch.float32, threads=1)
    found = store.read_recipe(sd_mecha.serialize(recipe), strict=True)
    store.merge(store.plan(found.request), name="merged")
    merged, *inputs = (store[one] for one in ("merged", *NAMES))
    del wanted["__metadata__"]
    for key, own in wanted.items():
        here = np.array(merged.tensor(key))
        size = sum(np.abs(np.array(model.tensor(key))) for model in inputs)
        gap = np.abs(here.astype("f8") - own.numpy().astype("f8"))
        assert (gap <= UNITS * 2.0**-24 * size).all(), (key, (gap / size).max() * 2.0**24)


def test_blocks_are_those_of_the_program() -> None:
    """Each tensor of SDXL is in the block that sd-mecha's conversion takes its number from."""
    keys = [*model_configs.resolve(CONFIG).keys()]
    blocks = layout_of(keys, "sdxl").of
    config = model_configs.resolve("sdxl-supermerger_blocks")
    own = convert_sdxl_blocks_to_sgm.build_key_map([config], {}, model_configs.resolve(CONFIG))
    for key in keys:
        (clause,) = own[key].clauses
        assert clause.by_param["blocks"] == (blocks[key],), key
