"""The child process that loads pickled weights with torch and writes them as safetensors.

    python -I conversion_program.py RESULT < request

The request is a JSON object: `parent` (process id), `memory`, `seconds`, `file_bytes`, `growth`
(limits), `tasks` (a list of [source, its stamp, target]; the stamp is device, inode, size and the
two times of the file when it was listed). RESULT is written at the end: {"files": [{"tensors",
"bytes", "left_out"}, ...]}, or {"kind", "what", "file"} for an error. Ends with status 0 in both
cases; any other end is a kill.

All limits are set before the first byte of a source is read, and cannot be undone. The source is
mapped, and tensors are written one by one: memory is that of one tensor and of what the loader
allocates, not of the model.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import resource
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
# Before 2.6, torch unpickles archives of the oldest form without restrictions (CVE-2025-32434).
OLDEST_TORCH = (2, 6)
MIB = 1 << 20
CHANGED = "the file changed while it was being read"


# Extracts from torch's message the name that a pickle wanted to load.
_WANTED = re.compile(r"\bGLOBAL ([A-Za-z_][\w.]{0,200})")


class Refused(Exception):
    """Raised for a source that cannot be converted: `kind` is missing, limit, code or bad."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def die_with(parent: int) -> None:
    """Arrange to be killed when the parent ends, and never to gain a privilege."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getppid() != parent:
        # The parent ended before the first of these calls.
        os.kill(os.getpid(), signal.SIGKILL)


def lower(limit: int, value: int) -> None:
    """Set a resource limit that cannot be raised again; keep a lower existing one."""
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def lower_time(seconds: int) -> None:
    """Limit processor time: SIGXCPU, which names the limit, comes before the kill."""
    lower(resource.RLIMIT_CPU, seconds + 1)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, hard), hard))


def import_torch() -> Any:
    for name in [name for name in os.environ if name.startswith(("TORCH", "PYTORCH"))]:
        # Some of them switch `weights_only` off.
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        import torch
    except ImportError:
        raise Refused("missing", "conversion needs torch, which is not installed") from None
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        raise Refused("missing", f"torch {torch.__version__} is too old to load pickles with")
    torch.set_num_threads(1)
    return torch


def address_space() -> int:
    """Return how many bytes this process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def dtypes(torch: Any) -> dict[Any, str]:
    """Return the dtypes of safetensors that this torch has, in the library's layout order."""
    names = {
        "uint64": "U64",
        "int64": "I64",
        "float64": "F64",
        "complex64": "C64",
        "float32": "F32",
        "uint32": "U32",
        "int32": "I32",
        "bfloat16": "BF16",
        "float16": "F16",
        "uint16": "U16",
        "int16": "I16",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int8": "I8",
        "uint8": "U8",
        "bool": "BOOL",
    }
    return {getattr(torch, name): code for name, code in names.items() if hasattr(torch, name)}


def open_stamped(source: str, stamp: list[int]) -> int:
    """Open the file that was listed, like `mstore.checkpoint.reading`; return its descriptor."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(source, flags)
    except OSError as error:
        raise Refused("bad", CHANGED) from error
    require_stamp(descriptor, stamp)
    return descriptor


def require_stamp(descriptor: int, stamp: list[int]) -> None:
    """Raise Refused unless an open file still has the stamp from when it was listed."""
    is_now = os.fstat(descriptor)
    times = is_now.st_mtime_ns, is_now.st_ctime_ns
    if [is_now.st_dev, is_now.st_ino, is_now.st_size, *times] != stamp:
        raise Refused("bad", CHANGED)


def load(torch: Any, descriptor: int) -> tuple[dict[str, Any], list[str]]:
    """Return the named tensors of an open file, and the names of other entries beside them."""
    is_archive = os.pread(descriptor, 4, 0) == b"PK\x03\x04"
    # torch opens by name: this name stays the open file, whatever its own path now leads to.
    source = f"/proc/self/fd/{descriptor}"
    # The format before torch 1.6 cannot be mapped.
    try:
        loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        raise Refused("code", unsafe(str(error))) from error
    if not isinstance(loaded, dict):
        raise Refused("bad", f"holds a {type(loaded).__name__}, not tensors by name")
    nested = loaded.get("state_dict")
    if isinstance(nested, dict):
        return nested, sorted(str(key) for key in loaded if key != "state_dict")
    return loaded, []


def unsafe(words: str) -> str:
    """Describe what a pickle wanted; torch's own message would explain how to allow it."""
    wanted = _WANTED.search(words)
    if wanted is None:
        return "is a pickle of something else than tensors; nothing in it was run"
    return f"wants to load {wanted[1].rstrip('.')}, which is no tensor; it was not run"


