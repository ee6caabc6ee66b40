"""Turns a small file that a person wrote (YAML, JSON, a table) into its text, within bounds, or into one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaletrace.errors import InputError

MOST_BYTES = 16 << 20
"""Descriptions are kilobytes; what is larger is another file than was meant."""


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


def read_yaml(path: str | Path, remedy: str) -> Any:
    """What a YAML (or JSON) file of a person holds. Raises InputError as read_small, and for text that is no YAML."""
    import yaml

    text = read_small(path, remedy)
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise InputError(f"{path}: nested too deeply; {remedy}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not valid YAML ({str(error).splitlines()[0]}); {remedy}") from error
