"""A keeper persists what it is told to; whatever happens to it, the trainer goes on and nothing half-done can be opened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ucformat
from tests.snapshot.rigs.keeping import (
    PATIENCE_S,
    assert_persisted,
    ends,
    hashed,
    listen,
    make_slots,
    only,
    options,
    persist_all,
    take,
    until,
)
from tests.snapshot.rigs.slotfill import opened
from ucformat.errors import NotACheckpointError
from ucformat.snapshot.keeper import client as keepers
from ucformat.snapshot.keeper import contributions
from ucformat.snapshot.keeper.client import Keeper
from ucformat.snapshot.keeper.messages import Failed, Hashed, Persisted, Restarted, Skipped, Stored, Trouble
from ucformat.snapshot.slots.restart_fence import Fence, abandon, write_fence
from ucformat.snapshot.slots.slot_set import SlotSet
from ucformat.storage.open import open_store


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "gate"
    folder.mkdir()
    monkeypatch.setenv("GATE", str(folder))
    return folder


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotSet]:
    with make_slots(tmp_path / "slots", count=3) as made:
        yield made


@pytest.fixture
def started() -> Iterator[list[Keeper]]:
    """Keepers to be ended with the test, however it ends."""
    running: list[Keeper] = []
    yield running
    for keeper in running:
        keeper.stop(0.0)


def start(started: list[Keeper], keeper: Keeper) -> Keeper:
    started.append(keeper)
    keeper.start()
    return keeper


def exists(pid: int) -> bool:
    """Whether a process is there that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_slots_are_hashed_and_persisted_bit_for_bit(tmp_path: Path, slots: SlotSet, started: list[Keeper]) -> None:
    keeper = start(started, Keeper(options(tmp_path / "slots", tmp_path / "run")))
    assert keeper.alive()
    first, second = take(slots, 4), take(slots, 5)
    assert keeper.hash_and_maybe_persist(first.index, 4, persist=True)
    assert keeper.hash_and_maybe_persist(second.index, 5, persist=False)
    assert keeper.busy_slots() == {first.index, second.index}
    (events,) = listen(Persisted, keeper)
    events += keeper.stop(PATIENCE_S)
    assert {(type(event), event.step) for event in events if not isinstance(event, Restarted)} == {
        (Hashed, 4),
        (Hashed, 5),
        (Stored, 4),
        (Persisted, 4),
    }
    assert keeper.busy_slots() == set()
    assert (keeper.refused, keeper.restarts, keeper.alive()) == (0, 0, False)
    assert_persisted(tmp_path / "run", 4)
    assert opened(tmp_path / "slots").files[0].checks is not None
    with pytest.raises(ValueError, match="no persist_url"):
        Keeper(options(tmp_path / "slots")).hash_and_maybe_persist(0, 6, persist=True)


def test_a_keeper_does_its_work_without_loading_torch(tmp_path: Path, slots: SlotSet, started: list[Keeper]) -> None:
    keeper = start(started, Keeper(options(tmp_path / "slots", tmp_path / "run", imports=())))
    assert keeper.hash_and_maybe_persist(take(slots, 4).index, 4, persist=True)
    listen(Persisted, keeper)
    assert_persisted(tmp_path / "run", 4)
    maps = Path(f"/proc/{keeper.pid}/maps").read_text()
    assert "numpy" in maps
    assert "torch" not in maps


def test_the_keepers_of_two_ranks_commit_together(tmp_path: Path, started: list[Keeper]) -> None:
    url = f"file://{tmp_path}/run"
    with make_slots(tmp_path / "a", 0, 2) as first, make_slots(tmp_path / "b", 1, 2) as second:
        pair = [start(started, Keeper(options(tmp_path / host, url, rank, 2))) for rank, host in enumerate("ab")]
        assert pair[1].hash_and_maybe_persist(take(second, 5).index, 5, persist=True)
        listen(Stored, pair[1])
        with pytest.raises(NotACheckpointError):
            ucformat.open(str(tmp_path / "run"))
        assert pair[0].hash_and_maybe_persist(take(first, 5).index, 5, persist=True)
        said = listen(Persisted, *pair)
        assert [ends(events) for events in said] == [[(Persisted, 5)], [(Persisted, 5)]]
        assert_persisted(tmp_path / "run", 5)
        assert [keeper.stop(PATIENCE_S) for keeper in pair] == [[], []]


