"""What is no part of a model: patterns as git reads them, defaults that take no model apart."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import BLOCK, files_of, small_model

from mstore.api import Store
from mstore.checkpoint.directory import scan
from mstore.checkpoint.exclusion import (
    DEFAULT_PATTERNS,
    MAX_PATTERNS,
    Exclusion,
    Pattern,
    is_needed,
)
from mstore.terms.errors import BadCheckpoint, BadRequest
from mstore_cli.spelling import Typed

PATHS = (
    "a", "b", "a.json", "b.pt", "logs/a", "logs/b.pt", "logs/x/a", "x/logs/a", "x/y/a", "x/y/b.pt",
    "x/a.json", "[a]", "!a", "#a", "a b", "x/a/b/a", "aa", "ab",
)  # fmt: skip
LINES = (
    "a", "/a", "*.pt", "logs/", "/logs/", "logs/*", "x/y", "x/*/a", "**/a", "x/**", "x/**/a", "?",
    "[ab]", "[!a]", "[^a]", "\\[a\\]", "\\!a", "\\#a", "# a", "", "!a", "!logs/a", "!*.pt", "a ",
    "a\\ b", "**", "*", "/**/a", "a/", "x/a/", "**/y/**", "[a-b].json", "!x/", "logs/**/a",
)  # fmt: skip


def left(lines: list[str], root: Path) -> set[str]:
    """The paths that a walk with these lines leaves."""
    exclusion = Exclusion.chosen([line for line in lines if line], defaults=False)
    found = set()
    for path in PATHS:
        parts = path.split("/")
        above = ["/".join(parts[:at]) for at in range(1, len(parts))]
        if not any(exclusion.deciding(one, is_directory=True) for one in above) and not (
            exclusion.deciding(path, is_directory=False)
        ):
            found.add(path)
    return found


@pytest.fixture(scope="module")
def checked_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository that has the files of PATHS."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    root = tmp_path_factory.mktemp("git")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for path in PATHS:
        # Some are a file here and a directory there: those that come later stand aside.
        target = root / path
        if not any(one.is_file() for one in target.parents) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("")
    return root


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(st.sampled_from(LINES), min_size=1, max_size=4))
def test_patterns_are_gits(lines: list[str], checked_out: Path) -> None:
    """Whatever lines are written, in whatever order: what stays is what git would not ignore."""
    (checked_out / ".git" / "info" / "exclude").write_text("\n".join(lines) + "\n")
    there = [path for path in PATHS if (checked_out / path).is_file()]
    told = subprocess.run(
        ["git", "-C", str(checked_out), "ls-files", "-z", "--others", "--exclude-standard"],
        check=True,
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": str(checked_out), "GIT_CONFIG_NOSYSTEM": "1"},
    ).stdout.decode()
    assert left(lines, checked_out) & set(there) == set(told.split("\0")) - {""}


@pytest.mark.parametrize("line", ["/", "a//b", "!", "!/", "/".join("a" * 100)])
def test_no_pattern(line: str) -> None:
    """A line that can fit nothing is an error that shows how patterns look."""
    with pytest.raises(BadRequest, match="no pattern") as caught:
        Exclusion.chosen([line])
    assert caught.value.hint == "exclude=['logs/', '*.tmp']"
    assert caught.value.where == "exclude"


def test_patterns_take_no_time() -> None:
    """A pattern made to be slow is not: a downloaded `.mstoreignore` cannot hold up an add."""
    slow = ["*a" * 120 + "b", "/".join(["**", "a"] * 32)]
    exclusion = Exclusion.chosen(slow, defaults=False)
    began = time.process_time()
    for _ in range(20):
        assert exclusion.deciding("a" * 250, is_directory=False) is None
        assert exclusion.deciding("/".join(["a"] * 30), is_directory=False) is None
    assert time.process_time() - began < 20
    with pytest.raises(BadRequest, match="more than"):
        Exclusion.chosen(["a"] * (MAX_PATTERNS + 1))


# -- the defaults ------------------------------------------------------------------------------

TRAINING = (
    "optimizer.pt", "optimizer.bin", "optimizer_1.bin", "scheduler.pt", "scheduler.bin",
    "scaler.pt", "rng_state.pth", "rng_state_0.pth", "random_states_0.pkl",
    "optimizer_0/__0_0.distcp", "global_step100/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ".git/HEAD", ".git/objects/ab/cd", ".cache/huggingface/download/config.json.metadata",
    ".mstoreignore", "sub/optimizer.pt", "training_args.bin",
)  # fmt: skip
MODEL = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.txt",
    "merges.txt", "README.md", ".gitattributes", "trainer_state.json",
    "pytorch_model.bin", "voices/af.pt", "consolidated.00.pth", "vae/config.json", "LICENSE",
    "optimizer.md", "scheduler/scheduler_config.json", "modeling_x.py", ".cache/other",
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint with all that a trainer and a download leave in it."""
    root = small_model(tmp_path / "model", "x")
    for path in (*TRAINING, *MODEL):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if path not in ("config.json", ".mstoreignore"):
            (root / path).write_bytes(path.encode())
    (root / ".mstoreignore").write_text("# nothing\n")
    return root


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        yield store


