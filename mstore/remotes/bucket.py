"""Objects in object storage: S3 and what speaks it, Google Cloud Storage, Azure.

Owns how obstore is called, and what its errors mean. Requests are tried again by obstore, within
limits set here. obstore takes credentials from the environment, from the machine's role, and at
Google from gcloud's file; it reads no profiles of AWS: a caller may give what does. They stay
there: no error, report or file of mstore has them.
"""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from mstore.remotes.objects import (
    MOST_JOBS,
    MOST_ROOT_BYTES,
    PIECE_BYTES,
    PROBE,
    ROOT,
    Absent,
    Listed,
    Objects,
    Overtaken,
    RootStamp,
    short,
)
from mstore.terms.errors import Corrupt, Incompatible, MstoreError, Unavailable
from mstore.terms.ids import Buffer
from mstore.terms.phrases import Text

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
_READERS: Final = 10
_GAP: Final = 64 << 10
"""Bytes between two spans that are read rather than asked around."""
_TRIES: Final[Any] = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=120),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=10),
        "base": 2,
    },
}
# The providers' own hosts are asked by TLS; an endpoint that says http:// means it.
CLIENT: Final[Any] = {"connect_timeout": "10s", "timeout": "120s", "allow_http": True}
# An error of obstore quotes the server's answer, which may quote the request: addresses with
# signatures, headers with tokens. So of its text only what is listed here is shown.
_STATUS: Final = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z-]*)*)")
_CODE: Final = re.compile(r"<Code>([A-Z][A-Za-z]{2,60})</Code>")
_BEYOND: Final = re.compile(r"status code: 416|StartTooLarge|value: \"bytes \d+--1/")
_SERVER: Final = re.compile(r"Error performing \w+ (https?://[^/\s@]+)/")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
_CREDENTIALS: Final = re.compile(r"token request|//169\.254\.|credential|Access Key", re.IGNORECASE)
_SOURCES: Final = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a profile or `aws sso login`: "
    "pip install boto3",
    "gs": "gcloud auth application-default login, or set GOOGLE_SERVICE_ACCOUNT to a key's file",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY; after `az login`, AZURE_USE_AZURE_CLI=true",
}
_SIGNS: Final = (
    ("ConnectionRefused", "the connection is refused"),
    ("dns error", "there is no host of this name"),
    ("TimedOut", "no answer in time"),
    ("kind: Timeout", "no answer in time"),
    ("certificate", "its certificate is not trusted"),
    ("kind: Connect", "it cannot be reached"),
    ("IncompleteMessage", "the connection breaks"),
    ("UnexpectedEof", "the connection breaks"),
    ("ConnectionReset", "the connection breaks"),
    ("MissingAccount", "no storage account is named (AZURE_STORAGE_ACCOUNT_NAME)"),
)


_DENIED: Final = "check the credentials in the environment, and their rights"


class _Unable(Unavailable):
    """The server says that it cannot do this at all."""


def connect(url: str, options: dict[str, Any]) -> Bucket:
    """Return what is below a prefix of a bucket. Raises Unavailable, as `store_of`."""
    return Bucket(store_of(url, options), url)


