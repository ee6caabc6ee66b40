"""Turns sends and receives into pairs: the k-th send from a to b in a group meets b's k-th receive from a.

Where both sides hold the same number in every step, order alone decides. Where a window cut some off on one side, the
shift does at which sizes and steps agree, no message arrives before it was issued, and the last of a step meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from scaletrace.parse.clocks import UNBOUNDED, Bound, apply
from scaletrace.parse.collectives import ALONE, ORDER, Table
from scaletrace.parse.events import IntArray
from scaletrace.parse.health import Health
from scaletrace.parse.job import Clock
from scaletrace.parse.match_align import score_shifts
from scaletrace.parse.members import KIND, P2P

_FROM_ROOT = (KIND["broadcast"], KIND["scatter"])
_ONE_WAY = (*P2P, *_FROM_ROOT, KIND["reduce"], KIND["gather"])


def pair_messages(table: Table, clocks: Mapping[int, Clock], health: Health) -> None:
    """Give every send and receive with a known peer its `instance`, shared by the two of a pair, in place."""
    next_id = int(table.instance.max(initial=-1)) + 1
    rows = np.flatnonzero(np.isin(table.kind, list(P2P)))
    if not len(rows):
        return
    known = rows[table.peer[rows] >= 0]
    blind = np.setdiff1d(rows, known)
    table.instance[blind] = next_id + np.arange(len(blind))
    next_id += len(blind)
    issued = apply(clocks, table.rank, table.issue_ns)
    ended = apply(clocks, table.rank, table.end_ns)
    is_send = table.kind[known] == KIND["send"]
    source = np.where(is_send, table.rank[known], table.peer[known])
    target = np.where(is_send, table.peer[known], table.rank[known])
    _, code = np.unique(np.column_stack([table.group[known], source, target]), axis=0, return_inverse=True)
    code = code.reshape(-1)
    for pair in range(int(code.max(initial=-1)) + 1):
        mine = known[code == pair]
        sends, receives = (
            side[np.argsort(table.turn_ns[side], kind="stable")]
            for side in (mine[table.kind[mine] == KIND["send"]], mine[table.kind[mine] == KIND["recv"]])
        )
        shift, unsure = 0, False
        if len(sends) and len(receives) and not _same_counts(table.step[sends], table.step[receives]):
            doubt = _doubt(clocks, int(table.rank[sends[0]]), int(table.rank[receives[0]]))
            shift, unsure = _shift(table, sends, receives, ended[receives], issued[sends], doubt)
        if unsure:
            health.guessed["message sequences paired by time"] += 1
        table.instance[sends] = next_id + np.arange(len(sends)) - min(0, shift)
        table.instance[receives] = next_id + np.arange(len(receives)) + max(0, shift)
        table.rung[mine] = ORDER
        next_id += len(sends) + len(receives) + abs(shift)


def one_way(table: Table, ranks: Sequence[int]) -> tuple[Bound, ...]:
    """Bounds on clocks from what moves in one direction: nothing arrives before it was issued.

    A receive ends after its send was issued, a broadcast or scatter on other ranks after the root issued it, a reduce or
    gather on the root after every other rank issued it. Messages both ways make an interval.
    """
    index = {rank: i for i, rank in enumerate(ranks)}
    tightest: dict[tuple[int, int], int] = {}
    moves = np.flatnonzero(np.isin(table.kind, _ONE_WAY) & (table.bytes_in != 0) & (table.rung != ALONE))
    # a kernel's data leaves when it starts; gloo's may leave from the moment of the call
    left = np.where(table.on_device > 0, table.start_ns, table.issue_ns)
    order = moves[np.lexsort((table.rank[moves], table.instance[moves]))]
    for rows in np.split(order, np.flatnonzero(np.diff(table.instance[order])) + 1):
        for source, target in _directions(table, rows.tolist()):
            pair = (int(table.rank[source]), int(table.rank[target]))
            lag = int(table.end_ns[target] - left[source])
            tightest[pair] = min(tightest.get(pair, lag), lag)
    return tuple(
        Bound(index[target], index[source], -UNBOUNDED, lag) for (source, target), lag in sorted(tightest.items())
    )


def _directions(table: Table, rows: list[int]) -> Iterator[tuple[int, int]]:
    """(row that issues, row that ends after it) for the members of one instance."""
    if len(rows) < 2:
        return
    kind = int(table.kind[rows[0]])
    if kind in P2P:
        if {int(table.kind[row]) for row in rows} == P2P:
            yield (rows[0], rows[1]) if kind == KIND["send"] else (rows[1], rows[0])
        return
    for root in [row for row in rows if table.rank[row] == table.root[row]]:
        yield from ((root, row) if kind in _FROM_ROOT else (row, root) for row in rows if row != root)


def _same_counts(a: IntArray, b: IntArray) -> bool:
    """Whether both sides hold equally many messages in every step."""
    steps_a, counts_a = np.unique(a, return_counts=True)
    steps_b, counts_b = np.unique(b, return_counts=True)
    return bool(np.array_equal(steps_a, steps_b) and np.array_equal(counts_a, counts_b))


def _doubt(clocks: Mapping[int, Clock], a: int, b: int) -> float:
    """By how much the clocks of two ranks can be off against each other."""
    if any(clocks[rank].source == "unaligned" for rank in (a, b)):
        return float(UNBOUNDED)
    # "same host" offsets are exact as far as the system clock goes; the others stay within their interval
    return sum(
        0.0 if clocks[rank].source in ("same host", "reference") else float(clocks[rank].high_ns - clocks[rank].low_ns)
        for rank in (a, b)
    )


def _shift(
    table: Table, sends: IntArray, receives: IntArray, ended: IntArray, issued: IntArray, doubt: float
) -> tuple[int, bool]:
    """(shift of receives onto sends, whether time had to decide)."""
    zeros = np.zeros(max(len(sends), len(receives)), np.int64)
    shifts = np.arange(1 - len(receives), len(sends), dtype=np.int64)
    size = np.maximum(table.bytes_in, table.bytes_out)
    bad, same, both = score_shifts(
        zeros[: len(sends)],
        size[sends],
        table.step[sends],
        zeros[: len(receives)],
        size[receives],
        table.step[receives],
        shifts,
        len(sends),
    )
    overlap = np.minimum(len(sends), len(receives) + shifts) - np.maximum(0, shifts)
    cost = bad + (both - same)
    fit = np.flatnonzero((overlap >= -(-min(len(sends), len(receives)) // 4)) & (cost == cost[overlap > 0].min()))
    if len(fit) == 0:
        fit = np.flatnonzero(cost == cost.min())
    # a step ends with all of its messages taken, and profilers lose records when they start, so ends go together
    last = int(table.step[sends[-1]])
    at_end = len(sends) - len(receives) if last >= 0 and last == int(table.step[receives[-1]]) else None
    best: tuple[float, bool, float, int] | None = None
    for shift in shifts[fit].tolist():
        low, high = max(0, shift), min(len(sends), len(receives) + shift)
        lag = (ended[low - shift : high - shift] - issued[low:high]).astype(np.float64)
        early = max(0.0, -float(lag.min()) - doubt)
        rank = (early, shift != at_end, float(np.median(np.abs(lag))), shift)
        best = rank if best is None or rank < best else best
    return (best[3] if best else 0), len(fit) > 1
