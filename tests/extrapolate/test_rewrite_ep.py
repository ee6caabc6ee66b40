"""Expert parallelism: groups, work of experts, imbalance observed and drawn, and a real mixture of experts over gloo."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.kernels import Ceilings, Shape, Work, anchored
from scaletrace.extrapolate.layout import Layout, measured_layout, scaled
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.ep import spread_experts
from scaletrace.extrapolate.rewrite.state import State, open_state
from scaletrace.extrapolate.routing import DRAWS, Routing, drawn, imbalance, observed, of_experts
from scaletrace.parse.build import build
from scaletrace.parse.graph import GraphCollective, GraphGroup, NodeKind
from scaletrace.parse.job import Job
from scaletrace.parse.load import load
from tests.extrapolate.test_rewrite_cp import exchanged
from tests.extrapolate.test_rewrite_layout import BIG, same

ROOT = Path(__file__).resolve().parents[2]
Stateful = Callable[..., State]
EXPERT = Shape(Work.MATMUL, 128, 4096, 4096, 16)
"""The products of sixteen local experts, each with 128 tokens."""


@pytest.fixture
def experts(stateful: Stateful) -> Callable[..., State]:
    """experts(ranks=8) → a job whose every layer is one grouped product of experts and whose data ranks hold them all."""

    def make(ranks: int = 8, loads: list[list[float]] | None = None) -> State:
        state = stateful(2, 1, ranks, reduce_ns=500_000 if ranks > 1 else 0, **BIG)
        shape = tuple(EXPERT if s is not None else None for s in state.work.shape)
        routing = Routing(np.array(loads, float), "split sizes") if loads else state.routing
        return replace(state, work=replace(state.work, shape=shape), routing=routing)

    return make


def expert_ns(state: State) -> int:
    """Time of all products of experts."""
    mine = [shape is not None and shape.work is Work.MATMUL for shape in state.work.shape]
    return int(state.graph.dur_ns[mine].sum())


def test_tokens_go_to_experts_and_come_back(experts: Callable[..., State]) -> None:
    """Forward: counts, tokens there, tokens back; backward without counts; of every layer."""
    tokens, counts = 16 * 128 * 4096 * 2, 16 * 8
    one = [("all_to_all", counts, counts), *[("all_to_all", tokens, tokens)] * 2]

    assert [*one, *one, *[("all_to_all", tokens, tokens)] * 4] == exchanged(spread_experts(experts(), 4), "ep")


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 8])
def test_one_rank_to_several_and_back_gives_the_same_graph(
    experts: Callable[..., State], degree: int, ranks: int
) -> None:
    """1 → k → 1 returns every node, edge, duration and byte."""
    state = replace(experts(ranks), layout=Layout(dp=8, mbs=4, microbatches=1, seq=2048))

    assert same(state.graph, spread_experts(spread_experts(state, degree), 1).graph)


def test_a_degree_and_back_gives_the_same_graph(experts: Callable[..., State]) -> None:
    """4 → 8 → 4 and 4 → 2 → 4 return every duration and byte, with loads that were observed or without."""
    for loads in (None, [[3.0, 1.0, 1.0, 1.0]]):
        state = spread_experts(experts(8, loads), 4)
        for degree in (2, 8):
            back = spread_experts(spread_experts(state, degree), 4)

            assert state.graph.collectives == back.graph.collectives and state.graph.groups == back.graph.groups
            assert np.abs(state.graph.dur_ns - back.graph.dur_ns).max() <= 1


def test_experts_keep_their_work_and_read_fewer_weights(experts: Callable[..., State]) -> None:
    """Twice the ranks: half the experts with twice the tokens each, at the ratio of the grouped product's model."""
    state = spread_experts(experts(), 2)
    made = spread_experts(state, 4)
    ceilings = Ceilings(1e12, 1e10)
    slow = replace(state, ceilings=ceilings)
    old = next(s for s in state.work.shape if s is not None)
    bound = expert_ns(spread_experts(slow, 4)) / expert_ns(state)
    each = old.flop / 1e12

    assert {old.scaled(rows=2, batch=1 / 2)} == {s for s in made.work.shape if s is not None}
    assert old.flop == old.scaled(rows=2, batch=1 / 2).flop
    assert anchored(each, old, old.scaled(rows=2, batch=1 / 2), ceilings) / each == pytest.approx(bound, rel=1e-3)


