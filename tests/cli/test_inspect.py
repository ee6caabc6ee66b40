"""`scaletrace inspect`: one screen, one JSON document, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_inspect_answers_in_json(run: Run, samples: Path) -> None:
    """Ranks, steps, groups, collectives, clocks and health of a shipped capture, as docs/cli.md names them."""
    answer = json.loads(run("inspect", samples / "ddp_straggler_w4", "--json").stdout)

    assert "scaletrace.inspect/1" == answer["schema"]
    assert (4, [0, 1, 2, 3], []) == tuple(answer["ranks"][key] for key in ("expected", "present", "missing"))
    assert [("dp", 4, 1)] == [(g["axis"], g["size"], g["stride"]) for g in answer["groups"] if g["size"] > 1]
    assert (0, "seq") == (answer["collectives"]["unmatched"], answer["collectives"]["rung"])
    assert answer["collectives"]["matched"] > 0
    assert {"offset_ns", "low_ns", "high_ns"} <= answer["clocks"]["3"].keys()
    assert {"repaired", "clipped", "dropped", "guessed", "unmatched", "notes"} == answer["health"].keys()
    assert (3, "launches later") == (answer["stragglers"][0]["rank"], answer["stragglers"][0]["cause"])


def test_inspect_fits_one_screen_of_80_columns(run: Run, samples: Path) -> None:
    """Everything a reader needs on 40 lines, and what was guessed among it."""
    lines = run("inspect", samples / "ddp_straggler_w4").stdout.splitlines()

    assert len(lines) <= 40
    assert max(len(line) for line in lines[1:]) <= 80
    text = "\n".join(lines)
    for word in ("ranks    4 of 4", "backend gloo", "clocks", "all_reduce", "launches later", "guessed"):
        assert word in text


def test_inspect_says_why_it_can_not(run: Run, tmp_path: Path) -> None:
    """A folder without traces is one sentence on stderr and exit code 1; an unknown capture is wrong usage."""
    (tmp_path / "notes.json").write_text("{}")
    refused = run("inspect", tmp_path)

    assert (1, "") == (refused.returncode, refused.stdout)
    assert "no Kineto trace" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_unknown_capture_is_wrong_usage(run: Run, samples: Path) -> None:
    """Exit code 2 and the names that exist."""
    refused = run("inspect", samples / "ddp_straggler_w4", "--capture", "elsewhere")

    assert 2 == refused.returncode
    assert "elsewhere" in refused.stderr


def test_quiet_prints_nothing(run: Run, samples: Path) -> None:
    """The exit code alone tells."""
    done = run("inspect", samples / "ddp_straggler_w4", "--quiet")

    assert (0, "") == (done.returncode, done.stdout)


def test_inspect_and_replay_give_one_number(run: Run, samples: Path) -> None:
    """How long the others wait for the straggler is the same in both commands, although clocks are loosely bounded."""
    inspected = json.loads(run("inspect", samples / "ddp_straggler_w4", "--json").stdout)["stragglers"][0]
    replayed = json.loads(run("replay", samples / "ddp_straggler_w4", "--no-trace", "--json").stdout)
    each_ns = replayed["stragglers"][0]["caused_wait_ns"] / len(replayed["steps"])

    assert 3 == inspected["rank"] == replayed["stragglers"][0]["rank"]
    assert abs(inspected["each_waited_ns"] / each_ns - 1) < 0.01


@pytest.mark.parametrize(
    "name", ["gloo/fsdp2_w4", "gloo/pp_1f1b_w4", "gloo/tp_dp_w4", "traces/lightllm8_h200-logs-run1"]
)
def test_inspect_and_replay_agree_on_every_rank(run: Run, shared_data: Path, name: str) -> None:
    """Waits and verdicts of all ranks are one answer: the same clocks, the same collectives."""
    inspected = json.loads(run("inspect", shared_data / name, "--json").stdout)["stragglers"]
    replayed = json.loads(run("replay", shared_data / name, "--no-trace", "--json").stdout)["stragglers"]
    waited = [{s["rank"]: (s["each_waited_ns"], s["cause"]) for s in rows} for rows in (inspected, replayed)]

    assert waited[0] == waited[1]


def test_inspect_writes_units_as_the_other_commands(run: Run, shared_data: Path) -> None:
    """Microseconds are µs, bandwidths have their unit in the cell, and captions say what the numbers are of."""
    text = " ".join(run("inspect", shared_data / "gloo" / "fsdp2_w4").stdout.split())

    assert "7.39 MB/s" in text
    assert " us " not in text
    assert "waits summed over ranks, each transfer once" in text
    assert "One step says little about which rank is slow." in text


def test_inspect_shows_what_the_model_is_made_of(run: Run, samples: Path) -> None:
    """One layer of the sample's model, with embedding, head and optimizer apart, and times that add up to a whole."""
    layers = json.loads(run("inspect", samples / "ddp_w2", "--json").stdout)["layers"]
    parts = {part["name"]: part for part in layers["parts"]}

    assert (True, 1, 1, "a single attention") == tuple(
        layers[key] for key in ("found", "layers", "micro_batches", "rule")
    )
    assert ["embedding", "layer", "head", "optimizer", "rest of the step"] == list(parts)
    assert 1 == round(sum(part["share"] for part in layers["parts"]), 6)
    assert parts["layer"]["backward_ns"] > parts["layer"]["forward_ns"] > parts["embedding"]["forward_ns"] > 0
    assert parts["optimizer"]["other_ns"] > 0


