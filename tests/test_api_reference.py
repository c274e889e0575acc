"""docs/api.md says what the library's docstrings say."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import readme_family

import mstore
from mstore.api import reports
from mstore.snapshots import signing
from mstore.terms import errors
from mstore_cli import api_reference, reference
from mstore_fuse import mounts

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
HEADINGS = re.findall(r"^#+ (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
# What annotations name that is no class of this library; the page's head tells of the aliases.
FOREIGN = {
    "Any", "Callable", "Executor", "Iterator", "Mapping", "None", "Path", "PathLike", "Self",
    "Sequence",
}  # fmt: skip
ALIASES = {
    *("Buffer", "Experts", "ProgressCallback", "Revision", "Show", "Text", "Trusted"),
}


def _functions() -> Iterator[tuple[str, object]]:
    """Every public function that the page documents."""
    kinds = (*mstore.Store.__mro__[:-1], mstore.Snapshot, mstore.Budget, signing.SigningKey)
    for kind in kinds:
        for name, member in api_reference.public(kind):
            found = member.fget if isinstance(member, property) else member
            yield f"{kind.__name__}.{name}", getattr(found, "__func__", found)
    for function in (signing.load_key, signing.read_signers, mounts.mount, mounts.unmount):
        yield function.__name__, function


FUNCTIONS = dict(_functions())


def test_page_is_current() -> None:
    """The page is what docstrings make of it: python -m mstore_cli.reference docs/api.md."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == reference.renewed("api.md", text)


@pytest.mark.parametrize("name", mstore.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """Whatever `mstore` exports has a section of its own."""
    assert {f"mstore.{name}".replace("__", r"\_\_"), name} & {*HEADINGS}


def test_every_error_and_report_is_there() -> None:
    """Each class of errors and of reports has a section."""
    own = {
        f"mstore.{name}"
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and kind.__module__ == errors.__name__
    }
    exported = {name for name in reports.__all__ if inspect.isclass(getattr(reports, name))}
    assert own | exported <= {*HEADINGS}
    assert len(exported) > 40


def test_every_call_is_there() -> None:
    """Each public member of Store, Snapshot and Budget has a section."""
    shown = {heading.partition(".")[2] for heading in HEADINGS if "." in heading}
    assert {name.partition(".")[2] for name in FUNCTIONS if "." in name} <= shown


def test_what_calls_take_and_give_is_there() -> None:
    """Each class of this library that a public call names as a type has a section."""
    last_words = {heading.rpartition(".")[2] for heading in HEADINGS}
    for name, function in FUNCTIONS.items():
        assert callable(function)
        signature = inspect.signature(function)
        told = [one.annotation for one in signature.parameters.values() if one.name != "self"]
        for annotation in (*told, signature.return_annotation):
            named = set(re.findall(r"\b[A-Z]\w+", str(annotation).replace("np.ndarray", "")))
            assert named - FOREIGN - ALIASES <= last_words, name
    head = PAGE.read_text(encoding="utf-8").partition(reference.marker("api.md"))[0]
    assert all(f"`{alias}`" in head for alias in ALIASES)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_docstrings_are_exact(name: str) -> None:
    """What a docstring lists are parameters of its call, and what it says is raised are errors."""
    function = FUNCTIONS[name]
    assert callable(function)
    doc = inspect.getdoc(function)
    assert doc is not None
    parameters = {*inspect.signature(function).parameters}
    for names in re.findall(r"^((?:[a-z]\w*, )*[a-z]\w*): ", doc, re.MULTILINE):
        assert {*names.split(", ")} <= parameters, names
    for sentence in re.findall(r"\bRaises (.+?)(?:[.;](?:\s|$)|$)", doc, re.DOTALL):
        for error in re.findall(
            r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)*\b", re.sub(r"\([^)]*\)", "", sentence)
        ):
            assert issubclass(getattr(errors, error), mstore.MstoreError)


@pytest.mark.rest
@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="the example mounts")
def test_example(tmp_path: Path) -> None:
    """The example at the page's head runs and prints what the page says."""
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text.split("\n## ")[0], re.M | re.S)
    told = re.search(r"It prints `(.+)`\.", text)
    assert told is not None
    readme_family.write(tmp_path)
    try:
        done = subprocess.run(
            [sys.executable, "-c", example],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=600,
            check=False,
        )
        assert done.stderr == ""
        assert done.stdout.strip() == told[1]
    finally:
        if os.path.ismount(tmp_path / "mnt"):
            mounts.unmount(tmp_path / "mnt")
