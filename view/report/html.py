"""Builds HTML in which nothing can escape: every text is cleaned and escaped unless it is already `Html`."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from scaletrace.view import units
from scaletrace.view.report.words import named, shown_value

Cell = str | int | float | None


class Html(str):
    """Markup that was built here, with all foreign text escaped."""

    __slots__ = ()


def escape(value: object) -> Html:
    """`value` as text that no markup can break out of, in an element or a quoted attribute."""
    return value if isinstance(value, Html) else Html(html.escape(units.clean(value), quote=True))


def join(*parts: object) -> Html:
    return Html("".join(escape(part) for part in parts if part is not None))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element; attribute names lose a trailing underscore, other underscores become dashes, None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(*children)}</{name}>")


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers behind a plot or a section: `columns` and `rows` are plain, for CSV; `heads` and `shown` what a reader sees
    of them, else the words and units that the columns' keys stand for."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    shown: Sequence[Sequence[object]] = field(default_factory=tuple)
    heads: Sequence[str] = ()

    def to_csv(self) -> str:
        """Comma-separated values; a text that a spreadsheet would run as a formula gets an apostrophe in front."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([_harmless(column) for column in self.columns])
        writer.writerows([_harmless(cell) for cell in row] for row in self.rows)
        return out.getvalue()

    def to_html(self, caption: str, most: int = 200) -> Html:
        """A table that scrolls sideways by itself (and by keyboard), numbers to the right; long ones are cut and say so."""
        shown = self.shown or [
            [shown_value(key, cell) for key, cell in zip(self.columns, row, strict=True)] for row in self.rows[:most]
        ]
        heads = self.heads or [named(column) for column in self.columns]
        numeric = [
            all(isinstance(row[i], int | float) or row[i] is None for row in self.rows)
            for i in range(len(self.columns))
        ]
        head = tag(
            "tr",
            *(tag("th", c, scope="col", class_="n" if n else None) for c, n in zip(heads, numeric, strict=True)),
        )
        body = (
            tag(
                "tr", *(tag("td", _cell(cell), class_="n" if n else None) for cell, n in zip(row, numeric, strict=True))
            )
            for row in shown[:most]
        )
        note = f" (the first {most} of {len(self.rows)}; the CSV has all)" if len(self.rows) > most else ""
        table = tag("table", tag("caption", caption, note), tag("thead", head), tag("tbody", *body))
        return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(value: object) -> object:
    return units.MISSING if value is None else value


def _harmless(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = units.clean(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def csv_link(table: Table, file_name: str) -> Html:
    """A link that downloads the numbers; they are inside the page."""
    href = f"data:text/csv;charset=utf-8,{quote(table.to_csv())}"
    return tag("a", f"CSV: {file_name}", href=href, download=file_name, class_="csv")
