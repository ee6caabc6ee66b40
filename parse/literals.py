"""Turns text that a person or a trace wrote into a number or a regular expression, or says that it is none."""

from __future__ import annotations

import re

from scaletrace.errors import ScaletraceError, UsageError

MOST_DIGITS = 18
"""Longer numbers pass 64 bits; Python itself refuses to read thousands of digits."""


def whole(text: object) -> int | None:
    """The number that `text` writes in decimal digits alone, None for anything else and for more than 64 bits hold.

    Not `isdigit`, which takes "²" for a digit that `int` then refuses.
    """
    digits = text.strip() if isinstance(text, str) else ""
    return int(digits) if digits.isdecimal() and len(digits) <= MOST_DIGITS else None


def compiled(text: str, where: str, flags: int = 0, error: type[ScaletraceError] = UsageError) -> re.Pattern[str]:
    """The regular expression, or `error` that names `where` and why `re` refuses the text in any of its ways."""
    try:
        return re.compile(text, flags)
    except (re.error, OverflowError, RecursionError) as refused:
        reason = "nested too deeply" if isinstance(refused, RecursionError) else refused
        shown = repr(text if len(text) <= 200 else f"{text[:200]}…")
        raise error(f"{where}: {shown} is not a regular expression: {reason}") from refused
