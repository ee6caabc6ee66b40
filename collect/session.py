"""Turns step boundaries into recordings: the state of one process, driven by the hook, a `with` block or `mark_step`.

>>> from scaletrace.collect import record
>>> with record("capture", start_step=10, steps=3) as session:   # doctest: +SKIP
...     for batch in loader:
...         train_step(batch)
...         session.step()
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from scaletrace.collect import clocks, facts
from scaletrace.collect.guards import Log, ProfilerWatch, leave_at_once_in_children, unsafe_reason
from scaletrace.collect.ranks import Place, here, is_selected
from scaletrace.collect.settings import Settings
from scaletrace.collect.trigger import Trigger
from scaletrace.collect.unwatched import KEPT, Boundaries, summary
from scaletrace.collect.window import Window

_NEVER = 1 << 62
_SLOTS = KEPT - 1
_now_ns = time.perf_counter_ns
_watch = ProfilerWatch()
"""One for the process: a second recorder must know that the first one's profiler is ours."""


class Recorder:
    """Counts boundaries and opens windows. Nothing it does raises into the job; a failure disables it.

    `completed` is the number of steps that have ended, and so the number of the step that begins at a boundary.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.completed = 0
        self.disabled = False
        self.marked = False
        self.watch = _watch
        self._wake = 1
        self._pid = os.getpid()
        self._window: Window | None = None
        self._start_at = settings.start_step if settings.start_step is not None and not settings.for_s else _NEVER
        self._began = 0.0
        self._log = Log(os.path.join(settings.folder, "collect.log"))
        self._trigger = Trigger(settings.folder) if settings.on_demand else None
        self._boundaries = Boundaries()
        self._at_ns = self._boundaries.at_ns
        self._model: dict[str, int] = {}
        self._at_exit = False

    # ------------------------------------------------------------ what drives it

    def step(self) -> None:
        """One step has ended. Costs less than a microsecond while nothing is to be done."""
        if self.disabled:
            return
        number = self.completed = self.completed + 1
        self._at_ns[number & _SLOTS] = _now_ns()
        if number >= self._wake:
            self._guarded(self._boundary)

    def tick(self) -> None:
        """A moment at which a time window may begin or end."""
        if self.settings.for_s and not self.disabled:
            self._guarded(self._time)

    def mark(self) -> None:
        """A step boundary that the job names itself; from now on optimizers don't count."""
        if not self.marked:
            self.marked = True
            self._boundaries.start_over(self.completed + 1)
        self.step()

    def close(self) -> None:
        """The job ends: write what a window that is still open has."""
        if not self.disabled and self._window is not None and os.getpid() == self._pid:
            self._guarded(self._close_window)

    def disable(self) -> None:
        """Do nothing any more (a forked child, or after a failure)."""
        self.disabled = True
        self._window = None

    def note_optimizer(self, optimizer: Any) -> None:
        """From now on this optimizer counts: remember how many parameters it trains; steps so far were of another."""
        self._boundaries.start_over(self.completed + 1)
        self._model.update(facts.told(lambda: facts.parameters(optimizer), {}))

    # ------------------------------------------------------------ what it does

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001  (nothing may reach the job)
            self._log.once(f"disabled by a failure:\n{traceback.format_exc()}")
            self._give_up()

    def _give_up(self) -> None:
        window, self.disabled, self._window = self._window, True, None
        self.watch.give_way = None
        try:
            if window is not None and not unsafe_reason():
                window.abandon()
        except Exception:  # noqa: BLE001  (nothing may reach the job)
            self._log.once(f"the profiler could not be stopped:\n{traceback.format_exc()}")

    def _boundary(self) -> None:
        reason = unsafe_reason()
        if reason:
            self._log.once(f"not recording here: {reason}")
            return
        if not self._began:
            self._first_boundary()
        was_open = self._window
        if self.settings.for_s:
            self._time()
        if was_open is None:
            self._look()
        elif was_open is self._window:
            self._advance(was_open)

    def _first_boundary(self) -> None:
        self._began = time.monotonic()
        place = here()
        address = clocks.master()
        if place.rank == 0 and address and self.settings.probe_port and not self.settings.fake_world:
            clocks.order_responder(self.settings.probe_port, address[1])

    def _advance(self, window: Window) -> None:
        window.advance(self.completed)
        if window.finished:
            self._after_window()

    def _look(self) -> None:
        """No window was open: is it time for one? Sets when to look again."""
        if self._trigger is not None:
            asked = self._trigger.poll(self.completed, here)
            if asked is not None:
                self._start_at = asked
        if self._window is None and self.completed >= self._start_at - 1:
            self._open(max(self._start_at, self.completed + (self._start_at > 1)), self.settings.steps)
        polling = self._trigger is not None or bool(self.settings.for_s) or self._window is not None
        self._wake = self.completed + 1 if polling else self._start_at - 1

    def _time(self) -> None:
        if unsafe_reason():
            return
        self._began = self._began or time.monotonic()
        passed = time.monotonic() - self._began - self.settings.after_s
        if passed >= self.settings.for_s:
            self._close_window()
            self.disabled = True
        elif self._window is None and passed >= 0:
            self._open(self.completed, None)

    def _open(self, first: int, count: int | None) -> None:
        if self.watch.another_is_on():
            self._log.once("stepping aside: the job's own profiler is on")
            self._plan_next(first)
            return
        place, settings = self._place(), self.settings
        several = settings.every or settings.on_demand
        parts = (f"attempt{place.attempt}" if place.attempt else "", f"step{first:06d}" if several else "")
        name = "/".join(part for part in parts if part)
        groups = [(description, members) for _, description, _, members in facts.told(facts.process_groups, [])]
        selected = is_selected(settings.ranks, place, groups)
        window = Window(settings, place, name, selected, self.watch, self._job)
        window.unwatched = facts.told(self.unwatched, None)
        self._window, self._wake = window, 0
        self.watch.give_way = self._give_way
        if not self._at_exit:
            self._at_exit = True
            atexit.register(self.close)
            leave_at_once_in_children()
        window.open(self.completed, first, count)

    def unwatched(self) -> dict[str, int] | None:
        """How long steps took before a window; a fake world has no times."""
        if self.settings.fake_world:
            return None
        return summary(self._boundaries.steps_ns(self.completed, self.watch.watched.spans()))

    def _place(self) -> Place:
        settings, place = self.settings, here()
        if settings.fake_world:
            return replace(place, rank=settings.fake_rank, world_size=settings.fake_world, source="fake world")
        return place

    def _give_way(self) -> None:
        """The job starts a profiler of its own while ours is on."""
        window = self._window
        if window is not None and not unsafe_reason():
            self._log.once("stepped aside: the job started its own profiler during the window; nothing written")
            self._window, self.watch.give_way = None, None
            self._boundaries.start_over(self.completed + 1)
            self._guarded(window.abandon)
            self._plan_next(window.first)

    def _close_window(self) -> None:
        window = self._window
        if window is None or unsafe_reason():
            return
        window.close(self.completed)
        self._after_window()

    def _after_window(self) -> None:
        window, self._window = self._window, None
        self.watch.give_way = None
        if window is None:
            return
        self._boundaries.start_over(self.completed + 1)  # the step that begins now holds the export
        self._plan_next(window.first)
        if not self.settings.launched:
            from scaletrace.collect.upload import deliver_detached

            deliver_detached(self.settings)

    def _plan_next(self, first: int) -> None:
        every = self.settings.every
        self._start_at = first + every if every else _NEVER
        while every and self._start_at <= self.completed + 1:
            self._start_at += every
        self._wake = self.completed + 1 if self._trigger or self.settings.for_s else self._start_at - 1

    def _job(self) -> dict[str, Any]:
        """What is the same for all ranks, so that whoever packs the files needs no settings."""
        settings = self.settings
        model: dict[str, Any] = {**self._model, "tokens_per_step": settings.tokens_per_step}
        model["samples_per_step"] = settings.samples_per_step
        flops, source = settings.flops_per_step, "user"
        if flops is None and settings.tokens_per_step and self._model:
            flops, source = 6.0 * self._model["parameters"] * settings.tokens_per_step, "6 x parameters x tokens"
        if flops is not None:
            model.update(flops_per_step=flops, flops_source=source)
        return {
            "command": list(settings.command),
            "boundary": "mark_step" if self.marked else "time" if settings.for_s else "optimizer.step",
            "fake_world": settings.fake_world,
            "settings": {"shapes": settings.shapes, "stacks": settings.stacks, "memory": settings.memory},
            "ranks_asked": settings.ranks,
            "model": {key: value for key, value in model.items() if value is not None},
            "log": self._log.lines,
        }


