"""mstore in the place of mergekit's merge functions: the same arguments, merged in a store.

Owns the directories, the recipes and the store.  What mergekit's functions are called with becomes
a recipe in YAML and checkpoints in directories; the result is read from a checkout.  What mstore
refuses is raised as `Refused`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from mergekit.merge_methods import BasePolicy, MergeMethod, ParameterScope
from safetensors.torch import load_file, save
from torch import Tensor

from mstore import Store
from mstore.merge.methods import registry
from mstore.merge.recipes.resolve import PER_MODEL
from mstore.terms.errors import MstoreError

Models = Mapping[Hashable, Mapping[str, Tensor]]

_BLOCK = 1 << 16
_MODELS = 60
"""Every commit lists the packs of its store: several small stores are quicker than a large one."""


class Refused(ValueError, RuntimeError):
    """mstore's own error, as the types that mergekit raises; the text is mstore's."""


class NoGradients(RuntimeError):
    """A case asks for gradients: mstore merges stored models, and nothing of it is torch's."""


class _Merged(torch.autograd.Function):
    """A merged tensor, which has a place in torch's graph and no gradient."""

    @staticmethod
    def forward(_: Any, merged: Tensor, *sources: Tensor) -> Tensor:
        return merged.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Any:
        raise NoGradients("mstore has no gradients")