def store_of(url: str, options: dict[str, Any]) -> ObjectStore:
    """Return obstore's store for an address. Raises Unavailable.

    url: as obstore takes it. options: keyword arguments of obstore's store for this provider.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise Unavailable(
            "remotes in object storage need obstore",
            where=url,
            hint="pip install 'mstore[remote]'",
        ) from error
    _require_threads(url)
    given: dict[str, Any] = {"client_options": CLIENT, "retry_config": _TRIES, **options}
    return _translated(url, lambda: from_url(url, **given), _DENIED)


class Bucket(Objects):
    """Objects below a prefix of a bucket.

    where: the address, for errors and reports. denied: what to do if the server refuses.
    """

    def __init__(self, store: ObjectStore, where: str, denied: Text = _DENIED) -> None:
        self._store = store
        self._denied = denied
        self.where = where

    def __reduce__(self) -> NoReturn:
        # The store's own pickle has the credentials.
        raise TypeError("a bucket is not pickled: open the remote where it is used")

    def _ask(self, name: str, ask: Callable[[], T]) -> T:
        """Call obstore, and turn its errors into those of `Objects`."""
        where = f"{self.where}/{name}" if name else self.where
        _require_threads(where)
        return _translated(where, ask, self._denied)

    def read_root(self, known: RootStamp | None = None) -> tuple[bytes, RootStamp] | None:
        import obstore
        from obstore.exceptions import NotModifiedError

        asked: Any = {} if known is None else {"if_none_match": known.e_tag}

        def ask() -> tuple[bytes, RootStamp] | None:
            try:
                got = obstore.get(self._store, ROOT, options=asked)
            except NotModifiedError:
                return None
            meta = got.meta
            if meta["size"] > MOST_ROOT_BYTES:
                raise Corrupt("the root is too long", where=f"{self.where}/{ROOT}")
            return bytes(got.bytes()), RootStamp(meta.get("e_tag"), meta.get("version"))

        found = self._ask(ROOT, ask)
        # A server may ignore the condition.
        return None if found is None or found[1] == known else found

    def swap_root(self, data: bytes, before: RootStamp | None) -> RootStamp:
        try:
            return self._put_if(ROOT, data, before)
        except (Overtaken, Unavailable):
            # The answer to a put that stands may have been lost, and the put tried again.
            with suppress(Absent):
                found = self.read_root()
                if found is not None and found[0] == data:
                    return found[1]
            raise

    def _put_if(self, name: str, data: bytes, before: RootStamp | None) -> RootStamp:
        import obstore

        mode: Any = "create"
        if before is not None:
            # A version that is None is refused, not left out.
            known = {"e_tag": before.e_tag, "version": before.version}
            mode = {key: value for key, value in known.items() if value is not None}
        result = self._ask(name, lambda: obstore.put(self._store, name, data, mode=mode))
        return RootStamp(result.get("e_tag"), result.get("version"))

    def probe(self, name: str) -> None:
        path = f"{PROBE}{name}"
        try:
            self._require_conditions(path)
        except _Unable as error:
            raise _ignores(self.where) from error
        finally:
            with suppress(Unavailable, Absent):
                self.remove(path)

    def _require_conditions(self, path: str) -> None:
        first = self._put_if(path, b"1", None)
        second = self._put_if(path, b"2", first)
        for before in (None, first):
            try:
                self._put_if(path, b"3", before)
            except Overtaken:
                continue
            raise _ignores(self.where)
        if bytes(self.read_each(path, [(0, 1)])[0]) != b"2" or second == first:
            raise Incompatible("the server does not keep what it took", where=self.where)

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        import obstore

        def read(joined: tuple[int, int]) -> memoryview:
            start, end = joined
            got = self._ask(
                name, lambda: obstore.get_range(self._store, name, start=start, end=end)
            )
            data = memoryview(got).cast("B")
            if len(data) != end - start:
                raise short(self.where, name)
            return data

        # obstore's own get_ranges panics where an object ends before a span begins.
        joined = _joined(spans)
        if len(joined) <= 1:
            parts = [read(one) for one in joined]
        else:
            with ThreadPoolExecutor(min(_READERS, len(joined)), "read") as pool:
                parts = list(pool.map(read, joined))
        starts = [start for start, _ in joined]

        def found(offset: int, length: int) -> Buffer:
            if not length:
                return b""
            at = bisect_right(starts, offset) - 1
            return parts[at][offset - starts[at] :][:length]

        return [found(*span) for span in spans]

    def size(self, name: str) -> int:
        return int(self._head(name)["size"])

    def time_ns(self, name: str) -> int:
        return int(self._head(name)["last_modified"].timestamp()) * 10**9

    def _head(self, name: str) -> Any:
        import obstore

        return self._ask(name, lambda: obstore.head(self._store, name))

    def put(self, name: str, size: int, pieces: Iterable[Buffer], *, jobs: int = 1) -> None:
        import obstore

        if size <= PIECE_BYTES:
            data = b"".join(pieces)
            self._ask(name, lambda: obstore.put(self._store, name, data, use_multipart=False))
            return
        failed: list[BaseException] = []

        def told() -> Iterator[Buffer]:
            # obstore may give what the pieces raise as an error of its own.
            try:
                yield from pieces
            except GeneratorExit:
                # obstore gave up, and lets go of the pieces.
                raise
            except BaseException as error:
                failed.append(error)
                raise

        def ask() -> None:
            obstore.put(
                self._store,
                name,
                told(),
                use_multipart=True,
                chunk_size=PIECE_BYTES,
                max_concurrency=max(1, min(jobs, MOST_JOBS)),
            )

        try:
            self._ask(name, ask)
        except BaseException:
            if failed:
                raise failed[0] from None
            raise

    def names(self, below: str) -> Iterator[Listed]:
        import obstore

        batches = self._ask(below, lambda: iter(obstore.list(self._store, below)))
        while batch := self._ask(below, lambda: next(batches, None)):
            for one in batch:
                when = int(one["last_modified"].timestamp()) * 10**9
                yield Listed(one["path"], one["size"], when)

    def remove(self, name: str) -> None:
        import obstore

        with suppress(Absent):
            self._ask(name, lambda: obstore.delete(self._store, name))


def _require_threads(where: str) -> None:
    """Raise Unavailable in the child of a process that used obstore before the fork."""
    if _first_process() != os.getpid():
        # obstore's threads are not in the child: each of its calls would wait for ever.
        raise Unavailable(
            "this process was forked after a remote was used, and cannot use one",
            where=where,
            hint='start the new process by spawn: multiprocessing.get_context("spawn")',
        )


@cache
def _first_process() -> int:
    """Return the process that used obstore first, and has its threads."""
    return os.getpid()


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (start, end) of what to read for spans: near ones at once, empty ones not at all."""
    joined: list[tuple[int, int]] = []
    for offset, length in sorted(one for one in spans if one[1]):
        end = offset + length
        if joined:
            before = joined[-1]
            is_near = offset <= before[1] + _GAP and end - before[0] <= PIECE_BYTES
            if is_near or end <= before[1]:
                joined[-1] = before[0], max(before[1], end)
                continue
        joined.append((offset, end))
    return joined


