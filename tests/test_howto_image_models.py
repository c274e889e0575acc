"""docs/howto/image-models.md: its commands work, in the page's order, on files with true names."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "image-models.md").read_text()
LINES = re.findall(r"^    ((?:mstore|mkdir|export) .*)$", PAGE, re.MULTILINE)
SMALLER = 40
"""By which the widths of SDXL are divided."""


def generator() -> Any:
    """The benchmark's module that makes checkpoints of SDXL, small and with true names."""
    spec = importlib.util.spec_from_file_location("image_models", ROOT / "bench/image_models.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["image_models"] = found
    spec.loader.exec_module(found)
    return found


RECIPE = """\
version 0.1.0
model "/models/sdxl.safetensors" model_config="sdxl-sgm" merge_space="weight"
model "/models/photo.safetensors" model_config="sdxl-sgm" merge_space="weight"
dict key=0.3
literal &2 model_config="singleton-mecha" merge_space="param"
merge "convert_singleton" &3
merge "weighted_sum" &0 &1 &4
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three checkpoints, what lies beside them, and a LoRA."""
    place = tmp_path_factory.mktemp("place")
    made = generator()
    (place / "disk").mkdir()
    (place / "loras").mkdir()
    base = made.base(SMALLER)
    made.save(place / "disk" / "sdxl.safetensors", base, title="SDXL")
    for tune in made.TUNES:
        if tune.name in ("photo", "anime"):
            file = place / "disk" / f"{tune.name}.safetensors"
            made.save(file, made.tuned(base, tune), title=tune.name)
    (place / "mix.mecha").write_text(RECIPE)
    (place / "disk" / "photo.preview.png").write_bytes(b"\x89PNG")
    (place / "disk" / "photo.civitai.info").write_text("{}")
    made.save(place / "loras" / "detail.safetensors", made.lora(SMALLER, 4, 1))
    return place


@pytest.mark.rest
def test_the_page(place: Path) -> None:
    """From files in a folder to files in a folder: each command does what the page says."""
    assert len(LINES) > 15
    program = f"{shlex.quote(sys.executable)} -m mstore_cli"
    script = ["set -e", f'mstore() {{ {program} "$@"; }}']
    for line in LINES:
        script += [f"echo '>>>' {shlex.quote(line)}", line]
    script += ["ls checkpoints", "head -c 16 checkpoints/half.safetensors > begin"]
    environment = {key: value for key, value in os.environ.items() if key != "MSTORE_STORE"}
    environment["XDG_CONFIG_HOME"] = str(place / "config")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=place,
        env=environment,
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    subprocess.run(
        [sys.executable, "-m", "mstore_cli", "unmount", "checkpoints"], cwd=place, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = dict(one.split("\n", 1) for one in done.stdout.split(">>> ")[1:])
    added = told["mstore add disk/*.safetensors --base sdxl"]
    assert len(re.findall(r"^added +(anime|photo|sdxl) ", added, re.MULTILINE)) == 3
    for name in ("mix", "half", "mbw", "portrait", "photo"):
        assert f"{name}.safetensors" in done.stdout.rpartition(">>>")[2]
    assert "AutoV2" in told["mstore show mix --digest"]
    assert "photo" in told["mstore find disk/photo.safetensors"]
    with safe_open(place / "mix-v1.safetensors", "np") as opened:
        metadata = opened.metadata()
        assert len([*opened.keys()]) > 2000
    assert metadata["modelspec.title"] == "mix-v1"
    assert "sd_merge_recipe" in metadata
