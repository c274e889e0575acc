"""Whether a request's conditions hold: If-Match and its kind.  Pure.

The order is that of RFC 9110, section 13.2.2. Every ETag here is strong. A date counts only where
time tells versions apart (`Validators.modified`): a ref may move twice in a second, or back.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import formatdate, parsedate_to_datetime
from typing import Final

import msgspec

_ETAG: Final = re.compile(r'(W/)?("[\x21\x23-\x7e\x80-\xff]*")')


class Validators(msgspec.Struct, frozen=True):
    """What tells versions of one address apart.

    etag: strong, with its quotes. modified: seconds since 1970, None where a time does not tell.
    """

    etag: str
    modified: int | None


class Verdict(enum.Enum):
    """What the conditions ask for."""

    SEND = 200
    NOT_MODIFIED = 304
    FAILED = 412


def evaluate(headers: Mapping[str, str], current: Validators) -> Verdict:
    """Return what to answer to a GET or HEAD; `headers` by lower-case name."""
    match = headers.get("if-match")
    if match is not None:
        if not _is_listed(match, current.etag, weakly=False):
            return Verdict.FAILED
    elif _is_newer(current, headers.get("if-unmodified-since")) is True:
        return Verdict.FAILED
    none_match = headers.get("if-none-match")
    if none_match is not None:
        is_known = _is_listed(none_match, current.etag, weakly=True)
    else:
        is_known = _is_newer(current, headers.get("if-modified-since")) is False
    return Verdict.NOT_MODIFIED if is_known else Verdict.SEND


def range_applies(headers: Mapping[str, str], current: Validators) -> bool:
    """Return whether a Range is to be followed: If-Range, if given, names this version."""
    named = headers.get("if-range")
    if named is None:
        return True
    if '"' in named:
        return named.strip() == current.etag
    return current.modified is not None and _seconds(named) == current.modified


def http_date(seconds: int) -> str:
    """Return a time as HTTP writes it."""
    return formatdate(seconds, usegmt=True)


def _is_listed(header: str, etag: str, *, weakly: bool) -> bool:
    if header.strip() == "*":
        return True
    return any(tag == etag and (weakly or not weak) for weak, tag in _ETAG.findall(header))


def _is_newer(current: Validators, date: str | None) -> bool | None:
    """Return whether this version is younger than the date; None if nobody can say."""
    if date is None or current.modified is None:
        return None
    seconds = _seconds(date)
    return None if seconds is None else current.modified > seconds


def _seconds(date: str) -> int | None:
    try:
        found = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return None
    # Of the old forms, one has no zone: it is UTC.
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
