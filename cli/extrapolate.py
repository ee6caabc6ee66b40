"""Turns a capture into its scaling curve on the command line: a table, `curve.json` and predicted timelines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrace.cli.common import MOST_GPUS, document, err, exit_codes, in_range, out, print_json
from scaletrace.cli.reading import read_job, reads_captures
from scaletrace.cli.targets import spare

if TYPE_CHECKING:
    from rich.table import Table

    from scaletrace.extrapolate.calibrate import Evidence
    from scaletrace.extrapolate.curve import ScalingCurve
    from scaletrace.extrapolate.energy import Prices
    from scaletrace.extrapolate.stragglers import Noise
    from scaletrace.parse.health import Health

SIZES = "8,16,32,64,128,256,512,1024"


_CLUSTER = typer.Option(help="Cluster of the catalog, or a YAML file; default: what the trace looks like.")
_RECORDED = typer.Option(help="Cluster that the trace was recorded on, where --cluster has another network.")
_NOISE = typer.Option(help="Jitter and slow ranks, as residual=0.02,static=0.01,tail=pareto; default: measured.")
_OVERLAP = typer.Option(help="How much slower compute runs beside a collective (0.2); default: measured.")
_BUCKETS = typer.Option(help="DDP gradient buckets of this many MiB; default: measured.")
_EVIDENCE = typer.Option(help="Output of nccl-tests as further evidence, as RANKS:FILE; may be repeated.")
_FLOP = typer.Option(help="FLOP of one step on one GPU, for MFU; default: from shapes.")
_PRICE = typer.Option(
    help="Money per GPU-hour, for the cost of tokens: a number, or a YAML or JSON table by device (H100 SXM: 2.50)."
)
_KNEE = typer.Option(help="A doubling that gives less than this share of double is the knee.")
_TIMELINES = typer.Option(help="Sizes whose predicted timeline is written beside it as a .pftrace, as 64,1024.")


@reads_captures
def extrapolate(
    path: Annotated[str, typer.Argument(help="Capture: a folder, a file, a glob or a URL.")],
    gpus: Annotated[str, typer.Option(help="Sizes to predict, as 16,64,256.")] = SIZES,
    cluster: Annotated[str, _CLUSTER] = "",
    recorded_on: Annotated[str, _RECORDED] = "",
    layout: Annotated[str, typer.Option(help="Layout to use at every size, as fsdp=8 (dp fills up).")] = "",
    strong: Annotated[bool, typer.Option("--strong/--weak", help="Keep the global batch / the work of a GPU.")] = False,
    noise: Annotated[str, _NOISE] = "",
    overlap_slowdown: Annotated[float | None, _OVERLAP] = None,
    nics: Annotated[int | None, typer.Option(help="NICs of a node that one group drives at most.")] = None,
    bucket_mb: Annotated[float | None, _BUCKETS] = None,
    nccl_tests: Annotated[list[str] | None, _EVIDENCE] = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens of one step on one GPU, for tokens/s.")] = None,
    flop: Annotated[float | None, _FLOP] = None,
    price: Annotated[str, _PRICE] = "",
    knee: Annotated[float, _KNEE] = 0.8,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where curve.json goes.")] = Path("curve.json"),
    timelines: Annotated[str, _TIMELINES] = "",
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, no table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files, print nothing.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Stretch a measured job to larger clusters, with a band and the origin of every number.

    Example: scaletrace extrapolate runs/8gpu --gpus 16,64,256,1024 --cluster dgx_h100
    """
    given = dict(locals())
    with exit_codes(debug):
        from scaletrace.extrapolate.curve import extrapolate as stretch
        from scaletrace.parse.build import build
        from scaletrace.view.progress import progress

        for name, (low, high) in _BOUNDS.items():
            in_range(f"--{name.replace('_', '-')}", given[name], low, high)
        sizes, shown = _sizes(gpus, "--gpus"), _sizes(timelines, "--timelines") if timelines else []
        evidence, unread = _nccl_tests(nccl_tests or [])
        options = _options(given) | {"sizes": sizes, "evidence": evidence}
        evidence_files = (one.partition(":")[2] or one for one in nccl_tests or [])
        spare([path, cluster, recorded_on, price, *evidence_files], output, *(_drawn(output, size) for size in shown))
        built = build(read_job(path))
        with progress("stretching the job", err):
            curve = stretch(built, **options)
        curve.health.add(unread)
        answer = document("scaletrace.extrapolate/1", path, curve.health.to_json(), **curve.to_json_parts())
        _write(answer, curve, output, shown)
        if json_:
            print_json(answer)
        elif not quiet:
            _show(answer, output, bool(price))


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """What `curve.extrapolate` is told beside sizes and evidence."""
    from scaletrace.extrapolate.cluster import Cluster
    from scaletrace.extrapolate.layout import Layout

    bucket_mb, price = given["bucket_mb"], given["price"]
    return {
        "cluster": Cluster.load(given["cluster"]) if given["cluster"] else None,
        "recorded": Cluster.load(given["recorded_on"]) if given["recorded_on"] else None,
        "layout": Layout.parse(given["layout"]) if given["layout"] else None,
        "weak": not given["strong"],
        "noise": _noise(given["noise"]) if given["noise"] else None,
        "overlap_slowdown": given["overlap_slowdown"],
        "nics": given["nics"],
        "bucket_bytes": round(bucket_mb * 2**20) if bucket_mb is not None else None,
        "tokens_per_step_per_gpu": given["tokens"],
        "flop_per_step_per_gpu": given["flop"],
        "prices": read_prices(price) if price else None,
        "knee_share": given["knee"],
    }


