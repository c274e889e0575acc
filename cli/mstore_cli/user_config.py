"""The user's own settings: the TOML file `config.toml`, beside `allowed_signers`.

    safe_stores = ["/srv/models/store"]

Owns the keys, and how the file is read and written.  Only the command line reads it; what a command
line or an MSTORE_* variable says wins.  The file is data, read up to a limit, and has to be the
user's or root's.  A key or value that this version does not know is an error that names the line:
no setting is ignored silently.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

MAX_BYTES: Final = 1 << 16
_NAME: Final = "config.toml"
_AT_LINE: Final = re.compile(r" \(at line ([0-9]+), column [0-9]+\)$")

Value = list[str]


class Key(NamedTuple):
    """One setting.

    typed: makes a value of a word that the user typed to add it. stored: of one to remove it.
    problem: what is wrong with a value, None if nothing is.
    """

    name: str
    kind: type[list[Any]]
    typed: Callable[[str], str]
    stored: Callable[[str], str]
    problem: Callable[[str], str | None]
    help: str


def _store(word: str) -> str:
    """Return the path of a store.  Raises NotFound if there is none: a slip would be kept."""
    from mstore_cli.found import STORE_NAME

    if not word or not os.path.exists(os.path.join(word, "format")):
        from mstore.errors import NotFound

        inside = os.path.join(word, STORE_NAME)
        is_around = bool(word) and os.path.exists(os.path.join(inside, "format"))
        hint = f"mstore config --user safe_stores {shlex.quote(inside) if is_around else 'DIR'}"
        what = "no store here, but in it" if is_around else "no store here"
        raise NotFound(what, where=word or "''", hint=hint)
    return os.path.realpath(word)


def _not_absolute(path: str) -> str | None:
    return None if os.path.isabs(path) else f"{path!r} is not an absolute path"


KEYS: Final[Mapping[str, Key]] = MappingProxyType(
    {
        key.name: key
        for key in (
            Key(
                "safe_stores",
                list,
                _store,
                os.path.realpath,
                _not_absolute,
                "stores of other users that are used where they are found, without being named",
            ),
        )
    }
)


def path() -> Path:
    """Return the path of the file; it need not exist."""
    from platformdirs import user_config_path

    return user_config_path("mstore") / _NAME


def read() -> dict[str, Value]:
    """Return every setting with its value; the default, for those that the file does not have.

    Raises BadRequest that names the file and the line, Conflict for another user's file,
    StorageFailed.
    """
    found: dict[str, Value] = {key: [] for key in KEYS}
    text = _text(path())
    if text:
        import tomllib  # late: commands that need no setting do not wait for it

        try:
            given = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise _refused(*_place(str(error), text)) from error
        for name, value in given.items():
            found[name] = _checked(name, value, _line_of(name, text))
    return found


def add(key: str, words: Sequence[str]) -> None:
    """Add values that the user typed to a setting.

    Raises BadRequest, Conflict, StorageFailed, and NotFound for a directory that a store lies in.
    """
    known = _known(key)
    settings = read()
    settings[key] = list(dict.fromkeys([*settings[key], *map(known.typed, words)]))
    _write(settings)


def remove(key: str, words: Sequence[str]) -> None:
    """Remove values from a setting, all if none is given.  Raises as `add`."""
    known = _known(key)
    settings = read()
    gone = [known.stored(word) for word in words] or settings[key]
    missing = next((value for value in gone if value not in settings[key]), None)
    if missing is not None:
        from mstore.errors import BadRequest

        raise BadRequest(f"{key} does not have {missing}", hint=f"mstore config --user {key}")
    settings[key] = [value for value in settings[key] if value not in gone]
    _write(settings)


def _known(name: str) -> Key:
    if name not in KEYS:
        from mstore.errors import BadRequest

        raise BadRequest(_unknown(name), hint="mstore config --user")
    return KEYS[name]


def _unknown(name: str) -> str:
    return f"no such setting of a user: {name!r}; there are {', '.join(KEYS)}"


def _text(file: Path) -> str:
    """Return the file's content; "" if there is none, or none that this user can see."""
    # A home directory may belong to another user, as sudo may leave it.
    if not os.path.lexists(file):
        return ""
    from mstore import fs
    from mstore.errors import Conflict, StorageFailed
    from mstore_cli.found import own_users

    # A fifo is refused, not waited for.
    with fs.translated(file), open(file, "rb", opener=_without_waiting) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise StorageFailed(
                "not a regular file", where=str(file), hint=f"remove {shlex.quote(str(file))}"
            )
        if status.st_uid not in own_users() | {0}:
            raise Conflict(
                "your settings are in a file of another user",
                where=str(file),
                hint=f"ls -l {shlex.quote(str(file))} says whose: make it yours, or remove it",
            )
        data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _refused(f"longer than {MAX_BYTES} bytes", None)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _refused("not UTF-8", data.count(b"\n", 0, error.start) + 1) from error


def _without_waiting(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_NONBLOCK)


def _checked(name: str, value: object, line: int | None) -> Value:
    if name not in KEYS:
        raise _refused(_unknown(name), line)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _refused(f"{name} takes a list of texts, as {name} = [...]", line)
    wrong = next(filter(None, map(KEYS[name].problem, value)), None)
    if wrong is not None:
        raise _refused(f"{name}: {wrong}", line)
    return value


def _place(message: str, text: str) -> tuple[str, int | None]:
    """Return what the TOML reader says, and on which line."""
    found = _AT_LINE.search(message)
    if found is not None:
        return message[: found.start()], int(found[1])
    at_end = message.removesuffix(" (at end of document)")
    return at_end, None if at_end == message else len(text.splitlines())


def _line_of(name: str, text: str) -> int | None:
    """Return the line on which a key is set, unless it is written in an unusual way."""
    found = re.search(rf"""^[ \t]*\[*[ \t]*["']?{re.escape(name)}\b""", text, re.MULTILINE)
    return None if found is None else text.count("\n", 0, found.start()) + 1


def _refused(what: str, line: int | None) -> Exception:
    from mstore.errors import BadRequest

    return BadRequest(
        f"not valid as your settings: {what}",
        where=f"{path()}" if line is None else f"{path()}, line {line}",
        hint="correct the file; mstore config --user --help lists the settings",
    )


def _write(settings: Mapping[str, Value]) -> None:
    """Replace the file by one with these settings."""
    from mstore import fs
    from mstore.errors import BadRequest

    lines = []
    for name, values in settings.items():
        if values:
            # A JSON string is a TOML string, but for the delete character.
            listed = (json.dumps(value, ensure_ascii=False) for value in values)
            inside = "".join(f"    {one},\n" for one in listed).replace("\x7f", "\\u007F")
            lines.append(f"{name} = [\n{inside}]\n")
    text = "".join(lines)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("a setting has to be text in UTF-8") from error
    # A link stays one, as those of who keep such files elsewhere.
    file = Path(os.path.realpath(path()))
    fs.make_directories(file.parent)
    fs.replace_file(file, text)
