"""Torch's schedules: what we plan for is what its runtime calls, in that order."""

from __future__ import annotations

import pytest
from torch.distributed import pipelining

from tests.snapshot.rigs.pipelines import MICROBATCHES, RANKS, live
from tests.snapshot.schedule.test_actions import feasible
from ucformat.errors import UnsupportedError
from ucformat.snapshot.schedule.actions import ScheduleError
from ucformat.snapshot.schedule.from_torch import CLASSES, SINGLE, named, of_schedule, rank_of

PER_RANK = {**dict.fromkeys(SINGLE, (1,)), "zbvzerobubble": (2,), "dualpipev": (2,)}  # stages that a rank may hold


def flat(row: list[str]) -> list[str]:
    """Single actions of a list, pairs opened."""
    return [part for text in row for part in text.removesuffix("OVERLAP_F_B").strip("()").split(";")]


@pytest.mark.parametrize("name", CLASSES)
def test_a_live_schedule_runs_exactly_the_actions_that_are_planned_for(name: str) -> None:
    for rank, seen in enumerate(live()):
        assert seen[name].ran == flat(seen[name].lists[rank])
        assert seen[name].rank == rank


@pytest.mark.parametrize("name", CLASSES)
def test_by_name_and_from_the_live_object_the_schedule_is_the_same(name: str) -> None:
    schedule = named(name, RANKS, MICROBATCHES)
    for seen in live():
        assert seen[name].lists == schedule.lists()


@pytest.mark.parametrize(("name", "stages"), [(name, each) for name in CLASSES for each in PER_RANK.get(name, (2, 3))])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (2, 8), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_every_schedule_can_be_run_for_many_sizes(name: str, stages: int, ranks: int, microbatches: int) -> None:
    schedule = named(name, ranks, microbatches, stages)
    assert feasible(schedule)
    assert schedule.name == name
    assert schedule.microbatches == microbatches
    assert all(len(schedule.stages_of(rank)) == stages for rank in range(ranks))


def test_names_are_taken_in_torchs_spelling() -> None:
    assert named("ScheduleInterleaved1F1B", 2, 4) == named("interleaved1f1b", 2, 4, 2)
    assert named("1F1B", 2, 4).name == "1f1b"


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "stages"),
    [("Interleaved1F1B", 3, 7, 2), ("DualPipeV", 4, 4, 2), ("ZBVZeroBubble", 2, 4, 3), ("GPipe", 2, 4, 2), ("1F1B", 0, 4, 1)],
)
def test_sizes_that_dont_go_together_are_refused(name: str, ranks: int, microbatches: int, stages: int) -> None:
    with pytest.raises(ScheduleError, match=r"microbatches|stages"):
        named(name, ranks, microbatches, stages)


def test_an_unknown_name_or_object_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match="known: 1f1b, gpipe"):
        named("zigzag", 2, 4)
    with pytest.raises(UnsupportedError, match="parse"):
        of_schedule(object())
    with pytest.raises(UnsupportedError, match="rank"):
        rank_of(object())


def test_a_torch_without_the_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pipelining, CLASSES["dualpipev"])
    with pytest.raises(UnsupportedError, match=r"ScheduleDualPipeV: torch .* does not have it"):
        named("dualpipev", 2, 4)
