"""The rooms are top-level folders, but only the name `scaletrace` may reach an installation."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("collect", "parse", "replay", "extrapolate", "view", "cli", "traces")


def _packages_on_disk() -> set[str]:
    found = {"scaletrace"}
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            found.add(".".join(("scaletrace", *init.parent.relative_to(ROOT).parts)))
    return found


def test_every_package_is_listed_in_pyproject() -> None:
    """A sub-package that is missing from either list would be left out of the wheel without a word."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

    assert _packages_on_disk() == set(setup["packages"]) == set(setup["package-dir"])


def test_every_room_is_linked() -> None:
    """mypy and the import contracts find the rooms through relative links in `scaletrace/`."""
    links = {room: (ROOT / "scaletrace" / room).readlink().as_posix() for room in ROOMS}

    assert {room: f"../{room}" for room in ROOMS} == links


def test_library_modules_stay_under_the_ceiling() -> None:
    """A module of more than 600 lines holds two concerns."""
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if (lines := path.read_text().count("\n")) > 600
    }

    assert {} == long


@pytest.mark.slow
def test_wheel_holds_every_module_and_only_scaletrace(tmp_path: Path) -> None:
    """A wheel installs no generic top-level name and misses no module or data file."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"scaletrace/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert {"scaletrace"} == {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert set() == expected - set(names)
