"""Programs that other people wrote, on every kind of mount: they see the files that were added."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mount_drivers import (
    SHARDS,
    Driver,
    Family,
    Mount,
    drop_pages,
    files_below,
    on_disk,
    write_family,
)

from mstore import Store

pytest_plugins = ["mount_drivers"]
tmp_path_factory = on_disk

FIO_BYTES = 3 << 20


@pytest.fixture(scope="module")
def written(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The family; `tuned` also has a file that fio wrote, where there is fio."""
    root = tmp_path_factory.mktemp("programs")
    family = write_family(root, driver)
    if shutil.which("fio"):
        target = family.sources["tuned"] / "fio.bin"
        fio(target, "--rw=randwrite", "--do_verify=0")
        with Store.open(family.store) as store:
            store.add(family.sources["tuned"], name="tuned", base="base")
    return family


@pytest.fixture(scope="module")
def pair(written: Family, mounted: Mount) -> tuple[Path, Path]:
    """`tuned` mounted, and the directory it came from."""
    return mounted(written.store, "tuned", written.store.parent / "mnt"), written.sources["tuned"]


@pytest.fixture
def cold(pair: tuple[Path, Path]) -> tuple[Path, Path]:
    """The same, with nothing of it in the page cache."""
    for path in files_below(pair[0]):
        drop_pages(pair[0] / path)
    return pair


def told(command: str, folder: Path) -> str:
    """What a line of bash prints in a folder; it has to succeed."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | {"LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert done.stderr == "", command
    return done.stdout


def fio(file: Path, *how: str) -> subprocess.CompletedProcess[str]:
    """Run fio on a file of blocks that each hold their place and a checksum."""
    command = [
        *("fio", "--name=job", "--verify=crc32c", "--bs=4k", f"--size={FIO_BYTES}"),
        *(f"--filename={file.name}", "--allow_file_create=1", *how),
    ]
    return subprocess.run(
        command, cwd=file.parent, capture_output=True, text=True, check=not file.exists()
    )


READING = {
    "find": "find . -type f -printf '%p %s %y %l\\n' | sort",
    "find, by size": "find . -type f -size +100k -size -300k | sort",
    "find -ls": "find . -type f -ls | awk '{print $4, $7, $11}' | sort",
    "ls": "ls -R; ls -lLS | awk 'NR > 1 && !/^d/ {print $5, $9}'",
    "du": "find . -type f -print0 | sort -z | du -b --files0-from=-",
    "md5sum, 8 at once": "find . -type f -print0 | xargs -0 -n1 -P8 md5sum | sort",
    "tar": "tar --sort=name --mtime=@0 --owner=0 --group=0 --mode=a=rX -cf- . | sha256sum",
    "tar --sparse": "tar --sparse --sort=name --mtime=@0 --mode=a=rX -cf- *.* | tar -xOf- | md5sum",
    "dd, odd blocks": f"for bs in 511 4097 65535 131071 1048577; do "
    f"dd if={SHARDS[0]} bs=$bs status=none | md5sum; "
    f"dd if={SHARDS[0]} bs=$bs skip=1 status=none | md5sum; done",
    "dd, bytes and jumps": f"dd if={SHARDS[1]} bs=1 skip=65530 count=20 status=none | md5sum; "
    f"dd if={SHARDS[1]} iflag=skip_bytes,count_bytes bs=64k skip=999 count=200001 status=none"
    "| md5sum",
    "dd iflag=direct": f"dd if={SHARDS[0]} bs=128k iflag=direct status=none | md5sum",
    "tail and head": f"for n in 1 17 4096 65537 700000; do tail -c $n {SHARDS[0]} | md5sum; "
    f"head -c $n {SHARDS[1]} | md5sum; tail -c +$n {SHARDS[0]} | md5sum; done",
    "wc and grep": f"wc -c * 2>/dev/null | sort || true; grep -c weight *.json; "
    f"grep -abo 'seed1.1.4' {SHARDS[1]} | head -c 200",
    "od": f"od -An -tx1 -j 65520 -N 64 {SHARDS[0]}",
}


@pytest.mark.sampled(42)
@pytest.mark.parametrize("program", READING)
def test_programs_that_read_print_the_same(
    driver: Driver, cold: tuple[Path, Path], program: str
) -> None:
    """find, ls, du, md5sum, tar, dd, tail, head, wc, grep and od say of a mount what they say of
    the directory that was added."""
    shown, original = cold
    if "iflag=direct" in READING[program] and not driver.reads_directly:
        pytest.skip(f"nothing reads {driver} past the page cache")
    assert told(READING[program], shown) == told(READING[program], original)


COPYING = {
    "cp -r": 'cp -r . "$OUT"',
    "cp -a": 'cp -a --reflink=auto --sparse=always . "$OUT"',
    "tar": 'mkdir "$OUT"; tar -cf- . | tar -xf- -C "$OUT"',
    "rsync": 'rsync -a --checksum . "$OUT/" && rsync -an --checksum --itemize-changes . "$OUT/"',
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("program", COPYING)
def test_copies_are_the_directory(
    cold: tuple[Path, Path], program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cp, tar and rsync copy a mount to what was added, and `diff -r` and cmp find no difference
    between that, the mount and the copy."""
    if shutil.which(program.partition(" ")[0]) is None:
        pytest.skip(f"{program} is not installed")
    shown, original = cold
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert told(COPYING[program], shown) == ""
    for other in (original, shown):
        assert told(f'diff -r . "{other}"', tmp_path / "out") == ""
    if program != "cp -r":
        # tar keeps whole seconds.
        times = [int((at / SHARDS[0]).stat().st_mtime) for at in (tmp_path / "out", shown)]
        assert times[0] == times[1]


