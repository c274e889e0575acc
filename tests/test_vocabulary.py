"""Aligning vocabularies: the same token in the same row of every model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from small_models import BLOCK

from mstore import MergeRequest, Store, TokenRow, Vocabulary
from mstore.merge.planning import warnings
from mstore.models.vocabulary import tokenizer as tokenizers
from mstore.models.vocabulary.embeddings import MEAN, MISSING, RowOrigins, gathered
from mstore.terms.errors import BadRequest, Incompatible, NotFound

WIDTH = 24
Rows = npt.NDArray[Any]
EMBEDDINGS = ("lm_head.weight", "model.embed_tokens.weight")


def tokenizer_json(tokens: Sequence[str], added: Sequence[str] = ()) -> str:
    """A tokenizer that knows whole words; added tokens follow the others."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    entries = [
        {"id": len(tokens) + number, "content": token, "special": True, "lstrip": True}
        for number, token in enumerate(added)
    ]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": tokens[0]}
    return json.dumps({"version": "1.0", "added_tokens": entries, "model": model})


def model(
    path: Path,
    tokens: Sequence[str],
    added: Sequence[str] = (),
    *,
    rows: int | None = None,
    dtype: Any = ml_dtypes.bfloat16,
    tied: bool = False,
    config: Mapping[str, object] | None = None,
    seed: int = 0,
    tokenizer: bool = True,
) -> Path:
    """A model with an embedding for each token, and rows after them."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    rows = len(tokens) + len(added) if rows is None else rows
    tensors = {"model.layers.0.mlp.weight": rng.standard_normal((WIDTH, 8)).astype(dtype)}
    for name in EMBEDDINGS[1:] if tied else EMBEDDINGS:
        tensors[name] = rng.standard_normal((rows, WIDTH)).astype(dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    fields = {"vocab_size": rows, "eos_token_id": 1, "tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(fields | dict(config or {})))
    if tokenizer:
        (path / "tokenizer.json").write_text(tokenizer_json(tokens, added))
    return path


class Place:
    """A store, and the tokens of each model in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store.init(root / "store", block_size=BLOCK)
        self.tokens: dict[str, list[str]] = {}

    def add(self, name: str, tokens: Sequence[str], added: Sequence[str] = (), **more: Any) -> None:
        path = model(self.root / name, tokens, added, seed=len(self.tokens), **more)
        self.store.add(path, name=name)
        self.tokens[name] = [*tokens, *added]

    def row(self, name: str, tensor: str, token: str) -> Rows | None:
        """A token's row in a model as it was added."""
        if token not in self.tokens[name]:
            return None
        own = self.store[name].tensor(tensor)
        at = self.tokens[name].index(token)
        return own[at] if at < len(own) else None

    def align(self, *names: str, **vocabulary: Any) -> Any:
        request = MergeRequest(base=names[0], experts=names[1:], method="linear")
        return self.store.align(request, Vocabulary(**vocabulary))

    def tokens_of(self, name: str) -> dict[str, int]:
        raw = self.store[name].read("tokenizer.json")
        return dict(tokenizers.parse(raw, name).ids)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    with place.store:
        yield place


def same(one: Rows, other: Rows) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def wanted_row(
    place: Place, names: Sequence[str], number: int, tensor: str, token: str, *, base_first: bool
) -> Rows:
    """The definition, one token at a time."""
    dtype = place.store[names[number]].tensor(tensor).dtype
    has = [place.row(name, tensor, token) for name in names]
    if has[number] is not None:
        return has[number]
    there = [row for row in has if row is not None]
    if not there:
        return np.zeros(WIDTH, dtype)
    if len(there) == 1 or (base_first and has[0] is not None):
        return (there[0] if has[0] is None else has[0]).astype(dtype)
    total = np.zeros(WIDTH, np.float32)
    for row in there:
        total = total + row.astype(np.float32)
    return (total / np.float32(len(there))).astype(dtype)


