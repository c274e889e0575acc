"""A pytest plugin that puts mstore in the place of mergekit's merge functions.

Loaded by `test_regressions` into a process of its own, in which mergekit's test files run as they
are.  Owns what is replaced, and what became of each case.  What is replaced:

    run_merge, plan_flat_merge and its Executor   directories, or files, merged into a directory
    merge_state_dicts, merge_tensors, methods     tensors merged into tensors
    sparsify                                      what a method keeps of one tensor
    construct_param_dicts                         what a configuration means for one tensor

Methods that a case makes itself stay mergekit's.  Words of errors are each program's own: `_SAID`
says which error of mstore's stands for which of mergekit's.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import mergekit.graph
import mergekit.merge
import mergekit.sparsify
import pico
import pytest
import torch
import yaml
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.merge_methods import MergeMethod, PerGroupValues, TensorGroup
from mergekit.options import MergeOptions
from mergekit.scripts import merge_raw_pytorch
from mergekit.sparsify import SparsificationMethod
from stand_in import NoGradients, Refused, StandIn
from torch import Tensor

_SHAPES = "has shape"
_NAMES = "is missing.* is not in the base"
_ODD = "cannot be merged, and have other values than in .*:"
_SAID = {
    "Missing required parameter weight for b.w": "linear needs the weight of b",
    "Missing tensors": _NAMES,
    "Tensor size mismatch": _SHAPES,
    "different tensor keys": _NAMES,
    "embedding.weight.*Align vocabulary axes": f"embedding.weight {_SHAPES}",
    "floating-point torch.dtype": "int64 is not supported; types",
    "requires a base input": "needs a base_model",
    "size mismatch for projection": f"projection {_SHAPES}",
    "Tensor size mismatch for w": f"w {_SHAPES}",
    "Tensor size mismatch.*tokenizer": _SHAPES,
    "tokenizer.*source: base": f"embed.* {_SHAPES}",
    "Non-floating buffer 'counter' differs": f"counter {_SHAPES}|{_ODD} counter",
    "Non-floating buffer": _ODD,
    "test_della_invalid_epsilon": "epsilon must be in",
    "test_later_invalid_group_fails_before_any_kernel[shape]": _SHAPES,
    "test_later_invalid_group_fails_before_any_kernel[coefficient]": "weight takes a number",
}
"""By the words that a case expects (or its name, where it expects none): mstore's own."""
_REQUIRED = {"weight": 1.0, "t": 0.5}
"""Values of parameters that a recipe must have, for calls that leave them out to be refused for
their tensors."""

_SPARSIFYING = {
    SparsificationMethod.magnitude: "ties",
    SparsificationMethod.random: "dare_linear",
    SparsificationMethod.magnitude_outliers: "breadcrumbs",
    SparsificationMethod.della_magprune: "della_linear",
}
_ITERATIONS = 5
"""How often a case of averages repeats itself; each of its results has the norm exactly."""


