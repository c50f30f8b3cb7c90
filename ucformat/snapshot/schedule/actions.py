"""Pipeline schedules as data: which rank runs which stage on which microbatch, and in which order.

`named` and `parse` make one without a process group, `torchlists.of_schedule` from a live torch schedule. Every `Schedule`
has been walked through once: one that would deadlock is refused. `replay` puts times to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

from ucformat.errors import UcformatError

Kind = Literal["F", "B", "I", "W", "REDUCE_GRAD"]
"""Forward; full backward; backward of the input alone, and of the weights alone; reduction of a stage's gradients."""

KINDS: tuple[Kind, ...] = get_args(Kind)
MOVES = ("UNSHARD", "RESHARD", "SEND_F", "RECV_F", "SEND_B", "RECV_B")  # torch's other actions: nobody waits for compute there
ACTION = re.compile(rf"(\d+)({'|'.join(sorted((*KINDS, *MOVES), key=len, reverse=True))})(\d*)")
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")

Result = tuple[int, str, int]
"""(stage, what, microbatch): "F" an output, "B" the gradient of an input, "W" the gradient of weights."""


class Action(NamedTuple):
    """What a rank does at one position of its list. `microbatch` is None for REDUCE_GRAD alone."""

    stage: int
    kind: Kind
    microbatch: int | None = None
    joined: bool = False
    """The second half of an OVERLAP_F_B pair: torch runs the halves one after the other unless the user overrides that."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


class ScheduleError(UcformatError):
    """Action lists that can't be run. `rank` and `action` say where, None where it is about the whole."""

    def __init__(self, why: str, rank: int | None = None, action: Action | str | None = None) -> None:
        self.why, self.rank, self.action = why, rank, action
        where = "" if rank is None else f" rank {rank}" + ("" if action is None else f", action {action}")
        super().__init__(f"pipeline schedule:{where}{':' if where else ''} {why}")


@dataclass(frozen=True, slots=True)
class Schedule:
    """R ranks' actions in order. Made by `build`, which proves that they can be run."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    """Rank of each stage."""
    microbatches: int
    order: tuple[tuple[int, int], ...]
    """All (rank, position), each after everything that it needs."""

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that `rank` holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_rank) if holder == rank)

    def needs(self, action: Action) -> tuple[Result, ...]:
        """The results without which `action` can't begin."""
        return _needs(action, len(self.stage_rank), self.microbatches)

    def lists(self) -> list[list[str]]:
        """Torch's text form, which `parse` reads back."""
        return [_spell(actions) for actions in self.ranks]


def gives(action: Action) -> tuple[Result, ...]:
    """The results that `action` leaves behind."""
    if action.microbatch is None:
        return ()
    parts = {"F": "F", "B": "BW", "I": "B", "W": "W"}[action.kind]
    return tuple((action.stage, part, action.microbatch) for part in parts)


def _needs(action: Action, stages: int, microbatches: int) -> tuple[Result, ...]:
    stage, at = action.stage, action.microbatch
    if at is None:
        return tuple((stage, "W", m) for m in range(microbatches))
    if action.kind == "F":
        return () if stage == 0 else ((stage - 1, "F", at),)
    if action.kind == "W":
        return ((stage, "B", at),)
    own = (stage, "F", at)
    return (own,) if stage == stages - 1 else (own, (stage + 1, "B", at))


def build(name: str, ranks: Iterable[Iterable[Action]]) -> Schedule:
    """The schedule of these lists. Raises ScheduleError for one that is incomplete, repeats itself or would deadlock."""
    lists = tuple(tuple(actions) for actions in ranks)
    holder: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if holder.setdefault(action.stage, rank) != rank:
                raise ScheduleError(f"stage {action.stage} also runs on rank {holder[action.stage]}", rank, action)
    if not holder or sorted(holder) != list(range(len(holder))):
        raise ScheduleError(f"stages must be numbered from 0 without a gap, found {sorted(holder)}")
    seen = [action.microbatch for actions in lists for action in actions if action.microbatch is not None]
    if not seen:
        raise ScheduleError("no action has a microbatch")
    microbatches = max(seen) + 1
    _complete(lists, holder, microbatches)
    stage_rank = tuple(holder[stage] for stage in range(len(holder)))
    return Schedule(name, lists, stage_rank, microbatches, _walk(lists, len(holder), microbatches))


