"""The commands, from the command line to the disk and back."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import Adapter
from checkpoints import Tensor, write_safetensors
from cli_runs import Program
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from mstore import Store
from mstore_cli.keys import DOCUMENTS, OBJECTS, keys_of
from mstore_cli.verbs import OF_NO_STORE, VERBS

ID = re.compile(r"[0-9a-f]{64}")
ELEMENTS = 100_000
MERGE = ("--base", "tiny/base", "--expert", "tiny/math", "--expert", "tiny/code=0.5")
SHAREABLE = ("--method", "task_arithmetic", *MERGE)


def write_model(directory: Path, *, seed: int, moved: tuple[str, ...] = ()) -> Path:
    """A checkpoint of three F32 tensors; those in `moved` differ from the base's, by `seed`."""
    tensors: list[Tensor] = []
    for name in ("embed", "layer", "norm"):
        draw = random.Random(f"{name} {seed if name in moved else 0}")
        values = bytearray(draw.randbytes(4 * ELEMENTS))
        # Exponents near 1: no infinities, no NaN, no values that swamp the others.
        values[3::4] = bytes(0x3F if byte % 2 else 0xBF for byte in values[3::4])
        tensors.append((name, "F32", (ELEMENTS,), bytes(values)))
    write_safetensors(directory / "model.safetensors", tensors, metadata={"format": "pt"})
    (directory / "config.json").write_text('{"model_type": "tiny"}\n')
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two experts of it, as directories."""
    return write_models(tmp_path_factory.mktemp("models"))


def write_models(root: Path) -> Path:
    """A base and two experts of it, and the keys."""
    write_model(root / "base", seed=0)
    write_model(root / "math", seed=1, moved=("layer",))
    write_model(root / "code", seed=2, moved=("layer", "norm"))
    draw = np.random.default_rng(3)
    factors = draw.random((6, 2), np.float32), draw.random((2, 4), np.float32)
    Adapter({"layer": factors}).write(root / "adapter")
    write_keys(root)
    return root


def write_keys(directory: Path) -> None:
    """A private key `key`, and the list `signers` that trusts it."""
    made = Ed25519PrivateKey.from_private_bytes(bytes(32))
    pem = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / "key").write_bytes(made.private_bytes(*pem))
    public = made.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (directory / "signers").write_bytes(b"me " + public + b"\n")


@pytest.fixture(scope="module")
def family(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store with the base, the experts and a merge.  Tests that use it only read."""
    mstore = Program(tmp_path_factory.mktemp("family") / "store")
    mstore.succeed("init", "--block-size", "64KiB")
    mstore.succeed("add", models / "base", "--name", "tiny/base", "-m", "the base")
    for name in ("math", "code"):
        mstore.succeed("add", models / name, "--name", f"tiny/{name}", "--base", "tiny/base")
    mstore.succeed("add", models / "adapter", "--name", "tiny/adapter")
    mstore.succeed("merge", "--name", "tiny/merged", *SHAREABLE, "-m", "both")
    mstore.succeed("merge", "--name", "tiny/merged", "--candidate", "run", *SHAREABLE)
    mstore.succeed("sign", "tiny/code", "--key", models / "key")
    mstore.succeed("pin", "tiny/math", "--raw")
    mstore.succeed("remote", "add", "origin", tmp_path_factory.mktemp("remote").as_uri())
    mstore.succeed("push", "origin", "tiny/base", "tiny/math")
    mstore.succeed("fetch", "origin", "--lazy")
    return mstore


@pytest.fixture
def copy(family: Program, tmp_path: Path) -> Program:
    """The same store, free to be changed."""
    return Program(Path(shutil.copytree(family.store, tmp_path / "store")))


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


# JSON

# `mount` and `unmount` need FUSE, `serve` stays, `export` needs a Hub, `moe`, `shuffle` and
# `permute` layers of a language model: each has tests of its own. `cat` has no JSON.
WITHOUT_LINES = {
    "cat",
    "convert-adapter",
    "find",
    "mount",
    "unmount",
    "serve",
    "export",
    "moe",
    "permute",
    "shuffle",
}
WITH_LINES = [verb for verb in VERBS if verb not in WITHOUT_LINES]


