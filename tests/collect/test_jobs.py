"""Real jobs under torchrun, collected by the command alone: nothing changes for the job, and the product reads what it got."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scaletrace.api import load
from scaletrace.parse.profiler_cost import profiler_cost
from scaletrace.replay.accuracy import mean_error
from tests.collect.conftest import JOB, Ran, collected, files_of, run, torchrun

MATRIX = [
    ("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("tp", 2), ("tp", 4),
    ("pp_1f1b", 2), ("pp_1f1b", 4), ("pp_gpipe", 2), ("pp_gpipe", 4), ("ddp_compile", 2), ("ddp_compile", 4),
]  # fmt: skip
AXES = {
    "ddp": {"default_pg"},
    "ddp_compile": {"default_pg"},
    "fsdp2": {"default_pg"},
    "hsdp": {"mesh_dp_replicate", "mesh_dp_shard"},
    "tp": {"mesh_tp"},
    "pp_1f1b": {"default_pg"},
    "pp_gpipe": {"default_pg"},
}
"""Descriptions of groups that the manifest of such a job holds."""


def test_a_collected_job_says_and_ends_the_same(ddp_pair: tuple[Ran, Ran, Path]) -> None:
    """Two ranks of DDP print the same losses to the last digit, and the same on standard error."""
    without, under, _ = ddp_pair
    assert (0, without.stdout, without.stderr) == (under.returncode, under.stdout, under.stderr)
    assert "loss" in under.stdout


def test_a_capture_holds_a_trace_and_a_sidecar_of_each_rank(ddp_pair: tuple[Ran, Ran, Path]) -> None:
    """The capture folder is the manifest and two files a rank, and nothing temporary."""
    expected = ["fr_rank00000.json.gz", "fr_rank00001.json.gz", "manifest.json"]
    expected += ["rank00000_of00002.json.zst", "rank00001_of00002.json.zst"]
    assert expected == files_of(ddp_pair[2])


def test_the_manifest_tells_what_was_recorded(ddp_pair: tuple[Ran, Ran, Path]) -> None:
    """Ranks, steps, groups, model and versions stand in the manifest."""
    manifest = json.loads((ddp_pair[2] / "manifest.json").read_bytes())
    assert {"expected": 2, "present": [0, 1], "traced": [0, 1], "light": [], "missing": [], "asked": "all"} == manifest[
        "ranks"
    ]
    assert {"first": 5, "last": 7, "count": 3, "partial": []} == manifest["steps"]
    assert [("default_pg", 0, 1, 2)] == [
        (group["description"], group["start"], group["stride"], group["size"]) for group in manifest["groups"]
    ]
    parameters = 2 * 256 * 128 + 12 * 128 * 128  # embedding, head, one block
    assert parameters == manifest["model"]["parameters"]
    assert 6.0 * parameters * 512 == manifest["model"]["flops_per_step"]
    assert "6 x parameters x tokens" == manifest["model"]["flops_source"]
    assert {"python", "system", "torch"} <= set(manifest["versions"])
    assert [0, 1] == manifest["hosts"][0]["ranks"]


def test_the_capture_tells_what_the_profiler_cost(ddp_pair: tuple[Ran, Ran, Path]) -> None:
    """Steps 1 to 3 of each rank, before the warm-up of step 4, are compared with the recorded ones."""
    manifest = json.loads((ddp_pair[2] / "manifest.json").read_bytes())
    assert [3, 3] == [member["unwatched"]["count"] for member in manifest["members"]]
    cost = profiler_cost(load(ddp_pair[2]).job)
    assert cost is not None
    assert (2, 3, 2) == (cost.ranks, cost.unwatched_steps, cost.recorded_steps)


def test_the_product_reads_and_replays_the_capture(ddp_pair: tuple[Ran, Ran, Path]) -> None:
    """All ranks and steps are read, every collective is matched through the sidecar, and the replay is close."""
    check_readable(ddp_pair[2], 2)


def check_readable(capture: Path, ranks: int) -> None:
    trace = load(capture)
    assert (ranks, ()) == (trace.job.world_size, trace.job.missing_ranks)
    steps = [[5, 6, 7]] * ranks
    assert steps == [[step.number for step in rank.steps] for rank in trace.job.ranks]
    assert 0 == trace.job.collectives.unmatched
    result = trace.replay()
    assert 0.05 > mean_error(result.steps)
    assert trace.critical_path().length_ns > 0


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), MATRIX)
def test_every_kind_of_parallelism(tmp_path: Path, strategy: str, ranks: int) -> None:
    """The job's output is unchanged, all ranks are recorded on the same steps, and the product reads and replays them."""
    layers = str(ranks) if strategy.startswith("pp_") else "1"
    out = tmp_path / "capture"
    command = torchrun(ranks, str(JOB), "--strategy", strategy, "--steps", "9", "--layers", layers)
    without, under = run(command), collected(out, [], command)
    assert (0, without.stdout) == (under.returncode, under.stdout), under.stderr[-4000:]
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert list(range(ranks)) == manifest["ranks"]["traced"]
    assert {(5, 7)} == {(member["first_step"], member["last_step"]) for member in manifest["members"]}
    axes = {"default_pg"} if ranks == 2 else AXES[strategy]  # a mesh axis as long as the world is the world's group
    assert axes <= {group["description"] for group in manifest["groups"]}
    check_readable(out, ranks)