class Seams:
    """mergekit's functions, by mstore, and what became of each case.

    outcomes: by case: outcome and said (pytest's), merges (how often mstore was asked), remarks (of
    its plans). expecting: how many `pytest.raises` the case is in. case: the one that runs.
    """

    def __init__(self, here: StandIn, root: Path) -> None:
        self.here = here
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.expecting = 0
        self.case = ""
        self._root = root

    # -- what is replaced ------------------------------------------------------------------------

    def run_merge(
        self, config: MergeConfiguration, out_path: str, options: MergeOptions, *_: Any
    ) -> None:
        paths = {str(model): Path(model.model.path) for model in config.referenced_models()}
        self.here.merge(yaml.safe_load(config.to_yaml()), paths, Path(out_path))

    def merge_state_dicts(
        self,
        models: Mapping[Hashable, Any] | Sequence[Any],
        method: str | MergeMethod,
        **given: Any,
    ) -> dict[str, Tensor]:
        method = merge_methods.get(method) if isinstance(method, str) else method
        if not _is_own(method):
            return _THEIRS["merge_state_dicts"](models, method, **given)
        named = models if isinstance(models, Mapping) else dict(enumerate(models))
        held = {
            key: one.state_dict(keep_vars=True) if isinstance(one, torch.nn.Module) else one
            for key, one in named.items()
        }
        given.pop("batch_options", None)
        parameters = given.pop("parameters", None) or {}
        own = {key: one for key, one in parameters.items() if isinstance(one, PerGroupValues)}
        if not own:
            return self.here.tensors(held, method, parameters, **given)
        merged: dict[str, Tensor] = {}
        for number, name in enumerate(next(iter(held.values()))):
            values = parameters | {key: one.values[number] for key, one in own.items()}
            alone = {key: {name: one[name]} for key, one in held.items()}
            merged |= self.here.tensors(alone, method, values, **given)
        return merged

    def merge_tensors(
        self,
        tensors: Sequence[Tensor],
        method: str | MergeMethod,
        *,
        parameters: Mapping[str, Any] | None = None,
        ids: Sequence[Hashable] | None = None,
        base_index: int | None = None,
        name: str | None = None,
        **dtypes: Any,
    ) -> Tensor:
        method = merge_methods.get(method) if isinstance(method, str) else method
        group = TensorGroup.from_tensors(tensors, ids=ids, base_index=base_index, name=name)
        (result,) = method((group,), parameters=parameters, **dtypes)
        return result

    def call(
        self,
        method: MergeMethod,
        groups: Sequence[TensorGroup],
        /,
        *,
        parameters: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        batch_options: Any = None,
    ) -> tuple[Tensor, ...]:
        given = {"parameters": parameters, "dtype": dtype, "out_dtype": out_dtype}
        if not _is_own(method):
            return _THEIRS["call"](method, groups, batch_options=batch_options, **given)
        merged = []
        for number, group in enumerate(groups):
            name = group.metadata.name or "w"
            values = {
                key: one.values[number] if isinstance(one, PerGroupValues) else one
                for key, one in (parameters or {}).items()
            }
            models = {entry.id: {name: entry.tensor} for entry in group.entries}
            own = {one.name for one in method.spec.parameters if one.required}
            values = {key: one for key, one in _REQUIRED.items() if key in own} | values
            base = None if group.base is None else group.base.id
            found = self.here.tensors(
                models, method, values, base=base, dtype=dtype, out_dtype=out_dtype
            )
            merged.append(found[name])
        return tuple(merged)

    def sparsify(
        self,
        tensor: Tensor,
        density: float,
        method: SparsificationMethod,
        gamma: float = 0,
        rescale_norm: str | None = None,
        epsilon: float = 0.15,
    ) -> Tensor:
        """A merge of one expert into zeros is what is left of the expert."""
        name = _SPARSIFYING[method]
        own = {"gamma": gamma, "epsilon": epsilon, "density": density, "weight": 1.0}
        norm = None if rescale_norm is None else getattr(rescale_norm, "value", rescale_norm)
        own["rescale"] = {None: False, "l1": True}.get(norm, norm)
        own["normalize"] = False
        known = {one.name for one in merge_methods.get(name).spec.parameters}
        models = {"base": {"w": torch.zeros_like(tensor)}, "expert": {"w": tensor}}
        parameters = {key: value for key, value in own.items() if key in known}
        return self.here.tensors(models, merge_methods.get(name), parameters, base="base")["w"]

    def construct_param_dicts(
        self, config: Any, method: MergeMethod, tensor_name: str
    ) -> tuple[dict[str, Any], dict[ModelReference, dict[str, Any]]]:
        if not _is_own(method):
            return _THEIRS["construct_param_dicts"](config, method, tensor_name)
        recipe, names = _raw_recipe(config)
        shared, each = self.here.values(recipe, names, tensor_name)
        return shared, {ModelReference.parse(name): own for name, own in each.items()}

    def plan_flat_merge(self, config: Any, out_path: str, union: bool, *others: Any) -> _Flat:
        recipe, names = _raw_recipe(config)
        paths = {}
        for number, name in enumerate(names):
            paths[name] = self._root / "flat" / f"{len(self.outcomes)}-{number}"
            paths[name].mkdir(parents=True, exist_ok=True)
            (paths[name] / "model.safetensors").write_bytes(Path(name).read_bytes())
        flat = _Flat(self, recipe, paths, Path(out_path), (config, out_path, union, *others))
        if self.expecting:
            # The case expects mergekit to refuse what it plans; mstore does so before it merges.
            flat.execute()
        return flat

    def executor(self, tasks: Any, *given: Any, **more: Any) -> Any:
        return tasks if isinstance(tasks, _Flat) else _THEIRS["executor"](tasks, *given, **more)

    def raises(self, expected: Any, *given: Any, match: str | None = None, **more: Any) -> Any:
        if given or more:
            return _THEIRS["raises"](expected, *given, match=match, **more)
        return _Expecting(self, expected, match)

    # -- what became of it -----------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.case, self.expecting = item.name, 0
        self.here.remarks.clear()
        if hasattr(item.cls, "NUM_ITERATIONS"):
            item.cls.NUM_ITERATIONS = _ITERATIONS
        before = self.here.merges
        name = _name(item.nodeid)
        self.outcomes[name] = {"outcome": "passed", "said": ""}
        result = yield
        self.outcomes[name] |= {
            "merges": self.here.merges - before,
            "remarks": self.here.remarks[:],
        }
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(report.longrepr)
            self.outcomes[_name(report.nodeid)] |= {"outcome": report.outcome, "said": said}


