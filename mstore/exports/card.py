"""The card of an exported snapshot: its README.md, completed with what the store knows.

Front matter keeps every key that it has; keys that it lacks are added: `base_model` and
`base_model_relation` from the lineage, `license` from the bases, `library_name` from the files,
`model-index` from evaluations, `tags`.  The text stays.  One section, between markers, is mstore's:
the snapshot's id, and its parents with their commits on the Hub.

The snapshot stays as it is: the card is made when files go out.  A merge's own card names parents
by ids of content (docs/design/011-model-cards.md), which no Hub knows; only here they become names
of the Hub.  What cards of others say is repeated if it looks like a name, and never interpreted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import yaml

from mstore.checkpoint.declared import CARD, MERGEKIT, front_matter, values
from mstore.checkpoint.origin import Origin
from mstore.checkpoint.strict_json import LENGTH_BYTES, METADATA_KEY, header_bytes
from mstore.merge.recipes.write import named
from mstore.merge.running.model_card import NOT_NAMED, TO_PUBLISH
from mstore.models.adapters.config import CONFIG as ADAPTER_CONFIG
from mstore.models.adapters.config import named_base
from mstore.models.made import NAME, WORD, start_of
from mstore.snapshots import notes
from mstore.snapshots.checkout import header_size
from mstore.snapshots.digests import SNAPSHOT_KEY
from mstore.snapshots.lineage import plan_of
from mstore.store.catalog import Catalog
from mstore.store.models import Input
from mstore.store.objects import snapshot as records
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.view import SnapshotView
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import SnapshotId

BEGIN: Final = "<!-- mstore: begin; each export writes this section anew -->"
END: Final = "<!-- mstore: end -->"
_SECTION: Final = re.compile(rf"\n*{re.escape(BEGIN)}.*?(?:{re.escape(END)}\n?|\Z)", re.S)
_MATTER: Final = re.compile(
    r"---[ \t]*\r?\n(?P<matter>.*?)^---[ \t]*(?:\r?\n|\Z)", re.M | re.DOTALL
)
_CONTENT_ID: Final = re.compile(r"[0-9a-f]{64}(:.*)?")
_BASE_MODEL: Final = "base_model"
_RELATION: Final = "base_model_relation"
_LICENCE: Final = ("license", "license_name", "license_link")
_TAGS: Final = "tags"
_OWN_TAGS: Final = ("merge", "mergekit", "mstore")
_LIBRARIES: Final = (
    (ADAPTER_CONFIG, "peft"),
    ("model_index.json", "diffusers"),
    ("modules.json", "sentence-transformers"),
    ("config.json", "transformers"),
)
"""By which file a library knows its models; the first that is there counts."""
_RELATIONS: Final[Mapping[str, str]] = {
    records.MERGE: "merge",
    records.EXTRACT: "adapter",
    records.COMBINE: "adapter",
    records.ALIGN: "finetune",
}
_OF_MACHINE: Final = re.compile(r"\S+@\S+")
_EIGHT_BITS: Final = ("F8", "I8", "U8", "F4", "F6")
_MOST_ANCESTORS: Final = 1000


class _ParentModel(msgspec.Struct, frozen=True):
    """A model that this one was made of.

    origin: where it is on the Hub, or the nearest model there that it was made of; None: nowhere.
    """

    role: str
    record: SnapshotRecord
    origin: Origin | None

    @property
    def name(self) -> str | None:
        """The name on the Hub of the model that `origin` tells."""
        return None if self.origin is None else self.origin.model

    def told(self) -> str:
        """Say what it is, for people."""
        if self.origin is None:
            return "not on the Hub"
        return _link(self.origin) if self.is_there else f"tuned from {_link(self.origin)}"

    def commit(self) -> str:
        """Return the beginning of its commit on the Hub, if it is there itself."""
        if self.origin is None or not self.is_there:
            return ""
        return f"`{self.origin.commit[:12]}`"

    @property
    def is_there(self) -> bool:
        """Whether it is on the Hub itself."""
        return self.record.origin == self.origin


def card(catalog: Catalog, view: SnapshotView, asked: Input) -> dict[str, bytes]:
    """Return the card of a view by its path, and a merge's recipe with names of the Hub.

    Nothing if its README.md is no text.

    asked: what the view shows; the last part of its name is the title where README.md is missing.

    Raises Corrupt, NotFound (a parent's record is missing), StorageFailed.
    """
    name = re.sub(r"[^\w.-]+", "-", (asked.model or asked.name).rpartition("/")[2])
    path = next((one for one in view.files if one.casefold() == CARD.casefold()), CARD)
    raw = view.read(path, 0, view.files[path]) if path in view.files else f"# {name}\n".encode()
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return {}
    made = _Card(catalog, view, name)
    return {path: made.completed(text).encode(), **made.recipe()}


def completed_header(
    catalog: Catalog, snapshot: SnapshotId, title: str, view: SnapshotView, path: str
) -> Callable[[str], bytes]:
    """Return what makes the header of a single file, from the SHA-256 of its tensors.

    Keys that it has stay; a title, the snapshot, and for what was made here its author, date and
    digest are added, as Stability AI's model metadata names them. An author that is only the user
    of a machine is nobody to publish.
    """
    record = catalog.snapshot(snapshot)
    fields = json.loads(view.read(path, 0, header_size(view, path))[LENGTH_BYTES:])
    told = fields.get(METADATA_KEY) or {}
    when = datetime.fromtimestamp(record.time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    author = "" if _OF_MACHINE.fullmatch(record.author) else record.author
    made_here = {"date": when, "author": author} if record.made != records.ADD else {}
    own = {"title": title, **made_here}
    more = {f"modelspec.{key}": value for key, value in own.items() if value}
    origin = {SNAPSHOT_KEY: snapshot.hex()}

    def header(digest: str) -> bytes:
        digested = {"modelspec.hash_sha256": f"0x{digest}"} if made_here else {}
        return header_bytes({**fields, METADATA_KEY: more | digested | told | origin})

    return header


class _Card:
    def __init__(self, catalog: Catalog, view: SnapshotView, name: str) -> None:
        self._catalog = catalog
        self._view = view
        self._name = name
        self._record = catalog.snapshot(view.id)
        self._parents = list(self._found_parents())

    def completed(self, text: str) -> str:
        """Return the text of a README.md with what it lacks."""
        found = _MATTER.match(text)
        matter = "" if found is None else found["matter"].replace("\r\n", "\n")
        body = f"\n{text}" if found is None else text[found.end() :]
        for key, value in self._keys(matter):
            matter = _without(matter, key)
            if value is not None:
                # It quotes what YAML would read as something else than text.
                matter += yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True)
        body = _SECTION.sub("\n", body).replace(f" {TO_PUBLISH}", "").rstrip("\n")
        body = self._told_parents(body)
        section = "\n".join([BEGIN, *self._section(), END])
        return f"---\n{matter}---\n{body}\n\n{section}\n"

    def recipe(self) -> dict[str, bytes]:
        """Return the recipe of a merge, whose models are those of the Hub that are there."""
        if self._record.made != records.MERGE or MERGEKIT not in self._view.files:
            return {}
        raw = self._view.read(MERGEKIT, 0, self._view.files[MERGEKIT])
        text = named(raw.decode(errors="replace"), self._called())
        return {} if text.encode() == raw else {MERGEKIT: text.encode()}

    def _called(self) -> dict[str, str]:
        """Return what parents that are on the Hub are called there, by the ids of contents."""
        return {
            parent.record.manifest_id().hex(): parent.name
            for parent in self._parents
            if parent.name is not None and parent.is_there
        }

    def _told_parents(self, body: str) -> str:
        """Return the text of a merge's own card with names of parents that it knew none of."""
        for content, called in self._called().items():
            row = re.compile(rf"^(\| [^|\n]* \| ){NOT_NAMED}( \|[^\n]*`{content})", re.M)
            # A name of the Hub has no backslash.
            body = row.sub(rf"\g<1>{called}\g<2>", body)
        return body

    # -- front matter --------------------------------------------------------------------------

    def _keys(self, matter: str) -> Iterator[tuple[str, object]]:
        """Yield keys to set, None for one to remove; never one that the user has set."""
        lines = matter.splitlines()
        has = {key for key in _keys_in(lines) if key}
        stated = values(lines, _BASE_MODEL)
        is_of_ids = any(_CONTENT_ID.fullmatch(one) for one in stated)
        if _BASE_MODEL not in has or is_of_ids:
            names = self._base_names() or [one for one in stated if not _CONTENT_ID.fullmatch(one)]
            if names or is_of_ids:
                yield _BASE_MODEL, (names[0] if len(names) == 1 else names) if names else None
            if names and _RELATION not in has and (relation := self._relation()):
                yield _RELATION, relation
        library = self._library()
        if "library_name" not in has and library is not None:
            yield "library_name", library
        if not has & {*_LICENCE}:
            yield from self._licence()
        # Of tags, those of a merge's own card are mstore's.
        if _TAGS not in has or {*values(lines, _TAGS)} <= {*_OWN_TAGS}:
            yield _TAGS, self._tags()
        if "model-index" not in has and (index := self._model_index(lines)):
            yield "model-index", index

    def _base_names(self) -> list[str]:
        names = [one.name for one in self._parents if one.name is not None]
        if not names and ADAPTER_CONFIG in self._view.files:
            size = self._view.files[ADAPTER_CONFIG]
            own = named_base(self._view.read(ADAPTER_CONFIG, 0, size))
            names = [own] if own is not None and "/" in own and NAME.fullmatch(own) else []
        return list(dict.fromkeys(names))

    def _relation(self) -> str | None:
        made = self._record.made
        if made == records.ADD:
            return "adapter" if self._library() == "peft" else "finetune"
        if made == records.CAST:
            is_small = any(
                self._view.record(name).dtype.startswith(_EIGHT_BITS) for name in self._view.tensors
            )
            return "quantized" if is_small else None
        return _RELATIONS.get(made)

    def _library(self) -> str | None:
        return next((library for file, library in _LIBRARIES if file in self._view.files), None)

    def _licence(self) -> Iterator[tuple[str, object]]:
        """Yield the licence that all parents state alike."""
        stated = {self._licence_of(one) for one in self._parents}
        if len(stated) == 1:
            yield from zip(_LICENCE[: len(first := stated.pop())], first, strict=True)

    def _licence_of(self, parent: _ParentModel) -> tuple[str, ...]:
        """Return the values of `_LICENCE` in the card of a parent, as far as they are there."""
        lines: list[str] = []
        with suppress(NotFound, Corrupt):
            lines = front_matter(start_of(self._catalog, parent.record.manifest_id(), CARD))
        found: list[str] = []
        for key in _LICENCE:
            one = values(lines, key)
            is_sound = len(one) == 1 and (
                WORD.fullmatch(one[0]) or (key == _LICENCE[-1] and one[0].startswith("https://"))
            )
            if not is_sound:
                break
            found.append(one[0])
        return tuple(found)

    def _tags(self) -> list[str]:
        is_merge = self._record.made == records.MERGE
        has_recipe = MERGEKIT in self._view.files
        wanted = {"merge": is_merge, "mergekit": is_merge and has_recipe, "mstore": True}
        return [tag for tag in _OWN_TAGS if wanted[tag]]

    def _scores(self) -> Iterator[tuple[str, str, float]]:
        """Yield scores: of what, the score's name, its value."""
        for (key, name), score in notes.scores_of(self._catalog, self._view.id):
            # The key is the command, unless somebody named it: its paths are nobody's business.
            what = name if re.search(r"[\s/]", key) else key
            yield what, name, score

    def _model_index(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        by_what: dict[str, list[dict[str, Any]]] = {}
        for what, name, score in self._scores():
            by_what.setdefault(what, []).append({"type": name, "value": score, "name": name})
        task = next((one for one in values(list(lines), "pipeline_tag")), "other")
        results = [
            {"task": {"type": task}, "dataset": {"name": what, "type": what}, "metrics": metrics}
            for what, metrics in by_what.items()
        ]
        return [{"name": self._name, "results": results}] if results else []

    # -- mstore's section ----------------------------------------------------------------------

    def _section(self) -> Iterator[str]:
        yield "## Where this model is from"
        yield ""
        plan = plan_of(self._catalog, self._record)
        method = "" if plan is None else f" It was merged by {plan.method}."
        yield f"Exported by mstore.{method} Content is mstore's id of all files of a model."
        yield ""
        yield "| | model | commit | content |"
        yield "|---|---|---|---|"
        own = self._record.manifest_id().hex()
        yield f"| this model | snapshot `{self._view.id.hex()}` | | `{own}` |"
        for one in self._parents:
            content = one.record.manifest_id().hex()
            yield f"| {one.role} | {one.told()} | {one.commit()} | `{content}` |"
        scores = list(self._scores())
        if scores:
            yield from ("", "| evaluation | score | value |", "|---|---|---|")
            for what, name, score in scores:
                yield f"| {_cell(what)} | {_cell(name)} | {score:.6g} |"

    # -- the lineage ---------------------------------------------------------------------------

    def _found_parents(self) -> Iterator[_ParentModel]:
        for parent in self._record.parents:
            if parent.role in (records.BASE, records.EXPERT):
                id = parent.snapshot_id()
                yield _ParentModel(parent.role, self._catalog.snapshot(id), self._on_hub(id))

    def _on_hub(self, id: SnapshotId) -> Origin | None:
        """Return where a model is on the Hub, or else its nearest base."""
        lineage = self._catalog.nearest_first(id, lambda record: record.of_role(records.BASE))
        origins = (record.origin for _, record in islice(lineage, _MOST_ANCESTORS))
        return next((one for one in origins if one is not None and one.model), None)


def _keys_in(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        found = re.match(r"""["']?([A-Za-z_][\w-]*)["']?[ \t]*:""", line)
        yield "" if found is None else found[1]


def _without(matter: str, key: str) -> str:
    """Return front matter without a key and the lines of its value."""
    kept, is_inside = [], False
    for line in matter.splitlines():
        if is_inside and re.match(r"[ \t]|-(\s|$)", line):
            continue
        is_inside = next(_keys_in([line])) == key
        if not is_inside:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def _link(origin: Origin) -> str:
    place = urlsplit(origin.url)
    page = f"{place.scheme}://{place.netloc}/{origin.model}/tree/{origin.commit}"
    return f"[{origin.model}]({page})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
