"""Turns a pipeline program into which passes gather a stage's weights under FSDP, and which stages find gradients.

As in `torch.distributed.pipelining` and FSDP2 (torch 2.13): a backward leaves its stage gathered, and so does a forward
where nothing is resharded behind it. The schedules that PyTorch lowers (all but GPipe and 1F1B) also fetch the stages
that come next and give away those that do not (`_add_unshard_reshard`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scaletrace.extrapolate.rewrite.schedules import Action, Op, Program

ACTIVE = 3
"""Stages that PyTorch keeps gathered on a rank."""
SINGLE = ("GPipe", "1F1B")


@dataclass(slots=True)
class Fetches:
    """What one rank's actions did so far: passes whose weights were gathered for them, stages that found gradients.

    gathered: stages whose weights are whole now;  ahead: those that were gathered for a pass to come
    """

    passes: set[Action] = field(default_factory=set)
    finds: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)


def fetches(program: Program, rank: int, resharded: bool) -> Fetches:
    """The passes of a pipeline rank that gather; a gather for a split backward counts with its input part.

    resharded: whether a forward gives the weights away again
    """
    row = program.actions[rank]
    found = Fetches()
    active: list[int] = []
    for number, action in enumerate(row):
        if program.schedule not in SINGLE and (number == 0 or program.chunks > ACTIVE):
            active = _lowered(found, active, _next_stages(row, number))
        _run(found, program, action, resharded)
    return found


def _next_stages(row: tuple[Action, ...], number: int) -> list[int]:
    """The stages of the next actions, each once, as many as are kept."""
    out: list[int] = []
    for action in row[number:]:
        if action.stage not in out:
            out.append(action.stage)
            if len(out) == ACTIVE:
                break
    return out


def _lowered(found: Fetches, active: list[int], wanted: list[int]) -> list[int]:
    """Give away the active stages that are not wanted, then gather the wanted ones that are not active."""
    for stage in active:
        if stage not in wanted:
            found.gathered.discard(stage)
            found.ahead.discard(stage)
    for stage in wanted:
        if stage not in active and stage not in found.gathered:
            found.gathered.add(stage)
            found.ahead.add(stage)
    return wanted


def _run(found: Fetches, program: Program, action: Action, resharded: bool) -> None:
    """One action; of stage 0 PyTorch runs the whole backward as the weight part, since its input has no gradient.

    A split backward looks its weights up when the input part begins. Where forward gave them away and nothing has
    fetched them since, it finds shards, which are not in the graph, and the weight part computes nothing
    (`stage_backward_input`).
    """
    stage, op, batch = action
    split = (stage, batch) in program.split
    if op is Op.WEIGHT if stage else split and op is Op.INPUT:
        return
    whole = stage in found.gathered
    if op is not Op.FORWARD and (whole or op is not Op.INPUT):
        found.finds.add(stage)
    if not whole or stage in found.ahead:
        found.passes.add(Action(stage, Op.INPUT, batch) if op is Op.WEIGHT else action)
    found.ahead.discard(stage)
    found.gathered.add(stage)
    if op is Op.FORWARD and resharded:
        found.gathered.discard(stage)
