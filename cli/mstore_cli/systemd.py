"""Tells systemd that a service is ready (sd_notify(3)), if it asked to be told."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

VARIABLE = "NOTIFY_SOCKET"


def notify_ready() -> None:
    """Send READY=1 to the socket that systemd names; do nothing elsewhere.

    A service of which systemd hears nothing counts as failed, so a lost message is no error here.
    """
    address = os.environ.get(VARIABLE)
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(address)
        sender.send(b"READY=1\n")
