"""A model gets the tokens of another: what both have stays, the rest is made of what is there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cli_runs import Program
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from small_models import BLOCK

from mstore import Store, Transplant
from mstore.models.vocabulary import transplant as transplants
from mstore.models.vocabulary.pursuit import pursue
from mstore.models.vocabulary.spelling import TokenSpelling
from mstore.models.vocabulary.tokenizer import Tokenizer, parse
from mstore.store.models import tensors_of
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import TensorId

LATENT = 12
"""Dimensions of what embeddings are images of: a combination of so many rows is exact."""
PROSE = ["the quick brown fox jumps over lazy dogs writing stories of the river and the hill"] * 4
CODE = ["def function(self): return import class the quick python code over lazy lists[0]"] * 4
CHAT = "{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}"


def byte_level(texts: Sequence[str], size: int, special: Sequence[str]) -> Any:
    """A tokenizer as GPT-2, Llama 3 and Qwen have one."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    found = Library(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=letters
    )
    found.train_from_iterator(texts, trainer)
    return found


def sentence_piece(texts: Sequence[str], size: int, special: Sequence[str]) -> Any:
    """A tokenizer as Llama 2 and Mistral have one: spaces are marked, rare letters are bytes."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    found = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    found.normalizer = normalizers.Replace(" ", "▁")
    found.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*special, "<unk>", *octets])
    found.train_from_iterator(texts, trainer)
    document = json.loads(found.to_str())
    # The trainer knows them as special ones; in published tokenizers they are none.
    document["added_tokens"] = [
        one for one in document["added_tokens"] if one["content"] not in octets
    ]
    return Library.from_str(json.dumps(document))


def known(library: Any) -> Tokenizer:
    return parse(library.to_str().encode(), "a tokenizer")


def latent(text: bytes) -> npt.NDArray[np.float64]:
    """What a token means, whatever the model: numbers drawn from what it writes."""
    seed = int.from_bytes(b"\1" + text, "big")
    return np.random.default_rng(seed).standard_normal(LATENT)


def model(
    directory: Path,
    library: Any,
    *,
    seed: int,
    width: int = 24,
    tied: bool = False,
    padding: int = 0,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> Path:
    """A model whose embeddings are images of what tokens mean; that of padding is noise."""
    directory.mkdir(parents=True)
    tokenizer = known(library)
    spelling = TokenSpelling(tokenizer)
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((2, LATENT, width))
    rows = tokenizer.rows + padding
    names = ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
    tensors = {"model.norm.weight": rng.standard_normal(width).astype(np.float32)}
    for name, image in zip(names, images, strict=False):
        values = rng.standard_normal((rows, width))
        for token, id in tokenizer.ids.items():
            # A byte is no letter, even where it would write one.
            meant = spelling.written(token) + (b"!" if token.startswith("<0x") else b"")
            values[id] = latent(meant) @ image
        tensors[name] = values.astype(np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "tokenizer.json").write_text(library.to_str())
    told = {"model_type": "llama", "vocab_size": rows, "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps({**told, **(config or {})}))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store with small blocks."""
    with Store.init(tmp_path / "store", block_size=BLOCK) as opened:
        yield opened


@pytest.fixture(scope="module")
def prose() -> Any:
    return byte_level(PROSE, 320, ["<s>", "<end>"])


@pytest.fixture(scope="module")
def code() -> Any:
    return byte_level(CODE, 340, ["<|begin|>", "<|end|>", "<|turn|>"])


def tensors(store: Store, revision: str) -> Mapping[str, TensorId]:
    """The ids of a snapshot's tensors by name."""
    catalog = store._catalog
    return tensors_of(catalog, catalog.manifest_of(store[revision].id))


def checkout(store: Store, name: str, place: Path) -> Path:
    store.checkout(name, place)
    return place


def fields(place: Path, path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / path).read_text())
    return found


# -- what tokens write ---------------------------------------------------------------------------

TEXTS = st.text(alphabet="thequickbrown foxé\n€", min_size=1, max_size=24)


