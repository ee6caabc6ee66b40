"""Turns the description of a job (model, cluster, layout) into a capture: Kineto files as a real run would leave them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, err, exit_codes, in_range, out, print_json
from scaletrace.errors import LimitError, UsageError

if TYPE_CHECKING:
    from scaletrace.extrapolate.described.planned import Described
    from scaletrace.traces.synth import Fault, SynthJob

_MOST_RANKS = 1 << 20
_RECORDS_PER_LAYER = 200
_MOST_RECORDS = 20_000_000
"""About 8 GB of files and as much memory."""
_LONGEST_STEP_S = 1e5
_FASTEST_STEP_S = 1e-6

_MFU = typer.Option(help="Calibrate to this model FLOP utilization, 0 to 1.")
_COUNTS = typer.Option(
    help="What the FLOP of an MFU count: attention (products and attention scores, as PaLM does) or parameters (6 N)."
)
_SLOWER = typer.Option(help="How much slower kernels run beside a collective (0.5, 0: not); default: the device's.")
_PRICE = typer.Option(help="Money per GPU-hour, or a YAML table of it by device, for the cost of tokens.")
_FAULT = typer.Option(
    help="Damage: KIND[:RANK[:AMOUNT]], as in clock:1:2ms or slow:3:1.3; times without a unit are ns; repeatable."
)


def synth(
    model: Annotated[
        str, typer.Option(help="A built-in model (llama2-7b, gpt3-175b, mixtral-8x7b, …) or a YAML file.")
    ],
    layout: Annotated[
        str,
        typer.Option(help="Degrees and sizes, as in fsdp=8,mbs=2 or tp=4,pp=8,dp=2,microbatches=16,schedule=GPipe."),
    ],
    cluster: Annotated[str, typer.Option(help="A cluster of the catalog, or a YAML file.")] = "dgx_h100",
    output: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")] = Path("synth"),
    steps: Annotated[int, typer.Option(help="Steps to record.")] = 3,
    ranks: Annotated[
        str, typer.Option(help="Which ranks to write: distinct, all, or numbers such as 0,8.")
    ] = "distinct",
    step_time: Annotated[float | None, typer.Option(help="Calibrate to this step time, in seconds.")] = None,
    mfu: Annotated[float | None, _MFU] = None,
    mfu_counts: Annotated[str, _COUNTS] = "attention",
    overlap_slowdown: Annotated[float | None, _SLOWER] = None,
    price: Annotated[str, _PRICE] = "",
    flash: Annotated[bool, typer.Option(help="Flash attention, or separate score kernels.")] = True,
    fault: Annotated[list[str] | None, _FAULT] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code tells.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Write Kineto files for a described job, one for each distinct rank, with faults if wanted.

    Example: scaletrace synth --model llama2-7b --layout fsdp=8,mbs=2 --mfu 0.4 --out runs/llama
    """
    with exit_codes(debug):
        from scaletrace.cli.described import Interference, bill, calibrated
        from scaletrace.cli.extrapolate import read_prices
        from scaletrace.traces.synth import Fault, plan, write_capture
        from scaletrace.view.progress import progress

        _check(steps, step_time, overlap_slowdown)
        faults = [Fault.parse(text) for text in fault or ()]
        prices = read_prices(price) if price else None
        described = _described(model, layout, cluster, flash)
        flop = _flop(described, mfu_counts)
        target_s = _target_s(described, flop, step_time, mfu)
        chosen = _ranks(described, ranks)
        _check_size(described, len(chosen), steps)
        with progress("calibrating" if target_s else "planning", err) as advance:
            facts = _facts(described, flop, mfu_counts)
            apart = Interference(overlap_slowdown, 0.0 if overlap_slowdown == 0 else None)
            scale, job = calibrated(described, chosen, steps, target_s, apart, facts)
            advance(1, 2, f"writing {len(chosen)} ranks")
            written = write_capture(job, output, faults)
            timing = plan(job)
        step_s = timing.step_ns(steps - 1) / 1e9
        answer = _answer(described, job, scale, step_s, flop, target_s)
        answer |= bill(described, timing, steps - 1, answer["tokens_per_s_per_gpu"], prices)
        answer |= {"mfu_counts": mfu_counts, "files": list(map(str, written)), "faults": list(map(str, faults))}
        answer["overlap_slowdown"] = apart.beside(described)
        health = _health(described, target_s, faults)
        if json_:
            print_json(document("scaletrace.synth/1", str(output), health, **answer))
        elif not quiet:
            _show(answer, health, described, output)


def _check(steps: int, step_time: float | None, overlap_slowdown: float | None) -> None:
    in_range("--steps", steps, 1, 1e6)
    in_range("--step-time", step_time, _FASTEST_STEP_S, _LONGEST_STEP_S)
    in_range("--overlap-slowdown", overlap_slowdown, 0, 100)


