"""The user's own settings: the TOML file `config.toml`, beside `allowed_signers`.

    safe_stores = ["/srv/models/store"]
    author = "Ada <ada@example.org>"
    endpoints = ["https://minio.example.org"]
    cache_size = "50GiB"
    signing_key = "/home/ada/.ssh/id_ed25519"

    [gates.quality]         what the gate `quality` runs, wherever a store or a command names it
    command = "python /srv/score.py {}"
    score = ["acc=results.json:acc"]
    min = ["acc>=base-0.01"]
    timeout = "30m"

    [blocks]                what `--blocks portrait` stands for
    portrait = "IN*=0.4,M00=0,OUT*=0.7"

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

from mstore_cli.session import STORE_NAME

MAX_BYTES: Final = 1 << 16
_NAME: Final = "config.toml"
_MOST_AUTHOR: Final = 256
_AT_LINE: Final = re.compile(r" \(at line ([0-9]+), column [0-9]+\)$")

Value = list[str] | str


def own_users() -> frozenset[int]:
    """Return the numbers of whoever runs this program: for root, also of the caller of sudo."""
    me = os.geteuid()
    caller = os.environ.get("SUDO_UID", "") if me == 0 else ""
    is_number = caller.isascii() and caller.isdigit()
    return frozenset({me, int(caller)} if is_number else {me})


class Key(NamedTuple):
    """One setting.

    kind: a list of texts, or one text, empty by default. typed: makes a value of a word that the
    user typed to add it. stored: of one to remove it. problem: what is wrong with a value, None if
    nothing is.
    """

    name: str
    kind: type[list[Any] | str]
    typed: Callable[[str], str]
    stored: Callable[[str], str]
    problem: Callable[[str], str | None]
    help: str


def _store(word: str) -> str:
    """Return the path of a store.  Raises NotFound if there is none: a slip would be kept."""
    if not word or not os.path.exists(os.path.join(word, "format")):
        from mstore.terms.errors import NotFound

        inside = os.path.join(word, STORE_NAME)
        is_around = bool(word) and os.path.exists(os.path.join(inside, "format"))
        hint = f"mstore config --user safe_stores {shlex.quote(inside) if is_around else 'DIR'}"
        what = "no store here, but in it" if is_around else "no store here"
        raise NotFound(what, where=word or "''", hint=hint)
    return os.path.realpath(word)


def _not_absolute(path: str) -> str | None:
    return None if os.path.isabs(path) else f"{path!r} is not an absolute path"


def _endpoint(word: str) -> str:
    """Return the address of a server as stores name it.  Raises BadRequest."""
    from mstore.remotes.address import checked_endpoint

    return checked_endpoint(word)


def is_endpoint(word: str) -> bool:
    """Return whether a word is the address of a server."""
    from mstore.terms.errors import BadRequest

    try:
        return bool(_endpoint(word))
    except BadRequest:
        return False


def _no_endpoint(text: str) -> str | None:
    if text.isprintable() and text.startswith(("https://", "http://")):
        return None
    return f"{text!r} is no address of a server: it begins with https:// or http://"


def _no_author(text: str) -> str | None:
    if not text.isprintable():
        return f"{text!r} is not one line of text"
    return None if len(text) <= _MOST_AUTHOR else f"longer than {_MOST_AUTHOR} characters"


def _no_size(text: str) -> str | None:
    from mstore.terms.errors import BadRequest
    from mstore.terms.sizes import parse_size

    try:
        parse_size(text, option="cache_size")
    except BadRequest as error:
        return error.what
    return None


def cache_size() -> int | None:
    """Return the setting `cache_size` in bytes; None if it is not set."""
    from mstore.terms.sizes import parse_size

    found = read()["cache_size"]
    is_set = isinstance(found, str) and bool(found)
    return parse_size(str(found), option="cache_size") if is_set else None


def _signing_key(word: str) -> str:
    """Return the path of a key.  Raises NotFound if there is none: a slip would be kept."""
    if not os.path.isfile(word):
        from mstore.terms.errors import NotFound

        raise NotFound(
            "no such file", where=word or "''", hint="mstore config --user signing_key FILE"
        )
    return os.path.abspath(word)


class GateConfig(NamedTuple):
    """What a gate runs: the words of its command, and texts as the options take them."""

    command: tuple[str, ...]
    score: tuple[str, ...] = ()
    min: tuple[str, ...] = ()
    timeout: str | None = None


GATES: Final = "gates"
"""The table of gates; `config --user` keeps it, and only an editor changes it."""


BLOCKS: Final = "blocks"
"""The table of weights of network blocks, by names of the user's; kept as that of gates."""


