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
from scaletrace.parse.events import IntArray

UNPLACED = -1
_BRUTE_FORCE = 4_000_000
_MAX_SHIFTS = 64
_NEARLY_ALL = 0.9
_CLEARLY_MORE = 1.25
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
    label_b: IntArray,
    size_b: IntArray,
    step_b: IntArray,
) -> IntArray:
    """Position in a of every element of b, -1 where it has none: the common subsequence that agrees most in steps."""
    n, m = len(label_a), len(label_b)
    best = np.zeros((n + 1, m + 1), np.int32)
    for i in range(n - 1, -1, -1):
        for j in range(m - 1, -1, -1):
            value = max(best[i + 1, j], best[i, j + 1])
            if label_a[i] == label_b[j] and (size_a[i] < 0 or size_b[j] < 0 or size_a[i] == size_b[j]):
                gain = 2
                if step_a[i] >= 0 and step_b[j] >= 0:
                    gain = 4 if step_a[i] == step_b[j] else -100
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
    found = align_with_gaps(a.label, a.size, a.step, b.label, b.size, b.step)
    return int(np.sum(found != UNPLACED)) >= _CLEARLY_MORE * overlap


def _shift_of_ends(a: Sequence_, b: Sequence_) -> int | None:
    """The shift at which the last elements meet, where both were issued in the same step; None otherwise.

    A step ends on all ranks with the same call, while sessions lose records at their start.
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
    origin, ambiguous, gaps = 0, 0, 0
    positions: dict[int, IntArray] = {order[0]: np.arange(len(line), dtype=np.int64)}
    spare = 2**40  # elements that fit nowhere get positions of their own
    for k in order[1:]:
        other = sequences[k]
        shift, unsure, broken = best_shift(line, other)
        ambiguous += unsure
        if broken:
            gaps += 1
            at = _with_gaps(line, other, shift)
            lost = at == UNPLACED
            at = at + origin
            at[lost] = spare + np.arange(int(lost.sum()))
            spare += int(lost.sum())
            positions[k] = at
            continue
        at = np.arange(len(other), dtype=np.int64) + (shift or 0)
        positions[k] = at + origin
        line, moved = _extend(line, other, shift or 0)
        origin -= moved
    return Placed(tuple(positions[k] for k in range(len(sequences))), ambiguous, gaps)


def _with_gaps(a: Sequence_, b: Sequence_, shift: int | None) -> IntArray:
    if len(a) * len(b) <= _BRUTE_FORCE:
        return align_with_gaps(a.label, a.size, a.step, b.label, b.size, b.step)
    if shift is None:
        return np.full(len(b), UNPLACED, np.int64)
    at = np.arange(len(b), dtype=np.int64) + shift
    inside = (at >= 0) & (at < len(a))
    fits = np.zeros(len(b), bool)
    i = at[inside]
    fits[inside] = (a.label[i] == b.label[inside]) & (
        (a.size[i] < 0) | (b.size[inside] < 0) | (a.size[i] == b.size[inside])
    )
    return np.where(fits | ~inside, at, UNPLACED)


def _extend(line: Sequence_, other: Sequence_, shift: int) -> tuple[Sequence_, int]:
    """The line with what `other` has beyond its ends and with its sizes and steps where the line lacks them.

    Returns also by how much the line grew at its beginning.
    """
    before, after = max(0, -shift), max(0, len(other) + shift - len(line))
    low, high = max(0, shift), min(len(line), len(other) + shift)
    overlap = slice(low - shift, high - shift)
    offset = np.int64(np.median(line.end_ns[low:high] - other.end_ns[overlap]))

    def grown(mine: IntArray, theirs: IntArray, fill: bool) -> IntArray:
        middle = mine.copy()
        if fill:
            middle[low:high] = np.where(mine[low:high] < 0, theirs[overlap], mine[low:high])
        return np.concatenate([theirs[:before], middle, theirs[len(theirs) - after :]])

    return (
        Sequence_(
            line.rank,
            grown(line.label, other.label, False),
            grown(line.size, other.size, True),
            grown(line.step, other.step, True),
            grown(line.end_ns, other.end_ns + offset, False),
            line.tight,
        ),
        before,
    )