def _ignores(where: str) -> Incompatible:
    return Incompatible(
        "the server ignores conditions of writes, so two pushes at once could undo each other",
        where=where,
        hint="use a server with conditional writes (S3, GCS, Azure, MinIO, R2, Ceph)",
    )


def _heeding_ctrl_c(ask: Callable[[], T]) -> T:
    """Call obstore, for the main thread in another one.

    Python hears Ctrl-C only where the main thread waits in Python, and a server may be silent for
    two minutes. What was asked then ends by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return ask()
    answer: Future[T] = Future()

    def answered() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001 -- raised where it was asked
            answer.set_exception(error)

    threading.Thread(target=answered, name="ask", daemon=True).start()
    return answer.result()


def _translated(where: str, ask: Callable[[], T], denied: Text) -> T:
    """Call obstore. Its errors have no place in the chain of those that this raises."""
    try:
        return _heeding_ctrl_c(ask)
    except (MstoreError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # obstore's panics are no Exceptions; whatever is no error of obstore's goes on.
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        failure = _failure(error, where, denied)
    raise failure


def _failure(error: BaseException, where: str, denied: Text) -> MstoreError:
    import obstore.exceptions as known

    text = str(error)
    status = _STATUS.search(text)
    code = _CODE.search(text)
    number = status[1][:3] if status else ""
    if _BEYOND.search(text):
        return Corrupt("the object is shorter than what lists it says", where=where)
    if code and code[1] in _NO_BUCKET:
        return Unavailable(
            "there is no such bucket", where=where, hint="check the address, or make the bucket"
        )
    if isinstance(error, known.NotFoundError | FileNotFoundError):
        return Absent("there is no such object", where=where)
    if isinstance(error, known.AlreadyExistsError | known.PreconditionError):
        return Overtaken("the object is not what it was", where=where)
    if isinstance(error, known.NotSupportedError | NotImplementedError) or number == "501":
        return _Unable("the server cannot do this", where=where)
    if "External AWS credential provider" in text:
        return Unavailable(
            "the credentials cannot be renewed",
            where=where,
            hint="log in again, as with `aws sso login`, and run it again",
        )
    # obstore's own words for a refusal speak of credentials, which are there.
    is_refused = isinstance(error, known.PermissionDeniedError | known.UnauthenticatedError)
    if not is_refused and _CREDENTIALS.search(text.partition("Server returned")[0]):
        return Unavailable(
            "no credentials were found, or they cannot be read",
            where=where,
            hint=_SOURCES.get(where.partition("://")[0]),
        )
    told = f"it answers {status[1]}{f' ({code[1]})' if code else ''}" if status else _sign(text)
    if is_refused or number in ("401", "403"):
        return Unavailable(f"access is denied: {told}", where=where, hint=denied)
    answers = f"the server does not answer as it should: {told}"
    return Unavailable(
        answers if status else f"the server is not reached: {told}",
        where=where,
        hint="check the address, the endpoint and the network, then run it again",
    )


def _sign(text: str) -> str:
    """Return what an error that is no answer's status says, and of which server."""
    found = next((words for sign, words in _SIGNS if sign in text), None)
    if found is None:
        return "its answer cannot be understood"
    server = _SERVER.search(text)
    return found if server is None else f"{found} ({server[1]})"
