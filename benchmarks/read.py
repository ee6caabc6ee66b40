"""Times the reading of a large trace against HTA, traceinsight and the bare fast-JSON decode of the same file, in one run.

    python -P benchmarks/read.py [TRACE] [--mb 300] [--traceinsight FOLDER] [--skip-hta]

A real trace is repeated with shifted times, steps and ids until it has the wanted size. Every reader runs in a process
of its own, after a warm-up on a tiny file; CPU seconds count, since other work may share the machine. FOLDER is an
unpacked traceinsight wheel, which like HTA imports as `hta`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.common import table, write_result

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "traces/hta_v100_2/df_index_resolver.json.gz"
ALL_OF_IT = ", all arguments, with call graph"
CPU_GATE_HTA, CPU_GATE_MSGSPEC, RSS_GATE = 15.0, 3.0, 1.2

_NUMBERS = re.compile(
    rb'("(?:ts|correlation|External id|id|external id)"\s*:\s*)(\d+)((?:\.\d+)?)|(ProfilerStep#)(\d+)'
)


def repeated(document: bytes, mb: float) -> Iterator[bytes]:
    """The text of `document` with its events repeated to about `mb` MB; times, steps and ids shift at each turn."""
    start = document.index(b"[", document.index(b'"traceEvents"')) + 1
    end = document.rindex(b"]")
    body = document[start:end].strip()
    times = [float(match) for match in re.findall(rb'"ts"\s*:\s*(\d+(?:\.\d+)?)', body)]
    latest = max(times)
    late = [value for value in times if value > latest / 2]
    span = int(latest - min(late)) + 1_000_000
    ids = 1 + max(int(match) for match in re.findall(rb'"(?:correlation|External id|id)"\s*:\s*(\d+)', body))
    steps = len(set(re.findall(rb"ProfilerStep#\d+", body)))
    yield document[:start]
    written, turn = 0, 0
    while written < mb * 1e6:

        def shift(match: re.Match[bytes], turn: int = turn) -> bytes:
            if match[4]:
                return match[4] + str(int(match[5]) + turn * steps).encode()
            by = span if b"ts" in match[1] else ids
            return match[1] + str(int(match[2]) + turn * by).encode() + match[3]

        part = _NUMBERS.sub(shift, body) if turn else body
        yield (b",\n  " if turn else b"\n  ") + part
        written, turn = written + len(part), turn + 1
    yield b"\n  " + document[end:]


OURS = """
from scaletrace.parse.reader import read_file
read_file(tiny)
begin()
trace = read_file(path)
finish(len(trace.events), trace.records)
"""
OURS_LINKS = """
from scaletrace.parse.reader import read_file
from scaletrace.parse import kernels, links
def all_of(path):
    trace = read_file(path)
    launches = links.launch_of(trace.events)
    links.op_of(trace.events, launches), links.self_ns(trace.events, links.parent_of(trace.events))
    kernels.classes_of(trace.events)
    return trace
all_of(tiny)
begin()
trace = all_of(path)
finish(len(trace.events), trace.records)
"""
HTA = """
import logging, warnings
logging.disable(logging.CRITICAL); warnings.simplefilter("ignore")
from hta.common.trace import Trace
from hta.common.trace_call_graph import CallGraph
from hta.configs.parser_config import ParserConfig
def load(path):
    config = ParserConfig(ParserConfig.ARGS_COMPLETE) if COMPLETE else ParserConfig.get_default_cfg()
    trace = Trace(trace_files={0: path}, trace_dir="/", parser_config=config)
    trace.load_traces(use_multiprocessing=False, include_last_profiler_step=True)
    if GRAPH:
        CallGraph(trace)
    return trace
load(tiny)
begin()
trace = load(path)
finish(len(trace.traces[0]), None)
"""
MSGSPEC = """
import msgspec
class Args(msgspec.Struct, gc=False):
    external: int | None = msgspec.field(name="External id", default=None)
    correlation: int | None = None
    stream: int | str | None = None
class Event(msgspec.Struct, gc=False):
    ph: str
    name: str
    pid: int | str | None = None
    tid: int | str | None = None
    cat: str | None = None
    ts: float = 0.0
    dur: float | None = None
    args: Args | None = None
class File(msgspec.Struct, gc=False):
    traceEvents: list[Event]
decoder = msgspec.json.Decoder(File)
begin()
with open(path, "rb") as file:
    document = decoder.decode(file.read())
finish(len(document.traceEvents), len(document.traceEvents))
"""
JSON = """
import json
begin()
with open(path, "rb") as file:
    document = json.load(file)
finish(len(document["traceEvents"]), len(document["traceEvents"]))
"""

_FRAME = """
import json, sys, time
path, tiny = sys.argv[1], sys.argv[2]
def peak():
    # not ru_maxrss, which a child inherits from the process that started it
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
def begin():
    global cpu, wall, before
    before = peak()
    cpu, wall = time.process_time(), time.perf_counter()
