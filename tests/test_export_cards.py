"""The card of an export: README.md with what the store knows, the same by `checkout --card`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_runs import Program
from hub import Hub
from huggingface_hub import ModelCard, constants
from small_models import files_of, small_model
from test_exports import merged
from test_hub import ADAPTER, PIPELINE, hub, store

from mstore import Store
from mstore.exports.card import BEGIN, END

__all__ = ["hub", "store"]


def card_of(store: Store, name: str, directory: Path) -> str:
    """The card that a checkout writes."""
    store.checkout(name, directory, card=True)
    return (directory / "README.md").read_text()


def data(text: str) -> dict[str, Any]:
    """The front matter of a card, which the parser of huggingface_hub takes too."""
    ModelCard(text)
    found = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def add(
    store: Store, directory: Path, name: str, readme: str | None, more: Mapping[str, bytes] = {}
) -> Path:
    """Add a small model with this README.md."""
    made = directory / name
    made.mkdir()
    small_model(made, name)
    for path, content in more.items():
        (made / path).write_bytes(content)
    if readme is not None:
        (made / "README.md").write_text(readme, newline="")
    store.add(made, name=name)
    return made


def test_a_merge(hub: Hub, store: Store, tmp_path: Path) -> None:
    """A merge's card names base and experts as the Hub does, relation, licence, tags and scores."""
    own = merged(hub, store, tmp_path)
    store.note("merged", {"mmlu": {"scores": {"acc": 0.61}}, "judge": 8.1}, kind="evaluation")
    text = card_of(store, "merged", tmp_path / "x")
    found = data(text)
    assert found["base_model"] == ["org/base", "org/math", "org/code"]
    assert found["base_model_relation"] == "merge"
    assert found["license"] == "mit"
    assert found["library_name"] == "transformers"
    assert found["tags"] == ["merge", "mergekit", "mstore"]
    results = ModelCard(text).data.eval_results
    assert results is not None
    assert {(one.dataset_name, one.metric_type, one.metric_value) for one in results} == {
        ("mmlu", "acc", 0.61),
        ("judge", "judge", 8.1),
    }
    section = text[text.index(BEGIN) : text.index(END)]
    assert store["merged"].id.hex() in section
    assert store["math"].manifest.hex() in section
    commit = hub.models["org/math"].refs["main"]
    assert f"({hub.url}/org/math/tree/{commit})" in section
    # Its own text stays, but for the request that is fulfilled.
    assert "# A merge of 2 models by linear" in text
    assert "before you publish" in own["README.md"].decode()
    assert "before you publish" not in text


