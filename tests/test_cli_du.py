"""`du` on the command line: what it says, as JSON and as names, and the page that it writes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import families
import pytest
from cli_runs import Program
from hypothesis import given
from hypothesis import strategies as st

from mstore_cli.sizes import format_size
from mstore_pages import treemap
from mstore_pages.markup import visible
from mstore_pages.treemap import Box, Node, place, squarified


@pytest.fixture(scope="module")
def mstore(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store of a base, an expert and a tag.  Tests only read."""
    root = tmp_path_factory.mktemp("du")
    families.layered(rows=40).write(root)
    mstore = Program(root / "store")
    mstore.succeed("init", "--block-size", "64KiB", "--codec", "raw")
    mstore.succeed("add", root / "base", "--name", "m/base")
    mstore.succeed("add", root / "e0", "--name", "m/e0", "--base", "m/base")
    mstore.succeed("tag", "v1", "m/e0")
    return mstore


def test_all_refs_and_their_sums(mstore: Program) -> None:
    """Every ref has a line; unique and shared add up to stored; -q names the refs."""
    told = mstore.succeed("du", "--json").document
    assert all(ref["shared_with"] == [] for ref in told["refs"])
    assert [ref["name"] for ref in told["refs"]] == ["m/base", "m/e0", "v1"]
    for ref in told["refs"]:
        assert ref["unique_bytes"] + ref["shared_bytes"] == ref["stored_bytes"] > 0
    base, expert, tag = told["refs"]
    assert base["freed_bytes"] == expert["freed_bytes"] == tag["freed_bytes"] == 0
    assert told["freed_bytes"] == told["live_bytes"] == told["stored_bytes"]
    assert mstore.succeed("du", "-q").lines == ["m/base", "m/e0", "v1"]
    shown = mstore.succeed("du").out
    assert all(word in shown for word in ("m/base", "m/e0", "v1", "UNIQUE", "FREED BY RM", "raw"))
    assert "SHARES WITH" not in shown


def test_some_refs_together(mstore: Program) -> None:
    """With names, they alone, whom they share with, and what is freed without all of them."""
    told = mstore.succeed("du", "v1", "m/e0", "--json").document
    assert [ref["name"] for ref in told["refs"]] == ["v1", "m/e0"]
    tag, expert = told["refs"]
    assert tag["shared_with"][0] == {"name": "m/e0", "stored_bytes": expert["stored_bytes"]}
    base = next(one for one in tag["shared_with"] if one["name"] == "m/base")
    assert told["freed_bytes"] == tag["stored_bytes"] - base["stored_bytes"]
    shown = mstore.succeed("du", "v1", "m/e0").out
    assert "SHARES WITH" in shown
    assert "by rm, and gc 30 days later" in shown


def test_many_that_share_are_counted(mstore: Program, tmp_path: Path) -> None:
    """Of many refs that share with a named one, those that share most are listed, and the rest is
    counted."""
    copy = Program(tmp_path / "copy")
    mstore.succeed("clone", mstore.store, copy.store)
    for number in range(12):
        copy.succeed("tag", f"t{number:02}", "m/e0")
    shown = copy.succeed("du", "v1").out
    rows = [line for line in shown.splitlines() if line.startswith("v1  ")]
    # The ref itself, ten that share with it, the rest.
    assert len(rows) == 1 + 10 + 1
    assert " 4 more " in rows[-1]
    assert "m/base" not in shown
    assert len(copy.succeed("du", "v1", "--json").document["refs"][0]["shared_with"]) == 14


def test_a_name_that_is_none(mstore: Program) -> None:
    """It fails with the name and draws nothing."""
    done = mstore("du", "m/nobody")
    assert (done.status, done.out) == (1, "")
    assert "m/nobody" in done.err


def test_stats_list_codecs(mstore: Program) -> None:
    """A line for each way in which blocks are stored, and what is of no use."""
    shown = mstore.succeed("stats").out
    assert all(word in shown for word in ("CODEC", "RATIO", "raw", "constant", "dead in packs"))


def test_a_page_keeps_the_numbers(mstore: Program, tmp_path: Path) -> None:
    """The page names every ref with its size, in the picture and in the table, and the codecs; what
    is printed stays, and the same store gives the same bytes."""
    file, again = tmp_path / "du.html", tmp_path / "again.html"
    shown = mstore.succeed("du", "--html", file).out
    assert shown == f"{mstore.succeed('du').out}drawn in {file}\n"
    mstore.succeed("du", "--html", again)
    assert file.read_bytes() == again.read_bytes()
    page = file.read_text()
    document = mstore.succeed("du", "--json").document
    for ref in document["refs"]:
        size, unique = (format_size(ref[key]) for key in ("portion_bytes", "unique_bytes"))
        assert f"<title>{ref['name']}: {size} (" in page
        assert f"{unique} in this ref only" in page
        assert re.search(rf"<th [^>]*>\d+ {ref['name']}</th>", page)
    for one in document["codecs"]:
        assert f'<th scope="row">{one["codec"]}</th>' in page