def _show(answer: dict[str, Any], health: dict[str, Any], described: Described, output: Path) -> None:
    out.print(
        f"{len(answer['files'])} file{'s' * (len(answer['files']) != 1)} in {output}: {described.model.name}, {described.layout}, "
        f"world {answer['world_size']}, step {answer['step_time_s']:.4f} s, "
        f"{answer['tokens_per_s_per_gpu']:.0f} tokens/s a GPU, MFU {answer['mfu']:.1%}",
        markup=False,
    )
    if answer["power_W_per_gpu"]:
        money = answer["money_per_million_tokens"]
        cost = f", {money:.4g} a million tokens" if money is not None else ""
        out.print(
            f"modelled power {answer['power_W_per_gpu']:.0f} W a GPU, {answer['tokens_per_J']:.3g} tokens a joule{cost}"
        )
    for fault in answer["faults"]:
        out.print(f"injected: {fault}", markup=False)
    for note in health["notes"]:
        out.print(f"note: {note}", markup=False)


_ZERO = re.compile(r"(?:^|[ ,])(?!zero|sp)([a-z_]+)=0+(?=$|[ ,])", re.IGNORECASE)


def _described(model: str, layout: str, cluster: str, flash: bool) -> Described:
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.described.constants import costs_on, device_of
    from scaletrace.extrapolate.described.models import load_model
    from scaletrace.extrapolate.described.planned import Described
    from scaletrace.extrapolate.layout import Layout

    cut = Layout.parse(layout)
    nothing = _ZERO.search(layout)
    if nothing:
        # 0 means "as measured" for a capture; a described job has nothing measured.
        raise UsageError(f"--layout {layout!r}: {nothing[1]}=0 is not possible; leave it out or give at least 1")
    device = device_of(Cluster.load(cluster))
    return Described(load_model(model), cut, device, costs_on(device, flash=flash))


def _flop(described: Described, counts: str) -> float:
    """Model FLOP of one step of the whole job by the chosen way of counting."""
    if counts == "attention":
        return described.model.step_flop(described.tokens_per_step, described.seq)
    if counts == "parameters":
        return 6.0 * described.model.active_parameters * described.tokens_per_step
    raise UsageError(f"--mfu-counts {counts!r}: write attention (6 N and attention scores) or parameters (6 N)")


def _facts(described: Described, flop: float, counts: str) -> dict[str, float | str]:
    """What the manifest says of the model, so that every command counts the same tokens and FLOP."""
    return {
        "parameters": described.model.parameters,
        "tokens_per_step": described.tokens_per_step,
        "samples_per_step": described.tokens_per_step // described.seq,
        "flops_per_step": flop,
        "flops_source": f"model FLOP, {counts} counted",
    }


def _target_s(described: Described, flop: float, step_time: float | None, mfu: float | None) -> float | None:
    """Seconds of a step to calibrate to, or None for modelled times as they are."""
    if step_time is not None and mfu is not None:
        raise UsageError("--step-time and --mfu both calibrate; give one of them")
    if mfu is None:
        return step_time
    if not 0 < mfu <= 1:
        raise UsageError(f"--mfu {mfu} must lie between 0 and 1")
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


def _answer(
    described: Described, job: SynthJob, scale: float, step_s: float, flop: float, target_s: float | None
) -> dict[str, Any]:
    ranks = described.layout.ranks
    return {
        "model": described.model.name,
        "parameters": described.model.parameters,
        "layout": described.layout.to_json(),
        "schedule": described.layout.pipeline_schedule if described.layout.pp > 1 else None,
        "world_size": job.world_size,
        "ranks": sorted(job.programs),
        "step_time_s": step_s,
        "tokens_per_s_per_gpu": described.tokens_per_step / ranks / step_s,
        "mfu": flop / ranks / step_s / described.device.bf16_flop_s,
        "kernel_scale": scale,
        "provenance": "calibrated" if target_s is not None else "modelled",
    }


def _health(described: Described, target_s: float | None, faults: Sequence[Fault]) -> dict[str, Any]:
    notes = []
    if target_s is None:
        notes.append("kernel times are modelled and not calibrated; give --step-time or --mfu for a measured anchor")
    if described.micro_batches != described.layout.microbatches:
        notes.append(f"microbatches not given; {described.micro_batches} taken")
    if not described.layout.mbs:
        notes.append(f"mbs not given; {described.mbs} taken")
    if not described.device.overlap_is_fitted:
        notes.append(f"what overlap costs on {described.device.name} is not known; that of A100 stands in")
    if faults:
        notes.append("step time, throughput and power are those of the job without its faults")
    return {
        "repaired": {},
        "clipped": {},
        "dropped": {},
        "guessed": {"kernel times without a measured anchor": 1} if target_s is None else {},
        "unmatched": {},
        "notes": notes,
    }
