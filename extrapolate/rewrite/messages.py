"""Turns the laid actions of a pipeline into the messages between them: nodes of sends and receives, posted and awaited.

A message moves when both sides have posted it: gloo hands a buffer over only to a receive that is there, and NCCL's
kernels meet each other. Who posts when, and who waits, is the schedule's (postings.deeds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scaletrace.extrapolate.rewrite.loom import Loom
from scaletrace.extrapolate.rewrite.postings import Deed, Verb, deeds
from scaletrace.extrapolate.rewrite.schedules import Action, Op, Program
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import EdgeKind, GraphCollective, GraphGroup, NodeKind

MessageTime = Callable[[int, int, int], int]
"""(bytes, sending pipeline rank, receiving pipeline rank) → ns."""
LANE = "point to point"


@dataclass(frozen=True, slots=True)
class Run:
    """The copies (positions in the rank's row) that one action of one step takes."""

    step: int
    action: Action
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a message: the rank that posted it and its two nodes."""

    rank: int
    arrive: int
    transfer: int


Sides = dict[Action, _Side]


def pipeline_group(loom: Loom, ranks: int, columns: int) -> int:
    """Index of the pipeline's group of `ranks`; the measured one is replaced where there was one, -1 for one rank."""
    for index, group in enumerate(loom.groups):
        if group.axis == "pp":
            loom.groups[index] = replace(group, size=ranks, stride=columns)
            return index
    if ranks == 1:
        return -1
    loom.groups.append(GraphGroup("pp", ranks, columns, 1, "pp"))
    return len(loom.groups) - 1


def add_messages(
    loom: Loom,
    program: Program,
    plans: Sequence[Sequence[Run]],
    starts: IntArray,
    columns: int,
    group: int,
    size_bytes: int,
    message_ns: MessageTime,
) -> None:
    """A send and a receive for every message of `program`, in every step that computes anything.

    plans[pipeline rank × columns + column]: its runs in order; starts int64: first copy of each of those ranks
    """
    rows = deeds(program)
    for column in range(columns):
        mine = [home * columns + column for home in range(program.ranks)]
        for step in sorted({run.step for new in mine for run in plans[new] if run.begin < run.end}):
            sides: list[Sides] = []
            for new, row in zip(mine, rows, strict=True):
                runs = [run for run in plans[new] if run.step == step]
                sides.append(_posted(loom, row, runs, new, int(starts[new]), int(starts[new + 1])))
            _joined(loom, program, sides, columns, group, size_bytes, message_ns)


def _posted(loom: Loom, row: Sequence[Deed], runs: Sequence[Run], rank: int, start: int, end: int) -> Sides:
    """The nodes of one rank's messages in one step, each behind what its host did before and ahead of who awaits it."""
    if not runs:
        return {}
    of_action = {run.action: run for run in runs}
    sides: Sides = {}
    tail = int(loom.last[start + runs[0].begin - 1]) if runs[0].begin else -1
    awaited: list[int] = []
    for deed in row:
        if deed.verb is Verb.POST:
            for message in deed.actions:
                sides[message] = _side(loom, rank, str(message), runs[0].step)
                _before(loom, [tail], sides[message].arrive, EdgeKind.HAND_OVER)
                _before(loom, awaited, sides[message].arrive, EdgeKind.EVENT_WAIT)
        elif deed.verb is Verb.WAIT:
            awaited += [sides[message].transfer for message in deed.actions]
        else:
            run = of_action[deed.actions[0]]
            head = int(loom.first[start + run.begin]) if run.begin < run.end else -1
            if head >= 0:
                _before(loom, awaited, head, EdgeKind.EVENT_WAIT)
                tail, awaited = int(loom.last[start + run.end - 1]), []
    behind = start + runs[-1].end
    if behind < end:  # the optimizer, or the next step's first piece
        _before(loom, awaited, int(loom.first[behind]), EdgeKind.EVENT_WAIT)
    return sides


def _before(loom: Loom, nodes: Sequence[int], node: int, kind: EdgeKind) -> None:
    for other in nodes:
        if other >= 0 and node >= 0:
            loom.edge(other, node, kind)


def _side(loom: Loom, rank: int, name: str, step: int) -> _Side:
    columns = {"rank": rank, "lane": loom.lane(rank, LANE, True), "name": loom.name(name), "step": step}
    arrive = loom.node(NodeKind.ARRIVE, **columns)
    transfer = loom.node(NodeKind.TRANSFER, **columns)
    loom.edge(arrive, transfer, EdgeKind.STREAM)
    return _Side(rank, arrive, transfer)


def _joined(
    loom: Loom,
    program: Program,
    sides: Sequence[Sides],
    columns: int,
    group: int,
    size_bytes: int,
    message_ns: MessageTime,
) -> None:
    """Let both sides of each message meet, and messages of one direction between two ranks follow each other."""
    before: dict[tuple[int, int], int] = {}
    for home, mine in enumerate(sides):
        for send, sender in mine.items():
            if send.op not in (Op.SEND_F, Op.SEND_B):
                continue
            receive = _counterpart(send)
            peer = program.rank_of_stage[receive.stage]
            taker = sides[peer].get(receive)
            if taker is None:
                continue
            instance = len(loom.collectives)
            loom.collectives.append(GraphCollective("send", group, size_bytes, size_bytes))
            dur_ns = message_ns(size_bytes, home, peer)
            for side, other in ((sender, taker), (taker, sender)):
                loom.fill(side.arrive, instance=instance)
                loom.fill(side.transfer, instance=instance, dur_ns=dur_ns)
                loom.edge(other.arrive, side.transfer, EdgeKind.RENDEZVOUS)
            if (home, peer) in before:
                loom.edge(before[home, peer], taker.transfer, EdgeKind.STREAM)
            before[home, peer] = taker.transfer


def _counterpart(send: Action) -> Action:
    """The receive that meets a send."""
    if send.op is Op.SEND_F:
        return Action(send.stage + 1, Op.RECV_F, send.micro_batch)
    return Action(send.stage - 1, Op.RECV_B, send.micro_batch)
