"""Versions get to storage one after another, through failures; what can't is reported and leaves nothing that opens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ucformat
from tests.checkpoints import flip
from tests.snapshot.rigs.keeping import (
    PATIENCE_S,
    RUN,
    assert_persisted,
    ends,
    hashed,
    make_slots,
    only,
    options,
    persist_all,
    until,
)
from ucformat.errors import NotACheckpointError
from ucformat.formats import native
from ucformat.snapshot.keeper import contributions, slot_copy, worker
from ucformat.snapshot.keeper.contributions import Refusal
from ucformat.snapshot.keeper.messages import Event, Failed, Order, Persisted, Pruned, Skipped, Stored, Trouble
from ucformat.snapshot.keeper.worker import Persister
from ucformat.snapshot.slots.slot_set import SlotSet
from ucformat.storage.open import open_store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PAUSE_S", 0.01)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "gate"
    folder.mkdir()
    monkeypatch.setenv("GATE", str(folder))
    return folder


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotSet]:
    with make_slots(tmp_path / "slots") as made:
        yield made


def test_a_version_is_stored_then_committed_and_nothing_else_is_left(tmp_path: Path, slots: SlotSet) -> None:
    held = hashed(slots, 7)
    events = persist_all(options(tmp_path / "slots", tmp_path / "run"), held)
    assert [type(event) for event in events] == [Stored, Persisted]
    assert only(Persisted, events).nbytes == held.record.size
    assert_persisted(tmp_path / "run", 7)
    files = sorted(str(path.relative_to(tmp_path / "run" / "step-00000007")) for path in tmp_path.glob("run/*/**/*"))
    assert files == [f"shards.{RUN}", *(f"shards.{RUN}/{name}.safetensors" for name in ("00000", "index")), "ucf.json"]


@pytest.mark.parametrize("scheme", ["", "memory://", "gated://"])
def test_any_url_will_do(tmp_path: Path, gate: Path, slots: SlotSet, scheme: str) -> None:
    url = f"{scheme}{tmp_path}/run"
    events = persist_all(options(tmp_path / "slots", url), hashed(slots, 7), hashed(slots, 8))
    assert ends(events) == [(Persisted, 7), (Persisted, 8)]
    assert_persisted(url, 7)
    assert_persisted(url, 8)
    assert ucformat.steps(url) == [7, 8]


def test_a_storage_that_fails_now_and_then_costs_nothing_but_time(tmp_path: Path, gate: Path, slots: SlotSet) -> None:
    (gate / "failures").write_text("3")
    events = persist_all(options(tmp_path / "slots", f"gated://{tmp_path}/run"), hashed(slots, 7))
    assert ends(events) == [(Persisted, 7)]
    troubles = [event.message for event in events if isinstance(event, Trouble)]
    assert len(troubles) == 3
    assert all("the disk is on fire" in message and "step-00000007" in message for message in troubles)
    assert "attempt 1 of 6" in troubles[0]
    assert_persisted(f"gated://{tmp_path}/run", 7)


def test_a_directory_that_appears_late_is_found(tmp_path: Path, slots: SlotSet, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.write_text("not mounted yet")
    troubles: list[Event] = []

    def emit(event: Event) -> None:
        troubles.append(event)
        if len(troubles) == 2 and disk.is_file():
            disk.unlink()
            disk.mkdir()

    held = hashed(slots, 7)
    work = Persister(options(tmp_path / "slots", disk / "run"), emit)
    work.submit(Order(7, held.index, persist=True), held)
    work.finish(drop=False)
    work.run()
    assert [type(event) for event in troubles[:2]] == [Trouble, Trouble]
    assert str(disk) in only(Trouble, troubles[:1]).message
    assert ends(troubles) == [(Persisted, 7)]
    assert_persisted(disk / "run", 7)


def test_a_storage_that_stays_broken_fails_that_version_only(tmp_path: Path, gate: Path, slots: SlotSet) -> None:
    url = f"gated://{tmp_path}/run"
    (gate / "failures").write_text("3")
    chosen = options(tmp_path / "slots", url, retries=2)
    events = persist_all(chosen, hashed(slots, 7), hashed(slots, 8))
    assert ends(events) == [(Failed, 7), (Persisted, 8)]
    assert "the disk is on fire" in only(Failed, events).message
    assert ucformat.steps(url) == [8]
    assert not (tmp_path / "run" / "step-00000007").exists()


def test_damage_in_memory_fails_the_version_at_once(tmp_path: Path, slots: SlotSet) -> None:
    held = hashed(slots, 7)
    flip(held.file, held.record.data_start + 9)
    events = persist_all(options(tmp_path / "slots", tmp_path / "run"), held)
    assert ends(events) == [(Failed, 7)]
    assert held.file in only(Failed, events).message
    assert not [event for event in events if isinstance(event, Trouble)]
    assert ucformat.steps(str(tmp_path / "run")) == []


def test_a_version_that_is_committed_already_is_skipped(tmp_path: Path, slots: SlotSet) -> None:
    chosen = options(tmp_path / "slots", tmp_path / "run")
    held = hashed(slots, 7)
    persist_all(chosen, held)
    before = (tmp_path / "run" / "step-00000007" / "ucf.json").read_bytes()
    assert ends(persist_all(chosen, held)) == [(Persisted, 7)]  # by a keeper that died before it could say so
    events = persist_all(replace(chosen, run="another"), held)
    assert [type(event) for event in events] == [Skipped]
    assert "committed already" in only(Skipped, events).why
    assert (tmp_path / "run" / "step-00000007" / "ucf.json").read_bytes() == before


def test_what_a_former_start_left_in_the_directory_is_not_mixed_in(tmp_path: Path, slots: SlotSet) -> None:
    store = open_store(str(tmp_path / "run" / "step-00000007"))
    contributions.begin(store, "before").hold.release()
    store.put(contributions.shard_path(0, "before"), b"half a shard")
    store.put(contributions.part_path(0, "before"), b"half a part")
    events = persist_all(options(tmp_path / "slots", tmp_path / "run"), hashed(slots, 7))
    assert ends(events) == [(Persisted, 7)]
    assert_persisted(tmp_path / "run", 7)
    assert list(store.list()) == [f"shards.{RUN}/", "ucf.json"]


def test_keep_and_keep_every(tmp_path: Path, slots: SlotSet) -> None:
    chosen = options(tmp_path / "slots", tmp_path / "run", keep=2, keep_every=4)
    events = [event for step in range(1, 8) for event in persist_all(chosen, hashed(slots, step))]
    assert ucformat.steps(str(tmp_path / "run")) == [4, 6, 7]
    assert [event.removed for event in events if isinstance(event, Pruned)] == [(1,), (2,), (3,), (5,)]


def test_a_rank_that_hands_in_nothing_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    with make_slots(tmp_path / "slots", 0, 3) as slots:
        chosen = options(tmp_path / "slots", tmp_path / "run", world=3, timeout_s=0.5)
        store = open_store(str(tmp_path / "run" / "step-00000008"))
        events = persist_all(chosen, hashed(slots, 8))
    message = only(Failed, events).message
    assert "rank 1: handed in nothing within 0.5 s" in message
    assert "rank 2: handed in nothing within 0.5 s" in message
    assert list(store.list()) == [f".ucf.{RUN}.json", f"parts.{RUN}/"]
    assert list(store.list(f"parts.{RUN}")) == ["00000.refused.json"]
    with pytest.raises(NotACheckpointError):
        ucformat.open(str(tmp_path / "run"))


def test_a_rank_that_gives_up_ends_the_waiting_for_it(tmp_path: Path) -> None:
    with make_slots(tmp_path / "slots", 0, 2) as slots:
        contributions.put_part(open_store(str(tmp_path / "run/step-00000007")), RUN, Refusal(7, 1, "no space left"))
        events = persist_all(options(tmp_path / "slots", tmp_path / "run", world=2), hashed(slots, 7))
    assert "rank 1: no space left" in only(Failed, events).message
    names = sorted(path.name for path in (tmp_path / "run/step-00000007").iterdir())
    assert names == [f".ucf.{RUN}.json", f"parts.{RUN}"]


def test_another_rank_tells_rank_0_why_it_gives_up(tmp_path: Path, gate: Path) -> None:
    (gate / "failures").write_text("1")
    url = f"gated://{tmp_path}/run"
    with make_slots(tmp_path / "slots", 1, 2) as slots:
        events = persist_all(options(tmp_path / "slots", url, 1, 2, retries=0), hashed(slots, 7))
    assert ends(events) == [(Failed, 7)]
    assert "the disk is on fire" in contributions.read_refusal(open_store(f"{url}/step-00000007"), RUN, 1, 7).why


def test_another_rank_hears_of_the_commit_or_that_there_is_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with make_slots(tmp_path / "slots", 1, 2, count=4) as slots:
        late = persist_all(options(tmp_path / "slots", run, 1, 2, timeout_s=0.5), hashed(slots, 7))
        assert "rank 0: did not commit within 0.5 s" in only(Failed, late).message
        said: list[Event] = []
        work = Persister(options(tmp_path / "slots", run, 1, 2), said.append)
        for step in (8, 9, 10):
            held = hashed(slots, step)
            work.submit(Order(step, held.index, persist=True), held)
        work.finish(drop=False)
        work.start()
        with make_slots(tmp_path / "slots", 0, 2) as first:
            assert ends(persist_all(options(tmp_path / "slots", run, 0, 2), hashed(first, 8))) == [(Persisted, 8)]
        while not open_store(str(run / "step-00000010")).exists(contributions.part_path(1, RUN)):
            assert work.is_alive()
            threading.Event().wait(0.01)
        contributions.put_part(open_store(str(run / "step-00000009")), RUN, Refusal(9, 0, "no space left"))
        open_store(str(run / "step-00000010")).remove()  # as the commit of a later version does
        work.join(PATIENCE_S)
    assert sorted(ends(said), key=lambda end: end[1]) == [(Persisted, 8), (Failed, 9), (Skipped, 10)]
    assert "rank 0: no space left" in only(Failed, said).message
    assert "pruned, or given up" in only(Skipped, said).why


def test_a_version_that_a_rank_has_passed_by_is_given_up_when_a_later_one_is_committed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with make_slots(tmp_path / "slots", 0, 2) as slots, make_slots(tmp_path / "slots", 1, 2) as others:
        said: list[Event] = []
        other = Persister(options(tmp_path / "slots", run, 1, 2), said.append)
        held = hashed(others, 9)
        other.submit(Order(9, held.index, persist=True), held)
        other.finish(drop=False)
        other.start()
        events = persist_all(options(tmp_path / "slots", run, 0, 2), hashed(slots, 8), hashed(slots, 9))
        other.join(PATIENCE_S)
    assert sorted(ends(events), key=lambda end: end[1]) == [(Failed, 8), (Persisted, 9)]
    assert "rank 1: handed in nothing for it, but has for step 9" in only(Failed, events).message
    assert ends(said) == [(Persisted, 9)]
    assert [path.name for path in run.iterdir()] == [native.step_name(9)]


def test_a_commit_that_was_interrupted_is_made_up_without_the_slot(tmp_path: Path, slots: SlotSet) -> None:
    chosen = options(tmp_path / "slots", tmp_path / "run")
    store = open_store(str(tmp_path / "run/step-00000007"))
    held = hashed(slots, 7)
    path = contributions.shard_path(0, RUN)
    slot_copy.copy_slot(held, store, path, lambda: None)
    contributions.put_part(store, RUN, contributions.make_part(held, path))
    said: list[Event] = []
    work = Persister(chosen, said.append)
    work.submit(Order(7, None, persist=True, nbytes=held.record.size), None)
    work.finish(drop=False)
    work.run()
    assert [type(event) for event in said] == [Persisted]
    assert only(Persisted, said).nbytes == held.record.size
    assert_persisted(tmp_path / "run", 7)


def test_a_commit_whose_keeper_died_before_it_could_tell_is_told_and_tidied(tmp_path: Path, slots: SlotSet) -> None:
    chosen = options(tmp_path / "slots", tmp_path / "run", keep=1)
    persist_all(chosen, hashed(slots, 6))
    held = hashed(slots, 7)
    persist_all(options(tmp_path / "slots", tmp_path / "run"), held)
    store = open_store(str(tmp_path / "run/step-00000007"))
    contributions.begin(store, RUN).hold.release()
    store.put(contributions.part_path(0, RUN), b"")
    said: list[Event] = []
    work = Persister(chosen, said.append)
    work.submit(Order(7, None, persist=True, nbytes=5), None)
    work.finish(drop=False)
    work.run()
    assert [type(event) for event in said] == [Persisted, Pruned]
    assert list(store.list()) == [f"shards.{RUN}/", "ucf.json"]
    assert ucformat.steps(str(tmp_path / "run")) == [7]
    assert_persisted(tmp_path / "run", 7)


def test_what_has_not_begun_is_dropped_when_told_so(tmp_path: Path, gate: Path, slots: SlotSet) -> None:
    url = f"gated://{tmp_path}/run"
    (gate / "hold").touch()
    said: list[Event] = []
    work = Persister(options(tmp_path / "slots", url), said.append)
    for step in (7, 8):
        held = hashed(slots, step)
        work.submit(Order(step, held.index, persist=True), held)
    work.start()
    while not (gate / "reached").exists():
        threading.Event().wait(0.01)
    work.finish(drop=True)
    (gate / "hold").unlink()
    work.join(PATIENCE_S)
    assert ends(said) == [(Persisted, 7)]
    assert ucformat.steps(url) == [7]


# -- other starts of the job ---------------------------------------------------------------------------------------------


def waiting(tmp_path: Path, slots: SlotSet, said: list[Event], step: int) -> Persister:
    """Rank 0 of two, which has stored its shard and looks for the other rank's part."""
    work = Persister(options(tmp_path / "slots", tmp_path / "run", 0, 2), said.append)
    held = hashed(slots, step)
    work.submit(Order(step, held.index, persist=True), held)
    work.start()
    until(lambda: any(isinstance(event, Stored) for event in said))
    return work