def assert_aligned(place: Place, names: Sequence[str], report: Any, *, base_first: bool) -> None:
    told = [report.base, *report.experts]
    ids = place.tokens_of(told[0].ref or names[0])
    for number, one in enumerate(told):
        view = place.store[one.ref or one.name]
        for tensor in set(EMBEDDINGS) & set(view.tensor_names()):
            rows = view.tensor(tensor)
            assert len(rows) == report.rows
            for token, at in ids.items():
                wanted = wanted_row(place, names, number, tensor, token, base_first=base_first)
                assert same(rows[at], wanted), (one.name, tensor, token)
        config = json.loads(view.read("config.json"))
        assert config["vocab_size"] == report.rows


WORDS = [f"w{number}" for number in range(12)]


@st.composite
def vocabularies(draw: st.DrawFn) -> list[tuple[list[str], list[str]]]:
    """Of two to four models: tokens, and added ones, in orders of their own."""
    found = []
    for _ in range(draw(st.integers(2, 4))):
        own = draw(st.permutations(WORDS))[: draw(st.integers(1, len(WORDS)))]
        cut = draw(st.integers(1, len(own)))
        found.append((own[:cut], own[cut:]))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("source", ["base", "union"])
@pytest.mark.parametrize("base_first", [True, False])
@settings(max_examples=5, deadline=None)
@given(tokens=vocabularies(), tied=st.booleans())
def test_every_row_is_the_tokens_own(
    source: str,
    base_first: bool,
    tokens: list[tuple[list[str], list[str]]],
    tied: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever the vocabularies are, each token's row is what the definition says, for each model;
    the base's tokens keep their ids, and a union has the tokens of all."""
    place = Place(tmp_path_factory.mktemp("vocabulary"))
    with place.store:
        names = [f"m{number}" for number in range(len(tokens))]
        for name, (own, added) in zip(names, tokens, strict=True):
            place.add(name, own, added, tied=tied)
        report = place.align(*names, source=source, base_first=base_first, keep_padding=False)
        assert_aligned(place, names, report, base_first=base_first)
        ids = place.tokens_of(report.base.ref or "m0")
        for number, token in enumerate(place.tokens["m0"]):
            assert ids[token] == number
        every = {token for own in place.tokens.values() for token in own}
        assert ids.keys() == (every if source == "union" else set(place.tokens["m0"]))
        assert sorted(ids.values()) == list(range(report.rows))
        # Again: it is there.
        again = place.align(*names, source=source, base_first=base_first, keep_padding=False)
        assert again.bytes_written == 0
        assert [one.snapshot for one in again.experts] == [o.snapshot for o in report.experts]


def test_models_that_fit_stay(place: Place) -> None:
    """Models with one vocabulary are not stored again, and nothing is written."""
    for name in ("base", "one"):
        place.add(name, WORDS, ["<x>"], rows=20)
    report = place.align("base", "one")
    assert (report.base.ref, report.experts[0].ref, report.bytes_written) == (None, None, 0)
    assert (report.tokens, report.rows) == (13, 20)
    request = MergeRequest(base="base", experts=(("one", 0.5),), method="linear")
    assert report.applied(request) == request


def test_dropped_tokens_are_told(place: Place) -> None:
    """What only an expert has and the vocabulary lacks is named; a union lacks nothing."""
    place.add("base", ["a", "b", "c"])
    place.add("chat", ["a", "b", "c"], ["<|im_start|>", "<|im_end|>"])
    dropped = (
        "chat: 2 of its tokens are not in the vocabulary, and their rows are dropped: "
        "<|im_start|>, <|im_end|>"
    )
    assert dropped in place.align("base", "chat", source="base").remarks
    assert dropped in place.align("base", "chat", source="base", chat_template="{{ a }}").remarks
    assert not any("dropped" in one for one in place.align("base", "chat", source="union").remarks)


def test_padding_is_kept_or_dropped(place: Place) -> None:
    """Rows after the tokens stay if asked to, else go; rows that are rounded up to are the mean."""
    place.add("base", WORDS, rows=20)
    place.add("one", WORDS[:10], ["chat"], rows=14)
    before = place.store["base"].tensor(EMBEDDINGS[0])
    kept = place.align("base", "one", source="base")
    assert (kept.rows, kept.base.ref) == (20, None)
    one = place.store[kept.experts[0].ref].tensor(EMBEDDINGS[0])
    own = place.store["one"].tensor(EMBEDDINGS[0])
    assert same(one[:10], own[:10])
    assert same(one[10:12], before[10:12])
    assert same(one[12:14], own[12:14])
    assert same(one[14:], before[14:])
    dropped = place.align("base", "one", source="base", keep_padding=False)
    assert dropped.rows == 12
    assert same(place.store[dropped.base.ref].tensor(EMBEDDINGS[0]), before[:12])
    rounded = place.align("base", "one", source="union", keep_padding=False, pad_to=8)
    assert (rounded.tokens, rounded.rows) == (13, 16)
    found = place.store[rounded.base.ref].tensor(EMBEDDINGS[0])
    mean = found[:13].astype(np.float64).mean(axis=0).astype(np.float32).astype(found.dtype)
    for row in found[13:]:
        assert same(row, mean)


def test_wishes(place: Place) -> None:
    """A token's row comes from where the request says, for models that lack it, or for all."""
    place.add("base", ["a", "b", "c"])
    place.add("one", ["c", "d"])
    place.add("two", ["d", "e", "a"])
    wishes = {
        "d": TokenRow(model="two"),
        "e": TokenRow(),
        "a": TokenRow(model="one", token="c", force=True),
        "b": TokenRow(model="two", token=1),
    }
    report = place.align("base", "one", "two", tokens=wishes, keep_padding=False)
    ids = place.tokens_of(report.base.ref)
    rows = [place.store[one.ref].tensor(EMBEDDINGS[0]) for one in (report.base, *report.experts)]

    def row(name: str, token: str) -> Rows:
        found = place.row(name, EMBEDDINGS[0], token)
        assert found is not None
        return found

    base, one, two = rows
    assert same(base[ids["d"]], row("two", "d"))
    assert same(one[ids["d"]], row("one", "d"))
    assert same(base[ids["e"]], np.zeros(WIDTH, base.dtype))
    assert same(two[ids["e"]], row("two", "e"))
    for found in rows:
        assert same(found[ids["a"]], row("one", "c"))
    assert same(one[ids["b"]], row("two", "e"))


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ({"b": TokenRow()}, "no token of the vocabulary"),
        ({"zz": TokenRow(model="one")}, "has no row for 'zz'"),
        ({"a": TokenRow(model="one", token="zz")}, "has no row for 'zz'"),
        ({"a": TokenRow(model="one", token=9)}, "has no row for 9"),
    ],
)
def test_impossible_wishes(place: Place, tokens: dict[str, TokenRow], told: str) -> None:
    """A wish that names no row is an error, and nothing is stored."""
    place.add("base", ["a", "b"], rows=1)
    place.add("one", ["a", "c"])
    with pytest.raises(BadRequest, match=told):
        place.align("base", "one", source="base", tokens=tokens)
    assert {ref.name for ref in place.store.refs()} == {"base", "one"}


