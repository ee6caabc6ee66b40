"""Makes the pictures of these pages from the shipped samples, in a headless Chromium.

python docs/make_pictures.py
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from scaletrace.cli.common import document
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from scaletrace.replay.result import replay_job
from scaletrace.view.perfetto import write_timeline
from scaletrace.view.report import write_plots, write_report
from scaletrace.view.serve import TraceServer
from tests.view.chromium import chromium

PICTURES = ROOT / "docs" / "pictures"
SAMPLES = ROOT / "traces" / "samples"
LONGEST = (
    "select s.id as n from slice s join track t on s.track_id = t.id "
    "where t.name = 'Critical path' and s.name not like 'gap%' order by s.dur desc limit 1"
)


def main() -> None:
    """A selected piece of the critical path in Perfetto, the report, and plots as SVG."""
    result = replay_job(build(load(str(SAMPLES / "ddp_straggler_w4"))))
    replayed = document("scaletrace.replay/1", "ddp_straggler_w4", result.health.to_json(), **result.to_json_parts())
    sizes = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    curve = extrapolate(build(load(str(SAMPLES / "ddp_w4"))), cluster=Cluster.load("gloo_10g"), sizes=sizes)
    stretched = document("scaletrace.extrapolate/1", "ddp_w4", curve.health.to_json(), **curve.to_json_parts())
    write_plots(PICTURES, [stretched, replayed])
    with tempfile.TemporaryDirectory() as name, chromium() as page:
        folder = Path(name)
        report = write_report(folder / "report.html", [stretched, replayed])
        page.size(1100, 760)
        page.open(report.path.as_uri())
        page.wait_for("document.querySelectorAll('svg.plot').length > 0")
        page.screenshot(PICTURES / "report.png")
        trace = write_timeline(
            folder / "replay.pftrace", result.timeline, measured=result.built.measured, critical_path=result.path
        )
        server = TraceServer(trace.path)
        stop = threading.Event()
        thread = threading.Thread(target=server.serve, args=(stop.is_set,))
        thread.start()
        try:
            page.size(1400, 860)
            page.open(server.url)
            page.wait_for("!!globalThis.app?.trace && app.trace.workspace.pinnedTracks.length >= 3")
            page.wait_for("document.body.innerText.includes('Query result')")
            page.screenshot(PICTURES / "perfetto.png")
            longest = page.evaluate(f"app.trace.engine.query({LONGEST!r}).then(r => Number(r.firstRow({{n: 0}}).n))")
            page.evaluate(f"app.trace.selection.selectSqlEvent('slice', {longest}, {{scrollToSelection: true}})")
            page.wait_for("document.body.innerText.includes('Arguments')")
            page.wait_for("document.body.innerText.includes('why')")
            page.screenshot(PICTURES / "critical-path.png")
        finally:
            stop.set()
            thread.join()
            server.close()


if __name__ == "__main__":
    main()