def of_another_start(tmp_path: Path, step: int, *ranks: int) -> None:
    """What ranks of the next start of the job hand in of the same step."""
    for rank in ranks:
        with make_slots(tmp_path / "next", rank, 2, run="run-2") as slots:
            held = hashed(slots, step)
            path, store = contributions.shard_path(rank, "run-2"), open_store(str(tmp_path / f"run/step-{step:08d}"))
            slot_copy.copy_slot(held, store, path, lambda: None)
            contributions.put_part(store, "run-2", contributions.make_part(held, path))


def test_an_abandoned_version_is_not_committed_and_others_in_its_directory_stay(tmp_path: Path) -> None:
    said: list[Event] = []
    with make_slots(tmp_path / "slots", 0, 2) as slots, make_slots(tmp_path / "slots", 1, 2) as others:
        work = waiting(tmp_path, slots, said, 10)
        of_another_start(tmp_path, 10, 1)
        work.abandon(8)
        persist_all(options(tmp_path / "slots", tmp_path / "run", 1, 2, timeout_s=0.5), hashed(others, 10))  # all is there now
        work.finish(drop=False)
        work.join(PATIENCE_S)
    assert "went on from step 8" in only(Skipped, said).why
    of_another_start(tmp_path, 10, 0)
    with make_slots(tmp_path / "next", 0, 2, run="run-2") as slots:
        events = persist_all(options(tmp_path / "next", tmp_path / "run", 0, 2, run="run-2"), hashed(slots, 10))
    assert ends(events) == [(Persisted, 10)]
    assert_persisted(tmp_path / "run", 10)
    assert contributions.made_by(open_store(str(tmp_path / "run/step-00000010")), "run-2")


