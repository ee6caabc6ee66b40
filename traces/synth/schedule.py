"""Turns programs into times: when each host call, kernel and collective of each rank starts and ends, in integer ns.

Every rank's thread runs ahead of its device; a kernel starts once it is launched, its stream is free and what it waits
for has ended; a collective ends for all of its ranks together. The answer is the longest path through these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scaletrace.errors import UsageError
from scaletrace.traces.synth.program import (
    COMPUTE_STREAM,
    Annotation,
    Collective,
    HostCosts,
    HostOp,
    Instruction,
    Kernel,
    Sync,
    SynthJob,
    Wait,
)


@dataclass(slots=True)
class Call:
    """One instruction of one rank with its host interval and, where it runs on the device, its device interval."""

    what: Instruction
    step: int
    depth: int
    host: int
    device: int = -1
    end: int = -1
    seq: int = -1
    waits_on: tuple[int, int] = (-1, -1)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The calls of one rank in order, ranges as (name, first host node, last host node, depth), steps likewise."""

    calls: tuple[Call, ...]
    ranges: tuple[tuple[str, int, int], ...]
    steps: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """start_ns and end_ns of every node, and the plan of every rank that refers to them."""

    start_ns: list[int]
    end_ns: list[int]
    plans: Mapping[int, RankPlan]

    @property
    def makespan_ns(self) -> int:
        return max(self.end_ns, default=0)

    def step_ns(self, step: int) -> int:
        """Length of one step over all ranks: latest end minus earliest start of its host range."""
        bounds = [(first, last) for plan in self.plans.values() for number, first, last in plan.steps if number == step]
        return max(self.end_ns[last] for _, last in bounds) - min(self.start_ns[first] for first, _ in bounds)


@dataclass(slots=True)
class _Nodes:
    dur_ns: list[int] = field(default_factory=list)
    before: list[list[tuple[int, int]]] = field(default_factory=list)

    def add(self, dur_ns: int, before: Iterable[tuple[int, int]] = ()) -> int:
        self.dur_ns.append(dur_ns)
        self.before.append(list(before))
        return len(self.dur_ns) - 1


@dataclass(slots=True)
class _Rank:
    """What the planner knows of one rank while it walks the program."""

    rank: int
    nodes: _Nodes
    costs: HostCosts
    slow: float
    calls: list[Call] = field(default_factory=list)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    thread: int = -1
    last: dict[int, int] = field(default_factory=dict)
    pending: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def host(self, dur_ns: int, after: Iterable[int] = ()) -> int:
        before = [(self.thread, 0)] if self.thread >= 0 else []
        self.thread = self.nodes.add(dur_ns, [*before, *((node, 0) for node in after)])
        return self.thread

    def enqueue(self, stream: int, dur_ns: int, launched: int, lead_ns: int, also: Iterable[int] = ()) -> int:
        """A device operation on `stream`: after its launch, after the stream's last work and what the stream awaits."""
        reach = lead_ns + self.costs.launch_ns + self.costs.to_device_ns
        before = [(launched, reach - self.nodes.dur_ns[launched])]
        before += [(node, 0) for node in self.pending.pop(stream, ())]
        before += [(node, 0) for node in also]
        if stream in self.last:
            before.append((self.last[stream], 0))
        return self.nodes.add(dur_ns, before)


Key = tuple[str, str, int]
"""Instance of a collective: (group, "" or "src>dst", number)."""


def schedule(
    job: SynthJob,
    costs: HostCosts | None = None,
    slow: Mapping[int, float] | None = None,
    delay_ns: Mapping[int, int] | None = None,
) -> Schedule:
    """Times of all ranks. `slow` multiplies a rank's kernel times, `delay_ns` is extra host time at each step's start."""
    costs, nodes = costs or HostCosts(), _Nodes()
    arrivals: dict[Key, list[int]] = defaultdict(list)
    ends: dict[Key, int] = {}
    plans = {}
    for rank, program in sorted(job.programs.items()):
        state = _Rank(rank, nodes, costs, (slow or {}).get(rank, 1.0))
        counter: dict[tuple[str, str], int] = defaultdict(int)
        for step in range(job.steps):
            first = state.host(costs.step_ns + (delay_ns or {}).get(rank, 0))
            for instruction in program:
                _walk(state, instruction, step, 0, counter, arrivals, ends)
            state.steps.append((step, first, state.thread))
        plans[rank] = RankPlan(tuple(state.calls), tuple(state.ranges), tuple(state.steps))
    for key, node in ends.items():
        nodes.before[node] += [(arrival, 0) for arrival in arrivals[key]]
    start_ns, end_ns = _longest_path(nodes)
    return Schedule(start_ns, end_ns, plans)


