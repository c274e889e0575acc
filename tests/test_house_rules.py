"""The library's manners, read from its syntax trees: silent, no environment, one writing module.

`breaches` knows names, not values: it resolves imports (`from os import replace as r`) and then
forbids mere mention, so that passing `os.unlink` along is caught as well as calling it.  What it
cannot see (a method reached through getattr) no reviewer should let in either.
"""

from __future__ import annotations

import ast
import builtins
import functools
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from mstore.merge.methods.registry import METHODS
from mstore_cli.verbs import VERBS

ROOT = Path(__file__).resolve().parent.parent
# A program of its own that a child process runs, in a directory it was given: no part of the
# library and loaded by none of it (tests/test_convert.py).  It knows torch: nothing else need.
CONVERTER = ROOT / "mstore" / "checkpoint" / "conversion_program.py"
# Starts that child; no other module starts any.
PARENT = ROOT / "mstore" / "checkpoint" / "conversion.py"
# Likewise a program of its own: it runs the command that a user judges snapshots with, and ends all
# that the command started.  The other starts it.
SUPERVISOR = ROOT / "mstore" / "judging" / "supervisor_program.py"
WATCHER = ROOT / "mstore" / "judging" / "process.py"
# What a cluster's workers get and give back is calls: who can send one may run code there anyway.
CALLS = {
    ROOT / "mstore" / "merge" / "running" / "slices.py",
    ROOT / "mstore" / "clusters" / "pilots.py",
}
# Workers have no command line: their keys are in their environment.
WORKER = ROOT / "mstore" / "clusters" / "at_remote.py"
# Asks Slurm by its commands, and jobs have their number in their environment.
SLURM = ROOT / "mstore" / "clusters" / "slurm.py"
# Docker and podman say by variables where their logins are, and have programs that know them.
LOGINS = ROOT / "mstore" / "oci" / "credentials.py"
LIBRARY = sorted({*(ROOT / "mstore").rglob("*.py")} - {CONVERTER, SUPERVISOR})
# Functions of what a store reports: as silent as the library.
PAGES = sorted((ROOT / "pages").rglob("*.py"))
ADAPTERS = sorted(
    path for top in ("fuse", "pages", "serve", "cli") for path in (ROOT / top).rglob("*.py")
)
WRITERS = sorted((ROOT / "mstore" / "fs").glob("*.py"))

ENVIRONMENT = {
    *("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"),
}
TALK = ENVIRONMENT | {
    *("print", "breakpoint", "exit", "quit", "SystemExit"),
    *("sys.exit", "sys.stdout", "sys.stderr", "sys.stdin", "os._exit", "os.abort"),
    *("os.path.expanduser", "os.path.expandvars", "pathlib.Path.home"),
}
TALK_METHODS = {"expanduser"}

EXECUTION = {
    *("eval", "exec", "compile", "__import__"),
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader"),
    *("os.system", "os.popen", "subprocess", "runpy", "code"),
}

WRITES = {
    *("os.rename", "os.renames", "os.replace", "os.link", "os.symlink"),
    *("os.unlink", "os.remove", "os.removedirs", "os.rmdir"),
    *("os.mkdir", "os.makedirs", "os.mkfifo", "os.mknod"),
    *("os.truncate", "os.ftruncate", "os.posix_fallocate"),
    *("os.fsync", "os.fdatasync", "os.sync"),
    *("os.write", "os.writev", "os.pwrite", "os.pwritev"),
    *("os.sendfile", "os.copy_file_range", "os.splice"),
    *("os.chmod", "os.fchmod", "os.chown", "os.fchown", "os.utime", "os.setxattr"),
    *("os.O_WRONLY", "os.O_RDWR", "os.O_CREAT", "os.O_EXCL"),
    *("os.O_APPEND", "os.O_TRUNC", "os.O_TMPFILE"),
    *("shutil", "tempfile", "fileinput"),
    *("numpy.save", "numpy.savez", "numpy.savez_compressed", "numpy.savetxt", "numpy.memmap"),
    *("safetensors.numpy.save_file", "safetensors.serialize_file"),
}
WRITE_METHODS = {
    *("write_text", "write_bytes", "touch", "tofile"),
    *("mkdir", "rmdir", "unlink", "rename", "symlink_to", "hardlink_to", "chmod", "lchmod"),
}
OPENERS = {"open", "io.open", "codecs.open", "gzip.open", "bz2.open", "lzma.open", "os.fdopen"}


