"""Turns a model, a layout and a device into what each rank's thread issues in one step: kernels, collectives, waits.

Where `jobs` sees a layer as one stretch of compute, this sees its kernels, so that the step can be written down as a
trace. Times of kernels come from the same formulas (kernels.py) and share one factor, to be calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scaletrace.errors import UsageError
from scaletrace.extrapolate.described.collectives import (
    GroupShape,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    send_s,
)
from scaletrace.extrapolate.described.constants import ADAM_BYTES_PER_PARAMETER, Device, KernelCosts
from scaletrace.extrapolate.described.kernels import ATTENTION_SHARE, gemm_s
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.described.pipeline import order
from scaletrace.extrapolate.described.stages import layers_by_chunk
from scaletrace.extrapolate.layout import MESH, Layout

GATHER, REDUCE, TENSOR, EXPERT, CONTEXT, REPLICATE = 20, 24, 28, 32, 36, 40
RECEIVE_FORWARD, SEND_FORWARD, RECEIVE_BACKWARD, SEND_BACKWARD = 44, 48, 52, 56
"""Streams, one for each use, as PyTorch and Megatron keep one communicator for each."""

BUCKET_BYTES = 25e6
"""DDP's default bucket."""

_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_cublas"
_NORM = "void rms_norm_kernel<c10::BFloat16, float>"
_POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::{}>"
_ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """A kernel: seconds before calibration, grid, and the shapes of the op that launches it."""

    name: str
    op: str
    seconds: float
    blocks: int
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective or message: kind, axis of its group, stream, seconds of transfer, elements of one member."""

    kind: str
    axis: str
    stream: int
    seconds: float
    in_elements: int
    out_elements: int
    dtype: str = "BFloat16"
    peer: int = -1


@dataclass(frozen=True, slots=True)
class PlannedWait:
    """The compute stream waits for another."""

    on: int


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A named range of the host around further items."""

    name: str
    body: tuple[Item, ...]


Item = PlannedKernel | PlannedCollective | PlannedWait | PlannedRange


