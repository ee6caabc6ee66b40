"""Turns the category names of every Kineto generation into the few classes that analysis tells apart."""

from __future__ import annotations

KERNEL_CATS = ("kernel", "Kernel")
COPY_CATS = ("gpu_memcpy", "Memcpy")
SET_CATS = ("gpu_memset", "Memset")
DEVICE_CATS = (*KERNEL_CATS, *COPY_CATS, *SET_CATS, "mtia_ccp_events")
"""Work on a device. "gpu_user_annotation" only repeats it, and sync rows are waits."""

RUNTIME_CATS = (
    "cuda_runtime",
    "cuda_driver",
    "Runtime",
    "mtia_runtime",
    "glow_runtime",
    "xpu_runtime",
    "xpu_driver",
    "privateuse1_runtime",
    "privateuse1_driver",
)
"""Host calls that a correlation id may lead to."""

OP_CATS = ("cpu_op", "Operator", "hpu_op")
ANNOTATION_CATS = ("user_annotation",)
PYTHON_CATS = ("python_function",)
HOST_CATS = (*OP_CATS, *ANNOTATION_CATS, *PYTHON_CATS, *RUNTIME_CATS)
"""Spans on a host thread, which nest."""

SYNC_CATS = ("cuda_sync", "xpu_sync")
STREAM_SYNC_TID = 1_000_000
"""Since 2026 "Stream Sync" rows stand on tid = stream + this (pytorch/kineto#1356)."""

KNOWN_CATS = frozenset(
    {
        "",
        *DEVICE_CATS,
        *HOST_CATS,
        *SYNC_CATS,
        "gpu_user_annotation",
        "external_correlation",
        "cpu_instant_event",
        "overhead",
        "mtia_insight",
        "cuda_event",
        "mtia_counters",
        "cuda_profiler_range",
        "collective_comm",
        "xpu_scope_profiler",
        "hardware_counters",
        "Trace",
        "fwdbwd",
        "ac2g",
        "async",
        "async_gpu",
        "async_cpu_to_gpu",
        "critical_path",
    }
)