def check(torch: Any, tensors: dict[Any, Any], known: dict[Any, str], most: int) -> int:
    """Return the bytes of all tensors. Raises Refused for what safetensors cannot hold."""
    total = 0
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise Refused("bad", f"has the key {str(name)[:100]!r}, which is not text")
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise Refused("bad", f"holds a {kind} under {name[:100]!r}, not tensors alone")
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise Refused("bad", f"the tensor {name[:100]!r} is sparse, or has no bytes")
        if tensor.is_quantized or tensor.dtype not in known:
            raise Refused("bad", f"safetensors has no {tensor.dtype} (tensor {name[:100]!r})")
        total += tensor.numel() * tensor.element_size()
        if total > most:
            raise Refused("limit", f"its tensors take more than {most} bytes; the limit is that")
    return total


def write(torch: Any, tensors: dict[str, Any], known: dict[Any, str], target: str) -> None:
    """Write a safetensors file, byte for byte as the format's own library writes it."""
    ranks = {dtype: rank for rank, dtype in enumerate(known)}
    names = sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": known[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensors[name].detach().resolve_conj().resolve_neg().contiguous()
            if tensor.numel():
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def convert(
    torch: Any, source: str, stamp: list[int], target: str, request: dict[str, Any]
) -> dict[str, Any]:
    descriptor = open_stamped(source, stamp)
    try:
        most = request["growth"] * os.fstat(descriptor).st_size + MIB
        known = dtypes(torch)
        tensors, left_out = load(torch, descriptor)
        total = check(torch, tensors, known, most)
        count = len(tensors)
        write(torch, tensors, known, target)
        require_stamp(descriptor, stamp)
    finally:
        os.close(descriptor)
    return {"tensors": count, "bytes": total, "left_out": left_out}


def run(request: dict[str, Any]) -> dict[str, Any]:
    file = None
    try:
        torch = import_torch()
        lower(resource.RLIMIT_AS, address_space() + request["memory"])
        lower(resource.RLIMIT_NPROC, 0)
        files = []
        for file, stamp, target in request["tasks"]:
            files.append(convert(torch, file, stamp, target, request))
    except Refused as refused:
        return {"kind": refused.kind, "what": str(refused), "file": file}
    except MemoryError:
        return {"kind": "limit", "what": "needs more memory than it is allowed", "file": file}
    except Exception as error:  # noqa: BLE001 -- any error of the loader is about the file
        text = str(error)
        if "weights_only" in text:
            # Other errors carry the same advice.
            return {"kind": "code", "what": unsafe(text), "file": file}
        if "alloc" in text or "Cannot allocate memory" in text or "mmap" in text:
            return {"kind": "limit", "what": "needs more memory than it is allowed", "file": file}
        words = text.strip().partition("\n")[0][:300]
        what = f"cannot be loaded as weights: {type(error).__name__}: {words}"
        return {"kind": "bad", "what": what, "file": file}
    return {"files": files}


def main() -> None:
    request = json.load(sys.stdin)
    die_with(request["parent"])
    os.umask(0o077)
    os.nice(10)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    lower(resource.RLIMIT_CORE, 0)
    lower_time(request["seconds"])
    lower(resource.RLIMIT_FSIZE, request["file_bytes"])
    lower(resource.RLIMIT_NOFILE, 64)
    answer = run(request)
    with open(sys.argv[1], "x", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
