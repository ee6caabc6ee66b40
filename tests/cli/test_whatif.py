"""`scaletrace whatif` and `scaletrace diff` answer in tables and in JSON, and refuse what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from scaletrace.cli.diff import diff
from scaletrace.cli.whatif import whatif
from tests.cli.conftest import Run
from tests.parse.traces import call, kernel, write


def run(command: Any, *arguments: str) -> Any:
    """Run one command as the program does."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """One rank with two kernels of 50 and 20 us."""
    events = [call("cudaLaunchKernel", 0, 4, 1), kernel("gemm", 6, 50, 1)]
    events += [call("cudaLaunchKernel", 10, 4, 2), kernel("add", 57, 20, 2)]
    folder = tmp_path / "capture"
    folder.mkdir()
    return write(folder, [events])


def test_whatif_json(capture: Path, tmp_path: Path) -> None:
    """Half the gemm is 25 us less, and the trace is written."""
    target = tmp_path / "out.pftrace"
    answer = json.loads(run(whatif, str(capture), "--set", "gemm=0.5", "--json", "-o", str(target)).stdout)

    assert ("scaletrace.whatif/1", -25_000) == (answer["schema"], answer["change_ns"])
    assert [{"rule": "gemm=0.5", "changed_nodes": 1}] == answer["rules"]
    assert target.stat().st_size > 0


def test_whatif_table(capture: Path) -> None:
    """The headline says what the change is worth."""
    found = run(whatif, str(capture), "--set", "gemm=0.5", "--no-trace")

    assert 0 == found.exit_code
    assert "0.077 ms → 0.052 ms: 0.025 ms (32.5%) shorter" in found.stdout


def test_a_step_comes_before_the_window(samples: Path) -> None:
    """Of several steps the headline is what one takes, as replay shows it; the window of all follows, in the table too."""
    arguments = (str(samples / "fsdp2_w2"), "--set", "bandwidth=2x", "--no-trace")
    text, answer = run(whatif, *arguments).stdout, json.loads(run(whatif, *arguments, "--json").stdout)
    step, parts = answer["step_time_ns"], answer["step_breakdown"]

    assert text.startswith("a step: 34.295 ms → ") and "the window of 3 steps: 113.687 ms → " in text
    assert ["a step", "window"] == [word for word in ("a step", "window") if word in text.split("ms, mean of ranks")[1]]
    assert parts["wall_ns"] == pytest.approx(step["after"], abs=1)
    assert answer["after_ns"] > 3 * step["after"]


def test_communication_that_stays_exposed_under_ideal_overlap_is_explained(shared_data: Path) -> None:
    """Where a late host sets the pace nothing gets shorter, and collectives wait for it as long."""
    job = str(shared_data / "traces" / "nanogpt8_h100")
    ideal, less = (
        json.loads(run(whatif, job, "--set", rule, "--no-trace", "--json").stdout)["notes"]
        for rule in ("overlap=ideal", "comm=0.5")
    )

    assert any("which is no error: 89.5% of the critical path is host" in note for note in ideal)
    assert not any("which is no error" in note for note in less)


def test_bound_is_not_sold_as_a_prediction(capture: Path) -> None:
    """overlap=ideal says "at most" in the headline, why in a note, and is_bound in JSON."""
    arguments = (str(capture), "--set", "overlap=ideal", "--no-trace")
    text, answer = run(whatif, *arguments).stdout, json.loads(run(whatif, *arguments, "--json").stdout)

    assert "shorter at most" in text
    assert "upper bound" in text
    assert answer["is_bound"]


def test_removed_delay_says_how_much_there_was(capture: Path) -> None:
    """Alone in one step a rank can only give up the 6 us between its launches, which hide under the kernel: both are said."""
    arguments = (str(capture), "--set", "rank0.delay=-50ms", "--no-trace", "--json")
    answer = json.loads(run(whatif, *arguments).stdout)
    (rule,) = answer["rules"]

    assert (50_000_000, 6_000, 0) == (rule["asked_ns"], rule["taken_ns"], answer["change_ns"])
    assert {"host": 6_000, "stall": 0, "kernels": 0} == rule["taken_from_ns"]
    assert any("could be taken out" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        *(("gemm", 2), ("nothing=2", 2), ("rank9.gemm=2", 2), ("gemm=quick", 2)),
        *(("rank0.delay=1e30s", 2), ("gemm=1e300", 2), ("gemm=1e999us", 2)),
    ],
)
def test_wrong_rules_are_wrong_usage(capture: Path, rule: str, code: int) -> None:
    """Exit code 2, a sentence on stderr, nothing on stdout."""
    found = run(whatif, str(capture), "--set", rule, "--no-trace", "--json")

    assert (code, "") == (found.exit_code, found.stdout)
    assert rule in found.stderr


def test_missing_capture_is_an_input_error(tmp_path: Path) -> None:
    """Exit code 1 and the path in the sentence."""
    found = run(whatif, str(tmp_path / "nowhere"), "--set", "gemm=2", "--no-trace")

    assert 1 == found.exit_code
    assert "nowhere" in found.stderr


def test_diff_explains_the_difference(tmp_path: Path) -> None:
    """The second run's gemm takes 30 us longer, and the path's lines sum to the difference of the windows."""
    folders = []
    for name, dur in (("a", 50), ("b", 80)):
        (tmp_path / name).mkdir()
        folders.append(write(tmp_path / name, [[call("cudaLaunchKernel", 0, 4, 1), kernel("gemm", 6, dur, 1)]]))
    answer = json.loads(run(diff, str(folders[0]), str(folders[1]), "--json").stdout)

    assert 30_000 == answer["delta_ns"] == answer["window_delta_ns"] == sum(line["delta_ns"] for line in answer["path"])
    assert ("gemm", "compute", 30_000) == tuple(answer["path"][0][key] for key in ("what", "kind", "delta_ns"))


def test_diff_says_what_its_lines_sum_to(tmp_path: Path) -> None:
    """The step time is that of `replay`; the lines of the critical path sum to the difference of the whole windows."""
    folders = []
    for name, dur in (("a", 50), ("b", 80)):
        (tmp_path / name).mkdir()
        folders.append(write(tmp_path / name, [[call("cudaLaunchKernel", 0, 4, 1), kernel("gemm", 6, dur, 1)]]))
    text = " ".join(run(diff, str(folders[0]), str(folders[1])).stdout.split())

    assert "0.056 ms → 0.086 ms, +0.030 ms, to which the lines on the critical path sum." in text


def test_a_step_that_gets_longer_is_explained(shared_data: Path) -> None:
    """Without rank 1's delay steps 11 and 12 end earlier, then rank 2 sets the pace: step 13 is longer, the window shorter."""
    folder = shared_data / "traces" / "nanogpt8_h100"
    answer = json.loads(run(whatif, str(folder), "--set", "rank1.delay=none", "--no-trace", "--json").stdout)
    last = answer["steps"][-1]

    assert last["after_ns"] > last["before_ns"]
    assert answer["change_ns"] < 0
    assert any(
        note.startswith("Step 13 gets longer") and "rank 2 sets the pace now" in note for note in answer["notes"]
    )