def test_a_keeper_killed_in_mid_persist_leaves_nothing_that_opens_and_its_successor_catches_up(
    tmp_path: Path, slots: SlotSet, started: list[Keeper], gate: Path
) -> None:
    url = f"gated://{tmp_path}/run"
    (gate / "hold").touch()
    keeper = start(started, Keeper(options(tmp_path / "slots", url)))
    slot = take(slots, 4)
    assert keeper.hash_and_maybe_persist(slot.index, 4, persist=True)
    until((gate / "reached").exists, keeper)
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGKILL)
    until(lambda: not keeper.alive())
    with pytest.raises(NotACheckpointError):
        ucformat.open(str(tmp_path / "run"))
    assert not keeper.hash_and_maybe_persist(take(slots, 5).index, 5, persist=True)
    assert (keeper.refused, keeper.busy_slots()) == (1, {slot.index})
    (gate / "hold").unlink()
    (events,) = listen(Persisted, keeper)
    assert keeper.restarts == 1
    assert "was killed by SIGKILL" in only(Restarted, events).message
    assert ends(events) == [(Persisted, 4)]
    assert keeper.busy_slots() == set()
    assert_persisted(tmp_path / "run", 4)


def test_a_keeper_that_dies_over_an_order_again_gives_it_up(
    tmp_path: Path, slots: SlotSet, started: list[Keeper], gate: Path
) -> None:
    (gate / "hold").touch()
    keeper = start(started, Keeper(options(tmp_path / "slots", f"gated://{tmp_path}/run")))
    assert keeper.hash_and_maybe_persist(take(slots, 4).index, 4, persist=True)
    for life in range(keepers.LIVES):
        until((gate / "reached").exists, keeper)
        assert keeper.pid is not None
        os.kill(keeper.pid, signal.SIGKILL)
        until(lambda: not keeper.alive())
        (gate / "reached").unlink()
        if life < keepers.LIVES - 1:
            assert only(Restarted, listen(Restarted, keeper)[0]).count == life + 1
    (events,) = listen(Failed, keeper)
    assert "was killed by SIGKILL" in only(Failed, events).message
    assert keeper.busy_slots() == set()


def test_a_keeper_that_can_not_start_says_why_and_harms_nobody(tmp_path: Path, slots: SlotSet, started: list[Keeper]) -> None:
    keeper = start(started, Keeper(options(tmp_path / "slots", tmp_path / "run", imports=("no_such_module",))))
    assert keeper.hash_and_maybe_persist(take(slots, 4).index, 4, persist=True)
    (events,) = listen(Failed, keeper)
    assert "No module named 'no_such_module'" in only(Failed, events).message
    assert keeper.busy_slots() == set()


def test_a_storage_that_hangs_is_given_up_and_hashing_goes_on(
    tmp_path: Path, slots: SlotSet, started: list[Keeper], gate: Path
) -> None:
    (gate / "hold").touch()
    url = f"gated://{tmp_path}/run"
    keeper = start(started, Keeper(options(tmp_path / "slots", url, timeout_s=1.0)))
    assert keeper.hash_and_maybe_persist(take(slots, 4).index, 4, persist=True)
    (events,) = listen(Hashed, keeper)
    (more,) = until((gate / "reached").exists, keeper)
    assert keeper.hash_and_maybe_persist(take(slots, 5).index, 5, persist=False)
    (hashed,) = listen(Hashed, keeper)
    assert only(Hashed, hashed).step == 5
    (last,) = listen(Restarted, keeper)
    failed = only(Failed, [*events, *more, *hashed, *last])
    assert failed.step == 4
    assert url in failed.message
    assert "does not come back" in failed.message
    assert keeper.busy_slots() == set()
    (gate / "hold").unlink()
    assert keeper.hash_and_maybe_persist(take(slots, 6).index, 6, persist=True)
    (events,) = listen(Persisted, keeper)
    assert ucformat.steps(url) == [6]
    assert_persisted(url, 6)


