"""One run of the program: the global options, and the store, output and progress bar from them.

The only module that reads `MSTORE_STORE`, `MSTORE_AUTHOR`, `MSTORE_TOKEN`, `MSTORE_S3_KEY`,
`MSTORE_S3_SECRET` and the endpoints of the environment.  Never creates a store.
"""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mstore_cli.errors import UsageError, note, warn, with_store
from mstore_cli.output import Mode, Output
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore import SnapshotId, Store
    from mstore.terms.phrases import Text
    from mstore.terms.report import Progress, ProgressCallback

_READ_TO_PLAN = {
    "statistics": "that have no statistics here (a fetch may bring them)",
    "thresholds": "for exact trim thresholds",
}
"""Phases of planning that read weights, and why."""
STORE_VARIABLE = "MSTORE_STORE"
AUTHOR_VARIABLE = "MSTORE_AUTHOR"
TOKEN_VARIABLE = "MSTORE_TOKEN"  # noqa: S105 -- its name
S3_VARIABLES = ("MSTORE_S3_KEY", "MSTORE_S3_SECRET")
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
STORE_NAME = ".mstore"
"""What a store is called that commands find by looking upward."""


class Choices(NamedTuple):
    """The global options as given on one side of the verb."""

    store: Path | None = None
    json: bool = False
    quiet: bool = False
    no_progress: bool = False

    def over(self, outer: Choices) -> Choices:
        """Fill unset choices from those before the verb."""
        return Choices(
            store=self.store or outer.store,
            json=self.json or outer.json,
            quiet=self.quiet or outer.quiet,
            no_progress=self.no_progress or outer.no_progress,
        )


