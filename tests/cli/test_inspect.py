"""`scaletrace inspect`: one screen, one JSON document, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

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
