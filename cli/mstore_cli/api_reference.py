"""The generator of the reference in docs/api.md, from the docstrings of the library.

The page lists what `mstore` exports, every error, and every
class that these calls take or return.  `mstore_cli.reference` writes it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

import mstore
from mstore.api import reports
from mstore.api.adding import Adding
from mstore.api.assembling import Assembling
from mstore.api.exchanging import Exchanging
from mstore.api.exporting import Exporting
from mstore.api.integrations.directory import as_directory
from mstore.api.integrations.pretrained import from_pretrained
from mstore.api.judging import Judging
from mstore.api.keeping import Keeping
from mstore.api.load import SafeOpen, TensorSlice
from mstore.api.merging import Merging
from mstore.api.naming import Naming
from mstore.api.open_store import OpenStore
from mstore.api.reading import Reading
from mstore.api.searching import Searching
from mstore.checkpoint.conversion import ConversionLimits
from mstore.checkpoint.directory import CheckpointLimits
from mstore.search.template import Template
from mstore.snapshots import signing
from mstore.store import view
from mstore.store.leases import Hold
from mstore.terms import errors, ids, phrases
from mstore_cli import keys
from mstore_fuse import mounts
from mstore_fuse.driver import MountInfo
from mstore_serve import serving

WIDTH = 88
# In a docstring, a line that begins with names of parameters and a colon.
_ITEM = re.compile(r"^([a-z]\w*(?:, [a-z]\w*)*): ", re.MULTILINE)
# Users see a store as one class; its parts give the page its sections.
PARTS = (
    *(OpenStore, Adding, Reading, Merging, Assembling, Judging, Searching, Naming, Keeping),
    *(Exchanging, Exporting),
)
IDS: tuple[type, ...] = (
    *(ids.BlockId, ids.TensorId, ids.ManifestId, ids.SnapshotId, ids.PlanId, ids.NoteId),
)
# Other types that calls take or return, beside reports, with a name for each.
OTHERS: dict[type, str] = {
    view.SnapshotView: "view",
    SafeOpen: "file",
    TensorSlice: "part",
    Hold: "hold",
    Template: "template",
    CheckpointLimits: "limits",
    ConversionLimits: "limits",
}


def reference() -> str:
    """Return the generated part of docs/api.md."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield f"## mstore.Store\n\n{_text(mstore.Store)}"
    for part in PARTS:
        yield f"### Store: {_title(part)}\n"
        yield from _members(part, "Store", "store")
    yield "### Store: snapshots by name\n"
    yield _entry(
        "store[revision]", "store[revision: Revision] -> Snapshot", mstore.Store.__getitem__
    )
    yield f"## mstore.Snapshot\n\n{_text(mstore.Snapshot)}"
    yield from _members(mstore.Snapshot, "Snapshot", "snapshot")
    yield f"## mstore.MergeRequest\n\n{_text(mstore.MergeRequest)}\n{_fields(mstore.MergeRequest)}"
    yield from _members(mstore.MergeRequest, "MergeRequest", "request")
    recipe = mstore.RecipeRequest
    yield f"## mstore.RecipeRequest\n\n{_text(recipe)}\n{_fields(recipe)}"
    yield f"## mstore.TensorRule\n\n{_text(mstore.TensorRule)}\n{_fields(mstore.TensorRule)}"
    yield from _members(mstore.TensorRule, "TensorRule", "rule")
    words, row = mstore.Vocabulary, mstore.TokenRow
    yield f"## mstore.Vocabulary\n\n{_text(words)}\n{_fields(words)}"
    yield f"## mstore.TokenRow\n\n{_text(row)}\n{_fields(row)}"
    asked = mstore.Transplant
    yield f"## mstore.Transplant\n\n{_text(asked)}\n{_fields(asked)}"
    yield f"## mstore.Gate\n\n{_text(mstore.Gate)}"
    yield from _members(mstore.Gate, "Gate", "gate")
    yield f"## mstore.Budget\n\n{_text(mstore.Budget)}"
    yield from _members(mstore.Budget, "Budget", "budget")
    yield f"## Ids\n\n{_text(ids.Id)}"
    for kind in IDS:
        yield f"### mstore.{kind.__name__}\n\n{_text(kind)}"
    yield from _members(ids.Id, "SnapshotId", "id")
    yield "## mstore.\\_\\_version\\_\\_\n\nThe version, as text.\n"
    yield f"## Errors\n\n{_text(errors)}"
    for error in _classes(errors):
        yield f"### mstore.{error.__name__}\n\n{_text(error)}"
        if error is errors.MstoreError:
            yield from _members(error, "MstoreError", "error")
    yield f"## mstore.terms.phrases\n\n{_text(phrases)}"
    for kind in (phrases.Phrase, phrases.Call, phrases.Option, phrases.Spelling):
        yield f"### {kind.__name__}\n\n{_text(kind)}"
        yield from _members(kind, kind.__name__, kind.__name__.lower())
    yield f"## mstore.api.reports\n\n{_text(reports)}"
    for report in _reports():
        yield f"### {report.__name__}\n\n{_text(report)}\n{_fields(report)}"
    yield "## mstore.snapshots.signing\n\nKeys for `Store.sign` and `Store.verify`.\n"
    for function in (signing.load_key, signing.read_signers):
        yield _function("signing", function)
    yield f"### SigningKey\n\n{_text(signing.SigningKey)}"
    yield from _members(signing.SigningKey, "SigningKey", "key")
    yield "## mstore.api.integrations\n\nOther libraries on top of mstore.\n"
    yield _function("integrations.pretrained", from_pretrained)
    yield _function("integrations.directory", as_directory)
    yield "## mstore_fuse.mounts\n\nMounts, for programs: what the command line calls.\n"
    for call in (mounts.mount, mounts.shown, mounts.mounts, mounts.unmount, mounts.unmount_all):
        yield _function("mounts", call)
    yield f"### MountInfo\n\n{_text(MountInfo)}\n{_fields(MountInfo)}"
    yield f"### Mounted\n\n{_text(mounts.Mounted)}"
    yield from _members(mounts.Mounted, "Mounted", "mounted")
    yield f"### Unmounted\n\n{_text(mounts.Unmounted)}\n{_fields(mounts.Unmounted)}"
    yield "## mstore_serve.serving\n\nA store over HTTP and S3: what the command line calls.\n"
    yield _function("serving", serving.serve)
    for struct in (serving.S3Keys, serving.ServeInfo):
        yield f"### {struct.__name__}\n\n{_text(struct)}\n{_fields(struct)}"
    yield "## What else calls take and give\n"
    for other, instance in OTHERS.items():
        fields = f"\n{_fields(other)}" if issubclass(other, msgspec.Struct) else ""
        yield f"### {other.__module__}.{other.__name__}\n\n{_text(other)}{fields}"
        yield from _members(other, other.__name__, instance)


