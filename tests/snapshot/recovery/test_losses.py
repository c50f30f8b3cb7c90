"""A lost host costs nothing that was protected; what can't be computed is never made up."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.campaigns.injuries import injure
from tests.checkpoints import flip
from tests.snapshot.rigs.hosts import MemoryHosts, restore_on
from tests.snapshot.rigs.parts import Part
from ucformat.errors import ChecksumError, NotACheckpointError
from ucformat.snapshot.restore import Restored


def made(place: Path, hosts: Sequence[int], members: int = 8) -> MemoryHosts:
    """Steps 1 and 2, both protected."""
    memory = MemoryHosts(place, hosts, members)
    for step in (1, 2):
        memory.take(step)
        memory.protect()
    memory.close()
    return memory


def lose(place: Path, *hosts: int) -> None:
    for host in hosts:
        shutil.rmtree(place / f"host{host}")


def assert_all(found: list[tuple[Restored | None, Part]], step: int, computed: tuple[int, ...] = ()) -> Restored:
    """Every rank restored this step, every bit of it."""
    for restored, part in found:
        assert restored is not None
        assert (restored.step, restored.source, restored.computed) == (step, "memory", computed)
        assert part.is_of(step)
    first = found[0][0]
    assert first is not None
    return first


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "dim"), [(4, 0), (3, 0), (2, 1)])
def test_any_lost_host_is_computed_from_parity_for_any_ranks(tmp_path: Path, lost: int, ranks: int, dim: int) -> None:
    made(tmp_path, [0, 1, 2, 3])
    lose(tmp_path, lost)
    left = [host for host in range(4) if host != lost]
    places = [*left, lost][:ranks] if ranks == 4 else left  # the lost host comes back empty, or not at all
    restored = assert_all(restore_on(tmp_path, places, dim), 2, (lost,))
    assert restored.verified
    assert restored.served["parity"] > 0
    assert f"what rank {lost} held" in restored.why


def test_several_ranks_on_each_host_and_several_groups(tmp_path: Path) -> None:
    memory = made(tmp_path, [0, 0, 1, 1, 2, 2, 3, 3], 2)
    assert memory.grouping.groups == ((0, 4), (2, 6), (1, 5), (3, 7))
    lose(tmp_path, 1)
    assert_all(restore_on(tmp_path, [0, 2, 3], 1), 2, (2, 3))


def test_two_lost_hosts_of_different_groups_are_computed(tmp_path: Path) -> None:
    memory = made(tmp_path, [0, 1, 2, 3], 2)
    assert memory.grouping.groups == ((0, 2), (1, 3))
    lose(tmp_path, 0, 1)
    assert_all(restore_on(tmp_path, [2, 3]), 2, (0, 1))


def test_two_lost_hosts_of_one_group_are_an_error_that_says_so(tmp_path: Path) -> None:
    made(tmp_path, [0, 1, 2, 3])
    lose(tmp_path, 0, 3)
    with pytest.raises(NotACheckpointError, match=r"step 2 of 4 ranks.*ranks 0, 3 have no directory on any of 2 hosts"):
        restore_on(tmp_path, [1, 2])


def test_a_damaged_slot_is_computed_and_never_loaded(tmp_path: Path) -> None:
    memory = made(tmp_path, [0, 1, 2])
    record = memory.slots and memory.last[1]
    assert record
    flip(tmp_path / "host1/rank-00001" / f"slot-{record.index}.safetensors", 4096 + 77_777)
    restored = assert_all(restore_on(tmp_path, [0, 1, 2]), 2, (1,))
    assert "step 2 in memory can't be used" in restored.passed_over[0]


def test_a_damaged_slot_beside_a_lost_host_gives_the_version_before(tmp_path: Path) -> None:
    memory = made(tmp_path, [0, 1, 2])
    flip(tmp_path / "host1/rank-00001" / f"slot-{memory.last[1].index}.safetensors", 4096 + 77_777)
    lose(tmp_path, 2)
    restored = assert_all(restore_on(tmp_path, [0, 1]), 1, (2,))
    assert any("step 2 in memory can't be used" in why for why in restored.passed_over)


def test_parity_of_another_version_is_not_used(tmp_path: Path) -> None:
    """Rank 0 has made its stripe of step 2, the others theirs of step 1 only: step 1 is what is protected."""
    memory = MemoryHosts(tmp_path, [0, 1, 2])
    memory.take(1)
    memory.protect()
    memory.take(2)
    memory.protect([0])
    memory.close()
    lose(tmp_path, 1)
    restored = assert_all(restore_on(tmp_path, [0, 2]), 1, (1,))
    assert any("step 2 of 3 ranks lies in part elsewhere" in why for why in restored.passed_over)


def test_what_is_damaged_in_every_way_raises(tmp_path: Path) -> None:
    memory = MemoryHosts(tmp_path, [0, 1])
    memory.take(1)
    memory.close()
    flip(tmp_path / "host1/rank-00001" / f"slot-{memory.last[1].index}.safetensors", 4096 + 77_777)
    with pytest.raises(ChecksumError):
        restore_on(tmp_path, [0, 1])


# -- seeds: `python -m tests.campaigns --only injuries` tries more ----------------------------------------------------


def test_injuries_cost_no_protected_version_and_nothing_is_made_up(tmp_path: Path) -> None:
    for seed in range(20):
        assert injure(tmp_path / str(seed), random.Random(seed)) == "", seed
        shutil.rmtree(tmp_path / str(seed))