def test_no_layers_are_said_with_the_remedy(run: Run, shared_data: Path) -> None:
    """A recommendation model is no stack of layers; the reason and what to record stand in text and JSON."""
    folder = shared_data / "traces" / "torchrec2_v100"
    text = " ".join(run("inspect", folder).stdout.split())

    assert "none found: no stretch that repeats covers half of the forward pass" in text
    assert "with_modules=True" in text
    assert json.loads(run("inspect", folder, "--json").stdout)["layers"]["why_not"]


def test_hosts_that_only_file_names_suggest_are_not_counted(run: Run, shared_data: Path) -> None:
    """worker0_…, worker1_… are no eight hosts; a shared name in front of the process id says that it is a guess."""
    dlrm = json.loads(run("inspect", shared_data / "traces" / "dlrm8_v100", "--json").stdout)
    named = json.loads(run("inspect", shared_data / "traces" / "torchrec2_v100", "--json").stdout)

    assert ([], None) == (dlrm["hosts"], dlrm["hosts_by"])
    assert (["node01"], "file names") == (named["hosts"], named["hosts_by"])


def test_a_rank_with_slow_kernels_computes_longer(run: Run, tmp_path: Path) -> None:
    """Kernels a fifth slower on one rank are named so, although the others' kernels are slow beside their waits."""
    made = run(
        "synth", "--model", "llama2-7b", "--layout", "fsdp=4", "--ranks", "all", "--steps", "2", "--fault", "slow:3:1.2",
        "--out", tmp_path / "slow",
    )  # fmt: skip
    assert 0 == made.returncode
    worst = json.loads(run("inspect", tmp_path / "slow", "--json").stdout)["stragglers"][0]

    assert (3, "computes longer") == (worst["rank"], worst["cause"])
    assert worst["extra_compute_ns"] > 0.1 * worst["compute_ns"]


@pytest.mark.parametrize("command", [["inspect"], ["replay", "--no-trace"]])
def test_the_cost_of_the_profiler_is_told(run: Run, samples: Path, tmp_path: Path, command: list[str]) -> None:
    """A capture that knows how long steps took without the profiler says so to people and in JSON; others say null."""
    told = tmp_path / "told"
    shutil.copytree(samples / "ddp_straggler_w4", told)
    before = {"count": 40, "mean_ns": 100_000_000, "median_ns": 100_000_000, "spread_ns": 1_000_000}
    ends = [10**18, 10**18 + 120_000_000, 10**18 + 240_000_000]
    member = {"rank": 0, "trace": "rank0.json", "unwatched": before, "boundaries_ns": ends}
    (told / "manifest.json").write_text(json.dumps({"schema": "scaletrace.capture/1", "members": [member]}))

    words = " ".join(run(*command, told).stdout.split())
    assert (
        "(median of 40 steps before the window), recorded 120 ms: the profiler cost 20.0%. Projections carry" in words
    )
    cost = json.loads(run(*command, told, "--json").stdout)["profiler_cost"]
    assert (True, False, 1_000_000) == (cost["large"], cost["within_noise"], cost["noise_ns"])
    silent = run(*command, samples / "ddp_straggler_w4", "--json").stdout
    assert json.loads(silent)["profiler_cost"] is None


def test_inspect_and_replay_call_an_assumed_group_the_same(run: Run, shared_data: Path) -> None:
    """Collectives that name no group are those of the one that is assumed to hold all ranks, in both commands."""
    source = str(shared_data / "traces" / "torchrec2_v100")
    seen = json.loads(run("inspect", source, "--json").stdout)
    replayed = json.loads(run("replay", source, "--no-trace", "--json").stdout)

    assert {"world"} == {row["axis"] for row in seen["collectives"]["by_kind"]}
    assert {"world"} == {row["axis"] for row in replayed["collectives"]}
