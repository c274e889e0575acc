"""A model's repository on the Hub at one commit: its files, ranges of them, and whole ones.

huggingface_hub does what is the Hub's: URLs, revisions, tokens, metadata, downloads.  This says
which of its errors is which of ours, and waits as long as a server asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from mstore.checkpoint.origin import Origin
from mstore.checkpoint.paths import quoted
from mstore.checkpoint.reading import storage_error
from mstore.checkpoint.tree import HUB_PREFIX, hub_origin
from mstore.origins.repository import RemoteFile
from mstore.terms.errors import BadCheckpoint, BadRequest, MstoreError, NotFound, Unavailable
from mstore.terms.phrases import Phrase, call, joined, phrase
from mstore.terms.tries import BUSY, asked_pause, pause, tried

if TYPE_CHECKING:
    import huggingface_hub

T = TypeVar("T")
_ADDRESS: Final = re.compile(r"hf:/{0,2}(?P<rest>[^/].*)")
"""An address; as a path it has one slash for several."""
_FEW: Final = 1 << 20
"""A file of up to this many bytes is read by one request."""
_USUAL: Final = "https://huggingface.co"


def is_address(text: str) -> bool:
    """Return whether a text is an address of a model on the Hub, sound or not."""
    return _ADDRESS.fullmatch(text) is not None


def is_page(url: str) -> bool:
    """Return whether an address of the web is of the Hub that is asked.  Raises Unavailable."""
    return url.startswith(f"{library().constants.ENDPOINT}/")


class Address(msgspec.Struct, frozen=True):
    """A model on the Hub: ORG/NAME, a revision (None: the main branch), a directory of it."""

    model: str
    revision: str | None = None
    directory: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address that `hf://ORG/NAME[@REVISION][/DIRECTORY]` names; also `hf:ORG/NAME`.

        A revision is a branch, a tag, a commit or `refs/pr/N`.  Raises BadRequest, Unavailable.
        """
        hub = library()
        found = _ADDRESS.fullmatch(text)
        try:
            uri = hub.parse_hf_uri(f"hf://{'' if found is None else found['rest']}")
        except ValueError as error:
            *_, why = str(error).splitlines()
            raise BadRequest(
                f"is no address of a model: {why}",
                where=text,
                hint="hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME@REVISION/DIRECTORY",
            ) from error
        if uri.type != "model":
            raise BadRequest(f"is a {uri.type} of the Hub, not a model", where=text)
        return cls(uri.id, uri.revision, uri.path_in_repo.strip("/"))

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        below = f"/{self.directory}" if self.directory else ""
        return f"hf://{self.model}{revision}{below}"

    @property
    def name(self) -> str:
        """The last part of the model's name, or of the directory."""
        return (self.directory or self.model).rpartition("/")[2]


def recorded(origin: Origin) -> Address | None:
    """Return the address that a snapshot of this origin was added from; None: from no Hub."""
    if not origin.model:
        return None
    revision = origin.revision or origin.commit
    _, _, directory = origin.url.partition(f"/{origin.model}/tree/{revision}/")
    return Address(origin.model, revision, directory)


def now(origin: Origin, address: Address) -> str:
    """Return the commit that an address is now.  Raises as `HubRepository`."""
    if not is_page(origin.url):
        raise Unavailable("it is of another Hub than HF_ENDPOINT names", where=str(address))
    return HubRepository(address).commit


