"""Signatures: made with keys of ssh-keygen and openssl, and believed only for trusted keys."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_safetensors
from cli_runs import Program
from families import BLOCK
from hypothesis import given
from hypothesis import strategies as st

from mstore import Store
from mstore.api.reports import BAD_SIGNATURE, GOOD_SIGNATURE, UNKNOWN_KEY
from mstore.blocks.packs import Kind
from mstore.blocks.schema import NOTES
from mstore.snapshots.notes import notes_on, publish
from mstore.snapshots.signing import (
    fingerprint,
    is_good,
    load_key,
    parse_signers,
    sign,
    signature,
    signed_message,
    signed_text,
)
from mstore.store.objects.note import REPLACED, SIGNATURE, Note, packed
from mstore.terms.errors import BadName, BadRequest, Conflict, Corrupt, MstoreError, NotFound
from mstore.terms.ids import NoteId, SnapshotId
from mstore.terms.phrases import Option

PASSPHRASE = "correct horse"


def ssh_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "", "-f", str(path)]
    command += ["-b", "2048"] if kind == "rsa" else []
    subprocess.run(command, check=True)
    return path


def pem_key(path: Path, passphrase: str = "") -> Path:
    command = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(path)]
    command += ["-aes256", "-pass", f"pass:{passphrase}"] if passphrase else []
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("keys")
    ssh_key(root / "alice")
    ssh_key(root / "bob")
    return root


def build(root: Path) -> None:
    """A checkpoint, and a store that has it, closed."""
    write_safetensors(
        root / "a" / "model.safetensors", [("w", "U8", (200_000,), bytes(range(250)) * 800)]
    )
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "a", name="a")


@pytest.fixture
def store(copied: Path) -> Iterator[Store]:
    with Store.open(copied / "store") as store:
        yield store


def allowed(keys: Path, *names: str, options: str = "") -> bytes:
    lines = [f"{name}@x {options} {(keys / f'{name}.pub').read_text()}" for name in names]
    return "".join(lines).encode()


# -- keys ----------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [ssh_key, pem_key])
@pytest.mark.parametrize("passphrase", ["", PASSPHRASE])
def test_keys_of_both_programs_sign(
    make: Any, passphrase: str, store: Store, tmp_path: Path
) -> None:
    """OpenSSH and PEM keys sign, encrypted or not; the passphrase is asked for only if needed."""
    path = make(tmp_path / "key", passphrase=passphrase)
    asked: list[str] = []

    def ask() -> str:
        asked.append("asked")
        return passphrase

    key = load_key(path, ask)
    assert len(asked) == bool(passphrase)
    report = store.sign("a", key)
    assert report.key == fingerprint(key.public_key)
    assert store.verify("a", {key.public_key: "me"}).verified
    if passphrase:
        for wrong in (None, lambda: "wrong"):
            with pytest.raises(BadRequest) as refused:
                load_key(path, wrong)
            assert refused.value.where == str(path)


@pytest.mark.parametrize(
    "what", ["rsa", "public", "empty", "noise", "huge", "missing", "directory"]
)
def test_what_is_no_key_is_refused(what: str, keys: Path, tmp_path: Path) -> None:
    """Another kind of key, a public key, noise or nothing gives one error that names the file."""
    path = tmp_path / "key"
    if what == "rsa":
        ssh_key(path, "rsa")
    elif what == "directory":
        path.mkdir()
    elif what != "missing":
        path.write_bytes(
            {
                "public": (keys / "alice.pub").read_bytes(),
                "empty": b"",
                "noise": b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n",
                "huge": (keys / "alice").read_bytes() + bytes(1 << 17),
            }[what]
        )
    with pytest.raises(MstoreError) as refused:
        load_key(path)
    assert refused.value.where == str(path)


def test_the_public_half_does_not_sign(keys: Path, tmp_path: Path) -> None:
    """A public key, of ssh-keygen or openssl, is called one; beside KEY.pub the hint is KEY."""
    with pytest.raises(BadRequest, match="public half") as refused:
        load_key(keys / "alice.pub")
    assert refused.value.texts[2] == Option("key", str(keys / "alice"))
    pem = tmp_path / "public.pem"
    pem.write_bytes(b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    with pytest.raises(BadRequest, match="public half") as refused:
        load_key(pem)
    assert refused.value.hint is None


def test_the_secret_is_not_in_a_repr(keys: Path) -> None:
    """What is printed of a key is its fingerprint, as ssh-keygen has it."""
    key = load_key(keys / "alice")
    listed = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(keys / "alice.pub")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert fingerprint(key.public_key) in listed.stdout
    assert repr(key) == f"SigningKey({fingerprint(key.public_key)})"


# -- trusted keys --------------------------------------------------------------------------------


def test_signers_of_openssh(keys: Path) -> None:
    """Names, options, comments and other key types are read as OpenSSH writes them."""
    alice = load_key(keys / "alice").public_key
    public = (keys / "alice.pub").read_text().strip()
    for line, name in [
        (f"alice@x {public}", "alice@x"),
        (f"alice@x,al@y {public} a comment", "alice@x,al@y"),
        (f'"alice of x" {public}', "alice of x"),
        (f'alice namespaces="git,mstore" {public}', "alice"),
        (f'alice namespaces="*" {public}\r', "alice"),
        (f"# people\n\n  \nalice {public}\nother {public}", "alice"),
    ]:
        assert parse_signers(line.encode(), "here") == {alice: name}


def test_lines_that_trust_no_key_of_ours(keys: Path, tmp_path: Path) -> None:
    """A key for other namespaces, an authority and a key of another type are passed over."""
    public = (keys / "alice.pub").read_text()
    rsa = ssh_key(tmp_path / "r", "rsa").with_suffix(".pub").read_text()
    text = f'a namespaces="git" {public}b cert-authority {public}c {rsa}d namespaces="" {public}'
    assert parse_signers(text.encode(), "here") == {}


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice ssh-ed25519",
        "alice ssh-ed25519 !!!!",
        "alice ssh-ed25519 AAAA",
        "alice ssh-ed25519 A",
        "alice ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAA",
        '"alice ssh-ed25519 AAAA',
        "al\x1b[1mice KEY",
        'alice valid-before="20990101" KEY',
        "alice no-such-option KEY",
        'alice namespaces="mstore KEY',
    ],
)
def test_a_bad_line_is_named(line: str, keys: Path) -> None:
    """A line that is not understood trusts nobody: the error says which it is."""
    key = (keys / "alice.pub").read_text().strip()
    text = f"bob {key}\n{line.replace('KEY', key)}\n"
    with pytest.raises(BadRequest, match="line 2") as refused:
        parse_signers(text.encode(), "here")
    assert refused.value.where == "here"


@given(st.binary(max_size=200) | st.text(alphabet='a ,="#\n-ssh25', max_size=60).map(str.encode))
def test_any_list_of_signers(data: bytes) -> None:
    """Any bytes are a list of signers or BadRequest."""
    try:
        parse_signers(data, "here")
    except BadRequest:
        return


# -- signing and verifying -----------------------------------------------------------------------


def test_only_a_trusted_key_verifies(store: Store, keys: Path) -> None:
    """Unsigned, signed by somebody, signed by somebody trusted: verified only in the last case."""
    trusted = parse_signers(allowed(keys, "alice"), "here")
    assert not store.verify("a", trusted).verified
    store.sign("a", load_key(keys / "bob"), signer="alice@x")
    report = store.verify("a", trusted)
    assert not report.verified
    assert [(one.state, one.signer) for one in report.signatures] == [(UNKNOWN_KEY, None)]
    store.sign("a", load_key(keys / "alice"))
    report = store.verify("a", trusted)
    assert report.verified
    assert [(one.state, one.signer, one.claimed_signer) for one in report.signatures] == [
        (UNKNOWN_KEY, None, "alice@x"),
        (GOOD_SIGNATURE, "alice@x", None),
    ]
    assert store.log(signers=trusted)[0].signatures == report.signatures
    assert store.show("a", signers=trusted).signatures == report.signatures


def test_signing_twice_is_signing_once(store: Store, keys: Path) -> None:
    """The same key on the same snapshot gives the signature that is there."""
    first = store.sign("a", load_key(keys / "alice"))
    again = store.sign("a", load_key(keys / "alice"), signer="another name")
    assert again == first
    assert len(notes_on(store._catalog, first.snapshot)) == 1


def test_openssh_agrees(store: Store, keys: Path, tmp_path: Path) -> None:
    """ssh-keygen makes the same signature of the same line, and accepts ours."""
    report = store.sign("a", load_key(keys / "alice"))
    text = tmp_path / "line"
    text.write_bytes(signed_text(report.snapshot))
    command = [
        "ssh-keygen",
        "-q",
        "-Y",
        "sign",
        "-f",
        str(keys / "alice"),
        "-n",
        "mstore",
        str(text),
    ]
    subprocess.run(command, check=True, capture_output=True)
    armoured = text.with_suffix(".sig").read_text().split("-----")[2]
    blob = base64.b64decode(armoured)
    (record,) = notes_on(store._catalog, report.snapshot).values()
    assert blob.endswith(bytes.fromhex(record.value["signature"]))


@pytest.mark.parametrize("damage", ["signature", "key", "snapshot", "key is no point"])
def test_a_forged_signature_is_bad(damage: str, store: Store, keys: Path) -> None:
    """A signature of another key, another snapshot or nothing is BAD, whoever it names."""
    key = load_key(keys / "alice")
    catalog = store._catalog
    id = store["a"].id
    other = SnapshotId(bytes(32)) if damage == "snapshot" else id
    made = bytes(64) if damage == "signature" else key.sign(signed_message(other))
    of = {"key": load_key(keys / "bob").public_key, "key is no point": b"\xff" * 32}
    value = {"key": of.get(damage, key.public_key).hex(), "signature": made.hex()}
    publish(catalog, [Note(id, (), SIGNATURE, "ed25519", packed(value), "alice@x", 0)])
    trusted = {key.public_key: "alice@x", b"\xff" * 32: "nobody"}
    report = store.verify("a", trusted)
    assert [one.state for one in report.signatures] == [BAD_SIGNATURE]
    assert not report.verified
    store.sign("a", key)
    assert store.verify("a", trusted).verified


def test_a_row_of_another_snapshot_is_corrupt(store: Store, keys: Path) -> None:
    """A signature that the index gives to another snapshot does not vouch for it."""
    store.sign("a", load_key(keys / "alice"))
    catalog = store._catalog
    (id,) = notes_on(catalog, store["a"].id)
    (store.path.parent / "a" / "more.txt").write_text("more")
    store.add(store.path.parent / "a", name="b")
    with catalog.index.env.write() as rows:
        catalog.index.put(rows, NOTES, (store["b"].id, id), None)
    with pytest.raises(Corrupt, match="another snapshot"):
        store.verify("b", {})


def test_read_data_reads_what_was_signed(store: Store, keys: Path) -> None:
    """A flipped bit in a signed snapshot is found with read_data, which reads all of it once."""
    key = load_key(keys / "alice")
    store.sign("a", key)
    report = store.verify("a", {key.public_key: "alice"}, read_data=True)
    assert report.verified
    assert report.bytes_read == store.view("a").manifest.plain_bytes()
    location = store._catalog.locate([store.view("a").record("w").block(1)])[0]
    pack = Path(store._catalog.packs.where(location.pack))
    pack.chmod(0o644)
    with pack.open("r+b") as file:
        file.seek(location.offset)
        byte = file.read(1)[0]
        file.seek(location.offset)
        file.write(bytes([byte ^ 1]))
    assert store.verify("a", {key.public_key: "alice"}).verified
    with pytest.raises(Corrupt):
        store.verify("a", {key.public_key: "alice"}, read_data=True)


def test_a_collected_snapshot_is_not_signed(store: Store, keys: Path) -> None:
    """A snapshot that goes while it is being signed gets no signature."""
    catalog = store._catalog
    id = store["a"].id
    with catalog.index.env.write() as rows:
        rows.delete(b"\x03" + id, db=catalog.index.db("records"))
    with pytest.raises(Conflict):
        sign(catalog, id, load_key(keys / "alice"))
    assert notes_on(catalog, id) == {}


def test_names_that_cannot_be(store: Store, keys: Path) -> None:
    """A signer is a line of text; a revision that is not there is NotFound."""
    key = load_key(keys / "alice")
    for name in ("", "a\nb", "\x1b[1m", "x" * 5000):
        with pytest.raises(BadRequest):
            store.sign("a", key, signer=name)
    with pytest.raises(NotFound):
        store.sign("nothing", key)


def test_a_store_without_signatures_needs_no_library(store: Store) -> None:
    """`log` of a store that nobody signed imports no cryptography."""
    program = (
        "import sys, mstore; mstore.Store.open(sys.argv[1]).log();"
        "assert not any(name.startswith('cryptography') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(store.path)], check=True)


def test_without_the_library(store: Store, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cryptography `log` says that it could not check, and `verify` what to install."""
    store.sign("a", load_key(keys / "alice"))
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert [one.state for one in store.log()[0].signatures] == ["unchecked"]
    for call in (lambda: store.verify("a", {}), lambda: load_key(keys / "alice")):
        with pytest.raises(MstoreError) as refused:
            call()
        assert refused.value.hint == "pip install 'mstore[sign]'"


