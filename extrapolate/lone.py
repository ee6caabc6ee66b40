"""Turns passes that hold a single layer into that layer, between embedding and head.

Nothing repeats in such a pass, so other evidence must tell: the one attention of a block, or in a pipeline what every
stage does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scaletrace.extrapolate.kernels import Work, classify
from scaletrace.extrapolate.layers import Evidence, Found, Pass, Sections, attends, find_sections, framed, steps_of
from scaletrace.extrapolate.operators import outermost
from scaletrace.extrapolate.repeats import SAME, extent
from scaletrace.parse.events import BoolArray, Events, Int32Array, IntArray
from scaletrace.parse.job import RankTrace

ONE_ATTENTION = "a single attention"
ALL_STAGES = "what all stages do"


def by_one_block(events: Events, passes: list[Pass]) -> Found | None:
    """One layer, where each forward pass holds a single attention and so a single block.

    Its embedding lies before, its head is the last product, unless a sum follows that closes the block.
    """
    work = [classify(text) for text in events.strings]
    sums = np.array([text.endswith(("::add", "::add_")) for text in events.strings], np.bool_)
    units = []
    for one in passes:
        unit = np.full(len(one.ops.row), -1, np.int32)
        for rows in _batches(one):
            name, cores = events.name[one.ops.row[rows]], attends(events, one.ops.row[rows])
            mine = [Work.ATTENTION if core else work[code] for code, core in zip(name.tolist(), cores, strict=True)]
            if int(cores.sum()) != 1:
                return None
            unit[rows] = _block(mine, sums[name])
        units.append(unit)
    seen = any(len(one.forward) for one in passes)
    return Found(units, *framed(1, ("layer 0",), ("layer",)), ONE_ATTENTION) if seen else None


def _batches(one: Pass) -> list[IntArray]:
    batch = one.batch[one.forward]
    return [one.forward[batch == number] for number in np.unique(batch).tolist()]


def _block(work: Sequence[Work], sums: BoolArray) -> Int32Array:
    """Unit of each operator of a pass with one block: 0 embedding, 1 the block, 2 head and loss."""
    unit = np.ones(len(work), np.int32)
    attention = work.index(Work.ATTENTION)
    lookups = [at for at, kind in enumerate(work[:attention]) if kind is Work.EMBEDDING]
    if lookups:
        unit[: lookups[-1] + 1] = 0
    products = [at for at, kind in enumerate(work) if kind is Work.MATMUL and at > attention]
    losses = [at for at, kind in enumerate(work) if kind is Work.LOSS]
    if products and not sums[products[-1] :].any():
        head = products[-1]
        unit[head - (work[head - 1] is Work.NORM) :] = 2
    elif losses:
        unit[losses[0] :] = 2
    return unit


def staged(traces: Mapping[int, RankTrace], stages: Mapping[int, int]) -> dict[int, Sections]:
    """Sections of ranks whose stages are one layer each, by rank; empty where the stages do not do the same.

    traces, stages: by rank. The first stage does something ahead of its layer, the last one something behind it.
    """
    last = max(stages.values(), default=0)
    first_of = {stage: rank for rank, stage in sorted(stages.items(), reverse=True)}
    if last < 1 or set(first_of) != set(range(last + 1)):
        return {}
    words = [_words(traces[first_of[stage]]) for stage in range(last + 1)]
    common = set.intersection(*(set(spoken) for spoken in words))
    template = [word for word in words[last // 2] if word in common]
    if not template or any(sum(word in common for word in spoken) < SAME * len(template) for spoken in words):
        return {}
    return {
        rank: find_sections(trace, (_as_template(template, stages[rank], last),))
        for rank, trace in traces.items()
        if rank in stages
    }


def _words(trace: RankTrace) -> list[str]:
    """Name and dimensions of the forward operators of a rank's first micro batch."""
    for step in steps_of(trace):
        ops = outermost(trace.events, step)
        forward = np.flatnonzero(~ops.backward & (ops.partner >= 0))
        if len(forward):
            block = ops.block[ops.partner[forward]]
            return [_word(trace.events, int(row)) for row in ops.row[forward[block == block[0]]].tolist()]
    return []


def _word(events: Events, row: int) -> str:
    return f"{events.name_of(row)} {events.text('Input Dims', row) or ''}"


def _as_template(template: Sequence[str], stage: int, last: int) -> Evidence:
    """Evidence that a stage holds the template once: at its end in the first stage, at its beginning in the last one."""
    code = {word: number for number, word in enumerate(dict.fromkeys(template))}
    wanted = np.array([code[word] for word in template], np.int32)

    def look(events: Events, passes: list[Pass]) -> Found | None:
        units = []
        for one in passes:
            unit = np.full(len(one.ops.row), -1, np.int32)
            for rows in _batches(one):
                words = [_word(events, int(row)) for row in one.ops.row[rows].tolist()]
                spoken = np.array([code.get(word, -1 - at) for at, word in enumerate(words)], np.int32)
                mine = np.ones(len(rows), np.int32)
                if stage == 0:
                    mine[: len(rows) - extent(spoken[::-1], wanted[::-1])[0]] = 0
                elif stage == last:
                    mine[extent(spoken, wanted)[0] :] = 2
                unit[rows] = mine
            units.append(unit)
        return Found(units, *framed(1, ("layer 0",), ("layer",)), ALL_STAGES) if units else None

    return look
