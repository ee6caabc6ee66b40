"""Turns what the user asked for into one environment variable, and back inside every worker.

The hook reads it in each Python process of the job, so this module imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from scaletrace.errors import UsageError

VARIABLE = "SCALETRACE_COLLECT"
FIRST_STEP = 5
STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One recording, as every rank must see it. Times are seconds where the name says so, else steps."""

    folder: str
    """Where the capture goes."""
    spool: str = ""
    """Local folder for raw files until they are packed; "" means inside `folder`."""
    start_step: int | None = FIRST_STEP
    """First step to record, counted from 0; None waits for a trigger."""
    steps: int = STEPS
    every: int = 0
    """Record again every so many steps; 0 means once."""
    ranks: str = "all"
    """`all`, `classes` (one rank of those that do the same work), or a list such as `0,4-7`."""
    shapes: bool = True
    stacks: bool = False
    memory: bool = False
    after_s: float = 0.0
    """Time window: begin this long after the first boundary (with `for_s`)."""
    for_s: float = 0.0
    on_demand: bool = False
    tokens_per_step: int | None = None
    samples_per_step: int | None = None
    flops_per_step: float | None = None
    fake_world: int = 0
    fake_rank: int = 0
    launched: bool = False
    """Whether `scaletrace collect` runs the job, and so packs the files."""
    probe_port: int = 0
    """UDP port on loopback where the launcher takes orders; 0 means no clock probes."""
    command: tuple[str, ...] = ()
    compression: str = "auto"
    """`zstd`, `gzip`, or `auto`: zstd where it is installed."""
    upload: str = ""

    def __post_init__(self) -> None:
        first = self.start_step
        if self.steps < 1:
            raise UsageError(f"{self.steps} steps to record; ask for at least 1 (--steps)")
        if first is not None and first < 1:
            raise UsageError(f"start step {first}: the first boundary is the end of step 0, so start at 1 or later")
        if self.fake_world and (first is None or first < 4 or self.for_s):
            raise UsageError("a fake world is recorded by step, from step 4 on (the settled step before is watched)")
        if self.every and self.every <= self.steps:
            raise UsageError(f"every {self.every} steps is not longer than a window of {self.steps} (--every, --steps)")
        if self.compression not in ("auto", "zstd", "gzip"):
            raise UsageError(f"compression {self.compression!r} is not one of auto, zstd, gzip")
        if self.fake_world and not 0 <= self.fake_rank < self.fake_world:
            raise UsageError(f"rank {self.fake_rank} is not in a world of {self.fake_world} (--rank, --fake-world)")
        if (self.after_s < 0 or self.for_s < 0) or (self.after_s and not self.for_s):
            raise UsageError("a time window needs a length above zero (--after, --for)")
        if self.steps > 100_000 or self.fake_world > 1_000_000:
            raise UsageError("more than 100,000 steps or 1,000,000 fake ranks were asked for")

    def to_json(self) -> str:
        """One line; `from_json` gives back an equal value."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Unknown keys (of a newer launcher) are left out."""
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in json.loads(text).items() if key in known}
        values["command"] = tuple(values.get("command", ()))
        return cls(**values)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings | None:
        """What the launcher left for this process, None outside of a recording."""
        text = environment.get(VARIABLE)
        try:
            return cls.from_json(text) if text else None
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{VARIABLE} holds no settings of a recording: {error}") from error