def test_a_slow_storage_makes_the_keeper_refuse_and_never_the_trainer_wait(
    tmp_path: Path, started: list[Keeper], gate: Path
) -> None:
    (gate / "hold").touch()
    url = f"gated://{tmp_path}/run"
    with make_slots(tmp_path / "slots", count=4) as slots:
        keeper = start(started, Keeper(options(tmp_path / "slots", url)))
        assert keeper.hash_and_maybe_persist(take(slots, 1).index, 1, persist=True)
        assert keeper.hash_and_maybe_persist(take(slots, 2).index, 2, persist=True)
        third = take(slots, 3)
        assert not keeper.hash_and_maybe_persist(third.index, 3, persist=True)
        assert keeper.hash_and_maybe_persist(third.index, 3, persist=False)
        assert not keeper.hash_and_maybe_persist(third.index, 3, persist=False)
        assert keeper.refused == 2
        (gate / "hold").unlink()
        listen(Persisted, keeper, count=2)
        assert keeper.hash_and_maybe_persist(take(slots, 4).index, 4, persist=True)
        listen(Persisted, keeper)
        assert ucformat.steps(url) == [1, 2, 4]


def test_failures_of_the_storage_arrive_as_events(tmp_path: Path, slots: SlotSet, started: list[Keeper], gate: Path) -> None:
    (gate / "failures").write_text("2")
    url = f"gated://{tmp_path}/run"
    keeper = start(started, Keeper(options(tmp_path / "slots", url)))
    assert keeper.hash_and_maybe_persist(take(slots, 4).index, 4, persist=True)
    (events,) = listen(Persisted, keeper)
    assert ["the disk is on fire" in event.message for event in events if isinstance(event, Trouble)] == [True, True]
    assert keeper.stop(PATIENCE_S) == []
    assert (tmp_path / "slots" / "rank-00000" / keepers.LOG).read_text() == ""


def test_stop_finishes_what_was_ordered_or_says_what_was_not(
    tmp_path: Path, slots: SlotSet, started: list[Keeper], gate: Path
) -> None:
    keeper = start(started, Keeper(options(tmp_path / "slots", tmp_path / "run")))
    assert keeper.hash_and_maybe_persist(take(slots, 4).index, 4, persist=True)
    assert ends(keeper.stop(PATIENCE_S)) == [(Persisted, 4)]
    assert keeper.stop(PATIENCE_S) == []
    assert keeper.poll() == []
    assert not keeper.hash_and_maybe_persist(take(slots, 5).index, 5, persist=True)
    (gate / "hold").touch()
    other = start(started, Keeper(options(tmp_path / "slots", f"gated://{tmp_path}/other")))
    assert other.hash_and_maybe_persist(take(slots, 6).index, 6, persist=True)
    until((gate / "reached").exists, other)
    assert "had not finished within 0 s" in only(Failed, other.stop(0.0)).message
    assert not other.alive()
    assert ucformat.steps(str(tmp_path / "other")) == []


def run_trainer(tmp_path: Path, *steps: int) -> tuple[subprocess.Popen[str], int]:
    command = [
        sys.executable,
        "-m",
        "tests.snapshot.rigs.trainers",
        str(tmp_path / "slots"),
        f"gated://{tmp_path}/run",
        *map(str, steps),
    ]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert trainer.stdout.readline() == "ordered\n"
    return trainer, pid


def kill(trainer: subprocess.Popen[str]) -> None:
    trainer.kill()
    trainer.wait()
    assert trainer.stdout is not None
    trainer.stdout.close()