def test_a_rank_that_abandons_a_version_takes_back_its_own_part_alone(tmp_path: Path) -> None:
    said: list[Event] = []
    with make_slots(tmp_path / "slots", 1, 2) as slots:
        of_another_start(tmp_path, 10, 0, 1)
        work = Persister(options(tmp_path / "slots", tmp_path / "run", 1, 2), said.append)
        work.abandon(9)
        held = hashed(slots, 10)
        work.submit(Order(10, held.index, persist=True), held)
        work.finish(drop=False)
        work.run()
    assert ends(said) == [(Skipped, 10)]
    folder = tmp_path / "run/step-00000010"
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    assert names == [
        f"{kind}.run-2/0000{rank}.{end}" for kind, end in (("parts", "json"), ("shards", "safetensors")) for rank in (0, 1)
    ]


def test_what_is_not_newer_than_the_step_gone_on_from_is_not_abandoned(tmp_path: Path, slots: SlotSet) -> None:
    said: list[Event] = []
    work = Persister(options(tmp_path / "slots", tmp_path / "run"), said.append)
    work.abandon(8)
    work.abandon(9)  # another start, that went on from what is abandoned itself
    for step in (8, 9):
        held = hashed(slots, step)
        work.submit(Order(step, held.index, persist=True), held)
    work.finish(drop=False)
    work.run()
    assert ends(said) == [(Persisted, 8), (Skipped, 9)]
    assert ucformat.steps(str(tmp_path / "run")) == [8]


