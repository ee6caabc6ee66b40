"""Whole jobs: what must match in the public ones, manifests, missing ranks, errors, processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scaletrace.errors import InputError, UsageError
from scaletrace.parse.load import load
from scaletrace.parse.manifest import bounds_in, cpus_in, expected_ranks, groups_in, hosts_in
from tests.parse.jobs import host, loaded, nccl, write


def counts(folder: Path) -> tuple[int, int]:
    """(instances that hold all ranks, instances)."""
    c = load(folder).collectives
    return len(np.unique(c.instance[c.matched])), len(np.unique(c.instance))


@pytest.mark.parametrize(
    ("name", "matched", "of"),
    [
        ("nanogpt8_h100", 76, 84),
        ("dlrm8_v100", 8, 8),
        ("megatron_tp2_v100", 13, 13),
        ("torchrec2_v100", 12, 12),
        ("torchrec4_v100-sst_long_a2a_optimizer_2-run1", 31, 33),
        ("torchrec4_v100-sst_long_a2a_optimizer_5-run1", 30, 32),
        ("torchrec4_v100-sst_long_a2a_optimizer_5_qcomm-run1", 30, 31),
        ("lightllm8_h200-logs-run1", 116, 116),
        ("lightllm8_h200-logs_decode_overlap-run1", 464, 464),
    ],
)
def test_public_jobs_match(shared_data: Path, name: str, matched: int, of: int) -> None:
    """Every collective inside the common window of the ranks is matched on all of them."""
    job = load(shared_data / "traces" / name)

    assert (matched, of) == counts(shared_data / "traces" / name)
    assert "members of collectives without all their partners" not in job.health.unmatched


def test_the_h100_ranks_end_together(shared_data: Path) -> None:
    """What alignment leaves of the spread of ends over eight ranks is at most 20 us in the median."""
    assert np.median(load(shared_data / "traces" / "nanogpt8_h100").residual_ns) <= 20_000


def test_the_offset_of_torchrec_is_found(shared_data: Path) -> None:
    """The clock of rank 1 is 31 us behind in every collective."""
    assert -31 == round(load(shared_data / "traces" / "torchrec2_v100").clocks[1].offset_ns / 1000)


@pytest.mark.parametrize("name", ["ddp_w2", "ddp_w8", "fsdp2_w4", "hsdp_w4", "tp_w4", "tp_dp_w4"])
def test_gloo_jobs_know_group_and_sequence(shared_data: Path, name: str) -> None:
    """With sidecars every collective has its group and number, and all of them match."""
    job = load(shared_data / "gloo" / name)
    c = job.collectives

    assert c.matched.all()
    assert (c.group >= 0).all()
    assert (c.seq >= 0).all()
    assert "seq" == c.rung
    assert (c.bytes_in > 0).all()


def test_gloo_groups_carry_the_names_of_their_mesh(shared_data: Path) -> None:
    """HSDP shards over neighbours and replicates across them."""
    used = {int(group) for group in load(shared_data / "gloo" / "hsdp_w4").collectives.group}
    groups = [group for group in load(shared_data / "gloo" / "hsdp_w4").groups if group.id in used]

    assert {("dp", (0, 2)), ("dp", (1, 3)), ("fsdp", (0, 1)), ("fsdp", (2, 3))} == {(g.axis, g.members) for g in groups}


def test_a_missing_rank_is_told_and_not_guessed(tmp_path: Path) -> None:
    """Two of three ranks match among themselves; the third stands in missing_ranks."""
    more = {"Group size": 3, "Process Group Ranks": "[0, 1, 2]"}
    ranks = {r: nccl("allreduce", 0, 10, 30, 1, Seq=1, **more) for r in (0, 2)}
    job = loaded(tmp_path, ranks, world=3)

    assert (1,) == job.missing_ranks
    assert job.collectives.matched.all()
    assert any("2 of 3 ranks present (missing: 1)" in note for note in job.health.notes)


MANIFEST = {
    "schema": "scaletrace.capture/1",
    "ranks": {"expected": 4, "present": [0, 1]},
    "groups": [{"name": "3", "description": "mesh_tp", "start": 0, "stride": 1, "size": 2}],
    "hosts": [{"name": "a", "boot_id": "x", "ranks": [0]}, {"name": "b", "boot_id": "y", "ranks": [1]}],
    "clocks": [
        {"rank": 1, "when": "start", "offset_ns": 500, "low_ns": 400, "high_ns": 600},
        {"rank": 1, "when": "end", "offset_ns": 520, "low_ns": 450, "high_ns": 590},
    ],
}


def test_a_manifest_adds_what_traces_do_not_know(tmp_path: Path) -> None:
    """Expected ranks, groups, hosts and measured clocks come from it."""
    write(tmp_path, {r: [host("aten::mm", 1, 1)] for r in (0, 1)}, groups=[])
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    job = load(tmp_path)

    assert (2, 3) == job.missing_ranks
    assert ("mesh_tp", (0, 1), "tp") in [(group.description, group.members, group.axis) for group in job.groups]
    assert (520, "middle of the bounds") == (job.clocks[1].offset_ns, job.clocks[1].source)


def test_manifest_forms() -> None:
    """Lists, counts and nonsense; a reference that no rank present has."""
    assert (0, 1, 2, 3) == expected_ranks(MANIFEST)
    assert (0, 5) == expected_ranks({"ranks": {"expected": [0, 5]}})
    assert () == expected_ranks({"ranks": "all"})
    assert {0: "x", 1: "y"} == hosts_in(MANIFEST)
    assert {0: 4, 2: 4} == cpus_in(
        {"hosts": [{"cpus": 4, "ranks": [0, 2]}, {"cpus": "many", "ranks": [1]}, {"ranks": [3]}]}
    )
    assert [(0, 1)] == [said.members for said in groups_in(MANIFEST)]
    assert [] == groups_in({"groups": [3, {"name": "x"}]})
    both = {"clocks": [{"rank": 2, "low_ns": 0, "high_ns": 10}, {"rank": 3, "low_ns": 100, "high_ns": 130}]}
    assert [(1, 0, 90, 130)] == [(b.rank, b.to, b.low_ns, b.high_ns) for b in bounds_in(both, [2, 3])]


def test_two_files_of_one_rank_without_a_way_to_tell_are_refused(tmp_path: Path) -> None:
    """The error says which files and how to go on."""
    for name in ("node_1.1708722576381804001.pt.trace.json", "node_2.1708722576381804002.pt.trace.json"):
        (tmp_path / name).write_text(json.dumps({"schemaVersion": 1, "traceEvents": [host("aten::mm", 1, 1)]}))
    with pytest.raises(InputError, match=r"node_1.*--rank-regex"):
        load(tmp_path)


def test_one_unreadable_file_costs_its_rank_only(tmp_path: Path) -> None:
    """The job loads without it and says why; strict refuses."""
    write(tmp_path, {r: nccl("allreduce", 0, 10, 30, 1, Seq=1) for r in (0, 1)})
    (tmp_path / "rank1.json").write_text((tmp_path / "rank1.json").read_text() * 2)
    job = load(tmp_path)

    assert (1,) == job.missing_ranks
    assert job.health.dropped["files that can't be read"] == 1
    assert any("rank1.json" in note for note in job.health.notes)
    with pytest.raises(InputError, match=r"rank1\.json"):
        load(tmp_path, strict=True)
    with pytest.raises(InputError, match=r"rank1\.json"):
        load(tmp_path / "rank1.json")


def test_broken_patterns_are_wrong_usage(tmp_path: Path) -> None:
    """The option and what is wrong with it."""
    for option in ({"patterns": ["("]}, {"step_annotation": "("}):
        with pytest.raises(UsageError, match=next(iter(option))):
            load(tmp_path, **option)  # type: ignore[arg-type]


def test_many_threads_read_what_one_reads(tmp_path: Path) -> None:
    """With two workers, and with tables spooled to disk, the job is the same."""
    write(tmp_path, {r: nccl("allreduce", 0, 10, 30, 1, Seq=1) for r in (0, 1)})
    one, two = load(tmp_path, workers=1), load(tmp_path, workers=2)
    spooled = load(tmp_path, spool=tmp_path / "spool")

    assert one.collectives.to_frame().equals(two.collectives.to_frame())
    assert one.collectives.to_frame().equals(spooled.collectives.to_frame())


def test_a_url_is_read_like_a_folder(tmp_path: Path) -> None:
    """Whatever fsspec reaches: a folder, a glob, and a clear error for nothing and for an unknown protocol."""
    import fsspec

    memory = fsspec.filesystem("memory")
    write(tmp_path, {r: nccl("allreduce", 0, 10, 30, 1, Seq=1) for r in (0, 1)})
    for path in tmp_path.iterdir():
        memory.pipe(f"/captures/one/{path.name}", path.read_bytes())

    for source in ("memory://captures/one", "memory://captures/one/rank*.json", "memory://captures"):
        job = load(source)
        assert ([0, 1], source) == ([trace.rank for trace in job.ranks], job.source)
    for broken in ("memory://nothing", "nosuch://x"):
        with pytest.raises(InputError, match=broken.partition(":")[0]):
            load(broken)
