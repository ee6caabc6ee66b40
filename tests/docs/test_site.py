"""The documentation site: what it takes from the code, and that it builds."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_reference_has_every_option_of_a_command(hooks: ModuleType) -> None:
    """The page is made from the command itself, with its defaults and its example."""
    page = hooks.command_page("query")

    for words in (
        "## scaletrace query",
        "| `FILE` |",
        "| `--limit` | `100` |",
        "```sh\nscaletrace query replay.pftrace",
    ):
        assert words in page


def test_the_python_reference_shows_signature_and_docstring(hooks: ModuleType) -> None:
    """An entry is the object's own signature and words."""
    entry = hooks.api_entry("scaletrace.view.sql.query")

    assert "def query(path: 'str | Path', sql: 'str'" in entry
    assert "Ask one question of a trace file." in entry


def test_every_name_in_the_python_reference_exists(hooks: ModuleType) -> None:
    """No entry of the page points at something that was renamed."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")

    assert "<!-- api:" not in hooks.on_page_markdown(page)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every link, picture and reference entry resolves."""
    pytest.importorskip("material", reason="mkdocs-material is not installed (pip install 'scaletrace[docs]')")
    command = [
        sys.executable,
        "-P",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "pictures" / "report.png").is_file()
