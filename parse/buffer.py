"""Turns an iterator of pieces into one moving window of bytes that the scanner can index."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scaletrace.parse.events import ByteArray
from scaletrace.parse.scan_text import SENTINEL

_PAD = b" " * 8


class Buffer:
    """A window over the document: `data[at:end]` is unread, `base` is the document offset of data[0]."""

    __slots__ = ("_pieces", "at", "base", "data", "end", "final")

    def __init__(self, pieces: Iterator[bytes], size: int) -> None:
        self._pieces = pieces
        self.data: ByteArray = np.zeros(size + SENTINEL, np.uint8)
        self.at, self.end, self.base, self.final = 0, 0, 0, False

    def more(self) -> bool:
        """Drop what is read and append the next piece; False when there is none left.

        The last piece is a few spaces, so that no token touches the end of the window.
        """
        if self.final:
            return False
        piece = next(self._pieces, None)
        if piece is None:
            self.final, piece = True, _PAD
        kept = self.end - self.at
        need = kept + len(piece) + SENTINEL
        target = self.data if need <= len(self.data) else np.zeros(need + kept, np.uint8)
        target[:kept] = self.data[self.at : self.end]
        self.base += self.at
        self.at, self.end, self.data = 0, kept + len(piece), target
        target[kept : self.end] = np.frombuffer(piece, np.uint8)
        target[self.end : self.end + SENTINEL] = 0
        return True

    def text(self, start: int, stop: int) -> bytes:
        """The bytes data[start:stop], not beyond `end`."""
        return self.data[start : min(stop, self.end)].tobytes()

    def growing(self, limit: int) -> Iterator[tuple[bytes, bool]]:
        """(unread text, whether nothing follows it), first a little of it and then ever more, up to `limit` bytes.

        Whoever looks for something near the cursor so pays for little text.
        """
        size = 4096
        while True:
            while self.end - self.at < size and self.more():
                pass
            short = self.end - self.at <= size
            yield self.text(self.at, self.at + size), short and self.final
            if (short and self.final) or size > limit:
                return
            size *= 4

    @property
    def offset(self) -> int:
        """Document offset of the next unread byte."""
        return self.base + self.at
