"""Turns the name of a pipeline schedule and its sizes into each rank's list of actions, and those into messages.

The lists are those of `torch.distributed.pipelining` (GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
ZBVZeroBubble, DualPipeV), action for action; Megatron's interleaved order is the same as Interleaved1F1B.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from scaletrace.errors import UsageError


class Op(Enum):
    """What a rank does with one micro batch of one stage; the values are PyTorch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """Backward for the stage's input only."""
    WEIGHT = "W"
    """Backward for the stage's weights only."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT


class Action(NamedTuple):
    """One action; written as PyTorch's profiler does, `3F0` or `2SEND_B1`."""

    stage: int
    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.micro_batch}"


Order = list[tuple[int, Op]]
"""(stage, operation) in order; the k-th of a kind is the one on micro batch k."""


@dataclass(frozen=True, slots=True)
class Program:
    """What every rank of a pipeline does in one step: actions[rank], compute only.

    Stage s of `ranks` × `chunks` lives on rank_of_stage[s]; stage 0 holds the embedding, the last one the head.
    `split` holds the (stage, micro batch) whose backward is done in two parts, input and weights.
    """

    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    split: frozenset[tuple[int, int]]

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def backward(self, stage: int, micro_batch: int) -> Action:
        """The action after which the gradient of the stage's input is there."""
        return Action(stage, I if (stage, micro_batch) in self.split else B, micro_batch)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The compute actions, of this rank or a neighbour, whose results `action` reads."""
        stage, op, batch = action
        if op is F:
            return (Action(stage - 1, F, batch),) if stage else ()
        if op is W:
            return (Action(stage, I, batch),)
        own = Action(stage, F, batch)
        return (own,) if stage == self.stages - 1 else (self.backward(stage + 1, batch), own)


def build(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> Program:
    """The program of `schedule` (any case) on `ranks` ranks with `chunks` stages each.

    Raises UsageError for an unknown schedule or sizes that it does not allow, with the remedy.
    """
    name = canonical(schedule)
    rule = _RULES[name]
    check(name, ranks, micro_batches, chunks)
    v_shaped = rule.shape == "v"
    stages = ranks * chunks
    home = tuple(s if s < ranks else 2 * ranks - 1 - s for s in range(stages)) if v_shaped else None
    actions = tuple(_actions(name, ranks, micro_batches, chunks, rank) for rank in range(ranks))
    split = frozenset((a.stage, a.micro_batch) for row in actions for a in row if a.op is I)
    return Program(name, ranks, chunks, micro_batches, home or tuple(s % ranks for s in range(stages)), actions, split)


def actions_of(schedule: str, ranks: int, micro_batches: int, chunks: int, rank: int) -> tuple[Action, ...]:
    """The actions of one rank alone; raises as `build` does."""
    check(schedule, ranks, micro_batches, chunks)
    return _actions(canonical(schedule), ranks, micro_batches, chunks, rank)


def _actions(name: str, ranks: int, micro_batches: int, chunks: int, rank: int) -> tuple[Action, ...]:
    return tuple(_numbered(_RULES[name].order(ranks, micro_batches, chunks, rank), micro_batches, name))


def check(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> None:
    """Raise UsageError where a schedule does not allow these sizes, with the remedy."""
    name = canonical(schedule)
    if min(ranks, micro_batches, chunks) < 1:
        raise UsageError(f"{name}: ranks, micro batches and chunks must be at least 1")
    _RULES[name].check(name, ranks, micro_batches, chunks)


def canonical(schedule: str) -> str:
    """PyTorch's name of a schedule, from any case; "zb1p", "zbv", "interleaved" and "megatron" are understood too."""
    short = schedule.lower().replace("-", "").replace("_", "")
    for name in _RULES:
        if short == name.lower() or short in _SHORT.get(name, ()):
            return name
    raise UsageError(f"unknown pipeline schedule {schedule!r}; one of {', '.join(_RULES)}")