class Session:
    """What every command receives: where the store is and how to print.

    Raises UsageError for `--json` together with `--quiet`.
    """

    def __init__(self, choices: Choices) -> None:
        if choices.json and choices.quiet:
            raise UsageError("--json and --quiet exclude each other")
        self._choices = choices
        mode = Mode.JSON if choices.json else Mode.QUIET if choices.quiet else Mode.HUMAN
        self.output = Output(mode, typed=self.typed)
        self._stores: list[Store] = []
        self.is_doubted = False
        """Whether the index of the last opened store cannot be trusted."""

    @property
    def named_store(self) -> Path | None:
        """The store named by `--store` or MSTORE_STORE, if any."""
        if self._choices.store is not None:
            return self._choices.store
        variable = os.environ.get(STORE_VARIABLE)
        return Path(variable) if variable else None

    @property
    def given_store(self) -> Path | None:
        """The store that `--store` names on this command line."""
        return self._choices.store

    @property
    def named_by(self) -> str:
        """Which of the two named that store."""
        return "--store" if self._choices.store is not None else f"${STORE_VARIABLE}"

    def store_path(self) -> Path:
        """Return `--store`, else MSTORE_STORE, else the nearest `.mstore` upward, else the user's.

        Raises NotFound if none was named and none exists, or if a directory was named that has one;
        Conflict for a store of another user that was only found.
        """
        if self.named_store is not None:
            _require_not_around(self.named_store)
            return self.named_store
        store = nearest_store(Path.cwd())
        _require_own(store)
        return store

    def open(self) -> Store:
        """Open the store of this run, for use in a `with` block."""
        from mstore import Store

        self.report_waiting()
        return self._opened(partial(Store.open, author=author))

    def open_to_exchange(self) -> Store:
        """Do the same for a command that asks a remote, with the user's credentials.

        They go to an endpoint that the store's settings name only if the user named it, too.
        """
        endpoints = own_endpoints()
        store = self.open()
        if not store.is_lazy:
            _let_ask(store, endpoints)
        return store

    def trust(self, url: str, endpoint: str) -> str:
        """Let the server of an address that the user typed get credentials, if there are any.

        Adds it to the user's settings.  Returns it; empty: there is none, as for a directory.
        """
        from mstore.remotes import address
        from mstore_cli import user_config

        server = address.web_server(url) if token() else ""
        server = endpoint or server
        if server:
            user_config.add("endpoints", [server])
        return server

    def open_to_look(self) -> Store:
        """Do the same for a command that waits for no lock, so needs no `logging`."""
        from mstore import Store

        return self._opened(Store.open)

    def open_silently(self) -> Store:
        """Do the same without a warning, for shell completion."""
        from mstore import Store

        return Store.open(self.store_path())

    def open_checked(self) -> Store:
        """Do the same for a store whose index may be damaged: checks the index first."""
        from mstore import Store

        self.report_waiting()
        return self._opened(partial(Store.open_checked, author=author))

    def report_waiting(self) -> None:
        """Say on standard error who holds a lock that this command waits for, unless quiet."""
        from mstore_cli import waiting

        waiting.report(quiet=self._choices.quiet)

    def _opened(self, open_at: Callable[[Path], Store]) -> Store:
        """Open the store; warn if its index cannot be trusted."""
        store = self._open_named(open_at)
        self._stores.append(store)
        if store.is_lazy:
            # Whatever reads a block may ask a remote.
            _let_ask(store, own_endpoints())
        if store.has_required_gates:
            from mstore_cli import judging
            from mstore_cli.signers import trusted_signers

            store.trust_verdicts(trusted_signers(None))
            store.define_gates(judging.gate_of_settings)
        why = store.doubt()
        self.is_doubted = why is not None
        if why is not None:
            warn(
                f"{self.store_path()}: {why}; "
                "what is read may be out of date, and nothing is written",
                self.typed("mstore reindex"),
            )
        return store

    def _open_named(self, open_at: Callable[[Path], Store]) -> Store:
        from mstore.terms.errors import NotFound

        try:
            return open_at(self.store_path())
        except NotFound as error:
            if self.named_store is None or self.given_store is not None:
                raise
            # The name is nowhere on the command line.
            what, where, hint = error.texts
            what = f"{what}: {self.named_by} names it"
            raise NotFound(what, where=where, hint=hint) from error

    def warn_if_quiet(self, texts: Iterable[Text]) -> None:
        """Print warnings on standard error with --quiet; other outputs have them already."""
        if self.output.mode is Mode.QUIET:
            for text in texts:
                warn(self.typed(text))

    def remarks(self) -> list[str]:
        """Return what this run's stores found damaged and replaced."""
        return [remark for store in self._stores for remark in store.remarks]

    def typed(self, hint: Text) -> str:
        """Format a hint for this user to type: with `--store`, if that named the store."""
        from mstore.terms.phrases import as_phrase
        from mstore_cli.spelling import Typed

        store = self._choices.store
        return with_store(as_phrase(hint).spelled(Typed(store)), store)

    def settled(self) -> None:
        """Declare everything published: no Ctrl-C or SIGTERM ends the process from here on.

        Only closing the store and printing the result remain; "interrupted" would be false.
        """
        # Other threads receive no Ctrl-C, and Python refuses the call there.
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, signal.SIG_IGN)

    def progress(self) -> AbstractContextManager[ProgressCallback | None]:
        """Return the callback for a long call: a bar on a terminal, else None."""
        from mstore_cli import progress

        wanted = not (self._choices.no_progress or self._choices.quiet)
        return progress.bar(wanted=wanted)

    @contextmanager
    def planning(self, store: Store) -> Iterator[ProgressCallback | None]:
        """Yield the callback for a call that plans. In a lazy store, say what planning downloads.

        It is said before it happens, on standard error, unless quiet.
        """
        with self.progress() as tick:
            if self._choices.quiet or not store.is_lazy:
                yield tick
                return

            said: set[tuple[str, int]] = set()

            def told(progress: Progress) -> None:
                why, what = _READ_TO_PLAN.get(progress.phase), (progress.phase, progress.total)
                # Once: a chunk that two experts share costs nothing the second time.
                if why is not None and not progress.done and what not in said:
                    said.add(what)
                    size = format_size(progress.total)
                    note(
                        f"planning reads up to {size} of experts {why}, and what the base has "
                        "there; --no-analyze reads none"
                    )
                if tick is not None:
                    tick(progress)

            yield told


def token() -> str:
    """Return what says to web servers who asks; empty: nothing does."""
    return os.environ.get(TOKEN_VARIABLE, "")


