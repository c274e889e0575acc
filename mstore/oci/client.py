"""Requests to a registry about one repository: the OCI distribution specification.

Owns tokens, tries, and what answers mean.  A busy registry (429, 5xx) is waited for as long as it
asks, up to five minutes; a connection that breaks is made again.  Blobs go up in chunks: after a
break, the registry says how much it has, and the upload goes on there.  What an error shows of an
answer are status and code: an answer may quote the request, and that has a token.

Safe for any number of threads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

import msgspec

from mstore.oci import credentials
from mstore.oci.address import DOCKER_HUB, ArtifactAddress, is_digest, is_loopback
from mstore.terms.errors import BadCheckpoint, MstoreError, NotFound, Unavailable

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
CHUNK_BYTES: Final = 16 << 20
"""Bytes of a request that sends a part of a blob; smaller blobs take one."""
MOST_MANIFEST_BYTES: Final = 4 << 20
"""The specification's limit."""
_BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})
_TRIES: Final = 6
_LONGEST_WAIT: Final = 300.0
"""Seconds.  A registry that asks for more is told to the user."""
_TO_FINISH: Final = 900.0
"""Seconds.  At the end of an upload, a registry may read all of the blob again."""
_PIECE: Final = 1 << 20
_MOST_SKIPPED: Final = 64 << 20
"""Bytes of an answer that are not kept, where a registry sends whole blobs for ranges."""
_CERTIFICATE: Final = "CERTIFICATE_VERIFY_FAILED"
_CODE: Final = re.compile(r"[A-Z][A-Z_]{1,60}")
_CHALLENGE: Final = re.compile(r'([A-Za-z_]+)="([^"]*)"')
_AGAIN: Final = "run the command again: it goes on with what arrived"
INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
MANIFESTS: Final = (MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")


def library() -> Any:
    """Return httpx2.  Raises Unavailable."""
    try:
        import httpx2
    except ImportError as error:
        raise Unavailable(
            f"registries need the library httpx2 ({error})", hint="pip install 'mstore[oci]'"
        ) from error
    return httpx2


class FoundManifest(NamedTuple):
    """A manifest as a registry has it: its bytes, their digest, what the registry calls it."""

    data: bytes
    digest: str
    media_type: str


class _Refused(Exception):
    """An answer that is none of those that were asked for."""

    def __init__(self, response: httpx2.Response, code: str) -> None:
        super().__init__(f"{response.status_code} {code}".strip())
        self.status = response.status_code
        self.code = code
        self.after = str(response.headers.get("Retry-After", ""))


class Upload(NamedTuple):
    """A blob to send: its digest, its size, what gives its bytes (offset, length)."""

    digest: str
    size: int
    read: Callable[[int, int], bytes]


class Registry:
    """The repository of an address, at its registry.

    Every call raises NotFound, Unavailable (the registry does not answer, or lets nobody in), and
    BadCheckpoint for bytes that have not the digest that they are asked for by.
    """

    def __init__(self, address: ArtifactAddress, *, patience: float = 60.0) -> None:
        httpx2 = library()
        self.address = address
        self._patience = patience
        self._http: Any = httpx2.Client(
            timeout=patience,
            follow_redirects=True,
            headers={"User-Agent": "mstore", "Accept-Encoding": "identity"},
        )
        self._lock = Lock()
        self._tokens: dict[tuple[str, ...], str] = {}
        self._credentials: credentials.Credentials | None = None
        self._asked_credentials = False
        self._base = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # -- manifests ---------------------------------------------------------------------------------

    def manifest(self, reference: str) -> FoundManifest | None:
        """Return the manifest of a tag or a digest; None if there is none."""
        headers = {"Accept": ", ".join((*MANIFESTS, *INDEXES))}

        def ask() -> FoundManifest | None:
            with self._answer("GET", f"manifests/{reference}", headers=headers) as answer:
                if answer.status_code == 404:
                    return None
                self._require(answer, 200)
                data = _limited(answer, MOST_MANIFEST_BYTES)
            if data is None:
                raise self._bad(f"the manifest {reference} has more than 4 MiB")
            kind = str(answer.headers.get("Content-Type", "")).partition(";")[0].strip()
            return FoundManifest(data, digest_of(data), kind)

        found = self._asked(ask)
        if found is not None and is_digest(reference) and found.digest != reference:
            raise self._bad(f"the registry sent another manifest than {reference}")
        return found

    def manifest_digest(self, reference: str) -> str | None:
        """Return the digest of a manifest, as the registry tells it; None if there is none."""
        headers = {"Accept": ", ".join((*MANIFESTS, *INDEXES))}

        def ask() -> str | None:
            with self._answer("HEAD", f"manifests/{reference}", headers=headers) as answer:
                if answer.status_code == 404:
                    return None
                self._require(answer, 200)
            told = str(answer.headers.get("Docker-Content-Digest", ""))
            return told if is_digest(told) else ""

        found = self._asked(ask)
        if found == "":
            # The specification lets a registry leave it out.
            whole = self.manifest(reference)
            return None if whole is None else whole.digest
        return found

    def put_manifest(self, reference: str, data: bytes, media_type: str) -> bool:
        """Make a tag, or a digest, name this manifest; return whether it was linked to its subject.

        A registry that does not know subjects leaves that to the client.
        """

        def ask() -> bool:
            headers = {"Content-Type": media_type}
            with self._answer(
                "PUT", f"manifests/{reference}", headers=headers, content=data, push=True
            ) as answer:
                self._require(answer, 201)
            return "OCI-Subject" in answer.headers

        return self._asked(ask)

    def has_referrers(self, digest: str) -> bool:
        """Return whether the registry itself lists the manifests whose subject a digest is."""

        def ask() -> bool:
            with self._answer("GET", f"referrers/{digest}") as answer:
                return answer.status_code == 200

        return self._asked(ask)

    # -- blobs -------------------------------------------------------------------------------------

    def has_blob(self, digest: str) -> bool:
        """Return whether the repository has a blob."""

        def ask() -> bool:
            with self._answer("HEAD", f"blobs/{digest}") as answer:
                if answer.status_code != 404:
                    self._require(answer, 200)
            return answer.status_code == 200

        return self._asked(ask)

    def read(
        self,
        digest: str,
        offset: int,
        length: int,
        tick: Callable[[int], None] | None = None,
    ) -> bytes:
        """Return these bytes of a blob, unchecked; fewer at its end.

        tick: called with the bytes that arrived, now and then; what it raises ends the request.  If
        the registry is asked again, it is told less than nothing.
        """

        def ask() -> bytes:
            pieces: list[bytes] = []
            got, skip = 0, offset
            headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
            try:
                with self._answer("GET", f"blobs/{digest}", headers=headers) as answer:
                    if answer.status_code == 416:
                        return b""
                    self._require(answer, 200, 206)
                    # Some proxies send the whole blob.
                    skip = 0 if answer.status_code == 206 else offset
                    if skip > _MOST_SKIPPED:
                        raise Unavailable(
                            "the registry sends no ranges of blobs",
                            where=self.shown,
                            hint=f"oras pull -o DIR {str(self.address).partition(':')[2]}, and add "
                            "the directory",
                        )
                    for piece in answer.iter_bytes(_PIECE):
                        kept = piece[skip:]
                        skip -= len(piece) - len(kept)
                        pieces.append(kept)
                        got += len(kept)
                        if tick is not None and kept:
                            tick(len(kept))
                        if got >= length:
                            break
            except BaseException:
                if tick is not None and got:
                    tick(-got)
                raise
            return b"".join(pieces)[:length]

        return self._asked(ask) if length > 0 else b""

    def stream(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield the pieces of a blob; after a break, it goes on where it was.

        Raises BadCheckpoint at the end if they have not the digest.
        """
        found, at = sha256(), 0
        while at < size:
            piece = self.read(digest, at, min(CHUNK_BYTES, size - at))
            if not piece:
                raise self._bad(f"the blob {digest} is shorter than the {size} bytes it should be")
            found.update(piece)
            at += len(piece)
            yield piece
        if f"sha256:{found.hexdigest()}" != digest:
            raise self._bad(f"the registry sent other bytes than those of {digest}")

    def mount(self, digest: str, source: str) -> bool:
        """Let the repository have a blob of another one of the registry; return whether it could.

        source: the other repository.
        """
        query = {"mount": digest, "from": source}

        def ask() -> str | None:
            with self._answer(
                "POST", "blobs/uploads/", query=query, push=True, also=(source,)
            ) as answer:
                if answer.status_code == 201:
                    return None
                if answer.status_code in _BUSY:
                    self._require(answer, 201)
                # 202: the registry began an upload.  Anything else: it cannot.
                return str(answer.headers.get("Location", ""))

        begun = self._asked(ask)
        if begun:
            with suppress(MstoreError):
                self._asked(lambda: self._cancel(begun))
        return begun is None

    def _cancel(self, place: str) -> None:
        with self._answer("DELETE", place, push=True):
            pass

    def upload(self, blob: Upload, tick: Callable[[int], None]) -> None:
        """Send a blob.  tick: called with the bytes that the registry has more than ever before."""
        most = 0

        def reached(at: int) -> None:
            nonlocal most
            if at > most:
                tick(at - most)
                most = at

        for left in reversed(range(3)):
            try:
                self._upload(blob, reached)
            except _Refused as error:
                # After a break, some registries have a part twice.
                if error.status not in (400, 404, 416) or not left:
                    raise self._told(error) from error
                continue
            return

    def _upload(self, blob: Upload, reached: Callable[[int], None]) -> None:
        place = self._begin()
        at = failures = 0
        while blob.size > CHUNK_BYTES and at < blob.size:
            data = blob.read(at, min(CHUNK_BYTES, blob.size - at))
            try:
                place, at = self._send_chunk(place, at, data)
                failures = 0
            except Exception as error:
                if not _is_ours(error):
                    raise
                wait = _wait(error, failures)
                failures += 1
                is_over = isinstance(error, _Refused) and error.status in (404, 416)
                if failures == _TRIES or (wait is None and not is_over):
                    raise self._told(error) from error
                time.sleep(wait or 0.0)
                place, at = self._where(place) or (self._begin(), 0)
            reached(at)
        rest = b"" if blob.size > CHUNK_BYTES else blob.read(0, blob.size)
        self._finish(place, blob, rest)
        reached(blob.size)

    def _begin(self) -> str:
        """Begin an upload; return its address."""

        def ask() -> str:
            with self._answer("POST", "blobs/uploads/", push=True) as answer:
                self._require(answer, 202)
            place = str(answer.headers.get("Location", ""))
            if not place:
                raise Unavailable("the registry does not say where to upload", where=self.shown)
            return place

        return self._asked(ask)

    def _send_chunk(self, place: str, at: int, data: bytes) -> tuple[str, int]:
        """Send the next bytes; return the upload's new address, and how many bytes it has."""
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{at}-{at + len(data) - 1}",
        }
        with self._answer("PATCH", place, headers=headers, content=data, push=True) as answer:
            self._require(answer, 202)
        told = _end(answer)
        return str(answer.headers.get("Location", place)), at + len(data) if told is None else told

    def _where(self, place: str) -> tuple[str, int] | None:
        """Return the address of an upload and how many bytes it has; None if it is gone."""

        def ask() -> tuple[str, int] | None:
            with self._answer("GET", place, push=True) as answer:
                if answer.status_code != 204:
                    return None
            return str(answer.headers.get("Location", place)), _end(answer) or 0

        return self._asked(ask)

    def _finish(self, place: str, blob: Upload, rest: bytes) -> None:
        """Close an upload with its last bytes; also where an answer was lost.  Raises _Refused."""
        headers = {"Content-Type": "application/octet-stream"}
        query = {"digest": blob.digest}
        for number in range(_TRIES):
            try:
                with self._answer(
                    "PUT",
                    place,
                    query=query,
                    headers=headers,
                    content=rest,
                    push=True,
                    patience=_TO_FINISH,
                ) as answer:
                    self._require(answer, 201)
                return
            except Exception as error:
                if not _is_ours(error):
                    raise
                # The answer may have been lost, and not the blob.
                if self.has_blob(blob.digest):
                    return
                wait = _wait(error, number)
                if wait is None or number == _TRIES - 1:
                    if isinstance(error, _Refused):
                        raise
                    raise self._told(error) from error
                time.sleep(wait)
                if rest:
                    place = self._begin()

    # -- requests ----------------------------------------------------------------------------------

    @contextmanager
    def _answer(
        self,
        method: str,
        place: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        push: bool = False,
        also: Sequence[str] = (),
        patience: float | None = None,
    ) -> Iterator[httpx2.Response]:
        """Send a request, with a token if the registry wants one; yield the answer.

        place: below the repository, or the address that the registry gave.  also: other
        repositories that it is about.  patience: seconds without a byte; None: the usual ones.
        """
        httpx2 = library()
        base = httpx2.URL(f"{self._server()}/v2/{self.address.repository}/")
        url = base.join(place)
        if query:
            url = url.copy_merge_params(dict(query))
        if url.scheme == "http" and base.scheme == "https":
            # What stands behind a proxy that ends TLS may not know that it does.
            if url.host != base.host:
                raise Unavailable(
                    "the registry sends blobs to a place without TLS", where=self.shown
                )
            url = url.copy_with(scheme=base.scheme, port=base.port)
        # An address that the registry gave may be elsewhere: no token goes there.
        is_own = (url.scheme, url.netloc) == (base.scheme, base.netloc)
        actions = "pull,push" if push else "pull"
        scopes = (
            f"repository:{self.address.repository}:{actions}",
            *(f"repository:{one}:pull" for one in also),
        )
        with self._lock:
            token = self._tokens.get(scopes) if is_own else None
        # A token may end while it is on its way, so a second new one is asked for.
        for left in (2, 1, 0):
            own = dict(headers or {})
            if token:
                own["Authorization"] = token
            if content is not None or method in ("POST", "PUT", "PATCH"):
                own["Content-Length"] = str(len(content or b""))
            with self._http.stream(
                method, url, headers=own, content=content, timeout=patience or self._patience
            ) as answer:
                if answer.status_code != 401 or not left or not is_own:
                    yield answer
                    return
                challenge = str(answer.headers.get("WWW-Authenticate", ""))
            token = self._authorized(challenge, scopes)
            if token is None:
                raise self._login("the registry wants a login")
            with self._lock:
                self._tokens[scopes] = token

    def _server(self) -> str:
        """Return where requests go.  On this machine, TLS is left out where there is none."""
        with self._lock:
            if self._base:
                return self._base
            server = self.address.server
            self._base = f"https://{server}"
            if self.address.is_on_this_machine:
                httpx2 = library()
                try:
                    self._http.get(f"{self._base}/v2/")
                except httpx2.TransportError as error:
                    if _CERTIFICATE not in str(error):
                        self._base = f"http://{server}"
            return self._base

    def _authorized(self, challenge: str, scopes: Sequence[str]) -> str | None:
        """Return the header that a challenge asks for; None if this user has no credentials."""
        kind, _, rest = challenge.partition(" ")
        with self._lock:
            if not self._asked_credentials:
                self._credentials = credentials.find(self.address.host, self.address.repository)
                self._asked_credentials = True
            known = self._credentials
        if kind.lower() == "basic":
            return None if known is None or known.user is None else known.basic
        if kind.lower() != "bearer":
            raise Unavailable(
                "the registry wants a login of a kind that mstore does not know", where=self.shown
            )
        told = dict(_CHALLENGE.findall(rest))
        return self._token(told.get("realm", ""), told.get("service", ""), scopes, known)

    def _token(
        self,
        realm: str,
        service: str,
        scopes: Sequence[str],
        known: credentials.Credentials | None,
    ) -> str:
        """Return the header of a token that the registry's token service gives."""
        httpx2 = library()
        url = httpx2.URL(realm) if realm.startswith(("https://", "http://")) else None
        is_safe = url is not None and (
            url.scheme == "https" or (self.address.is_on_this_machine and is_loopback(url.host))
        )
        if url is None or not is_safe:
            raise Unavailable(
                "the registry sends its users to a token service without TLS", where=self.shown
            )

        def ask() -> Any:
            if known is not None and known.user is None:
                form = {
                    "grant_type": "refresh_token",
                    "service": service,
                    "client_id": "mstore",
                    "scope": " ".join(scopes),
                    "refresh_token": known.secret,
                }
                request = self._http.build_request("POST", url, data=form)
            else:
                query = [("service", service), *(("scope", one) for one in scopes)]
                headers = {} if known is None else {"Authorization": known.basic}
                request = self._http.build_request("GET", url, params=query, headers=headers)
            # A token service has no reason to send anybody elsewhere.
            answer = self._http.send(request, stream=True, follow_redirects=False)
            try:
                self._require(answer, 200)
                data = _limited(answer, _PIECE)
            finally:
                answer.close()
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                return msgspec.json.decode(data or b"")
            return None

        told = self._asked(ask)
        token = (told.get("token") or told.get("access_token")) if isinstance(told, dict) else None
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise Unavailable("the registry's token service gives no token", where=self.shown)
        return f"Bearer {token}"

    def _asked(self, ask: Callable[[], T]) -> T:
        """Ask, and ask again as long as the registry is busy and says when."""
        for number in range(_TRIES):
            try:
                return ask()
            except Exception as error:
                wait = _wait(error, number)
                if isinstance(error, MstoreError):
                    raise
                if wait is None or number == _TRIES - 1:
                    if not _is_ours(error):
                        raise
                    raise self._told(error) from error
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _require(self, answer: httpx2.Response, *expected: int) -> None:
        """Raise _Refused unless an answer has one of these statuses."""
        if answer.status_code in expected:
            return
        code = ""
        with suppress(msgspec.MsgspecError, ValueError, RecursionError, TypeError, KeyError):
            told = msgspec.json.decode(_limited(answer, _PIECE) or b"")
            code = str(told["errors"][0]["code"])
        raise _Refused(answer, code if _CODE.fullmatch(code) else "")

    # -- errors ------------------------------------------------------------------------------------

    @property
    def shown(self) -> str:
        """The address, as errors name it."""
        return str(self.address)

    def _bad(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(what, where=self.shown)

    def _login(self, what: str) -> Unavailable:
        host = "" if self.address.host == DOCKER_HUB else f" {self.address.host}"
        return Unavailable(what, where=self.shown, hint=f"docker login{host}")

    def _told(self, error: Exception) -> MstoreError:
        """Return an error of a request as ours."""
        if isinstance(error, MstoreError):
            return error
        if not isinstance(error, _Refused):
            # Of other errors the text may hold a part of a request or of an answer.
            why = str(error) if isinstance(error, library().ConnectError) else type(error).__name__
            is_trusted = _CERTIFICATE not in why
            return Unavailable(
                f"the registry at {self.address.host} does not answer: {why}",
                where=self.shown,
                hint=_AGAIN
                if is_trusted
                else "SSL_CERT_FILE names a file with the certificates that you trust",
            )
        if error.status in (401, 403):
            return self._login(f"the registry does not let this user do that ({error})")
        if error.status == 404:
            return NotFound(
                f"the registry has no such repository or blob ({error})", where=self.shown
            )
        later = f", and asks to wait {error.after} s" if error.after.isdigit() else ""
        return Unavailable(f"the registry answers {error}{later}", where=self.shown, hint=_AGAIN)


def digest_of(data: bytes) -> str:
    """Return the digest of bytes, as manifests have it."""
    return f"sha256:{sha256(data).hexdigest()}"


def _limited(answer: httpx2.Response, most: int) -> bytes | None:
    """Return the body of an answer; None if it has more than so many bytes."""
    pieces: list[bytes] = []
    got = 0
    for piece in answer.iter_bytes(1 << 16):
        got += len(piece)
        if got > most:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def _end(answer: httpx2.Response) -> int | None:
    """Return how many bytes of an upload a registry has; None if it does not say."""
    found = re.fullmatch(r"(?:bytes=)?0-(\d+)", str(answer.headers.get("Range", "")))
    # `0-0` is what registries say of none, and of one byte.
    return None if found is None else int(found[1]) + 1 if int(found[1]) else 0


def _wait(error: Exception, number: int) -> float | None:
    """Return how many seconds to wait before the next try; None if no try would help."""
    if isinstance(error, _Refused):
        if error.status not in _BUSY:
            return None
        told = error.after
        wait = float(told) if told.isdigit() else float(2**number) / 4
        return wait if wait <= _LONGEST_WAIT else None
    if not _is_ours(error) or _CERTIFICATE in str(error):
        return None
    return float(2**number) / 4


def _is_ours(error: Exception) -> bool:
    """Return whether an error is one of a request, and not of what `tick` or a reader raises."""
    return isinstance(error, _Refused | library().HTTPError | library().InvalidURL)