class _Flat:
    """A planned merge of files, and its executor."""

    def __init__(
        self,
        seams: Seams,
        recipe: Mapping[str, Any],
        paths: Mapping[str, Path],
        out: Path,
        given: tuple[Any, ...],
    ) -> None:
        self._seams, self._recipe, self._paths, self._out = seams, recipe, paths, out
        self._given = given

    def execute(self) -> None:
        self._seams.here.merge(self._recipe, self._paths, self._out)

    def __iter__(self) -> Iterator[Any]:
        """mergekit's own tasks, for who looks into the plan."""
        with mock.patch.object(
            merge_raw_pytorch, "construct_param_dicts", _THEIRS["construct_param_dicts"]
        ):
            return iter(_THEIRS["plan_flat_merge"](*self._given))


class _Expecting:
    """pytest.raises, for which mstore's words are as good as mergekit's."""

    def __init__(self, seams: Seams, expected: Any, match: str | None) -> None:
        self._seams, self._expected, self._match = seams, expected, match
        self._theirs = _THEIRS["raises"](expected, match=match)

    def __enter__(self) -> Any:
        self._seams.expecting += 1
        return self._theirs.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> Any:
        self._seams.expecting -= 1
        if isinstance(error, NoGradients):
            return False
        if not isinstance(error, Refused):
            return self._theirs.__exit__(kind, error, trace)
        wanted = _SAID.get(self._match or self._seams.case)
        fits = isinstance(error, self._expected) and wanted is not None
        return fits and re.search(wanted, str(error)) is not None


_THEIRS: dict[str, Callable[..., Any]] = {
    "call": MergeMethod.__call__,
    "merge_state_dicts": merge_methods.merge_state_dicts,
    "construct_param_dicts": merge_raw_pytorch.construct_param_dicts,
    "plan_flat_merge": merge_raw_pytorch.plan_flat_merge,
    "executor": mergekit.graph.Executor,
    "raises": pytest.raises,
}
_OWN = {id(method) for method in merge_methods.registered_methods()}


def _name(nodeid: str) -> str:
    """A case's name, without the folder."""
    return nodeid.removeprefix("tests/")


def _is_own(method: MergeMethod) -> bool:
    """Whether it is one of the methods that mergekit brings, and not one that a case makes."""
    return id(method) in _OWN


def _raw_recipe(config: Any) -> tuple[dict[str, Any], list[str]]:
    """The recipe of mergekit-pytorch's configuration, and the names of its models."""
    recipe = config.model_dump(exclude_none=True, mode="json")
    names = [one["model"] for one in recipe["models"]]
    if config.base_model is not None and config.base_model not in names:
        names.append(config.base_model)
    return recipe, names


def _gradcheck(merge: Callable[..., Tensor], inputs: Sequence[Tensor], **_: Any) -> bool:
    """torch's own would merge once for each element."""
    merge(*inputs)
    raise NoGradients("mstore has no gradients")


def _install(seams: Seams) -> None:
    """Replace all of it where the test files import it from."""

    def call(method: MergeMethod, groups: Sequence[TensorGroup], /, **given: Any) -> Any:
        return seams.call(method, groups, **given)

    mergekit.merge.run_merge = seams.run_merge
    for module in (merge_methods, merge_methods.api):
        module.merge_state_dicts = seams.merge_state_dicts
        module.merge_tensors = seams.merge_tensors
    MergeMethod.__call__ = call
    mergekit.sparsify.sparsify = seams.sparsify
    merge_raw_pytorch.construct_param_dicts = seams.construct_param_dicts
    merge_raw_pytorch.plan_flat_merge = seams.plan_flat_merge
    mergekit.graph.Executor = seams.executor
    pytest.raises = seams.raises
    torch.backends.mps.is_available = lambda: False
    torch.autograd.gradcheck = _gradcheck


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", help="where to write what became of each case, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    # How torch cuts a sum among threads must not depend on the machine.
    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    here = StandIn(Path(folder.name))
    config.add_cleanup(here.close)
    seams = Seams(here, Path(folder.name))
    _install(seams)
    # The source distribution has neither `tests/__init__.py` nor `tests/common.py`.
    tests = types.ModuleType("tests")
    tests.__path__ = list(config.args)
    sys.modules |= {"tests": tests, "tests.common": pico}
    config.pluginmanager.register(seams)
    config.add_cleanup(
        lambda: Path(config.getoption("--outcomes")).write_text(json.dumps(seams.outcomes))
    )
