"""A store's own settings: the TOML file `config` in it.

    codec = "auto"       which codecs new blocks may take: auto, raw, dense
    reflog_days = 30     for how many days the reflog keeps what refs pointed at
    shared = "umask"     who besides its creator may use what is created: umask, group, all
    filesystem = ""      a type that behaves as a local filesystem, for whoever uses the store
    require_signed = false   whether a fetch moves refs only to snapshots that a trusted key signed

    [required_gates]     patterns of branches and tags, and the gates that these must pass
    "prod/*" = ["quality"]

    [remote.NAME]        a remote (`mstore.remotes`): its address, and how to reach it
    url = "s3://bucket/models"
    endpoint = ""        the server, where the provider's own is not meant
    region = ""
    lazy = false         whether only records are fetched, and blocks come when something reads them
    addressing_style = ""    path or virtual: where requests name the bucket, at S3

Owns the keys, their allowed values, and the file. Missing keys have their default; so have all keys
if there is no file. A key or value that this version does not know is an error: no setting is
ignored silently. Settings say how the store is written, never how it is read.
"""

from __future__ import annotations

import errno
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import msgspec

from mstore import fs
from mstore.blocks.codecs import Policy
from mstore.fs.rights import Sharing
from mstore.store.layout import Layout, locate, require_writable
from mstore.terms.errors import BadRequest, Corrupt, StorageFailed
from mstore.terms.phrases import call

MAX_BYTES: Final = 1 << 16
MAX_REFLOG_DAYS: Final = 36_500

Value = str | int
"""A truth value is an int, too."""


class RemoteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a remote is.  No credential is ever part of it."""

    name: str
    url: str
    endpoint: str = ""
    region: str = ""
    addressing_style: str = ""
    lazy: bool = False

    def text(self) -> str:
        """Return its table in the file."""
        given = msgspec.structs.asdict(self)
        name = given.pop("name")
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in given.items() if value]
        return f"\n[remote.{json.dumps(name)}]\n" + "".join(lines)


class Config(msgspec.Struct, frozen=True):
    """The settings of a store."""

    codec: Policy = Policy.AUTO
    reflog_days: int = 30
    shared: Sharing = Sharing.UMASK
    filesystem: str = ""
    require_signed: bool = False
    remotes: tuple[RemoteConfig, ...] = ()
    required_gates: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def load(cls, layout: Layout) -> Self:
        """Read the store's config file. Raises Corrupt naming the file, StorageFailed."""
        path = layout.config
        try:
            text = fs.read_file(path, MAX_BYTES + 1)
        except StorageFailed as error:
            if error.errno == errno.ENOENT:
                return cls()
            raise
        if text == cls().text().encode():
            # As every store has it at first, and read by every command.
            return cls()
        import tomllib  # late: few stores have settings of their own

        try:
            if len(text) > MAX_BYTES:
                raise ValueError(f"longer than {MAX_BYTES} bytes")
            values = tomllib.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise Corrupt(
                f"not a config file: {error}",
                where=str(path),
                hint=f"rm {shlex.quote(str(path))}    (settings are the defaults then)",
            ) from error
        try:
            return cls().changed(values)
        except BadRequest as error:
            what, _, hint = error.texts
            raise Corrupt(what, where=str(path), hint=hint) from error

    @property
    def lazy_remotes(self) -> tuple[RemoteConfig, ...]:
        """The remotes whose blocks come when something reads them."""
        return tuple(one for one in self.remotes if one.lazy)

    def changed(self, values: Mapping[str, object]) -> Self:
        """Return a copy with some values replaced. Raises BadRequest."""
        known = msgspec.structs.asdict(self)
        own = {key: value for key, value in values.items() if key not in _TABLES}
        if "remote" in values:
            known["remotes"] = _remotes(values["remote"])
        if "required_gates" in values:
            known["required_gates"] = _gates(values["required_gates"])
        return type(self)(**known | {key: _parsed(key, value) for key, value in own.items()})

    def values(self) -> dict[str, Value]:
        """Return every key with its value, in order."""
        return {
            "codec": self.codec.value,
            "reflog_days": self.reflog_days,
            "shared": self.shared.value,
            "filesystem": self.filesystem,
            "require_signed": self.require_signed,
        }

    def text(self) -> str:
        """Return the file's content."""
        lines = [
            # JSON's words, numbers and truth values are those of TOML.
            f"{key} = {json.dumps(value)}\n"
            for key, value in self.values().items()
            # Omit the default, so that versions without these keys read most stores.
            if (key, value) not in _OMITTED
        ]
        if self.required_gates:
            lines.append("\n[required_gates]\n")
        lines += [
            f"{json.dumps(pattern)} = {json.dumps(gates)}\n"
            for pattern, gates in self.required_gates
        ]
        return "".join([*lines, *(one.text() for one in self.remotes)])

    def save(self, layout: Layout) -> None:
        """Replace the file atomically."""
        fs.replace_file(layout.config, self.text(), staging=layout.tmp)


