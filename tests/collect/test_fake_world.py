"""One process under a fake world issues the collectives that the real job issues: kinds, groups and element counts."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from scaletrace.collect.fake_world import KINDS, Issued, collective_operations, entry
from tests.collect.conftest import JOB, collected, torchrun

WIDTH, VOCABULARY, TOKENS = 128, 256, 4 * 64
STEP = ["--steps", "7", "--layers", "1"]
Census = Counter[tuple[str, tuple[int, ...], int, int]]


def census(capture: Path, rank: int = 0) -> Census:
    """How often `rank` issues each (kind, members, elements in, elements out) in a step.

    Kind and sizes are those of the c10d operations of the trace, the group is that of the sidecar's entry for it.
    """
    (path,) = capture.glob(f"rank{rank:05d}_of*.json.zst")
    trace = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))
    entries = json.loads(gzip.decompress((capture / f"fr_rank{rank:05d}.json.gz").read_bytes()))["entries"]
    members = {group["pg_name"]: tuple(group["ranks"]) for group in trace["distributedInfo"]["pg_config"]}
    found = Census()
    for event in trace["traceEvents"]:
        name = event.get("name", "").removeprefix("c10d::")
        if event.get("ph") == "X" and event["name"].startswith("c10d::") and name in KINDS:
            start_ns = trace["baseTimeNanoseconds"] + round(event["ts"] * 1000)
            end_ns = start_ns + round(event["dur"] * 1000)
            (group,) = [e["process_group"][0] for e in entries if start_ns <= e["time_created_ns"] <= end_ns]
            sizes = [math.prod(dims) for dims in event["args"]["Input Dims"] if dims and isinstance(dims[0], int)]
            if name == "allreduce_":
                sizes = [math.prod(event["args"]["Input Dims"][0][0])] * 2
            found[KINDS[name], members[group], sizes[1], sizes[0]] += 1
    return found


def fake(out: Path, world: int, strategy: str, rank: int = 0) -> Census:
    options = ["--fake-world", str(world), "--rank", str(rank), "--start-step", "4", "--steps", "1"]
    ran = collected(out, options, [sys.executable, str(JOB), "--strategy", strategy, *STEP])
    assert (0, "") == (ran.returncode, ran.stderr)
    return census(out, rank)


def real(out: Path, world: int, strategy: str, rank: int = 0) -> Census:
    command = torchrun(world, str(JOB), "--strategy", strategy, *STEP)
    assert 0 == collected(out, ["--start-step", "4", "--steps", "1"], command).returncode
    return census(out, rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world"), [("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("tp", 2), ("tp", 4), ("ddp", 2)]
)
def test_the_fake_world_is_the_real_one(tmp_path: Path, strategy: str, world: int) -> None:
    """Where a real run exists, the fake one issues the same collectives on the same members with the same elements."""
    last = world - 1
    expected = real(tmp_path / "real", world, strategy, last)
    assert expected.total() > 0
    assert expected == fake(tmp_path / "fake", world, strategy, last)


def sharded_elements(world: int, tp: int = 1) -> dict[str, int]:
    """Elements of one rank's shard of embedding, block and head under FSDP2: rows are dealt out, the last ones padded."""

    def shard(rows: int, columns: int) -> int:
        return -(-rows // world) * columns

    block = shard(3 * WIDTH // tp, WIDTH) + shard(WIDTH, WIDTH // tp)
    block += shard(4 * WIDTH // tp, WIDTH) + shard(WIDTH, 4 * WIDTH // tp)
    return {"embedding": shard(VOCABULARY, WIDTH), "block": block, "head": shard(VOCABULARY, WIDTH)}


def sharded_census(members: tuple[int, ...], tp: int = 1) -> Census:
    """What FSDP2 issues a step: gather before forward and before backward, scatter the gradients after."""
    world, found = len(members), Census()
    for size in sharded_elements(world, tp).values():
        found["all_gather", members, size, world * size] += 2
        found["reduce_scatter", members, world * size, size] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_fully_sharded_at_any_size(tmp_path: Path, world: int) -> None:
    """FSDP2 over N ranks: each unit's collectives over all N, with the padded shard of one rank."""
    expected = sharded_census(tuple(range(world)))
    assert expected == fake(tmp_path, world, "fsdp2")


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_hybrid_sharding_at_any_size(tmp_path: Path, world: int) -> None:
    """HSDP of N/2 x 2: collectives of the shard group of 2, and an all-reduce of each shard over N/2 replicas."""
    expected = sharded_census((0, 1))
    replicas = tuple(range(0, world, 2))
    for size in sharded_elements(2).values():
        expected["all_reduce", replicas, size, size] += 1
    assert expected == fake(tmp_path, world, "hsdp")


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_tensor_parallelism_at_any_size(tmp_path: Path, world: int) -> None:
    """FSDP2 of N/2 x TP of 2: four all-reduces of the activations in the pair, shards of half matrices in the rest."""
    members = tuple(range(0, world, 2))
    expected = Census()
    half, whole = sharded_elements(len(members), 2), sharded_elements(len(members))
    for size in (whole["embedding"], half["block"], whole["head"]):
        expected["all_gather", members, size, len(members) * size] += 2
        expected["reduce_scatter", members, len(members) * size, size] += 1
    activations = TOKENS * WIDTH
    expected["all_reduce", (0, 1), activations, activations] += 4
    assert expected == fake(tmp_path, world, "tp")


def test_operations_of_a_trace_in_order_of_time() -> None:
    """Only c10d operations that start a collective count, by the time of their start."""
    document = {
        "baseTimeNanoseconds": 1000,
        "traceEvents": [
            {"ph": "X", "name": "c10d::allreduce_", "ts": 2.5, "dur": 1},
            {"ph": "X", "name": "c10d::_allgather_base_", "ts": 0.001, "dur": 1},
            {"ph": "X", "name": "_c10d_functional::all_reduce", "ts": 2.4, "dur": 1},
            {"ph": "X", "name": "c10d::something_else", "ts": 1, "dur": 1},
            {"ph": "M", "name": "c10d::allreduce_"},
        ],
    }
    expected = [("all_gather", 1001), ("all_reduce", 3500)]
    assert expected == collective_operations(document)


def test_an_entry_reads_like_the_flight_recorders() -> None:
    """The keys that a reader of PyTorch's dumps asks for are there, and unknown times are null."""
    one = Issued("all_gather", "3", "mesh_tp", (0, 1), [[4]], [[8]], "float32")
    made = entry(7, one, 2, 99)
    expected = {"process_group": ["3", "mesh_tp"], "collective_seq_id": 2, "time_created_ns": 99, "is_p2p": False}
    assert expected == {key: made[key] for key in expected}
    assert made["time_discovered_started_ns"] is None
    json.dumps(made)
