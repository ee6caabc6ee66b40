"""Turns the step hooks of training frameworks into step boundaries: Lightning's Trainer and the Hugging Face Trainer.

>>> from scaletrace.collect.callbacks import lightning_callback          # doctest: +SKIP
>>> Trainer(callbacks=[lightning_callback("capture", start_step=10)])    # doctest: +SKIP

The frameworks are imported only when their callback is made.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from scaletrace.collect.session import Session, record
from scaletrace.errors import MissingExtraError


def _base(name: str, *modules: str) -> Any:
    """Class `name` of the first of `modules` that is installed.

    Raises MissingExtraError where none is.
    """
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
    raise MissingExtraError(f"this callback needs {' or '.join(modules)}; pip install {modules[0].partition('.')[0]}")


class _Steps:
    """A session that opens at the first step and closes once."""

    def __init__(self, folder: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._folder, self._options = folder, options
        self._session: Session | None = None

    def begin(self) -> None:
        if self._session is None:
            self._session = record(self._folder, **self._options).__enter__()

    def step(self) -> None:
        if self._session is not None:
            self._session.step()

    def end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.__exit__(None, None, None)


def lightning_callback(folder: str | os.PathLike[str], **options: Any) -> Any:
    """A Lightning callback that ends a step whenever the global step has advanced, so accumulation counts as one.

    `options` are those of `Settings`. Raises MissingExtraError where neither lightning nor pytorch_lightning is there.
    """
    steps = _Steps(folder, options)

    def on_train_start(self: Any, trainer: Any, module: Any) -> None:
        self.last_step = trainer.global_step
        steps.begin()

    def on_train_batch_end(self: Any, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step != self.last_step:
            self.last_step = trainer.global_step
            steps.step()

    def finish(self: Any, *_: Any, **__: Any) -> None:
        steps.end()

    hooks = {
        "on_train_start": on_train_start,
        "on_train_batch_end": on_train_batch_end,
        "on_train_end": finish,
        "on_exception": finish,
    }
    base = _base("Callback", "lightning.pytorch", "pytorch_lightning")
    return type("ScaletraceCallback", (base,), hooks)()


def trainer_callback(folder: str | os.PathLike[str], **options: Any) -> Any:
    """A callback for the Hugging Face Trainer; its `on_step_end` comes once an optimizer step.

    `options` are those of `Settings`. Raises MissingExtraError where transformers is not there.
    """
    steps = _Steps(folder, options)
    hooks = {
        "on_train_begin": lambda self, *_, **__: steps.begin(),
        "on_step_end": lambda self, *_, **__: steps.step(),
        "on_train_end": lambda self, *_, **__: steps.end(),
    }
    return type("ScaletraceCallback", (_base("TrainerCallback", "transformers"),), hooks)()
