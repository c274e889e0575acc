"""The manifests of examples/kubernetes: what Kubernetes and the operators would refuse, and what
this project says of them. Nothing here runs on a cluster."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from small_models import small_model

from mstore import Store
from mstore.terms import __version__
from mstore_cli import tree
from mstore_cli.sizes import parse_size

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "kubernetes"
SCHEMAS = ROOT / "tests" / "data" / "kubernetes"
BOTH = ("dask.yaml", "ray.yaml")
CORE = "io.k8s.api.core.v1."
KEYS = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL")
BUCKET = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
"""What a process that reads the bucket must have."""
UNITS = {"": 1, "Mi": 1 << 20, "Gi": 1 << 30}

Manifest = dict[str, Any]


@cache
def manifest(name: str) -> tuple[Manifest, Manifest]:
    """The ConfigMap and the job of a file."""
    script, job = yaml.safe_load_all((EXAMPLES / name).read_text())
    return script, job


# -- schemas -----------------------------------------------------------------------------------


def _definitions(name: str) -> dict[str, Any]:
    found = json.loads((SCHEMAS / name).read_text())["$defs"]
    assert isinstance(found, dict)
    return found


def _strict(schema: Any, *, are_names: bool = False) -> Any:
    """A schema that refuses fields that it does not know, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: _strict(one, are_names=key == "properties" and not are_names)
        for key, one in schema.items()
    }
    if not are_names and "properties" in closed and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed


@cache
def _validator(definition: str) -> jsonschema.Draft202012Validator:
    core = _definitions("core.json")
    dask = _strict(_definitions("daskjob.json"))
    dask["DaskJob"]["properties"] |= {key: {} for key in ("apiVersion", "kind", "metadata")}
    everything = core | dask | _definitions("rayjob.json")
    return jsonschema.Draft202012Validator(
        {"$defs": everything, "$ref": f"#/$defs/{definition}"},
    )


def _broken(definition: str, document: Any, where: str) -> Iterator[str]:
    for error in _validator(definition).iter_errors(document):
        yield f"{where}.{'.'.join(map(str, error.absolute_path))}: {error.message}"


def _of_a_crd(path: Path) -> jsonschema.Draft202012Validator:
    """KubeRay's own definition of a RayJob."""
    crd = yaml.safe_load(path.read_text())
    [schema] = (
        one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"] if one["name"] == "v1"
    )
    closed = _strict(schema)
    closed["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(closed)


# -- what is in a manifest ---------------------------------------------------------------------


def pods(job: Manifest) -> dict[str, Manifest]:
    """The specifications of pods in a job, by what they are for."""
    spec = job["spec"]
    if job["kind"] == "DaskJob":
        cluster = spec["cluster"]["spec"]
        return {
            "coordinator": spec["job"]["spec"],
            "worker": cluster["worker"]["spec"],
            "scheduler": cluster["scheduler"]["spec"],
        }
    cluster = spec["rayClusterSpec"]
    [group] = cluster["workerGroupSpecs"]
    return {
        "coordinator": cluster["headGroupSpec"]["template"]["spec"],
        "worker": group["template"]["spec"],
    }


def containers(job: Manifest) -> Iterator[tuple[str, Manifest, Manifest]]:
    """What each container is for, its pod, and itself."""
    for role, pod in pods(job).items():
        for one in [*pod.get("initContainers", ()), *pod["containers"]]:
            yield f"{role}/{one['name']}", pod, one


def main_container(job: Manifest, role: str) -> Manifest:
    """The one container of a pod that works."""
    [one] = pods(job)[role]["containers"]
    assert isinstance(one, dict)
    return one


def script_of(config: Manifest) -> str:
    """What the coordinator runs."""
    [(name, text)] = config["data"].items()
    assert name == "merge.sh"
    assert isinstance(text, str)
    return text


def commands(script: str) -> list[list[str]]:
    """The words after `mstore` of each of its commands in a script."""
    lines = script.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("mstore ")]


def merge_options(script: str) -> dict[str, str]:
    """The options of the merge, each with the word after it."""
    [words] = [words for words in commands(script) if words[0] == "merge"]
    return {one: words[at + 1] for at, one in enumerate(words[:-1]) if one.startswith("--")}


