"""Turns one process into rank R of a job of N ranks that does not exist, and its collectives into a sidecar.

PyTorch's own fake process group does no communication: results are wrong, but every collective is issued with the
group, kind and sizes that the real job would issue. Kineto does not record the group of a collective that no back end
carries out, so one step before the window is watched by a dispatch mode, and its list is laid over the recorded steps.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrace.collect.settings import Settings

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
}
"""Operators of c10d and _c10d_functional that start a collective, and its kind."""

GATHERED_FIRST = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
"""c10d operators whose first tensor is the output and whose second is the input."""


@dataclass(frozen=True, slots=True)
class Issued:
    """One collective that the watched step issued."""

    kind: str
    group: str
    description: str
    members: tuple[int, ...]
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    dtype: str


@dataclass(slots=True)
class _State:
    """What the process knows of its watched step; the hook sees one step only."""

    watching: Any = None
    issued: list[Issued] | None = None


_state = _State()


def variables(settings: Settings) -> dict[str, str]:
    """What a launcher would tell rank `fake_rank` of such a job."""
    told = {"RANK": settings.fake_rank, "WORLD_SIZE": settings.fake_world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return {name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def patch_distributed(c10d: Any, settings: Settings) -> None:
    """Make every process group of this process a fake one; `c10d` is torch.distributed.distributed_c10d, just imported.

    Collectives of Python objects, which a fake group can't carry out, give this rank's own object for all others.
    """
    os.environ.update(variables(settings))  # torchrun has told this worker something else
    original, grouped = c10d.init_process_group, c10d._new_group_with_tag

    def init_process_group(backend: Any = None, *_: Any, **options: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        kept = {name: options[name] for name in ("timeout", "group_name") if options.get(name)}
        patch_ddp()
        original("fake", rank=settings.fake_rank, world_size=settings.fake_world, store=FakeStore(), **kept)

    def _new_group_with_tag(ranks: Any = None, timeout: Any = None, *rest: Any, **options: Any) -> Any:
        kept = {name: value for name, value in options.items() if not name.startswith("backend")}
        return grouped(ranks, timeout, None, None, *rest[2:], **kept)

    def all_gather_object(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def keep(*_: Any, **__: Any) -> None:
        """A broadcast of objects leaves what this rank has."""

    def recv_object_list(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "a fake world has no neighbour to receive an object from; a pipeline stage asks for shapes this way: "
            "give PipelineStage its input_args and output_args"
        )

    for function in (init_process_group, _new_group_with_tag, all_gather_object, gather_object, recv_object_list):
        setattr(c10d, function.__name__, function)
    c10d.broadcast_object_list = c10d.monitored_barrier = keep


def patch_ddp() -> None:
    """DDP's own reduction asks the fake work for a result, which it has not; reduce by a hook that needs none."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as Ddp

    begin = Ddp.__init__

    def reduce_bucket(group: Any, bucket: Any) -> Any:
        buffer = bucket.buffer().div_(group.size())
        dist.all_reduce(buffer, group=group)
        done: Any = torch.futures.Future()
        done.set_result(buffer)
        return done

    reduce_bucket.__annotations__ = {}  # DDP checks that they name its own types, or that there are none

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        register = self.register_comm_hook

        def replace_hook(state: Any, hook: Any) -> None:
            """The job's own hook would meet the same missing result."""

        register(self.process_group, reduce_bucket)
        self.register_comm_hook = replace_hook

    Ddp.__init__ = __init__  # type: ignore[method-assign]


def watch_step() -> None:
    """Begin to list the collectives of the step that begins now."""
    from torch.utils._python_dispatch import TorchDispatchMode

    issued: list[Issued] = []

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            space, _, name = str(func._schema.name).partition("::")
            if space in ("c10d", "_c10d_functional") and name in KINDS:
                issued.append(_issued(name, args, result))
            return result

    mode: Any = Watching()  # type: ignore[no-untyped-call]
    mode.__enter__()
    _state.watching, _state.issued = mode, issued


