"""Who may: credentials as docker and podman leave them, passwords, tokens, helpers."""

from __future__ import annotations

import base64
import json
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from registries import PASSWORD, USER, Proxy, Registry, registry, registry_with_password
from servers import shown
from test_hub import sharded
from test_registry import kept, name, proxy, server, store

from mstore import Store
from mstore.oci import client, credentials
from mstore.oci.credentials import Credentials, find
from mstore.terms.errors import Unavailable

__all__ = ["name", "proxy", "server", "store"]
BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any credentials."""
    for variable in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def write(path: Path, told: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(told if isinstance(told, str) else json.dumps(told))


def helper(directory: Path, kind: str, answers: dict[str, dict[str, str]]) -> None:
    """A program that gives what a keychain has, as docker's helpers do."""
    directory.mkdir(exist_ok=True)
    path = directory / f"docker-credential-{kind}"
    path.write_text(
        "#!/usr/bin/env python3\nimport json, sys\n"
        f"found = {answers!r}.get(sys.stdin.read())\n"
        "sys.exit('credentials not found in native keychain') if found is None else None\n"
        "print(json.dumps(found))\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry_with_password(tmp_path_factory.mktemp("guarded")) as made:
        yield made


def test_a_password_of_docker_lets_in(
    guarded: Registry, home: Path, store: Store, name: str
) -> None:
    """Without a login, the error says which command makes one; with docker's file, all works."""
    kept(store, sharded(2))
    address = f"oci://{guarded.host}/{name}:v1"
    with pytest.raises(Unavailable, match="wants a login") as refused:
        store.export("x", address, card=False)
    assert refused.value.hint == f"docker login {guarded.host}"
    write(home / ".docker/config.json", {"auths": {guarded.host: {"auth": BASIC}}})
    store.export("x", address, card=False)
    store.add(address, name="y")
    assert store["y"].manifest == store["x"].manifest
    assert guarded.files(f"{name}:v1") == sharded(2)


def test_a_wrong_password_is_told_and_not_shown(
    guarded: Registry, home: Path, store: Store, name: str
) -> None:
    """A password that the registry refuses stands in no error."""
    kept(store, sharded(1))
    wrong = base64.b64encode(b"ada:wrong-secret").decode()
    write(home / ".docker/config.json", {"auths": {guarded.host: {"auth": wrong}}})
    with pytest.raises(Unavailable, match="does not let this user") as refused:
        store.export("x", f"oci://{guarded.host}/{name}:v1", card=False)
    assert refused.value.hint == f"docker login {guarded.host}"
    assert "wrong-secret" not in shown(refused.value)
    assert wrong not in shown(refused.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["password", "identity"])
def test_a_token_service_gives_tokens(
    kind: str,
    home: Path,
    proxy: Proxy,
    server: Registry,
    store: Store,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A registry that wants a token gets one from its service, for the password or the token."""
    kept(store, sharded(2))
    proxy.token = "a.token.of-the-service"
    entry = {"auth": BASIC} if kind == "password" else {"identitytoken": PASSWORD}
    monkeypatch.setenv("DOCKER_CONFIG", str(home / "docker"))
    write(home / "docker/config.json", {"auths": {proxy.host: entry}})
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert server.files(f"{name}:v1") == sharded(2)
    if kind == "password":
        assert set(proxy.logins) == {f"Basic {BASIC}"}
    else:
        told = json.loads(proxy.logins[0])
        assert told["refresh_token"] == [PASSWORD]
        assert told["scope"] == [f"repository:{name}:pull"]
    # A token for each thing that is done, not for each request.
    assert len(proxy.logins) <= 8
    assert max(map(proxy.logins.count, proxy.logins)) <= 8


def test_a_token_that_ends_is_asked_for_again(
    proxy: Proxy, home: Path, server: Registry, store: Store, name: str
) -> None:
    """If a token is refused in the middle, a new one is fetched, and the export goes on."""
    kept(store, sharded(3))
    proxy.token = "first"

    def fault(method: str, path: str, number: int) -> None:
        if number == 9:
            proxy.token = "second"

    proxy.fault = fault
    write(home / ".docker/config.json", {"auths": {proxy.host: {"auth": BASIC}}})
    store.export("x", f"oci://{proxy.host}/{name}:v1", card=False)
    assert proxy.token == "second"
    assert server.files(f"{name}:v1") == sharded(3)


def test_no_password_goes_to_a_service_without_tls(
    home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry elsewhere that names a token service without TLS gets nothing."""
    from mstore.oci.address import ArtifactAddress

    write(home / ".docker/config.json", {"auths": {"h.example": {"auth": BASIC}}})
    registry = client.Registry(ArtifactAddress.parse("oci://h.example/x"))
    for realm in ("http://tokens.example/t", "file:///etc/passwd", "", "//tokens.example"):
        with pytest.raises(Unavailable, match="without TLS"):
            registry._connection._authorized(
                f'Bearer realm="{realm}",service="s"', ("repository:x:pull",)
            )


def test_a_token_goes_to_the_registry_alone(
    proxy: Proxy, home: Path, server: Registry, store: Store, name: str
) -> None:
    """Where a registry sends a client to another host for a blob, no token goes along."""
    kept(store, sharded(1))
    address = f"oci://{proxy.host}/{name}:v1"
    store.export("x", address, card=False)
    write(home / ".docker/config.json", {"auths": {proxy.host: {"auth": BASIC}}})
    with Proxy(server.host) as elsewhere:
        proxy.token = "a-token"
        proxy.elsewhere = elsewhere.host.replace("127.0.0.1", "localhost")
        store.add(address, name="y")
        assert [one for one in elsewhere.log if "/blobs/" in one.path]
        assert elsewhere.authorizations == {None}


# Where credentials are


def test_docker_and_podman(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file that knows the host counts; podman's keys may name a part of a host."""
    key = base64.b64encode

    def auth(user: str) -> dict[str, str]:
        return {"auth": key(f"{user}:pw:{user}".encode()).decode()}

    assert find("h.example", "org/x") is None
    write(home / ".config/containers/auth.json", {"auths": {"h.example": auth("podman")}})
    assert find("h.example", "org/x") == Credentials("podman", "pw:podman")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "run"))
    told = {"h.example": auth("host"), "h.example/org": auth("org"), "h.example/org/x/y": {}}
    write(home / "run/containers/auth.json", {"auths": told})
    assert find("h.example", "org/x") == Credentials("org", "pw:org")
    assert find("h.example", "other/x") == Credentials("host", "pw:host")
    write(home / ".docker/config.json", {"auths": {"https://h.example/v1/": auth("docker")}})
    assert find("h.example", "org/x") == Credentials("docker", "pw:docker")
    write(home / "given.json", {"auths": {"h.example": auth("given")}})
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(home / "given.json"))
    assert find("h.example", "org/x") == Credentials("given", "pw:given")
    assert find("other.example", "org/x") is None


