"""The part of the build that compiles kernels ahead (docs/design/032-kernels-ahead.md).

A wheel ships them for every level of processor; an editable install makes those of this machine.
Where they cannot be compiled, the build goes on without: mstore compiles them at first use then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    """Runs scripts/kernels.py before the files of the wheel are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; `version` says whether the wheel is an editable one."""
        root = Path(self.root)
        command = [sys.executable, str(root / "scripts" / "kernels.py")]
        if version != "editable":
            command.append("--all")
        # The build may run where the sources are not importable, or another mstore is.
        environment = {**os.environ, "PYTHONPATH": str(root)}
        inherited = os.environ.get("PYTHONPATH")
        if inherited:
            environment["PYTHONPATH"] += os.pathsep + inherited
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            self.app.display_warning(
                "kernels were not compiled ahead: mstore will compile them at first use"
            )
