"""The hint where something must be measured and nothing may be read."""

from __future__ import annotations

from typing import Final

from mstore.phrases import Option, phrase

NEEDS_ANALYSIS: Final = phrase("run the command without {off}", off=Option("analyze", False))
