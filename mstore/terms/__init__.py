"""The words that all rooms speak: ids, errors, sizes, requests, texts for users.

Nothing else may settle here: what one room alone needs belongs to that room.
"""

from __future__ import annotations

__version__ = "0.1.0"
TOOL = f"mstore {__version__}"
