"""Recipes as `mstore recipe` prints them, as the file of the snapshot has them."""

from __future__ import annotations

import re

from mstore.merge.recipes.write import HEAD


def by_ids(text: str) -> str:
    """Put the ids that comments give in the place of refs."""
    return re.sub(r'"[^"]*"  # ([0-9a-f+]+)', r'"\1"', text).replace(HEAD[1], HEAD[0], 1)
