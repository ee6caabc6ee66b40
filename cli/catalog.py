"""Turns the catalog of devices, networks, clusters and models into a table or JSON, each number with its source."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from scaletrace.cli.common import exit_codes, out, print_json

WHAT = ("devices", "networks", "clusters", "models")


def catalog(
    what: Annotated[str, typer.Argument(help="devices, networks, clusters or models.")] = "clusters",
    name: Annotated[str, typer.Argument(help="Show one entry in full, with the source of each number.")] = "",
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Names only, one a line.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """What is known of devices, networks, clusters and models, each number with its source.

    Example: scaletrace catalog clusters dgx_h100
    """
    with exit_codes(debug):
        from scaletrace import __version__
        from scaletrace.errors import UsageError
        from scaletrace.extrapolate.catalog import entry, names

        if what not in WHAT:
            raise UsageError(f"the catalog has {', '.join(WHAT)}, not {what!r}")
        if name and name not in names(what):
            raise UsageError(f"no {what[:-1]} {name!r} in the catalog; known: {', '.join(names(what))}")
        entries = {each: entry(what, each) for each in ([name] if name else names(what))}
        if json_:
            print_json({"schema": "scaletrace.catalog/1", "scaletrace_version": __version__, what: entries})
        elif quiet:
            out.print("\n".join(entries), markup=False)
        elif name:
            _show_one(name, entries[name])
        else:
            _show_all(what, entries)


def _show_all(what: str, entries: dict[str, dict[str, Any]]) -> None:
    """One row an entry, the numbers that tell entries apart."""
    from rich.table import Table

    rows = {each: _summary(what, values) for each, values in entries.items()}
    table = Table("name", *next(iter(rows.values())))
    for each, cells in rows.items():
        table.add_row(each, *cells.values())
    out.print(table)
    out.print(f"`scaletrace catalog {what} NAME` shows every number with its source.", markup=False)


def _summary(what: str, values: dict[str, Any]) -> dict[str, str]:
    if what == "clusters":
        tiers = [f"{t['domain'] or 'all'} x {t['bandwidth_GBps']:g} GB/s {t['name']}" for t in values["tiers"]]
        return {"device": str(values["device"]), "tiers (ranks x share of one)": "\n".join(tiers)}
    keys = {
        "devices": ("bf16_tflops", "fp8_tflops", "memory_GB", "memory_GBps", "link_GBps", "power_W"),
        "networks": ("port_Gbps", "latency_us"),
        "models": ("parameters", "layers", "hidden", "heads", "vocabulary"),
    }[what]
    return {key: "" if values.get(key) is None else f"{values[key]:,g}" for key in keys}


def _show_one(name: str, values: dict[str, Any]) -> None:
    """Every number of one entry and where it comes from."""
    from rich.table import Table

    table = Table("what", "value", "source", title=name)
    for part in (values, *values.get("tiers", ())):
        sources = part.get("sources", {})
        prefix = "" if part is values else f"{part['name']}: "
        for key, value in part.items():
            if key not in ("source", "sources", "tiers") and value is not None:
                table.add_row(prefix + key, str(value), sources.get(key, part.get("source", "")))
    out.print(table)
