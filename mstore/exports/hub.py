"""A model's repository on the Hub as a destination.

All files of an export are one commit, which the Hub makes or refuses as a whole.  The contents of
large files go first, and are nobody's until a commit names them.  How they go, a class each:
- by Xet, if hf-xet is there and HF_HUB_DISABLE_XET is not set: blocks go into its stream as they
  are decoded; it cuts them into chunks of its own, and sends those that the Hub lacks;
- as LFS objects, which the Hub knows by their SHA-256: each in one request, or in parts.
Neither needs a file on disk, nor a whole file in memory.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from mstore.checkpoint.declared import CARD
from mstore.exports.destination import (
    ChangesThere,
    Export,
    OutgoingFile,
    Sent,
    Wishes,
    opened,
    sent_together,
)
from mstore.origins.hub import Address, HubRepository, answer_of, asked, library
from mstore.origins.repository import RemoteFile
from mstore.terms.errors import (
    BadRequest,
    Conflict,
    MstoreError,
    NotFound,
    Unavailable,
)
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Option, call, phrase

T = TypeVar("T")
_MAIN: Final = "main"
_PULL_REQUEST: Final = "refs/pr/"
_LFS: Final = "lfs"
_SAMPLE: Final = 512
"""Bytes by which the Hub tells text from data."""
_OF_ONE_QUESTION: Final = 256
_LOOKED_AT: Final = 20
"""Open pull requests among which one is looked for."""
_KEPT: Final = frozenset({".gitattributes", CARD})
"""Files that stay if the snapshot lacks them: the Hub's own, and the page of the repository."""
_TIMEOUT: Final = 120.0
_GOES_ON: Final = "run the command again: it goes on with what arrived"


class _Requests:
    """Requests that need the right to write to a branch, or to propose a change to it."""

    def __init__(self, address: Address, branch: str, *, is_proposal: bool) -> None:
        hub = library()
        self.address = address
        self.branch = branch
        self.is_proposal = is_proposal
        self.api: Any = hub.HfApi(endpoint=hub.constants.ENDPOINT, library_name="mstore")
        self.headers: dict[str, str] = hub.utils.build_hf_headers(library_name="mstore")

    @property
    def endpoint(self) -> str:
        """The Hub."""
        return str(self.api.endpoint)

    @property
    def token_url(self) -> str:
        """Who gives tokens for Xet."""
        # Who proposes a change need not be able to write the branch.
        if self.is_proposal:
            return self._url("xet-write-token/None?create_pr=1")
        return self._url(f"xet-write-token/{quote(self.branch, safe='')}")

    def written(self, ask: Callable[[], T]) -> T:
        """Ask for something that needs the right to write."""

        def with_right() -> T:
            with _refusals(self.address):
                return ask()

        return asked(self.address, with_right)

    def of_branch(self, what: str, **content: Any) -> Any:
        """Post to the branch, once; return the answer.  Raises errors of huggingface_hub."""
        hub = library()
        more = content.pop("headers", {})
        response = hub.utils.get_session().post(
            self._url(f"{what}/{quote(self.branch, safe='')}"),
            headers={**self.headers, **more},
            params={"create_pr": "1"} if self.is_proposal else {},
            timeout=_TIMEOUT,
            **content,
        )
        hub.utils.hf_raise_for_status(response)
        return response.json()

    def _url(self, what: str) -> str:
        return f"{self.endpoint}/api/models/{self.address.model}/{what}"


class _Uploaded(msgspec.Struct, frozen=True):
    """The contents of a file as the Hub has them, and how many bytes were sent for that."""

    sha256: str
    bytes_sent: int


class _Upload(Protocol):
    """A way by which contents go to the Hub."""

    def send(self, file: OutgoingFile, tick: Callable[[int], None]) -> _Uploaded:
        """Send the contents of a file, or what of them the Hub lacks.  From any thread."""


