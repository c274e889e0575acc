"""Chat templates that a recipe may name: the formats of ChatML, Alpaca, Llama 3, Mistral, EXAONE 3.

Owns their text, as Jinja, written from the formats that their makers publish.  The names are those
of mergekit 0.1.5, whose own files put line breaks and indentation of theirs between messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


def _template(each: str, *, start: str = "", prompt: str = "") -> str:
    """Return a template: `start`, `each` for every message (`one`), `prompt` for an answer."""
    asked = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}" if prompt else ""
    return f"{start}{{% for one in messages %}}{each}{{% endfor %}}{asked}"


_CHATML: Final = _template(
    "{{ '<|im_start|>' + one['role'] + '\\n' + one['content'] + '<|im_end|>\\n' }}",
    prompt="{{ '<|im_start|>assistant\\n' }}",
)
_LLAMA3: Final = _template(
    "{{ '<|start_header_id|>' + one['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ one['content'] | trim + '<|eot_id|>' }}",
    start="{{ bos_token }}",
    prompt="{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
)
_EXAONE: Final = _template(
    "{{ '[|' + one['role'] + '|]' + one['content'] }}"
    "{{ '\\n' if one['role'] == 'user' else '[|endofturn|]\\n' }}",
    start="{{ '' if messages[0]['role'] == 'system' else '[|system|][|endofturn|]\\n' }}",
    prompt="{{ '[|assistant|]' }}",
)
# A system message is a part of the first question.
_MISTRAL: Final = _template(
    "{% if one['role'] == 'user' %}{{ ' [INST] ' }}"
    "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ one['content'] + ' [/INST]' }}"
    "{% elif one['role'] == 'assistant' %}{{ ' ' + one['content'] + eos_token }}"
    "{% elif not loop.first or one['role'] != 'system' %}"
    "{{ raise_exception('only user and assistant speak, after one system message') }}{% endif %}",
    start="{{ bos_token }}",
)
_ALPACA: Final = _template(
    "{% if one['role'] == 'user' %}{{ '### Instruction:\\n' }}"
    "{% elif one['role'] == 'user_context' %}{{ '### Input:\\n' }}"
    "{% elif one['role'] == 'assistant' %}{{ '### Response:\\n' }}{% endif %}"
    "{{ one['content'] | trim }}{% if not loop.last or add_generation_prompt %}{{ '\\n\\n' }}"
    "{% endif %}",
    prompt="{{ '### Response:\\n' }}",
)

TEMPLATES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "alpaca": _ALPACA,
        "chatml": _CHATML,
        "exaone": _EXAONE,
        "llama3": _LLAMA3,
        "mistral": _MISTRAL,
    }
)
"""By name."""
