"""Turns a measured job's state into that of another layout, axis by axis in one stated order.

micro batch size → sequence length → context → tensor → experts → pipeline and micro batches → data axes → recompute.
Sizes come first, since the later steps cut what the earlier ones have sized; recompute comes last, since it repeats
what all others have settled. Each step is one module of rewrite/ and can be used alone.
"""

from __future__ import annotations

from dataclasses import replace

from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.batch import repeat_micro_batches, resize_micro_batch, without_early_reductions
from scaletrace.extrapolate.rewrite.checkpointing import checkpoint
from scaletrace.extrapolate.rewrite.data import resize
from scaletrace.extrapolate.rewrite.ep import spread_experts
from scaletrace.extrapolate.rewrite.sequence import resize_sequence, spread_context
from scaletrace.extrapolate.rewrite.stages import pipeline
from scaletrace.extrapolate.rewrite.state import State, recosted
from scaletrace.extrapolate.rewrite.tp import tensor


def relayout(state: State, target: Layout) -> State:
    """The job under `target`; what the target leaves open (0, no schedule) stays as measured.

    Raises UsageError where something does not divide, or for a change that cannot be made.
    """
    target = target.over(state.layout)
    if target == state.layout:
        return state
    out = state
    if target.mbs != out.layout.mbs:
        out = resize_micro_batch(out, target.mbs)
    if target.seq != out.layout.seq:
        out = resize_sequence(out, target.seq)
    if target.cp != out.layout.cp:
        out = spread_context(out, target.cp)
    if (target.tp, target.sp) != (out.layout.tp, out.layout.sp):
        out = tensor(out, target.tp, target.sp)
    if target.ep != out.layout.ep:
        out = spread_experts(out, target.ep)
    out = _stages(out, target)
    out = _data(out, target)
    if target.recompute == "full" and out.layout.recompute != "full":
        out = checkpoint(out)
    return replace(out, layout=target)


def _stages(state: State, target: Layout) -> State:
    """Pipeline degree, schedule, chunks and micro batches, in one step where any of them changes."""
    old = state.layout
    same = (old.pp, old.chunks, old.pp == 1 or old.pipeline_schedule) == (
        target.pp, target.chunks, target.pp == 1 or target.pipeline_schedule,
    )  # fmt: skip
    if same:
        return repeat_micro_batches(state, target.microbatches)
    asked = replace(state, layout=replace(old, microbatches=target.microbatches, schedule="", chunks=1, pp=1))
    out = pipeline(asked, target.pp, target.schedule, target.chunks)
    return without_early_reductions(out, old.microbatches)


def _data(state: State, target: Layout) -> State:
    """Degrees of dp and fsdp, with padding to the byte where a unit's weights are known."""
    old = state.layout
    if (old.dp, old.fsdp) == (target.dp, target.fsdp):
        return state
    before = Layout(dp=old.dp, fsdp=old.fsdp, tp=old.tp, pp=old.pp, cp=old.cp)
    after = replace(before, dp=target.dp, fsdp=target.fsdp)
    units = [[weight.dims for weight in unit] for unit in state.work.weights]
    resized = resize(state.graph, before, after, units)
    out = recosted(state, resized.collectives, resized.groups)
    graph = replace(out.graph, multiplicity=resized.multiplicity)
    return replace(out, graph=graph, layout=replace(old, dp=target.dp, fsdp=target.fsdp))
