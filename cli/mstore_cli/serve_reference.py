"""The generator of the reference in docs/serving.md: the keys of the documents that a server gives.

`python -m mstore_cli.serve_reference docs/serving.md` replaces the text below the marker in that
page; a test compares the page with `reference()`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mstore_cli import page
from mstore_cli.keys import OBJECTS, SERVED, keys_of
from mstore_cli.reference import table
from mstore_serve import documents

MARKER = page.marker("python -m mstore_cli.serve_reference docs/serving.md")
DOCUMENTS: dict[str, type] = {
    "/": documents.RootDocument,
    "/refs": documents.RefsDocument,
    "/refs/NAME": OBJECTS["ref"],
    "/snapshots": documents.SnapshotsDocument,
    "/snapshots/ID": documents.SnapshotDocument,
    "/snapshots/ID/files/": documents.DirectoryDocument,
    "/snapshots/ID/tensors/": documents.TensorsDocument,
    "an error": documents.ErrorDocument,
}
"""The document of each address."""


def reference() -> str:
    """Return the generated part of docs/serving.md: a table for each document and object."""
    parts = [f"### {address}\n\n{table(keys_of(one))}" for address, one in DOCUMENTS.items()]
    objects = {"ref": OBJECTS["ref"], "tensor": OBJECTS["tensor"], **SERVED}
    parts += [f"### Object: {word}\n\n{table(keys_of(one))}" for word, one in objects.items()]
    return "\n".join(parts)


def main() -> None:
    """Rewrite the page named on the command line."""
    page.renew(Path(sys.argv[1]), MARKER, reference())


if __name__ == "__main__":
    main()
