"""What pages say can be followed: links, commands, messages, figures, pipelines."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import readme_family
import yaml

from mstore import Store
from mstore_cli.verbs import VERBS, verb_of

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted({*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "bench").glob("*.md")})
GUIDES = [
    *sorted((DOCS / "howto").glob("*.md")),
    *(DOCS / name for name in ("tutorial.md", "when-not.md", "troubleshooting.md", "serving.md")),
    *(DOCS / name for name in ("sizing.md", "comparison.md", "releases.md")),
    ROOT / "SECURITY.md",
]
GLOBAL_OPTIONS = {"--store", "--json", "--quiet", "-q", "--no-progress", "--version"}


def _prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#+ +(.+?) *$", _prose(page), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("\\", "")
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        anchors.add(f"{slug}-{count}" if count else slug)
    return anchors


@pytest.mark.sampled(110)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Every relative link leads to a file that exists, and to a heading that it has."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in _anchors(file), target


def _listed_layers() -> dict[str, list[list[str]]]:
    """The picture of docs/architecture.md: layers by package, modules side by side together."""
    section = (DOCS / "architecture.md").read_text().split("\n## Rooms\n")[1].split("\n## ")[0]
    found: dict[str, list[list[str]]] = {}
    at = [""]
    for lead, names in re.findall(r"^ {4}( *)(\w+(?: \| \w+)*)(?: |$)", section, re.MULTILINE):
        depth = len(lead) // 2
        side_by_side = names.split(" | ")
        found.setdefault(".".join(at[1 : depth + 1]), []).append(side_by_side)
        at[depth + 1 :] = [side_by_side[0]]
    return found


def test_one_list_of_the_layers() -> None:
    """docs/architecture.md lists the layers that import-linter enforces, in their order."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    enforced = {
        one.get("containers", [""])[0]: [re.findall(r"\w+", layer) for layer in one["layers"]]
        for one in contracts["contracts"]
        # A contract that leaves modules out says how some belong together, and is no layer.
        if one["type"] == "layers" and (one.get("exhaustive") or "containers" not in one)
    }
    listed = _listed_layers()
    assert listed.keys() == enforced.keys()
    for container, layers in enforced.items():
        assert [sorted(one) for one in listed[container]] == [sorted(one) for one in layers]


def test_no_other_page_lists_the_layers() -> None:
    """Other pages link to the list of layers: a second one would not be compared with anything."""
    names = {name for layers in _listed_layers().values() for layer in layers for name in layer}
    for page in {*PAGES} - {DOCS / "architecture.md", DOCS / "cli.md", DOCS / "api.md"}:
        starts = re.findall(r"^ {2,}(?:mstore/)?(\w+)", page.read_text(), re.MULTILINE)
        assert len({*starts} & (names - {"version", "ids"})) < 5, page


def test_every_page_is_found() -> None:
    """The README links to every page of docs/, and the list of designs to every design."""
    linked = set(re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text()))
    pages = {str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith("docs/design/")} <= linked
    assert "docs/design/README.md" in linked
    listed = re.findall(
        r"^\| \[(\d+)\]\((.+?)\)", (DOCS / "design" / "README.md").read_text(), re.M
    )
    assert {name for _, name in listed} == {page.name for page in (DOCS / "design").glob("0*.md")}
    assert all(name.startswith(f"{number}-") for number, name in listed)


_SUPERSEDED = re.compile(r"\A# .*\n\n?Superseded by \[(\d+)\]\((.+?)\)")


def test_designs_describe_what_is_there() -> None:
    """A file that a design names exists, unless the note's first line says what superseded it;
    the list of designs says so, too."""
    roots = (
        "mstore",
        "cli",
        "fuse",
        "pages",
        "serve",
        "tests",
        "bench",
        "scripts",
        "conformance",
        "examples",
    )
    files = [f"/{path.relative_to(ROOT)}" for root in roots for path in (ROOT / root).rglob("*.py")]
    # A file of mergekit's.
    elsewhere = {"tokenizer/embed.py"}
    listed = (DOCS / "design" / "README.md").read_text()
    for page in (DOCS / "design").glob("0*.md"):
        text = page.read_text()
        row = next(line for line in listed.splitlines() if f"({page.name})" in line)
        later = _SUPERSEDED.match(text)
        assert (later is not None) == ("superseded by" in row), page.name
        if later is not None:
            assert (page.parent / later[2]).exists()
            continue
        for name in re.findall(r"`([\w/]+\.py)`", text):
            assert name in elsewhere or any(one.endswith(f"/{name}") for one in files), (page, name)


_SHELLS = {"", "sh", "console", "yaml", "text", "ini"}
"""What code may be in which commands stand."""


