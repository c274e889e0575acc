"""Pages and pictures as text: what is escaped, what is measured, which bytes they have."""

from __future__ import annotations

import itertools
import json
import re
import struct
import zlib
from base64 import b64decode
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import report_stores
from cli_runs import Program
from msgspec.structs import replace

from mstore import Store
from mstore.api.reports import NoteReport, OriginReport
from mstore.store.objects.shapes import parts_of
from mstore.terms.ids import NoteId, SnapshotId
from mstore.terms.report import plain
from mstore_pages import curve, figures, gather, heatmap, lineage, matrix, report, sections, summary
from mstore_pages.curve import BudgetPoint
from mstore_pages.heatmap import Packing
from mstore_pages.lineage import Node
from mstore_pages.markup import Markup, breaking, data, escaped, join, tag

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = report_stores.HOSTILE


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a merge of two experts.  Tests only read, and may measure."""
    root = tmp_path_factory.mktemp("pages")
    return report_stores.family(root, 3, ("math", "code"), size=140)


@pytest.fixture(scope="module")
def found(family: Store) -> summary.SnapshotSummary:
    """The summary of the merge."""
    return gather.snapshot_summary(family, "model/merged")


# -- markup --------------------------------------------------------------------------------------


def test_text_is_escaped_by_its_type() -> None:
    """Text becomes text wherever it stands; only what is markup already stays markup."""
    made = tag("p", HOSTILE, Markup("<b>b</b>"), 3, None, title=HOSTILE)
    (p,) = ET.fromstring(f"<x>{made}</x>")
    assert p.text == HOSTILE
    assert p.get("title") == HOSTILE
    assert made.endswith("<b>b</b>3</p>")
    assert escaped("<") == "&lt;" == join(["<"])
    assert type(escaped("<")) is Markup
    # Adding makes text of markup, so nothing escapes the rule by accident.
    assert escaped(Markup("<i>") + "<") == "&lt;i&gt;&lt;"


def test_characters_that_nobody_sees_are_shown() -> None:
    """A name cannot turn the direction of its line, end a line, or hide a part of itself."""
    assert tag("p", "a\u202eb\x1b\u200b\ud800") == "<p>a\\u202eb\\x1b\\u200b\\ud800</p>"


def test_names_may_break_behind_their_dots() -> None:
    """A long name breaks where its words end, and is the same text."""
    made = breaking("a.b_c..<d>&.e")
    assert made == "a.<wbr>b_<wbr>c..<wbr>&lt;d&gt;&amp;.<wbr>e"


def test_data_cannot_end_its_element() -> None:
    """Whatever a name holds, the JSON of a page is one element that says the same."""
    made = data("x", {"name": HOSTILE, "mark": "<!--"})
    assert made.count("<") == made.count(">") == 2
    assert json.loads(made.partition(">")[2].rpartition("<")[0]) == {
        "name": HOSTILE,
        "mark": "<!--",
    }


# -- pictures ------------------------------------------------------------------------------------


def boxes(drawn: str) -> list[tuple[float, float, float, float]]:
    found = []
    for one in ET.fromstring(drawn).iter(f"{SVG}rect"):
        if one.get("class") in ("box", "chosen-box"):
            x, y, wide, high = (float(one.get(key, 0)) for key in ("x", "y", "width", "height"))
            found.append((x, y, x + wide, y + high))
    return found


def texts(drawn: str) -> list[str]:
    return ["".join(one.itertext()) for one in ET.fromstring(drawn).iter(f"{SVG}text")]


def chain(count: int, wide: int) -> list[Node]:
    """Generations of `wide` snapshots, each made from all of the one before, and from the first."""
    nodes = []
    for rank, place in itertools.product(range(count), range(wide)):
        before = [("expert", f"{rank - 1}/{n}") for n in range(wide)] if rank else []
        first = [("base", "0/0")] if rank > 1 else []
        key = f"{rank}/{place}"
        nodes.append(
            Node(key, (f"name-{key}-{HOSTILE}" * (place + 1),), ("add",), (*before, *first))
        )
    return nodes[::-1]


@pytest.mark.parametrize(("count", "wide"), [(1, 1), (2, 5), (6, 3), (30, 1)])
def test_boxes_of_a_lineage_do_not_overlap(count: int, wide: int) -> None:
    """Every snapshot has a box of its own, right of what it was made from, and in the picture."""
    nodes = chain(count, wide)
    drawn = lineage.draw(nodes)
    own = boxes(drawn)
    assert len(own) == count * wide
    for (x0, y0, x1, y1), (u0, v0, u1, v1) in itertools.combinations(own, 2):
        assert x1 <= u0 or u1 <= x0 or y1 <= v0 or v1 <= y0
    at = dict(zip((node.key for node in nodes), own, strict=True))
    for node in nodes:
        assert all(at[parent][2] < at[node.key][0] for _, parent in node.parents)
        wanted = max(figures.width_of(name) for name in node.names)
        assert at[node.key][2] - at[node.key][0] >= wanted
    edge = float(ET.fromstring(drawn).get("width", 0))
    assert all(box[2] <= edge for box in own)
    assert {name for node in nodes for name in node.names} <= {*texts(drawn)}


def test_a_lineage_that_goes_round_is_drawn() -> None:
    """Records from elsewhere may name each other: the picture ends all the same."""
    nodes = [Node(key, (key,), (), (("previous", other),)) for key, other in ("ab", "ba", "cc")]
    assert len(boxes(lineage.draw(nodes))) == 3


def test_a_matrix_has_every_name_and_number() -> None:
    """Names stand in full, numbers in the cells and in their titles, unknown cells are hatched."""
    long = "expert/" + 60 * "x" + "_end"
    made = matrix.Matrix(
        title="who made it",
        rows=("layer 0", long),
        columns=(HOSTILE, "b"),
        cells=((0.254, 1.0), (None, -0.001)),
        measure="share",
        levels=figures.SIGNED,
        axes=("layer", "expert"),
    )
    drawn = matrix.draw(made)
    assert {"layer 0", long, HOSTILE, "b", "25", "100", "not known"} <= {*texts(drawn)}
    assert f"{long}, {HOSTILE}: not known" in [
        "".join(one.itertext()) for one in ET.fromstring(drawn).iter(f"{SVG}title")
    ]
    assert float(ET.fromstring(drawn).get("width", 0)) > figures.width_of(long)


def test_a_curve_marks_what_is_known() -> None:
    """Kinds of errors that nobody knows have no line; the merge has a ring, inside the picture."""
    points = [BudgetPoint(n << 20, 0.1 / n**4) for n in range(1, 11)]
    drawn = curve.draw(points, HOSTILE, BudgetPoint(10 << 20, 0.0))
    assert "certified bound" in texts(drawn)
    assert {"estimate", "measured"}.isdisjoint(texts(drawn))
    assert "read from experts (MiB)" in texts(drawn)
    assert "this merge: 10.0 MiB, 0\u00a0%" in texts(drawn)
    for one in ET.fromstring(drawn).iter(f"{SVG}circle"):
        assert 0 < float(one.get("cx", -1)) < curve.WIDTH
        assert 0 < float(one.get("cy", -1)) < curve.HEIGHT
    assert "this merge" not in curve.draw([BudgetPoint(0)], "nothing")


def test_a_scale_has_a_class_for_each_number() -> None:
    """Zero has a class of its own, larger numbers never a smaller class, and no number has none."""
    for values in ([0.1, 0.11, 0.12], [10.0**-n for n in range(9)], [0.5], [0.0], []):
        levels = figures.growing(values)
        assert levels.class_of(0.0) == "h0"
        order = [levels.classes.index(levels.class_of(one) or "") for one in sorted(values)]
        assert order == sorted(order)
        assert len(figures.legend(levels)) == len(levels.classes)
        assert levels.class_of(None) is None
        assert levels.class_of(float("nan")) is None


def test_the_edges_of_a_scale_are_round() -> None:
    """Steps are equal where numbers are alike, and 1, 2, 5, 10 where most are small."""
    alike = figures.growing([0.31, 0.42, 0.56, 0.753]).edges[1:]
    assert alike == (0.2, 0.4, 0.6)
    small = figures.growing([0.0011, 0.0013, 0.004, 0.03, 0.9]).edges[1:]
    assert small == (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def test_what_may_be_chance_has_no_colour(found: summary.SnapshotSummary) -> None:
    """A cosine within its standard deviation is coloured as zero."""
    assert found.similarity is not None
    (first, *rest) = found.similarity.pairs
    pairs = (replace(first, cosine=-0.3, deviation=0.4), *rest)
    shown = replace(found.similarity, pairs=pairs)
    told = "".join(sections.similarity(shown))
    assert f'<td class="h0">{figures.MINUS}0.30</td>' in told
    pairs = (replace(first, cosine=-0.3, deviation=0.04), *rest)
    told = "".join(sections.similarity(replace(shown, pairs=pairs)))
    assert f'<td class="n3">{figures.MINUS}0.30</td>' in told


def test_origins_are_told_where_they_are_known(found: summary.SnapshotSummary) -> None:
    """The repository of an imported model stands in the picture and in the table."""
    assert "Origin" not in "".join(sections.ancestry(found.lineage, complete=True))
    origin = OriginReport("https://example.org/a/b", "main", "c0ffee")
    first = found.lineage[0]
    known = replace(first, snapshot=replace(first.snapshot, origin=origin))
    told = "".join(sections.ancestry([known], complete=True))
    assert told.count("https://example.org/a/b") == 2


@pytest.mark.parametrize(
    "values",
    [
        [None, 0.0, 1e-12, 0.101, 0.09996, 0.5, 1.0, 1 - 1e-9],
        [1e-6, 3.333e-4, 0.02, 1.7, 123.456],
        [-0.7, 0.0, 0.25, None, 1.2, -1e-7, 4.2e-5],
        [None],
        [0.5, *9 * [0.25], *7 * [None], *80 * [0.0], -1.0],
        [n / 1000 for n in range(-500, 500)],
    ],
)
def test_packed_numbers_are_those_of_the_tables(values: list[float | None]) -> None:
    """What the script unpacks has the digits that the page shows without it."""
    how = Packing.of(values)
    packed = re.sub(r"(.)~(\d+)\.", lambda run: run[1] * int(run[2]), how.packed([values]))
    assert len(packed) == how.letters * len(values)
    known: list[float | None] = [None, 0.0]
    for code in itertools.accumulate(how.steps):
        sign, n = divmod(code, 900 * how.decades)
        known.append(float(f"{'-' if sign else ''}{100 + n % 900}e{how.low + n // 900}"))
    for at, value in enumerate(values):
        place = 0
        for letter in packed[at * how.letters : (at + 1) * how.letters]:
            place = place * 64 + heatmap._ALPHABET.index(letter)
        assert figures.percent(known[place]) == figures.percent(value)


def test_percentages_have_three_digits() -> None:
    """Neither exponents nor digits beyond the third are shown."""
    told = [figures.percent(one) for one in (3e-7, 12.345, 1.0, -0.04321, 1e-9)]
    wanted = ["0.00003", "1230", "100", f"{figures.MINUS}4.32", "0"]
    assert told == [f"{one}{figures.NO_BREAK}%" for one in wanted]


def test_small_images_are_png() -> None:
    """The pixels have the colours of the legend, for light and dark: read by the format's rules."""
    made = heatmap.pixels([[0.0, 1.0, None], [1.0, 0.0, 0.0]], figures.SHARES, "told")
    dark, light = re.findall(r"base64,([^\"]+)", made)
    assert "prefers-color-scheme:dark" in made.partition("<img")[0]
    assert drawn_by(light) == colours("f1f3f6", "123a6a", "ffffff")
    assert drawn_by(dark) == colours("22262e", "cfe3fa", "14161a")


