"""One family of each element type and way of tying, and its store, shared by a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import oracle
import parts
import pytest
import torch
from case import Case
from generated import Family, Head, Tensors, generate
from subject import Stored

FAMILIES: dict[str, tuple[str, Head]] = {
    "bf16 untied": ("bfloat16", "own"),
    "bf16 tied": ("bfloat16", "tied"),
    "fp16 untied": ("float16", "own"),
    "fp16 headless": ("float16", "none"),
    "fp32 untied": ("float32", "own"),
    "fp32 tied": ("float32", "tied"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the part that was asked for."""
    parts.leave_part(config, items)


@dataclass
class Workplace:
    """A family, its store, and a counter of directories."""

    family: Family
    stored: Stored
    root: Path
    runs: int = 0

    def ours(self, case: Case, out_dtype: str) -> Tensors:
        return self.stored.merge(case, out_dtype=out_dtype)

    def theirs(self, case: Case, out_dtype: str, dtype: str | None = "float32") -> Tensors:
        self.runs += 1
        out = self.root / f"mergekit{self.runs}"
        return oracle.merge(self.family, case, out, dtype=dtype, out_dtype=out_dtype)


@pytest.fixture(scope="session")
def workplaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Workplace]]:
    """A workplace by the name of its family, made when it is asked for."""
    # How torch cuts a sum among threads must not depend on the machine.
    torch.set_num_threads(1)
    made: dict[str, Workplace] = {}

    def workplace(name: str) -> Workplace:
        if name not in made:
            root = tmp_path_factory.mktemp("family")
            dtype, head = FAMILIES[name]
            family = generate(root / "members", dtype, head, seed=1 + list(FAMILIES).index(name))
            made[name] = Workplace(family, Stored(family, root), root)
        return made[name]

    yield workplace
    for one in made.values():
        one.stored.close()


@pytest.fixture(params=FAMILIES)
def workplace(request: pytest.FixtureRequest, workplaces: Callable[[str], Workplace]) -> Workplace:
    """Each family in turn."""
    return workplaces(request.param)
