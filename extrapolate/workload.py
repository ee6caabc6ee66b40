"""Turns a model and, where there is one, a measured job into the time of its parts at any micro batch, length and split.

A measured part is stretched by the ratio of its shapes' models (kernels.py); without a trace the model alone is the
prior, and says so. A part is one layer's forward, or the head's; backward is measured or twice the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from scaletrace.errors import InputError
from scaletrace.extrapolate.anatomy import Anatomy, Outline, forward_ops, outlined, stages_in
from scaletrace.extrapolate.blocks import TOLERANCE, Block, Operator, block_of
from scaletrace.extrapolate.cluster import Device
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.kernels import Ceilings, Shape, Work, ceilings_seen, seconds, shape_of
from scaletrace.extrapolate.layers import Phase, Sections
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.signatures import sections_of
from scaletrace.parse.build import Built
from scaletrace.parse.graph import NodeKind
from scaletrace.parse.health import Health

BACKWARD_OVER_FORWARD = 2.0
ADAM_BYTES = 28.0
"""Read and written a parameter by Adam with an fp32 master: weights, two moments, gradient (scaling-findings)."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """What one rank measured: seconds of one layer and of embedding and head together, per micro batch.

    layout gives the micro batch, the length and the tensor degree at which that was
    """

    layout: Layout
    layer_forward_s: float
    layer_backward_s: float
    ends_forward_s: float
    ends_backward_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """A model on a device, anchored in a measurement if there is one.

    element_bytes  of activations and weights in compute; `provenance` is "measured" or "modelled"
    unknown        which of "length", "heads" and "vocabulary" no shape of a capture tells, so that a guess stands there
    """

    model: Model
    ceilings: Ceilings
    anchor: Anchor | None = None
    element_bytes: float = 2.0
    health: Health = field(default_factory=Health)
    unknown: tuple[str, ...] = ()

    @property
    def provenance(self) -> str:
        return "measured and stretched" if self.anchor else "modelled"

    def layer_s(self, layout: Layout) -> tuple[float, float]:
        """(forward, backward) seconds of one layer for one micro batch on one rank."""
        model_s = _layer_model_s(self.model, self.ceilings, self.element_bytes, _key(layout))
        if self.anchor is None:
            return model_s, BACKWARD_OVER_FORWARD * model_s
        there = _layer_model_s(self.model, self.ceilings, self.element_bytes, _key(self.anchor.layout))
        ratio = model_s / there
        return self.anchor.layer_forward_s * ratio, self.anchor.layer_backward_s * ratio

    def ends_s(self, layout: Layout) -> tuple[float, float]:
        """(forward, backward) seconds of head and loss for one micro batch, on the last stage."""
        model_s = _head_model_s(self.model, self.ceilings, self.element_bytes, _key(layout))
        if self.anchor is None or self.anchor.ends_forward_s <= 0:
            return model_s, BACKWARD_OVER_FORWARD * model_s
        there = _head_model_s(self.model, self.ceilings, self.element_bytes, _key(self.anchor.layout))
        ratio = model_s / there
        return self.anchor.ends_forward_s * ratio, self.anchor.ends_backward_s * ratio

    def optimizer_s(self, parameters: float) -> float:
        """Adam over this many parameters of one rank: bound by memory."""
        return ADAM_BYTES * parameters / self.ceilings.memory_Bps

    @staticmethod
    def described(model: Model, device: Device, element_bytes: float = 2.0) -> Workload:
        """A model that was never measured, on a device of the catalog."""
        health = Health()
        health.note(f"Compute times of {model.name} come from shape models of {device.name}, not from a trace.")
        return Workload(model, Ceilings.of(device, element_bytes), None, element_bytes, health)


Key = tuple[int, int, int, int, bool, int]


def _key(layout: Layout) -> Key:
    return layout.mbs, layout.seq, layout.tp, layout.cp, layout.sp, layout.ep


def layer_shapes(model: Model, key: Key, element_bytes: float = 2.0) -> list[Shape]:
    """The kernels of one layer's forward for one micro batch on one rank; key = (mbs, seq, tp, cp, sp, ep)."""
    samples, seq, tp, cp, sp, _ = key
    tokens, h = samples * seq / cp, model.hidden
    whole = tokens / (tp if sp else 1)
    head = h // model.heads
    active = model.experts_per_token
    width = model.mlp_width / tp
    qkv = (h + 2 * model.kv_width) / tp

    def product(rows: float, columns: float, depth: float) -> Shape:
        return Shape(Work.MATMUL, rows, columns, depth, element_bytes=element_bytes)

    def pass_over(rows: float, columns: float, tensors: float, work: Work = Work.ELEMENTWISE) -> Shape:
        return Shape(work, rows, columns, element_bytes=element_bytes, tensors=tensors)

    up = product(tokens * active, width * (model.mlp_matrices - 1), h)
    return [
        pass_over(whole, h, 2, Work.NORM),
        product(tokens, qkv, h),
        pass_over(tokens, qkv, 2),
        Shape(Work.ATTENTION, seq / cp, seq, head, samples * model.heads / tp, element_bytes, causal=True),
        product(tokens, h, h / tp),
        pass_over(whole, h, 3),
        pass_over(whole, h, 2, Work.NORM),
        up,
        pass_over(tokens * active, width, 2 + (model.mlp_matrices == 3)),
        product(tokens * active, h, width),
        pass_over(whole, h, 3),
    ]


