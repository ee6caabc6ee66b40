"""Jobs that go wrong, or do odd things, end and print under the collector exactly as they do without it."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from tests.collect.conftest import COLLECT, JOB, Ran, collected, files_of, run, torchrun
from tests.collect.fault_job import FAULTS

HERE = Path(__file__).resolve().parent
FAULT_JOB = str(HERE / "fault_job.py")
QUICK = ("in_backward",)
NEEDS_PYTHONPATH = ("modules_of_mine",)
IN_PROCESS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(FAULTS)
    if name not in NEEDS_PYTHONPATH
]
RECORDED = frozenset(
    [
        "none",
        "error",
        "exit",
        "sigint",
        "ends_in_window",
        "two_optimizers",
        "loader_fork",
        "loader_spawn",
        "forked_child",
        "own_handlers",
        "compiled_step",
        "scaler",
        "closure",
        "accumulation_and_schedule",
        "strict_warnings",
        "closed_streams",
        "lingering_thread",
        "cleaned_meta_path",
        "changed_directory",
    ]
)
"""The faults that leave a capture; the others leave none."""


def plain(text: str) -> str:
    """Standard error without what differs from run to run: numbers of processes and clocks, addresses.

    Three things are ours and can't be helped: Kineto reads its log level once, so a profiler that the job starts after
    ours does not announce itself ("USDT:"); it complains itself where no file can be opened; and a traceback through
    `Optimizer.step` has one frame more.
    """
    text = re.sub(r'\n  File "[^"]*/collect/hook/boundary.py".*(?:\n    .*)*', "", text)
    ours = ("USDT:", "Failed to read process name")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(ours)]
    # spawned loader workers and multiprocessing's tracker race at exit, with or without us
    lines = [line for line in lines if "resource_tracker" not in line]
    return "\n".join(re.sub(r"0x[0-9a-f]+|\d+", "#", line) for line in lines)


def ended(ran: Ran) -> tuple[int, str, str]:
    return ran.returncode, ran.stdout, plain(ran.stderr)


def check_files(out: Path) -> None:
    """Every file that is left is whole, and nothing temporary is left."""
    for path in out.rglob("*"):
        if path.suffix == ".zst":
            json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))
        elif path.suffix == ".gz":
            json.loads(gzip.decompress(path.read_bytes()))
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            assert path.is_dir() or path.name == "collect.log", f"left behind: {path}"


@pytest.mark.parametrize("fault", IN_PROCESS)
def test_a_fault_inside_the_job_is_none_of_ours(tmp_path: Path, fault: str) -> None:
    """Exit code, standard output and standard error are those of the job alone, and what is recorded is whole."""
    command = [sys.executable, FAULT_JOB, fault]
    out = tmp_path / "capture"
    without, under = run(command), collected(out, [], command)
    assert ended(without) == ended(under)
    check_files(out)
    recorded = fault in RECORDED
    assert recorded == (out / "manifest.json").exists()


@pytest.mark.slow
def test_modules_of_the_user_are_not_shadowed(tmp_path: Path) -> None:
    """A user's module called as one of ours is the one that is imported, and their sitecustomize runs."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "guards.py").write_text("VALUE = 'mine'\n")
    (mine / "sitecustomize.py").write_text("import sys\nprint('my sitecustomize', __name__, file=sys.stderr)\n")
    command = [sys.executable, FAULT_JOB, "modules_of_mine"]
    without = run(command, PYTHONPATH=str(mine))
    under = collected(tmp_path / "capture", [], command, PYTHONPATH=str(mine))
    # the launcher is a Python process too, and says the line once more
    line = "my sitecustomize sitecustomize\n"
    assert (0, without.stdout, line + without.stderr) == (under.returncode, under.stdout, under.stderr)
    assert "my guards: mine" in under.stdout


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["/proc/nowhere/capture", "/dev/null/capture"])
def test_a_folder_that_cannot_be_made(folder: str) -> None:
    """The job runs as ever where nothing can be written."""
    command = [sys.executable, FAULT_JOB, "none"]
    assert ended(run(command)) == ended(collected(Path(folder), [], command))


@pytest.mark.slow
def test_the_folder_goes_away_during_the_run(tmp_path: Path) -> None:
    """A capture folder that is removed under way costs the recording, not the job."""
    out = tmp_path / "capture"
    script = f"import shutil, runpy, sys; shutil.rmtree({str(out)!r}, True); sys.argv[1:] = ['none']; "
    command = [sys.executable, "-c", script + f"runpy.run_path({FAULT_JOB!r}, run_name='__main__')"]
    assert ended(run(command)) == ended(collected(out, [], command))


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_an_interpreter_that_ignores_the_environment(tmp_path: Path, flag: str) -> None:
    """`python -I` does not load the hook: the job runs, and nothing is recorded."""
    command = [sys.executable, flag, FAULT_JOB, "none"]
    assert ended(run(command)) == ended(collected(tmp_path / "capture", [], command))
    expected: list[str] = []
    assert expected == files_of(tmp_path / "capture")


