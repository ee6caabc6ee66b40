"""Search: what is a candidate, that pruning loses nothing, and what the estimates are made of."""

import time
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.anatomy import dissect
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.described.models import Model, load_model
from scaletrace.extrapolate.estimate import MESSAGE_OVERHEAD_S, Network, Terms, estimate, lower_bound_s
from scaletrace.extrapolate.kernels import Ceilings
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.rewrite.pp import pipeline_graph
from scaletrace.extrapolate.rewrite.schedules import Op, build
from scaletrace.extrapolate.search import Space, candidates, search
from scaletrace.extrapolate.workload import Anchor, Workload, from_job, infer_model
from scaletrace.parse.build import build as build_graph
from scaletrace.parse.load import load
from scaletrace.replay.engine import replay

H100 = Cluster.load("dgx_h100")
SMALL = Model("small", "llama", 8, 2048, 16, 5632, 16, 32000, 2048, False)
MOE = Model("moe", "moe", 8, 2048, 16, 4096, 16, 32000, 2048, False, 8, 2)


def described(model: Model) -> Workload:
    """A model on H100s that nobody measured."""
    return Workload.described(model, H100.device)


@pytest.mark.parametrize("model", [SMALL, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("gpus", [1, 8, 32])
def test_pruning_finds_what_brute_force_finds(model: Model, gpus: int) -> None:
    """The ten best of a pruned search are those of costing every candidate, in the same order."""
    work, network = described(model), Network(H100)
    space = Space(gpus, 64, 2048, 76e9, micro_batches=(1, 4), chunks=(1, 2))
    everything = search(work, network, space, exhaustive=True)
    pruned = search(work, network, space)

    assert everything.best == pruned.best
    assert [lost.estimate for lost in everything.next] == [lost.estimate for lost in pruned.next]
    assert everything.candidates == pruned.candidates
    assert pruned.evaluated <= everything.evaluated


def test_a_search_tells_how_far_it_is() -> None:
    """The first candidate and every 500th are told of, with how many there are in all."""
    heard: list[tuple[int, int]] = []
    found = search(described(SMALL), Network(H100), Space(64, 256, 2048, 76e9), advance=lambda *at: heard.append(at))

    assert [(at, found.candidates) for at in range(0, 500 * len(heard), 500)] == heard
    assert len(heard) >= 2


def test_more_micro_batches_take_no_longer_to_search() -> None:
    """A hundred times the batch has orders of actions a hundred times as long, which no candidate has to write out."""
    space = Space(8, 800_000, 2048, 76e9, micro_batches=(1,), chunks=(1, 2))
    began = time.process_time()
    found = search(described(SMALL), Network(H100), space)

    assert 800_000 == found.best.samples
    assert time.process_time() - began < 5


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 4, 16]),
       st.sampled_from(["none", "full"]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_bound_never_exceeds_the_estimate(tp: int, pp: int, cp: int, m: int, recompute: str) -> None:
    """Compute alone is a lower bound of every layout's step, which is what makes pruning safe."""
    layout = Layout(fsdp=2, tp=tp, pp=pp, cp=cp, mbs=1, microbatches=m, seq=2048, recompute=recompute, sp=tp > 1)
    work = described(SMALL)

    assert lower_bound_s(work, layout) <= estimate(work, layout, Network(H100)).step_s


def test_every_candidate_uses_all_gpus_and_the_whole_batch() -> None:
    """Degrees multiply to the size, and micro batches to the batch; none is proposed twice."""
    space = Space(16, 32, 2048, 76e9)
    found = list(candidates(described(SMALL), space))

    assert {16} == {layout.ranks for layout in found}
    assert {32} == {layout.mbs * layout.microbatches * layout.data_ranks for layout in found}
    assert len(found) == len(set(found)) > 100


def test_degrees_that_do_not_divide_the_model_are_no_candidates() -> None:
    """24 heads can't be split 16 ways, nor 8 layers over 16 stages."""
    model = Model("odd", "gpt", 8, 3072, 24, seq=2048)
    found = list(candidates(described(model), Space(16, 16, 2048, 76e9)))

    assert 16 not in {layout.tp for layout in found}
    assert 16 not in {layout.pp for layout in found}
    assert {1, 2, 4, 8} == {layout.tp for layout in found}


def test_what_does_not_fit_is_said_with_the_remedy() -> None:
    """A 70B model does not train on one GPU, and the message says why."""
    with pytest.raises(UsageError, match=r"no layout of 1 GPUs fits .*more memory than there is.*give more GPUs"):
        search(described(load_model("llama3-70b")), Network(H100), Space(1, 1, 8192, 76e9))


def test_the_next_ones_lose_for_a_reason() -> None:
    """Each layout behind the best names what costs it more."""
    found = search(described(SMALL), Network(H100), Space(16, 64, 2048, 76e9))

    assert all(lost.behind >= 0 and lost.reasons for lost in found.next)
    assert sorted(lost.behind for lost in found.next) == [lost.behind for lost in found.next]


def test_terms_add_up_to_the_step() -> None:
    """The step is the sum of its terms and nothing else."""
    found = estimate(described(SMALL), Layout(fsdp=8, mbs=1, microbatches=4, seq=2048), Network(H100))

    assert sum(getattr(found.terms, f.name) for f in fields(Terms)) == pytest.approx(found.step_s)


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_the_closed_form_is_the_replay_of_the_schedule(schedule: str, chunks: int) -> None:
    """Compute, bubble and messages of the estimate are those of a replay of the same stages."""
    work = described(Model("headless", "gpt", 8, 2048, 16, vocab=1, seq=2048))
    layout = Layout(pp=4, mbs=1, microbatches=8, seq=2048, schedule=schedule, chunks=chunks)
    found = estimate(work, layout, Network(H100))
    forward, backward = (8 / layout.stages * t * 1e9 for t in work.layer_s(layout))
    hop = Network(H100).seconds("send", 2048 * 2048 * 2, 2, 1) + MESSAGE_OVERHEAD_S
    graph = pipeline_graph(
        build(schedule, 4, 8, chunks),
        lambda a: round(forward if a.op is Op.FORWARD else backward),
        lambda *_: round(hop * 1e9),
    )
    makespan_s = replay(graph).makespan_ns * 1e-9

    assert makespan_s == pytest.approx(found.terms.compute + found.terms.bubble, rel=0.02)


def test_a_measured_layer_is_stretched_by_the_ratio_of_shapes() -> None:
    """At the measured layout the measured times come back exactly; twice the micro batch takes about twice as long."""
    at = Layout(tp=2, mbs=1, seq=2048)
    work = Workload(SMALL, Ceilings.of(H100.device), Anchor(at, 3e-3, 7e-3, 1e-3, 2e-3))
    twice = work.layer_s(Layout(tp=2, mbs=2, seq=2048))

    assert (3e-3, 7e-3) == work.layer_s(at)
    assert (1e-3, 2e-3) == work.ends_s(at)
    assert twice[0] == pytest.approx(6e-3, rel=0.1)
    assert work.layer_s(Layout(tp=4, mbs=1, seq=2048))[0] < 3e-3


def test_the_70b_search_over_4096_gpus_finds_one_that_fits() -> None:
    """Thousands of layouts are looked at, and the answer trains a 70B model in 80 GB (benchmarks/search.py times it)."""
    found = search(described(load_model("llama3-70b")), Network(H100), Space(4096, 2048, 8192, 76e9))

    assert found.candidates > 5_000
    assert found.best.memory is not None
    assert found.best.memory.total < 76e9


def test_a_model_is_read_from_a_recorded_jobs_shapes(shared_data: Path) -> None:
    """Layers, width, vocabulary and tokens come from the operators, and the anchor from their times."""
    built = build_graph(load(shared_data / "gloo" / "ddp_w2"))
    work = from_job(built, dissect(built), Layout(dp=2))

    assert (2, 64, 128, 32) == (work.model.layers, work.model.hidden, work.model.mlp_width, work.model.vocab)
    assert work.anchor is not None
    assert 8 == work.anchor.layout.mbs * work.anchor.layout.seq
    assert work.anchor.layer_forward_s > 0


def test_a_job_without_layers_is_refused_with_the_remedy(shared_data: Path) -> None:
    """A recommendation model is no stack of layers, and the message says so and what to do."""
    built = build_graph(load(shared_data / "traces" / "dlrm8_v100"))
    with pytest.raises(InputError, match=r"no layers were found: no stretch that repeats .* or name a model"):
        infer_model(built, dissect(built), Layout(dp=8))
