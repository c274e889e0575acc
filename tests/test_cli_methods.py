"""`mstore methods`: what each merge method takes and promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Program

from mstore import Store
from mstore.merge.methods.registry import METHODS
from mstore.terms.errors import BadRequest


def test_all_methods_are_listed(tmp_path: Path) -> None:
    """Without a store, every method has a line; -q prints the names alone."""
    program = Program(tmp_path / "no-store")
    shown = program.succeed("methods").out
    assert all(f"{name} " in shown for name in METHODS)
    assert set(program.succeed("methods", "-q").lines) >= METHODS.keys()


def test_one_is_described(tmp_path: Path) -> None:
    """Formula, parameters with defaults and ranges, facts, bound and source of one method."""
    shown = Program(tmp_path / "no-store").succeed("methods", "dare_ties").out
    for text in ("base + lambda", "2311.03099", "estimate", "any number, with weights"):
        assert text in shown
    density = next(line for line in shown.splitlines() if line.startswith("density"))
    assert density.split()[1] == "1"
    assert "one for each expert" in density
    assert "true or false, or l1, or density" in shown
    assert "1, without weights" in Program(tmp_path / "no-store").succeed("methods", "slerp").out


def test_an_unknown_one_is_refused(tmp_path: Path) -> None:
    """A name that is no method's is refused with the names that are."""
    failed = Program(tmp_path / "no-store")("methods", "tie")
    assert failed.status == 2
    assert "did you mean ties?" in failed.err


@pytest.mark.parametrize("name", METHODS)
def test_a_report_holds_the_declaration(name: str) -> None:
    """Every parameter's default is one that the method accepts, and the report has its range."""
    (report,) = Store.methods(name)
    method = METHODS[name]
    assert [one.name for one in report.parameters] == [one.name for one in method.accepted]
    for told, own in zip(report.parameters, method.accepted, strict=True):
        assert told.default == own.default
        assert told.per_expert == own.each
        if own.default is not None:
            assert own.parse(own.default) == own.default
        for word in told.words:
            own.parse(word)
    assert report.certified == method.has_bound


def test_python_lists_them_too() -> None:
    """Store.methods() has all of them and needs no store; an unknown name is a BadRequest."""
    assert {one.name for one in Store.methods()} >= METHODS.keys()
    with pytest.raises(BadRequest, match="unknown method"):
        Store.methods("nothing")
