"""`--recipe FILE`: a recipe of mergekit or sd-mecha as the request of `plan` and `merge`.

Owns where a recipe's models are: refs of the store, or paths, which are added first.  Does
not own what a recipe means (`Store.read_recipe`).

Also `--vocab`: base and experts of a merge with the same token in the same row of each.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from mstore.checkpoint.paths import SAFETENSORS_SUFFIX, is_safetensors, name_for
from mstore_cli import completion
from mstore_cli.errors import remarks, warn
from mstore_cli.options import WHAT, Option
from mstore_cli.session import Session

if TYPE_CHECKING:
    from mstore import MergeRequest, Store
    from mstore.api.reports import AlignedModel, AlignReport
    from mstore.merge.moe.recipe import MoeRecipe
    from mstore.merge.recipes.mecha import MechaRecipe
    from mstore.merge.recipes.recipe import Recipe, Text
    from mstore.terms.requests import RecipeRequest, Vocabulary


Vocab = Annotated[
    str | None,
    Option(
        "--vocab",
        metavar="union|base|common|REF",
        help="First align the models' vocabularies: union keeps the tokens of all, base those of "
        "the base, common those that all have, REF those of this model (see `mstore align`).",
        shell_complete=completion.refs,
        group=WHAT,
    ),
]


def aligned(
    session: Session, store: Store, request: MergeRequest, vocabulary: Vocabulary
) -> MergeRequest:
    """Return the request with aligned models, and print which those are."""
    with session.progress() as tick:
        report = store.align(request, vocabulary, progress=tick)
    remarks([*report.remarks, *_told(report)])
    return report.applied(request)


def _told(report: AlignReport) -> Iterator[str]:
    for one in dict.fromkeys((report.base, *report.experts)):
        if one.new_snapshot:
            yield f"stored {one.name} as {one.ref}, {told_change(one, report)}"


def told_change(one: AlignedModel, report: AlignReport) -> str:
    """Return what alignment changed in a model."""
    if one.ref is None:
        return "as it is"
    more = f", {one.tokens_missing} that it lacked" if one.tokens_missing else ""
    return f"with {report.tokens} tokens{more}"


STDIN = "-"
_ID = re.compile("[0-9a-f]{64}")
_OF_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_PATHS = ("/", "./", "../", "~")

RecipeFile = Annotated[
    str | None,
    Option(
        "--recipe",
        metavar="FILE",
        help="Merge as this recipe of mergekit (YAML) or sd-mecha (.mecha) says, instead of "
        "--base, --expert, --method and --param; - reads standard input.",
        group=WHAT,
    ),
]


Strict = Annotated[
    bool,
    Option(
        "--strict",
        help="Refuse what the recipe says and mergekit ignores, such as misspelt keys, and what "
        "mstore makes otherwise than sd-mecha; else a warning names each with its line.",
    ),
]


class RecipeText(msgspec.Struct, frozen=True):
    """A recipe as it was read.

    folder: what paths of models in it are relative to. strict: refuse what mergekit ignores.
    """

    text: str
    where: str
    folder: Path
    strict: bool

    @classmethod
    def read(cls, file: str, *, strict: bool) -> RecipeText:
        """Read FILE, or standard input.  Raises BadRequest, NotFound, OSError."""
        from mstore.merge.recipes.recipe import DEFAULT_LIMITS
        from mstore.terms.errors import BadRequest, NotFound

        most = DEFAULT_LIMITS.max_bytes + 1
        if file == STDIN:
            where, folder, raw = "standard input", Path(), sys.stdin.buffer.read(most)
        else:
            where, folder = file, Path(file).parent
            try:
                with Path(file).open("rb") as stream:
                    raw = stream.read(most)
            except FileNotFoundError as error:
                hint = "check the path; mstore recipe REF > FILE writes the recipe of a merge"
                raise NotFound("no such file", where=file, hint=hint) from error
        try:
            # One byte too many is enough for the library to refuse it.
            return cls(raw.decode(), where, folder, strict)
        except UnicodeDecodeError as error:
            if len(raw) == most:
                raise BadRequest(f"a recipe has at most {most - 1} bytes", where=where) from error
            raise BadRequest("not a recipe: not a text file", where=where) from error


def documents(recipe: RecipeText) -> dict[int, Recipe | MechaRecipe]:
    """Return the recipes of a file by number, in an order to merge in.  Raises BadRequest."""
    from mstore.merge.planning.recipes import checked

    return checked(recipe.text, where=recipe.where, strict=recipe.strict)


def request_of_recipe(
    session: Session,
    store: Store,
    recipe: RecipeText,
    document: int,
    earlier: Mapping[str, str],
    *,
    allow_nonfinite: bool,
) -> MergeRequest:
    """Return the request of one recipe of a file.

    Adds the directories that it names as models, makes the models that must be made first, and
    aligns vocabularies if the recipe says so.

    earlier: refs of the merges that it may need, by name.  Raises BadRequest, NotFound and
    whatever adding raises.
    """
    from mstore.merge.recipes.mecha import MechaRecipe
    from mstore.merge.recipes.recipe import at
    from mstore.terms.errors import BadRequest

    # Whatever is wrong with any of them must be known before anything is added.
    every = documents(recipe)
    models = _Models(session, store, recipe, earlier)
    if not earlier and len(every) > 1:
        names = {one.name.text for one in every.values() if one.name is not None}
        for one in every.values():
            models.require(one, but=names)
    revisions = models.found(every[document])
    found = _read(session, store, recipe, document, revisions, allow_nonfinite=allow_nonfinite)
    own = every[document]
    if found.vocabulary is None or isinstance(own, MechaRecipe):
        return found.request
    try:
        return aligned(session, store, found.request, found.vocabulary)
    except BadRequest as error:
        for asked in () if own.tokenizer is None else own.tokenizer.tokens:
            if error.where == f"tokens: {asked.token}":
                place = at(recipe.where, asked.token.line)
                what, _, hint = error.texts
                raise BadRequest(
                    f"the token {asked.token.text!r}: {what}", where=place, hint=hint
                ) from error
        raise


def models_of_template(session: Session, store: Store, recipe: RecipeText) -> dict[str, str]:
    """Return the revisions of the models that a recipe with free numbers names.

    Adds directories and makes models as `request_of_recipe` does, and warns likewise.
    """
    template = store.read_template(recipe.text, where=recipe.where)
    filled = msgspec.structs.replace(recipe, text=template.fill(template.start()))
    (only,) = documents(filled).values()
    revisions = _Models(session, store, filled, {}).found(only)
    _read(session, store, filled, 0, revisions, allow_nonfinite=False)
    return revisions


def models_of_moe(
    session: Session, store: Store, recipe: RecipeText, routers: str | None
) -> dict[str, str]:
    """Return the revisions of the models that a recipe of mergekit-moe names.

    routers: the revision of a checkpoint. Adds directories, as `request_of_recipe` does, but none
    for a recipe that the configs of its models show to be wrong.  Raises BadRequest, NotFound.
    """
    from mstore.merge.moe.mixture import checked
    from mstore.merge.moe.recipe import parse_moe

    asked = parse_moe(recipe.text, recipe.where)
    models = _Models(session, store, recipe, {})
    models.require(asked, but=())
    types = models.types(asked)
    if types:
        checked(asked, types, has_routers=routers is not None)
    if routers is not None:
        store[routers]
    # A mixture takes MLPs alone: an expert may have more tokens than the base.
    return models.found(asked, loose=True)


def _read(
    session: Session,
    store: Store,
    recipe: RecipeText,
    document: int,
    revisions: Mapping[str, str],
    *,
    allow_nonfinite: bool,
) -> RecipeRequest:
    """Make the models that a recipe needs first, and read it; tell what it says in vain."""
    with session.progress() as tick:
        made = store.prepare_recipe(
            recipe.text,
            where=recipe.where,
            models=revisions,
            document=document,
            strict=recipe.strict,
            allow_nonfinite=allow_nonfinite,
            progress=tick,
        )
    remarks([f"stored {one.ref}: {one.name}" for one in made if one.new_snapshot])
    found = store.read_recipe(
        recipe.text,
        where=recipe.where,
        models=revisions,
        document=document,
        strict=recipe.strict,
    )
    for text in found.warnings:
        warn(text)
    remarks(found.remarks)
    return found


class _Models:
    """The models of one recipe."""

    def __init__(
        self, session: Session, store: Store, recipe: RecipeText, earlier: Mapping[str, str]
    ) -> None:
        self._earlier = earlier
        self._session = session
        self._store = store
        self._recipe = recipe

    def found(
        self, recipe: Recipe | MechaRecipe | MoeRecipe, *, loose: bool = False
    ) -> dict[str, str]:
        """Return the revision of each model, by the recipe's name for it.

        A name is a ref if there is one, of FILE.safetensors too; `./name` is always a path. loose:
        a model may have other shapes than the base, and is then added without one.
        """
        from mstore.terms.errors import Incompatible

        self.require(recipe, but=self._earlier)
        directories: dict[str, Path] = {}
        revisions: dict[str, str] = {}
        for model in recipe.named():
            if model.text in self._earlier:
                revisions[model.text] = self._earlier[model.text]
            elif self._is_ref(here := self._here(model.text)):
                revisions[model.text] = here
            else:
                directories[model.text] = self._directory(here)
            if model.text not in self._earlier and model.text.startswith(f"{here}@"):
                warn(self._ignored(model))
        base: str | None = None
        # Models whose layers are stacked may have fewer layers than the first.
        is_stack = len({one.layers for one in recipe.every_source()}) > 1
        for model in recipe.named():
            if model.text in directories:
                own = None if is_stack else base
                try:
                    added = self._added(directories[model.text], own)
                except Incompatible:
                    if own is None or not loose:
                        raise
                    added = self._added(directories[model.text], None)
                revisions[model.text] = added
            # The first that is named is the base; the others are stored as differences to it.
            base = base or revisions[model.text]
        return revisions

    def require(self, recipe: Recipe | MechaRecipe | MoeRecipe, *, but: Collection[str]) -> None:
        """Raise NotFound for models that are neither refs nor paths, but for these.

        Raises BadRequest for revisions of the Hub, if what is ignored is refused.
        """
        from mstore.terms.errors import BadRequest

        models = [one for one in recipe.named() if one.text not in but]
        missing = [one for one in models if not self._is_here(self._here(one.text))]
        if missing:
            raise self._not_found(missing)
        for one in models:
            if self._recipe.strict and one.text.startswith(f"{self._here(one.text)}@"):
                raise BadRequest(self._ignored(one))

    def types(self, recipe: MoeRecipe) -> set[str]:
        """Return the model types of its models; nothing of those without a config.json."""
        from mstore.checkpoint.declared import CONFIG
        from mstore.checkpoint.strict_json import json_object
        from mstore.terms.errors import NotFound

        found = set()
        for name in recipe.names():
            here = self._here(name.model().text)
            try:
                raw = (
                    b"".join(self._store.read_file(here, CONFIG))
                    if self._is_ref(here)
                    else (self._directory(here) / CONFIG).read_bytes()
                )
            except (NotFound, FileNotFoundError):
                # Such as an adapter, which has an error of its own.
                continue
            found.add(str(json_object(raw).get("model_type")))
        return found

    def _here(self, name: str) -> str:
        """Return what a model is called here.

        The ref of FILE.safetensors, wherever that was; NAME for NAME@REVISION, as in the Hub's
        names.
        """
        from mstore.merge.recipes.mecha import ref_of

        own = ref_of(name)
        if own != name and not name.startswith("./") and self._is_ref(own):
            return own
        own = name.partition("@")[0]
        return own if own and self._is_here(own) and not self._is_here(name) else name

    def _ignored(self, model: Text) -> str:
        from mstore.merge.recipes.recipe import at

        told = "is not looked up: the model is that of this store"
        return f"{at(self._recipe.where, model.line)}: the revision of {model} {told}"

    def _is_here(self, name: str) -> bool:
        return self._is_ref(name) or self._directory(name).exists()

    def _is_ref(self, name: str) -> bool:
        from mstore.store.models import snapshot_of

        return not name.startswith(_PATHS) and snapshot_of(name) in self._store

    def _directory(self, name: str) -> Path:
        """Return where a model is: a directory, or a file, whose name may lack its suffix."""
        path = self._recipe.folder / Path(name).expanduser()
        file = path.with_name(f"{path.name}{SAFETENSORS_SUFFIX}") if path.name else path
        return file if file.is_file() and not path.exists() else path

    def _added(self, directory: Path, base: str | None) -> str:
        """Return the ref of a directory: one that holds it already, else a new one."""
        name = _name_of(directory)
        number = 1
        while name in self._store:
            if self._holds(name, directory):
                remarks([f"{directory} is {name} of this store"])
                return name
            number += 1
            name = f"{_name_of(directory)}-{number}"
        with self._session.progress() as tick:
            # Without a base given, the nearest is found.
            self._store.add(
                directory, name=name, base=base, detect_base=base is None, progress=tick
            )
        remarks([f"added {directory} as {name}"])
        return name

    def _holds(self, name: str, directory: Path) -> bool:
        with self._session.progress() as tick:
            found = self._store.diff_directory(name, directory, progress=tick)
        return not found.files and not found.tensors

    def _not_found(self, missing: list[Text]) -> Exception:
        from mstore.merge.recipes.recipe import at
        from mstore.terms.errors import NotFound

        first = missing[0]
        if _ID.fullmatch(first.text):
            return NotFound(
                f"{first} is the id of a model that this store does not have",
                where=at(self._recipe.where, first.line),
                hint="run the recipe that made it, or clone a store that has it",
            )
        is_path = first.text.startswith(_PATHS)
        files = [one.text for one in missing if is_safetensors(one.text)]
        names = [
            one.text.partition("@")[0]
            for one in missing
            if one.text not in files and not one.text.startswith(_PATHS)
        ]
        lines = [f"mstore add {shlex.quote(file)}" for file in files] + [
            f"mstore add {f'hf://{name}' if _OF_HUB.fullmatch(name) else 'DIRECTORY'} "
            f"--name {shlex.quote(name)}"
            for name in names
        ]
        return NotFound(
            f"no directory {first.text}"
            if is_path and first.text not in files
            else f"{first.text} is neither a ref of this store nor a "
            + ("file" if first.text in files else "directory"),
            where=at(self._recipe.where, first.line),
            hint="\n".join(lines) or "paths are relative to the recipe's folder",
        )


def _name_of(directory: Path) -> str:
    """Return a ref for a directory or file: its name, with what a ref cannot have replaced."""
    from mstore.store.refs import check_name
    from mstore.terms.errors import BadName

    name = name_for(directory.resolve())
    try:
        check_name(name)
    except BadName:
        return f"model-{name}"
    return name