def size(quantity: str) -> int:
    """The bytes of a quantity of Kubernetes."""
    number, unit = re.fullmatch(r"(\d+)(\w*)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


# -- the rules ---------------------------------------------------------------------------------


def misfits(config: Manifest, job: Manifest) -> Iterator[str]:
    """What the server and the operators would refuse."""
    yield from _broken(f"{CORE}ConfigMap", config, "ConfigMap")
    yield from _broken(job["kind"], job, job["kind"])
    for role, pod in pods(job).items():
        yield from _broken(f"{CORE}PodSpec", pod, role)
    if job["kind"] == "DaskJob":
        service = job["spec"]["cluster"]["spec"]["scheduler"]["service"]
        yield from _broken(f"{CORE}ServiceSpec", service, "service")


def open_keys(job: Manifest) -> Iterator[str]:
    """Keys in the manifest, and containers that lack them."""
    for where, _, one in containers(job):
        for variable in one.get("env", ()):
            is_referred = {"name", "valueFrom"} == variable.keys() and {"secretKeyRef"} == variable[
                "valueFrom"
            ].keys()
            if KEYS.search(variable["name"]) and not is_referred:
                yield f"{where}: {variable['name']} comes from no Secret"
    for role in ("coordinator", "worker"):
        names = {one["name"] for one in main_container(job, role).get("env", ())}
        yield from (f"{role}: {name} is missing" for name in sorted(BUCKET - names))


def misplaced_scratch(job: Manifest) -> Iterator[str]:
    """Processes that would write packs into the image's layer, or more than their volume holds."""
    for role in ("coordinator", "worker"):
        one = main_container(job, role)
        values = {variable["name"]: variable.get("value") for variable in one.get("env", ())}
        mounted = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pods(job)[role]["volumes"]}
        volume = volumes.get(mounted.get(values.get("TMPDIR"), ""), {})
        if "emptyDir" in volume:
            limit = one["resources"]["limits"].get("ephemeral-storage", "0")
            if size(volume["emptyDir"].get("sizeLimit", "0")) > size(limit):
                yield f"{role}: its volume is larger than its limit of ephemeral-storage"
        elif "ephemeral" not in volume:
            yield f"{role}: TMPDIR is no volume of its own"


def too_little_memory(config: Manifest, job: Manifest) -> Iterator[str]:
    """Workers whose slices at a time do not fit into their limit."""
    worker = main_container(job, "worker")
    limits = worker["resources"]["limits"]
    if job["kind"] == "DaskJob":
        words = worker["args"]
        at_a_time = int(words[words.index("--nthreads") + 1])
    else:
        at_a_time = int(limits["cpu"])
    asked = at_a_time * parse_size(merge_options(script_of(config))["--memory"], option="--memory")
    # The framework needs some, too.
    if size(limits["memory"]) * 3 // 4 < asked:
        yield f"worker: {at_a_time} slices at a time take {asked} bytes"


def faults(config: Manifest, job: Manifest) -> list[str]:
    """What is wrong with a manifest; of one that fits no schema, only that."""
    if found := list(misfits(config, job)):
        return found
    return [*open_keys(job), *misplaced_scratch(job), *too_little_memory(config, job)]


@pytest.mark.parametrize("name", BOTH)
def test_a_manifest_is_right(name: str) -> None:
    """A manifest fits the schemas, keys come from a Secret, and TMPDIR is a volume."""
    assert faults(*manifest(name)) == []


def _written_key(job: Manifest) -> None:
    variables = main_container(job, "worker")["env"]
    at = next(at for at, one in enumerate(variables) if one["name"] == "AWS_SECRET_ACCESS_KEY")
    main_container(job, "worker")["env"] = [
        *variables[:at],
        {"name": "AWS_SECRET_ACCESS_KEY", "value": "wJalrXUt"},
        *variables[at + 1 :],
    ]


