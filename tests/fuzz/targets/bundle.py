"""A bundle: a zip of a stranger's, and the objects in it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

from mutation import Form

from mstore.remotes.bundle import Bundle, NewBundle
from mstore.remotes.objects import PIECE_BYTES, ROOT
from targets import samples

FORM = Form.BYTES


def target(data: bytes) -> None:
    """Read every object; none has bytes beyond the file."""
    path = samples.scratch() / "input.mbundle"
    path.write_bytes(data)
    with closing(Bundle(path)) as opened:
        opened.read_root()
        for one in opened.names(""):
            assert one.size < len(data)
            length = min(one.size, PIECE_BYTES)
            [read] = opened.read_each(one.name, [(one.size - length, length)])
            assert len(read) == length


def seeds() -> Iterable[bytes]:
    path = samples.scratch() / "seed.mbundle"
    for names in ((), ("lists/00-ab", "tables/00-cd", "packs/ab/abcd.pack")):
        path.unlink(missing_ok=True)
        made = NewBundle(path)
        for name in names:
            made.put_bytes(name, name.encode() * 9)
        made.swap_root(f'{{"{ROOT}": {{}}}}'.encode(), None)
        made.finish()
        yield path.read_bytes()