@pytest.mark.parametrize(("source", "first"), [("base", ["a", "b"]), ("union", ["a", "b", "c"])])
def test_new_tokens(source: str, first: list[str], place: Place) -> None:
    """Single tokens that no vocabulary has follow it, in every model, with the rows that are wished
    for; a model's added token keeps its settings."""
    place.add("base", ["a", "b"])
    place.add("one", ["a", "b", "c"], ["<x>"])
    tokens = {
        "<new>": TokenRow(model="base", token="b"),
        "<zero>": TokenRow(),
        "<x>": TokenRow(model="one"),
    }
    report = place.align("base", "one", source=source, tokens=tokens)
    wanted = [*first, "<x>", "<new>", "<zero>"] if source == "union" else [*first, *tokens]
    names = [report.base.ref, report.experts[0].ref]
    for name in names:
        ids = place.tokens_of(name)
        assert sorted(ids, key=ids.__getitem__) == wanted
        rows = place.store[name].tensor(EMBEDDINGS[0])
        assert len(rows) == len(wanted)
        assert same(rows[ids["<new>"]], place.row("base", EMBEDDINGS[0], "b"))
        assert same(rows[ids["<zero>"]], np.zeros(WIDTH, rows.dtype))
        assert same(rows[ids["<x>"]], place.row("one", EMBEDDINGS[0], "<x>"))
        document = json.loads(place.store[name].read("tokenizer.json"))
        special = {one["content"]: one["special"] for one in document["added_tokens"]}
        assert (special["<x>"], special["<new>"]) == (True, False)
        assert json.loads(place.store[name].read("config.json"))["vocab_size"] == len(wanted)
    (told,) = [remark for remark in report.remarks if "now has" in remark]
    assert ("<x>" in told) == (source == "base")
    assert "<new>, <zero>" in told


