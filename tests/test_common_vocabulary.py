"""The tokens that all models have: tokenizers of the `tokenizers` library with tokens dropped, as
transformers loads and uses them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from later import Later
from safetensors.numpy import save_file
from small_models import BLOCK

from mstore import MergeRequest, Store, Vocabulary
from mstore.models.vocabulary.target import kept_tokens, reduced
from mstore.models.vocabulary.tokenizer import parse
from mstore.terms.errors import Incompatible

tokenizers = Later("tokenizers")
transformers = Later("transformers")
torch = Later("torch")

TEXTS = (
    "def add(first, second): return first + second",
    "the quick brown fox jumps over the lazy dog, and then the other one",
    "numbers 1234 5678, naïve café, 日本語 ✓\n\tindented",
)
SPECIAL = ("<s>", "</s>", "<pad>")
ADDED = ("<|im_start|>", "<|tool|>", "<|unused|>")
WIDTH = 8


def trained(kind: str) -> Any:
    """A tokenizer of this kind, trained on the texts, with special tokens first and last."""
    t = tokenizers
    corpus = [text for text in TEXTS[:2] for _ in range(4)] + ["there then these the them"] * 4
    special = [*SPECIAL, "<unk>"]
    if kind == "byte-level BPE":
        made = t.Tokenizer(t.models.BPE())
        made.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = t.decoders.ByteLevel()
        alphabet = t.pre_tokenizers.ByteLevel.alphabet()
        trainer = t.trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "WordPiece":
        made = t.Tokenizer(t.models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer = t.pre_tokenizers.Whitespace()
        made.decoder = t.decoders.WordPiece()
        trainer = t.trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=special, show_progress=False
        )
    else:
        made = t.Tokenizer(t.models.Unigram())
        made.pre_tokenizer = t.pre_tokenizers.Metaspace()
        made.decoder = t.decoders.Metaspace()
        trainer = t.trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    made.train_from_iterator(corpus, trainer)
    made.add_special_tokens([t.AddedToken(one, special=True) for one in ADDED])
    ids = [(one, made.token_to_id(one)) for one in SPECIAL[:2]]
    made.post_processor = t.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=ids
    )
    return made


def written(
    path: Path,
    tokenizer: str,
    *,
    config: Mapping[str, object] = {},
    seed: int = 0,
    **files: object,
) -> Path:
    """A model with these tokens, a row for each and three more."""
    path.mkdir(parents=True)
    ids = parse(tokenizer.encode(), "").ids
    rows = max(ids.values()) + 4
    rng = np.random.default_rng(seed)
    embedding = rng.standard_normal((rows, WIDTH)).astype(np.float32)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": 2 * embedding}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    own = {"bos_token_id": "<s>", "eos_token_id": "</s>", "pad_token_id": "<pad>"}
    named = {key: ids[token] for key, token in own.items() if token in ids}
    fields = {"model_type": "llama", "vocab_size": rows, **named, **config}
    (path / "config.json").write_text(json.dumps(fields))
    (path / "tokenizer.json").write_text(tokenizer)
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    told["pad_token"] = "<pad>"
    for name, content in {"tokenizer_config": told, **files}.items():
        suffix = "" if "." in name else ".json"
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}{suffix}").write_text(text)
    return path


def lacking(tokenizer: str, tokens: Collection[str]) -> str:
    """A tokenizer file without these tokens, made without the code under test: only its tokens
    count."""
    document = json.loads(tokenizer)
    model = document["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [one for one in model["vocab"] if one[0] not in tokens]
    else:
        left = [token for token in model["vocab"] if token not in tokens]
        model["vocab"] = {token: number for number, token in enumerate(left)}
    added = [one for one in document["added_tokens"] if one["content"] not in tokens]
    start = len(model["vocab"])
    for one in added:
        place = [token[0] if isinstance(token, list) else token for token in model["vocab"]]
        if one["content"] in place:
            one["id"] = place.index(one["content"])
        else:
            one["id"], start = start, start + 1
    document["added_tokens"] = added
    return json.dumps(document)


class Place:
    """A store with a base and an expert that lacks some of its tokens."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store.init(root / "store", block_size=BLOCK)
        self.rows: dict[str, Any] = {}

    def add(self, name: str, tokenizer: str, **more: Any) -> None:
        path = written(self.root / name, tokenizer, seed=len(self.rows), **more)
        self.store.add(path, name=name)
        self.rows[name] = self.store[name].tensor("model.embed_tokens.weight")

    def align(self, *names: str, **more: Any) -> Any:
        request = MergeRequest(base=names[0], experts=names[1:], method="linear")
        return self.store.align(request, Vocabulary(source="common", **more))

    def out(self, name: str) -> Path:
        path = self.root / f"out-{name.replace('/', '-')}"
        self.store.checkout(name, path)
        return path


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    with place.store:
        yield place


