"""Turns the name of a device into the constants that every described job on it shares, each with its derivation.

Nothing here belongs to one table of measurements. One number per device is fitted, `overlap_loss`;
the rows that fixed it are named below, are typed `FitRow` in benchmarks/validation and never scored.

NCCL latencies      tuner of NCCL 2.30.7, Simple protocol (src/graph/tuning.cc): base 8.4 µs; ring hop 3.4 µs over
                    NVLink, 14 µs over the network; tree hop 4.0 and 14 µs. A multi-node ring all-reduce has latency × 1.4.
nvlink_share 0.80   ring bus bandwidth over link rate: 235/300 (A100), 367/450 (H200), 682/900 (B200).
nic_share 0.96      23.5/25, 48.5/50 GB/s (SimAI), 193.7/200 Gb/s (ib_write_bw).
hbm_share 0.85      streaming share of HBM rate that element-wise kernels reach.
spread 0.011        coefficient of variation over ranks of one kernel's time, 8 H100 ranks of one job, taken as static.
overlap_loss λ      seconds of compute lost per second of a collective that hides wholly, at NCCL_CHANNELS channels; in
                    proportion to the channels (SMs held) elsewhere.
                    H100: MPT-1B under FSDP, 128 → 256 GPUs (MosaicML, 2 rows).
                    A100: InternLM-7B, TP1, node-local ZeRO-1, 8 → 16 GPUs (InternEvo, 2 rows).
collective_slowdown μ 0.19: the mean slowdown reported for overlapped work (2507.03114), used here for collectives.
NCCL_CHANNELS 24    grid of the NCCL kernels in the public 8 × H100 trace.
fp8_over_bf16 1.6   ratio of the rates that FP8 and bf16 GEMMs reach (1403/794.5 for large squares, less for real shapes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scaletrace.errors import UsageError

US = 1e-6
NCCL_BASE_S = 8.4 * US
RING_NVLINK_HOP_S = 3.4 * US
RING_NETWORK_HOP_S = 14 * US
TREE_NVLINK_HOP_S = 4.0 * US
TREE_NETWORK_HOP_S = 14 * US
RING_MULTINODE_FACTOR = 1.4
TREE_BANDWIDTH_SHARE = 0.92
SEND_RECV_S = 20 * US

ADAM_BYTES_PER_PARAMETER = 28
"""Traffic of one fused Adam update: read gradient, master, two moments (fp32), write the last three: 7 × 4 B."""

GRADIENT_PASS_BYTES_PER_PARAMETER = 4
"""One read and one write of bf16 gradients (norm and scale) or of FP8 weights: 2 × 2 B."""

FP8_OVER_BF16 = 1.6
NCCL_CHANNELS = 24


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU in its usual node: rates per direction and GPU in bytes or FLOP a second, shares that are reached."""

    name: str
    bf16_flop_s: float
    fp8_flop_s: float
    hbm_Bps: float
    hbm_bytes: float
    nvlink_Bps: float
    nic_Bps: float
    overlap_loss: float
    power_W: float
    gpus_per_node: int = 8
    sm_count: int = 132
    nvlink_share: float = 0.80
    nic_share: float = 0.96
    hbm_share: float = 0.85
    collective_slowdown: float = 0.19
    spread: float = 0.011

    def kernel_slowdown(self, channels: int = NCCL_CHANNELS) -> float:
        """κ: a kernel beside a resident collective of `channels` channels takes 1 + κ times as long.

        Solves λ = κ (1 + μ) / (1 + κ), the loss of a wholly hidden collective (lanes.py).
        """
        loss = self.overlap_loss * channels / NCCL_CHANNELS
        return loss / (1 + self.collective_slowdown - loss)

    def with_nics(self, node_Bps: float) -> Device:
        """The same device in a node whose NICs move `node_Bps` in total per direction."""
        return replace(self, nic_Bps=node_Bps / self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class KernelCosts:
    """What a software stack does with a device, beyond the device's own rates.

    gemm_share    share of peak that full waves of large tiles reach in training (kernel alone: 271/312 on A100)
    score_bytes   HBM bytes per attention score over forward and backward; 0 with flash attention
    hidden_bytes  HBM bytes per token and hidden element of one layer over forward and backward
    logit_bytes   HBM bytes per logit over forward and backward
    launch_s      gap that one small kernel leaves
    host_s        host time to issue one pass (forward, recomputation or backward) of one layer
    host_tp_s     what tensor parallelism adds to it
    """

    gemm_share: float
    score_bytes: float
    hidden_bytes: float
    logit_bytes: float
    launch_s: float
    host_s: float
    host_tp_s: float
    sequence_parallel: bool = False


MEGATRON_A100 = KernelCosts(0.80, 42.0, 46.0, 29.0, 6.0e-6, 1.07e-3, 0.115e-3)
"""Megatron without flash attention. Fitted together, each source with equal weight, on vTrain's 2-GPU runs without a
pipeline (93 rows) and on Korthikanti's 22B and 175B (4 rows); nothing else of either source was used."""

FLASH_H100 = KernelCosts(0.74, 0.0, 46.0, 29.0, 6.0e-6, 1.07e-3, 0.115e-3, sequence_parallel=True)
"""The same stack on H100 with flash attention and sequence parallelism: no constant fitted. gemm_share is A100's times
the ratio of the shares that the largest kernels reach, (794.5/989) / (271.2/312)."""


_DEVICES = (
    Device("h100", 989e12, 1979e12, 3.35e12, 80e9, 450e9, 50e9, overlap_loss=0.603, power_W=700),
    Device("a100", 312e12, 312e12, 2.0e12, 80e9, 300e9, 25e9, overlap_loss=0.217, power_W=400, sm_count=108),
    Device("a100-40", 312e12, 312e12, 1.555e12, 40e9, 300e9, 25e9, overlap_loss=0.217, power_W=400, sm_count=108),
    # V100: no table fixes its interference; the value of A100, the nearest device, stands in.
    Device("v100", 125e12, 125e12, 0.9e12, 32e9, 150e9, 12.5e9, overlap_loss=0.217, power_W=300, sm_count=80),
)


def device(name: str) -> Device:
    """The constants of a device by name; raises UsageError with the known names."""
    for known in _DEVICES:
        if known.name == name:
            return known
    raise UsageError(f"no constants for device {name!r}; known: {', '.join(d.name for d in _DEVICES)}")