_active: Recorder | None = None


def set_active(recorder: Recorder | None) -> None:
    """Make `recorder` the one that `mark_step` and `record` drive in this process."""
    global _active
    _active = recorder


def active() -> Recorder | None:
    """The recorder of this process, if one is armed."""
    return _active


def mark_step() -> None:
    """End a step of a job without a torch optimizer. Does nothing unless the process is being recorded."""
    if _active is not None and threading.current_thread() is threading.main_thread():
        _active.mark()


class Session:
    """A recording written into the training code: a context manager whose `step` ends a step.

    Under `scaletrace collect` it drives the recording that the command asked for, and its own settings don't count.
    """

    def __init__(self, settings: Settings) -> None:
        self._recorder = _active or Recorder(settings)

    def __enter__(self) -> Self:
        import torch  # noqa: F401  (the guards ask it; a recording without it makes no sense)

        self._recorder.watch.install()
        set_active(self._recorder)
        return self

    def step(self) -> None:
        """A step has ended."""
        self._recorder.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.close()
        if not self._recorder.settings.launched:
            set_active(None)


def record(folder: str | os.PathLike[str], **options: Any) -> Session:
    """Record steps of this process into the capture `folder`; `options` are those of `Settings`.

    Every rank calls it with the same folder and options; each packs its own files in a process beside the job.
    """
    path = os.path.abspath(folder)
    own = {"spool": os.path.join(path, f".spool-{os.uname().nodename}-{os.getpid()}"), "command": tuple(sys.orig_argv)}
    return Session(Settings(folder=path, **{**own, **options}))
