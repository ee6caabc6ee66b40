"""Turns the published tables into the accuracy page docs/validation.md: every gate, what was fitted, what was predicted.

    make validate        or        python -P benchmarks/validate.py [--only SOURCE] [--check]

The tables are looked for in ../shared/data or $SCALETRACE_DATA; where they are absent, that is said and nothing is written.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.common import environment
from benchmarks.validation.report import gate_table, page, plots
from benchmarks.validation.result import Result, Verdict
from benchmarks.validation.robustness import section
from benchmarks.validation.rows import tables_folder

SOURCES = (
    "mlperf",
    "internevo",
    "ptdp",
    "mosaic",
    "megascale",
    "megatron_a100",
    "lumos",
    "nanotron",
    "collectives_fig2",
    "papers",
    "unseen",
    "traces",
)
"""Modules of benchmarks/validation, each with `results(tables)`."""

FILES = (
    "scaling_points.csv",
    "mlperf_training_steps.csv",
    "vtrain_single_node.csv",
    "collectives.csv",
    "erdil_epoch_h100_default_utilization_curve.csv",
)


def results(tables: Path, only: str = "") -> list[Result]:
    """The results of all sources, in the order of the page."""
    out: list[Result] = []
    for name in SOURCES:
        if only in ("", name):
            out += importlib.import_module(f"benchmarks.validation.{name}").results(tables)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns 1 with --check where a gate is missed that names no reason."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", choices=["", *SOURCES], help="one source, printed and not written")
    options.add_argument("--check", action="store_true", help="fail where a gate is missed without a stated reason")
    chosen = options.parse_args(argv)
    tables = tables_folder()
    missing = [name for name in FILES if tables is None or not (tables / name).is_file()]
    if tables is None or missing:
        sys.stdout.write(
            f"validation skipped: published tables not found ({', '.join(missing)}); set SCALETRACE_DATA\n"
        )
        return 0
    begin = time.process_time()
    found = results(tables, chosen.only)
    seconds = time.process_time() - begin
    gates = [gate for result in found for gate in result.gates]
    sys.stdout.write(gate_table(gates) + f"\n\n{seconds:.0f} CPU seconds\n")
    if not chosen.only:
        made = ", ".join(f"{key} {value}" for key, value in environment("numpy", "numba").items())
        docs = ROOT / "docs"
        splits = section(tables)
        seconds = time.process_time() - begin
        text = page(found, made, seconds, robustness=splits)
        (docs / "validation.md").write_text(text, encoding="utf-8")
        for name, picture in plots(found).items():
            (docs / name).write_text(picture, encoding="utf-8")
    unexplained = [gate for gate in gates if gate.verdict is Verdict.MISSED and not gate.reason]
    return 1 if chosen.check and unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
