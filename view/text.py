"""Turns drawing calls into lines of text, so that a test (or a reader) sees exactly the event stream."""

from __future__ import annotations

from typing import TextIO

from scaletrace.parse.events import IntArray
from scaletrace.view import units
from scaletrace.view.sink import FloatArray, Slices


class TextSink:
    """A `Sink` that writes one line an event: kind, track, times in ns, name, category, flows and arguments."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._names: dict[int, str] = {0: ""}

    def process(self, pid: int, name: str) -> None:
        self._out.write(f"process {pid} {units.clean(name)}\n")

    def track(self, name: str, parent: int = 0, order: int = 0, unit: str = "", description: str = "") -> int:
        track = len(self._names)
        path = f"{self._names[parent]}/{units.clean(name)}" if parent else units.clean(name)
        self._names[track] = path
        more = (f" [{unit}]" if unit else "") + (f" -- {units.clean(description)}" if description else "")
        self._out.write(f"track {track} #{order} {path}{more}\n")
        return track

    def slices(self, batch: Slices) -> None:
        extras: list[list[str]] = [[] for _ in range(len(batch))]
        if batch.flow is not None:
            for row, flow in zip(batch.flow.rows.tolist(), batch.flow.ids.tolist(), strict=True):
                extras[row].append(f"~{flow}")
        for argument in batch.arguments:
            for row, value in zip(argument.rows.tolist(), argument.values.tolist(), strict=True):
                shown = units.clean(argument.texts[int(value)]) if argument.texts else value
                extras[row].append(f"{argument.key}={shown}")
        for row, extra in enumerate(extras):
            name, category = batch.names[int(batch.name[row])], batch.names[int(batch.category[row])]
            times = f"{batch.start_ns[row]}..{batch.end_ns[row]}"
            tail = "".join(f" {part}" for part in extra)
            self._out.write(f"slice {batch.track[row]} {times} {units.clean(name)} ({category}){tail}\n")

    def counter(self, track: int, at_ns: IntArray, values: IntArray | FloatArray) -> None:
        steps = " ".join(f"{t}:{v:g}" for t, v in zip(at_ns.tolist(), values.tolist(), strict=True))
        self._out.write(f"counter {track} {steps}\n")

    def close(self) -> None:
        self._out.flush()
