"""How functions become machine code: flags, inlining, and the cache on disk.

Owns the decorators and the flags that make compiled float32 arithmetic bit-equal to numpy's on
every machine. Does not own any arithmetic. Compiled functions run without the GIL; numba serialises
compilation itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic

from mstore.numeric import code_cache

_NOTHING_TO_FREE = "define void @NRT_MemInfo_call_dtor(ptr %info) {\n ret void\n}"

_ARGUMENTS = {"i": numba.types.int64, "p": numba.types.voidptr}

_Function = TypeVar("_Function", bound=Callable[..., Any])

# No fastmath anywhere: LLVM must neither reorder sums nor contract a product and a sum into one
# rounding, and vectorised results equal scalar ones. Division by zero follows IEEE.


def compiled(function: _Function) -> _Function:
    """Compile a step of a kernel together with the kernel that calls it."""
    return cast(_Function, numba.njit(nogil=True, error_model="numpy")(function))


def inlined(function: _Function) -> _Function:
    """Inline a small function into its callers' loops.

    A call, even one that LLVM inlines later, prevents some loops from being vectorised.
    """
    pasted = numba.njit(nogil=True, error_model="numpy", inline="always")
    return cast(_Function, pasted(function))


@intrinsic
def _pointer(_typing: Any, _address: Any) -> Any:
    """Turn an address, an int64, into what `carray` takes."""

    def made(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return numba.types.voidptr(numba.types.int64), made


# The decorator's type shows the typing context as an argument, which calls do not pass.
pointer: Any = _pointer


class _StampedCache(FunctionCache):
    """numba's cache, keyed by all sources; its failures are never errors.

    numba itself notices only changes of the kernel's own file, and raises on a full disk or on a
    file that a power cut damaged.
    """

    def __init__(self, function: Callable[..., Any], modules: tuple[ModuleType, ...]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        sources = [inspect.getsource(module) for module in (sys.modules[__name__], *modules)]
        self._stamp = hashlib.sha256("\0".join(sources).encode()).hexdigest()

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        key = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return (*key, self._stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - damaged bytes raise anything; compiling again fixes it
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def keep(self, path: Path, data: bytes) -> None:
        """Write a file of our own as numba writes its own: atomically."""
        with contextlib.suppress(OSError):
            self._impl.locator.ensure_cache_path()
            _keep(path, data)

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


class Entry:
    """A function of integers and addresses: how its machine code is made and stored."""

    def __init__(
        self, function: Callable[..., Any], takes: str, modules: tuple[ModuleType, ...]
    ) -> None:
        self._function = function
        self._arguments = tuple(_ARGUMENTS[letter] for letter in takes)
        self._modules = modules

    def compiled(self, path: Path, stamp: bytes) -> tuple[int, Any]:
        """Return (address, an object to keep alive while the address is used).

        Stores the code at `path` if possible. If numba's cache lies elsewhere than beside the
        source, the code goes there too, in numba's own form, and each process pays for the
        compiler's start; not so if `code_cache.use_cache` set a directory.
        """
        own = code_cache.cache_directory() is not None
        try:
            cache = None if own else _StampedCache(self._function, self._modules)
        except (OSError, RuntimeError):
            cache = None
        beside = cache is not None and Path(cache.cache_path) == path.parent
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(self._function)
        if cache is not None and not beside:
            dispatcher._cache = cache
        dispatcher.compile(self._arguments)
        made = dispatcher.overloads[self._arguments]
        name = made.fndesc.llvm_func_name
        if own or (cache is not None and beside):
            data = code_cache.stored(_alone(made.library.get_llvm_str(), name), stamp)
            if cache is not None:
                cache.keep(path, data)
            else:
                _keep(path, data)
        return made.library.get_pointer_to_function(name), made


def _keep(path: Path, data: bytes) -> None:
    """Write a file as numba writes those of its cache: atomically."""
    with contextlib.suppress(OSError):
        files = IndexDataCacheFile(str(path.parent), path.stem, None)  # type: ignore[no-untyped-call]
        with files._open_for_write(str(path)) as file:
            file.write(data)


def entry(takes: str, *modules: ModuleType) -> Callable[[Callable[..., Any]], Entry]:
    """Declare a kernel that is run through `code_cache.Pass`, and returns nothing.

    `takes` is as there. `modules` are all other modules that its steps come from. If nothing can be
    written (neither beside the source nor in the user's cache directory), each process compiles for
    itself.
    """
    return lambda function: Entry(function, takes, modules)


def _alone(assembly: str, name: str) -> bytes:
    """Return object code of one function and its callees, independent of the compiler's runtime."""
    module = llvm.parse_assembly(assembly)
    # Arrays made from addresses own nothing, so nothing needs to be freed.
    module.link_in(llvm.parse_assembly(_NOTHING_TO_FREE))
    for function in module.functions:
        if not function.is_declaration and function.name != name:
            function.linkage = "internal"
    target = code_cache.target_machine()
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options()))
    module.get_function(name).name = code_cache.SYMBOL
    code: bytes = target.emit_object(module)
    return code