def public(owner: type) -> Iterator[tuple[str, object]]:
    """Yield the public members of a class itself, in source order."""
    for name, member in vars(owner).items():
        described = isinstance(member, property | classmethod | staticmethod)
        if not name.startswith("_") and (described or inspect.isfunction(member)):
            yield name, member


def _classes(module: object) -> list[type]:
    """Return the classes that a module defines, in source order."""
    return [
        one
        for one in vars(module).values()
        if inspect.isclass(one) and one.__module__ == getattr(module, "__name__", None)
    ]


def _reports() -> list[type]:
    """Return the classes that `mstore.api.reports` exports, by name."""
    exported = [getattr(reports, name) for name in sorted(reports.__all__)]
    return [one for one in exported if inspect.isclass(one)]


def _members(owner: type, kind: str, instance: str) -> Iterator[str]:
    for name, member in public(owner):
        if isinstance(member, property):
            getter = member.fget
            assert getter is not None
            given = inspect.signature(getter).return_annotation
            yield _entry(f"{kind}.{name}", f"{instance}.{name}: {_own(given, kind)}", getter)
            continue
        called_on = kind if isinstance(member, classmethod | staticmethod) else instance
        function = getattr(owner, name)
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else function
        yield _entry(f"{kind}.{name}", _own(_call(f"{called_on}.{name}", function), kind), plain)


def _function(module: str, function: Callable[..., object]) -> str:
    name = f"{module}.{function.__name__}"
    return _entry(name, _call(name, function), function)


def _own(text: str, kind: str) -> str:
    return re.sub(r"\bSelf\b", kind, text)


def _call(shown: str, function: Callable[..., object]) -> str:
    """Format a call as a program writes it, with types; one parameter per line if it is long."""
    signature = inspect.signature(function)
    parameters = [one for name, one in signature.parameters.items() if name != "self"]
    words: list[str] = []
    for at, one in enumerate(parameters):
        before = parameters[at - 1].kind if at else None
        if one.kind is one.KEYWORD_ONLY and before not in (one.KEYWORD_ONLY, one.VAR_POSITIONAL):
            words.append("*")
        stars = "*" if one.kind is one.VAR_POSITIONAL else ""
        stars = "**" if one.kind is one.VAR_KEYWORD else stars
        default = "" if one.default is one.empty else f" = {one.default!r}"
        words.append(f"{stars}{one.name}: {one.annotation}{default}")
    tail = f") -> {signature.return_annotation}"
    line = f"{shown}({', '.join(words)}{tail}"
    if len(line) <= WIDTH:
        return line
    return "\n".join((f"{shown}(", *(f"    {word}," for word in words), tail))


def _entry(title: str, call: str, documented: object) -> str:
    return f"#### {title}\n\n```python\n{call}\n```\n\n{_text(documented)}"


def _title(part: type) -> str:
    return _doc(part).split("\n")[0].rstrip(".").lower()


def _doc(documented: object) -> str:
    found = inspect.getdoc(documented)
    if not found:
        raise ValueError(f"{documented!r} has no docstring")
    return found


def _text(documented: object) -> str:
    """Format a docstring for a page: descriptions of parameters become a list."""
    doc = _doc(documented)
    if not inspect.isfunction(documented):
        return f"{doc}\n"
    return "\n".join(_paragraph(one) for one in doc.split("\n\n"))


def _paragraph(text: str) -> str:
    if not _ITEM.match(text):
        return f"{text}\n"
    items = _ITEM.split(text)[1:]
    pairs = zip(items[::2], items[1::2], strict=True)
    return "".join(
        f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {' '.join(said.split())}\n"
        for names, said in pairs
    )


def _fields(report: type) -> str:
    """Format one row per field: its type as written, and the meaning of the JSON key."""
    types = {
        name: kind
        for one in report.__mro__[::-1]
        for name, kind in vars(one).get("__annotations__", {}).items()
    }
    names = keys.fields_of(report)
    told = keys.meanings(report)
    if not told:
        return _table(("field", "type"), [(f"`{one}`", f"`{types[one]}`") for one in names])
    return _table(
        ("field", "type", "meaning"),
        [(f"`{one}`", f"`{types[one]}`", told[one]) for one in names],
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in r] for r in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
