"""Makes core.json and daskjob.json out of two packages of PyPI.

    pip download --no-deps -d DIR kubernetes-validate==1.37.0 dask-kubernetes==2026.3.0
    python tests/data/kubernetes/make.py DIR

README.md says what these files are, and whose. rayjob.json is written by hand.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
CORE = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
DASK = "dask_kubernetes/operator/deployment/helm/dask-kubernetes-operator/crds/daskjob.yaml"
WANTED = ("ConfigMap", "PodSpec", "PodTemplateSpec", "ServiceSpec")
SAYS_NOTHING = {"description", "$schema", "x-kubernetes-group-version-kind"}


def main() -> None:
    """Write both files."""
    packages = Path(sys.argv[1])
    core = json.loads(_read(packages, "kubernetes_validate", CORE))["$defs"]
    _write("core.json", _closure(core, [f"io.k8s.api.core.v1.{name}" for name in WANTED]))
    crd = yaml.safe_load(_read(packages, "dask_kubernetes", DASK))
    [version] = crd["spec"]["versions"]
    _write("daskjob.json", _with_one_pod(_bare(version["schema"]["openAPIV3Schema"])))


def _read(packages: Path, name: str, inside: str) -> bytes:
    [wheel] = packages.glob(f"{name}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(inside)


def _closure(definitions: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """These definitions, and those that they name."""
    found: dict[str, Any] = {}
    while names:
        name = names.pop()
        if name not in found:
            found[name] = _bare(definitions[name])
            names += _named(found[name])
    return dict(sorted(found.items()))


def _named(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for one in schema.values():
            yield from _named(one)
    elif isinstance(schema, list):
        for one in schema:
            yield from _named(one)


def _bare(schema: Any, *, are_names: bool = False) -> Any:
    """A schema without what validates nothing. are_names: the keys are those of a manifest."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: _bare(one, are_names=key == "properties" and not are_names)
        for key, one in schema.items()
        if are_names or key not in SAYS_NOTHING
    }
    if isinstance(kept.get("$ref"), str) and not are_names:
        kept["$ref"] = f"#/$defs/{kept['$ref'].rpartition('/')[2]}"
    return kept


def _with_one_pod(crd: dict[str, Any]) -> dict[str, Any]:
    """Definitions of a DaskJob, with one copy of the specification of a pod instead of three."""
    spec = crd["properties"]["spec"]["properties"]
    cluster = spec["cluster"]["properties"]["spec"]["properties"]
    holders = [spec["job"], cluster["worker"], cluster["scheduler"]]
    pods = [holder["properties"]["spec"] for holder in holders]
    # The operator's patch adds defaults to them; nothing else may differ.
    assert len({json.dumps(_without_defaults(pod), sort_keys=True) for pod in pods}) == 1
    for holder in holders:
        holder["properties"]["spec"] = {"$ref": "#/$defs/PodSpec"}
    return {"DaskJob": crd, "PodSpec": _without_defaults(pods[0])}


def _without_defaults(schema: Any, *, are_names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_without_defaults(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_defaults(one, are_names=key == "properties" and not are_names)
        for key, one in schema.items()
        if are_names or key != "default"
    }


def _write(name: str, definitions: dict[str, Any]) -> None:
    """Write definitions, one a line."""
    rows = (f"{json.dumps(key)}: {json.dumps(one)}" for key, one in definitions.items())
    (HERE / name).write_text('{"$defs": {\n' + ",\n".join(rows) + "\n}}\n")


if __name__ == "__main__":
    main()
