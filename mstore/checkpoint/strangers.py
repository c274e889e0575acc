"""Files that people mistake for safetensors checkpoints, recognised by first bytes or by name.

For errors only: what such a file is, and how to get a checkpoint that can be added.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

import msgspec

from mstore.errors import BadCheckpoint
from mstore.phrases import Text, call, phrase

PREFIX_BYTES: Final = 8
"""How many first bytes of a file `by_bytes` needs; it accepts more."""


class Stranger(msgspec.Struct, frozen=True):
    """What a file is, as a predicate, and what to do about it."""

    what: str
    hint: Text

    def error(self, where: str) -> BadCheckpoint:
        """Build the error that refuses a file at `where`."""
        return BadCheckpoint(self.what, where=where, hint=self.hint)


LFS_POINTER: Final = Stranger(
    "is a Git LFS pointer, not the file that it stands for",
    "git lfs pull",
)
GGUF: Final = Stranger(
    "is a GGUF file, which is made for llama.cpp and mostly quantised; mstore stores safetensors",
    "add the safetensors checkpoint that it was made from",
)
ZIP: Final = Stranger(
    "is a zip archive, as torch.save writes, and not safetensors",
    phrase(
        "give it the suffix .bin, then: {add}",
        add=call("add", "DIRECTORY", name="x", convert=True),
    ),
)
HTML: Final = Stranger(
    "is a web page: the download went wrong, or asked for a login",
    "download it again, as with: hf download REPOSITORY",
)
RECIPE: Final = Stranger(
    "is a YAML file, as mergekit's recipes are; a checkpoint has .safetensors files",
    phrase(
        "{help} says how to give base, experts, weights and method",
        help=call("merge", help=True),
    ),
)

_BY_BYTES: Final = (
    (b"version ", LFS_POINTER),
    (b"GGUF", GGUF),
    (b"PK\x03\x04", ZIP),
    (b"<!DOCTYP", HTML),
    (b"<!doctyp", HTML),
    (b"<html", HTML),
)


def by_bytes(prefix: bytes) -> Stranger | None:
    """Recognise a file by its first bytes; None if it may be safetensors."""
    return next((stranger for magic, stranger in _BY_BYTES if prefix.startswith(magic)), None)


def by_name(path: str) -> Stranger | None:
    """Recognise a file that mstore does not accept by its name; else None."""
    match PurePath(path).suffix.lower():
        case ".gguf" | ".ggml":
            return GGUF
        case ".yaml" | ".yml":
            return RECIPE
    return None
