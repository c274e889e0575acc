"""Models that are one file: their digests, the lineage in their headers, and their names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import Program
from safetensors.numpy import load_file, save_file
from small_models import BLOCK

from mstore import MergeRequest, Store
from mstore.models.header_lineage import MODELS, RECIPE
from mstore.terms.errors import BadName, BadRequest, Conflict, Incompatible, NotFound

NAMES = ("base", "a", "b")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models in one folder, with previews beside them."""
    found = tmp_path_factory.mktemp("models")
    draw = np.random.default_rng(3)
    base = {
        "model.diffusion_model.input_blocks.1.1.proj_in.weight": draw.normal(size=(64, 64)),
        "first_stage_model.encoder.conv_in.weight": draw.normal(size=(16, 3, 3, 3)),
    }
    for number, name in enumerate(NAMES):
        tensors = {
            key: (value + number * 0.01 * draw.normal(size=value.shape)).astype("f2")
            for key, value in base.items()
        }
        metadata = {"format": "pt", "modelspec.title": f"The {name}", "modelspec.date": "2024"}
        save_file(tensors, found / f"{name}.safetensors", metadata if name != "b" else None)
        (found / f"{name}.preview.png").write_bytes(b"\x89PNG")
    return found


@pytest.fixture
def store(disk: Path, tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", block_size=BLOCK) as made:
        for name in NAMES:
            made.add(disk / f"{name}.safetensors", name=name)
        yield made


def metadata_in(path: Path) -> dict[str, str]:
    """What the header of a file says of it."""
    raw = path.read_bytes()
    found: dict[str, str] = json.loads(raw[8 : _start(raw)])["__metadata__"]
    return found


def _start(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def request(**experts: float) -> MergeRequest:
    """A merge of these experts into the base."""
    return MergeRequest(
        base="base",
        experts=tuple(experts.items()),
        method="task_arithmetic",
    )


# -- digests -------------------------------------------------------------------------------------


def test_an_added_file_is_found_by_its_digest(store: Store, disk: Path) -> None:
    """`find` takes a SHA-256, its first ten digits in any case, and the file itself."""
    digest = digest_of(disk / "a.safetensors")
    for asked in (digest, digest[:10], digest[:10].upper(), f"0x{digest}"):
        [one] = store.find(asked)
        assert (one.refs, one.path, one.sha256) == (("a",), "a.safetensors", digest)
        assert one.autov2 == digest[:10]
    [one] = store.find(disk / "a.safetensors")
    assert one.refs == ("a",)
    assert store.digests("a") == (one,)


def test_a_digest_is_noted_once(store: Store, disk: Path, tmp_path: Path) -> None:
    """An add of the same bytes under the same name writes no second note."""
    store.add(disk / "a.safetensors", name="a")
    assert len(store.notes_of("a", every=True)) == 1
    store.add(disk / "a.safetensors", name="again")
    assert {one.refs for one in store.find(digest_of(disk / "a.safetensors"))} == {
        ("a",),
        ("again",),
    }


def test_models_of_a_directory_have_no_digests(disk: Path, tmp_path: Path) -> None:
    """The files of a model that is a directory are not digested: nobody names them so."""
    (tmp_path / "llm").mkdir()
    tensors = load_file(disk / "a.safetensors")
    save_file(tensors, tmp_path / "llm" / "model.safetensors")
    with Store.init(tmp_path / "store") as store:
        store.add(tmp_path / "llm", name="llm")
        assert store.notes_of("llm") == ()
        assert store.digests("llm") == ()


def test_a_folder_of_models_has_the_digest_of_each(disk: Path, tmp_path: Path) -> None:
    """Several single files in one snapshot are found one by one."""
    with Store.init(tmp_path / "store") as store:
        store.add(disk, name="all")
        for name in NAMES:
            [one] = store.find(digest_of(disk / f"{name}.safetensors"))
            assert one.path == f"{name}.safetensors"


@pytest.mark.parametrize("virtual", [False, True])
def test_the_digest_of_a_merge_is_computed_when_asked(
    store: Store, tmp_path: Path, virtual: bool
) -> None:
    """A merge has no digest until somebody asks; then it is that of the file, and noted."""
    store.merge(store.plan(request(a=0.5)), name="mix", virtual=virtual)
    assert store.notes_of("mix") == ()
    [told] = store.digests("mix")
    assert store.checkout("mix", tmp_path / "mix.safetensors").files == 1
    assert told.sha256 == digest_of(tmp_path / "mix.safetensors")
    assert store.find(told.autov2) == (told,)
    assert len(store.notes_of("mix")) == 1


def test_a_removed_digest_is_not_found(store: Store) -> None:
    """Who removes the note of a digest removes what `find` knows."""
    [told] = store.digests("a")
    [note] = store.notes_of("a")
    store.remove_notes("a", [note.note])
    assert store.find(told.sha256) == ()


def test_what_is_no_digest_is_refused(store: Store, tmp_path: Path) -> None:
    """Seven digits, other letters and a missing file are named errors."""
    for asked in ("0123456", "not hexadecimal", "g" * 64, "0" * 65):
        with pytest.raises(BadName):
            store.find(asked)
    with pytest.raises(NotFound):
        store.find(tmp_path / "missing.safetensors")
    assert store.find("0" * 64) == ()


# -- names -----------------------------------------------------------------------------------------


def test_files_are_added_by_their_own_names(disk: Path, tmp_path: Path) -> None:
    """`add *.safetensors` makes one branch for each; characters that refs lack become hyphens."""
    Store.init(tmp_path / "store").close()
    mstore = Program(tmp_path / "store")
    other = tmp_path / "My model v1.safetensors"
    other.write_bytes((disk / "a.safetensors").read_bytes())
    mstore.succeed("add", *(disk / f"{name}.safetensors" for name in NAMES), other)
    with Store.open(tmp_path / "store") as store:
        assert sorted(one.name for one in store.refs()) == ["My-model-v1", "a", "b", "base"]
    assert "no --name" in mstore("add", disk).err


def test_find_and_show_on_the_command_line(store: Store, disk: Path, tmp_path: Path) -> None:
    """`find` prints where the file is, `show` its digest; an unknown one is an error."""
    mstore = Program(tmp_path / "store")
    digest = digest_of(disk / "a.safetensors")
    assert mstore.succeed("find", digest[:10], "--json").document["found"][0]["refs"] == ["a"]
    assert f"{digest} (AutoV2 {digest[:10]}) a.safetensors" in mstore.succeed("show", "a").out
    assert mstore.succeed("find", f"0x{digest}", "-q").lines
    assert mstore.succeed("find", disk / "a.safetensors", "-q").lines
    missing = mstore("find", "0123456789")
    assert missing.status == 1
    assert "--digest" in missing.err
    store.merge(store.plan(request(a=0.5)), name="mix")
    assert "AutoV2" in mstore.succeed("show", "mix", "--digest").out


def test_prefixes_go_before_names_without_spaces(disk: Path, tmp_path: Path) -> None:
    """With a prefix, too, what a ref cannot have becomes a hyphen."""
    Store.init(tmp_path / "store").close()
    other = tmp_path / "My model v1.safetensors"
    other.write_bytes((disk / "a.safetensors").read_bytes())
    Program(tmp_path / "store").succeed("add", other, "--name-prefix", "sdxl/")
    with Store.open(tmp_path / "store") as store:
        assert [one.name for one in store.refs()] == ["sdxl/My-model-v1"]


# -- headers ---------------------------------------------------------------------------------------


def test_a_merge_says_in_its_header_what_it_was_made_of(store: Store, tmp_path: Path) -> None:
    """The recipe and the parents stand where A1111 writes them."""
    store.merge(store.plan(request(a=0.3, b=0.5)), name="mix")
    store.checkout("mix", tmp_path / "mix.safetensors")
    told = metadata_in(tmp_path / "mix.safetensors")
    recipe, models = json.loads(told[RECIPE]), json.loads(told[MODELS])
    contents = {name: str(store.show(name).manifest) for name in NAMES}
    assert recipe["type"] == "mstore"
    assert recipe["method"] == "task_arithmetic"
    assert recipe["base"] == contents["base"]
    assert recipe["experts"] == [
        {"model": contents["a"], "weight": 0.3},
        {"model": contents["b"], "weight": 0.5},
    ]
    named = {contents["base"]: "The base", contents["a"]: "The a", contents["b"]: "b"}
    assert {id: one["name"] for id, one in models.items()} == named
    assert told["modelspec.merged_from"] == "The base, The a, b"
    assert told["format"] == "pt"
    assert "modelspec.title" not in told


def test_a_merge_of_merges_tells_all_ancestors(store: Store, tmp_path: Path) -> None:
    """The recipe of a parent and its own parents are passed on."""
    store.merge(store.plan(request(a=0.3)), name="first")
    store.merge(store.plan(request(b=0.3, first=0.5)), name="second")
    store.checkout("second", tmp_path / "second.safetensors")
    models = json.loads(metadata_in(tmp_path / "second.safetensors")[MODELS])
    contents = {name: str(store.show(name).manifest) for name in (*NAMES, "first")}
    assert set(models) == set(contents.values())
    assert models[contents["first"]][RECIPE]["experts"][0]["model"] == contents["a"]
    assert models[contents["first"]]["name"] != "base"


def test_the_header_is_the_same_in_every_store(disk: Path, tmp_path: Path) -> None:
    """Names of refs and times are in no header: the same merge has the same content."""
    made = []
    for number, names in enumerate((NAMES, ("x/base", "x/a", "x/b"))):
        with Store.init(tmp_path / str(number)) as store:
            for name, own in zip(NAMES, names, strict=True):
                store.add(disk / f"{name}.safetensors", name=own)
            asked = MergeRequest(
                base=names[0], experts=tuple((one, 0.5) for one in names[1:]), method="ties"
            )
            virtual = store.merge(store.plan(asked), name="v", virtual=True)
            merged = store.merge(store.plan(asked), name="mix")
            assert virtual.manifest != merged.manifest
            store.materialize("v")
            assert store.show("v").manifest == merged.manifest
            made.append(merged.manifest)
    assert made[0] == made[1]


def test_a_cast_says_what_it_was_made_of(store: Store, tmp_path: Path) -> None:
    """A cast names its source, and passes on how that was merged."""
    store.merge(store.plan(request(a=0.3)), name="mix")
    store.cast("mix", dtype="bfloat16", name="small")
    store.cast("small", without=["first_stage_model.*"], name="part")
    store.checkout("part", tmp_path / "part.safetensors")
    told = metadata_in(tmp_path / "part.safetensors")
    contents = {name: str(store.show(name).manifest) for name in (*NAMES, "mix", "small")}
    recipe, models = json.loads(told[RECIPE]), json.loads(told[MODELS])
    without = ["first_stage_model.*"]
    assert recipe == {"type": "mstore", "base": contents["small"], "without": without}
    assert models[contents["small"]][RECIPE]["dtype"] == "bfloat16"
    assert models[contents["mix"]][RECIPE]["method"] == "task_arithmetic"
    assert contents["a"] in models


@pytest.mark.parametrize(
    "metadata",
    [
        {RECIPE: "not JSON", MODELS: "[1]"},
        {RECIPE: "[" * 100_000, MODELS: '{"a":' * 100_000},
        {RECIPE: '{"a": 1}', MODELS: json.dumps({f"{n}": "x" * 1000 for n in range(1000)})},
        {"modelspec.title": "t" * 10_000},
    ],
)
def test_what_a_parent_says_is_bounded(
    disk: Path, tmp_path: Path, metadata: dict[str, str]
) -> None:
    """Odd or long entries of a parent's header never stop a merge, nor fill its header."""
    with Store.init(tmp_path / "store") as store:
        store.add(disk / "base.safetensors", name="base")
        save_file(load_file(disk / "a.safetensors"), tmp_path / "a.safetensors", metadata)
        store.add(tmp_path / "a.safetensors", name="a")
        store.merge(store.plan(request(a=0.5)), name="mix")
        store.checkout("mix", tmp_path / "mix.safetensors")
        assert len(str(metadata_in(tmp_path / "mix.safetensors"))) < 300_000


def test_a_merge_has_no_preview_of_its_base(disk: Path, tmp_path: Path) -> None:
    """What lies beside a file and is about it does not follow its tensors into a merge."""
    place = tmp_path / "base"
    place.mkdir()
    (place / "x.safetensors").write_bytes((disk / "base.safetensors").read_bytes())
    papers = ("x.preview.png", "x.civitai.info", "x.json")
    others = ("x.yaml", "other.png")
    for name in (*papers, *others):
        (place / name).write_text("{}")
    with Store.init(tmp_path / "store") as store:
        store.add(place, name="base")
        store.add(disk / "a.safetensors", name="a")
        store.merge(store.plan(request(a=0.5)), name="mix")
        files = {one.path for one in store["mix"].files()}
        assert files.isdisjoint(papers)
        assert files >= {"x.safetensors", *others}
        assert {one.path for one in store["base"].files()} >= {*papers}


def test_models_that_are_not_merged_keep_their_previews(disk: Path, tmp_path: Path) -> None:
    """Of a folder of models, the papers of those that stay are true."""
    with Store.init(tmp_path / "store") as store:
        store.add(disk, name="all")
        one = MergeRequest(base="all:base", experts={"all:a": 0.5}, method="task_arithmetic")
        store.merge(store.plan(one), name="mix")
        files = {each.path for each in store["mix"].files()}
        assert "base.preview.png" not in files
        assert files >= {"a.preview.png", "b.preview.png"}


def test_models_of_directories_have_cards_alone(disk: Path, tmp_path: Path) -> None:
    """Shards of a model that is a directory are not copied alone: their headers have no recipe."""
    with Store.init(tmp_path / "store") as store:
        for name in NAMES:
            (tmp_path / name).mkdir()
            tensors = load_file(disk / f"{name}.safetensors")
            save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
            store.add(tmp_path / name, name=name)
        store.merge(store.plan(request(a=0.5)), name="mix")
        store.checkout("mix", tmp_path / "mix")
        assert metadata_in(tmp_path / "mix" / "model.safetensors") == {"format": "pt"}


# -- checkout of a file ----------------------------------------------------------------------------


def test_a_checkout_of_a_file_is_the_file(store: Store, disk: Path, tmp_path: Path) -> None:
    """Byte for byte, under any name, durably, and never over another one."""
    report = store.checkout("a", tmp_path / "other.safetensors")
    assert (tmp_path / "other.safetensors").read_bytes() == (disk / "a.safetensors").read_bytes()
    assert (report.files, report.bytes_written) == (1, (disk / "a.safetensors").stat().st_size)
    with pytest.raises(Conflict, match="exists"):
        store.checkout("b", tmp_path / "other.safetensors")
    assert (tmp_path / "other.safetensors").read_bytes() == (disk / "a.safetensors").read_bytes()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Conflict, match="exists"):
        store.checkout("b", tmp_path / "link.safetensors")
    with pytest.raises(BadRequest, match="directory above"):
        store.checkout("b", tmp_path / "missing" / "b.safetensors")
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "link.safetensors",
        "other.safetensors",
        "store",
    ]


