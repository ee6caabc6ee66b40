"""Turns a rank of an emulated cluster into one that need not wait for a time slice, as a host of its own would not."""

from __future__ import annotations

import os


def urgent(network_first: bool = True) -> None:
    """Let this rank's threads run as soon as a core is free, those of the network before or after the one that trains.

    Where ranks are pinned, the network must come after: its thread spins while the one that trains holds the pair's
    lock (gloo, tcp/pair.cc, handleEvents), and on the same core it would keep that one from ever letting go. Needs root.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        first = (thread == os.getpid()) != network_first
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(2 if first else 1))
