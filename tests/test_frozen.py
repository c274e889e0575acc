"""Frozen dataclasses that are compiled late are those that `dataclasses` makes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mstore.terms.frozen import frozen


def define(make: Callable[[type], type]) -> tuple[type, type]:
    """Two classes made by a decorator: one with everything, one that inherits from it."""

    @make
    class Whole:
        """With defaults, a factory, a property, a check and a field that is not compared."""

        name: str
        size: int = 3
        words: dict[str, int] = field(default_factory=dict)
        note: str = field(default="", compare=False, repr=False)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("negative")
            object.__setattr__(self, "name", self.name.strip())

        @property
        def twice(self) -> int:
            return 2 * self.size

    @make
    class Named(Whole):  # type: ignore[misc]
        """Inherits, and prints itself."""

        more: int = 0

        def __repr__(self) -> str:
            return f"<{self.name}>"

    return Whole, Named


BOTH = define(frozen), define(dataclass(frozen=True, slots=True))
LATE, USUAL = BOTH


def outcome(act: Callable[[], object]) -> object:
    """What a call returns, or how it fails."""
    try:
        return repr(act())
    except (AttributeError, TypeError, ValueError) as error:
        return type(error), str(error).replace("Whole.", "").replace("Named.", "")


ACTS: dict[str, Callable[[Any, Any], object]] = {
    "made": lambda whole, named: whole(" a ", 4),
    "by name": lambda whole, named: whole(name="a", words={"x": 1}, note="n"),
    "too few": lambda whole, named: whole(),
    "too many": lambda whole, named: whole(1, 2, 3, 4, 5),
    "unknown": lambda whole, named: whole("a", other=1),
    "checked": lambda whole, named: whole("a", -1),
    "property": lambda whole, named: whole("a", 4).twice,
    "inherited": lambda whole, named: (named("a", more=2), named("a", more=2).more),
    "equal": lambda whole, named: (whole("a") == whole("a", note="x"), whole("a") == whole("b")),
    "other class": lambda whole, named: (whole("a") == named("a"), whole("a") == 1),
    "no factory shared": lambda whole, named: whole("a").words is whole("a").words,
    "hash": lambda whole, named: hash(whole("a", 1, ())) == hash(whole("a", 1, (), "x")),
    "no hash": lambda whole, named: hash(whole("a")),
    "set": lambda whole, named: setattr(whole("a"), "size", 1),
    "delete": lambda whole, named: delattr(whole("a"), "size"),
    "no dictionary": lambda whole, named: vars(whole("a")),
    "as a dictionary": lambda whole, named: dataclasses.asdict(whole("a", words={"x": 1})),
    "replaced": lambda whole, named: dataclasses.replace(whole("a"), size=9),
    "fields": lambda whole, named: [(f.name, f.type, f.default) for f in dataclasses.fields(named)],
    "signature": lambda whole, named: str(inspect.signature(named)),
    "matched": lambda whole, named: (whole.__match_args__, named.__match_args__),
    "copied": lambda whole, named: copy.deepcopy(whole("a", words={"x": 1})),
    "document": lambda whole, named: whole.__doc__,
}


@pytest.mark.parametrize("act", ACTS)
def test_it_does_what_a_dataclass_does(act: str) -> None:
    """Every use of a class, as the first of all, gives what the class of `dataclasses` gives."""
    for classes in (define(frozen), LATE):
        assert outcome(lambda c=classes: ACTS[act](*c)) == outcome(lambda: ACTS[act](*USUAL))  # type: ignore[misc]


@frozen
class Kept:
    """A class that can be found by name."""

    name: str
    parts: tuple[int, ...] = ()


def test_it_can_be_pickled() -> None:
    """An object that was pickled equals the first, and is as frozen."""
    again = pickle.loads(pickle.dumps(Kept("a", (1, 2))))
    assert again == Kept("a", (1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.name = "b"


def test_nothing_is_compiled_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defining a class compiles nothing, and its first use compiles once."""
    made: list[str] = []
    compiling = dataclasses.make_dataclass

    def counted(name: str, *given: Any, **named: Any) -> type:
        made.append(name)
        return compiling(name, *given, **named)

    monkeypatch.setattr(dataclasses, "make_dataclass", counted)
    whole, _ = define(frozen)
    assert dataclasses.is_dataclass(whole)
    assert made == []
    assert whole("a") == whole("a")
    assert made == ["Whole"]
