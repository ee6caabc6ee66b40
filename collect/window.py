"""Turns a few steps of a running job into the files of one rank: a Kineto trace, a flight-recorder sidecar, a member record.

All files are written under temporary names and renamed, and the member record last: what it names is complete.
They are plain JSON on a local disk; compressing and moving them is left to another process (`upload`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scaletrace.collect import clocks, facts
from scaletrace.collect.guards import ProfilerWatch
from scaletrace.collect.ranks import Place
from scaletrace.collect.settings import Settings
from scaletrace.collect.sidecar import flight_record

About = Callable[[], dict[str, Any]]
"""Gives what is the same for all ranks of the job."""


class IncompleteTrace(Exception):
    """The file that the profiler wrote does not end as it should (a full disk)."""


class Window:
    """One recording: opened at a step boundary, advanced at each, closed by itself after `count` steps.

    A rank that is not selected goes through the same window without a profiler. `count` None records until `close`.
    """

    def __init__(
        self, settings: Settings, place: Place, name: str, selected: bool, watch: ProfilerWatch, about: About
    ) -> None:
        self._settings, self._place, self._name = settings, place, name
        self._selected, self._watch, self._about = selected, watch, about
        self._profiler: Any = None
        self._trace = ""
        self.boundaries_ns: list[int] = []
        self.first = self.last = 0
        self.opened_ns = self.export_ns = self.start_cost_ns = 0
        self.before: clocks.Probe | None = None
        self.unwatched: dict[str, int] | None = None
        self.finished = False
        self.notes: list[str] = []

    @property
    def folder(self) -> Path:
        """Where this window's raw files go."""
        return Path(self._settings.spool or os.path.join(self._settings.folder, ".spool")) / (self._name or "main")

    def open(self, number: int, first: int, count: int | None) -> None:
        """Begin at the boundary where step `number` begins; steps before `first` warm the profiler up."""
        began = time.perf_counter_ns()
        self.first, self.last = first, first + count - 1 if count is not None else 1 << 62
        self.opened_ns = time.time_ns()
        self.before = probe(self._settings, self._place)
        if self._selected:
            self._profiler = self._make_profiler(number)
            with self._as_ours():
                self._profiler.start()
        if self._settings.fake_world and number < first:
            from scaletrace.collect.fake_world import watch_step

            watch_step()
        self.start_cost_ns = time.perf_counter_ns() - began

    def _make_profiler(self, number: int) -> Any:
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        def schedule(step: int) -> ProfilerAction:
            step = max(step, number)
            if step > self.last:
                return ProfilerAction.NONE
            if step == self.last:
                return ProfilerAction.RECORD_AND_SAVE
            return ProfilerAction.RECORD if step >= self.first else ProfilerAction.WARMUP

        torch: Any = sys.modules["torch"]
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and not under_nsight():
            activities.append(ProfilerActivity.CUDA)
        settings = self._settings
        profiler = profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self._export,
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
            profile_memory=settings.memory,
            experimental_config=sync_events() if len(activities) > 1 else None,
        )
        profiler.step_num = number  # so that ProfilerStep#N is the job's own step number on every rank
        return profiler

    def advance(self, number: int) -> None:
        """A boundary: step `number` begins now. After the last step the files are written."""
        if number > self.first:
            self.boundaries_ns.append(time.time_ns())
        if self._settings.fake_world and number >= self.first:
            from scaletrace.collect.fake_world import end_watch

            end_watch()
        if self._profiler is not None:
            with self._as_ours():
                self._profiler.step()
                if number > self.last:
                    self._profiler.stop()
        if number > self.last:
            self._finish(number, partial=False)

    def close(self, number: int) -> None:
        """End early, at a boundary or at exit, with what there is; a window that recorded nothing leaves no file."""
        if self.finished:
            return
        if self._profiler is not None:
            with self._as_ours():
                self._profiler.stop()
        if number < self.first or (self._selected and not self._trace):
            self.finished = True
            return
        self._finish(number, partial=self.last < 1 << 62)

    def abandon(self) -> None:
        """Stop without writing anything: the user's own profiler is about to start."""
        self.finished = True
        if self._profiler is not None:
            self._profiler.on_trace_ready = None
            with self._as_ours():
                self._profiler.stop()

    def _as_ours(self) -> _Ours:
        return _Ours(self._watch)

    def _export(self, profiler: Any) -> None:
        began = time.perf_counter_ns()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._place.stem}.json"
        part = self.folder / f".{name}.{os.getpid()}.part"
        try:
            with part.open("wb"), Path(os.devnull).open("rb"):
                pass  # Kineto says on stderr what it can't open, so what fails must fail here
            profiler.export_chrome_trace(str(part))
            check_complete(part)
            os.replace(part, self.folder / name)
        finally:
            part.unlink(missing_ok=True)
        self._trace = name
        self.export_ns = time.perf_counter_ns() - began

    def _finish(self, number: int, partial: bool) -> None:
        self.finished = True
        self.folder.mkdir(parents=True, exist_ok=True)
        record = facts.told(lambda: flight_record(self._place.rank, self._place.world_size), None)
        fake = self._settings.fake_world
        if fake:
            from scaletrace.collect.fake_world import recorded_sidecar

            record, note = recorded_sidecar(self.folder / self._trace, self._place.rank, fake)
            self.notes += [note] if note else []
        sidecar = f"fr_rank{self._place.rank:05d}.json" if record is not None else ""
        if record is not None:
            write_json(self.folder / sidecar, record)
        write_json(self.folder / f"member_{self._place.stem}.json", self._member(number, partial, sidecar))

    def _member(self, number: int, partial: bool, sidecar: str) -> dict[str, Any]:
        place = self._place
        return {
            "window": self._name,
            "files": {"trace": self._trace, "sidecar": sidecar},
            "rank": place.rank,
            "world_size": place.world_size,
            "local_rank": place.local_rank,
            "rank_source": place.source,
            "attempt": place.attempt,
            "pid": place.pid,
            "first_step": self.first,
            "last_step": number - 1,
            "partial": partial,
            "boundaries_ns": self.boundaries_ns,
            "unwatched": self.unwatched,
            "start_cost_ns": self.start_cost_ns,
            "export_ns": self.export_ns,
            "clock": {
                "before": clocks.as_json(self.before),
                "after": clocks.as_json(probe(self._settings, place)),
            },
            "versions": facts.told(facts.versions, {}),
            "host": facts.told(facts.host, {}),
            "groups": facts.told(facts.groups, []),
            "meshes": facts.told(facts.meshes, []),
            "notes": self.notes,
            "job": self._about(),
        }


