"""Pages in a real browser: what its console says, what it asks for, what a script can do there."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import browser
import pytest
import report_stores
from browser import asked, dump, shot

from mstore import Store
from mstore_pages import gather, report
from mstore_pages.figures import percent
from mstore_pages.usage import usage_page

pytestmark = browser.needed
HOSTILE = report_stores.HOSTILE
WIDTHS = (320, 768, 1280)
NAMES = ("math", "code", "chat")


def write(root: Path, store: Store) -> Path:
    page = root / "page.html"
    page.write_text(report.snapshot_page(gather.snapshot_summary(store, "model/merged")))
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a merge of 32 layers, in which people wrote what they should not."""
    root = tmp_path_factory.mktemp("browser")
    extra = (f"model.layers.3.{HOSTILE}.weight", f"\u202e{HOSTILE}")
    store = report_stores.family(root, 32, NAMES, extra=extra, licence=json.dumps(HOSTILE))
    store.note("model/merged", {HOSTILE: HOSTILE, "mmlu": 0.61})
    usage = root / "usage.html"
    usage.write_text(usage_page(store.usage(), HOSTILE))
    both = root / "two.html"
    two = gather.comparison_summary(store, "model/math", "model/code")
    both.write_text(report.comparison_page(two))
    return write(root, store)


