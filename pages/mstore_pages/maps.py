"""The map of layers and parts on a page: the selector, strips, small images, tables, data.

The strips show the first model.  What the script can choose lies beside them as packed numbers;
small images and tables show the same without a script.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from mstore_pages import heatmap
from mstore_pages.document import details, scroll
from mstore_pages.figures import SHARES, SIGNED, Levels, growing, percent
from mstore_pages.heatmap import Packing
from mstore_pages.markup import Markup, data, tag

if TYPE_CHECKING:
    from mstore_pages.summary import LayerMap, ModelMap

MEASURES = {
    "change": "change",
    "share": "share of what the merge changed",
    "left_out": "blocks left out",
    "equal": "blocks equal to the base's",
}


def maps_of(maps: Sequence[LayerMap]) -> Iterator[Markup]:
    """Yield the selector, the strips of the first model, and small images of all others."""
    if not maps:
        return
    changes = [v for one in maps for model in one.models for row in model.change for v in row]
    levels = {
        "change": growing(changes),
        "share": SIGNED,
        "left_out": SHARES,
        "equal": SHARES,
    }
    models = [model.model for model in maps[0].models]
    yield _selector(models, [one for one in MEASURES if _is_told(maps, one)])
    title = f"{models[0]}: {MEASURES['change']}"
    yield tag("h3", title, class_="map-title")
    for one in maps:
        yield tag(
            "div",
            heatmap.rows_of(one.parts, one.models[0].change, levels["change"]),
            _feet(one),
            class_="map",
        )
    yield tag("output", "", class_="readout", id="map-readout", aria_live="polite")
    for name, scale in levels.items():
        yield tag(
            "div",
            heatmap.swatches(scale, unknown="not there, or not known"),
            class_="map-legend",
            id=f"legend-{name}",
            hidden=name != "change",
        )
    yield tag(
        "p",
        "Each row is a part of the layers, each cell a layer. The more a colour differs from the "
        "page, the larger the number.",
        class_="caption",
    )
    for n, one in enumerate(maps):
        yield details(f"{one.kind}: the numbers as a table", _map_table(n, one, levels["change"]))
    if len(models) > 1:
        # Of a virtual merge all are experts, else the first is the result.
        yield from _gallery(max(maps, key=_cells), levels)
    yield _map_data(maps, models, levels)


def _cells(one: LayerMap) -> int:
    return len(one.layers) * len(one.parts)


def _is_told(maps: Sequence[LayerMap], measure: str) -> bool:
    return any(getattr(model, measure) is not None for one in maps for model in one.models)


def _selector(models: Sequence[str], measures: Sequence[str]) -> Markup:
    return tag(
        "form",
        tag(
            "label",
            "Model",
            tag(
                "select",
                *(tag("option", one, value=n) for n, one in enumerate(models)),
                name="model",
            ),
        ),
        tag(
            "label",
            "What is shown",
            tag(
                "select",
                *(tag("option", MEASURES[one], value=one) for one in measures),
                name="measure",
            ),
        ),
        class_="selector",
        id="map-selector",
        hidden=True,
    )


def _feet(one: LayerMap) -> Markup | None:
    if one.layers == ("",):
        return None
    return tag(
        "div", tag("span", one.kind, class_="name"), heatmap.axis(one.layers), class_="row feet"
    )


def _map_table(number: int, one: LayerMap, levels: Levels) -> Markup:
    rows = one.models[0].change
    lines = []
    for at, layer in enumerate(one.layers):
        cells = [tag("td", percent(row[at]), class_=levels.class_of(row[at]) or "") for row in rows]
        lines.append(tag("tr", tag("th", layer or "all", scope="row"), *cells))
    heads = (tag("th", part, scope="col") for part in ("layer", *one.parts))
    inside = tag(
        "table",
        tag("thead", tag("tr", *heads)),
        tag("tbody", *lines),
        id=f"map-table-{number}",
        class_="grid-table",
    )
    return scroll(f"{one.kind}: numbers by layer and part", inside, is_long=True)


def _gallery(one: LayerMap, levels: dict[str, Levels]) -> Iterator[Markup]:
    """Yield small images for each expert, so that all are seen at once, and without a script."""
    experts = [model for model in one.models if model.left_out is not None] or one.models[1:]
    has_shares = all(model.share is not None for model in experts)
    where = f"Rows are the parts and columns the layers of {one.kind}, as above."
    against = " Orange: against the result." if has_shares else ""
    yield from _images(one, experts, "share" if has_shares else "change", levels, where + against)
    if any(v for model in experts for row in model.left_out or () for v in row):
        yield from _images(one, experts, "left_out", levels, where)


def _images(
    one: LayerMap,
    experts: Sequence[ModelMap],
    measure: str,
    levels: dict[str, Levels],
    caption: str,
) -> Iterator[Markup]:
    yield tag("h3", f"Each expert: {MEASURES[measure]}")
    items = []
    for model in experts:
        told = f"{model.model}: {MEASURES[measure]} by part and layer"
        image = heatmap.pixels(getattr(model, measure) or (), levels[measure], told)
        items.append(tag("li", tag("figure", tag("figcaption", model.model), image)))
    yield tag("ul", *items, class_="gallery")
    yield tag("p", caption, class_="caption")
    yield heatmap.swatches(levels[measure])


def _map_data(
    maps: Sequence[LayerMap],
    models: Sequence[str],
    levels: dict[str, Levels],
) -> Markup:
    """Return all numbers for the page's script, packed."""
    packings = {
        name: Packing.of(
            v for m in maps for model in m.models for row in getattr(model, name) or () for v in row
        )
        for name in levels
    }
    kinds = []
    for one in maps:
        kind: dict[str, Any] = {"kind": one.kind, "layers": one.layers, "parts": one.parts}
        for name, packing in packings.items():
            rows = [getattr(model, name) for model in one.models]
            kind[name] = [None if own is None else packing.packed(own) for own in rows]
        kinds.append(kind)
    measures = {
        name: {
            "edges": scale.edges,
            "classes": scale.classes,
            "packing": asdict(p),
        }
        for (name, scale), p in zip(levels.items(), packings.values(), strict=True)
    }
    return data(
        "map-data",
        {"models": models, "measures": measures, "kinds": kinds, "least": heatmap.LEAST_COLUMNS},
    )