CHANGES: dict[str, tuple[Callable[[Manifest, Manifest], object], str]] = {
    "misspelt field of a pod": (
        lambda _, job: pods(job)["worker"].update(volume=[]),
        "'volume' was unexpected",
    ),
    "misspelt field of a container": (
        lambda _, job: main_container(job, "coordinator").update(enviroment=[]),
        "'enviroment' was unexpected",
    ),
    "misspelt field of the job": (
        lambda _, job: job["spec"].update(shutDown=True),
        "'shutDown' was unexpected",
    ),
    "number where a name must be": (
        lambda _, job: main_container(job, "worker").update(image=1),
        "1 is not of type 'string'",
    ),
    "container without a name": (
        lambda _, job: pods(job)["worker"].update(containers=[{"image": "i", "resources": {}}]),
        "'name' is a required property",
    ),
    "script that is no text": (
        lambda config, _: config.update(data={"merge.sh": 1}),
        "1 is not of type 'string'",
    ),
    "key in the manifest": (
        lambda _, job: _written_key(job),
        "AWS_SECRET_ACCESS_KEY comes from no Secret",
    ),
    "worker without keys": (
        lambda _, job: main_container(job, "worker").pop("env"),
        "worker: AWS_ACCESS_KEY_ID is missing",
    ),
    "scratch in the layer of the image": (
        lambda _, job: main_container(job, "worker").update(
            volumeMounts=[{"name": "scratch", "mountPath": "/elsewhere"}]
        ),
        "worker: TMPDIR is no volume of its own",
    ),
    "scratch of any size": (
        lambda _, job: pods(job)["worker"].update(
            volumes=[{"name": "scratch", "emptyDir": {"sizeLimit": "900Gi"}}]
        ),
        "worker: its volume is larger than its limit of ephemeral-storage",
    ),
    "slices that do not fit": (
        lambda config, _: config.update(data={"merge.sh": "mstore merge --memory 9GiB x"}),
        "slices at a time take",
    ),
}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("change", CHANGES)
def test_a_broken_manifest_is_found(change: str, name: str) -> None:
    """Each of these mistakes is a fault."""
    apply, told = CHANGES[change]
    config, job = copy.deepcopy(manifest(name))
    apply(config, job)
    found = faults(config, job)
    assert any(told in one for one in found), found


def test_parts_of_a_cluster_are_checked() -> None:
    """What stands beside the pods is checked, too."""
    dask, ray = (copy.deepcopy(manifest(name)[1]) for name in BOTH)
    cluster = dask["spec"]["cluster"]["spec"]
    cluster["worker"]["replicas"] = "eight"
    cluster["scheduler"]["service"]["port"] = 8786
    found = [*_broken("DaskJob", dask, "DaskJob")]
    assert any("'eight' is not of type 'integer'" in one for one in found)
    assert any("'port' was unexpected" in one for one in found)
    cluster = ray["spec"]["rayClusterSpec"]
    cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    cluster["authOptions"]["mode"] = "none"
    del cluster["rayVersion"]
    found = [*_broken("RayJob", ray, "RayJob")]
    for told in ("0 is not of type 'string'", "'none' is not one of", "'rayVersion' is a required"):
        assert any(told in one for one in found), found


@pytest.mark.skipif("MSTORE_RAYJOB_CRD" not in os.environ, reason="it names KubeRay's definition")
def test_a_ray_job_by_kuberays_own_definition() -> None:
    """The same, by the file that KubeRay installs: no package has it."""
    validator = _of_a_crd(Path(os.environ["MSTORE_RAYJOB_CRD"]))
    job = copy.deepcopy(manifest("ray.yaml")[1])
    assert [error.message for error in validator.iter_errors(job)] == []
    pods(job)["worker"]["volume"] = []
    assert [*validator.iter_errors(job)] != []


# -- what belongs together ---------------------------------------------------------------------


def test_one_image() -> None:
    """All containers of both files have one image, of this version, as the Dockerfile makes it."""
    images = {one["image"] for name in BOTH for _, _, one in containers(manifest(name)[1])}
    [image] = images
    assert image.endswith(f":{__version__}")
    dockerfile = (EXAMPLES / "Dockerfile").read_text()
    assert f"docker build -t {image} " in dockerfile
    made = dict(re.findall(r"^ARG (\w+)=(.+)$", dockerfile, re.MULTILINE))
    assert made["MSTORE"] == __version__
    ray = manifest("ray.yaml")[1]["spec"]["rayClusterSpec"]["rayVersion"]
    assert made["RAY"] == ray
    assert f"\nray=={ray}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("name", BOTH)
def test_nobody_is_root(name: str) -> None:
    """Every pod runs as the user of the image."""
    [user] = re.findall(r"^USER (\d+):\d+$", (EXAMPLES / "Dockerfile").read_text(), re.MULTILINE)
    for pod in pods(manifest(name)[1]).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == int(user) > 0
    for where, _, one in containers(manifest(name)[1]):
        assert one["securityContext"]["allowPrivilegeEscalation"] is False, where


