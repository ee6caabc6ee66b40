"""JSON answers as the commands write them, small and complete, and a hostile one."""

from __future__ import annotations

from typing import Any

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[2J\x00" + "k" * 10_000


def replay_answer(name: str = "gemm", ranks: int = 2) -> dict[str, Any]:
    part = {"compute_ns": 20, "exposed_comm_ns": 10, "overlapped_comm_ns": 5, "host_ns": 5, "idle_ns": 5, "wall_ns": 40}
    return {
        "schema": "scaletrace.replay/1",
        "scaletrace_version": "0.1.0",
        "input": f"runs/{name}",
        "steps": [{"step": 3, "measured_ns": 31_000_000, "replayed_ns": 31_100_000, "error": 0.0032}],
        "mean_abs_error": 0.0032,
        "quality": {"strict_error": 0.01, "contradicted": {"match": 2}},
        "breakdown": {str(rank): {**part, "exposed_comm_ns": 10 + rank % 7} for rank in range(ranks)},
        "collectives": [
            {
                "axis": name,
                "kind": "all_reduce",
                "group_size": 8,
                "bytes": size,
                "count": 10,
                "wait_ns": 1000,
                "transfer_ns": 10 * round(20_000 + size / 100),
                "busbw_Bps": size / (20e-6 + size / 100e9),
            }
            for size in (2**16, 2**20, 2**24, 2**28)
        ],
        "stragglers": [{"rank": 1, "caused_wait_ns": 52_000_000}, {"rank": 0, "caused_wait_ns": 0}],
        "critical_path": {
            "length_ns": 40,
            "share": {"compute": 0.75, "communication": 0.25, "host": 0.0},
            "segments": [
                {"rank": 1, "lane": "stream 7", "name": name, "kind": "compute", "start_ns": 0, "dur_ns": 30},
                {
                    "rank": 0,
                    "lane": "stream 20",
                    "name": "all_reduce",
                    "kind": "communication",
                    "start_ns": 30,
                    "dur_ns": 10,
                },
            ],
        },
        "health": {
            "repaired": {},
            "dropped": {"events without time": 4},
            "guessed": {},
            "notes": [f"rank 2 of {name}"],
        },
    }


def curve_answer(name: str = "fsdp") -> dict[str, Any]:
    def point(gpus: int, step_s: float, origin: str) -> dict[str, Any]:
        return {
            "gpus": gpus,
            "layout": {name: gpus, "tp": 1},
            "step_time_s": {"low": step_s * 0.9, "p50": step_s, "high": step_s * 1.2},
            "tokens_per_s_per_gpu": 1000 / step_s,
            "mfu": 0.4,
            "exposed_comm_fraction": 0.1,
            "exposed_by_axis": {name: 0.08, "tp": 0.02},
            "bubble_fraction": None,
            "straggler_fraction": 0.01,
            "memory_bytes": 2**35,
            "power_W_per_gpu": None,
            "dominant": "compute",
            "provenance": origin,
        }

    return {
        "schema": "scaletrace.extrapolate/1",
        "scaletrace_version": "0.1.0",
        "input": f"runs/{name}",
        "points": [point(8, 0.1, "measured"), point(64, 0.12, "interpolated"), point(512, 0.2, "extrapolated")],
        "knee_gpus": 64,
        "comm_dominates_gpus": 512,
        "best_layout_by_gpus": {"8": {name: 8}, "64": {name: 64}},
        "benchmark_next": [128],
        "health": {},
    }
