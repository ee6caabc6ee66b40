"""Turns programs into times: when each host call, kernel and collective of each rank starts and ends, in integer ns.

Every rank's thread runs ahead of its device; a kernel starts once it is launched, its stream is free and what it waits
for has ended; a collective ends for all of its ranks together. The answer is the longest path through these, or, where
kernels and collectives slow each other, what interference.py makes of them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scaletrace.errors import UsageError
from scaletrace.traces.synth.interference import Roles, contended
from scaletrace.traces.synth.program import (
    COMPUTE_STREAM,
    Annotation,
    Backward,
    Collective,
    HostCosts,
    HostOp,
    Instruction,
    Kernel,
    Module,
    Range,
    Sync,
    SynthJob,
    Wait,
)

LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
LEAST_JITTER = 0.2
"""No kernel gets shorter than this share of its time, however wide the jitter."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What is wrong with a rank: `slow` × kernel times, extra host ns at each step's start (unnamed, or in the data
    loader) and at each launch, and the standard deviation of kernel times as a share."""

    slow: float = 1.0
    delay_ns: int = 0
    loader_ns: int = 0
    launch_ns: int = 0
    jitter: float = 0.0


WELL = Condition()


@dataclass(slots=True)
class Call:
    """One instruction of one rank with its host interval and, where it runs on the device, its device interval.

    number: autograd sequence number of a tagged operator, -1 without.
    """

    what: Instruction
    step: int
    depth: int
    host: int
    device: int = -1
    end: int = -1
    seq: int = -1
    number: int = -1


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of the host from one of its nodes to another; number as of the operator that a backward node belongs to."""

    what: Range
    first: int
    last: int
    number: int = -1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The calls of one rank in order, its ranges in order of start, steps as (number, first and last host node)."""

    calls: tuple[Call, ...]
    ranges: tuple[Stretch, ...]
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
        """Length of one step, mean over ranks of their ProfilerStep: ranks of a pipeline start and end apart."""
        own = [
            self.end_ns[last] - self.start_ns[first]
            for plan in self.plans.values()
            for number, first, last in plan.steps
            if number == step
        ]
        return round(sum(own) / len(own))


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
    condition: Condition
    dice: random.Random
    calls: list[Call] = field(default_factory=list)
    ranges: list[Stretch] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    thread: int = -1
    numbers: int = 0
    last: dict[int, int] = field(default_factory=dict)
    pending: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    marks: dict[str, int] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)

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

    def kernel_ns(self, what: Kernel) -> int:
        """The time of a kernel on this rank, before anything slows it."""
        factor = self.condition.slow
        if self.condition.jitter:
            factor *= max(LEAST_JITTER, self.dice.gauss(1.0, self.condition.jitter))
        return round(what.dur_ns * factor)

    def number_of(self, tag: str) -> int:
        """A new autograd sequence number for a tagged operator, -1 without a tag."""
        if not tag:
            return -1
        self.numbers += 1
        self.tags[tag] = self.numbers
        return self.numbers


Key = tuple[str, str, int]
"""Instance of a collective: (group, "" or "src>dst", number)."""


@dataclass(slots=True)
class _World:
    """What the ranks share while they are walked."""

    arrivals: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[Key, int] = field(default_factory=dict)
    roles: Roles = field(default_factory=Roles)


def schedule(
    job: SynthJob, costs: HostCosts | None = None, conditions: Mapping[int, Condition] | None = None
) -> Schedule:
    """Times of all ranks, with what is wrong with some of them."""
    costs, nodes, world = costs or HostCosts(), _Nodes(), _World()
    plans = {}
    for rank, program in sorted(job.programs.items()):
        state = _Rank(rank, nodes, costs, (conditions or {}).get(rank, WELL), random.Random(f"jitter {rank}"))
        counter: dict[tuple[str, str], int] = defaultdict(int)
        for step in range(job.steps):
            first = state.host(costs.step_ns + state.condition.delay_ns)
            if state.condition.loader_ns:
                loader = state.host(state.condition.loader_ns)
                state.ranges.append(Stretch(Annotation(LOADER, ()), loader, loader))
            for instruction in program:
                _walk(state, instruction, step, 0, counter, world)
            state.steps.append((step, first, state.thread))
        plans[rank] = RankPlan(tuple(state.calls), tuple(state.ranges), tuple(state.steps))
    for key, node in world.ends.items():
        nodes.before[node] += [(arrival, 0) for arrival in world.arrivals[key]]
    if any(world.roles.slowdown.values()) or job.collective_slowdown:
        start_ns, end_ns = contended(nodes.dur_ns, nodes.before, world.roles, job.collective_slowdown)
        _refuse_stuck(sum(end < 0 for end in end_ns))
    else:
        start_ns, end_ns = _longest_path(nodes)
    return Schedule(start_ns, end_ns, plans)


def _walk(
    state: _Rank, what: Instruction, step: int, depth: int, counter: dict[tuple[str, str], int], world: _World
) -> None:
    costs = state.costs
    if isinstance(what, Annotation | Backward | Module):
        _range(state, what, step, depth, counter, world)
    elif isinstance(what, HostOp):
        state.calls.append(Call(what, step, depth, state.host(what.dur_ns)))
    elif isinstance(what, Kernel):
        call = state.host(costs.op_ns + state.condition.launch_ns)
        lead_ns = costs.lead_ns + state.condition.launch_ns
        node = state.enqueue(what.stream, state.kernel_ns(what), call, lead_ns)
        world.roles.kernels[node] = state.rank
        state.last[what.stream] = node
        state.calls.append(Call(what, step, depth, call, node, node, number=state.number_of(what.tag)))
    elif isinstance(what, Collective):
        _collective(state, what, step, depth, counter, world)
    elif isinstance(what, Wait):
        call = state.host(costs.marked_wait_ns if what.mark else costs.wait_ns)
        if what.mark:
            state.pending[what.stream].append(state.marks[what.mark])
        elif what.on in state.last:
            state.pending[what.stream].append(state.last[what.on])
        state.calls.append(Call(what, step, depth, call))
    elif isinstance(what, Sync):
        state.calls.append(Call(what, step, depth, state.host(costs.sync_ns)))
        state.calls[-1].end = _wait_for_device(state)


def _range(
    state: _Rank, what: Range, step: int, depth: int, counter: dict[tuple[str, str], int], world: _World
) -> None:
    """A range around its body; nodes and modules take a little time of their own to enter and to leave."""
    place, before = len(state.ranges), len(state.nodes.dur_ns)
    named = not isinstance(what, Annotation)
    first = state.host(state.costs.enter_ns) if named else before
    for inner in what.body:
        _walk(state, inner, step, depth + 1, counter, world)
    if named:
        state.host(state.costs.leave_ns)
    if len(state.nodes.dur_ns) > before:
        number = state.tags.get(what.of, -1) if isinstance(what, Backward) else -1
        state.ranges.insert(place, Stretch(what, first, state.thread, number))


def _wait_for_device(state: _Rank) -> int:
    """The host's return from a synchronisation: after its call and after the last work of every stream."""
    return state.host(0, state.last.values())


