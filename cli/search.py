"""Turns a capture or a model's name into its best layouts at a size, on the command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, err, exit_codes, in_range, out, print_json
from scaletrace.cli.reading import read_job, reads_captures

if TYPE_CHECKING:
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.confirm import Ranking
    from scaletrace.extrapolate.energy import Prices
    from scaletrace.extrapolate.estimate import Fit, Network
    from scaletrace.extrapolate.layout import Layout
    from scaletrace.extrapolate.memory import Memory, StateBytes
    from scaletrace.extrapolate.rewrite.state import State
    from scaletrace.extrapolate.search import Advance, Found, Space
    from scaletrace.extrapolate.workload import Workload
    from scaletrace.parse.build import Built

_PRICE = typer.Option(
    help="Money per GPU-hour, for the cost of tokens: a number, or a YAML or JSON table by device (H100 SXM: 2.50)."
)
_CONFIRM = typer.Option(
    help="How many of the best to predict again by rewriting and replaying the capture's graph, beside the measured "
    "layout, and as many again of those that may still be faster; default: 5, of a large capture 3."
)


@reads_captures
def search(
    path: Annotated[str, typer.Argument(help="Capture (folder, file, glob, URL), or a model: llama3-70b, model.yaml.")],
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")],
    cluster: Annotated[str, typer.Option(help="Cluster of the catalog, or a YAML file.")] = "",
    batch: Annotated[
        int, typer.Option(help="Samples of a step over all GPUs; default: as measured a GPU, or 2 a GPU.")
    ] = 0,
    seq: Annotated[int, typer.Option(help="Tokens a sample; default: as measured, or the model's.")] = 0,
    memory: Annotated[float, typer.Option(help="GB of one device that may be used; default: 95 % of it.")] = 0.0,
    layout: Annotated[str, typer.Option(help="Layout of the capture, where its groups do not tell.")] = "",
    best: Annotated[int, typer.Option(help="How many to show.")] = 10,
    confirm: Annotated[int | None, _CONFIRM] = None,
    price: Annotated[str, _PRICE] = "",
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, no table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the best layout alone.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Find the fastest layouts at a size that fit into memory, and say what the next ones are behind by.

    Example: scaletrace search llama3-70b --gpus 4096 --cluster dgx_h100 --batch 2048
    """
    with exit_codes(debug):
        from scaletrace.cli.extrapolate import read_prices
        from scaletrace.extrapolate.confirm import DESCRIBED, ranked, slowdown_of
        from scaletrace.extrapolate.search import Space
        from scaletrace.view.progress import progress

        in_range("--gpus", gpus, 1, 1_000_000)
        in_range("--best", best, 1, 1000)
        in_range("--confirm", confirm, 0, 100)
        in_range("--batch", batch, 0, 1e7)
        in_range("--seq", seq, 0, 1e9)
        in_range("--memory", memory, 0, 1e6)
        prices = read_prices(price) if price else None
        job = _job(path, cluster, layout)
        space = Space(
            gpus,
            batch or max(1, round(job.per_gpu * gpus)),
            seq or job.work.model.seq,
            memory * 1e9 or 0.95 * job.machine.device.memory_bytes,
            micro_batches=job.micro_batches,
        )
        with progress(f"searching layouts of {gpus:,} GPUs", err) as advance:
            found, state, own = _found(job, space, best, confirm, advance)
            advance(0, 0, "replaying the best")
            lost = slowdown_of(job.built, state) if job.built is not None and state is not None else None
            ranking = ranked(found, state, confirm, own, DESCRIBED if job.built is None else None, advance, lost)
        parts = found.to_json_parts() | ranking.to_json_parts() | {"go_on": _go_on(path, job, space, ranking)}
        answer = _answer(path, job, space, parts, bool(batch), prices)
        if json_:
            print_json(answer)
        elif quiet:
            out.print(str(ranking.rows[0].estimate.layout), soft_wrap=True)
        else:
            show(answer)


