"""Turns a described job into the kernels of its layers, each with seconds, grid and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scaletrace.extrapolate.described.kernels import ATTENTION_SHARE, gemm_s
from scaletrace.extrapolate.described.planned import Described, Item, PlannedKernel

_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_cublas"
_NORM = "void rms_norm_kernel<c10::BFloat16, float>"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::{}>"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"


class KernelPlans:
    """Makes the kernels of one job; all ranks of a stage launch the same."""

    __slots__ = ("d",)

    def __init__(self, described: Described) -> None:
        self.d = described

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
        name = POINTWISE.format("silu_mul_backward" if backward else "silu_mul")
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
