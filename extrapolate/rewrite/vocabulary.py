"""Turns a state into one whose embedding and head are split by vocabulary over the tensor ranks, or whole again.

The embedding's partial rows are summed behind it, the gradient of the head's input behind its backward. The logits are
gathered for a loss on all of them, or the loss is computed on slices, with three small reductions for each token
(largest logit, sum of exponentials, the target's own logit), as PyTorch's `loss_parallel` does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from scaletrace.errors import UsageError
from scaletrace.extrapolate.kernels import Shape, Work
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.nodework import Role, Weight
from scaletrace.extrapolate.rewrite.parameters import with_weights
from scaletrace.extrapolate.rewrite.state import State, axis_of_item, passes, stretched
from scaletrace.extrapolate.rewrite.tensor_collectives import Place, followers, inserted, without_tensor_collectives
from scaletrace.extrapolate.rewrite.tp import GRADIENT_BYTES
from scaletrace.parse.events import BoolArray
from scaletrace.parse.graph import NodeKind

WHOLE, GATHERED, LOSS = "whole", "gathered", "loss"
LOSS_BYTES = 4
"""The loss is computed in single precision."""
LOSS_REDUCTIONS = 3


@dataclass(frozen=True, slots=True)
class _Ends:
    """Masks bool[n] of what embedding and head compute."""

    embedding: BoolArray
    head: BoolArray
    loss: BoolArray
    before: BoolArray
    after: BoolArray


def vocabulary(state: State, how: str) -> State:
    """Embedding and head "whole", split with their logits "gathered", or split up to the "loss".

    Raises UsageError where the vocabulary does not divide, or the capture shows no head.
    """
    old = state.layout.vocab or WHOLE
    how = how or WHOLE
    if how == old:
        return state
    if how != WHOLE and state.layout.tp == 1:
        raise UsageError(f"vocab={how} splits the vocabulary over tensor ranks, and tp is 1")
    out = _joined(state, old) if old != WHOLE else state
    if how != WHOLE:
        out = _split(out, how)
    return replace(out, layout=replace(out.layout, vocab="" if how == WHOLE else how))


def measured_vocabulary(state: State) -> str:
    """How the capture's embedding and head are split, guessed from the tensor collectives that it has there; "" = whole.

    A loss on slices reduces (largest logit, sum, target's logit) behind the last layer, one on all logits gathers them;
    sequence parallelism gathers the head's input too, which tells neither. Where forward shows nothing there, the loss
    keeps its slices if backward sums the gradient of the head's input.
    """
    ends = _ends(state)
    graph, anatomy = state.graph, state.anatomy
    own = np.array([axis_of_item(item, graph.groups) == "tp" for item in graph.collectives] + [False], np.bool_)
    mine = own[graph.instance] & (graph.kind == int(NodeKind.TRANSFER))
    forward = mine & (anatomy.phase == int(Phase.FORWARD))

    def kinds(where: BoolArray) -> Counter[str]:
        return Counter(graph.collectives[i].kind for i in graph.instance[where].tolist())

    before, after = kinds(forward & ends.before), kinds(forward & ends.after)
    if not before:
        return ""
    if after["all_reduce"]:
        return LOSS
    keys = np.stack([graph.rank, graph.step, anatomy.micro_batch], axis=1)[forward & ends.before]
    inputs = len(np.unique(keys, axis=0)) if state.layout.sp or before["reduce_scatter"] else 0
    if after["all_gather"] > inputs:
        return GATHERED
    return LOSS if kinds(mine & ~forward & ends.after) else ""


def _ends(state: State) -> _Ends:
    anatomy, work, graph = state.anatomy, state.work, state.graph
    layers = [unit for unit, is_layer in enumerate(anatomy.is_layer) if is_layer]
    first, last = (layers[0], layers[-1]) if layers else (0, len(anatomy.units))
    before = (anatomy.unit >= 0) & (anatomy.unit < first)
    after = anatomy.unit > last
    kinds = np.array([shape.work.value if shape is not None else "" for shape in work.shape])
    busy = work.computes & passes(state)
    embedding = busy & before & (kinds == Work.EMBEDDING.value)
    head = busy & after & (kinds == Work.MATMUL.value)
    width = max((s.columns for s, h in zip(work.shape, head.tolist(), strict=True) if h and s is not None), default=0.0)
    head &= np.array([s is not None and s.columns == width for s in work.shape])
    loss = busy & after & ~head & _beyond(state, head)
    return _Ends(embedding, head, loss, np.asarray(before & (graph.rank >= 0)), np.asarray(after))


def _beyond(state: State, head: BoolArray) -> BoolArray:
    """Behind the head's product in forward, ahead of its backward: work on logits."""
    graph, anatomy = state.graph, state.anatomy
    forward = anatomy.phase == int(Phase.FORWARD)
    key = (graph.rank.astype(np.int64) * 2**20 + graph.step + 1) * 2**12 + anatomy.micro_batch + 1
    out = np.zeros(len(graph), np.bool_)
    number = np.arange(len(graph))
    for one in np.unique(key[head]).tolist():
        mine = key == one
        ahead, behind = number[mine & head & forward], number[mine & head & ~forward]
        if len(ahead):
            out |= mine & forward & (number > ahead.max())
        if len(behind):
            out |= mine & ~forward & (number < behind.min())
    return out


def _split(state: State, how: str) -> State:
    """Slices of the vocabulary on each tensor rank, with the collectives that they need."""
    ends, tp = _ends(state), state.layout.tp
    if not ends.head.any() or not ends.embedding.any():
        raise UsageError(f"vocab={how}: the capture's operators show no embedding and no head to split")
    out = _resized(state, ends, 1.0 / tp, how)
    return inserted(out, tp, _places(state, ends, how))


def _resized(state: State, ends: _Ends, share: float, how: str) -> State:
    """The head's product and, for a loss on slices, the work on logits at `share` of the vocabulary; weights too."""
    sizes = [w.dims[0] for unit in _end_units(state) for w in state.work.weights[unit] if len(w.dims) > 1]
    for size in sizes:
        if size * share != int(size * share):
            raise UsageError(f"tp={round(1 / share)} does not divide a vocabulary of {size}; pad it as Megatron does")

    def stretch(shape: Shape | None, role: Role) -> tuple[Shape | None, float]:
        return (shape.scaled(columns=share), share) if shape is not None else (None, share)

    where = ends.head | ends.loss if how == LOSS else ends.head
    out = stretched(state, stretch, where)
    weights = list(state.work.weights)
    for unit in _end_units(state):
        weights[unit] = tuple(
            Weight((round(w.dims[0] * share), *w.dims[1:]), w.role) if len(w.dims) > 1 else w for w in weights[unit]
        )
    return with_weights(out, tuple(weights))


def _end_units(state: State) -> list[int]:
    return [unit for unit, is_layer in enumerate(state.anatomy.is_layer) if not is_layer]


def _places(state: State, ends: _Ends, how: str) -> list[Place]:
    """Where embedding and head communicate, in every micro batch of every rank."""
    behind = followers(state.graph)
    forward = state.anatomy.phase == int(Phase.FORWARD)
    sp = state.layout.sp
    places: list[Place] = []
    for node in _lasts(state, ends.embedding & forward):
        shape = _shape(state, node)
        size = round(shape.rows * shape.columns * shape.element_bytes)
        places.append(Place(node, behind.get(node), "reduce_scatter" if sp else "all_reduce", size))
    for node in _lasts(state, ends.head & forward):
        shape = _shape(state, node)
        inputs = round(shape.rows * shape.depth * shape.element_bytes)
        if sp:
            places.append(Place(None, node, "all_gather", inputs))
        if how == GATHERED:
            whole = round(shape.rows * shape.columns * shape.element_bytes)
            places.append(Place(node, behind.get(node), "all_gather", whole))
        else:
            small = round(shape.rows * LOSS_BYTES)
            places += [Place(node, behind.get(node), "all_reduce", small)] * LOSS_REDUCTIONS
    for node in _lasts(state, ends.head & ~forward):
        shape = _shape(state, node)
        inputs = round(shape.rows * shape.depth * shape.element_bytes)
        places.append(Place(node, behind.get(node), "reduce_scatter" if sp else "all_reduce", inputs))
    if sp:
        places += _norm_gradients(state, ends, behind)
        for node in _lasts(state, ends.embedding & ~forward):
            shape = _shape(state, node)
            places.append(Place(None, node, "all_gather", round(shape.rows * shape.columns * shape.element_bytes)))
    return places


def _norm_gradients(state: State, ends: _Ends, behind: dict[int, int]) -> list[Place]:
    """Sums of the gradients of the norm before the head, which each rank has of its own tokens only."""
    backward = state.anatomy.phase == int(Phase.BACKWARD)
    norms = [w for unit in _end_units(state) for w in state.work.weights[unit] if len(w.dims) == 1]
    return [
        Place(node, behind.get(node), "all_reduce", weight.elements * GRADIENT_BYTES)
        for node in _lasts(state, state.work.computes & ends.after & backward)
        for weight in norms
    ]


def _shape(state: State, node: int) -> Shape:
    shape = state.work.shape[node]
    if shape is None:
        raise UsageError("an embedding or head without a shape can't be split")
    return shape


def _lasts(state: State, where: BoolArray) -> list[int]:
    """The last node of each run of `where` on a rank, in a step and micro batch."""
    graph, anatomy = state.graph, state.anatomy
    found: dict[tuple[int, int, int], int] = {}
    for node in np.flatnonzero(where).tolist():
        found[int(graph.rank[node]), int(graph.step[node]), int(anatomy.micro_batch[node])] = node
    return sorted(found.values())


def _joined(state: State, old: str) -> State:
    """Embedding and head whole on each rank again."""
    ends = _ends(state)
    out = _resized(state, ends, float(state.layout.tp), old)
    return without_tensor_collectives(out, ends.before | ends.after)
