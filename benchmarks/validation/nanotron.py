"""Turns nanotron's best configuration of each size and node count into ranks within our own search. Nothing is fitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.validation.result import Gate, Result
from benchmarks.validation.rows import Config, HeldOutRow, Scored, read_table
from scaletrace.extrapolate.described.constants import FLASH_H100, device
from scaletrace.extrapolate.described.jobs import Layout, pipeline_job
from scaletrace.extrapolate.described.memory import memory_bytes
from scaletrace.extrapolate.described.models import Model

H100 = device("h100")
USABLE = 0.92
"""Share of device memory that a job gets: context, NCCL buffers and fragmentation take the rest."""

NAMED = 3
BATCH = 256
TENSORS_A_LAYER = 6
"""Structural fact: nanotron gathers and reduces parameters one by one (qkv, o, gate-up, down, two norms)."""

_LLAMA = Model("llama", "llama", 16, 2048, 32, ffn=8192, vocab=131072, seq=4096)
MODELS = {
    "Llama-like 1.34B": _LLAMA,
    "Llama-like 3.57B": replace(_LLAMA, layers=28, hidden=3072, heads=24),
    "Llama-like 8.86B": replace(_LLAMA, layers=32, hidden=4096, ffn=14336, tied=False),
    "Llama-like 80.0B": replace(_LLAMA, layers=80, hidden=8192, heads=64, ffn=28672, tied=False),
}
"""Shapes follow from the printed parameter counts: 131,072 tokens of vocabulary, no grouped queries."""

Axes = tuple[int, int, int]


def results(tables: Path) -> list[Result]:
    """Each row's (dp, tp, pp) among our layouts of that model and size, from `scaling_points.csv`."""
    table = [
        row
        for row in read_table(tables, "scaling_points.csv")
        if row["source_id"] == "nanotron" and row["model"] in MODELS
    ]
    scored: list[Scored] = []
    hits, lines = 0, []
    for row in table:
        held = HeldOutRow(Config.of({k: v for k, v in row.items() if k not in AXES}), float(row["mfu_pct"]))
        measured = _axes(row)
        model = MODELS[held.config.text("model")]
        ranking = search(model, held.config.whole("gpus"))
        names = list(ranking)
        rank = names.index(measured) + 1 if measured in names else 0
        hits += 0 < rank <= NAMED
        step_s = ranking.get(measured, float("nan"))
        mfu = 100 * model.step_flop(BATCH * model.seq) / step_s / held.config.whole("gpus") / H100.bf16_flop_s
        label = f"{model_label(held.config)}, dp{measured[0]} tp{measured[1]} pp{measured[2]}"
        scored.append(held.scored(label, mfu))
        first = ", ".join(f"dp{dp} tp{tp} pp{pp}" for dp, tp, pp in names[:NAMED])
        lines.append((label, str(rank or "-"), str(len(names)), first))
    gate = Gate(
        "nanotron",
        f"best layout among our first {NAMED}, share of {len(table)} sizes",
        100 * hits / max(1, len(table)),
        100,
        100,
        at_least=True,
        reason="the source prefers a pipeline with dp = 1 or wide tensor parallelism where our bubble and message "
        "terms say otherwise; its runs at 128 GPUs lose more to data parallelism than its code's collectives explain",
    )
    table_ = ("Rank of the measured best layout", ("measured best", "our rank", "of", "our first three"), tuple(lines))
    title = "nanotron, H100, best layout by size"
    return [Result("nanotron", title, "MFU, %", (), tuple(scored), (gate,), tables=(table_,))]


AXES = ("dp", "tp", "pp", "mbs", "sharding", "parallelism")
"""The columns that say which layout was best: what is predicted here, so no part of the description."""


def model_label(config: Config) -> str:
    return f"{config.text('model')}, {config.whole('gpus')} GPUs"


def search(model: Model, gpus: int) -> dict[Axes, float]:
    """Step seconds of every (dp, tp, pp) that fits into memory, at its best micro batch and sharding, fastest first."""
    best: dict[Axes, float] = {}
    for layout in _layouts(model, gpus):
        if memory_bytes(model, layout) > USABLE * H100.hbm_bytes:
            continue
        axes = (layout.dp, layout.tp, layout.pp)
        step_s = pipeline_job(model, layout, H100, FLASH_H100).step_s(1.0)
        best[axes] = min(step_s, best.get(axes, step_s))
    return dict(sorted(best.items(), key=lambda item: item[1]))


def _layouts(model: Model, gpus: int) -> Iterator[Layout]:
    powers = [2**i for i in range(6)]
    for tp in powers:
        for pp in powers:
            dp, rest = divmod(gpus, tp * pp)
            if rest or not dp or BATCH % dp or pp > model.layers:
                continue
            for mbs in powers:
                micro_batches, odd = divmod(BATCH // dp, mbs)
                if odd or not micro_batches:
                    continue
                for sharded in (False, True) if dp > 1 else (False,):
                    yield Layout(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        micro_batch=mbs,
                        micro_batches=micro_batches,
                        overlapped=False,
                        sharded_optimizer=sharded,
                        gradient_bytes=4,
                        tensors_apart=TENSORS_A_LAYER,
                        balanced_stages=True,
                    )


def _axes(row: dict[str, str]) -> Axes:
    return int(float(row["dp"])), int(float(row["tp"])), int(float(row["pp"]))
