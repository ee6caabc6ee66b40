"""When messages of a pipeline are posted and awaited: call for call what PyTorch's own schedules do."""

from __future__ import annotations

from typing import Any

import pytest

from scaletrace.extrapolate.rewrite.postings import Deed, Verb, deeds
from scaletrace.extrapolate.rewrite.schedules import Op, build

CASES = [
    *((name, p, m, 1) for name in ("GPipe", "1F1B") for p, m in ((2, 1), (2, 4), (4, 2), (4, 4), (4, 9), (8, 16))),
    *((name, p, m, 2) for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
      for p, m in ((2, 2), (2, 4), (4, 8))),
    ("Interleaved1F1B", 4, 8, 3), ("DualPipeV", 2, 4, 2), ("DualPipeV", 4, 8, 2), ("DualPipeV", 4, 13, 2),
]  # fmt: skip
Log = list[tuple[str, tuple[str, ...]]]


class Stage:
    """Stands in for a stage of PyTorch and writes down what the schedule has it do."""

    submod = None

    def __init__(self, index: int, home: list[int], log: Log) -> None:
        self.stage_index, self.home, self.log = index, home, log
        self.is_first, self.is_last = index == 0, index == len(home) - 1

    def ops(self, op: str, batch: int, peer: int) -> list[str]:
        """One message with the stage before or after, none where that is on the same rank or not there."""
        there = 0 <= peer < len(self.home) and self.home[peer] != self.home[self.stage_index]
        return [f"{self.stage_index}{op}{batch}"] if there else []

    def get_fwd_recv_ops(self, batch: int) -> list[str]:
        return self.ops("RECV_F", batch, self.stage_index - 1)

    def get_fwd_send_ops(self, batch: int) -> list[str]:
        return self.ops("SEND_F", batch, self.stage_index + 1)

    def get_bwd_recv_ops(self, batch: int) -> list[str]:
        return self.ops("RECV_B", batch, self.stage_index + 1)

    def get_bwd_send_ops(self, batch: int) -> list[str]:
        return self.ops("SEND_B", batch, self.stage_index - 1)

    def forward_one_chunk(self, batch: int, *_: Any, **__: Any) -> None:
        self.log.append(("run", (f"{self.stage_index}F{batch}",)))

    def backward_one_chunk(self, batch: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        self.log.append(("run", (f"{self.stage_index}{'B' if full_backward else 'I'}{batch}",)))

    def backward_weight_one_chunk(self, batch: int, *_: Any, **__: Any) -> None:
        self.log.append(("run", (f"{self.stage_index}W{batch}",)))

    def get_local_bwd_output(self, *_: Any) -> None: ...

    def set_local_fwd_input(self, *_: Any) -> None: ...

    def set_local_bwd_input(self, *_: Any) -> None: ...

    def perform_reduce_grad(self, *_: Any) -> None: ...


def pytorch_log(monkeypatch: pytest.MonkeyPatch, name: str, p: int, m: int, v: int, rank: int) -> Log:
    """What PyTorch's schedule does on one rank, without a process group: it is run on stages that only take notes."""
    from torch.distributed.pipelining import schedules as theirs

    log: Log = []

    def post(ops: list[str], desc: str | None = None) -> list[str]:
        log.append(("post", tuple(ops)))
        return ops

    monkeypatch.setattr(theirs, "_batch_p2p", post)
    monkeypatch.setattr(theirs, "_wait_batch_p2p", lambda work: log.append(("wait", tuple(work))))
    monkeypatch.setattr(theirs, "_sorted_batch_p2p", lambda ops, desc=None: {0: post(ops)} if ops else {})
    kind = theirs.get_schedule_class(name)
    schedule: Any = kind.__new__(kind)
    program = build(name, p, m, v)
    home = list(program.rank_of_stage)
    mine = [Stage(stage, home, log) for stage in range(p * v) if home[stage] == rank]
    schedule._n_microbatches, schedule._num_stages, schedule._stages = m, p * v, mine
    schedule._stage, schedule.rank, schedule.scale_grads = mine[0], rank, False
    for method in ("_initialize_stage", "_initialize_stages", "_maybe_compute_loss", "_maybe_get_loss",
                   "_update_losses", "_assert_unsharded"):  # fmt: skip
        setattr(schedule, method, lambda *_, **__: None)
    schedule._check_inputs = lambda *_: ([()] * m, [{}] * m)
    if v > 1:
        _lower(schedule, theirs, home, p, m, v)
    schedule._step_microbatches()
    return [entry for entry in log if entry[1]]


def _lower(schedule: Any, theirs: Any, home: list[int], p: int, m: int, v: int) -> None:
    """The schedule's own actions with sends and receives, as its constructor makes them."""
    schedule.pp_group_size, schedule.num_stages, schedule.n_local_stages = p, p * v, v
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    actions = {r: schedule._calculate_single_rank_operations(r) for r in range(p)}
    rows = {r: [a for a in row if a is not None] for r, row in actions.items()}
    schedule.pipeline_order_with_comms = theirs._add_send_recv(rows, lambda stage: home[stage], p * v)
    schedule._comp_type_to_function_map, schedule.unshard_ops = {}, {}
    schedule.fwd_recv_ops, schedule.bwd_recv_ops = {}, {}
    from collections import Counter

    schedule.backward_counter = Counter()


def ours(row: tuple[Deed, ...], split: bool) -> Log:
    """A rank's deeds as the log writes them; posts of single messages stand alone where PyTorch's runtime posts each."""
    out: Log = []
    for deed in row:
        names = tuple(str(action) for action in deed.actions)
        if split and deed.verb is Verb.WAIT:
            out += [("wait", (name,)) for name in names]
        else:
            out.append((deed.verb.value, names))
    return out


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_messages_are_posted_and_awaited_as_pytorch_does(
    monkeypatch: pytest.MonkeyPatch, name: str, p: int, m: int, v: int
) -> None:
    """Every rank computes, posts and waits in the order in which PyTorch's schedule of that name does."""
    rows = deeds(build(name, p, m, v))
    for rank in {0, 1, p // 2, p - 1}:
        single = name != "1F1B"

        assert pytorch_log(monkeypatch, name, p, m, v, rank) == ours(rows[rank], single)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("p", "m"), [(64, 128), (1024, 4), (1024, 32)])
def test_long_pipelines_post_and_await_as_pytorch_does(
    monkeypatch: pytest.MonkeyPatch, name: str, p: int, m: int
) -> None:
    """The same on 64 and 1,024 stages, at both ends and in the middle."""
    rows = deeds(build(name, p, m))
    for rank in (0, 1, p // 2, p - 2, p - 1):
        assert pytorch_log(monkeypatch, name, p, m, 1, rank) == ours(rows[rank], name != "1F1B")


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_every_message_is_posted_and_awaited_once_on_both_sides(name: str, p: int, m: int, v: int) -> None:
    """What is sent is received, and nobody leaves the step with a message on the way."""
    program = build(name, p, m, v)
    done = {verb: [a for row in deeds(program) for d in row if d.verb is verb for a in d.actions] for verb in Verb}
    sends = {(a.stage, a.op is Op.SEND_F, a.micro_batch) for a in done[Verb.POST] if "SEND" in a.op.value}
    receives = {
        (a.stage + (-1 if a.op is Op.RECV_F else 1), a.op is Op.RECV_F, a.micro_batch)
        for a in done[Verb.POST]
        if "RECV" in a.op.value
    }

    assert sends == receives
    assert sorted(map(str, done[Verb.POST])) == sorted(map(str, done[Verb.WAIT]))
    assert [list(row) for row in program.actions] == [
        [deed.actions[0] for deed in row if deed.verb is Verb.RUN] for row in deeds(program)
    ]
