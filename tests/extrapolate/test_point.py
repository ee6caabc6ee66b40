"""What stands beside the step of a point: bubble, power, energy and money."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.base import Base, prepare
from scaletrace.extrapolate.catalog import load_device
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.draft import Draft
from scaletrace.extrapolate.energy import Prices
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.point import POWER, Options, bubble_fraction, core, evaluate, point_of
from scaletrace.extrapolate.steps import Shares
from scaletrace.extrapolate.stragglers import Noise
from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphGroup
from scaletrace.parse.load import load

V100 = replace(Cluster.load("dgx_v100"), device=load_device("V100 SXM2"))


@pytest.fixture(scope="module")
def job(shared_data: Path) -> Base:
    """Two V100s, without stragglers."""
    return prepare(build(load(shared_data / "traces" / "torchrec2_v100")), V100, noise=Noise(0.0, 0.0))


@pytest.mark.parametrize(("name", "stages"), [("pp_1f1b_w4", 4), ("pp_1f1b_w2", 2)])
def test_the_bubble_of_a_real_pipeline_is_near_its_closed_form(shared_data: Path, name: str, stages: int) -> None:
    """(p - 1) / (m + p - 1) of the step with m = 4 micro batches, give or take what messages and uneven stages add."""
    point = evaluate(prepare(build(load(shared_data / "gloo" / name))), stages, Options())

    assert (stages - 1) / (4 + stages - 1) == pytest.approx(point.bubble_fraction, abs=0.12)


def test_a_bubble_is_zero_only_where_it_is_known_that_there_is_no_pipeline() -> None:
    """Messages over experts or context are none; messages in groups without a name leave it open."""
    part = Shares(0.5, 0.3, {"pp": 0.3}, 0.3, {"pp": 0.2})
    for axis, layout, expected in (("pp", Layout(pp=2), 0.2), ("cp", Layout(cp=2), 0.0), ("", Layout(dp=2), None)):
        draft = Draft(groups=[GraphGroup(axis, 2, 1)])
        draft.collective("send", 0, 8, [(0, []), (1, [])])
        value, reason = bubble_fraction(draft.graph(), layout, part)

        assert expected == value and bool(reason) == (expected is None)
    assert (0.0, "") == bubble_fraction(Draft(groups=[GraphGroup("dp", 2, 1)]).graph(), Layout(dp=2), part)


def test_power_follows_kernels_at_their_own_rate_and_resident_collectives(job: Base) -> None:
    """The model's shares of TDP for the compute of the step, freed of slowdown, and the time with a collective."""
    found = core(job, 2, Options())
    point = point_of(job, found, Options())
    kernels = found.part.compute
    expected = POWER.power_W(300, kernels, found.part.resident)

    assert 0.17 * 300 < (point.power_W_per_gpu or 0) <= expected + 1e-9
    assert "modelled" == point.provenance["power"]


def test_energy_and_money_follow_tokens_power_and_price(job: Base) -> None:
    """Tokens a joule are tokens a second over watts; the hour's price goes over the tokens of an hour."""
    point = evaluate(job, 16, Options(tokens_per_step=1000, prices=Prices({"*": 3.6})))
    rate = 1000 / point.p50_s

    assert rate == pytest.approx(point.tokens_per_s_per_gpu)
    assert point.tokens_per_J == pytest.approx(rate / (point.power_W_per_gpu or np.nan))
    assert point.money_per_million_tokens == pytest.approx(1e6 * 3.6 / 3600 / rate)
    assert {"memory_bytes"} == set(point.unknown) - {"mfu"}
