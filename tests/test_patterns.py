"""Patterns of names: those of an adapter's config, of options, rules and recipes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.checkpoint.exclusion import Exclusion
from mstore.merge.planning.request import Rule, Rules
from mstore.merge.planning.tensors import left_out_names
from mstore.merge.recipes.recipe import Condition, Setting
from mstore.models.adapters.config import MAX_PATH, Patterns
from mstore.store.objects.shapes import chosen, matching, require_matches
from mstore.terms.errors import Incompatible

ATOMS = ["a", "b", "1", ".", r"\.", ".*", r"\d", r"\d+", "[ab]", "[a-b]+", "(a|b)", "(ab|a)"]


def calls(function: Callable[[], object]) -> int:
    """Return how many functions, of Python or of C, a call calls: a measure without a clock."""
    count = 0

    def told(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(told)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def modules(count: int) -> list[str]:
    return [f"model.layers.{i // 7:05}.block{i % 7}.attn.to_q" for i in range(count)]


# -- as PEFT matches -------------------------------------------------------------------------------

PATTERN = st.builds(
    lambda start, atoms, end: start + "".join(atoms) + end,
    st.sampled_from(["", "^"]),
    st.lists(st.sampled_from(ATOMS), min_size=1, max_size=6),
    st.sampled_from(["", "$"]),
)


@given(st.lists(PATTERN, max_size=5, unique=True), st.text(alphabet="ab.1", min_size=1, max_size=9))
def test_the_first_pattern_as_peft_finds_it(patterns: list[str], module: str) -> None:
    """The value is that of the first pattern that PEFT's expression matches."""
    wanted = next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), "none")
    assert Patterns({one: one for one in patterns}, "here").value(module, "none") == wanted


@pytest.mark.parametrize("pattern", ["(a+)+", "[b-a]", "", "a{2}", "(?:a)", r"\w", "a|b", "a+"])
def test_other_expressions_are_refused(pattern: str) -> None:
    """A pattern that mstore does not match is refused, and named."""
    with pytest.raises(Incompatible, match=re.escape(repr(pattern))):
        Patterns({pattern: 1}, "here")


def test_too_many_forms() -> None:
    """The steps for one module are limited, whatever a stranger sends."""
    forms = {"".join("." if n >> k & 1 else "a" for k in range(12)): n for n in range(4096)}
    with pytest.raises(Incompatible, match="too many different forms"):
        Patterns(forms, "here")
    Patterns(dict.fromkeys(modules(4096), 1), "here")


def test_wildcards_are_followed_once() -> None:
    """Wildcards that fail at the end take steps in proportion to their number, not all ways."""
    found = Patterns({".*a" * 60 + "b": 1, ".*.*.*.*.*": 2}, "here")
    module = "a." * (MAX_PATH // 2)
    assert found.value(module, 0) == 2
    assert found.value(module + "a", 0) == 0
    assert calls(lambda: found.value(module, 0)) < 2000


# -- as many names as patterns ---------------------------------------------------------------------


def _adapters(names: list[str]) -> None:
    found = Patterns(dict.fromkeys(names, 1), "here")
    assert all(found.value(name, 0) for name in names)


def _filters(names: list[str]) -> None:
    setting = Setting(tuple(Condition(0.5, name, 1) for name in names), 1)
    assert all(setting.given(name) == 0.5 for name in names)


def _rules(names: list[str]) -> None:
    nothing: Any = None
    rules = Rules([Rule((name,), nothing, None) for name in names])
    assert all(rules.of(name) for name in names)
    assert rules.unmatched(names) is None


def _options(names: list[str]) -> None:
    require_matches(names, names, names, "REF")
    assert not chosen(dict.fromkeys(names, ()), names, names)
    assert len(left_out_names({name: name for name in names}, names, names, base="b")) == len(names)


@pytest.mark.parametrize("match", [_adapters, _filters, _rules, _options])
def test_steps_grow_with_names_and_patterns(match: Callable[[list[str]], None]) -> None:
    """Twice as many names with as many patterns take about twice the steps, not four times."""
    match(modules(10))
    few, many = calls(lambda: match(modules(200))), calls(lambda: match(modules(400)))
    assert many < 2.5 * few


def test_expressions_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of patterns are compiled once, not again for each name."""
    names = modules(700)
    globs = [f"*{name[6:]}" for name in names]
    compile_one, compiled = re._compiler.compile, []  # type: ignore[attr-defined]

    def counting(pattern: str, flags: int) -> object:
        compiled.append(pattern)
        return compile_one(pattern, flags)

    monkeypatch.setattr("re._compiler.compile", counting)
    assert matching(names, globs) == set(names)
    assert len(compiled) == 1
    excluding = Exclusion.chosen(globs, defaults=False)
    compiled.clear()
    assert all(excluding.deciding(name, is_directory=False) for name in names[::100])
    assert not compiled
