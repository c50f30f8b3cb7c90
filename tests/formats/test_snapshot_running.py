"""Slots of a job that runs on: what is read of them is of one version, or an error."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import ucformat
from tests.scripts import forked
from tests.snapshot.rigs.slotfill import W, assert_is_step, hash_slot, opened, overwrite_for_ever, pieces, take
from ucformat.errors import NotACheckpointError, SnapshotChangedError
from ucformat.reshard.reading.lazy import read
from ucformat.reshard.verify import verify
from ucformat.snapshot.slots.slot_set import SlotSet
from ucformat.storage.local import LocalStore

LOADS = 40


def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(tmp_path: Path) -> None:
    """By a longer or a shorter one, as a keeper does with a record."""
    contents = [b"a" * 100, b"b" * 5000]
    stop = threading.Event()
    (tmp_path / "record").write_bytes(contents[0])

    def replace() -> None:
        at = 0
        while not stop.is_set():
            (tmp_path / "part").write_bytes(contents[at := 1 - at])
            os.replace(tmp_path / "part", tmp_path / "record")

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        assert all(LocalStore(str(tmp_path)).read("record") in contents for _ in range(2000))
    finally:
        stop.set()
        thread.join()


def test_loads_of_a_running_jobs_slots_never_mix_versions(tmp_path: Path) -> None:
    context = forked()
    here, there = context.Pipe(duplex=False)
    job = context.Process(target=overwrite_for_ever, args=(str(tmp_path), there), daemon=True)
    job.start()
    try:
        for _ in range(2):
            here.recv()
        seen, refused = set(), 0
        for _ in range(LOADS):
            while here.poll():
                here.recv()
            try:
                catalog = opened(tmp_path)
                rows = ucformat.open(str(tmp_path))[W.name][10:30]
                assert len(rows.unique()) == 1
                seen.add(assert_is_step(catalog))
                whole = ucformat.load(str(tmp_path))
                weight = whole["model"]["w"]  # type: ignore[index]
                assert bool((weight == whole["step"] % 16).all())  # type: ignore[operator]
            except SnapshotChangedError:
                refused += 1
        assert len(seen) + refused > 1
    finally:
        job.kill()
        job.join()


@pytest.mark.parametrize("hashed", [False, True])
def test_what_was_given_to_another_version_while_it_was_read_is_an_error(tmp_path: Path, hashed: bool) -> None:
    with SlotSet.create(tmp_path, 0, 1, pieces()) as slots:
        slot = take(slots, pieces(), 1)
        assert slot is not None
        if hashed:
            hash_slot(slots, slot)
        catalog = opened(tmp_path)
        take(slots, pieces(), 2)
        assert bool((read(catalog, W.name) == 1).all())  # the other slot was filled
        if not hashed:
            hash_slot(slots, slot)
            assert bool((read(catalog, W.name) == 1).all())  # a record that gained checksums is that of the same version
        take(slots, pieces(), 3)
        with pytest.raises(SnapshotChangedError, match="while step 1 was read"):
            read(catalog, W.name)
        if hashed:  # else there is nothing to compare with
            with pytest.raises(SnapshotChangedError):
                verify(catalog)


def test_a_step_of_the_slots_opens_and_an_absent_one_names_those_there_are(tmp_path: Path) -> None:
    with SlotSet.create(tmp_path, 0, 1, pieces()) as slots:
        for step in (1, 2):
            take(slots, pieces(), step)
        for step in (1, 2):
            assert bool((ucformat.open(tmp_path, step=step)[W.name][0:2] == step).all())
            assert ucformat.load(tmp_path, step=step)["step"] == step
        with pytest.raises(NotACheckpointError, match=r"(?s)3.*[12]"):
            ucformat.open(tmp_path, step=3)


def test_a_load_that_a_running_job_disturbed_is_done_again(tmp_path: Path) -> None:
    with SlotSet.create(tmp_path, 0, 1, pieces()) as slots:
        for step in (1, 2):
            take(slots, pieces(), step)
        steps = iter((3, 4))

        def disturb(_: int) -> None:
            for step in steps:  # once, while step 2 is read
                take(slots, pieces(), step)

        assert ucformat.load(tmp_path, on_bytes=disturb)["step"] == 4