@functools.cache
def _words(source: str) -> frozenset[str]:
    """All words of a file: what mentions a name holds each part of it."""
    return frozenset(re.findall(r"\w+", source))


@functools.cache
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """The syntax tree, walked once: several rules read each file."""
    return tuple(ast.walk(ast.parse(source)))


def breaches(
    source: str, names: set[str], methods: frozenset[str] | set[str] = frozenset()
) -> Iterator[str]:
    """Each mention of one of `names` (dotted, or a whole module) or of a method of that name.

    A method is looked for on objects only: `fs.unlink`, a function of an imported module of
    mstore, is not `path.unlink`.
    """
    words = _words(source)
    names = {name for name in names if words.issuperset(name.split("."))}
    if not names and words.isdisjoint(methods):
        # Most files: a syntax tree takes a hundred times as long.
        return
    nodes = _nodes(source)
    imported = dict(_imports(nodes))
    for name, line in _import_lines(nodes):
        if _within(name, names):
            yield f"line {line}: imports {name}"
    for node in nodes:
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        dotted = _dotted(node, imported)
        if dotted is not None and _within(dotted, names):
            yield f"line {node.lineno}: {dotted}"
        elif isinstance(node, ast.Attribute) and node.attr in methods:
            owner = _dotted(node.value, imported)
            if owner is None or not owner.startswith("mstore"):
                yield f"line {node.lineno}: .{node.attr}"


def opens_for_writing(source: str) -> Iterator[str]:
    """Each `open` (builtin, of a module, or of a path) whose mode is not a literal reading mode."""
    if _words(source).isdisjoint({"open", "fdopen"}):
        return
    nodes = _nodes(source)
    imported = dict(_imports(nodes))
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        dotted = _dotted(node.func, imported)
        if dotted in OPENERS:
            mode = _argument(node, 1, "mode")
            if mode is not None and not _is_reading(mode):
                yield f"line {node.lineno}: {dotted}"
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "open":
            mode = _argument(node, 0, "mode")
            # A first argument that is no mode belongs to another `open`: Store.open(path).
            is_mode = isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rwxabt+")
            if is_mode and not _is_reading(mode):
                yield f"line {node.lineno}: .open({mode.value!r})"


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """(local name, dotted origin) of every import in the file."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _import_lines(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _dotted(node: ast.expr, imported: dict[str, str]) -> str | None:
    """`a.b.c` with `a` an import (as its origin) or a builtin; None for any other expression."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id if hasattr(builtins, node.id) else None)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, imported)
        return f"{owner}.{node.attr}" if owner is not None else None
    return None


def _within(dotted: str, names: set[str]) -> bool:
    parts = dotted.split(".")
    return any(".".join(parts[:n]) in names for n in range(1, len(parts) + 1))


def _argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    if len(call.args) > position:
        return call.args[position]
    return next((k.value for k in call.keywords if k.arg == keyword), None)