def _commands(page: Path) -> Iterator[list[str]]:
    """The words of every mstore command in a page, in blocks and in between."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    blocks = [block for kind, block in found if kind in _SHELLS]
    spoken = re.findall(r"`(mstore [^`]+)`", _prose(page).replace("\n", " "))
    for line in [*(line for block in blocks for line in block.splitlines()), *spoken]:
        for command in re.findall(r"(?<![\w/.-])mstore (?!\(|says)[^|;&<>#]*", line):
            if not line.startswith(("Description", "error", "hint", "to end it", "to have it")):
                yield _split(command)[1:]


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.replace("'", " ").replace('"', " ").split()


@cache
def _help() -> dict[str, str]:
    """What the program says of each of its commands: docs/cli.md, which is compared with it."""
    sections = (DOCS / "cli.md").read_text().split("\n## mstore ")[1:]
    return {section.split("\n")[0]: section.split("\n## ")[0] for section in sections}


def _known(words: list[str]) -> str | None:
    """What is wrong with a command: its verb, or an option that it has not."""
    # What follows is the command that mstore runs.
    rest = words[: words.index("--")] if words[:1] == ["eval"] and "--" in words else list(words)
    while rest and rest[0].startswith("-"):
        if rest[0] not in GLOBAL_OPTIONS:
            return rest[0]
        rest = rest[2:] if rest[0] == "--store" else rest[1:]
    if not rest:
        return None if words else "nothing"
    if rest[0] not in VERBS:
        return rest[0]
    told = _help()[verb_of(rest)]
    options = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    unknown = (one for one in options - GLOBAL_OPTIONS if not re.search(rf" {one}[ ,]", told))
    return next(unknown, None)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    """Each command of a guide is one of the program's, with options that it has."""
    for words in _commands(page):
        assert _known(words) is None, f"mstore {' '.join(words)}"


@pytest.mark.parametrize("words", ["frobnicate", "gc --quickly", "--loud refs", "add x --names y"])
def test_commands_that_do_not_exist(words: str) -> None:
    """The test above finds verbs and options that are not there."""
    assert _known(words.split()) is not None


def _texts() -> str:
    """The program, its texts in one piece each, with `...` in the place of values."""
    sources = (
        path.read_text()
        for root in ("mstore", "cli", "fuse", "pages", "serve")
        for path in (ROOT / root).rglob("*.py")
    )
    joined = re.sub(r'"\s+[fr]?"', "", "\n".join(sources))
    return re.sub(r"(\{[^{}\n]*\})+", "...", joined)


def test_messages_exist() -> None:
    """Each message in docs/troubleshooting.md, and in the table about Kubernetes, is one that the
    program has."""
    told = re.findall(r"^\| `([^`]+)`", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(told) > 40
    kubernetes = (DOCS / "howto" / "cluster-kubernetes.md").read_text()
    messages = re.findall(r"^\|[^|]*`([a-z]+ [^|`]+)`", kubernetes, re.MULTILINE)
    assert len(messages) == 7
    told += messages
    texts = _texts()
    for message in told:
        assert message.removesuffix("...") in texts, message


def test_figures_of_sizing_were_measured() -> None:
    """Every figure in docs/sizing.md stands in one of the pages of benchmarks."""
    unit = r"(?:MB|GB|MiB|KiB|s|%|bytes|blocks)\b"
    figure = re.compile(r"\d[\d,]*(?:\.\d+)?(?= ?(?:%|" + unit + "))")
    pages = [page.read_text() for page in DOCS.glob("benchmarks*.md")]
    measured = set(re.findall(r"\d[\d,]*(?:\.\d+)?", "\n".join(pages)))
    figures = set(figure.findall((DOCS / "sizing.md").read_text()))
    assert len(figures) > 40
    assert figures <= measured


def _ran(step: str, root: Path, *shell: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What lines of a page do in a directory, with a store there.  shell: the program."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MSTORE_STORE": str(root / "store"),
    }
    return subprocess.run(
        [*shell, step],
        cwd=root,
        env=environment | more,
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )


def _steps(page: Path) -> dict[str, list[str]]:
    """The shell lines of each pipeline in a page."""
    github, gitlab = (
        yaml.safe_load(block)
        for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.M | re.S)
    )
    return {
        "github": [step["run"] for step in github["jobs"]["merge"]["steps"]],
        "gitlab": gitlab["merge"]["script"],
    }


