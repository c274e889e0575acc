"""How units of a merge are called."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.search.spelling import UnitName, of_probe

EXPERTS = ("code", "math", "law", "chat")
LAYERS = ("model.embed_tokens", *(f"model.layers.{number}" for number in range(12)))
BY_EXPERT = [(expert, None) for expert in EXPERTS]
BY_LAYER = [(None, layer) for layer in LAYERS]
BY_BOTH = [(expert, layer) for expert in EXPERTS for layer in LAYERS]
TWO_STACKS = [(None, f"{stack}.layers.{n}") for stack in ("text", "vision") for n in (0, 1, 2)]


def without(units: Sequence[UnitName], *left_out: UnitName) -> list[UnitName]:
    return [one for one in units if one not in left_out]


@pytest.mark.parametrize(
    ("tried", "units", "name"),
    [
        (BY_EXPERT[:2], BY_EXPERT, "code, math"),
        (without(BY_EXPERT, ("law", None)), BY_EXPERT, "all but law"),
        (BY_LAYER[1:5], BY_LAYER, "layers 0-3"),
        ([BY_LAYER[1]], BY_LAYER, "layer 0"),
        ([*BY_LAYER[:2], *BY_LAYER[3:5]], BY_LAYER, "layers 0, 2-3, model.embed_tokens"),
        ([BY_LAYER[0], *BY_LAYER[3:5]], BY_LAYER, "layers 2-3, model.embed_tokens"),
        (BY_LAYER[:-1], BY_LAYER, "all but layer 11"),
        (BY_BOTH[: 2 * len(LAYERS)], BY_BOTH, "code, math"),
        ([("law", LAYERS[8])], BY_BOTH, "law in layer 7"),
        (without(BY_BOTH, ("law", LAYERS[8])), BY_BOTH, "all but law in layer 7"),
        ([*BY_BOTH[: len(LAYERS)], *BY_BOTH[27:31]], BY_BOTH, "code; law in layers 0-3"),
        ([(e, LAYERS[3]) for e in ("math", "chat")], BY_BOTH, "math, chat in layer 2"),
        (TWO_STACKS[1:4], TWO_STACKS, "text.layers 1-2, vision.layers 0"),
        ([(None, "h.0"), (None, "h.4")], [(None, f"h.{n}") for n in (0, 4, 6)], "h 0-4"),
        ([], BY_BOTH, "the base alone"),
        (BY_BOTH, BY_BOTH, "all"),
    ],
)
def test_a_probe_has_a_short_name(
    tried: Sequence[UnitName], units: Sequence[UnitName], name: str
) -> None:
    """A probe is called by its experts, by ranges of layers, or by what it lacks."""
    assert of_probe(tried, units) == name


def read(name: str) -> set[UnitName]:
    """The units of BY_BOTH that a name of a probe says."""
    if name in ("the base alone", "all"):
        return set(BY_BOTH if name == "all" else ())
    if name.startswith("all but "):
        return set(BY_BOTH) - read(name.removeprefix("all but "))
    found: set[UnitName] = set()
    for part in name.split("; "):
        experts, _, layers = part.partition(" in ")
        chosen: set[str] = set() if layers else set(LAYERS)
        for word in layers.replace("layers ", "").replace("layer ", "").split(", "):
            if word == "model.embed_tokens":
                chosen.add(word)
            elif word:
                first, _, last = word.partition("-")
                numbers = range(int(first), int(last or first) + 1)
                chosen |= {f"model.layers.{number}" for number in numbers}
        found |= {(expert, layer) for expert in experts.split(", ") for layer in chosen}
    return found


@given(tried=st.sets(st.sampled_from(BY_BOTH)))
def test_a_name_is_exact(tried: set[UnitName]) -> None:
    """Whoever reads the name of a probe knows its units."""
    assert read(of_probe(tried, BY_BOTH)) == tried
