"""The table at the top of the page: each piece of work, its peer, its limit, its aim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tables import Told, table

HEAD = """\
## At a glance

*Ratio* is mstore against the peer in the same run: "x" says how many times as fast, "times" how
many times as long. *Limit* is mstore's wall time in multiples of the least that this machine could
take (`bench/limits.py`), where that was measured. The sections below say how each figure was made.
"""


class Row(NamedTuple):
    """One piece of work.  got: the figure that the aim is about."""

    work: str
    peer: str
    peer_s: float | None
    mstore_s: float
    ratio: str
    limit: float | None
    aim: str
    met: bool


def section(told: dict[str, Told]) -> str:
    """The table, of the results (by the names of their files) that are there."""
    rows = []
    for needs, make in MAKERS:
        if needs in told:
            rows += list(make(told))
    return "\n".join(
        [
            HEAD,
            table(
                ("work", "peer", "peer s", "mstore s", "ratio", "limit", "aim", ""),
                [_line(row) for row in rows],
            ),
        ]
    )


def _line(row: Row) -> tuple[str, ...]:
    return (
        row.work,
        row.peer,
        "" if row.peer_s is None else f"{row.peer_s:.2f}",
        f"{row.mstore_s:.2f}",
        row.ratio,
        "" if row.limit is None else f"{row.limit:.1f} times",
        row.aim,
        "met" if row.met else "missed",
    )


def _limit(told: dict[str, Told], work: str) -> float | None:
    found = told.get("limits", {}).get("works", {}).get(work)
    return None if found is None else float(found["ratio"]["median"])


def _mergekit(told: dict[str, Told]) -> Iterator[Row]:
    for method, least in (("ties", 50), ("linear", 8)):
        found = told["mergekit"][method]
        times = found["times_faster"]
        limit = _limit(told, f"{method} raw")
        yield Row(
            f"{method}, 4 experts, raw",
            "mergekit",
            found["mergekit"]["wall"],
            found["mstore"]["wall"],
            f"{times:.1f}x",
            limit,
            f"{least}x, limit 1.4 times",
            met=times >= least and limit is not None and limit <= 1.4,
        )


def _dense(told: dict[str, Told]) -> Iterator[Row]:
    works = told["limits"]["works"]
    for method in ("ties", "linear"):
        raw, dense = works[f"{method} raw"]["wall"], works[f"{method} dense"]["wall"]
        yield Row(
            f"{method}, 4 experts, dense",
            "mstore, raw",
            raw,
            dense,
            f"{dense / raw:.2f} times",
            _limit(told, f"{method} dense"),
            "1.3 times",
            met=dense / raw <= 1.3,
        )


def _rates(told: dict[str, Told]) -> Iterator[Row]:
    for part, peer, work, aim in (
        ("add", "cp + b3sum", "dense expert", 2.0),
        ("add", "cp + b3sum", "raw expert", 1.3),
        ("checkout", "cp -r", "dense expert", 1.25),
    ):
        found = told["rates"][part]
        times = found[work]["ratio"]["median"]
        name = f"add {work}" if part == "add" else f"checkout {work.replace(' expert', ' expert0')}"
        yield Row(
            f"{part}, {work}",
            peer,
            found[peer]["wall"],
            found[work]["wall"],
            f"{times:.2f} times",
            _limit(told, name),
            f"{aim:g} times",
            met=times <= aim,
        )


def _incremental(told: dict[str, Told]) -> Iterator[Row]:
    for key, work in (("ninth", "a ninth expert"), ("changed", "one expert changed")):
        found = told["incremental"][key]
        times = found["times_faster"]["median"]
        yield Row(
            f"TIES again, {work}",
            "mstore, no memo",
            found["no memo"]["wall"],
            found["memo"]["wall"],
            f"{times:.1f}x",
            None,
            "20x",
            met=times >= 20,
        )


def _paper(told: dict[str, Told]) -> Iterator[Row]:
    found = told["paper"]["scaling"]["20"]
    ours = found["10%"]
    times = ours["times_faster"]["median"]
    yield Row(
        "20 experts at a 10 % budget, cold",
        "naive full read",
        found["naive"]["wall"]["median"],
        ours["wall"]["median"],
        f"{times:.1f}x",
        None,
        "11x",
        met=times >= 11,
    )


MAKERS: tuple[tuple[str, Callable[[dict[str, Told]], Iterator[Row]]], ...] = (
    ("mergekit", _mergekit),
    ("limits", _dense),
    ("rates", _rates),
    ("incremental", _incremental),
    ("paper", _paper),
)
