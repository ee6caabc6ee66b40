"""Turns an installation without extras into a verdict: every analysis room imports and answers on one capture.

CI runs it against the newest pandas, in an environment that has none of the optional packages:
python check_core.py [CAPTURE]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pandas as pd

import scaletrace
from scaletrace.view.perfetto import write_timeline

OPTIONAL = ("torch", "hta", "dask", "viztracer", "wasmtime")


def main(capture: str) -> None:
    """Load, replay, stretch and draw; every table goes through pandas."""
    trace = scaletrace.load(capture)
    result = trace.replay()
    curve = trace.extrapolate([8, 64])
    frames = {
        "events": trace.job.ranks[0].events.to_frame(),
        "collectives": trace.job.collectives.to_frame(),
        "replay": result.to_frame(),
        "path": trace.critical_path().to_frame(),
        "curve": curve.to_frame(),
    }
    empty = [name for name, frame in frames.items() if frame.empty]
    with tempfile.TemporaryDirectory() as folder:
        drawn = write_timeline(Path(folder) / "core.pftrace", result.timeline, critical_path=result.path)
    loaded = [name for name in OPTIONAL if name in sys.modules]
    print(f"pandas {pd.__version__}: {', '.join(f'{name} {len(frame)} rows' for name, frame in frames.items())}")
    print(f"{drawn.slices} slices drawn; optional packages imported: {', '.join(loaded) or 'none'}")
    if empty or loaded:
        raise SystemExit(f"the core alone should fill {empty} and import none of {loaded}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent.parent / "traces" / "samples" / "ddp_w2"))
