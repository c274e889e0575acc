"""Ways to damage a store that leave its packs whole.  Each draws from a generator, and says what.

Every one is something that happens: a bit that turns, a file cut short by a full disk or a crash, a
page of zeros, a backup tool that restores an older file, a tidy neighbour that deletes.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from lmdb_page import PAGE

# What a life kept of itself: copies of index/, stats/, memo/ and refs/ at earlier times.
Older = list[Path]
Damage = Callable[[Path, Older, random.Random], str]


def _environment(draw: random.Random) -> str:
    # The index more often: everything hangs on it.
    return draw.choice(["index", "index", "index", "stats", "memo"])


def _data(root: Path, draw: random.Random) -> Path | None:
    path = root / _environment(draw) / "data.mdb"
    return path if path.exists() and path.stat().st_size else None


def flips(root: Path, older: Older, draw: random.Random) -> str:
    """A few bits turn, anywhere in an LMDB file."""
    path = _data(root, draw)
    if path is None:
        return "nothing"
    data = bytearray(path.read_bytes())
    places = [draw.randrange(len(data)) for _ in range(draw.choice([1, 1, 2, 8]))]
    for place in places:
        data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"{path.parent.name}: bits at {places}"


def flips_in_a_head(root: Path, older: Older, draw: random.Random) -> str:
    """A bit turns in a meta page, or in the first bytes of another page."""
    path = _data(root, draw)
    if path is None:
        return "nothing"
    data = bytearray(path.read_bytes())
    page = draw.choice([0, 1, draw.randrange(1 + len(data) // PAGE)])
    place = min(len(data) - 1, page * PAGE + draw.randrange(160))
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"{path.parent.name}: a bit at {place}"


def cut(root: Path, older: Older, draw: random.Random) -> str:
    """A file ends too early."""
    path = _data(root, draw)
    if path is None:
        return "nothing"
    size = path.stat().st_size
    length = draw.choice([0, PAGE, size - 2 * PAGE, size - PAGE, draw.randrange(size)])
    with path.open("r+b") as file:
        file.truncate(max(0, length))
    return f"{path.parent.name}: cut from {size} to {length}"


def pages(root: Path, older: Older, draw: random.Random) -> str:
    """A page becomes zeros, noise, or a copy of another page."""
    path = _data(root, draw)
    if path is None:
        return "nothing"
    data = bytearray(path.read_bytes())
    count = -(-len(data) // PAGE)
    number, other = draw.randrange(count), draw.randrange(count)
    what = draw.choice(["zeros", "noise", "a copy"])
    page = {
        "zeros": bytes(PAGE),
        "noise": draw.randbytes(PAGE),
        "a copy": bytes(data[other * PAGE : (other + 1) * PAGE]),
    }[what]
    data[number * PAGE : (number + 1) * PAGE] = page
    path.write_bytes(data)
    return f"{path.parent.name}: page {number} is {what} (of {other})"


def restore(root: Path, older: Older, draw: random.Random) -> str:
    """An older index, or only its data, or stats, memo or mirror with it, is put back."""
    if not older:
        return "nothing"
    number = draw.randrange(len(older))
    kinds = draw.choice([["index"], ["index"], ["refs"], ["index", "refs"], ["stats", "memo"]])
    for kind in kinds:
        source, target = older[number] / kind, root / kind
        if not source.exists():
            continue
        if kind == "index" and target.exists() and draw.random() < 0.5:
            shutil.copy(source / "data.mdb", target / "data.mdb")
            continue
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
    return f"older {' and '.join(kinds)} of step {number}"


def remove(root: Path, older: Older, draw: random.Random) -> str:
    """Something that can be had again is deleted."""
    name = draw.choice(
        ["index", "stats", "memo", "refs", "refs/mirror", "index/lock.mdb", "index/data.mdb"]
    )
    path = root / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return f"no {name}"


def mirror(root: Path, older: Older, draw: random.Random) -> str:
    """The mirror, or one that it replaced, is flipped, cut or emptied."""
    found = sorted(root.glob("refs/*"))
    if not found:
        return "nothing"
    path = draw.choice([root / "refs" / "mirror", *found])
    if not path.exists():
        return "nothing"
    data = bytearray(path.read_bytes())
    what = draw.choice(["flipped", "cut", "empty"])
    if what == "flipped" and data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif what == "cut" and data:
        del data[draw.randrange(len(data)) :]
    else:
        data.clear()
    path.unlink()
    path.write_bytes(data)
    return f"{path.name} {what}"


ALL: tuple[Damage, ...] = (
    flips, flips, flips_in_a_head, cut, pages, restore, restore, remove, mirror,
)  # fmt: skip
