"""Chat templates that a recipe may name: ChatML alone, whose format is public and never changes.

Owns their text, as Jinja.  Names that mergekit has besides are refused (`parse`): those are the
templates of other people's models, which `auto` takes from the models themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_CHATML: Final = (
    "{% for one in messages %}"
    "{{ '<|im_start|>' + one['role'] + '\\n' + one['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEMPLATES: Final[Mapping[str, str]] = MappingProxyType({"chatml": _CHATML})
"""By name."""