def colours(least: str, most: str, none: str) -> list[list[str]]:
    return [[least, most, none], [most, least, least]]


def drawn_by(image: str) -> list[list[str]]:
    """The colours of an image of three columns and two rows."""
    raw = b64decode(image)
    chunks, at = {}, 8
    while at < len(raw):
        (length,) = struct.unpack(">I", raw[at : at + 4])
        kind, body = raw[at + 4 : at + 8], raw[at + 8 : at + 8 + length]
        assert raw[at + 8 + length :][:4] == struct.pack(">I", zlib.crc32(kind + body))
        chunks[kind] = body
        at += 12 + length
    assert chunks[b"IHDR"][:8] == struct.pack(">II", 3, 2)
    rows = zlib.decompress(chunks[b"IDAT"])
    palette = [chunks[b"PLTE"][n : n + 3].hex() for n in range(0, len(chunks[b"PLTE"]), 3)]
    # A byte before each row says how it is filtered; four pixels a byte.
    rows_of = [[rows[at] >> shift & 3 for shift in (6, 4, 2)] for at in (1, 3)]
    return [[palette[one] for one in row] for row in rows_of]


# -- summaries -----------------------------------------------------------------------------------


def test_parts_of_layers() -> None:
    """Numbers behind the layer's own are stars; a name that is a layer has no part."""
    names = ["a.layers.0.mlp.experts.7.up", "a.layers.10.norm", "a.embed.weight", "head"]
    assert parts_of(names) == {
        "a.layers.0.mlp.experts.7.up": ("a.layers.0", "mlp.experts.*.up"),
        "a.layers.10.norm": ("a.layers.10", "norm"),
        "a.embed.weight": ("a.embed", "weight"),
        "head": ("head", ""),
    }


