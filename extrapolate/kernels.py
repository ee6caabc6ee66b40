"""Turns shapes of operators into a model of their time, used only as a ratio to stretch a time that was measured.

    t' = floor + (t - floor) · M(shape', ceilings') / M(shape, ceilings),   M = max(waves · tile, bytes / bandwidth)

A matrix product is cut into 128 × 128 tiles that run in waves of one a multiprocessor; everything else is bound by the
larger of its FLOP and its bytes. On a CPU (one "multiprocessor") tiles vanish. Which kernel a library picks for another
shape is not known, so a stretched product carries the error that `ratio_error` states.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from math import ceil, log2, prod

import numpy as np

from scaletrace.extrapolate.cluster import Device

TILE = 128
MATMUL_SHARE = 0.8
"""Share of the dense peak that large products reach (H100 80 %, A100 87 %, B200 78 % measured)."""
GPU_FLOOR_S = 2e-6
"""Shortest kernel: launch and drain."""
PER_DOUBLING_ERROR = 0.03
"""Relative error added for each doubling or halving of a dimension; another tile or split may be chosen."""


class Work(Enum):
    """Classes of kernels with a shape model of their own."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    OPTIMIZER = "optimizer"
    EMBEDDING = "embedding"
    LOSS = "loss"
    COPY = "copy"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What bounds a kernel on a device. `sms` 1 means no wave quantisation (CPU)."""

    flops: float
    memory_Bps: float
    sms: int = 1
    floor_s: float = 0.0

    @staticmethod
    def of(device: Device, element_bytes: float = 2.0) -> Ceilings:
        """From the catalog: dense peak of the element type times the share that products reach."""
        peak = device.bf16_flops
        if element_bytes <= 1 and device.fp8_flops:
            peak = device.fp8_flops
        elif element_bytes >= 4:
            peak = device.tf32_flops or device.fp32_flops or peak / 2
        elif device.measured_bf16_flops:
            return Ceilings(
                device.measured_bf16_flops,
                device.memory_Bps * device.memory_efficiency,
                device.sms or 1,
                GPU_FLOOR_S if device.generation != "cpu" else 0.0,
            )
        on_cpu = device.generation == "cpu"
        return Ceilings(
            peak * MATMUL_SHARE,
            device.memory_Bps * device.memory_efficiency,
            1 if on_cpu else device.sms or 1,
            0.0 if on_cpu else GPU_FLOOR_S,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """One kernel's work. rows × columns × depth for a product (batch of them); otherwise FLOP and bytes alone.

    For attention rows and columns are query and key tokens, depth the head size, batch = samples × heads of queries;
    queries_per_key heads of queries share one of keys and values.
    For the others rows are tokens and columns the width; `tensors` operands of `element_bytes` each are moved.
    """

    work: Work
    rows: float
    columns: float
    depth: float = 1.0
    batch: float = 1.0
    element_bytes: float = 2.0
    tensors: float = 2.0
    causal: bool = False
    queries_per_key: float = 1.0

    @property
    def flop(self) -> float:
        if self.work is Work.MATMUL:
            return 2.0 * self.batch * self.rows * self.columns * self.depth
        if self.work is Work.ATTENTION:
            return 4.0 * self.batch * self.rows * self.columns * self.depth * (0.5 if self.causal else 1.0)
        return 10.0 * self.batch * self.rows * self.columns

    @property
    def bytes_moved(self) -> float:
        if self.work is Work.MATMUL:
            words = self.rows * self.depth + self.depth * self.columns + self.rows * self.columns
            return self.batch * words * self.element_bytes
        if self.work is Work.ATTENTION:
            tokens = self.rows + self.columns / self.queries_per_key
            return self.batch * 2.0 * tokens * self.depth * self.element_bytes
        return self.batch * self.rows * self.columns * self.tensors * self.element_bytes

    def scaled(self, *, rows: float = 1.0, columns: float = 1.0, depth: float = 1.0, batch: float = 1.0) -> Shape:
        """The shape with its dimensions multiplied; attention's key tokens are its columns."""
        return replace(
            self,
            rows=self.rows * rows,
            columns=self.columns * columns,
            depth=self.depth * depth,
            batch=self.batch * batch,
        )


