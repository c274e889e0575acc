"""The setting `require_signed`: refs from elsewhere move only to what a trusted key signed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Program
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from exchanges import REMOTE, Place, files, place, refs, sound
from proof_models import model_files
from test_cli_commands import write_keys

from mstore.api import Store
from mstore.remotes import fetch
from mstore.snapshots.notes import publish
from mstore.snapshots.signing import SigningKey, signature
from mstore.store.objects.note import ED25519, SIGNATURE, Note, packed
from mstore.terms.errors import Conflict, Unavailable

__all__ = ["place"]

FRIEND = SigningKey(Ed25519PrivateKey.generate())
STRANGER = SigningKey(Ed25519PrivateKey.generate())
TRUSTED = {FRIEND.public_key: "friend"}


def shown(store: Store) -> tuple[object, ...]:
    """What a refused transfer must leave: refs, snapshots, packs."""
    snapshots = [one.snapshot for one in store.log(every=True)]
    packs = sorted(path.name for path in (store.path / "packs").rglob("*.pack"))
    return refs(store), snapshots, packs


def strict(place: Place, name: str) -> Store:
    """A store that knows the remote, and requires signatures."""
    made = place.store(name)
    made.configure("require_signed", "true")
    return made


@pytest.fixture
def a(place: Place) -> Store:
    """A store that pushed an unsigned model."""
    made = place.store("a")
    place.add(made, "x", 1)
    made.push(REMOTE, every=True)
    return made


def pushed(a: Store, key: SigningKey, name: str = "x") -> None:
    """Sign a model, and push it."""
    a.sign(name, key)
    a.push(REMOTE, [name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["fetch", "pull"])
def test_unsigned_is_refused(place: Place, a: Store, verb: str) -> None:
    """What nobody signed does not come: the error names ref, snapshot and next step; no ref moved,
    and nothing was published, nor kept of a pack."""
    b = strict(place, "b")
    before = shown(b)
    id = a.show("x").snapshot
    with pytest.raises(Conflict, match=rf"require_signed.*: x {id.short} \(not signed\)") as caught:
        getattr(b, verb)(REMOTE, signers=TRUSTED)
    assert caught.value.where == place.url
    hint = str(caught.value.hint)
    assert hint == (
        "where they were made, sign them, mstore.Store.open(STORE).sign('x', ...), and push again"
    )
    assert shown(b) == before
    assert not list((b.path / "remotes" / REMOTE / "incoming").iterdir())
    pushed(a, FRIEND)
    getattr(b, verb)(REMOTE, signers=TRUSTED)
    assert files(b, f"{REMOTE}/x") == model_files(1)
    assert ("x" in refs(b)) == (verb == "pull")
    sound(b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["fetch", "pull"])
def test_an_untrusted_key_is_refused(place: Place, a: Store, verb: str) -> None:
    """A signature of an unknown key does not count, whoever it claims to be; the error names the
    key. With the key among the signers all comes."""
    made = a.sign("x", STRANGER, signer="friend")
    a.push(REMOTE, ["x"])
    b = strict(place, "b")
    before = shown(b)
    for signers in (TRUSTED, {}, None):
        with pytest.raises(Conflict) as caught:
            getattr(b, verb)(REMOTE, signers=signers)
        assert f"signed by {made.key}" in caught.value.what
        assert str(caught.value.hint).startswith("if you know whose a key is, trust it (signers)")
        assert shown(b) == before
    getattr(b, verb)(REMOTE, signers={STRANGER.public_key: "her"})
    assert files(b, f"{REMOTE}/x") == model_files(1)


def _forged(a: Store) -> Note:
    id = a.show("x").snapshot
    value = {"key": FRIEND.public_key.hex(), "signature": bytes(64).hex()}
    return Note(id, (), SIGNATURE, ED25519, packed(value), "friend", 0)


def _of_a_note(a: Store) -> Note:
    id = a.show("x").snapshot
    [note] = a.note("x", {"score": 1})
    return signature(note.note, id, FRIEND)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", [_forged, _of_a_note])
def test_what_signs_nothing(place: Place, a: Store, made: Callable[[Store], Note]) -> None:
    """A bad signature in the name of a trusted key is none, and one of a note is none of its
    snapshot."""
    publish(a._catalog, [made(a)])
    a.push(REMOTE, ["x"])
    b = strict(place, "b")
    why = "the signature is bad" if made is _forged else "not signed"
    with pytest.raises(Conflict, match=why):
        b.pull(REMOTE, signers=TRUSTED)
    assert not refs(b)
    pushed(a, FRIEND)
    b.pull(REMOTE, signers=TRUSTED)


def test_one_of_several_is_unsigned(place: Place, a: Store) -> None:
    """One ref without a signature stops all; those that are named may come without it. What is
    below a signed snapshot needs no signature of its own."""
    place.add(a, "y", 2)
    place.add(a, "y", 2, 1)
    pushed(a, FRIEND, "y")
    b = strict(place, "b")
    with pytest.raises(Conflict) as caught:
        b.pull(REMOTE, signers=TRUSTED)
    assert caught.value.what.endswith(f": x {a.show('x').snapshot.short} (not signed)")
    assert not refs(b)
    assert {one.name for one in b.pull(REMOTE, ["y"], signers=TRUSTED).moved} == {"y"}
    assert len(b.log("y")) == 2
    sound(b)


def test_a_ref_that_stays_is_not_checked(place: Place, a: Store) -> None:
    """What came before the setting stays; it is checked when a ref would move to it."""
    b = place.store("b")
    b.fetch(REMOTE)
    b.configure("require_signed", True)
    before = shown(b)
    assert not b.fetch(REMOTE).fetched
    with pytest.raises(Conflict, match="not signed"):
        b.pull(REMOTE, signers=TRUSTED)
    assert shown(b) == before
    place.add(a, "y", 2)
    pushed(a, FRIEND, "y")
    assert [one.name for one in b.fetch(REMOTE, signers=TRUSTED).fetched] == ["y"]
    a.push(REMOTE, delete=["x"])
    assert [one.new for one in b.fetch(REMOTE).fetched] == [None]


def test_a_signature_made_here_counts(place: Place, a: Store) -> None:
    """A signature that this store has and the remote lacks is as good."""
    b = place.store("b")
    b.fetch(REMOTE)
    b.configure("require_signed", True)
    b.sign(f"{REMOTE}/x", FRIEND)
    assert [one.name for one in b.pull(REMOTE, signers=TRUSTED).moved] == ["x"]


def test_a_ref_that_moves_meanwhile(
    place: Place, a: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch that was there, and was removed during the download, does not come back unsigned."""
    b = place.store("b")
    b.pull(REMOTE)
    b.configure("require_signed", True)
    place.add(a, "y", 2)
    pushed(a, FRIEND, "y")
    run = fetch.Arrival.run

    def slow(self: Any) -> None:
        run(self)
        with Store.open(b.path) as other:
            other.remove("x")

    monkeypatch.setattr(fetch.Arrival, "run", slow)
    before = refs(b)
    with pytest.raises(Conflict, match=r"x [0-9a-f]{12} \(not signed\)"):
        b.pull(REMOTE, signers=TRUSTED)
    assert refs(b).keys() == before.keys() - {"x"}


