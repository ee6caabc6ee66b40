"""Turns a pipeline program into what the host of each rank does in order: it computes, posts messages, waits for them.

When a message is posted, and whether the host waits for it at once, is what decides how much of it hides behind compute.
GPipe and 1F1B post a receive only when they need it, and 1F1B sends a result together with the receive that it wants
next and waits for both; the other schedules post each receive when its sender has run in lock step. As in
`torch.distributed.pipelining.schedules` (torch 2.13); Megatron's `send_forward_recv_backward` does as 1F1B does here.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from scaletrace.extrapolate.rewrite.schedules import Action, Op, Program, message_of, with_messages


class Verb(Enum):
    """What a host does."""

    RUN = "run"
    """Compute one action."""
    POST = "post"
    """Hand messages to the network, several at once where they are batched."""
    WAIT = "wait"
    """Go on only when these messages are through."""


class Deed(NamedTuple):
    """One thing that a host does; actions are one compute action or the messages posted or awaited together."""

    verb: Verb
    actions: tuple[Action, ...]


def deeds(program: Program) -> tuple[tuple[Deed, ...], ...]:
    """For each rank of the pipeline all that its host does in one step, in order; empty posts and waits are left out."""
    if program.schedule == "GPipe":
        rows = [list(_gpipe(program, rank)) for rank in range(program.ranks)]
    elif program.schedule == "1F1B":
        rows = [list(_one_f_one_b(program, rank)) for rank in range(program.ranks)]
    else:
        rows = [list(_runtime(program, row)) for row in with_messages(program)]
    return tuple(tuple(deed for deed in row if deed.actions) for row in rows)


def _sent(program: Program, action: Action) -> tuple[Action, ...]:
    """The message that carries the result of a compute action away, () where it stays on the rank."""
    found = message_of(program, action)
    return (found[0],) if found else ()


def _received(program: Program, action: Action) -> tuple[Action, ...]:
    """The message that brings what a compute action needs, () where that is there already."""
    for need in program.needs(action):
        found = message_of(program, need)
        if found and found[1].stage == action.stage:
            return (found[1],)
    return ()


def _gpipe(program: Program, rank: int) -> Iterator[Deed]:
    """Receive just before each pass, send just behind it; sends are waited for at the end of each half."""
    for op in (Op.FORWARD, Op.BACKWARD):
        sent: list[Action] = []
        for action in program.actions[rank]:
            if action.op is not op:
                continue
            yield Deed(Verb.POST, _received(program, action))
            yield Deed(Verb.WAIT, _received(program, action))
            yield Deed(Verb.RUN, (action,))
            yield Deed(Verb.POST, _sent(program, action))
            sent += _sent(program, action)
        yield Deed(Verb.WAIT, tuple(sent))


def _one_f_one_b(program: Program, rank: int) -> Iterator[Deed]:
    """Warm-up and drain wait for the send before last; between them each send is batched with the next receive."""
    forwards = [action for action in program.actions[rank] if action.op is Op.FORWARD]
    backwards = [action for action in program.actions[rank] if action.op is Op.BACKWARD]
    warm_up = min(len(forwards), program.ranks - rank)
    flying: tuple[Action, ...] = ()
    left: tuple[Action, ...] = ()
    for number, action in enumerate(forwards[:warm_up]):
        yield Deed(Verb.POST, _received(program, action))
        yield Deed(Verb.WAIT, _received(program, action))
        yield Deed(Verb.RUN, (action,))
        yield Deed(Verb.WAIT, flying)
        left = _sent(program, action)
        if number != warm_up - 1:
            yield Deed(Verb.POST, left)
            flying = left
    behind = iter(forwards[warm_up:])
    rest = iter(backwards)
    for action in rest:
        both = left + _received(program, action)
        yield Deed(Verb.POST, both)
        yield Deed(Verb.WAIT, both)
        yield Deed(Verb.RUN, (action,))
        left = _sent(program, action)
        forward = next(behind, None)
        if forward is None:
            break
        both = left + _received(program, forward)
        yield Deed(Verb.POST, both)
        yield Deed(Verb.WAIT, both)
        yield Deed(Verb.RUN, (forward,))
        left = _sent(program, forward)
    yield Deed(Verb.POST, left)
    for action in rest:
        yield Deed(Verb.POST, _received(program, action))
        yield Deed(Verb.WAIT, _received(program, action))
        yield Deed(Verb.RUN, (action,))
        yield Deed(Verb.WAIT, left)
        left = _sent(program, action)
        yield Deed(Verb.POST, left)
    yield Deed(Verb.WAIT, left)


def _runtime(program: Program, row: tuple[Action, ...]) -> Iterator[Deed]:
    """Every message is posted where the lowered schedule has it; a receive is waited for by its pass, sends at the end."""
    sent: list[Action] = []
    for action in row:
        if action.op in (Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT):
            yield Deed(Verb.WAIT, _received(program, action) if action.op is not Op.WEIGHT else ())
            yield Deed(Verb.RUN, (action,))
            continue
        yield Deed(Verb.POST, (action,))
        if action.op in (Op.SEND_F, Op.SEND_B):
            sent.append(action)
    yield Deed(Verb.WAIT, tuple(reversed(sent)))