def test_the_fullest_rank_sets_the_pace(experts: Callable[..., State]) -> None:
    """Loads given by the caller, or observed on the same ranks, stretch exchanges and experts alike."""
    tokens = [7.0, 1.0, 1.0, 1.0, *[0.5] * 12]
    even = spread_experts(experts(), 4)
    told = spread_experts(experts(), 4, tokens)
    uneven = spread_experts(experts(8, [[10.0, 2.0, 2.0, 2.0]]), 4)
    fullest = 10 / 4

    assert expert_ns(even) * fullest == pytest.approx(expert_ns(told), rel=0.05)
    assert expert_ns(told) == pytest.approx(expert_ns(uneven), rel=1e-6)
    assert 1 == even.health.guessed["expert loads taken as even, since the trace does not tell them"]
    assert spread_experts(experts(), 4, [1.0] * 16).error < even.error


def test_groups_of_the_same_experts_shrink_as_experts_spread(experts: Callable[..., State]) -> None:
    """Eight data ranks, four expert ranks: pairs hold the same experts; at eight none do, and each holds half as much."""
    state = spread_experts(experts(), 4)
    groups = (*state.graph.groups, GraphGroup("dp", 2, 4))
    items = list(state.graph.collectives)
    items[0] = GraphCollective("all_reduce", len(groups) - 1, 8192, 8192)
    state = replace(state, graph=replace(state.graph, groups=groups, collectives=tuple(items)))
    made = spread_experts(state, 8)

    assert (1, 8) == (made.graph.groups[-1].size, made.graph.groups[-1].stride)
    assert 4096 == made.graph.collectives[0].bytes_in
    assert (64, 8, 1) == (
        relayout(made, Layout(dp=64, ep=8)).graph.groups[0].size,
        relayout(made, Layout(dp=64, ep=8)).graph.groups[-1].size,
        relayout(made, Layout(dp=64, ep=8)).graph.groups[1].stride,
    )


def test_what_can_not_be_spread_is_refused(stateful: Stateful, experts: Callable[..., State]) -> None:
    """No experts, or a number of them that does not divide."""
    with pytest.raises(UsageError, match="no expert-parallel group to change"):
        spread_experts(stateful(2, 1, 8), 4)
    with pytest.raises(UsageError, match="ep=32 does not divide 16 experts"):
        spread_experts(experts(32), 32)
    with pytest.raises(UsageError, match="ep=4 does not divide 6 experts"):
        spread_experts(experts(), 4, [1.0] * 6)


@pytest.mark.parametrize(
    ("loads", "degree", "expected"), [([1, 1, 1, 1], 2, 1.0), ([3, 1, 0, 0], 2, 2.0), ([3, 1, 0, 0], 4, 3.0)]
)
def test_imbalance_is_the_fullest_over_the_mean(loads: list[float], degree: int, expected: float) -> None:
    """Experts lie in blocks; the fuller the first block, the worse. Fewer ranks add the loads of neighbours."""
    assert expected == of_experts(np.array(loads), degree)
    assert expected == imbalance(Routing(np.array([loads], float), "split sizes"), degree).value


def test_more_ranks_are_drawn_from_a_stated_seed_and_spread_further() -> None:
    """Loads of 4 ranks with some spread: on 16 the fullest stands out more, the same seed gives the same answer."""
    loads = Routing(np.array([[1.1, 0.9, 1.05, 0.95], [0.92, 1.08, 1.0, 1.0]]), "split sizes")
    four, sixteen = imbalance(loads, 4), imbalance(loads, 16)

    assert sixteen == imbalance(loads, 16) != imbalance(loads, 16, seed=7)
    assert 1 < four.value < sixteen.value and sixteen.drawn and not four.drawn
    assert sixteen.low < sixteen.value < sixteen.high
    assert 1.0 == imbalance(loads, 1).value