def test_tokenizer_and_config_follow(place: Place, tmp_path: Path) -> None:
    """An aligned model has the vocabulary's tokenizer, and its configs the ids of special tokens of
    the model whose tokenizer that is."""
    place.add("base", ["a", "end", "b"])
    place.add("one", ["b", "stop"], config={"eos_token_id": [1, 0], "bos_token_id": 0})
    report = place.align("base", "one", source="union")
    one = place.store[report.experts[0].ref]
    config = json.loads(one.read("config.json"))
    assert config["eos_token_id"] == 1
    assert "bos_token_id" not in config
    assert one.read("tokenizer.json") == place.store[report.base.ref].read("tokenizer.json")
    entries = json.loads(one.read("tokenizer.json"))["added_tokens"]
    assert [(entry["id"], entry["content"]) for entry in entries] == [(3, "stop")]
    other = place.align("base", "one", source="one")
    base = place.store[other.base.ref]
    assert base.read("tokenizer.json") == place.store["one"].read("tokenizer.json")
    assert place.tokens_of(other.base.ref) == {"b": 0, "stop": 1}
    config = json.loads(base.read("config.json"))
    assert (config["eos_token_id"], config["bos_token_id"]) == ([1, 0], 0)
    assert config["vocab_size"] == 2


def test_tokens_in_other_rows_are_a_warning(place: Place) -> None:
    """A plan for models of equal shapes whose rows are different tokens warns; aligned, it does
    not; nor if no embedding is merged."""
    place.add("base", ["a", "b", "c"])
    place.add("one", ["b", "a", "c"])
    place.add("two", ["a", "b", "c"])
    request = MergeRequest(base="base", experts=["one", "two"], method="linear")
    report = place.store.plan(request)
    # These models are random: that they are far from the base is no matter here.
    [told] = [one for one in report.warnings if one.kind != warnings.FAR]
    assert (told.kind, told.expert) == ("tokens in other rows", "one")
    assert "2 tokens are in other rows than the base's, such as 'b'" in told.text
    aligned = place.store.align(request, Vocabulary()).applied(request)
    assert {one.kind for one in place.store.plan(aligned).warnings} <= {warnings.FAR}
    layers = dataclasses.replace(request, only=["model.layers.*"])
    assert {one.kind for one in place.store.plan(layers).warnings} <= {warnings.FAR}


def test_nothing_is_stored_for_a_request_that_cannot_be(place: Place) -> None:
    """A request with a mistake is refused before anything is aligned."""
    place.add("base", ["a", "b"])
    place.add("one", ["a", "c"])
    for changes in ({"method": "nope"}, {"budget": "0%"}, {"experts": []}, {"experts": ["who"]}):
        request = MergeRequest(**{"base": "base", "experts": ["one"], "method": "ties"} | changes)
        with pytest.raises((BadRequest, NotFound)):
            place.store.align(request, Vocabulary())
    with pytest.raises(BadRequest, match="neither the base nor an expert"):
        place.align("base", "one", source="Union")
    assert {ref.name for ref in place.store.refs()} == {"base", "one"}


