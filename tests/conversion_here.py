"""Conversion without a child: each child imports torch first, which takes seconds."""

from __future__ import annotations

import json
import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from mstore.checkpoint import conversion


def convert_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the child's program run in this process, without its limits."""
    import torch

    spec = spec_from_file_location("conversion_program_here", conversion.PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.setattr(program, "lower", lambda limit, value: None)

    def run(command: list[str], request: dict[str, Any], *_: object) -> int:
        threads = torch.get_num_threads()
        with monkeypatch.context() as patch:
            # What it takes from the environment comes back.
            patch.setattr(os, "environ", os.environ.copy())
            answer = program.run(json.loads(json.dumps(request)))
        torch.set_num_threads(threads)
        Path(command[-1]).write_text(json.dumps(answer))
        return 0

    monkeypatch.setattr(conversion, "_spawn", run)
