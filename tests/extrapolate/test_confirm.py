"""Confirming a search by replay: the order, what is replayed, and what an estimate's error leaves open."""

from dataclasses import replace
from pathlib import Path

import pytest

from scaletrace.cli.described import Interference, calibrated
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.confirm import (
    DESCRIBED,
    ErrorBand,
    Ranking,
    Row,
    _may_be_first,
    confirmed,
    freed,
    layout_at,
    opened,
    ranked,
    slowdown_of,
)
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.described.constants import costs_on, device
from scaletrace.extrapolate.described.models import load_model
from scaletrace.extrapolate.described.planned import Described
from scaletrace.extrapolate.estimate import Estimate, Terms
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.search import Found, Lost
from scaletrace.extrapolate.stragglers import Noise
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from scaletrace.traces.synth import write_capture


def costed(layout: Layout, step_s: float) -> Estimate:
    """An estimate that is all compute."""
    return Estimate(layout, Terms(step_s, *[0.0] * 9), 8)


def found(*estimates: Estimate) -> Found:
    """The answer of a search, best first."""
    return Found(estimates[0], tuple(Lost(item, 0.0, ()) for item in estimates[1:]), len(estimates))


def test_the_fastest_replay_comes_first(samples: Path) -> None:
    """The measured layout is replayed beyond the number asked for; no estimate is first, and zero is not rewritten."""
    built = build(load(samples / "ddp_w2"))
    state = opened(built, Layout(dp=2), Cluster.load("gloo_10g"))
    own = state.layout
    more = [Layout(dp=2, zero=1, mbs=own.mbs, microbatches=1, seq=own.seq),
            Layout(dp=2, recompute="full", mbs=own.mbs, microbatches=1, seq=own.seq),
            Layout(fsdp=2, mbs=own.mbs, microbatches=1, seq=own.seq)]  # fmt: skip
    estimates = [
        costed(layout, step_s) for layout, step_s in zip([*more, own], (0.001, 0.002, 0.003, 0.004), strict=True)
    ]
    out = ranked(found(*estimates), state, 1, own)
    known = [row for row in out.rows if row.replayed_s is not None]

    assert out.by_replay and out.rows[0] is known[0] and 2 == len(known)
    assert {more[1], own} == {row.estimate.layout for row in known}
    assert [True] == [row.as_measured for row in known if row.estimate.layout == own]
    others = {row.estimate.layout: row for row in out.rows if row.replayed_s is None}
    assert {more[0], more[2]} == set(others)
    assert "not rewritten" in str(others[more[0]].why_not)
    assert "no sharded parameters" in str(others[more[2]].why_not)  # tried, as it may have been faster
    assert out.band is not None and 2 == out.band.confirmed and out.band.high > out.band.low


def test_what_may_still_be_faster_is_replayed_too() -> None:
    """Where replays come out at 1.0 and 0.5 times the estimate, an estimate of 1.1 beside a replay of 1.0 may be first;
    of two such the one that may be furthest ahead; what could not be rewritten and what is behind for sure are left."""
    far, near = Row(costed(Layout(dp=8), 1.0), 1.0), Row(costed(Layout(dp=4), 4.0), 2.0)
    maybe, less, sure = (Row(costed(Layout(dp=2), step_s)) for step_s in (1.1, 1.9, 2.1))
    blocked = replace(maybe, why_not="layers don't divide")

    assert 2 == _may_be_first([far, near, maybe, less])
    assert 3 == _may_be_first([far, near, blocked, less])
    assert -1 == _may_be_first([far, near, blocked, sure])


def test_of_equal_replays_the_measured_layout_is_first() -> None:
    """Where nothing is gained nothing is to be changed; a row with bounds alone stands by their middle, never first."""
    from scaletrace.extrapolate.confirm import _ordered

    rows = [Row(costed(Layout(dp=8), 1.0), 2.0001), Row(costed(Layout(fsdp=8), 2.0), 2.0004, as_measured=True),
            Row(costed(Layout(tp=8), 1.5), 1.9), Row(costed(Layout(pp=8), 0.5))]  # fmt: skip

    assert ["tp", "pp", "fsdp", "dp"] == [str(row.estimate.layout).partition("=")[0] for row in _ordered(rows)]


@pytest.mark.parametrize(
    ("step_s", "replayed_s", "error", "expected"),
    [
        (0.95, None, 0.0, True),  # between 0.95 × 1 and 0.95 × 1 / 0.9 s, where the first takes 1 s
        (1.1, None, 0.0, False),
        (1.0, 1.004, 0.0, True),
        (1.0, 1.1, 0.0, False),
        (1.0, 1.1, 0.12, True),
    ],
)
def test_a_layout_loses_only_beyond_the_error(
    step_s: float, replayed_s: float | None, error: float, expected: bool
) -> None:
    """An estimate by the band that the replays show, a replay by the error of its stretched kernels."""
    first, row = Row(costed(Layout(dp=8), 0.9), 1.0), Row(costed(Layout(tp=8), step_s), replayed_s, error)

    assert expected == Ranking((first, row), ErrorBand(0.8, 1.5, 2)).within_error(row)


