"""Pipeline schedules: the action lists are PyTorch's own, and their bubbles are the closed forms."""

from typing import Any

import pytest

from scaletrace.errors import UsageError
from scaletrace.extrapolate.rewrite.schedules import (
    SCHEDULES,
    Action,
    Op,
    actions_of,
    build,
    canonical,
    with_messages,
)

CASES = [
    *((name, p, m, 1) for name in ("GPipe", "1F1B") for p in (1, 2, 4, 8) for m in (1, 2, 4, 7, 16)),
    *(
        (name, p, m, v)
        for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
        for p, m in ((1, 2), (2, 4), (4, 4), (4, 8), (4, 10), (8, 16), (4, 3))
        for v in (1, 2, 3)
    ),
    *(("ZBVZeroBubble", p, m, 2) for p, m in ((1, 1), (2, 2), (2, 4), (4, 8), (4, 5), (8, 24))),
    *(("DualPipeV", p, m, 2) for p, m in ((1, 2), (2, 4), (4, 8), (4, 13), (8, 24))),
]


def pytorch_order(name: str, p: int, m: int, v: int) -> Any:
    """PyTorch's own program, with and without messages, without starting a process group."""
    from torch.distributed.pipelining import schedules as theirs

    kind = theirs.get_schedule_class(name)
    schedule = kind.__new__(kind)
    schedule.pp_group_size = schedule._num_stages = p
    schedule._n_microbatches = m
    if v == 1 and name in ("GPipe", "1F1B"):
        return schedule._get_pipeline_order()
    schedule._num_stages = schedule.num_stages = p * v
    schedule.n_local_stages, schedule._stages = v, [None] * v
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(p)}


def pytorch_rank(name: str, p: int, m: int, v: int, rank: int) -> Any:
    """PyTorch's own actions of one rank of a long pipeline."""
    from torch.distributed.pipelining import schedules as theirs

    if v == 1:
        return pytorch_order(name, p, m, v)[rank]
    kind = theirs.get_schedule_class(name)
    schedule = kind.__new__(kind)
    schedule.pp_group_size, schedule._num_stages, schedule.num_stages = p, p * v, p * v
    schedule._n_microbatches, schedule.n_local_stages, schedule._stages = m, v, [None] * v
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    return schedule._calculate_single_rank_operations(rank)


def flat(actions: Any) -> list[str]:
    """Compute actions as PyTorch prints them, overlapped pairs one after the other."""
    out = []
    for action in actions:
        if action is None or action.computation_type.value == "REDUCE_GRAD":
            continue
        out += flat(action.sub_actions) if action.sub_actions else [str(action)]
    return out


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_actions_are_those_of_pytorch(name: str, p: int, m: int, v: int) -> None:
    """Every rank does exactly what PyTorch's schedule of the same name and sizes does."""
    if name == "1F1B" and m < p:
        pytest.skip("PyTorch's listing (not its run) of 1F1B invents micro batches when there are fewer than stages")
    expected = pytorch_order(name, p, m, v)
    program = build(name, p, m, v)
    if name == "1F1B":  # the listing (not the run) counts the forwards of the last stage from one
        expected[p - 1] = [
            a._replace(microbatch_index=a.microbatch_index - 1) if a and a.computation_type.value == "F" else a
            for a in expected[p - 1]
        ]

    assert {rank: flat(row) for rank, row in expected.items()} == {
        rank: [str(action) for action in row] for rank, row in enumerate(program.actions)
    }


@pytest.mark.parametrize(("name", "p", "m", "v"), [case for case in CASES if case[0] not in ("GPipe", "1F1B")])
def test_messages_are_posted_in_the_order_of_pytorch(name: str, p: int, m: int, v: int) -> None:
    """Sends and receives stand where PyTorch's runtime puts them."""
    from torch.distributed.pipelining.schedules import _add_send_recv

    program = build(name, p, m, v)
    theirs = {rank: [a for a in row if a is not None] for rank, row in pytorch_order(name, p, m, v).items()}
    expected = _add_send_recv(theirs, lambda s: program.rank_of_stage[s], p * v)

    assert {rank: flat(row) for rank, row in expected.items()} == {
        rank: [str(a) for a in row] for rank, row in enumerate(with_messages(program))
    }


