"""The curve as a whole: identity, growth, knee, what to measure next, on drafts and on the shipped captures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import UsageError
from scaletrace.extrapolate.base import Base, prepare
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.columns import BOTH, INNER, NONE, OUTER
from scaletrace.extrapolate.curve import ScalingCurve, extrapolate
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.point import Options, evaluate, spread_of, stretch
from scaletrace.extrapolate.steps import shares, step_times_ns
from scaletrace.extrapolate.stragglers import Noise
from scaletrace.parse.build import Built, Quality, build
from scaletrace.parse.graph import Graph, GraphCollective, GraphGroup, Measured, NodeKind
from scaletrace.parse.health import Health
from scaletrace.parse.job import Collectives, Job
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay

H100 = Cluster.load("dgx_h100")
QUIET = Noise(0.0, 0.0)


def _built(graph: Graph, ranks: int) -> Built:
    no = np.zeros(0, np.int64)
    small, flags = no.astype(np.int32), no.astype(np.bool_)
    table = Collectives(no, small, small, small, no.astype(np.uint8), small, no, no, no, no, no, no, no, flags)
    timeline = replay(graph)
    measured = Measured(timeline.start_ns, timeline.end_ns, np.ones(len(graph), np.bool_))
    return Built(
        graph, measured, Quality(1, 1, {}, timeline.makespan_ns, {}, {}), Job((), ranks, (), table, {}, Health())
    )


def _fsdp(ranks: int = 8, layers: int = 6, compute_ns: int = 2_000_000, size: int = 64 << 20, steps: int = 3) -> Built:
    """Each layer: a gather prefetched beside the last layer's compute, then its own compute of that rank."""
    draft = Draft(groups=[GraphGroup("fsdp", ranks, 1)])
    computed: list[int | None] = [None] * ranks
    gathered: list[list[int]] = [[] for _ in range(ranks)]
    for _ in range(steps * layers):
        nodes = draft.collective("all_gather", 0, 0, [(r, gathered[r][-1:]) for r in range(ranks)], 300_000)
        draft.collectives[-1] = GraphCollective("all_gather", 0, size // ranks, size)
        for rank, node in enumerate(nodes):
            gathered[rank].append(node)
            before = [node] + ([computed[rank] or 0] if computed[rank] is not None else [])
            computed[rank] = draft.node(
                NodeKind.KERNEL, compute_ns, rank=rank, after=before, lane="stream 7", name="gemm"
            )
    graph = draft.graph()
    graph.step[:] = np.arange(len(graph)) * steps // len(graph)
    return _built(graph, ranks)


@pytest.fixture(scope="module")
def gathers() -> Base:
    """A base whose noise is off, so that only costs move it."""
    return prepare(_fsdp(), H100, noise=QUIET)


def test_the_measured_size_is_replayed_bit_for_bit(gathers: Base) -> None:
    """The identity rewrite gives the timeline of the plain replay, and no band from models."""
    _, done = stretch(gathers, 8, Options())
    plain = replay(_fsdp().graph)

    assert np.array_equal(plain.start_ns, done.timeline.start_ns)
    assert np.array_equal(plain.end_ns, done.timeline.end_ns)
    assert 0.0 == evaluate(gathers, 8, Options()).comm_error_s


def test_the_shipped_captures_replay_bit_for_bit_at_their_size(samples: Path) -> None:
    """Real gloo jobs too: nothing is rescaled, shared or serialised where nothing changes."""
    for name in ("ddp_w4", "fsdp2_w4"):
        built = build(load(samples / name))
        _, done = stretch(prepare(built), 4, Options())

        assert np.array_equal(replay(built.graph).end_ns, done.timeline.end_ns)


def test_steps_never_get_faster_with_ranks(gathers: Base) -> None:
    """Weak scaling on a fixed topology: the step time never falls, from 8 to 100,000 ranks."""
    sizes = [8, 16, 24, 64, 256, 512, 1024, 4096, 32768, 100_000]
    times = [evaluate(gathers, size, Options()).p50_s for size in sizes]

    assert times == sorted(times) and times[-1] > 5 * times[0]


@settings(max_examples=20, deadline=None)
@given(compute_us=st.integers(50, 5000), mib=st.integers(1, 512), first=st.integers(1, 64), more=st.integers(1, 64))
def test_steps_grow_with_ranks_for_any_balance(compute_us: int, mib: int, first: int, more: int) -> None:
    """Monotone whatever the balance of compute and communication."""
    base = prepare(
        _fsdp(layers=3, compute_ns=1000 * compute_us, size=mib << 20, steps=2), H100, noise=Noise(0.01, 0.01)
    )
    small, large = 8 * first, 8 * (first + more)

    assert evaluate(base, small, Options()).p50_s <= evaluate(base, large, Options()).p50_s * (1 + 1e-9)


def test_more_overlap_costs_compute(gathers: Base) -> None:
    """Gathers that grow beside compute slow it: the step is longer than with ideal overlap, and more so with a larger κ."""
    steps = []
    for kappa in (0.0, 0.3, 0.6):
        base = prepare(_fsdp(), H100, noise=QUIET, slowdown=kappa)
        point = evaluate(base, 256, Options())
        steps.append(point.p50_s)
        assert point.ideal_overlap_s <= point.p50_s + 1e-12

    assert steps[0] < steps[1] < steps[2]


def test_strong_scaling_shrinks_compute_but_not_communication(gathers: Base) -> None:
    """Twice the ranks on the same batch: compute halves above a launch's worth, the gathers stay."""
    strong_base = prepare(_fsdp(), H100, noise=QUIET, strong=True)
    weak = stretch(gathers, 16, Options())[1]
    strong = stretch(strong_base, 16, Options(weak=False))[1]
    kernels = weak.graph.kind == NodeKind.KERNEL
    transfers = weak.graph.kind == NodeKind.TRANSFER

    assert 1_001_000 == int(np.median(strong.ideal.end_ns[kernels] - strong.ideal.start_ns[kernels]))
    assert np.array_equal(
        (weak.ideal.end_ns - weak.ideal.start_ns)[transfers], (strong.ideal.end_ns - strong.ideal.start_ns)[transfers]
    )


def test_samples_that_no_shape_tells_can_be_given() -> None:
    """A job without shapes whose user says mbs=8: what was measured is meant, so nothing changes at its size, and 64
    samples go over 64 ranks but not over 128."""
    built = _fsdp()
    plain = prepare(built, H100, noise=QUIET)
    said = prepare(built, H100, noise=QUIET, asked=Layout.parse("mbs=8,fsdp=8"), strong=True)

    assert said.batch is not None and ("samples", 8) == (said.batch.unit, said.batch.samples)
    assert plain.step_s == said.step_s
    assert 1 == said.batch.share(64, 64).samples
    with pytest.raises(UsageError, match="64 samples"):
        said.batch.share(128, 128)


def test_a_base_for_weak_scaling_does_not_pretend_to_be_strong(gathers: Base) -> None:
    """What a batch holds was not found out, so the size is refused."""
    with pytest.raises(UsageError, match="strong=True"):
        stretch(gathers, 16, Options(weak=False))


def test_a_described_straggler_population_costs_a_known_share() -> None:
    """Blocking gathers and 5 % noise at 512 ranks lose what the ensemble says, on top of what 8 ranks showed."""
    quiet, noisy = (
        evaluate(prepare(_fsdp(), H100, noise=noise, slowdown=0.0), 512, Options())
        for noise in (QUIET, Noise(0.05, 0.0))
    )

    assert 0.0 == quiet.straggler_fraction
    assert 0.0 < noisy.straggler_fraction < 0.15
    assert noisy.p50_s == pytest.approx(quiet.p50_s / (1 - noisy.straggler_fraction), rel=1e-6)


def test_groups_of_neighbours_wait_for_each_other_only() -> None:
    """TP of 8 inside 512 ranks is the inner axis, its DP groups cross it, a world-wide norm reaches everyone."""
    groups = [GraphGroup("tp", 8, 1), GraphGroup("dp", 64, 8), GraphGroup("world", 512, 1), GraphGroup("fsdp", 1, 0)]
    draft = Draft(groups=groups)
    for group in range(4):
        draft.collective("all_reduce", group, 8, [(0, [])])
    draft.collective("send", 1, 8, [(0, [])])
    population, reach = spread_of(draft.graph(), 512, 1)

    assert (64, 8) == (population.outer, population.inner)
    assert [INNER, OUTER, BOTH, NONE, NONE] == reach.tolist()


def test_compute_and_exposed_communication_are_shares_of_the_step(gathers: Base) -> None:
    """Shares and the rest add up to one, by axis too where there is one axis."""
    _, done = stretch(gathers, 1024, Options())
    part = shares(done.graph, done.timeline.start_ns, done.timeline.end_ns)

    assert 1.0 == pytest.approx(part.compute + part.exposed + part.rest)
    assert part.exposed == pytest.approx(part.by_axis["fsdp"])


def test_step_times_run_from_end_to_end() -> None:
    """Three steps give two intervals between their ends."""
    built = _fsdp(steps=3)
    timeline = replay(built.graph)

    assert 2 == len(step_times_ns(built.graph, timeline.start_ns, timeline.end_ns))


def test_where_the_curve_bends_does_not_depend_on_the_sizes_asked() -> None:
    """Knee and dominance are looked for on the same grid, whatever few sizes are shown."""
    built = _fsdp()
    curves = [extrapolate(built, cluster=H100, sizes=sizes, noise=QUIET) for sizes in ([8], [16, 100], [8, 512, 4096])]

    assert 1 == len({(curve.knee, curve.dominance, curve.evaluated_to) for curve in curves})
    assert curves[0].knee.gpus is not None and curves[0].dominance.gpus is not None
    assert [[8], [16, 100], [8, 512, 4096]] == [[point.gpus for point in curve.points] for curve in curves]


def test_bends_lie_in_their_ranges() -> None:
    """The knee is the upper end of a doubling of the grid; both sizes of the range enclose where communication dominates."""
    parts = extrapolate(_fsdp(), cluster=H100, sizes=[8], noise=QUIET).to_json_parts()
    low, high = parts["knee_range_gpus"]

    assert (high, 131_072) == (parts["knee_gpus"], parts["evaluated_to_gpus"]) and high in (low, 2 * low)
    low, high = parts["comm_dominates_range_gpus"]
    assert low <= parts["comm_dominates_gpus"] <= high


def test_communication_dominates_no_later_where_its_overlap_is_dearer() -> None:
    """What kernels lose beside collectives is a cost of communication: more of it never moves the size up."""
    found = [
        extrapolate(_fsdp(), cluster=H100, sizes=[8], noise=QUIET, overlap_slowdown=kappa).dominance.gpus or 1 << 30
        for kappa in (0.0, 0.5, 2.0)
    ]

    assert sorted(found, reverse=True) == found and found[0] > found[-1]


def test_every_answer_of_the_interface_is_there(samples: Path) -> None:
    """JSON parts as documented, a frame with a row a point, and a timeline for any size."""
    curve: ScalingCurve = extrapolate(load(samples / "ddp_w4"), sizes=[8, 64], cluster=Cluster.load("gloo_10g"))
    parts = curve.to_json_parts()

    wanted = {"points", "knee_gpus", "comm_dominates_gpus", "best_layout_by_gpus", "benchmark_next"}
    assert wanted <= set(parts)
    documented = {
        "gpus", "layout", "step_time_s", "tokens_per_s_per_gpu", "mfu", "exposed_comm_fraction", "exposed_by_axis",
        "bubble_fraction", "straggler_fraction", "memory_bytes", "power_W_per_gpu", "dominant", "provenance",
    }  # fmt: skip
    assert documented <= set(parts["points"][0])
    band = parts["points"][1]["step_time_s"]
    assert 0 < band["low"] < band["p50"] < band["high"]
    assert [8, 64] == curve.to_frame().gpus.tolist()
    assert curve.timeline(64).makespan_ns > 0


def test_every_null_has_its_reason(samples: Path) -> None:
    """A CPU job without tokens, price or a known power: each number that is missing says why, no other does."""
    for curve in (extrapolate(load(samples / "ddp_w4"), sizes=[8]), extrapolate(_fsdp(), cluster=H100, sizes=[16])):
        point = curve.points[0].to_json()
        missing = {name for name, value in point.items() if value is None}

        assert missing and missing == set(point["unknown"]) - {"step_time_band"}
        assert all(point["unknown"].values())


def test_evidence_from_elsewhere_narrows_the_band() -> None:
    """Transfers measured over 64 ranks turn a prior into an extrapolation, with a smaller error at 512."""
    from scaletrace.extrapolate.calibrate import Evidence
    from scaletrace.extrapolate.costs import collective_seconds

    seen = [
        Evidence("all_gather", size, 64, collective_seconds("all_gather", size, 64, H100).seconds)
        for size in (1 << 20, 1 << 24, 1 << 26, 1 << 28)
    ]
    before, after = (
        extrapolate(_fsdp(), cluster=H100, sizes=[512], evidence=found, noise=QUIET).points[0] for found in ([], seen)
    )

    assert ("prior", "extrapolated") == (before.provenance["communication"], after.provenance["communication"])
    assert after.comm_error_s < before.comm_error_s


def test_sizes_that_do_not_fit_are_refused(gathers: Base) -> None:
    """No size, none below one, and none that the other axes don't divide."""
    with pytest.raises(UsageError, match="sizes"):
        extrapolate(_fsdp(), sizes=[])
    with pytest.raises(UsageError, match="multiple of 8"):
        stretch(replace(gathers, layout=Layout(dp=2, fsdp=8)), 12, Options())


def test_eight_h100_are_stretched_with_honest_origins(shared_data: Path) -> None:
    """A public job of one node: beyond it communication is the prior's, compute measured, overlap mostly; steps grow."""
    curve = extrapolate(load(shared_data / "traces" / "nanogpt8_h100"), sizes=[8, 16, 128, 1024])
    first, *rest = curve.points
    times = [point.p50_s for point in curve.points]

    assert ("dgx_h100", Layout(fsdp=8)) == (curve.base.cluster.name, first.layout)
    assert "measured" == first.provenance["communication"] and first.low_s < first.p50_s < first.high_s
    assert {("prior", "measured", "mixed (16 kernels)", "prior")} == {
        (p.provenance["communication"], p.provenance["compute"], p.provenance["overlap"], p.provenance["stragglers"])
        for p in rest
    }
    assert times == sorted(times)
    assert 0.1 < (first.mfu or 0.0) < 0.6
    widths = [(point.high_s - point.low_s) / point.p50_s for point in curve.points]
    assert widths[0] < widths[-1]
    assert curve.health.guessed and any("guess" in note for note in curve.health.notes)
    assert ("host", True) == (first.parts.dominant, first.parts.compute > first.parts.host)
    assert any("The host sets the pace at 8" in note and "at 8 89.5%" in note for note in curve.health.notes)


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [("ddp_w4", "fsdp=4", "no sharded parameters"), ("fsdp2_w4", "dp=64", "sharded parameters; say over how many")],
)
def test_sharding_is_not_invented(samples: Path, name: str, layout: str, message: str) -> None:
    """DDP doesn't become FSDP by asking, nor the other way round."""
    with pytest.raises(UsageError, match=message):
        extrapolate(load(samples / name), sizes=[64], layout=Layout.parse(layout))