@pytest.mark.rest
@pytest.mark.skipif(shutil.which("jq") is None, reason="the pipelines use jq")
@pytest.mark.parametrize("kind", ["github", "gitlab"])
def test_pipelines(kind: str, tmp_path: Path) -> None:
    """Each step of docs/howto/ci.md succeeds on a family, and a plan that loses much is refused."""
    readme_family.write(tmp_path)
    commits = dict.fromkeys(("GITHUB_SHA", "CI_COMMIT_SHA"), "0a1b" * 10)

    def run(step: str) -> subprocess.CompletedProcess[str]:
        return _ran(step, tmp_path, "bash", "-ec", **commits)

    assert run("mstore init").returncode == 0
    for name in ("llama", "code", "math"):
        assert run(f"mstore add {name} --name {name}").returncode == 0
    steps = _steps(DOCS / "howto" / "ci.md")[kind]
    for step in steps:
        done = run(step)
        assert done.returncode == 0, f"{step}: {done.stdout}{done.stderr}"
    assert run("mstore refs -q release 'candidates/*'").returncode != 0
    assert run("mstore refs -q release").stdout.strip() == "release"
    gate = next(step for step in steps if "error_share_estimate" in step)
    assert run("echo '{\"error_share_estimate\": 0.9}' > plan.json").returncode == 0
    assert run(gate).returncode != 0
    changed = next(step for step in steps if "all(.tensors" in step).splitlines()[-1]
    assert run('echo \'{"tensors": [{"name": "model.norm.weight"}]}\' > diff.json').returncode == 0
    assert run(changed).returncode != 0


@pytest.mark.rest
@pytest.mark.skipif(shutil.which("jq") is None, reason="the lines use jq")
@pytest.mark.parametrize("fails", [False, True])
def test_a_command_before_the_branch_moves(fails: bool, tmp_path: Path) -> None:
    """The lines of docs/howto/ci.md move the branch if the command succeeds, and else they leave
    it where it was."""
    page = (DOCS / "howto" / "ci.md").read_text()
    (lines,) = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    readme_family.write(tmp_path)
    (tmp_path / "evaluate.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "assert (Path(sys.argv[1]) / 'config.json').exists()\n"
        f"sys.exit({int(fails)})\n"
    )

    def run(step: str) -> str:
        done = _ran(step, tmp_path, "bash", "-c")
        return done.stdout + done.stderr

    run("mstore init && mstore add llama --name llama && mstore add code --name code --base llama")
    run("mstore plan --base llama --expert code --method linear -o plan.json")
    told = run(lines)
    # A script that stopped leaves the candidate to be looked at.
    assert ("removed candidates/try-7/release" in told) == (not fails), told
    assert ("new branch release" in told) == (not fails)
    found = run("mstore refs -q 'r*'")
    assert (found == "release\n") == (not fails)
    assert "candidates" not in run("mstore refs -q")
    listed = run("mstore refs")
    assert "candidates/try-7" not in listed
    assert ("\n1 candidate: mstore refs 'candidates/*'\n" in listed) == fails
    again = run("mstore merge --plan plan.json --name release --candidate two")
    expected = "mstore reset release candidates/two/release --expect "
    assert expected in again, again
    line = next(line for line in again.splitlines() if expected in line)
    assert "is at" not in run("mstore reset release code"), again
    moved = run(f"mstore {line.partition('mstore ')[2]}")
    assert "expected" in moved, moved


@pytest.mark.rest
def test_nightly_backup(tmp_path: Path) -> None:
    """The script of docs/howto/backup.md makes a backup, brings it up to date, and it restores."""
    page = (DOCS / "howto" / "backup.md").read_text()
    script, restore = (
        next(
            block for block in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) if word in block
        )
        for word in ("#!/bin/sh", "/srv/models/restored")
    )
    readme_family.write(tmp_path)

    def run(text: str) -> str:
        for place in ("/srv/models", "/backup/models"):
            text = text.replace(place, f"{tmp_path}{place}")
        done = _ran(text, tmp_path, "sh", "-ec")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("mkdir -p /srv/models && mkdir -p $(dirname /backup/models)")
    store = "mstore --store /srv/models/store"
    run(f"{store} init && {store} add llama --name llama")
    run(script)
    run(f"{store} add code --name code")
    run(script)
    run(restore)
    assert run("mstore --store /srv/models/restored refs -q").split() == ["code", "llama"]


def _programs(page: Path) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_python_of_pages() -> None:
    """Each block of Python parses, but for signatures; one that starts processes can be a file."""
    for page in {*PAGES} - {DOCS / "api.md"}:
        for block in _programs(page):
            ast.parse(block)
            if "ProcessPoolExecutor(" in block:
                assert '\nif __name__ == "__main__":\n' in block, page


@pytest.mark.rest
def test_a_merge_in_other_processes_runs_as_a_file(tmp_path: Path) -> None:
    """The first program of docs/howto/cluster.md, saved as a file, merges in its workers."""
    program = tmp_path / "program.py"
    program.write_text(_programs(DOCS / "howto" / "cluster.md")[0])
    readme_family.write(tmp_path)
    with Store.init(tmp_path / ".mstore") as store:
        for name in ("llama", "code", "math"):
            store.add(tmp_path / name, name=name)
    line = [sys.executable, str(program)]
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    with Store.open(tmp_path / ".mstore") as store:
        assert store["merged"].tensor_names()