def test_checkout_writes_what_export_sends(
    hub: Hub, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`checkout --card` writes card and recipe of an export, and all other files as they are."""
    own = merged(hub, store, tmp_path)
    report = store.export("merged", "hf://org/copy", dry_run=True)
    Program(store.path).succeed("checkout", "merged", tmp_path / "x", "--card")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    store.export("merged", "hf://org/copy")
    assert files_of(tmp_path / "x") == hub.models["org/copy"].tip()
    assert files_of(tmp_path / "x").keys() == own.keys()
    assert (tmp_path / "x" / "README.md").read_text() == report.card
    # The snapshot stays as it is.
    assert b"".join(store.read_file("merged", "README.md")) == own["README.md"]


def test_a_checkout_of_some_files_has_the_card_if_it_matches(
    hub: Hub, store: Store, tmp_path: Path
) -> None:
    """Patterns choose the card like any other file, also one that the snapshot lacks."""
    add(store, tmp_path, "m", None)
    store.checkout("m", tmp_path / "a", card=True, only=["*.json"])
    assert files_of(tmp_path / "a").keys() == {"config.json"}
    report = store.checkout("m", tmp_path / "b", card=True, only=["README.md"])
    assert files_of(tmp_path / "b").keys() == {"README.md"}
    assert report.bytes_written == (tmp_path / "b" / "README.md").stat().st_size


README = """---
# what I say
license: apache-2.0
library_name: "mylib"
tags: [chat, mine]
base_model:
  - my/base
model-index:
- name: own
  results: []
language:
- en
---
# Mine

Text with --- dashes.
---
The end.
"""


def test_what_the_user_says_stays(hub: Hub, store: Store, tmp_path: Path) -> None:
    """Keys that are set stay, byte for byte, and so does the text; one section comes after it."""
    add(store, tmp_path, "m", README)
    store.note("m", {"mmlu": 0.5}, kind="evaluation")
    text = card_of(store, "m", tmp_path / "x")
    assert text.startswith(README)
    assert text[len(README) :].strip().startswith(BEGIN)
    assert data(text) == data(README)


@pytest.mark.parametrize(
    "readme",
    [
        "",
        "# Only text\n",
        "---\nlanguage: en\n# Never ended\n",
        "---\r\nlanguage: en\r\n---\r\n# X\r\n",
    ],
)
def test_odd_readmes(readme: str, hub: Hub, store: Store, tmp_path: Path) -> None:
    """A README.md without front matter gets one, and its text stays."""
    add(store, tmp_path, "m", readme)
    text = card_of(store, "m", tmp_path / "x")
    assert data(text)["tags"] == ["mstore"]
    assert data(text)["library_name"] == "transformers"
    last = readme.strip().rpartition("\n")[2]
    assert last in text
    assert ("language" in data(text)) == ("\r" in readme)


def test_a_readme_that_is_no_text(hub: Hub, store: Store, tmp_path: Path) -> None:
    """Bytes that are not UTF-8 go as they are."""
    add(store, tmp_path, "m", None, {"README.md": b"\xff\xfe"})
    store.checkout("m", tmp_path / "x", card=True)
    assert (tmp_path / "x" / "README.md").read_bytes() == b"\xff\xfe"


def test_the_section_is_replaced(hub: Hub, store: Store, tmp_path: Path) -> None:
    """The card of a card has one section, and what was written behind it."""
    add(store, tmp_path, "m", "# M\n")
    first = card_of(store, "m", tmp_path / "x")
    add(store, tmp_path, "n", first + "\nMore text.\n")
    second = card_of(store, "n", tmp_path / "y")
    assert second.count(BEGIN) == second.count(END) == 1
    assert "More text." in second
    assert store["m"].id.hex() not in second
    assert store["n"].id.hex() in second


def test_a_fine_tune(hub: Hub, store: Store, tmp_path: Path) -> None:
    """A fine-tune of a model of the Hub names it, and has its licence."""
    (tmp_path / "base").mkdir()
    files = files_of(small_model(tmp_path / "base", "one"))
    licence = b"license: other\nlicense_name: llama3\nlicense_link: https://example.org/l\n"
    files["README.md"] = b"---\n" + licence + b"---\n"
    hub.model("org/base", files)
    store.add("hf://org/base", name="base")
    (tmp_path / "own").mkdir()
    store.add(small_model(tmp_path / "own", "one", changed="x"), name="own", base="base")
    (tmp_path / "again").mkdir()
    store.add(small_model(tmp_path / "again", "one", changed="y"), name="again", base="own")
    found = data(card_of(store, "own", tmp_path / "x"))
    assert (found["base_model"], found["base_model_relation"]) == ("org/base", "finetune")
    assert found["license"] == "other"
    assert found["license_name"] == "llama3"
    assert found["license_link"] == "https://example.org/l"
    # What it was tuned from is on no Hub: the nearest model that is there.
    text = card_of(store, "again", tmp_path / "y")
    assert data(text)["base_model"] == "org/base"
    assert "| base | tuned from [org/base]" in text


def test_an_adapter_and_a_pipeline(hub: Hub, store: Store, tmp_path: Path) -> None:
    """An adapter's base is that of its config; each kind names its library."""
    hub.model("org/adapter", ADAPTER)
    store.add("hf://org/adapter", name="adapter")
    found = data(card_of(store, "adapter", tmp_path / "a"))
    assert (found["base_model"], found["base_model_relation"]) == ("org/base", "adapter")
    assert found["library_name"] == "peft"
    hub.model("org/pipeline", PIPELINE)
    store.add("hf://org/pipeline", name="pipeline")
    assert data(card_of(store, "pipeline", tmp_path / "p"))["library_name"] == "diffusers"


def test_no_ids_of_content_on_the_hub(hub: Hub, store: Store, tmp_path: Path) -> None:
    """A merge of models that are on no Hub has no base_model: an id of content is no name there."""
    from mstore import MergeRequest

    for name, changed in (("base", ""), ("math", "x"), ("code", "y")):
        (tmp_path / name).mkdir()
        store.add(small_model(tmp_path / name, "one", changed=changed), name=name)
    store.merge(
        store.plan(MergeRequest(base="base", experts=["math", "code"], method="linear")), name="m"
    )
    text = card_of(store, "m", tmp_path / "x")
    assert "base_model" not in data(text)
    assert data(text)["base_model_relation"] == "merge"
    assert "| expert | not on the Hub |" in text


def test_a_command_is_not_published(hub: Hub, store: Store, tmp_path: Path) -> None:
    """A score whose key is the command is called by its name: commands hold paths."""
    add(store, tmp_path, "m", None)
    key = "python /home/me/secret/check.py {}"
    store.note("m", {key: {"scores": {"acc": 0.5}}}, kind="evaluation")
    text = card_of(store, "m", tmp_path / "x")
    assert "secret" not in text
    assert [one["metrics"] for one in data(text)["model-index"][0]["results"]] == [
        [{"type": "acc", "value": 0.5, "name": "acc"}]
    ]