SVG = "{http://www.w3.org/2000/svg}"


def shares(*sizes: float, name: str = "team/model") -> list[treemap.Share]:
    return [
        treemap.Share(n, f"{name}-{n}", f"{size:.0f} B", size, size / 4, f"part {n}")
        for n, size in enumerate(sizes, 1)
    ]


def test_labels_of_a_treemap_are_whole() -> None:
    """A label is a name and a size, a name, or the number of the part: never a part of a name.

    It lies inside of its rectangle, however many there are, and names are data.
    """
    parts = shares(*(float(1000 - n) for n in range(80)), name="a<b>&\x1b" + 12 * "long")
    drawn = ET.fromstring(treemap.draw(parts, "all"))
    both = {f"{one.name}  {one.size}" for one in parts}
    told = both | {one.name for one in parts} | {str(one.number) for one in parts}
    labels = [one for one in drawn.iter(f"{SVG}text") if one.get("class") == "name"]
    assert len(labels) > 40
    assert {"".join(one.itertext()) for one in labels} <= {visible(one) for one in told}
    areas = [one for one in drawn.iter(f"{SVG}rect") if one.get("class") in ("only", "shared")]
    plates = [one for one in drawn.iter(f"{SVG}rect") if one.get("class") == "paper"]
    right = max(float(one.get("x", 0)) + float(one.get("width", 0)) for one in areas)
    for plate in plates:
        assert float(plate.get("x", 0)) + float(plate.get("width", 0)) <= right


SIZES = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=40).map(lambda s: sorted(s)[::-1])


def overlap(a: Box, b: Box) -> float:
    across = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    along = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
    return max(0.0, across) * max(0.0, along)


@given(SIZES, st.floats(0.1, 10), st.floats(0.1, 10))
def test_areas_are_sizes(sizes: list[float], width: float, height: float) -> None:
    """Rectangles lie inside the box, do not overlap, and each area is its size's share."""
    boxes = squarified(sizes, Box(2.0, 3.0, width, height))
    area, slack = width * height, 1e-6 * (1 + width + height)
    for size, box in zip(sizes, boxes, strict=True):
        assert math.isclose(box.width * box.height, size / sum(sizes) * area, rel_tol=1e-6)
        assert 2.0 - slack <= box.x
        assert box.x + box.width <= 2.0 + width + slack
        assert 3.0 - slack <= box.y
        assert box.y + box.height <= 3.0 + height + slack
    shared = sum(overlap(a, b) for n, a in enumerate(boxes) for b in boxes[:n])
    assert shared <= 1e-6 * area


def test_the_example_of_the_paper() -> None:
    """Sizes 6, 6, 4, 3, 2, 2, 1 in a box of 6 x 4: two sixes, then 4 and 3, and 2 by itself."""
    boxes = squarified([6, 6, 4, 3, 2, 2, 1], Box(0, 0, 6, 4))
    assert [(b.x, b.y) for b in boxes[:4]] == [
        (0, 0),
        (0, 2),
        (3, 0),
        (pytest.approx(3 + 12 / 7), 0),
    ]
    assert (boxes[0].width, boxes[0].height) == (3, 2)
    assert boxes[2].height == pytest.approx(7 / 3)
    assert boxes[4].y == pytest.approx(7 / 3)


def test_parts_stand_in_their_whole() -> None:
    """A part lies inside its whole, in the drawing order; what has no size has no rectangle."""
    tree = Node(
        "all", 10, (Node("a", 6, (Node("a1", 4), Node("a2", 2))), Node("b", 4), Node("c", 0))
    )
    placed = place(tree, Box(0, 0, 5, 2), margin=0.1)
    assert [one.node.name for one in placed] == ["all", "a", "a1", "a2", "b"]
    boxes = {one.node.name: one.box for one in placed}
    for part, whole in (("a1", "a"), ("a2", "a"), ("a", "all"), ("b", "all")):
        inner, outer = boxes[part], boxes[whole]
        assert overlap(inner, outer) == pytest.approx(inner.width * inner.height)
    assert [node.name for node in placed[2].path] == ["all", "a"]
