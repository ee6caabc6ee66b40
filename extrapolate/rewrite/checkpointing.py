"""Turns a state into one that recomputes all, some or none of its layers' activations in backward instead of keeping them.

All: every layer's forward, with its collectives, runs once more right before its backward. Some: attention alone, right
before its own backward. None: what was run again is left out.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Work, classify
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import DATA_AXES
from scaletrace.extrapolate.rewrite.batch import attention_of
from scaletrace.extrapolate.rewrite.insert import by_place, neighbours
from scaletrace.extrapolate.rewrite.loom import Woven, reopen
from scaletrace.extrapolate.rewrite.removal import pruned, without_nodes
from scaletrace.extrapolate.rewrite.schedules import Program, build
from scaletrace.extrapolate.rewrite.stages import laid
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, told
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import EdgeKind, NodeKind

_GATHERING = re.compile(r"fsdp::|FSDP::|c10d|split_with_sizes_copy|gloo:|record_param_comms")
AGAIN = " (again)"
"""How the names of attention nodes end that selective checkpointing runs once more."""


def checkpointed(state: State, how: str) -> State:
    """The state with "full", "selective" or no ("none", "off") recomputation, whatever it had.

    Raises UsageError where attention is to run again and none was found.
    """
    now, wanted = (what if what in ("full", "selective") else "none" for what in (state.layout.recompute, how))
    if now == wanted:
        return replace(state, layout=replace(state.layout, recompute=how))
    out = state if now == "none" else _without(state)
    if wanted == "full":
        out = _without_gathers(laid(out, _program(out), recompute=True))
    elif wanted == "selective":
        out = _attention_again(out)
    return replace(out, layout=replace(state.layout, recompute=how))


def checkpoint(state: State) -> State:
    """Every layer's forward runs once more. Raises UsageError for a state that recomputes it already."""
    if state.layout.recompute == "full":
        raise UsageError("this job recomputes its activations already")
    return checkpointed(state, "full")


def _program(state: State) -> Program:
    layout = state.layout
    return build(layout.pipeline_schedule if layout.pp > 1 else "1F1B", layout.pp, layout.microbatches, layout.chunks)


def _without(state: State) -> State:
    """The state without work that is run again. What selective checkpointing put in stands beside the old order."""
    mine = np.array([name.endswith(AGAIN) for name in state.graph.names] + [False], np.bool_)[state.graph.name]
    if mine.any():
        out = without_nodes(state, mine)
        return replace(out, graph=pruned(out.graph, (), lambda name: name.endswith(AGAIN), lambda _: False))
    return laid(state, _program(state), recompute=False)


def _without_gathers(state: State) -> State:
    """The state without what a copied forward gathers over data ranks: backward has the layer's weights by then."""
    graph = state.graph
    again = state.anatomy.phase == int(Phase.RECOMPUTE)
    axes = np.array([axis_of_item(item, graph.groups) in DATA_AXES for item in graph.collectives] + [False], np.bool_)
    gathers = again & axes[graph.instance]
    if not gathers.any():
        return state
    calls = np.array([bool(_GATHERING.search(name)) for name in graph.names] + [False], np.bool_)[graph.name]
    exact = np.where(again & calls & (graph.instance < 0), 0.0, state.anatomy.exact_ns)
    hub = graph.kind == int(NodeKind.RENDEZVOUS)
    into = graph.edge_dst
    served, others = np.zeros(len(graph), np.bool_), np.zeros(len(graph), np.bool_)
    served[into[hub[into] & gathers[graph.pred]]] = True
    others[into[hub[into] & ~gathers[graph.pred]]] = True
    quiet = replace(state, anatomy=replace(state.anatomy, exact_ns=exact)).with_durations()
    return without_nodes(quiet, gathers | (hub & served & ~others))


def _attention_nodes(state: State, phase: Phase) -> BoolArray:
    attends = attention_of(state)
    named = np.array([classify(name) is Work.ATTENTION for name in state.graph.names] + [False], np.bool_)
    shaped = np.array([shape is not None and attends(shape) for shape in state.work.shape], np.bool_)
    blind = np.array([shape is None for shape in state.work.shape], np.bool_)
    attention = (shaped | (blind & named[state.graph.name])) & state.work.computes
    return np.asarray(attention & (state.anatomy.phase == int(phase)), np.bool_)


def _attention_again(state: State) -> State:
    """Attention's forward of every layer and micro batch once more before its backward."""
    graph, anatomy = state.graph, state.anatomy

    def place(run: IntArray) -> tuple[int, int, int, int]:
        node = int(run[0])
        return int(graph.rank[node]), int(graph.step[node]), int(anatomy.unit[node]), int(anatomy.micro_batch[node])

    forward = {place(run): run for run in by_place(state, _attention_nodes(state, Phase.FORWARD))}
    backward = {place(run): run for run in by_place(state, _attention_nodes(state, Phase.BACKWARD))}
    both = [key for key in backward if key in forward]
    if not both:
        raise UsageError("no attention with a forward and a backward was found, so none can be recomputed alone")
    loom = reopen(graph, anatomy.exact_ns, anatomy.entry)
    before, _ = neighbours(graph)
    count = 0
    for key in both:
        first = int(backward[key][0])
        on_device = graph.lanes[int(graph.lane[first])].is_device
        order = EdgeKind.STREAM if on_device else EdgeKind.PROGRAM
        previous = int(before[first])
        for node in forward[key].tolist():
            new = loom.node(
                NodeKind(int(graph.kind[node])), rank=key[0], lane=int(graph.lane[first]), step=key[1],
                name=loom.name(graph.name_of(node) + AGAIN), dur_ns=round(float(anatomy.exact_ns[node])),
                key=max(0, first - 1), event=node,
            )  # fmt: skip
            count += 1
            if previous >= 0:
                loom.edge(previous, new, order)
            previous = new
        loom.edge(previous, first, order)
    return told(_dressed(state, loom.finish()), f"Attention is run again in backward, in {count} nodes.")


def _dressed(state: State, woven: Woven) -> State:
    """The state of the woven graph; a new node's event says for a moment which node it runs again."""
    graph, new = woven.graph, np.flatnonzero(woven.origin < 0)
    like = woven.origin.copy()
    like[new] = graph.event[new]
    event = graph.event.copy()
    event[new] = -1
    anatomy = replace(state.anatomy.moved(like), exact_ns=woven.exact_ns, entry=woven.entry)
    phase = anatomy.phase.copy()
    phase[new] = int(Phase.RECOMPUTE)
    return replace(
        state,
        graph=replace(graph, event=event, multiplicity=state.graph.multiplicity),
        anatomy=replace(anatomy, phase=phase),
        work=state.work.moved(like),
    )
