"""Turns a workload and a number of GPUs into the best layouts, with the reason for which the next ones lose.

Every valid layout is a candidate. A bound on its step (compute alone) and its memory discard most before their
communication is costed; the bound never exceeds the estimate, so the winner is that of an exhaustive comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from scaletrace.errors import UsageError
from scaletrace.extrapolate.estimate import PLAIN, Estimate, Fit, Network, Terms, estimate, lower_bound_s
from scaletrace.extrapolate.layout import Layout, divisors
from scaletrace.extrapolate.memory import Memory, StateBytes, peak_memory
from scaletrace.extrapolate.rewrite import schedules
from scaletrace.extrapolate.workload import Workload

NAMES = {
    "compute": "less efficient kernels",
    "head": "head and loss on the last stage",
    "recompute": "recomputed activations",
    "tensor": "tensor-parallel collectives",
    "context": "gathering of keys and values",
    "expert": "expert all-to-all",
    "bubble": "pipeline bubble",
    "data_exposed": "gradient and weight traffic",
    "slowdown": "compute slowed beside hidden collectives",
    "optimizer": "optimizer",
    "host": "host between operators",
}


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen. batch: samples of a step over all ranks; 0 axes limits mean no limit.

    tp, cp, ep     largest degrees;  micro_batches: samples of one micro batch to try
    schedules, chunks, recompute: which to try;  memory_bytes: of one device, less what is kept free
    """

    gpus: int
    batch: int
    seq: int
    memory_bytes: float
    tp: int = 16
    cp: int = 16
    pp: int = 64
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    schedules: tuple[str, ...] = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    chunks: tuple[int, ...] = (1, 2, 4, 5, 8, 10)
    recompute: tuple[str, ...] = ("none", "full")

    def __post_init__(self) -> None:
        if min(self.gpus, self.batch, self.seq) < 1 or self.memory_bytes <= 0:
            raise UsageError("a search needs at least one GPU, one sample, one token and some memory")