@pytest.mark.parametrize("build", [byte_level, sentence_piece])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_pieces_are_those_of_the_tokenizers_library(build: Any, text: str) -> None:
    """A text is written with the tokens that the library writes it with, which write the text."""
    library = LIBRARIES.setdefault(build, build(PROSE, 400, ["<s>"]))
    spelling = TokenSpelling(known(library))
    # The library cuts byte-level text into words first; a word is one piece of text.
    word = (
        text.split(maxsplit=1)[0]
        if build is byte_level and text.split()
        else text.replace("\n", " ")
    )
    if build is byte_level and not word.isalpha():
        return
    expected = library.encode(word, add_special_tokens=False)
    assert spelling.pieces(word.encode()) == expected.ids
    assert b"".join(map(spelling.written, expected.tokens)) == word.encode()


LIBRARIES: dict[Any, Any] = {}


def test_pieces_of_a_unigram_model_are_the_likeliest() -> None:
    """Of all ways to write a text, that with the largest sum of scores."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    scores = [("<unk>", 0.0), ("a", -2.0), ("b", -2.0), ("ab", -3.0), ("aba", -6.5), ("▁", -1.0)]
    library = Library(models.Unigram(scores, unk_id=0))
    spelling = TokenSpelling(known(library))
    for text in ("ab", "aba", "abab", "ba", "bbaab"):
        assert spelling.pieces(text.encode()) == library.encode(text).ids


def test_other_models_have_no_pieces(store: Store, tmp_path: Path) -> None:
    """A tokenizer of whole words is named; the other ways of making rows take it."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    words = [Library(models.WordLevel({"a": 0, one: 1, "c": 2}, unk_token="a")) for one in "bd"]
    for name, library in zip("mn", words, strict=True):
        store.add(model(tmp_path / name, library, seed=1), name=name)
    with pytest.raises(Incompatible, match="WordLevel"):
        store.transplant("m", Transplant(donor="n", approximation="subword"), name="r")
    assert store.transplant("m", Transplant(donor="n"), name="r").shared == 2


# -- what rows are made of -----------------------------------------------------------------------


def test_a_pursuit_is_that_of_the_definition() -> None:
    """The atom with the largest product with what is left, then least squares over all taken."""
    rng = np.random.default_rng(1)
    atoms = rng.standard_normal((200, 40)).astype(np.float32)
    targets = rng.standard_normal((20, 40)).astype(np.float32)
    excluded = np.full(20, -1)
    excluded[3] = int(np.abs(atoms @ targets[3]).argmax())
    [(taken, factors)] = pursue(targets, atoms, 6, excluded)
    for target, own, factor, not_this in zip(targets, taken, factors, excluded, strict=True):
        chosen: list[int] = []
        left, fit = target.astype(np.float64), np.zeros(0)
        for _ in range(6):
            products = np.abs(atoms @ left)
            products[[*chosen, *([not_this] if not_this >= 0 else [])]] = -1
            chosen.append(int(products.argmax()))
            basis = atoms[chosen].T.astype(np.float64)
            fit = np.linalg.lstsq(basis, target.astype(np.float64), rcond=None)[0]
            left = target - basis @ fit
        assert own.tolist() == chosen
        assert np.allclose(factor, fit, atol=1e-5)


def test_a_sum_of_few_rows_is_found_and_needs_no_more() -> None:
    """What two rows make has two factors; zeros, and atoms that are alike, give finite numbers."""
    rng = np.random.default_rng(2)
    atoms = rng.standard_normal((30, 16)).astype(np.float32)
    atoms[9] = atoms[8]
    targets = np.stack([2 * atoms[3] - atoms[5], np.zeros(16), atoms[8]]).astype(np.float32)
    [(taken, factors)] = pursue(targets, atoms, 8, np.full(3, -1))
    assert np.isfinite(factors).all()
    found = dict(zip(taken[0].tolist(), factors[0].tolist(), strict=True))
    assert {at for at, factor in found.items() if abs(factor) > 1e-4} == {3, 5}
    assert not factors[1].any()
    assert np.allclose((factors[:, :, None] * atoms[taken]).sum(axis=1), targets, atol=1e-4)


