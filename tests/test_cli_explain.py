"""`explain` and `blame` on the command line: what they say, in 80 columns, and what they draw."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from cli_runs import Program
from families import cast, write_checkpoint

from mstore_cli.commands.explain import SHOWN, runs
from mstore_cli.groups import WIDTH, Group, draw_groups
from mstore_cli.output import Screen

EXPERTS = {"m/math": 1.0, "m/code": 0.5, "m/" + 30 * "long" + "/chat": -0.25}
NAMES = (
    "model.embed_tokens.weight",
    *(f"model.layers.{n}.{part}.weight" for n in (0, 1, 10) for part in ("attn", "mlp")),
    "model.norm.weight",
    "lm_head.weight",
)


def write_models(root: Path) -> None:
    """A base, and experts: the first changes layers 0 and 1, the second 1 and 10, the third all."""
    rng = np.random.default_rng(11)
    base = {name: cast(rng.standard_normal((192, 256)), "BF16") for name in NAMES}
    base["model.steps"] = np.arange(4)
    base["lm_head.weight"] = base["model.embed_tokens.weight"]
    write_checkpoint(root / "0", base)
    for number, changed in enumerate((("0.", "1."), ("1.", "10."), ("",)), start=1):
        expert = dict(base)
        for name in NAMES[:-1]:
            if any(f"layers.{part}" in name or not part for part in changed):
                moved = base[name].astype("f4") + rng.standard_normal((192, 256)) / 50
                expert[name] = cast(moved, "BF16")
        expert["lm_head.weight"] = expert["model.embed_tokens.weight"]
        write_checkpoint(root / str(number), expert)


@pytest.fixture(scope="module")
def mstore(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store with a merge at half the bytes and one at all of them.  Tests only read."""
    root = tmp_path_factory.mktemp("explain")
    write_models(root)
    mstore = Program(root / "store")
    mstore.succeed("init", "--block-size", "64KiB")
    mstore.succeed("add", root / "0", "--name", "m/base")
    options = []
    for number, (name, weight) in enumerate(EXPERTS.items(), start=1):
        mstore.succeed("add", root / str(number), "--name", name, "--base", "m/base")
        options += ["--expert", f"{name}={weight}"]
    merge = ["merge", "--base", "m/base", *options, "--method", "ties", "--param", "density=0.5"]
    mstore.succeed(*merge, "--name", "half", "--budget", "50%")
    mstore.succeed(*merge, "--name", "full")
    return mstore


