"""The part of the build that compiles kernels (docs/design/032-kernels-ahead.md).

A wheel has them for two levels of processor: the best that this machine is, and the one that every
machine of its architecture is.  Its tag names that architecture.  With MSTORE_BUILD_ALL_LEVELS=1,
for a release, a wheel built on x86-64 has all levels and is for any platform.  An editable install
makes kernels for the best level.  If they cannot be compiled, nothing is built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

EVERY = "MSTORE_BUILD_ALL_LEVELS"


class KernelsHook(BuildHookInterface[Any]):
    """Runs scripts/kernels.py before the files of the wheel are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; `version` says whether the wheel is an editable one."""
        # The build may run where the sources are not importable.
        sys.path.insert(0, self.root)
        from mstore.numeric.levels import LEVELS, runnable

        own = runnable()
        is_for_all = os.environ.get(EVERY) == "1" and os.uname().machine == "x86_64"
        if is_for_all:
            levels = [level.name for level in LEVELS]
        elif version == "editable":
            levels = [level.name for level in own[:1]]
        else:
            levels = sorted({level.name for level in (*own[:1], *own[-1:])})
        command = [sys.executable, str(Path(self.root) / "scripts" / "kernels.py"), *levels]
        # pip shows the progress with -v.
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SystemExit(
                "kernels could not be compiled, see above. If the compiler is missing, build with "
                "its isolation (pip without --no-build-isolation)"
            )
        # git ignores what the build makes; what lies there for other levels stays there.
        build_data["artifacts"] += [f"/mstore/numeric/kernels/{name}/*.pass" for name in levels]
        if not is_for_all:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
