"""The README says what the program does."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import readme_family
import transcripts
from hub import environment

from mstore import Store

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="the transcript mounts")
def test_transcript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the README's transcript prints what the README says it prints."""
    hub = readme_family.on_hub(tmp_path / "hub")
    for name, value in environment(hub.url, tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    (tmp_path / "work").mkdir()
    transcript = transcripts.pairs(README.read_text())
    assert len(transcript) >= 8
    try:
        with hub.running():
            for command, told in transcript:
                printed = transcripts.run(command, tmp_path / "work").replace(hub.url, "HUB")
                assert transcripts.steady(printed) == transcripts.steady(
                    told.replace("https://huggingface.co", "HUB")
                ), command
    finally:
        if os.path.ismount(tmp_path / "work" / "mnt"):
            transcripts.run("mstore unmount mnt", tmp_path / "work")


def test_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's Python merges, and loads a result with all tensors of the base, some changed."""
    readme_family.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Store.init(".mstore") as store:
        for path, name in (("llama", "qwen"), ("code", "coder"), ("math", "instruct")):
            store.add(tmp_path / path, name=name)
        base = store["qwen"].load()
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    (tmp_path / "snippet.py").write_text(snippet)
    made = runpy.run_path(str(tmp_path / "snippet.py"))
    with made["store"]:
        weights = made["weights"]
        assert weights.keys() == readme_family.SHAPES.keys()
        changed = {name for name in weights if not np.array_equal(weights[name], base[name])}
        assert changed
        assert (
            changed <= readme_family.CHANGES["code"].keys() | readme_family.CHANGES["math"].keys()
        )


def test_figures_have_a_source() -> None:
    """A speed or ratio in the README stands in a line with a footnote to its benchmark."""
    for line in README.read_text().splitlines():
        if re.search(r"\d\s?(?:GB/s|MB/s|x faster|times faster)", line):
            assert "[^" in line, line
