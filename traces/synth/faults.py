"""Turns a good trace into a damaged or odd one, one fault at a time, as real captures are found to be.

A fault is written KIND, KIND:RANK or KIND:RANK:AMOUNT; without a rank it concerns every rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from scaletrace.errors import UsageError
from scaletrace.traces.synth.kineto import Event

AMOUNTS = {
    "slow": "1.2",
    "delay": "20000000",
    "clock": "2000000",
    "drift": "50",
    "missing": "",
    "late-start": "1",
    "lost-kernels": "0.02",
    "lost-launches": "0.02",
    "zero-duration": "0.02",
    "shuffled": "",
    "crossing": "0.02",
    "truncated": "0.7",
    "not-a-number": "",
    "bare-quote": "",
    "trailing-comma": "",
    "old-torch": "",
    "no-sequence": "",
    "no-sync-events": "",
    "no-shapes": "",
    "twice": "",
}
"""Every fault with its default amount: slow (× kernel times), delay (ns of host time a step), clock (ns of offset), drift
(ppm), late-start (steps not recorded), shares of events for lost-*, zero-duration and crossing, share of the file kept
for truncated."""

TIMING = frozenset({"slow", "delay"})
STYLE = frozenset({"old-torch", "no-sequence", "no-sync-events", "no-shapes"})
FILES = frozenset({"missing", "twice"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `rank` -1 is every rank."""

    kind: str
    rank: int = -1
    amount: float = 0.0

    @staticmethod
    def parse(text: str) -> Fault:
        """Read KIND[:RANK[:AMOUNT]]; raises UsageError naming what is known."""
        kind, _, rest = text.partition(":")
        rank, _, amount = rest.partition(":")
        if kind not in AMOUNTS:
            raise UsageError(f"no fault {kind!r}; known: {', '.join(AMOUNTS)}")
        try:
            return Fault(kind, int(rank) if rank else -1, float(amount or AMOUNTS[kind] or 0))
        except ValueError as error:
            raise UsageError(
                f"fault {text!r}: write {kind}:RANK:AMOUNT with numbers, as in {kind}:0:{AMOUNTS[kind] or 1}"
            ) from error

    def concerns(self, rank: int) -> bool:
        return self.rank in (-1, rank)


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
                event.ts_ns += round((event.ts_ns - begin) * fault.amount / 1e6)
        elif fault.kind == "late-start":
            cut = first_step_ns[min(int(fault.amount), len(first_step_ns) - 1)]
            out = [event for event in out if event.ph == "M" or event.ts_ns >= cut]
        elif fault.kind in ("lost-kernels", "lost-launches"):
            out = _lose(out, fault, dice)
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
