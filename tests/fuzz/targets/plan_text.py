"""A plan as JSON text, imported into a store that has its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import msgspec
from mutation import Form

from mstore import MergeRequest
from mstore.merge.analysis import exchange
from mstore.terms.errors import MstoreError
from targets.samples import store

FORM = Form.JSON


def target(data: bytes) -> None:
    """Imported as it is, and once more with the id that it should have."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    with suppress(MstoreError):
        store().import_plan(text)
    store().import_plan(_with_its_id(text))


def _with_its_id(text: str) -> str:
    try:
        value = msgspec.json.decode(text, type=exchange._Text)
        id = exchange._plan(value).id().hex()
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return text
    return msgspec.json.encode(msgspec.structs.replace(value, plan=id)).decode()


def seeds() -> Iterable[bytes]:
    for method, options in (("linear", {}), ("ties", {"density": 0.5})):
        plan = store().plan(
            MergeRequest(base="base", experts=["e0", "e1"], method=method, parameters=options)
        )
        yield store().export_plan(str(plan.plan)).encode()