def test_checksums_made_elsewhere_hold(cold: tuple[Path, Path], tmp_path: Path) -> None:
    """`sha256sum -c` accepts every file of a mount by the sums of the original, and cmp compares
    from any byte."""
    shown, original = cold
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(told("find . -type f -print0 | xargs -0 sha256sum", original))
    told(f'sha256sum --strict --quiet -c "{sums}"', shown)
    for skipped in (0, 1, 65_537, 700_001):
        told(f'cmp -i {skipped} {SHARDS[0]} "{original / SHARDS[0]}"', shown)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "how", [("randread", "psync"), ("randread", "mmap"), ("read", "psync")], ids=" ".join
)
def test_fio_verifies_every_block(cold: tuple[Path, Path], how: tuple[str, str]) -> None:
    """Eight jobs of fio read all blocks of a file that fio wrote, at random or in order, and find
    each where it was written."""
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    shown, _ = cold
    order, engine = how
    done = fio(
        shown / "fio.bin", *(f"--rw={order}", f"--ioengine={engine}"),
        *("--readonly", "--numjobs=8", "--group_reporting", "--allow_file_create=0"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"io={8 * FIO_BYTES / 2**20:.1f}MiB" in done.stdout


TENSORS = """
import hashlib, json, os, random, sys
import ml_dtypes
from safetensors import safe_open
folder, shards = sys.argv[1], sys.argv[2:]

def digest(seed):
    found = {}
    for shard in random.Random(seed).sample(shards, len(shards)):
        with safe_open(os.path.join(folder, shard), "np") as file:
            names = list(file.keys())
            random.Random(seed).shuffle(names)
            for name in names:
                array = file.get_tensor(name)
                sha = hashlib.sha256(array.tobytes()).hexdigest()
                found[name] = [str(array.dtype), list(array.shape), sha]
    return json.dumps(found, sort_keys=True) + "\\n"

children = int(os.environ["CHILDREN"])
for seed in range(children):
    if os.fork() == 0:
        status = 1
        try:
            os.write(1, digest(seed).encode())
            status = 0
        finally:
            os._exit(status)
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(children)))
"""


def tensors(folder: Path, processes: int) -> list[dict[str, object]]:
    """What each of several processes at once finds with `safe_open`: every tensor's digest."""
    done = subprocess.run(
        [sys.executable, "-c", TENSORS, str(folder), *SHARDS],
        env=os.environ | {"CHILDREN": str(processes)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.sampled(3)
def test_eight_processes_open_the_shards(cold: tuple[Path, Path]) -> None:
    """safetensors in eight processes at once maps every tensor of a mount, each in an order of its
    own, and all of them find the original's bytes."""
    shown, original = cold
    (wanted,) = tensors(original, 1)
    assert len(wanted) == 10
    assert tensors(shown, 8) == [wanted] * 8
