"""Turns kernels whose operators recorded no dimensions into shapes told by weights and by the bytes of collectives.

A layer's parameters are what FSDP gathers for it (or its share of what DDP reduces); a tensor collective or a pipeline
message holds tokens times width. With both, width and tokens follow; with one, the other is what the layer's products
can have done in their time. Only the ratio of shapes is used later, so a width that is off by some per cent does little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from scaletrace.extrapolate.anatomy import Anatomy
from scaletrace.extrapolate.kernels import Ceilings, Shape, Work, classify
from scaletrace.extrapolate.layers import Phase
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.nodework import NodeWork
from scaletrace.extrapolate.rewrite.data import ELEMENT_BYTES
from scaletrace.parse.events import BoolArray, IntArray
from scaletrace.parse.graph import Graph, GraphCollective, NodeKind
from scaletrace.parse.health import Health

MATRICES = 12.0
"""Parameters of a transformer layer in squares of its width: 4 for attention, 8 for the MLP (gated ones are as large)."""
HEAD = 128
BLIND = "kernels without a shape, whose time is stretched in proportion"
TOLD = "kernels whose shape is told by weights and bytes of collectives, not recorded"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a micro batch on one rank, width and MLP width of the whole model, bytes an element."""

    tokens: float
    hidden: float
    inner: float
    element_bytes: float


def with_inferred_shapes(
    graph: Graph, anatomy: Anatomy, work: NodeWork, layout: Layout, ceilings: Ceilings
) -> NodeWork:
    """The work with shapes of the layers' kernels, where no product of a layer has a recorded one and bytes tell them."""
    kernels = _layer_kernels(graph, anatomy, work)
    of_name = [classify(name) for name in graph.names]
    kinds = np.array([list(Work).index(work_of) for work_of in of_name] + [-1])[graph.name]
    products = kernels & (kinds == list(Work).index(Work.MATMUL))
    if not products.any() or any(work.shape[node] is not None for node in np.flatnonzero(products).tolist()):
        return work
    sizes = _sizes(graph, anatomy, products, layout, ceilings)
    if sizes is None:
        return work
    shapes = list(work.shape)
    for run in _runs(graph, anatomy, products):
        backward = int(anatomy.phase[run[0]]) == int(Phase.BACKWARD)
        for node, shape in zip(run.tolist(), _products(len(run), sizes, layout.tp, backward), strict=True):
            shapes[node] = shape
    for node in np.flatnonzero(kernels & ~products).tolist():
        shapes[node] = shapes[node] or _other(of_name[int(graph.name[node])], sizes, layout)
    told = sum(new is not None and old is None for new, old in zip(shapes, work.shape, strict=True))
    return replace(work, shape=tuple(shapes), health=_recounted(work.health, told))


def _recounted(health: Health, told: int) -> Health:
    out = Health()
    out.add(health)
    out.guessed[TOLD] += told
    out.guessed[BLIND] -= min(told, out.guessed[BLIND])
    if not out.guessed[BLIND]:
        del out.guessed[BLIND]
    return out


def _layer_kernels(graph: Graph, anatomy: Anatomy, work: NodeWork) -> BoolArray:
    layers = np.array([*anatomy.is_layer, False], np.bool_)[anatomy.unit]
    return np.asarray(work.computes & (graph.kind == int(NodeKind.KERNEL)) & layers, np.bool_)


def _runs(graph: Graph, anatomy: Anatomy, where: BoolArray) -> list[IntArray]:
    """Nodes of one rank, step, phase, unit and micro batch, in order."""
    nodes = np.flatnonzero(where)
    keys = np.stack(
        [graph.rank[nodes], graph.step[nodes], anatomy.phase[nodes], anatomy.unit[nodes], anatomy.micro_batch[nodes]]
    )
    _, code = np.unique(keys, axis=1, return_inverse=True)
    order = np.argsort(code.reshape(-1), kind="stable")
    cuts = np.flatnonzero(np.diff(code.reshape(-1)[order])) + 1
    return [run for run in np.split(nodes[order], cuts) if len(run)]


def _sizes(graph: Graph, anatomy: Anatomy, products: BoolArray, layout: Layout, ceilings: Ceilings) -> Sizes | None:
    """Width and tokens from what the collectives of a layer move; None where none of them tells anything."""
    weights = _layer_parameters(graph, anatomy, layout)
    activations = _activation_elements(graph, anatomy)
    each = [
        float(anatomy.exact_ns[run].sum()) * 1e-9
        for run in _runs(graph, anatomy, products & (anatomy.phase == int(Phase.FORWARD)))
    ]
    known = bool(each) and np.isfinite(ceilings.flops)
    done = float(np.median(each)) * ceilings.flops * layout.tp if known else 0.0
    if weights:
        hidden = sqrt(weights / MATRICES)
        tokens = activations / hidden if activations else done / (2 * weights)
    elif activations and done > 0:
        hidden = done / (2 * MATRICES * activations)
        tokens = activations / hidden
    else:
        return None
    hidden = max(64.0, 64 * round(hidden / 64))
    inner = max(hidden, (weights - 4 * hidden**2) / (2 * hidden)) if weights else 4 * hidden
    return Sizes(max(1.0, tokens), hidden, inner, 2.0) if tokens > 0 else None