# -- the command line ----------------------------------------------------------------------------
@pytest.fixture
def mstore(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Program(store.path)


def test_sign_and_verify(mstore: Program, keys: Path, tmp_path: Path) -> None:
    """verify fails until a trusted key has signed, of --signers or of the user's own file."""
    assert mstore("verify", "a").status == 1
    refused = mstore("sign", "a")
    assert (refused.status, "--key" in refused.err) == (2, True)
    assert f"hint: mstore --store {mstore.store} sign a --key FILE" in refused.err
    assert "ssh-keygen -t ed25519" in refused.err
    signed = mstore.succeed("sign", "a", "--key", keys / "alice", "--as", "alice", "--json")
    assert signed.document["claimed_signer"] == "alice"
    done = mstore("verify", "--json")
    assert (done.status, done.document["snapshots"][0]["verified"]) == (1, False)
    list_of_signers = tmp_path / "signers"
    list_of_signers.write_bytes(allowed(keys, "bob"))
    assert mstore("verify", "a", "--signers", list_of_signers).status == 1
    list_of_signers.write_bytes(allowed(keys, "bob", "alice"))
    done = mstore.succeed("verify", "a", "--signers", list_of_signers, "--read-data")
    assert "signed by alice@x" in done.out
    log = mstore.succeed("log").out
    assert "signed by an unknown key" in log
    assert f"unknown key: {signed.document['key']}\n" in log
    assert "to trust a key, add a line to" in log
    shown = mstore.succeed("show", "a").out
    assert f"unknown key: {signed.document['key']}\n" in shown
    own = tmp_path / "config" / "mstore" / "allowed_signers"
    assert f"to trust a key, add a line to {own}:" in shown
    own.parent.mkdir(parents=True)
    list_of_signers.rename(own)
    assert mstore.succeed("verify", "-q").lines == [str(signed.document["snapshot"])]
    for verb in (["log"], ["show", "a"]):
        told = mstore.succeed(*verb).out
        assert "signed by alice@x" in told
        assert "unknown key" not in told
    assert mstore("verify", "a", "--signers", list_of_signers).status == 1


def test_one_unsigned_is_a_failure(
    mstore: Program, store: Store, keys: Path, tmp_path: Path
) -> None:
    """Of several revisions every one must be vouched for."""
    (tmp_path / "a" / "more.txt").write_text("more")
    store.add(tmp_path / "a", name="b")
    mstore.succeed("sign", "a", "--key", keys / "alice")
    signers = tmp_path / "signers"
    signers.write_bytes(allowed(keys, "alice"))
    mstore.succeed("verify", "a", "--signers", signers)
    assert mstore("verify", "a", "b", "--signers", signers).status == 1
    assert mstore("verify", "--signers", signers).status == 1


def test_passphrases(mstore: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A passphrase comes from a file, or a terminal; without either the hint says how."""
    key = pem_key(tmp_path / "key", PASSPHRASE)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    done = mstore("sign", "a", "--key", key)
    assert done.status == 2
    assert "--passphrase-file" in done.err
    (tmp_path / "words").write_text(f"{PASSPHRASE}\n")
    mstore.succeed("sign", "a", "--key", key, "--passphrase-file", tmp_path / "words")
    (tmp_path / "words").write_text("wrong")
    assert mstore("sign", "a", "--key", key, "--passphrase-file", tmp_path / "words").status == 2


# -- signatures of notes -------------------------------------------------------------------------


def test_a_note_is_signed(store: Store, keys: Path) -> None:
    """A key signs a note of a snapshot; this vouches for the note and not for the snapshot."""
    key = load_key(keys / "alice")
    trusted = {key.public_key: "alice"}
    (note,) = store.note("a", {"mmlu": 0.62}, kind="evaluation")
    report = store.sign("a", key, note=note.note)
    assert store.sign("a", key, note=note.note.hex()[:8]) == report
    (told,) = store.notes_of("a", signers=trusted)
    assert [(one.signature, one.state) for one in told.signatures] == [
        (report.signature, GOOD_SIGNATURE)
    ]
    verified = store.verify("a", trusted)
    assert (verified.verified, verified.signatures) == (False, ())
    assert store.show("a", signers=trusted).notes == verified.notes == (told,)
    store.note("a", {"mmlu": 0.7, "other": 1})
    assert [one.state for one in store.verify("a", trusted).notes] == [REPLACED]
    with pytest.raises(BadName) as refused:
        store.sign("a", key, note="other")
    (other,) = [one for one in store.notes_of("a") if one.key == "other"]
    again = f"store.sign('{told.snapshot.short}', ..., note='{other.note.short}')"
    assert refused.value.hint == again
    with pytest.raises(NotFound):
        store.sign("a", key, note="0" * 64)


def test_verify_shows_signed_notes(
    mstore: Program, store: Store, keys: Path, tmp_path: Path
) -> None:
    """A signed note has a line of its own, and unknown keys of notes are explained; only the
    signatures of the snapshot decide."""
    store.note("a", {"seen": True})
    store.sign("a", load_key(keys / "bob"))
    (note,) = store.note("a", {"mmlu": 0.62}, kind="evaluation")
    store.sign("a", load_key(keys / "alice"), note=note.note)
    signers = tmp_path / "signers"
    signers.write_bytes(allowed(keys, "bob"))
    told = mstore.succeed("verify", "a", "--signers", signers)
    assert "note evaluation mmlu = 0.62: signed by an unknown key" in told.out
    assert "to trust a key" in told.out
    assert "seen" not in told.out
    signers.write_bytes(allowed(keys, "alice"))
    refused = mstore("verify", "a", "--signers", signers)
    assert (refused.status, "0.62: signed by alice@x" in refused.out) == (1, True)
    store.note("a", {"mmlu": 0.7})
    again = mstore("verify", "a", "--signers", signers)
    assert "note evaluation mmlu = 0.62 (replaced): signed by alice@x" in again.out


def test_signed_notes_are_checked_wherever_they_are_listed(
    mstore: Program, store: Store, keys: Path, tmp_path: Path
) -> None:
    """Also of a snapshot that is not signed itself, a note's signature is checked with the user's
    own list: in show, log and note; unknown keys are explained where notes are listed."""
    (note,) = store.note("a", {"mmlu": 0.62})
    signed = mstore.succeed("sign", "a", "--key", keys / "alice", "--note", note.note)
    assert signed.out.startswith(f"signed note {note.note.hex()[:12]} of ")
    for verb in (["show", "a"], ["note", "a"]):
        assert "signed by an unknown key" in mstore.succeed(*verb).out
        assert "to trust a key" in mstore.succeed(*verb).out
    own = tmp_path / "config" / "mstore" / "allowed_signers"
    own.parent.mkdir(parents=True)
    own.write_bytes(allowed(keys, "alice"))
    assert "mmlu = 0.62 (signed by alice@x)" in mstore.succeed("show", "a").out
    shown = mstore.succeed("show", "a", "--json").document
    (logged,) = mstore.succeed("log", "--json").document["snapshots"]
    for report in (shown, logged):
        assert report["notes"][0]["signatures"][0]["state"] == GOOD_SIGNATURE


def test_a_signature_of_a_snapshot_is_none_of_a_note(store: Store, keys: Path) -> None:
    """The same id as a snapshot's and as a note's is signed as another line."""
    key = load_key(keys / "alice")
    id = store["a"].id
    forged = signature(id, id, key)
    as_note = Note(id, (NoteId(id),), SIGNATURE, "ed25519", forged.data, "", 0)
    assert is_good(forged)
    assert not is_good(as_note)
    assert signed_text(id) != signed_text(NoteId(id))


# -- how long a signature lives ------------------------------------------------------------------


def test_signatures_live_with_their_snapshot(store: Store, keys: Path) -> None:
    """gc keeps the signatures of what it keeps, and drops those of what it drops."""
    key = load_key(keys / "alice")
    kept = store.sign("a", key)
    (store.path.parent / "a" / "more.txt").write_text("more")
    store.add(store.path.parent / "a", name="b")
    gone = store.sign("b", key)
    store.remove("b")
    store.gc(reflog_days=0)
    assert store.verify("a", {key.public_key: "alice"}).verified
    with store._catalog.index.env.read() as rows:
        assert store._catalog.index.count(rows, "notes") == 1
        for report, is_there in ((kept, True), (gone, False)):
            found = store._catalog.index.record(rows, Kind.NOTE, report.signature)
            assert (found is not None) == is_there


def test_signatures_come_back_with_the_index(store: Store, keys: Path) -> None:
    """A rebuilt index finds the signatures in the packs."""
    key = load_key(keys / "alice")
    signed = store.sign("a", key)
    store.close()
    Store.reindex(store.path, use_old_index=False)
    with Store.open(store.path) as again:
        report = again.verify("a", {key.public_key: "alice"})
        assert [one.signature for one in report.signatures] == [signed.signature]
        assert report.verified
