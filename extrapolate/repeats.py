"""Turns a sequence of operators or kernels into the stack of layers that repeats in it, although no two may be alike.

Each layer holds some item, its anchor, once: attention, a norm, a matrix of its own. The stretches from one anchor to
the next are compared by what they hold, not by position, so that an extra kernel in one of them, or two kinds of layers
in turn, hide nothing. Where a layer begins before its anchor follows from how far what precedes the first anchor is
what precedes the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scaletrace.parse.events import BoolArray, Int32Array, IntArray

FloatArray = npt.NDArray[np.float64]

ALIKE = 0.5
"""Two neighbours of a stack share at least this much (cosine of the roots of the counts): the halves of one layer share a
norm and a sum, which is 0.2 to 0.4."""
AROUND_CORE = 0.25
"""The same between two attentions, which can't be halves: a dense layer and one with many experts share that alone."""
SAME = 0.8
"""Layers this similar are of one kind, unless one is longer by the factor LONGER."""
LONGER = 1.5
COVERED = 0.75
"""Anchors that explain this much of what the best one explains are as good: some explain the ends along with the layers."""
STACK = 0.5
"""Less than this share of the work repeated is no stack of layers."""
SHORT, TOWER = 3, 0.75
"""Layers of fewer items than SHORT must hold the share TOWER."""
_OWN, _SHARED = 192, 64
_PEERS = 8


@dataclass(frozen=True, slots=True)
class Stack:
    """l layers of a sequence: layer i holds the items first[i] … last[i] - 1, and those after it up to the next one.

    kind  int32[l]: equal for layers of one kind, numbered in order of appearance
    run   int32[l]: layers of one run follow each other; something else lies between two runs
    share of the weight that the layers hold
    """

    first: IntArray
    last: IntArray
    kind: Int32Array
    run: Int32Array
    share: float

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence with what every candidate needs: counts of each token up to each place (n + 1 rows)."""

    tokens: Int32Array
    upto: IntArray
    weight: FloatArray
    opens: BoolArray

    def roots(self, first: IntArray, last: IntArray) -> FloatArray:
        """Square roots of the token counts of stretches, each of length one: their products are similarities."""
        bags = np.sqrt(self.upto[last] - self.upto[first])
        length = np.sqrt((bags**2).sum(axis=1, keepdims=True))
        return np.asarray(bags / np.maximum(length, 1e-12), np.float64)


def _sequence(tokens: Int32Array, weight: FloatArray | None, opens: BoolArray | None) -> _Sequence:
    """Columns: one for each of the frequent tokens, the rest share some."""
    n = len(tokens)
    _, code, count = np.unique(tokens, return_inverse=True, return_counts=True)
    rank = np.empty(len(count), np.int32)
    rank[np.argsort(-count, kind="stable")] = np.arange(len(count))
    column = np.where(rank < _OWN, rank, _OWN + rank % _SHARED).astype(np.int32)[code.reshape(-1)]
    upto = np.zeros((n + 1, int(column.max(initial=0)) + 1), np.int64)
    upto[np.arange(n) + 1, column] = 1
    np.cumsum(upto, axis=0, out=upto)
    return _Sequence(
        tokens,
        upto,
        np.ones(n) if weight is None else np.asarray(weight, np.float64),
        np.zeros(n, np.bool_) if opens is None else opens,
    )


def find_stack(
    tokens: Int32Array,
    *,
    weight: FloatArray | None = None,
    opens: BoolArray | None = None,
    cores: BoolArray | None = None,
    sizes: IntArray | None = None,
    want: int = 0,
) -> Stack | None:
    """The stack of layers in a sequence of n items, None where less than half of the weight repeats (with `want`: any).

    weight  float64[n]: what an item counts (its time); one each by default
    opens   bool[n]: items with which a layer preferably begins (norms), where several beginnings explain as much
    cores   bool[n]: items that a layer holds once (attention); the best anchor if they explain most
    sizes   int64[n]: elementary things that an item stands for (operators inside it), 1 each by default
    want    number of layers that must come out, 0 = any
    """
    if len(tokens) < 4:
        return None
    sequence = _sequence(tokens, weight, opens)
    found: list[_Candidate] = []
    for places, core in _candidates(tokens, cores, want):
        one = _linked(sequence, places, core)
        if one is not None:
            found.append(one)
    best = max((one.held for one in found), default=0.0)
    good = [
        one for one in found if one.held >= (STACK if one.core else COVERED) * best and (one.core or one.alike >= SAME)
    ]
    most = max((one.count for one in good if one.core), default=0)
    # Attention stands in each layer once, but for the odd layer without any; else the finest cut into equal parts counts.
    good.sort(key=lambda one: (one.worth(most), -int(one.places[0])), reverse=True)
    for one in good:
        stack = _cut(sequence, one)
        if stack is None or (len(stack) != want if want else stack.share < _enough(stack, sizes)):
            continue
        if 2 * (int(stack.kind.max()) + 1) <= len(stack) or one.core:
            return stack
    return None


def _enough(stack: Stack, sizes: IntArray | None) -> float:
    """The share that a stack must hold: a product and its activation, repeated, are a tower that other models have too."""
    upto = np.append(0, np.cumsum(sizes)) if sizes is not None else np.arange(int(stack.last[-1]) + 1)
    short = float((upto[stack.last] - upto[stack.first]).mean()) < SHORT
    return TOWER if short else STACK


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An anchor: its places, whether it is attention, the weight of the stretches that are like a neighbour, how alike
    those are on average, and how many."""

    places: IntArray
    core: bool
    held: float
    alike: float
    count: int

    def worth(self, cores: int) -> tuple[bool, bool, int, float]:
        """Order of preference, where attention stands `cores` times (0 = nowhere in a stack)."""
        every = self.core or (self.alike >= SAME and cores < self.count <= 1.25 * cores)
        return every, self.alike >= SAME, self.count, self.alike