def test_drawn_loads_have_the_spread_asked_for() -> None:
    """Two ranks with 10 % between them: the fuller of two is half of 2/√π σ above the mean."""
    found = drawn(0.1, 2)

    assert (DRAWS,) == found.shape
    assert 1 + 0.1 / np.sqrt(np.pi) == pytest.approx(found.mean(), rel=0.01)
    assert (drawn(0.0, 8) == 1).all()


Recorder = Callable[..., Job]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """gloo(ranks, ep, experts, skew) → a real mixture of experts, recorded for two steps."""
    folder = tmp_path_factory.mktemp("gloo")

    def run(ranks: int, *arguments: int) -> Job:
        target = folder / "_".join(map(str, (ranks, *arguments)))
        if not target.exists():
            command = [sys.executable, "-P", "-m", "scaletrace.cli", "collect", "--out", str(target), "--start-step",
                       "4", "--steps", "2", "--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node",
                       str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
                       str(ROOT / "tests/extrapolate/jobs/experts.py"), *map(str, arguments), "2"]  # fmt: skip
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr
        return load(target)

    return run


def per_step(state: State) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
    """(size, stride) → what rank 0 issues in a step, sorted."""
    graph = state.graph
    steps = len(np.unique(graph.step[graph.step >= 0]))
    out: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for node in np.flatnonzero((graph.kind == int(NodeKind.ARRIVE)) & (graph.rank == 0) & (graph.step >= 0)).tolist():
        item = graph.collectives[int(graph.instance[node])]
        group = graph.groups[item.group]
        if group.size > 1:
            key = (group.size, max(1, group.stride))
            out.setdefault(key, []).append((item.kind, item.bytes_in, item.bytes_out))
    return {key: sorted(items)[::steps] for key, items in out.items()}


@pytest.mark.slow
def test_a_recorded_mixture_of_experts_is_spread_as_a_real_one_is(gloo: Recorder) -> None:
    """Four gloo ranks with experts in pairs, rewritten for fours, issue what four ranks with experts in fours issue."""
    pairs, fours = gloo(4, 2, 8, 0), gloo(4, 4, 8, 0)
    network = Network(Cluster.load("gloo_10g"))
    built = build(pairs)
    measured = measured_layout(built.graph, 4)
    state = open_state(built, replace(measured, mbs=1, seq=256), network)
    real = open_state(build(fours), Layout(dp=4, ep=4, mbs=1, seq=256), network)

    assert (4, 2) == (measured.data_ranks, measured.ep)
    assert per_step(real) == per_step(spread_experts(state, 4))
    assert per_step(state) == per_step(spread_experts(real, 2))


@pytest.mark.slow
def test_loads_are_read_from_what_real_ranks_received(gloo: Recorder) -> None:
    """64 of 256 tokens of every rank go to the first expert beside its share: seen on two ranks, merged from four."""
    job = gloo(4, 4, 8, 64)
    routing = observed(job)
    counts = np.bincount(np.where(np.arange(256) < 64, 0, np.arange(256) % 8), minlength=8)

    assert "bytes received" == routing.source
    for degree in (2, 4):
        assert of_experts(counts, degree) == pytest.approx(imbalance(routing, degree).value, rel=1e-6)


