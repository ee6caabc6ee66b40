"""Turns "is it safe now?" into yes or no, and keeps every failure of the collector away from the job.

What is known to hurt: starting or stopping the profiler inside backward or off the main thread crashes the process;
a second profiler makes the user's own raise; a CUDA graph under capture must not be disturbed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from scaletrace.collect.unwatched import Watched

_FOREIGN_CALLS = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")


class Log:
    """Lines appended to one file, each kind once. Where it can't be written, the first is said on stderr and no other."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._said: set[str] = set()

    def once(self, text: str) -> None:
        """Append `text` with time and process, unless this process has said it before."""
        if text in self._said:
            return
        self._said.add(text)
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} pid {os.getpid()}: {text}\n"
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            lines = text.splitlines()
            shown = " ".join([lines[0], *lines[1:][-1:]])  # of a traceback the last line says what it was
            say(f"{shown} ({self._path} can't be written: {error.strerror})")
            self._path = os.devnull

    @property
    def lines(self) -> list[str]:
        """What was said so far, for the manifest."""
        return sorted(self._said)


def say(text: str) -> None:
    """One line on the job's stderr, where there is one."""
    with contextlib.suppress(Exception):  # closed, or replaced by something of the job's own
        if sys.stderr is not None:
            sys.stderr.write(f"scaletrace: {text}\n")


def unsafe_reason() -> str:
    """Why the profiler must not be touched right now; "" where it may."""
    if threading.current_thread() is not threading.main_thread():
        return "the step boundary is off the main thread"
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return "torch is not imported"
    if torch._C._current_graph_task_id() != -1:
        return "the step boundary is inside backward (an optimizer that runs in backward hooks)"
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def leave_at_once_in_children() -> None:
    """Let a forked child that leaves by `exit` skip the destructors of C++ libraries.

    Once Kineto was used, its configuration loader waits in a thread. A forked child has no such thread, and the
    loader's destructor waits for it for ever, so `sys.exit` in the child would hang (seen with torch 2.13). What Python
    and the C library have buffered is written first. Children that end by `os._exit` or `exec` are not concerned.
    """
    libc: Any = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("on_exit", "__cxa_atexit", "fcloseall", "_exit")):
        return
    end, flush = (ctypes.cast(function, ctypes.c_void_p) for function in (libc._exit, libc.fcloseall))

    def arrange() -> None:
        libc.on_exit(end, None)  # handlers run in reverse order, so this one ends what the next one has flushed
        getattr(libc, "__cxa_atexit")(flush, None, None)

    os.register_at_fork(after_in_child=arrange)


class ProfilerWatch:
    """Notices profilers other than ours, by the three functions through which all of torch's profilers go.

    `busy` is true from another profiler's preparation to its end. When another one comes while ours is on, `give_way`
    is called first, so that the user's start does not fail.
    """

    def __init__(self) -> None:
        self.ours = False
        self.busy = False
        self.watched = Watched()
        self.give_way: Callable[[], None] | None = None

    def install(self) -> None:
        """Wrap the three functions in torch.autograd.profiler; costs nothing until a profiler is used."""
        module: Any = sys.modules.get("torch.autograd.profiler")
        if module is None:
            return
        for name in _FOREIGN_CALLS:
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, "scaletrace"):
                setattr(module, name, self._wrapped(original, begins=name != "_disable_profiler"))

    def _wrapped(self, original: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.ours:
                if begins and self.give_way is not None:
                    self.give_way()
                self.busy = begins
                (self.watched.begin if begins else self.watched.end)(time.perf_counter_ns())
            return original(*args, **kwargs)

        call.scaletrace = True  # type: ignore[attr-defined]
        return call

    def another_is_on(self) -> bool:
        """Whether somebody else's profiler is prepared or running in this thread."""
        torch: Any = sys.modules["torch"]
        return self.busy or bool(torch.autograd._profiler_enabled())