class _Ours:
    """While it is open, calls into the profiler are ours and not a user's."""

    def __init__(self, watch: ProfilerWatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.ours = True
        # Kineto's announcements of start and stop would be new lines on the job's stderr; it reads this once, at first use
        self._quiet = "KINETO_LOG_LEVEL" not in os.environ
        if self._quiet:
            os.environ["KINETO_LOG_LEVEL"] = "6"

    def __exit__(self, *_: object) -> None:
        self._watch.ours = False
        if self._quiet:
            os.environ.pop("KINETO_LOG_LEVEL", None)


def probe(settings: Settings, place: Place) -> clocks.Probe | None:
    """The offset of this host's clock to that of rank 0's host, asked by one rank of each host."""
    address = clocks.master() if settings.probe_port else None
    if address is None or place.local_rank not in (0, None):
        return None
    resolved = clocks.resolve(address[0])
    return clocks.measure((resolved, address[1])) if resolved else None


def under_nsight() -> bool:
    """Whether an Nsight tool holds CUPTI, of which there is only one user a process."""
    return any(name.startswith(("NSYS_", "NV_NSIGHT", "CUDA_INJECTION64_PATH")) for name in os.environ)


def sync_events() -> Any:
    """Kineto's option for CUDA synchronisation events, None where this PyTorch has none."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(enable_cuda_sync_events=True)
    except TypeError:
        return None


def check_complete(path: Path) -> None:
    """Raise IncompleteTrace unless the JSON at `path` ends with its closing brace: Kineto does not notice a full disk."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - 64))
        if not file.read().rstrip().endswith(b"}"):
            raise IncompleteTrace(f"{path}: {size} bytes and no closing brace; is the disk full?")


def write_json(path: Path, document: Any) -> None:
    """Write `document` under a temporary name and rename it: other processes see all of it or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