def finish(rows, records):
    print(json.dumps({{"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "peak": peak(),
                       "start": before, "rows": rows, "records": records}}))
{body}
"""


def measure(body: str, path: Path, tiny: Path, extra_path: str = "") -> dict[str, Any]:
    """Run one reader in a process of its own: CPU and wall seconds of the reading, peak and starting memory in bytes."""
    places = os.pathsep.join(filter(None, (extra_path, os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-P", "-c", _FRAME.format(body=body), str(path), str(tiny)],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:120]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _hta(*, complete: bool, graph: bool) -> str:
    return f"COMPLETE, GRAPH = {complete}, {graph}\n{HTA}"


def tiny_trace(folder: Path) -> Path:
    """A trace of one step, so that every reader has compiled and imported what it needs before it is timed."""
    rows = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 1.5, "dur": 9.5,
         "args": {"External id": 1}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 2.5, "dur": 1.5,
         "args": {"External id": 1, "correlation": 5}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 5.5, "dur": 2.5,
         "args": {"External id": 1, "correlation": 5, "stream": 7}},
    ]  # fmt: skip
    path = folder / "tiny.json"
    path.write_text(json.dumps({"traceEvents": rows}))
    return path


def rows_of(found: dict[str, dict[str, Any]], size: int) -> list[list[object]]:
    """The table's lines, with ratios to our reader."""
    ours = found["scaletrace"]["cpu"]
    out: list[list[object]] = []
    for name, answer in found.items():
        if "failed" in answer:
            out.append([name, "failed", answer["failed"], "", "", "", ""])
            continue
        out.append([
            name, f"{answer['cpu']:.2f}", f"{answer['wall']:.2f}", f"{answer['cpu'] / ours:.1f}",
            f"{answer['peak'] / 1e6:.0f}", f"{answer['peak'] / size:.2f}", f"{answer['rows']:,}",
        ])  # fmt: skip
    return out


def verdicts(found: dict[str, dict[str, Any]], size: int) -> list[str]:
    """One line a gate, with the figure that was measured."""
    ours = found["scaletrace"]
    lines = [
        f"- {size / 1e6 / ours['cpu']:.0f} MB of JSON a CPU second",
        _gate("peak memory over JSON size", ours["peak"] / size, RSS_GATE, below=True),
    ]
    bare = found["msgspec, typed, decode only"]
    if "cpu" in bare:
        lines.append(_gate("CPU over the bare msgspec decode", ours["cpu"] / bare["cpu"], CPU_GATE_MSGSPEC, below=True))
    whole = found["scaletrace, with launches, ops, self times and classes"]
    lines += [
        _gate(f"CPU of {name} over ours with the same", answer["cpu"] / whole["cpu"], CPU_GATE_HTA, below=False)
        for name, answer in found.items()
        if name.endswith(ALL_OF_IT) and "cpu" in answer
    ]
    return lines


def _gate(what: str, value: float, limit: float, *, below: bool) -> str:
    held = value <= limit if below else value >= limit
    return f"- {what}: {value:.2f} (gate: {'at most' if below else 'at least'} {limit}) {'holds' if held else 'FAILS'}"


def main() -> int:
    """Make the trace, run every reader, print and write the table; 1 where a gate fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    data = Path(os.environ.get("SCALETRACE_DATA", ROOT.parent / "shared" / "data"))
    parser.add_argument("trace", nargs="?", type=Path, default=data / DEFAULT)
    parser.add_argument("--mb", type=float, default=300)
    parser.add_argument("--traceinsight", default="")
    parser.add_argument("--skip-hta", action="store_true")
    options = parser.parse_args()
    if not options.trace.is_file():
        print(f"{options.trace}: not found; give a Kineto trace")
        return 2
    raw = options.trace.read_bytes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, tiny = folder / "large.json", tiny_trace(folder)
        with path.open("wb") as sink:
            sink.writelines(repeated(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, options.mb))
        size = path.stat().st_size
        packed = folder / "large.json.gz"
        with path.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            while part := source.read(1 << 22):
                target.write(part)
        found = {
            "scaletrace": measure(OURS, path, tiny),
            "scaletrace, from gzip": measure(OURS, packed, tiny),
            "scaletrace, with launches, ops, self times and classes": measure(OURS_LINKS, path, tiny),
            "msgspec, typed, decode only": measure(MSGSPEC, path, tiny),
            "json, decode only": measure(JSON, path, tiny),
        }
        peers = {} if options.skip_hta else {"HTA 0.5.0": "", "traceinsight": options.traceinsight}
        for name, place in peers.items():
            if name == "HTA 0.5.0" or place:
                found[f"{name}, 10 arguments"] = measure(_hta(complete=False, graph=False), path, tiny, place)
                found[f"{name}, all arguments it knows"] = measure(_hta(complete=True, graph=False), path, tiny, place)
                found[f"{name}{ALL_OF_IT}"] = measure(_hta(complete=True, graph=True), path, tiny, place)
    columns = ["reader", "CPU s", "wall s", "CPU / ours", "peak MB", "peak / JSON", "rows"]
    lines = verdicts(found, size)
    body = f"{options.trace.name} repeated to {size / 1e6:.0f} MB, {found['scaletrace']['records']:,} records.\n\n"
    body += table(columns, rows_of(found, size)) + "\n\n" + "\n".join(lines)
    started = time.strftime("%H:%M")
    print(write_result("read", f"Reading one large trace ({started} UTC)", body, "numba", "numpy", "msgspec", "pandas"))
    return int(any("FAILS" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