def _candidates(tokens: Int32Array, cores: BoolArray | None, want: int) -> list[tuple[IntArray, bool]]:
    """(places, is attention) of every token that occurs often enough, and of all attention whatever its size."""
    order = np.argsort(tokens, kind="stable")
    _, first, count = np.unique(tokens[order], return_index=True, return_counts=True)
    least, most = max(2, want), len(tokens) // 2 if not want else want + max(1, want // 4)
    out = []
    for at, times in zip(first.tolist(), count.tolist(), strict=True):
        if least <= times <= most:
            places = order[at : at + times]
            out.append((places, bool(cores is not None and cores[places[0]])))
    if cores is not None and least <= int(cores.sum()) <= most:
        out.append((np.flatnonzero(cores), True))
    return out


def _linked(sequence: _Sequence, places: IntArray, core: bool) -> _Candidate | None:
    """How well one anchor explains the sequence, None where no stretch is like its neighbour."""
    gap = np.diff(places)
    last = np.append(places[1:], min(len(sequence.tokens), int(places[-1]) + int(np.median(gap))))
    roots = sequence.roots(places, last)
    alike = (roots[1:] * roots[:-1]).sum(axis=1)
    link = alike >= (AROUND_CORE if core else ALIKE)
    if not link.any():
        return None
    inside = np.zeros(len(places), np.bool_)
    inside[1:] |= link
    inside[:-1] |= link
    total = np.append(0.0, np.cumsum(sequence.weight))
    each = total[last] - total[places]
    each[-1] = np.median(each[:-1])  # where the last layer ends is not known yet
    held = float(each[inside].sum())
    return _Candidate(places, core, held, float(alike[link].mean()), int(inside.sum()))


