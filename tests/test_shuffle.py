"""Shuffles of layers: recipes of stacks whose layers are drawn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_safetensors
from small_layers import LAYERS, member, write

from mstore import Store
from mstore.merge.recipes.parse import parse
from mstore.merge.recipes.shuffle import Shuffled, shuffled
from mstore.terms.errors import BadRequest, NotFound


def layers_of(text: str) -> list[tuple[str, int]]:
    """The layers of a recipe in order, each as its model and number."""
    (recipe,) = parse(text, "r", strict=True)
    found = []
    for part in recipe.slices:
        (source,) = part.sources
        assert source.layers is not None
        found += [(source.model.text, layer) for layer in range(*source.layers)]
    return found


def test_a_seed_gives_the_same_recipe_anywhere() -> None:
    """The draws are these, on every machine and in every version."""
    text = shuffled([Shuffled("a", 1, 6), Shuffled("b", 0.5, 6)], 7, full_random=False)
    assert text.splitlines() == [
        "# A shuffle of layers: seed 7.",
        "merge_method: passthrough",
        'base_model: "a"',
        "slices:",
        *("- sources:", '  - model: "a"', "    layer_range: [0, 2]"),
        *("- sources:", '  - model: "b"', "    layer_range: [2, 3]"),
        *("- sources:", '  - model: "a"', "    layer_range: [3, 6]"),
    ]
    full = shuffled([Shuffled("a", 0.5, 4), Shuffled("b", 0.5, 4)], 7, full_random=True)
    assert layers_of(full) == [("b", 3), ("a", 0), ("b", 3), ("a", 1)]


def test_layers_are_drawn_by_weight() -> None:
    """Each place has its own layer, of a model as often as its weight says, of none without one."""
    models = [Shuffled("a", 1, 4000), Shuffled("none", 0, 4000), Shuffled("b", 3, 5000)]
    found = layers_of(shuffled(models, 1, full_random=False))
    assert [layer for _, layer in found] == list(range(4000))
    share = Counter(name for name, _ in found)
    assert share.keys() == {"a", "b"}
    # Four standard deviations.
    assert abs(share["a"] / 4000 - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    other = layers_of(shuffled(models, 2, full_random=False))
    assert sum(a != b for a, b in zip(found, other, strict=True)) > 1000


def test_full_random_draws_layers_and_order() -> None:
    """Of each model int(layers * weight) layers are drawn from all that it has, in any order."""
    models = [Shuffled("a", 0.29, 100), Shuffled("b", 1.5, 80), Shuffled("c", 0.001, 80)]
    found = layers_of(shuffled(models, 3, full_random=True))
    assert Counter(name for name, _ in found) == {"a": 28, "b": 120}
    own = [layer for name, layer in found if name == "a"]
    assert (max(own) > 80, max(layer for _, layer in found) < 100) == (True, True)
    assert own != sorted(own)
    assert len({name for name, _ in found[:40]}) == 2


@pytest.mark.parametrize(
    ("models", "full_random", "what"),
    [
        ([], False, "one model at least"),
        ([Shuffled("a", -1, 4)], False, "a: a weight is a number from 0"),
        ([Shuffled("a", float("inf"), 4)], True, "a weight is a number from 0"),
        ([Shuffled("a", 0, 4)], False, "all weights are 0"),
        ([Shuffled("a", 1, 4), Shuffled("b", 1, 3)], False, "b: it has 3 layers, and a has 4"),
        ([Shuffled("a", 0.1, 4)], True, "give no model a layer"),
        ([Shuffled("a", 1e9, 4)], True, "at most 10000 layers"),
    ],
)
def test_what_gives_no_shuffle(models: list[Shuffled], full_random: bool, what: str) -> None:
    """What cannot be drawn is refused."""
    with pytest.raises(BadRequest, match=what):
        shuffled(models, 0, full_random=full_random)


@pytest.mark.parametrize("full_random", [False, True])
def test_a_shuffle_is_a_stack(tmp_path: Path, full_random: bool) -> None:
    """The merge of the recipe has the layers that it names, embeddings of the first and norm and
    head of the last; it reads no weights, and replays."""
    write(tmp_path)
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name in ("base", "math"):
            store.add(tmp_path / name, name=name)
        text = store.shuffle(["base", (store["math"], 1.0)], seed=5, full_random=full_random)
        # An object names its snapshot.
        drawn = layers_of(text.replace(str(store["math"].id), "math"))
        assert {name for name, _ in drawn} == {"base", "math"}
        assert store.shuffle(["base+any"]).splitlines()[2] == 'base_model: "base+any"'
        plan = store.plan(store.read_recipe(text).request)
        assert plan.planned_expert_bytes == 0
        store.merge(plan, name="drawn")
        assert store.replay("drawn").same
        members = {"base": member(0), "math": member(1)}
        own = store["drawn"]
        assert len(drawn) == LAYERS * (2 if full_random else 1)
        for place, (name, layer) in enumerate(drawn):
            for part in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm"):
                wanted = members[name][f"model.layers.{layer}.{part}.weight"]
                found = own.tensor(f"model.layers.{place}.{part}.weight")
                assert found.tobytes() == wanted.tobytes()
        for at, tensor in ((0, "model.embed_tokens"), (-1, "model.norm"), (-1, "lm_head")):
            wanted = members[drawn[at][0]][f"{tensor}.weight"]
            assert own.tensor(f"{tensor}.weight").tobytes() == wanted.tobytes()


def test_models_that_have_no_layers(tmp_path: Path) -> None:
    """A model without layers is refused, and a name that is none."""
    content = np.ones(4, np.float32).tobytes()
    write_safetensors(tmp_path / "one" / "model.safetensors", [("t", "F32", (4,), content)])
    with Store.init(tmp_path / "store") as store:
        store.add(tmp_path / "one", name="one")
        with pytest.raises(BadRequest, match="it has not one stack of layers"):
            store.shuffle(["one"])
        with pytest.raises(NotFound):
            store.shuffle(["two"])