def _found(
    job: _Job, space: Space, best: int, confirm: int | None, advance: Advance
) -> tuple[Found, State | None, Layout | None]:
    """(what the search found, the capture's graph where it is to be rewritten, the measured layout at this size)."""
    from scaletrace.errors import ScaletraceError
    from scaletrace.extrapolate.confirm import layout_at, opened
    from scaletrace.extrapolate.estimate import Network
    from scaletrace.extrapolate.search import search as find

    state = own = None
    if job.built is not None and job.measured is not None and confirm != 0:
        try:
            state = opened(job.built, job.measured, job.machine)
        except ScaletraceError as error:
            job.work.health.note(f"No layout is rewritten and replayed: {error}")
    if state is not None:
        own = layout_at(state.layout, space.gpus, space.batch, space.seq)
    elif job.work.anchor is not None:
        own = layout_at(job.work.anchor.layout, space.gpus, space.batch, space.seq)
    found = find(
        job.work,
        job.network or Network(job.machine),
        space,
        best=best,
        fit=job.fit,
        states=job.states,
        memory=job.memory,
        also=own,
        advance=advance,
    )
    return found, state, own


def _go_on(path: str, job: _Job, space: Space, ranking: Ranking) -> str | None:
    """The command that stretches the capture to the best layout; None where `extrapolate` does not make it."""
    first = ranking.rows[0]
    layout, measured = first.estimate.layout, job.measured
    if measured is None or first.replayed_s is None or layout.zero != measured.zero:
        return None
    if (layout.fsdp > 1) != (measured.fsdp > 1):
        return None  # it neither shards what was recorded whole nor the other way round
    return f"scaletrace extrapolate {shlex.quote(path)} --gpus {space.gpus} --layout {layout}"


def _answer(
    path: str, job: _Job, space: Space, parts: dict[str, Any], given: bool, prices: Prices | None
) -> dict[str, Any]:
    """The whole JSON answer; `given`: the user said the batch."""
    work = job.work
    for row in (parts["best"], *parts["next"]):
        row.update(_yield(job, space, row, prices))
    source = {"cluster": job.machine.name, "model": work.model.name, "compute": work.provenance}
    fitted = {name: getattr(job.fit, name) for name in job.fit.__slots__} if job.fit.measured_s else None
    usual = "measured" if job.built is not None else "default"
    global_batch = {
        "samples": space.batch,
        "tokens": space.batch * space.seq,
        "tokens_per_sample": space.seq,
        "samples_per_gpu": space.batch / space.gpus,
        "source": "--batch" if given else usual,
    }
    return document(
        "scaletrace.search/1", path, work.health.to_json(), gpus=space.gpus, **source, model_unknown=list(work.unknown),
        global_batch=global_batch, fit=fitted, memory_limit_bytes=space.memory_bytes, **parts,
    )  # fmt: skip


def _yield(job: _Job, space: Space, row: dict[str, Any], prices: Prices | None) -> dict[str, Any]:
    """Tokens a second of one GPU, MFU and the cost of a million tokens, of the replayed step or else the estimate."""
    from scaletrace.extrapolate.energy import money_per_million_tokens

    device = job.machine.device
    step_s = row["best_known_step_time_s"]
    rate = space.batch * space.seq / space.gpus / step_s
    out: dict[str, Any] = {"tokens_per_s_per_gpu": rate, "mfu": None, "money_per_million_tokens": None}
    flop = job.sample_flop
    if flop and job.on_device:
        model = job.work.model
        longer = model.step_flop(space.seq, space.seq) / model.step_flop(model.seq, model.seq)
        out["mfu"] = flop * longer * space.batch / space.gpus / step_s / device.bf16_flops
    if prices is not None:
        prices.hour(device.name)  # a missing price is an error whatever else is known
        if job.on_device:
            money, why = money_per_million_tokens(rate, None, device.name, prices)
        else:
            money, why = None, f"its compute was not recorded on {device.name}"
        out["money_per_million_tokens"] = money
        if why:
            job.work.health.note(f"No cost of tokens: {why}.")
    return out


@dataclass(frozen=True, slots=True)
class _Job:
    """What is searched from. per_gpu: samples a GPU takes in a step; built, measured: of a capture, None for a model.

    micro_batches: samples of one micro batch to try;  sample_flop: model FLOP of a sample, None where nothing tells
    states, memory: bytes of what training keeps, and the peak of a layout; None: those of the model
    network: costs on the cluster, corrected by what the capture measured of them; None: those of the catalog
    on_device: compute times are of a GPU like the cluster's, so that MFU and money mean something
    """

    work: Workload
    machine: Cluster
    per_gpu: float
    fit: Fit
    built: Built | None = None
    measured: Layout | None = None
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    states: StateBytes | None = None
    memory: Callable[[Layout], Memory] | None = None
    sample_flop: float | None = None
    on_device: bool = True
    network: Network | None = None


