"""Turns JSON answers into one self-contained HTML page, and its plots into SVG and PNG files."""

from scaletrace.view.report.export import write_plots
from scaletrace.view.report.page import write_report

__all__ = ["write_plots", "write_report"]