@lru_cache(maxsize=4096)
def _layer_model_s(model: Model, ceilings: Ceilings, element_bytes: float, key: Key) -> float:
    return sum(seconds(shape, ceilings) for shape in layer_shapes(model, key, element_bytes))


@lru_cache(maxsize=4096)
def _head_model_s(model: Model, ceilings: Ceilings, element_bytes: float, key: Key) -> float:
    samples, seq, tp, cp, _, _ = key
    tokens = samples * seq / cp
    head = Shape(Work.MATMUL, tokens, model.vocab / tp, model.hidden, element_bytes=element_bytes)
    loss = Shape(Work.LOSS, tokens, model.vocab / tp, element_bytes=4.0, tensors=3)
    return seconds(head, ceilings) + seconds(loss, ceilings)


def from_job(built: Built, anatomy: Anatomy, layout: Layout, device: Device | None = None) -> Workload:
    """The model that a measured job ran, read from its shapes, anchored in its layers' times.

    device: of the catalog; without it the ceilings are those that the job's own kernels reached.
    Raises InputError where the trace has no shapes or no layers, naming what to record.
    """
    read = read_model(built, layout, anatomy)
    model, measured, size, unknown = read.model, read.layout, read.element_bytes, read.unknown
    if device is not None:
        ceilings = Ceilings.of(device, size)
    else:
        ceilings = measured_ceilings(built)
    anchor = _anchor(built, anatomy, measured)
    health = Health()
    health.add(anatomy.health)
    heads = "unknown heads" if "heads" in unknown else f"{model.heads} heads"
    vocabulary = "unknown vocabulary" if "vocabulary" in unknown else f"vocabulary {model.vocab}"
    health.note(
        f"Model read from shapes: {model.layers} layers of width {model.hidden}, MLP {model.mlp_width}, "
        f"{heads}, {vocabulary}."
    )
    if "length" in unknown:
        health.note(
            "No shape of attention tells the length of a sample; the tokens of a micro batch count as one sample."
        )
    return Workload(model, ceilings, anchor, size, health, unknown)


def infer_model(built: Built, anatomy: Anatomy, layout: Layout) -> tuple[Model, Layout, float]:
    """(model, layout with micro batch and length, bytes an element) from the operators' dimensions of a job.

    The model is the whole one: the layers of all stages, and what one tensor rank holds times the tensor ranks.
    Raises InputError where there are no layers or no shapes, naming what to record.
    """
    found = read_model(built, layout, anatomy)
    return found.model, found.layout, found.element_bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """A model as a job's shapes tell it. `layout`: with micro batch, micro batches and length.

    doubt: why the weights of its layers are not those that the job's products read, "" where they are
    missed: share by which they miss those
    unknown: as in Workload
    """

    model: Model
    layout: Layout
    element_bytes: float
    doubt: str = ""
    unknown: tuple[str, ...] = ()
    missed: float = 0.0


