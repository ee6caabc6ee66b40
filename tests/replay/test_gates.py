"""The gates on public jobs with all their ranks: what identity replay alone can't show.

Errors are of steps between the ends of the device work they launched (of the whole window where there are no steps).
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from scaletrace.parse.build import Built, build
from scaletrace.parse.graph import EdgeKind, Graph
from scaletrace.parse.load import load
from scaletrace.replay.accuracy import across_steps, mean_error, step_errors, without_stalls
from scaletrace.replay.engine import replay
from scaletrace.replay.stragglers import stragglers
from scaletrace.replay.whatif import whatif

TORCHREC = "torchrec4_v100-sst_long_a2a_optimizer_"
SMALL = ("dlrm8_v100/kineto", "torchrec2_v100", f"{TORCHREC}5-run1", f"{TORCHREC}5_qcomm-run1", f"{TORCHREC}2-run1")
LARGE = ("nanogpt8_h100", "lightllm8_h200-logs-run1", "lightllm8_h200-logs_decode_overlap-run1")
JOBS = [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]
GLOO = ("ddp_w2", "ddp_w4", "ddp_w8", "fsdp2_w2", "fsdp2_w4", "hsdp_w4", "tp_w2", "tp_w4", "tp_dp_w4")
GLOO_ALL = (*GLOO, "pp_1f1b_w2", "pp_1f1b_w4", "pp_gpipe_w2", "ddp_straggler_w2", "ddp_straggler_w4")


@cache
def _build(path: Path) -> Built:
    return build(load(path))


def _job(shared_data: Path, name: str) -> Built:
    return _build(shared_data / "traces" / name)


def _strict(built: Built) -> list[float]:
    graph = built.graph
    return [e.error for e in step_errors(graph, built.measured, replay(graph, without_stalls(graph)))]


@pytest.mark.parametrize("name", JOBS)
def test_strict_identity(shared_data: Path, name: str) -> None:
    """With constants for every lag and no stalls each step is within 1 %."""
    assert max(abs(e) for e in _strict(_job(shared_data, name))) <= 0.01


@pytest.mark.parametrize("name", JOBS)
def test_little_is_unexplained(shared_data: Path, name: str) -> None:
    """Stall at most 1 % of the window on the worst rank, 95 % of starts within 20 us, contradictions at most 1 % a source."""
    quality = _job(shared_data, name).quality

    assert quality.worst_stall_fraction <= 0.01
    assert quality.explained_starts >= 0.95
    assert {} == {s: n for s, n in quality.contradicted.items() if n > 0.01 * quality.offered[s]}


def test_time_sliced_device_is_recognised(shared_data: Path) -> None:
    """Rank 0 of megatron_tp2_v100 shares its device: named, labelled, and its strict error is no surprise."""
    built = _build(shared_data / "traces" / "megatron_tp2_v100")

    assert (0,) == built.quality.time_sliced_ranks
    assert "stall: time-sliced device" in built.graph.names
    assert any("another process" in note for note in built.health.notes)


@pytest.mark.parametrize(
    "name", ["torchrec2_v100", f"{TORCHREC}5-run1", f"{TORCHREC}5_qcomm-run1", f"{TORCHREC}2-run1"]
)
def test_steps_are_predicted_from_the_others(shared_data: Path, name: str) -> None:
    """Within 3 % in the mean and better than the mean of the other steps; with own host times within 3 % everywhere."""
    built = _job(shared_data, name)
    found = across_steps(built.graph, built.measured)
    error, naive = (float(np.mean([abs(getattr(a, key)) for a in found])) for key in ("error", "naive_error"))

    assert error <= 0.03
    assert error < naive
    assert max(abs(a.device_only_error) for a in found) <= 0.03


@pytest.mark.slow
def test_host_bound_steps_vary_with_their_host(shared_data: Path) -> None:
    """nanogpt8's steps are as long as the slowest host thread: within the host's own variation, exact with own host times.

    The mean error is smaller than that of the mean of the other steps.
    """
    built = _job(shared_data, "nanogpt8_h100")
    found = across_steps(built.graph, built.measured)
    error, naive = (float(np.mean([abs(getattr(a, key)) for a in found])) for key in ("error", "naive_error"))

    assert error < naive
    assert max(abs(a.error) for a in found) <= max(a.host_variation for a in found)
    assert max(abs(a.device_only_error) for a in found) <= 0.03


@pytest.mark.parametrize("name", ["dlrm8_v100/kineto", f"{TORCHREC}5-run1"])
def test_no_measured_start_reaches_the_engine(shared_data: Path, name: str) -> None:
    """With the graph frozen, random offsets on all measured starts change no bit of the replay."""
    built = _job(shared_data, name)
    noise = np.random.default_rng(7).integers(-(10**9), 10**9, len(built.graph))
    moved = dataclasses.replace(
        built, measured=dataclasses.replace(built.measured, start_ns=built.measured.start_ns + noise)
    )

    assert replay(built.graph).start_ns.tobytes() == replay(moved.graph).start_ns.tobytes()
    assert not any("start" in name and name != "start_ns" for name in Graph.__slots__)


CLASSES = [
    (EdgeKind.RENDEZVOUS, "comm=3"),
    (EdgeKind.EVENT_WAIT, "comm=3"),
    (EdgeKind.HOST_SYNC, "comm=3"),
    (EdgeKind.OCCUPANCY, "compute=2"),
    (EdgeKind.LAUNCH, "host=0.25"),
    (EdgeKind.STREAM, "compute=2"),
    (EdgeKind.PROGRAM, "host=0.25"),
    (EdgeKind.HAND_OVER, "host=0.25"),
]


@pytest.mark.parametrize(("kind", "rule"), CLASSES)
def test_each_edge_class_earns_its_place(shared_data: Path, kind: EdgeKind, rule: str) -> None:
    """The answer to a what-if changes when the class is dropped."""
    graph = _job(shared_data, f"{TORCHREC}5-run1").graph
    full, without = (whatif(g, [rule], arbitrate=False).after.makespan_ns for g in (graph, graph.without(kinds=[kind])))

    assert without < full


def test_gloo_with_constants(shared_data: Path) -> None:
    """One constant for release and one for issue: the median error of all steps of all jobs is within 5 %."""
    errors = [abs(e) for name in GLOO_ALL for e in _strict(_build(shared_data / "gloo" / name))]

    assert float(np.median(errors)) <= 0.05


@pytest.mark.parametrize("name", GLOO)
def test_gloo_identity(shared_data: Path, name: str) -> None:
    """With stalls and early releases the measured times come back."""
    built = _build(shared_data / "gloo" / name)

    assert mean_error(step_errors(built.graph, built.measured, replay(built.graph))) <= 0.001


@pytest.mark.parametrize(
    ("name", "late", "clean"), [("ddp_straggler_w2", 1, "ddp_w2"), ("ddp_straggler_w4", 3, "ddp_w4")]
)
def test_straggler_counterfactual(shared_data: Path, name: str, late: int, clean: str) -> None:
    """The delayed rank is named first, and without its delay the step is shorter by tens of ms, towards the clean run."""
    built = _build(shared_data / "gloo" / name)
    timeline = replay(built.graph)
    first = stragglers(timeline)[0]

    assert late == first.rank
    assert 20_000_000 <= first.shorter_by_ns <= 60_000_000
    assert timeline.makespan_ns > replay(_build(shared_data / "gloo" / clean).graph).makespan_ns or clean == "ddp_w2"


def test_injected_delay_can_be_taken_away(shared_data: Path) -> None:
    """Removing the 50 ms sleep of ddp_straggler_w2 by rule shortens the step by most of it."""
    graph = _build(shared_data / "gloo" / "ddp_straggler_w2").graph

    assert -60_000_000 <= whatif(graph, ["rank1.delay=none"]).change_ns <= -40_000_000


def test_quantised_communication_has_the_predicted_direction(shared_data: Path) -> None:
    """Less bytes: scaling the transfers of the plain job as the quantised one's shortens it, as the measured pair says."""
    plain, quantised = (_job(shared_data, f"{TORCHREC}{v}-run1") for v in ("5", "5_qcomm"))
    predicted = whatif(plain.graph, ["bandwidth=2x"]).change_ns
    measured = quantised.quality.window_ns - plain.quality.window_ns

    assert predicted < 0
    assert measured < 0


@pytest.mark.slow
def test_overlap_has_the_predicted_direction(shared_data: Path) -> None:
    """Two real pairs, decode overlap off and on, and communication in hooks: ideal overlap bounds the gain, and gains."""
    off, on = (_job(shared_data, f"lightllm8_h200-logs{v}-run1") for v in ("", "_decode_overlap"))
    ab = shared_data / "traces" / "nanogpt_ab_v1"
    current, hook = (
        _build(ab / f"alt1__modded-nanogpt-{v}-gpu-rank-00-chrome-trace.json.gz") for v in ("current", "hook")
    )

    for before, after in ((off, on), (current, hook)):
        measured = replay(after.graph).makespan_ns - replay(before.graph).makespan_ns
        assert whatif(before.graph, ["overlap=ideal"]).change_ns <= measured < 0