def _walk(
    state: _Rank,
    what: Instruction,
    step: int,
    depth: int,
    counter: dict[tuple[str, str], int],
    arrivals: dict[Key, list[int]],
    ends: dict[Key, int],
) -> None:
    costs = state.costs
    if isinstance(what, Annotation):
        first = len(state.nodes.dur_ns)
        for inner in what.body:
            _walk(state, inner, step, depth + 1, counter, arrivals, ends)
        if len(state.nodes.dur_ns) > first:
            state.ranges.append((what.name, first, state.thread))
    elif isinstance(what, HostOp):
        state.calls.append(Call(what, step, depth, state.host(what.dur_ns)))
    elif isinstance(what, Kernel):
        call = state.host(costs.op_ns)
        node = state.enqueue(what.stream, round(what.dur_ns * state.slow), call, costs.lead_ns)
        state.last[what.stream] = node
        state.calls.append(Call(what, step, depth, call, node, node))
    elif isinstance(what, Collective):
        _collective(state, what, step, depth, counter, arrivals, ends)
    elif isinstance(what, Wait):
        call = state.host(costs.wait_ns)
        if what.on in state.last:
            state.pending[what.stream].append(state.last[what.on])
        state.calls.append(Call(what, step, depth, call))
    elif isinstance(what, Sync):
        state.calls.append(Call(what, step, depth, state.host(costs.sync_ns)))
        state.calls[-1].end = _wait_for_device(state)


def _wait_for_device(state: _Rank) -> int:
    """The host's return from a synchronisation: after its call and after the last work of every stream."""
    return state.host(0, state.last.values())


def _collective(
    state: _Rank,
    what: Collective,
    step: int,
    depth: int,
    counter: dict[tuple[str, str], int],
    arrivals: dict[Key, list[int]],
    ends: dict[Key, int],
) -> None:
    pair = ""
    if what.kind == "send":
        pair = f"{state.rank}>{what.peer}"
    elif what.kind == "recv":
        pair = f"{what.peer}>{state.rank}"
    number = counter[(what.group, pair)]
    counter[(what.group, pair)] += 1
    key = (what.group, pair, number)
    call = state.host(state.costs.collective_ns)
    current = [state.last[COMPUTE_STREAM]] if COMPUTE_STREAM in state.last else []
    arrive = state.enqueue(what.stream, 0, call, state.costs.collective_lead_ns, current)
    arrivals[key].append(arrive)
    if key not in ends:
        ends[key] = state.nodes.add(what.dur_ns)
    state.last[what.stream] = ends[key]
    state.calls.append(Call(what, step, depth, call, arrive, ends[key], number + 1))


def _longest_path(nodes: _Nodes) -> tuple[list[int], list[int]]:
    """Start and end of every node, by Kahn's order. A cycle (ranks that disagree on order) is an error of the program."""
    n = len(nodes.dur_ns)
    after: list[list[int]] = [[] for _ in range(n)]
    missing = [len(before) for before in nodes.before]
    for node, before in enumerate(nodes.before):
        for earlier, _ in before:
            after[earlier].append(node)
    start_ns, end_ns = [0] * n, [0] * n
    ready = [node for node in range(n) if not missing[node]]
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        at = max((end_ns[earlier] + lag for earlier, lag in nodes.before[node]), default=0)
        start_ns[node] = max(0, at)
        end_ns[node] = start_ns[node] + nodes.dur_ns[node]
        for later in after[node]:
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    if done < n:
        raise UsageError(
            f"{n - done} operations of the program wait for each other: its ranks call their collectives in another order"
        )
    return start_ns, end_ns
