"""Turns the text of a what-if rule (`gemm*=0.5`, `bandwidth.nic=2x`, `rank3.delay=20ms`) into a Rule."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from scaletrace.errors import UsageError

UNITS_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
CLASSES = ("compute", "comm", "memory", "host", "stall", "all")
EXAMPLES = "gemm*=0.5, comm=3, host=0.25, layer:blocks.3=0.5, bandwidth.nic=2x, latency=0.5, rank3.delay=20ms, overlap=ideal, drop=all_reduce"
_RANK = re.compile(r"rank(\d+)\.?(.*)$")
_TIME = re.compile(r"([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(ns|us|µs|ms|s)$")
_FACTOR = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)x?$")
CLOSE = 0.75
"""A word this much like another one may have been meant (1 is the same)."""
MOST_S = 1_000_000
"""Longest time that a rule may add or take, about twelve days."""


WORDS = ("bandwidth", "latency", "overlap", "drop", "delay", *CLASSES)
"""What a target may be called beside a name in the trace."""


def meant(target: str, names: Iterable[str] = ()) -> str:
    """ "; did you mean bandwidth.nic?" where a target is close to a word of the rules or to a name of the trace; else ""."""
    head, dot, tail = target.partition(".")
    known = {name.lower(): name for name in (*names, *WORDS)}
    found = difflib.get_close_matches(head.strip("*").lower(), known, n=1, cutoff=CLOSE)
    return f"; did you mean {known[found[0]]}{dot}{tail}?" if found and found[0] != head.lower() else ""


class Action(Enum):
    """What a rule does to the nodes that it selects."""

    SCALE = "scale"
    ADD = "add"
    BANDWIDTH = "bandwidth"
    LATENCY = "latency"
    DELAY = "delay"
    PEERS = "peers"
    IDEAL_OVERLAP = "overlap"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Rule:
    """One change. `target` is a class, a name pattern, `layer:PATTERN`, an axis or a tier; "" is everything.

    factor multiplies durations (divides them for BANDWIDTH); time_ns is added to each (ADD) or each step (DELAY, which
    takes a negative time out of what delays the rank).
    """

    text: str
    action: Action
    target: str = ""
    rank: int | None = None
    factor: float = 1.0
    time_ns: int = 0


def parse_rule(text: str) -> Rule:
    """One rule from its text. Raises UsageError that says which part is not understood, with examples."""
    left, sign, right = text.partition("=")
    if not sign or not left.strip() or not right.strip():
        raise UsageError(f"rule {text!r} is not TARGET=VALUE; examples: {EXAMPLES}")
    target, value, rank = left.strip(), right.strip(), None
    found = _RANK.match(target)
    if found is not None:
        rank, target = int(found[1]), found[2]
    if target == "overlap":
        if value != "ideal":
            raise UsageError(f"rule {text!r}: overlap can only be set to ideal")
        return Rule(text, Action.IDEAL_OVERLAP, rank=rank)
    if target == "drop":
        return Rule(text, Action.DROP, value, rank)
    if target == "delay":
        return _delay(text, value, rank)
    head, dot, tail = target.partition(".")
    if head in ("bandwidth", "latency") and dot and not tail:
        raise UsageError(f"rule {text!r}: nothing follows the dot in {target!r}; examples: {EXAMPLES}")
    if head in ("bandwidth", "latency"):
        action = Action.BANDWIDTH if head == "bandwidth" else Action.LATENCY
        return Rule(text, action, tail, rank, _factor(text, value, target))
    time = _TIME.match(value)
    if time is not None:
        return Rule(text, Action.ADD, target, rank, time_ns=_ns(text, time))
    return Rule(text, Action.SCALE, target, rank, _factor(text, value, target))


def _delay(text: str, value: str, rank: int | None) -> Rule:
    if value in ("none", "peers"):
        if rank is None:
            raise UsageError(f"rule {text!r}: say whose delay goes, as in rank3.delay=none")
        return Rule(text, Action.PEERS, rank=rank)
    time = _TIME.match(value)
    if time is None:
        raise UsageError(
            f"rule {text!r}: {value!r} is no time; write it like 20ms, 5us, or none to keep the peers' pace"
        )
    return Rule(text, Action.DELAY, rank=rank, time_ns=_ns(text, time))


def _ns(text: str, time: re.Match[str]) -> int:
    value_ns = float(time[1]) * UNITS_NS[time[2]]
    if not abs(value_ns) <= MOST_S * UNITS_NS["s"]:
        raise UsageError(f"rule {text!r}: {time[0]} is longer than any step; give at most {MOST_S:,} s")
    return round(value_ns)


def _factor(text: str, value: str, target: str) -> float:
    found = _FACTOR.match(value)
    if found is None:
        raise UsageError(
            f"rule {text!r}: {value!r} is neither a factor (0.5, 2x) nor a time (20ms){meant(target)}; examples: {EXAMPLES}"
        )
    factor = float(found[1])
    if not 0 <= factor < float("inf"):
        raise UsageError(f"rule {text!r}: the factor must be a finite number that is not negative")
    return factor
