"""`scaletrace collect` passes the job through, and answers for itself on stderr, or as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scaletrace.collect.launch import default_folder, spool_for
from tests.collect.conftest import COLLECT, Ran, run

SELF = [sys.executable, "-P", "-c", COLLECT]


def cli(*arguments: str) -> Ran:
    return run([*SELF, *arguments])


def test_the_jobs_output_and_code_are_its_own(tmp_path: Path) -> None:
    """Standard output is the job's alone; a job that never reached a window is told so on stderr."""
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    ran = cli("--out", str(tmp_path / "capture"), "--", sys.executable, "-c", code)
    assert (3, "out\n") == (ran.returncode, ran.stdout)
    said = f"err\nnothing was recorded in {tmp_path / 'capture'}: no rank reached the window; did it run fewer steps?\n"
    assert said == ran.stderr


def test_options_after_the_dashes_belong_to_the_job(tmp_path: Path) -> None:
    """What follows `--` is not parsed, even where it looks like an option of ours."""
    code = "import sys; print(sys.argv[1:])"
    ran = cli(
        "--quiet", "--out", str(tmp_path / "c"), "--", sys.executable, "-c", code, "--steps", "9", "--json", "--", "-q"
    )
    assert (0, "['--steps', '9', '--json', '--', '-q']\n", "") == (ran.returncode, ran.stdout, ran.stderr)


def test_json_is_alone_on_stdout(tmp_path: Path) -> None:
    """With --json the job's output goes to stderr, and stdout is one document."""
    ran = cli("--json", "--out", str(tmp_path / "c"), "--", sys.executable, "-c", "print('out')")
    answer = json.loads(ran.stdout)
    assert ("scaletrace.collect/1", 0, {}) == (answer["schema"], answer["returncode"], answer["captures"])
    assert "out\n" == ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--steps", "0", "--", "true"], 2, "0 steps"),
        (["--nonsense", "--", "true"], 2, "no such option: --nonsense"),
        (["--ranks", "first", "--", "true"], 2, "'first' is no rank"),
        (["--fake-world", "8", "--rank", "8", "--", "true"], 2, "not in a world of 8"),
        (["--", "no-such-command-anywhere"], 1, "can't be started"),
        ([], 2, "COMMAND"),
    ],
)
def test_wrong_usage_is_one_sentence(tmp_path: Path, arguments: list[str], code: int, part: str) -> None:
    """The job is not started, and the sentence names the value."""
    ran = cli("--out", str(tmp_path / "c"), *arguments)
    assert (code, "", True) == (ran.returncode, ran.stdout, part in ran.stderr)
    assert "Traceback" not in ran.stderr


def test_a_complete_capture_is_not_written_over(tmp_path: Path) -> None:
    """A folder that holds a capture is refused, unless --overwrite says otherwise."""
    manifest = {"schema": "scaletrace.capture/1", "ranks": {"missing": []}, "notes": []}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    refused = cli("--out", str(tmp_path), "--", "true")
    allowed = cli("--quiet", "--overwrite", "--out", str(tmp_path), "--", "true")
    assert (1, 0) == (refused.returncode, allowed.returncode)
    assert "choose another --out" in refused.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("mounts", "inside"),
    [
        ("/dev/vda / ext4 rw 0 0\n", True),
        ("/dev/vda / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n", False),
        ("/dev/vda / ext4 rw 0 0\nserver:/x /dat nfs4 rw 0 0\n", True),
        ("", True),
    ],
)
def test_raw_files_stay_off_the_network(mounts: str, inside: bool) -> None:
    """Ranks write to a local disk where the capture is on a network file system."""
    assert inside == spool_for("/data/run/capture", mounts).startswith("/data/run/capture/.spool-")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}, "capture-slurm-77.0"),
        ({"PBS_JOBID": "12.server/x"}, "capture-pbs-12.server_x"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "capture-run-none"),
    ],
)
def test_nodes_of_one_job_agree_on_the_folder(environment: dict[str, str], expected: str) -> None:
    """Under a batch system the capture is named by the job, so that all nodes write to one folder."""
    assert expected == default_folder(environment)
