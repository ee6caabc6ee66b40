"""Turns a schedule into Kineto files, one a rank, with the events, ids, flows and metadata that torch.profiler writes."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from scaletrace.traces.synth.program import (
    COMPUTE_STREAM,
    DTYPES,
    KINDS,
    Annotation,
    Backward,
    Collective,
    HostCosts,
    HostOp,
    Kernel,
    Sync,
    SynthJob,
    Wait,
)
from scaletrace.traces.synth.schedule import Call, Schedule, Stretch

TRIMONTH_S = 7_889_238
BASE_NS = 224 * TRIMONTH_S * 1_000_000_000
"""baseTimeNanoseconds as Kineto writes it: now, floored to a quarter of a year; here a fixed one, so files repeat."""

START_NS = 1_234_567_890_123_456
"""When the first step begins, after the base."""

LISTED_RANKS = 30
"""Entries of "Process Group Ranks" before Kineto cuts the list."""

_EVENT_NS = 1_500
_INSET_NS = 400
"""How much later an operator starts, and earlier it ends, than the one that calls it."""


@dataclass(frozen=True, slots=True)
class Style:
    """What a writer may leave out or do differently, as versions and settings of torch do.

    sync_events  cuda_sync records (`enable_cuda_sync_events`); sequence  "Seq" of collectives (torch ≥ 2.12)
    groups       pg_config in the header and group metadata on events (torch ≥ 2.4); kernel_metadata  on NCCL kernels
    shapes       "Input Dims" (`record_shapes`); modules  frames of modules (`with_modules`)
    """

    sync_events: bool = True
    sequence: bool = True
    groups: bool = True
    kernel_metadata: bool = True
    shapes: bool = True
    modules: bool = True


@dataclass(slots=True)
class _Ids:
    correlation: int = 1000
    external: int = 1
    event: int = 0
    frame: int = 0

    def next_correlation(self) -> int:
        self.correlation += 1
        return self.correlation

    def next_external(self) -> int:
        self.external += 1
        return self.external


@dataclass(slots=True)
class Event:
    """One record before it is text; times in ns since the base."""

    ph: str
    cat: str
    name: str
    pid: int | str
    tid: int | str
    ts_ns: int
    dur_ns: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    flow: int = -1

    def text(self) -> str:
        """The record as Kineto prints it: microseconds with exactly three decimals."""
        head = f'"ph":"{self.ph}","cat":{json.dumps(self.cat)},"name":{json.dumps(self.name)}'
        where = f'"pid":{json.dumps(self.pid)},"tid":{json.dumps(self.tid)},"ts":{_us(self.ts_ns)}'
        if self.flow >= 0:
            bind = ',"bp":"e"' if self.ph == "f" else ""
            return f'{{{head},"id":{self.flow},{where}{bind}}}'
        if self.ph == "M":
            return f'{{"name":{json.dumps(self.name)},"ph":"M",{where},"args":{json.dumps(self.args)}}}'
        return f'{{{head},{where},"dur":{_us(self.dur_ns)},"args":{json.dumps(self.args)}}}'


def _us(ns: int) -> str:
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


def rank_events(job: SynthJob, plan: Schedule, rank: int, style: Style | None = None) -> list[Event]:
    """All events of one rank, grouped by thread as Kineto writes them, not sorted by time."""
    return list(_Writer(job, plan, rank, style or Style()).events())


class _Writer:
    """Holds what all events of one rank share."""

    __slots__ = ("costs", "device", "ids", "job", "modules", "pid", "plan", "rank", "recorded", "style", "used")

    def __init__(self, job: SynthJob, plan: Schedule, rank: int, style: Style) -> None:
        self.job, self.plan, self.rank, self.style = job, plan, rank, style
        self.costs, self.ids = HostCosts(), _Ids()
        self.pid = 4000 + rank
        self.device = rank % job.gpus_per_node
        self.used: Counter[str] = Counter()
        self.recorded: dict[str, int] = {}
        self.modules: dict[str, int] = {}

    def events(self) -> Iterator[Event]:
        mine = self.plan.plans[self.rank]
        yield from self._names(
            sorted({call.what.stream for call in mine.calls if isinstance(call.what, Kernel | Collective)})
        )
        for step, first, last in mine.steps:
            yield self._range(f"ProfilerStep#{step}", first, last)
        for stretch in mine.ranges:
            yield from self._stretch(stretch)
        for call in mine.calls:
            if isinstance(call.what, HostOp):
                yield self._op(call.what.name, call)
            elif isinstance(call.what, Kernel):
                yield from self._kernel(call, call.what)
            elif isinstance(call.what, Collective):
                yield from self._collective(call, call.what)
            elif isinstance(call.what, Wait):
                yield from self._wait(call, call.what)
            elif isinstance(call.what, Sync):
                yield from self._sync(call)
        begin = START_NS - 50_000
        end = START_NS + self.plan.makespan_ns + 50_000
        yield Event(
            "X", "Trace", "PyTorch Profiler (0)", "Spans", "PyTorch Profiler", begin, end - begin, {"Op count": 0}
        )

    def _at(self, node: int) -> tuple[int, int]:
        """(start, duration) of a node, start counted from the base."""
        return START_NS + self.plan.start_ns[node], self.plan.end_ns[node] - self.plan.start_ns[node]

    def _names(self, streams: Sequence[int]) -> Iterator[Event]:
        at = START_NS
        yield Event("M", "", "process_name", self.pid, 0, at, args={"name": "python3"})
        yield Event("M", "", "process_labels", self.pid, 0, at, args={"labels": "CPU"})
        yield Event("M", "", "thread_name", self.pid, self.pid, at, args={"name": f"thread {self.pid} (python3)"})
        yield Event("M", "", "process_name", self.device, 0, at, args={"name": "python3"})
        yield Event("M", "", "process_labels", self.device, 0, at, args={"labels": f"GPU {self.device}"})
        for stream in streams:
            yield Event("M", "", "thread_name", self.device, stream, at, args={"name": f"stream {stream} "})

    def _range(
        self, name: str, first: int, last: int, cat: str = "user_annotation", more: Mapping[str, Any] | None = None
    ) -> Event:
        start, _ = self._at(first)
        end = START_NS + self.plan.end_ns[last]
        args = {"External id": self.ids.next_external(), "Record function id": 0, **(more or {})}
        return Event("X", cat, name, self.pid, self.pid, start, end - start, args)

    def _stretch(self, stretch: Stretch) -> Iterator[Event]:
        """An annotation, an autograd node with the number of its forward operator, or the frame of a module."""
        what = stretch.what
        if isinstance(what, Annotation):
            yield self._range(what.name, stretch.first, stretch.last)
        elif isinstance(what, Backward):
            name = f"autograd::engine::evaluate_function: {what.name}"
            number = {"Sequence number": stretch.number, "Fwd thread id": 1} if stretch.number >= 0 else {}
            yield self._range(name, stretch.first, stretch.last, "cpu_op", number)
        elif self.style.modules:
            self.ids.frame += 1
            place = self.modules.setdefault(what.name, len(self.modules))
            frame = self._range(f"nn.Module: {what.name}", stretch.first, stretch.last, "python_function")
            frame.args = {"Python parent id": None, "Python module id": place, "Python id": self.ids.frame}
            yield frame

    def _op(
        self, name: str, call: Call, more: Mapping[str, Any] | None = None, cat: str = "cpu_op", inset: int = 0
    ) -> Event:
        start, dur = self._at(call.host)
        args = {"External id": self.ids.next_external(), "Record function id": 0, **(more or {})}
        return Event("X", cat, name, self.pid, self.pid, start + inset, dur - 2 * inset, args)

    def _runtime(self, name: str, ts_ns: int, dur_ns: int, external: int, cbid: int) -> Event:
        args = {"External id": external, "cbid": cbid, "correlation": self.ids.next_correlation()}
        return Event("X", "cuda_runtime", name, self.pid, self.pid, ts_ns, dur_ns, args)

    def _kernel(self, call: Call, what: Kernel) -> Iterator[Event]:
        number = {"Sequence number": call.number, "Fwd thread id": 0} if call.number >= 0 else {}
        if what.outer:
            yield self._op(what.outer, call, {**number, **self._dims(what.outer_shapes)})
        op = self._op(what.op, call, {**number, **self._dims(what.shapes)}, inset=_INSET_NS if what.outer else 0)
        yield op
        start, dur = self._at(call.host)
        longer = dur - self.costs.op_ns
        launch = self._runtime(
            "cudaLaunchKernel", start + self.costs.lead_ns, self.costs.launch_ns + longer, op.args["External id"], 211
        )
        yield launch
        yield from self._on_device(what.name, what.stream, call, launch, what.blocks, {})

    def _dims(self, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Shapes and types of an operator's inputs, where they are recorded; () is an input that is no tensor."""
        if not self.style.shapes or not shapes:
            return {}
        return {
            "Input Dims": [list(shape) for shape in shapes],
            "Input type": ["c10::BFloat16" if shape else "" for shape in shapes],
        }

    def _on_device(
        self, name: str, stream: int, call: Call, launch: Event, blocks: int, more: Mapping[str, Any]
    ) -> Iterator[Event]:
        start = START_NS + self.plan.start_ns[call.device]
        end = START_NS + self.plan.end_ns[call.end]
        correlation = launch.args["correlation"]
        args = {
            "External id": launch.args["External id"],
            "queued": 0,
            "device": self.device,
            "context": 1,
            "stream": stream,
            "correlation": correlation,
            "registers per thread": 96,
            "shared memory": 49152,
            "blocks per SM": round(blocks / self.job.sm_count, 6),
            "warps per SM": round(8 * blocks / self.job.sm_count, 6),
            "grid": [blocks, 1, 1],
            "block": [256, 1, 1],
            "est. achieved occupancy %": min(100, round(100 * 8 * blocks / self.job.sm_count / 64)),
            **more,
        }
        yield Event("s", "ac2g", "ac2g", self.pid, self.pid, launch.ts_ns, flow=correlation)
        yield Event("X", "kernel", name, self.device, stream, start, end - start, args)
        yield Event("f", "ac2g", "ac2g", self.device, stream, start, flow=correlation)

    def _collective(self, call: Call, what: Collective) -> Iterator[Event]:
        collective, kernel, dispatcher = KINDS[what.kind]
        yield self._op(dispatcher, call)
        metadata = self._metadata(what, collective)
        record = self._op("record_param_comms", call, {**metadata, **self._record_only(what)}, inset=4_000)
        yield record
        yield self._op(f"nccl:{collective}", call, cat="user_annotation", inset=6_000)
        (start, dur), external = self._at(call.host), record.args["External id"]
        yield from self._stream_wait(start + 8_000, what.stream, COMPUTE_STREAM, external)
        at = start + self.costs.collective_lead_ns
        longer = dur - self.costs.collective_ns
        launch = self._runtime("cudaLaunchKernelExC", at, self.costs.launch_ns + longer, external, 430)
        yield launch
        if what.mark:
            record_ns = at + self.costs.launch_ns + longer + 300
            done = self._runtime("cudaEventRecordWithFlags", record_ns, _EVENT_NS, external, 370)
            self.recorded[what.mark] = done.args["correlation"]
            yield done
        letter = DTYPES[what.dtype][0]
        name = f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)"
        if kernel != "SendRecv":
            name = f"ncclDevKernel_{kernel}_{letter}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        carried = metadata if self.style.kernel_metadata else {}
        yield from self._on_device(name, what.stream, call, launch, what.channels, carried)

    def _metadata(self, what: Collective, collective: str) -> dict[str, Any]:
        """What both the host record and the kernel carry."""
        out: dict[str, Any] = {
            "Collective name": collective,
            "dtype": what.dtype,
            "In msg nelems": what.in_elements,
            "Out msg nelems": what.out_elements,
        }
        group = self.job.group(what.group)
        if self.style.groups:
            out |= {
                "Group size": len(group.ranks),
                "In split size": "[]",
                "Out split size": "[]",
                "Process Group Name": group.name,
                "Process Group Description": group.description,
                "Process Group Ranks": _listed(group.ranks),
            }
        if what.kind in ("send", "recv"):
            out["Dst Rank" if what.kind == "send" else "Src Rank"] = what.peer
            sequence = self.used[what.group] + 1
        else:
            self.used[what.group] += 1
            sequence = self.used[what.group]
        if self.style.sequence:
            out["Seq"] = sequence
        return out

    def _record_only(self, what: Collective) -> dict[str, Any]:
        """What only the host record carries: this rank (or the peer, for messages) in the group, and its regular shape."""
        ranks = self.job.group(what.group).ranks
        named = what.peer if what.kind in ("send", "recv") else self.rank
        out: dict[str, Any] = {"Rank": ranks.index(named), "Is asynchronized op": 1}
        if self.style.groups:
            out["Global rank start"] = ranks[0]
            strides = {later - earlier for earlier, later in pairwise(ranks)}
            if len(strides) == 1:
                out["Global rank stride"] = strides.pop()
        return out

    def _wait(self, call: Call, what: Wait) -> Iterator[Event]:
        start, _ = self._at(call.host)
        if what.mark:
            recorded = self.recorded[what.mark]
            yield from self._awaited(start + 500, what.stream, what.on, self.ids.external, recorded)
        else:
            yield from self._stream_wait(start + 500, what.stream, what.on, self.ids.external)

    def _stream_wait(self, ts_ns: int, stream: int, on: int, external: int) -> Iterator[Event]:
        """`stream` waits for `on`: an event is recorded there, and awaited here."""
        record = self._runtime("cudaEventRecordWithFlags", ts_ns, _EVENT_NS, external, 370)
        yield record
        yield from self._awaited(ts_ns + _EVENT_NS + 300, stream, on, external, record.args["correlation"])

    def _awaited(self, ts_ns: int, stream: int, on: int, external: int, recorded: int) -> Iterator[Event]:
        """`stream` waits for the event that call `recorded` put on `on`."""
        wait = self._runtime("cudaStreamWaitEvent", ts_ns, _EVENT_NS, external, 147)
        yield wait
        if not self.style.sync_events:
            return
        self.ids.event += 1
        args = {
            "External id": external,
            "cuda_sync_kind": "Stream Wait Event",
            "wait_on_stream": on,
            "wait_on_cuda_event_record_corr_id": recorded,
            "wait_on_cuda_event_id": self.ids.event,
            "stream": stream,
            "correlation": wait.args["correlation"],
            "device": self.device,
            "context": 1,
        }
        yield Event("X", "cuda_sync", "Stream Wait Event", self.device, stream, wait.ts_ns + 200, 500, args)

    def _sync(self, call: Call) -> Iterator[Event]:
        start, _ = self._at(call.host)
        end = START_NS + self.plan.end_ns[call.end]
        sync = self._runtime("cudaDeviceSynchronize", start, end - start, self.ids.next_external(), 165)
        yield sync
        if self.style.sync_events:
            args = {
                "External id": sync.args["External id"],
                "cuda_sync_kind": "Context Sync",
                "stream": -1,
                "correlation": sync.args["correlation"],
                "device": self.device,
                "context": 1,
            }
            yield Event("X", "cuda_sync", "Context Sync", self.device, -1, start + 300, max(0, end - start - 600), args)


