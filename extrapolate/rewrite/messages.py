"""Turns the laid actions of a pipeline into the messages between them: nodes of sends and receives, posted and awaited.

A message moves when both sides have posted it: gloo hands a buffer over only to a receive that is there, and NCCL's
kernels meet each other. Who posts when, and who waits, is the schedule's (postings.deeds).

Two ranks of gloo share one connection, on which a receiver's notice that it is ready stands behind the data that it has
under way to the sender (`Pair::recv` and `handleRemotePendingRecv` in gloo's transport/tcp/pair.cc). So where two ranks
exchange messages, the one that comes later sends first, and the other's message follows when that one has arrived.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scaletrace.extrapolate.rewrite.loom import Loom
from scaletrace.extrapolate.rewrite.postings import Deed, Verb, deeds
from scaletrace.extrapolate.rewrite.schedules import Action, Op, Program
from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import EdgeKind, GraphCollective, GraphGroup, NodeKind
from scaletrace.replay.engine import replay

MessageTime = Callable[[int, int, int], int]
"""(bytes, sending pipeline rank, receiving pipeline rank) → ns."""
LANE = "point to point"
SOCKET_BYTES = 2 * 212_992
"""What the system holds of a message that gloo sends: Linux's usual net.core.wmem_max, which it doubles."""
ROUNDS = 4
"""Replays at most until who comes later in each exchange no longer changes."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """Messages of gloo: a send is over when the system holds its bytes, and both directions share a connection.

    whole_ns  a message's time when nothing is before it
    """

    whole_ns: MessageTime

    def __call__(self, size_bytes: int, src: int, dst: int) -> int:
        """Time until the receiver has all of it."""
        return self.whole_ns(size_bytes, src, dst)

    def sent_ns(self, size_bytes: int, src: int, dst: int) -> int:
        """Time until the system holds what is left to send."""
        left = max(0, size_bytes - SOCKET_BYTES)
        return round(self.whole_ns(size_bytes, src, dst) * left / size_bytes) if left else 0


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
    """Index of the pipeline's group of `ranks`, -1 for one rank; the measured one keeps how far apart its ranks lie.

    A group of the stages that share an embedding is no such group (tied).
    """
    known = [at for at, group in enumerate(loom.groups) if group.axis == "pp"]
    whole = [at for at in known if "embedding" not in loom.groups[at].description.lower()]
    if whole:
        group = loom.groups[whole[0]]
        loom.groups[whole[0]] = replace(group, size=ranks, stride=group.stride if group.stride > 0 else columns)
        return whole[0]
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
    exchanges: list[list[_Message]] = []
    for column in range(columns):
        mine = [home * columns + column for home in range(program.ranks)]
        for step in sorted({run.step for new in mine for run in plans[new] if run.begin < run.end}):
            sides: list[Sides] = []
            for new, row in zip(mine, rows, strict=True):
                runs = [run for run in plans[new] if run.step == step]
                sides.append(_posted(loom, row, runs, new, int(starts[new]), int(starts[new + 1])))
            exchanges.append(_joined(loom, program, sides, group, size_bytes, message_ns))
    if isinstance(message_ns, Streamed):
        _take_turns(loom, exchanges)


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
    # The optimizer, or the next step's first piece; what only communicates does not wait.
    behind = next((int(node) for node in loom.first[start + runs[-1].end : end] if node >= 0), -1)
    _before(loom, awaited, behind, EdgeKind.EVENT_WAIT)
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


@dataclass(frozen=True, slots=True)
class _Message:
    """Both sides of a message."""

    sender: _Side
    taker: _Side


def _joined(
    loom: Loom, program: Program, sides: Sequence[Sides], group: int, size_bytes: int, message_ns: MessageTime
) -> list[_Message]:
    """Let both sides of each message meet, and messages of one direction between two ranks follow each other."""
    before: dict[tuple[int, int], int] = {}
    out: list[_Message] = []
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
            sent_ns = message_ns.sent_ns(size_bytes, home, peer) if isinstance(message_ns, Streamed) else dur_ns
            for side, other, time_ns in ((sender, taker, sent_ns), (taker, sender, dur_ns)):
                loom.fill(side.arrive, instance=instance)
                loom.fill(side.transfer, instance=instance, dur_ns=time_ns)
                loom.edge(other.arrive, side.transfer, EdgeKind.RENDEZVOUS)
            if (home, peer) in before:
                loom.edge(before[home, peer], taker.transfer, EdgeKind.STREAM)
            before[home, peer] = taker.transfer
            out.append(_Message(sender, taker))
    return out


def _take_turns(loom: Loom, exchanges: Sequence[Sequence[_Message]]) -> None:
    """Let each message wait for the data that its receiver had under way to its sender when it said that it was ready.

    Who had, a replay tells; since waiting moves what follows, that is asked again until it stays the same.
    """
    settled = len(loom.edges)
    turns: list[tuple[int, int]] = []
    for _ in range(ROUNDS):
        woven = loom.finish()
        start_ns = replay(woven.graph).start_ns[woven.place]
        found = [turn for exchange in exchanges for turn in _turns(exchange, start_ns)]
        if found == turns:
            return
        turns = found
        del loom.edges[settled:]
        for src, dst in turns:
            loom.edge(src, dst, EdgeKind.STREAM)


def _turns(exchange: Sequence[_Message], start_ns: IntArray) -> list[tuple[int, int]]:
    """(TRANSFER that ends, TRANSFER that begins then) of one step's messages, by when their sides were posted."""
    by_way: dict[tuple[int, int], list[_Message]] = {}
    for message in sorted(exchange, key=lambda message: message.sender.arrive):
        by_way.setdefault((message.sender.rank, message.taker.rank), []).append(message)
    out: list[tuple[int, int]] = []
    for (src, dst), messages in by_way.items():
        back = by_way.get((dst, src), [])
        posted = [other.sender.arrive for other in back]  # nodes of one rank are numbered as it posts
        for message in messages:
            ready_ns = int(start_ns[message.taker.arrive])
            for other in reversed(back[: bisect_left(posted, message.taker.arrive)]):
                if start_ns[other.taker.arrive] < ready_ns:  # wanted before, so under way
                    turn = other.taker.transfer
                    out += [(turn, message.sender.transfer), (turn, message.taker.transfer)]
                    break
    return out


def _counterpart(send: Action) -> Action:
    """The receive that meets a send."""
    if send.op is Op.SEND_F:
        return Action(send.stage + 1, Op.RECV_F, send.micro_batch)
    return Action(send.stage - 1, Op.RECV_B, send.micro_batch)