def test_loads_are_read_from_the_split_sizes_of_a_single_rank(tmp_path: Path) -> None:
    """One of four ranks: what it sends to each says how full each is; exchanges of counts say nothing."""
    events: list[dict[str, object]] = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 900}
    ]
    for number, (sent, size) in enumerate([([1, 1, 1, 1], 4), ([10, 20, 30, 40], 6400), ([25, 25, 25, 25], 6400)]):
        ts, launched = 100 * (number + 1), 7 + number
        common = {"Collective name": "all_to_allv", "In msg nelems": size, "Out msg nelems": size, "Group size": 4,
                  "dtype": "Float", "In split size": str(sent), "Out split size": "[25, 25, 25, 25]",
                  "Process Group Name": "3", "Process Group Description": "mesh_ep",
                  "Process Group Ranks": "[0, 1, 2, 3]", "Rank": 0, "External id": launched}  # fmt: skip
        events += [
            {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": ts, "dur": 30,
             "args": common},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": ts + 5, "dur": 5,
             "args": {"correlation": launched, "External id": launched}},
            {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "pid": 0,
             "tid": 20, "ts": ts + 20, "dur": 40, "args": {**common, "correlation": launched, "stream": 20, "device": 0}},
        ]  # fmt: skip
    told = {"rank": 0, "world_size": 4, "backend": "nccl", "pg_config": [
        {"pg_name": "3", "pg_desc": "mesh_ep", "pg_size": 4, "ranks": [0, 1, 2, 3]}]}  # fmt: skip
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events, "distributedInfo": told}))
    routing = observed(load(tmp_path))

    assert "split sizes" == routing.source
    assert [[10, 20, 30, 40], [25, 25, 25, 25]] == routing.loads.tolist()
    assert (1.6 + 1) / 2 == pytest.approx(imbalance(routing, 4).value)
    assert (1.4 + 1) / 2 == pytest.approx(imbalance(routing, 2).value)


def test_a_layout_may_leave_the_data_ranks_of_experts_open(experts: Callable[..., State]) -> None:
    """ep=8 alone takes the data ranks that a size gives; a single rewrite has to be told how many."""
    assert Layout(dp=64, ep=8) == scaled(Layout(), 64, Layout.parse("ep=8"))
    assert Layout(dp=8, ep=8) == scaled(Layout(), 8, Layout.parse("ep=8"))
    with pytest.raises(UsageError, match="ep=8 takes its ranks from the data axes; say how many, as dp=8"):
        relayout(experts(), Layout(ep=8))
    with pytest.raises(UsageError, match="must divide the data ranks"):
        scaled(Layout(), 12, Layout.parse("ep=8"))


def test_replicas_of_shards_are_not_the_groups_of_the_same_experts(experts: Callable[..., State]) -> None:
    """HSDP of 2 × 4 with experts over the 4: replicas stand as far apart as holders of the same experts, and stay."""
    state = spread_experts(experts(), 4)
    groups = (GraphGroup("fsdp", 4, 1), *state.graph.groups[1:], GraphGroup("dp", 2, 4))
    items = tuple(replace(item, group=0) if item.group == 0 else item for item in state.graph.collectives)
    graph = replace(state.graph, groups=groups, collectives=items)
    made = spread_experts(replace(state, graph=graph, layout=Layout(dp=2, fsdp=4, ep=4, mbs=4, seq=2048)), 2)

    assert (2, 4) == (made.graph.groups[-1].size, made.graph.groups[-1].stride)


@pytest.mark.parametrize(
    ("name", "size"),
    [("mesh_edp", 2), ("expert_data_parallel", 2), ("MOD_EP", 2), ("shared_expert", 1), ("sharedexpert dp", 1),
     ("SharedExperts", 1), ("mlp", 1)],
)  # fmt: skip
def test_a_group_of_one_rank_is_the_experts_own_only_by_its_name(
    experts: Callable[..., State], name: str, size: int
) -> None:
    """Ranks that hold the same experts grow as experts move together; every rank holds a shared expert. Names are guesses."""
    state = spread_experts(experts(4), 4)
    groups = (*state.graph.groups, GraphGroup("dp", 1, 1, 1, name))
    found = spread_experts(replace(state, graph=replace(state.graph, groups=groups)), 2)
    guess = f"group {name!r} taken for the experts' own by its name, as it has one rank"

    assert size == found.graph.groups[len(groups) - 1].size
    assert (size == 2) == (guess in found.health.guessed)