def test_shares_of_a_layer_add_up(found: summary.SnapshotSummary) -> None:
    """Shares of experts add up to 1 in each layer and in each cell of the map."""
    known = [one.shares for one in found.layers if None not in one.shares]
    assert known
    assert all(sum(shares) == pytest.approx(1) for shares in known)  # type: ignore[arg-type]
    (layers, _) = found.maps
    cells: list[Any] = [
        [model.share[part][at] for model in layers.models[1:] if model.share]
        for part in range(len(layers.parts))
        for at in range(len(layers.layers))
    ]
    assert sum(one[0] is not None for one in cells) > 9
    assert all(sum(one) == pytest.approx(1) for one in cells if one[0] is not None)


def test_the_map_is_what_compare_says(family: Store, found: summary.SnapshotSummary) -> None:
    """Cells are the parts of `compare`, and the most changed tensor is the most changed one."""
    told = family.compare("model/merged", base="model/base", by="part")
    by_name = {one.name: one.models[0].change for one in told.parts}
    (layers, outside) = found.maps
    for part, row in zip(layers.parts, layers.models[0].change, strict=True):
        for number, change in zip(layers.layers, row, strict=True):
            assert change == by_name[f"model.layers.{number}.{part}"]
    assert outside.parts == ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    tensors = family.compare("model/merged", base="model/base", by="tensor").parts
    first = max(tensors, key=lambda one: one.models[0].change or 0.0)
    assert (found.tensors[0].name, found.tensors[0].change) == (first.name, first.models[0].change)


