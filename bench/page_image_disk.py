"""The section of bench/image_disk.py."""

from __future__ import annotations

from tables import Told, aim, machine, percent, table, wall

MOST_BYTES = 0.35
MOST_VIRTUAL = 0.01
TRUE_BYTES = 6.94e9
"""SDXL's file in float16."""

ABOUT = """\
{machine} `python bench/image_disk.py WORK --mecha ... --peers ...`. {originals} originals, a base
and fine-tunes of it, and {mixes} mixes, each one file of {tensors:,} tensors with SDXL's names,
widths divided by {divide}: {model:.0f} MB each, {plain:.2f} GB in all. Fine-tunes move the denoiser
by 2 to 10 % of the weights' deviation (each tensor by half as much to twice as much), text encoders
by 0 to 3 %, and keep the VAE. Mixes are sums of two, added differences, block weights, LoRAs, and
mixes of mixes. A plain script made them (safetensors and numpy, float32, rounded to float16).
Processes ran in turn, {runs} of each; load of the machine before them {load:.1f}.
"""
WAYS = {
    "added": "mstore, all files added",
    "added, base first": "mstore, all files added, `--base` given",
    "merged": "mstore, originals added, mixes merged",
    "virtual": "mstore, originals added, mixes virtual",
}
KINDS = {
    "sum": "sum of two",
    "difference": "add difference",
    "blocks": "block weights",
    "lora": "LoRA baked in",
    "originals": "originals",
    "of mixes": "mixes of mixes",
}
PROGRAMS = {
    "plain": "plain script",
    "sd-mecha": "sd-mecha",
    "merge": "mstore merge",
    "virtual": "mstore merge --virtual",
}


def _seconds(kind: str, found: Told) -> list[tuple[str, ...]]:
    return [
        (
            kind,
            name,
            wall(found[key]),
            f"{found[key]['cpu']:.2f}",
            f"{found[key]['bytes'] / 1e6:.2f}" if "bytes" in found[key] else "",
        )
        for key, name in PROGRAMS.items()
        if key in found
    ]


def section(told: Told) -> str:
    """The section of the page."""
    plain = told["plain_bytes"]
    about = ABOUT.format(
        machine=machine(told),
        load=told["load"],
        runs=told["seconds"]["sum"]["plain"]["runs"],
        model=told["model_bytes"] / 1e6,
        plain=plain / 1e9,
        **{name: told[name] for name in ("originals", "mixes", "tensors", "divide")},
    )
    rows = [
        (name, f"{one['stored_bytes'] / 1e9:.2f}", percent(one["stored_bytes"] / plain), "")
        for name, one in told["beside"].items()
    ]
    for key, name in WAYS.items():
        one = told["ways"][key]
        mix = f"{one['bytes_a_mix'] / 1e6:.2f}" if "bytes_a_mix" in one else ""
        rows.append((name, f"{one['stored_bytes'] / 1e9:.2f}", _share(told, key), mix))
    added = told["ways"]["added, base first"]
    kinds = ", ".join(
        f"{KINDS[kind]} {percent(share, 0)}" for kind, share in added["shares"].items()
    )
    wide = told["wide"]
    timed = [row for kind, one in told["seconds"].items() for row in _seconds(KINDS[kind], one)]
    timed += _seconds(f"sum of two, {wide['model_bytes'] / 1e6:.0f} MB each", wide["sum"])
    mount = told["ways"]["virtual"]["mount"]
    stored, virtual = told["ways"]["merged"], told["ways"]["virtual"]
    fixed = virtual["bytes_a_mix"]
    files = added["stored_bytes"] / plain
    first = (
        f"What the store keeps of a file that is added, the base named: {kinds}. Without `--base`"
        f" the first file by name is the base of all"
        f" ({', '.join(told['ways']['added']['bases'])}).\n"
    )
    inside = (
        f"In one process of Python a merge takes {stored['seconds']['median']:.2f} s"
        f" ({stored['cpu_a_mix']:.2f} s of processor time), a virtual one"
        f" {virtual['seconds']['median']:.2f} s ({virtual['cpu_a_mix']:.2f})."
        f" Left out: {_left_out(told)}.\n"
    )
    shown = (
        f"`mount --models` of {mount['listed']} models, {told['mixes']} of them virtual: the"
        f" first listing with sizes takes {mount['list_seconds']:.2f} s; reading an original"
        f" {mount['original, first']:.2f} s, a virtual mix {mount['sum, first']:.2f} s, a"
        f" virtual mix of mixes {mount['of mixes, first']:.2f} s.\n"
    )
    return "\n".join(
        [
            "## A disk of image models\n",
            about,
            table(("", "GB", "of the files", "MB a mix"), rows),
            first,
            _seconds_table(timed),
            inside,
            shown,
            aim(
                f"files from elsewhere in {percent(MOST_BYTES, 0)} of their bytes"
                f" ({percent(files)})",
                met=files <= MOST_BYTES,
            ),
            aim(
                f"the disk in {percent(MOST_BYTES, 0)} of its bytes, mixes virtual"
                f" ({_share(told, 'virtual')})",
                met=virtual["stored_bytes"] <= MOST_BYTES * plain,
            ),
            aim(
                f"a virtual mix in {percent(MOST_VIRTUAL, 0)} of its bytes:"
                f" {fixed / 1e6:.2f} MB whatever the widths, {percent(fixed / TRUE_BYTES, 2)} of"
                f" SDXL's {TRUE_BYTES / 1e9:.2f} GB, {percent(fixed / wide['model_bytes'], 2)} of"
                f" {wide['model_bytes'] / 1e6:.0f} MB",
                met=fixed / wide["model_bytes"] <= MOST_VIRTUAL,
            ),
        ]
    )


def _seconds_table(rows: list[tuple[str, ...]]) -> str:
    return table(("mix", "program", "wall s", "CPU s", "MB stored"), rows)


def _share(told: Told, way: str) -> str:
    return percent(told["ways"][way]["stored_bytes"] / told["plain_bytes"])


def _left_out(told: Told) -> str:
    left = ", ".join(f"{name} ({why})" for name, why in told["left_out"].items())
    return left or "nothing"
