"""`mstore mount`: a snapshot, or all of them, as an ordinary directory."""

from __future__ import annotations

import os
import shlex
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from mstore_cli import completion, user_config
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument, Option
from mstore_cli.output import Screen, near
from mstore_cli.session import Session, own_endpoints
from mstore_fuse.driver import DriverName, MountInfo, Verify

# By default both prefetch from network file systems only (docs.vllm.ai/en/latest/api/vllm/config,
# docs.sglang.io/docs/advanced_features/model_loading).
SERVING = (
    "--safetensors-load-strategy=prefetch (vLLM), --weight-loader-prefetch-checkpoints (SGLang)"
)


@command(
    example="mstore mount llama/merged /mnt/merged",
    failure="an error; nothing is mounted",
)
def mount(
    session: Session,
    target: Annotated[
        tuple[str, ...],
        Argument(
            metavar="[REF[:MODEL]] DIR",
            help="The snapshot, or one model of it, and an empty directory; with --all only the "
            "directory; with --adapters and --models a pattern of refs [default: all] and the "
            "directory.",
            shell_complete=completion.mounted,
        ),
    ],
    everything: Annotated[
        bool, Option("--all", help="Show the whole store: refs/... and snapshots/ID/...")
    ] = False,
    adapters: Annotated[
        bool,
        Option(
            "--adapters",
            help="Show the branches and tags that are LoRA adapters, as vLLM and LoRAX look for "
            "them: DIR/REF/adapter_config.json.",
        ),
    ] = False,
    models: Annotated[
        bool,
        Option(
            "--models",
            help="Show the models of one file that branches and tags have, as ComfyUI and A1111 "
            "look for them: DIR/REF.safetensors.",
        ),
    ] = False,
    served_base: Annotated[
        str | None,
        Option(
            "--served-base",
            metavar="NAME",
            help="With --adapters: what their configs call the base, the name by which it is "
            "served [default: as they say].",
        ),
    ] = None,
    foreground: Annotated[
        bool, Option("--foreground", help="Stay, until unmounted or interrupted.")
    ] = False,
    driver: Annotated[
        DriverName,
        Option(
            "--driver",
            help="fuse: a process serves it; erofs: the kernel reads the packs (root, stored raw); "
            "auto: erofs where it works, else fuse.",
        ),
    ] = DriverName.FUSE,
    follow: Annotated[
        bool,
        Option("--follow", help="REF is a name: files opened after it moves are its new ones."),
    ] = False,
    allow_other: Annotated[
        bool, Option("--allow-other", help="Let other users read, too.")
    ] = False,
    show_meta: Annotated[
        bool, Option("--show-meta", help="List .mstore, with manifest.json and lineage.json.")
    ] = False,
    log: Annotated[
        Path | None,
        Option("--log", metavar="FILE", help="Append to FILE what goes wrong [default: syslog]."),
    ] = None,
    cache: Annotated[
        str, Option("--cache", metavar="SIZE", help="Decoded blocks kept in memory.")
    ] = "64MiB",
    verify: Annotated[
        Verify,
        Option(
            "--verify",
            help="once: check each block when it is first read (erofs: all of them at mounting); "
            "always: whenever it is read; never (only erofs): not at all.",
        ),
    ] = Verify.ONCE,
) -> None:
    """Show a snapshot, one model or the store as a directory.

    With --adapters or --models it shows those of the store. The directory is read-only. Paths of
    REF:MODEL begin in the model's directory. The command returns when the mount works. The mount
    stays after you close the shell.
    """
    if everything + adapters + models > 1:
        what = "give one of --all, --adapters and --models"
        raise UsageError(what, hint="mstore mount --help")
    takes = {1} if everything else {1, 2} if adapters or models else {2}
    if len(target) not in takes:
        wanted = "--all takes only DIR" if everything else "give REF and DIR, or --all and DIR"
        raise UsageError(wanted, hint="mstore mount --help")
    revision = target[0] if len(target) == 2 else None
    directory = Path(target[-1])
    from mstore.terms.phrases import Option
    from mstore.terms.sizes import parse_size
    from mstore_fuse.mounts import mount as start_mount
    from mstore_fuse.mounts import unmount as end_mount

    cleared: list[MountInfo] = []

    def ready(info: MountInfo) -> None:
        def human(screen: Screen) -> None:
            shown = info.revision or "the whole store"
            place = near(info.mountpoint)
            end = "Ctrl-C" if foreground else f"mstore unmount {shlex.quote(place)}"
            for stale in cleared:
                was = stale.revision or "the whole store"
                screen.line(f"cleared a stale mount of {was}: its process had ended")
            by = "" if info.pid else " by the kernel"
            screen.line(f"mounted {shown} at {place}{by}", style="green")
            if by and verify is Verify.NEVER:
                screen.line("its blocks were not checked: a damaged pack shows wrong bytes")
            screen.line(f"to end it: {end}")
            if adapters:
                screen.line(f"for vLLM: VLLM_LORA_RESOLVER_CACHE_DIR={shlex.quote(place)}")
            elif models:
                quoted = shlex.quote(place)
                screen.line(f"for A1111: --ckpt-dir {quoted}; ComfyUI: extra_model_paths.yaml")
            else:
                screen.line(f"to load fast: {SERVING}")

        try:
            session.output.emit(info, ids=[info.mountpoint], human=human)
            notify_ready()
        except BaseException:
            # End a mount that could not be reported: the user would not know to unmount it.
            end_mount(info.mountpoint)
            raise

    start_mount(
        session.store_path(),
        revision,
        directory,
        driver=driver,
        foreground=foreground,
        on_ready=ready,
        on_cleared=cleared.append,
        allow_other=allow_other,
        log=log,
        cache_bytes=parse_size(cache, option=Option("cache_bytes")),
        verify=verify,
        follow=follow,
        adapters=adapters,
        models=models,
        served_base=served_base,
        show_meta=show_meta,
        endpoints=own_endpoints(),
        cache_size=user_config.cache_size(),
    )


def notify_ready() -> None:
    """Send READY=1 to the socket that systemd names; do nothing elsewhere.

    A service of which systemd hears nothing counts as failed, so a lost message is no error here.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(address)
        sender.send(b"READY=1\n")
