"""One run of the program: the global options, and the store, output and bar they choose.

The only module that reads `MSTORE_STORE`.  Never creates a store.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mstore_cli import progress
from mstore_cli.errors import UsageError, warn, with_store
from mstore_cli.output import Mode, Output

if TYPE_CHECKING:
    from mstore import Store
    from mstore.reports import Progress

STORE_VARIABLE = "MSTORE_STORE"
STORE_NAME = ".mstore"


@dataclass(frozen=True, slots=True)
class Choices:
    """The global options as given on one side of the verb."""

    store: Path | None = None
    json: bool = False
    quiet: bool = False
    no_progress: bool = False

    def over(self, outer: Choices) -> Choices:
        """These choices, with those before the verb where these say nothing."""
        return Choices(
            store=self.store or outer.store,
            json=self.json or outer.json,
            quiet=self.quiet or outer.quiet,
            no_progress=self.no_progress or outer.no_progress,
        )


class Session:
    """What every command is given: where the store is and how to speak.

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
        """Whether the index of the store that was opened last cannot be believed."""

    @property
    def named_store(self) -> Path | None:
        """The store that was asked for by `--store` or MSTORE_STORE, if any."""
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
        """What named that store."""
        return "--store" if self._choices.store is not None else f"${STORE_VARIABLE}"

    def store_path(self) -> Path:
        """`--store`, else MSTORE_STORE, else the nearest `.mstore` upward, else the user's own.

        Raises NotFound where none was named and none is there.
        """
        if self.named_store is not None:
            return self.named_store
        here = Path.cwd()
        for directory in (here, *here.parents):
            if (directory / STORE_NAME).is_dir():
                return directory / STORE_NAME
        from platformdirs import user_data_path

        users = user_data_path("mstore") / "store"
        if users.is_dir():
            return users
        from mstore.errors import NotFound

        raise NotFound(
            f"no store: no {STORE_NAME} in {here} or above it, and none at {users}",
            hint="mstore init",
        )

    def open(self) -> Store:
        """The store of this run, to be used in a `with` block."""
        from mstore import Store

        return self._opened(Store.open)

    def open_silently(self) -> Store:
        """The same without a warning, for a shell that completes a line."""
        from mstore import Store

        return Store.open(self.store_path())

    def open_checked(self) -> Store:
        """The same for a store whose index may be damaged: it is looked at first."""
        from mstore import Store

        return self._opened(Store.open_checked)

    def _opened(self, open_at: Callable[[Path], Store]) -> Store:
        """The store; where its index cannot be believed, people are told so."""
        # Not at the start: it brings in `logging`, which --help and the like do without.
        from mstore_cli import kernels

        kernels.prepare()
        store = open_at(self.store_path())
        self._stores.append(store)
        why = store.doubt()
        self.is_doubted = why is not None
        if why is not None:
            warn(
                f"{store.path}: {why}; what is read may be out of date, and nothing is written",
                self.typed("mstore reindex"),
            )
        return store

    def notes(self) -> list[str]:
        """What the stores of this run found damaged and replaced."""
        return [note for store in self._stores for note in store.notes]

    def typed(self, hint: str) -> str:
        """A hint as this user is to type it: with `--store`, where that named the store."""
        return with_store(hint, self._choices.store)

    def settled(self) -> None:
        """Say that all is published: from here on Ctrl-C is not heard, until the process ends.

        What is left is closing the store and telling the result, and "interrupted" would be a lie.
        """
        # Elsewhere no Ctrl-C arrives, and Python refuses.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def progress(self) -> AbstractContextManager[Callable[[Progress], None] | None]:
        """The callback for a long call: a bar on a terminal, else None."""
        wanted = not (self._choices.no_progress or self._choices.quiet)
        return progress.bar(wanted=wanted)
