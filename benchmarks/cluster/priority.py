"""Turns a rank of an emulated cluster into one that need not wait for a time slice, as a host of its own would not."""

from __future__ import annotations

import os


def urgent() -> None:
    """Let this rank's threads run as soon as a core is free, those of the network first. Needs root."""
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1 if thread == os.getpid() else 2))


def ahead() -> None:
    """Let this rank's threads run before all others that share its core, but not alone. Needs root.

    For ranks that are pinned: in real time, two of them on a core can keep the network's threads from it for good.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        os.setpriority(os.PRIO_PROCESS, thread, -20)