class StandIn:
    """A store, and what has been merged in it; a new one after some merges."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stores = 0
        self._store = self._new_store()
        self._added: dict[str, str] = {}
        self.merges = 0
        """How often it was asked to merge, or what a recipe means."""
        self.remarks: list[str] = []
        """What plans said of merges since this was last emptied."""

    def close(self) -> None:
        self._store.close()

    def _new_store(self) -> Store:
        self._stores += 1
        return Store.init(self._root / f"store{self._stores}", block_size=_BLOCK)

    # -- directories -----------------------------------------------------------------------------

    def merge(self, recipe: Mapping[str, Any], paths: Mapping[str, Path], out: Path) -> None:
        """Merge directories by a recipe that names them so, into a new directory."""
        self.merges += 1
        self._merge(recipe, paths, out)

    def _merge(self, recipe: Mapping[str, Any], paths: Mapping[str, Path], out: Path) -> None:
        if len(self._added) > _MODELS:
            self._store.close()
            self._store, self._added = self._new_store(), {}
        try:
            models = {name: self._add(path) for name, path in paths.items()}
            text = yaml.safe_dump(dict(recipe), sort_keys=False)
            self._store.prepare_recipe(text, models=models, threads=1)
            found = self._store.read_recipe(text, models=models)
            request = found.request
            if found.vocabulary is not None:
                request = self._store.align(request, found.vocabulary).applied(request)
            plan = self._store.plan(request, allow_noop=True, threads=1)
            self.remarks += plan.remarks
            self._store.merge(plan, name="merged", allow_nonfinite=True, threads=1)
            self._store.checkout("merged", out, threads=1)
        except MstoreError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error

    def _add(self, path: Path) -> str:
        """Return the ref of a directory's content."""
        digest = hashlib.sha256()
        for file in sorted(path.rglob("*")):
            if file.is_file():
                digest.update(f"{file.relative_to(path)}\0".encode() + file.read_bytes())
        key = digest.hexdigest()[:16]
        if key not in self._added:
            self._store.add(path, name=f"model-{key}", threads=1)
            self._added[key] = f"model-{key}"
        return self._added[key]

    def values(
        self, recipe: Mapping[str, Any], names: Sequence[str], tensor: str
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """What a recipe means for one tensor: parameters of all, and those of each model."""
        self.merges += 1
        folder = self._root / f"values{self.merges}"
        models = {}
        try:
            for number, name in enumerate(names):
                path = folder / str(number)
                path.mkdir(parents=True)
                content = {tensor: torch.full((2,), float(number))}
                (path / "model.safetensors").write_bytes(save(content))
                models[name] = self._add(path)
            text = yaml.safe_dump(dict(recipe), sort_keys=False)
            request = self._store.read_recipe(text, models=models).request
        except MstoreError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(folder)
        names_of = {ref: name for name, ref in models.items()}
        own = {names_of[str(ref)]: weight for ref, weight in request.weighted()}
        parameters = dict(request.parameters)
        for rule in request.rules:
            if tensor in rule.patterns():
                parameters |= rule.parameters
                if rule.weights is not None:
                    own = dict(zip(own, rule.weights, strict=True))
        each = {name: {"weight": own[name]} if name in own else {} for name in names}
        for key in [one for one in parameters if one in PER_MODEL]:
            value = parameters.pop(key)
            values = value if isinstance(value, tuple) else (value,) * len(own)
            for name, one in zip(own, values, strict=True):
                each[name][key] = one
        return parameters, each

    # -- tensors ---------------------------------------------------------------------------------

    def tensors(
        self,
        models: Models,
        method: MergeMethod,
        parameters: Mapping[str, Any],
        *,
        base: Hashable | None = None,
        dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """Merge state dictionaries, in the order of their tensors, with a method's parameters."""
        self.merges += 1
        folder = self._root / f"tensors{self.merges}"
        paths = {str(number): folder / str(number) for number in range(len(models))}
        for path, tensors in zip(paths.values(), models.values(), strict=True):
            path.mkdir(parents=True)
            # Each tensor of a file has its own memory.
            held = {
                name: one.detach().cpu().clone(memory_format=torch.contiguous_format)
                for name, one in tensors.items()
            }
            (path / "model.safetensors").write_bytes(save(held))
        try:
            recipe = _recipe(list(models), method, parameters, base)
            for key, value in (("dtype", dtype), ("out_dtype", out_dtype)):
                if value is not None:
                    recipe[key] = str(value).removeprefix("torch.")
            self._merge(recipe, paths, folder / "out")
            merged = load_file(folder / "out" / "model.safetensors")
        finally:
            shutil.rmtree(folder)
        first = next(iter(models.values()))
        merged = {name: merged[name] for name in (*first, *merged) if name in merged}
        sources = [one for tensors in models.values() for one in tensors.values()]
        if torch.is_grad_enabled() and any(one.requires_grad for one in sources):
            return {name: _Merged.apply(one, *sources) for name, one in merged.items()}
        return merged


def _recipe(
    ids: Sequence[Hashable],
    method: MergeMethod,
    parameters: Mapping[str, Any],
    base: Hashable | None,
) -> dict[str, Any]:
    """The recipe of a call: models are named by their numbers."""
    names = {one: str(number) for number, one in enumerate(ids)}
    ignores_base = method.spec.contract.base == BasePolicy.IGNORED
    own: dict[Hashable, dict[str, Any]] = {one: {} for one in ids}
    shared: dict[str, Any] = {}
    scopes = {one.name: one.scope for one in method.spec.parameters}
    for name, value in parameters.items():
        scope = scopes.get(name, ParameterScope.SHARED)
        taking = [
            one for one in ids if scope == ParameterScope.INPUT or one != base or ignores_base
        ]
        if isinstance(value, Mapping):
            for one in taking:
                if one in value:
                    own[one][name] = value[one]
        elif isinstance(value, list | tuple) and scope != ParameterScope.SHARED:
            if len(value) != len(taking):
                raise Refused(f"{len(value)} values of {name} for {len(taking)} models")
            for one, part in zip(taking, value, strict=True):
                own[one][name] = part
        else:
            shared[name] = value
    name = method.spec.name
    if name in registry.METHODS and any(
        one.name == "seed" for one in registry.METHODS[name].parameters
    ):
        # Drawn from torch's generator: the same after the same torch.manual_seed.
        shared["seed"] = int(torch.randint(0, 1 << 31, ()))
    recipe: dict[str, Any] = {"merge_method": name}
    if base is not None:
        recipe["base_model"] = names[base]
    recipe["models"] = [{"model": names[one], "parameters": own[one]} for one in ids]
    recipe["parameters"] = shared
    return recipe