def test_it_is_a_merge_after_that(place: Place) -> None:
    """Aligned models merge, and the result has the tokens of all; without, the merge is refused."""
    place.add("base", WORDS[:8])
    place.add("one", WORDS[:8], ["chat"])
    request = MergeRequest(base="base", experts=[("one", 0.5)], method="task_arithmetic")
    with pytest.raises(Incompatible):
        place.store.plan(request)
    report = place.store.align(request, Vocabulary())
    aligned = report.applied(request)
    assert (aligned.base, report.experts[0].ref) == ("aligned/base", None)
    place.store.merge(place.store.plan(aligned), name="merged")
    merged = place.store["merged"]
    assert place.tokens_of("merged")["chat"] == 8
    found = merged.tensor(EMBEDDINGS[0])
    # The base took the row from the expert, so the merge does not move it.
    assert same(found[8], place.store["one"].tensor(EMBEDDINGS[0])[8])
    roles = [(one.role, one.refs) for one in merged.parents]
    assert roles == [("base", ("aligned/base",)), ("expert", ("one",))]
    (origin,) = place.store["aligned/base"].parents
    assert (origin.role, origin.refs) == ("base", ("base",))
    assert place.store.fsck(read_data=True).problems == ()


def test_chat_templates(place: Place, tmp_path: Path) -> None:
    """The base gets the chat template that was asked for, or the one that most models have; where
    it was written before, it is no more."""
    for name, template in (("base", "{{ a }}"), ("one", "{{ b }}"), ("two", "{{ b }}\n")):
        path = model(tmp_path / f"m/{name}", WORDS, seed=1)
        told = {"chat_template": template, "tokenizer_class": "X"}
        (path / "tokenizer_config.json").write_text(json.dumps(told))
        place.store.add(path, name=name)
    for asked, wanted in (("auto", "{{ b }}"), ("{{ c }}", "{{ c }}")):
        report = place.align("base", "one", "two", source="base", chat_template=asked)
        assert [one.ref for one in report.experts] == [None, None]
        base = place.store[report.base.ref]
        assert base.read("chat_template.jinja").decode() == wanted
        assert json.loads(base.read("tokenizer_config.json")) == {"tokenizer_class": "X"}
        assert (
            base.tensor(EMBEDDINGS[0]).tobytes()
            == place.store["one"].tensor(EMBEDDINGS[0]).tobytes()
        )
    for asked in ("{{ a }}", None):
        assert place.align("base", "one", chat_template=asked).base.ref is None


def test_what_is_shared_is_shared(place: Place) -> None:
    """Only rows that move are written: a vocabulary that grows at its end costs its last block."""
    words = [f"w{number}" for number in range(4000)]
    place.add("base", words, tied=True)
    place.add("one", words, ["chat"], tied=True)
    report = place.align("base", "one")
    plain = place.store["base"].tensor(EMBEDDINGS[1]).nbytes
    tokenizer = len(place.store["aligned/base"].read("tokenizer.json"))
    assert report.bytes_written < tokenizer + plain / 4


def test_element_types_may_differ(place: Place) -> None:
    """A row of another model is rounded to the type of the model that takes it."""
    place.add("base", ["a", "b"], dtype=np.float16)
    place.add("one", ["a", "c"], dtype=np.float32)
    report = place.align("base", "one")
    for number, one in enumerate((report.base, *report.experts)):
        rows = place.store[one.ref].tensor(EMBEDDINGS[0])
        assert rows.dtype == (np.float16, np.float32)[number]
    assert_aligned(place, ["base", "one"], report, base_first=True)