def s3_keys() -> tuple[str, str]:
    """Return key and secret that clients of S3 sign with; empty where one is not set."""
    key, secret = (os.environ.get(name, "") for name in S3_VARIABLES)
    return key, secret


def _let_ask(store: Store, endpoints: Iterable[str]) -> None:
    """Let a store ask remotes, with the user's credentials and settings."""
    from mstore_cli import aws, user_config

    store.trust(*endpoints)
    store.token = token()
    store.s3_credentials = aws.credentials()
    store.cache_bytes_on_disk = user_config.cache_size()


def own_endpoints() -> list[str]:
    """Return the servers that the user's settings and environment name."""
    from mstore_cli import user_config

    named = {name: os.environ.get(name, "") for name in ENDPOINT_VARIABLES}
    for name, value in named.items():
        if value and not value.startswith(("http://", "https://")):
            # What speaks to the server would only say that it cannot.
            hint = None if "://" in value else f"{name}=https://{value}"
            raise UsageError(f"the variable {name} is no address: {value}", hint=hint)
    return [*user_config.read()["endpoints"], *filter(user_config.is_endpoint, named.values())]


def author() -> str:
    """Return who makes snapshots: as MSTORE_AUTHOR says, else the user's settings, else user@host.

    Raises as `user_config.read`.
    """
    from mstore_cli import user_config

    return os.environ.get(AUTHOR_VARIABLE) or str(user_config.read()["author"]) or _user_at_host()


def author_and_why() -> str:
    """Return who makes snapshots, and where that was said if not in the user's settings."""
    from mstore_cli import user_config

    if os.environ.get(AUTHOR_VARIABLE):
        return f"{author()} (${AUTHOR_VARIABLE})"
    return author() if user_config.read()["author"] else f"{author()} (the default)"


def _user_at_host() -> str:
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    return f"{user}@{os.uname().nodename}"


def nearest_store(here: Path) -> Path:
    """Return the nearest `.mstore` upward, else the user's own store.  Raises NotFound."""
    for directory in (here, *here.parents):
        if (directory / STORE_NAME).is_dir():
            return directory / STORE_NAME
    from platformdirs import user_data_path

    users = user_data_path("mstore") / "store"
    if users.is_dir():
        return users
    from mstore.terms.errors import NotFound

    raise NotFound(
        f"no store: no {STORE_NAME} in {here} or above it, and none at {users}",
        hint="mstore init",
    )


def _require_own(store: Path) -> None:
    """Raise Conflict, with the ways to use it, unless the store is this user's or listed as safe.

    Whoever may create a directory above the one where a command runs decides which store it finds,
    as in /tmp; and who writes a store decides what its models are (CVE-2022-24765 was the same in
    git).
    """
    from mstore import fs
    from mstore_cli import user_config

    stranger = next((one for one in fs.owners(store) if one not in user_config.own_users()), None)
    if stranger is None or os.path.realpath(store) in user_config.read()["safe_stores"]:
        return
    from mstore.terms.errors import Conflict

    named = shlex.quote(str(store))
    raise Conflict(
        f"this store belongs to user {fs.user_name(stranger)}, and was only found, not named",
        where=str(store),
        hint=f"if you trust it: mstore --store {named} ...    (for one command)\n"
        f"export MSTORE_STORE={named}    (for this shell)\n"
        f"mstore config --user safe_stores {named}    (for all your commands)",
    )


def _require_not_around(named: Path) -> None:
    """Raise NotFound if this is no store, but the directory that a store lies in."""
    inside = named / STORE_NAME
    if (inside / "format").exists() and not (named / "format").exists():
        from mstore.terms.errors import NotFound

        raise NotFound(
            "no store here, but in it",
            where=str(named),
            hint=f"name the store: --store {shlex.quote(str(inside))}",
        )


def replaced(store: Store, snapshot: SnapshotId) -> SnapshotId | None:
    """Return what the branch of a new snapshot was before, None for a new branch."""
    parents = store.show(snapshot).parents
    return next((parent.snapshot for parent in parents if parent.role == "previous"), None)