class HubDestination:
    """A branch of a model's repository on the Hub, or a pull request to it."""

    def __init__(self, address: str, wishes: Wishes) -> None:
        hub = library()
        place = Address.parse(address)
        if place.revision is not None and wishes.branch is not None:
            raise BadRequest(
                f"names the revision {place.revision}, and {wishes.branch} is given beside it",
                where=address,
                hint=Option("branch", wishes.branch),
            )
        branch = wishes.branch or place.revision
        if branch is not None and hub.constants.REGEX_COMMIT_OID.fullmatch(branch):
            raise BadRequest("is a commit, and only a branch can get another one", where=branch)
        self._wishes = wishes
        self._address = Address(place.model, branch, place.directory)
        self._branch = branch or _MAIN
        self._requests = _Requests(self._address, self._branch, is_proposal=wishes.pull_request)
        self._parent: str | None = None
        self._has_branch = True

    @property
    def shown(self) -> str:
        """The address."""
        return str(self._address)

    # -- comparing -----------------------------------------------------------------------------

    def compare(self, outgoing: Export) -> ChangesThere:
        """Compare sizes and digests of files with what the Hub lists."""
        there = self._there()
        listed = {} if there is None else self._listed(there)
        added: list[OutgoingFile] = []
        changed: list[OutgoingFile] = []
        same: list[OutgoingFile] = []
        for file in outgoing.files:
            found = listed.pop(file.path, None)
            if found is None:
                added.append(file)
            else:
                (same if _is_same(file, found) else changed).append(file)
        removed = sorted(listed.keys() - _KEPT)
        is_new = there is None or not self._has_branch
        return ChangesThere(is_new, tuple(added), tuple(changed), tuple(same), tuple(removed))

    def _there(self) -> HubRepository | None:
        """Return the repository as the branch has it, or will begin; None if there is none."""
        model = self._address.model
        try:
            main = HubRepository(Address(model))
        except NotFound:
            return None
        if self._wishes.private and not main.is_private:
            raise Conflict(
                "the model is there and public: everybody would see what is exported",
                where=self.shown,
                hint=f"make it private in its settings, {main.endpoint}/{model}/settings, or "
                "choose another name",
            )
        try:
            found = HubRepository(self._address)
        except NotFound:
            if self._branch.startswith(_PULL_REQUEST) or self._wishes.pull_request:
                raise
            self._has_branch = False
            found = HubRepository(Address(model, main.commit, self._address.directory))
        self._parent = found.commit
        return found

    def _listed(self, there: HubRepository) -> dict[str, RemoteFile]:
        try:
            return {one.path: one for one in there.files()}
        except NotFound:
            # A directory that the export makes.
            return {}

    # -- sending -------------------------------------------------------------------------------

    def send(self, outgoing: Export, changes: ChangesThere, tick: Callable[[int], None]) -> Sent:
        """Make one commit with the changes; if there are none, no commit."""
        if self._parent is None:
            self._create()
        if not self._has_branch:
            branch = {"branch": self._branch, "revision": self._parent, "exist_ok": True}
            make = self._requests.api.create_branch
            self._requests.written(lambda: make(self._address.model, **branch))
        if not (changes.to_send or changes.removed):
            return Sent(str(self._parent), self._page(str(self._parent)), 0)
        modes = self._modes(changes.to_send)
        large = [file for file in changes.to_send if modes[file.path] == _LFS and file.size]
        done = self._contents(large, tick)
        digests = {path: one.sha256 for path, one in done.items()}
        commit, url = self._commit(outgoing, changes, digests)
        small = sum(file.size for file in changes.to_send) - sum(file.size for file in large)
        return Sent(commit, url, small + sum(one.bytes_sent for one in done.values()))

    def _contents(
        self, files: Sequence[OutgoingFile], tick: Callable[[int], None]
    ) -> dict[str, _Uploaded]:
        """Send the contents of large files, several at once; the first that fails ends all."""
        sent = sent_together(files, self._upload().send, tick)
        return {file.path: one for file, one in zip(files, sent, strict=True)}

    def _create(self) -> None:
        def create() -> None:
            try:
                self._requests.api.create_repo(
                    self._address.model, private=self._wishes.private or None
                )
            except Exception as error:
                if _status(error) != 409:
                    raise
                raise Conflict(
                    "somebody made this model in the meantime",
                    where=self.shown,
                    hint="run the command again",
                ) from error

        self._requests.written(create)
        found = HubRepository(Address(self._address.model))
        self._parent = found.commit
        self._has_branch = self._branch == _MAIN

    def _upload(self) -> _Upload:
        is_wanted = not library().constants.HF_HUB_DISABLE_XET
        is_there = find_spec("hf_xet") is not None
        return _Xet(self._requests) if is_wanted and is_there else _Lfs(self._requests)

    def _modes(self, files: Sequence[OutgoingFile]) -> dict[str, str]:
        """Return how the Hub wants each file: as a large one, or in the commit."""
        modes: dict[str, str] = {}
        for start in range(0, len(files), _OF_ONE_QUESTION):
            some = files[start : start + _OF_ONE_QUESTION]
            by_place = {self._place(file.path): file.path for file in some}
            question = [
                {
                    "path": self._place(file.path),
                    "size": file.size,
                    "sample": base64.b64encode(file.read(0, _SAMPLE)).decode(),
                }
                for file in some
            ]
            ask = partial(self._requests.of_branch, "preupload", json={"files": question})
            answer = self._requests.written(ask)
            modes |= {by_place[one["path"]]: str(one["uploadMode"]) for one in answer["files"]}
        return modes

    def _place(self, path: str) -> str:
        directory = self._address.directory
        return f"{directory}/{path}" if directory else path

    # -- the commit ----------------------------------------------------------------------------

    def _commit(
        self, outgoing: Export, changes: ChangesThere, digests: dict[str, str]
    ) -> tuple[str, str]:
        """Make the commit; return its id and its page.

        An answer may be lost, or be an error although the commit was made: so each try looks first
        whether it is there.
        """
        lines = b"".join(
            json.dumps({"key": key, "value": value}).encode() + b"\n"
            for key, value in self._operations(outgoing, changes, digests)
        )
        tried = False

        def commit() -> tuple[str, str]:
            nonlocal tried
            made = self._made(outgoing.snapshot) if tried else None
            if made is not None:
                return made
            tried = True
            try:
                answer = self._requests.of_branch(
                    "commit", content=lines, headers={"Content-Type": "application/x-ndjson"}
                )
            except Exception as error:
                if _status(error) not in (409, 412):
                    raise
                made = self._made(outgoing.snapshot)
                if made is None:
                    raise self._moved() from error
                return made
            page = answer.get("pullRequestUrl") or answer["commitUrl"]
            return str(answer["commitOid"]), str(page)

        try:
            return self._requests.written(commit)
        except Unavailable:
            # The last try may have been the one whose answer was lost.
            made = asked(self._address, lambda: self._made(outgoing.snapshot))
            if made is None:
                raise
            return made

    def _operations(
        self, outgoing: Export, changes: ChangesThere, digests: dict[str, str]
    ) -> Iterator[tuple[str, dict[str, object]]]:
        yield (
            "header",
            {
                "summary": outgoing.message,
                "description": _of_snapshot(outgoing.snapshot),
                "parentCommit": self._parent,
            },
        )
        for file in changes.to_send:
            place = {"path": self._place(file.path)}
            digest = digests.get(file.path)
            if digest is not None:
                yield "lfsFile", {**place, "algo": "sha256", "oid": digest, "size": file.size}
            else:
                content = base64.b64encode(file.read(0, file.size)).decode()
                yield "file", {**place, "content": content, "encoding": "base64"}
        for path in changes.removed:
            yield "deletedFile", {"path": self._place(path)}

    def _made(self, snapshot: SnapshotId) -> tuple[str, str] | None:
        """Return the commit of this export and its page, if the Hub has made it."""
        if not self._wishes.pull_request:
            commit = self._made_on(self._branch, snapshot)
            return None if commit is None else (commit, self._page(commit))
        found = self._requests.api.get_repo_discussions(
            self._address.model, discussion_type="pull_request", discussion_status="open"
        )
        for _, one in zip(range(_LOOKED_AT), found, strict=False):
            commit = self._made_on(f"{_PULL_REQUEST}{one.num}", snapshot)
            if commit is not None:
                return commit, str(one.url)
        return None

    def _made_on(self, branch: str, snapshot: SnapshotId) -> str | None:
        for one in self._requests.api.list_repo_commits(self._address.model, revision=branch):
            if one.commit_id == self._parent:
                return None
            if _of_snapshot(snapshot) in one.message:
                return str(one.commit_id)
        return None

    def _page(self, commit: str) -> str:
        return f"{self._requests.endpoint}/{self._address.model}/commit/{commit}"

    def _moved(self) -> Conflict:
        return Conflict(
            f"{self._branch} has another commit since this export began; nothing was changed",
            where=self.shown,
            hint=phrase(
                "{look} shows what would change now; {again} exports on top of it",
                look=call("export", "REF", self.shown, dry_run=True),
                again=call("export", "REF", self.shown),
            ),
        )