def test_without_the_library(place: Place, a: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where signatures cannot be checked nothing comes, and the hint says what to install."""
    pushed(a, FRIEND)
    b = strict(place, "b")
    for name in [one for one in sys.modules if one.startswith("cryptography")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unavailable) as caught:
        b.fetch(REMOTE, signers=TRUSTED)
    assert caught.value.hint == "pip install 'mstore[sign]'"
    assert not refs(b)


def test_copy(place: Place, a: Store) -> None:
    """The setting of the store that a copy goes to counts; where the models come from, it does
    not."""
    b = strict(place, "b")
    with pytest.raises(Conflict, match="not signed") as caught:
        a.copy_to(b.path, ["x"], signers=TRUSTED)
    assert str(caught.value.hint) == "sign them: store.sign('x', ...)"
    assert not refs(b)
    a.sign("x", FRIEND)
    a.copy_to(b.path, ["x"], signers=TRUSTED)
    c = place.store("c")
    b.copy_to(c.path, ["x"])
    assert refs(c) == refs(b, "branch")


def test_on_the_command_line(
    place: Place, a: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trusted keys are those of --signers, or of the user's own list, as `verify` has them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    write_keys(tmp_path)
    there, here = Program(a.path), Program(place.store("b").path)
    here.succeed("config", "require_signed", "true")
    for words in (("fetch", REMOTE), ("pull", REMOTE, "--signers", tmp_path / "signers")):
        done = here(*words)
        assert done.status == 1
        assert "error: " in done.err
        assert "(not signed)" in done.err
        assert "sign them, mstore --store STORE sign x ..., and push again" in done.err
    there.succeed("sign", "x", "--key", tmp_path / "key")
    there.succeed("push", REMOTE, "x")
    done = here("pull", REMOTE)
    assert done.status == 1
    assert "trust it (--signers); else " in done.err
    fetched = here.succeed("fetch", REMOTE, "--signers", tmp_path / "signers")
    assert "signed by me" in fetched.out
    assert here("pull", REMOTE).status == 1
    (tmp_path / "own" / "mstore").mkdir(parents=True)
    shutil.copy(tmp_path / "signers", tmp_path / "own" / "mstore" / "allowed_signers")
    assert here.succeed("pull", REMOTE, "-q").lines == ["x"]
    third = Program(place.store("c").path)
    third.succeed("config", "require_signed", "true")
    here.succeed("copy", "x", third.store)
