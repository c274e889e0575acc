"""Write docs/benchmarks.md, docs/benchmarks-aims.md, docs/benchmarks-details.md and the table of
docs/merge-methods.md from the results that the scripts here left: no figure is typed by hand.

    python bench/report.py [--results DIR] [--pages DIR]

A script that has not been run has no section.  `plots.py` draws the figures that the page shows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import page_adapters
import page_aims
import page_cluster_sim
import page_decoding
import page_density
import page_draft
import page_estimates
import page_first
import page_growth
import page_hub
import page_image_disk
import page_incremental
import page_large
import page_lazy
import page_limits
import page_mergekit
import page_method_quality
import page_methods
import page_moe
import page_mounts
import page_neurons
import page_paper
import page_peers
import page_planning
import page_quality
import page_rates
import page_refs
import page_remote
import page_search
import page_segments
import page_shuffle
import page_small
import page_small_calls
import page_spine
import page_start
import page_statistics
from tables import Told

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs"

HEAD_OF_DETAILS = """\
# Benchmarks in detail

What stands behind [the ratios](benchmarks.md): a section for each script of `bench`, and at the
end how the machines differ, what falls short, and why. Written by `bench/report.py` from
`bench/results` and `bench/notes.md`; `bench/README.md` says how to run each script. Each figure is
the median of the rounds, with the extremes in brackets; a ratio is the median of the ratios of the
rounds. MB and GB are 10^6 and 10^9 bytes.
"""

SECTIONS: dict[str, Callable[[Told], str]] = {
    "limits": page_limits.section,
    "decoding": page_decoding.section,
    "density": page_density.section,
    "rates": page_rates.section,
    "growth": page_growth.section,
    "refs": page_refs.section,
    "segments": page_segments.section,
    "remote": page_remote.section,
    "lazy": page_lazy.section,
    "hub": page_hub.section,
    "cluster_sim": page_cluster_sim.section,
    "first": page_first.section,
    "start": page_start.section,
    "small": page_small.section,
    "small_calls": page_small_calls.section,
    "spine": page_spine.section,
    "statistics": page_statistics.section,
    "mergekit": page_mergekit.section,
    "methods": page_methods.section,
    "adapters": page_adapters.section,
    "moe": page_moe.section,
    "moe_quality": page_moe.quality,
    "neurons": page_neurons.section,
    "image_disk": page_image_disk.section,
    "draft": page_draft.section,
    "mounts": page_mounts.section,
    "paper": page_paper.section,
    "planning": page_planning.section,
    "large": page_large.section,
    "search": page_search.section,
    "quality": page_quality.section,
    "method_quality": page_method_quality.section,
    "shuffle": page_shuffle.section,
    "incremental": page_incremental.section,
}


def read(directory: Path) -> dict[str, Told]:
    """The results of a directory, by the names of their files."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(directory.glob("*.json"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--pages", type=Path, default=PAGES, help="where the pages are")
    arguments = parser.parse_args()
    told, earlier = read(arguments.results), read(arguments.results / "avx512")
    pages: Path = arguments.pages
    (pages / "benchmarks.md").write_text(page_peers.page(told))
    (pages / "benchmarks-aims.md").write_text(page_aims.page(told, earlier))
    parts = [HEAD_OF_DETAILS]
    parts += [section(told[name]) for name, section in SECTIONS.items() if name in told]
    parts.append((HERE / "notes.md").read_text())
    (pages / "benchmarks-details.md").write_text("\n".join(parts))
    if "estimates" in told:
        methods = pages / "merge-methods.md"
        methods.write_text(page_estimates.placed(methods.read_text(), told["estimates"]))


if __name__ == "__main__":
    main()
