"""Checks the weights of a model without running it: are they finite, and how large are they?

    python check_weights.py MODEL

Writes results.json into the working directory: `finite`, the share of elements that are neither
infinite nor NaN, and `rms`, their root mean square.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401 -- NumPy knows bfloat16 by it
import numpy as np
from safetensors.numpy import load_file


def main() -> None:
    finite, squares, elements = 0, 0.0, 0
    for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
        for tensor in load_file(file).values():
            values = tensor.astype(np.float64)
            is_finite = np.isfinite(values)
            finite += int(is_finite.sum())
            squares += float(np.square(values[is_finite]).sum())
            elements += values.size
    scores = {"finite": finite / elements, "rms": (squares / max(finite, 1)) ** 0.5}
    Path("results.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    main()