def test_docker_hub_has_an_old_key(home: Path) -> None:
    """Docker's file calls Docker Hub by its first address."""
    write(home / ".docker/config.json", {"auths": {"https://index.docker.io/v1/": {"auth": BASIC}}})
    assert find("docker.io", "library/x") == Credentials(USER, PASSWORD)


def test_helpers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper of the host comes before the store of all hosts, and that before the file."""
    monkeypatch.setenv("PATH", f"{home}/bin", prepend=":")
    helper(
        home / "bin",
        "one",
        {
            "h.example": {"Username": "one", "Secret": "s1"},
            "t.example": {"Username": "<token>", "Secret": "identity"},
        },
    )
    helper(home / "bin", "all", {"o.example": {"Username": "all", "Secret": "s2"}})
    write(
        home / ".docker/config.json",
        {
            "auths": {"f.example": {"auth": BASIC}, "o.example": {}},
            "credHelpers": {"h.example": "one", "t.example": "one"},
            "credsStore": "all",
        },
    )
    assert find("h.example", "x") == Credentials("one", "s1")
    assert find("t.example", "x") == Credentials(None, "identity")
    assert find("o.example", "x") == Credentials("all", "s2")
    assert find("f.example", "x") == Credentials(USER, PASSWORD)
    assert find("none.example", "x") is None


@pytest.mark.parametrize("name", ["../../bin/sh", "a b", "gone"])
def test_helpers_that_cannot_run(name: str, home: Path) -> None:
    """A helper that is missing, or is no name of a program, is an error that names the file."""
    write(home / ".docker/config.json", {"credsStore": name})
    with pytest.raises(Unavailable) as refused:
        find("h.example", "x")
    assert str(home / ".docker/config.json") in str(refused.value)


def test_files_that_cannot_be_read(home: Path) -> None:
    """A file that is no JSON is an error that names it."""
    write(home / ".docker/config.json", "{")
    with pytest.raises(Unavailable, match="cannot be read") as refused:
        find("h.example", "x")
    assert refused.value.hint == "docker login h.example"


def test_credentials_do_not_show() -> None:
    """No text of credentials has the secret."""
    assert "secret" not in repr(Credentials("ada", "secret")) + str(Credentials("ada", "secret"))
    assert credentials.Credentials("ada", "b").basic == "Basic YWRhOmI="


@pytest.mark.rest
def test_a_certificate_that_nobody_trusts(
    tmp_path: Path, store: Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry with another certificate is asked by no other way; SSL_CERT_FILE makes it good."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    own = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *files, *own], check=True, capture_output=True)
    tls = f"  tls: {{certificate: {tmp_path}/cert.pem, key: {tmp_path}/key.pem}}\n"
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    kept(store, sharded(1))
    with registry(tmp_path, tls) as server:
        address = f"oci://localhost:{server.host.rpartition(':')[2]}/{name}:v1"
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED") as refused:
            store.export("x", address, card=False)
        assert "SSL_CERT_FILE" in str(refused.value.hint)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        store.export("x", address, card=False)
        store.add(address, name="y")
    assert store["y"].manifest == store["x"].manifest
