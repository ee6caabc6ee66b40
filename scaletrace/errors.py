"""The exceptions that scaletrace raises on purpose; each message names the place and the remedy.

ScaletraceError
├── InputError        a file or folder can't be used as given (exit code 1)
│   ├── NotATraceError    readable, but not a Kineto trace of one rank
│   ├── CorruptTraceError strict mode, or nothing readable at all; carries the byte offset
│   └── LimitError        a size or depth limit was reached; the message names the flag that raises it
├── UsageError        the call makes no sense (exit code 2)
├── AlignmentError    clocks of the ranks can't be reconciled
└── MissingExtraError an optional dependency is not installed; says which `pip install` brings it
"""


class ScaletraceError(Exception):
    """Base of all errors that scaletrace raises on purpose."""


class InputError(ScaletraceError):
    """A file or folder can't be used as given."""


class NotATraceError(InputError):
    """Readable, but not a Kineto trace of one rank."""


class CorruptTraceError(InputError):
    """Damaged beyond what was allowed; `offset` is the first bad byte of the decompressed text, if known."""

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message)
        self.offset = offset


class LimitError(InputError):
    """A limit that guards against hostile input was reached."""


class UsageError(ScaletraceError):
    """The arguments contradict each other or name what is not there."""


class AlignmentError(ScaletraceError):
    """The ranks' clocks can't be reconciled."""


class MissingExtraError(ScaletraceError):
    """An optional dependency is not installed."""