def _job(path: str, cluster: str, layout: str) -> _Job:
    """The workload, the cluster and the samples a GPU of a step, from a model's name or a capture."""
    from scaletrace.errors import InputError, UsageError
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.described.models import load_model, model_names
    from scaletrace.extrapolate.estimate import PLAIN
    from scaletrace.extrapolate.workload import Workload

    names, there = model_names(), Path(path).exists()
    if path.lower().replace("_", "-") in names and not there:
        path = path.lower().replace("_", "-")
    if path in names or (path.endswith((".yaml", ".yml")) and there):
        if layout:
            raise UsageError("--layout says how a capture was laid out; a model has no measured layout")
        machine = Cluster.load(cluster or "dgx_h100")
        model = load_model(path)
        work = Workload.described(model, machine.device)
        return _Job(work, machine, 2.0, PLAIN, sample_flop=model.step_flop(model.seq, model.seq))
    if not there and re.fullmatch(r"[\w.-]+", path) and "." not in path.rstrip("0123456789b"):
        raise InputError(f"{path}: no such file, and no model of that name; models: {', '.join(names)}")
    return _of_capture(path, cluster, layout)


def _of_capture(path: str, cluster: str, layout: str) -> _Job:
    from scaletrace.errors import UsageError
    from scaletrace.extrapolate.anatomy import dissect
    from scaletrace.extrapolate.base import guess_cluster
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.confirm import measured_costs
    from scaletrace.extrapolate.estimate import PLAIN, Network
    from scaletrace.extrapolate.fit import fit_to, for_cluster, tell
    from scaletrace.extrapolate.flops import step_flop
    from scaletrace.extrapolate.footprint import footprint_of_job
    from scaletrace.extrapolate.layout import Layout, measured_layout
    from scaletrace.extrapolate.workload import from_job
    from scaletrace.parse.build import build
    from scaletrace.parse.profiler_cost import tell_profiler_cost

    job = read_job(path)
    built = build(job)
    measured = Layout.parse(layout) if layout else measured_layout(built.graph, max(1, job.world_size))
    if layout and measured.ranks != max(1, job.world_size):
        raise UsageError(
            f"--layout {measured} has {measured.ranks:,} ranks, and the capture is of {max(1, job.world_size):,}; it says how "
            "the capture was laid out, while --gpus says for how many layouts are sought"
        )
    seen = guess_cluster(job)
    machine = Cluster.load(cluster) if cluster else seen
    on_cpu = machine.device.generation == "cpu"
    anatomy = dissect(built, measured)
    work = from_job(built, anatomy, measured, None if on_cpu else machine.device)
    same = machine.name == seen.name
    held = replace(footprint_of_job(built, measured), model=work.model, on_device=not on_cpu)
    costs = measured_costs(built.graph, seen)
    fit = for_cluster(fit_to(work, built, Network(seen, costs), anatomy, held.states), same)
    tell(fit, work.health, same)
    if not cluster:
        work.health.note(f"Cluster {seen.name} is a guess from the trace; name another with --cluster.")
    elif machine.device.name != seen.device.name:
        work.health.note(
            f"Compute was recorded on {seen.device.name} and keeps its times here, also on {machine.device.name}; "
            "`extrapolate --cluster` moves it."
        )
    tell_profiler_cost(job, work.health)
    anchor = work.anchor
    samples = anchor.layout.mbs * max(1, anchor.layout.microbatches) if anchor else 1
    mbs = anchor.layout.mbs if anchor else 1
    tried = tuple(sorted({1, 2, 4, 8, mbs}))
    per_gpu = samples * measured.data_ranks / measured.ranks
    if held.measured_bytes:
        work.health.note(
            f"Memory is that of the measured peak of {held.measured_bytes / 1e9:.3g} GB: its states are those of the "
            "weights, the rest follows the model."
        )
    flop = step_flop(job)
    sample_flop = flop / per_gpu if flop else None
    on_device = seen.device.generation != "cpu"
    return _Job(
        work, machine, per_gpu, fit if anchor else PLAIN, built, measured, tried, held.states,
        held.parts, sample_flop, on_device, Network(machine, costs) if same else None,
    )  # fmt: skip


def show(answer: dict[str, Any]) -> None:
    """The answer as tables of at most 80 columns; commands to paste stay on one line."""
    from scaletrace.view.layouts import search_tables

    for part in search_tables(answer):
        out.print(part, soft_wrap=bool(getattr(part, "no_wrap", False)))