def test_a_committed_version_of_another_start_is_never_replaced(tmp_path: Path) -> None:
    said: list[Event] = []
    with make_slots(tmp_path / "slots", 0, 2) as slots, make_slots(tmp_path / "slots", 1, 2) as others:
        work = waiting(tmp_path, slots, said, 10)
        of_another_start(tmp_path, 10, 0, 1)
        store = open_store(str(tmp_path / "run/step-00000010"))
        claim = contributions.begin(store, "run-2")
        contributions.commit_parts(claim, 10, [contributions.read_part(store, "run-2", rank, 10) for rank in (0, 1)])
        record = (tmp_path / "run/step-00000010/ucf.json").read_bytes()
        events = persist_all(options(tmp_path / "slots", tmp_path / "run", 1, 2), hashed(others, 10))
        path = contributions.shard_path(1, RUN)
        held = hashed(others, 10)
        slot_copy.copy_slot(held, store, path, lambda: None)
        contributions.put_part(store, RUN, contributions.make_part(held, path))  # it was too late to see the commit
        work.finish(drop=False)
        work.join(PATIENCE_S)
    assert ends(events) == [(Skipped, 10)]
    assert "another start" in only(Skipped, said).why
    assert (tmp_path / "run/step-00000010/ucf.json").read_bytes() == record
    assert_persisted(tmp_path / "run", 10)


def test_an_orphan_does_not_wait_for_ranks_that_are_gone_too(tmp_path: Path) -> None:
    said: list[Event] = []
    with make_slots(tmp_path / "slots", 0, 2) as slots:
        work = waiting(tmp_path, slots, said, 10)  # its version has two minutes
        work.finish(drop=True, within_s=0.0)
        work.join(PATIENCE_S / 2)
        assert not work.is_alive()
    assert ends(said) == [(Failed, 10)]
    assert ucformat.steps(str(tmp_path / "run")) == []


def test_an_operation_that_does_not_come_back_is_noticed(
    tmp_path: Path, gate: Path, slots: SlotSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_S", 0.1)
    (gate / "hold").touch()
    work = Persister(options(tmp_path / "slots", f"gated://{tmp_path}/run", timeout_s=0.3), lambda event: None)
    held = hashed(slots, 7)
    work.submit(Order(7, held.index, persist=True), held)
    work.finish(drop=False)
    work.start()
    while (doing := work.hanging()) is None:
        assert work.is_alive()
        threading.Event().wait(0.01)
    assert (doing.step, doing.what) == (7, "writing")
    (gate / "hold").unlink()
    work.join(PATIENCE_S)
    assert work.hanging() is None
