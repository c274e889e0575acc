"""Parsing recipes: nodes become a `Recipe`; what is not supported is refused by name and line.

Keys that are none are ignored, as mergekit does, and told with their lines; or refused, if asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Final, TypeGuard, TypeVar

from mstore.merge.recipes.documents import Entries, Items, Node, Scalar, read_documents
from mstore.merge.recipes.recipe import (
    ANY,
    DEFAULT_LIMITS,
    Condition,
    Given,
    Ignored,
    Module,
    NotThatKind,
    Recipe,
    RecipeSlice,
    Setting,
    Settings,
    Source,
    Text,
    TokenizerSource,
    TokenSource,
    YamlLimits,
    at,
    converted,
)
from mstore.terms.errors import BadRequest, did_you_mean
from mstore.terms.phrases import Call, phrase
from mstore.terms.requests import AUTO, UNION

_Parsed = TypeVar("_Parsed")

_KEYS: Final = (
    *("merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype"),
    *("out_dtype", "tokenizer_source", "tokenizer", "chat_template", "name", "companions"),
)
_OF_MIXTURES: Final = ("gate_mode", "experts")
_LAYER_SLICES: Final = "layer_slices"
"""The key of recipes of bakllama."""
_SEED: Final = "the seed is a parameter of the method: parameters, then seed"
_SHOWN = 60
_ZERO: Final = "zero"
_ANOTHER: Final = "model_token"


def parse(
    text: str, where: str, *, strict: bool = False, limits: YamlLimits = DEFAULT_LIMITS
) -> tuple[Recipe, ...]:
    """Return the recipes of a file, one for each document.

    where: the file's name, for errors. strict: whether what mergekit ignores is refused. Raises
    BadRequest that names the line.
    """
    documents = read_documents(text, where, limits=limits)
    if not documents:
        raise BadRequest("there is no recipe in it: it is empty", where=where)
    return tuple(_Document(where, strict).recipe(node) for node in documents)


class DocumentReader:
    """Reads the nodes of one document; keys that are none are noted, or refused if strict."""

    def __init__(self, where: str, strict: bool) -> None:
        self._where = where
        self._strict = strict
        self._ignored: list[Ignored] = []

    def fields(self, node: Node, what: str, known: Collection[str]) -> dict[str, Node]:
        if not isinstance(node, Entries):
            raise self.refused(f"{what} is a mapping with the keys {', '.join(known)}", node)
        for key, _ in node.entries:
            name = str(key.value)
            if name not in known:
                meant = _SEED if name == "random_seed" else did_you_mean(name, known)
                told = f"{what} has no key {name[:_SHOWN]!r}"
                more = f"; its keys: {', '.join(known)}"
                self._ignore(told, key.line, None if meant is None else str(meant), more)
        return {str(key.value): value for key, value in node.entries if key.value in known}

    def items(
        self, fields: Mapping[str, Node], key: str, item: Callable[[Node], _Parsed]
    ) -> tuple[_Parsed, ...]:
        node = fields.get(key)
        if node is None or _is_null(node):
            return ()
        if not isinstance(node, Items):
            raise self.refused(f"{key} is a list", node)
        return tuple(item(one) for one in node.items)

    def maybe(
        self, fields: Mapping[str, Node], key: str, read: Callable[[Node], Text]
    ) -> Text | None:
        node = fields.get(key)
        return None if node is None or _is_null(node) else read(node)

    def _ignore_given(self, fields: Mapping[str, Node], key: str, why: str) -> None:
        node = fields.get(key)
        if node is not None and not _is_null(node):
            self._ignore(f"{key} {why}", node.line)

    def _ignore(self, what: str, line: int, meant: str | None = None, more: str = "") -> None:
        """Remark on what is ignored.  Raises BadRequest if it is refused; `more` is told."""
        if self._strict:
            raise BadRequest(what + more, where=at(self._where, line), hint=meant)
        self._ignored.append(Ignored(what, line, meant))

    def lacking(self, what: str, node: Node) -> BadRequest:
        meant = next((one for one in self._ignored if one.meant is not None), None)
        hint = None if meant is None else f"line {meant.line}: {meant.what}; {meant.meant}"
        return BadRequest(what, where=at(self._where, node.line), hint=hint)

    def text(self, node: Node, what: str) -> Text:
        if isinstance(node, Scalar) and isinstance(node.value, str) and node.value:
            return Text(node.value, node.line)
        raise self.refused(f"{what} is text; write it in quotes if it looks like a number", node)

    def refused(self, what: str, node: Node) -> BadRequest:
        return BadRequest(what, where=at(self._where, node.line))

    def adapted(self, node: Node) -> Text:
        name, lora = self.model_and_lora(node)
        parts = [*name.text.split("+"), *([] if lora is None else [lora.text])]
        if not all(parts):
            raise self.refused("a model with an adapter is MODEL+ADAPTER", node)
        if len(parts) > 2:
            raise self.refused("a model has one adapter at most", node)
        return Text("+".join(parts), name.line)

    def model_and_lora(self, node: Node) -> tuple[Text, Text | None]:
        if not isinstance(node, Entries):
            return self.text(node, "a model"), None
        known = ("model", "lora", "override_architecture")
        if not any(key.value == "model" for key, _ in node.entries):
            raise self.refused("a model is a name, or a mapping with model: NAME", node)
        fields = self.fields(node, "a model", known)
        told = "is not needed: layers are known by the names of tensors"
        self._ignore_given(fields, "override_architecture", told)
        lora = self.maybe(fields, "lora", lambda one: self.path(one, "an adapter"))
        return self.path(fields["model"], "a model"), lora

    def path(self, node: Node, what: str) -> Text:
        if isinstance(node, Entries):
            fields = self.fields(node, what, ("path", "revision"))
            told = "is not looked up: the model is that of this store"
            self._ignore_given(fields, "revision", told)
            node = fields.get("path", node)
        return self.text(node, what)


class _Document(DocumentReader):
    """Parses one document."""

    def recipe(self, node: Node) -> Recipe:
        keys = {key.value for key, _ in node.entries} if isinstance(node, Entries) else set()
        if not keys.isdisjoint(_OF_MIXTURES) and "merge_method" not in keys:
            raise BadRequest(
                "a recipe of a mixture of experts",
                where=at(self._where, node.line),
                hint=phrase(
                    "{make} makes it at once: it copies no weight, and needs no plan before",
                    make=Call("plan_moe", ("TEXT",)),
                ),
            )
        if _LAYER_SLICES in keys and "merge_method" not in keys:
            return self._bakllama(node)
        fields = self.fields(node, "a recipe", _KEYS)
        if "merge_method" not in fields:
            raise self.lacking("a recipe names its merge_method", node)
        models = self.items(fields, "models", self._model)
        slices = self.items(fields, "slices", self._slice)
        modules = self._modules(fields.get("modules"))
        if sum(map(bool, (models, slices, modules))) != 1:
            raise self.lacking("a recipe has one of models, slices and modules", node)
        base = self.maybe(fields, "base_model", self.adapted)
        tokenizer = self._tokenizer(fields)
        return Recipe(
            where=self._where,
            line=node.line,
            method=self.text(fields["merge_method"], "merge_method"),
            base=base,
            models=models,
            slices=slices,
            modules=modules,
            settings=self._settings(fields),
            dtype=self.maybe(fields, "dtype", lambda one: self.text(one, "dtype")),
            out_dtype=self.maybe(fields, "out_dtype", lambda one: self.text(one, "out_dtype")),
            tokenizer=tokenizer,
            template=self.maybe(fields, "chat_template", self._template),
            name=self.maybe(fields, "name", lambda one: self.text(one, "name")),
            ignored=tuple(sorted(self._ignored, key=lambda one: one.line)),
            strict=self._strict,
            companions=self._companions(fields.get("companions")),
        )

    def _bakllama(self, node: Node) -> Recipe:
        """Parse a recipe of bakllama: a stack of layers, whose down projections may be scaled."""
        known = (_LAYER_SLICES, "embedding_source", "lm_head_source")
        fields = self.fields(node, "a recipe of bakllama", known)
        slices = self.items(fields, _LAYER_SLICES, self._layer_slice)
        if not slices:
            raise self.lacking("a recipe of bakllama has layer_slices", node)
        # Its program reads both and uses neither: a stack has them of its first and last slice.
        for key, place in (("embedding_source", slices[0]), ("lm_head_source", slices[-1])):
            given = self.maybe(fields, key, self.adapted)
            used = place.sources[0].model
            if given is not None and given.text != used.text:
                raise self.refused(f"{key} of a stack is {used}, not {given}", fields[key])
        return Recipe(
            where=self._where,
            line=node.line,
            method=Text("passthrough", node.line),
            base=None,
            models=(),
            slices=slices,
            modules=(),
            settings={},
            dtype=None,
            out_dtype=None,
            tokenizer=None,
            template=None,
            name=None,
            ignored=tuple(sorted(self._ignored, key=lambda one: one.line)),
            strict=self._strict,
        )

    def _layer_slice(self, node: Node) -> RecipeSlice:
        fields = self.fields(node, "a layer slice", ("model", "start", "end", "scale"))
        for key in ("model", "start", "end"):
            if key not in fields:
                raise self.lacking(f"a layer slice needs its {key}", node)
        first, end = (self._layer(fields[key]) for key in ("start", "end"))
        if first is None or end is None or not 0 <= first < end:
            raise self.refused(
                "start and end are two whole numbers, the end larger than the start", node
            )
        settings: Settings = {}
        scale = fields.get("scale")
        if scale is not None and not _is_null(scale):
            condition = Condition(self._single(scale, "scale"), "down_proj", scale.line)
            settings = {"scale": Setting((condition,), scale.line)}
        model = self.adapted(fields["model"])
        return RecipeSlice((Source(model, settings, (first, end), node.line),), {}, None, node.line)

    def _companions(self, node: Node | None) -> tuple[tuple[Text, Text], ...]:
        if node is None or _is_null(node):
            return ()
        if not isinstance(node, Entries):
            raise self.refused("companions are models by ROLE:MODEL", node)
        return tuple(
            (Text(str(key.value), key.line), self.path(value, "a companion"))
            for key, value in node.entries
        )

    # -- models --------------------------------------------------------------------------------

    def _model(self, node: Node) -> Source:
        fields = self.fields(node, "a model", ("model", "parameters"))
        if "model" not in fields:
            raise self.lacking("an item of models names its model", node)
        return Source(self.adapted(fields["model"]), self._settings(fields), None, line=node.line)

    def _slice(self, node: Node) -> RecipeSlice:
        known = ("sources", "parameters", "base_model", "residual_weight")
        fields = self.fields(node, "a slice", known)
        self._ignore_given(fields, "residual_weight", "does nothing")
        sources = self.items(fields, "sources", self._source)
        if not sources:
            raise self.lacking("a slice has sources", node)
        base = self.maybe(fields, "base_model", self.adapted)
        return RecipeSlice(sources, self._settings(fields), base, node.line)

    def _modules(self, node: Node | None) -> tuple[Module, ...]:
        if node is None or _is_null(node):
            return ()
        if not isinstance(node, Entries):
            raise self.refused("modules are parts of the model by name", node)
        return tuple(self._module(key, value) for key, value in node.entries)

    def _module(self, key: Scalar, node: Node) -> Module:
        name = Text(str(key.value), key.line)
        what = f"the module {name.text[:_SHOWN]}"
        fields = self.fields(node, what, ("models", "slices", "parameters"))
        models = self.items(fields, "models", self._model)
        slices = self.items(fields, "slices", self._slice)
        if bool(models) == bool(slices):
            raise self.lacking(f"{what} has either models or slices", key)
        return Module(name, models, slices, self._settings(fields))

    def _source(self, node: Node) -> Source:
        fields = self.fields(node, "a source", ("model", "layer_range", "parameters"))
        for key in ("model", "layer_range"):
            if key not in fields:
                raise self.lacking(f"a source of a slice needs its {key}", node)
        return Source(
            self.adapted(fields["model"]),
            self._settings(fields),
            self._range(fields["layer_range"]),
            node.line,
        )

    def _range(self, node: Node) -> tuple[int, int]:
        if isinstance(node, Items) and len(node.items) == 2:
            first, last = map(self._layer, node.items)
            if first is not None and last is not None and 0 <= first < last:
                return first, last
        raise self.refused(
            "a layer_range is [first, end]: two whole numbers, the end larger than the first", node
        )

    def _layer(self, node: Node) -> int | None:
        """Return the number of a layer, also if it is written as text or as 3.0."""
        value = node.value if isinstance(node, Scalar) else None
        try:
            found = None if isinstance(value, bool | None) else converted(value, "int")
        except NotThatKind:
            return None
        return found if _is_whole(found) else None

    def _model_name(self, node: Node) -> Text:
        name = self.adapted(node)
        if name.adapter() is not None:
            raise self.refused(
                "a model with an adapter (MODEL+ADAPTER) is one of models or the base_model, and "
                "gives no tokens",
                node,
            )
        return name

    # -- parameters ----------------------------------------------------------------------------

    def _settings(self, fields: Mapping[str, Node]) -> Settings:
        node = fields.get("parameters")
        if node is None or _is_null(node):
            return {}
        if not isinstance(node, Entries):
            raise self.refused("parameters are values by name", node)
        return {str(key.value): self._setting(value, str(key.value)) for key, value in node.entries}

    def _setting(self, node: Node, name: str) -> Setting:
        if isinstance(node, Entries):
            return Setting((self._condition(node, name),), node.line)
        if isinstance(node, Items) and any(isinstance(one, Entries) for one in node.items):
            conditions = tuple(self._condition(one, name) for one in node.items)
            return Setting(conditions, node.line)
        return Setting((Condition(self._value(node, name), None, node.line),), node.line)

    def _condition(self, node: Node, name: str) -> Condition:
        fields = self.fields(node, f"a condition of {name}", ("filter", "value"))
        if "value" not in fields:
            raise self.refused(f"a condition of {name} has a value", node)
        pattern = self.maybe(fields, "filter", self._filter)
        value = self._value(fields["value"], name)
        return Condition(value, None if pattern is None else pattern.text, fields["value"].line)

    def _filter(self, node: Node) -> Text:
        # An empty one is a part of every name.
        is_empty = isinstance(node, Scalar) and node.value == ""
        return Text(ANY, node.line) if is_empty else self.text(node, "a filter")

    def _value(self, node: Node, name: str) -> Given | tuple[Given, ...]:
        if isinstance(node, Items):
            return tuple(self._single(one, name) for one in node.items)
        return self._single(node, name)

    def _single(self, node: Node, name: str) -> Given:
        if isinstance(node, Scalar) and node.value is not None:
            return node.value
        raise self.refused(
            f"{name} is a value, a list of values over the layers, or conditions", node
        )

    # -- tokenizer -----------------------------------------------------------------------------

    def _tokenizer(self, fields: Mapping[str, Node]) -> TokenizerSource | None:
        source = self.maybe(fields, "tokenizer_source", self._model_name)
        node = fields.get("tokenizer")
        if node is None or _is_null(node):
            return None if source is None else TokenizerSource(source)
        if source is not None:
            raise self.refused("a recipe has tokenizer or tokenizer_source, not both", node)
        own = self.fields(node, "tokenizer", ("source", "tokens", "pad_to_multiple_of"))
        tokens = own.get("tokens", Entries((), node.line, 0))
        if not isinstance(tokens, Entries) and not _is_null(tokens):
            raise self.refused("tokenizer.tokens is a mapping of tokens to their sources", tokens)
        return TokenizerSource(
            self.maybe(own, "source", self._model_name) or Text(UNION, node.line),
            tuple(self._token(*one) for one in tokens.entries)
            if isinstance(tokens, Entries)
            else (),
            self._padding(own.get("pad_to_multiple_of")),
        )

    def _template(self, node: Node) -> Text:
        found = self.text(node, "chat_template")
        if found.text in TEMPLATES:
            return Text(TEMPLATES[found.text], found.line)
        if found.text != AUTO and "{" not in found.text:
            raise self.refused(
                f"no chat template is called {found.text[:_SHOWN]!r} here: write the template "
                f"itself, {', '.join(TEMPLATES)}, or {AUTO}",
                node,
            )
        return found

    def _padding(self, node: Node | None) -> int | None:
        if node is None or _is_null(node):
            return None
        if isinstance(node, Scalar) and _is_whole(node.value) and node.value > 0:
            return node.value
        raise self.refused("pad_to_multiple_of is a whole number of 1 or more", node)

    def _token(self, key: Scalar, node: Node) -> TokenSource:
        token = Text(str(key.value), key.line)
        own = self.fields(node, f"the token {token.text[:_SHOWN]!r}", ("source", "force"))
        force = self._flag(own.get("force"))
        source = own.get("source")
        if source is None or _is_null(source):
            raise self.refused(f"the token {token.text[:_SHOWN]!r} needs a source", node)
        kind = self._kind(source)
        if kind is None:
            return TokenSource(token, self._model_name(source), None, force)
        known = ("kind",) if kind == _ZERO else ("kind", "model", "token", "token_id")
        fields = self.fields(source, f"a source of kind {kind}", known)
        if kind == _ZERO:
            return TokenSource(token, None, None, force)
        other = [fields[name] for name in ("token", "token_id") if name in fields]
        given = [one.value for one in other if isinstance(one, Scalar) and one.value is not None]
        if "model" not in fields or len(given) != 1 or not isinstance(given[0], str | int):
            raise self.refused("a model_token has a model, and a token or a token_id", source)
        value = given[0] if _is_whole(given[0]) else str(given[0])
        return TokenSource(token, self._model_name(fields["model"]), value, force)

    def _kind(self, node: Node) -> str | None:
        found = (
            {key.value: value for key, value in node.entries} if isinstance(node, Entries) else {}
        )
        kind = found.get("kind")
        if not isinstance(kind, Scalar):
            return None
        if kind.value not in (_ZERO, _ANOTHER):
            raise self.refused(f"a kind of source is {_ZERO} or {_ANOTHER}", kind)
        return str(kind.value)

    def _flag(self, node: Node | None) -> bool:
        if node is None or _is_null(node):
            return False
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        raise self.refused("force is true or false", node)


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value is None


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _template(each: str, *, start: str = "", prompt: str = "") -> str:
    """Return a template: `start`, `each` for every message (`one`), `prompt` for an answer."""
    asked = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}" if prompt else ""
    return f"{start}{{% for one in messages %}}{each}{{% endfor %}}{asked}"


_CHATML: Final = _template(
    "{{ '<|im_start|>' + one['role'] + '\\n' + one['content'] + '<|im_end|>\\n' }}",
    prompt="{{ '<|im_start|>assistant\\n' }}",
)
_LLAMA3: Final = _template(
    "{{ '<|start_header_id|>' + one['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ one['content'] | trim + '<|eot_id|>' }}",
    start="{{ bos_token }}",
    prompt="{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
)
_EXAONE: Final = _template(
    "{{ '[|' + one['role'] + '|]' + one['content'] }}"
    "{{ '\\n' if one['role'] == 'user' else '[|endofturn|]\\n' }}",
    start="{{ '' if messages[0]['role'] == 'system' else '[|system|][|endofturn|]\\n' }}",
    prompt="{{ '[|assistant|]' }}",
)
# A system message is a part of the first question.
_MISTRAL: Final = _template(
    "{% if one['role'] == 'user' %}{{ ' [INST] ' }}"
    "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ one['content'] + ' [/INST]' }}"
    "{% elif one['role'] == 'assistant' %}{{ ' ' + one['content'] + eos_token }}"
    "{% elif not loop.first or one['role'] != 'system' %}"
    "{{ raise_exception('only user and assistant speak, after one system message') }}{% endif %}",
    start="{{ bos_token }}",
)
_ALPACA: Final = _template(
    "{% if one['role'] == 'user' %}{{ '### Instruction:\\n' }}"
    "{% elif one['role'] == 'user_context' %}{{ '### Input:\\n' }}"
    "{% elif one['role'] == 'assistant' %}{{ '### Response:\\n' }}{% endif %}"
    "{{ one['content'] | trim }}{% if not loop.last or add_generation_prompt %}{{ '\\n\\n' }}"
    "{% endif %}",
    prompt="{{ '### Response:\\n' }}",
)

TEMPLATES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "alpaca": _ALPACA,
        "chatml": _CHATML,
        "exaone": _EXAONE,
        "llama3": _LLAMA3,
        "mistral": _MISTRAL,
    }
)
"""By name."""