@pytest.mark.slow
def test_an_upload_that_fails(tmp_path: Path) -> None:
    """Where the target refuses, the capture stays local, whole, and says so."""
    out = tmp_path / "capture"
    command = [sys.executable, FAULT_JOB, "none"]
    assert ended(run(command)) == ended(collected(out, ["--upload", "file:///proc/nowhere"], command))
    check_files(out)
    notes = json.loads((out / "manifest.json").read_bytes())["notes"]
    assert any("not uploaded" in note for note in notes)


@pytest.mark.slow
def test_a_rank_that_fails_takes_the_others_along(tmp_path: Path) -> None:
    """When one rank dies, torchrun ends the others by SIGTERM: same exit code and output, no broken file."""
    script = tmp_path / "job.py"
    text = "import os, sys, runpy; sys.argv[1:] = ['sigkill' if os.environ['RANK'] == '1' else 'lingering_thread']; "
    script.write_text(text + f"runpy.run_path({FAULT_JOB!r}, run_name='__main__')")
    out = tmp_path / "capture"
    without, under = run(torchrun(2, str(script))), collected(out, [], torchrun(2, str(script)))
    assert (without.returncode, 1) == (under.returncode, 1)
    check_files(out)


@pytest.mark.slow
def test_a_restarted_job_is_recorded_by_attempt(tmp_path: Path) -> None:
    """After a failure torchrun starts all ranks again; each attempt has its own capture."""
    script = tmp_path / "job.py"
    text = "import os, sys, runpy; sys.argv[1:] = ['error' if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 'none']; "
    script.write_text(text + f"runpy.run_path({FAULT_JOB!r}, run_name='__main__')")
    out = tmp_path / "capture"
    launcher = torchrun(1, "--max-restarts", "1", str(script))
    without, under = run(launcher), collected(out, [], launcher)
    assert (without.returncode, without.stdout) == (under.returncode, under.stdout)
    attempts = {"attempt1/manifest.json", "manifest.json"}
    assert attempts == {name for name in files_of(out) if name.endswith("manifest.json")}
    assert [0] == json.loads((out / "manifest.json").read_bytes())["steps"]["partial"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_reaches_the_job(tmp_path: Path, number: signal.Signals) -> None:
    """Stopping the command stops the job, and the shell sees the job's own end."""
    script = "import time\ntry:\n print('ready', flush=True); time.sleep(60)\nfinally:\n print('left')"
    own = [sys.executable, "-P", "-c", COLLECT, "--quiet", "--out", str(tmp_path / "capture"), "--"]
    codes = []
    for prefix in ([], own):
        job = subprocess.Popen(
            [*prefix, sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        job.send_signal(number)
        codes.append((job.communicate(timeout=30)[0], job.returncode))
    assert codes[0] == codes[1]


@pytest.mark.slow
def test_killing_the_launcher_kills_the_job(tmp_path: Path) -> None:
    """SIGKILL to the command is SIGKILL to the job, as if the command were the job."""
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    own = [sys.executable, "-P", "-c", COLLECT, "--quiet", "--out", str(tmp_path / "capture"), "--"]
    launcher = subprocess.Popen([*own, sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    job = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{job}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{job}").exists()


@pytest.mark.slow
def test_a_missing_kineto_daemon_changes_nothing(tmp_path: Path) -> None:
    """With KINETO_USE_DAEMON set and no daemon there, the job runs and is recorded."""
    command = [sys.executable, FAULT_JOB, "none"]
    without = run(command, KINETO_USE_DAEMON="1")
    under = collected(tmp_path / "capture", [], command, KINETO_USE_DAEMON="1")
    assert (without.returncode, without.stdout) == (under.returncode, under.stdout)
    assert (tmp_path / "capture" / "manifest.json").exists()


@pytest.mark.slow
def test_spawned_ranks_without_variables(tmp_path: Path) -> None:
    """mp.spawn tells no rank by environment; torch.distributed does, and both ranks are recorded."""
    script = tmp_path / "spawn.py"
    script.write_text(
        "import os, sys\nimport torch.multiprocessing as mp\nimport torch.distributed as dist\n"
        f"sys.path.insert(0, {str(JOB.parent)!r})\nimport transformer\n"
        "def rank(number, port):\n"
        "    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=number, world_size=2)\n"
        "    transformer.train(transformer.parser().parse_args(['--steps', '9', '--layers', '1']))\n"
        "    dist.destroy_process_group()\n"
        "if __name__ == '__main__':\n    mp.spawn(rank, (int(os.environ['TEST_PORT']),), nprocs=2)\n"
    )
    command = [sys.executable, str(script)]
    out = tmp_path / "capture"
    port = str(20000 + os.getpid() % 10000)
    without, under = run(command, TEST_PORT=port), collected(out, [], command, TEST_PORT=port)
    assert (0, without.stdout) == (under.returncode, under.stdout)
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert [0, 1] == manifest["ranks"]["traced"]
    assert ["torch.distributed"] * 2 == [member["rank_source"] for member in manifest["members"]]
