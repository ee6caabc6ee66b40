"""Turns keys of JSON answers and their values into the words and units that a reader of the page sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scaletrace.view import units
from scaletrace.view.report.read import num

_NAMES = {
    "a_ns": "first run",
    "b_ns": "second run",
    "delta_ns": "change",
    "a_step_ns": "step of the first run",
    "b_step_ns": "step of the second run",
    "a_window_ns": "window of the first run, a step",
    "b_window_ns": "window of the second run, a step",
    "window_delta_ns": "change of the window, a step",
    "common": "operations that both runs have",
    "axis_certainty": "certainty of the axes",
    "bytes": "size",
    "benchmark_next": "sizes worth measuring next",
    "benchmark_next_narrows": "their measurement narrows the error by",
    "busbw_Bps": "bus bandwidth",
    "candidates": "layouts within the limits",
    "caused_wait_ns": "others waited, summed over them",
    "cause": "verdict",
    "comm_dominates_gpus": "communication dominates from (GPUs)",
    "comm_dominates_range_gpus": "communication comes to dominate between (GPUs)",
    "compute_is_of": "compute times are of",
    "confidence": "certainty",
    "data_axis_seen": "gradients are seen to be reduced",
    "discarded": "left out",
    "dur_ns": "takes",
    "each_shorter_ns": "gain a step at its peers' pace",
    "each_waited_ns": "the others wait, a step",
    "ends_last": "ends the window",
    "estimate_error": "replay over estimate",
    "evaluated": "layouts costed",
    "evaluated_to_gpus": "looked for up to (GPUs)",
    "global_batch": "global batch",
    "go_on": "go on with",
    "hidden_ns": "hidden behind compute",
    "is_bound": "is the most that it can bring",
    "is_layer": "is a layer",
    "knee_gpus": "knee (GPUs)",
    "knee_range_gpus": "knee lies between (GPUs)",
    "knee_share": "share of doubled throughput that ends at the knee",
    "late_rank_counts": "last by rank (collectives)",
    "linear_until_flop": "linear until (FLOP)",
    "mean_abs_error": "mean error of replayed steps",
    "memory_bytes": "memory a GPU",
    "memory_limit_bytes": "memory limit a GPU",
    "model_unknown": "no shape tells",
    "offset_ns": "clock's offset",
    "low_ns": "lowest",
    "high_ns": "highest",
    "drift_ppm": "drift (ppm)",
    "overlap_slowdown": "what overlap costs",
    "power_W_per_gpu": "power a GPU (W)",
    "rung": "matched by",
    "shorter_by_ns": "gain at its peers' pace",
    "tail": "shape of delays",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "start_ns": "starts at",
    "uneven_pp": "pipeline degrees left out (layers don't divide)",
    "unmatched_members": "members without a match",
    "waited_ns": "waits itself",
    "wall_flop": "wall (FLOP)",
    "what_if": "what if",
    "noise.residual_cv": "scatter from step to step",
    "noise.static_cv": "spread between nodes",
    "overlap_slowdown.waiting": "kernels beside a collective that waits: slower by",
    "overlap_slowdown.moving": "beside one that moves bytes: slower by",
    "overlap_slowdown.transfers": "transfers beside kernels: slower by",
    "overlap_slowdown.evidence": "measured share of that",
    "estimate_error.low": "from",
    "estimate_error.high": "to",
    "estimate_error.confirmed": "layouts replayed",
    "memory.bytes": "needs",
    "whatif.before_ns": "window before",
    "whatif.after_ns": "window after",
    "whatif.change_ns": "change of the window",
    "measured.error": "error of the replay",
    "measured.replayed_step_time_s": "replayed step",
}
"""Words for keys whose own words say too little; "group.key" inside a group of values."""
_WORDS = {
    "gpus": "GPUs",
    "gpu": "GPU",
    "mfu": "MFU",
    "comm": "communication",
    "flop": "FLOP",
    "pp": "pipeline",
    "s/gpu": "s/GPU",
}
_UNITS: tuple[tuple[str, Callable[[float | None], str]], ...] = (
    ("_ns", units.duration),
    ("_s", units.seconds),
    ("bytes", units.size),
    ("_Bps", units.rate),
    ("flop", lambda v: units.MISSING if v is None else f"{v:.3g}"),
)
_SHARES = (
    "_fraction",
    "_share",
    "share",
    "error",
    "mfu",
    "MFU",
    "certainty",
    "confidence",
    "_cv",
    "utilization",
    "common",
)
_SHARES_OF = ("benchmark_next_narrows", "overlap_slowdown")
"""Groups all of whose numbers are shares."""
_UNIT_ENDS = ("_ns", "_s", "_bytes", "_Bps", "_fraction")


def named(key: str, group: str = "") -> str:
    """What a reader calls a key: `exposed_comm_ns` → "exposed communication"; the unit stands beside the number."""
    known = _NAMES.get(f"{group}.{key}") or _NAMES.get(key)
    if known is not None:
        return known
    plain = units.clean(key, 60).replace(" ", "_")
    for end in _UNIT_ENDS:
        plain = plain.removesuffix(end)
    return " ".join(_WORDS.get(word, word) for word in plain.split("_"))


def shown_value(key: str, value: Any, group: str = "") -> str:
    """A value in three digits with the unit that its key, or the group that it is in, has at its end."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    number = num(value)
    if number is None or isinstance(value, str):
        return units.MISSING if value is None else units.clean(value, 400)
    if group == "estimate_error":
        return f"{number:.3g}"
    if group in _SHARES_OF:
        return units.percent(number)
    name = key.replace(" ", "_")
    show = _unit(name) or ("_" not in name and _unit(group)) or units.number
    return show(number)


def _unit(key: str) -> Callable[[float | None], str] | None:
    """How a number is shown whose key ends like this; None where its end says no unit."""
    found = next((show for end, show in _UNITS if key.endswith(end)), None)
    return found or (units.percent if key.endswith(_SHARES) else None)
