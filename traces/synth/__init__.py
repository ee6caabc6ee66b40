"""Turns a program of kernels and collectives per rank into Kineto files like those of a real run, whole or with faults."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from scaletrace.errors import UsageError
from scaletrace.traces.synth.faults import Fault, conditions, damage_events, damage_text
from scaletrace.traces.synth.kineto import (
    START_NS,
    Style,
    file_name,
    header,
    manifest_text,
    rank_events,
    trace_text,
    write_text,
)
from scaletrace.traces.synth.program import (
    Annotation,
    Backward,
    Collective,
    HostOp,
    Instruction,
    Kernel,
    Module,
    ProcessGroup,
    Sync,
    SynthJob,
    Wait,
)
from scaletrace.traces.synth.schedule import Condition, Schedule, schedule

__all__ = [
    "Annotation",
    "Backward",
    "Collective",
    "Condition",
    "Fault",
    "HostOp",
    "Instruction",
    "Kernel",
    "Module",
    "ProcessGroup",
    "Schedule",
    "Style",
    "Sync",
    "SynthJob",
    "Wait",
    "plan",
    "schedule",
    "write_capture",
]


_HEADER_BYTES = 64 << 20
"""The word that marks our files stands behind the lists of the groups' ranks."""


def plan(job: SynthJob, faults: Sequence[Fault] = ()) -> Schedule:
    """When everything happens, with the faults that change timing (slow ranks, delays, jitter, …) applied."""
    return schedule(job, conditions={rank: conditions(faults, rank) for rank in job.programs})


def write_capture(job: SynthJob, folder: Path, faults: Sequence[Fault] = (), style: Style | None = None) -> list[Path]:
    """Write one Kineto file for each rank with a program, and a manifest beside them where the job describes its model.

    Returns the traces. Raises UsageError for a fault of a rank that is not written.
    """
    for fault in faults:
        if fault.rank >= 0 and fault.rank not in job.programs:
            raise UsageError(f"fault {fault.kind}: rank {fault.rank} is not written; there are {sorted(job.programs)}")
    names = {rank: _names(rank, faults) for rank in sorted(job.programs)}
    _refuse_others(folder, {name for own in names.values() for name in own})
    timing = plan(job, faults)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if job.model:
        write_text(folder / "manifest.json", manifest_text(job))
    for rank, own in names.items():
        mine = [fault for fault in faults if fault.concerns(rank)]
        how = _style(style or Style(), {fault.kind for fault in mine})
        starts = [START_NS + timing.start_ns[first] for _, first, _ in timing.plans[rank].steps]
        text = ""
        for name in own:
            if not text:
                events = damage_events(rank_events(job, timing, rank, how), mine, rank, starts)
                text = damage_text(trace_text(header(job, rank, how), events), mine, rank)
            write_text(folder / name, text)
            written.append(folder / name)
    return written


def _names(rank: int, faults: Sequence[Fault]) -> list[str]:
    """Files of a rank: one, two where it is doubled, none where it is missing."""
    kinds = {fault.kind for fault in faults if fault.concerns(rank)}
    if "missing" in kinds:
        return []
    return [file_name(rank), f"again-{file_name(rank)}"] if "twice" in kinds else [file_name(rank)]


def _refuse_others(folder: Path, own: set[str]) -> None:
    """Traces that would stay beside the written ones would be read as ranks of the same job, and a recording in their
    place would be lost."""
    others = sorted(path.name for path in folder.glob("*rank*.json*") if path.name not in own)
    if others:
        raise UsageError(f"{folder} holds other traces ({others[0]}); choose an empty folder or take them away")
    recorded = next((name for name in sorted(own) if (folder / name).exists() and not _is_ours(folder / name)), None)
    if recorded:
        raise UsageError(
            f"{folder / recorded} was not written by synth and would be overwritten; choose another folder"
        )


def _is_ours(path: Path) -> bool:
    """Whether an earlier run of the synthesizer wrote the file, as its header says."""
    try:
        with gzip.open(path) as stream:
            return b'"synthetic"' in stream.read(_HEADER_BYTES)
    except (OSError, EOFError, zlib.error):
        return False


def _style(style: Style, kinds: set[str]) -> Style:
    """The style with what the faults leave out."""
    old = "old-torch" in kinds
    return Style(
        sync_events=style.sync_events and not old and "no-sync-events" not in kinds,
        sequence=style.sequence and not old and "no-sequence" not in kinds,
        groups=style.groups and not old,
        kernel_metadata=style.kernel_metadata and not old,
        shapes=style.shapes and "no-shapes" not in kinds,
        modules=style.modules and "no-modules" not in kinds,
    )
