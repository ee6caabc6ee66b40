"""Turns the sequences in which ranks issued collectives into common positions, though every window is cut differently.

Two sequences are laid over each other with the shift at which names and sizes agree. Repeating steps leave several
such shifts; the step numbers of the host decide between them, then the shift at which the ends move together, since
members of one collective end together whatever the clocks say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaletrace.jit import jit
from scaletrace.parse.events import BoolArray, IntArray

UNPLACED = -1
_BRUTE_FORCE = 4_000_000
_MAX_SHIFTS = 64
_NEARLY_ALL = 0.9
_CLEARLY_MORE = 1.25
_NEAR_NS = 200_000
"""Kernels of one collective end within tens of microseconds; those that follow each other seldom do."""
_FAR_NS = 5_000_000
_WINDOWS_NS = (10_000, 50_000, 200_000)
_NEARLY_ALL_IN_TIME = 0.97
_SAMPLES = 64
_DECISIVE = 5.0
"""How many times better the ends of members must move together to outweigh where the last step ends."""


@dataclass(frozen=True, slots=True)
class Sequence_:
    """One rank's collectives of one group in order: what they are (label, size; -1 unknown), in which step, their end.

    `tight`: the ends are those of kernels, which members share within microseconds.
    """

    rank: int
    label: IntArray
    size: IntArray
    step: IntArray
    end_ns: IntArray
    tight: bool = True

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, slots=True)
class Placed:
    """Position of every element on the common line, and how it was found.

    positions: one int64 array a sequence; equal positions belong together. `ambiguous` counts sequences for which a
    second shift was nearly as good; `gaps` counts sequences with elements missing in the middle.
    """

    positions: tuple[IntArray, ...]
    ambiguous: int = 0
    gaps: int = 0


@jit
def score_shifts(
    label_a: IntArray,
    size_a: IntArray,
    step_a: IntArray,
    label_b: IntArray,
    size_b: IntArray,
    step_b: IntArray,
    shifts: IntArray,
    limit: int,
) -> tuple[IntArray, IntArray, IntArray]:
    """(mismatches, agreeing steps, steps known on both) of each shift, element j of b lying on j + shift of a.

    Counting stops at `limit` mismatches.
    """
    n = len(shifts)
    bad, same, both = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    for k in range(n):
        shift = shifts[k]
        low, high = max(0, shift), min(len(label_a), len(label_b) + shift)
        for i in range(low, high):
            j = i - shift
            if label_a[i] != label_b[j] or (size_a[i] >= 0 and size_b[j] >= 0 and size_a[i] != size_b[j]):
                bad[k] += 1
                if bad[k] > limit:
                    break
            if step_a[i] >= 0 and step_b[j] >= 0:
                both[k] += 1
                if step_a[i] == step_b[j]:
                    same[k] += 1
    return bad, same, both


@jit
def align_with_gaps(
    label_a: IntArray,
    size_a: IntArray,
    step_a: IntArray,
    end_a: IntArray,
    label_b: IntArray,
    size_b: IntArray,
    step_b: IntArray,
    end_b: IntArray,
    near_ns: int,
    far_ns: int,
) -> IntArray:
    """Position in a of every element of b, -1 where it has none: the common subsequence that agrees most.

    Equal names and sizes are required, equal steps and ends within `near_ns` preferred, other steps and ends farther
    apart than `far_ns` forbidden. `far_ns` 0 leaves times out of it; else both ends are on one clock.
    """
    n, m = len(label_a), len(label_b)
    best = np.zeros((n + 1, m + 1), np.int32)
    for i in range(n - 1, -1, -1):
        for j in range(m - 1, -1, -1):
            value = max(best[i + 1, j], best[i, j + 1])
            if label_a[i] == label_b[j] and (size_a[i] < 0 or size_b[j] < 0 or size_a[i] == size_b[j]):
                gain = 2
                if step_a[i] >= 0 and step_b[j] >= 0:
                    gain = 4 if step_a[i] == step_b[j] else -100
                if far_ns > 0:
                    apart = abs(end_a[i] - end_b[j])
                    gain += 4 if apart <= near_ns else (0 if apart <= far_ns else -100)
                value = max(value, best[i + 1, j + 1] + gain)
            best[i, j] = value
    out = np.full(m, -1, np.int64)
    i, j = 0, 0
    while i < n and j < m:
        if best[i, j] == best[i + 1, j]:
            i += 1
        elif best[i, j] == best[i, j + 1]:
            j += 1
        else:
            out[j] = i
            i += 1
            j += 1
    return out


def _candidates(a: Sequence_, b: Sequence_) -> IntArray:
    """Shifts worth scoring: all of them for short sequences, else those that common runs of names vote for."""
    if len(a) * len(b) <= _BRUTE_FORCE:
        return np.arange(1 - len(b), len(a), dtype=np.int64)
    run = 8
    keys_a, keys_b = _runs(a.label, run), _runs(b.label, run)
    order = np.argsort(keys_a, kind="stable")
    counts: dict[int, int] = {}
    for j in np.linspace(0, len(keys_b) - 1, 256).astype(np.int64).tolist():
        low, high = np.searchsorted(keys_a[order], [keys_b[j], keys_b[j] + 1])
        for i in order[low:high].tolist():
            counts[i - j] = counts.get(i - j, 0) + 1
    top = sorted(counts, key=lambda s: (-counts[s], abs(s)))[: 4 * _MAX_SHIFTS]
    return np.array(sorted(top), np.int64)


def _runs(label: IntArray, run: int) -> IntArray:
    """A number for each run of `run` labels (wrapping arithmetic is what makes it a hash)."""
    out = np.zeros(len(label) - run + 1, np.uint64)
    for k in range(run):
        out = out * np.uint64(1_000_003) + label[k : len(label) - run + 1 + k].astype(np.uint64)
    return (out >> np.uint64(1)).astype(np.int64)


def best_shift(a: Sequence_, b: Sequence_) -> tuple[int | None, bool, bool]:
    """(shift of b onto a or None, whether another shift was as good, whether some elements disagree)."""
    shorter = min(len(a), len(b))
    shifts = _candidates(a, b)
    overlap = np.minimum(len(a), len(b) + shifts) - np.maximum(0, shifts)
    shifts = shifts[overlap >= max(1, -(-shorter // 4))]
    overlap = np.minimum(len(a), len(b) + shifts) - np.maximum(0, shifts)
    if not len(shifts):
        return None, False, True
    bad, same, both = score_shifts(a.label, a.size, a.step, b.label, b.size, b.step, shifts, max(1, shorter // 20))
    # a shift that no step number supports is worth less than one that they all support, more than one they deny
    wrong_steps = np.where(both > 0, 1 - same / np.maximum(both, 1), 0.5)
    usable = bad <= overlap // 20
    if not usable.any() or _gap_explains_more(a, b, int(overlap[usable].max())):
        return None, False, True
    # steps before single mismatches: one missing kernel costs a few, a shift by a whole step denies all
    usable &= wrong_steps <= wrong_steps[usable].min() + 0.05
    usable &= bad == bad[usable].min()
    rest = np.flatnonzero(usable)
    if len(rest) > _MAX_SHIFTS:
        rest = rest[np.argsort(-overlap[rest], kind="stable")[:_MAX_SHIFTS]]
    spread, middle = np.array([_ends(a, b, int(s)) for s in shifts[rest]]).T
    # few pairs move together by chance, so a small overlap must earn its small spread
    cost = (spread + 1_000) * (overlap[rest].max() / overlap[rest]) ** 2
    pick = np.lexsort((np.abs(middle), -overlap[rest], np.round(cost, 3)))
    best = int(pick[0])
    by_ends = np.flatnonzero(shifts[rest] == _shift_of_ends(a, b))
    if len(by_ends) and (not (a.tight and b.tight) or cost[by_ends[0]] <= _DECISIVE * cost[best]):
        best = int(by_ends[0])
    unsure = len(rest) > 1 and bool(np.partition(cost, 1)[1] <= 2 * cost[best])
    return int(shifts[rest[best]]), unsure, bool(bad[rest[best]] > 0)


def _gap_explains_more(a: Sequence_, b: Sequence_, overlap: int) -> bool:
    """Whether leaving out some elements matches clearly more of the shorter sequence than the widest shift does."""
    shorter = min(len(a), len(b))
    if overlap >= _NEARLY_ALL * shorter or len(a) * len(b) > _BRUTE_FORCE:
        return False
    return int(np.sum(_gapped(a, b) != UNPLACED)) >= _CLEARLY_MORE * overlap


def _shift_of_ends(a: Sequence_, b: Sequence_) -> int | None:
    """The shift at which the last elements meet, where both were issued in the same step; None otherwise.

    A step ends on all ranks with the same call, while profilers lose records when they start.
    """
    same = a.step[-1] >= 0 and a.step[-1] == b.step[-1]
    return len(a) - len(b) if same else None


def _ends(a: Sequence_, b: Sequence_, shift: int) -> tuple[float, float]:
    """(spread, middle) of the differences of ends in ns at this shift."""
    low, high = max(0, shift), min(len(a), len(b) + shift)
    ends = (a.end_ns[low:high] - b.end_ns[low - shift : high - shift]).astype(np.float64)
    middle = float(np.median(ends))
    return float(np.median(np.abs(ends - middle))) if len(ends) > 1 else float(np.abs(middle)), middle


def place(sequences: Sequence[Sequence_]) -> Placed:
    """Lay all sequences on one line, the longest first, each next one onto what is there already.

    The answer does not depend on the order in which the sequences are given.
    """
    order = sorted(range(len(sequences)), key=lambda k: (-len(sequences[k]), sequences[k].rank))
    line = sequences[order[0]]
    ambiguous, gaps = 0, 0
    positions: dict[int, IntArray] = {order[0]: np.arange(len(line), dtype=np.int64)}
    for k in order[1:]:
        at, unsure, broken = _onto(line, sequences[k])
        ambiguous, gaps = ambiguous + unsure, gaps + broken
        line, moved, own = _merge(line, sequences[k], at)
        positions = {rank: moved[place] for rank, place in positions.items()}
        positions[k] = own
    return Placed(tuple(positions[k] for k in range(len(sequences))), ambiguous, gaps)


def _onto(a: Sequence_, b: Sequence_) -> tuple[IntArray, bool, bool]:
    """(index in a of every element of b, UNPLACED where it has none; whether that is in doubt; whether there are gaps)."""
    shift, unsure, broken = best_shift(a, b)
    at = np.arange(len(b), dtype=np.int64) + (shift or 0)
    at[(at < 0) | (at >= len(a))] = UNPLACED
    if broken:
        at = _gapped(a, b) if len(a) * len(b) <= _BRUTE_FORCE else np.where(_agree(a, b, at), at, UNPLACED)
    if not (a.tight and b.tight):
        return at, unsure, broken
    if not broken and _in_time(a, b, at, _own_offset(a, b, at)) >= _NEARLY_ALL_IN_TIME * np.sum(at != UNPLACED):
        return at, unsure, broken
    offset = _offset(a, b)
    timed = _gapped(a, b, offset) if len(a) * len(b) <= _BRUTE_FORCE else _nearest(a, b, offset)
    if _in_time(a, b, timed, offset) > _in_time(a, b, at, offset):
        return timed, False, True
    return at, unsure, broken


def _gapped(a: Sequence_, b: Sequence_, offset: int | None = None) -> IntArray:
    end_b, far = (b.end_ns, 0) if offset is None else (b.end_ns + offset, _FAR_NS)
    return align_with_gaps(a.label, a.size, a.step, a.end_ns, b.label, b.size, b.step, end_b, _NEAR_NS, far)


def _agree(a: Sequence_, b: Sequence_, at: IntArray) -> BoolArray:
    """Which elements of b have the name and size of their element of a."""
    i = np.maximum(at, 0)
    sizes = (a.size[i] < 0) | (b.size < 0) | (a.size[i] == b.size)
    return np.asarray((at != UNPLACED) & (a.label[i] == b.label) & sizes, np.bool_)


def _in_time(a: Sequence_, b: Sequence_, at: IntArray, offset: int) -> int:
    """How many elements of b agree with theirs of a in name, size and end."""
    near = np.abs(a.end_ns[np.maximum(at, 0)] - b.end_ns - offset) <= _NEAR_NS
    return int(np.sum(_agree(a, b, at) & near))


def _own_offset(a: Sequence_, b: Sequence_, at: IntArray) -> int:
    """The clock difference (a minus b) that this placement implies."""
    placed = at != UNPLACED
    return int(np.median(a.end_ns[at[placed]] - b.end_ns[placed])) if placed.any() else 0


def _offset(a: Sequence_, b: Sequence_) -> int:
    """The clock difference (a minus b) at which most ends of equally named elements meet."""
    some = np.unique(np.linspace(0, len(b) - 1, _SAMPLES).astype(np.int64))
    same = a.label[None, :] == b.label[some][:, None]
    same &= (a.step[None, :] < 0) | (b.step[some][:, None] < 0) | (a.step[None, :] == b.step[some][:, None])
    apart = np.sort((a.end_ns[None, :] - b.end_ns[some][:, None])[same])
    if not len(apart):
        return 0
    together = np.zeros(len(apart), np.int64)
    for window in _WINDOWS_NS:  # summed, so that a sharp peak beats a broad one of as many
        together += np.searchsorted(apart, apart + window, side="right") - np.searchsorted(apart, apart - window)
    return int(apart[np.argmax(together)])


def _nearest(a: Sequence_, b: Sequence_, offset: int) -> IntArray:
    """For each element of b the one of a with its name that ends nearest, if near enough; for long sequences."""
    out = np.full(len(b), UNPLACED, np.int64)
    for label in np.unique(b.label).tolist():
        mine, theirs = np.flatnonzero(b.label == label), np.flatnonzero(a.label == label)
        if not len(theirs):
            continue
        ends, wanted = a.end_ns[theirs], b.end_ns[mine] + offset
        high = np.clip(np.searchsorted(ends, wanted), 1, len(ends) - 1) if len(ends) > 1 else np.zeros(len(mine), int)
        low = np.maximum(high - 1, 0)
        pick = np.where(np.abs(ends[high] - wanted) < np.abs(ends[low] - wanted), high, low)
        near = np.abs(ends[pick] - wanted) <= _NEAR_NS
        out[mine[near]] = theirs[pick[near]]
    out[~_agree(a, b, out)] = UNPLACED
    placed = np.flatnonzero(out != UNPLACED)
    # an element of a serves one of b, and order is kept
    keep = out[placed] > np.maximum.accumulate(np.r_[-1, out[placed][:-1]]) if len(placed) else placed
    out[placed[~keep]] = UNPLACED
    return out


def _merge(line: Sequence_, other: Sequence_, at: IntArray) -> tuple[Sequence_, IntArray, IntArray]:
    """(the line with the elements that only `other` has, new index of each old element, index of each of `other`).

    What the line does not know of size and step is filled in.
    """
    placed = at != UNPLACED
    before = np.maximum.accumulate(np.where(placed, at, -1)) if len(at) else at
    new = np.flatnonzero(~placed)
    key = np.concatenate([np.arange(len(line)), before[new] + 0.5])
    order = np.argsort(key, kind="stable")
    index = np.empty(len(order), np.int64)
    index[order] = np.arange(len(order))
    own = np.empty(len(other), np.int64)
    own[placed], own[new] = index[at[placed]], index[len(line) :]
    gap = line.end_ns[at[placed]] - other.end_ns[placed]
    shift = np.int64(np.median(gap)) if len(gap) else np.int64(0)
    size, step = line.size.copy(), line.step.copy()
    for mine, theirs in ((size, other.size), (step, other.step)):
        mine[at[placed]] = np.where(mine[at[placed]] < 0, theirs[placed], mine[at[placed]])

    def merged(mine: IntArray, theirs: IntArray) -> IntArray:
        return np.asarray(np.concatenate([mine, theirs[new]])[order], np.int64)

    whole = Sequence_(
        line.rank,
        merged(line.label, other.label),
        merged(size, other.size),
        merged(step, other.step),
        merged(line.end_ns, other.end_ns + shift),
        line.tight,
    )
    return whole, index[: len(line)], own