def _complete(lists: Sequence[Sequence[Action]], holder: dict[int, int], microbatches: int) -> None:
    """Every result of every stage and microbatch once, every reduction at most once."""
    given: set[Result] = set()
    for rank, actions in enumerate(lists):
        for action in actions:
            made = gives(action) or ((action.stage, action.kind, 0),)
            if not given.isdisjoint(made):
                raise ScheduleError("comes twice, or its part was done before", rank, action)
            given.update(made)
    for stage, rank in sorted(holder.items()):
        for at in range(microbatches):
            for part, kind in (("F", "F"), ("B", "B or I"), ("W", "B or W")):
                if (stage, part, at) not in given:
                    raise ScheduleError(f"{kind} is missing for stage {stage}, microbatch {at}", rank)


def _walk(lists: Sequence[Sequence[Action]], stages: int, microbatches: int) -> tuple[tuple[int, int], ...]:
    """All (rank, position) in an order that can be run. Raises ScheduleError at a deadlock."""
    order: list[tuple[int, int]] = []
    done: set[Result] = set()
    place = [0] * len(lists)
    waiting: dict[Result, list[int]] = {}
    runnable = list(range(len(lists) - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        for at in range(place[rank], len(lists[rank])):
            action = lists[rank][at]
            missing = next((key for key in _needs(action, stages, microbatches) if key not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            order.append((rank, at))
            place[rank] = at + 1
            for key in gives(action):
                done.add(key)
                runnable.extend(waiting.pop(key, ()))
    if waiting:
        raise _deadlock(lists, place, [(rank, missing) for missing, ranks in waiting.items() for rank in ranks])
    return tuple(order)


def _deadlock(lists: Sequence[Sequence[Action]], place: Sequence[int], stuck: Sequence[tuple[int, Result]]) -> ScheduleError:
    """The error for ranks that stand at `place`: about a rank that is in its own way, if there is one."""

    def blocks_itself(item: tuple[int, Result]) -> bool:
        rank, missing = item
        return any(missing in gives(action) for action in lists[rank][place[rank] :])

    rank, (stage, part, at) = next(filter(blocks_itself, stuck), stuck[0])
    result = {"F": "the forward", "B": "the backward", "W": "the weights' backward"}[part]
    why = f"waits for ever for {result} of stage {stage}, microbatch {at}: this order deadlocks"
    return ScheduleError(why, rank, lists[rank][place[rank]])


def parse(lists: Iterable[Iterable[str | None]], name: str = "given") -> Schedule:
    """The schedule of action lists in torch's text form, one per rank: "0F0", "2I0", "2W0", "(0F3;3B1)OVERLAP_F_B".

    None, "" and actions that only move data (SEND_F, UNSHARD, …) are left out. Raises ScheduleError.
    """
    return build(name, ([action for text in row if text for action in _read(text, rank)] for rank, row in enumerate(lists)))


def _read(text: str, rank: int) -> list[Action]:
    """The compute actions of one entry."""
    pair = PAIR.fullmatch(text.strip())
    found: list[Action] = []
    for part in pair[1].split(";") if pair else [text]:
        match = ACTION.fullmatch(part.strip())
        if match is None:
            raise ScheduleError('not an action: write "2F0", "1B3", "2I0", "2W0" or "(0F3;3B1)OVERLAP_F_B"', rank, text)
        if match[2] in MOVES:
            continue
        kind = cast("Kind", match[2])
        if (match[3] == "") != (kind == "REDUCE_GRAD"):
            raise ScheduleError(f"{kind} {'needs a' if match[3] == '' else 'has no'} microbatch", rank, text)
        found.append(Action(int(match[1]), kind, int(match[3]) if match[3] else None, joined=bool(found)))
    return found


def _spell(actions: Sequence[Action]) -> list[str]:
    found: list[list[Action]] = []
    for action in actions:
        if action.joined and found:
            found[-1].append(action)
        else:
            found.append([action])
    return [str(part[0]) if len(part) == 1 else f"({';'.join(map(str, part))})OVERLAP_F_B" for part in found]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B, one stage per rank, as torch's loop runs it. Its own published list starts one microbatch late on the last rank."""
    lists = []
    for stage in range(ranks):
        warm = min(microbatches, ranks - stage)
        row = [Action(stage, "F", at) for at in range(warm)]
        for at in range(microbatches):
            row.append(Action(stage, "B", at))
            if warm + at < microbatches:
                row.append(Action(stage, "F", warm + at))
        lists.append([*row, Action(stage, "REDUCE_GRAD")])
    return build("1f1b", lists)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, one stage per rank."""
    every = range(microbatches)
    return build(
        "gpipe",
        (
            [*(Action(s, "F", m) for m in every), *(Action(s, "B", m) for m in every), Action(s, "REDUCE_GRAD")]
            for s in range(ranks)
        ),
    )