def gates() -> dict[str, GateConfig]:
    """Return the user's gates by name.  Raises as `read`."""
    text = _text(path())
    tables = _tables(GATES, "gates are tables, as [gates.NAME]", text)
    return {name: _gate(name, value, text) for name, value in tables.items()}


def block_presets() -> dict[str, str]:
    """Return the user's weights of network blocks by name, as `--blocks` takes them."""
    return _presets(_text(path()))


def _presets(text: str) -> dict[str, str]:
    usual = '[blocks] has lines as NAME = "0,0.5,1"'
    found = _tables(BLOCKS, usual, text)
    if not all(isinstance(one, str) for one in found.values()):
        raise _refused(usual, _line_of(BLOCKS, text))
    return found


def _tables(name: str, usual: str, text: str) -> dict[str, Any]:
    found = _parsed(text).get(name, {})
    if not isinstance(found, dict):
        raise _refused(usual, _line_of(name, text))
    return found


def _gate(name: str, given: Any, text: str) -> GateConfig:
    line = _line_of(f"gates.{name}", text)
    if not isinstance(given, dict) or not given.get("command"):
        raise _refused(f'gates.{name} takes command = "..."', line)
    unknown = given.keys() - {*GateConfig._fields}
    if unknown:
        known = ", ".join(GateConfig._fields)
        raise _refused(f"no such setting of a gate: {min(unknown)!r}; there are {known}", line)
    lists = {key: given.get(key, []) for key in ("score", "min")}
    lists = {key: [one] if isinstance(one, str) else one for key, one in lists.items()}
    command, timeout = given["command"], given.get("timeout")
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise _refused(f"gates.{name}: the command has {str(error).lower()}", line) from None
    texts = (words, *lists.values(), [] if timeout is None else [timeout])
    if not all(isinstance(one, list) and all(isinstance(t, str) for t in one) for one in texts):
        raise _refused(f"gates.{name}: command, score, min and timeout are texts", line)
    return GateConfig(tuple(words), tuple(lists["score"]), tuple(lists["min"]), timeout)


def _tables_text(gates: Mapping[str, Any], presets: Mapping[str, str]) -> str:
    """Return the tables of gates and of network blocks as TOML."""
    lines = [f"\n[{BLOCKS}]\n"] if presets else []
    lines += [f"{_quoted(name)} = {_quoted(value)}\n" for name, value in presets.items()]
    for name, table in gates.items():
        lines.append(f"\n[{GATES}.{_quoted(name)}]\n")
        for key, value in table.items():
            told = f"[{', '.join(map(_quoted, value))}]" if isinstance(value, list) else ""
            lines.append(f"{key} = {told or _quoted(value)}\n")
    return "".join(lines)