def probed(page: Path, root: Path, script: str, width: int = 1280) -> Any:
    """What an expression of JavaScript is in the page, without its policy."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page.read_text())
    probe = f"<script>document.title = JSON.stringify((() => {{ {script} }})())</script>"
    copy = root / "probed.html"
    copy.write_text(text.replace("</body>", f"{probe}</body>"))
    found = re.search(r"<title>(.*?)</title>", dump(copy, width=width).dom, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["page.html", "usage.html", "two.html"])
def test_nothing_is_refused_and_nothing_leaves(page: Path, tmp_path: Path, name: str) -> None:
    """The console is empty, also in the dark, and no address is asked for."""
    file = page.with_name(name)
    for dark in (False, True):
        assert dump(file, dark=dark).console == ()
    assert asked(file, tmp_path / "log.json") == []


@pytest.mark.rest
def test_the_checks_above_can_fail(tmp_path: Path) -> None:
    """An error of a script, what a policy refuses and what a page asks for are all seen."""
    bad = tmp_path / "bad.html"
    bad.write_text("<!DOCTYPE html><img src='http://example.invalid/x'><script>nothing()</script>")
    assert any("ReferenceError" in line for line in dump(bad).console)
    assert "http://example.invalid/x" in asked(bad, tmp_path / "log.json")
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
    bad.write_text(f"<!DOCTYPE html>{policy}<p style='color:red'>x</p>")
    assert any("Content Security Policy" in line for line in dump(bad).console)


def test_hostile_names_stay_text(page: Path, tmp_path: Path) -> None:
    """Names of tensors, licences and notes are shown letter by letter, and make no element."""
    told = probed(
        page,
        tmp_path,
        """return {
            images: [...document.images].filter(one => !one.src.startsWith("data:")).length,
            scripts: document.scripts.length,
            handlers: document.querySelectorAll("[onerror]").length,
            cells: document.body.innerText,
        };""",
    )
    assert told["images"] == 0
    # Its own, its data, and the probe.
    assert told["scripts"] == 3
    assert told["handlers"] == 0
    assert HOSTILE in told["cells"]
    assert "\\u202e" in told["cells"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("width", WIDTHS)
def test_screens(page: Path, tmp_path: Path, width: int) -> None:
    """At each width the page is drawn, light and dark differ, and only tables may be wider."""
    light = shot(page, tmp_path / "light.png", width=width)
    dark = shot(page, tmp_path / "dark.png", width=width, dark=True)
    assert min(len(light), len(dark)) > 10_000
    assert light != dark
    script = "return document.documentElement.scrollWidth;"
    assert probed(page, tmp_path, script, width) <= width


@pytest.mark.rest
def test_the_selector_shows_each_expert(page: Path, tmp_path: Path) -> None:
    """Choosing an expert and a share draws its numbers, in the strips and in the table."""
    told = probed(
        page,
        tmp_path,
        """
        const form = document.getElementById("map-selector"), cells = () =>
            [...document.querySelectorAll("#map-table-0 tbody tr:nth-child(2) td")]
                .map(one => one.textContent);
        const first = cells(), options = () =>
            [...form.elements.measure.options].map(one => [one.textContent, one.disabled]);
        const before = options();
        form.elements.model.value = "1";
        form.elements.measure.value = "share";
        form.dispatchEvent(new Event("change"));
        const box = document.querySelector(".map");
        box.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
        return {
            hidden: form.hidden, first, then: cells(), before, after: options(),
            title: document.querySelector(".map-title").textContent,
            said: document.getElementById("map-readout").textContent,
            legends: [...document.querySelectorAll(".map-legend")]
                .filter(one => !one.hidden).map(one => one.id),
            paths: document.querySelectorAll(".strip path").length,
        };""",
    )
    assert told["hidden"] is False
    assert told["title"] == "model/math: share of what the merge changed"
    assert told["first"] != told["then"]
    # Of the result nothing was left out: the greyed choice says what to do.
    assert ["blocks left out (choose an expert first)", True] in told["before"]
    assert ["blocks left out", False] in told["after"]
    # The numbers of layer 1, as the page has them without its script.
    with Store.open(page.parent / "store") as store:
        layers = gather.snapshot_summary(store, "model/merged").maps[0]
    assert told["first"] == [percent(row[1]) for row in layers.models[0].change]
    assert told["then"] == [percent(row[1]) for row in layers.models[1].share or ()]
    assert told["said"] == f"model.layers 1, self_attn.q_proj.weight: {told['then'][0]}"
    assert told["legends"] == ["legend-share"]
    assert told["paths"] > 0


def test_a_narrow_window_shows_the_subject_of_the_lineage(page: Path, tmp_path: Path) -> None:
    """The picture scrolls until its subject is in sight."""
    told = probed(
        page,
        tmp_path,
        """
        const box = document.querySelector(".chosen-box").getBoundingClientRect();
        return [box.right, document.documentElement.clientWidth, box.width];""",
        360,
    )
    right, window, width = told
    assert 0 < width < right <= window


@pytest.mark.rest
def test_headings_sort(page: Path, tmp_path: Path) -> None:
    """A click on a heading sorts by numbers, not by their letters, and says which way."""
    told = probed(
        page,
        tmp_path,
        """
        const table = document.querySelector("#tensors table"), head = table.tHead.rows[0].cells[1];
        const values = () => [...table.tBodies[0].rows].map(row => Number(row.cells[1].dataset.v));
        const found = [];
        for (let n = 0; n < 2; n += 1) {
            head.querySelector("button").click();
            found.push([head.getAttribute("aria-sort"), values()]);
        }
        return found;""",
    )
    (down, falling), (up, rising) = told
    assert (down, up) == ("descending", "ascending")
    assert falling == sorted(falling, reverse=True)
    assert rising == sorted(rising)
    assert len({*rising}) > 5


@pytest.mark.rest
@pytest.mark.parametrize(
    ("layers", "names", "experts", "most"),
    [
        (2, ("math", "code"), 0, 80),
        pytest.param(
            *(80, tuple(f"expert-{n:02}" for n in range(20)), 0, 300), marks=pytest.mark.slow
        ),
        pytest.param(126, ("math", "code"), 8, 300, marks=pytest.mark.slow),
    ],
    ids=["2 layers", "80 layers by 20 experts", "126 layers of 8"],
)
def test_sizes(
    tmp_path: Path, layers: int, names: tuple[str, ...], experts: int, most: int
) -> None:
    """Small and large models have a page of at most so many KB, without an error."""
    store = report_stores.family(tmp_path, layers, names, experts=experts, size=8)
    # Experts of a mixture are one part: of 128, the page is as large.
    page = write(tmp_path, store)
    assert page.stat().st_size <= most * 1000
    assert dump(page).console == ()
    assert asked(page, tmp_path / "log.json") == []
