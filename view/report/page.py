"""Turns JSON answers into one self-contained HTML page: no network, no script, readable on a phone and by keyboard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from scaletrace import __version__
from scaletrace.errors import UsageError
from scaletrace.view.report import svg
from scaletrace.view.report.chart import Plot
from scaletrace.view.report.html import Html, csv_link, join, tag
from scaletrace.view.report.read import Document
from scaletrace.view.report.sections import Section, sections_of

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""The page may load nothing and run nothing, so that no name in a trace can make it do so."""


@dataclass(frozen=True, slots=True)
class PageReport:
    """What was written: how many sections and plots, and the size."""

    path: Path
    sections: int
    plots: int
    size_bytes: int


def write_report(path: str | Path, documents: Sequence[Document], title: str = "") -> PageReport:
    """Write a page about any mix of the JSON answers of replay, whatif, diff, extrapolate, search and inspect.

    Raises UsageError without documents.
    """
    if not documents:
        raise UsageError("a report needs at least one JSON answer, for example of `scaletrace replay --json`")
    sections = sections_of(documents)
    page = render(documents, sections, title)
    target = Path(path)
    target.write_text(page, encoding="utf-8", errors="replace")
    return PageReport(target, len(sections), sum(len(s.plots) for s in sections), target.stat().st_size)


def render(documents: Sequence[Document], sections: Sequence[Section], title: str = "") -> str:
    """The whole page as text."""
    inputs = ", ".join(dict.fromkeys(_short(str(doc["input"])) for doc in documents if doc.get("input")))
    name = title or f"scaletrace: {inputs}" if inputs else title or "scaletrace report"
    style = files("scaletrace.view.report").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'),
        tag("title", name),
        Html(f"<style>{svg.STYLE}\n{style}</style>"),
    )
    links = tag("ul", *(tag("li", tag("a", s.title, href=f"#{s.id}")) for s in sections))
    headlines = (tag("p", s.headline, class_="headline") for s in sections if s.headline)
    header = tag("header", tag("h1", name), *headlines, tag("nav", links, aria_label="sections"))
    footer = tag("footer", tag("p", f"Written by scaletrace {__version__}. ", _raw_links(documents), class_="soft"))
    skip = tag("a", "to the results", href="#results", class_="skip")
    main = tag("main", *(_section(s) for s in sections), id="results")
    return f'<!DOCTYPE html>\n<html lang="en">{head}{tag("body", skip, header, main, footer)}</html>\n'


def _short(source: str) -> str:
    """The last part of a path or address."""
    return source.rstrip("/").rsplit("/", 1)[-1]


def _section(section: Section) -> Html:
    plots = tag("div", *(_figure(plot) for plot in section.plots), class_="plots") if section.plots else None
    return tag("section", tag("h2", section.title), join(*section.before), plots, join(*section.after), id=section.id)


def _figure(plot: Plot) -> Html:
    numbers = tag("details", tag("summary", "Numbers"), plot.table.to_html(plot.title))
    return tag("figure", tag("h3", plot.title), plot.drawing, numbers, csv_link(plot.table, f"{plot.name}.csv"))


def _raw_links(documents: Sequence[Document]) -> Html:
    """The answers themselves, for other programs."""
    parts: list[Html] = []
    for number, doc in enumerate(documents, 1):
        file_name = f"{str(doc.get('schema', 'answer')).replace('/', '-')}-{number}.json"
        href = f"data:application/json;charset=utf-8,{quote(json.dumps(doc, ensure_ascii=True))}"
        parts.append(join(tag("a", f"JSON: {file_name}", href=href, download=file_name, class_="csv"), " "))
    return join(*parts)
