"""Numbers and regular expressions that others wrote: read, or refused in one sentence."""

from __future__ import annotations

import pytest

from scaletrace.errors import InputError, UsageError
from scaletrace.parse.literals import compiled, whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), (" 17 ", 17), ("9" * 18, 10**18 - 1), ("9" * 19, None), ("9" * 5000, None), ("²", None), ("-1", None),
     ("1.0", None), ("", None), (None, None), (7, None)],
)  # fmt: skip
def test_a_number_is_decimal_digits_that_64_bits_hold(text: object, expected: int | None) -> None:
    """What `isdigit` lets through and `int` refuses is none, nor what Python refuses to read for its length."""
    assert expected == whole(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("(", "unterminated"), ("a{99999999999999999999}", "too large"), ("(" * 5000 + ")" * 5000, "nested too deeply")],
)
def test_a_regular_expression_is_refused_in_one_sentence(text: str, reason: str) -> None:
    """Python has three kinds of errors for it; the place comes first, and a long text is cut."""
    with pytest.raises(UsageError, match=f"--pattern: .{{1,250}} is not a regular expression: .*{reason}"):
        compiled(text, "--pattern")
    with pytest.raises(InputError, match=r"rules\.yaml: "):
        compiled(text, "rules.yaml", error=InputError)