def test_what_a_budget_left_out(family: Store, found: summary.SnapshotSummary) -> None:
    """Experts' counts are those of `explain`."""
    told = family.explain("model/merged")
    for one, share in zip(found.experts, told.experts, strict=True):
        assert one.chunks_left_out == share.chunks_over_budget > 0
        assert one.chunks_used == share.chunks_read + share.chunks_shared
        assert one.chunks_equal_base == share.chunks_equal_base


def test_blocks_by_origin(family: Store) -> None:
    """Blocks from parents and new ones are all blocks, of an import too; codecs add up."""
    for name in ("model/base", "model/math", "model/merged"):
        told = family.reuse(name)
        assert told.new_blocks + sum(one.blocks for one in told.reused) == told.blocks
        assert sum(one.blocks for one in told.codecs) == told.blocks
        assert sum(one.stored_bytes for one in told.codecs) == told.stored_bytes
        assert told.new_bytes + sum(one.stored_bytes for one in told.reused) == told.stored_bytes
    merged = family.reuse("model/merged")
    assert {one.parent.role for one in merged.reused} == {"base", "expert"}
    assert family.reuse("model/base").new_blocks == family.reuse("model/base").blocks


def test_quick_reads_no_weights(family: Store) -> None:
    """Without measuring, shares are not known and the page says so; experts' changes are."""
    quick = gather.snapshot_summary(family, "model/merged", measure=False)
    assert quick.gaps["shares"] == "weights were not read"
    assert all(one.share is None and one.change is not None for one in quick.experts)
    assert "Shares are not known: weights were not read." in report.snapshot_page(quick)


# -- first lines, notes and the recipe -----------------------------------------------------------


def noted(kind: str, key: str, value: object) -> NoteReport:
    return NoteReport(NoteId(b"n" * 32), SnapshotId(b"s" * 32), kind, key, value, "me", 1, "counts")


def with_scores(found: summary.SnapshotSummary, *notes: NoteReport) -> summary.SnapshotSummary:
    """The summary with notes, and an evaluation of its base with 0.398."""
    base = noted("evaluation", "python score.py {}", {"scores": {"acc": 0.398}})
    lineage = tuple(
        replace(one, snapshot=replace(one.snapshot, notes=(base,)))
        if one.snapshot.refs == ("model/base",)
        else one
        for one in found.lineage
    )
    return replace(found, snapshot=replace(found.snapshot, notes=notes), lineage=lineage)


