"""What-if rules change what they name, and the replay says what that is worth."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from scaletrace.errors import UsageError
from scaletrace.parse.graph import EdgeKind, Graph, GraphCollective, GraphGroup, NodeKind
from scaletrace.replay.contention import fit_slowdown, overlapped_share
from scaletrace.replay.engine import replay
from scaletrace.replay.rules import Action, Rule, parse_rule
from scaletrace.replay.whatif import latencies, whatif
from tests.replay.graphs import graph_of, two_ranks


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("gemm*=0.5", Rule("gemm*=0.5", Action.SCALE, "gemm*", None, 0.5)),
        ("comm=3x", Rule("comm=3x", Action.SCALE, "comm", None, 3.0)),
        ("rank3.gemm=1.5", Rule("rank3.gemm=1.5", Action.SCALE, "gemm", 3, 1.5)),
        ("host=-5us", Rule("host=-5us", Action.ADD, "host", None, 1.0, -5000)),
        ("bandwidth.nic=2x", Rule("bandwidth.nic=2x", Action.BANDWIDTH, "nic", None, 2.0)),
        ("latency=0.5", Rule("latency=0.5", Action.LATENCY, "", None, 0.5)),
        ("rank3.delay=20ms", Rule("rank3.delay=20ms", Action.DELAY, "", 3, 1.0, 20_000_000)),
        ("rank3.delay=none", Rule("rank3.delay=none", Action.PEERS, "", 3)),
        ("overlap=ideal", Rule("overlap=ideal", Action.IDEAL_OVERLAP)),
        ("drop=all_reduce", Rule("drop=all_reduce", Action.DROP, "all_reduce")),
    ],
)
def test_rule_texts(text: str, rule: Rule) -> None:
    """Every form of a rule means what the help says."""
    assert rule == parse_rule(text)


@pytest.mark.parametrize(
    "text",
    [
        *("gemm", "gemm=", "=2", "gemm=fast", "overlap=some", "delay=none", "delay=2", "gemm=-1", "gemm=1e999"),
        *("rank0.delay=1e30s", "rank0.delay=-1e30s", "gemm=1e999us", "host=2e7s", "bandwidth.=2x"),
    ],
)
def test_wrong_rules_say_what_is_wrong(text: str) -> None:
    """A rule that means nothing is refused with its own text."""
    with pytest.raises(UsageError, match=text.replace("*", r"\*")):
        parse_rule(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bandwith=2x", "did you mean bandwidth?"),
        ("rank1.latncy.tp=2", "did you mean latency.tp?"),
        ("rank1.dely=none", "did you mean delay?"),
        ("comput=2", "did you mean compute?"),
        ("drop=allreduce", "did you mean all_reduce?"),
        ("gmm=2", "did you mean gemm?"),
    ],
)
def test_a_word_that_is_nearly_known_is_suggested(text: str, said: str) -> None:
    """Words of the rules, kinds of collectives and names of the trace; a stranger gets no suggestion."""
    graph = two_ranks(late_ns=50)
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        whatif(graph, [text])
    with pytest.raises(UsageError) as stranger:
        whatif(graph, ["xyzzy=2"])
    assert "did you mean" not in str(stranger.value)


@pytest.mark.parametrize(
    ("rule", "change_ns"),
    [
        ("gemm=0.5", -75),
        ("compute=2", 180),
        ("comm=3", 80),
        ("host=0", -10),
        ("rank1.delay=20ns", 20),
        ("rank0.delay=20ns", 0),
        ("rank1.delay=none", -50),
        ("drop=all_reduce", -40),
        ("add=+10ns", 10),
        ("bandwidth=2x", -20),
        ("bandwidth.dp=2x", -20),
    ],
)
def test_change_of_the_makespan(rule: str, change_ns: int) -> None:
    """Rank 1 is 50 ns late to an all-reduce of 40 ns: each rule moves the end by what it should."""
    assert change_ns == whatif(two_ranks(late_ns=50), [rule]).change_ns


def test_ideal_overlap_hides_all_it_can() -> None:
    """Kernels no longer wait for the transfer, whose own time still bounds the end."""
    found = whatif(two_ranks(late_ns=50), ["overlap=ideal"])

    assert 207 == found.after.makespan_ns + 1
    assert 237 == found.before.makespan_ns


@pytest.mark.parametrize(
    "rule", ["nothing_here=2", "rank7.gemm=2", "drop=broadcast", "bandwidth.tp=2x", "bandwidth.nic=2x", "layer:x=2"]
)
def test_rules_that_select_nothing_are_refused(rule: str) -> None:
    """A rule without effect is an error of the caller, never a silent zero."""
    with pytest.raises(UsageError):
        whatif(two_ranks(), [rule])


@pytest.mark.parametrize("rule", ["gemm=1e300", "gemm=1e18", "bandwidth=1e-300x", "latency=1e300"])
def test_rules_beyond_64_bits_are_refused(rule: str) -> None:
    """A change that no clock can hold is wrong usage with a reason, not an overflow."""
    if rule.startswith("latency"):
        nodes = [("nccl", NodeKind.TRANSFER, 0, 0, dur) for dur in (10, 30)]
        graph = graph_of(
            nodes,
            [(0, 1, 0, EdgeKind.STREAM)],
            instance={0: 0, 1: 1},
            groups=[GraphGroup("dp", 2, 1, 2)],
            collectives=[GraphCollective("all_reduce", 0, size, size) for size in (0, 1000)],
        )
    else:
        graph = two_ranks()

    with pytest.raises(UsageError, match="years"):
        whatif(graph, [rule])


def test_ideal_overlap_is_called_a_bound() -> None:
    """What real dependencies leave of it is less: the answer says so; a prediction is not called one."""
    bound, plain = (whatif(two_ranks(), [rule]) for rule in ("overlap=ideal", "gemm=0.5"))

    assert (True, False) == (bound.is_bound, plain.is_bound)
    assert ["upper bound" in note for note in bound.notes] == [True]
    assert [] == plain.notes


def test_rules_apply_in_order() -> None:
    """Two factors multiply."""
    assert (
        whatif(two_ranks(), ["gemm=0.25"]).after.makespan_ns
        == whatif(two_ranks(), ["gemm=0.5", "gemm=0.5"]).after.makespan_ns
    )


def test_latency_is_what_bytes_do_not_explain() -> None:
    """Payloads of 0, 1000 and 2000 bytes in 10, 30 and 50 ns: 10 ns latency, and twice the bandwidth halves the rest."""
    nodes = [("nccl", NodeKind.TRANSFER, 0, 0, dur) for dur in (10, 30, 50)]
    graph = graph_of(
        nodes,
        [(0, 1, 0, EdgeKind.STREAM), (1, 2, 0, EdgeKind.STREAM)],
        release={0: 0},
        instance={0: 0, 1: 1, 2: 2},
        groups=[GraphGroup("dp", 2, 1, 2)],
        collectives=[GraphCollective("all_reduce", 0, size, size) for size in (0, 1000, 2000)],
    )

    assert [10, 10, 10] == latencies(graph, []).tolist()
    assert 60 == whatif(graph, ["bandwidth.nic=2x"]).after.makespan_ns
    assert 75 == whatif(graph, ["latency=0.5"]).after.makespan_ns


def test_one_payload_is_noted_in_the_singular() -> None:
    """A kind of collective with a single size says nothing of latency, and the note counts it as one."""
    graph = graph_of(
        [("nccl", NodeKind.TRANSFER, 0, 0, 10)],
        [],
        release={0: 0},
        instance={0: 0},
        groups=[GraphGroup("dp", 2, 1, 2)],
        collectives=[GraphCollective("all_reduce", 0, 8, 8)],
    )
    notes: list[str] = []

    assert [0] == latencies(graph, notes).tolist()
    assert ["1 kind of collective has one payload size: its whole transfer counts as bandwidth"] == notes


def _contended() -> Graph:
    """Five kernels of 100 alone, five of 150 beside one long transfer, which takes half as long again."""
    nodes = [("gemm", NodeKind.KERNEL, 0, 0, 100) for _ in range(5)] + [
        ("gemm", NodeKind.KERNEL, 0, 0, 150) for _ in range(5)
    ]
    nodes.append(("nccl", NodeKind.TRANSFER, 0, 1, 750))
    edges = [(at, at + 1, 0, EdgeKind.STREAM) for at in range(9)]
    return graph_of(nodes, edges, release={0: 0, 10: 500})


def test_slowdown_is_measured_from_both_kinds_of_samples() -> None:
    """Median beside over median alone is 1.5; the overlapped share is 0 or 1."""
    timeline = replay(_contended())

    assert [0.0] * 5 + [1.0] * 5 + [0.0] == overlapped_share(timeline).tolist()
    assert {"gemm": 1.5} == fit_slowdown(timeline).measured


def test_slowdown_of_a_class_serves_its_other_kernels() -> None:
    """A matmul without samples takes the factor of the measured matmul, 1.5, not the pooled one of both names, 1.25."""
    names = ["ampere_sgemm_64x64_nn", *["volta_sgemm_128x64_tn"] * 5, *["vectorized_elementwise_kernel"] * 5]
    beside = [("volta_sgemm_128x64_tn", 150)] * 5 + [("vectorized_elementwise_kernel", 100)] * 5
    nodes = [(name, NodeKind.KERNEL, 0, 0, 100) for name in names]
    nodes += [(name, NodeKind.KERNEL, 0, 0, dur) for name, dur in beside]
    nodes.append(("nccl", NodeKind.TRANSFER, 0, 1, 1250))
    edges = [(at, at + 1, 0, EdgeKind.STREAM) for at in range(20)]

    found = fit_slowdown(replay(graph_of(nodes, edges, release={0: 0, 21: 1100})))

    assert {"volta_sgemm_128x64_tn": 1.5, "vectorized_elementwise_kernel": 1.0} == found.measured
    assert (1.25, 1.5) == (found.pooled, found.factor[0])


def test_slowdown_goes_with_the_overlap() -> None:
    """Without the transfer the slowed kernels run at their own pace: 10 × 100 instead of 5 × 100 + 5 × 150."""
    plain, fitted = (whatif(_contended(), ["nccl=0"], slowdown=on) for on in (False, True))

    assert 1250 == plain.after.makespan_ns
    assert 1000 == fitted.after.makespan_ns


def test_slowdown_leaves_the_measured_step_alone() -> None:
    """No change, no difference: taken out before and put back after."""
    assert 0 == whatif(_contended(), ["all=1"], slowdown=True).change_ns


def test_layers_can_be_scaled() -> None:
    """`layer:PATTERN` selects by module path."""
    graph = dataclasses.replace(
        two_ranks(), layer=np.array([-1, -1, 0, 0, -1, -1, -1, -1, 1, 1], np.int32), layers=("blocks.0", "blocks.1")
    )

    assert -50 == whatif(graph, ["layer:blocks.0=0.5"]).change_ns
