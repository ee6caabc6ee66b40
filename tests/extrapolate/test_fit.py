"""The fit of an estimate to a measured step: exact at the measured layout whatever was measured, bounds still hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.described.models import Model
from scaletrace.extrapolate.estimate import PLAIN, Network, estimate, lower_bound_s
from scaletrace.extrapolate.fit import factors, for_cluster
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.search import Space, search
from scaletrace.extrapolate.workload import Anchor, Workload

NETWORK = Network(Cluster.load("dgx_h100"))
MODEL = Model("small", "llama", 8, 2048, 16, 5632, 16, 32000, 2048, False)
LAYOUTS = [
    Layout(dp=4, mbs=1, microbatches=2, seq=2048),
    Layout(fsdp=4, mbs=1, microbatches=1, seq=2048),
    Layout(dp=2, tp=2, mbs=1, microbatches=2, seq=2048),
    Layout(pp=4, mbs=1, microbatches=8, seq=2048),
    Layout(dp=2, pp=2, mbs=1, microbatches=4, seq=2048),
]


def measured(layout: Layout) -> Workload:
    """A model whose layers took 3 and 7 ms, and whose ends took 1 and 2."""
    return Workload(MODEL, Ceilings.of(NETWORK.cluster.device), Anchor(layout, 3e-3, 7e-3, 1e-3, 2e-3))


@given(
    st.sampled_from(LAYOUTS),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.9),
    st.floats(0.3, 3.0),
    st.sampled_from([0.0, 3.0, 20.0]),
    st.floats(0.0, 1.0),
)
@settings(max_examples=80, deadline=None)
def test_the_estimate_is_the_measurement_where_it_was_measured(
    layout: Layout, computes: float, exposed: float, longer: float, calls: float, held: float
) -> None:
    """Any split of the step into compute, exposed communication and rest gives back the step, or says what is left."""
    work = measured(layout)
    step_s = estimate(work, layout, NETWORK).step_s * longer
    axes = {"tp": 0.3, "dp": 0.5, "pp": 0.2}
    parts = {axis: (1 - computes) * exposed * share * step_s for axis, share in axes.items()}
    fit = factors(work, layout, NETWORK, step_s, computes * step_s, parts, calls, held)
    now = estimate(work, layout, NETWORK, fit=fit)

    assert now.step_s / step_s - 1 == pytest.approx(fit.residual, abs=1e-9)
    assert lower_bound_s(work, layout, fit) <= now.step_s * (1 + 1e-9)
    assert fit.residual == pytest.approx(0, abs=1e-6) or now.terms.bubble > 0


def test_a_split_that_the_layout_can_have_is_met_exactly() -> None:
    """Compute, gradients and host of a data-parallel job each come out as measured."""
    layout = LAYOUTS[0]
    work = measured(layout)
    fit = factors(work, layout, NETWORK, 0.4, 0.25, {"dp": 0.1})
    terms = estimate(work, layout, NETWORK, fit=fit).terms

    assert terms.data_exposed == pytest.approx(0.1)
    assert terms.compute + terms.head + terms.optimizer + fit.once_s == pytest.approx(0.25)
    assert terms.host - fit.once_s == pytest.approx(0.05)
    assert abs(fit.residual) < 1e-9


def test_dispatch_does_not_shrink_with_the_layers() -> None:
    """Of compute that is all dispatch a split over tensor ranks saves nothing, of one that is none it saves half."""
    here, there = Layout(mbs=1, microbatches=1, seq=2048), Layout(tp=2, mbs=1, microbatches=1, seq=2048)
    work = measured(here)
    held, free = (factors(work, here, NETWORK, 0.1, 0.083, {}, held=share) for share in (1.0, 0.0))

    assert estimate(work, there, NETWORK, fit=held).terms.compute == pytest.approx(0.08)
    assert estimate(work, there, NETWORK, fit=free).terms.compute < 0.05


def test_communication_factors_stay_with_their_cluster() -> None:
    """On another cluster compute and host are kept, and communication is the model's."""
    layout = LAYOUTS[0]
    fit = factors(measured(layout), layout, NETWORK, 0.4, 0.25, {"dp": 0.1})
    other = for_cluster(fit, same=False)

    assert 1.0 == other.data != fit.data
    assert (fit.host_s, fit.compute) == (other.host_s, other.compute)
    assert for_cluster(fit, same=True) is fit


def test_pruning_loses_nothing_with_a_fit() -> None:
    """The ten best of a fitted search are those of costing every candidate."""
    layout = LAYOUTS[0]
    work = measured(layout)
    fit = factors(work, layout, NETWORK, 0.4, 0.25, {"dp": 0.1}, calls=5.0, held=0.4)
    space = Space(16, 64, 2048, 76e9, micro_batches=(1, 4), chunks=(1, 2))
    everything = search(work, NETWORK, space, exhaustive=True, fit=fit)
    pruned = search(work, NETWORK, space, fit=fit)

    assert [everything.best, *(lost.estimate for lost in everything.next)] == [
        pruned.best, *(lost.estimate for lost in pruned.next),
    ]  # fmt: skip
    assert PLAIN != fit


def test_the_fastest_that_does_not_fit_is_told() -> None:
    """With little memory the search names what would be faster with more."""
    work = Workload.described(MODEL, NETWORK.cluster.device)
    found = search(work, NETWORK, Space(8, 32, 2048, 8e9))

    assert found.too_large is not None and found.too_large.memory is not None
    assert found.too_large.memory.total > 8e9
    assert found.too_large.step_s < found.next[-1].estimate.step_s
    assert search(work, NETWORK, Space(8, 32, 2048, 1e15)).too_large is None
