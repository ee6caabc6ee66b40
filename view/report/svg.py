"""Draws plots as SVG by hand: scales, axes, lines, bands, points and stacked bars, in a size that a phone can show.

Colours are CSS classes, so that one plot serves light and dark pages; `standalone` puts the same rules into the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scaletrace.view.report.html import Html, join, tag

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 88, 14, 34, 46
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#8c8c8c", "#7a5195")
"""Okabe and Ito's colours, which differ for colour-blind readers too, slightly darkened for white paper."""

_RULES = "".join(f".f{i}{{fill:{c}}}.s{i}{{stroke:{c};fill:none}}" for i, c in enumerate(PALETTE))
STYLE = (
    "svg{font:14px system-ui,sans-serif}svg text{fill:var(--ink,#1a1a1a)}.grid{stroke:var(--line,#d0d0d0);stroke-width:1}"
    ".axis{stroke:var(--ink,#1a1a1a);stroke-width:1}.mark{stroke:var(--ink,#1a1a1a);stroke-width:1.5;stroke-dasharray:5 4}"
    ".hollow{fill:var(--paper,#fff);stroke-width:2}.band{opacity:.22}.line{stroke-width:2.5;stroke-linejoin:round}"
    ".dash{stroke-dasharray:3 5}.halo{paint-order:stroke;stroke:var(--paper,#fff);stroke-width:5px;stroke-linejoin:round}.faint{opacity:.45}.edge{stroke:var(--paper,#fff);stroke-width:.7}"
    + _RULES
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels, linearly or by logarithm; `ticks` are (value, label)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: Sequence[tuple[float, str]] = field(default_factory=tuple)

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        at = math.log(max(value, self.low)) if self.log else value
        part = (at - low) / (high - low) if high > low else 0.5
        return self.start + (self.end - self.start) * min(max(part, -0.02), 1.02)


def nice_ticks(high: float, count: int = 4) -> list[float]:
    """Round values from 0 to at least `high`, about `count` steps."""
    if high <= 0 or not math.isfinite(high):
        return [0.0, 1.0]
    raw = high / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def log_ticks(values: Sequence[float], base: float, most: int = 6) -> list[float]:
    """At most `most` powers of `base` that span the values."""
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = math.ceil(math.log(max(values), base) - 1e-9)
    every = max(1, math.ceil((high - low + 1) / most))
    return [base**power for power in range(low, high + 1, every)]


def point(x: float, y: float, css: str, about: str, shape: str = "circle") -> Html:
    """A mark that the keyboard reaches and that says its numbers when pointed at."""
    about_html = tag("title", about)
    common = {"class_": css, "tabindex": "0", "role": "img", "aria_label": about}
    if shape == "diamond":
        corners = f"{x:.1f},{y - 6:.1f} {x + 6:.1f},{y:.1f} {x:.1f},{y + 6:.1f} {x - 6:.1f},{y:.1f}"
        return tag("polygon", about_html, points=corners, **common)
    if shape == "square":
        return tag("rect", about_html, x=f"{x - 4.5:.1f}", y=f"{y - 4.5:.1f}", width="9", height="9", **common)
    return tag("circle", about_html, cx=f"{x:.1f}", cy=f"{y:.1f}", r="5", **common)


def line(points: Sequence[tuple[float, float]], css: str) -> Html:
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=css)


def band(points: Sequence[tuple[float, float, float]], css: str) -> Html:
    """The area between the lower and upper y of each x."""
    around = [(x, low) for x, low, _ in points] + [(x, high) for x, _, high in reversed(points)]
    return tag("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in around), class_=css)


def text(x: float, y: float, words: object, anchor: str = "start", css: str | None = None) -> Html:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=css)


def text_width(words: str) -> float:
    """About as wide as words are at most, in the letters of a phone, which are larger."""
    return 9.4 * len(words)


def rect(x: float, y: float, width: float, height: float, css: str, about: str) -> Html:
    shape = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{max(width, 0):.1f}", "height": f"{height:.1f}"}
    return tag("rect", tag("title", about), class_=css, **shape)


def axes(x: Scale, y: Scale, x_label: str, y_label: str) -> Html:
    """Grid, tick labels and axis names."""
    parts: list[Html] = []
    bottom = y.start
    for value, label in y.ticks:
        at = y(value)
        parts.append(tag("line", x1=f"{x.start:.1f}", x2=f"{x.end:.1f}", y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
        parts.append(text(x.start - 6, at + 5, label, "end"))
    for value, label in x.ticks:
        parts.append(
            tag(
                "line",
                x1=f"{x(value):.1f}",
                x2=f"{x(value):.1f}",
                y1=f"{bottom:.1f}",
                y2=f"{bottom + 5:.1f}",
                class_="axis",
            )
        )
        parts.append(text(x(value), bottom + 20, label, "middle"))
    parts.append(
        tag("line", x1=f"{x.start:.1f}", x2=f"{x.end:.1f}", y1=f"{bottom:.1f}", y2=f"{bottom:.1f}", class_="axis")
    )
    parts.append(text((x.start + x.end) / 2, bottom + 40, x_label, "middle"))
    parts.append(text(4, 16, y_label))
    return join(*parts)


def legend(entries: Sequence[tuple[int, str]], y: float, width: float = WIDTH) -> tuple[Html, float]:
    """Coloured squares with names, wrapped to the width (as wide as a phone's larger letters need). Returns the drawing and the height that it took."""
    parts: list[Html] = []
    x, row = 8.0, 0
    for colour, name in entries:
        size = 32 + text_width(name)
        if x + size > width and x > 8:
            x, row = 8.0, row + 1
        parts.append(
            tag("rect", x=f"{x:.1f}", y=f"{y + 22 * row - 10:.1f}", width="11", height="11", class_=f"f{colour}")
        )
        parts.append(text(x + 16, y + 22 * row, name))
        x += size
    return join(*parts), 22.0 * (row + 1)


def svg(*parts: object, about: str, height: float = HEIGHT, width: float = WIDTH) -> Html:
    """A whole plot."""
    return tag(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="group",
        aria_label=about,
        class_="plot",
    )


def standalone(plot: Html, scale: float = 2.0) -> str:
    """The plot as a file of its own: black on white, with its style inside and a size in pixels."""
    box = plot.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split(" ")
    width, height = float(box[0]) * scale, float(box[1]) * scale
    head, rest = plot.split(">", 1)
    plain = STYLE.replace("system-ui,sans-serif", "DejaVu Sans,Arial,sans-serif")
    for name, colour in (("ink", "#1a1a1a"), ("line", "#d0d0d0"), ("paper", "#fff")):
        plain = plain.replace(f"var(--{name},{colour})", colour)
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'{head} width="{width:.0f}" height="{height:.0f}"><style>{plain}</style>{background}{rest}\n'


__all__ = [
    "Html",
    "Scale",
    "axes",
    "band",
    "legend",
    "line",
    "log_ticks",
    "nice_ticks",
    "point",
    "rect",
    "standalone",
    "svg",
    "text",
]