class _Lfs:
    """Contents go as LFS objects; the Hub says which it has."""

    def __init__(self, requests: _Requests) -> None:
        self._requests = requests

    def send(self, file: OutgoingFile, tick: Callable[[int], None]) -> _Uploaded:
        digest = file.sha256()
        sent = self._requests.written(lambda: self._sent(file, digest, tick))
        return _Uploaded(digest, sent)

    def _sent(self, file: OutgoingFile, digest: str, tick: Callable[[int], None]) -> int:
        import huggingface_hub.lfs as lfs

        requests = self._requests
        info: Any = SimpleNamespace(sha256=bytes.fromhex(digest), size=file.size)
        actions, errors, _ = lfs.post_lfs_batch_info(
            [info],
            token=None,
            repo_type="model",
            repo_id=requests.address.model,
            # Who proposes a change need not be able to write the branch.
            revision=None if requests.is_proposal else quote(requests.branch, safe=""),
            endpoint=requests.endpoint,
            headers=requests.headers,
        )
        if errors:
            what = errors[0].get("error", {}).get("message", "no reason")
            raise Unavailable(
                f"the Hub does not take {file.path}: {what}", where=str(requests.address)
            )
        action = actions[0]
        if action.get("actions") is None:
            tick(file.size)
            return 0

        @contextmanager
        def as_file(**_: object) -> Iterator[Any]:
            with opened(file, tick) as reader:
                yield reader

        operation: Any = SimpleNamespace(path_in_repo=file.path, upload_info=info, as_file=as_file)
        try:
            lfs.lfs_upload(operation, action, headers=requests.headers, endpoint=requests.endpoint)
        except Exception as error:
            if _status(error) not in (401, 403):
                raise
            # Addresses to upload to are good for some time only; no token goes there.
            raise Unavailable(
                f"the Hub's storage does not take {file.path} any more ({_status(error)})",
                where=str(requests.address),
                hint=_GOES_ON,
            ) from error
        return file.size