def read_model(built: Built, layout: Layout, anatomy: Anatomy) -> Reading:
    """The model of a job, and whether it accounts for the weights that the job's products read.

    Raises InputError where there are no layers or no shapes, naming what to record.
    """
    if not anatomy.layers:
        raise InputError(f"no layers were found: {anatomy.why}; or name a model instead of a trace")
    stages = stages_in(built.job, layout)
    sections, outline = outlined(built.job, stages)
    operators = [_unit_operators(built, unit, sections, outline) for unit in range(len(outline.names))]
    layers = [unit for unit, is_layer in enumerate(outline.is_layer) if is_layer]
    blocks = [block_of(operators[unit], layout.tp, layout.ep) for unit in layers]
    block = blocks[0]
    if block is None:
        raise InputError("the layers' matrix products have no recorded shapes; record with record_shapes=True")
    here = max(1, len(set(stages.values())))
    depth = round(len(layers) * layout.pp / here)
    family = "moe" if block.experts > 1 else "llama" if block.is_gated else "gpt"
    ends = [one for unit, is_layer in enumerate(outline.is_layer) if not is_layer for one in operators[unit]]
    heads = block.heads or max(1, block.hidden // 64)
    heads = heads if block.hidden % heads == 0 else 1
    seq, samples = (block.seq, block.samples) if block.seq else (block.tokens, 1)
    vocab = _vocabulary(ends, block.hidden) * layout.tp
    known = {"length": block.seq, "heads": block.heads, "vocabulary": vocab}
    model = Model(
        "measured", family, depth, block.hidden, heads, block.width, block.key_heads, vocab or block.hidden, seq * layout.cp, False, block.experts,
        block.experts_per_token,
    )  # fmt: skip
    measured = Layout(
        **{axis: getattr(layout, axis) for axis in ("dp", "fsdp", "tp", "pp", "cp", "ep")},
        mbs=samples, microbatches=anatomy.micro_batches, seq=seq * layout.cp,
    )  # fmt: skip
    unknown = tuple(name for name, told in known.items() if not told)
    doubt, missed = _doubt(model, [one for one in blocks if one is not None])
    return Reading(model, measured, block.element_bytes, doubt, unknown, missed)


def _doubt(model: Model, blocks: Sequence[Block]) -> tuple[str, float]:
    """Why the model's layers are not the measured ones (their weights, in all, are others), and by what share."""
    read = sum(block.weights for block in blocks) / len(blocks)
    told = model.attention_parameters + model.experts * model.expert_parameters
    missed = abs(told / read - 1)
    if missed <= TOLERANCE:
        return "", missed
    return (
        f"the products of a layer read {read:,.0f} weights, and the family that fits best ({model.family}) has "
        f"{told:,.0f}; name the model instead of the trace"
    ), missed


def _vocabulary(ends: Sequence[Operator], hidden: int) -> int:
    """Columns of the head's product on one rank; where no head is, 0."""
    found = [int(one.shape.columns) for one in ends if one.is_product and one.shape.depth == hidden]
    return found[-1] if found else 0


def _unit_operators(built: Built, unit: int, found: Mapping[int, Sections], outline: Outline) -> list[Operator]:
    """Forward operators of one unit in the first micro batch of the first rank that runs it."""
    for trace in built.job.ranks:
        sections, shift = found[trace.rank], outline.shift[trace.rank]
        if unit not in shift:
            continue
        events, rows = trace.events, forward_ops(trace, sections)
        at = sections.at(events.ts_ns[rows])
        local = sections.unit[at]
        mine = (local >= 0) & (shift[np.maximum(local, 0)] == unit) & (sections.micro_batch[at] == 0)
        mine &= sections.step[at] == sections.step[0]
        out = []
        reach = -1
        for row in rows[mine].tolist():
            name = events.name_of(row)
            shape = shape_of(name, events.text("Input Dims", row), events.text("Input type", row))
            if shape is None or int(events.ts_ns[row]) < reach:
                continue
            if shape.work in (Work.MATMUL, Work.ATTENTION):
                reach = int(events.end_ns[row])
            out.append(Operator(name.rpartition("::")[2], shape))
        if out:
            return out
    return []


def _anchor(built: Built, anatomy: Anatomy, layout: Layout) -> Anchor:
    """Seconds of a layer and of the ends per micro batch: of the busiest kind of node, kernels or else operators."""
    graph = built.graph
    kernels = graph.kind == int(NodeKind.KERNEL)
    kernels &= graph.instance < 0
    work = kernels if kernels.any() else (graph.kind == int(NodeKind.HOST))
    steps = max(1, len(np.unique(graph.step[graph.step >= 0])))
    layers = np.array(anatomy.is_layer, np.bool_)
    ranks = len(np.unique(graph.rank[work])) / max(1, layout.pp)
    each = steps * max(1, anatomy.micro_batches) * max(1.0, ranks)

    def total(phase: Phase, of_layers: bool) -> float:
        units = np.flatnonzero(layers == of_layers)
        mine = work & (anatomy.phase == int(phase)) & np.isin(anatomy.unit, units)
        return float(graph.dur_ns[mine].sum()) * 1e-9 / each

    count = max(1, int(layers.sum()))
    return Anchor(
        layout,
        total(Phase.FORWARD, True) / count,
        total(Phase.BACKWARD, True) / count,
        total(Phase.FORWARD, False),
        total(Phase.BACKWARD, False),
    )


def measured_ceilings(built: Built) -> Ceilings:
    """Ceilings from the job's own operators with shapes."""
    shapes: list[Shape] = []
    times: list[float] = []
    for trace in built.job.ranks[:1]:
        events = trace.events
        sections = sections_of(trace)
        for row in forward_ops(trace, sections).tolist():
            shape = shape_of(events.name_of(row), events.text("Input Dims", row), events.text("Input type", row))
            if shape is not None:
                shapes.append(shape)
                times.append(float(events.dur_ns[row]) * 1e-9)
    return ceilings_seen(shapes, times)
