"""Turns calls of `Optimizer.step` into step boundaries of a recorder, from outside the optimizer's own annotation.

`register_optimizer_step_post_hook` would fire inside the `Optimizer.step#…` annotation and cut it; wrapping
`Optimizer.profile_hook_step` puts the boundary after it. Only the first optimizer counts, so that a job with several
has one boundary a step; when it is gone, or others step many times without it, the next one takes over.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

from scaletrace.collect.session import Recorder, set_active
from scaletrace.collect.settings import Settings

PATIENCE = 64
"""Steps of other optimizers in a row after which the counting one is taken for abandoned."""


class Boundary:
    """Decides which `Optimizer.step` ends a step, and passes it on to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._owner: weakref.ref[Any] | None = None
        self._others = 0

    def __call__(self, optimizer: Any) -> None:
        """Called after each `Optimizer.step` of the process; never raises."""
        recorder = self._recorder
        if recorder.disabled or recorder.marked:
            return
        owner = self._owner() if self._owner is not None else None
        if owner is not optimizer:
            self._others += 1
            if owner is not None and self._others < PATIENCE:
                return
            self._owner = weakref.ref(optimizer)
            recorder.note_optimizer(optimizer)
        self._others = 0
        recorder.step()


def install(module: Any, settings: Settings | None = None) -> Recorder | None:
    """Arm this process once `module`, torch.optim.optimizer, is imported; the recorder, None where nothing is asked for.

    `module` may also be torch.distributed.distributed_c10d, which only a fake world changes.
    """
    settings = settings or Settings.from_environment()
    if settings is None:
        return None
    if module.__name__.startswith("torch.distributed"):
        if settings.fake_world:
            from scaletrace.collect.fake_world import patch_distributed

            patch_distributed(module, settings)
        return None
    recorder = Recorder(settings)
    set_active(recorder)
    os.register_at_fork(after_in_child=recorder.disable)
    recorder.watch.install()
    wrap(module.Optimizer, module.torch, Boundary(recorder))
    if settings.for_s:
        wrap_backward(module.torch, recorder)
    return recorder


def wrap(optimizer_class: Any, torch: Any, boundary: Callable[[Any], None]) -> None:
    """Make every optimizer class call `boundary` after its step, once the step's own annotation is closed.

    torch.compile folds `is_compiling()` to True, so a compiled step neither breaks its graph nor has a boundary.
    """
    original = optimizer_class.__dict__["profile_hook_step"].__func__

    def profile_hook_step(function: Callable[..., Any]) -> Callable[..., Any]:
        inner = original(function)

        @functools.wraps(inner)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                boundary(self)
            return result

        return step

    optimizer_class.profile_hook_step = staticmethod(profile_hook_step)


def wrap_backward(torch: Any, recorder: Recorder) -> None:
    """For time windows: the end of each backward pass is a moment to look at the clock, optimizer or not."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            recorder.tick()
        return result

    torch.autograd.backward = backward
