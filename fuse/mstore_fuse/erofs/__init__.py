"""Snapshots shown by the kernel's EROFS: no process serves them, and the kernel reads the packs.

    image     names, sizes and maps -> the bytes of an EROFS image (pure)
    mapping   a snapshot view -> which pages of its files are pages of packs, and which are copied
    kernel    the system calls
    driver    wires these: a mount from a store and a revision, of blocks that it has checked

The image holds names, attributes, maps, and what does not lie in a pack as it is read. It is a file
without a name, so nothing remains when the mount ends.
"""

from __future__ import annotations
