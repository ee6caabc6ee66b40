"""Small files of a person: their text, or one sentence that names the file and the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scaletrace.errors import InputError
from scaletrace.parse.small import read_small, read_yaml

_BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


def test_the_text_is_read(tmp_path: Path) -> None:
    """A file of a few bytes comes back as it is."""
    (tmp_path / "a.yaml").write_text("a: é", encoding="utf-8")

    assert "a: é" == read_small(tmp_path / "a.yaml", "give one")
    assert {"a": "é"} == read_yaml(tmp_path / "a.yaml", "give one")


def test_what_never_ends_is_not_opened(tmp_path: Path) -> None:
    """Pipes and devices would hang or fill the memory; a folder is no file either."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")

    for name in ("pipe", "zero", "."):
        with pytest.raises(InputError, match="not a regular file; give one"):
            read_small(tmp_path / name, "give one")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x" * 2049, "larger than"),
        (b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_what_is_no_small_text_is_said(tmp_path: Path, content: bytes, reason: str) -> None:
    """The limit and the encoding are named with the file."""
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(InputError, match=f"file: {reason}"):
        read_small(tmp_path / "file", "give one", 2048)


def test_a_missing_file_is_said() -> None:
    """The system's own word for it, and the remedy."""
    with pytest.raises(InputError, match="none: No such file or directory; give one"):
        read_small("none", "give one")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "not valid YAML: line 1: "),
        ("b: 1\na: 2\nb: 3", "not valid YAML: line 1: 'b' is there twice; give one"),
        ("when: 2001-99-99", "not valid YAML: month must be"),
        ("[" * 5000, "not valid YAML: nested too deeply"),
        (_BOMB, "not valid YAML: line 1: its aliases stand for more than 1,000,000 values"),
        ("a: &a [*a]", "not valid YAML: line 1: its aliases stand for more than 1,000,000 values"),
    ],
)
def test_what_is_no_yaml_is_said(tmp_path: Path, text: str, reason: str) -> None:
    """Broken and absurdly nested text is one sentence."""
    (tmp_path / "a.yaml").write_text(text)

    with pytest.raises(InputError, match=reason):
        read_yaml(tmp_path / "a.yaml", "give one")


def test_an_alias_that_is_used_now_and_then_is_read(tmp_path: Path) -> None:
    """Only what grows without bounds is refused."""
    (tmp_path / "a.yaml").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}")

    assert {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}} == read_yaml(tmp_path / "a.yaml", "give one")
