"""The user's own settings: what may be said in the file, and that nothing in it is ignored."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_runs import Program
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mstore_cli import user_config

NOWHERE = Program(Path("/nowhere"))


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the settings of a user who has none yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    return tmp_path / "own" / "mstore" / "config.toml"


def a_store(path: Path) -> str:
    """A directory that is a store as far as the list of safe ones cares."""
    path.mkdir()
    (path / "format").touch()
    return str(path)


def test_a_list_grows_and_shrinks(settings: Path, tmp_path: Path) -> None:
    """`config --user` shows all settings, KEY one of them; values are added once, resolved to
    absolute paths, and --unset removes some or all.  No store is needed."""
    stores = [a_store(tmp_path / name) for name in ("one", "two words")]
    (tmp_path / "link").symlink_to("two words")
    line = ("config", "--user", "safe_stores")
    assert NOWHERE.succeed("config", "--user", "--json").document == {
        "safe_stores": [],
        "author": "",
        "endpoints": [],
        "cache_size": "",
        "signing_key": "",
    }
    assert NOWHERE.succeed(*line).lines == ["safe_stores  none"]
    assert not settings.exists()
    added = NOWHERE.succeed(*line, os.path.relpath(stores[0]), tmp_path / "link", "--json")
    assert added.document["safe_stores"] == stores
    NOWHERE.succeed(*line, stores[1])
    assert NOWHERE.succeed(*line, "-q").lines == stores
    assert tomllib.loads(settings.read_text()) == {"safe_stores": stores}
    unset = ("config", "--user", "--unset", "safe_stores")
    assert NOWHERE.succeed(*unset, stores[0], "-q").lines == [stores[1]]
    assert f"safe_stores does not have {stores[0]}" in NOWHERE(*unset, stores[0]).err
    assert NOWHERE.succeed(*unset, "--json").document["safe_stores"] == []


def test_an_author(settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots tell who made them: as MSTORE_AUTHOR says, else `config --user author`, else
    user@host; log tells it where there are several, show and JSON always."""
    monkeypatch.delenv("MSTORE_AUTHOR", raising=False)
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    (tmp_path / "model").mkdir()

    def author(name: str) -> object:
        save_file({name: np.zeros(2, "f4")}, tmp_path / "model" / "model.safetensors")
        mstore.succeed("add", tmp_path / "model", "--name", name)
        return mstore.succeed("show", name, "--json").document["author"]

    host = os.uname().nodename
    assert str(author("one")).endswith(f"@{host}")
    assert "BY" not in mstore.succeed("log").out
    line = ("config", "--user", "author")
    assert NOWHERE.succeed(*line).lines == [f"author  {author('one')} (the default)"]
    assert "(the default)" in NOWHERE.succeed("config", "--user").out
    assert NOWHERE.succeed(*line, "Ada L.").lines == ["author  Ada L."]
    assert tomllib.loads(settings.read_text()) == {"author": "Ada L."}
    assert author("two") == "Ada L."
    assert "author    Ada L." in mstore.succeed("show", "two").out
    assert "Ada L." in mstore.succeed("log").out
    assert "takes one value" in NOWHERE(*line, "Ada", "L.").err
    assert "not one line" in NOWHERE(*line, "a\nb").err
    monkeypatch.setenv("MSTORE_AUTHOR", "robot")
    assert author("three") == "robot"
    assert NOWHERE.succeed(*line).lines == ["author  robot ($MSTORE_AUTHOR)"]
    monkeypatch.delenv("MSTORE_AUTHOR")
    assert NOWHERE.succeed("config", "--user", "--unset", "author", "-q").lines == [""]
    assert str(author("four")).endswith(f"@{host}")


