"""Settings of a store: what may be said, and that what was said is kept."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from cli_runs import Program
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.api import Store
from mstore.blocks.codecs import Policy
from mstore.fs.rights import Sharing
from mstore.store.config import KEYS, MAX_BYTES, MAX_REFLOG_DAYS, WORDS, Config, typed
from mstore.terms.errors import BadRequest, Corrupt

BLOCK = 1 << 16


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty store."""
    Store.init(tmp_path / "store", block_size=BLOCK).close()
    return tmp_path / "store"


@settings(max_examples=12)
@given(
    codec=st.sampled_from(Policy),
    days=st.integers(0, MAX_REFLOG_DAYS),
    shared=st.sampled_from(Sharing),
    filesystem=st.sampled_from(["", "9p", "fuse.juicefs"]),
    signed=st.booleans(),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    codec: Policy,
    days: int,
    shared: Sharing,
    filesystem: str,
    *,
    signed: bool,
) -> None:
    """Every setting comes back from the file as it was put in."""
    root = tmp_path_factory.mktemp("config") / "store"
    given = {"codec": codec, "shared": shared, "filesystem": filesystem}
    expected = {**given, "reflog_days": days, "require_signed": signed}
    with Store.init(root, block_size=BLOCK, **given) as store:
        store.configure("reflog_days", days)
        store.configure("require_signed", signed)
        assert dict(store.config) == expected
    with Store.open(root) as store:
        assert dict(store.config) == expected
    # Whoever does not know these keys reads most stores.
    text = (root / "config").read_text()
    assert ("shared" in text) == (shared is not Sharing.UMASK)
    assert ("filesystem" in text) == (filesystem != "")
    assert ("require_signed" in text) == signed


def test_what_is_missing_has_its_default(root: Path) -> None:
    """Without the file, or with an empty one, everything is as in a new store."""
    with Store.open(root) as store:
        fresh = dict(store.config)
    for text in ("", "# nothing\n", None):
        (root / "config").unlink()
        if text is not None:
            (root / "config").write_text(text)
        with Store.open(root) as store:
            assert dict(store.config) == fresh == Config().values()
        (root / "config").touch()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("codec = 'zip'", "auto, raw, dense"),
        ("codec = 1", "auto, raw, dense"),
        ("codec = true", "auto, raw, dense"),
        ("reflog_days = '3'", "0 to"),
        ("reflog_days = -1", "0 to"),
        ("reflog_days = 1.5", "0 to"),
        ("reflog_days = true", "0 to"),
        (f"reflog_days = {MAX_REFLOG_DAYS + 1}", "0 to"),
        ("filesystem = 9", "name of a filesystem type"),
        ("filesystem = 'a b'", "name of a filesystem type"),
        ("require_signed = 'true'", "true, false"),
        ("require_signed = 1", "true, false"),
        ("colour = 'red'", "no such setting"),
        ("[codec]", "auto, raw, dense"),
        ("codec = 'auto'\ncodec = 'raw'", "not a config file"),
        ("codec", "not a config file"),
        ("\0", "not a config file"),
        ("#" * (MAX_BYTES + 1), "longer"),
        ("a = " + "[" * 5000, "not a config file"),
    ],
)
def test_a_file_that_says_something_else(root: Path, text: str, why: str) -> None:
    """An unknown key, a value of another kind, or no TOML at all: Corrupt, which names the file."""
    (root / "config").write_text(text)
    with pytest.raises(Corrupt, match=why) as refusal:
        Store.open(root)
    assert refusal.value.where == str(root / "config")


def test_refused_settings_change_nothing(root: Path) -> None:
    """A key or value that cannot be raises BadRequest, and the file is as it was."""
    before = (root / "config").read_bytes()
    with Store.open(root) as store:
        for key, value in (
            ("codec", "fast"), ("codec", 1), ("reflog_days", "soon"), ("reflog_days", "-1"),
            ("reflog_days", "9" * 20), ("require_signed", "yes"), ("require_signed", 1),
            ("nope", "1"),
        ):  # fmt: skip
            with pytest.raises(BadRequest):
                store.configure(key, value)
        with pytest.raises(BadRequest):
            store.add(root, name="x", codec="fast")
    assert (root / "config").read_bytes() == before
    with pytest.raises(BadRequest):
        Store.init(root.parent / "other", codec="fast")
    assert not (root.parent / "other").exists()


