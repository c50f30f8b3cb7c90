"""Schedules out of torch.distributed.pipelining: from a live schedule object, or by name without a process group.

The one place that relies on how torch builds its schedules. What it reads of a live object is public (`pipeline_order`,
`pipeline_order_with_comms`, the text of an action); private are only the stage of a single-stage schedule, and
the stand-ins for stages with which torch's classes make their lists where there is no process group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from ucformat.errors import UnsupportedError
from ucformat.snapshot.schedule.actions import Schedule, ScheduleError, gpipe, one_f_one_b, parse

CLASSES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "loopedbfs": "ScheduleLoopedBFS",
    "interleavedzerobubble": "ScheduleInterleavedZeroBubble",
    "zbvzerobubble": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""Name, lower case as torch's `get_schedule_class` takes it → public class of torch.distributed.pipelining."""

SINGLE = ("1f1b", "gpipe")  # one stage per rank; the rest have several


def of_schedule(schedule: object) -> Schedule:
    """What a live schedule object of torch.distributed.pipelining runs, on all ranks.

    Raises UnsupportedError for an object without action lists, ScheduleError for lists that can't be run.
    """
    name = kind_of(schedule)
    order = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
    if not isinstance(order, dict) or not order:
        raise UnsupportedError(
            type(schedule).__name__,
            "no action lists in `pipeline_order`: give them by hand with ucformat.snapshot.schedule.parse, in torch's text form",
        )
    if sorted(order) != list(range(len(order))):
        raise ScheduleError(f"ranks must be numbered from 0 without a gap, found {sorted(order)}")
    lists = [[None if action is None else str(action) for action in order[rank]] for rank in range(len(order))]
    if name == "1f1b":  # torch's own list of the last rank is off by one and deadlocks, only the loop is right
        return one_f_one_b(len(lists), sum(text is not None and text.startswith("0F") for text in lists[0]))
    return parse(lists, name)


def kind_of(schedule: object) -> str:
    """The schedule's name as in `CLASSES`, or its class's name.

    Nothing is imported for it: torch.distributed.pipelining would keep the process group (see `reshard.fsdp.known`).
    """
    pipelining = sys.modules.get("torch.distributed.pipelining")
    for name, title in CLASSES.items():
        known = getattr(pipelining, title, None)
        if known is not None and isinstance(schedule, known):
            return name
    return type(schedule).__name__


def rank_of(schedule: object) -> int:
    """The rank of this process in the pipeline. Raises UnsupportedError when the object does not say."""
    stage = getattr(schedule, "_stage", None)  # private: single-stage schedules have no other way to tell
    found = getattr(stage, "group_rank", None) if stage is not None else getattr(schedule, "rank", None)
    if not isinstance(found, int):
        raise UnsupportedError(type(schedule).__name__, f"torch {torch.__version__} does not tell the rank in the pipeline")
    return found


def named(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """A schedule by its name (see `CLASSES`; case and a leading "Schedule" do not matter), without a process group.

    `stages_per_rank` is 1 for 1F1B and GPipe, otherwise 2 unless given. Raises ScheduleError where the numbers don't go
    together, UnsupportedError for a name or class that this torch does not have.
    """
    key = name.lower().removeprefix("schedule")
    each = stages_per_rank or (1 if key in SINGLE else 2)
    if key not in CLASSES:
        raise UnsupportedError(name, f"no such schedule; known: {', '.join(CLASSES)}")
    if ranks < 1 or microbatches < 1 or each < 1 or (key in SINGLE and each != 1):
        raise ScheduleError(f"{name} can't have {ranks} ranks of {each} stages and {microbatches} microbatches")
    if key == "gpipe":
        return gpipe(ranks, microbatches)
    if key == "1f1b":
        return one_f_one_b(ranks, microbatches)
    return of_schedule(_stand_in(key, ranks, microbatches, each))


def _stand_in(key: str, ranks: int, microbatches: int, each: int) -> object:
    """Torch's schedule object over stages that hold nothing but numbers."""
    from torch.distributed import pipelining

    title = CLASSES[key]
    made = getattr(pipelining, title, None)
    if made is None:
        raise UnsupportedError(title, f"torch {torch.__version__} does not have it")
    stages: Sequence[object] = [
        SimpleNamespace(num_stages=ranks * each, group_size=ranks, group_rank=0, submod=None) for _ in range(each)
    ]
    try:
        found: object = made(stages, microbatches)
    except (ValueError, AssertionError) as error:
        raise ScheduleError(f"torch can't build {title} for {ranks} ranks, {microbatches} microbatches: {error}") from error
    except (AttributeError, TypeError) as error:
        why = f"torch {torch.__version__} builds it in another way ({error}): pass a live schedule object, or parse() its lists"
        raise UnsupportedError(title, why) from error
    return found
