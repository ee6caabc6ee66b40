"""Clock offsets between hosts are measured within bounds that contain the truth, and never wait for long."""

from __future__ import annotations

import socket
import time

import pytest

from scaletrace.collect.clocks import Responder, as_json, measure, offset_of, order_responder, resolve


def free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.bind(("127.0.0.1", 0))
        return int(link.getsockname()[1])


def test_one_ping_pong_bounds_the_offset() -> None:
    """Sent at 1000 and back at 1040 on the own clock, got at 510 and answered at 520 on the other: 490 to 520."""
    expected = (505, 490, 520)
    assert expected == offset_of(sent_ns=1000, got_ns=510, answered_ns=520, back_ns=1040)


@pytest.mark.parametrize("skew_ns", [0, 5_000_000, -20_000_000, 123_000_000_000])
def test_a_known_skew_lies_within_the_bounds(skew_ns: int) -> None:
    """With one clock on both sides but for a known skew, the bounds contain the skew."""
    port = free_udp_port()
    with Responder() as responder:
        responder.start()
        order_responder(responder.port, port)
        found = None
        for _ in range(40):
            found = measure(("127.0.0.1", port), lambda: time.time_ns() + skew_ns)
            if found is not None:
                break
            time.sleep(0.05)
    assert found is not None
    assert found.low_ns <= skew_ns <= found.high_ns
    assert found.high_ns - found.low_ns == found.rtt_ns or found.high_ns - found.low_ns < found.rtt_ns
    assert set(as_json(found) or {}) == {"offset_ns", "low_ns", "high_ns", "rtt_ns", "samples", "at_ns"}


def test_nobody_answers() -> None:
    """A probe without an answer gives up within a fifth of a second, and says so."""
    began = time.monotonic()
    assert measure(("127.0.0.1", free_udp_port())) is None
    assert time.monotonic() - began < 0.2


def test_garbage_is_not_an_answer() -> None:
    """Datagrams of another service on that port are no offsets."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        other.sendto(b"x" * 32, other.getsockname())
        assert measure(other.getsockname()) is None


def test_an_unknown_host_is_no_host() -> None:
    """A name that can't be looked up in time has no address."""
    assert resolve("no-such-host.invalid") is None