_BOUNDS = {
    "overlap_slowdown": (0.0, 100.0),
    "nics": (1.0, 1000.0),
    "bucket_mb": (1e-3, 1e6),
    "tokens": (1.0, math.inf),
    "flop": (1.0, math.inf),
    "knee": (0.0, 1.0),
}


def _sizes(text: str, option: str) -> list[int]:
    """Numbers of ranks from "16,64"; says which part is none."""
    from scaletrace.errors import UsageError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdecimal() or len(part) > 18 or not 1 <= int(part) <= MOST_GPUS]
    if wrong or not parts:
        raise UsageError(
            f"{option}: sizes are whole numbers from 1 to {MOST_GPUS:,} as in 16,64,256, got {wrong[0] if wrong else text!r}"
        )
    return [int(part) for part in parts]


def _noise(text: str) -> Noise:
    """Noise from "residual=0.02,static=0.01,tail=pareto,index=4"."""
    from scaletrace.errors import UsageError
    from scaletrace.extrapolate.stragglers import PRIOR_NOISE, Noise

    values = dict(part.partition("=")[::2] for part in text.split(",") if part)
    unknown = set(values) - {"residual", "static", "tail", "index"}
    if unknown:
        raise UsageError(f"--noise: no {unknown.pop()!r}; known: residual, static, tail, index")
    try:
        return Noise(
            float(values.get("residual", PRIOR_NOISE.residual_cv)),
            float(values.get("static", PRIOR_NOISE.static_cv)),
            values.get("tail", "normal"),
            float(values.get("index", 4.0)),
        )
    except ValueError as error:
        raise UsageError(f"--noise: {error} (as in residual=0.02,static=0.01)") from error


def read_prices(text: str) -> Prices:
    """Prices from --price: a number, or the path of a YAML or JSON table."""
    from scaletrace.errors import UsageError
    from scaletrace.extrapolate.energy import Prices
    from scaletrace.parse.small import read_yaml

    if not text.endswith((".yaml", ".yml", ".json")):
        try:
            return Prices.parse(float(text), "--price")
        except ValueError:
            raise UsageError(f"--price: {text!r} is neither a number nor a .yaml or .json file") from None
    return Prices.parse(read_yaml(text, "give a table of prices by device"), f"--price {text}")