def _other_store(out: Path) -> Path:
    """An empty store."""
    path = out / "other-store"
    if not path.exists():
        Store.init(path, block_size=1 << 16).close()
    return path


def _marks(out: Path) -> Path:
    """A log of a bisection."""
    path = out / "marks"
    path.write_text("# bad: tiny/merged\nstart tiny/merged --layers\n")
    return path


def _free(out: Path) -> Path:
    """A recipe with a free number."""
    path = out / "recipe.yaml"
    path.write_text(
        "merge_method: task_arithmetic\nbase_model: tiny/base\nmodels:\n"
        "  - model: tiny/code\n    parameters: {weight: {min: 0, max: 1}}\n"
    )
    return path


GOING_ON = {f"bisect{word}" for word in ("", " good", " bad", " skip", " log", " reset")}
"""Verbs of a bisection that goes on."""


def lines_for(models: Path, out: Path) -> dict[str, list[str]]:
    """A command line that goes well for each verb that has JSON and needs no FUSE."""
    return {
        "init": ["init", str(out / "new")],
        "config": ["config"],
        "add": ["add", str(models / "math"), "--name", "tiny/again"],
        "analyze": ["analyze", "tiny/code", "--base", "tiny/math"],
        "check-merge": ["check-merge", *MERGE],
        "align": ["align", *MERGE],
        "cast": ["cast", "tiny/code", "--dtype", "float64"],
        "emr": [
            *("emr", "--base", "tiny/base", "--expert", "tiny/math", "--expert", "tiny/code"),
            *("--name", "family"),
        ],
        "extract-lora": [
            *("extract-lora", "tiny/code", "--base", "tiny/base", "--rank", "2"),
            *("--name", "tiny/lora"),
        ],
        "combine-adapters": [
            *("combine-adapters", "--expert", "tiny/adapter", "--expert", "tiny/adapter=0.5"),
            *("--method", "cat", "--name", "tiny/both"),
        ],
        "methods": ["methods"],
        "plan": ["plan", *SHAREABLE],
        "plans": ["plans"],
        "merge": ["merge", "--name", "tiny/other", *SHAREABLE],
        "materialize": ["materialize", "tiny/merged"],
        "log": ["log"],
        "show": ["show", "tiny/merged"],
        "ls": ["ls", "tiny/merged"],
        "diff": ["diff", "tiny/base", "tiny/code", "--blocks"],
        "compare": ["compare", "tiny/code", "tiny/math"],
        "explain": ["explain", "tiny/merged", "layer"],
        "blame": ["blame", "tiny/merged"],
        "recipe": ["recipe", "tiny/merged"],
        "report": ["report", "tiny/merged", "-o", str(out / "page.html")],
        "replay": ["replay", "tiny/merged"],
        "checkout": ["checkout", "tiny/base", str(out / "copy")],
        "mounts": ["mounts"],
        "refs": ["refs"],
        "tag": ["tag", "v1", "tiny/merged"],
        "reset": ["reset", "tiny/merged", "tiny/base"],
        "rename": ["rename", "tiny/merged", "tiny/renamed"],
        "reflog": ["reflog", "tiny/merged"],
        "rm": ["rm", "tiny/code"],
        "note": ["note", "tiny/merged", "mmlu=0.62"],
        "eval": ["eval", "tiny/merged", "--checkout", "--", "true", "{}"],
        "metrics": ["metrics", "tiny/merged"],
        "search": [
            *("search", "--recipe", str(_free(out)), "--name", "tiny/best", "--same-set"),
            *("--eval", "sh -c 'echo {\\\"acc\\\": 1} > r.json' x {}", "--score", "r.json:acc"),
            *("--sampler", "grid", "--trials", "2", "--checkout"),
        ],
        "bisect": ["bisect"],
        "bisect start": ["bisect", "start", "tiny/merged", "--experts"],
        "bisect good": ["bisect", "good"],
        "bisect bad": ["bisect", "bad"],
        "bisect skip": ["bisect", "skip"],
        "bisect run": [
            *("bisect", "run", "tiny/merged", "--layers", "--checkout"),
            *("--", "true", "{}"),
        ],
        "bisect log": ["bisect", "log"],
        "bisect replay": ["bisect", "replay", str(_marks(out))],
        "bisect reset": ["bisect", "reset"],
        "gate": ["gate"],
        "gate run": ["gate", "run", "tiny/merged", "--check", "true {}", "--check-checkout"],
        "gate drop": ["gate", "drop", "candidates/run/tiny/merged"],
        "gate require": ["gate", "require", "prod/*", "quality"],
        "sign": ["sign", "tiny/merged", "--key", str(models / "key"), "--as", "me"],
        "verify": ["verify", "tiny/code", "--signers", str(models / "signers"), "--read-data"],
        "prune": ["prune", "--keep-last", "1"],
        "gc": ["gc", "--dry-run"],
        "pin": ["pin", "tiny/base", "--raw"],
        "unpin": ["unpin", "tiny/math"],
        "backup": ["backup", str(out / "backup")],
        # Where the store of `copy` is.
        "clone": ["clone", str(out / "store"), str(out / "clone")],
        "copy": ["copy", "tiny/base", "tiny/math", str(_other_store(out))],
        "bundle create": ["bundle", "create", str(out / "one.mbundle"), "tiny/math"],
        "remote": ["remote"],
        "remote add": ["remote", "add", "other", (out / "other").as_uri()],
        "remote show": ["remote", "show", "origin"],
        "remote rename": ["remote", "rename", "origin", "team"],
        "remote rm": ["remote", "rm", "origin"],
        "remote du": ["remote", "du", "origin"],
        "remote gc": ["remote", "gc", "origin", "--dry-run"],
        "remote fsck": ["remote", "fsck", "origin"],
        "push": ["push", "origin", "tiny/code"],
        "fetch": ["fetch", "origin"],
        "pull": ["pull", "origin"],
        "outdated": ["outdated"],
        "prefetch": ["prefetch", "tiny/base"],
        "drop": ["drop", "tiny/base"],
        "fsck": ["fsck", "--read-data"],
        "reindex": ["reindex"],
        "migrate": ["migrate"],
        "stats": ["stats"],
        "doctor": ["doctor"],
        "version": ["version"],
        "du": ["du"],
    }