def lead(page: str) -> str:
    """The first lines of a page, as text."""
    inside = page.partition('<p class="verdict">')[2].partition("</p>")[0]
    return unescape(re.sub("<[^>]+>", "", inside)).replace(figures.NO_BREAK, " ")


def test_a_verdict_tells_its_limit_and_the_base_s_score(found: summary.SnapshotSummary) -> None:
    """The first lines have score, limit and reference; the table has the scores of parents."""
    limit = {
        "score": "acc", "value": 0.416, "sign": ">=", "limit": 0.298, "held": True,
        "reference": "base", "reference_value": 0.398,
    }  # fmt: skip
    command = ["python", "/far/away/score.py", "{}"]
    verdict = {"passed": True, "comparisons": [limit], "scores": {"acc": 0.416, "f1": 0.5}}
    scores = {"command": command, "scores": {"acc": 0.416}}
    key = "python score.py {}"
    shown = with_scores(
        found, noted("verdict", f"gate: {key}", verdict), noted("evaluation", key, scores)
    )
    page = report.snapshot_page(shown)
    told = lead(page)
    assert "passed: acc 0.416 ≥ 0.298 (base has 0.398); f1 0.5." in told
    # The gate's own evaluation is not told again, nor is its path.
    assert "Evaluation" not in told
    assert "/far/away" not in told
    notes = page.partition('<section id="notes"')[2].partition("</section>")[0]
    assert "/far/away/score.py" in notes
    rows = re.findall(r"<tr>(.*?)</tr>", notes.partition("</table>")[0])
    assert [re.sub("<[^>]+>", "|", row).strip("|") for row in rows[1:]] == [
        "model/merged||this one||0.416", "model/base||base||0.398",
    ]  # fmt: skip
    limit["held"] = False
    verdict["passed"] = False
    failed = with_scores(found, noted("verdict", "gate: mine", verdict))
    assert "Gate mine: did not pass: acc 0.416 is not ≥ 0.298" in lead(report.snapshot_page(failed))


@pytest.mark.parametrize("value", [None, 3, {"comparisons": 1}, {"comparisons": [1, {}]}, []])
def test_verdicts_of_strangers_are_told(found: summary.SnapshotSummary, value: object) -> None:
    """A verdict that is not what a gate writes makes no page fail."""
    shown = with_scores(found, noted("verdict", "gate: x", value), noted("evaluation", "x", value))
    assert "Gate x: " in lead(report.snapshot_page(shown))


def test_the_lost_part_of_the_change_is_told(found: summary.SnapshotSummary) -> None:
    """Estimates have two digits, and say what they are a part of."""
    assert found.plan is not None
    plan = replace(
        found.plan, error_bound=None, error_estimate=0.0398689, error_share_estimate=0.33728
    )
    told = lead(report.snapshot_page(replace(found, plan=plan)))
    assert "Of what the full merge changes, about 34 % is lost, which is about 4 % of" in told


def test_the_plan_repeats_what_the_recipe_leaves_out(found: summary.SnapshotSummary) -> None:
    """A recipe has no budget: the page says so, and has the command that has one."""
    page = report.snapshot_page(found)
    assert found.plan is not None
    assert "The recipe leaves out its budget" in page
    assert f"store.merge(plan='{found.plan.plan}', name=REF)" in unescape(page)
    free = replace(found, plan=replace(found.plan, budget_bytes=None))
    assert "leaves out" not in report.snapshot_page(free).partition('<section id="recipe"')[2]


def test_nothing_is_said_of_directions_where_one_is_the_base(family: Store) -> None:
    """A base has no change of its own, so no cosine: the sentence and the section are left out."""
    page = report.comparison_page(gather.comparison_summary(family, "model/base", "model/math"))
    assert "cosine" not in page.partition("</style>")[2].partition("<script")[0]
    assert 'id="similarity"' not in page


# -- pages ---------------------------------------------------------------------------------------


def test_the_same_snapshot_gives_the_same_page(
    family: Store, found: summary.SnapshotSummary
) -> None:
    """A page has no date of making and no random id."""
    again = gather.snapshot_summary(family, "model/merged")
    assert report.snapshot_page(again) == report.snapshot_page(found)
    two = [gather.comparison_summary(family, "model/math", "model/code") for _ in range(2)]
    assert two[0] == two[1]