def dropped_of(tokenizer: Any) -> set[str]:
    """Some of its tokens: long ones, one that others are merged from, and an added one."""
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    plain = [one for one in tokens if one not in (*SPECIAL, *ADDED, "<unk>")]
    longest = sorted(plain, key=len)[-12:]
    short = [one for one in plain if len(one) == 2][:3]
    return {*longest[::2], *short, "<|tool|>"}


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["byte-level BPE", "WordPiece", "Unigram"])
def test_the_result_is_a_tokenizer(place: Place, kind: str) -> None:
    """transformers loads it; what has no dropped token is encoded to the same tokens, everything
    else to smaller ones, and any text comes back; each token has its own row."""
    base = trained(kind)
    gone = dropped_of(base)
    place.add("base", base.to_str())
    place.add("tuned", lacking(base.to_str(), gone))
    report = place.align("base", "tuned")
    found = transformers.AutoTokenizer.from_pretrained(place.out(report.base.ref))
    before = transformers.AutoTokenizer.from_pretrained(place.root / "base")
    old, new = before.get_vocab(), found.get_vocab()
    assert len(new) == report.tokens == report.rows
    assert "<|tool|>" not in new
    left = old.keys() - new.keys()
    assert len(left) >= 4
    assert left <= gone
    assert [one for one in sorted(old, key=old.get) if one in new] == sorted(new, key=new.get)
    assert sorted(new.values()) == list(range(len(new)))
    changed = 0
    for text in (*TEXTS, *(text[: len(text) // 2] for text in TEXTS), "the <|im_start|> end"):
        one, other = before(text)["input_ids"], found(text)["input_ids"]
        tokens = before.convert_ids_to_tokens(one)
        mine = found.convert_ids_to_tokens(other)
        if left.isdisjoint(tokens):
            assert mine == tokens
        changed += not left.isdisjoint(tokens)
        assert found.decode(other, skip_special_tokens=True) == before.decode(
            one, skip_special_tokens=True
        )
        assert (mine[0], mine[-1]) == ("<s>", "</s>")
    assert changed
    if kind == "byte-level BPE":
        for text in TEXTS:
            assert found.decode(found(text)["input_ids"], skip_special_tokens=True) == text
        for token in new.keys() - {*SPECIAL, *ADDED, "<unk>"}:
            text = before.convert_tokens_to_string([token])
            if before.tokenize(text) == [token]:
                assert found.tokenize(text) == [token], token
    for name, model in (("base", report.base), ("tuned", report.experts[0])):
        rows = place.store[model.ref].tensor("model.embed_tokens.weight")
        heads = place.store[model.ref].tensor("lm_head.weight")
        own = parse((place.root / name / "tokenizer.json").read_bytes(), "").ids
        for token, at in new.items():
            donor, number = (name, own[token]) if token in own else ("base", old[token])
            assert np.array_equal(rows[at], place.rows[donor][number]), (name, token)
            assert np.array_equal(heads[at], 2 * place.rows[donor][number])
        config = json.loads(place.store[model.ref].read("config.json"))
        assert config["vocab_size"] == len(new)
        for key, token in (("bos", "<s>"), ("eos", "</s>"), ("pad", "<pad>")):
            assert config[f"{key}_token_id"] == new[token]
    assert any("of its tokens are not in the vocabulary" in remark for remark in report.remarks)


def test_it_is_the_base_where_experts_have_its_tokens(place: Place) -> None:
    """Where all have the base's tokens, and some more, common is base: the same models."""
    base = trained("byte-level BPE")
    place.add("base", base.to_str())
    base.add_special_tokens(["<|chat|>"])
    place.add("chat", base.to_str())
    request = MergeRequest(base="base", experts=["chat"], method="linear")
    wanted = place.store.align(request, Vocabulary(source="base"))
    found = place.align("base", "chat")
    assert found.base.ref is None
    assert found.experts[0].snapshot == wanted.experts[0].snapshot
    assert not found.experts[0].new_snapshot
    assert (found.tokens, found.rows) == (wanted.tokens, wanted.rows)


def test_what_others_are_merged_from_stays(place: Place) -> None:
    """A token of a BPE that a token which stays is merged from stays, too, and a remark names it;
    where nothing is left to drop, it is the base's vocabulary."""
    vocabulary = {token: number for number, token in enumerate(["t", "h", "e", "x", "th", "the"])}
    model = {"type": "BPE", "vocab": {**vocabulary, "ex": 6}, "merges": ["t h", "th e", "e x"]}
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    place.add("base", text, tokenizer_config="{}")
    place.add("tuned", lacking(text, {"th", "x", "ex"}), tokenizer_config="{}")
    report = place.align("base", "tuned")
    document = json.loads(place.store[report.base.ref].read("tokenizer.json"))
    assert document["model"]["vocab"] == vocabulary
    assert document["model"]["merges"] == ["t h", "th e"]
    (remark,) = [one for one in report.remarks if one.startswith("2 tokens that not all")]
    assert remark.endswith(": x, th")
    place.add("other", lacking(text, {"th", "x"}), tokenizer_config="{}")
    assert place.align("base", "other").base.ref is None


NAMED: dict[str, Callable[[int], dict[str, Any]]] = {
    "a config": lambda id: {"config": {"image_token_id": id}},
    "a list of a config": lambda id: {"generation_config": {"eos_token_id": [1, id]}},
    "a part of a config": lambda id: {"config": {"text_config": {"pad_token_id": id}}},
    "tokens not to be written": lambda id: {"generation_config": {"suppress_tokens": [id, -1]}},
    "a tokenizer's config": lambda _: {
        "tokenizer_config": {"additional_special_tokens": ["<|tool|>"]}
    },
    "special tokens": lambda _: {"special_tokens_map": {"mask_token": {"content": "<|tool|>"}}},
    "a chat template": lambda _: {"chat_template.jinja": "{{ '<|tool|>' }}"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", NAMED)
def test_what_is_named_stays(place: Place, case: str) -> None:
    """A token that a config, a tokenizer's config or a chat template names stays, and configs have
    its new id."""
    base = trained("byte-level BPE")
    more = NAMED[case](base.token_to_id("<|tool|>"))
    place.add("base", base.to_str(), **more)
    place.add("tuned", lacking(base.to_str(), dropped_of(base)))
    report = place.align("base", "tuned")
    found = place.store[report.base.ref]
    new = parse(found.read("tokenizer.json"), "").ids
    assert "<|tool|>" in new
    assert new["<|tool|>"] < base.token_to_id("<|tool|>")
    if "config" in more or "generation_config" in more:
        path = "config.json" if "config" in more else "generation_config.json"
        told = json.dumps(json.loads(found.read(path)))
        assert str(new["<|tool|>"]) in told
        assert str(base.token_to_id("<|tool|>")) not in told
        assert "-1" in told or "suppress_tokens" not in told


def test_other_forms_of_the_tokenizer_go(place: Place) -> None:
    """Files with the ids of before are left out, and the listed added tokens have the new ones."""
    base = trained("byte-level BPE")
    listed = {str(base.token_to_id(one)): {"content": one} for one in ADDED}
    more = {"tokenizer_config": {"added_tokens_decoder": listed, "bos_token": "<s>"}}
    place.add("base", base.to_str(), vocab={}, **{"merges.txt": "a b"}, added_tokens={}, **more)
    place.add("tuned", lacking(base.to_str(), dropped_of(base)))
    found = place.store[place.align("base", "tuned").base.ref]
    paths = {file.path for file in found.files()}
    assert not paths & {"vocab.json", "merges.txt", "added_tokens.json"}
    new = parse(found.read("tokenizer.json"), "").ids
    told = json.loads(found.read("tokenizer_config.json"))["added_tokens_decoder"]
    assert told == {str(new[one]): {"content": one} for one in ADDED if one != "<|tool|>"}


def test_padding_goes(place: Place) -> None:
    """Where tokens are dropped, rows after the tokens go too; they can be asked for."""
    base = trained("byte-level BPE")
    place.add("base", base.to_str())
    place.add("tuned", lacking(base.to_str(), dropped_of(base)))
    report = place.align("base", "tuned", pad_to=64)
    assert report.rows == -(-report.tokens // 64) * 64


def test_words_are_never_dropped(place: Place) -> None:
    """A tokenizer of whole words could not write a dropped one: all stay."""
    words = ["<unk>", "the", "quick", "fox"]
    model = {"type": "WordLevel", "vocab": {one: n for n, one in enumerate(words)}}
    text = json.dumps({"added_tokens": [], "model": {**model, "unk_token": "<unk>"}})
    place.add("base", text)
    place.add("tuned", lacking(text, {"quick"}))
    report = place.align("base", "tuned")
    assert report.base.ref is None
    assert report.tokens == 4


def changed(tokenizer: str, **fields: Any) -> str:
    return json.dumps({**json.loads(tokenizer), **fields})


REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "an id of no token": (
        lambda _: {"config": {"pad_token_id": 99_999}},
        "config.json: pad_token_id is 99999, which is no token",
    ),
    "another form": (
        lambda _: {"generation_config": {"forced_decoder_ids": [[1, 2]]}},
        "generation_config.json: forced_decoder_ids names tokens in a way that is not known",
    ),
    "a post-processor": (
        lambda one: {"tokenizer": changed(one.to_str(), post_processor={"type": "Other"})},
        "its post-processor is of the type 'Other'",
    ),
    "a model": (
        lambda one: {
            "tokenizer": changed(
                one.to_str(), model={**json.loads(one.to_str())["model"], "type": "Other"}
            )
        },
        "its model is of the type 'Other'",
    ),
    "a merge": (
        lambda one: {
            "tokenizer": changed(
                one.to_str(), model={**json.loads(one.to_str())["model"], "merges": ["a b c"]}
            )
        },
        "it has an unknown form",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_is_refused(place: Place, case: str) -> None:
    """Ids or tokens in a form that is not known are refused, and nothing is stored; the hint is the
    base's vocabulary, which needs none of that."""
    base = trained("byte-level BPE")
    make, says = REFUSED[case]
    more = make(base)
    place.add("base", more.pop("tokenizer", base.to_str()), **more)
    place.add("tuned", lacking(base.to_str(), dropped_of(base)))
    with pytest.raises(Incompatible, match=says) as refused:
        place.align("base", "tuned")
    assert refused.value.where == "base"
    assert "base" in str(refused.value.hint)
    assert not [one for one in place.store.refs() if one.name.startswith("aligned/")]


def test_a_token_that_an_expert_names_alone(place: Place) -> None:
    """A setting of an expert that is no token's of the vocabulary is refused, by its name."""
    base = trained("byte-level BPE")
    place.add("base", base.to_str())
    document = json.loads(lacking(base.to_str(), dropped_of(base)))
    id = max(one["id"] for one in document["added_tokens"]) + 1
    document["added_tokens"].append({"content": "<image>", "id": id})
    place.add("tuned", json.dumps(document), config={"image_token_id": id})
    with pytest.raises(
        Incompatible, match=r"image_token_id is .*<image>, which not all"
    ) as refused:
        place.align("base", "tuned")
    assert refused.value.where == "tuned"


def test_added_tokens_in_between() -> None:
    """Added tokens that come before others of the vocabulary cannot be numbered as the library
    does."""
    document = {
        "added_tokens": [{"content": "<x>", "id": 1}],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 2, "c": 3}, "merges": []},
    }
    with pytest.raises(Incompatible, match="added tokens do not follow"):
        reduced(parse(json.dumps(document).encode(), ""), ["a", "<x>", "c"])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_processors_of_pairs(kind: str) -> None:
    """Those of BERT and RoBERTa have tokens and ids beside each other."""
    types = {"bert": "BertProcessing", "roberta": "RobertaProcessing"}
    document = {
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "s": 3}, "merges": []},
        "post_processor": {
            "type": "Sequence",
            "processors": [
                {"type": types[kind], "sep": ["s", 3], "cls": ["c", 2]},
                {"type": "ByteLevel"},
            ],
        },
    }
    found = reduced(parse(json.dumps(document).encode(), ""), ["a", "c", "s"])
    own, _ = found.document["post_processor"]["processors"]
    assert (own["sep"], own["cls"]) == (["s", 2], ["c", 1])


@pytest.mark.rest
def test_a_model_goes_on_with_fewer_tokens(place: Place, tmp_path: Path) -> None:
    """A merge of models with their common tokens generates with transformers; the aligned base
    gives the base's logits for the tokens that stay."""
    base = trained("byte-level BPE")
    gone = dropped_of(base)
    torch.manual_seed(0)
    made = {}
    for name, text in (("base", base.to_str()), ("tuned", lacking(base.to_str(), gone))):
        ids = parse(text.encode(), "").ids
        config = transformers.LlamaConfig(
            vocab_size=len(ids),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            bos_token_id=ids["<s>"],
            eos_token_id=ids["</s>"],
            pad_token_id=ids["<pad>"],
        )
        model = transformers.LlamaForCausalLM(config).eval()
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(text)
        told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(told))
        place.store.add(tmp_path / name, name=name)
        made[name] = model
    request = MergeRequest(base="base", experts=[("tuned", 0.5)], method="task_arithmetic")
    report = place.store.align(request, Vocabulary(source="common"))
    place.store.merge(place.store.plan(report.applied(request)), name="merged")
    before = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    aligned = transformers.LlamaForCausalLM.from_pretrained(place.out(report.base.ref)).eval()
    found = transformers.AutoTokenizer.from_pretrained(place.out("merged"))
    old, new = before.get_vocab(), found.get_vocab()
    assert old.keys() - new.keys()
    order = sorted(new, key=new.get)
    text = next(
        text[:n]
        for text in TEXTS
        for n in range(len(text), 0, -1)
        if set(before.tokenize(text[:n])) <= new.keys()
    )
    with torch.no_grad():
        one = made["base"](torch.tensor([before(text)["input_ids"]])).logits
        other = aligned(torch.tensor([found(text)["input_ids"]])).logits
    assert torch.allclose(one[..., [old[token] for token in order]], other, atol=1e-5)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out-merged")
    wrote = merged.generate(
        torch.tensor([found(TEXTS[0])["input_ids"]]), max_new_tokens=5, do_sample=False
    )
    assert int(wrote.max()) < len(new)
    assert found.decode(found(TEXTS[2])["input_ids"], skip_special_tokens=True) == TEXTS[2]


@pytest.mark.parametrize("fallback", [False, True])
def test_what_no_others_can_write_stays(fallback: bool) -> None:
    """A token of characters that are no tokens stays, unless there are tokens for all bytes; so do
    bytes, single characters, and pieces within a word of such."""
    scores = [["<unk>", 0.0], ["a", -1.0], ["b", -1.0], ["ab", -2.0], ["日本", -2.0]]
    scores += [[f"<0x{number:02X}>", -9.0] for number in range(256)] if fallback else []
    model = {"type": "Unigram", "vocab": scores, "unk_id": 0, "byte_fallback": fallback}
    tokenizer = parse(json.dumps({"added_tokens": [], "model": model}).encode(), "")
    kept = kept_tokens(tokenizer, {"a"}, lambda _: None)
    assert kept & {"<unk>", "a", "b", "ab"} == {"<unk>", "a", "b"}
    assert ("日本" in kept) != fallback
    assert len(kept) == (259 if fallback else 4)
    pieces = {
        token: n for n, token in enumerate(["[UNK]", "u", "##n", "##d", "un", "##nd", "##é!"])
    }
    model = {"type": "WordPiece", "vocab": pieces, "continuing_subword_prefix": "##"}
    model["unk_token"] = "[UNK]"
    tokenizer = parse(json.dumps({"added_tokens": [], "model": model}).encode(), "")
    kept = kept_tokens(tokenizer, set(), lambda _: None)
    assert kept == {"[UNK]", "u", "##n", "##d", "##é!"}
