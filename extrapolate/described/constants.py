"""Turns the name of a device into the constants that every described job on it shares, each with its derivation.

Nothing here belongs to one table of measurements. Fitted are `overlap_loss`, one number a device, and MEGATRON_A100,
seven costs of a software stack for tables that span shapes; the rows that fixed them are named beside them, are typed
`FitRow` in benchmarks/validation and are never scored. Tests find the numbers again from these rows.

NCCL latencies      tuner of NCCL 2.30.7, Simple protocol (src/graph/tuning.cc): base 8.4 µs; ring hop 3.4 µs over
                    NVLink, 14 µs over the network; tree hop 4.0 and 14 µs. A multi-node ring all-reduce has latency × 1.4.
nvlink_share 0.80   ring bus bandwidth over link rate: 235/300 (A100), 367/450 (H200), 682/900 (B200).
nic_share 0.96      23.5/25, 48.5/50 GB/s (SimAI), 193.7/200 Gb/s (ib_write_bw).
hbm_share 0.85      streaming share of HBM rate that element-wise kernels reach.
spread 0.011        coefficient of variation over ranks of one kernel's time, 8 H100 ranks of one job, taken as static.
overlap_loss λ, collective_slowdown μ, NCCL_CHANNELS   what overlap costs: interference.py, which the whole tool shares.
fp8_over_bf16 1.6   ratio of the rates that FP8 and bf16 GEMMs reach (1403/794.5 for large squares, less for real shapes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scaletrace.errors import UsageError
from scaletrace.extrapolate.catalog import load_device
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.interference import (
    COLLECTIVE_SLOWDOWN,
    NCCL_CHANNELS,
    OVERLAP_LOSS,
    kernel_slowdown,
    overlap_loss,
)
from scaletrace.extrapolate.nccl import RING_PLATEAU, TREE_BANDWIDTH, US, Tuning

_SIMPLE = 2
_TUNING = Tuning()
NCCL_BASE_S = _TUNING.ring_base[_SIMPLE] * US
RING_NVLINK_HOP_S = _TUNING.ring_nvlink[_SIMPLE] * US
RING_NETWORK_HOP_S = _TUNING.ring_net[_SIMPLE] * US
TREE_NVLINK_HOP_S = _TUNING.tree_nvlink[_SIMPLE] * US
TREE_NETWORK_HOP_S = _TUNING.tree_net[_SIMPLE] * US
RING_MULTINODE_FACTOR = RING_PLATEAU
TREE_BANDWIDTH_SHARE = TREE_BANDWIDTH
SEND_RECV_S = 20 * US

ADAM_BYTES_PER_PARAMETER = 28
"""Traffic of one fused Adam update: read gradient, master, two moments (fp32), write the last three: 7 × 4 B."""

GRADIENT_PASS_BYTES_PER_PARAMETER = 4
"""One read and one write of bf16 gradients (norm and scale) or of FP8 weights: 2 × 2 B."""

FP8_OVER_BF16 = 1.6


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
    collective_slowdown: float = COLLECTIVE_SLOWDOWN
    spread: float = 0.011
    overlap_is_fitted: bool = True
    generation: str = ""

    def kernel_slowdown(self, channels: int = NCCL_CHANNELS) -> float:
        """κ: a kernel beside a resident collective of `channels` channels takes 1 + κ times as long.

        In proportion to the SMs held: λ of a collective with fewer channels is as much smaller.
        """
        return kernel_slowdown(self.overlap_loss * channels / NCCL_CHANNELS, self.collective_slowdown)

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


MEGATRON_A100 = KernelCosts(0.80, 41.2, 43.1, 29.3, 7.0e-6, 1.07e-3, 0.117e-3)
"""Megatron without flash attention. Fitted together, each source with equal weight, on vTrain's 2-GPU runs without a
pipeline (92 rows) and on Korthikanti's 22B and 175B (4 rows); nothing else of either source was used."""

FLASH_H100 = KernelCosts(0.74, 0.0, 43.1, 29.3, 7.0e-6, 1.07e-3, 0.117e-3, sequence_parallel=True)
"""The same stack on H100 with flash attention and sequence parallelism: no constant fitted. gemm_share is A100's times
the ratio of the shares that the largest kernels reach, (794.5/989) / (271.2/312)."""


_GEMM_SHARE = {"ampere": MEGATRON_A100.gemm_share, "hopper": FLASH_H100.gemm_share}


def costs_on(device: Device, *, flash: bool = True) -> KernelCosts:
    """Kernel costs of a usual stack on a device: with flash attention, or without as MEGATRON_A100 was.

    Another generation than Ampere takes Hopper's share of peak, the nearest measured one.
    """
    share = _GEMM_SHARE.get(device.generation, _GEMM_SHARE["hopper"])
    return replace(FLASH_H100 if flash else MEGATRON_A100, gemm_share=share)


_HBM_SHARE = 0.85
_CLUSTERS = {
    "h100": ("dgx_h100", "H100 SXM"),
    "h200": ("dgx_h200", "H200 SXM"),
    "b200": ("dgx_b200", "B200 SXM"),
    "a100": ("dgx_a100", "A100 SXM 80GB"),
    "a100-40": ("dgx_a100", "A100 SXM 40GB"),
    "v100": ("dgx_v100", "V100 SXM2"),
}


def device(name: str) -> Device:
    """A device in its usual node by short name; its rates are the catalog's. Raises UsageError with the known names."""
    if name not in _CLUSTERS:
        raise UsageError(f"no device {name!r} among the described ones; known: {', '.join(_CLUSTERS)}")
    cluster, kind = _CLUSTERS[name]
    return device_of(replace(Cluster.load(cluster), device=load_device(kind)), name)


def device_of(cluster: Cluster, name: str = "") -> Device:
    """The device of a cluster with its share of NVLink and network; raises UsageError for a cluster without GPUs."""
    found = cluster.device
    if cluster.backend != "nccl":
        raise UsageError(f"cluster {cluster.name}: described jobs run on GPUs with NCCL, not on {cluster.backend}")
    inner, outer = cluster.tiers[0], cluster.tiers[min(1, len(cluster.tiers) - 1)]
    return Device(
        name=name or found.name,
        bf16_flop_s=found.bf16_flops,
        fp8_flop_s=found.fp8_flops or found.bf16_flops,
        hbm_Bps=found.memory_Bps,
        hbm_bytes=found.memory_bytes,
        nvlink_Bps=inner.bandwidth_Bps,
        nic_Bps=outer.bandwidth_Bps / outer.oversubscription,
        overlap_loss=overlap_loss(found.generation),
        power_W=found.power_W or 0.0,
        gpus_per_node=cluster.node_size,
        sm_count=found.sms or 132,
        nvlink_share=inner.efficiency,
        nic_share=outer.efficiency,
        hbm_share=_HBM_SHARE,
        overlap_is_fitted=found.generation in OVERLAP_LOSS,
        generation=found.generation,
    )
