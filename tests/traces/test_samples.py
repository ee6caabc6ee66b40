"""The captures that ship: complete, of the described shape, and free of what identifies a machine."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.estimate import Network
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.relayout import relayout
from scaletrace.extrapolate.rewrite.state import open_state
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from scaletrace.traces.make_samples import SAMPLES, Sample, scrub

EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)


def read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def spans(trace: dict[str, Any], pattern: str) -> list[dict[str, Any]]:
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and re.match(pattern, e["name"])]
    return sorted(found, key=lambda event: event["ts"])


@EVERY
def test_each_sample_has_a_trace_and_a_sidecar_of_every_rank(samples: Path, sample: Sample) -> None:
    """A sample of N ranks is 2N files, named by rank."""
    expected = {f"{prefix}rank{rank}.json.gz" for rank in range(sample.ranks) for prefix in ("", "fr_")}
    assert expected == {path.name for path in (samples / sample.name).iterdir()}


@EVERY
def test_each_trace_says_who_it_is_and_holds_three_steps(samples: Path, sample: Sample) -> None:
    """The header gives rank and world size, and the window is the three steps after the four warm ones."""
    for rank in range(sample.ranks):
        trace = read(samples / sample.name / f"rank{rank}.json.gz")
        info = trace["distributedInfo"]
        assert (rank, sample.ranks, "gloo") == (info["rank"], info["world_size"], info["backend"])
        expected = ["ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"]
        assert expected == [step["name"] for step in spans(trace, "ProfilerStep")]


@EVERY
def test_all_ranks_issue_the_same_collectives(samples: Path, sample: Sample) -> None:
    """Ranks of a data-parallel job call the same collectives in the same order: 2 a step in DDP, 13 of four
    layers, 9 in FSDP2."""
    orders = []
    for rank in range(sample.ranks):
        trace = read(samples / sample.name / f"rank{rank}.json.gz")
        orders.append([event["name"] for event in spans(trace, "c10d::")])
    of_ddp = 13 if sample.layers == 4 else 2
    per_step = of_ddp if sample.strategy == "ddp" else 9 if sample.ranks > 1 else 0
    assert [orders[0]] * sample.ranks == orders
    assert 3 * per_step == len(orders[0])


@EVERY
def test_every_recorded_collective_is_in_the_sidecar(samples: Path, sample: Sample) -> None:
    """Each c10d operation of the trace holds the creation time of exactly one flight-recorder entry."""
    for rank in range(sample.ranks):
        trace = read(samples / sample.name / f"rank{rank}.json.gz")
        entries = read(samples / sample.name / f"fr_rank{rank}.json.gz")["entries"]
        created_ns = [entry["time_created_ns"] for entry in entries]
        base_ns = trace["baseTimeNanoseconds"]
        issued = [(base_ns + round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in spans(trace, "c10d::")]
        inside = [sum(start <= at <= start + dur for at in created_ns) for start, dur in issued]
        expected = [1] * len(issued)
        assert expected == inside


def test_the_straggler_makes_the_others_wait(samples: Path) -> None:
    """In `ddp_straggler_w4` the last rank enters each step's first all-reduce tens of ms after the others."""
    starts = []
    for rank in range(4):
        trace = read(samples / "ddp_straggler_w4" / f"rank{rank}.json.gz")
        first = spans(trace, "c10d::allreduce_")[::2]
        starts.append([trace["baseTimeNanoseconds"] + round(event["ts"] * 1000) for event in first])
    late_ms = [(last - max(others)) / 1e6 for *others, last in zip(*starts, strict=True)]
    expected = [True] * 3
    assert expected == [late > 25 for late in late_ms]


def test_the_layers_of_a_sample_can_be_rewritten(samples: Path) -> None:
    """From `ddp_layers_w2` four layers are found, and depth, a pipeline, tensor ranks and another width can be asked for."""
    built = build(load(samples / "ddp_layers_w2"))
    state = open_state(built, Layout(dp=2), Network(Cluster.load("gloo_10g")))
    asked = ("layers=8", "pp=4,mbs=1,microbatches=4", "tp=4", "hidden=512", "pp=2,tp=2,mbs=2,microbatches=2")
    made = [relayout(state, Layout.parse(f"dp=2,{text}")).layout for text in asked]

    assert 4 == state.anatomy.layers
    assert [8, 0, 0, 0, 0] == [layout.layers for layout in made]
    assert [(1, 1), (4, 1), (1, 4), (1, 1), (2, 2)] == [(layout.pp, layout.tp) for layout in made]


def test_samples_name_no_machine(samples: Path) -> None:
    """Neither a host name nor a path of the recording machine is left in any file."""
    text = b"".join(gzip.decompress(path.read_bytes()) for path in sorted(samples.rglob("*.gz")))
    hosts, paths = {b"sample-host"}, []
    assert hosts == set(re.findall(rb'"host_name":"([^"]*)"', text))
    assert paths == re.findall(rb'"/(?:tmp|home|root|work|usr)[^"]*"', text)


def test_scrub_touches_only_what_it_says() -> None:
    """Host name, path, white space and Ev Idx go; numbers and names stay as they were written."""
    before = b"""{
  "host_name": "box-17", "displayTimeUnit": "ms",
  "traceName": "\\/tmp\\/x.json", "baseTimeNanoseconds": 1790857026000000000,
  "traceEvents": [
  {
    "ph": "X", "name": "a, \\"b\\": 1", "ts": 5200320341264.360, "dur": 0.100,
    "args": {
      "External id": 34,"Ev Idx": 36
    }
  }
]}"""
    expected = (
        b'{"host_name":"sample-host","displayTimeUnit":"ms","traceName":"rank0.json.gz",'
        b'"baseTimeNanoseconds":1790857026000000000,"traceEvents":[{"ph":"X","name":"a, \\"b\\": 1",'
        b'"ts":5200320341264.360,"dur":0.100,"args":{"External id":34}}]}'
    )
    assert expected == scrub(before, "rank0.json.gz")