def _nccl_tests(entries: list[str]) -> tuple[list[Evidence], Health]:
    """Evidence from every RANKS:FILE, and what of the files could not be used."""
    from scaletrace.errors import InputError, UsageError
    from scaletrace.extrapolate.nccl_tests import LARGEST_FILE, read_nccl_tests
    from scaletrace.parse.health import Health

    found: list[Evidence] = []
    health = Health()
    for entry in entries:
        ranks, _, file = entry.partition(":")
        if not ranks.isdecimal() or len(ranks) > 8 or not 2 <= int(ranks) <= MOST_GPUS or not file:
            raise UsageError(f"--nccl-tests: {entry!r} should be RANKS:FILE with 2 ranks or more, as 16:all_reduce.txt")
        try:
            if Path(file).exists() and not Path(file).is_file():
                raise InputError(f"{file}: not a regular file; give the output of nccl-tests")
            with Path(file).open(encoding="utf-8", errors="replace") as source:
                text = source.read(LARGEST_FILE + 1)
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from error
        if len(text) > LARGEST_FILE:
            raise InputError(f"{file}: longer than an nccl-tests output can be; keep only its tables")
        pieces, dropped = read_nccl_tests(text, int(ranks), file)
        found += pieces
        health.add(dropped)
    return found, health


def _write(answer: dict[str, Any], curve: ScalingCurve, output: Path, shown: list[int]) -> None:
    """curve.json, and one predicted timeline a size asked for."""
    import json

    from scaletrace.errors import InputError

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(answer, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{output}: can't be written ({error.strerror}); choose another place with --output"
        ) from error
    for size in shown:
        from scaletrace.view.perfetto import write_timeline

        target = _drawn(output, size)
        write_timeline(target, curve.timeline(size))
        err.print(f"predicted timeline of {size} ranks: {target}", markup=False)


def _drawn(output: Path, size: int) -> Path:
    """Where the predicted timeline of a size goes."""
    return output.with_name(f"{output.stem}_{size}.pftrace")


def _show(answer: dict[str, Any], output: Path, priced: bool) -> None:
    from scaletrace.view.terminal import curve_table

    out.print(curve_table(answer))
    costed = any(point["money_per_million_tokens"] is not None for point in answer["points"])
    if costed or any(point["tokens_per_J"] for point in answer["points"]):
        out.print(_economy(answer, costed))
    for line in _priceless(answer) if priced else []:
        out.print(line, markup=False)
    for line in _beside(answer):
        out.print(line, markup=False)
    out.print(f"written to {output}", markup=False)


def _priceless(answer: dict[str, Any]) -> list[str]:
    """Why a price gives no cost, and what to give beside it; or which unit the cost has."""
    reasons = [why for p in answer["points"] if (why := p["unknown"].get("money_per_million_tokens"))]
    if reasons:
        return [f"--price gives no cost: {reasons[0]}"]
    return ["the cost is in the currency of --price"]


def _economy(answer: dict[str, Any], priced: bool) -> Table:
    """Power, energy and (where there is a price) money by size; a price has the user's own currency."""
    from rich.table import Table

    from scaletrace.view import units

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("GPUs", "W/GPU (modelled)", "tokens/J", *(["cost of a million tokens"] if priced else [])):
        table.add_column(name, justify="right")
    for point in answer["points"]:
        money = point["money_per_million_tokens"]
        table.add_row(
            units.number(point["gpus"]),
            units.number(point["power_W_per_gpu"]),
            units.number(point["tokens_per_J"]),
            *([units.MISSING if money is None else f"{money:.3g}"] if priced else []),
        )
    return table


def _beside(answer: dict[str, Any]) -> list[str]:
    """How well the model gives the measured step, and which sizes are missing."""
    from scaletrace.view import units

    seen = answer["measured"]
    step, replayed = units.seconds(seen["step_time_s"]), units.seconds(seen["replayed_step_time_s"])
    over = f"{seen['steps']} step{'s' * (seen['steps'] != 1)}"
    line = f"measured at {seen['gpus']}: {step} a step over {over}; its replay gives {replayed}"
    return [f"{line} ({seen['error']:+.2%})"] + [f"left out: {each['reason']}" for each in answer["left_out"]]