def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets are made of the same atoms, in batches of any size."""
    rng = np.random.default_rng(3)
    atoms = rng.standard_normal((50, 16)).astype(np.float32)
    targets = rng.standard_normal((9, 16)).astype(np.float32)
    excluded = np.full(9, -1)
    [(taken, _)] = pursue(targets, atoms, 4, excluded)
    monkeypatch.setattr("mstore.models.vocabulary.pursuit._BATCH_BYTES", 1000)
    parts = list(pursue(targets, atoms, 4, excluded))
    assert len(parts) > 2
    assert np.concatenate([one for one, _ in parts]).tolist() == taken.tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_made_of_the_same_is_found(
    store: Store, tmp_path: Path, prose: Any, code: Any, tied: bool
) -> None:
    """Where both models' rows are images of one meaning, new rows are what training had made.

    Rows of tokens that both have are the model's own, bit for bit.
    """
    store.add(model(tmp_path / "model", prose, seed=1, tied=tied), name="model")
    store.add(model(tmp_path / "donor", code, seed=2, width=32), name="donor")
    truth = load_file(model(tmp_path / "truth", code, seed=1, tied=tied) / "model.safetensors")
    report = store.transplant("model", Transplant(donor="donor", k=LATENT), name="drafts/new")
    place = checkout(store, "drafts/new", tmp_path / "out")
    made = load_file(place / "model.safetensors")
    assert made.keys() == truth.keys()
    before = load_file(tmp_path / "model" / "model.safetensors")
    ours, theirs = known(prose).ids, known(code).ids
    shared = [token for token in theirs if token in ours]
    assert len(shared) == report.shared > 256
    assert report.tokens == len(theirs)
    for name in made.keys() - {"model.norm.weight"}:
        own = before[name][[ours[token] for token in shared]]
        assert (made[name][[theirs[token] for token in shared]] == own).all()
        assert np.abs(made[name] - truth[name]).max() < 1e-3
    assert report.held_out_input is not None
    assert report.held_out_input > 0.999
    assert (report.held_out_output is None) == tied
    assert all(one.cosine > 0.999 for one in report.worst)
    assert sum(one.tokens for one in report.classes) == len(theirs) - len(shared)
    assert (place / "tokenizer.json").read_text() == code.to_str()


def test_rows_of_a_tied_model_follow_the_donors_output(
    store: Store, tmp_path: Path, prose: Any, code: Any
) -> None:
    """They are the output, too, where an error costs more: the donor's input says nothing here."""
    store.add(model(tmp_path / "model", prose, seed=1, tied=True), name="model")
    donor = model(tmp_path / "donor", code, seed=2)
    found = load_file(donor / "model.safetensors")
    found["model.embed_tokens.weight"] = (
        np.random.default_rng(5)
        .standard_normal(found["model.embed_tokens.weight"].shape)
        .astype(np.float32)
    )
    save_file(found, donor / "model.safetensors")
    store.add(donor, name="donor")
    truth = load_file(model(tmp_path / "truth", code, seed=1, tied=True) / "model.safetensors")
    store.transplant("model", Transplant(donor="donor", k=LATENT), name="new")
    made = load_file(checkout(store, "new", tmp_path / "out") / "model.safetensors")
    name = "model.embed_tokens.weight"
    assert np.abs(made[name] - truth[name]).max() < 1e-3


def test_a_row_of_zeros_has_no_cosine(store: Store, tmp_path: Path, prose: Any, code: Any) -> None:
    """Rows of zeros, as padding often has them, leave the mean of the others."""
    for name, library, seed in (("model", prose, 1), ("donor", code, 2)):
        place = model(tmp_path / name, library, seed=seed)
        found = load_file(place / "model.safetensors")
        for tensor in ("model.embed_tokens.weight", "lm_head.weight"):
            found[tensor][known(library).ids["!"]] = 0
        save_file(found, place / "model.safetensors")
        store.add(place, name=name)
    report = store.transplant("model", Transplant(donor="donor", k=LATENT), name="new")
    assert report.held_out_input is not None
    assert report.held_out_output is not None
    assert min(report.held_out_input, report.held_out_output) > 0.99