def seconds(shape: Shape, ceilings: Ceilings) -> float:
    """The model's time. Only ratios of it are ever used."""
    return work_seconds(shape, ceilings) + ceilings.floor_s


def work_seconds(shape: Shape, ceilings: Ceilings) -> float:
    """The model's time without launch and drain."""
    memory_s = shape.bytes_moved / ceilings.memory_Bps
    if shape.work in (Work.MATMUL, Work.ATTENTION):
        return max(_compute_s(shape, ceilings), memory_s)
    return memory_s


def _compute_s(shape: Shape, ceilings: Ceilings) -> float:
    """Waves of tiles. A product of few tiles and great depth is also cut along the depth, as libraries do (split-K,
    stream-K): of all cuts that leave each tile enough to do, the one that fills the last wave best."""
    whole_s = shape.flop / ceilings.flops
    if ceilings.sms <= 1 or shape.rows < 1 or shape.columns < 1:
        return whole_s
    across = 1 if shape.work is Work.ATTENTION else ceil(shape.columns / TILE)
    tiles = shape.batch * ceil(shape.rows / TILE) * across
    padded = (ceil(shape.rows / TILE) * TILE / shape.rows) if shape.work is Work.MATMUL else 1.0
    if tiles > 8 * ceilings.sms:
        return whole_s
    deepest = max(1, int(shape.depth // (4 * TILE))) if shape.work is Work.MATMUL else 1
    cuts = {1, *(cut for cut in (2, 3, 4, 6, 8, 12, 16, 32, 64) if cut <= deepest)}
    idle = min(ceil(tiles * cut / ceilings.sms) * ceilings.sms / (tiles * cut) for cut in cuts)
    return whole_s * padded * max(1.0, idle)


def ratio(old: Shape, new: Shape, ceilings: Ceilings, other: Ceilings | None = None) -> float:
    """What a measured time of `old` is multiplied by to become that of `new` (on the device `other`); 1.0 for itself."""
    if old == new and other is None:
        return 1.0
    return seconds(new, other or ceilings) / seconds(old, ceilings)


WAITING = frozenset({Work.MATMUL, Work.ATTENTION, Work.NORM, Work.ELEMENTWISE, Work.EMBEDDING})
"""Kinds whose recorded shape says all that they do, so that time beyond their model can be told from work."""


def latency_s(measured_s: float, shape: Shape, ceilings: Ceilings) -> float:
    """The part of a measured time that is neither launch and drain nor work, and that more or less work does not change.

    A kernel that takes longer than its model is either slow at its work, which scales, or waits (for memory, for its own
    steps one after the other), which does not. The less work there is beside launch and drain, the more it is the latter.
    """
    if shape.work not in WAITING:
        return 0.0
    floor, work_s = ceilings.floor_s, work_seconds(shape, ceilings)
    excess = measured_s - floor - work_s
    return excess * floor / (floor + work_s) if excess > 0 and floor > 0 else 0.0


def anchored(
    measured_s: float,
    old: Shape,
    new: Shape,
    ceilings: Ceilings,
    other: Ceilings | None = None,
    latent_s: float = 0.0,
) -> float:
    """The measured time of `old` stretched to `new` (on the device `other`): floor + (measured - floor) · M' / M.

    The floor is taken off the measured time, not only off the model's, so that a kernel slower than its model still
    follows its work; so is `latent_s` (latency_s). An unchanged shape keeps its time exactly, and stretching back gives
    it back.
    """
    if old == new and other is None:
        return measured_s
    floor = min(ceilings.floor_s, measured_s)
    latent_s = min(latent_s, measured_s - floor)
    after = floor + latent_s
    if other is not None and ceilings.floor_s > 0 and other.floor_s > 0:
        after = floor * other.floor_s / ceilings.floor_s + latent_s
    before_s = work_seconds(old, ceilings)
    share = work_seconds(new, other or ceilings) / before_s if before_s > 0 else 1.0
    return after + (measured_s - floor - latent_s) * share


def ratio_error(old: Shape, new: Shape) -> float:
    """Relative error of a stretched time: it grows with every doubling of a dimension."""
    pairs = ((old.rows, new.rows), (old.columns, new.columns), (old.depth, new.depth), (old.batch, new.batch))
    return PER_DOUBLING_ERROR * sum(abs(log2(b / a)) for a, b in pairs if a > 0 and b > 0)


_CLASSES: tuple[tuple[Work, re.Pattern[str]], ...] = (
    (
        Work.COPY,
        re.compile(r"memcpy|memset|::copy_|::clone|::contiguous|split_with_sizes_copy|chunk_cat|::cat$", re.IGNORECASE),
    ),
    (
        Work.OPTIMIZER,
        re.compile(r"adam|sgd|lamb|_foreach_|_fused_|multi_tensor_apply|adagrad|grad_norm|::lerp_", re.IGNORECASE),
    ),
    (
        Work.ATTENTION,
        re.compile(
            r"scaled_dot_product|flash|fmha|_efficient_attention|ScaledDotProduct|attn_(fwd|bwd)|attention",
            re.IGNORECASE,
        ),
    ),
    (Work.LOSS, re.compile(r"cross_entropy|nll_loss|log_softmax|NllLoss|LogSoftmax", re.IGNORECASE)),
    (Work.EMBEDDING, re.compile(r"embedding|indexSelect|index_select|vectorized_gather", re.IGNORECASE)),
    (Work.NORM, re.compile(r"layer_norm|rms_?norm|LayerNorm|NormBackward|batch_norm|softmax", re.IGNORECASE)),
    (
        Work.MATMUL,
        re.compile(
            r"::(mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|_grouped_mm)$|(Addmm|Mm|Bmm|Linear)Backward|gemm|nvjet|"
            r"cutlass|cublas|xmma|Cijk_",
            re.IGNORECASE,
        ),
    ),
    (
        Work.ELEMENTWISE,
        re.compile(
            r"elementwise|::(add|mul|sub|div|gelu|silu|relu|dropout|sigmoid|tanh|pow|sum|mean|neg)_?$|"
            r"(Add|Mul|Gelu|Silu|Relu|Dropout|Sum|Mean|Pow|Div)Backward|AccumulateGrad|reduce_kernel|triton_poi",
            re.IGNORECASE,
        ),
    ),
)


@lru_cache(maxsize=1 << 15)
def classify(name: str) -> Work:
    """The class of an operator or kernel, by its name."""
    for work, pattern in _CLASSES:
        if pattern.search(name):
            return work
    return Work.OTHER


def element_bytes(kind: str) -> float:
    """Bytes an element of a Kineto "Input type" entry; 4 where it says nothing that is known."""
    sizes = {
        "half": 2.0,
        "bfloat": 2.0,
        "float8": 1.0,
        "double": 8.0,
        "long": 8.0,
        "char": 1.0,
        "float": 4.0,
        "int": 4.0,
    }
    lower = kind.lower()
    return next((size for key, size in sizes.items() if key in lower), 4.0)


def shape_of(name: str, dims_json: str | None, types_json: str | None = None) -> Shape | None:
    """The shape of an operator from its recorded "Input Dims"; None where they are missing or say nothing.

    A linear layer counts its leading dimensions as rows; the first operand's type decides the element size.
    """
    dims = _tensors(dims_json)
    if not dims:
        return None
    types = _texts(types_json)
    size = element_bytes(types[0]) if types else 4.0
    work, first = classify(name), dims[0]
    if work is Work.MATMUL:
        return _product(name, dims, size)
    if work is Work.ATTENTION and len(first) == 4 and len(dims) > 1 and len(dims[1]) == 4:
        shared = first[1] / dims[1][1] if dims[1][1] else 1.0
        return Shape(work, first[2], dims[1][2], first[3], first[0] * first[1], size, queries_per_key=shared)
    if work is Work.EMBEDDING and len(first) == 2 and len(dims) > 1:
        return Shape(work, prod(dims[1]), first[1], element_bytes=size)
    if work is Work.OPTIMIZER:  # lists of parameters, gradients and moments, each of which is read or written once
        return Shape(work, sum(prod(one) for one in dims if one), 1.0, element_bytes=size, tensors=1.0)
    first = max(dims, key=prod) if work is Work.ELEMENTWISE else first  # a small operand is spread over the large one
    if not first:
        return None
    return Shape(work, prod(first[:-1]), first[-1], element_bytes=size, tensors=1.0 + sum(d == first for d in dims))


def _product(name: str, dims: Sequence[tuple[int, ...]], size: float) -> Shape | None:
    """Linear layers count leading dimensions as rows; so do products with one matrix, which operators of a project's own
    may take as linear layers keep it, with the inner dimension last. Several matrices are a batch:
    of as many products where both sides have leading dimensions, of experts where only the right one has them."""
    if name.endswith(("addmm", "baddbmm")):
        dims = dims[1:]
    if len(dims) < 2 or not dims[0] or not dims[1]:
        return None
    left, right = dims[0], dims[1]
    if name.endswith("linear"):
        return Shape(Work.MATMUL, prod(left[:-1]), right[0], left[-1], element_bytes=size)
    if len(right) > 2 and len(left) > 2:
        batch = max(prod(left[:-2]), prod(right[:-2]))
        return Shape(Work.MATMUL, left[-2], right[-1], left[-1], batch, size)
    if len(right) == 3 and len(left) == 2:
        experts = max(1, right[0])
        return Shape(Work.MATMUL, left[0] / experts, right[-1], left[-1], experts, size)
    turned = len(right) == 2 and right[0] != left[-1] and right[1] == left[-1]  # a weight as linear layers keep it
    return Shape(Work.MATMUL, prod(left[:-1]), right[0] if turned else right[-1], left[-1], element_bytes=size)


def _tensors(text: str | None) -> list[tuple[int, ...]]:
    """The entries of "Input Dims" up to the first that is not a list of numbers, lists of tensors flattened."""
    if not text:
        return []
    try:
        entries = json.loads(text)
    except ValueError:
        return []
    out: list[tuple[int, ...]] = []
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, list):
            break
        inner = entry if entry and all(isinstance(part, list) for part in entry) else [entry]
        for part in inner:
            if not all(isinstance(size, int) for size in part):
                return out
            out.append(tuple(part))
    return out


def _texts(text: str | None) -> list[str]:
    try:
        entries = json.loads(text) if text else []
    except ValueError:
        return []
    return [str(entry) for entry in entries] if isinstance(entries, list) else []


def ceilings_seen(shapes: Iterable[Shape], times_s: Iterable[float], sms: int = 1) -> Ceilings:
    """Ceilings of a device that the catalog lacks, from kernels measured on it.

    The fastest twentieth of the products sets the FLOP rate, that of the others the bandwidth, and the shortest
    twentieth of all the floor. Without any evidence for a rate it is infinite, so that it never binds.
    """
    pairs = [(shape, time) for shape, time in zip(shapes, times_s, strict=True) if time > 0]
    floor = float(np.quantile([time for _, time in pairs], 0.05)) if pairs else 0.0
    net = [(shape, time - floor) for shape, time in pairs if time > 2 * floor] or pairs
    products = [s.flop / t for s, t in net if s.work in (Work.MATMUL, Work.ATTENTION) and t > 0]
    others = [s.bytes_moved / t for s, t in net if s.work not in (Work.MATMUL, Work.ATTENTION) and t > 0]
    return Ceilings(
        float(np.quantile(products, 0.95)) if products else float("inf"),
        float(np.quantile(others, 0.95)) if others else float("inf"),
        sms,
        floor,
    )