def test_a_keeper_whose_trainer_is_killed_finishes_its_version_and_ends(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_S", "20")
    (gate / "hold").touch()
    trainer, pid = run_trainer(tmp_path, 4, 5)
    until((gate / "reached").exists)
    kill(trainer)
    time.sleep(1.0)  # the keeper sees that it is alone, and stays
    assert exists(pid)
    (gate / "hold").unlink()
    until(lambda: not exists(pid))
    assert ucformat.steps(f"gated://{tmp_path}/run") == [4]
    assert_persisted(f"gated://{tmp_path}/run", 4)
    assert ucformat.open(str(tmp_path / "slots")).catalog.notes.step == 5


def test_a_keeper_without_a_job_ends_with_its_trainer(tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_S", "20")
    trainer, pid = run_trainer(tmp_path)
    assert exists(pid)
    kill(trainer)
    until(lambda: not exists(pid))


def test_an_orphan_never_persists_what_the_job_has_abandoned(
    tmp_path: Path, gate: Path, started: list[Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_S", "0")
    url, home = f"gated://{tmp_path}/run", tmp_path / "slots"
    trainer, pid = run_trainer(tmp_path, 8)
    until(lambda: ucformat.steps(url) == [8])
    kill(trainer)
    until(lambda: not exists(pid))
    (gate / "hold").touch()
    trainer, pid = run_trainer(tmp_path, 10)
    until((gate / "reached").exists)  # step 10 is under way, when the trainer dies and the job goes on from step 8
    kill(trainer)
    assert abandon(str(home), 0, range(1), Fence("run-2", 8)) == [10]
    with make_slots(home, run="run-2") as slots:
        assert slots.steps == [8]
        keeper = start(started, Keeper(options(home, url, run="run-2")))
        assert keeper.hash_and_maybe_persist(take(slots, 10).index, 10, persist=True)
        assert exists(pid)
        (gate / "hold").unlink()
        listen(Persisted, keeper)
        assert not exists(pid)
        assert ucformat.steps(url) == [8, 10]
        assert_persisted(url, 10)
        assert contributions.made_by(open_store(f"{url}/step-00000010"), "run-2")


def test_a_keeper_hears_of_a_fence_that_is_set_up_while_it_works(tmp_path: Path, slots: SlotSet, started: list[Keeper]) -> None:
    """Rank 0 of two: its shard is stored, and the other rank hands in its part after the job has gone on without them."""
    home, run = tmp_path / "both", tmp_path / "run"
    with make_slots(home, 0, 2) as first, make_slots(home, 1, 2) as second:
        earlier = Fence("run-0", 3)  # of this very start, or one before: not against it
        write_fence(str(home / "rank-00000"), earlier)
        keeper = start(started, Keeper(options(home, run, 0, 2)))
        assert keeper.hash_and_maybe_persist(take(first, 10).index, 10, persist=True)
        listen(Stored, keeper)
        write_fence(str(home / "rank-00000"), Fence("run-2", 8))
        (said,) = listen(Skipped, keeper)
        assert "went on from step 8" in only(Skipped, said).why
        events = persist_all(options(home, run, 1, 2, timeout_s=0.5), hashed(second, 10))
        assert ends(events) == [(Failed, 10)]
    assert ucformat.steps(str(run)) == []


def test_a_new_trainers_keeper_waits_for_the_old_one(
    tmp_path: Path, gate: Path, started: list[Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_S", "0")
    (gate / "hold").touch()
    url = f"gated://{tmp_path}/run"
    trainer, pid = run_trainer(tmp_path, 4)
    until((gate / "reached").exists)
    kill(trainer)
    with make_slots(tmp_path / "slots", count=2, run="run-2") as slots:
        assert slots.steps == [4]
        keeper = start(started, Keeper(options(tmp_path / "slots", url, run="run-2")))
        slot = take(slots, 5)
        assert keeper.hash_and_maybe_persist(slot.index, 5, persist=True)
        assert exists(pid)
        (gate / "hold").unlink()
        listen(Persisted, keeper)
        assert not exists(pid)
        assert ucformat.steps(url) == [4, 5]
        assert_persisted(url, 4)
        assert_persisted(url, 5)