def _collective(
    state: _Rank, what: Collective, step: int, depth: int, counter: dict[tuple[str, str], int], world: _World
) -> None:
    pair = ""
    if what.kind == "send":
        pair = f"{state.rank}>{what.peer}"
    elif what.kind == "recv":
        pair = f"{what.peer}>{state.rank}"
    number = counter[(what.group, pair)]
    counter[(what.group, pair)] += 1
    key = (what.group, pair, number)
    call = state.host(state.costs.collective_ns + state.condition.launch_ns)
    current = [state.last[COMPUTE_STREAM]] if COMPUTE_STREAM in state.last else []
    lead_ns = state.costs.collective_lead_ns + state.condition.launch_ns
    arrive = state.enqueue(what.stream, 0, call, lead_ns, current)
    world.arrivals[key].append(arrive)
    if key not in world.ends:
        world.ends[key] = state.nodes.add(what.dur_ns)
    end = world.ends[key]
    world.roles.arrivals[arrive] = (state.rank, end)
    world.roles.members[end].append(state.rank)
    world.roles.slowdown[end] = max(what.slowdown, world.roles.slowdown.get(end, 0.0))
    state.last[what.stream] = end
    if what.mark:
        state.marks[what.mark] = end
    state.calls.append(Call(what, step, depth, call, arrive, end, number + 1))


def _refuse_stuck(count: int) -> None:
    """A cycle (ranks that disagree on order) is an error of the program."""
    if count:
        raise UsageError(
            f"{count} operations of the program wait for each other: its ranks call their collectives in another order"
        )


def _longest_path(nodes: _Nodes) -> tuple[list[int], list[int]]:
    """Start and end of every node, by Kahn's order."""
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
    _refuse_stuck(n - done)
    return start_ns, end_ns
