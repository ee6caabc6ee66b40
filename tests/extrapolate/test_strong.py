"""Strong scaling: micro batches go first, then their samples; kernels follow their shapes and keep their floors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.base import prepare
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.curve import _to_linear, extrapolate
from scaletrace.extrapolate.kernels import GPU_FLOOR_S
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.point import Options, evaluate
from scaletrace.extrapolate.rewrite.batch import repeat_micro_batches, resize_micro_batch
from scaletrace.extrapolate.rewrite.state import State
from scaletrace.extrapolate.strong import Batch, Share, agreed, batch_of, retiming_of, told_by_time, with_activations
from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphGroup, NodeKind
from scaletrace.parse.load import load

Stateful = Callable[..., State]


def _never(state: State) -> Any:
    raise AssertionError(state)


def _batch(state: State, samples: int, micro_batches: int, ranks: int, unit: str = "samples") -> Batch:
    layout = Layout(dp=ranks, mbs=samples, microbatches=micro_batches, seq=2048)
    return Batch(replace(state, layout=layout), samples, unit, _never)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (4, Share(4, 8, 1.0)),
        (8, Share(2, 8, 1.0)),
        (16, Share(1, 8, 1.0)),
        (32, Share(1, 4, 0.5)),
        (128, Share(1, 1, 0.125)),
        (2, Share(8, 8, 1.0)),
    ],
)
def test_micro_batches_go_first_then_samples(stateful: Stateful, ranks: int, expected: Share) -> None:
    """Four ranks of 4 × 8 samples: 16 ranks do one micro batch of 8 each, 128 one of a single sample, 2 twice as many."""
    assert expected == _batch(stateful(2, 1), 8, 4, 4).share(ranks, ranks)


@pytest.mark.parametrize(
    ("samples", "micro_batches", "ranks", "expected"),
    [
        (8, 6, 8, Share(3, 8, 1.0)),
        (6, 3, 8, Share(3, 3, 0.5)),
        (4, 3, 12, Share(1, 4, 1.0)),
        (6, 1, 12, Share(1, 2, 1 / 3)),
    ],
)
def test_what_does_not_divide_into_micro_batches_divides_into_samples(
    stateful: Stateful, samples: int, micro_batches: int, ranks: int, expected: Share
) -> None:
    """9 samples of a rank become 3 × 3, since two micro batches of 4.5 can't be."""
    assert expected == _batch(stateful(2, 1), samples, micro_batches, 4).share(ranks, ranks)


@pytest.mark.parametrize("ranks", [24, 256])
def test_a_batch_that_does_not_divide_is_refused(stateful: Stateful, ranks: int) -> None:
    """128 samples neither go over 24 ranks nor over 256."""
    with pytest.raises(UsageError, match=rf"global batch of 128 samples .* over {ranks} data-parallel ranks"):
        _batch(stateful(2, 1), 8, 4, 4).share(ranks, ranks)


def test_unknown_samples_shrink_to_any_part(stateful: Stateful) -> None:
    """Without shapes only micro batches are counted."""
    assert Share(1, 0, 1 / 3) == _batch(stateful(2, 1), 0, 1, 4, "").share(12, 12)


@pytest.mark.parametrize("factor", [0.5, 0.25, 2.0])
def test_retiming_is_that_of_another_micro_batch(stateful: Stateful, factor: float) -> None:
    """The same durations as rewrite.batch.resize_micro_batch gives, to the rounding."""
    state = stateful(4, 2, 2, forward_ns=10_000_000)
    expected = resize_micro_batch(state, round(state.layout.mbs * factor)).graph.dur_ns
    found = retiming_of(state).apply(state.graph.dur_ns, factor)

    assert np.abs(expected - found.dur_ns).max() <= 1
    assert found.by_shape > 0.9 and found.by_shape + found.by_time == pytest.approx(1.0)
    assert 0 < found.error < 0.2


def test_launch_bound_kernels_keep_their_floor(stateful: Stateful) -> None:
    """Kernels of a launch's length stay; longer ones never fall below it, and launches and the optimizer don't change."""
    state = stateful(4, 1, forward_ns=3_000, optimizer_ns=50_000)
    found = retiming_of(state).apply(state.graph.dur_ns, 1 / 1024)
    kernels = (state.graph.kind == int(NodeKind.KERNEL)) & (state.graph.dur_ns >= 3_000)

    assert found.dur_ns[kernels].min() >= GPU_FLOOR_S * 1e9
    assert (state.graph.dur_ns[~kernels] - found.dur_ns[~kernels]).max() <= 300 - 300 / 1024 + 1
    assert 50_000 == found.dur_ns[-1]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_collectives_are_kept_whole_when_micro_batches_go(stateful: Stateful, count: int) -> None:
    """One rank reduces its last bucket behind the backward pass, the other within it: still one collective of two ranks,
    as many in a step of any number of micro batches."""
    state = stateful(4, 4, 2, reduce_ns=500_000, forward_ns=1_000_000)
    late = (state.graph.instance == 3) & (state.graph.rank == 1)
    for name, value in (("phase", 3), ("unit", -1), ("micro_batch", -1)):
        getattr(state.anatomy, name)[late] = value
    graph = repeat_micro_batches(agreed(state), count).graph
    members = [graph.rank[graph.instance == at].tolist() for at in np.unique(graph.instance[graph.instance >= 0])]

    assert 4 * [[0, 0, 1, 1]] == [sorted(each) for each in members]
    apart = repeat_micro_batches(state, count).graph if count == 2 else None
    assert apart is None or len(np.unique(apart.instance[apart.instance >= 0])) == 5


