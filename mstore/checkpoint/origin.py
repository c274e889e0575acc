"""Where a checkpoint came from."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec


class Origin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a checkpoint came from.

    url: of the repository. revision: the branch or tag that was asked for, empty if that is not
    known. commit: what it was there.
    """

    url: str
    revision: str
    commit: str

    @property
    def model(self) -> str:
        """ORG/NAME, if it is from a Hub; empty for a registry."""
        parts = urlsplit(self.url)
        return "/".join(parts.path.split("/")[1:3]) if parts.scheme in ("http", "https") else ""

    def __str__(self) -> str:
        return f"{self.model or self.url}@{self.commit}"
