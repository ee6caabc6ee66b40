"""How many blocks fill a device follows from what the trace says about the device and the launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrace.parse.events import Events
from scaletrace.parse.graph import NodeKind
from scaletrace.parse.occupancy import Device, device_from, device_of, filling_blocks, grid_blocks
from scaletrace.replay.engine import replay
from tests.parse.traces import built_of, call, job_of, kernel

V100: dict[str, Any] = {
    "numSms": 80,
    "computeMajor": 7,
    "computeMinor": 0,
    "maxThreadsPerMultiprocessor": 2048,
    "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 98304,
}


def _events(folder: Path, **args: Any) -> Events:
    return job_of(folder, [kernel("gemm", 0, 10, 1, **args)]).ranks[0].events


@pytest.mark.parametrize(
    ("args", "blocks"),
    [
        ({"block": [1024, 1, 1]}, 160),
        ({"block": [256, 1, 1]}, 640),
        ({"block": [32, 1, 1]}, 2560),
        ({"block": [256, 1, 1], "registers per thread": 128}, 160),
        ({"block": [128, 1, 1], "shared memory": 49152}, 160),
        ({"block": [1024, 1, 1], "shared memory": 98304}, 80),
        ({}, 80),
    ],
)
def test_blocks_that_fill_a_known_device(tmp_path: Path, args: dict[str, Any], blocks: int) -> None:
    """The scarcest of threads, registers, shared memory and block slots decides; without a shape one block a processor."""
    events = _events(tmp_path, grid=[500, 1, 1], **args)
    rows = np.flatnonzero(events.in_cats("kernel"))

    assert [blocks] == filling_blocks(events, rows, device_from(events, rows, [V100])).tolist()


def test_processors_follow_from_the_recorded_ratio(tmp_path: Path) -> None:
    """Without device properties 264 blocks at 2 a processor tell of 132 of them."""
    events = _events(tmp_path, grid=[264, 1, 1], **{"blocks per SM": 2.0})
    rows = np.flatnonzero(events.in_cats("kernel"))

    assert [132] == filling_blocks(events, rows, device_from(events, rows, None)).tolist()


def test_unknown_device_takes_the_default(tmp_path: Path) -> None:
    """Where the trace says nothing, 80 blocks fill it."""
    events = _events(tmp_path)

    rows = np.flatnonzero(events.in_cats("kernel"))

    assert [80] == filling_blocks(events, rows, device_from(events, rows, None)).tolist()


def test_grid_is_the_product_of_its_sides(tmp_path: Path) -> None:
    """Three dimensions, and 0 where none is recorded."""
    events = job_of(tmp_path, [kernel("a", 0, 1, 1, grid=[2, 3, 4]), kernel("b", 2, 1, 2)]).ranks[0].events

    assert [24, 0] == grid_blocks(events)[events.in_cats("kernel")].tolist()


@pytest.mark.parametrize("properties", [None, "?", [], [{}], [{"numSms": "many"}], [{"numSms": -1}], [3]])
def test_properties_that_say_nothing(properties: Any) -> None:
    """Anything but a list with a number of processors is no device."""
    assert device_of(properties) is None


def test_newer_devices_hold_fewer_blocks() -> None:
    """Of compute capability 8.6 a processor holds 16 blocks, and the system takes 1 KiB of shared memory a block."""
    found = device_of([V100 | {"computeMajor": 8, "computeMinor": 6}])

    assert Device(80, 2048, 65536, 98304, 16, 1024) == found


def test_what_fills_the_device_holds_back_others_at_run_time(tmp_path: Path) -> None:
    """1,000 blocks of 1,024 threads fill a device of 132 processors, 200 don't: only there the other kernel waits."""
    times = {}
    for blocks in (200, 1000):
        shape = {
            "grid": [blocks, 1, 1],
            "block": [1024, 1, 1],
            "blocks per SM": blocks / 132,
            "registers per thread": 32,
        }
        events = [call("cudaLaunchKernel", 0, 4, 1), kernel("big", 6, 400, 1, 7, **shape)]
        events += [call("cudaLaunchKernel", 10, 4, 2), kernel("small", 16, 5, 2, 9, grid=[1, 1, 1], block=[32, 1, 1])]
        (tmp_path / str(blocks)).mkdir()
        graph = built_of(tmp_path / str(blocks), events).graph
        start = replay(graph, arbitrate=True).start_ns
        kernels = np.flatnonzero(graph.nodes(NodeKind.KERNEL))
        times[blocks] = int(np.diff(start[kernels])[0])

    assert {200: 10_000, 1000: 400_000} == times