def test_models_without_a_tokenizer(place: Place) -> None:
    """Tokens of a model without tokenizer.json are the base's if it has as many rows; else, or for
    a base without one, the model is refused."""
    place.add("base", ["a", "b"])
    place.add("one", ["a", "b"], tokenizer=False)
    place.add("two", ["a", "b", "c"], tokenizer=False)
    report = place.align("base", "one")
    assert report.experts[0].ref is None
    assert "one: no tokenizer.json" in report.remarks[0]
    with pytest.raises(Incompatible, match="which tokens they are is not known"):
        place.align("base", "two")
    with pytest.raises(Incompatible, match="its tokens are not known"):
        place.align("one", "base")
    assert place.align("one", "one").rows == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b'{"model": {}}',
        b'{"model": {"vocab": {"a": -1}}}',
        b'{"model": {"vocab": {"a": true}}}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": {}}',
        b'{"model": {"vocab": [["a", 0.5], 3]}}',
        b'{"model": ' + b'{"a":' * 100_000,
    ],
)
def test_no_tokenizer(raw: bytes) -> None:
    """A file that is no tokenizer is refused by the name of its model."""
    with pytest.raises(Incompatible) as found:
        tokenizers.parse(raw, "one")
    assert found.value.where == "one"


def test_unigram_vocabularies_are_lists() -> None:
    """Tokens of a Unigram model are numbered as they stand, and scores stay as they are."""
    raw = b'{"model": {"type": "Unigram", "vocab": [["a", -1.25], ["b", -1e-07]]}}'
    one = tokenizers.parse(raw, "one")
    assert one.ids == {"a": 0, "b": 1}
    other = tokenizers.parse(tokenizer_json(["b", "c"]).encode(), "two")
    both = tokenizers.union(one, [other])
    assert both.ids == {"a": 0, "b": 1, "c": 2}
    assert json.loads(both.encode())["model"] == json.loads(raw)["model"]


def test_rows_that_another_type_cannot_hold_are_refused() -> None:
    """A finite row of a model in bfloat16 never becomes infinite in one in float16."""
    dtype = np.dtype(np.float16)
    large = np.array([[1.0, 7e4]], dtype=ml_dtypes.bfloat16)
    given = [np.array([MISSING]), np.array([0])]
    own = np.zeros((0, 2), dtype=np.float16)
    for member in (1, MEAN):
        places = RowOrigins(np.array([member]), np.array([0]))
        with pytest.raises(Incompatible, match="too large for float16"):
            gathered(places, slice(0, 1), [own, large], given, dtype, None)
    odd = np.array([[1.0, np.inf]], dtype=ml_dtypes.bfloat16)
    places = RowOrigins(np.array([1]), np.array([0]))
    assert np.isinf(gathered(places, slice(0, 1), [own, odd], given, dtype, None)).any()


# -- models of a snapshot ------------------------------------------------------------------------

FORMS = {"": ml_dtypes.bfloat16, ".fp16": np.float16}


def encoder(root: Path, number: str, tokens: Sequence[str], seed: int) -> None:
    """A text encoder of a pipeline in two forms, and its tokenizer beside it."""
    folder = root / f"text_encoder{number}"
    for form, dtype in FORMS.items():
        made = model(root / "made", tokens, dtype=dtype, seed=seed)
        folder.mkdir(exist_ok=True)
        (made / "model.safetensors").rename(folder / f"model{form}.safetensors")
        for path in made.iterdir():
            home = f"tokenizer{number}" if path.name == "tokenizer.json" else folder.name
            (root / home).mkdir(exist_ok=True)
            path.rename(root / home / path.name)
        made.rmdir()


def pipeline(root: Path, tokens: Sequence[str], seed: int) -> Path:
    """A pipeline whose second text encoder has these tokens, and whose first has others."""
    root.mkdir()
    encoder(root, "", ["a", "b", "c"], 50)
    encoder(root, "_2", tokens, seed)
    (root / "model_index.json").write_text("{}")
    return root