@dataclass(frozen=True, slots=True)
class Lost:
    """A layout behind the best: by how much, and the two terms that cost it most beyond the best's."""

    estimate: Estimate
    behind: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The best layout, the next ones, and what became of all candidates.

    too_large: the fastest layout that needs more memory than there is, None where its estimate is above those shown
    uneven_pp: degrees of pipelines that were left out, since the layers don't divide by them
    """

    best: Estimate
    next: tuple[Lost, ...]
    candidates: int
    discarded: Counter[str] = field(default_factory=Counter)
    evaluated: int = 0
    too_large: Estimate | None = None
    uneven_pp: tuple[int, ...] = ()

    def to_json_parts(self) -> dict[str, Any]:
        """What `search --json` says of all candidates; the layouts themselves: confirm.Ranking."""
        return {
            "too_large": estimate_json(self.too_large) if self.too_large else None,
            "uneven_pp": list(self.uneven_pp),
            "candidates": self.candidates,
            "evaluated": self.evaluated,
            "discarded": dict(self.discarded),
        }


def estimate_json(item: Estimate) -> dict[str, Any]:
    """One layout of `search --json`."""
    return {
        "layout": item.layout.to_json(),
        "layout_text": str(item.layout),
        "step_time_s": item.step_s,
        "samples_per_s": item.samples_per_s,
        "bubble_fraction": item.bubble_fraction,
        "memory_bytes": item.memory.total if item.memory else None,
        "terms_s": {f.name: getattr(item.terms, f.name) for f in fields(Terms)},
    }


def candidates(work: Workload, space: Space) -> Iterator[Layout]:
    """All layouts of exactly `space.gpus` ranks that divide the model and the batch."""
    model = work.model
    for tp in divisors(space.gpus):
        if tp > space.tp or model.heads % tp or model.mlp_width % tp or model.kv_width % tp:
            continue
        for pp in divisors(space.gpus // tp):
            if pp > min(space.pp, model.layers) or model.layers % pp:
                continue
            for cp in divisors(space.gpus // tp // pp):
                if cp > space.cp or space.seq % (2 * cp if cp > 1 else 1):
                    continue
                data = space.gpus // tp // pp // cp
                yield from _data(work, space, tp, pp, cp, data)


def uneven_pp(work: Workload, space: Space) -> tuple[int, ...]:
    """Degrees of pipelines that would divide the GPUs, but not the layers, of which stages hold as many each here."""
    most = min(space.pp, work.model.layers)
    return tuple(pp for pp in divisors(space.gpus) if pp <= most and work.model.layers % pp)


def _data(work: Workload, space: Space, tp: int, pp: int, cp: int, data: int) -> Iterator[Layout]:
    """How the data ranks shard, the micro batch, experts, schedules and memory choices."""
    experts = [e for e in divisors(data * cp) if work.model.experts % e == 0] if work.model.experts > 1 else [1]
    for mbs in space.micro_batches:
        if space.batch % (data * mbs):
            continue
        m = space.batch // (data * mbs)
        for fsdp in divisors(data):
            zeros = (0, 1) if fsdp == 1 and data > 1 else (0,)
            for ep in experts:
                for zero in zeros:
                    base = Layout(
                        dp=data // fsdp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep, mbs=mbs, seq=space.seq, zero=zero,
                        sp=tp > 1,
                    )  # fmt: skip
                    yield from _pipelines(work, space, base, m)


def _pipelines(work: Workload, space: Space, base: Layout, m: int) -> Iterator[Layout]:
    for recompute in space.recompute:
        if base.pp == 1:
            yield replace(base, microbatches=m, recompute=recompute)
            continue
        for schedule in space.schedules:
            for chunks in space.chunks:
                if work.model.layers % (base.pp * chunks) or (chunks == 1) != (schedule in ("1F1B", "GPipe")):
                    continue
                try:
                    schedules.check(schedule, base.pp, m, chunks)
                except UsageError:
                    continue
                if m < base.pp and schedule != "1F1B":
                    continue  # warm-up alone would fill the step, which these schedules are not made for
                yield replace(base, microbatches=m, recompute=recompute, schedule=schedule, chunks=chunks)


Advance = Callable[[int, int], None]
"""Hears how many candidates of how many are done."""
TOLD_EACH = 500


def silent(done: int, total: int) -> None:
    """Nobody listens."""


def search(
    work: Workload,
    network: Network,
    space: Space,
    *,
    best: int = 10,
    exhaustive: bool = False,
    fit: Fit = PLAIN,
    states: StateBytes | None = None,
    memory: Callable[[Layout], Memory] | None = None,
    also: Layout | None = None,
    advance: Advance = silent,
) -> Found:
    """The fastest layouts that fit. `exhaustive` costs every candidate, to check that pruning loses nothing.

    fit            what a measured step makes of the estimate (fit.fit_to)
    states         bytes of what training keeps; default: by the type of the compute
    memory         the peak of a layout; default: that of the model (memory.peak_memory) with `states`
    advance        is told (done, of how many) now and then
    also           a layout to list at the end where it is not among the best: the measured one
    Raises UsageError where nothing fits, saying what was in the way.
    """
    states = states or StateBytes.of(work.element_bytes)
    peak = memory or partial(peak_memory, work.model, states=states)
    bounded = [(0.0 if exhaustive else lower_bound_s(work, layout, fit), layout) for layout in candidates(work, space)]
    bounded.sort(key=lambda pair: pair[0])
    discarded: Counter[str] = Counter()
    kept: list[Estimate] = []
    evaluated = 0
    too_large: Estimate | None = None
    for at, (bound, layout) in enumerate(bounded):
        if at % TOLD_EACH == 0:
            advance(at, len(bounded))
        if not exhaustive and len(kept) == best and bound >= kept[-1].step_s:
            discarded["slower than the best by compute alone"] += len(bounded) - at
            break
        found = estimate(work, layout, network, states, fit)
        evaluated += 1
        if not exhaustive and len(kept) == best and found.step_s >= kept[-1].step_s:
            discarded["slower than the best"] += 1
            continue
        needed = peak(layout)
        if needed.total > space.memory_bytes:
            discarded["more memory than there is"] += 1
            if too_large is None or (found.step_s, str(layout)) < (too_large.step_s, str(too_large.layout)):
                too_large = replace(found, memory=needed)
            continue
        kept.append(replace(found, memory=needed))
        kept.sort(key=lambda item: (item.step_s, str(item.layout)))
        del kept[best:]
    if not kept:
        raise UsageError(_nothing_fits(space, len(bounded), discarded))
    if too_large is not None and too_large.step_s >= kept[-1].step_s:
        too_large = None
    if also is not None and also not in [item.layout for item in kept]:
        kept.append(replace(estimate(work, also, network, states, fit), memory=peak(also)))
    losers = tuple(Lost(item, item.step_s / kept[0].step_s - 1, reasons(kept[0], item)) for item in kept[1:])
    return Found(kept[0], losers, len(bounded), discarded, evaluated, too_large, uneven_pp(work, space))


def _nothing_fits(space: Space, count: int, discarded: Counter[str]) -> str:
    why = ", ".join(f"{many} {reason}" for reason, many in discarded.items()) or "none divides model and batch"
    return (
        f"no layout of {space.gpus} GPUs fits ({count} candidates: {why}); give more GPUs, another --batch, or a "
        "smaller --seq"
    )


def reasons(best: Estimate, item: Estimate) -> tuple[str, ...]:
    """The two terms by which a layout is furthest behind, per sample."""
    gaps = {
        f.name: getattr(item.terms, f.name) / item.samples - getattr(best.terms, f.name) / best.samples
        for f in fields(Terms)
    }
    worst = sorted((gap, name) for name, gap in gaps.items() if gap > 0)[::-1][:2]
    return tuple(f"{NAMES[name]} +{gap * item.samples * 1e3:.1f} ms" for gap, name in worst) or (
        "none by the estimate",
    )