def stored(store: Store, name: str) -> set[str]:
    return set(store.view(store[name].id).files)


def test_what_training_and_downloads_leave_is_left_out(store: Store, model: Path) -> None:
    """By default an add stores the model and says what else lay there: names, files, bytes."""
    report = store.add(model, name="x", threads=1)
    assert stored(store, "x") == {"model.safetensors", *MODEL}
    lost = {path for path in TRAINING if not path.startswith((".git/", "optimizer_0/"))}
    lost -= {path for path in TRAINING if "/" in path and path != "sub/optimizer.pt"}
    assert set(report.excluded) == lost | {
        ".git/", ".cache/huggingface/", "optimizer_0/", "global_step100/",
    }  # fmt: skip
    assert report.excluded_files == len(TRAINING)
    assert report.excluded_bytes == sum((model / path).stat().st_size for path in TRAINING)
    whole = store.add(model, name="all", default_excludes=False, threads=1)
    assert stored(store, "all") == {"model.safetensors", *MODEL, *TRAINING}
    assert (whole.excluded, whole.excluded_files, whole.excluded_bytes) == ((), 0, 0)


def test_what_is_left_out_is_not_looked_at(store: Store, model: Path) -> None:
    """Links, fifos, odd names and stores are no errors where they are left out."""
    os.mkfifo(model / ".git" / "fifo")
    (model / ".git" / "out").symlink_to("/etc/passwd")
    (model / ".git" / "bad\nname").write_text("")
    (model / "optimizer.pt").unlink()
    (model / "optimizer.pt").symlink_to("/nowhere")
    (model / os.fsdecode(b"rng_state_\xff.pth")).write_text("")
    report = store.add(model, name="x", threads=1)
    assert "rng_state_\\udcff.pth" in report.excluded
    assert stored(store, "x") == {"model.safetensors", *MODEL}


def test_no_default_takes_what_a_model_needs() -> None:
    """No default pattern fits a file that a model is loaded from, in any of its directories."""
    patterns = [Pattern.parsed(line, "default") for line in DEFAULT_PATTERNS]
    needed = [path for path in MODEL if is_needed(path)]
    assert len(needed) > 5
    for path in (
        *needed,
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "adapter_config.json",
    ):
        for prefix in ("", "text_encoder/", "a/b/"):
            parts = (prefix + path).split("/")
            assert not any(p and p.fits(parts, is_directory=False) for p in patterns)


def test_a_default_takes_no_directory_with_weights(store: Store, tmp_path: Path) -> None:
    """Some trainers put whole models into global_step100/: where weights lie, it stays."""
    root = tmp_path / "run"
    small_model(root / "global_step100" / "actor", "x")
    (root / "global_step100" / "actor" / "optimizer.pt").write_text("state")
    report = store.add(root, name="x", threads=1)
    assert "global_step100/actor/model.safetensors" in stored(store, "x")
    assert report.excluded == ("global_step100/actor/optimizer.pt",)


# -- by the user -------------------------------------------------------------------------------


def test_exclude_and_the_file(store: Store, model: Path) -> None:
    """.mstoreignore comes after the defaults and --exclude after both; the last one decides."""
    (model / ".mstoreignore").write_text("\ufeff# mine\n/voices/\n!optimizer.pt\n*.bin\r\n")
    report = store.add(
        model, name="x", exclude=["*.md", "!README.md", "!training_args.bin", "nosuch"], threads=1
    )
    found = stored(store, "x")
    assert {"optimizer.pt", "sub/optimizer.pt", "README.md", "training_args.bin"} <= found
    assert not {"voices/af.pt", "pytorch_model.bin", "optimizer.md", ".mstoreignore"} & found
    assert "voices/" in report.excluded
    assert [str(remark) for remark in report.remarks] == ["exclude=['nosuch'] left nothing out"]