@pytest.mark.parametrize("text", ["\u0663", "1e2", " 3", "", "0x3"])
def test_numbers_are_typed_in_plain_digits(text: str) -> None:
    """What a person types for a number is digits, and nothing else that looks like some."""
    with pytest.raises(BadRequest):
        typed("reflog_days", text)


def test_on_the_command_line(tmp_path: Path) -> None:
    """`config` shows all settings or one, and changes one; `init` takes a codec."""
    mstore = Program(tmp_path / "store")
    assert mstore.succeed("init", "--codec", "dense", "--json").document["codec"] == "dense"
    assert mstore.succeed("config", "--json").document == {
        "codec": "dense",
        "reflog_days": 30,
        "shared": "umask",
        "filesystem": "",
        "require_signed": False,
    }
    assert mstore.succeed("config", "codec", "-q").out == "dense\n"
    mstore.succeed("config", "reflog_days", "7")
    assert "7" in mstore.succeed("config", "reflog_days").out
    assert mstore.succeed("config", "codec", "raw", "--json").document == {
        "codec": "raw",
        "reflog_days": 7,
        "shared": "umask",
        "filesystem": "",
        "require_signed": False,
    }
    mstore.succeed("config", "filesystem", "fuse.juicefs")
    assert mstore.succeed("config", "filesystem", "-q").out == "fuse.juicefs\n"
    assert mstore.succeed("config", "filesystem", "", "--json").document["filesystem"] == ""
    mstore.succeed("config", "require_signed", "true")
    assert mstore.succeed("config", "require_signed", "-q").out == "true\n"
    assert "require_signed true" in " ".join(mstore.succeed("config").out.split())
    assert mstore.succeed("config", "--json").document["require_signed"] is True
    mstore.succeed("config", "shared", "group")
    assert mstore.succeed("config", "shared", "-q").out == "group\n"
    for words in (("nope",), ("nope", "1")):
        result = mstore("config", *words)
        assert result.status == 2
        assert " config" in result.err


@pytest.mark.parametrize("key", KEYS)
def test_a_refused_value(key: str, tmp_path: Path) -> None:
    """A value that a setting cannot have is answered with what it can have, for `config` and for
    `init`: each word is explained."""
    mstore = Program(tmp_path / "store")
    lines = [["config", key, "no such"]]
    if key not in ("reflog_days", "require_signed"):
        lines.append(["init", f"--{key}", "no such", str(tmp_path / "store")])
    mstore.succeed("init")
    for line in lines:
        done = mstore(*line)
        assert done.status == 2
        told = done.err.partition("\nhint: ")[2]
        assert told
        assert "mstore" not in told
        for word in WORDS.get(key, ()):
            assert re.search(rf"\b{word}\b", told), word


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        (("init",), "umask"),
        (("init", "--shared", "group"), "group"),
        (("init", "--shared=all"), "all"),
        (("init", "--shared=umask"), "umask"),
    ],
)
def test_init_shared(tmp_path: Path, words: tuple[str, ...], shared: str) -> None:
    """`init --shared` says who may use the store."""
    mstore = Program(tmp_path / "store")
    assert mstore.succeed(*words, "--json").document["shared"] == shared
    assert mstore.succeed("config", "shared", "-q").out == f"{shared}\n"


def test_init_shared_refuses_other_words(tmp_path: Path) -> None:
    """A word that says nothing about sharing is refused, and nothing is made."""
    refused = Program(tmp_path / "other")("init", "--shared=some")
    assert refused.status == 2
    assert "umask, group, all" in refused.err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "text", ['codec = "raw"\nreflog_days =  3\n', 'codec = "raw"\n', "reflog_days = 3 # days\n"]
)
def test_what_people_write_is_toml(root: Path, text: str) -> None:
    """A file that is not exactly as `save` writes it means what TOML says."""
    (root / "config").write_text(text)
    wanted = Config().values() | tomllib.loads(text)
    with Store.open(root) as store:
        assert dict(store.config) == wanted
