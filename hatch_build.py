"""The part of the build that compiles kernels ahead (docs/design/032-kernels-ahead.md).

A wheel ships them for every level of processor; an editable install makes those of this machine.
Where they cannot be compiled, no wheel is built: its users would wait for a compiler, or have none.
Who wants one nevertheless sets MSTORE_BUILD_WITHOUT_KERNELS. An editable install goes on without.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ALLOWED = "MSTORE_BUILD_WITHOUT_KERNELS"


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
        if not done.returncode:
            return
        if version != "editable" and not os.environ.get(ALLOWED):
            raise SystemExit(
                "kernels could not be compiled, see above. If the compiler is missing, build with "
                f"its isolation (pip without --no-build-isolation), or set {ALLOWED}=1 for a wheel "
                "that compiles them at first use"
            )
        self.app.display_warning(
            "kernels were not compiled ahead: mstore will compile them at first use"
        )