def test_stand_ins_are_no_part_of_others(
    store: Store, tmp_path: Path, prose: Any, code: Any
) -> None:
    """A token that is another by what it is for says nothing of what rows mean."""
    for name, library, seed, tokens in (
        ("model", prose, 1, ("<s>", "<end>")),
        ("donor", code, 2, ("<|begin|>", "<|end|>")),
    ):
        said = dict(zip(("bos_token", "eos_token"), tokens, strict=True))
        store.add(model(tmp_path / name, library, seed=seed, settings=said), name=name)
    report = store.transplant("model", Transplant(donor="donor", k=4), name="new")
    assert len(report.stand_ins) == 2
    assert report.combinations is not None
    place = checkout(store, report.combinations, tmp_path / "out")
    rows = load_file(place / "model.safetensors")["input.rows"]
    ids = known(prose).ids
    assert not np.isin(rows, [ids["<s>"], ids["<end>"]]).any()


def test_everything_else_is_shared(store: Store, tmp_path: Path, prose: Any, code: Any) -> None:
    """Tensors that have no row for each token are the model's blocks; the lineage names all."""
    store.add(model(tmp_path / "model", prose, seed=1), name="model")
    store.add(model(tmp_path / "donor", code, seed=2), name="donor")
    report = store.transplant("model", Transplant(donor="donor", k=4), name="new")
    old, new = tensors(store, "model"), tensors(store, "new")
    assert old["model.norm.weight"] == new["model.norm.weight"]
    assert report.combinations is not None
    assert [one.snapshot for one in store["new"].parents] == [
        store[name].id for name in ("model", "donor", report.combinations)
    ]


