"""`export REF hf://ORG/NAME`: a snapshot goes to the Hub, from its view.

The Hub is `tests/hub.py`; huggingface_hub and hf-xet are the real ones.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cli_runs import Program
from hub import Hub, directory_files, environment
from huggingface_hub import constants, snapshot_download
from small_models import files_of, small_model
from test_hub import PIPELINE, SORTS, hub, shard, sharded, store

from mstore import MergeRequest, Store
from mstore.terms.errors import BadRequest, Conflict, NotFound, Unavailable

__all__ = ["hub", "store"]

KIB = 1 << 10


@pytest.fixture(autouse=True)
def may_write(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's token may write; contents go as LFS objects unless a test says otherwise."""
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def by_xet(hub: Hub, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let contents go by Xet, to a directory."""
    hub.xet = directory / "cas"
    hub.xet.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_XET_CACHE", str(directory / "xet"))


def by_lfs(hub: Hub, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each content go in one request."""


def in_parts(hub: Hub, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let contents go in parts."""
    hub.part_size = 30 * KIB


def merged(hub: Hub, store: Store, directory: Path) -> dict[str, bytes]:
    """Add a base and two experts from the Hub, merge them as `merged`; return its files."""
    for name, changed in (("base", ""), ("math", "x"), ("code", "y")):
        (directory / name).mkdir()
        card = b"base_model: org/base\n" if changed else b""
        files = files_of(small_model(directory / name, "one", changed=changed))
        files["README.md"] = b"---\nlicense: mit\n" + card + b"---\n# A model\n"
        hub.model(f"org/{name}", files)
        store.add(f"hf://org/{name}", name=name, detect_base=True)
    request = MergeRequest(base="base", experts=["math", "code"], method="linear")
    store.merge(store.plan(request), name="merged")
    store.checkout("merged", directory / "out")
    return files_of(directory / "out")


# -- round trips ---------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", [by_lfs, in_parts, by_xet])
@pytest.mark.parametrize("sort", [*SORTS, "merged"])
def test_round_trip(
    sort: str, way: object, hub: Hub, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back from the Hub are the snapshot's bytes, in one commit, but for the card."""
    assert callable(way)
    way(hub, tmp_path, monkeypatch)
    if sort == "merged":
        own = merged(hub, store, tmp_path)
    else:
        own = SORTS[sort]
        hub.model("org/own", own)
        store.add("hf://org/own", name="merged")
    report = store.export("merged", "hf://org/copy")
    copy = hub.models["org/copy"]
    there = copy.tip()
    if sort == "merged":
        # Models have the names that they have on the Hub.
        recipe = there["mergekit_config.yml"].decode()
        assert all(f'"org/{name}"  # ' in recipe for name in ("base", "math", "code"))
        assert "not named by its card" not in report.card
        own = {**own, "mergekit_config.yml": recipe.encode()}
    assert there == {**own, "README.md": report.card.encode()}
    assert (report.is_new, report.commit) == (True, copy.refs["main"])
    assert len(copy.commits) == 2
    assert not hub.leaked

    downloaded = snapshot_download("org/copy", local_dir=tmp_path / "back", endpoint=hub.url)
    shutil.rmtree(Path(downloaded) / ".cache")
    back = directory_files(Path(downloaded))
    del back[".gitattributes"]
    assert back == copy.tip()
    store.add("hf://org/copy", name="copy", exclude=[".gitattributes"])
    store.checkout("copy", tmp_path / "added")
    assert files_of(tmp_path / "added") == back


@pytest.mark.rest
def test_nothing_lies_on_the_disk(hub: Hub, store: Store, tmp_path: Path) -> None:
    """While contents go, no file of them is in the store or in a temporary directory."""
    hub.model("org/own", sharded(2))
    store.add("hf://org/own", name="x")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    seen: list[list[Path]] = []

    def look() -> None:
        new = {path for path in tmp_path.rglob("*") if path.is_file()} - before
        seen.append([path for path in new if path.exists() and path.stat().st_size > KIB])

    hub.before_commit = look
    hub.before_upload = lambda path: look()
    store.export("x", "hf://org/copy")
    assert len(seen) == 3
    assert not any(seen)


# -- what is there already -----------------------------------------------------------------------


def test_the_same_again_sends_nothing(hub: Hub, store: Store) -> None:
    """A second export of a snapshot makes no commit and uploads nothing."""
    hub.model("org/own", sharded(2))
    store.add("hf://org/own", name="x")
    first = store.export("x", "hf://org/copy")
    uploads, commits = len(hub.uploads), len(hub.models["org/copy"].commits)
    again = store.export("x", "hf://org/copy")
    assert (len(hub.uploads), len(hub.models["org/copy"].commits)) == (uploads, commits)
    assert (again.commit, again.bytes_to_send, again.is_new) == (first.commit, 0, False)
    assert {one.what for one in again.files} == {"there"}


@pytest.mark.rest
def test_a_fine_tune_sends_what_changed(hub: Hub, store: Store) -> None:
    """A next version uploads the changed shards only, and a file of another name that the Hub has
    is not sent again."""
    first, second, third = names = [f"{one}.safetensors" for one in "abc"]
    files = {name: shard(name) for name in names}
    hub.model("org/own", files)
    store.add("hf://org/own", name="x")
    store.export("x", "hf://org/copy")
    hub.uploads.clear()
    tuned = {first: shard("other"), second: files[second], "again.safetensors": files[third]}
    hub.model("org/tuned", tuned)
    store.add("hf://org/tuned", name="x")
    report = store.export("x", "hf://org/copy")
    assert [size for _, size in hub.uploads] == [len(tuned[first])]
    what = {one.path: one.what for one in report.files}
    assert (what[first], what[third]) == ("changed", "removed")
    assert (what[second], what["again.safetensors"]) == ("there", "added")
    assert hub.models["org/copy"].tip() == {**tuned, "README.md": report.card.encode()}


@pytest.mark.rest
def test_xet_sends_changed_chunks(
    hub: Hub, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Xet a shard of which a part changed costs the chunks around that part."""
    by_xet(hub, tmp_path, monkeypatch)
    data = bytearray(shard("big", 4_000_000))
    hub.model("org/own", {"model.safetensors": bytes(data), "config.json": b"{}"})
    store.add("hf://org/own", name="x")
    store.export("x", "hf://org/copy")
    before = hub.xet_bytes()
    assert before > 6_000_000
    data[4_000_000] ^= 1
    hub.models["org/own"].commit({"model.safetensors": bytes(data), "config.json": b"{}"})
    store.add("hf://org/own", name="x")
    report = store.export("x", "hf://org/copy")
    assert 0 < hub.xet_bytes() - before < 400_000
    assert 0 < report.bytes_sent < 500_000 < report.bytes_to_send
    assert hub.models["org/copy"].tip()["model.safetensors"] == bytes(data)


# -- where it goes -------------------------------------------------------------------------------


@pytest.fixture
def x(hub: Hub, store: Store) -> str:
    """A snapshot of a small model, by its name."""
    hub.model("org/own", sharded(1))
    store.add("hf://org/own", name="x")
    return "x"


def test_dry_run(x: str, hub: Hub, store: Store) -> None:
    """A dry run tells what would go and the card, and asks for nothing to be changed."""
    hub.model("org/there", {"README.md": b"old", "old.bin": b"old", ".gitattributes": b""})
    for address in ("hf://org/copy", "hf://org/there"):
        hub.requests.clear()
        report = store.export(x, address, dry_run=True)
        assert {method for method, _ in hub.requests} == {"GET"}
        assert (report.commit, report.url, report.bytes_sent) == (None, None, 0)
        assert "## Where this model is from" in report.card
    assert {one.path: one.what for one in report.files if one.what != "added"} == {
        "README.md": "changed",
        "old.bin": "removed",
    }
    assert hub.models.keys() == {"org/own", "org/there"}


def test_the_repository_gets_exactly_these_files(x: str, hub: Hub, store: Store) -> None:
    """Files that the snapshot lacks are removed, but the Hub's own."""
    there = hub.model("org/there", {"old.bin": b"old", "a/b.txt": b"x", ".gitattributes": b"own"})
    store.export(x, "hf://org/there", card=False)
    assert there.tip() == sharded(1)
    assert there.commits[there.refs["main"]][".gitattributes"] == b"own"


def test_no_card(x: str, hub: Hub, store: Store) -> None:
    """Without the card README.md goes as the snapshot has it; the Hub's stays if it has none."""
    store.export(x, "hf://org/copy", card=False)
    assert hub.models["org/copy"].tip()["README.md"] == sharded(1)["README.md"]
    files = {path: data for path, data in sharded(1).items() if path != "README.md"}
    hub.models["org/own"].commit(files)
    store.add("hf://org/own", name="x")
    store.export(x, "hf://org/copy", card=False)
    assert hub.models["org/copy"].tip()["README.md"] == sharded(1)["README.md"]


@pytest.mark.rest
def test_a_directory(x: str, hub: Hub, store: Store) -> None:
    """hf://ORG/NAME/DIRECTORY gets the files in the directory, and all else stays."""
    there = hub.model("org/there", {"top.txt": b"top", "small/old.txt": b"old"})
    store.export(x, "hf://org/there/small", card=False)
    below = {f"small/{path}": data for path, data in sharded(1).items()}
    assert there.tip() == {"top.txt": b"top", **below}


def test_branches(x: str, hub: Hub, store: Store) -> None:
    """A branch that is missing begins at the main one, which stays as it is."""
    there = hub.model("org/there", {"old.txt": b"old"})
    main = there.refs["main"]
    assert store.export(x, "hf://org/there", branch="v2", dry_run=True).is_new
    assert store.export(x, "hf://org/there", branch="v2").is_new
    assert there.refs["main"] == main
    assert there.parents[there.refs["v2"]] == main
    assert "model-00001-of-00001.safetensors" in there.tip("v2")
    again = store.export(x, "hf://org/there@v2")
    assert (again.bytes_to_send, again.is_new) == (0, False)
    with pytest.raises(BadRequest):
        store.export(x, "hf://org/there@v2", branch="v3")
    with pytest.raises(BadRequest):
        store.export(x, f"hf://org/there@{main}")


@pytest.mark.rest
def test_a_pull_request(x: str, hub: Hub, store: Store) -> None:
    """--pr leaves the branch as it is, and the report tells the page of the pull request."""
    there = hub.model("org/there", {"old.txt": b"old"})
    main = there.refs["main"]
    report = store.export(x, "hf://org/there", pull_request=True)
    assert there.refs["main"] == main
    assert report.commit == there.refs["refs/pr/1"]
    assert report.url == f"{hub.url}/org/there/discussions/1"
    assert "old.txt" not in there.tip("refs/pr/1")


@pytest.mark.rest
def test_private(x: str, hub: Hub, store: Store) -> None:
    """A new model is private if that is asked for; a public one refuses what is to be private."""
    store.export(x, "hf://org/copy", private=True)
    assert hub.models["org/copy"].private
    store.export(x, "hf://org/copy", private=True)
    hub.model("org/there", {"old.txt": b"old"})
    with pytest.raises(Conflict, match="public"):
        store.export(x, "hf://org/there", private=True)


def test_a_virtual_merge(hub: Hub, store: Store, tmp_path: Path) -> None:
    """A merge that is computed on read goes with the bytes that it has when it is computed."""
    own = merged(hub, store, tmp_path)
    request = MergeRequest(base="base", experts=["math", "code"], method="linear")
    store.merge(store.plan(request), name="virtual", virtual=True)
    store.export("virtual", "hf://org/copy", card=False)
    assert hub.models["org/copy"].tip() == own


@pytest.mark.rest
def test_one_model_of_a_pipeline(hub: Hub, store: Store) -> None:
    """REF:MODEL goes with the paths of the model's directory."""
    hub.model("org/pipeline", PIPELINE)
    store.add("hf://org/pipeline", name="p")
    store.export("p:vae", "hf://org/vae", card=False)
    wanted = {path.removeprefix("vae/") for path in PIPELINE if path.startswith("vae/")}
    assert hub.models["org/vae"].tip().keys() == wanted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("address", ["org/copy", "s3://bucket/x", "hf://datasets/org/x", "hf://x"])
def test_other_addresses(address: str, x: str, store: Store) -> None:
    """What is no address of a model on the Hub is refused; a directory is a checkout's."""
    with pytest.raises(BadRequest) as refused:
        store.export(x, address)
    told = f"for a directory: store.checkout(REF, '{address}')"
    assert (told in str(refused.value.hint)) == ("://" not in address)


# -- what can go wrong ---------------------------------------------------------------------------


@pytest.mark.rest
def test_another_commit_between(x: str, hub: Hub, store: Store) -> None:
    """If somebody commits meanwhile, the export changes nothing and says how to go on."""
    there = hub.model("org/there", {"old.txt": b"old"})
    hub.before_commit = lambda: (there.commit({"theirs.txt": b"new"}), None)[1]
    with pytest.raises(Conflict, match="another commit") as failed:
        store.export(x, "hf://org/there")
    assert there.tip() == {"theirs.txt": b"new"}
    assert "export" in str(failed.value.hint)
    hub.before_commit = lambda: None
    uploads = len(hub.uploads)
    store.export(x, "hf://org/there", card=False)
    assert there.tip() == sharded(1)
    assert len(hub.uploads) == uploads


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pull_request", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_an_answer_is_lost(
    *, always: bool, pull_request: bool, x: str, hub: Hub, store: Store
) -> None:
    """A commit that was made, and answered by 504, is found and not made again."""
    there = hub.model("org/there", {"old.txt": b"old"})
    lost = iter([504] * (9 if always else 1))
    hub.after_commit = lambda: next(lost, None)
    report = store.export(x, "hf://org/there", pull_request=pull_request)
    assert len(there.commits) == 2
    assert report.commit == there.refs["refs/pr/1" if pull_request else "main"]
    if pull_request:
        assert report.url == f"{hub.url}/org/there/discussions/1"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("path", ["/commit/", "/preupload/", "/objects/batch", "/repos/create"])
@pytest.mark.parametrize("status", [429, 503, 504])
def test_a_busy_hub(
    path: str, status: int, x: str, hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that the Hub has no time for are sent again."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.fail(path, status, 2, Retry_After="1")
    store.export(x, "hf://org/copy", card=False)
    assert hub.models["org/copy"].tip() == sharded(1)
    assert len(hub.models["org/copy"].commits) == 2


@pytest.mark.rest
def test_an_upload_that_is_refused(x: str, hub: Hub, store: Store) -> None:
    """If storage refuses a content, its address may be too old: the next run asks for a new one."""
    hub.fail("/lfs-upload/", 403)
    with pytest.raises(Unavailable, match="any more") as failed:
        store.export(x, "hf://org/copy", card=False)
    assert "again" in str(failed.value.hint)
    assert hub.models["org/copy"].tip() == {}
    store.export(x, "hf://org/copy", card=False)
    assert hub.models["org/copy"].tip() == sharded(1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [by_lfs, by_xet])
def test_what_ends_one_upload_ends_all(
    way: object, hub: Hub, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first failure, or Ctrl-C, no further file is begun, and there is no commit."""
    assert callable(way)
    way(hub, tmp_path, monkeypatch)
    hub.model("org/own", {f"{n}.safetensors": shard(str(n)) for n in range(20)})
    store.add("hf://org/own", name="x")
    seen: list[int] = []

    def stop(progress: object) -> None:
        seen.append(1)
        raise RuntimeError("stop")

    with pytest.raises((RuntimeError, Unavailable), match="stop"):
        store.export("x", "hf://org/copy", progress=stop)
    assert len(seen) <= 4
    assert hub.models["org/copy"].tip() == {}


def test_a_token_that_may_only_read(
    x: str, hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says that the token may not write, and where to get one that may."""
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    hub.model("org/there", {"old.txt": b"old"})
    for address in ("hf://org/copy", "hf://org/there"):
        with pytest.raises(Unavailable, match="may not write") as failed:
            store.export(x, address)
        assert "/settings/tokens" in str(failed.value.hint)
    assert hub.models["org/there"].tip() == {"old.txt": b"old"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("token", "what"), [("hf_old", "expired"), (None, "no token")])
def test_a_token_that_is_no_good(
    token: str | None,
    what: str,
    x: str,
    hub: Hub,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error says whether a token is missing or refused, and how to log in."""
    hub.model("org/there", {"old.txt": b"old"})
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(Unavailable, match=what) as failed:
        store.export(x, "hf://org/there")
    assert "hf auth login" in str(failed.value.hint)


def start(store: Store, hub: Hub, tmp_path: Path, **more: str) -> subprocess.Popen[bytes]:
    """Export in a process of its own."""
    own = {**environment(hub.url, tmp_path / "hf"), "HF_TOKEN": "hf_good", **more}
    words = [sys.executable, "-m", "mstore_cli", "--store", str(store.path)]
    return subprocess.Popen(
        [*words, "export", "x", "hf://org/copy"],
        env=own,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.rest
def test_a_killed_export_goes_on(hub: Hub, store: Store, tmp_path: Path) -> None:
    """After a kill the model has its first commit only; the next run uploads what is missing."""
    files = sharded(8)
    hub.model("org/own", files)
    store.add("hf://org/own", name="x")
    full, is_dead = threading.Event(), threading.Event()

    def hang(oid: str) -> None:
        if len(hub.uploads) >= 3:
            full.set()
            is_dead.wait()
            raise ConnectionError("the client is dead")

    hub.before_upload = hang
    process = start(store, hub, tmp_path, HF_HUB_DISABLE_XET="1")
    assert full.wait(120)
    process.kill()
    process.wait()
    is_dead.set()
    copy = hub.models["org/copy"]
    assert copy.tip() == {}
    there = len(hub.objects)
    assert there == 3
    hub.before_upload = lambda oid: None
    hub.uploads.clear()
    report = store.export("x", "hf://org/copy")
    # On a busy machine one may be sent twice.
    assert len({path for path, _ in hub.uploads}) == 8 - there
    assert copy.tip() == {**files, "README.md": report.card.encode()}


@pytest.mark.rest
def test_a_killed_export_by_xet_goes_on(
    hub: Hub, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill nothing is to be seen, and the next run completes the model."""
    files = {f"{n}.safetensors": shard(str(n), 2_000_000) for n in range(6)}
    hub.model("org/own", files)
    store.add("hf://org/own", name="x")
    by_xet(hub, tmp_path, monkeypatch)
    process = start(store, hub, tmp_path)
    while hub.xet_bytes() < 4_000_000 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    copy = hub.models["org/copy"]
    assert copy.tip() == {}
    report = store.export("x", "hf://org/copy")
    assert copy.tip() == {**files, "README.md": report.card.encode()}


def test_a_missing_branch_of_a_pull_request(x: str, hub: Hub, store: Store) -> None:
    """A pull request to a branch, or a commit to a pull request, needs one that is there."""
    hub.model("org/there", {"old.txt": b"old"})
    with pytest.raises(NotFound):
        store.export(x, "hf://org/there@refs/pr/9")
    with pytest.raises(NotFound):
        store.export(x, "hf://org/there", branch="v2", pull_request=True)


# -- the command ---------------------------------------------------------------------------------


def test_the_command(x: str, store: Store, hub: Hub) -> None:
    """`export` prints what became of each file and the page; a dry run prints the card."""
    mstore = Program(store.path)
    dry = mstore.succeed("export", x, "hf://org/copy", "--dry-run")
    assert "would be exported" in dry.out
    assert "README.md:" in dry.lines
    assert "hf://" not in dry.err
    done = mstore.succeed("export", x, "hf://org/copy", "-m", "First version")
    commit = hub.models["org/copy"].refs["main"]
    assert f"{hub.url}/org/copy/commit/{commit}" in done.out
    assert hub.models["org/copy"].messages[commit][0] == "First version"
    assert "already" in mstore.succeed("export", x, "hf://org/copy").out
    quiet = mstore.succeed("export", x, "hf://org/copy", "--quiet")
    assert quiet.lines == [commit]


def test_the_json(x: str, store: Store, hub: Hub) -> None:
    """With --json it prints the keys of docs/cli.md."""
    from mstore_cli.keys import DOCUMENTS

    done = Program(store.path).succeed("export", x, "hf://org/copy", "--json")
    assert list(done.document) == [key.name for key in DOCUMENTS["export"]]
    assert done.document["commit"] == hub.models["org/copy"].refs["main"]


def test_hints_are_commands(x: str, store: Store, hub: Hub) -> None:
    """A conflict names the command that shows what would change, as one types it."""
    there = hub.model("org/there", {"old.txt": b"old"})
    hub.before_commit = lambda: (there.commit({"theirs.txt": b"new"}), None)[1]
    done = Program(store.path)("export", x, "hf://org/there")
    assert done.status == 1
    assert "export REF hf://org/there --dry-run" in done.err
