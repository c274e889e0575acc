"""mergekit's other programs that write or read recipes: layershuffle, multi and bakllama.

Each is run as its users run it, and mstore from the same recipe.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from compare import assert_same
from mergekit.scripts import bakllama, layershuffle, multimerge
from pydantic import ValidationError
from safetensors.torch import load_file
from test_recipes import LAYERS, MEMBERS, Place

from mstore import Store


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("programs"))
    yield made
    made.store.close()


# -- layershuffle --------------------------------------------------------------------------------


class Counted:
    """What mergekit-layershuffle asks of an architecture, and its own has not."""

    def num_layers(self, _: Any) -> int:
        return LAYERS


@pytest.mark.parametrize("more", [[], ["--full-random"]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_shuffle_of_mergekit(
    seed: int, more: list[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mergekit-layershuffle of 0.1.5 fails where it counts layers; once they are counted for it,
    the recipe that it prints gives its model."""
    words = [word for name in MEMBERS for word in ("-m", str(place.family.path(name)), "-w", "0.5")]
    line = ["none", *words, "--dry-run", "--print-yaml", "--random-seed", str(seed), *more]
    assert isinstance(CliRunner().invoke(layershuffle.main, line).exception, AttributeError)
    monkeypatch.setattr(layershuffle, "arch_info_for_config", lambda _: Counted())
    text = CliRunner().invoke(layershuffle.main, line, catch_exceptions=False).output
    assert_same(place.ours(text), place.theirs(text))


@pytest.mark.parametrize("full_random", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_shuffle_of_mstore(seed: int, full_random: bool, place: Place) -> None:
    """mergekit makes the same model of the recipe that mstore's shuffle prints."""
    text = place.store.shuffle(
        [("base", 0.5), ("math", 0.75), ("code", 0.5)], seed=seed, full_random=full_random
    )
    for member in MEMBERS:
        text = text.replace(f'"{member}"', f'"{place.family.path(member)}"')
    text += "dtype: float32\n"
    assert_same(place.ours(text), place.theirs(text))


# -- multi ---------------------------------------------------------------------------------------

STEPS = """\
merge_method: task_arithmetic
base_model: {base}
models:
- model: sum
  parameters: {{weight: 0.5}}
- model: stack
  parameters: {{weight: 0.25}}
dtype: float32
---
name: stack
merge_method: passthrough
slices:
- sources: [{{model: sum, layer_range: [0, 2]}}]
- sources: [{{model: {code}, layer_range: [2, 4]}}]
dtype: float32
---
name: sum
merge_method: linear
models:
- model: {math}
  parameters: {{weight: 0.75}}
- model: {code}
  parameters: {{weight: 0.5}}
dtype: float32
"""


def merged(store: Store, recipe: Path, name: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mstore_cli", "--store", str(store.path), "merge"]
    words = [*line, "--recipe", str(recipe), "--name", name]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def multi(recipe: Path, folder: Path) -> BaseException | None:
    """Run mergekit-multi; return what went wrong."""
    line = [str(recipe), "--out-path", str(folder / "out"), "-I", str(folder), "--quiet"]
    line += ["--no-copy-tokenizer", "--no-write-model-card"]
    found: BaseException | None = CliRunner().invoke(multimerge.main, line).exception
    return found


def test_recipes_of_one_file(place: Place, tmp_path: Path) -> None:
    """The result, and each merge that it needs, are those of mergekit-multi."""
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(place.text(STEPS))
    assert multi(recipe, tmp_path) is None
    done = merged(place.store, recipe, "all")
    assert done.returncode == 0, done.stderr
    with Store.open(place.store.path) as store:
        for ref, folder in (("all", "out"), ("all.stack", "stack"), ("all.sum", "sum")):
            store.checkout(ref, tmp_path / f"our-{folder}")
            ours = load_file(tmp_path / f"our-{folder}" / "model.safetensors")
            (theirs,) = (tmp_path / folder).glob("*.safetensors")
            assert_same(ours, load_file(theirs))


@pytest.mark.parametrize(
    "text",
    [
        STEPS.replace("{math}", "stack"),
        STEPS.replace("{math}", "sum"),
        STEPS.replace("name: stack\n", ""),
        STEPS.replace("name: stack\n", "name: sum\n"),
        STEPS.replace("merge_method: linear\n", ""),
    ],
)
def test_what_both_refuse(text: str, place: Place, tmp_path: Path) -> None:
    """Recipes that need each other or themselves, two without a name or of one name, and what is no
    recipe."""
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(place.text(text))
    assert multi(recipe, tmp_path) is not None
    assert merged(place.store, recipe, "refused").returncode == 2


# -- bakllama ------------------------------------------------------------------------------------

LAYER_SLICES = """\
layer_slices:
- {{model: {math}, start: 0, end: 3, scale: 0.7}}
- {{model: {code}, start: 1, end: 4}}
embedding_source: {math}
lm_head_source: {code}
"""
AS_SLICES = """\
merge_method: passthrough
slices:
- sources:
  - {{model: {math}, layer_range: [0, 3], parameters: {{scale: {{filter: down_proj, value: 0.7}}}}}}
- sources: [{{model: {code}, layer_range: [1, 4]}}]
dtype: float32
"""


def test_recipes_of_bakllama(place: Place, tmp_path: Path) -> None:
    """bakllama refuses its own recipes; mstore makes what its source says: slices, of which `scale`
    is that of the down projections."""
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(place.text(LAYER_SLICES))
    done = CliRunner().invoke(bakllama.main, [str(recipe), str(tmp_path / "out")])
    assert isinstance(done.exception, ValidationError)
    assert_same(place.ours(recipe.read_text()), place.theirs(place.text(AS_SLICES)))
