"""Layouts reached and left again: the order in which a user writes axes, what composes to what, 1 → k → 1 on captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.confirm import MOST_NODES, Row, confirmed
from scaletrace.extrapolate.estimate import Estimate, Network, Terms
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.batch import resize_micro_batch, without_early_reductions
from scaletrace.extrapolate.rewrite.select import real_ranks
from scaletrace.extrapolate.rewrite.sequence import resize_sequence
from scaletrace.extrapolate.rewrite.stages import pipeline
from scaletrace.extrapolate.rewrite.state import State, open_state, recosted
from scaletrace.extrapolate.rewrite.tp import tensor
from scaletrace.parse.build import build
from scaletrace.parse.graph import Graph, NodeKind
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay

Stateful = Callable[..., State]
AXES = {
    "dp": st.sampled_from([1, 2, 8]),
    "fsdp": st.sampled_from([1, 4]),
    "tp": st.sampled_from([2, 4]),
    "pp": st.sampled_from([1, 2]),
    "mbs": st.sampled_from([1, 2]),
    "microbatches": st.sampled_from([4, 8]),
    "seq": st.sampled_from([512, 2048]),
    "sp": st.sampled_from([0, 1]),
    "vocab": st.sampled_from(["whole", "gathered", "loss"]),
    "recompute": st.sampled_from(["none", "full"]),
}


def same(one: Graph, other: Graph) -> bool:
    """Equal in every column, edge, collective and group."""
    columns = ("dur_ns", "release_ns", "kind", "rank", "lane", "name", "step", "instance", "pred_ptr", "pred", "lag_ns",
               "edge_kind")  # fmt: skip
    spread = [
        graph.multiplicity if len(graph.multiplicity) else np.ones(len(real_ranks(graph))) for graph in (one, other)
    ]
    return (
        np.array_equal(*spread)
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
        and (
            (one.collectives, one.groups, one.names, one.lanes)
            == (other.collectives, other.groups, other.names, other.lanes)
        )
    )


def parts(graph: Graph) -> tuple[int, int, int, int]:
    """What a graph laid anew has in common with the one it came from, wherever its nodes now stand: (nodes, their time,
    the replayed step, collectives)."""
    real = graph.kind != int(NodeKind.RENDEZVOUS)
    instances = len(set(graph.instance[graph.instance >= 0].tolist()))
    return int(real.sum()), int(graph.dur_ns.sum()), replay(graph).makespan_ns, instances


@settings(deadline=None, max_examples=100)
@given(values=st.fixed_dictionaries({}, optional=AXES), shuffled=st.randoms(use_true_random=False))
def test_axes_may_be_written_in_any_order(values: dict[str, object], shuffled: object) -> None:
    """Whatever the order, the same layout is meant, and it prints in one order."""
    values.setdefault("tp", 2)
    written = [f"{axis}={value}" for axis, value in values.items()]
    mixed = list(written)
    shuffled.shuffle(mixed)  # type: ignore[attr-defined]

    assert Layout.parse(",".join(written)) == Layout.parse(" ".join(mixed))
    assert Layout.parse(str(Layout.parse(",".join(mixed)))) == Layout.parse(",".join(written))


def test_a_layout_is_its_steps_in_the_stated_order(stateful: Stateful) -> None:
    """One call does what the single rewrites do one after the other: sizes, tensor, pipeline, data."""
    state = stateful(4, 1, 2, reduce_ns=1000, forward_ns=10_000_000)
    by_hand = tensor(resize_sequence(resize_micro_batch(state, 8), 4096), 2)
    by_hand = replace(by_hand, layout=replace(by_hand.layout, microbatches=4))
    by_hand = without_early_reductions(pipeline(by_hand, 2, "GPipe"), 1)
    target = Layout(dp=2, tp=2, pp=2, mbs=8, seq=4096, microbatches=4, schedule="GPipe")

    assert same(by_hand.graph, relayout(state, target).graph)


@cache
def opened(folder: Path, measured: str) -> State:
    """The state of a recorded gloo job."""
    return open_state(build(load(folder)), Layout.parse(measured), Network(Cluster.load("gloo_10g")))


BITWISE = [
    ("ddp_w2", "dp=2,mbs=1,seq=8", change)
    for change in ("tp=2,dp=2", "dp=16", "dp=2,mbs=4", "dp=2,seq=32", "dp=8,tp=2,mbs=2,seq=16")
] + [
    ("fsdp2_w2", "fsdp=2,mbs=1,seq=8", change) for change in ("fsdp=2,tp=2", "fsdp=64", "fsdp=8,tp=2", "fsdp=2,mbs=8")
] + [
    ("tp_dp_w4", "fsdp=2,tp=2,mbs=1,seq=8", "fsdp=8,tp=4"),
    ("tp_w4", "tp=4,mbs=1,seq=8", "tp=2"),
    ("hsdp_w4", "dp=2,fsdp=2,mbs=1,seq=8", "dp=32,fsdp=2"),
]  # fmt: skip


@pytest.mark.parametrize(("job", "measured", "there"), BITWISE)
def test_recorded_jobs_come_back_bit_for_bit(shared_data: Path, job: str, measured: str, there: str) -> None:
    """There and back along tensor, data, batch, sequence and width gives the measured graph, to the nanosecond."""
    state = opened(shared_data / "gloo" / job, measured)
    away = relayout(state, Layout.parse(there))

    assert not same(state.graph, away.graph)
    assert same(state.graph, relayout(away, state.layout).graph)


LAID = [
    ("ddp_w1", "dp=1,mbs=1,seq=8", "pp=2"),
    ("ddp_w1", "dp=1,mbs=1,seq=8", "dp=1,microbatches=4"),
    ("pp_1f1b_w1", "mbs=1,seq=2", "pp=4"),
    ("pp_1f1b_w1", "mbs=1,seq=2", "pp=2,chunks=2"),
    ("pp_1f1b_w1", "mbs=1,seq=2", "pp=4,schedule=GPipe"),
]


@pytest.mark.parametrize(("job", "measured", "there"), LAID)
def test_recorded_jobs_come_back_from_pipelines(shared_data: Path, job: str, measured: str, there: str) -> None:
    """There and back through other stages or more micro batches has the same nodes, time, step and collectives."""
    state = opened(shared_data / "gloo" / job, measured)
    home = replace(state.layout, schedule="")
    once = relayout(
        state, replace(Layout.parse(there), microbatches=Layout.parse(there).microbatches or home.microbatches)
    )
    back = relayout(once, replace(home, schedule="1F1B" if home.pp > 1 else ""))

    assert parts(state.graph) != parts(once.graph)
    assert parts(state.graph) == parts(back.graph)


@pytest.mark.parametrize(("job", "measured"), [("tp_w4", "tp=4,mbs=1,seq=8"), ("tp_dp_w4", "fsdp=2,tp=2,mbs=1,seq=8")])
def test_removed_tensor_parallelism_leaves_no_call_behind(shared_data: Path, job: str, measured: str) -> None:
    """Neither a collective of the tensor axis, nor a call or wait for one, nor a wrapper of DTensor is left, and every
    thread still runs through."""
    state = opened(shared_data / "gloo" / job, measured)
    made = relayout(state, replace(state.layout, tp=1))
    used = {made.graph.collectives[i].group for i in made.graph.instance[made.graph.instance >= 0].tolist()}
    names = {made.graph.name_of(node) for node in range(len(made.graph))}
    loose = [int((np.diff(graph.pred_ptr) == 0).sum()) for graph in (state.graph, made.graph)]

    assert "tp" not in {made.graph.groups[group].axis for group in used}
    assert not [name for name in names if "Redistribute" in name or "TorchTensor" in name or "_c10d_functional" in name]
    assert loose[1] <= loose[0]
    assert made.graph.is_topological()


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_heads_divide_whatever_the_micro_batch(samples: Path, micro_batch: int) -> None:
    """Six heads of a recorded job are cut over 2, 3 and 6 tensor ranks at every micro batch, and over 4 at none."""
    built = build(load(samples / "ddp_straggler_w4"))
    state = open_state(built, Layout(dp=4), Network(Cluster.load("gloo_10g")))
    cut = [relayout(state, Layout.parse(f"dp=4,tp={degree},mbs={micro_batch}")).layout.tp for degree in (2, 3, 6)]

    assert [2, 3, 6] == cut
    with pytest.raises(UsageError, match="tp=4 does not divide 6 heads of attention"):
        relayout(state, Layout.parse(f"dp=4,tp=4,mbs={micro_batch}"))


@pytest.mark.parametrize("layout", ["dp=4,microbatches=100000", "dp=4,layers=1000000"])
def test_a_graph_that_could_not_be_held_is_refused(samples: Path, layout: str) -> None:
    """Before anything is made, with the number of nodes and what to ask for."""
    built = build(load(samples / "ddp_straggler_w4"))
    state = open_state(built, Layout(dp=4), Network(Cluster.load("gloo_10g")))
    nodes = len(state.graph) * int(layout.rpartition("=")[2])

    with pytest.raises(UsageError, match=f"about {nodes:,} nodes, of which 20,000,000 can be made; ask for fewer"):
        relayout(state, Layout.parse(layout))


def test_a_search_replays_no_graph_that_takes_minutes(samples: Path) -> None:
    """A layout whose graph would be large keeps its estimate, and the reason stands beside it."""
    built = build(load(samples / "ddp_straggler_w4"))
    state = open_state(built, Layout(dp=4), Network(Cluster.load("gloo_10g")))
    terms = Terms(*[1.0] * len(fields(Terms)))
    layout = replace(state.layout, microbatches=2 * MOST_NODES // len(state.graph))
    row = confirmed(state, Row(Estimate(layout, terms, 1)))

    assert row.replayed_s is None
    assert (row.why_not or "").endswith("and a search replays up to 1,000,000")


def test_what_goes_beyond_a_transfer_is_not_stretched_and_comes_back(stateful: Stateful) -> None:
    """Of a transfer of which 300 ns are the host's, the rest alone follows the cost of more bytes, and back it is exact."""
    state = stateful(2, 1, ranks=2, reduce_ns=1000)
    nodes = np.flatnonzero((state.graph.kind == int(NodeKind.TRANSFER)) & (state.graph.instance >= 0))
    beyond = np.zeros(len(state.graph))
    beyond[nodes[0]] = 300.0
    held = replace(state, anatomy=replace(state.anatomy, beyond_ns=beyond))
    larger = [replace(item, bytes_in=1 << 24, bytes_out=1 << 24) for item in state.graph.collectives]
    plain, out = (recosted(each, larger, state.graph.groups) for each in (state, held))
    factor = plain.anatomy.exact_ns[nodes] / 1000
    assert (factor > 2).all()
    assert out.anatomy.exact_ns[nodes].tolist() == pytest.approx([700 * factor[0] + 300, *(1000 * factor[1:])])
    assert same(state.graph, recosted(out, state.graph.collectives, state.graph.groups).graph)
