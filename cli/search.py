"""Turns a capture or a model's name into its best layouts at a size, on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, exit_codes, in_range, out, print_json
from scaletrace.cli.reading import read_job, reads_captures

if TYPE_CHECKING:
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.estimate import Fit
    from scaletrace.extrapolate.layout import Layout
    from scaletrace.extrapolate.memory import StateBytes
    from scaletrace.extrapolate.workload import Workload
    from scaletrace.parse.build import Built


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
    confirm: Annotated[
        int, typer.Option(help="How many of the best to predict again by rewriting and replaying the capture's graph.")
    ] = 3,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, no table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the best layout alone.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Find the fastest layouts at a size that fit into memory, and say why the next ones lose.

    Example: scaletrace search llama3-70b --gpus 4096 --cluster dgx_h100 --batch 2048
    """
    with exit_codes(debug):
        from scaletrace.extrapolate.estimate import Network
        from scaletrace.extrapolate.search import Space
        from scaletrace.extrapolate.search import search as find

        in_range("--gpus", gpus, 1, 1_000_000)
        in_range("--best", best, 1, 1000)
        in_range("--confirm", confirm, 0, 100)
        in_range("--batch", batch, 0, 1e7)
        in_range("--seq", seq, 0, 1e9)
        in_range("--memory", memory, 0, 1e6)
        job = _job(path, cluster, layout)
        work = job.work
        limit = memory * 1e9 or 0.95 * job.machine.device.memory_bytes
        space = Space(
            gpus,
            batch or max(1, round(job.per_gpu * gpus)),
            seq or work.model.seq,
            limit,
            micro_batches=job.micro_batches,
        )
        found = find(
            work,
            Network(job.machine),
            space,
            best=best,
            fit=job.fit,
            states=job.states,
            memory_factor=job.memory_factor,
        )
        parts = found.to_json_parts()
        _confirm(job, parts, confirm)
        source = {"cluster": job.machine.name, "model": work.model.name, "compute": work.provenance}
        fitted = {name: getattr(job.fit, name) for name in job.fit.__slots__} if job.fit.measured_s else None
        answer = document(
            "scaletrace.search/1", path, work.health.to_json(), gpus=gpus, **source, fit=fitted,
            memory_limit_bytes=limit, **parts,
        )  # fmt: skip
        if json_:
            print_json(answer)
        elif quiet:
            out.print(str(found.best.layout))
        else:
            show(answer)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is searched from. per_gpu: samples a GPU takes in a step; built, measured: of a capture, None for a model.

    micro_batches: samples of one micro batch to try
    """

    work: Workload
    machine: Cluster
    per_gpu: float
    fit: Fit
    built: Built | None = None
    measured: Layout | None = None
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    states: StateBytes | None = None
    memory_factor: float = 1.0


def _job(path: str, cluster: str, layout: str) -> _Job:
    """The workload, the cluster and the samples a GPU of a step, from a model's name or a capture."""
    from scaletrace.errors import UsageError
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.described.models import load_model, model_names
    from scaletrace.extrapolate.estimate import PLAIN
    from scaletrace.extrapolate.workload import Workload

    if path in model_names() or (path.endswith((".yaml", ".yml")) and Path(path).is_file()):
        if layout:
            raise UsageError("--layout says how a capture was laid out; a model has no measured layout")
        machine = Cluster.load(cluster or "dgx_h100")
        return _Job(Workload.described(load_model(path), machine.device), machine, 2.0, PLAIN)
    return _of_capture(path, cluster, layout)


def _of_capture(path: str, cluster: str, layout: str) -> _Job:
    from scaletrace.extrapolate.anatomy import dissect
    from scaletrace.extrapolate.base import guess_cluster
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.estimate import PLAIN, Network
    from scaletrace.extrapolate.fit import fit_to, for_cluster, measured_memory, tell
    from scaletrace.extrapolate.layout import Layout, measured_layout
    from scaletrace.extrapolate.memory import StateBytes
    from scaletrace.extrapolate.traced_memory import fused_attention
    from scaletrace.extrapolate.workload import from_job
    from scaletrace.parse.build import build

    job = read_job(path)
    built = build(job)
    measured = Layout.parse(layout) if layout else measured_layout(built.graph, max(1, job.world_size))
    seen = guess_cluster(job)
    machine = Cluster.load(cluster) if cluster else seen
    on_cpu = machine.device.generation == "cpu"
    anatomy = dissect(built, measured)
    work = from_job(built, anatomy, measured, None if on_cpu else machine.device)
    same = machine.name == seen.name
    fit = for_cluster(fit_to(work, built, Network(seen), anatomy), same)
    tell(fit, work.health, same)
    anchor = work.anchor
    samples = anchor.layout.mbs * max(1, anchor.layout.microbatches) if anchor else 1
    mbs = anchor.layout.mbs if anchor else 1
    tried = tuple(sorted({1, 2, 4, 8, mbs}))
    per_gpu = samples * measured.data_ranks / measured.ranks
    states = StateBytes.of(work.element_bytes, fused=fused_attention(job))
    peak, factor = measured_memory(work, built, states)
    if peak:
        work.health.note(f"Measured peak of memory {peak / 1e9:.3g} GB; the model's is multiplied by {factor:.3g}.")
    return _Job(work, machine, per_gpu, fit if anchor else PLAIN, built, measured, tried, states, factor)


def _confirm(job: _Job, parts: dict[str, Any], most: int) -> None:
    """Put beside the best estimates the step of the capture's own graph, rewritten for their layout and replayed."""
    from scaletrace.errors import ScaletraceError
    from scaletrace.extrapolate.layout import Layout
    from scaletrace.extrapolate.relayout import predict

    rows = [parts["best"], *parts["next"]]
    for row in rows:
        row["rewritten_step_time_s"] = row["why_not_rewritten"] = None
    if job.built is None:
        return
    for row in rows[:most]:
        try:
            made = predict(job.built, Layout(**row["layout"]), job.machine, job.measured)
            row["rewritten_step_time_s"] = made.step_s
        except ScaletraceError as error:
            row["why_not_rewritten"] = str(error)
    known = [row for row in rows if row["rewritten_step_time_s"] is not None]
    if len(known) > 1:
        first = min(known, key=lambda row: row["rewritten_step_time_s"])
        if first is not rows[0]:
            text = ",".join(f"{name}={value}" for name, value in first["layout"].items())
            job.work.health.note(
                f"Of the layouts rewritten and replayed {text} is the fastest, not the estimate's best."
            )


def show(answer: dict[str, Any]) -> None:
    """The answer as tables of at most 80 columns."""
    from scaletrace.view.layouts import search_tables

    for part in search_tables(answer):
        out.print(part)