def test_without_a_replay_the_error_is_that_of_described_jobs_or_not_known() -> None:
    """A named model's estimates share the error that described jobs have; a capture's without replays have none."""
    near, far = costed(Layout(tp=8), 1.1), costed(Layout(pp=8), 1.3)
    described = ranked(found(costed(Layout(dp=8), 1.0), near, far), prior=DESCRIBED)
    blind = ranked(found(costed(Layout(dp=8), 1.0), near, far))

    assert [True, False] == [described.within_error(row) for row in described.rows[1:]]
    assert [None, None] == [blind.within_error(row) for row in blind.rows[1:]]
    assert ("estimate", None) == (blind.to_json_parts()["ordered_by"], blind.to_json_parts()["estimate_error"])


def test_the_measured_layout_grows_by_its_data_axis() -> None:
    """Shards where there are only shards, replicas elsewhere; none where the size or the batch is another."""
    shards, mixed = Layout(fsdp=8, mbs=1, microbatches=2, seq=64), Layout(tp=2, pp=2, mbs=1, microbatches=2, seq=64)
    sized = layout_at(mixed, 8, 4, 64)

    assert Layout(fsdp=32, mbs=1, microbatches=2, seq=64) == layout_at(shards, 32, 64, 64)
    assert sized is not None and (2, "1F1B") == (sized.dp, sized.schedule)
    assert [None, None, None] == [layout_at(shards, *size) for size in ((12, 24, 64), (16, 16, 64), (16, 32, 128))]


def test_replayed_layouts_pay_for_overlap_as_a_stretched_job_does(tmp_path: Path) -> None:
    """More ranks hide longer gathers, beside which kernels are slower; without that the step comes out shorter."""
    on, model = device("h100"), load_model("llama2-1b")
    described = Described(model, Layout(fsdp=8, mbs=2), on, costs_on(on))
    write_capture(calibrated(described, [0], 2, None, Interference(), {})[1], tmp_path)
    built = build(load(tmp_path, workers=1))
    state = opened(built, Layout(fsdp=8), Cluster.load("dgx_h100"))
    slowdown = slowdown_of(built, state)
    assert slowdown is not None
    wide = replace(state.layout, fsdp=64)
    row = Row(costed(wide, 1.0))
    with_it, without = confirmed(freed(state, slowdown), row, slowdown), confirmed(state, row)
    stretched = extrapolate(built, sizes=[64], cluster=Cluster.load("dgx_h100"), noise=Noise(0.0, 0.0)).points[0]

    assert with_it.replayed_s is not None and without.replayed_s is not None
    assert with_it.replayed_s > without.replayed_s
    assert stretched.p50_s == pytest.approx(with_it.replayed_s, rel=0.03)


def compared(*rows: Row) -> list[tuple[str | None, list[float] | None, float | None]]:
    """By what all but the first of ordered rows are compared, from where to where they are behind, and how far."""
    parts = Ranking(rows, None).to_json_parts()["next"]
    ranges = [row["behind_range"] and [round(end, 3) for end in row["behind_range"]] for row in parts]
    return [(row["compared_by"], apart, row["behind"]) for row, apart in zip(parts, ranges, strict=True)]


def test_estimates_are_compared_with_replays_on_one_measure() -> None:
    """An estimate counts as far off as those of replays like it: 1 s beside replays of twice and 2.2 times theirs is
    2 to 2.2 s, not half as long as the first's 2 s; nothing is said where nothing like it was replayed."""
    first, second = Row(costed(Layout(fsdp=8), 1.0), 2.0), Row(costed(Layout(dp=2, fsdp=4), 1.0), 2.2)
    alike, unlike = Row(costed(Layout(dp=4, fsdp=2), 1.0)), Row(costed(Layout(tp=2, pp=2, dp=2), 0.5))

    expected = [("replay", None, pytest.approx(0.1)), ("bounded estimate", [0.0, 0.1], None), (None, None, None)]
    assert expected == compared(first, second, alike, unlike)


def test_one_replay_alone_leaves_the_bounds_open_to_the_estimate() -> None:
    """One ratio shows no scatter, so the row may take its estimate as it is, too."""
    first, other = Row(costed(Layout(fsdp=8), 1.0), 2.0), Row(costed(Layout(dp=8), 1.5))

    assert [("bounded estimate", [-0.25, 0.5], None)] == compared(first, other)