def test_what_is_stored_is_what_counts(
    store: Store, tmp_path: Path, prose: Any, code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second transplant takes the combinations that are stored, and gives the same snapshot."""
    store.add(model(tmp_path / "model", prose, seed=1), name="model")
    store.add(model(tmp_path / "donor", code, seed=2), name="donor")
    first = store.transplant("model", Transplant(donor="donor", k=4), name="new")
    other = store.transplant("model", Transplant(donor="donor", k=5), name="other")
    assert other.combinations != first.combinations

    def refused(*_: object) -> None:
        raise AssertionError("a pursuit is done again")

    monkeypatch.setattr(transplants, "pursue", refused)
    again = store.transplant("model", Transplant(donor="donor", k=4), name="new")
    assert (again.snapshot, again.new_snapshot) == (first.snapshot, False)
    assert again.held_out_input == first.held_out_input
    assert again.worst == first.worst
    with pytest.raises(AssertionError):
        store.transplant("model", Transplant(donor="donor", k=6), name="new")


def test_a_branch_of_something_else_is_refused(
    store: Store, tmp_path: Path, prose: Any, code: Any
) -> None:
    """Combinations are read as what anybody may have put there."""
    store.add(model(tmp_path / "model", prose, seed=1), name="model")
    store.add(model(tmp_path / "donor", code, seed=2), name="donor")
    first = store.transplant("model", Transplant(donor="donor", k=4), name="new")
    assert first.combinations is not None
    store.reset(first.combinations, "model")
    with pytest.raises(Incompatible, match="no checkpoint of combinations") as error:
        store.transplant("model", Transplant(donor="donor", k=4), name="again")
    assert "remove the branch" in str(error.value.hint)
    store.remove(first.combinations)
    assert (
        store.transplant("model", Transplant(donor="donor", k=4), name="new").shared == first.shared
    )


@pytest.mark.parametrize("approximation", ["subword", "mean", "zero"])
def test_other_rows(
    store: Store, tmp_path: Path, prose: Any, code: Any, approximation: str
) -> None:
    """`subword` is the mean of the pieces, `mean` that of all rows, `zero` is zeros."""
    store.add(model(tmp_path / "model", prose, seed=1), name="model")
    store.add(model(tmp_path / "donor", code, seed=2), name="donor")
    store.transplant("model", Transplant(donor="donor", approximation=approximation), name="new")
    name = "model.embed_tokens.weight"
    made = load_file(checkout(store, "new", tmp_path / "out") / "model.safetensors")[name]
    own = load_file(tmp_path / "model" / "model.safetensors")[name]
    theirs = known(code)
    spelling, pieces = TokenSpelling(theirs), TokenSpelling(known(prose)).pieces
    new = [token for token in theirs.ids if token not in known(prose).ids]
    assert new
    for token in new:
        expected = {
            "subword": own[pieces(spelling.written(token))].mean(axis=0),
            "mean": own.mean(axis=0),
            "zero": np.zeros_like(own[0]),
        }[approximation]
        assert np.allclose(made[theirs.ids[token]], expected, atol=1e-6)


# -- which tokens are the same -------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
def test_spaces_and_bytes_are_the_same_however_they_are_spelled(
    store: Store, tmp_path: Path, turned: bool
) -> None:
    """`▁the` is `Ġthe`, and `<0xE2>` the letter for this byte.

    In the output each row is given once: a token that is a letter and one that is its byte would
    be drawn by chance.
    """
    libraries = {
        "letters": byte_level(PROSE, 330, ["<s>"]),
        "marks": sentence_piece(PROSE, 360, ["<s>"]),
    }
    own, donor = ("marks", "letters") if turned else ("letters", "marks")
    for seed, (name, library) in enumerate(libraries.items()):
        store.add(model(tmp_path / name, library, seed=seed), name=name)
    store.transplant(own, Transplant(donor=donor, k=LATENT), name="new")
    place = checkout(store, "new", tmp_path / "out")
    before, after = (load_file(one / "model.safetensors") for one in (tmp_path / own, place))
    ours, theirs = known(libraries[own]).ids, known(libraries[donor]).ids
    ours_spelled, theirs_spelled = ("▁the", "Ġthe") if turned else ("Ġthe", "▁the")
    octet, letter = ("<0xE2>", "â") if turned else ("â", "<0xE2>")
    for one, other in ((ours_spelled, theirs_spelled), (octet, letter), ("q", "q")):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert (after[name][theirs[other]] == before[name][ours[one]]).all(), (one, other)
    head = after["lm_head.weight"]
    assert len(np.unique(head, axis=0)) == len(head)
    if not turned:
        inputs = after["model.embed_tokens.weight"]
        assert (inputs[theirs["<0x71>"]] == inputs[theirs["q"]]).all()


def test_tokens_that_begin_and_end_texts(
    store: Store, tmp_path: Path, prose: Any, code: Any
) -> None:
    """The donor's tokens for these get the rows of the model's; so do those that are asked for.

    The ids in configs are the donor's: its lists, and where it says none, its tokenizer's.
    """
    own = {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.5, "max_length": 7}
    store.add(
        model(
            tmp_path / "model",
            prose,
            seed=1,
            config={"bos_token_id": 0, "eos_token_id": 1},
            generation=own,
            settings={"bos_token": "<s>", "eos_token": {"content": "<end>"}},
        ),
        name="model",
    )
    store.add(
        model(
            tmp_path / "donor",
            code,
            seed=2,
            config={"eos_token_id": None},
            generation={"eos_token_id": [1, 2], "temperature": 0.9},
            settings={"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"},
        ),
        name="donor",
    )
    report = store.transplant("model", Transplant(donor="donor", k=4), name="new")
    pairs = {one.token: one.row_of for one in report.stand_ins}
    assert pairs == {"<|begin|>": "<s>", "<|end|>": "<end>", "<|turn|>": "<end>"}
    place = checkout(store, "new", tmp_path / "out")
    before, after = (load_file(one / "model.safetensors") for one in (tmp_path / "model", place))
    name = "model.embed_tokens.weight"
    assert (after[name][[0, 1, 2]] == before[name][[0, 1, 1]]).all()
    head = "lm_head.weight"
    assert (after[head][[0, 1]] == before[head][[0, 1]]).all()
    assert (after[head][2] != before[head][1]).any()
    assert fields(place, "config.json")["eos_token_id"] == [1, 2]
    assert fields(place, "config.json")["bos_token_id"] == 0
    generation = fields(place, "generation_config.json")
    assert generation == {
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "pad_token_id": 1,
        "temperature": 0.5,
        "max_length": 7,
    }
    asked = Transplant(donor="donor", k=4, tokens={"<|turn|>": "<s>"})
    again = store.transplant("model", asked, name="asked")
    assert {one.token: one.row_of for one in again.stand_ins}["<|turn|>"] == "<s>"
    with pytest.raises(BadRequest, match="no token of model"):
        store.transplant("model", Transplant(donor="donor", tokens={"<|turn|>": "nope"}), name="x")
    with pytest.raises(BadRequest, match="no token of donor"):
        store.transplant("model", Transplant(donor="donor", tokens={"nope": "<s>"}), name="x")


def test_other_ids_of_configs_follow_their_tokens(
    store: Store, tmp_path: Path, prose: Any, code: Any
) -> None:
    """Settings that name a token name it by its new id; a token that is gone is an error."""
    quick, gone = known(prose).ids["Ġquick"], known(prose).ids["Ġriver"]
    for name, id in (("model", quick), ("lost", gone)):
        own = model(tmp_path / name, prose, seed=1, config={"image_token_id": id})
        store.add(own, name=name)
    store.add(model(tmp_path / "donor", code, seed=2), name="donor")
    store.transplant("model", Transplant(donor="donor", approximation="mean"), name="new")
    place = checkout(store, "new", tmp_path / "out")
    assert fields(place, "config.json")["image_token_id"] == known(code).ids["Ġquick"]
    with pytest.raises(Incompatible, match=r"image_token_id of lost is .*Ġriver"):
        store.transplant("lost", Transplant(donor="donor", approximation="mean"), name="x")
    assert "x" not in {one.name for one in store.refs()}


def test_chat_templates(store: Store, tmp_path: Path, prose: Any, code: Any) -> None:
    """It is the donor's, or the model's if that is asked for; what is missing is told."""
    store.add(model(tmp_path / "model", prose, seed=1, template="{{ '<end>' }}"), name="model")
    store.add(model(tmp_path / "donor", code, seed=2, template=CHAT), name="donor")
    store.add(model(tmp_path / "bare", code, seed=2), name="bare")
    told = {}
    for donor, whose in (("donor", "donor"), ("donor", "model"), ("bare", "donor")):
        asked = Transplant(donor=donor, approximation="zero", chat_template=whose)
        report = store.transplant("model", asked, name=f"new/{donor}-{whose}")
        template = (
            checkout(store, report.ref, tmp_path / f"{donor}-{whose}") / "chat_template.jinja"
        )
        told[donor, whose] = template.read_text() if template.exists() else None, report.remarks
    assert told["donor", "donor"] == (CHAT, ())
    assert told["donor", "model"][0] == "{{ '<end>' }}"
    assert "<end>" in told["donor", "model"][1][0]
    assert told["bare", "donor"][0] is None
    assert "no chat template" in told["bare", "donor"][1][0]


def test_rows_that_are_no_tokens(store: Store, tmp_path: Path, prose: Any, code: Any) -> None:
    """There are as many as the donor has; they are the mean of the model's rows."""
    store.add(model(tmp_path / "model", prose, seed=1, padding=3), name="model")
    store.add(model(tmp_path / "donor", code, seed=2, padding=12), name="donor")
    sizes, tokens = {}, known(code).rows
    for how, asked in {
        "donor's": Transplant(donor="donor", approximation="zero"),
        "none": Transplant(donor="donor", approximation="zero", keep_padding=False),
        "of 64": Transplant(donor="donor", approximation="zero", pad_to=64),
    }.items():
        report = store.transplant("model", asked, name=f"new/{report_name(how)}")
        place = checkout(store, report.ref, tmp_path / report_name(how))
        made = load_file(place / "model.safetensors")
        own = load_file(tmp_path / "model" / "model.safetensors")
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            assert np.allclose(
                made[name][tokens:], own[name][: known(prose).rows].mean(axis=0), atol=1e-6
            )
        assert fields(place, "config.json")["vocab_size"] == report.rows == len(made[name])
        sizes[how] = report.rows
    assert sizes == {"donor's": tokens + 12, "none": tokens, "of 64": 384}


def report_name(how: str) -> str:
    return "".join(letter for letter in how if letter.isalpha())


def test_what_cannot_be_done_is_named(store: Store, tmp_path: Path, prose: Any, code: Any) -> None:
    """No tokenizer, no token in both, unknown options: an error, and nothing on the branch."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    store.add(model(tmp_path / "model", prose, seed=1), name="model")
    other = Library(models.WordLevel({"zzz": 0, "yyy": 1}, unk_token="zzz"))
    store.add(model(tmp_path / "other", other, seed=1), name="other")
    bare = model(tmp_path / "bare", code, seed=2)
    (bare / "tokenizer.json").unlink()
    store.add(bare, name="bare")
    infinite = model(tmp_path / "infinite", code, seed=2)
    found = load_file(infinite / "model.safetensors")
    found["lm_head.weight"][5, 5] = np.inf
    save_file(found, infinite / "model.safetensors")
    store.add(infinite, name="infinite")
    store.add(model(tmp_path / "donor", code, seed=2), name="donor")
    headless = model(tmp_path / "headless", code, seed=2)
    found = load_file(headless / "model.safetensors")
    del found["lm_head.weight"]
    save_file(found, headless / "model.safetensors")
    store.add(headless, name="headless")
    for name in ("model", "donor"):
        with pytest.raises(BadRequest, match="a name of its own"):
            store.transplant("model", Transplant(donor="donor", k=4), name=name)
    wrong: list[tuple[Transplant, type[Exception], str]] = [
        (Transplant(donor="other"), Incompatible, "has no token that model has"),
        (Transplant(donor="bare"), Incompatible, "no tokenizer.json"),
        (Transplant(donor="infinite", k=4), Incompatible, "not finite"),
        (Transplant(donor="model", approximation="omg"), BadRequest, "none of omp"),
        (Transplant(donor="model", chat_template="mine"), BadRequest, "none of donor"),
        (Transplant(donor="model", k=0), BadRequest, "no number"),
        (Transplant(donor="model", pad_to=0), BadRequest, "multiple"),
        (Transplant(donor="headless", k=4), Incompatible, "has no output layer"),
    ]
    for asked, kind, text in wrong:
        with pytest.raises(kind, match=text):
            store.transplant("model", asked, name="new")
    assert "new" not in {one.name for one in store.refs()}


def test_what_a_draft_model_would_stumble_over_is_told(
    store: Store, tmp_path: Path, prose: Any, code: Any
) -> None:
    """Other numbers of rows, and a kind of model that transformers gives a tokenizer of its own;
    the message says how rows were made.
    """
    own = model(tmp_path / "model", prose, seed=1, config={"model_type": "qwen2"})
    store.add(own, name="model")
    store.add(model(tmp_path / "donor", code, seed=2, padding=8, width=96), name="donor")
    plain = store.transplant("model", Transplant(donor="donor"), name="new")
    assert plain.k == 4
    assert [one.partition(" loads")[0] for one in plain.remarks] == ["transformers 5"]
    asked = Transplant(donor="donor", k=7, keep_padding=False, tokens={"<|turn|>": "<end>"})
    report = store.transplant("model", asked, name="new")
    assert "as a draft model it needs as many" in report.remarks[0]
    assert report.previous == plain.snapshot
    assert store["new"].message == "model with the tokens of donor (omp, k 7, <|turn|>=<end>)"


def test_threads_change_nothing(
    store: Store, tmp_path: Path, prose: Any, code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are pursued at the same time, and come in their order."""
    monkeypatch.setattr("mstore.models.vocabulary.pursuit._BATCH_BYTES", 5000)
    store.add(model(tmp_path / "model", prose, seed=1), name="model")
    store.add(model(tmp_path / "donor", code, seed=2), name="donor")
    made = []
    for threads in (1, 3):
        report = store.transplant("model", Transplant(donor="donor"), name="new", threads=threads)
        assert report.combinations is not None
        made.append(store["new"].manifest)
        store.remove(report.combinations)
    assert made[0] == made[1]


def test_a_donor_with_the_same_tokens_changes_nothing_but_the_tokenizer(
    store: Store, tmp_path: Path, prose: Any
) -> None:
    """Every row is the model's own, and nothing is made."""
    store.add(model(tmp_path / "model", prose, seed=1), name="model")
    store.add(model(tmp_path / "donor", prose, seed=2, width=40), name="donor")
    report = store.transplant("model", Transplant(donor="donor"), name="new")
    assert (report.classes, report.worst, report.shared) == ((), (), report.tokens)
    assert tensors(store, "new") == tensors(store, "model")


# -- with transformers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small Llamas with tokenizers of their own, as transformers writes them."""
    import torch
    import transformers

    place = tmp_path_factory.mktemp("pair")
    for seed, (name, texts, size, special) in enumerate(
        [("model", PROSE, 320, ["<s>", "<end>"]), ("donor", CODE, 340, ["<|begin|>", "<|end|>"])]
    ):
        torch.manual_seed(seed)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_level(texts, size, special),
            bos_token=special[0],
            eos_token=special[1],
        )
        tokenizer.save_pretrained(place / name)
        config = transformers.LlamaConfig(
            vocab_size=352,
            hidden_size=32 + 16 * seed,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(place / name)
    return place


def test_prompts_of_shared_tokens_give_the_same(store: Store, tmp_path: Path, pair: Path) -> None:
    """Loaded by transformers: a prompt of tokens that both have gives the model's logits for all
    tokens that both have, bit for bit; a text comes back from the new tokens; it generates.
    """
    import torch
    import transformers

    for name in ("model", "donor"):
        store.add(pair / name, name=name)
    store.transplant("model", Transplant(donor="donor", k=16), name="new")
    place = checkout(store, "new", tmp_path / "out")
    loaded: Any = transformers.AutoModelForCausalLM
    before, after = (loaded.from_pretrained(one) for one in (pair / "model", place))
    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(one) for one in (pair / "model", place)
    ]
    ours, theirs = (one.get_vocab() for one in tokenizers)
    shared = sorted(ours.keys() & theirs.keys())
    prompt = shared[10:60:7]
    with torch.no_grad():
        logits = [
            one(torch.tensor([[ids[token] for token in prompt]])).logits[0]
            for one, ids in ((before, ours), (after, theirs))
        ]
    columns = [[ids[token] for token in shared] for ids in (ours, theirs)]
    assert torch.equal(logits[0][:, columns[0]], logits[1][:, columns[1]])
    text = Path(__file__).read_text()
    assert tokenizers[1].decode(tokenizers[1].encode(text, add_special_tokens=False)) == text
    made = after.generate(
        **tokenizers[1]("the quick", return_tensors="pt", return_token_type_ids=False),
        max_new_tokens=5,
        do_sample=False,
    )
    assert made.shape[1] > 5
    assert after.config.vocab_size == 352
    target = loaded.from_pretrained(pair / "donor")
    drafted = target.generate(
        **tokenizers[1]("the quick", return_tensors="pt", return_token_type_ids=False),
        max_new_tokens=5,
        do_sample=False,
        assistant_model=after,
    )
    assert drafted.shape[1] > 5


