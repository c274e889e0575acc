"""Addresses of clusters: what people write, and the engine that it means.

local:N                           processes of this machine
tcp://HOST:PORT, tls://HOST:PORT  a Dask scheduler
dask:FILE                         the same, by the file that it wrote (scheduler_file)
ray:auto, ray://HOST:PORT         a Ray cluster
slurm:PARTITION[,KEY=VALUE...]    a partition of Slurm, through submitit
"""

from __future__ import annotations

from concurrent.futures import Executor

from mstore.clusters.engine import AnyExecutor, Engine, LocalProcesses
from mstore.terms.errors import BadRequest

_KNOWN = "local:4, tcp://HOST:8786, dask:FILE, ray:auto, ray://HOST:10001, slurm:PARTITION"


def opened(cluster: str | Executor) -> Engine:
    """Return the engine of an address, or of an executor. Raises BadRequest, Unavailable."""
    if not isinstance(cluster, str):
        return AnyExecutor(cluster)
    kind, _, rest = cluster.partition(":")
    match kind:
        case "local":
            if not rest.isdecimal() or not 0 < int(rest) <= 4096:
                raise BadRequest("a number of processes is missing", where=cluster, hint="local:4")
            return LocalProcesses(int(rest))
        case "tcp" | "tls" | "dask" if rest.strip("/"):
            from mstore.clusters.dask import Dask

            return Dask(cluster)
        case "ray" if rest == "auto" or rest.startswith("//"):
            from mstore.clusters.ray import Ray

            return Ray(cluster)
        case "slurm" if rest:
            from mstore.clusters.slurm import Slurm

            return Slurm(cluster)
    raise BadRequest("no address of a cluster", where=cluster, hint=f"one of: {_KNOWN}")
