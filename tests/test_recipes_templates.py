"""Chat templates by name: the formats that the makers of the models publish."""

from __future__ import annotations

import pytest

from mstore.merge.recipes.parse import TEMPLATES, parse
from mstore.terms.errors import BadRequest

TALK = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
)
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n"
WANTED = {
    "alpaca": "Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello!\n\n"
    "### Instruction:\nBye\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n"
    "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n",
    "exaone": "[|system|]Be brief.[|endofturn|]\n[|user|]Hi \n[|assistant|]Hello![|endofturn|]\n"
    "[|user|]Bye\n[|assistant|]",
    "llama3": "<s>"
    + LLAMA.format("system")
    + "Be brief.<|eot_id|>"
    + LLAMA.format("user")
    + "Hi<|eot_id|>"
    + LLAMA.format("assistant")
    + "Hello!<|eot_id|>"
    + LLAMA.format("user")
    + "Bye<|eot_id|>"
    + LLAMA.format("assistant"),
    "mistral": "<s> [INST] Be brief.\n\nHi  [/INST] Hello!</s> [INST] Bye [/INST]",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_dialogue(name: str) -> None:
    """A dialogue is what models of this family were trained on."""
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATES[name])
    given = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    assert template.render(messages=TALK, **given) == WANTED[name]


def test_a_name_is_its_template() -> None:
    """A recipe names a template, or has one; other names are refused."""
    text = "merge_method: linear\nmodels: [{model: a}]\nchat_template: "
    for given, wanted in (*TEMPLATES.items(), ("'{{ b }}'", "{{ b }}"), ("auto", "auto")):
        (recipe,) = parse(text + given, "r.yml")
        assert recipe.template is not None
        assert (recipe.template.text, recipe.template.line) == (wanted, 3)
    with pytest.raises(BadRequest, match="alpaca, chatml, exaone, llama3, mistral, or auto"):
        parse(text + "vicuna", "r.yml")