def _is_reading(mode: ast.expr) -> bool:
    return isinstance(mode, ast.Constant) and str(mode.value) in {"r", "rb", "br", "rt"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _sources() -> list[Path]:
    """Every text file that git tracks or would track; without git, those of the known folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True)
    if done.returncode == 0:
        paths = [ROOT / os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    else:
        folders = ["mstore", "fuse", "pages", "serve", "cli", "tests", "docs", "examples", "bench"]
        folders += ["scripts", ".ci"]
        paths = [p for folder in folders for p in (ROOT / folder).rglob("*")]
        paths += [p for p in ROOT.iterdir() if p.is_file()]
    return [p for p in paths if p.is_file() and b"\0" not in p.read_bytes()]


def _found(paths: Iterable[Path], rule: Callable[[Path, str], Iterable[str]]) -> list[str]:
    """Each breach of a rule, with the file that it is in."""
    return [f"{_name(path)}: {said}" for path in paths for said in rule(path, path.read_text())]


def test_library_is_silent() -> None:
    """Library and pages print nothing, read no environment variable and never exit."""

    def rule(path: Path, source: str) -> Iterator[str]:
        return breaches(
            source, TALK - ENVIRONMENT if path in (WORKER, SLURM, LOGINS) else TALK, TALK_METHODS
        )

    assert _found([*LIBRARY, *PAGES], rule) == []


def test_only_fs_writes_files() -> None:
    """No room but mstore/fs opens a file for writing, or makes, renames, syncs or removes."""
    others = [path for path in (*LIBRARY, *PAGES) if path not in WRITERS]
    assert len(others) == len(LIBRARY) + len(PAGES) - len(WRITERS)
    assert _found(others, lambda path, source: breaches(source, WRITES, WRITE_METHODS)) == []
    assert _found(others, lambda path, source: opens_for_writing(source)) == []


def test_input_stays_data() -> None:
    """Nothing in the library unpickles, evaluates or runs what it reads, nor imports torch."""

    def rule(path: Path, source: str) -> Iterator[str]:
        starts_programs = path in ADAPTERS or path in (PARENT, SLURM, WATCHER, LOGINS)
        allowed = {"subprocess"} if starts_programs else set()
        return breaches(source, EXECUTION - allowed - ({"pickle"} if path in CALLS else set()))

    assert _found([*LIBRARY, *ADAPTERS], rule) == []


def test_every_rule_reads_every_file() -> None:
    """The lists hold the library and all that stands on it, and a breach names its file."""
    assert {path.parts[len(ROOT.parts)] for path in (*LIBRARY, *ADAPTERS)} == {
        "mstore",
        "fuse",
        "pages",
        "serve",
        "cli",
    }
    assert len(LIBRARY) > 100
    assert len(ADAPTERS) > 50
    found = _found(WRITERS, lambda path, source: breaches(source, WRITES, WRITE_METHODS))
    assert any(one.startswith("mstore/fs/files.py: line ") for one in found)


def compared_with(source: str, names: set[str]) -> Iterator[str]:
    """Each comparison with one of these words, or with one of those in a constant of the module."""
    if not any(name in source for name in names):
        return
    module, *nodes = _nodes(source)
    assert isinstance(module, ast.Module)
    constants = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if not isinstance(node, ast.Compare):
            continue
        sides = [
            constants.get(side.id, side) if isinstance(side, ast.Name) else side
            for side in (node.left, *node.comparators)
        ]
        for part in (part for side in sides for part in ast.walk(side)):
            if isinstance(part, ast.Constant) and part.value in names:
                yield f"line {node.lineno}: {part.value!r}"


def test_what_compares_with_names_is_seen() -> None:
    """A comparison is found in an expression, in a tuple, and by way of a constant."""
    for source in ("m == 'x'", "m in ('x', 'y')", "ALL = ('x',)\nm in ALL", "m != 'x' and m"):
        assert len(list(compared_with(source, {"x"}))) == 1
    assert not list(compared_with("m == 'y'; ALL = ('x',); f('x')", {"x"}))


JUDGES = ("upkeep/",)
"""What decides that something is damaged, missing or not needed."""
OF_THE_MACHINE = {"MstoreError", "StorageFailed", "Unavailable", "OSError", "Exception"}
ALLOWED = {
    # A file that is missing, and nothing else.
    "upkeep/check/index_file.py:_opened",
    "upkeep/backup/remotes.py:_copy_file",
    # Only names who is in the way.
    "upkeep/check/reindex.py:_require_idle",
    # Of a table that is not needed, after the new index is in its place.
    "upkeep/check/reindex.py:_forget_requests",
    # A full disk.
    "upkeep/gc/collect.py:copy",
    # Garbage that stays.
    "upkeep/gc/collect.py:_commit",
    "upkeep/backup/backup.py:_publish",
    "upkeep/backup/destination.py:opened",
    # Who can take no lease looks again at what went.
    "upkeep/backup/copying.py:held",
    # Says that it is pinned, and raises it again.
    "upkeep/pins/pin.py:_runs_now",
}
"""Where else such an error may be caught, and why it is not taken for damage there."""


def catches(source: str) -> Iterator[tuple[str, str]]:
    """The function and the class of each error that is caught in it, suppressed ones too."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                caught: list[ast.expr] = []
                if isinstance(node, ast.ExceptHandler) and node.type is not None:
                    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "suppress":
                    caught = node.args
                yield from ((function.name, ast.unparse(kind)) for kind in caught)


def test_only_damage_is_taken_for_damage() -> None:
    """Checks, repairs, collections, copies and pins catch damage, and no error of the machine but
    where they are known to do no harm with it."""
    found = set()
    for path in LIBRARY:
        name = str(path.relative_to(ROOT / "mstore"))
        if name.startswith(JUDGES):
            caught = catches(path.read_text())
            found |= {f"{name}:{where}" for where, kind in caught if kind in OF_THE_MACHINE}
    assert found == ALLOWED


OF_STORES = ("blocks/", "models/stats/", "store/", "upkeep/")
READS = {"open", "io.open", "os.open", "os.listdir", "os.scandir", "os.walk", "glob"}
READ_METHODS = {"read_text", "read_bytes", "iterdir", "glob", "rglob"}
READ_ELSEWHERE = {
    # A file of the kernel's, and a copy in memory.
    "blocks/lmdb_table.py: .read_bytes",
    "blocks/lmdb_copy.py: os.open",
    # What may become a store, before anything is opened there.
    "store/layout.py: .iterdir",
    "store/layout.py: .rglob",
    "store/layout.py: .glob",
    "upkeep/backup/destination.py: .iterdir",
    # Sizes for reports: a link is counted, and nothing is opened.
    "store/leases.py: .rglob",
    "store/unnamed_packs.py: .rglob",
}


def test_files_of_a_store_are_opened_by_fs() -> None:
    """The rooms that know stores open and list nothing by path: mstore.fs starts at the open
    directory of the store, and follows no link."""
    found = set()
    for path in LIBRARY:
        name = str(path.relative_to(ROOT / "mstore"))
        if name.startswith(OF_STORES):
            for said in breaches(path.read_text(), READS, READ_METHODS):
                found.add(f"{name}: {said.partition(': ')[2]}")
    assert found == READ_ELSEWHERE


def test_methods_and_verbs_have_properties() -> None:
    """Nothing asks for a merge method or a command by its name: what is special about one is a
    property of its operator, or of its verb.
    """

    def rule(path: Path, source: str) -> Iterator[str]:
        names = set(METHODS)
        if path.name in {"command.py", "main.py"}:
            names |= set(VERBS)
        return compared_with(source, names)

    assert _found([*LIBRARY, *ADAPTERS], rule) == []


def test_progress_has_one_type() -> None:
    """What takes the ticks of a long call is a ProgressCallback; no module writes the type out."""

    def rule(path: Path, source: str) -> Iterator[str]:
        return (one for one in re.findall(r"Callable\[\[Progress\].*", source))

    found = _found([*LIBRARY, *ADAPTERS], rule)
    assert found == ["mstore/terms/report.py: Callable[[Progress], None]"]


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.replace(a, b)",
        "import os as o\no.unlink(a)",
        "from os import replace as r\nr(a, b)",
        "import os\nf = os.fsync",
        "import os\nos.open(p, os.O_RDONLY | os.O_CREAT)",
        "import shutil\nshutil.rmtree(p)",
        "from shutil import copyfile",
        "import tempfile",
        "path.write_bytes(b'')",
        "(a / b).unlink()",
        "import numpy as np\nnp.save(p, a)",
    ],
)
def test_a_write_is_seen(source: str) -> None:
    """The rule on writing catches renamed imports, mere mention, flags and methods of paths."""
    assert list(breaches(source, WRITES, WRITE_METHODS))