def library() -> Any:
    """Return huggingface_hub.  Raises Unavailable."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.hf_api
        import huggingface_hub.utils
    except ImportError as error:
        raise Unavailable(
            f"the Hub needs the library huggingface_hub ({error})",
            hint="pip install 'mstore[hub]'",
        ) from error
    return huggingface_hub


class HubRepository:
    """A model on the Hub at the commit that its revision is now.

    Every call raises NotFound, Unavailable (the Hub does not answer, or asks for an account or a
    licence), and BadCheckpoint for a file that is not what the Hub's list says.
    """

    def __init__(self, address: Address) -> None:
        hub = library()
        self.address = address
        self.endpoint: str = hub.constants.ENDPOINT
        self._api: huggingface_hub.HfApi = hub.HfApi(endpoint=self.endpoint, library_name="mstore")
        self._headers: dict[str, str] = hub.utils.build_hf_headers(library_name="mstore")
        self._locations: dict[str, str] = {}
        info = self._asked(
            lambda: self._api.model_info(address.model, revision=address.revision, timeout=60)
        )
        self.commit = str(info.sha)
        self.is_private = bool(info.private)
        stated = getattr(info.card_data, "base_model", None)
        self._bases: tuple[str, ...] = (
            (stated,)
            if isinstance(stated, str)
            else tuple(one for one in stated or () if isinstance(one, str))
        )

    @property
    def shown(self) -> str:
        """Its address, as errors name it."""
        return str(self.address)

    @property
    def bases(self) -> tuple[str, ...]:
        """The models that its card calls its base."""
        return self._bases

    @property
    def origin(self) -> Origin:
        """What a snapshot of it records."""
        return hub_origin(
            self.address.model,
            self.address.revision or "main",
            self.commit,
            self.address.directory,
            self.endpoint,
        )

    def files(self) -> Iterator[RemoteFile]:
        """Yield the files below the address, as the Hub names them: unchecked, in any order."""
        hub = library()
        above = f"{self.address.directory}/" if self.address.directory else ""
        entries = self._asked(
            lambda: list(
                self._api.list_repo_tree(
                    self.address.model,
                    self.address.directory or None,
                    recursive=True,
                    revision=self.commit,
                )
            )
        )
        for entry in entries:
            if not isinstance(entry, hub.hf_api.RepoFile):
                continue
            lfs = entry.lfs
            digest = entry.blob_id if lfs is None else lfs.sha256
            yield RemoteFile(entry.path.removeprefix(above), entry.size, digest, lfs is None)

    def _place(self, path: str) -> str:
        directory = self.address.directory
        return f"{directory}/{path}" if directory else path

    def cached(self, file: RemoteFile) -> Path | None:
        """Return where the user's cache has a file of this commit; None if it has it not."""
        hub = library()
        found = hub.try_to_load_from_cache(
            self.address.model,
            self._place(file.path),
            cache_dir=hub.constants.HF_HUB_CACHE,
            revision=self.commit,
        )
        if not isinstance(found, str):
            return None
        path = Path(found)
        return path if path.stat().st_size == file.size else None

    def read(
        self,
        file: RemoteFile,
        offset: int,
        length: int,
        tick: Callable[[int], None] | None = None,
    ) -> bytes:
        """Return these bytes of a file, fewer at its end."""
        end = min(offset + length, file.size)
        if end <= offset:
            return b""

        def ask() -> bytes:
            is_known = file.path in self._locations
            try:
                return self._range(file, offset, end, tick)
            except Exception as error:
                response = answer_of(error)
                if not is_known or response is None or response.status_code in BUSY:
                    raise
            # The address that the Hub told is good for some minutes.
            self._locations.pop(file.path, None)
            return self._range(file, offset, end, tick)

        data = self._asked(ask)
        if len(data) != end - offset:
            raise self._changed(file)
        return data

    def _range(
        self, file: RemoteFile, offset: int, end: int, tick: Callable[[int], None] | None
    ) -> bytes:
        hub = library()
        url, headers = self._located(file)
        headers = {
            **headers,
            "Range": f"bytes={offset}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        pieces: list[bytes] = []
        got = 0
        try:
            with hub.get_session().stream(
                "GET", url, headers=headers, follow_redirects=True, timeout=60
            ) as response:
                hub.utils.hf_raise_for_status(response)
                if response.status_code != 206 and (offset, end) != (0, file.size):
                    raise Unavailable(
                        "the Hub sends no parts of files",
                        where=str(self.address),
                        hint=f"hf download {self.address.model}, and add what that prints",
                    )
                for piece in response.iter_bytes():
                    pieces.append(piece)
                    got += len(piece)
                    if tick is not None:
                        tick(len(piece))
                    if got >= end - offset:
                        break
        except Exception:
            if tick is not None:
                with suppress(Exception):
                    tick(-got)
            raise
        return b"".join(pieces)[: end - offset]

    def _located(self, file: RemoteFile) -> tuple[str, Mapping[str, str]]:
        """Return where the bytes of a file are, and what to tell there.

        The Hub counts what it is asked.  So only the first request asks it; it tells an address
        elsewhere, and the next go there.
        """
        hub = library()
        page: str = hub.hf_hub_url(
            self.address.model,
            self._place(file.path),
            revision=self.commit,
            endpoint=self.endpoint,
        )
        if file.size <= _FEW:
            return page, self._headers
        found = self._locations.get(file.path)
        if found is None:
            told = hub.get_hf_file_metadata(page, headers=dict(self._headers), timeout=60)
            found = self._locations[file.path] = told.location
        is_here = urlsplit(found)[:2] == urlsplit(self.endpoint)[:2]
        return found, self._headers if is_here else {}

    def other_bytes(self, file: RemoteFile) -> BadCheckpoint:
        """Return the error for a file that has not the digest that the Hub lists."""
        return BadCheckpoint(
            f"the Hub sent other bytes of {quoted(file.path)} than it lists",
            where=str(self.address),
            hint="run the command again; if it stays, what answers is no faithful mirror",
        )

    def _changed(self, file: RemoteFile) -> BadCheckpoint:
        return BadCheckpoint(
            f"the Hub sent another length of {quoted(file.path)} than the {file.size} bytes that "
            "it lists",
            where=str(self.address),
            hint="run the command again",
        )

    def _asked(self, ask: Callable[[], T]) -> T:
        return asked(self.address, ask)


def asked(address: Address, ask: Callable[[], T]) -> T:
    """Ask the Hub, and ask again as long as it is busy and says when.

    Raises errors of huggingface_hub as ours: NotFound, Unavailable, StorageFailed.
    """
    with _told(address):
        return tried(ask, _wait)


def _wait(error: Exception, number: int) -> float | None:
    """Return how many seconds to wait before the next try; None if no try would help."""
    import httpx2

    if isinstance(error, httpx2.TransportError):
        return pause(number)
    response = answer_of(error)
    if response is None:
        return None
    return asked_pause(response.status_code, str(response.headers.get("Retry-After", "")), number)


def answer_of(error: BaseException) -> Any:
    """Return the answer that an error of huggingface_hub, or one that it hides, is about."""
    answers = (getattr(one, "response", None) for one in _chain(error))
    return next((one for one in answers if one is not None), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__


@contextmanager
def _told(address: Address) -> Iterator[None]:
    """Raise errors of huggingface_hub as ours."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except MstoreError:
        raise
    except (httpx2.HTTPError, errors.OfflineModeIsEnabled, OSError, ValueError) as error:
        raise _error(error, address) from error


def _error(error: Exception, address: Address) -> MstoreError:
    from huggingface_hub import constants, errors, get_token

    known = (errors.HfHubHTTPError, errors.OfflineModeIsEnabled)
    found: Exception | None = next((one for one in _chain(error) if isinstance(one, known)), None)
    where = str(address)
    page = f"{constants.ENDPOINT}/{address.model}"
    has_token = get_token() is not None
    login = "hf auth login" if not has_token else "hf auth whoami"
    match found:
        case errors.GatedRepoError():
            step = f"open {page} in a browser and accept its terms"
            return Unavailable(
                "the model is gated: its owner lets in who accepts the terms",
                where=where,
                hint=step if has_token else f"{step}, then: {login}",
            )
        case errors.RepositoryNotFoundError():
            return NotFound(
                "the Hub has no such model, or it is private and "
                + ("the token does not reach it" if has_token else "no token is set"),
                where=where,
                hint=f"check the name at {page}; if it is private: {login}",
            )
        case errors.RevisionNotFoundError():
            return NotFound(
                f"the model has no revision {address.revision or 'main'}",
                where=where,
                hint=f"its branches and tags: {page}/tree/main",
            )
        case errors.EntryNotFoundError():
            return NotFound(
                f"the model has no directory {quoted(address.directory)}",
                where=where,
                hint=call("add", f"hf://{address.model}", name="REF"),
            )
        case errors.OfflineModeIsEnabled():
            return Unavailable(
                "HF_HUB_OFFLINE is set, and the Hub is asked for this",
                where=where,
                hint=joined("unset HF_HUB_OFFLINE", _from_cache(address)),
            )
        case errors.HfHubHTTPError(response=response) if response is not None:
            status = response.status_code
            if status in (401, 403):
                return Unavailable(
                    f"the Hub refuses the token, or has none for this ({status})",
                    where=where,
                    hint=login,
                )
            told = response.headers.get("Retry-After")
            later = f", and asks to wait {told} s" if told else ""
            again = "run the command again later: it goes on with what arrived"
            return Unavailable(f"the Hub answers {status}{later}", where=where, hint=again)
    if isinstance(error, OSError) and error.errno is not None and found is None:
        return storage_error(error, where)
    again = "run the command again: it goes on with what arrived"
    if constants.ENDPOINT != _USUAL:
        again = f"is HF_ENDPOINT right? If so, {again}"
    return Unavailable(
        f"the Hub at {constants.ENDPOINT} does not answer: {str(error).splitlines()[0]}",
        where=where,
        hint=joined(again, _from_cache(address)),
    )


def _from_cache(address: Address) -> Phrase | None:
    """Return the call that adds the model from the user's cache; None if the cache lacks it."""
    from huggingface_hub import constants

    folder = f"{HUB_PREFIX}{address.model.replace('/', '--')}"
    if address.directory or not (Path(constants.HF_HUB_CACHE) / folder).is_dir():
        return None
    revision = "" if address.revision is None else f"@{address.revision}"
    add = call("add", f"{address.model}{revision}", name="REF")
    return phrase("from the cache: {add}", add=add)