def check_objects(value: Any, kind: str) -> None:
    """Every object inside a document has the keys that docs/cli.md lists for it."""
    word = kind.removesuffix(" or null").removeprefix("list of ")
    if word in OBJECTS and value is not None:
        for one in value if isinstance(value, list) else [value]:
            assert list(one) == [key.name for key in keys_of(OBJECTS[word])]
            for key in keys_of(OBJECTS[word]):
                check_objects(one[key.name], key.kind)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("verb", WITH_LINES)
def test_json_keys(verb: str, copy: Program, models: Path, tmp_path: Path) -> None:
    """With --json each command prints one object with exactly the keys of docs/cli.md."""
    line = lines_for(models, tmp_path)[verb]
    # `init DIR` is asked for a store of its own: naming two would be wrong usage.
    mstore = Program(Path(line[1])) if verb == "init" else copy
    if verb in GOING_ON:
        copy.succeed("bisect", "start", "tiny/merged", "--experts")
    # Before the verb: what follows `--` is another command's.
    done = mstore.succeed("--json", *line)
    assert list(done.document) == [key.name for key in DOCUMENTS[verb]]
    for key in DOCUMENTS[verb]:
        check_objects(done.document[key.name], key.kind)
    assert done.err == ""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("verb", WITH_LINES)
def test_human_output(verb: str, copy: Program, models: Path, tmp_path: Path) -> None:
    """Without options each command says something; off a terminal in plain characters only."""
    line = lines_for(models, tmp_path)[verb]
    mstore = Program(Path(line[1])) if verb == "init" else copy
    if verb in GOING_ON:
        copy.succeed("bisect", "start", "tiny/merged", "--experts")
    done = mstore.succeed(*line)
    assert done.out.strip()
    assert all(text == text.rstrip() for text in done.lines)
    assert "".join(done.lines).isprintable()
    assert done.err == ""
    # Whatever it says to type acts on the same store.
    of_a_store = "|".join(verb for verb in VERBS if verb not in OF_NO_STORE)
    assert not re.findall(rf"\bmstore (?:{of_a_store})\b", done.out)


