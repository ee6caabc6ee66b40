"""Turns a capture or a model's name into its best layouts at a size, on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, exit_codes, in_range, out, print_json
from scaletrace.cli.reading import read_job, reads_captures

if TYPE_CHECKING:
    from scaletrace.extrapolate.cluster import Cluster
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
        in_range("--batch", batch, 0, 1e7)
        in_range("--seq", seq, 0, 1e9)
        in_range("--memory", memory, 0, 1e6)
        work, machine, per_gpu = _workload(path, cluster, layout)
        limit = memory * 1e9 or 0.95 * machine.device.memory_bytes
        space = Space(gpus, batch or max(1, round(per_gpu * gpus)), seq or work.model.seq, limit)
        found = find(work, Network(machine), space, best=best)
        parts = found.to_json_parts()
        source = {"cluster": machine.name, "model": work.model.name, "compute": work.provenance}
        answer = document("scaletrace.search/1", path, work.health.to_json(), gpus=gpus, **source, **parts)
        if json_:
            print_json(answer)
        elif quiet:
            out.print(str(found.best.layout))
        else:
            _show(answer)


def _workload(path: str, cluster: str, layout: str) -> tuple[Workload, Cluster, float]:
    """The workload, the cluster and the samples a GPU of a step, from a model's name or a capture."""
    from pathlib import Path

    from scaletrace.errors import UsageError
    from scaletrace.extrapolate.base import guess_cluster
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.described.models import load_model, model_names
    from scaletrace.extrapolate.workload import Workload, from_job

    if path in model_names() or (path.endswith((".yaml", ".yml")) and Path(path).is_file()):
        if layout:
            raise UsageError("--layout says how a capture was laid out; a model has no measured layout")
        machine = Cluster.load(cluster or "dgx_h100")
        return Workload.described(load_model(path), machine.device), machine, 2.0
    from scaletrace.extrapolate.anatomy import dissect
    from scaletrace.extrapolate.layout import Layout, measured_layout
    from scaletrace.parse.build import build

    job = read_job(path)
    built = build(job)
    measured = Layout.parse(layout) if layout else measured_layout(built.graph, max(1, job.world_size))
    machine = Cluster.load(cluster) if cluster else guess_cluster(job)
    on_cpu = machine.device.generation == "cpu"
    work = from_job(built, dissect(built, measured), measured, None if on_cpu else machine.device)
    _refuse_misfit(work, guess_cluster(job), built, path)
    anchor = work.anchor
    samples = anchor.layout.mbs * max(1, anchor.layout.microbatches) if anchor else 1
    return work, machine, samples * measured.data_ranks / measured.ranks


FIT = 2.0
"""A model whose step is further off the measured one than by this factor does not describe the job."""


def _refuse_misfit(work: Workload, machine: Cluster, built: Built, path: str) -> None:
    """Raise InputError where the model found in a capture does not take about as long as the capture's own steps."""
    from scaletrace.errors import InputError
    from scaletrace.extrapolate.estimate import Network, estimate
    from scaletrace.replay.accuracy import step_errors
    from scaletrace.replay.engine import replay

    steps = [step.measured_ns for step in step_errors(built.graph, built.measured, replay(built.graph))]
    if work.anchor is None or not steps:
        return
    measured_s = sorted(steps)[len(steps) // 2] / 1e9
    modelled_s = estimate(work, work.anchor.layout, Network(machine)).step_s
    if not measured_s / FIT <= modelled_s <= measured_s * FIT:
        raise InputError(
            f"{path}: as a transformer this job would take {modelled_s:.3g} s a step, but it took {measured_s:.3g} s, "
            "so a search from it would mislead; name a model instead (scaletrace catalog models)"
        )


def _show(answer: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{answer['gpus']} GPUs, {answer['model']} on {answer['cluster']}: compute {answer['compute']}")
    table.add_column("layout", style="bold", overflow="fold", ratio=3)
    for name in ("step", "bubble", "memory"):
        table.add_column(name, justify="right")
    table.add_column("why it loses", ratio=2)
    rows = [{**answer["best"], "behind": 0.0, "reasons": ["best"]}, *answer["next"]]
    for row in rows:
        text = ",".join(f"{name}={value}" for name, value in row["layout"].items()) or "dp=1"
        behind = f" (+{row['behind']:.1%})" if row["behind"] else ""
        table.add_row(
            text,
            f"{row['step_time_s']:.3f} s{behind}",
            f"{row['bubble_fraction']:.1%}",
            f"{row['memory_bytes'] / 1e9:.0f} GB",
            "; ".join(row["reasons"]),
        )
    out.print(table)
    lost = ", ".join(f"{count} {reason}" for reason, count in answer["discarded"].items())
    out.print(f"{answer['candidates']} candidates, {answer['evaluated']} costed; {lost}")
    for note in answer["health"]["notes"]:
        out.print(f"note: {note}")