@pytest.mark.parametrize(
    "source",
    [
        "open(p, 'wb')",
        "open(p, mode='a')",
        "open(p, mode)",
        "import gzip\ngzip.open(p, 'w')",
        "p.open('r+b')",
        "p.open(mode='x')",
    ],
)
def test_an_open_for_writing_is_seen(source: str) -> None:
    """An `open` whose mode is not plainly a reading mode is a breach."""
    assert list(opens_for_writing(source))


@pytest.mark.parametrize(
    "source",
    [
        "open(p)",
        "open(p, 'rb')",
        "p.open('rb')",
        "Store.open(p)",
        "from mstore import fs\nfs.unlink(p)",
        "import os\nos.open(p, os.O_RDONLY | os.O_CLOEXEC)\nos.pread(fd, 1, 0)",
        "name.replace('a', 'b')",
        "def f(tempfile: str) -> str:\n    return tempfile",
    ],
)
def test_reading_is_free(source: str) -> None:
    """Reading files, text methods and calls into mstore.fs break no rule."""
    assert not list(breaches(source, WRITES, WRITE_METHODS))
    assert not list(opens_for_writing(source))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("print('x')", TALK),
        ("import sys\nsys.exit(1)", TALK),
        ("from os import environ", TALK),
        ("import os\nx = os.getenv('A')", TALK),
        ("raise SystemExit", TALK),
        ("import pickle", EXECUTION),
        ("from torch import nn", EXECUTION),
        ("import yaml\nyaml.load(x)", EXECUTION),
        ("eval(x)", EXECUTION),
    ],
)
def test_talk_and_execution_are_seen(source: str, names: set[str]) -> None:
    """Printing, leaving, reading the environment, unpickling and evaluating are breaches."""
    assert list(breaches(source, names))


