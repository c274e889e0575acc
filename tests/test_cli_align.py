"""`align`, `--vocab`, and tokenizers of recipes, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Program
from test_vocabulary import EMBEDDINGS, model, same

from mstore import Store
from mstore.models.vocabulary.tokenizer import parse

TOKENS = ["a", "b", "c", "d"]


def build(root: Path) -> None:
    """A base, an expert with a token more, and one with tokens in another order, and a store."""
    program = Program(root / "store")
    program.succeed("init")
    for seed, (name, tokens) in enumerate(
        {"base": TOKENS, "chat": [*TOKENS, "<chat>"], "other": ["d", "x", "a"]}.items()
    ):
        path = model(root / name, tokens, seed=seed)
        program.succeed("add", path, "--name", f"org/{name}")


@pytest.fixture
def mstore(copied: Path) -> Program:
    return Program(copied / "store")


def tokens_of(mstore: Program, name: str) -> list[str]:
    raw = mstore.succeed("cat", f"{name}:tokenizer.json").out
    return list(parse(raw.encode(), name).ids)


def test_align(mstore: Program) -> None:
    """It stores what differs on branches below aligned/, and says so."""
    experts = ("--expert", "org/chat", "--expert", "org/other")
    report = mstore.succeed("align", "--base", "org/base", *experts, "--json").document
    assert (report["tokens"], report["rows"]) == (6, 6)
    assert [one["ref"] for one in (report["base"], *report["experts"])] == [
        "aligned/org/base",
        "aligned/org/chat",
        "aligned/org/other",
    ]
    assert [one["tokens_missing"] for one in report["experts"]] == [1, 3]
    told = mstore.succeed("align", "--base", "org/base", *experts)
    assert "aligned/org/chat" in told.out
    assert "plan --base aligned/org/base --expert aligned/org/chat" in told.out
    assert tokens_of(mstore, "aligned/org/other") == [*TOKENS, "<chat>", "x"]
    kept = mstore.succeed("align", "--base", "org/base", *experts, "--vocab", "base", "--json")
    assert kept.document["base"]["ref"] is None
    assert kept.document["rows"] == 4
    padded = ("--vocab", "org/other", "--pad-to", "8")
    assert (
        mstore.succeed("align", "--base", "org/base", *experts, *padded, "--json").document["rows"]
        == 8
    )


def test_vocab_of_a_merge(mstore: Program) -> None:
    """Models that differ in their vocabularies are refused with a hint, and merge with --vocab."""
    ask = ("--base", "org/base", "--expert", "org/chat", "--method", "ties", "--param")
    refused = mstore("merge", *ask, "density=0.5", "--name", "m")
    assert refused.status
    assert "align --base org/base --expert org/chat gives them one vocabulary" in refused.err
    told = mstore.succeed("merge", *ask, "density=0.5", "--name", "m", "--vocab", "union")
    assert (
        "remark: stored org/base as aligned/org/base, with 5 tokens, 1 that it lacked" in told.err
    )
    assert tokens_of(mstore, "m") == [*TOKENS, "<chat>"]
    planned = mstore.succeed("plan", *ask, "density=0.5", "--vocab", "base", "--json").document
    assert planned["base"] == "org/base"
    assert planned["experts"][0][0] == "aligned/org/chat"
    assert "leave out" in mstore("merge", "--plan", "m", "--name", "n", "--vocab", "base").err
    assert "nobody" in mstore("plan", *ask, "density=0.5", "--vocab", "nobody").err


RECIPE = """\
models:
  - model: org/chat
    parameters: {{weight: 0.5}}
  - model: org/other
    parameters: {{weight: 0.25}}
merge_method: task_arithmetic
base_model: org/base
dtype: float32
out_dtype: bfloat16
{more}
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ("tokenizer_source: union", [*TOKENS, "<chat>", "x"]),
        ("tokenizer_source: base", TOKENS),
        ("tokenizer_source: org/base", TOKENS),
        ("tokenizer: {{source: org/other}}", ["d", "x", "a"]),
        ("tokenizer: {{tokens: {{x: {{source: {{kind: zero}}}}}}}}", [*TOKENS, "<chat>", "x"]),
        ("tokenizer_source: base\nchat_template: '{{{{ messages }}}}'", TOKENS),
    ],
)
def test_recipes(mstore: Program, tmp_path: Path, more: str, tokens: list[str]) -> None:
    """A recipe's tokenizer aligns its models; the result has these tokens, and prints a recipe that
    gives the same merge."""
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(RECIPE.format(more=more.format()))
    merged = mstore.succeed("merge", "--recipe", recipe, "--name", "m", "--json").document
    assert tokens_of(mstore, "m") == tokens
    if "chat_template" in more:
        assert mstore.succeed("cat", "m:chat_template.jinja").out.strip() == "{{ messages }}"
    again = tmp_path / "again.yml"
    again.write_text(mstore.succeed("recipe", "m").out)
    assert mstore.succeed("plan", "--recipe", again, "--json").document["plan"] == merged["plan"]
    mstore.succeed("replay", "m")


def test_a_token_that_is_none_has_its_line(mstore: Program, tmp_path: Path) -> None:
    """What is wrong with a token is told with file and line, as all that a recipe says."""
    recipe = tmp_path / "recipe.yml"
    more = (
        "tokenizer:\n  tokens:\n    x: {source: {kind: model_token, model: org/chat, token: nope}}"
    )
    recipe.write_text(RECIPE.format(more=more))
    failed = mstore("merge", "--recipe", recipe, "--name", "m")
    assert f"error: {recipe}, line 12: the token 'x': org/chat has no row for 'nope'" in failed.err


def test_in_python(mstore: Program) -> None:
    """A recipe's request says what to align, and aligned it is the same plan."""
    with Store.open(mstore.store) as store:
        found = store.read_recipe(RECIPE.format(more="tokenizer_source: union"))
        assert found.vocabulary is not None
        request = store.align(found.request, found.vocabulary).applied(found.request)
        assert request.base == "aligned/org/base"
        store.merge(store.plan(request), name="m")
        rows = store["m"].tensor(EMBEDDINGS[0])
        base = store["org/base"].tensor(EMBEDDINGS[0])
        # <chat>: the base took it from the only model that has it, and so did the other expert.
        chat = store["org/chat"].tensor(EMBEDDINGS[0])[4]
        assert same(rows[4], chat)
        assert len(rows) == len(base) + 2