def test_plan_has_the_keys_of_a_merge(copy: Program) -> None:
    """A plan's object has every key of a merge's but its name, null or 0 where nothing is done."""
    plan = copy.succeed("plan", *SHAREABLE, "--json").document
    merge = copy.succeed("merge", "--plan", plan["plan"], "--name", "x", "--json").document
    own = {"name", "new_snapshot", "pushed_to", "virtual", "was", "workers", "verdicts", "moved"}
    assert merge.keys() - plan.keys() == own
    assert plan["snapshot"] is None
    assert plan["manifest"] is None
    assert plan["expert_bytes_read"] == plan["base_bytes_read"] == plan["bytes_written"] == 0
    assert merge["plan"] == plan["plan"]
    saved = plan["memo_expert_bytes"]
    assert merge["expert_bytes_read"] == plan["planned_expert_bytes"] - saved


# Quiet


def test_quiet_prints_ids(copy: Program, models: Path) -> None:
    """-q prints ids and names only, one a line, and they can be used again."""
    for line in (
        ["add", str(models / "code"), "--name", "x"],
        ["plan", *SHAREABLE],
        ["merge", "--name", "y", *SHAREABLE],
        ["show", "tiny/merged"],
        ["tag", "v1", "tiny/base"],
    ):
        [identity] = copy.succeed(*line, "-q").lines
        assert ID.fullmatch(identity)
    ids = copy.succeed("log", "-q").lines
    assert all(ID.fullmatch(identity) for identity in ids)
    assert copy.succeed("show", ids[0][:12], "-q").lines == [ids[0]]
    assert set(copy.succeed("refs", "-q").lines) > {"tiny/base", "tiny/code", "v1"}
    assert copy.succeed("ls", "tiny/base", "-q").lines == ["config.json", "model.safetensors"]
    assert copy.succeed("diff", "tiny/base", "tiny/math", "-q").lines == [
        "model.safetensors",
        "layer",
    ]
    assert copy.succeed("fsck", "-q").out == ""


# What comes out


