"""Turns a good trace into a damaged or odd one, one fault at a time, as real captures are found to be.

A fault is written KIND, KIND:RANK or KIND:RANK:AMOUNT; without a rank it concerns every rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from scaletrace.errors import UsageError
from scaletrace.traces.synth.kineto import Event
from scaletrace.traces.synth.schedule import Condition

_UNITS_NS = (("ns", 1), ("us", 1_000), ("µs", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000))
"""Units of a time, those that end like another one first."""


@dataclass(frozen=True, slots=True)
class Amount:
    """What the number of a fault means, its default, and between which values it makes sense; no meaning: no number.

    A meaning that begins with "ns" is a time, which may be written with a unit (20ms).
    """

    meaning: str = ""
    default: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def is_time(self) -> bool:
        return self.meaning.startswith("ns ")

    def read(self, text: str) -> float:
        """The number in `text`; a time in ns from a number with or without a unit. Raises ValueError for others."""
        number = text.strip()
        if self.is_time:
            for unit, ns in _UNITS_NS:
                if number.endswith(unit):
                    return float(number.removesuffix(unit)) * ns
        return float(number)


_HOUR_NS = 3.6e12
_SHARE = (0.02, 0.0, 1.0)
FAULTS = {
    "slow": Amount("factor on the kernel times of the rank", 1.2, 0.01, 100),
    "jitter": Amount("standard deviation of its kernel times, as a share of them", 0.05, 0, 2),
    "delay": Amount("ns of host time before each of its steps", 20_000_000, 0, _HOUR_NS),
    "loader-stall": Amount("ns that it waits for the data loader, each step", 20_000_000, 0, _HOUR_NS),
    "late-launch": Amount("ns that each of its launches takes longer", 500_000, 0, 1e9),
    "clock": Amount("ns by which its clock is ahead", 2_000_000, -_HOUR_NS, _HOUR_NS),
    "drift": Amount("parts in a million by which its clock is fast", 50, -100_000, 100_000),
    "missing": Amount(),
    "late-start": Amount("steps that it does not record", 1, 0, 1e6),
    "lost-kernels": Amount("share of kernels without a record", *_SHARE),
    "lost-launches": Amount("share of launches without a record", *_SHARE),
    "lost-ops": Amount("share of operators without a record", *_SHARE),
    "zero-duration": Amount("share of kernels recorded without a duration", *_SHARE),
    "shuffled": Amount(),
    "crossing": Amount("share of operators that end in the next one", *_SHARE),
    "truncated": Amount("share of the file that is kept", 0.7, 0, 1),
    "not-a-number": Amount(),
    "bare-quote": Amount(),
    "trailing-comma": Amount(),
    "old-torch": Amount(),
    "no-sequence": Amount(),
    "no-sync-events": Amount(),
    "no-shapes": Amount(),
    "no-modules": Amount(),
    "twice": Amount(),
}
"""Every fault and what its number means."""


def _time(value_ns: float) -> str:
    """ns in the largest unit that leaves at least one of it."""
    for unit, ns in (("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000)):
        if abs(value_ns) >= ns:
            return f"{value_ns / ns:g} {unit}"
    return f"{value_ns:g} ns"


def _example(known: Amount) -> str:
    """An amount as a user may write it."""
    return _time(known.default).replace(" ", "") if known.is_time else f"{known.default or 1:g}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `rank` -1 is every rank."""

    kind: str
    rank: int = -1
    amount: float = 0.0

    @staticmethod
    def parse(text: str) -> Fault:
        """Read KIND[:RANK[:AMOUNT]]; raises UsageError naming what is known, or what the amount may be."""
        kind, _, rest = text.partition(":")
        rank, _, amount = rest.partition(":")
        if kind not in FAULTS:
            raise UsageError(f"no fault {kind!r}; known: {', '.join(FAULTS)}")
        known = FAULTS[kind]
        try:
            fault = Fault(kind, int(rank) if rank else -1, known.read(amount) if amount else known.default)
        except ValueError as error:
            raise UsageError(
                f"fault {text!r}: write {kind}:RANK:AMOUNT with numbers, as in {kind}:0:{_example(known)}"
            ) from error
        if amount and not known.meaning:
            raise UsageError(f"fault {text!r}: {kind} takes no amount; write {kind} or {kind}:RANK")
        if known.meaning and not known.low <= fault.amount <= known.high:
            raise UsageError(
                f"fault {text!r}: {amount} is not possible; give the {known.meaning}, from {known.low:g} to {known.high:g}"
            )
        if rank and fault.rank < 0:
            raise UsageError(f"fault {text!r}: rank {rank} is not possible; ranks count from 0, none means every rank")
        return fault

    def __str__(self) -> str:
        """What is injected, for a reader: "delay on rank 3: 20 ms of host time before each of its steps"."""
        where = "every rank" if self.rank < 0 else f"rank {self.rank}"
        known = FAULTS[self.kind]
        if not known.meaning:
            return f"{self.kind} on {where}"
        if known.is_time:
            return f"{self.kind} on {where}: {_time(self.amount)} {known.meaning.removeprefix('ns ')}"
        return f"{self.kind} on {where}: {self.amount:g} {known.meaning}"

    def concerns(self, rank: int) -> bool:
        return self.rank in (-1, rank)


