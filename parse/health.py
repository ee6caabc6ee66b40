"""The health report: everything that was repaired, clipped, dropped, guessed or left unmatched, as counts and notes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KINDS = ("repaired", "clipped", "dropped", "guessed", "unmatched")


@dataclass(slots=True)
class Health:
    """Counts by reason, in five kinds, and sentences for a reader.

    A stage adds to it while it works; afterwards it travels with the result and is only read.
    Reasons are short phrases in the plural ("launches without kernels"), so that they print as a table.
    """

    repaired: Counter[str] = field(default_factory=Counter)
    clipped: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    guessed: Counter[str] = field(default_factory=Counter)
    unmatched: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Add a sentence once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def add(self, other: Health) -> None:
        """Fold the counts and notes of `other` into this one."""
        for kind in KINDS:
            getattr(self, kind).update(getattr(other, kind))
        for sentence in other.notes:
            self.note(sentence)

    @property
    def clean(self) -> bool:
        return not (self.repaired or self.clipped or self.dropped or self.guessed or self.unmatched or self.notes)

    def rows(self) -> list[tuple[str, str, int]]:
        """(kind, reason, count) of everything that was counted, the largest of each kind first."""
        return [
            (kind, reason, count)
            for kind in KINDS
            for reason, count in sorted(getattr(self, kind).items(), key=lambda item: (-item[1], item[0]))
        ]

    def to_text(self) -> str:
        """A short table of the counts and then the notes; "nothing to report" where the trace was clean."""
        lines = [f"{kind:<10}{count:>10,}  {reason}" for kind, reason, count in self.rows()]
        return "\n".join([*lines, *(f"note: {sentence}" for sentence in self.notes)]) or "nothing to report"

    def to_json(self) -> dict[str, Any]:
        """The `health` object of every JSON answer (docs/cli.md)."""
        counts = {kind: dict(sorted(getattr(self, kind).items())) for kind in KINDS}
        return {**counts, "notes": list(self.notes)}
