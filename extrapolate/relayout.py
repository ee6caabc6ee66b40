"""Turns a measured job's state into that of another layout, axis by axis in one stated order.

width → depth → micro batch size → sequence length → context → tensor (and vocabulary) → experts → pipeline and micro batches → data axes
→ precision of gradients → recompute.
Sizes come first, since the later steps cut what the earlier ones have sized; recompute comes last, since it repeats
what all others have settled. Each step is one module of rewrite/ and can be used alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate import transfers
from scaletrace.extrapolate.calibrate import Evidence, calibrate
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.layout import Layout, measured_layout
from scaletrace.extrapolate.rewrite.batch import repeat_micro_batches, resize_micro_batch, without_early_reductions
from scaletrace.extrapolate.rewrite.checkpointing import checkpointed
from scaletrace.extrapolate.rewrite.cp import spread_context
from scaletrace.extrapolate.rewrite.data import group_shapes, resize
from scaletrace.extrapolate.rewrite.depth import resize_hidden, resize_layers
from scaletrace.extrapolate.rewrite.ep import spread_experts
from scaletrace.extrapolate.rewrite.gradients import trains, with_gradients, without_gradients
from scaletrace.extrapolate.rewrite.precision import reduce_gradients
from scaletrace.extrapolate.rewrite.replicas import with_replicas, without_replicas
from scaletrace.extrapolate.rewrite.sequence import resize_sequence
from scaletrace.extrapolate.rewrite.stages import pipeline
from scaletrace.extrapolate.rewrite.state import State, open_state, recosted, told
from scaletrace.extrapolate.rewrite.tp import tensor
from scaletrace.extrapolate.rewrite.uncut import relaid
from scaletrace.extrapolate.rewrite.vocabulary import measured_vocabulary, vocabulary
from scaletrace.extrapolate.steps import step_times_ns
from scaletrace.parse.build import Built
from scaletrace.parse.health import Health
from scaletrace.replay.engine import replay
from scaletrace.replay.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Predicted:
    """A layout's step: seconds now (as the measured graph replays) and then, and how uncertain kernels are.

    kernel_error  relative error (one sigma) collected by stretching kernels to other shapes
    """

    layout: Layout
    measured_s: float
    step_s: float
    kernel_error: float
    timeline: Timeline
    health: Health

    def to_json(self) -> dict[str, Any]:
        """For JSON answers."""
        return {
            "layout": self.layout.to_json(),
            "replayed_step_time_s": self.measured_s,
            "step_time_s": self.step_s,
            "kernel_error": self.kernel_error,
            "provenance": "measured" if self.kernel_error == 0 else "measured and stretched",
        }


def predict(
    built: Built,
    target: Layout,
    cluster: Cluster,
    measured: Layout | None = None,
    evidence: Sequence[Evidence] = (),
) -> Predicted:
    """The step of a measured job under another layout on `cluster`.

    measured  the layout that the job ran with, where its groups do not tell
    evidence  measured collectives of that cluster (calibrate.Evidence); the trace's own transfers count beside them
    Raises UsageError for what does not divide, InputError for a trace that can't be rewritten.
    """
    measured = measured or measured_layout(built.graph, max(1, built.job.world_size))
    on_cpu = cluster.device.generation == "cpu"
    seen = transfers.evidence(built.graph, built.graph.dur_ns)
    network = Network(cluster, calibrate([*evidence, *seen], cluster))
    state = open_state(built, measured, network, None if on_cpu else Ceilings.of(cluster.device))
    made = relayout(state, target)
    timeline = replay(made.graph)
    return Predicted(made.layout, _step_s(replay(state.graph)), _step_s(timeline), made.error, timeline, made.health)


def _step_s(timeline: Timeline) -> float:
    return float(np.median(step_times_ns(timeline.graph, timeline.start_ns, timeline.end_ns))) * 1e-9


MOST_NODES = 20_000_000
"""Nodes of a rewritten graph; each takes some 200 bytes, and a microsecond or more in every rewrite."""


def nodes_under(state: State, target: Layout) -> float:
    """About how many nodes the graph has under a layout: as many more as there are more micro batches and layers."""
    passes = target.microbatches / max(1, state.layout.microbatches)
    depth = target.layers / max(1, state.anatomy.layers) if target.layers else 1.0
    return len(state.graph) * max(1.0, passes) * max(1.0, depth)


def relayout(state: State, target: Layout) -> State:
    """The job under `target`; what the target leaves open (0, no schedule) stays as measured.

    Raises UsageError where something does not divide, or for a change that cannot be made.
    """
    target = target.over(state.layout)
    if target == state.layout:
        return state
    nodes = nodes_under(state, target)
    if nodes > MOST_NODES:
        raise UsageError(
            f"layout {target}: its graph would have about {nodes:,.0f} nodes, of which {MOST_NODES:,} can be made; ask "
            "for fewer micro batches or layers"
        )
    out = state
    if target.hidden != out.layout.hidden:
        out = resize_hidden(out, target.hidden)
    if target.layers != out.layout.layers:
        out = resize_layers(out, target.layers)
    if target.mbs != out.layout.mbs:
        out = resize_micro_batch(out, target.mbs)
    if target.seq != out.layout.seq:
        out = resize_sequence(out, target.seq)
    if (target.cp, target.exchange) != (out.layout.cp, out.layout.exchange):
        out = spread_context(out, target.cp, target.exchange)
    out = _tensor(out, target)
    if target.ep != out.layout.ep:
        if target.data_ranks * target.cp % target.ep:
            raise UsageError(
                f"layout: ep={target.ep} takes its ranks from the data axes; say how many, as dp={target.ep}"
            )
        if out.layout.data_ranks * out.layout.cp % target.ep:
            out = _data(out, target)
        out = spread_experts(out, target.ep)
    out = _stages(out, target)
    out = _data(out, target)
    if target.grads != out.layout.grads:
        out = reduce_gradients(out, target.grads)
    if target.recompute != out.layout.recompute:
        out = checkpointed(out, target.recompute)
    return replace(out, layout=target)


def _tensor(state: State, target: Layout) -> State:
    """Tensor degree, sequence parallelism and the split of the vocabulary, which is made anew where any of them changes."""
    old = state.layout
    seen = (old.vocab or measured_vocabulary(state)) if old.tp > 1 else ""
    wanted = {"whole": "", "": seen if target.tp > 1 else ""}.get(target.vocab, target.vocab)
    if (target.tp, target.sp, wanted) == (old.tp, old.sp, seen):
        return state
    if seen and not old.vocab:
        state = told(state, guess=f"the split of embedding and head ({seen}), from the collectives beside them")
    whole = vocabulary(replace(state, layout=replace(old, vocab=seen)), "whole")
    return vocabulary(tensor(whole, target.tp, target.sp), wanted)


def _stages(state: State, target: Layout) -> State:
    """Pipeline degree, schedule, chunks and micro batches, in one step where any of them changes."""
    old = state.layout
    same = (old.pp, old.chunks, old.pp == 1 or old.pipeline_schedule) == (
        target.pp, target.chunks, target.pp == 1 or target.pipeline_schedule,
    )  # fmt: skip
    if same and (state.source is None or target.microbatches == old.microbatches):
        return repeat_micro_batches(state, target.microbatches)
    if state.source is not None:
        # What data ranks beyond the source's brought goes first; it is put into the new stages again.
        ranks = state.source.state.layout
        state = _data(state, replace(old, dp=ranks.dp, fsdp=ranks.fsdp))

    def lay(source: State) -> State:
        out = pipeline(source, target.pp, target.schedule, target.chunks, micro_batches=target.microbatches)
        return without_early_reductions(out, source.layout.microbatches)

    return relaid(state, lay)


def _data(state: State, target: Layout) -> State:
    """Degrees of dp and fsdp, with padding to the byte where a unit's weights are known.

    Replicas of a job that only shards are made of the resized shards: each scattered gradient is reduced over them.
    """
    old = state.layout
    if target.fsdp > old.fsdp == 1 and trains(state.anatomy) and not _shards(state):
        raise UsageError(
            f"layout {target}: the trace shows no sharded parameters; record the job under FSDP, or use dp"
        )
    if target.data_ranks > 1 and old.data_ranks == 1:
        state = with_gradients(state)
    if target.data_ranks == 1 < old.data_ranks:
        return without_replicas(without_gradients(_resized(state, target)))
    if target.dp == 1 < old.dp:
        return without_replicas(_resized(state, target))
    if old.dp == 1 and target.dp > 1 and old.fsdp > 1 and target.fsdp > 1:
        shards = _resized(state, replace(target, dp=1))
        return _resized(with_replicas(shards), target)
    return _resized(state, target)


def _shards(state: State) -> bool:
    """Whether the job gathers parameters, were it over one rank."""
    graph = state.graph
    return any(item.group >= 0 and graph.groups[item.group].axis == "fsdp" for item in graph.collectives)


def _resized(state: State, target: Layout) -> State:
    old = state.layout
    if (old.dp, old.fsdp) == (target.dp, target.fsdp):
        return state
    before = Layout(dp=old.dp, fsdp=old.fsdp, tp=old.tp, pp=old.pp, cp=old.cp)
    after = replace(before, dp=target.dp, fsdp=target.fsdp)
    resized = resize(state.graph, before, after, group_shapes(state.work.weights, state.anatomy.is_layer))
    out = recosted(state, resized.collectives, resized.groups)
    graph = replace(out.graph, multiplicity=resized.multiplicity)
    return replace(out, graph=graph, layout=replace(old, dp=target.dp, fsdp=target.fsdp))
