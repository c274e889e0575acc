"""A tar layer of a registry: its first byte says how it is compressed."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterable

import zstandard
from mutation import Form

from mstore.oci.artifacts import COMPRESSIONS
from mstore.oci.tars import members

FORM = Form.BYTES


def target(data: bytes) -> None:
    found = members(
        iter([data[1:]]),
        compression=COMPRESSIONS[data[0] % len(COMPRESSIONS)] if data else "",
        size=len(data),
        most_files=100,
        where="input",
    )
    for one in found:
        assert sum(map(len, one.pieces())) == one.size
        assert not one.path.startswith("/")


def seeds() -> Iterable[bytes]:
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as archive:
            for path in ("config.json", "d/" + "n" * 120, "é"):
                made = tarfile.TarInfo(path)
                made.size = 3
                archive.addfile(made, io.BytesIO(b"{} "))
        plain = out.getvalue()
        yield b"\0" + plain
        yield b"\1" + gzip.compress(plain)
        yield b"\2" + zstandard.compress(plain)
