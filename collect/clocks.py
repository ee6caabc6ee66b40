"""Turns short ping-pongs between hosts into the offset of each host's clock, with bounds that contain the truth.

The launcher on rank 0's host answers, in its own process: no thread, no collective and no store of the job is used.
It listens on UDP at the number of the job's MASTER_PORT, which every rank knows, and is told that number by rank 0.
A probe sends at most `PINGS` datagrams and gives up after `LIMIT_S`, whatever happens at the other end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

PINGS = 24
LIMIT_S = 0.05
REPLY_S = 0.01
_PING = struct.Struct("<8sQ16x")  # as long as the answer, so nobody can use us to amplify
_PONG = struct.Struct("<8sQQQ")
_ORDER = struct.Struct("<8sH")
_ASK, _ANSWER, _SERVE = b"sctrping", b"sctrpong", b"sctrserv"


@dataclass(frozen=True, slots=True)
class Probe:
    """Own clock minus reference clock in ns, at `at_ns` (unix, own clock); the truth lies in [low_ns, high_ns]."""

    offset_ns: int
    low_ns: int
    high_ns: int
    rtt_ns: int
    samples: int
    at_ns: int


def offset_of(sent_ns: int, got_ns: int, answered_ns: int, back_ns: int) -> tuple[int, int, int]:
    """(offset, low, high) of one ping-pong: sent and back are read on the own clock, got and answered on the reference."""
    low, high = sent_ns - got_ns, back_ns - answered_ns
    return (low + high) // 2, low, high


def measure(address: tuple[str, int], clock: Callable[[], int] = time.time_ns) -> Probe | None:
    """Ping the responder at `address` and keep the tightest bounds; None where nobody answers in time."""
    low, high, best_rtt, samples = -(1 << 62), 1 << 62, 1 << 62, 0
    deadline = time.monotonic() + LIMIT_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.settimeout(REPLY_S)
        for number in range(PINGS):
            if time.monotonic() > deadline:
                break
            sent = clock()
            try:
                link.sendto(_PING.pack(_ASK, number), address)
                reply = link.recv(64)
            except OSError:
                continue
            back = clock()
            if len(reply) != _PONG.size:
                continue
            magic, echoed, got, answered = _PONG.unpack(reply)
            if magic != _ANSWER or echoed != number:
                continue
            _, this_low, this_high = offset_of(sent, got, answered, back)
            low, high, samples = max(low, this_low), min(high, this_high), samples + 1
            best_rtt = min(best_rtt, this_high - this_low)
    if not samples or low > high:
        return None
    return Probe((low + high) // 2, low, high, best_rtt, samples, clock())


def resolve(host: str) -> str | None:
    """The address of `host`, looked up beside the main thread so that a slow name server can't hold up the job."""
    found: list[str] = []

    def look_up() -> None:
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(host))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return found[0] if found else None


def order_responder(order_port: int, port: int) -> None:
    """Rank 0 tells the launcher on its own host to answer probes at UDP `port`; a lost message only means no probes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.sendto(_ORDER.pack(_SERVE, port), ("127.0.0.1", order_port))


class Responder:
    """Answers probes from a thread of the launcher; `port` takes orders on loopback.

    The socket is there from the beginning, the threads from `start`, so that the job can be forked in between.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._orders = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._orders.bind(("127.0.0.1", 0))
        self.port: int = self._orders.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._open = True
        self._serving: set[int] = set()

    def start(self) -> None:
        """Begin to take orders."""
        self._start(self._take_orders)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _take_orders(self) -> None:
        self._orders.settimeout(0.2)
        while self._open:
            try:
                text = self._orders.recv(64)
            except TimeoutError:
                continue
            except OSError:
                return
            if len(text) == _ORDER.size and text[:8] == _SERVE:
                port = _ORDER.unpack(text)[1]
                if port not in self._serving:
                    self._serving.add(port)
                    self._start(functools.partial(self._serve, port))

    def _serve(self, port: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
            try:
                link.bind(("", port))
            except OSError:
                return  # taken by somebody else: no probes, which the manifest shows
            link.settimeout(0.2)
            while self._open:
                try:
                    text, sender = link.recvfrom(64)
                except TimeoutError:
                    continue
                got = self._clock()
                if len(text) == _PING.size and text[:8] == _ASK:
                    number = _PING.unpack(text)[1]
                    link.sendto(_PONG.pack(_ANSWER, number, got, self._clock()), sender)

    def close(self) -> None:
        """Stop answering; returns within half a second."""
        self._open = False
        for thread in self._threads:
            thread.join(0.5)
        self._orders.close()


def master() -> tuple[str, int] | None:
    """Where rank 0's host answers: MASTER_ADDR and MASTER_PORT of the job, None where the job has none."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return (host, int(port)) if host and port and port.isdecimal() and 0 < int(port) < 65536 else None


def as_json(probe: Probe | None) -> dict[str, Any] | None:
    """A probe as it stands in the manifest."""
    names = ("offset_ns", "low_ns", "high_ns", "rtt_ns", "samples", "at_ns")
    return {name: getattr(probe, name) for name in names} if probe else None
