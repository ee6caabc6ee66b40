"""Turns the description of a job (model, cluster, layout) into a capture: Kineto files as a real run would leave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, err, exit_codes, out, print_json
from scaletrace.errors import LimitError, UsageError

if TYPE_CHECKING:
    from scaletrace.extrapolate.described.planned import Described, Item
    from scaletrace.traces.synth import Instruction, SynthJob

_CALIBRATED = 1e-4
_MOST_RANKS = 1 << 20
_RECORDS_PER_LAYER = 120
_MOST_RECORDS = 20_000_000
"""About 8 GB of files and as much memory."""


def synth(
    model: Annotated[
        str, typer.Option(help="A built-in model (llama2-7b, gpt3-175b, mixtral-8x7b, …) or a YAML file.")
    ],
    layout: Annotated[
        str, typer.Option(help="Degrees and sizes, as in fsdp=8,mbs=2 or tp=4,pp=8,dp=2,microbatches=16.")
    ],
    cluster: Annotated[str, typer.Option(help="A cluster of the catalog, or a YAML file.")] = "dgx_h100",
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")] = Path("synth"),
    steps: Annotated[int, typer.Option(help="Steps to record.", min=1)] = 3,
    ranks: Annotated[
        str, typer.Option(help="Which ranks to write: distinct, all, or numbers such as 0,8.")
    ] = "distinct",
    step_time: Annotated[float | None, typer.Option(help="Calibrate to this step time, in seconds.")] = None,
    mfu: Annotated[float | None, typer.Option(help="Calibrate to this model FLOP utilization, 0 to 1.")] = None,
    flash: Annotated[bool, typer.Option(help="Flash attention, or separate score kernels.")] = True,
    fault: Annotated[
        list[str] | None, typer.Option(help="Damage: KIND[:RANK[:AMOUNT]], as in clock:1:2000000; repeatable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code tells.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Write Kineto files for a described job, one for each distinct rank, with faults if wanted.

    Example: scaletrace synth --model llama2-7b --layout fsdp=8,mbs=2 --mfu 0.4 --out runs/llama
    """
    with exit_codes(debug):
        from scaletrace.traces.synth import Fault, plan, write_capture
        from scaletrace.view.progress import progress

        described = _described(model, layout, cluster, flash)
        target_s = _target_s(described, step_time, mfu)
        faults = [Fault.parse(text) for text in fault or ()]
        chosen = _ranks(described, ranks)
        _check_size(described, len(chosen), steps)
        with progress("calibrating" if target_s else "planning", err) as advance:
            scale, job = _calibrated(described, chosen, steps, target_s)
            advance(1, 2, f"writing {len(chosen)} ranks")
            written = write_capture(job, output, faults)
            step_s = plan(job).step_ns(steps - 1) / 1e9
        answer = _answer(described, job, scale, step_s, target_s, written)
        if json_:
            print_json(document("scaletrace.synth/1", str(output), _health(described, target_s), **answer))
        elif not quiet:
            out.print(
                f"{len(written)} files in {output}: {described.model.name}, {described.layout}, world {job.world_size}, "
                f"step {step_s:.4f} s, {answer['tokens_per_s_per_gpu']:.0f} tokens/s a GPU, MFU {answer['mfu']:.1%}"
            )
            for note in _health(described, target_s)["notes"]:
                out.print(f"note: {note}")


def _described(model: str, layout: str, cluster: str, flash: bool) -> Described:
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.described.constants import costs_on, device_of
    from scaletrace.extrapolate.described.models import load_model
    from scaletrace.extrapolate.described.planned import Described
    from scaletrace.extrapolate.layout import Layout

    device = device_of(Cluster.load(cluster))
    return Described(load_model(model), Layout.parse(layout), device, costs_on(device, flash=flash))


def _target_s(described: Described, step_time: float | None, mfu: float | None) -> float | None:
    """Seconds of a step to calibrate to, or None for modelled times as they are."""
    if step_time is not None and mfu is not None:
        raise UsageError("--step-time and --mfu both calibrate; give one of them")
    if step_time is not None:
        if step_time <= 0:
            raise UsageError(f"--step-time {step_time} must be positive")
        return step_time
    if mfu is None:
        return None
    if not 0 < mfu <= 1:
        raise UsageError(f"--mfu {mfu} must lie between 0 and 1")
    flop = described.model.step_flop(described.tokens_per_step, described.seq)
    return flop / (mfu * described.device.bf16_flop_s * described.layout.ranks)


def _ranks(described: Described, text: str) -> tuple[int, ...]:
    from scaletrace.extrapolate.described.expand import distinct_ranks

    world = described.layout.ranks
    if world > _MOST_RANKS:
        raise LimitError(f"a world of {world:,} ranks; its groups are listed rank by rank up to {_MOST_RANKS:,}")
    if text == "distinct":
        return distinct_ranks(described.layout)
    if text == "all":
        return tuple(range(world))
    try:
        chosen = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise UsageError(f"--ranks {text!r}: write distinct, all, or numbers such as 0,8") from error
    if chosen[0] < 0 or chosen[-1] >= world:
        raise UsageError(f"--ranks {text!r}: the world has ranks 0 to {world - 1}")
    return chosen


