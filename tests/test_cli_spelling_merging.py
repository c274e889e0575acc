"""How the command line spells what merges name, and that every name has a command or a flag."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mstore import MergeRequest, Store, TensorRule
from mstore.merge.measures import NEEDS_ANALYSIS
from mstore.merge.planning import tensors, validate
from mstore.store.objects.shapes import difference_hint
from mstore.terms.phrases import Call, Option, Phrase, Text, as_phrase, call, phrase
from mstore.terms.report import plain
from mstore_cli.command import find
from mstore_cli.spelling import Typed, flag
from mstore_cli.verbs import VERBS, verb_of

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {name: {option for one in find(name).params for option in one.opts} for name in VERBS}


@pytest.mark.parametrize(
    ("text", "python", "typed"),
    [
        (Option("max_error"), "max_error", "--max-error"),
        (Option("expert_budget", "30%"), "expert_budget='30%'", "--per-expert-budget 30%"),
        (Option("analyze", False), "analyze=False", "--no-analyze"),
        (Option("memo", False), "memo=False", "--no-memo"),
        (Option("allow_noop", True), "allow_noop=True", "--allow-noop"),
        (Option("experts", {"REF": "WEIGHT"}), "experts={REF: WEIGHT}", "--expert REF=WEIGHT"),
        (
            Option("parameters", {"density": 0.2, "normalize": False}),
            "parameters={'density': 0.2, 'normalize': False}",
            "--param density=0.2 --param normalize=false",
        ),
        (Option("memory", 300 << 20), "memory=314572800", "--memory 300MiB"),
        (
            call("init", block_size=1 << 16),
            "mstore.Store.init(PATH, block_size=65536)",
            "mstore init --block-size 64KiB",
        ),
        (call("export_plan", "PLAN"), "store.export_plan(PLAN)", "mstore plan ... -o plan.json"),
        (Option("skip", ("a b", "*")), "skip=['a b', '*']", "--skip 'a b' --skip '*'"),
        (call("sweep"), "store.sweep()", "mstore plan --sweep"),
        (call("sweep", measure=True), "store.sweep(measure=True)", "mstore plan --sweep --measure"),
        (call("tensors", "REF"), "store.tensors(REF)", "mstore ls --tensors REF"),
        (
            call("push", "origin", refs=("REF",)),
            "store.push('origin', refs=[REF])",
            "mstore push origin REF",
        ),
        (call("plan", "..."), "store.plan(...)", "mstore plan ..."),
        (
            difference_hint("base", "a b"),
            "store.diff('base', 'a b'); skip=[PATTERN] leaves tensors out",
            "mstore diff base 'a b'; --skip PATTERN leaves tensors out",
        ),
        (
            validate._ALLOW,
            "allow_noop=True merges it all the same",
            "--allow-noop merges it all the same",
        ),
        (
            NEEDS_ANALYSIS,
            "run the command without analyze=False",
            "run the command without --no-analyze",
        ),
    ],
)
def test_options_of_merges(text: Text, python: str, typed: str) -> None:
    """Callers read keyword arguments of merges, and people flags that mean the same."""
    assert str(text) == python
    assert as_phrase(text).spelled(Typed()) == typed


@pytest.mark.parametrize(
    ("stored", "python"),
    [
        (tensors.NOT_AMONG_ONLY, "not among only"),
        (tensors.skipped("lm_head.weight"), "skip=['lm_head.weight']"),
        (tensors.AT_EDGES, tensors.AT_EDGES.replace("--no-analyze", "analyze=False")),
        ("dtype I64 is not merged", "dtype I64 is not merged"),
    ],
)
def test_texts_of_stored_plans(stored: str, python: str) -> None:
    """What plans keep at rest is told to people as it is stored, and to callers in their words."""
    told = tensors.phrased(stored)
    assert (told, as_phrase(told).spelled(Typed())) == (python, stored)


def test_a_phrase_is_text() -> None:
    """Callers search, join, copy and store phrases as text; the command line still spells them."""
    told = phrase("{why}: {it}", why=phrase("use {one}", one=Option("top_p")), it=call("gc"))
    assert "top_p: store.gc()" in told
    assert "\n".join([told, "more"]) == "use top_p: store.gc()\nmore"
    assert json.dumps([told]) == '["use top_p: store.gc()"]'
    for again in (told, copy.deepcopy(told), pickle.loads(pickle.dumps(told))):
        assert isinstance(again, Phrase)
        assert again.spelled(Typed(Path("s"))) == "use --top-p: mstore --store s gc"
    assert plain({"remarks": (told, "{x}")}, lambda text: as_phrase(text).spelled(Typed())) == {
        "remarks": ["use --top-p: mstore gc", "{x}"]
    }


@cache
def _named() -> list[tuple[str, Call | Option]]:
    """What modules of the library build with literal names, and where."""
    return list(_search())


def _search() -> Iterator[tuple[str, Call | Option]]:
    tops = ("mstore", "fuse", "serve")
    for path in (path for top in tops for path in sorted((ROOT / top).rglob("*.py"))):
        source = path.read_text()
        if "Option(" not in source and "call(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if (
                not isinstance(node, ast.Call)
                or not isinstance(node.func, ast.Name)
                or not node.args
            ):
                continue
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            if not isinstance(name, str):
                continue
            if node.func.id == "Option":
                off = len(node.args) > 1 and ast.unparse(node.args[1]) == "False"
                yield place, Option(name, False if off else None)
            elif node.func.id == "call":
                keys = tuple((word.arg, True) for word in node.keywords if word.arg is not None)
                yield place, Call(name, (), keys)


def test_every_name_has_a_command_or_a_flag() -> None:
    """What the library names can be typed: the command is there, and it has the flags."""
    every = {option for flags in FLAGS.values() for option in flags} | {"--help"}
    assert len(_named()) > 50
    for place, one in _named():
        if isinstance(one, Option):
            assert flag(one.name, on=one.value is not False) in every, (place, one)
            continue
        # Refs are arguments on the command line.
        options = tuple(pair for pair in one.options if pair[0] not in ("store", "refs"))
        words = Typed().call(Call(one.operation, (), options)).split()[1:]
        verb = verb_of(words)
        missing = {word for word in words if word.startswith("-")} - FLAGS.get(verb, set())
        assert verb in FLAGS, (place, one)
        assert missing <= {"--help"}, (place, one, missing)


def test_options_of_merges_are_parameters() -> None:
    """Options that merges name are fields of the request or parameters of calls of Store."""
    calls = [getattr(Store, name) for name in dir(Store) if not name.startswith("_")]
    known = {name for one in calls if callable(one) for name in inspect.signature(one).parameters}
    known |= {
        field.name for kind in (MergeRequest, TensorRule) for field in dataclasses.fields(kind)
    }
    places = ("mstore/merge/", "mstore/store/objects/", "mstore/models/stats/", "mstore/store/")
    options = [
        one for place, one in _named() if place.startswith(places) and isinstance(one, Option)
    ]
    assert {one.name for one in options} - known == set()
    assert len(options) > 10