def test_what_has_no_shape_follows_time_and_is_named(stateful: Stateful) -> None:
    """Half of the samples, half of the time above a launch's worth; the report names the kernels."""
    state = stateful(2, 1, forward_ns=1_002_000)
    blind = replace(state, work=replace(state.work, shape=(None,) * len(state.graph)))
    retiming = retiming_of(blind)
    found = retiming.apply(state.graph.dur_ns, 0.5)
    forward = np.flatnonzero(state.graph.dur_ns == 1_002_000)

    assert [502_000] == sorted(set(found.dur_ns[forward].tolist()))
    assert (0.0, 1.0) == (found.by_shape, pytest.approx(found.by_time))
    assert "gemm" in told_by_time(state.graph, retiming, state.graph.dur_ns)


def test_rows_stand_for_samples_where_no_attention_tells(stateful: Stateful) -> None:
    """A job of products alone counts their rows; without any shape nothing is counted."""
    state = stateful(4, 1)
    no_attention = tuple(s if s is None or s.work.value == "matmul" else None for s in state.work.shape)
    rows = batch_of(replace(state, work=replace(state.work, shape=no_attention)), _never)
    blind = batch_of(replace(state, work=replace(state.work, shape=(None,) * len(state.graph))), _never)

    odd = tuple(s if s is None or s.work.value != "matmul" else replace(s, rows=s.rows - 1) for s in no_attention)
    layers = batch_of(replace(state, work=replace(state.work, shape=odd)), _never)
    whole = batch_of(state, _never)

    assert (state.layout.mbs, "samples") == (whole.samples, whole.unit)
    assert (8192, "rows of matrix products") == (rows.samples, rows.unit)
    # Other products may take longer; the tokens of the layers are what search counts, too.
    assert rows.samples == layers.samples == state.layout.mbs * state.layout.seq
    assert (0, "") == (blind.samples, blind.unit)


def test_collectives_of_activations_shrink_and_those_of_gradients_do_not(stateful: Stateful) -> None:
    """Half of the samples: half of the bytes on tp, all of them on dp."""
    state = stateful(2, 1, 2, reduce_ns=1000)
    graph = replace(state.graph, groups=(*state.graph.groups, GraphGroup("tp", 2, 1)))
    mixed = tuple(replace(item, group=at % 2) for at, item in enumerate(graph.collectives))
    graph = replace(graph, collectives=mixed)

    assert [4096, 2048] == [item.bytes_in for item in with_activations(graph, 0.5).collectives]


def test_a_real_job_keeps_its_global_batch(samples: Path) -> None:
    """The sample of four DDP ranks: compute shrinks with ranks, gradients don't, and each point says what it did."""
    weak, strong = (extrapolate(load(samples / "ddp_w4"), sizes=[4, 8, 16], weak=weak) for weak in (True, False))

    assert weak.points[0].p50_s == pytest.approx(strong.points[0].p50_s)
    assert strong.points[1].p50_s < weak.points[1].p50_s
    assert strong.points[2].retimed and not strong.points[0].retimed
    assert "compute_by" in strong.points[2].provenance
    assert any("re-timed by the models of shapes" in note for note in strong.health.notes)


def test_sizes_that_do_not_divide_are_left_out_with_the_reason(samples: Path) -> None:
    """Among others they are listed; alone they are an error."""
    built = build(load(samples / "ddp_w4"))
    curve = extrapolate(built, sizes=[8, 1 << 20], weak=False)

    assert [8] == [point.gpus for point in curve.points]
    assert [1 << 20] == list(curve.left_out) and "can't be divided" in curve.left_out[1 << 20]
    with pytest.raises(UsageError, match="can't be divided"):
        extrapolate(built, sizes=[1 << 20], weak=False)


def test_a_pipeline_laid_anew_keeps_its_messages_and_its_fill(shared_data: Path) -> None:
    """Four stages at two micro batches instead of four: messages take time though their size is not known, and five
    slots of seven remain, so the step is not halved."""
    alone = Cluster.load("gloo_10g")
    curve = extrapolate(load(shared_data / "gloo" / "pp_1f1b_w4"), cluster=alone, sizes=[4, 8], weak=False)
    measured, doubled = curve.points

    assert 5 / 7 == pytest.approx(doubled.p50_s / measured.p50_s, rel=0.1)
    assert "step_time_band" not in doubled.unknown and "dp" in doubled.exposed_by_axis


def test_more_than_linear_scaling_is_remarked_on_and_its_band_reaches_linear(samples: Path) -> None:
    """Half the step at twice the ranks stays; a third gets a band up to half, and a note."""
    base = prepare(load(samples / "ddp_w4"), strong=True)
    point = evaluate(base, 8, Options(weak=False))
    whole = base.fit.replayed_s
    linear, beyond = (
        replace(point, low_s=share * whole, p50_s=share * whole, high_s=share * whole) for share in (1 / 2, 1 / 3)
    )

    assert [whole / 2, whole / 2] == [each.high_s for each in _to_linear([linear, beyond], base)]
    assert ["3 times as fast at 8 GPUs" in note for note in base.health.notes if "More than linear" in note] == [True]