def _quoted(text: object) -> str:
    # A JSON string is a TOML string, but for the delete character.
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "\\u007F")


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
            Key(
                "author",
                str,
                str,
                str,
                _no_author,
                "who makes your snapshots, as they tell it; user@host unless it is set",
            ),
            Key(
                "endpoints",
                list,
                _endpoint,
                lambda word: word.rstrip("/"),
                _no_endpoint,
                "servers that get your credentials where a store's settings name them",
            ),
            Key(
                "cache_size",
                str,
                str,
                str,
                _no_size,
                "the most that each store keeps on its disk of what it reads at lazy remotes and "
                "computes of virtual merges; a tenth of the disk unless it is set",
            ),
            Key(
                "signing_key",
                str,
                _signing_key,
                os.path.abspath,
                _not_absolute,
                "the private key, ed25519, that signs verdicts of your gates",
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
    found: dict[str, Value] = {name: key.kind() for name, key in KEYS.items()}
    text = _text(path())
    for name, value in _parsed(text).items():
        if name not in (GATES, BLOCKS):
            found[name] = _checked(name, value, _line_of(name, text))
    return found


def _parsed(text: str) -> dict[str, Any]:
    """Return what the file says.  Raises BadRequest."""
    if not text:
        return {}
    import tomllib  # late: commands that need no setting do not wait for it

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(*_place(str(error), text)) from error


def add(key: str, words: Sequence[str]) -> None:
    """Add values that the user typed to a setting; one that has one value gets it.

    Raises BadRequest, Conflict, StorageFailed, and NotFound for a directory that a store lies in.
    """
    from mstore.terms.errors import BadRequest

    known = _known(key)
    settings = read()
    values = [known.typed(word) for word in words]
    wrong = next(filter(None, map(known.problem, values)), None)
    if wrong is None and known.kind is str and len(values) > 1:
        wrong = "takes one value; quote it if it has spaces"
    if wrong is not None:
        raise BadRequest(f"{key}: {wrong}")
    held = settings[key]
    settings[key] = values[0] if isinstance(held, str) else list(dict.fromkeys([*held, *values]))
    _write(settings)


def remove(key: str, words: Sequence[str]) -> None:
    """Remove values from a setting, all if none is given.  Raises as `add`."""
    known = _known(key)
    settings = read()
    held = _listed(settings[key])
    gone = [known.stored(word) for word in words] or held
    missing = next((value for value in gone if value not in held), None)
    if missing is not None:
        from mstore.terms.errors import BadRequest

        raise BadRequest(f"{key} does not have {missing}", hint=f"mstore config --user {key}")
    left = [value for value in held if value not in gone]
    settings[key] = "".join(left) if known.kind is str else left
    _write(settings)


def _known(name: str) -> Key:
    if name not in KEYS:
        from mstore.terms.errors import BadRequest

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
    from mstore.terms.errors import Conflict, StorageFailed

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
    known = KEYS[name]
    found = _listed(value) if isinstance(value, list | str) else []
    if not isinstance(value, known.kind) or not all(isinstance(one, str) for one in found):
        usual = "a text" if known.kind is str else f"a list of texts, as {name} = [...]"
        raise _refused(f"{name} takes {usual}", line)
    wrong = next(filter(None, map(known.problem, found)), None)
    if wrong is not None:
        raise _refused(f"{name}: {wrong}", line)
    return value


def _listed(value: list[Any] | str) -> list[Any]:
    """Return the values of a setting: an empty text is none."""
    return value if isinstance(value, list) else [value] if value else []


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
    from mstore.terms.errors import BadRequest

    return BadRequest(
        f"not valid as your settings: {what}",
        where=f"{path()}" if line is None else f"{path()}, line {line}",
        hint="correct the file; mstore config --user --help lists the settings",
    )


def _write(settings: Mapping[str, Value]) -> None:
    """Replace the file by one with these settings."""
    from mstore import fs
    from mstore.terms.errors import BadRequest

    lines = []
    for name, value in settings.items():
        texts = [_quoted(one) for one in _listed(value)]
        if isinstance(value, str):
            lines += [f"{name} = {text}\n" for text in texts]
        elif texts:
            inside = "".join(f"    {text},\n" for text in texts)
            lines.append(f"{name} = [\n{inside}]\n")
    kept = _text(path())
    text = "".join(lines) + _tables_text(_tables(GATES, "", kept), _presets(kept))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("a setting has to be text in UTF-8") from error
    # A link stays one, as those of who keep such files elsewhere.
    file = Path(os.path.realpath(path()))
    fs.make_directories(file.parent)
    fs.replace_file(file, text)