def conditions(faults: Sequence[Fault], rank: int) -> Condition:
    """What the faults that change timing make of one rank; several of a kind add up (slow: multiply)."""
    slow, total = 1.0, dict.fromkeys(("jitter", "delay", "loader-stall", "late-launch"), 0.0)
    for fault in faults:
        if not fault.concerns(rank):
            continue
        if fault.kind == "slow":
            slow *= fault.amount
        elif fault.kind in total:
            total[fault.kind] += fault.amount
    return Condition(
        slow, round(total["delay"]), round(total["loader-stall"]), round(total["late-launch"]), total["jitter"]
    )


def damage_events(
    events: Sequence[Event], faults: Sequence[Fault], rank: int, first_step_ns: Sequence[int]
) -> list[Event]:
    """Apply the faults that change single events. `first_step_ns` are the starts of the steps of this rank."""
    out = list(events)
    for number, fault in enumerate(faults):
        if not fault.concerns(rank):
            continue
        dice = random.Random(f"{fault.kind} {rank} {number}")
        if fault.kind == "clock":
            for event in out:
                event.ts_ns += round(fault.amount)
        elif fault.kind == "drift":
            begin = min(event.ts_ns for event in out)
            for event in out:
                end = event.ts_ns + event.dur_ns
                event.ts_ns += round((event.ts_ns - begin) * fault.amount / 1e6)
                event.dur_ns = end + round((end - begin) * fault.amount / 1e6) - event.ts_ns
        elif fault.kind == "late-start":
            cut = first_step_ns[min(int(fault.amount), len(first_step_ns) - 1)]
            out = [event for event in out if event.ph == "M" or event.ts_ns >= cut]
        elif fault.kind in ("lost-kernels", "lost-launches"):
            out = _lose(out, fault, dice)
        elif fault.kind == "lost-ops":
            out = [event for event in out if event.cat != "cpu_op" or dice.random() >= fault.amount]
        elif fault.kind == "zero-duration":
            for event in out:
                if event.cat == "kernel" and dice.random() < fault.amount:
                    event.dur_ns = 0
        elif fault.kind == "crossing":
            for event in out:
                if event.cat == "cpu_op" and dice.random() < fault.amount:
                    event.dur_ns += 7_000
        elif fault.kind == "shuffled":
            dice.shuffle(out)
    return out


def _lose(events: list[Event], fault: Fault, dice: random.Random) -> list[Event]:
    """Drop a share of the kernels (their launches stay) or of the launches (their kernels stay)."""
    cat = "kernel" if fault.kind == "lost-kernels" else "cuda_runtime"
    lost = {
        event.args["correlation"]
        for event in events
        if event.cat == cat
        and "Launch" in (event.name if cat == "cuda_runtime" else "Launch")
        and dice.random() < fault.amount
    }
    return [event for event in events if not (event.cat == cat and event.args.get("correlation") in lost)]


def damage_text(text: str, faults: Sequence[Fault], rank: int) -> str:
    """Apply the faults that break the JSON itself."""
    for fault in faults:
        if not fault.concerns(rank):
            continue
        if fault.kind == "truncated":
            text = text[: round(len(text) * fault.amount)]
        elif fault.kind == "not-a-number":
            text = text.replace('"queued":', '"bandwidth": NaN, "queued":', 1).replace(
                '"queued": 0', '"bandwidth": NaN, "queued": 0', 1
            )
        elif fault.kind == "bare-quote":
            text = text.replace("ProfilerStep#", 'say "hi" ProfilerStep#', 1)
        elif fault.kind == "trailing-comma":
            text = text.replace("\n],\n", ",\n],\n", 1)
    return text
