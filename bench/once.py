"""One merge in a process of its own, planned and run through the Python API, told as JSON.

    python bench/once.py STORE REQUEST

REQUEST is JSON: base, experts, method, parameters, budget.  The command line does the same; this
adds what it does not print: the seconds of planning apart from those of merging, and what the
operating system counted as read from the disk.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import mstore
import mstore.merge.analysis.explain
import mstore.merge.planning.session

# Imported here, so that neither planning nor merging is charged for it; the process is.
import mstore.merge.running.commit
from mstore import MergeRequest


def disk_bytes() -> dict[str, int]:
    """What this process made the disk read and write, by the kernel's own account."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"disk_read": int(lines["read_bytes"]), "disk_written": int(lines["write_bytes"])}


def main() -> None:
    path, request = Path(sys.argv[1]), json.loads(sys.argv[2])
    with mstore.Store.open(path) as store:
        began = time.perf_counter()
        plan = store.plan(MergeRequest(**request))
        planned = time.perf_counter()
        merged = store.merge(plan, name="merged")
        ended = time.perf_counter()
    told = {
        "plan_seconds": planned - began,
        "merge_seconds": ended - planned,
        "plan": str(plan.plan),
        "manifest": str(merged.manifest),
        "full_expert_bytes": merged.full_expert_bytes,
        "expert_bytes": merged.expert_bytes_read,
        "analyze_bytes": merged.analyze_bytes_read,
        "base_bytes": merged.base_bytes_read,
        "written_bytes": merged.bytes_written,
        "error_bound": merged.error_bound,
        "error_estimate": merged.error_estimate,
        "blocks_total": merged.blocks_total,
    }
    print(json.dumps(told | disk_bytes()))


if __name__ == "__main__":
    main()