def test_nothing_is_left_for_later() -> None:
    """No tracked file holds a note to do something later."""
    # Joined here, so that this file does not hold them.
    words = ["".join(pair) for pair in [("TO", "DO"), ("FIX", "ME"), ("X", "XX")]]
    marks = re.compile(rf"\b({'|'.join(words)})\b".encode())
    assert [_name(p) for p in _sources() if marks.search(p.read_bytes())] == []


def test_listing_the_tests_loads_no_framework() -> None:
    """No module of the tests imports torch before a test runs: each worker lists all of them."""
    slow = {"torch", "transformers", "safetensors.torch", "demo", "family"}
    tops = "|".join(sorted({name.split(".")[0] for name in slow}))
    mention = re.compile(rf"^(import|from)\b.*\b({tops})\b", re.MULTILINE)
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text()
        if not mention.search(source):
            continue
        at_once = ast.parse(source).body
        found += [
            f"{_name(path)}:{line}" for name, line in _import_lines(at_once) if _within(name, slow)
        ]
    assert found == []


def test_constraints_hold_names_and_versions_only() -> None:
    """constraints.txt is lines of name==version: no host, no hash, no local build label."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines
    wrong = [s for s in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", s)]
    assert wrong == []
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines]
    assert len(set(names)) == len(names)


def test_no_file_names_a_package_index() -> None:
    """Where packages come from is each machine's own business: no file names an index or mirror."""
    hosts = [
        ("pypi", "org"),
        ("pypi", "python", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("anaconda", "org"),
        ("deb", "debian", "org"),
        ("security", "debian", "org"),
        ("archive", "ubuntu", "com"),
        ("security", "ubuntu", "com"),
        ("npmjs", "org"),
        ("npmjs", "com"),
    ]
    options = [("--index", "url"), ("--extra-index", "url"), ("--trusted", "host")]
    words = [".".join(host) for host in hosts] + ["-".join(option) for option in options]
    pattern = re.compile("|".join(re.escape(word) for word in words).encode())
    assert [_name(p) for p in _sources() if pattern.search(p.read_bytes())] == []