def _check_size(described: Described, ranks: int, steps: int) -> None:
    """Refuse what would not fit into memory, before it is built."""
    layers = -(-described.model.layers // described.layout.pp)
    records = ranks * steps * described.micro_batches * layers * _RECORDS_PER_LAYER
    if records > _MOST_RECORDS:
        raise LimitError(
            f"about {records:,} records in {ranks} ranks and {steps} steps, more than {_MOST_RECORDS:,}; "
            "write fewer ranks (--ranks), steps (--steps), microbatches or layers"
        )


def _calibrated(
    described: Described, ranks: Sequence[int], steps: int, target_s: float | None
) -> tuple[float, SynthJob]:
    """The factor on kernel times that makes the written step last `target_s`, and the job with it."""
    from scaletrace.extrapolate.described.expand import expand
    from scaletrace.extrapolate.described.lanes import solve_increasing
    from scaletrace.traces.synth import plan

    items = {rank: expand(described, rank) for rank in ranks}
    if target_s is None:
        return 1.0, _job(described, items, steps, 1.0)

    def step_s(scale: float) -> float:
        return plan(_job(described, items, 2, scale)).step_ns(1) / 1e9

    scale = solve_increasing(step_s, target_s, guess=1.0, tolerance=_CALIBRATED)
    return scale, _job(described, items, steps, scale)


def _job(described: Described, items: Mapping[int, Sequence[Item]], steps: int, scale: float) -> SynthJob:
    from scaletrace.extrapolate.described.expand import groups
    from scaletrace.traces.synth import ProcessGroup, SynthJob

    found = [
        (axis, ProcessGroup(str(i), text, ranks)) for i, (axis, text, ranks) in enumerate(groups(described.layout))
    ]
    of_rank = {rank: {axis: group.name for axis, group in found if rank in group.ranks} for rank in items}
    return SynthJob(
        world_size=described.layout.ranks,
        groups=tuple(group for _, group in found),
        programs={rank: _program(own, scale, of_rank[rank]) for rank, own in items.items()},
        steps=steps,
        device=described.device.name,
        sm_count=described.device.sm_count,
        gpus_per_node=described.device.gpus_per_node,
        name=described.model.name,
        facts={"layout": str(described.layout), "kernel_scale": f"{scale:.6f}"},
    )


def _program(items: Sequence[Item], scale: float, group_of: Mapping[str, str]) -> tuple[Instruction, ...]:
    """Planned items as instructions of the synthesizer; only compute takes the calibrated factor."""
    from scaletrace.extrapolate.described.planned import PlannedCollective, PlannedKernel, PlannedRange
    from scaletrace.traces.synth import Annotation, Collective, Kernel, Sync, Wait

    def convert(item: Item) -> Instruction:
        if isinstance(item, PlannedKernel):
            return Kernel(item.name, round(item.seconds * scale * 1e9), item.op, blocks=item.blocks, shapes=item.shapes)
        if isinstance(item, PlannedCollective):
            return Collective(
                item.kind,
                group_of[item.axis],
                round(item.seconds * 1e9),
                item.in_elements,
                item.out_elements,
                item.dtype,
                item.stream,
                item.peer,
            )
        if isinstance(item, PlannedRange):
            return Annotation(item.name, tuple(convert(inner) for inner in item.body))
        return Wait(item.on)

    return (*(convert(item) for item in items), Sync())


def _answer(
    described: Described, job: SynthJob, scale: float, step_s: float, target_s: float | None, written: Sequence[Path]
) -> dict[str, Any]:
    tokens = described.tokens_per_step / described.layout.ranks / step_s
    flop = described.model.step_flop(described.tokens_per_step, described.seq) / described.layout.ranks
    return {
        "model": described.model.name,
        "parameters": described.model.parameters,
        "layout": described.layout.to_json(),
        "world_size": job.world_size,
        "ranks": sorted(job.programs),
        "files": [str(path) for path in written],
        "step_time_s": step_s,
        "tokens_per_s_per_gpu": tokens,
        "mfu": flop / step_s / described.device.bf16_flop_s,
        "kernel_scale": scale,
        "provenance": "calibrated" if target_s is not None else "modelled",
    }


def _health(described: Described, target_s: float | None) -> dict[str, Any]:
    notes = []
    if target_s is None:
        notes.append("kernel times are modelled and not calibrated; give --step-time or --mfu for a measured anchor")
    if described.micro_batches != described.layout.microbatches:
        notes.append(f"microbatches not given; {described.micro_batches} taken")
    return {
        "repaired": {},
        "clipped": {},
        "dropped": {},
        "guessed": {"kernel times without a measured anchor": 1} if target_s is None else {},
        "unmatched": {},
        "notes": notes,
    }