def _numbered(order: Order, micro_batches: int, name: str) -> Iterator[Action]:
    """Give the k-th operation of a kind on a stage micro batch k; GPipe-like reversal is done by LoopedBFS itself."""
    seen: Counter[tuple[int, Op]] = Counter()
    for stage, op in order:
        # A whole backward counts with the input backwards, of which it is one.
        counted = I if op is B else op
        at = seen[stage, counted]
        seen[stage, counted] += 1
        if op is B:
            seen[stage, W] += 1
        if at >= micro_batches:
            continue
        reverse = name == "LoopedBFS" and op is B
        yield Action(stage, op, micro_batches - 1 - at if reverse else at)


def _gpipe(ranks: int, m: int, chunks: int, rank: int) -> Order:
    return [(rank, F)] * m + [(rank, B)] * m


def _one_f_one_b(ranks: int, m: int, chunks: int, rank: int) -> Order:
    warm_up = min(ranks - 1 - rank, m)
    return [(rank, F)] * warm_up + [(rank, F), (rank, B)] * (m - warm_up) + [(rank, B)] * warm_up


def _looped_bfs(ranks: int, m: int, chunks: int, rank: int) -> Order:
    mine = range(rank, ranks * chunks, ranks)
    return [(s, F) for s in mine for _ in range(m)] + [(s, B) for s in reversed(mine) for _ in range(m)]


def _interleaved(ranks: int, m: int, chunks: int, rank: int) -> Order:
    return _in_rounds(ranks, m, chunks, rank, hop=2, deferred=None)


def _zero_bubble(ranks: int, m: int, chunks: int, rank: int) -> Order:
    return _in_rounds(ranks, m, chunks, rank, hop=1, deferred=rank)


