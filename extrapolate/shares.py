"""Turns a loaded job into what its model is made of: embedding, layers by kind, head, optimizer and the rest, with times.

Needs no graph: kernels count where they were launched, and where there is no device the operators of the host count
for as long as they ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scaletrace.extrapolate.anatomy import Outline, outlined
from scaletrace.extrapolate.layers import Phase, Sections, steps_of
from scaletrace.extrapolate.signatures import launched
from scaletrace.parse.events import Events, Int32Array, IntArray
from scaletrace.parse.job import Job, RankTrace

FloatArray = npt.NDArray[np.float64]
_TALK = ("c10d::", "_c10d_functional::", "gloo:", "c10d_", "nccl:")


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of the model takes in a step of one replica, all its layers together; times in ns.

    count: layers of this kind, 1 for other parts. `other_ns` is neither forward nor backward (optimizer, data, …).
    """

    name: str
    count: int
    is_layer: bool
    forward_ns: int
    backward_ns: int
    other_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class Makeup:
    """The parts of a job's model in model order, then the optimizer and the rest of the step."""

    outline: Outline
    parts: tuple[Part, ...]
    micro_batches: int
    on_device: bool

    def to_json(self) -> dict[str, Any]:
        """The part `layers` of `inspect --json`."""
        outline = self.outline
        return {
            "found": bool(outline.layers),
            "rule": outline.rule,
            "why_not": outline.why or None,
            "layers": outline.layers,
            "micro_batches": self.micro_batches,
            "time_of": "kernels" if self.on_device else "operators",
            "parts": [{name: getattr(part, name) for name in part.__slots__} for part in self.parts],
            "units": [
                {"name": name, "layer": is_layer, "kind": kind or None}
                for name, is_layer, kind in zip(outline.names, outline.is_layer, outline.kind, strict=True)
            ],
        }


def makeup(job: Job) -> Makeup:
    """Layers of a job and what each part takes, averaged over its replicas and steps."""
    stages = stages_of(job)
    sections, outline = outlined(job, stages)
    count = len(outline.names)
    table = np.zeros((count + 1, len(Phase)))
    on_device = False
    steps = 0
    for trace in job.ranks:
        found = sections[trace.rank]
        busy, kernels = _busy(trace, found, outline.shift[trace.rank], count)
        table += busy
        on_device |= kernels
        steps = max(steps, len(steps_of(trace)))
    replicas = max(1.0, len(job.ranks) / (max(stages.values(), default=0) + 1))
    table /= max(1, steps) * replicas
    batches = max((found.micro_batches for found in sections.values()), default=0)
    return Makeup(outline, _parts(outline, table), batches, on_device)


def stages_of(job: Job) -> dict[int, int]:
    """Pipeline stage of each rank: its place in its pipeline group, 0 where there is no pipeline."""
    out = {trace.rank: 0 for trace in job.ranks}
    for group in job.groups:
        if group.axis == "pp":
            out.update({rank: place for place, rank in enumerate(group.members) if rank in out})
    return out


def _busy(trace: RankTrace, found: Sections, shift: Int32Array, count: int) -> tuple[FloatArray, bool]:
    """(ns by unit and Phase, the last row for what has no unit; whether they are kernels') of one rank, all steps."""
    out = np.zeros((count + 1, len(Phase)))
    if not len(found.start_ns):
        return out, False
    launch = launched(trace.events)
    if len(launch.row):
        at = found.at(launch.when_ns)
        unit, phase = found.unit[np.maximum(at, 0)].copy(), found.phase[np.maximum(at, 0)].copy()
        if found.placed is not None:
            place = np.minimum(np.searchsorted(found.placed.row, launch.row), len(found.placed.row) - 1)
            hit = found.placed.row[place] == launch.row
            unit[hit], phase[hit] = found.placed.unit[place[hit]], found.placed.phase[place[hit]]
        taken = np.where(at >= 0, launch.dur_ns, 0.0)
    else:
        unit, phase, taken = found.unit, found.phase, _host_ns(trace.events, found.start_ns)
    place = np.where(unit >= 0, shift[np.maximum(unit, 0)], count)
    np.add.at(out, (place, phase), taken)
    return out, bool(len(launch.row))


def _host_ns(events: Events, start_ns: IntArray) -> FloatArray:
    """Time that operators take in each section, without communication; float64[s]."""
    talks = np.array([text.startswith(_TALK) for text in events.strings] + [False], np.bool_)
    every = events.in_cats("cpu_op", "Operator")
    bounds = np.append(start_ns, np.iinfo(np.int64).max // 2)
    # What encloses a communication call (the hook of a gradient) does not work while it runs.
    working = _upto(events, np.flatnonzero(every), bounds)
    talking = _upto(events, np.flatnonzero(every & talks[events.name]), bounds)
    return np.diff(working - talking)


def _upto(events: Events, rows: IntArray, bounds: IntArray) -> FloatArray:
    """Time that some operators took before each moment, on all threads, nested ones once; float64."""
    out = np.zeros(len(bounds))
    for lane in np.unique(events.lane[rows]):
        mine = rows[events.lane[rows] == lane]
        mine = mine[np.argsort(events.ts_ns[mine], kind="stable")]
        start, reach = events.ts_ns[mine], np.maximum.accumulate(events.end_ns[mine])
        opens = np.append(True, start[1:] > reach[:-1])
        begin, close = start[opens], reach[np.append(np.flatnonzero(opens)[1:] - 1, len(mine) - 1)]
        knots = np.stack([begin, close], axis=1).reshape(-1)
        level = np.append(0.0, np.cumsum(np.stack([close - begin, np.zeros(len(begin))], axis=1).reshape(-1)))[:-1]
        origin = int(knots[0])
        out += np.interp((bounds - origin).astype(np.float64), (knots - origin).astype(np.float64), level)
    return out


def _parts(outline: Outline, table: FloatArray) -> tuple[Part, ...]:
    """A row for each part: units that are no layers by name, layers by kind, then what belongs to no unit."""
    total = max(float(table.sum()), 1e-12)

    def part(name: str, rows: list[int], is_layer: bool, phases: tuple[Phase, ...] = tuple(Phase)) -> Part:
        each = {phase: float(table[rows, int(phase)].sum()) if phase in phases else 0.0 for phase in Phase}
        other = each[Phase.OTHER] + each[Phase.OPTIMIZER]
        return Part(
            name,
            len(rows) if is_layer else 1,
            is_layer,
            round(each[Phase.FORWARD]),
            round(each[Phase.BACKWARD] + each[Phase.RECOMPUTE]),
            round(other),
            sum(each.values()) / total,
        )

    out: list[Part] = []
    labels = [kind if is_layer else name for name, is_layer, kind in zip(
        outline.names, outline.is_layer, outline.kind, strict=True)]  # fmt: skip
    for label in dict.fromkeys(labels):
        rows = [at for at, other in enumerate(labels) if other == label]
        out.append(part(label, rows, outline.is_layer[rows[0]]))
    rest = [len(outline.names)]
    out.append(part("optimizer", rest, False, (Phase.OPTIMIZER,)))
    out.append(part("rest of the step", rest, False, (Phase.OTHER, Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)))
    return tuple(out)
