"""The section of bench/remote.py: push and pull beside s5cmd, restic, hf-xet and git."""

from __future__ import annotations

from tables import MIB, Told, aim, machine, span, table

HEAD = """\
{machine} `python bench/remote.py WORK`. {versions}. Servers on 127.0.0.1: a bucket in memory
(`bench/bucket_server.py`), and nginx with a copy of it for downloads. Each call in its own process,
{rounds} rounds, page cache warm; what is downloaded is synced. Seconds of mstore are those of the
call, without importing it: *process* has that, too. The processors were shared with other work (a
load of 4 to 13 on 2 cores), so wall seconds vary; ratios are medians of those of the rounds.
"""
RATES = """\
### Raw packs and plain files

{plain:.2f} GB of random bytes, {jobs} parts at once; s5cmd as it comes. A pull checks every block
and publishes packs; s5cmd writes files. The rate is s5cmd's seconds by mstore's.
"""
FAMILY = """\
### A family

A base of {millions:.0f} million parameters in bf16 and {experts} fine-tunes, each the base with
noise of {noise:g} of the weights' deviation everywhere: {plain:.2f} GB of plain files.
"""
AGAIN = """\
Nothing changed since the last time (`git fetch` is of a clone on the same disk):
"""
NINTH = """\
A ninth fine-tune pushed to the family that is there, and fetched elsewhere, by what was asked of
the bucket (`lists` and `tables` are those of [the format](format-remote.md)):
"""
MEMORY = """\
### Memory

Resident memory at its peak above that of the process before the call, MiB; raw packs as above.
"""
LEAST_RATE, MOST_SHARE, MOST_SECONDS, MOST_REQUESTS, MOST_MEMORY = 0.9, 0.35, 1.0, 3, 256
PROGRAMS = {"s5cmd": "s5cmd, plain files"}


def section(told: Told) -> str:
    """The section of bench/remote.py."""
    versions = ", ".join(told["versions"].values())
    head = HEAD.format(machine=machine(told), versions=versions, rounds=told["rounds"])
    parts = ["## Remotes: push and pull\n", head]
    if "rates" in told:
        parts += _rates(told["rates"])
    if "family" in told:
        parts += _family(told["family"])
    if "memory" in told:
        parts += _memory(told["memory"])
    return "\n".join(parts)


def _rates(told: Told) -> list[str]:
    plain = told["plain_bytes"]
    rows = []
    for work, found in told["works"].items():
        for name in ("mstore", "s5cmd"):
            one = found[name]
            rows.append(
                (
                    work,
                    name,
                    *(span(one[key]) for key in ("wall", "cpu", "process")),
                    f"{plain / one['wall']['median'] / 1e6:.0f}",
                )
            )
        keys = ("rate_wall", "rate_cpu", "rate_process")
        rows.append((work, "rate", *(span(found[key]) for key in keys), ""))
    return [
        RATES.format(plain=plain / 1e9, jobs=told["jobs"]),
        table(("work", "", "wall s", "CPU s", "process s", "MB/s"), rows),
        *(
            aim(
                f"{work} at {LEAST_RATE} of s5cmd's rate ({found['rate_wall']['median']:.2f})",
                met=found["rate_wall"]["median"] >= LEAST_RATE,
            )
            for work, found in told["works"].items()
        ),
    ]


def _family(told: Told) -> list[str]:
    plain, sent = told["plain_bytes"], told["sent_bytes"]
    share = sent["mstore"] / plain
    others = [size for name, size in sent.items() if name != "mstore"]
    again = told["again"]
    rows = [
        (name, *(span(one[key]) for key in ("wall", "cpu", "process")), _count(one))
        for name, one in again.items()
    ]
    ours = [one for name, one in again.items() if name.startswith(("push", "fetch"))]
    asked = [
        (work, kind, f"{one['requests']}", f"{one['objects']}", f"{one['bytes']:,}")
        for work, key in (("push", "ninth"), ("fetch", "ninth fetched"))
        for kind, one in told[key]["requests"].items()
    ]
    return [
        FAMILY.format(
            millions=told["millions"],
            experts=told["experts"],
            noise=told["noise"],
            plain=plain / 1e9,
        ),
        table(
            ("program", "sent MB", "of plain"),
            [
                (PROGRAMS.get(name, name), f"{size / 1e6:.1f}", f"{size / plain:.3f}")
                for name, size in sent.items()
            ],
        ),
        aim(
            f"at most {MOST_SHARE} of plain, and less than all ({share:.3f})",
            met=share <= MOST_SHARE and sent["mstore"] < min(others),
        ),
        AGAIN,
        table(("call", "wall s", "CPU s", "process s", "requests"), rows),
        aim(
            f"under {MOST_SECONDS:g} s and at most {MOST_REQUESTS} requests",
            met=all(
                one["wall"]["median"] < MOST_SECONDS and one["requests"] <= MOST_REQUESTS
                for one in ours
            ),
        ),
        NINTH,
        table(("work", "what", "requests", "objects", "bytes"), asked),
    ]


def _count(one: Told) -> str:
    return f"{one['requests']:.0f}" if "requests" in one else ""


def _memory(told: Told) -> list[str]:
    most = max(size for one in told.values() for size in one.values())
    return [
        MEMORY,
        table(
            ("jobs", "push", "clone"),
            [
                (jobs, *(f"{one[key] / MIB:.0f}" for key in ("push", "clone")))
                for jobs, one in told.items()
            ],
        ),
        aim(
            f"at most {MOST_MEMORY} MiB for any number of jobs ({most / MIB:.0f})",
            met=most <= MOST_MEMORY * MIB,
        ),
    ]