def _in_rounds(ranks: int, m: int, chunks: int, rank: int, hop: int, deferred: int | None) -> Order:
    """Depth first over chunks in rounds of about `ranks` micro batches.

    hop       extra warm-up forwards for each rank nearer to the front
    deferred  None: whole backwards; otherwise how many weight backwards are held back behind the input backwards
    """
    a_round = m // max(1, m // ranks)
    total = m * chunks
    warm_up = min((chunks - 1) * a_round + hop * (ranks - 1 - rank), total)
    out: Order = []
    waiting: deque[int] = deque()
    for op in range(total + warm_up):
        if op < total:
            out.append(((op // a_round) % chunks * ranks + rank, F))
        if op < warm_up:
            continue
        stage = (chunks - 1 - ((op - warm_up) // a_round) % chunks) * ranks + rank
        out.append((stage, B if deferred is None else I))
        if deferred is not None:
            waiting.append(stage)
            if op - warm_up >= deferred:
                out.append((waiting.popleft(), W))
    return out + [(stage, W) for stage in waiting]


def _zbv(ranks: int, m: int, chunks: int, rank: int) -> Order:
    first, last = rank, 2 * ranks - 1 - rank
    many = max(2 * ranks - 1, m)
    out: Order = [(first, F)] * (2 * (ranks - rank) - 1)
    out += [(last, F), (first, F)] * rank
    out += [(last, F), (last, I), (last, W)] * (ranks - rank)
    done = {op: Counter(stage for stage, o in out if o is op) for op in (F, I, W)}
    while done[F][last] < done[F][first] or done[F][first] < many:
        if done[F][first] < many:
            out.append((first, F))
            done[F][first] += 1
        out += [(first, I), (first, W), (last, F), (last, I), (last, W)]
        done[F][last] += 1
        for op in (I, W):
            done[op][first] += 1
            done[op][last] += 1
    out += [(first, I), (last, I)] * rank
    out += [(first, I), (first, W)] * (ranks - rank)
    done[I][last] += rank
    done[I][first] += ranks
    done[W][first] += ranks - rank
    out += [(last, W)] * (done[I][last] - done[W][last])
    return out + [(first, W)] * (done[I][first] - done[W][first])


def _dual_pipe_v(ranks: int, m: int, chunks: int, rank: int) -> Order:
    """DeepSeek's DualPipe cut in half; a forward and a backward that PyTorch overlaps stand one after the other."""
    first, last = rank, 2 * ranks - 1 - rank
    out: Order = []
    waiting: deque[int] = deque()

    def backward(stage: int, is_split: bool) -> None:
        out.append((stage, I if is_split else B))
        if is_split:
            waiting.append(stage)

    def weight() -> None:
        if waiting:
            out.append((waiting.popleft(), W))

    out += [(first, F)] * (2 * (ranks - rank - 1))
    out += [(first, F), (last, F)] * (rank + 1)
    for _ in range(ranks - rank - 1):
        backward(last, True)
        weight()
        out.append((last, F))
    out += [(first, F), (last, B), (last, F), (first, B)] * (m - 2 * ranks + rank + 1)
    out += [(last, B), (last, F), (first, B)] * (ranks - rank - 1)
    half, is_split = (rank + 1) // 2, False
    for i in range(rank + 1):
        is_split |= i == half and rank % 2 == 1
        backward(last, is_split)
        is_split |= i == half and rank % 2 == 0
        backward(first, is_split)
    for _ in range(ranks - rank - 1):
        weight()
        backward(first, is_split)
    for _ in range(rank + 1):
        weight()
    return out


def _check_single(name: str, ranks: int, m: int, chunks: int) -> None:
    if chunks != 1:
        raise UsageError(f"{name} has one chunk a rank, not {chunks}; use Interleaved1F1B or LoopedBFS for more")


def _check_any(name: str, ranks: int, m: int, chunks: int) -> None:
    return None


def _check_rounds(name: str, ranks: int, m: int, chunks: int) -> None:
    rounds = max(1, m // ranks)
    if m % rounds:
        raise UsageError(f"{name}: {m} micro batches must divide into {rounds} rounds; take a multiple of {ranks}")


def _check_v(name: str, ranks: int, m: int, chunks: int) -> None:
    if chunks != 2:
        raise UsageError(f"{name} has two chunks a rank, not {chunks}; give chunks=2 in the layout")
    if name == "DualPipeV" and m < 2 * ranks:
        raise UsageError(f"{name}: {m} micro batches are fewer than its {2 * ranks} stages")


@dataclass(frozen=True, slots=True)
class _Rule:
    order: Callable[[int, int, int, int], Order]
    check: Callable[[str, int, int, int], None]
    shape: str = "loop"


_RULES = {
    "GPipe": _Rule(_gpipe, _check_single),
    "1F1B": _Rule(_one_f_one_b, _check_single),
    "Interleaved1F1B": _Rule(_interleaved, _check_rounds),
    "LoopedBFS": _Rule(_looped_bfs, _check_any),
    "InterleavedZeroBubble": _Rule(_zero_bubble, _check_rounds),
    "ZBVZeroBubble": _Rule(_zbv, _check_v, "v"),
    "DualPipeV": _Rule(_dual_pipe_v, _check_v, "v"),
}
_SHORT = {
    "Interleaved1F1B": ("interleaved", "megatron", "vpp"),
    "LoopedBFS": ("bfs",),
    "InterleavedZeroBubble": ("zerobubble", "zb1p", "zb", "interleavedzb"),
    "ZBVZeroBubble": ("zbv",),
    "DualPipeV": ("dualpipe",),
}
SCHEDULES = tuple(_RULES)


def with_messages(program: Program) -> tuple[tuple[Action, ...], ...]:
    """Each rank's actions with the sends and receives between stages of different ranks, in the order of posting.

    A receive is posted when its sender has run, as PyTorch's runtime lays them out. Raises UsageError where a
    program waits for itself.
    """
    left = [deque(_together(program, rank)) for rank in range(program.ranks)]
    out: list[list[Action]] = [[] for _ in left]
    ready: set[Action] = set()
    while any(left):
        before = sum(map(len, left))
        for rank, row in enumerate(left):
            if not row or not all(need in ready for action in row[0] for need in program.needs(action)):
                continue
            actions = row.popleft()
            out[rank] += actions
            ready.update(actions)
            for message in filter(None, (message_of(program, action) for action in actions)):
                send, receive, peer = message
                out[rank].append(send)
                out[peer].append(receive)
        if sum(map(len, left)) == before:
            raise UsageError(f"{program.schedule}: waits for itself at {next(str(r[0][0]) for r in left if r)}")
    return tuple(tuple(row) for row in out)


def _together(program: Program, rank: int) -> Iterator[tuple[Action, ...]]:
    """A rank's actions, in pairs where PyTorch overlaps a forward with the backward behind it: what both have for others
    is sent behind the backward. DualPipeV does so, but for the first pair of its last rank."""
    row = program.actions[rank]
    alone = program.schedule != "DualPipeV"
    spared = rank == program.ranks - 1
    at = 0
    while at < len(row):
        pair = not alone and row[at].op is F and at + 1 < len(row) and row[at + 1].op is B
        if pair and spared:
            pair = spared = False
        yield row[at : at + 1 + pair]
        at += 1 + pair


def message_of(program: Program, action: Action) -> tuple[Action, Action, int] | None:
    """(send, receive, receiving rank) that follow a compute action, None where the next stage is on the same rank."""
    forward = action.op is F
    peer_stage = action.stage + (1 if forward else -1)
    if action.op is W or not 0 <= peer_stage < program.stages:
        return None
    here, there = program.rank_of_stage[action.stage], program.rank_of_stage[peer_stage]
    if here == there:
        return None
    send, receive = (Op.SEND_F, Op.RECV_F) if forward else (Op.SEND_B, Op.RECV_B)
    return Action(action.stage, send, action.micro_batch), Action(peer_stage, receive, action.micro_batch), there


ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that fill the bubble with weight gradients."""


def bubble_units(schedule: str, ranks: int) -> float:
    """Idle time of the step in units of one chunk's forward plus backward, on equal stages and free messages.

    (ranks - 1) for GPipe, 1F1B, LoopedBFS and Interleaved1F1B (micro batches a multiple of `ranks` there). Schedules of
    ZERO_BUBBLE idle (ranks - 1) forwards, a third of that, if forward, input and weight gradients take the same time
    and there are at least 2 · ranks micro batches.
    """
    return (ranks - 1) / (3.0 if canonical(schedule) in ZERO_BUBBLE else 1.0)


def message_delays(schedule: str, ranks: int, chunks: int, micro_batches: int) -> float:
    """How many messages in a row delay the step on equal stages, posted and awaited as PyTorch does (postings.deeds).

    Exact for short messages over kernels that move both ways at once, and at least 2 · ranks micro batches. GPipe and
    LoopedBFS ask for each message only when they need it, so none hides; 1F1B exchanges twice for each micro batch and
    waits both times, once where a rank has one neighbour; what DualPipeV overlaps sends only when both parts are done;
    the others pay the fill and drain.
    """
    name = canonical(schedule)
    if ranks == 1:
        return 0.0
    if name in ("GPipe", "LoopedBFS"):
        return 2.0 * (chunks * micro_batches + ranks - 2)
    if name == "1F1B":
        steady = micro_batches + 1 if ranks == 2 else 2 * micro_batches + 2 * ranks - 5
        return float(max(steady, 2 * (ranks - 1)))
    if name == "InterleavedZeroBubble":
        return (chunks + 3.0) * ranks - 4
    if name == "ZBVZeroBubble":
        return 5.0 * ranks - 7
    if name == "DualPipeV":
        return 6 * ranks - 7 + max(0, micro_batches - 2 * ranks) * (2 * ranks - 3) // (ranks - 1)
    return 2.0 * (ranks * chunks - 1)