def _cut(sequence: _Sequence, anchor: _Candidate) -> Stack | None:
    """Layers around the anchors; anchors between which something else lies begin a new run."""
    places = anchor.places
    roots = sequence.roots(places[:-1], places[1:])
    link = (roots[1:] * roots[:-1]).sum(axis=1) >= (AROUND_CORE if anchor.core else ALIKE)
    begins = np.flatnonzero(np.append(True, ~link))
    ends = np.append(begins[1:], len(places) - 1)
    first: list[int] = []
    last: list[int] = []
    run: list[int] = []
    for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        bounds = _run(sequence, places[begin : end + 1], last[-1] if last else 0)
        first += bounds[:-1]
        last += bounds[1:]
        run += [number] * (len(bounds) - 1)
    if len(first) < 2:
        return None
    starts, stops = np.array(first, np.int64), np.array(last, np.int64)
    total = np.append(0.0, np.cumsum(sequence.weight))
    held = float((total[stops] - total[starts]).sum())
    kinds = _kinds(sequence.roots(starts, stops), stops - starts)
    _, runs = np.unique(run, return_inverse=True)
    return Stack(starts, stops, kinds, runs.astype(np.int32), held / max(float(total[-1]), 1e-12))


def _run(sequence: _Sequence, anchors: IntArray, floor: int) -> list[int]:
    """Where the layers of a run of alike anchors begin, and where the last one ends; empty for fewer than two.

    floor: the first place that no earlier run holds
    """
    tokens, a = sequence.tokens, anchors.tolist()
    gap = a[1] - a[0]
    reach = min(gap - 1, a[0] - floor)
    before = max(extent(tokens[a[0] - reach : a[0]][::-1], tokens[b - reach : b][::-1])[0] for b in a[1 : _PEERS + 1])
    # The last layer ends like one of those before it; with several kinds of layers, like the one that fits best.
    peers = list(pairwise(a[-_PEERS - 1 :]))[::-1]
    tails = [extent(tokens[a[-1] : a[-1] + end - start], tokens[start:end]) for start, end in peers]
    best = max(range(len(peers)), key=lambda at: tails[at][1])
    after, whole = tails[best][0], max(1, peers[best][1] - peers[best][0] - before)
    seen = a[-1] + after
    if 2 * after >= whole:
        end = min(seen, a[-1] + whole)
    else:  # what follows the last anchor is no layer, as behind a final norm
        end = a.pop() - before
    if len(a) < 2:
        return []
    begin = a[0] - before
    opening = np.flatnonzero(sequence.opens[begin : begin + min(seen - end, gap - 1) + 1])
    shift = int(opening[0]) if len(opening) else 0
    bounds = [place - before + shift for place in a]
    return [*bounds, max(end + shift, bounds[-1] + 1)]


def extent(one: Int32Array, other: Int32Array) -> tuple[int, int]:
    """(how many items from the beginning two sequences share, whatever their order and with a few in between; how sure).

    Sure is the number of shared items less that of the others.
    """
    open_one: dict[int, int] = {}
    open_other: dict[int, int] = {}
    common = best = at = 0
    for k, (x, y) in enumerate(zip(one.tolist(), other.tolist(), strict=False), 1):
        if x == y:
            common += 1
        else:
            for item, mine, theirs in ((x, open_one, open_other), (y, open_other, open_one)):
                if theirs.get(item, 0):
                    theirs[item] -= 1
                    common += 1
                else:
                    mine[item] = mine.get(item, 0) + 1
        if 2 * common - k > best:
            best, at = 2 * common - k, k
    return at, best


def _kinds(roots: FloatArray, length: IntArray) -> Int32Array:
    """Number of each layer's kind, by likeness to the first layer of the kind and by length."""
    heads: list[int] = []
    out = np.zeros(len(roots), np.int32)
    for at in range(len(roots)):
        likeness = roots[heads] @ roots[at] * (same_length(length[heads], length[at])) if heads else np.zeros(0)
        if len(heads) and likeness.max() >= SAME:
            out[at] = int(likeness.argmax())
        else:
            out[at] = len(heads)
            heads.append(at)
    return out


def same_length(one: IntArray, other: int) -> BoolArray:
    """Whether lengths are within a half of each other; what holds the same things more often is another kind."""
    return np.asarray((one <= LONGER * other) & (other <= LONGER * one), np.bool_)


def alike(one: Int32Array, other: Int32Array) -> float:
    """Similarity of two sequences of tokens by what they hold, 0 to 1."""
    size = int(max(one.max(initial=0), other.max(initial=0))) + 1
    a, b = (np.sqrt(np.bincount(tokens, minlength=size)) for tokens in (one, other))
    length = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float(a @ b) / length if length else 0.0
