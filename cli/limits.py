"""Turns a device and a fabric into the data-movement limits of frontier training, as a table or a document."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import document, err, exit_codes, in_range, out, print_json
from scaletrace.errors import UsageError

if TYPE_CHECKING:
    from scaletrace.extrapolate.limits import Limits, Machine, Training

_FLOP = (1e15, 1e40)
_MOST_SIZES = 100
_NO_HEALTH: dict[str, Any] = {"repaired": {}, "clipped": {}, "dropped": {}, "guessed": {}, "unmatched": {}, "notes": []}


def limits(
    cluster: Annotated[
        str, typer.Option(help="A cluster of the catalog or a YAML file; its device and domain count.")
    ] = "dgx_h100",
    days: Annotated[float, typer.Option(help="Length of the training run.")] = 91.3125,
    latency_us: Annotated[float, typer.Option(help="Latency of one collective, in µs.")] = 2.7,
    launch_us: Annotated[float, typer.Option(help="What a serial step costs besides (for the wall), in µs.")] = 5.8,
    network: Annotated[float, typer.Option(help="Factor on the bandwidth beyond the domain.")] = 1.0,
    memory: Annotated[float, typer.Option(help="Factor on the memory bandwidth.")] = 1.0,
    domain: Annotated[int | None, typer.Option(help="GPUs in one NVLink domain (0: one flat fabric).")] = None,
    utilization: Annotated[float, typer.Option(help="Share of peak that kernels reach.")] = 0.70,
    bits: Annotated[int, typer.Option(help="Bits of a number.")] = 16,
    batch_exponent: Annotated[float, typer.Option(help="Growth of the batch with training FLOP.")] = 1 / 6,
    depth_exponent: Annotated[float, typer.Option(help="Growth of the depth with training FLOP.")] = 1 / 6,
    wider: Annotated[float, typer.Option(help="Factor on the width at the same parameters.")] = 1.0,
    sparsity: Annotated[float, typer.Option(help="Total over active parameters (1: dense).")] = 1.0,
    flop: Annotated[str, typer.Option(help="Training FLOP to evaluate, such as 1e26,2e28; default 1e24 to 1e32.")] = "",
    what_if: Annotated[bool, typer.Option("--what-if", help="Also answer the usual what-ifs.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing; the exit code tells.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Say up to which training FLOP a device scales linearly, and where latency builds a wall.

    Example: scaletrace limits --cluster dgx_h100 --network 2 --what-if
    """
    options = dict(locals())
    with exit_codes(debug):
        from scaletrace.extrapolate.limits import Training, limits, what_ifs
        from scaletrace.view.progress import progress

        _check(**{name: options[name] for name in _BOUNDS})
        sizes = _flops(flop)
        machine = _machine(cluster, latency_us, launch_us, network, memory, domain)
        training = Training(
            run_s=86400 * days,
            utilization=utilization,
            word_bytes=bits / 8,
            batch_exponent=batch_exponent,
            depth_exponent=depth_exponent,
            width_over_depth=wider,
            sparsity=sparsity,
        )
        with progress("searching the smallest clusters", err):
            answer = _answer(limits(machine, training, sizes))
            if what_if:
                answer["what_if"] = _what_ifs(what_ifs(machine, training))
        if json_:
            print_json(document("scaletrace.limits/1", cluster, _NO_HEALTH, **answer))
        elif not quiet:
            _show(answer)


_BOUNDS = {
    "days": (1e-3, 1e5),
    "latency_us": (0, 1e6),
    "launch_us": (0, 1e6),
    "network": (1e-6, 1e6),
    "memory": (1e-6, 1e6),
    "domain": (0, 1e6),
    "utilization": (1e-3, 1),
    "bits": (1, 64),
    "batch_exponent": (-1, 1),
    "depth_exponent": (-1, 1),
    "wider": (1e-3, 1e3),
    "sparsity": (1, 1e6),
}
"""Between which values each option makes sense."""


