"""Real servers of object storage, for tests: each at a free port of this machine.

    moto      S3, in Python                      azurite   Azure's blobs, for node
    gcs       Google Cloud Storage (gcs_stub)    s3rver    S3 that ignores conditions, for node

`scripts/setup` installs them; a test of one that is missing is skipped. Credentials are random:
so a test can look for them wherever they must not be.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import gcs_stub
import pytest

BUCKET = "models"
_NODE = Path(__file__).parent.parent / ".node" / "node_modules"
_PATIENCE = 120.0


@dataclass(frozen=True)
class Server:
    """A server that has one empty bucket, and what a client must know of it.

    url: the bucket's address. environment: what a client needs. secrets: what no error may show.
    asked: returns every request up to now, as `PUT /models/name`.
    """

    url: str
    endpoint: str
    environment: Mapping[str, str]
    secrets: Sequence[str]
    asked: Callable[[], list[str]]

    def below(self) -> str:
        """Return an address in the bucket that has nothing."""
        return f"{self.url}/{secrets.token_hex(6)}"

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let clients in this process, and in those that it starts, find the server."""
        forget(patch)
        for name, value in self.environment.items():
            patch.setenv(name, value)


def forget(patch: pytest.MonkeyPatch) -> None:
    """Remove what this process was told about providers."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            patch.delenv(name)


def shown(error: BaseException) -> str:
    """All that anybody may see of an error: it, its notes, those behind it, and its traceback."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one not in seen:
            seen.append(one)
            waiting += [one.__cause__, one.__context__]
    texts = [f"{one} {one!r} {one.args} {getattr(one, '__notes__', [])}" for one in seen]
    return "\n".join([*texts, *traceback.format_exception(error)])


def s3_environment(endpoint: str, key: str = "", secret: str = "") -> dict[str, str]:
    """Return what a client of S3 needs; new keys, unless they are given."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key or f"AK{secrets.token_hex(9).upper()}",
        "AWS_SECRET_ACCESS_KEY": secret or secrets.token_hex(20),
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def moto(directory: Path, *, least_part: int = 5 << 20) -> Iterator[Server]:
    """S3. Keys are not checked. least_part: bytes that a part of an upload needs, but the last."""
    program = Path(__file__).with_name("moto_atomic.py")
    command = [sys.executable, str(program), "-H", "127.0.0.1", "-p", "0"]
    ready = r"Running on (http://127\.0\.0\.1:\d+)"
    parts = {"S3_UPLOAD_PART_MIN_SIZE": str(least_part)}
    with started(command, directory, ready, parts) as (endpoint, log):
        _ask("PUT", f"{endpoint}/{BUCKET}")
        given = s3_environment(endpoint)
        yield Server(
            f"s3://{BUCKET}",
            endpoint,
            given,
            _secrets(given),
            lambda: _logged(log),
        )


@contextmanager
def s3rver(directory: Path) -> Iterator[Server]:
    """S3 that ignores every condition of a write. It knows one key, and checks its name only."""
    command = [*_node("s3rver/bin/s3rver.js"), "-d", str(directory), "-a", "127.0.0.1", "-p", "0"]
    command += ["--configure-bucket", BUCKET]
    with started(command, directory, r"listening on (127\.0\.0\.1:\d+)") as (address, _):
        given = s3_environment(f"http://{address}", "S3RVER", "S3RVER")
        yield Server(
            f"s3://{BUCKET}",
            f"http://{address}",
            given,
            (),
            lambda: pytest.fail("s3rver's log has no methods"),
        )


@contextmanager
def azurite(directory: Path) -> Iterator[Server]:
    """Azure's blobs."""
    account, key = f"a{secrets.token_hex(6)}", base64.b64encode(secrets.token_bytes(64)).decode()
    command = [*_node("azurite/dist/src/blob/main.js"), "--blobHost", "127.0.0.1"]
    command += ["--blobPort", "0", "--skipApiVersionCheck", "--inMemoryPersistence"]
    command += ["--disableTelemetry"]
    given = {"AZURITE_ACCOUNTS": f"{account}:{key}"}
    ready = r"successfully listens? on (http://127\.0\.0\.1:\d+)"
    with started(command, directory, ready, given) as (found, log):
        endpoint = f"{found}/{account}"
        _make_container(endpoint, account, key)
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": account,
            "AZURE_STORAGE_ACCOUNT_KEY": key,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }
        yield Server(
            f"az://{BUCKET}",
            endpoint,
            environment,
            (key,),
            lambda: _logged(log),
        )


@contextmanager
def gcs(stub: gcs_stub.Stub | None = None) -> Iterator[Server]:
    """Google Cloud Storage, as far as obstore uses it. It lets one token in."""
    with gcs_stub.serving(stub or google()) as one:
        environment = {"GOOGLE_BASE_URL": one.endpoint, "GOOGLE_BEARER_TOKEN": one.token}
        yield Server(
            f"gs://{BUCKET}", one.endpoint, environment, (one.token,), lambda: list(one.requests)
        )


def google() -> gcs_stub.Stub:
    """Return what `gcs` serves, for a test that changes it meanwhile."""
    return gcs_stub.Stub(BUCKET, f"ya29.{secrets.token_hex(20)}")


def _logged(log: Path) -> list[str]:
    """The requests in a server's log, which may be in colour."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
    return re.findall(r'"([A-Z]+ /\S*) HTTP', plain)


def _secrets(environment: Mapping[str, str]) -> tuple[str, ...]:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return tuple(environment[name] for name in names)


def _node(program: str) -> list[str]:
    """The command line of a program for node, or a skipped test."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed (scripts/setup)")
    if not (_NODE / program).exists():
        pytest.skip(f"{program.partition('/')[0]} is not installed (scripts/setup)")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.strip("v\n").partition(".")[0]) < 20:
        pytest.skip(f"node is {version.strip()}; these programs need 20")
    return [node, str(_NODE / program)]


@contextmanager
def started(
    command: Sequence[str],
    directory: Path,
    ready: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Path]]:
    """Start a server; give what its first words say by `ready`, and its log."""
    log = directory / f"{secrets.token_hex(4)}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(environment or {}),
        )
    try:
        yield _waited(process, log, ready), log
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _waited(process: subprocess.Popen[bytes], log: Path, ready: str) -> str:
    end = time.monotonic() + _PATIENCE
    while True:
        has_ended = process.poll() is not None
        if found := re.search(ready, log.read_text(errors="replace")):
            return found[1]
        assert not has_ended, f"{process.args}: {log.read_text()}"
        assert time.monotonic() < end, f"{process.args} does not start: {log.read_text()}"
        time.sleep(0.05)


def _ask(method: str, url: str, headers: Mapping[str, str] | None = None) -> None:
    request = urllib.request.Request(url, method=method, headers=dict(headers or {}))
    with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
        answer.read()


def _make_container(endpoint: str, account: str, key: str) -> None:
    """Make the bucket at Azurite, which wants the request signed."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
    lines += [f"/{account}/{account}/{BUCKET}", "restype:container"]
    made = hmac.new(base64.b64decode(key), "\n".join(lines).encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(made.digest()).decode()}"
    headers["Content-Length"] = "0"
    _ask("PUT", f"{endpoint}/{BUCKET}?restype=container", headers)