def test_a_component_of_a_pipeline_is_aligned(place: Place) -> None:
    """With REF:MODEL, tokens are those of the component's own tokenizer, which lies beside it; all
    forms of the component get the rows, each in its type, and everything else stays."""
    place.store.add(pipeline(place.root / "base", ["a", "b"], 1), name="base")
    place.store.add(pipeline(place.root / "one", ["b", "x"], 2), name="one", base=None)
    part = "text_encoder_2"
    report = place.align(f"base:{part}", "one", keep_padding=False)
    assert (report.tokens, report.rows) == (3, 3)
    assert report.base.aligned() == f"aligned/base-{part}:{part}"
    assert report.experts[0].aligned() == "aligned/one"
    base, one = (place.store[told.ref] for told in (report.base, *report.experts))
    for form, dtype in (("", ml_dtypes.bfloat16), ("@fp16", np.float16)):
        for tensor in EMBEDDINGS:
            name = f"{part}{form}:{tensor}"
            rows, before = (found.tensor(name) for found in (base, place.store["base"]))
            assert rows.dtype == dtype
            assert same(rows[:2], before)
            assert same(rows[2], place.store["one"].tensor(name)[1])
    raw = base.read("tokenizer_2/tokenizer.json")
    assert dict(tokenizers.parse(raw, "base").ids) == {"a": 0, "b": 1, "x": 2}
    assert json.loads(base.read(f"{part}/config.json"))["vocab_size"] == 3
    changed = {"tokenizer_2", part}
    for name, found in (("base", base), ("one", one)):
        files = {file.path for file in found.files()}
        assert files == {file.path for file in place.store.files(name)}
        differ = {file.path.split("/")[0] for file in place.store.diff(name, found).files}
        assert differ == changed
    request = MergeRequest(base=f"base:{part}", experts=["one"], method="linear")
    place.store.merge(place.store.plan(report.applied(request)), name="merged")
    merged = place.store["merged"].load(model=part)
    assert same(merged[EMBEDDINGS[1]], one.load(model=part)[EMBEDDINGS[1]])


def test_components_of_one_snapshot_are_aligned(place: Place) -> None:
    """Two models of one snapshot are two members; each is stored with its own rows."""
    place.store.add(pipeline(place.root / "base", ["b", "x"], 1), name="base")
    report = place.align("base:text_encoder", "base:text_encoder_2", keep_padding=False)
    told = [report.base.aligned(), report.experts[0].aligned()]
    assert told == [
        "aligned/base-text_encoder:text_encoder",
        "aligned/base-text_encoder_2:text_encoder_2",
    ]
    for revision in told:
        name, _, part = revision.partition(":")
        assert len(place.store[name].load(model=part)[EMBEDDINGS[0]]) == report.rows == 4


def test_forms_of_a_model_are_aligned_each_in_its_type(place: Place) -> None:
    """A variant beside a model gets the rows of tokens, too, and keeps its type; an expert with one
    form stands for the base's."""
    for name, tokens in (("base", ["a", "b"]), ("one", ["b", "x"])):
        place.add(name, tokens)
    half = model(place.root / "half", ["b", "x"], dtype=np.float16, seed=3)
    both = model(place.root / "both", ["a", "b"], seed=0)
    (model(place.root / "other", ["a", "b"], dtype=np.float16) / "model.safetensors").rename(
        both / "model.fp16.safetensors"
    )
    place.store.add(both, name="both", base=None)
    report = place.align("both", "one", keep_padding=False)
    found = place.store[report.base.ref]
    for name, dtype in (("", ml_dtypes.bfloat16), ("@fp16:", np.float16)):
        for tensor in EMBEDDINGS:
            assert (found.tensor(name + tensor).dtype, len(found.tensor(name + tensor))) == (
                dtype,
                3,
            )
    (half / "model.safetensors").rename(half / "model.fp16.safetensors")
    place.store.add(half, name="half", base=None)
    report = place.align("base", "half", keep_padding=False)
    rows = place.store[report.base.ref].tensor(EMBEDDINGS[0])
    donor = place.store["half"].tensor(f"@fp16:{EMBEDDINGS[0]}")
    assert same(rows[2], donor[1].astype(rows.dtype))