def _layer_parameters(graph: Graph, anatomy: Anatomy, layout: Layout) -> float:
    """Parameters of a whole layer: what FSDP gathers for one, else its share of what all reductions of gradients move."""
    gathered = []
    for node in _arrivals(graph, anatomy, ("fsdp",), ("all_gather",)):
        item = graph.collectives[int(graph.instance[node])]
        if item.bytes_out > 0:
            gathered.append(item.bytes_out / _width(item, 2.0))
    if gathered:
        return float(np.median(gathered)) * layout.tp
    steps = max(1, len(np.unique(graph.step[graph.step >= 0])))
    ranks = max(1, len(np.unique(graph.rank[graph.rank >= 0])))
    reduced = [
        max(0, item.bytes_in) / _width(item, 4.0)
        for node in _arrivals(graph, anatomy, ("dp",), ("all_reduce",), layers_only=False)
        if (item := graph.collectives[int(graph.instance[node])]).bytes_in > 64
    ]
    return sum(reduced) / steps / ranks / max(1, anatomy.layers) * layout.tp if reduced else 0.0


def _activation_elements(graph: Graph, anatomy: Anatomy) -> float:
    """Tokens times width: what tensor collectives of a layer or messages between stages move."""
    found = []
    for node in _arrivals(graph, anatomy, ("tp",), ("all_reduce", "all_gather", "reduce_scatter")):
        item = graph.collectives[int(graph.instance[node])]
        found.append(max(item.bytes_in, item.bytes_out) / _width(item, 2.0))
    if not found:
        for item in graph.collectives:
            if item.kind in ("send", "recv") and max(item.bytes_in, item.bytes_out) > 0:
                found.append(max(item.bytes_in, item.bytes_out) / _width(item, 2.0))
    return float(np.median(found)) if found else 0.0


def _arrivals(
    graph: Graph, anatomy: Anatomy, axes: Sequence[str], kinds: Sequence[str], layers_only: bool = True
) -> list[int]:
    wanted = np.array(
        [item.kind in kinds and item.group >= 0 and graph.groups[item.group].axis in axes for item in graph.collectives]
        + [False],
        np.bool_,
    )[graph.instance]
    if layers_only:
        wanted &= np.array([*anatomy.is_layer, False], np.bool_)[anatomy.unit]
    return np.flatnonzero(wanted & (graph.kind == int(NodeKind.ARRIVE))).tolist()


def _width(item: GraphCollective, default: float) -> float:
    return float(ELEMENT_BYTES.get(item.dtype, default))


def _products(count: int, sizes: Sizes, tp: int, backward: bool) -> list[Shape | None]:
    """Shapes of a layer's products in order: as many as fit attention and an MLP, in backward two for each.

    A number of products that fits no usual layer gets square ones, which keep the right ratio for tokens and width.
    """
    h, f, t, e = sizes.hidden, sizes.inner, sizes.tokens, sizes.element_bytes
    each = count // 2 if backward and count % 2 == 0 else count
    first = {4: [(3 * h / tp, h)], 5: [(3 * h / tp, h)], 6: [(h / tp, h)] * 3, 7: [(h / tp, h)] * 3}.get(each)
    gated = each in (5, 7)
    inner = f * 2 / 3 if gated else f
    if first is None:
        dims = [(h / tp, h)] * each
    else:
        dims = [*first, (h, h / tp), *[(inner / tp, h)] * (2 if gated else 1), (h, inner / tp)]
    shapes: list[Shape | None] = [Shape(Work.MATMUL, t, columns, depth, element_bytes=e) for columns, depth in dims]
    if not backward:
        return shapes
    twice = [shape for shape in reversed(shapes) for _ in range(2 if each != count else 1)]
    return twice


def _other(work: Work, sizes: Sizes, layout: Layout) -> Shape | None:
    """Passes over the tokens; attention only where the length of a sample is known."""
    if work in (Work.NORM, Work.ELEMENTWISE):
        return Shape(work, sizes.tokens, sizes.hidden, element_bytes=sizes.element_bytes)
    if work is Work.ATTENTION and layout.seq > 1:
        local = layout.seq / layout.cp
        heads = sizes.tokens / local * sizes.hidden / HEAD / layout.tp
        return Shape(work, local, layout.seq, HEAD, heads, sizes.element_bytes)
    return None
