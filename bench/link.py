"""A slow link to servers that run in a network namespace of their own, for `lazy.py`. Needs root.

    python bench/link.py NAME MEGABITS MILLISECONDS     (started by `Link`; ends with its input)

Kernels without netem have nothing that delays packets. So this process is the wire: a tun device
here and one in the namespace, and each packet that goes into one comes out of the other after
its share of the rate and half a round trip. Of what waits for its turn, WAITING bytes have room, as
in a router; the rest is dropped. Loopback and other devices are not touched. TCP is the kernel's,
with all its slow starts: packets are larger than Ethernet's, so that Python can pass them on, and
the first window is as many bytes as it is there.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

NEAR, FAR = "198.18.77.1", "198.18.77.2"
"""Addresses that RFC 2544 keeps for benchmarks."""
MTU = 7500
FIRST_WINDOW = 2
"""Packets: 15,000 bytes, as ten of 1500."""
WAITING = 1 << 20
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000


class Link:
    """A link of so many megabits a second, and its round trip in milliseconds."""

    def __init__(self, megabits: float, milliseconds: float) -> None:
        self.name = f"slow{os.getpid()}"
        self.megabits, self.milliseconds = megabits, milliseconds
        self.host = FAR

    def beyond(self, command: Sequence[str]) -> list[str]:
        """A command that runs at the far end: what it does there is not slowed down."""
        return ["ip", "netns", "exec", self.name, *command]

    @contextmanager
    def up(self) -> Iterator[Link]:
        """The link, until the end; whatever happens, nothing of it stays."""
        words = [self.name, str(self.megabits), str(self.milliseconds)]
        wire = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert wire.stdin is not None
        assert wire.stdout is not None
        try:
            if wire.stdout.readline() != "ready\n":
                raise SystemExit("the link is not there: it needs root, tun and ip")
            yield self
        finally:
            wire.stdin.close()
            wire.wait()


class _Way:
    """One direction."""

    def __init__(self, source: int, target: int, rate: float, delay: float) -> None:
        self.source, self.target = source, target
        self._rate, self._delay = rate, delay
        self._free = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        """Read what was sent."""
        with suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, MTU + 64)
                begin = max(now, self._free)
                if (begin - now) * self._rate < WAITING:
                    self._free = begin + len(packet) / self._rate
                    self._waiting.append((self._free + self._delay, packet))

    def give(self, now: float) -> float:
        """Write what has arrived; return when the next packet does."""
        while self._waiting and self._waiting[0][0] <= now:
            with suppress(OSError):
                os.write(self.target, self._waiting.popleft()[1])
        return self._waiting[0][0] if self._waiting else now + 1


def _device(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return file


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, stdout=sys.stderr)


def main() -> None:
    name, megabits, milliseconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    near, far = f"{name}a", f"{name}b"
    _ip("netns", "add", name)
    try:
        ends = _device(near), _device(far)
        _ip("link", "set", far, "netns", name)
        _ip("-n", name, "link", "set", "lo", "up")
        for device, own, other, where in ((near, NEAR, FAR, ()), (far, FAR, NEAR, ("-n", name))):
            _ip(*where, "link", "set", device, "mtu", str(MTU), "txqueuelen", "2000", "up")
            _ip(*where, "addr", "add", own, "peer", other, "dev", device)
            window = ("initcwnd", str(FIRST_WINDOW))
            _ip(*where, "route", "replace", other, "dev", device, "src", own, *window)
        # A wire does not wait for other processes.
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        print("ready", flush=True)
        _pass_on(ends, megabits * 1e6 / 8, milliseconds / 2000)
    finally:
        _ip("netns", "del", name)


def _pass_on(ends: tuple[int, int], rate: float, delay: float) -> None:
    """Be the wire until the input ends."""
    ways = [_Way(ends[0], ends[1], rate, delay), _Way(ends[1], ends[0], rate, delay)]
    while True:
        now = time.perf_counter()
        wait = min(way.give(now) for way in ways) - time.perf_counter()
        ready, _, _ = select.select([0, *ends], [], [], max(0.0, wait))
        if 0 in ready:
            return
        now = time.perf_counter()
        for way in ways:
            if way.source in ready:
                way.take(now)


if __name__ == "__main__":
    main()
