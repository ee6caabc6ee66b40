"""Turns a small file that a person wrote (YAML, JSON, a table) into its text, within bounds, or into one sentence."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from scaletrace.errors import InputError

MOST_BYTES = 16 << 20
"""Descriptions are kilobytes; what is larger is another file than was meant."""
MOST_NODES = 1_000_000
"""Values that YAML may hold once its aliases are written out: ten lines of aliases can stand for billions."""


def read_small(path: str | Path, remedy: str, most_bytes: int = MOST_BYTES) -> str:
    """The text of a regular file of at most `most_bytes`; a device or a pipe, which may never end, is not opened.

    Raises InputError that names the file, what is wrong and the remedy.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: not a regular file; {remedy}")
        with path.open("rb") as stream:
            data = stream.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise InputError(f"{path}: larger than {most_bytes >> 20} MiB; {remedy}")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not text in UTF-8; {remedy}") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}; {remedy}") from error


def read_yaml(path: str | Path, remedy: str, most_bytes: int = MOST_BYTES) -> Any:
    """What a YAML (or JSON) file of a person holds. Raises InputError as read_small, and for text that is no YAML."""
    return parse_yaml(read_small(path, remedy, most_bytes), str(path), remedy)


def parse_yaml(text: str, source: str, remedy: str) -> Any:
    """What YAML (or JSON) text of a person says; `source` names it in errors.

    A key that is there twice is refused, where YAML would silently take the last. Raises InputError with the line.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except RecursionError as error:
        raise InputError(f"{source}: not valid YAML: nested too deeply; {remedy}") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise InputError(f"{source}: not valid YAML: {line}{reason}; {remedy}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InputError(f"{source}: not valid YAML: {str(error).splitlines()[0]}; {remedy}") from error


@cache
def _loader() -> Any:
    """PyYAML's safe loader without keys that are there twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            if len(keys) > len(set(keys)):
                twice = Counter(keys).most_common(1)[0][0]
                raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is there twice", node.start_mark)
            return super().construct_mapping(node, deep)

        def get_single_node(self) -> yaml.Node | None:
            root: yaml.Node | None = super().get_single_node()
            if root is not None and _written_out(root, {}) > MOST_NODES:
                raise yaml.constructor.ConstructorError(
                    None, None, f"its aliases stand for more than {MOST_NODES:,} values", root.start_mark
                )
            return root

    return Loader


def _written_out(node: Any, known: dict[int, float]) -> float:
    """How many values a node of YAML holds with its aliases written out; infinite where it holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # what it is while its own parts are counted
        parts = node.value if isinstance(node.value, list) else ()
        inner = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
        known[id(node)] = 1 + sum(_written_out(one, known) for one in inner)
    return known[id(node)]
