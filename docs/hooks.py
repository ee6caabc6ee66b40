"""Turns markers in the pages into reference text taken from the code itself, so that it can't go stale.

<!-- cli -->            every command with its options
<!-- api: NAME -->      signature and docstring of an object, NAME as module.attribute
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import click
import typer

from scaletrace.cli.__main__ import COMMANDS

_API = re.compile(r"<!-- api: ([\w.]+) -->")


def on_config(config: Any) -> Any:
    """Called by mkdocs once: pages that the benchmarks write are listed where they are there."""
    folder = Path(config["docs_dir"])
    papers = [{_title(page): f"papers/{page.name}"} for page in sorted((folder / "papers").glob("*.md"))]
    if (folder / "validation.md").is_file():
        config["nav"].append({"Accuracy": "validation.md"})
    if papers:
        config["nav"].append({"Papers reproduced": papers})
    return config


def _title(page: Path) -> str:
    """The first heading of a page."""
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else page.stem


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    if "<!-- cli -->" in markdown:
        there = [name for name in COMMANDS if importlib.util.find_spec(f"scaletrace.cli.{name}")]
        markdown = markdown.replace("<!-- cli -->", "\n\n".join(command_page(name) for name in there))
    return _API.sub(lambda match: api_entry(match[1]), markdown)


def command_page(name: str) -> str:
    """One command: what it does, its arguments and its options."""
    module = importlib.import_module(f"scaletrace.cli.{name}")
    app = typer.Typer()
    app.command(name)(getattr(module, name))
    command = typer.main.get_command(app)
    lines = [
        f"## scaletrace {name}",
        "",
        _prose(command.help or ""),
        "",
        "| option | default | meaning |",
        "|---|---|---|",
    ]
    for parameter in command.params:
        if parameter.name != "help":
            lines.append(_option(parameter))
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Help text with its example as code."""
    return re.sub(r"(Example:)\s*(.+)", r"\1\n\n```sh\n\2\n```", inspect.cleandoc(text).replace("\b", ""))


def _option(parameter: click.Parameter) -> str:
    names = parameter.opts + parameter.secondary_opts
    is_argument = parameter.param_type_name == "argument"
    shown = ", ".join(f"`{name}`" for name in names) if not is_argument else f"`{(parameter.name or '').upper()}`"
    unset = (
        parameter.required or parameter.default is None or parameter.default is False or str(parameter.default) == ""
    )
    default = "" if unset else f"`{parameter.default}`"
    words = (getattr(parameter, "help", "") or "").replace("|", "\\|")
    return f"| {shown} | {default} | {words} |"


def api_entry(name: str) -> str:
    """One object: its signature as code, then its docstring."""
    module_name, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module_name), attribute)
    kind = "class" if inspect.isclass(found) else "def"
    try:
        signature = str(inspect.signature(found))
    except (TypeError, ValueError):
        signature = ""
    if inspect.isclass(found) and not getattr(found, "__dataclass_fields__", None):
        signature = ""
    doc = inspect.cleandoc(found.__doc__ or "")
    parts = [f"### {name}", f"```python\n{kind} {attribute}{signature}\n```", f"```text\n{doc}\n```"]
    if inspect.isclass(found):
        parts += [_member(key, value) for key, value in vars(found).items() if _public(key, value)]
    return "\n\n".join(parts)


def _public(key: str, value: Any) -> bool:
    plain = inspect.isfunction(value) or isinstance(value, property) or hasattr(value, "func")
    return not key.startswith("_") and plain and bool(getattr(value, "__doc__", None))


def _member(key: str, value: Any) -> str:
    signature = (
        str(inspect.signature(value)).replace("(self, ", "(").replace("(self)", "()")
        if inspect.isfunction(value)
        else ""
    )
    return f"- `{key}{signature}`: {inspect.cleandoc(value.__doc__ or '').splitlines()[0]}"
