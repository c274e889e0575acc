"""How functions become machine code: flags, inlining, and code for any level of processor.

Owns the decorators and the flags that make compiled float32 arithmetic bit-equal to numpy's on
every machine. Does not own any arithmetic, nor when code is made: `maker` runs this in a process of
its own, where numba leaves the optimising to us (NUMBA_OPT=0), so that what it makes of a function
is good for every level.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any, Final, TypeVar, cast

import numba
from llvmlite import binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba.extending import intrinsic

from mstore.numeric.images import Image
from mstore.numeric.levels import Level
from mstore.numeric.linking import linked

_SYMBOL: Final = "mstore_pass"
_NOTHING_TO_FREE: Final = "define void @NRT_MemInfo_call_dtor(ptr %info) {\n ret void\n}"
_ARGUMENTS: Final = {"i": numba.types.int64, "p": numba.types.voidptr}
# numba defines, beside each function, one of the same name after `cfunc.` for callers in C.
_NAMED: Final = re.compile(r'^define [^@\n]*@"?cfunc\.([^"(\n]+)"?\(', re.MULTILINE)
_TARGET: Final = re.compile(r"^target (triple|datalayout) = .*$", re.MULTILINE)

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


class Entry:
    """A function of integers and addresses, and how its machine code is made."""

    def __init__(self, function: Callable[..., Any], takes: str) -> None:
        self._function = function
        self._arguments = tuple(_ARGUMENTS[letter] for letter in takes)

    def assembly(self) -> str:
        """Return the function and its callees in LLVM's language, for any processor."""
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(self._function)
        dispatcher.compile(self._arguments)
        text: str = dispatcher.inspect_llvm(self._arguments)
        return text


def entry(takes: str, *modules: ModuleType) -> Callable[[Callable[..., Any]], Entry]:
    """Declare a kernel that is run through `code_cache.Pass`, and returns nothing.

    `takes` is as there. `modules` are all other modules that its steps come from: the `Pass` names
    their files.
    """
    return lambda function: Entry(function, takes)


def made(assembly: str, level: Level) -> Image:
    """Return the machine code of `Entry.assembly` for processors of a level, as an image.

    Raises linking.Refused if the code needs what an image cannot have.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(level.triple).create_target_machine(
        cpu=level.cpu, features=level.features, opt=3, reloc="pic", codemodel="small"
    )
    words = {"triple": level.triple, "datalayout": str(machine.target_data)}
    text = _TARGET.sub(lambda found: f'target {found[1]} = "{words[found[1]]}"', assembly)
    [name] = _NAMED.findall(text)
    module = llvm.parse_assembly(text)
    # Arrays made from addresses own nothing, so nothing needs to be freed.
    module.link_in(llvm.parse_assembly(_NOTHING_TO_FREE))
    for function in module.functions:
        if not function.is_declaration and function.name != name:
            function.linkage = "internal"
    _optimise(module, machine)
    module.get_function(name).name = _SYMBOL
    return linked(machine.emit_object(module), _SYMBOL, made_by())


def _optimise(module: Any, machine: Any) -> None:
    """Run LLVM's passes in the order that numba runs them: cheap ones first, then all."""
    without = _builder(machine, 0, vectorises=False)
    only = llvm.create_new_module_pass_manager()
    only.add_global_dead_code_eliminate_pass()
    only.run(module, without)
    # Loops in rotated form are vectorised more often.
    cheap = without.getModulePassManager()
    cheap.add_loop_rotate_pass()
    cheap.add_instruction_combine_pass()
    cheap.add_jump_threading_pass()
    cheap.add_refprune_pass()
    cheap.run(module, without)
    fully = _builder(machine, 3, vectorises=True)
    every = fully.getModulePassManager()
    every.add_refprune_pass()
    every.add_global_dead_code_eliminate_pass()
    every.run(module, fully)


def _builder(machine: Any, speed: int, *, vectorises: bool) -> Any:
    options = llvm.create_pipeline_tuning_options(speed_level=speed)
    options.loop_vectorization = vectorises
    options.slp_vectorization = vectorises
    return llvm.create_pass_builder(machine, options)


def made_by() -> str:
    """Return the compiler and its version, in words."""
    return f"numba {metadata.version('numba')}, llvmlite {metadata.version('llvmlite')}"