TALES = [
    ("explain", "half"),
    ("explain", "half", "--by", "tensor"),
    ("explain", "half", "--by", "expert"),
    ("explain", "half", "model.layers.1.mlp.weight"),
    ("explain", "full"),
    ("blame", "half"),
    ("blame", "half", "--by", "layer"),
    ("blame", "full", "--by", "expert"),
    ("blame", "full", "lm_head.weight"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("line", TALES, ids=" ".join)
def test_tables_fit_80_columns(line: tuple[str, ...], mstore: Program) -> None:
    """However long an expert's name is, what is drawn under a heading fits a terminal."""
    lines = mstore.succeed(*line).lines
    start = next(n for n, text in enumerate(lines) if text.rstrip().endswith(("OUT", "MOVED")))
    assert len(lines) > start + 2
    assert max(map(len, lines[start:])) <= WIDTH
    for name in list(EXPERTS)[:2]:
        assert any(text.strip().startswith(f"{name}=") for text in lines[start:])


def test_values_are_not_blocks(mstore: Program) -> None:
    """Where the merge writes another type, no block is the base's own, and chunks that no expert
    changed hold the base's values alone.
    """
    line = ["merge", "--base", "m/base", "--expert", "m/math", "--method", "task_arithmetic"]
    mstore.succeed(*line, "--name", "wide", "--dtype", "float32")
    told = mstore.succeed("explain", "wide", "model.layers.10.attn.weight").out
    assert ", 0 the base's own\n" in told
    assert ": the base alone\n" in told
    mstore.succeed("rm", "wide")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [[], ["--virtual"]], ids=["stored", "virtual"])
def test_merge_tells_the_error_asked_for(more: list[str], mstore: Program) -> None:
    """A merge prints --max-error as `plan` does, and no such line where none was given."""
    line = ["merge", "--base", "m/base", "--expert", "m/math", "--method", "linear", *more]
    told = mstore.succeed(*line, "--name", "near", "--max-error", "0.001").out
    assert re.search(r"^max error +0\.001$", told, re.MULTILINE)
    assert "max error" not in mstore.succeed(*line, "--name", "exact").out
    for name in ("near", "exact"):
        mstore.succeed("rm", name)


@pytest.mark.parametrize("verb", ["explain", "blame"])
def test_near_tensors(verb: str, mstore: Program) -> None:
    """A tensor's name that is nearly right is named in the hint, and all can be listed."""
    done = mstore(verb, "half", "model.layers.1.mpl.weight")
    assert done.status == 1
    assert "hint: did you mean model.layers.1.mlp.weight?\n" in done.err
    assert " ls --tensors " in done.err
    assert "did you mean" not in mstore(verb, "half", "zzz").err


def test_explain_sums_by_layer(mstore: Program) -> None:
    """By default there is a group a layer, in the order of layers, and the sum of all; a column
    that would hold zeros only is not there.
    """
    lines = mstore.succeed("explain", "half").lines
    table = lines[next(n for n, text in enumerate(lines) if text.startswith("LAYER")) :]
    groups = [text.split()[0] for text in table[1:] if not text.startswith(" ")]
    assert groups == [
        *("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.10"),
        *("model.norm", "lm_head", "model.steps", "all"),
    ]
    assert table[0].split() == [
        "LAYER",
        "READ",
        *["EQUAL", "TO", "BASE"],
        *["LEFT", "OUT", "NORM", "LEFT", "OUT"],
    ]
    full = mstore.succeed("explain", "full").out
    assert "LEFT OUT  NORM" not in full


@pytest.mark.parametrize("verb", ["explain", "blame"])
def test_a_long_name_of_one_tensor(verb: str, mstore: Program) -> None:
    """The name of a single tensor is above its table, and stands across no column."""
    name = "model.layers.10.mlp.weight"
    lines = mstore.succeed(verb, "half", name).lines
    at = next(n for n, text in enumerate(lines) if text.startswith(f"TENSOR {name}"))
    assert lines[at + 1].startswith("EXPERT ")
    rows = [text for text in lines[at + 2 : at + 5] if text.startswith("  m/")]
    assert len(rows) == 3
    assert {len(text) for text in rows} == {len(lines[at + 1])}


def test_explain_json_carries_all_sums(mstore: Program) -> None:
    """Layers and experts of the document are the sums over its tensors, tied ones counted once."""
    document = mstore.succeed("explain", "half", "--json").document
    tensors = {one["name"]: one for one in document["tensors"]}
    assert tensors["lm_head.weight"]["tied_to"] == "model.embed_tokens.weight"
    own = [one for one in tensors.values() if one["tied_to"] is None]
    for number, share in enumerate(document["experts"]):
        for key in ("chunks_read", "chunks_equal_base", "chunks_over_budget"):
            counts = [one["experts"][number][key] for one in own if one["experts"]]
            assert share[key] == sum(counts)
            layers = [one["experts"][number][key] for one in document["layers"]]
            assert share[key] == sum(layers)
        norms = [one["experts"][number]["omitted_norm"] for one in own if one["experts"]]
        assert share["omitted_norm"] == pytest.approx(np.hypot.reduce(norms))
    assert sum(one["chunks_over_budget"] for one in document["experts"]) > 0
    layer = next(one for one in document["layers"] if one["name"] == "model.layers.10")
    assert layer["tensors"] == 2
    assert layer["experts"][0]["chunks_equal_base"] == 4


def test_explain_says_who_made_each_block(mstore: Program) -> None:
    """For one tensor each run of blocks names the experts in it, and why others are not."""
    done = mstore.succeed("explain", "full", "model.layers.0.mlp.weight")
    [line] = [text for text in done.lines if text.startswith("0-1: ")]
    assert line.startswith("0-1: m/math, m/long")
    assert "  equal to base: m/code" in done.lines
    half = mstore.succeed("explain", "half", "model.layers.10.mlp.weight", "--json").document
    fates = {word for share in half["tensors"][0]["experts"] for word in share["chunks"]}
    told = mstore.succeed("explain", "half", "model.layers.10.mlp.weight").out
    assert "over budget" in fates
    assert all(f"  {SHOWN.get(fate, fate)}: " in told for fate in fates - {"read", "shared"})


def test_blame_shares_are_percentages_of_one(mstore: Program) -> None:
    """Who changed nothing in a layer has no share in it, and shares add up to 1."""
    document = mstore.succeed("blame", "full", "--json").document
    layer = next(one for one in document["layers"] if one["name"] == "model.layers.0")
    assert layer["experts"][1]["share"] == 0
    assert layer["experts"][1]["moved"] == 0
    for one in (document, *document["layers"], *document["tensors"]):
        assert sum(expert["share"] for expert in one["experts"]) == pytest.approx(1)
    names = mstore.succeed("blame", "full", "-q").lines
    assert names == [one["name"] for one in document["tensors"]]
    assert "lm_head.weight" not in names


def test_heat_maps_of_layers_and_experts(mstore: Program, tmp_path: Path) -> None:
    """--svg draws layers and experts of what was read, and of what each contributed."""
    for verb, words in (("explain", "chunks read"), ("blame", "norm of the contribution")):
        mstore.succeed(verb, "half", "--svg", tmp_path / f"{verb}.svg")
        found = ET.parse(tmp_path / f"{verb}.svg").iter("{http://www.w3.org/2000/svg}text")
        shown = ["".join(one.itertext()) for one in found]
        assert {"model.layers.0", "model.layers.10", "m/math", "m/code"} <= set(shown)
        assert any(text.startswith(words) for text in shown)


def test_nothing_is_drawn_of_what_was_not_merged(mstore: Program, tmp_path: Path) -> None:
    """An added snapshot is an error that leaves no file."""
    for verb in ("explain", "blame"):
        assert mstore(verb, "m/base", "--svg", tmp_path / "no.svg").status == 2
    assert not list(tmp_path.iterdir())


def test_fates_run_together() -> None:
    """Neighbours of one fate are one run; others stand alone."""
    read, equal = ("read", "read"), ("read", "equal to base")
    assert runs([read, read, equal, read]) == [("0-1", read), ("2", equal), ("3", read)]
    assert runs([]) == []


def test_long_names_are_shortened_in_rows_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows fit, headings stand in full, and no control character reaches the screen."""
    import sys

    heading, name = "h" * 100, "a\x1b" + 90 * "n" + "z"
    draw_groups(Screen(sys.stdout), "T", ("COUNT",), [Group(heading, "note", ((name, "12345"),))])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"T {heading}  note"
    assert second.endswith("COUNT")
    assert len(third) == WIDTH
    assert third.startswith("  a\\x1bnn")
    assert third.endswith("nz  12345")


def test_show_names_the_parents(mstore: Program) -> None:
    """Parents of a merge stand there with the refs that point at them, in words and in JSON."""
    lines = [" ".join(line.split()) for line in mstore.succeed("show", "full").lines]
    parents = mstore.succeed("show", "full", "--json").document["parents"]
    assert [one["refs"] for one in parents] == [["m/base"], *([name] for name in EXPERTS)]
    for one in parents:
        assert f"{one['role']} {one['snapshot'][:12]} ({one['refs'][0]})" in lines
