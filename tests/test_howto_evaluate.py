"""docs/howto/evaluate.md: its commands work, in the page's order; the harness if it is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import small_model

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "evaluate.md").read_text()


def commands(begin: str = "mstore ") -> list[str]:
    """The commands of the page's blocks that begin so."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(begin)]


def run(line: str, directory: Path, *words: str) -> str:
    """What a command prints, in a directory with the store `.mstore` and the examples."""
    bin_directory = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{bin_directory}:{os.environ['PATH']}"}
    environment.pop("MSTORE_STORE", None)
    done = subprocess.run(
        ["bash", "-c", line.replace("mstore ", f"{sys.executable} -m mstore_cli ", 1)],
        cwd=directory,
        env=environment | {"HF_HOME": str(directory / "hf")},
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a store of two models, and the repository's examples."""
    small_model(tmp_path / "llama", "1")
    small_model(tmp_path / "tuned", "1", changed="2")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run("mstore init --block-size 64KiB", tmp_path)
    run("mstore add llama --name llama", tmp_path)
    run("mstore add tuned --name chat --base llama", tmp_path)
    return tmp_path


@pytest.mark.rest
def test_the_page(place: Path) -> None:
    """Somebody scores two models by a script of their own, and compares them."""
    told = {line: run(line, place) for line in commands()}
    assert "finite  1" in re.sub(" +", "  ", next(iter(told.values())))
    assert "evaluation weights = finite 1, rms" in told["mstore log chat --notes"]
    (row,) = json.loads(told["mstore metrics chat --json"])["metrics"]
    assert row["scores"] | {"rms": 0} == {"finite": 1.0, "rms": 0, "judge": 8.1}


def test_the_page_has_every_step() -> None:
    """The page has evaluations by a script and by the harness, and the table."""
    assert {line.split()[1] for line in commands()} == {"eval", "metrics", "log", "note"}
    assert len(commands("HF_HUB_OFFLINE=1 mstore eval")) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("lm_eval") is None, reason="needs lm_eval, a program of its own")
def test_the_harness(place: Path) -> None:
    """lm-evaluation-harness scores a model from a mount, without a network."""
    make = (
        "import sys; sys.path.insert(0, 'examples')\n"
        "import family, torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)\n"
        "small |= dict(num_attention_heads=2, max_position_embeddings=256, vocab_size=258)\n"
        "model = LlamaForCausalLM(LlamaConfig(**small)).to(torch.bfloat16)\n"
        "model.save_pretrained('small')\n"
        "family.byte_tokenizer().save_pretrained('small')\n"
    )
    subprocess.run([sys.executable, "-c", make], cwd=place, check=True)
    run("mstore add small --name chat", place)
    (line,) = commands("HF_HUB_OFFLINE=1 mstore eval")
    run(line, place)
    notes = json.loads(run("mstore note chat --json", place))["notes"]
    (value,) = (one["value"] for one in notes if one["key"] == "arithmetic")
    assert 0 <= value["scores"]["acc"] <= 1
    assert value["tasks"]["n-samples"] == {"arithmetic": {"original": 40, "effective": 40}}
    assert len(f"{int(value['samples']['acc']['bits'], 16):b}") == 41