class _Xet:
    """Contents go through Xet, which sends the chunks that the Hub lacks."""

    def __init__(self, requests: _Requests) -> None:
        import hf_xet

        self._requests = requests
        self._session = hf_xet.XetSession()

    def send(self, file: OutgoingFile, tick: Callable[[int], None]) -> _Uploaded:
        try:
            return self._sent(file, tick)
        except (MstoreError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise Unavailable(
                f"the Hub's storage does not take {file.path}: {str(error).splitlines()[0]}",
                where=str(self._requests.address),
                hint=_GOES_ON,
            ) from error

    def _sent(self, file: OutgoingFile, tick: Callable[[int], None]) -> _Uploaded:
        import hf_xet

        headers = self._requests.headers
        own = {key: value for key, value in headers.items() if key.lower() != "authorization"}
        commit = self._session.new_upload_commit(
            token_refresh_url=self._requests.token_url,
            token_refresh_headers=headers,
            custom_headers=own,
        )
        try:
            # If nobody knows it yet, Xet computes it on the way: one pass instead of two.
            digest = file.known_sha256 or hf_xet.COMPUTE_SHA256
            stream = commit.start_upload_stream(name=file.path, sha256=digest)
            for piece in file.stream():
                stream.write(bytes(piece))
                tick(len(piece))
            made = stream.finish()
            report = commit.wait_to_finish()
        except BaseException:
            commit.abort()
            raise
        return _Uploaded(made.xet_info.sha256, report.dedup_metrics.total_bytes_uploaded)


def _is_same(file: OutgoingFile, there: RemoteFile) -> bool:
    if file.size != there.size:
        return False
    # The digest that the Hub knows large files by is remembered.
    return there.matches(file.stream()) if there.is_git else file.sha256() == there.digest


def _of_snapshot(id: SnapshotId) -> str:
    """Return the line of a commit's description that names the snapshot."""
    return f"Mstore-Snapshot: {id.hex()}"


def _status(error: BaseException) -> int | None:
    response = answer_of(error)
    return None if response is None else int(response.status_code)


@contextmanager
def _refusals(address: Address) -> Iterator[None]:
    """Say what a refusal to write means, and what to do."""
    from huggingface_hub import errors, get_token

    try:
        yield
    except MstoreError:
        raise
    except errors.HfHubHTTPError as error:
        status = _status(error)
        tokens = f"{library().constants.ENDPOINT}/settings/tokens"
        if status == 400:
            said = error.server_message or str(error)
            raise BadRequest(f"the Hub refuses it: {said}", where=str(address)) from error
        if status not in (401, 403):
            raise
        if status == 401:
            what = (
                "no token is set" if get_token() is None else "the token is no good, or has expired"
            )
            hint = f"make one that may write at {tokens}, then: hf auth login"
        else:
            what = f"the token may not write to {address.model}"
            hint = f"hf auth whoami says whose it is; one that may write: {tokens}"
        raise Unavailable(what, where=str(address), hint=hint) from error