LONG = [
    ("GPipe", 64, 128, 1),
    ("1F1B", 64, 128, 1),
    ("GPipe", 1024, 8, 1),
    *((name, p, m, 2) for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
      for p, m in ((64, 128), (1024, 64))),
    *((name, p, 2 * p, 2) for name in ("ZBVZeroBubble", "DualPipeV") for p in (64, 1024)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "p", "m", "v"), LONG)
def test_actions_of_long_pipelines_are_those_of_pytorch(name: str, p: int, m: int, v: int) -> None:
    """The same on 64 and 1,024 pipeline ranks, at both ends and in the middle."""
    for rank in (0, 1, p // 2, p - 2):
        expected = flat(pytorch_rank(name, p, m, v, rank))

        assert expected == [str(action) for action in actions_of(name, p, m, v, rank)]


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_every_micro_batch_passes_every_stage_once(name: str, p: int, m: int, v: int) -> None:
    """Each stage runs each micro batch forward once and backward once, whole or in two parts."""
    actions = [action for row in build(name, p, m, v).actions for action in row]
    work = {(s, b) for s in range(p * v) for b in range(m)}
    forward = [(a.stage, a.micro_batch) for a in actions if a.op is Op.FORWARD]
    to_input = [(a.stage, a.micro_batch) for a in actions if a.op in (Op.BACKWARD, Op.INPUT)]
    to_weight = [(a.stage, a.micro_batch) for a in actions if a.op in (Op.BACKWARD, Op.WEIGHT)]

    assert [sorted(work)] * 3 == [sorted(forward), sorted(to_input), sorted(to_weight)]


def test_a_short_1f1b_has_as_much_warm_up_as_micro_batches() -> None:
    """With fewer micro batches than stages the first rank does all forwards, then all backwards."""
    program = build("1f1b", 4, 2)

    expected = ["0F0", "0F1", "0B0", "0B1"]

    assert expected == [str(action) for action in program.actions[0]]


def test_names_are_understood_in_any_case_and_by_nickname() -> None:
    """`zbv`, `interleaved` and PyTorch's names in any case mean the same schedule."""
    expected = ["ZBVZeroBubble", "Interleaved1F1B", "1F1B", "GPipe"]

    assert expected == [canonical(name) for name in ("zbv", "vpp", "1f1b", "gPIPE")]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (("Zigzag", 2, 2), "one of GPipe"),
        (("1F1B", 2, 4, 2), "one chunk a rank, not 2"),
        (("Interleaved1F1B", 2, 5, 2), "take a multiple of 2"),
        (("ZBV", 2, 4, 3), "two chunks a rank, not 3; give chunks=2"),
        (("DualPipeV", 2, 3, 2), "fewer than its 4 stages"),
        (("GPipe", 0, 3), "at least 1"),
    ],
)
def test_impossible_programs_are_refused_with_the_remedy(call: tuple[Any, ...], sentence: str) -> None:
    """Sizes that a schedule does not allow raise a sentence that says which would do."""
    with pytest.raises(UsageError, match=sentence):
        build(*call)


def test_a_backward_needs_the_next_stage_and_its_own_forward() -> None:
    """Data dependencies follow the stages, to the split backward where there is one."""
    program = build("ZBV", 2, 2, 2)

    assert (Action(1, Op.INPUT, 0), Action(0, Op.FORWARD, 0)) == program.needs(Action(0, Op.INPUT, 0))
    assert (Action(3, Op.FORWARD, 1),) == program.needs(Action(3, Op.INPUT, 1))
    assert (Action(0, Op.INPUT, 0),) == program.needs(Action(0, Op.WEIGHT, 0))


def test_all_schedules_of_pytorch_are_covered() -> None:
    """Every schedule that PyTorch offers by name is known."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    expected = [get_schedule_class(name).__name__.removeprefix("Schedule") for name in SCHEDULES]

    assert expected == list(SCHEDULES)