def test_other_micro_batches_are_made_before_stretching(samples: Path) -> None:
    """Twice the samples: compute is extrapolated by its shapes, with a wider band, and takes longer."""
    built = build(load(samples / "fsdp2_w4"))
    measured = extrapolate(built, sizes=[8]).points[0]
    doubled = extrapolate(built, sizes=[8], layout=Layout.parse("fsdp=8,mbs=8")).points[0]

    assert ("measured", "extrapolated") == (measured.provenance["compute"], doubled.provenance["compute"])
    assert measured.p50_s < doubled.p50_s


def test_free_overlap_never_costs_more_than_the_step(shared_data: Path) -> None:
    """A step that is lifted to that of fewer ranks takes the one with free overlap along, so no band grows from that."""
    job = load(shared_data / "gloo" / "tp_w1")
    point = extrapolate(job, sizes=[16], layout=Layout(zero=1)).points[0]
    fewer = extrapolate(load(shared_data / "traces" / "nanogpt8_h100"), sizes=[2]).points[0]

    assert point.p50_s == pytest.approx(point.ideal_overlap_s, rel=1e-2)
    assert fewer.ideal_overlap_s <= fewer.p50_s


def test_what_a_lone_rank_sends_to_itself_is_no_data_axis(shared_data: Path) -> None:
    """DDP over one rank reduces and waits for nothing: where more ranks would wait was not seen, so no band is drawn."""
    alone = Cluster.load("gloo_10g")
    one, two = (
        extrapolate(load(shared_data / "gloo" / name), cluster=alone, sizes=[64]).points[0]
        for name in ("ddp_w1", "ddp_w2")
    )

    assert "no collective of a data axis" in one.unknown["step_time_band"]
    assert "step_time_band" not in two.unknown


def test_utilisation_counts_the_layers_asked_for(shared_data: Path) -> None:
    """Though the family of the model is not known, FLOP of eight layers are four times those of the two whose products
    were recorded, and those of the head stay."""
    job = load(shared_data / "gloo" / "tp_w1")
    of_layers, of_head = 3_145_728.0, 229_376.0

    assert of_layers + of_head == prepare(job).flop_per_step
    assert 4 * of_layers + of_head == prepare(job, asked=Layout(layers=8)).flop_per_step
