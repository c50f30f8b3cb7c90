"""The analyser: axes, schedule and this rank's stages, from the mesh and the schedule object."""

from __future__ import annotations

import pytest

from tests.snapshot.rigs.pipelines import MICROBATCHES, RANKS, live
from ucformat.errors import LayoutError
from ucformat.snapshot.schedule.from_torch import CLASSES, SINGLE, named
from ucformat.snapshot.schedule.strategy import derive, family


@pytest.mark.parametrize("name", CLASSES)
def test_mesh_and_live_schedule_tell_the_strategy(name: str) -> None:
    total = RANKS if name in SINGLE else 2 * RANKS
    for rank, seen in enumerate(live()):
        held = ", ".join(map(str, named(name, RANKS, MICROBATCHES).stages_of(rank)))
        assert seen[name].strategy == (
            f"pp 2 × dp_shard 1 × tp 1: {name}, {MICROBATCHES} microbatches; rank {rank} holds {held} of {total} stages"
        )


def test_a_mesh_that_contradicts_the_schedule_is_refused() -> None:
    for seen in live():
        assert "pp 1 × dp 2: the schedule 1f1b runs on 2 pipeline ranks" in seen["1f1b"].clash


def test_v_shaped_schedules_put_first_and_last_stage_on_rank_0() -> None:
    seen = live()[0]
    assert seen["zbvzerobubble"].stages == (0, 3)
    assert seen["interleaved1f1b"].stages == (0, 2)


def test_without_mesh_and_schedule_there_is_one_rank_and_no_pipeline() -> None:
    found = derive()
    assert (found.dp, found.tp, found.pp, found.other, found.rank) == (1, 1, 1, 1, 0)
    assert found.stages == ()
    assert found.microbatches == 1
    assert str(found) == "pp 1: no pipeline schedule"


def test_a_hand_given_schedule_needs_the_rank_from_somewhere() -> None:
    schedule = named("1f1b", 4, 8)
    assert derive(None, schedule, 3).stages == (3,)
    with pytest.raises(LayoutError, match="rank"):
        derive(None, schedule)
    with pytest.raises(LayoutError, match="no pipeline rank 4"):
        derive(None, schedule, 4)
    assert derive(None, named("gpipe", 1, 8)).stages == (0,)


USUAL = {"dp": "dp", "dp_shard": "dp", "DP_replicate": "dp", "data": "dp", "tp": "tp", "model": "tp", "pp": "pp", "cp": "other"}


@pytest.mark.parametrize(("axis", "kind"), USUAL.items())
def test_axes_are_known_by_their_usual_names(axis: str, kind: str) -> None:
    assert family(axis) == kind
