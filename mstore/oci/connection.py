"""Connections to a registry: tokens, tries, and what answers mean.

A busy registry (429, 5xx) is waited for as long as it asks, up to five minutes; a connection that
breaks is made again.  What an error shows of an answer are status and code: an answer may quote the
request, and that has a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from mstore.oci import credentials
from mstore.oci.address import DOCKER_HUB, ArtifactAddress, is_loopback
from mstore.terms.errors import MstoreError, NotFound, Unavailable
from mstore.terms.tries import asked_pause, pause, tried

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
_MOST_ANSWER: Final = 1 << 20
"""Bytes of an answer that is a token or an error."""
_CERTIFICATE: Final = "CERTIFICATE_VERIFY_FAILED"
_NO_TLS: Final = "WRONG_VERSION_NUMBER"
"""What OpenSSL says of an answer without TLS."""
_CODE: Final = re.compile(r"[A-Z][A-Z_]{1,60}")
_CHALLENGE: Final = re.compile(r'([A-Za-z_]+)="([^"]*)"')
_AGAIN: Final = "run the command again: it goes on with what arrived"


def library() -> Any:
    """Return httpx2.  Raises Unavailable."""
    try:
        import httpx2
    except ImportError as error:
        raise Unavailable(
            f"registries need the library httpx2 ({error})", hint="pip install 'mstore[oci]'"
        ) from error
    return httpx2


class RequestRefused(Exception):
    """An answer that is none of those that were asked for."""

    def __init__(self, response: httpx2.Response, code: str) -> None:
        super().__init__(f"{response.status_code} {code}".strip())
        self.status = response.status_code
        self.code = code
        self.after = str(response.headers.get("Retry-After", ""))


class RegistryConnection:
    """Requests about the repository of an address, at its registry.  Safe for any thread.

    Requests raise RequestRefused, and errors of httpx2, for `asked` to try again or to tell; and
    Unavailable where the registry wants a login that this user has not.
    """

    def __init__(self, address: ArtifactAddress, patience: float) -> None:
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

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    @contextmanager
    def answer(
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
                self.require(answer, 200)
                data = limited(answer, _MOST_ANSWER)
            finally:
                answer.close()
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                return msgspec.json.decode(data or b"")
            return None

        told = self.asked(ask)
        token = (told.get("token") or told.get("access_token")) if isinstance(told, dict) else None
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise Unavailable("the registry's token service gives no token", where=self.shown)
        return f"Bearer {token}"

    def asked(self, ask: Callable[[], T]) -> T:
        """Ask, and ask again as long as the registry is busy and says when."""
        try:
            return tried(ask, wait_for)
        except Exception as error:
            if not is_of_request(error):
                raise
            raise self.told(error) from error

    def require(self, answer: httpx2.Response, *expected: int) -> None:
        """Raise RequestRefused unless an answer has one of these statuses."""
        if answer.status_code in expected:
            return
        code = ""
        with suppress(msgspec.MsgspecError, ValueError, RecursionError, TypeError, KeyError):
            told = msgspec.json.decode(limited(answer, _MOST_ANSWER) or b"")
            code = str(told["errors"][0]["code"])
        raise RequestRefused(answer, code if _CODE.fullmatch(code) else "")

    @property
    def shown(self) -> str:
        """The address, as errors name it."""
        return str(self.address)

    def _login(self, what: str) -> Unavailable:
        host = "" if self.address.host == DOCKER_HUB else f" {self.address.host}"
        return Unavailable(what, where=self.shown, hint=f"docker login{host}")

    def told(self, error: Exception) -> MstoreError:
        """Return an error of a request as ours."""
        if isinstance(error, MstoreError):
            return error
        if not isinstance(error, RequestRefused):
            # Of other errors the text may hold a part of a request or of an answer.
            why = str(error) if isinstance(error, library().ConnectError) else type(error).__name__
            if _NO_TLS in why:
                return Unavailable(
                    f"the registry at {self.address.host} speaks HTTP without TLS, which is "
                    "allowed on this machine only",
                    where=self.shown,
                    hint=f"reach it by a tunnel: ssh -L 5000:{self.address.host} HOST, then "
                    f"oci://localhost:5000/{self.address.repository}",
                )
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


def limited(answer: httpx2.Response, most: int) -> bytes | None:
    """Return the body of an answer; None if it has more than so many bytes."""
    pieces: list[bytes] = []
    got = 0
    for piece in answer.iter_bytes(1 << 16):
        got += len(piece)
        if got > most:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def wait_for(error: Exception, number: int) -> float | None:
    """Return how many seconds to wait before the next try; None if no try would help."""
    if isinstance(error, RequestRefused):
        return asked_pause(error.status, error.after, number)
    if not is_of_request(error) or _CERTIFICATE in str(error):
        return None
    return pause(number)


def is_of_request(error: Exception) -> bool:
    """Return whether an error is one of a request, and not of what `tick` or a reader raises."""
    return isinstance(error, RequestRefused | library().HTTPError | library().InvalidURL)
