"""Stretched graphs against PyTorch's own fake process group at the target size: kinds, group sizes and elements agree."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from scaletrace.extrapolate.layout import Layout, measured_layout
from scaletrace.extrapolate.rewrite.data import resize
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from tests.collect.conftest import JOB, collected, torchrun
from tests.collect.test_fake_world import census

WIDTH, VOCABULARY = 192, 256
SIZE = ["--layers", "1", "--width", str(WIDTH), "--sequence", "64", "--batch", "4", "--steps", "7"]
UNITS = [
    [(VOCABULARY, WIDTH)],
    [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)],
]
"""Parameter shapes of what the job shards: embedding and head alike, and a block."""
FLOAT_BYTES = 4
Structure = Counter[tuple[str, int, int, int]]


def fake(out: Path, strategy: str, world: int) -> Structure:
    """What rank 0 issues a step in a fake world: (kind, group size, bytes in, bytes out)."""
    options = ["--fake-world", str(world), "--rank", "0", "--start-step", "4", "--steps", "1"]
    ran = collected(out, options, [sys.executable, str(JOB), "--strategy", strategy, *SIZE])
    assert 0 == ran.returncode, ran.stderr
    found: Structure = Counter()
    for (kind, members, elements_in, elements_out), count in census(out).items():
        found[kind, len(members), FLOAT_BYTES * elements_in, FLOAT_BYTES * elements_out] += count
    return found


def stretched(capture: Path, layout: Layout, rank: int = 0) -> Structure:
    """What one rank issues a step of the measured job after the rewrite to `layout`."""
    graph = build(load(capture)).graph
    ranks = len({int(r) for r in graph.rank if r >= 0})
    graph = resize(graph, measured_layout(graph, ranks), layout, UNITS)
    steps = len({int(step) for step in graph.step if step >= 0})
    mine = {int(i) for i, r in zip(graph.instance, graph.rank, strict=True) if i >= 0 and r == rank}
    found: Structure = Counter()
    for index in mine:
        item = graph.collectives[index]
        found[item.kind, graph.groups[item.group].size, item.bytes_in, item.bytes_out] += 1
    assert all(count % steps == 0 for count in found.values())
    return Counter({key: count // steps for key, count in found.items()})


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_stretched_fsdp_is_what_a_fake_world_issues(tmp_path: Path, samples: Path, world: int) -> None:
    """FSDP2 measured on 4 ranks, at 8, 64 and 1,024: every gather and scatter with FSDP2's padding."""
    assert fake(tmp_path, "fsdp2", world) == stretched(samples / "fsdp2_w4", Layout(fsdp=world))


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_stretched_ddp_is_what_a_fake_world_issues(tmp_path: Path, samples: Path, world: int) -> None:
    """DDP measured on 4 ranks: the same buckets over more ranks."""
    assert fake(tmp_path, "ddp", world) == stretched(samples / "ddp_w4", Layout(dp=world))


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_stretched_hsdp_is_what_a_fake_world_issues(tmp_path: Path, world: int) -> None:
    """HSDP measured on 2 x 2 ranks: gathers stay in the pair, all-reduces of shards go over all replicas."""
    command = torchrun(4, str(JOB), "--strategy", "hsdp", *SIZE)
    ran = collected(tmp_path / "real", ["--start-step", "4", "--steps", "2"], command)
    assert 0 == ran.returncode, ran.stderr

    assert fake(tmp_path / "fake", "hsdp", world) == stretched(tmp_path / "real", Layout(dp=world // 2, fsdp=2))
