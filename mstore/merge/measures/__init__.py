"""What is known of whole tensors before they are merged: measured, and estimated from it."""

from __future__ import annotations

from typing import Final

from mstore.terms.phrases import Option, phrase

NEEDS_ANALYSIS: Final = phrase("run the command without {off}", off=Option("analyze", False))
"""The hint where something must be measured and nothing may be read."""
BEYOND: Final = "a difference of two inputs is beyond float32"
"""What is wrong where all elements are finite, and a fact is not."""