def _listed(ranks: Sequence[int]) -> str:
    """Ranks as Kineto prints them: after 30 entries dots and the last one."""
    if len(ranks) <= LISTED_RANKS:
        return str(list(ranks))
    return "[" + ", ".join(map(str, ranks[: LISTED_RANKS - 1])) + f", ..., {ranks[-1]}]"


def header(job: SynthJob, rank: int, style: Style | None = None) -> dict[str, Any]:
    """The top-level keys beside traceEvents."""
    info: dict[str, Any] = {"backend": "nccl", "rank": rank, "world_size": job.world_size}
    if (style or Style()).groups:
        mine = [group for group in job.groups if rank in group.ranks]
        info["pg_count"] = len(job.groups)
        info["pg_config"] = [
            {
                "pg_name": group.name,
                "pg_desc": group.description,
                "backend_config": "cuda:nccl",
                "pg_size": len(group.ranks),
                "ranks": list(group.ranks),
            }
            for group in mine
        ]
        info["nccl_version"] = job.nccl_version
    device = {
        "id": rank % job.gpus_per_node,
        "name": job.device,
        "numSms": job.sm_count,
        "maxThreadsPerMultiprocessor": 2048,
    }
    return {
        "schemaVersion": 1,
        "deviceProperties": [device],
        "cuda_runtime_version": 12080,
        "record_shapes": 1,
        "distributedInfo": info,
        "host_name": f"synth-node{rank // job.gpus_per_node}",
        "synthetic": {"name": job.name, **job.facts},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
    }


def trace_text(top: Mapping[str, Any], events: Sequence[Event]) -> str:
    """One file as text: header, events, and the trace's name at the end, as Kineto orders them."""
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in top.items())
    body = ",\n".join(event.text() for event in events)
    return f'{{\n{head},\n"traceEvents": [\n{body}\n],\n"traceName": "trace.json"\n}}\n'


def manifest_text(job: SynthJob) -> str:
    """The capture's manifest: how many ranks there are, and what the model is and does in a step of the whole job."""
    document = {
        "schema": "scaletrace.capture/1",
        "synthetic": {"name": job.name, **job.facts},
        "ranks": {"expected": job.world_size},
        "model": dict(job.model),
    }
    return json.dumps(document, indent=1) + "\n"


def file_name(rank: int) -> str:
    return f"rank{rank}.json.gz"


def write_text(path: Path, text: str) -> None:
    """Write a trace, compressed where the name says so; the bytes depend on the text alone."""
    data = text.encode("utf-8")
    path.write_bytes(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
