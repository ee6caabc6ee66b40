"""Turns a described job into the kernels of its layers, each with seconds, grid and shapes.

A kernel's tag names its forward operator within a micro batch and unit ("2/5/qkv"), so that the backward node finds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum

from scaletrace.extrapolate.described.kernels import ATTENTION_SHARE, gemm_s
from scaletrace.extrapolate.described.planned import Described, PlannedBackward, PlannedKernel

_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_{}_n_tilesize128x256x64_cublas"
FORWARD, INPUT, WEIGHT = "tn", "nn", "nt"
"""Which operands a product takes transposed: of the forward, of the input's gradient, of the weight's gradient."""

GROUPED = "aten::_grouped_mm"
_NORM = "void rms_norm_kernel<c10::BFloat16, float>"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::{}>"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"


class Part(Enum):
    """What of a backward is done: all of it, or with a zero-bubble schedule the gradients of inputs or of weights."""

    WHOLE = "B"
    INPUT = "I"
    WEIGHT = "W"


class KernelPlans:
    """Makes the kernels of one job; all ranks of a stage launch the same."""

    __slots__ = ("d", "part", "unit")

    def __init__(self, described: Described) -> None:
        self.d = described
        self.unit = ""
        self.part = Part.WHOLE

    def node(self, name: str, slot: str, *kernels: PlannedKernel) -> Iterator[PlannedBackward]:
        """A backward node that gives gradients of inputs only, so it is skipped where weights' gradients are asked for."""
        if self.part is not Part.WEIGHT:
            yield PlannedBackward(name, f"{self.unit}/{slot}", kernels)

    def product(self, slot: str, columns: int, inner: int) -> PlannedKernel:
        """Forward of a linear layer from `inner` to `columns`."""
        rows = self.d.tokens
        kernel = self._gemm(FORWARD, rows, columns, inner)
        outer = ((rows, inner), (columns, inner), ())
        return replace(kernel, outer="aten::linear", outer_shapes=outer, tag=f"{self.unit}/{slot}")

    def product_backward(self, slot: str, columns: int, inner: int) -> Iterator[PlannedBackward]:
        """Gradient of the input, then of the weight."""
        rows = self.d.tokens
        kernels = []
        if self.part is not Part.WEIGHT:
            kernels.append(self._gemm(INPUT, rows, inner, columns))
        if self.part is not Part.INPUT:
            kernels.append(self._gemm(WEIGHT, inner, columns, rows))
        yield PlannedBackward("MmBackward0", f"{self.unit}/{slot}", tuple(kernels))

    def experts(self, slot: str, columns: int, inner: int) -> PlannedKernel:
        """Forward of this rank's experts, one product of each on the tokens that were sent to it: rows grouped by expert."""
        if self.d.model.experts == 1:
            return self.product(slot, columns, inner)
        rows, held = self.d.tokens * self.d.model.experts_per_token, self._held
        kernel = self._gemm(FORWARD, rows, columns, inner)
        shapes = ((rows, inner), (held, inner, columns), (held,))
        return replace(kernel, op=GROUPED, shapes=shapes, tag=f"{self.unit}/{slot}")

    def experts_backward(self, slot: str, columns: int, inner: int) -> Iterator[PlannedBackward]:
        """Gradient of the tokens, then of each expert's weights."""
        if self.d.model.experts == 1:
            yield from self.product_backward(slot, columns, inner)
            return
        rows, held = self.d.tokens * self.d.model.experts_per_token, self._held
        kernels = []
        if self.part is not Part.WEIGHT:
            kernel = self._gemm(INPUT, rows, inner, columns)
            kernels.append(replace(kernel, op=GROUPED, shapes=((rows, columns), (held, columns, inner), (held,))))
        if self.part is not Part.INPUT:
            kernel = self._gemm(WEIGHT, inner, columns, rows)
            kernels.append(replace(kernel, op=GROUPED, shapes=((inner, rows), (rows, columns), (held,))))
        yield PlannedBackward("GroupedMmBackward0", f"{self.unit}/{slot}", tuple(kernels))

    @property
    def _held(self) -> int:
        """Experts of one rank."""
        return self.d.model.experts // self.d.layout.ep

    def _gemm(self, operands: str, m: int, n: int, k: int) -> PlannedKernel:
        seconds = gemm_s(m, n, k, self.d.device, self.d.costs.gemm_share)
        blocks = math.ceil(m / 128) * math.ceil(n / 256)
        return PlannedKernel(_GEMM.format(operands), "aten::mm", seconds, max(1, blocks), ((m, k), (k, n)))

    def attention(self) -> PlannedKernel:
        query, key = self._attention_shapes()
        return PlannedKernel(
            "flash_fwd_kernel",
            "aten::_scaled_dot_product_flash_attention",
            self._attention_s(),
            self._attention_blocks(),
            (query, key, key),
            "aten::scaled_dot_product_attention",
            (query, key, key),
            f"{self.unit}/attention",
        )

    def attention_backward(self) -> Iterator[PlannedBackward]:
        query, key = self._attention_shapes()
        kernel = PlannedKernel(
            "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel",
            "aten::_scaled_dot_product_flash_attention_backward",
            2 * self._attention_s(),
            self._attention_blocks(),
            (query, query, key, key, query),
        )
        yield from self.node("ScaledDotProductFlashAttentionBackward0", "attention", kernel)

    def _attention_s(self) -> float:
        model, device, costs = self.d.model, self.d.device, self.d.costs
        tp = self.d.layout.tp
        flop = 4.0 * self.d.tokens * self.d.seq * model.hidden / tp
        seconds = flop / (device.bf16_flop_s * costs.gemm_share * ATTENTION_SHARE)
        scores = self.d.tokens * self.d.seq * model.heads / tp
        return seconds + scores * costs.score_bytes / 3 / (device.hbm_share * device.hbm_Bps)

    def _attention_blocks(self) -> int:
        heads = self.d.model.heads // self.d.layout.tp
        return max(1, self.d.mbs * heads * math.ceil(self.d.seq / self.d.layout.cp / 128))

    def _attention_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Samples, heads, tokens, head size of queries (those of this rank) and keys (of the whole sequence)."""
        model, layout = self.d.model, self.d.layout
        head = model.hidden // model.heads
        keys = max(1, model.kv_width // head // layout.tp)
        query = (self.d.mbs, model.heads // layout.tp, self.d.seq // layout.cp, head)
        return query, (self.d.mbs, keys, self.d.seq, head)

    def norm(self, slot: str) -> PlannedKernel:
        """A quarter of a layer's bytes per hidden element goes to each of its two norms."""
        rows, width = self._hidden_shape()
        kernel = self.hidden_kernel(_NORM, "aten::_fused_rms_norm", self.d.costs.hidden_bytes / 12)
        outer = ((rows, width), (), (width,))
        return replace(kernel, outer="aten::rms_norm", outer_shapes=outer, tag=f"{self.unit}/{slot}")

    def norm_backward(self, slot: str) -> Iterator[PlannedBackward]:
        name = _NORM.replace("norm", "norm_backward")
        kernel = self.hidden_kernel(name, "aten::_fused_rms_norm_backward", self.d.costs.hidden_bytes / 6)
        yield from self.node("FusedRmsNormBackward0", slot, kernel)

    def activation(self, width: int) -> PlannedKernel:
        """The gate of the MLP: reads what the product before it wrote, writes what the next one reads."""
        name, op = self._activation_names()
        moved = self.d.tokens * width * 2.0 * self.d.model.mlp_matrices
        kernel = self.kernel_of(POINTWISE.format(f"{name}_mul"), op, moved, (self.d.tokens, width))
        return replace(kernel, tag=f"{self.unit}/activation")

    def activation_backward(self, width: int) -> Iterator[PlannedBackward]:
        name, op = self._activation_names()
        moved = self.d.tokens * width * 2.0 * (self.d.model.mlp_matrices + 2)
        shape = (self.d.tokens, width)
        kernel = self.kernel_of(POINTWISE.format(f"{name}_mul_backward"), f"{op}_backward", moved, shape)
        yield from self.node(f"{name.capitalize()}Backward0", "activation", kernel)

    def _activation_names(self) -> tuple[str, str]:
        name = "gelu" if self.d.model.family == "gpt" else "silu"
        return name, f"aten::{name}"

    def residual(self) -> PlannedKernel:
        kernel = self.hidden_kernel(POINTWISE.format("CUDAFunctor_add<c10::BFloat16>"), "aten::add", 6)
        return replace(kernel, shapes=kernel.shapes * 2, tag=f"{self.unit}/residual")

    def embedding(self) -> PlannedKernel:
        model = self.d.model
        kernel = self.hidden_kernel("void at::native::embedding_kernel", "aten::embedding", 4)
        table = ((model.vocab // self.d.layout.tp, model.hidden), (self.d.mbs, self.d.seq // self.d.layout.cp))
        return replace(kernel, shapes=table, tag=f"{self.unit}/embedding")

    def embedding_backward(self) -> Iterator[PlannedBackward]:
        kernel = self.hidden_kernel("void at::native::embedding_backward_kernel", "aten::embedding_dense_backward", 6)
        if self.part is not Part.INPUT:
            yield PlannedBackward("EmbeddingBackward0", f"{self.unit}/embedding", (kernel,))

    def permutation(self) -> PlannedKernel:
        """Tokens in order of their experts."""
        kernel = self.hidden_kernel("void moe_permute_topk_kernel", "aten::index_select", 6)
        return replace(kernel, tag=f"{self.unit}/permutation")

    def permutation_backward(self) -> Iterator[PlannedBackward]:
        kernel = self.hidden_kernel("void moe_permute_topk_kernel", "aten::index_add", 6)
        yield from self.node("IndexSelectBackward0", "permutation", kernel)

    def loss(self) -> PlannedKernel:
        kernel = self._logits("void cross_entropy_forward_kernel<float>", "aten::cross_entropy_loss", 1 / 3)
        return replace(kernel, tag=f"{self.unit}/loss")

    def loss_backward(self) -> Iterator[PlannedBackward]:
        kernel = self._logits("void cross_entropy_backward_kernel<float>", "aten::nll_loss_backward", 2 / 3)
        yield from self.node("NllLossBackward0", "loss", kernel)

    def _logits(self, name: str, op: str, share: float) -> PlannedKernel:
        columns = self.d.model.vocab // self.d.layout.tp
        moved = self.d.tokens * columns * self.d.costs.logit_bytes * share
        return self.kernel_of(name, op, moved, (self.d.tokens, columns))

    def hidden_kernel(self, name: str, op: str, bytes_per_element: float) -> PlannedKernel:
        """A kernel that passes over the hidden state of this rank."""
        shape = self._hidden_shape()
        return self.kernel_of(name, op, shape[0] * shape[1] * bytes_per_element, shape)

    def _hidden_shape(self) -> tuple[int, int]:
        split = self.d.layout.tp if self.d.layout.sp else 1
        return max(1, self.d.tokens // split), self.d.model.hidden

    def kernel_of(self, name: str, op: str, bytes_moved: float, shape: tuple[int, int]) -> PlannedKernel:
        """A kernel bound by memory: bytes over HBM, and the shortest time that any kernel takes."""
        seconds = max(2e-6, bytes_moved / (self.d.device.hbm_share * self.d.device.hbm_Bps))
        return PlannedKernel(name, op, seconds, max(1, shape[0] * shape[1] // 4096), (shape,))