_OMITTED: Final = (("shared", Sharing.UMASK), ("filesystem", ""), ("require_signed", False))
_TABLES: Final = ("remote", "required_gates")
KEYS: Final = tuple(
    key for key in Config.__struct_fields__ if key not in ("remotes", "required_gates")
)
_TRUTH: Final = MappingProxyType({"true": True, "false": False})
WORDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"codec": tuple(Policy), "shared": tuple(Sharing), "require_signed": tuple(_TRUTH)}
)
"""The values of settings that are words."""


_MEANINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "codec": "auto compresses where that saves much, dense wherever it saves anything, "
        "raw never",
        "reflog_days": "a whole number of days",
        "shared": "group: the store's group reads and writes; all: others also read; "
        "umask: as the umask of each user says",
        "filesystem": "findmnt -n -o FSTYPE -T DIR prints the type of a directory",
        "require_signed": "true refuses what no trusted key signed, where a ref would move to it; "
        "false takes it",
    }
)
"""What the values of each setting mean."""
_FILESYSTEM: Final = re.compile(r"[\w.+-]{0,64}", re.ASCII)


def _remotes(given: object) -> tuple[RemoteConfig, ...]:
    """Parse the tables of remotes.  What an address may be is for `mstore.remotes.address`."""
    try:
        tables = msgspec.convert(given, dict[str, dict[str, str | bool]])
        named = ({**table, "name": name} for name, table in tables.items())
        return tuple(msgspec.convert(one, RemoteConfig, strict=True) for one in named)
    except (msgspec.ValidationError, TypeError) as error:
        raise BadRequest(f"the settings of a remote: {error}") from error


def _gates(given: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Parse the table of required gates: one name, or a list of names, by pattern."""
    try:
        tables = msgspec.convert(given, dict[str, str | tuple[str, ...]])
    except msgspec.ValidationError as error:
        raise BadRequest(f"required_gates: {error}") from error
    found = {
        pattern: (names,) if isinstance(names, str) else names for pattern, names in tables.items()
    }
    if not all(name for names in found.values() for name in names):
        raise BadRequest("required_gates: a gate without a name")
    return tuple((pattern, names) for pattern, names in found.items() if names)


def _parsed(key: str, value: object) -> Policy | Sharing | str | int:
    match key, value:
        case "shared", str() if value in WORDS[key]:
            return Sharing(value)
        case "shared", _:
            raise _refused(key, value, ", ".join(WORDS[key]))
        case "codec", str() if value in WORDS[key]:
            return Policy(value)
        case "codec", _:
            raise _refused(key, value, ", ".join(WORDS[key]))
        case "filesystem", str() if _FILESYSTEM.fullmatch(value):
            return value
        case "filesystem", _:
            raise _refused(key, value, "the name of a filesystem type, as in /proc/self/mountinfo")
        case "reflog_days", int() if type(value) is int and 0 <= value <= MAX_REFLOG_DAYS:
            return value
        case "reflog_days", _:
            raise _refused(key, value, f"0 to {MAX_REFLOG_DAYS}")
        case "require_signed", bool():
            return value
        case "require_signed", _:
            raise _refused(key, value, ", ".join(WORDS[key]))
    raise BadRequest(
        f"no such setting: {key!r}; there are {', '.join(KEYS)}", hint=call("configure")
    )


def _refused(key: str, value: object, allowed: str) -> BadRequest:
    return BadRequest(f"{key} cannot be {value!r}; it can be {allowed}", hint=_MEANINGS[key])


def typed(key: str, text: str) -> Value:
    """Parse a value that a person typed. Raises BadRequest."""
    if key == "reflog_days":
        if not text.isascii() or not text.isdigit():
            raise _refused(key, text, f"0 to {MAX_REFLOG_DAYS}")
        return int(text[:9])
    if key == "require_signed":
        return _TRUTH.get(text, text)
    return text


def vouch(root: Path, filesystem: str) -> Config:
    """Set `filesystem` of a store, also of one that cannot be opened where it lies."""
    layout = locate(root)
    require_writable(layout)
    fs.make_directory(layout.tmp, private=True, exist_ok=True)
    with fs.locked(layout.lock):
        config = Config.load(layout).changed({"filesystem": filesystem})
        fs.share(root, config.shared)
        config.save(layout)
    return config