def test_diff_table(capture: Path) -> None:
    """A run against itself differs in nothing; below stands what both runs' reading had to guess, twice over."""
    found = run(diff, str(capture), str(capture))
    first, second, *_ = found.stdout.splitlines()

    assert (0, "0.077 ms → 0.077 ms a step: +0.000 ms (+0.0%)") == (found.exit_code, first)
    assert "guessed: 2 kernels without a class" == second


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("rank1.delay=-0ms", "rank1.delay=-0ms: 0 nodes changed"),
        ("all=1", "all=1: 0 nodes changed"),
        ("host=+0us", "host=+0us: 0 nodes changed"),
    ],
)
def test_what_changes_nothing_says_so(samples: Path, rule: str, said: str) -> None:
    """A time of zero and a factor of one touch no node, and the job is neither shorter nor longer."""
    outcome = run(whatif, str(samples / "ddp_w2"), "--set", rule, "--no-trace")

    assert 0 == outcome.exit_code
    assert said in outcome.output and "no change" in outcome.output


def test_a_rule_that_has_nothing_to_act_on_says_why(run: Run, samples: Path) -> None:
    """Latency that the transfers do not tell, compute of a job without a device, and a factor that overflows."""
    latency = run("whatif", samples / "ddp_straggler_w4", "--set", "latency=10", "--no-trace")
    compute = run("whatif", samples / "ddp_straggler_w4", "--set", "compute=0", "--no-trace")
    endless = run("whatif", samples / "ddp_straggler_w4", "--set", "*=1e308", "--no-trace")

    assert 0 == latency.returncode and "do not tell latency" in " ".join(latency.stdout.split())
    assert 2 == compute.returncode and "part of host" in " ".join(compute.stderr.split())
    assert 2 == endless.returncode and "Warning" not in endless.stderr