def test_a_directory_of_that_name_is_filled(store: Store, tmp_path: Path) -> None:
    """An empty directory is a directory whatever it is called."""
    (tmp_path / "dir.safetensors").mkdir()
    store.checkout("a", tmp_path / "dir.safetensors")
    assert (tmp_path / "dir.safetensors" / "a.safetensors").is_file()


def test_a_file_is_one_model(disk: Path, tmp_path: Path) -> None:
    """Of several models one must be named; patterns have nothing to choose from."""
    with Store.init(tmp_path / "store") as store:
        store.add(disk, name="all")
        with pytest.raises(Incompatible) as refused:
            store.checkout("all", tmp_path / "x.safetensors")
        assert "all:a" in str(refused.value.texts)
        with pytest.raises(BadRequest):
            store.checkout("all:a", tmp_path / "x.safetensors", only=["*"])
        store.checkout("all:a", tmp_path / "x.safetensors")
        assert digest_of(tmp_path / "x.safetensors") == digest_of(disk / "a.safetensors")


@pytest.mark.parametrize("virtual", [False, True])
def test_a_completed_header_says_what_only_this_store_knows(
    store: Store, tmp_path: Path, virtual: bool
) -> None:
    """With a card, the title is the ref's name, and the digest is that of the tensors' bytes."""
    store.merge(store.plan(request(a=0.5)), name="mixes/one", virtual=virtual)
    plain, full = tmp_path / "plain.safetensors", tmp_path / "full.safetensors"
    store.checkout("mixes/one", plain)
    report = store.checkout("mixes/one", full, card=True)
    told, before = metadata_in(full), metadata_in(plain)
    assert {key: told[key] for key in before} == before
    assert told["modelspec.title"] == "full"
    assert told["mstore.snapshot"] == str(store.show("mixes/one").snapshot)
    raw = full.read_bytes()
    assert told["modelspec.hash_sha256"] == "0x" + hashlib.sha256(raw[_start(raw) :]).hexdigest()
    assert report.bytes_written == len(raw)
    equal: Callable[[Any, Any], bool] = np.array_equal
    mine, theirs = load_file(full), load_file(plain)
    assert mine.keys() == theirs.keys()
    assert all(equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("card", [False, True])
def test_a_file_that_went_out_is_found(store: Store, tmp_path: Path, card: bool) -> None:
    """Months later the published file, its hash, or its first ten digits name the snapshot."""
    store.merge(store.plan(request(a=0.5)), name="mix")
    store.checkout("mix", tmp_path / "My Mix v1.safetensors", card=card)
    digest = digest_of(tmp_path / "My Mix v1.safetensors")
    for asked in (digest, digest[:10], tmp_path / "My Mix v1.safetensors"):
        [one] = store.find(asked)
        assert (one.refs, one.path, one.sha256) == (("mix",), "My Mix v1.safetensors", digest)
    if card:
        assert metadata_in(tmp_path / "My Mix v1.safetensors")["modelspec.title"] == "My Mix v1"
        [note] = store.notes_of("mix")
        store.remove_notes("mix", [note.note])
        [one] = store.find(tmp_path / "My Mix v1.safetensors")
        assert one.refs == ("mix",)


def test_both_files_that_went_out_are_found(store: Store, tmp_path: Path) -> None:
    """One with a card does not hide the one without, which goes out later."""
    store.merge(store.plan(request(a=0.5)), name="mix")
    for name, card in (("full", True), ("plain", False)):
        store.checkout("mix", tmp_path / f"{name}.safetensors", card=card)
        [one] = store.find(digest_of(tmp_path / f"{name}.safetensors"))
        assert one.refs == ("mix",)


def test_only_an_author_with_a_name_is_published(disk: Path, tmp_path: Path) -> None:
    """USER@HOST, which is the author where nobody said one, does not go out."""
    for author, wanted in (("ada@lab", None), ("Ada <ada@example.org>", "Ada <ada@example.org>")):
        place = tmp_path / str(wanted is None)
        Store.init(place, block_size=BLOCK).close()
        with Store.open(place, author=author) as store:
            for name in NAMES:
                store.add(disk / f"{name}.safetensors", name=name)
            store.merge(store.plan(request(a=0.5)), name="mix")
            store.checkout("mix", place.with_suffix(".safetensors"), card=True)
        told = metadata_in(place.with_suffix(".safetensors"))
        assert told.get("modelspec.author") == wanted


def test_no_pickle_is_written(store: Store, tmp_path: Path) -> None:
    """A path of a pickle is no directory to fill."""
    with pytest.raises(BadRequest, match="safetensors"):
        store.checkout("a", tmp_path / "a.ckpt")


def test_what_its_author_wrote_stays(store: Store, disk: Path, tmp_path: Path) -> None:
    """The card of an added file adds the snapshot; its own title and date stay."""
    store.checkout("a", tmp_path / "a.safetensors", card=True)
    told = metadata_in(tmp_path / "a.safetensors")
    assert {key: told[key] for key in metadata_in(disk / "a.safetensors")} == metadata_in(
        disk / "a.safetensors"
    )
    assert told["mstore.snapshot"] == str(store.show("a").snapshot)
    assert "modelspec.hash_sha256" not in told
