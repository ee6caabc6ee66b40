"""How far the clocks of hosts leave open who was late."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from scaletrace.parse.load import load
from scaletrace.replay.result import replay_job
from scaletrace.view.terminal import replay_headline


def on_own_hosts(source: Path, target: Path) -> Path:
    """A copy of a capture in which every rank says another host, so that nothing but its collectives bounds its clock."""
    target.mkdir()
    for rank, path in enumerate(sorted(source.glob("rank*.json.gz"))):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        trace["host_name"] = f"node{rank}"
        (target / path.name).write_bytes(gzip.compress(json.dumps(trace).encode()))
    return target


def test_waits_between_hosts_say_how_well_their_clocks_are_known(samples: Path, tmp_path: Path) -> None:
    """The headline and the JSON have the doubt where it is as wide as the wait, and none where the ranks share a host."""
    source = samples / "ddp_straggler_w4"
    near, far = (
        replay_job(load(folder)).to_json_parts() for folder in (source, on_own_hosts(source, tmp_path / "far"))
    )
    late = max(far["stragglers"], key=lambda one: one["caused_wait_ns"])

    assert {0} == {one["clock_doubt_ns"] for one in near["stragglers"]} and "±" not in replay_headline(near)
    assert 2 * late["clock_doubt_ns"] > late["each_waited_ns"]
    assert "as clocks of hosts are known no better: another rank may be late" in replay_headline(far)
