"""`check-merge`: each way in which models may not fit is told, with real checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import Adapter
from cli_runs import Program
from safetensors.numpy import load_file, save_file
from test_vocabulary import EMBEDDINGS, model, tokenizer_json

from mstore import MergeRequest, Store
from mstore.terms.errors import BadRequest

TOKENS = [f"w{number}" for number in range(8)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "rope_theta": 10000.0,
}
Change = Callable[[Path], None]


def tensors(change: Callable[[dict[str, Any]], None]) -> Change:
    def act(path: Path) -> None:
        found = dict(load_file(path / "model.safetensors"))
        change(found)
        save_file(found, path / "model.safetensors")

    return act


def config(**changes: object) -> Change:
    def act(path: Path) -> None:
        fields = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(fields | changes))

    return act


def file(name: str, text: str) -> Change:
    return lambda path: (path / name).write_text(text) and None


def _rename(found: dict[str, Any]) -> None:
    found["other.weight"] = found.pop("model.layers.0.mlp.weight")


def _reshape(found: dict[str, Any]) -> None:
    found["model.layers.0.mlp.weight"] = found["model.layers.0.mlp.weight"][:, :4].copy()


def _retype(found: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.weight"
    found[name] = found[name].astype(np.float32)


def _grow(found: dict[str, Any]) -> None:
    for name in EMBEDDINGS:
        found[name] = np.concatenate([found[name], found[name][:2]])


def _grown(path: Path) -> None:
    tensors(_grow)(path)
    config(vocab_size=len(TOKENS) + 2)(path)
    file("tokenizer.json", tokenizer_json(TOKENS, ["<a>", "<b>"]))(path)


def _integers(found: dict[str, Any]) -> None:
    found["position_ids"] = np.arange(4, dtype=np.int64) + len(found)


CASES: dict[str, tuple[Change, list[tuple[str, str, str]]]] = {
    "names": (
        tensors(_rename),
        [
            ("names", "error", "lacks model.layers.0.mlp.weight"),
            ("names", "error", "has other.weight, and the base has not"),
        ],
    ),
    "shapes": (tensors(_reshape), [("shapes", "error", "is [24, 4], not [24, 8]")]),
    "rows": (
        _grown,
        [("vocabulary", "error", "10 rows of embeddings, the base has 8")],
    ),
    "order": (
        file("tokenizer.json", tokenizer_json([TOKENS[1], TOKENS[0], *TOKENS[2:]])),
        [("vocabulary", "error", "2 tokens are in other rows than the base")],
    ),
    "tokens": (
        file("tokenizer.json", tokenizer_json([*TOKENS[:7], "new"])),
        [
            (
                "vocabulary",
                "warning",
                "has 1 tokens that the base lacks, and lacks 1 of the base's tokens",
            )
        ],
    ),
    "tokenizer": (
        file("tokenizer.json", tokenizer_json(TOKENS).replace('"1.0"', '"1.1"')),
        [("tokenizer", "warning", "the same tokens and other settings")],
    ),
    "dtypes": (tensors(_retype), [("dtypes", "warning", "1 of F32")]),
    "architecture": (
        config(architectures=["MistralForCausalLM"], model_type="mistral"),
        [
            ("architecture", "warning", "architectures is ['MistralForCausalLM'], not"),
            ("architecture", "warning", "model_type is mistral, not llama"),
        ],
    ),
    "heads": (
        config(num_attention_heads=8),
        [("settings", "error", "num_attention_heads is 8, not 4")],
    ),
    "rope": (config(rope_theta=5e5), [("settings", "warning", "rope_theta is 500000.0, not")]),
    "rope in two forms": (
        config(rope_theta=None, rope_parameters={"rope_theta": 5e5}),
        [("settings", "warning", "rope_theta is 500000.0, not 10000.0")],
    ),
    "no config": (
        lambda path: (path / "config.json").unlink(),
        [("settings", "warning", "expert has no config.json: settings are not compared")],
    ),
    "no tokenizer": (
        lambda path: (path / "tokenizer.json").unlink(),
        [("tokenizer", "warning", "expert has no tokenizer.json: tokens are not compared")],
    ),
    "tied": (
        config(tie_word_embeddings=True),
        [("settings", "warning", "tie_word_embeddings is True, not False")],
    ),
    "template": (
        file("chat_template.jinja", "other"),
        [("chat template", "warning", "another than the base's")],
    ),
    "no template": (
        lambda path: (path / "chat_template.jinja").unlink(),
        [("chat template", "warning", "none, but the base has one; the result has the base's")],
    ),
    "end": (
        config(eos_token_id=3),
        [("settings", "warning", "eos_token_id is 3, not 1")],
    ),
    "licence": (
        file("README.md", "---\nlicense: cc-by-nc-4.0\n---\n"),
        [
            ("licences", "warning", "may forbid commercial use: cc-by-nc-4.0"),
            ("licences", "warning", "licences differ (cc-by-nc-4.0, mit)"),
        ],
    ),
    "nothing": (lambda path: None, []),
}


def base_model(path: Path) -> Path:
    model(path, TOKENS, config=CONFIG)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "README.md").write_text("---\nlicense: mit\n---\n")
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_told(case: str, tmp_path: Path) -> None:
    """Each difference is found, and nothing else; an error is what makes a merge meaningless."""
    change, wanted = CASES[case]
    with Store.init(tmp_path / "store") as store:
        store.add(base_model(tmp_path / "base"), name="base")
        expert = base_model(tmp_path / "expert")
        change(expert)
        store.add(expert, name="expert")
        request = MergeRequest(base="base", experts=["expert"], method="linear")
        report = store.check_merge(request)
        found = [(one.aspect, one.severity, one.text) for one in report.findings]
        assert len(found) == len(wanted), found
        for (aspect, severity, text), (about, grave, what) in zip(found, wanted, strict=True):
            assert (aspect, severity) == (about, grave)
            assert what in text
        assert report.mergeable == all(one[1] != "error" for one in wanted)
        if report.mergeable:
            store.plan(request, allow_noop=True)
        skipped = MergeRequest(
            base="base", experts=["expert"], method="linear", skip=["model.*", "lm_head*"]
        )
        aspects = {one.aspect for one in store.check_merge(skipped).findings}
        assert not aspects & {"names", "shapes"} or case == "names"
        nothing = dataclasses.replace(request, only=["zzz*"])
        with pytest.raises(BadRequest, match="no tensor's name matches"):
            store.check_merge(nothing)


def test_adapters(tmp_path: Path) -> None:
    """An adapter that cannot be applied is an error that says why; one that can is none."""
    rng = np.random.default_rng(1)
    with Store.init(tmp_path / "store") as store:
        store.add(base_model(tmp_path / "base"), name="base")
        for name, rows in (("fits", 24), ("other", 25)):
            up, down = (rng.standard_normal(one).astype(np.float32) for one in ((rows, 2), (2, 8)))
            made = Adapter({"model.layers.0.mlp": (up, down)})
            store.add(made.write(tmp_path / name), name=name)
        request = MergeRequest(base="base", experts=["fits", "other"], method="linear")
        report = store.check_merge(request)
        told = [(one.expert, one.aspect, one.severity) for one in report.findings]
        assert ("other", "adapter", "error") in told
        assert ("fits", "adapter", "error") not in told
        assert not report.mergeable


def test_on_the_command_line(tmp_path: Path) -> None:
    """It prints a table, and its exit status says whether a merge makes sense."""
    mstore = Program(tmp_path / "store")
    mstore.succeed("init")
    for name, change in (("base", None), ("wide", _grown), ("nc", CASES["licence"][0])):
        path = base_model(tmp_path / name)
        if change is not None:
            change(path)
        mstore.succeed("add", path, "--name", name)
    bad = mstore("check-merge", "--base", "base", "--expert", "wide", "--expert", "nc")
    assert bad.status == 1
    assert "10 rows of embeddings, the base has 8" in bad.out
    assert "cannot be merged into base as they are" in bad.out
    assert "hint: align the vocabularies" in bad.out
    assert "align --base base --expert wide --expert nc" in bad.out
    quiet = mstore("check-merge", "--base", "base", "--expert", "wide", "-q")
    assert quiet.lines == ["error wide: 10 rows of embeddings, the base has 8"]
    good = mstore.succeed("check-merge", "--base", "base", "--expert", "nc")
    assert "1 expert can be merged into base" in good.out
    document = mstore.succeed("check-merge", "--base", "base", "--expert", "nc", "--json").document
    assert document["mergeable"] is True
    assert {one["aspect"] for one in document["findings"]} == {"licences"}
