"""Objects in object storage: S3 and what speaks it, Google Cloud Storage, Azure; read over HTTP.

Owns how obstore is called, and what its errors mean. Requests are tried again by obstore, within
limits set here. Credentials come from the environment and the usual profiles, and stay in obstore:
no error, report or file of mstore has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

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
from mstore.terms.errors import Corrupt, Incompatible, Unavailable
from mstore.terms.ids import Buffer

if TYPE_CHECKING:
    from obstore.store import ObjectStore

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
_CLIENT: Final[Any] = {"connect_timeout": "10s", "timeout": "120s", "allow_http": True}
# What may stand in an error of a server: the address with its query, headers, XML of S3.
_SECRET: Final = re.compile(
    r"\?[^\s\"')]+|(?i:authorization|token|signature|secret)[^\s,]*[=:]\s*\S+"
)
_LONGEST: Final = 300


class Bucket(Objects):
    """Objects below a prefix of a bucket.

    url: as obstore takes it. options: keyword arguments of obstore's store for this provider.
    """

    def __init__(self, url: str, options: dict[str, Any], where: str | None = None) -> None:
        try:
            from obstore.store import from_url
        except ImportError as error:
            raise Unavailable(
                "remotes in object storage need obstore",
                where=url,
                hint="pip install 'mstore[remote]'",
            ) from error
        self.where = where or url
        with self._told(""):
            given: dict[str, Any] = {"client_options": _CLIENT, "retry_config": _TRIES, **options}
            self._store: ObjectStore = from_url(url, **given)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Turn obstore's errors into those of `Objects`."""
        import obstore.exceptions as known

        where = f"{self.where}/{name}" if name else self.where
        try:
            yield
        except (known.NotFoundError, FileNotFoundError) as error:
            raise Absent("there is no such object", where=where) from _plain(error)
        except (known.AlreadyExistsError, known.PreconditionError) as error:
            raise Overtaken("the object is not what it was", where=where) from _plain(error)
        except known.NotModifiedError:
            raise
        except (known.PermissionDeniedError, known.UnauthenticatedError) as error:
            raise Unavailable(
                f"access is denied: {_words(error)}",
                where=where,
                hint="check the credentials in the environment or the profile, and their rights",
            ) from _plain(error)
        except (known.BaseError, OSError, ValueError) as error:
            raise Unavailable(
                f"the server does not answer as it should: {_words(error)}",
                where=where,
                hint="check the address, the endpoint and the network, then run it again",
            ) from _plain(error)

    def read_root(self, known: RootStamp | None = None) -> tuple[bytes, RootStamp] | None:
        import obstore
        from obstore.exceptions import NotModifiedError

        asked: Any = {} if known is None else {"if_none_match": known.e_tag}
        try:
            with self._told(ROOT):
                got = obstore.get(self._store, ROOT, options=asked)
                meta = got.meta
                if meta["size"] > MOST_ROOT_BYTES:
                    raise Corrupt("the root is too long", where=f"{self.where}/{ROOT}")
                data = bytes(got.bytes())
        except NotModifiedError:
            return None
        stamp = RootStamp(meta.get("e_tag"), meta.get("version"))
        # A server may ignore the condition.
        return None if stamp == known else (data, stamp)

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
        with self._told(name):
            result = obstore.put(self._store, name, data, mode=mode)
        return RootStamp(result.get("e_tag"), result.get("version"))

    def probe(self, name: str) -> None:
        path = f"{PROBE}{name}"
        try:
            first = self._put_if(path, b"1", None)
            second = self._put_if(path, b"2", first)
            for before in (None, first):
                try:
                    self._put_if(path, b"3", before)
                except Overtaken:
                    continue
                raise Incompatible(
                    "the server ignores conditions of writes, so two pushes at once could undo "
                    "each other",
                    where=self.where,
                    hint="use a server with conditional writes (S3, GCS, Azure, MinIO, R2, Ceph)",
                )
            if bytes(self.read_each(path, [(0, 1)])[0]) != b"2" or second == first:
                raise Incompatible("the server does not keep what it took", where=self.where)
        finally:
            with suppress(Unavailable, Absent):
                self.remove(path)

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        import obstore

        with self._told(name):
            if len(spans) == 1:
                offset, length = spans[0]
                got = (
                    [obstore.get_range(self._store, name, start=offset, length=length)]
                    if length
                    else [b""]
                )
            else:
                got = obstore.get_ranges(
                    self._store,
                    name,
                    starts=[offset for offset, _ in spans],
                    lengths=[length for _, length in spans],
                )
        found = [memoryview(one).cast("B") for one in got]
        for (_, length), data in zip(spans, found, strict=True):
            if len(data) != length:
                raise short(self.where, name)
        return list(found)

    def size(self, name: str) -> int:
        return int(self._head(name)["size"])

    def time_ns(self, name: str) -> int:
        return int(self._head(name)["last_modified"].timestamp()) * 10**9

    def _head(self, name: str) -> Any:
        import obstore

        with self._told(name):
            return obstore.head(self._store, name)

    def put(self, name: str, size: int, pieces: Iterable[Buffer], *, jobs: int = 1) -> None:
        import obstore

        if size <= PIECE_BYTES:
            data = b"".join(pieces)
            with self._told(name):
                obstore.put(self._store, name, data, use_multipart=False)
            return
        failed: list[BaseException] = []

        def told() -> Iterator[Buffer]:
            # obstore would give what the pieces raise as an error of its own.
            try:
                yield from pieces
            except BaseException as error:
                failed.append(error)
                raise

        try:
            with self._told(name):
                obstore.put(
                    self._store,
                    name,
                    told(),
                    use_multipart=True,
                    chunk_size=PIECE_BYTES,
                    max_concurrency=min(jobs, MOST_JOBS),
                )
        except Unavailable:
            if failed:
                raise failed[0] from None
            raise

    def names(self, below: str) -> Iterator[Listed]:
        import obstore

        with self._told(below):
            for batch in obstore.list(self._store, below):
                for one in batch:
                    when = int(one["last_modified"].timestamp()) * 10**9
                    yield Listed(one["path"], one["size"], when)

    def remove(self, name: str) -> None:
        import obstore

        with suppress(Absent), self._told(name):
            obstore.delete(self._store, name)


def _words(error: BaseException) -> str:
    """Return what an error says, in one line, without what may be a secret."""
    text = _SECRET.sub("", str(error).partition("Debug source")[0])
    return " ".join(text.split())[:_LONGEST]


def _plain(error: BaseException) -> BaseException:
    """Return a cause to show: of the same words, without secrets."""
    return RuntimeError(_words(error))
