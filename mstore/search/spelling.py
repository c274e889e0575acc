"""How units of a merge are called: those that a probe has, and those that are to blame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mstore.terms.phrases import few

UnitName = tuple[str | None, str | None]
"""An expert's name and a layer; None for all of either."""


def of_culprits(units: Sequence[UnitName]) -> str:
    """Name units to blame: `code, math`, or `code in model.layers.1; math in model.layers.3`."""
    if all(layer is None for _, layer in units):
        return few([expert for expert, _ in units if expert is not None], len(units))
    by_expert: dict[str | None, list[str]] = {}
    for expert, layer in units:
        by_expert.setdefault(expert, []).extend([] if layer is None else [layer])
    return "; ".join(
        few(layers) if expert is None else f"{expert} in {few(layers)}" if layers else expert
        for expert, layers in by_expert.items()
    )


def of_probe(tried: Iterable[UnitName], units: Sequence[UnitName]) -> str:
    """Name exactly what a probe has of all units: `code, math`, `all but math in layers 0-3`.

    units: all of the merge, by expert, then by layer. `layers 0-3` are those of them that are
    units: other layers change nothing.
    """
    chosen = frozenset(tried)
    if not chosen:
        return "the base alone"
    if len(chosen) == len(units):
        return "all"
    direct = _spelled(chosen, units)
    if 2 * len(chosen) <= len(units):
        return direct
    return min(direct, f"all but {_spelled(frozenset(units) - chosen, units)}", key=len)


def _spelled(chosen: frozenset[UnitName], units: Sequence[UnitName]) -> str:
    """Name some units, experts with the same layers together."""
    experts: dict[str, list[str | None]] = {}
    for expert in dict.fromkeys(expert for expert, _ in units):
        own = [one for one in units if one[0] == expert]
        if chosen.isdisjoint(own):
            continue
        layers = [layer for _, layer in own if layer is not None]
        # A whole expert needs no layers; if all units are of all experts, layers are all there is.
        is_whole = expert is not None and chosen.issuperset(own)
        has = frozenset(layer for unit, layer in chosen if unit == expert)
        experts.setdefault("" if is_whole else _ranges(has, layers), []).append(expert)
    return "; ".join(
        layers if names == [None] else ", ".join(map(str, names)) + (layers and f" in {layers}")
        for layers, names in experts.items()
    )


def _ranges(chosen: frozenset[str | None], layers: Sequence[str]) -> str:
    """Name layers by ranges of numbers: `layers 0-3, 8; lm_head`."""
    parts = {layer: layer.rpartition(".") for layer in layers}
    numbered = {layer for layer, (_, _, last) in parts.items() if last.isdecimal()}
    kinds = list(dict.fromkeys(parts[layer][0] for layer in layers if layer in numbered))
    texts: list[str] = []
    for kind in kinds:
        own = [layer for layer in layers if layer in numbered and parts[layer][0] == kind]
        runs: list[list[str]] = []
        for at, layer in enumerate(own):
            if layer not in chosen:
                continue
            if at == 0 or own[at - 1] not in chosen:
                runs.append([])
            runs[-1].append(parts[layer][2])
        if not runs:
            continue
        # One stack of layers needs no longer name.
        word = kind.rpartition(".")[2] if len(kinds) == 1 else kind
        is_single = len(runs) == len(runs[0]) == 1
        word = "layer" if (word, is_single) == ("layers", True) else word
        texts.append(
            f"{word} "
            + ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        )
    rest = [layer for layer in layers if layer not in numbered and layer in chosen]
    return ", ".join([*texts, *rest])
