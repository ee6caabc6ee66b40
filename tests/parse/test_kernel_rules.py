"""Users add kernel classes with a file like the one that ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scaletrace.errors import InputError
from scaletrace.parse.job import KINDS
from scaletrace.parse.kernels import load_rules
from scaletrace.parse.load import load


def _event(name: str, cat: str, ts: int, dur: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def test_a_rule_makes_an_unknown_kernel_communication(tmp_path: Path) -> None:
    """Without the rule the kernel is listed as unknown; with it, it is one collective of a custom kind."""
    events = [
        _event("cudaLaunchKernel", "cuda_runtime", 10, 5, 1, correlation=7),
        _event("my_exchange", "kernel", 20, 30, 7, correlation=7, stream=7, device=0),
    ]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    (tmp_path / "mine.yaml").write_text("rules:\n  - class: communication/mine\n    any: [my_exchange]\n")
    plain = load(tmp_path / "rank0.json")
    known = load(tmp_path / "rank0.json", kernel_rules=[tmp_path / "mine.yaml"])

    assert (0, 1) == (len(plain.collectives), plain.health.guessed["kernels without a class"])
    assert (1, 0) == (len(known.collectives), known.health.guessed["kernels without a class"])
    assert ["custom"] == [KINDS[code] for code in known.collectives.kind]


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        ("['(']", "rule 1: '\\(' is not a regular expression"),
        ("['a{99999999999999999999}']", "too large"),
        ("['(?i)a']", "rule 1, its patterns together: "),
        ("['(?P<x>a)', '(?P<x>b)']", "rule 1, its patterns together: .*redefinition"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_said(tmp_path: Path, patterns: str, reason: str) -> None:
    """Alone, or beside the others of its rule: the file, the rule and why."""
    (tmp_path / "mine.yaml").write_text(f"rules:\n  - class: mine\n    any: {patterns}\n")

    with pytest.raises(InputError, match=f"mine.yaml: .*{reason}"):
        load_rules([tmp_path / "mine.yaml"])


def test_more_classes_than_a_byte_holds_are_refused(tmp_path: Path) -> None:
    """Their codes would begin again at 0."""
    rules = "".join(f"  - {{class: c{n}, any: [x{n}]}}\n" for n in range(256))
    (tmp_path / "mine.yaml").write_text(f"rules:\n{rules}")

    with pytest.raises(InputError, match="use 256 at most"):
        load_rules([tmp_path / "mine.yaml"])
