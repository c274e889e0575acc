"""The page size of the files that LMDB makes on this machine, or on one with other pages."""

from __future__ import annotations

import mmap
import subprocess
from pathlib import Path

PAGE = min(mmap.PAGESIZE, 1 << 15)
"""The system's, or LMDB's largest."""
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
long sysconf(int name) {
    static long (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_PAGESIZE ? atol(getenv("PAGE_BYTES")) : real(name);
}
int getpagesize(void) { return sysconf(_SC_PAGESIZE); }
"""


def page_shim(place: Path) -> Path:
    """Make a library for LD_PRELOAD that says that pages have $PAGE_BYTES; raises OSError."""
    (place / "shim.c").write_text(SHIM)
    command = ["gcc", "-shared", "-fPIC", "-o", str(place / "shim.so"), str(place / "shim.c")]
    if subprocess.run([*command, "-ldl"], check=False).returncode:
        raise OSError("gcc makes no shared library here")
    return place / "shim.so"