def test_the_files_patterns_hold_without_defaults(store: Store, model: Path) -> None:
    """--no-default-excludes drops the defaults only; .mstoreignore is then a file like others."""
    (model / ".mstoreignore").write_text("voices\n")
    store.add(model, name="x", default_excludes=False, threads=1)
    found = stored(store, "x")
    assert "voices/af.pt" not in found
    assert {".mstoreignore", "optimizer.pt", ".git/HEAD"} <= found


@pytest.mark.parametrize(
    ("text", "what"),
    [(b"\xff", "not valid UTF-8"), (b"a\n" * 40_000, "longer than"), (b"a\n" * 2000, "more than")],
)
def test_a_bad_file_is_named(store: Store, model: Path, text: bytes, what: str) -> None:
    """An .mstoreignore that cannot be read as one stops the add and is named."""
    (model / ".mstoreignore").write_bytes(text)
    with pytest.raises(BadCheckpoint, match=what) as caught:
        store.add(model, name="x", threads=1)
    assert str(caught.value.where).endswith(".mstoreignore")
    assert not store.refs()


def test_a_file_that_leads_out_is_refused(store: Store, model: Path, tmp_path: Path) -> None:
    """.mstoreignore is read by the rules of all files: no link out of the checkpoint, no fifo."""
    (tmp_path / "outside").write_text("*\n")
    (model / ".mstoreignore").unlink()
    (model / ".mstoreignore").symlink_to(tmp_path / "outside")
    with pytest.raises(BadCheckpoint, match="symlink out of the checkpoint"):
        store.add(model, name="x", threads=1)
    (model / ".mstoreignore").unlink()
    os.mkfifo(model / ".mstoreignore")
    with pytest.raises(BadCheckpoint, match="not a regular file"):
        store.add(model, name="x", threads=1)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("*.safetensors", "without --exclude '*.safetensors'"), ("*", "without --exclude '*'")],
)
def test_all_weights_left_out(store: Store, model: Path, pattern: str, hint: str) -> None:
    """A checkpoint of which no weights are left is refused, and the error says by which pattern."""
    with pytest.raises(BadCheckpoint, match="all its weights are left out") as caught:
        store.add(model, name="x", exclude=[pattern], threads=1)
    assert hint in str(caught.value.told(Typed()).hint)
    (model / ".mstoreignore").write_text(pattern)
    with pytest.raises(BadCheckpoint, match=r"of \.mstoreignore") as caught:
        store.add(model, name="x", threads=1)
    assert "change " in str(caught.value.hint)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer.model", "vocab.txt"])
def test_what_weights_need_stays(store: Store, model: Path, name: str) -> None:
    """A pattern that would leave weights without their config or tokenizer is refused; the hint
    keeps the file."""
    with pytest.raises(BadCheckpoint, match="cannot be loaded without") as caught:
        store.add(model, name="x", exclude=[f"{name[:4]}*"], threads=1)
    fix = str(caught.value.told(Typed()).hint).rpartition("--exclude ")[2].strip("'")
    assert fix.startswith("!/")
    others = [f"!{one}" for one in MODEL if is_needed(one)]
    store.add(model, name="x", exclude=[f"{name[:4]}*", fix, *others], threads=1)
    assert fix.removeprefix("!/") in stored(store, "x")


def test_a_copy_of_the_weights_may_go(store: Store, model: Path) -> None:
    """What is not needed to load the rest may be left out, weights too; a shard may not."""
    shutil.copytree(small_model(model / "original", "y"), model / "onnx")
    store.add(model, name="x", exclude=["original", "onnx/"], threads=1)
    assert not any(path.startswith(("original", "onnx")) for path in stored(store, "x"))
    (model / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors"}}'
    )
    with pytest.raises(BadCheckpoint, match="missing shard") as caught:
        store.add(model, name="y", exclude=["/model.safetensors"], threads=1)
    assert "left out by '/model.safetensors'" in str(caught.value.hint)


def test_a_single_file_is_meant(store: Store, model: Path) -> None:
    """Of a path to one file nothing is left out."""
    report = store.add(model / "model.safetensors", name="x", threads=1)
    assert report.excluded == ()
    assert scan(model / "model.safetensors", exclusion=Exclusion.chosen(["*"])).files


def test_repair_takes_a_checkpoint_either_way(store: Store, model: Path) -> None:
    """What was added heals from the directory that it came from, training state or not."""
    store.add(model, name="x", threads=1)
    before = files_of(model)
    for path in (store.path / "packs").glob("*/*.pack"):
        path.unlink()
    report = store.repair(sources=[model], read_data=True, threads=1)
    assert {line.split()[0] for line in report.healed} >= {"manifest", "tensor", "block"}
    assert files_of(model) == before
