"""Turns a graph into masks: which nodes run on a device, and which are its compute."""

from __future__ import annotations

import numpy as np

from scaletrace.parse.events import BoolArray
from scaletrace.parse.graph import Graph, NodeKind


def device_lanes(graph: Graph) -> BoolArray:
    """bool[n]: nodes on a stream of a device."""
    is_device = np.array([lane.is_device for lane in graph.lanes] + [False], np.bool_)
    return np.asarray(is_device[graph.lane])


def compute_nodes(graph: Graph) -> BoolArray:
    """bool[n]: kernels and copies on a device, or host work where the job has no device."""
    device = device_lanes(graph) & graph.nodes(NodeKind.KERNEL, NodeKind.COPY)
    return device if device.any() else graph.nodes(NodeKind.HOST)
