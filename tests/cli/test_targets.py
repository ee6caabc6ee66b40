"""Which files no command overwrites."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scaletrace.cli.targets import spare
from scaletrace.errors import UsageError
from tests.cli.conftest import Run


def test_an_input_is_spared_under_any_name(tmp_path: Path) -> None:
    """The file itself, one of the folder, through a symbolic or a hard link, and one that a glob finds."""
    capture = tmp_path / "capture"
    capture.mkdir()
    rank, notes = capture / "rank0.json.gz", capture / "fr_rank0.json"
    rank.write_text("a")
    notes.write_text("b")
    (tmp_path / "soft").symlink_to(rank)
    os.link(rank, tmp_path / "hard")

    for source in (capture, rank, f"{capture}/*.gz"):
        for target in (rank, tmp_path / "soft", tmp_path / "hard"):
            with pytest.raises(UsageError, match="part of the input"):
                spare([str(source)], target)
    with pytest.raises(UsageError, match="fr_rank0"):
        spare([str(capture)], None, notes)


def test_answers_and_new_files_may_be_written_into_the_folder(tmp_path: Path) -> None:
    """What an earlier command wrote beside the traces is written again; a file that is not there harms nothing."""
    for name in ("rank0.json", "replay.pftrace", "report.html", "curve.json"):
        (tmp_path / name).write_text("a")

    spare([str(tmp_path)], *(tmp_path / name for name in ("replay.pftrace", "report.html", "curve.json", "new.json")))
    spare(["s3://bucket/run", "", "gone"], tmp_path / "rank0.json")


@pytest.mark.parametrize(
    "words",
    [
        ("replay", "-o"),
        ("replay", "--no-trace", "--graphml"),
        ("whatif", "--set", "host=1", "-o"),
        ("extrapolate", "--gpus", "8", "-o"),
        ("report", "-o"),
    ],
)
def test_commands_refuse_to_overwrite_what_they_read(
    run: Run, samples: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Wrong usage, and every file of the capture is as it was."""
    folder = tmp_path / "capture"
    shutil.copytree(samples / "ddp_w2", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    target = next(name for name in sorted(before) if name.startswith("rank0"))
    done = run(words[0], folder, *words[1:], folder / target)

    assert 2 == done.returncode and "part of the input" in " ".join(done.stderr.split())
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(("option", "text"), [("--price", "H100 SXM: 2"), ("--axes", "groups: []")])
def test_files_that_options_name_are_spared(run: Run, samples: Path, tmp_path: Path, option: str, text: str) -> None:
    """A table of prices and the names of axes are input as well."""
    (tmp_path / "own.yaml").write_text(text)
    done = run(
        "extrapolate", samples / "ddp_w2", "--gpus", "8", option, tmp_path / "own.yaml", "-o", tmp_path / "own.yaml"
    )

    assert 2 == done.returncode and "part of the input" in " ".join(done.stderr.split())
    assert text == (tmp_path / "own.yaml").read_text()
