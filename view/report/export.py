"""Turns the plots of JSON answers into files: SVG always, PNG through resvg where that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scaletrace.errors import MissingExtraError, UsageError
from scaletrace.view.report import svg
from scaletrace.view.report.read import Document
from scaletrace.view.report.sections import sections_of

FORMATS = ("svg", "png")


def write_plots(folder: str | Path, documents: Sequence[Document], formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Write every plot of the answers into `folder`, named by section and plot. Returns the files.

    Raises UsageError for an unknown format, MissingExtraError for PNG without resvg.
    """
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise UsageError(f"no plots as {unknown[0]!r}; known formats: {', '.join(FORMATS)}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for section in sections_of(documents):
        for plot in section.plots:
            drawing = svg.standalone(plot.drawing)
            for kind in formats:
                file = target / f"{section.id}-{plot.name}.{kind}"
                data = drawing.encode() if kind == "svg" else png(drawing)
                file.write_bytes(data)
                written.append(file)
    return written


def png(drawing: str) -> bytes:
    """A PNG of a standalone SVG, at twice the size of the page."""
    try:
        import resvg_py
    except ImportError as error:
        raise MissingExtraError("PNG needs resvg: pip install resvg-py (SVG works without it)") from error
    return bytes(resvg_py.svg_to_bytes(svg_string=drawing))