@dataclass(frozen=True, slots=True)
class Described:
    """What is to be expanded. `layout` must say mbs and, with a pipeline, microbatches; seq comes from the model if 0."""

    model: Model
    layout: Layout
    device: Device
    costs: KernelCosts

    def __post_init__(self) -> None:
        layout, model = self.layout, self.model
        for axis, whole, name in (
            ("tp", model.heads, "heads"),
            ("tp", model.mlp_width, "ffn"),
            ("cp", self.seq, "seq"),
        ):
            if whole % getattr(layout, axis):
                raise UsageError(f"{axis}={getattr(layout, axis)} does not divide {name} {whole} of {model.name}")
        if layout.ep > 1 and model.experts % layout.ep:
            raise UsageError(f"ep={layout.ep} does not divide the {model.experts} experts of {model.name}")
        if layout.pp * layout.chunks > model.layers:
            raise UsageError(f"{layout.pp * layout.chunks} stages for the {model.layers} layers of {model.name}")
        if layout.pipeline_schedule not in ("1F1B", "Interleaved1F1B"):
            raise UsageError(f"schedule {layout.pipeline_schedule} can't be described yet; 1F1B or Interleaved1F1B")

    @property
    def seq(self) -> int:
        return self.layout.seq or self.model.seq

    @property
    def mbs(self) -> int:
        return self.layout.mbs or 1

    @property
    def micro_batches(self) -> int:
        return self.layout.microbatches or (max(1, self.layout.pp))

    @property
    def tokens(self) -> int:
        """Tokens of one micro batch on one rank."""
        return self.mbs * self.seq // self.layout.cp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step of the whole job."""
        return self.mbs * self.seq * self.micro_batches * self.layout.data_ranks

    def group(self, axis: str) -> GroupShape:
        """How the groups of an axis lie on nodes."""
        span = self.layout.span(axis)
        return GroupShape(span.size, max(1, self.device.gpus_per_node // span.stride))


def distinct_ranks(layout: Layout) -> tuple[int, ...]:
    """One rank for each class of equal work: the first of every pipeline stage."""
    span = layout.span("pp")
    return tuple(stage * span.stride for stage in range(span.size))


def expand(described: Described, rank: int) -> tuple[Item, ...]:
    """What one rank issues in one step."""
    return tuple(_Expander(described, rank).step())


class _Expander:
    """One rank's view of the step."""

    __slots__ = ("counts", "d", "gathered", "rank", "stage")

    def __init__(self, described: Described, rank: int) -> None:
        self.d, self.rank = described, rank
        self.stage = described.layout.coordinates(rank)["pp"]
        layout = described.layout
        self.counts = layers_by_chunk(described.model.layers, layout.pp * layout.chunks)
        self.gathered = 0

    def step(self) -> Iterator[Item]:
        layout = self.d.layout
        operations, _ = order(layout.pp, layout.chunks, self.d.micro_batches, self.stage)
        last_backward = {chunk: mb for is_forward, chunk, mb in operations if not is_forward}
        for is_forward, chunk, micro_batch in operations:
            work = self.forward if is_forward else self.backward
            name = f"{'Forward' if is_forward else 'Backward'} {micro_batch}"
            yield PlannedRange(name, tuple(work(chunk, last_backward[chunk] == micro_batch)))
        yield PlannedRange("Optimizer.step#AdamW.step", tuple(self.optimizer()))

    # Work of one chunk

    def forward(self, chunk: int, _: bool) -> Iterator[Item]:
        virtual = chunk * self.d.layout.pp + self.stage
        first, last = virtual == 0, virtual == len(self.counts) - 1
        if not first:
            yield from self.message("recv", RECEIVE_FORWARD, self.neighbour(-1))
        else:
            yield from self.sharded_root(first=True)
            yield self.bytes_kernel("void at::native::embedding_kernel", "aten::embedding", 4)
        yield from self.layers(self.counts[virtual], self.layer_forward)
        if last:
            yield from self.head(backward=False)
        else:
            yield from self.message("send", SEND_FORWARD, self.neighbour(1))

    def backward(self, chunk: int, reduces: bool) -> Iterator[Item]:
        virtual = chunk * self.d.layout.pp + self.stage
        first, last = virtual == 0, virtual == len(self.counts) - 1
        if last:
            yield from self.head(backward=True)
        else:
            yield from self.message("recv", RECEIVE_BACKWARD, self.neighbour(1))
        for _ in range(self.counts[virtual]):
            yield from self.gather_layer()
            if self.d.layout.recompute == "full":
                yield from self.layer_forward()
            yield from self.layer_backward()
            yield from self.reduce_layer(reduces)
        if first:
            yield self.bytes_kernel("void at::native::embedding_backward_kernel", "aten::embedding_dense_backward", 6)
            yield from self.sharded_root(first=False)
        else:
            yield from self.message("send", SEND_BACKWARD, self.neighbour(-1))

    def layers(self, count: int, work: Callable[[], Iterator[Item]]) -> Iterator[Item]:
        """Layers in order; the gather of the next one is issued before this one's kernels (prefetch)."""
        if count and self.sharded:
            yield self.layer_gather()
        for i in range(count):
            if self.sharded:
                yield PlannedWait(GATHER)
                if i + 1 < count:
                    yield self.layer_gather()
            yield from work()

    # Kernels of one layer

    def layer_forward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        yield self.norm()
        yield self.gemm((model.hidden + 2 * model.kv_width) // tp, model.hidden)
        if self.d.layout.cp > 1:
            yield from self.blocking(
                "all_gather", "cp", CONTEXT, self.d.tokens * 2 * model.kv_width // tp * self.d.layout.cp
            )
        yield self.attention(backward=False)
        yield self.gemm(model.hidden, model.hidden // tp)
        yield from self.tensor_parallel()
        yield self.norm()
        yield from self.routed(self.mlp_forward)
        yield from self.tensor_parallel()
        yield self.bytes_kernel(_POINTWISE.format("CUDAFunctor_add<c10::BFloat16>"), "aten::add", 6)

    def layer_backward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        yield from self.routed(self.mlp_backward)
        yield from self.tensor_parallel()
        yield self.norm(backward=True)
        yield from self.gemm_backward(model.hidden, model.hidden // tp)
        yield self.attention(backward=True)
        if self.d.layout.cp > 1:
            yield from self.blocking(
                "reduce_scatter", "cp", CONTEXT, self.d.tokens * 2 * model.kv_width // tp * self.d.layout.cp
            )
        yield from self.gemm_backward((model.hidden + 2 * model.kv_width) // tp, model.hidden)
        yield from self.tensor_parallel()
        yield self.norm(backward=True)

    def mlp_forward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        width = model.mlp_width // tp
        share = model.experts_per_token
        yield self.gemm(width * (model.mlp_matrices - 1), model.hidden, share)
        yield self.activation(width * share, backward=False)
        yield self.gemm(model.hidden, width, share)

    def mlp_backward(self) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        width = model.mlp_width // tp
        share = model.experts_per_token
        yield from self.gemm_backward(model.hidden, width, share)
        yield self.activation(width * share, backward=True)
        yield from self.gemm_backward(width * (model.mlp_matrices - 1), model.hidden, share)

    def routed(self, work: Callable[[], Iterator[Item]]) -> Iterator[Item]:
        """Expert layers: tokens go to their experts and come back."""
        model = self.d.model
        if model.experts == 1 or self.d.layout.ep == 1:
            yield from work()
            return
        elements = self.d.tokens * model.experts_per_token * model.hidden
        yield self.bytes_kernel("void moe_permute_topk_kernel", "aten::index_select", 6)
        yield from self.blocking("all_to_all", "ep", EXPERT, elements)
        yield from work()
        yield from self.blocking("all_to_all", "ep", EXPERT, elements)

    def head(self, backward: bool) -> Iterator[Item]:
        model, tp = self.d.model, self.d.layout.tp
        columns = model.vocab // tp
        if not backward:
            yield self.norm()
            yield self.gemm(columns, model.hidden)
            yield self.logits("void cross_entropy_forward_kernel<float>", "aten::cross_entropy_loss", 1 / 3)
        else:
            yield self.logits("void cross_entropy_backward_kernel<float>", "aten::nll_loss_backward", 2 / 3)
            yield from self.gemm_backward(columns, model.hidden)
            yield self.norm(backward=True)

    def gemm(self, columns: int, inner: int, share: int = 1) -> PlannedKernel:
        rows = self.d.tokens * share
        seconds = gemm_s(rows, columns, inner, self.d.device, self.d.costs.gemm_share)
        blocks = math.ceil(rows / 128) * math.ceil(columns / 256)
        return PlannedKernel(_GEMM, "aten::mm", seconds, max(1, blocks), ((rows, inner), (inner, columns)))

    def gemm_backward(self, columns: int, inner: int, share: int = 1) -> Iterator[Item]:
        """Gradient of the input, then of the weight."""
        rows = self.d.tokens * share
        for m, n, k in ((rows, inner, columns), (inner, columns, rows)):
            seconds = gemm_s(m, n, k, self.d.device, self.d.costs.gemm_share)
            blocks = math.ceil(m / 128) * math.ceil(n / 256)
            yield PlannedKernel(_GEMM, "aten::mm", seconds, max(1, blocks), ((m, k), (k, n)))

    def attention(self, backward: bool) -> PlannedKernel:
        model, device, costs = self.d.model, self.d.device, self.d.costs
        tp = self.d.layout.tp
        flop = 4.0 * self.d.tokens * self.d.seq * model.hidden / tp
        seconds = flop / (device.bf16_flop_s * costs.gemm_share * ATTENTION_SHARE)
        scores = self.d.tokens * self.d.seq * model.heads / tp
        seconds += scores * costs.score_bytes / 3 / (device.hbm_share * device.hbm_Bps)
        head = model.hidden // model.heads
        shape = (self.d.mbs, self.d.seq // self.d.layout.cp, model.heads // tp, head)
        name = "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel" if backward else "flash_fwd_kernel"
        op = "aten::_flash_attention_backward" if backward else "aten::_flash_attention_forward"
        blocks = max(1, self.d.mbs * model.heads // tp * math.ceil(self.d.seq / self.d.layout.cp / 128))
        return PlannedKernel(name, op, seconds * (2 if backward else 1), blocks, (shape, shape, shape))

    def norm(self, backward: bool = False) -> PlannedKernel:
        """A quarter of a layer's bytes per hidden element goes to each of its two norms."""
        name = _NORM.replace("norm", "norm_backward") if backward else _NORM
        op = "aten::_fused_rms_norm_backward" if backward else "aten::_fused_rms_norm"
        return self.bytes_kernel(name, op, self.d.costs.hidden_bytes / 4 * (2 / 3 if backward else 1 / 3))

    def activation(self, width: int, backward: bool) -> PlannedKernel:
        """The gate of the MLP: reads what the product before it wrote, writes what the next one reads."""
        bytes_moved = self.d.tokens * width * 2.0 * (self.d.model.mlp_matrices + (2 if backward else 0))
        name = _POINTWISE.format("silu_mul_backward" if backward else "silu_mul")
        return self.kernel_of(
            name, "aten::silu_backward" if backward else "aten::silu", bytes_moved, (self.d.tokens, width)
        )

    def bytes_kernel(self, name: str, op: str, bytes_per_element: float) -> PlannedKernel:
        split = self.d.layout.tp if self.d.layout.sp else 1
        elements = self.d.tokens * self.d.model.hidden // split
        shape = (self.d.tokens // split or 1, self.d.model.hidden)
        return self.kernel_of(name, op, elements * bytes_per_element, shape)

    def logits(self, name: str, op: str, share: float) -> PlannedKernel:
        columns = self.d.model.vocab // self.d.layout.tp
        return self.kernel_of(
            name, op, self.d.tokens * columns * self.d.costs.logit_bytes * share, (self.d.tokens, columns)
        )

    def kernel_of(self, name: str, op: str, bytes_moved: float, shape: tuple[int, int]) -> PlannedKernel:
        """A kernel bound by memory: bytes over HBM, and the shortest time that any kernel takes."""
        seconds = max(2e-6, bytes_moved / (self.d.device.hbm_share * self.d.device.hbm_Bps))
        return PlannedKernel(name, op, seconds, max(1, shape[0] * shape[1] // 4096), (shape,))

    # Collectives

    @property
    def sharded(self) -> bool:
        return self.d.layout.span("shard").size > 1 and self.d.layout.fsdp > 1

    def layer_elements(self) -> int:
        """Parameters of one layer on one tensor-parallel rank, experts divided over theirs."""
        model, layout = self.d.model, self.d.layout
        own = model.layer_parameters - model.experts * model.expert_parameters
        experts = model.experts * model.expert_parameters // layout.ep
        return (own + experts) // layout.tp

    def layer_gather(self) -> PlannedCollective:
        return self.shard_collective("all_gather", GATHER, self.layer_elements(), "BFloat16", 2)

    def gather_layer(self) -> Iterator[Item]:
        """FULL_SHARD gathers again in the backward."""
        if self.sharded:
            yield self.layer_gather()
            yield PlannedWait(GATHER)

    def reduce_layer(self, reduces: bool) -> Iterator[Item]:
        """FSDP scatters each micro batch's gradients; replicas reduce them once, after the last micro batch."""
        layout, elements = self.d.layout, self.layer_elements()
        if self.sharded:
            yield self.shard_collective("reduce_scatter", REDUCE, elements, "Float", 4)
            elements //= layout.span("shard").size
        if layout.dp > 1 and reduces:
            yield self.replica_reduction(elements)

    def replica_reduction(self, elements: int) -> PlannedCollective:
        group = self.d.group("dp")
        if self.d.layout.zero:
            seconds = all_gather_s(self.d.device, 4.0 * elements, group)
            return PlannedCollective(
                "reduce_scatter", "dp", REPLICATE, seconds, elements, elements // group.size, "Float"
            )
        buckets = max(1, math.ceil(4.0 * elements / BUCKET_BYTES))
        seconds = buckets * all_reduce_s(self.d.device, 4.0 * elements / buckets, group)
        return PlannedCollective("all_reduce", "dp", REPLICATE, seconds, elements, elements, "Float")

    def shard_collective(self, kind: str, stream: int, elements: int, dtype: str, width: int) -> PlannedCollective:
        group = self.d.group("shard")
        padded = math.ceil(elements / group.size) * group.size
        seconds = all_gather_s(self.d.device, float(width * padded), group)
        whole, part = padded, padded // group.size
        sizes = (part, whole) if kind == "all_gather" else (whole, part)
        return PlannedCollective(kind, "shard", stream, seconds, *sizes, dtype)

    def sharded_root(self, first: bool) -> Iterator[Item]:
        """The root unit (embedding, and head where it is tied): gathered at the head, reduced at the tail."""
        elements = self.d.model.embedding_parameters // self.d.layout.tp
        if self.sharded and first:
            yield self.shard_collective("all_gather", GATHER, elements, "BFloat16", 2)
            yield PlannedWait(GATHER)
        elif self.sharded:
            yield self.shard_collective("reduce_scatter", REDUCE, elements, "Float", 4)

    def tensor_parallel(self) -> Iterator[Item]:
        """What follows a row-parallel product: an all-reduce, or with sequence parallelism the two halves of one."""
        if self.d.layout.tp == 1:
            return
        elements = self.d.tokens * self.d.model.hidden
        if not self.d.layout.sp:
            yield from self.blocking("all_reduce", "tp", TENSOR, elements)
            return
        yield from self.blocking("reduce_scatter", "tp", TENSOR, elements)
        yield from self.blocking("all_gather", "tp", TENSOR, elements)

    def blocking(self, kind: str, axis: str, stream: int, elements: int) -> Iterator[Item]:
        """A collective whose result the next kernel needs; `elements` is the whole vector."""
        group = self.d.group(axis)
        size_bytes = 2.0 * elements
        part = max(1, elements // group.size)
        if kind == "all_reduce":
            seconds, sizes = all_reduce_s(self.d.device, size_bytes, group), (elements, elements)
        elif kind == "all_to_all":
            seconds, sizes = all_to_all_s(self.d.device, size_bytes, group), (elements, elements)
        else:
            seconds = all_gather_s(self.d.device, size_bytes, group)
            sizes = (part, elements) if kind == "all_gather" else (elements, part)
        yield PlannedCollective(kind, axis, stream, seconds, *sizes)
        yield PlannedWait(stream)

    def neighbour(self, direction: int) -> int:
        """The rank with the same coordinates on the next or previous stage, around the end for interleaved chunks."""
        span = self.d.layout.span("pp")
        stage = (self.stage + direction) % span.size
        return self.rank + (stage - self.stage) * span.stride

    def message(self, kind: str, stream: int, peer: int) -> Iterator[Item]:
        """An activation or its gradient, to or from another stage; a receive is awaited at once."""
        split = self.d.layout.tp if self.d.layout.sp else 1
        elements = self.d.tokens * self.d.model.hidden // split
        across = self.d.layout.span("pp").stride * self.d.layout.pp > self.d.device.gpus_per_node
        seconds = send_s(self.d.device, 2.0 * elements, across)
        yield PlannedCollective(kind, "pp", stream, seconds, elements, elements, peer=peer)
        if kind == "recv":
            yield PlannedWait(stream)

    def optimizer(self) -> Iterator[Item]:
        layout, model = self.d.layout, self.d.model
        if self.sharded:
            yield PlannedWait(REDUCE)
        if layout.dp > 1:
            yield PlannedWait(REPLICATE)
        if layout.ranks > 1:
            world = GroupShape(layout.ranks, self.d.device.gpus_per_node)
            yield PlannedCollective(
                "all_reduce", "world", REDUCE, all_reduce_s(self.d.device, 4.0, world), 1, 1, "Float"
            )
            yield PlannedWait(REDUCE)
        chunks = [chunk * layout.pp + self.stage for chunk in range(layout.chunks)]
        held = sum(self.counts[chunk] for chunk in chunks) * self.layer_elements()
        if 0 in chunks or len(self.counts) - 1 in chunks:
            held += model.embedding_parameters // layout.tp
        owned = math.ceil(held / layout.shards)
        yield self.kernel_of(_ADAM, "aten::_fused_adamw_", float(owned) * ADAM_BYTES_PER_PARAMETER, (owned, 1))
        if layout.zero and layout.dp > 1:
            group = self.d.group("dp")
            seconds = all_gather_s(self.d.device, 2.0 * held, group)
            yield PlannedCollective("all_gather", "dp", REPLICATE, seconds, held // group.size, held)
            yield PlannedWait(REPLICATE)


def groups(layout: Layout) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """All process groups of more than one rank: (axis, description, ranks), in the order of their creation."""
    found = [("world", "default_pg", tuple(range(layout.ranks)))]
    names = {
        "dp": "mesh_dp_replicate",
        "shard": "mesh_dp_shard",
        "tp": "mesh_tp",
        "cp": "mesh_cp",
        "ep": "mesh_ep",
        "pp": "mesh_pp",
    }
    for axis, description in names.items():
        span = layout.span(axis)
        if span.size == 1 or (axis == "shard" and layout.fsdp == 1):
            continue
        found += [(axis, description, members) for members in _groups_of(layout, axis)]
    return tuple(found)


def _groups_of(layout: Layout, axis: str) -> Iterator[tuple[int, ...]]:
    span = layout.span(axis)
    seen: set[int] = set()
    for rank in range(layout.ranks):
        if rank not in seen:
            members = tuple(range(rank, rank + span.size * span.stride, span.stride))
            seen.update(members)
            yield members


__all__ = [
    "MESH",
    "Described",
    "Item",
    "PlannedCollective",
    "PlannedKernel",
    "PlannedRange",
    "PlannedWait",
    "distinct_ranks",
    "expand",
    "groups",
]
