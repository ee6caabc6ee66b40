"""The sitecustomize that rides along chains the user's own, hides itself, loads nothing heavy, and needs no installation."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from scaletrace.collect.launch import hook_folder
from scaletrace.collect.settings import VARIABLE, Settings
from tests.collect.conftest import Ran, run

TORCH = {
    "torch/__init__.py": "import torch.optim.optimizer\n",
    "torch/optim/__init__.py": "",
    "torch/optim/optimizer.py": "import torch\nclass Optimizer:\n"
    "    @staticmethod\n    def profile_hook_step(func):\n        return func\n",
}
"""The little of torch that the hook looks for, so that these tests start in milliseconds."""


def start(code: str, *path: Path, python: str = sys.executable, folder: str = "") -> Ran:
    """Run `code` in a new interpreter with the hook first on PYTHONPATH, then `path`."""
    settings = Settings(folder=folder or "nowhere").to_json()
    entries = [hook_folder(), *map(str, path)]
    return run([python, "-c", code], PYTHONPATH=":".join(entries), **{VARIABLE: settings})


def mine(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(text)
    return folder


def test_the_users_own_sitecustomize_runs_under_its_name(tmp_path: Path) -> None:
    """The one that ours shadows is executed and is what `import sitecustomize` gives."""
    folder = mine(tmp_path, "VALUE = 'mine'\n")
    ran = start("import sitecustomize; print(sitecustomize.VALUE, sitecustomize.__file__)", folder)
    assert (0, f"mine {folder}/sitecustomize.py\n", "") == (ran.returncode, ran.stdout, ran.stderr)


def test_its_errors_are_reported_as_without_us(tmp_path: Path) -> None:
    """A sitecustomize that raises is reported by Python in the same words."""
    folder = mine(tmp_path, "raise ValueError('theirs')\n")
    without = run([sys.executable, "-c", "print('on')"], PYTHONPATH=str(folder))
    assert without == start("print('on')", folder)


def test_the_hook_leaves_sys_path(tmp_path: Path) -> None:
    """No module of ours can shadow one of the job's."""
    ran = start("import sys; print(any('collect' in entry for entry in sys.path))", tmp_path)
    assert "False\n" == ran.stdout


def test_a_process_without_torch_stays_light(tmp_path: Path) -> None:
    """Most processes of a job never import torch; the hook adds none of the slow modules to their start."""
    slow = {"json", "typing", "socket", "subprocess", "threading", "ctypes", "dataclasses", "pathlib", "scaletrace"}
    code = "import sys; print('\\n'.join(sorted(sys.modules)))"
    without = set(run([sys.executable, "-c", code], PYTHONPATH=str(tmp_path)).stdout.split())
    added = set(start(code, tmp_path).stdout.split()) - without
    expected: set[str] = set()
    assert expected == added & slow


def test_importing_torch_arms_the_process(tmp_path: Path) -> None:
    """Once torch's optimizers are imported, their step is wrapped, and no analysis package is loaded."""
    for name, text in TORCH.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = (
        "import sys, torch; from torch.optim.optimizer import Optimizer; from scaletrace.collect.session import active\n"
        "print(Optimizer.profile_hook_step.__module__, active() is not None)\n"
        "print(sorted(set(sys.modules) & {'numpy', 'pandas', 'numba', 'zstandard', 'scaletrace.api'}))"
    )
    ran = start(code, tmp_path)
    assert "scaletrace.collect.hook.boundary True\n[]\n" == ran.stdout


def test_an_interpreter_without_scaletrace(tmp_path: Path) -> None:
    """The hook brings its own package along where the job's environment has none."""
    venv.create(tmp_path / "bare", with_pip=False)
    for name, text in TORCH.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = (
        "import torch, sys; from torch.optim.optimizer import Optimizer; print(Optimizer.profile_hook_step.__module__)"
    )
    ran = start(code, tmp_path / "site", python=str(tmp_path / "bare" / "bin" / "python"))
    assert "scaletrace.collect.hook.boundary\n" == ran.stdout


@pytest.mark.parametrize("text", ["{", '{"folder": 3, "steps": "x"}', "[]"])
def test_a_broken_variable_does_no_harm(tmp_path: Path, text: str) -> None:
    """Settings that can't be read disarm the hook, and one line says so."""
    for name, content in TORCH.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    environment = {"PYTHONPATH": f"{hook_folder()}:{tmp_path}", VARIABLE: text}
    ran = run([sys.executable, "-c", "import torch; print('on')"], **environment)
    assert (0, "on\n") == (ran.returncode, ran.stdout)
    expected = f"scaletrace: this process is not recorded: {VARIABLE} holds no settings of a recording: "
    assert (1, expected) == (ran.stderr.count("\n"), ran.stderr[: len(expected)])
