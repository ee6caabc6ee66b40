"""The callbacks end a step when their framework says that one has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest

from scaletrace.collect import callbacks
from scaletrace.errors import MissingExtraError


class Recording:
    """Stands for a session: lists what it was asked."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def __enter__(self) -> Self:
        self.said.append("begin")
        return self

    def step(self) -> None:
        self.said.append("step")

    def __exit__(self, *_: object) -> None:
        self.said.append("end")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(callbacks, "record", lambda folder, **options: Recording(log))
    return log


def framework(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    fake: Any = ModuleType(module)
    setattr(fake, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, module.partition(".")[0], ModuleType(module.partition(".")[0]))
    monkeypatch.setitem(sys.modules, module, fake)


def test_lightning_counts_optimizer_steps(monkeypatch: pytest.MonkeyPatch, said: list[str], tmp_path: Path) -> None:
    """Two batches of accumulation are one step, and the end comes once."""
    framework(monkeypatch, "lightning.pytorch", "Callback")
    callback = callbacks.lightning_callback(tmp_path)
    trainer = SimpleNamespace(global_step=0)
    callback.on_train_start(trainer, None)
    for global_step in (0, 1, 1, 2):
        trainer.global_step = global_step
        callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_train_end(trainer, None)
    callback.on_exception(trainer, None, ValueError())
    expected = ["begin", "step", "step", "end"]
    assert expected == said


def test_the_trainer_counts_its_steps(monkeypatch: pytest.MonkeyPatch, said: list[str], tmp_path: Path) -> None:
    """on_step_end is one step."""
    framework(monkeypatch, "transformers", "TrainerCallback")
    callback = callbacks.trainer_callback(tmp_path)
    callback.on_train_begin(None, None, None)
    callback.on_step_end(None, None, None)
    callback.on_train_end(None, None, None)
    expected = ["begin", "step", "end"]
    assert expected == said


def test_a_framework_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what to install."""
    for module in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match="pip install lightning"):
        callbacks.lightning_callback(tmp_path)