def test_what_cannot_be_set(settings: Path, tmp_path: Path) -> None:
    """An unknown setting, and what is no store (as of an unset variable, or a pattern), are
    refused; nothing is written, and the hint names what was meant."""
    Program(tmp_path / "models" / ".mstore").succeed("init")
    assert "no such setting of a user: 'colour'" in NOWHERE("config", "--user", "colour", "red").err
    assert "no such setting of a user: 'colour'" in NOWHERE("config", "--user", "colour").err
    assert " config codec\n" in NOWHERE("config", "--user", "codec", "raw").err
    assert " config --user safe_stores\n" in NOWHERE("config", "safe_stores", "/x").err
    for word in ("", "*", "~/st", "/nowhere", str(tmp_path)):
        assert "no store here" in NOWHERE("config", "--user", "safe_stores", word).err
    said = NOWHERE("config", "--user", "safe_stores", tmp_path / "models").err
    assert f" config --user safe_stores {tmp_path}/models/.mstore\n" in said
    assert NOWHERE("config", "--unset", "codec").status == 2
    assert NOWHERE("config", "codec", "raw", "dense").status == 2
    assert not settings.parent.exists()


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ("# mine\ncolour = 'red'", ", line 2", "no such setting of a user: 'colour'"),
        ("\n[safe_stores]\nx = 1", ", line 2", "takes a list of texts"),
        ("safe_stores = 'x'", ", line 1", "takes a list of texts"),
        ("safe_stores = ['/x', 1]", ", line 1", "takes a list of texts"),
        ("author = ['me']", ", line 1", "author takes a text"),
        ("author = 'a\nb'", ", line 1", "invalid character"),
        ('author = "a\\nb"', ", line 1", "is not one line of text"),
        ("\n\n'safe_stores' = ['/x', 'y']", ", line 3", "'y' is not an absolute path"),
        ("\nsafe_stores", ", line 2", "Expected '='"),
        ("safe_stores = []\nsafe_stores = []", ", line 2", "Cannot overwrite a value"),
        ("\n# \udcff", ", line 2", "not UTF-8"),
        ("#" * (user_config.MAX_BYTES + 1), "", "longer than"),
        ("a = " + "[" * 5000, "", ""),
    ],
)
def test_a_broken_file_is_an_error(text: str, place: str, why: str, settings: Path) -> None:
    """What is wrong in the file is one error that names the file and the line; it is not changed
    either."""
    settings.parent.mkdir(parents=True)
    settings.write_text(text, errors="surrogateescape")
    for words in ((), ("safe_stores", "/x")):
        done = NOWHERE("config", "--user", *words)
        assert done.status == 2
        [error, hint] = done.err.splitlines()
        assert error.startswith(f"error: {settings}{place}: not valid as your settings: ")
        assert why in error
        assert hint.startswith("hint: correct the file")
    assert settings.read_text(errors="surrogateescape") == text


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir])
def test_a_file_of_another_kind(kind: Callable[[Path], None], settings: Path) -> None:
    """Settings that are no regular file are refused at once; a fifo is not waited for."""
    settings.parent.mkdir(parents=True)
    kind(settings)
    assert "config.toml: " in NOWHERE("config", "--user").err


def test_a_link_stays(settings: Path, tmp_path: Path) -> None:
    """Settings that are kept elsewhere, behind a link, are changed there."""
    settings.parent.mkdir(parents=True)
    kept = tmp_path / "kept.toml"
    kept.write_text("safe_stores = ['/x']  # mine")
    settings.symlink_to(kept)
    store = a_store(tmp_path / "y")
    NOWHERE.succeed("config", "--user", "safe_stores", store)
    assert settings.is_symlink()
    assert tomllib.loads(kept.read_text()) == {"safe_stores": ["/x", store]}


@given(names=st.lists(st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1)))
def test_what_is_written_is_read(
    names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any path that is text comes back from the file as it was set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("own")))
        paths = list(dict.fromkeys(os.path.realpath(f"/nowhere/{name}") for name in names))
        author = "".join(filter(str.isprintable, names))[:256]
        settings = {"safe_stores": paths, "author": author, "endpoints": []}
        settings |= {"cache_size": "", "signing_key": ""}
        user_config._write(settings)
        assert user_config.read() == settings


def test_a_path_that_is_no_text(settings: Path, tmp_path: Path) -> None:
    """A path that is not UTF-8 cannot be kept in TOML, and is refused."""
    store = a_store(tmp_path / "\udcff")
    assert "text in UTF-8" in NOWHERE("config", "--user", "safe_stores", store).err
    assert not settings.exists()


_TEXT = st.text(st.characters(codec="utf-8"), min_size=1)


@given(
    name=_TEXT,
    gate=st.fixed_dictionaries(
        {"command": st.lists(_TEXT, min_size=1)},
        optional={"score": st.lists(_TEXT), "min": _TEXT, "timeout": st.just("9m")},
    ),
)
def test_gates_are_kept(
    name: str, gate: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A change of another setting writes the tables again, whatever text is in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("own")))
        kept = user_config.path()
        kept.parent.mkdir(parents=True)
        kept.write_text(user_config._tables_text({name: gate}, {name: name}))
        user_config.add("author", ["ada"])
        assert tomllib.loads(kept.read_text())["gates"] == {name: gate}
        assert user_config.block_presets() == {name: name}
        found = user_config.gates()[name]
        assert list(found.command) == gate["command"]
