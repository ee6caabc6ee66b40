"""Turns a critical path into pieces to draw: its nodes and the labelled gaps between them, one after the other in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaletrace.parse.events import IntArray
from scaletrace.parse.graph import EdgeSource
from scaletrace.replay.critical_path import EDGE_REASON, SHARES, CriticalPath, share_of

_FIRST = "start of the window"


@dataclass(frozen=True, slots=True)
class Path:
    """k pieces that follow each other in time.

    node int64[k]  the node that a piece stands for, -1 for a gap;  start_ns, end_ns int64[k]
    label, what, why int64[k]  codes into `texts`: the piece's name, what it is ("compute", "gap: event wait"), and
    what the piece had to wait for before it could start
    """

    node: IntArray
    start_ns: IntArray
    end_ns: IntArray
    label: IntArray
    what: IntArray
    why: IntArray
    texts: Sequence[str]

    def __len__(self) -> int:
        return len(self.node)


def path_of(path: CriticalPath, shift_ns: int = 0) -> Path:
    """The pieces of `path` that take time, moved by `shift_ns`; each gap comes before the node that it delays."""
    graph, nodes = path.timeline.graph, path.nodes.astype(np.int64)
    texts: dict[str, int] = {}
    edge = (path.gap_kind.astype(np.int64) + 1) * 256 + path.gap_source.astype(np.int64) + 1
    distinct, at = np.unique(edge, return_inverse=True)
    reasons = [_reason(int(code) // 256 - 1, int(code) % 256 - 1) for code in distinct]
    why = _codes([f"after {reason}" for reason in reasons], texts)[at]
    gaps = _codes([f"gap: {reason}" for reason in reasons], texts)[at]
    what = _codes(list(SHARES), texts)[share_of(graph, path.nodes)]
    key = graph.rank[nodes].astype(np.int64) * max(len(graph.names), 1) + graph.name[nodes]
    known, place = np.unique(key, return_inverse=True)
    shown = [
        f"rank {rank}: {graph.names[name]}" for rank, name in zip(*divmod(known, max(len(graph.names), 1)), strict=True)
    ]
    label = _codes(shown, texts)[place] if len(known) else np.zeros(0, np.int64)
    # Laid end to end, since a node of the path may start before its predecessor ends (a negative lag).
    origin_ns = path.timeline.origin_ns + shift_ns
    end = origin_ns + np.maximum.accumulate(np.cumsum(_between(path.gap_ns, path.own_ns)))
    begin = np.concatenate([np.full(min(len(end), 1), origin_ns, np.int64), end[:-1]])
    kept = np.flatnonzero(end > begin)
    columns = (begin, end, _between(gaps, label), _between(gaps, what), _between(why, why))
    node = _between(np.full(len(nodes), -1, np.int64), nodes)
    begin, end, label, what, why = (column[kept] for column in columns)
    return Path(node[kept], begin, end, label, what, why, list(texts))


def _between(gap: IntArray, own: IntArray) -> IntArray:
    """One column from two: of each node first its gap's value, then its own."""
    both: IntArray = np.stack((gap, own), axis=1).ravel()
    return both


def _reason(kind: int, source: int) -> str:
    """Edge kind in words, with where the knowledge comes from where it was not recorded."""
    if kind < 0:
        return _FIRST
    words = next((text for edge, text in EDGE_REASON.items() if int(edge) == kind), f"edge kind {kind}")
    if source in (int(EdgeSource.RECORDED), int(EdgeSource.ORDER)) or source < 0:
        return words
    return f"{words} ({EdgeSource(source).name.lower().replace('_', ' ')})"


def _codes(words: Sequence[str], texts: dict[str, int]) -> IntArray:
    """Codes of `words` in the growing table `texts`."""
    return np.array([texts.setdefault(word, len(texts)) for word in words], np.int64)