def end_watch() -> None:
    """The watched step has ended."""
    if _state.watching is not None:
        _state.watching.__exit__(None, None, None)
        _state.watching = None


def _issued(name: str, args: Any, result: Any) -> Issued:
    import torch
    import torch.distributed as dist

    tensors = [tensor for arg in args for tensor in _tensors(arg)]
    produced = _tensors(result)
    name_of_group = next((arg for arg in reversed(args) if isinstance(arg, str)), None)
    group: Any = None
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(arg)
                break
            except (RuntimeError, TypeError):
                continue  # the reduce operation is a script object too
    if group is None and name_of_group is not None:
        c10d: Any = dist.distributed_c10d
        group = c10d._resolve_process_group(name_of_group)
    if name in GATHERED_FIRST:
        outputs, inputs = tensors[:1], tensors[1:2]
    elif name in ("allgather_", "reduce_scatter_", "alltoall_", "gather_", "scatter_"):
        outputs, inputs = _tensors(args[0]), _tensors(args[1])
    else:
        inputs, outputs = tensors, produced if name in KINDS and produced and not name.endswith("_") else tensors
    members = tuple(sorted(dist.get_process_group_ranks(group))) if group is not None else ()
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return Issued(
        KINDS[name],
        str(getattr(group, "group_name", "")),
        str(getattr(group, "group_desc", "")),
        members,
        [list(tensor.shape) for tensor in inputs],
        [list(tensor.shape) for tensor in outputs],
        dtype,
    )


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def recorded_sidecar(trace: Path, rank: int, world: int) -> tuple[dict[str, Any], str]:
    """The watched step's collectives laid over the c10d operations of the recorded trace, as a flight-recorder dump.

    Also a note, "" where every recorded operation found its place. A step that differs from the watched one is left out.
    """
    issued = _state.issued or []
    operations = collective_operations(json.loads(trace.read_bytes())) if trace.is_file() else []
    entries: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    fits = bool(issued) and len(operations) % len(issued) == 0
    fits = fits and all(kind == issued[at % len(issued)].kind for at, (kind, _) in enumerate(operations))
    if fits:
        for at, (_, start_ns) in enumerate(operations):
            one = issued[at % len(issued)]
            numbers[one.group] = numbers.get(one.group, 0) + 1
            entries.append(entry(at, one, numbers[one.group], start_ns))
    note = (
        ""
        if fits or not operations
        else (
            f"the watched step issued {len(issued)} collectives and the recorded steps {len(operations)}, "
            "so their groups are not known"
        )
    )
    groups = {
        one.group: {"name": one.group, "desc": one.description, "ranks": str(list(one.members))} for one in issued
    }
    record = {"version": "2.10", "comm_lib_version": "fake", "pg_config": groups, "entries": entries}
    return {**record, "rank": rank, "world_size": world}, note


def entry(number: int, one: Issued, seq: int, created_ns: int) -> dict[str, Any]:
    """One collective as the flight recorder writes it."""
    sizes = len(one.input_sizes), len(one.output_sizes)
    return {
        "record_id": number,
        "pg_id": int(one.group) if one.group.isdecimal() else 0,
        "process_group": [one.group, one.description],
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"fake:{one.kind}",
        "time_created_ns": created_ns,
        "input_sizes": one.input_sizes,
        "input_dtypes": [one.dtype] * sizes[0],
        "output_sizes": one.output_sizes,
        "output_dtypes": [one.dtype] * sizes[1],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "is_p2p": one.kind in ("send", "recv"),
    }


def collective_operations(document: dict[str, Any]) -> list[tuple[str, int]]:
    """(kind, start in unix ns) of the collectives in the steps of a trace, in order of their start."""
    base_ns = int(document.get("baseTimeNanoseconds", 0))
    found = []
    for event in document.get("traceEvents", []):
        name = event.get("name", "")
        if event.get("ph") == "X" and name.startswith("c10d::") and name[6:] in KINDS:
            found.append((KINDS[name[6:]], base_ns + round(float(event["ts"]) * 1000)))
    return sorted(found, key=lambda pair: pair[1])