def test_sections_stand_in_their_order(family: Store, found: summary.SnapshotSummary) -> None:
    """A merge has all sections; what was added has those that apply, and no empty ones."""
    ids = re.findall(r'<section id="(\w+)"', report.snapshot_page(found))
    wanted = ["lineage", "change", "experts", "sweep", "tensors", "similarity", "blocks", "notes"]
    assert [one for one in ids if one != "warnings"] == [*wanted, "recipe"]
    base = report.snapshot_page(gather.snapshot_summary(family, "model/base"))
    assert re.findall(r'<section id="(\w+)"', base) == ["lineage", "blocks", "notes"]
    expert = report.snapshot_page(gather.snapshot_summary(family, "model/math"))
    assert re.findall(r'<section id="(\w+)"', expert)[:3] == ["lineage", "change", "tensors"]
    two = report.comparison_page(gather.comparison_summary(family, "model/math", "model/code"))
    assert re.findall(r'<section id="(\w+)"', two) == [
        *("lineage", "change", "tensors", "similarity", "files"),
    ]


def test_a_virtual_merge_has_a_page(family: Store, tmp_path: Path) -> None:
    """What cannot be compared at rest is said; experts and the recipe are there."""
    merge = family.show("model/merged")
    assert merge.plan is not None
    family.merge(str(merge.plan), name="model/virtual", virtual=True, allow_noop=True)
    page = report.snapshot_page(gather.snapshot_summary(family, "model/virtual"))
    assert "A virtual merge of 2 experts" in page
    assert "a virtual merge has no weights at rest" in page
    assert "computed on read" in page
    family.remove("model/virtual")


def test_an_adapter_has_a_page(family: Store) -> None:
    """What was extracted is compared by what its factors stand for, and told from its model."""
    family.extract_lora("model/math", base="model/base", name="model/lora", rank=4)
    told = gather.snapshot_summary(family, "model/lora")
    assert {one.model for one in told.maps[0].models} == {"model/lora", "model/math"}
    assert told.tensors[0].name.startswith("model.layers.")
    assert told.tensors[0].shape is None
    page = report.snapshot_page(told)
    assert "Made by extract, with the base model/base" in page
    assert breaking(told.tensors[0].name) in page
    family.remove("model/lora")


def test_the_document_has_the_page_s_numbers(found: summary.SnapshotSummary) -> None:
    """The JSON of a report has maps, experts, budgets, tensors, cosines, blocks and the recipe."""
    document = plain(found)
    assert document["maps"][0]["models"][1]["share"][0][0] == found.maps[0].models[1].share[0][0]  # type: ignore[index]
    for key in ("lineage", "plan", "layers", "experts", "sweep", "tensors", "similarity", "blocks"):
        assert document[key]
    json.dumps(document, allow_nan=False)


def test_report_writes_a_page(
    family: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command writes one file, by default here; with --json it prints, and writes if asked."""
    monkeypatch.chdir(tmp_path)
    mstore = Program(family.path)
    done = mstore.succeed("report", "model/merged")
    assert done.out.startswith("written to mstore-report-model-merged.html (")
    assert [one.name for one in tmp_path.iterdir()] == ["mstore-report-model-merged.html"]
    first = (tmp_path / "mstore-report-model-merged.html").read_text()
    document = mstore.succeed("report", "model/merged", "--json", "-o", "x.html").document
    assert (tmp_path / "x.html").read_text() == first
    assert document["name"] == "model/merged"
    assert mstore.succeed("report", "model/math", "model/code", "-q").lines == [
        "mstore-report-model-math-model-code.html"
    ]
    assert mstore("report", "nobody").status == 1


def test_pictures_of_commands(family: Store, tmp_path: Path) -> None:
    """log, diff and compare draw what they print; a picture of no graph is refused."""
    mstore = Program(family.path)
    for words, told in (
        (("log", "--graph"), {"model/merged", "model/base", "expert", "base"}),
        (("diff", "model/base", "model/merged"), {"model.layers.*.mlp.up_proj.weight", "0", "2"}),
        (("compare", "model/math", "model/code"), {"model/math", "model/code", "1.00"}),
    ):
        file = tmp_path / f"{words[0]}.svg"
        done = mstore.succeed(*words, "--svg", file)
        assert f"drawn in {file}" in done.out
        assert told <= {*texts(file.read_text())}
    assert "--svg belongs to --graph" in mstore("log", "--svg", "x.svg").err