def _machine(
    cluster: str, latency_us: float, launch_us: float, network: float, memory: float, domain: int | None
) -> Machine:
    """The cluster's machine with the asked latencies, factors and domain."""
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.limits import machine_of

    machine = machine_of(Cluster.load(cluster))
    return replace(
        machine,
        latency_s=latency_us / 1e6,
        launch_s=launch_us / 1e6,
        beyond_Bps=machine.beyond_Bps * network,
        dram_Bps=machine.dram_Bps * memory,
        domain=machine.domain if domain is None else domain,
    )


def _check(**values: float | None) -> None:
    """Raise UsageError for an option out of its bounds."""
    for name, value in values.items():
        in_range("--" + name.replace("_", "-"), value, *_BOUNDS[name])


def _flops(text: str) -> tuple[float, ...]:
    """Training FLOP from "1e26,2e28"; () for the default sizes."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(f"--flop {text!r}: write numbers such as 1e26,2e28") from error
    if len(found) > _MOST_SIZES or (text.strip() and not found):
        raise UsageError(f"--flop: {len(found)} sizes; write 1 to {_MOST_SIZES}, such as 1e26,2e28")
    for value in found:
        in_range("--flop", value, *_FLOP)
    return found


def _finite(value: float) -> float | None:
    """JSON has no infinity: null says that there is no such limit."""
    return value if math.isfinite(value) else None


def _answer(found: Limits) -> dict[str, Any]:
    return {
        "device": found.machine.name,
        "linear_until_flop": _finite(found.linear_until_flop),
        "wall_flop": _finite(found.wall_flop),
        "curve": [
            {
                "flop": point.flop,
                "utilization": point.utilization,
                "layout": {
                    "pp": point.degrees.pp,
                    "dp": point.degrees.dp,
                    "tp_hidden": point.degrees.tp_hidden,
                    "tp_residual": point.degrees.tp_residual,
                    "microbatches": point.degrees.micro_batches,
                    "devices": point.degrees.devices,
                },
            }
            for point in found.curve
        ],
    }


def _what_ifs(cases: dict[str, tuple[Machine, Training]]) -> list[dict[str, Any]]:
    from scaletrace.extrapolate.limits import linear_until_flop, wall_flop

    return [
        {
            "case": name,
            "linear_until_flop": _finite(linear_until_flop(machine, training)),
            "wall_flop": _finite(wall_flop(machine, training)),
        }
        for name, (machine, training) in cases.items()
    ]


_DEGREES = (
    "Degrees are those of a continuous model, so pp=1.3 lies between one stage and two; a job takes the whole numbers near "
    "them. Tensor parallelism cuts each layer's matrices both ways: over the hidden (feed-forward) width × over the "
    "residual (model) width."
)


def _show(answer: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (
        "training\nFLOP",
        "\nutilization",
        "\ndevices",
        "\npp",
        "\ndp",
        "tp hidden ×\nresidual",
        "micro\nbatches",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for point in answer["curve"]:
        cut = point["layout"]
        table.add_row(
            f"{point['flop']:.1e}",
            f"{100 * point['utilization']:.1f} %" if point["utilization"] else "not in time",
            f"{cut['devices']:.2g}",
            f"{cut['pp']:.1f}",
            f"{cut['dp']:.0f}",
            f"{cut['tp_hidden']:.1f} × {cut['tp_residual']:.1f}",
            f"{cut['microbatches']:.0f}",
        )
    out.print(table)
    out.print(_DEGREES, style="bright_black")
    out.print(
        f"{answer['device']}: linear until {_flop(answer['linear_until_flop'])}, wall at {_flop(answer['wall_flop'])}"
    )
    for case in answer.get("what_if", ()):
        out.print(
            f"  {case['case']}: linear until {_flop(case['linear_until_flop'])}, wall at {_flop(case['wall_flop'])}"
        )


def _flop(value: float | None) -> str:
    return "no end below 1e36" if value is None else f"{value:.1e} FLOP"
