"""FSDP's copies around gathers: what a rank copies in follows its shard, what it copies out the whole unit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scaletrace.extrapolate.base import prepare
from scaletrace.extrapolate.compute import compute_nodes
from scaletrace.extrapolate.point import FLOOR_NS, Options, stretch
from scaletrace.extrapolate.rewrite.data import sharded_elements
from scaletrace.extrapolate.shards import _first_list, shard_copies, units_of
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from tests.parse.traces import call, kernel, op, write


def test_copies_of_a_cpu_job_are_its_operators(samples: Path) -> None:
    """Every gather of the FSDP2 sample has a copy in and a copy out; a DDP job has none."""
    built = build(load(samples / "fsdp2_w2"))
    found = shard_copies(built)
    names = {built.graph.name_of(int(node)) for node in np.flatnonzero(found.into)}
    out = {built.graph.name_of(int(node)) for node in np.flatnonzero(found.whole)}

    assert any("all_gather_copy_in" in name for name in names)
    assert any("split_with_sizes_copy" in name for name in out)
    assert not (found.into & found.whole).any() and not (found.into & ~compute_nodes(built.graph)).any()
    other = shard_copies(build(load(samples / "ddp_w2")))
    assert not other.into.any() and not other.whole.any()


def test_kernels_are_told_by_the_operator_that_launched_them(tmp_path: Path) -> None:
    """Of three kernels with one name the one launched inside the copy in counts, and the one inside the copy out."""
    events = [
        op("ProfilerStep#0", 0, 1000, cat="user_annotation"),
        op("fsdp::all_gather_copy_in", 10, 20), call("cudaLaunchKernel", 12, 3, 1), kernel("copy", 40, 10, 1),
        op("aten::mm", 50, 20), call("cudaLaunchKernel", 52, 3, 2), kernel("copy", 80, 10, 2),
        op("fsdp::split_with_sizes_copy", 90, 20), call("cudaLaunchKernel", 92, 3, 3), kernel("copy", 120, 10, 3),
    ]  # fmt: skip
    built = build(load(write(tmp_path, [events])))
    found = shard_copies(built)
    starts = [built.measured.start_ns[np.flatnonzero(mask)].tolist() for mask in (found.into, found.whole)]

    assert [1, 1] == [len(each) for each in starts]
    assert 80_000 == starts[1][0] - starts[0][0]


def test_copies_in_shrink_and_copies_out_stay(samples: Path) -> None:
    """From 2 to 64 shards a copy in takes 1/32, but no less than a launch; a copy out of an unpadded unit stays."""
    base = prepare(build(load(samples / "fsdp2_w2")))
    done = stretch(base, 64, Options())[1]
    was, now = base.spread_ns, done.plain_ns
    into, whole = np.flatnonzero(base.copies.into), np.flatnonzero(base.copies.whole)

    expected = np.maximum(np.minimum(was[into], FLOOR_NS), was[into] / 32)
    assert now[into] == pytest.approx(expected, rel=0.2, abs=1)
    assert np.array_equal(was[whole], now[whole])


def test_there_and_back_by_rows_of_events(samples: Path) -> None:
    """A graph whose nodes were reversed in number still shows the same copies; without rows nothing is claimed."""
    built = build(load(samples / "fsdp2_w2"))
    found = shard_copies(built)
    find = found.by_row(built.graph)

    assert np.array_equal(found.into, find(built.graph).into) and np.array_equal(found.whole, find(built.graph).whole)
    blank = replace(built.graph, event=np.full(len(built.graph), -1, np.int32))
    assert not find(blank).into.any()


def test_units_are_read_from_the_scatters_and_pad_every_gather(samples: Path) -> None:
    """The FSDP2 sample has a unit of four matrices and one of an embedding; over 1,024 ranks each parameter's first
    dimension is padded to 1,024, to the byte, and copies out of the gather grow with it."""
    built = build(load(samples / "fsdp2_w2"))
    units = units_of(built.job)
    base = prepare(built)
    done = stretch(base, 1024, Options())[1]
    gathers = {item.bytes_out for item in done.graph.collectives if item.kind == "all_gather"}
    whole = np.flatnonzero(base.copies.whole & (base.spread_ns > 50_000))

    assert {((256, 192),), ((576, 192), (192, 192), (768, 192), (192, 768))} == set(units)
    assert {4 * sharded_elements(unit, 1024) for unit in units} == gathers
    assert (done.plain_ns[whole] > 1.5 * base.spread_ns[whole]).all()
    assert () == units_of(load(samples / "ddp_w2"))


@pytest.mark.parametrize("text", ["", "[]", "[1]", "[[]]", "[[2,3]]", '["x"]', "[[[]]]", '[[["a"]]]', "{}"])
def test_what_is_no_list_of_tensors_is_no_unit(text: str) -> None:
    """Damaged or foreign shapes claim nothing."""
    assert () == _first_list(text)


def test_marks_follow_nodes() -> None:
    """New nodes copy nothing."""
    built = build(load(Path(__file__).parents[2] / "traces" / "samples" / "fsdp2_w1"))
    found = shard_copies(built)
    origin = np.concatenate([np.arange(len(built.graph)), [-1]]).astype(np.int32)
    moved = found.moved(origin)

    assert not moved.into[-1] and np.array_equal(found.into, moved.into[:-1])