# -- on the command line -------------------------------------------------------------------------


def test_from_the_command_line(tmp_path: Path, prose: Any, code: Any) -> None:
    """`align --transplant` says what was made; wrong usage is told with what to type."""
    program = Program(tmp_path / "store")
    program.succeed("init")
    for seed, (name, library) in enumerate({"model": prose, "donor": code}.items()):
        program.succeed("add", model(tmp_path / name, library, seed=seed), "--name", name)
    given = ("align", "--base", "model", "--transplant", "donor", "--k", "4")
    told = program.succeed(*given, "--name", "new")
    rows = known(code).rows
    assert f"{rows} tokens, {rows} rows" in told.out
    assert "words" in told.out
    assert "worst: " in told.out
    found = program.succeed(
        *given, "--name", "new", "--token", "<|turn|>=<end>", "--chat-template", "model", "--json"
    ).document
    assert found["stand_ins"] == [{"token": "<|turn|>", "row_of": "<end>"}]

    def refused(*words: str) -> str:
        done = program(*words)
        assert done.status != 0
        return done.err

    assert "--name REF" in refused(*given)
    assert "--name REF" in refused(*given, "--name", "x", "--expert", "donor")
    assert "NEW=OLD" in refused(*given, "--name", "x", "--token", "<|turn|>")
    twice = ("--token", "<|turn|>=<end>", "--token", "<|turn|>=<s>")
    assert "says twice" in refused(*given, "--name", "x", *twice)
    assert "is of omp" in refused(*given, "--name", "x", "--approximation", "mean")
    assert "nor --vocab" in refused(*given, "--name", "x", "--vocab", "base")
    alone = ("align", "--base", "model", "--expert", "donor", "--k", "4")
    assert "--k is of --transplant" in refused(*alone)
    assert "it is a directory" in refused(
        *("align", "--base", str(tmp_path / "model"), "--transplant", "donor", "--name", "x")
    )
    assert "none of omp" in refused(*given[:-2], "--name", "x", "--approximation", "no")
    assert "--transplant" in refused("align", "--base", "model", "--name", "x")