def test_checkout_and_cat_are_exact(family: Program, models: Path, tmp_path: Path) -> None:
    """What was added is what `checkout` writes and `cat` prints, byte for byte."""
    family.succeed("checkout", "tiny/code", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(models / "code")
    for path, content in contents(models / "code").items():
        assert family.succeed("cat", f"tiny/code:{path}").raw == content


def test_adding_again_changes_nothing(copy: Program, models: Path) -> None:
    """The same bytes again: nothing is stored, no snapshot is made, and the command says so."""
    again = copy.succeed("add", models / "base", "--name", "tiny/base", "--json").document
    assert not again["new_snapshot"]
    assert again["blocks_new"] == 0
    assert "nothing new" in copy.succeed("add", models / "base", "--name", "tiny/base").out


def test_plan_file(copy: Program, tmp_path: Path) -> None:
    """A plan in a file, in the same store, is the plan itself; its id and prefix name it too."""
    file = tmp_path / "plan.json"
    line = ("plan", *SHAREABLE, "--budget", "60%", "-o", file)
    plan = copy.succeed(*line, "--json").document
    assert plan["file"] == str(file)
    assert isinstance(json.loads(file.read_text()), dict)
    assert plan["planned_expert_bytes"] <= plan["budget_bytes"]
    manifests = set()
    for place, named in enumerate([file, plan["plan"], plan["plan"][:10]]):
        merge = copy.succeed("merge", "--plan", named, "--name", f"m{place}", "--json").document
        assert merge["plan"] == plan["plan"]
        assert merge["expert_bytes_read"] <= plan["budget_bytes"]
        manifests.add(merge["manifest"])
    assert len(manifests) == 1


def test_log_graph(family: Program) -> None:
    """The graph names the merge, its parents, and what they are to it."""
    lines = family.succeed("log", "--graph").lines
    assert "tiny/merged" in lines[0]
    text = "\n".join(lines)
    assert re.search(r"base +[0-9a-f]{12} tiny/base", text)
    assert re.search(r"expert +[0-9a-f]{12} tiny/math", text)
    assert len(family.succeed("log", "-n", "2", "-q").lines) == 2


def test_diff_names_what_moved(family: Program) -> None:
    """Only tensors that differ are listed, with how far they moved."""
    diff = family.succeed("diff", "tiny/base", "tiny/code", "--blocks", "--json").document
    assert [one["name"] for one in diff["tensors"]] == ["layer", "norm"]
    assert all(one["relative_l2"] > 0 for one in diff["tensors"])
    # REF:MODEL, of the model of the top directory.
    alone = family.succeed("diff", "tiny/base:", "tiny/code:", "--json").document
    assert [one["name"] for one in alone["tensors"]] == ["layer", "norm"]
    assert diff["tensors_equal"] == 1
    blocks = diff["tensors"][0]["changed_blocks"]
    assert blocks == list(range(diff["tensors"][0]["blocks_total"]))
    assert "0-6" in family.succeed("diff", "tiny/base", "tiny/code", "--blocks").out


def test_explain(family: Program) -> None:
    """A merge is explained expert by expert."""
    [layer] = family.succeed("explain", "tiny/merged", "layer", "--json").document["tensors"]
    assert [share["weight"] for share in layer["experts"]] == [1.0, 0.5]


@pytest.mark.parametrize("verb", ["explain", "blame", "recipe", "replay"])
def test_what_was_not_merged(verb: str, family: Program) -> None:
    """Asking what made a snapshot that was added is an error, alike for all who are asked, with the
    next command to type; under --json too.
    """
    done = family(verb, "tiny/base")
    assert (done.status, done.out) == (2, "")
    assert "was not made by a merge" in done.err
    assert f"mstore --store {family.store} show" in done.err
    told = family(verb, "tiny/base", "--json")
    assert told.status == 2
    assert told.document["error"]["code"] == "bad-request"


def test_refs_move_and_come_back(copy: Program) -> None:
    """reset moves a branch, the reflog knows where it was, and that can be put back."""
    before = copy.succeed("show", "tiny/merged", "-q").out
    copy.succeed("reset", "tiny/merged", "tiny/base")
    assert copy.succeed("show", "tiny/merged", "-q").out != before
    assert len(copy.succeed("reflog", "tiny/merged", "--json").document["entries"]) == 2
    copy.succeed("reset", "tiny/merged", "tiny/merged@{1}")
    assert copy.succeed("show", "tiny/merged", "-q").out == before
    copy.succeed("rm", "tiny/merged")
    assert copy("show", "tiny/merged").status == 1


def test_replay(family: Program) -> None:
    """A merge that is run again comes to the same content, exit 0."""
    assert "same content" in family.succeed("replay", "tiny/merged").out


def test_replay_of_other_content_fails(family: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other content is a result, printed, and exits with 1."""
    import mstore
    from mstore.api.reports import ReplayReport
    from mstore.terms.ids import ManifestId, PlanId, SnapshotId

    manifest = ManifestId(b"\1" * 32)
    report = ReplayReport(
        snapshot=SnapshotId(bytes(32)),
        plan=PlanId(bytes(32)),
        manifest=manifest,
        replayed=ManifestId(b"\2" * 32),
        same=False,
        first_difference="layer",
        remarks=("the method gated may have changed",),
        seconds=0.1,
    )
    monkeypatch.setattr(mstore.Store, "replay", lambda *_args, **_options: report)
    done = family("replay", "tiny/merged", "--json")
    assert done.status == 1
    assert done.document["replayed"] == "02" * 32
    said = family("replay", "tiny/merged")
    assert "DIFFERENT content, first at layer" in said.out
    assert said.err == "remark: the method gated may have changed\n"


def test_fsck_finds_a_flipped_bit(copy: Program) -> None:
    """A store with a flipped bit: fsck prints the problem and exits with 1."""
    pack = max(copy.store.rglob("*.pack"), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[len(content) // 3] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(content)
    done = copy("fsck", "--read-data", "--json")
    assert done.status == 1
    assert done.document["problems"]
    assert "found" in copy("fsck", "--read-data").out


# What goes wrong


BAD_LINES = {
    "unknown ref": ["show", "nobody"],
    "unknown file": ["cat", "tiny/base:nothing.txt"],
    "bad name": ["tag", "a..b//", "tiny/base"],
    "no checkpoint": ["add", "nowhere", "--name", "x"],
    "unknown base": ["add", "{models}/math", "--name", "x", "--base", "nobody"],
    "unknown method": ["plan", *MERGE, "--method", "magic"],
    "unknown parameter": ["plan", *SHAREABLE, "--param", "colour=red"],
    "parameter without value": ["plan", *SHAREABLE, "--param", "density"],
    "parameter of another type": ["plan", *SHAREABLE, "--param", "lambda=much"],
    "weight": ["plan", *SHAREABLE, "--expert", "tiny/math=heavy"],
    "unknown expert": ["merge", "--name", "x", *SHAREABLE, "--expert", "nobody"],
    "budget of nothing": ["plan", *SHAREABLE, "--budget", "0"],
    "share of nothing": ["plan", *SHAREABLE, "--budget", "0%"],
    "budget of nonsense": ["merge", "--name", "x", *SHAREABLE, "--budget", "lots"],
    "error below nothing": ["plan", *SHAREABLE, "--max-error", "-1"],
    "unknown dtype": ["plan", *SHAREABLE, "--dtype", "float99"],
    "unknown plan": ["merge", "--name", "x", "--plan", "00ff"],
    "no plan file": ["merge", "--name", "x", "--plan", "plan.json"],
    "not a plan": ["merge", "--name", "x", "--plan", "{models}/base/config.json"],
    "binary plan": ["merge", "--name", "x", "--plan", "{models}/base/model.safetensors"],
    "plan to nowhere": ["plan", *SHAREABLE, "-o", "{models}/nowhere/plan.json"],
    "unknown tensor": ["explain", "tiny/merged", "nothing"],
    "replay of what was added": ["replay", "tiny/base"],
    "checkout on top": ["checkout", "tiny/base", "{models}/base"],
    "second init": ["init"],
    "unmount of nothing": ["unmount", "{models}"],
    "reflog of nobody": ["reflog", "nobody"],
    "rm of nobody": ["rm", "nobody"],
}


WRONG_USAGE = {
    *("bad name", "unknown method", "unknown parameter", "parameter without value", "weight"),
    *("parameter of another type", "budget of nothing", "share of nothing", "budget of nonsense"),
    *("error below nothing", "unknown dtype", "not a plan", "binary plan"),
    "replay of what was added",
}
"""What is wrong in itself, and not only in this store: exit 2."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", BAD_LINES)
def test_bad_input(
    what: str, family: Program, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad input: exit 1 or 2, a readable error, no standard output, the store untouched."""
    monkeypatch.chdir(models)
    before = family.succeed("log", "-q").out, family.succeed("refs", "--json").out
    done = family(*(word.format(models=models) for word in BAD_LINES[what]))
    assert done.status == (2 if what in WRONG_USAGE else 1)
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    assert (family.succeed("log", "-q").out, family.succeed("refs", "--json").out) == before
    assert not any((family.store / "tmp").iterdir())
    assert not list(models.glob("**/.*plan*"))


def test_no_store(tmp_path: Path) -> None:
    """A store that is not there is an error that says how to make one, and is not made."""
    done = Program(tmp_path / "nothing")("log")
    assert done.status == 1
    assert f"{tmp_path / 'nothing'}: no store here: there is no such directory\n" in done.err
    assert re.search(r"hint: name another path, or .*: mstore .*init\n$", done.err)
    (tmp_path / "nothing").mkdir()
    assert "no store here\n" in Program(tmp_path / "nothing")("log").err
    (tmp_path / "nothing").rmdir()
    assert not os.listdir(tmp_path)


def test_bad_block_sizes(tmp_path: Path) -> None:
    """A block size that is no power of two, or outside the limits, makes no store."""
    for size in ("3MiB", "1KiB", "1GiB", "big"):
        done = Program(tmp_path / "store")("init", "--block-size", size)
        assert done.status == 2, size
        assert done.err.startswith("error: ")
        assert not (tmp_path / "store").exists()
    assert done.err.endswith("hint: a power of two, 64KiB to 16MiB, such as 1MiB\n")


def test_two_stores_named(tmp_path: Path) -> None:
    """`init DIR` with another --store is wrong usage."""
    assert Program(tmp_path / "a")("init", tmp_path / "b").status == 2
    assert not os.listdir(tmp_path)