@pytest.mark.parametrize("name", BOTH)
def test_the_script_is_there(name: str) -> None:
    """The coordinator's command runs the file that its volume has."""
    config, job = manifest(name)
    coordinator = main_container(job, "coordinator")
    words = coordinator.get("args") or job["spec"]["entrypoint"].split()
    assert words == ["sh", "/scripts/merge.sh"]
    [mounted] = [one for one in coordinator["volumeMounts"] if one["mountPath"] == "/scripts"]
    volumes = {one["name"]: one for one in pods(job)["coordinator"]["volumes"]}
    assert volumes[mounted["name"]]["configMap"]["name"] == config["metadata"]["name"]
    assert script_of(config)


def test_names_that_the_operator_makes() -> None:
    """The address of Dask's scheduler, and what its service selects, follow from the job's name."""
    config, job = manifest("dask.yaml")
    name = job["metadata"]["name"]
    assert merge_options(script_of(config))["--cluster"] == f"tcp://{name}-scheduler:8786"
    assert merge_options(script_of(manifest("ray.yaml")[0]))["--cluster"] == "ray:auto"
    [waits] = pods(job)["coordinator"]["initContainers"]
    assert f'("{name}-scheduler", 8786)' in waits["args"][-1]
    service = job["spec"]["cluster"]["spec"]["scheduler"]["service"]
    assert service["selector"]["dask.org/cluster-name"] == name
    ports = {one["name"] for one in main_container(job, "scheduler")["ports"]}
    assert {one["targetPort"] for one in service["ports"]} == ports


# -- commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_mstore_knows_the_commands(name: str) -> None:
    """Each command of the script is one that `mstore` parses."""
    found = commands(script_of(manifest(name)[0]))
    assert [words[0] for words in found] == ["config", "clone", "merge"]
    for words in found:
        assert tree.parse(words) is not None


def test_both_merge_the_same() -> None:
    """The scripts differ in the cluster's address alone."""
    dask, ray = (script_of(manifest(name)[0]) for name in BOTH)
    assert dask.replace("tcp://mstore-merge-scheduler:8786", "ray:auto") == ray


def test_dask_knows_its_commands() -> None:
    """The lines of worker and scheduler are ones that Dask parses."""
    worker = pytest.importorskip("distributed.cli.dask_worker")
    scheduler = pytest.importorskip("distributed.cli.dask_scheduler")
    job = manifest("dask.yaml")[1]
    for role, module in (("worker", worker), ("scheduler", scheduler)):
        program, command, *words = main_container(job, role)["args"]
        assert (program, command) == ("dask", role)
        assert module.main.make_context(f"dask {role}", list(words)).args == []


def test_dask_knows_its_setting() -> None:
    """The variable of the scheduler is a setting of Dask."""
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    [variable] = main_container(manifest("dask.yaml")[1], "scheduler")["env"]
    given = dask.config.collect_env({variable["name"]: variable["value"]})
    assert given == {"distributed": {"scheduler": {"allowed-failures": 10}}} or given == {
        "distributed": {"scheduler": {"allowed_failures": 10}}
    }
    assert isinstance(dask.config.get("distributed.scheduler.allowed-failures"), int)


@pytest.mark.rest
def test_ray_knows_its_parameters() -> None:
    """What KubeRay passes to `ray start` are options of it."""
    scripts = pytest.importorskip("ray.scripts.scripts")
    cluster = manifest("ray.yaml")[1]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        words = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        assert scripts.start.make_context("ray start", words).args == []


@pytest.mark.rest
def test_the_script_merges(tmp_path: Path) -> None:
    """The script, with a directory for the bucket and processes for the cluster, pushes a merge."""
    remote, models = tmp_path / "remote", ("llama", "chat", "code")
    with Store.init(tmp_path / "lead", block_size=1 << 16) as lead:
        for name in models:
            small_model(tmp_path / name, "1", changed="" if name == "llama" else name)
            lead.add(tmp_path / name, name=name)
        lead.add_remote("origin", remote.as_uri())
        lead.push("origin", every=True)
    script = script_of(manifest("dask.yaml")[0])
    script = script.replace("s3://team-models/llama", remote.as_uri())
    script = re.sub(r"tcp://\S+", "local:2", script)
    (scratch := tmp_path / "scratch").mkdir()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(scratch),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    done = subprocess.run(
        ["sh", "-c", script],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    Store.clone(remote.as_uri(), tmp_path / "reader")
    with Store.open(tmp_path / "reader") as reader:
        assert reader["mixed"].manifest not in {reader[name].manifest for name in models}