@pytest.mark.slow
def test_one_rank_a_class(tmp_path: Path) -> None:
    """Of 2 x 2 ranks of tensor parallelism, one of each tensor rank is traced, and the others leave their sidecar."""
    out = tmp_path / "capture"
    command = torchrun(4, str(JOB), "--strategy", "tp", "--steps", "9", "--layers", "1")
    assert 0 == collected(out, ["--ranks", "classes"], command).returncode
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert ([0, 1], [2, 3]) == (manifest["ranks"]["traced"], manifest["ranks"]["light"])
    sidecars = [f"fr_rank{rank:05d}.json.gz" for rank in range(4)]
    assert sidecars == [name for name in files_of(out) if name.startswith("fr_")]


@pytest.mark.slow
def test_again_every_so_many_steps(tmp_path: Path) -> None:
    """--every records windows at the same steps on both ranks, each in its own capture."""
    out = tmp_path / "capture"
    command = torchrun(2, str(JOB), "--steps", "16", "--layers", "1")
    assert 0 == collected(out, ["--start-step", "3", "--steps", "2", "--every", "5"], command).returncode
    windows = sorted(path.parent.name for path in out.rglob("manifest.json"))
    assert ["step000003", "step000008", "step000013"] == windows
    for window in windows:
        manifest = json.loads((out / window / "manifest.json").read_bytes())
        assert [0, 1] == manifest["ranks"]["traced"]
        assert int(window.removeprefix("step")) == manifest["steps"]["first"]


@pytest.mark.slow
def test_on_demand(tmp_path: Path) -> None:
    """A touched file starts a recording on one and the same step of both ranks of a job that is already running."""
    out = tmp_path / "capture"
    script = tmp_path / "slow.py"
    text = "import sys, time; sys.path.insert(0, sys.argv.pop(1)); import transformer, torch.distributed as dist\n"
    text += "dist.init_process_group('gloo'); options = transformer.parser().parse_args()\n"
    text += f"folder = {str(out)!r}\n"
    text += "count = [0]\ndef after():\n    count[0] += 1\n    time.sleep(0.05)\n"
    text += "    if count[0] == 20 and dist.get_rank() == 0: open(folder + '/record', 'w').close()\n"
    text += "transformer.train(options, after); dist.destroy_process_group()\n"
    script.write_text(text)
    command = torchrun(2, str(script), str(JOB.parent), "--steps", "110", "--layers", "1")
    assert 0 == collected(out, ["--on-demand"], command).returncode
    (manifest_path,) = out.rglob("manifest.json")
    manifest = json.loads(manifest_path.read_bytes())
    assert [0, 1] == manifest["ranks"]["traced"]
    assert 0 == manifest["steps"]["first"] % 10
    assert 3 == manifest["steps"]["count"]
    before = manifest["steps"]["first"] - 2  # without step 0 and the warm-up
    assert [before, before] == [member["unwatched"]["count"] for member in manifest["members"]]


@pytest.mark.slow
def test_a_time_window(tmp_path: Path) -> None:
    """Without counting steps, the window opens and closes by the clock."""
    out = tmp_path / "capture"
    command = torchrun(1, str(JOB), "--steps", "60", "--layers", "1")
    assert 0 == collected(out, ["--after", "0.2", "--for", "0.2"], command).returncode
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert ("time", [0]) == (manifest["job"]["boundary"], manifest["ranks"]["traced"])
    assert manifest["steps"]["count"] > 1
    assert manifest["members"][0]["unwatched"]["median_ns"] > 0
    assert [] == manifest["steps"]["partial"]
