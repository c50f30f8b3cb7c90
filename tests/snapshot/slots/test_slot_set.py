"""Slots: a version is whole or not there, whoever dies when; memory is counted before it is taken."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import flip, split_evenly
from tests.scripts import forked
from tests.snapshot.rigs.slotfill import W, assert_is_step, fill, hold_lock, opened, overwrite_for_ever, pieces, take
from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.containers.envelope import VERSION
from ucformat.dtypes import DTYPES
from ucformat.errors import NotACheckpointError, SnapshotInUseError, SnapshotMemoryError, UcformatError
from ucformat.formats.native.shard import lay_out
from ucformat.formats.snapshot import complete_steps
from ucformat.snapshot.slots.free_memory import filesystem, room
from ucformat.snapshot.slots.slot_set import SlotSet
from ucformat.snapshot.slots.slotfile import attach_table, holds
from ucformat.storage.open import open_store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A snapshot directory."""
    return tmp_path / "job"


def _files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_slots_are_shard_images_of_the_layout(home: Path) -> None:
    owned = pieces()
    layout = lay_out(owned, VERSION)
    with SlotSet.create(home, 0, 1, owned) as slots:
        assert [slot.index for slot in slots.slots] == [0, 1]
        for slot in slots.slots:
            assert Path(slot.path).read_bytes()[: layout.data_start] == layout.header
            assert os.stat(slot.path).st_size == layout.size == len(slot.image)
            assert os.stat(slot.path).st_blocks * 512 >= layout.size
            assert slot.image.ctypes.data % 4096 == 0


def test_tensors_share_the_files_memory_at_their_place(home: Path) -> None:
    owned = [(TensorSpec(f"t{i}", kind.name, (4, 6, 3)), Box((1, 0, 0), (2, 6, 3))) for i, kind in enumerate(DTYPES.values())]
    layout = lay_out(owned, VERSION)
    with SlotSet.create(home, 0, 1, owned) as slots:
        slot = slots.slots[0]
        for i, (spec, box) in enumerate(owned):
            tensor = slot.tensor(i)
            assert tensor is slot.tensor(i)
            assert tensor.dtype == spec.kind.torch
            assert tuple(tensor.shape) == box.length
            tensor.view(torch.uint8).fill_(i + 1)
            start, nbytes = int(layout.starts()[i]), box.volume * spec.kind.itemsize
            assert Path(slot.path).read_bytes()[start : start + nbytes] == bytes([i + 1]) * nbytes


def test_a_committed_version_opens_and_is_bit_exact(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        for step in range(1, 6):
            assert take(slots, owned, step) is not None
            assert assert_is_step(opened(home)) == step


def test_the_newest_version_and_held_slots_are_never_begun(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        first = take(slots, owned, 1)
        assert first is not None
        slots.hold(first)
        second = take(slots, owned, 2)
        assert second is not None
        assert slots.begin() is None  # one is held, the other the newest
        assert slots.steps == [1, 2]
        slots.release(first)
        assert slots.begin() is first
        assert slots.steps == [2]
        assert slots.begin() is first  # gives up what was not committed


def test_a_third_slot_is_used_while_one_is_held(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned, count=3) as slots:
        first = take(slots, owned, 1)
        assert first is not None
        slots.hold(first)
        assert [take(slots, owned, step) is not None for step in (2, 3, 4)] == [True] * 3
        assert slots.steps == [1, 3, 4]


def test_a_slot_that_is_begun_has_no_version(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        take(slots, owned, 1)
        take(slots, owned, 2)
        slot = slots.begin()
        assert slot is not None
        assert not os.path.exists(slot.file.record_path)
        fill(slot, owned, 9)  # half done when the process stops
        assert assert_is_step(opened(home)) == 2


def test_only_a_begun_slot_is_committed(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        slot = take(slots, owned, 1)
        assert slot is not None
        with pytest.raises(ValueError, match="not begun"):
            slots.commit(slot, 2)


def test_the_version_that_all_ranks_have_is_kept_until_they_have_a_newer_one(home: Path) -> None:
    both = [pieces(rank, 2) for rank in (0, 1)]
    with SlotSet.create(home, 0, 2, both[0]) as fast, SlotSet.create(home, 1, 2, both[1]) as slow:
        for rank, slots in enumerate((fast, slow)):
            take(slots, both[rank], 10)
        take(fast, both[0], 11, settled=False)
        assert fast.begin() is None  # the slow rank has not committed 11
        assert assert_is_step(opened(home)) == 10
        take(slow, both[1], 11, settled=False)
        assert fast.begin() is None  # nor is that known here
        fast.settle(11, whole=True)
        assert fast.begin() is not None
        assert assert_is_step(opened(home)) == 11


def test_a_version_that_another_rank_lacks_gives_way_and_the_one_before_stays(home: Path) -> None:
    both = [pieces(rank, 2) for rank in (0, 1)]
    with SlotSet.create(home, 0, 2, both[0]) as taken, SlotSet.create(home, 1, 2, both[1]) as skipped:
        for rank, slots in enumerate((taken, skipped)):
            take(slots, both[rank], 10)
        take(taken, both[0], 11, settled=False)
        for slots in (taken, skipped):
            slots.settle(11, whole=False)
        slot = taken.begin()
        assert slot is not None
        assert taken.steps == skipped.steps == [10]
        assert assert_is_step(opened(home)) == 10


def test_versions_of_a_start_that_nobody_went_on_from_do_not_pass_for_newer(home: Path) -> None:
    """The job was started from scratch in the same directory."""
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned, count=3, run="old") as slots:
        for step in (99, 100):
            take(slots, owned, step)
    with SlotSet.create(home, 0, 1, owned, count=3, run="new") as slots:
        take(slots, owned, 1)
        assert slots.begin() is not None
        assert slots.versions == [(1, "new")]
        assert assert_is_step(opened(home)) == 1


# -- crashes -----------------------------------------------------------------------------------------------------------


def test_a_killed_process_leaves_a_whole_version_whenever_it_dies(home: Path) -> None:
    context, chance = forked(), random.Random(3)
    known = 0
    for _ in range(10):
        here, there = context.Pipe(duplex=False)
        worker = context.Process(target=overwrite_for_ever, args=(str(home), there), daemon=True)
        worker.start()
        there.close()
        adopted = here.recv()
        assert adopted == (known or None)
        assert here.recv() == known + 1
        time.sleep(chance.uniform(0, 0.03))
        worker.kill()
        worker.join()
        told = known + 1
        try:
            while True:
                told = here.recv()
        except EOFError:
            pass
        known = assert_is_step(opened(home))
        assert known >= told
        assert not [remark for remark in opened(home).notes.remarks if "hashed" not in remark]


def test_a_process_killed_while_it_makes_or_adopts_slots_loses_nothing(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        take(slots, owned, 5)
    context, chance = forked(), random.Random(4)
    for _ in range(6):
        here, there = context.Pipe(duplex=False)
        worker = context.Process(target=hold_lock, args=(str(home), there), daemon=True)
        worker.start()
        time.sleep(chance.uniform(0, 0.04))
        worker.kill()
        worker.join()
        here.close()
        there.close()
        assert assert_is_step(opened(home)) == 5
    with SlotSet.create(home, 0, 1, owned) as slots:
        assert slots.steps == [5]
        assert _files(home) == [
            "lock",
            "rank-00000/lock",
            *(f"rank-00000/slot-{i}.{kind}" for i in (0, 1) for kind in ("json", "safetensors") if kind != "json" or i == 0),
        ]


def test_a_restart_adopts_the_files_and_keeps_the_newest_version(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        for step in (1, 2, 3):
            take(slots, owned, step)
        inodes = {slot.index: os.stat(slot.path).st_ino for slot in slots.slots}
    with SlotSet.create(home, 0, 1, owned) as slots:
        assert {slot.index: os.stat(slot.path).st_ino for slot in slots.slots} == inodes
        assert slots.steps == [2, 3]
        assert slots.newest is not None
        assert slots.newest.step == 3
        assert bool((slots.newest.tensor(0) == 3).all())
        take(slots, owned, 4)
        assert slots.steps == [3, 4]


def test_a_restart_with_another_layout_keeps_the_old_version_until_a_new_one_is_there(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        for step in (1, 2):
            take(slots, owned, step)
    changed = [(W, box) for box in split_evenly(W.shape, 1, 3)] + owned[1:]
    for _ in range(2):  # a start that dies before its first version changes nothing
        with SlotSet.create(home, 0, 1, changed) as slots:
            assert slots.steps == []
            assert assert_is_step(opened(home)) == 2
            assert len(list(home.rglob("*.safetensors"))) == 3
    with SlotSet.create(home, 0, 1, changed) as slots:
        slot = slots.begin()
        assert slot is not None
        fill(slot, changed, 3)
        assert assert_is_step(opened(home)) == 2
        slots.commit(slot, 3, b'{"step":3}')
        assert assert_is_step(opened(home), [W.name, "n"]) == 3
        slots.begin()
        assert len(list(home.rglob("*.safetensors"))) == 2
    with SlotSet.create(home, 0, 1, changed) as slots:
        assert slots.steps == [3]


def test_a_smaller_world_replaces_a_larger_one_only_once_it_has_a_version(home: Path) -> None:
    both = [pieces(rank, 2) for rank in (0, 1)]
    for rank in (0, 1):
        with SlotSet.create(home, rank, 2, both[rank]) as slots:
            take(slots, both[rank], 7)
    with SlotSet.create(home, 0, 1, pieces()) as slots:
        assert assert_is_step(opened(home)) == 7
        take(slots, pieces(), 8)
        assert assert_is_step(opened(home)) == 8
        assert (home / "rank-00001").exists()
        slots.begin()
        assert not (home / "rank-00001").exists()
        assert assert_is_step(opened(home)) == 8


def test_of_another_layout_the_version_that_can_be_opened_survives(home: Path) -> None:
    """Rank 0 was one step ahead when the job died: its own newest version is of no use."""
    both = [pieces(rank, 2) for rank in (0, 1)]
    for rank, steps in ((0, (10, 11)), (1, (9, 10))):
        with SlotSet.create(home, rank, 2, both[rank]) as slots:
            for step in steps:
                take(slots, both[rank], step)
    with SlotSet.create(home, 0, 1, pieces()) as slots:
        assert slots.steps == []
        assert assert_is_step(opened(home)) == 10


def test_after_a_restart_a_version_that_only_one_rank_has_gives_way_first(home: Path) -> None:
    both = [pieces(rank, 2) for rank in (0, 1)]
    for rank, steps in ((0, (10, 11)), (1, (9, 10))):
        with SlotSet.create(home, rank, 2, both[rank]) as slots:
            for step in steps:
                take(slots, both[rank], step)
    with SlotSet.create(home, 0, 2, both[0]) as fast, SlotSet.create(home, 1, 2, both[1]) as slow:
        assert fast.begin() is not None
        assert slow.begin() is not None
        assert fast.steps == slow.steps == [10]
        assert assert_is_step(opened(home)) == 10


def test_after_a_restart_the_version_that_ranks_of_other_hosts_hold_too_is_kept(tmp_path: Path) -> None:
    homes, both = [tmp_path / "host0", tmp_path / "host1"], [pieces(rank, 2) for rank in (0, 1)]
    for rank, steps in ((0, (10, 11)), (1, (9, 10))):
        with SlotSet.create(homes[rank], rank, 2, both[rank], run="old") as slots:
            for step in steps:
                take(slots, both[rank], step)
    with SlotSet.create(homes[0], 0, 2, both[0]) as first, SlotSet.create(homes[1], 1, 2, both[1]) as second:
        adopted = [first.adopted, second.adopted]
        for slots in (first, second):
            slots.agree(adopted)
            assert slots.begin() is not None
            assert slots.versions == [(10, "old")]


def test_a_rank_that_looks_as_before_in_a_larger_job_keeps_what_the_smaller_one_left(home: Path) -> None:
    both = [pieces(rank, 2) for rank in (0, 1)]
    for rank in (0, 1):
        with SlotSet.create(home, rank, 2, both[rank], run="old") as slots:
            for step in (4, 5):
                take(slots, both[rank], step)
    with SlotSet.create(home, 0, 3, both[0], run="new") as slots:
        assert slots.adopted == []  # the others have none in common with it
        slots.agree([slots.adopted, [], []])
        take(slots, both[0], 6, settled=False)
        assert slots.begin() is None  # nobody knows of step 6 yet, and step 5 is all that there is
        assert slots.versions == [(5, "old"), (6, "new")]
        assert assert_is_step(opened(home)) == 5


def test_a_record_that_does_not_fit_its_file_is_ignored_with_a_remark(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        for step in (1, 2):
            take(slots, owned, step)
        newest = slots.newest
        assert newest is not None
    os.truncate(newest.path, os.path.getsize(newest.path) - 4096)
    catalog = opened(home)
    assert assert_is_step(catalog) == 1
    assert any("was committed with" in remark for remark in catalog.notes.remarks)
    with SlotSet.create(home, 0, 1, owned) as slots:
        assert slots.steps == [1]
        assert any("was committed with" in remark for remark in slots.remarks)
        assert len(slots.slots) == 2
        take(slots, owned, 3)
        assert slots.steps == [1, 3]


def test_a_damaged_record_is_ignored_and_its_slot_used_again(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        for step in (1, 2):
            take(slots, owned, step)
        newest = slots.newest
        assert newest is not None
    record = Path(newest.file.record_path)
    flip(record, len(record.read_bytes()) // 2)
    with SlotSet.create(home, 0, 1, owned) as slots:
        assert slots.steps == [1]
        assert slots.remarks
        assert not record.exists()


def test_fewer_slots_than_before_leave_the_newest_versions(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned, count=3) as slots:
        for step in (1, 2, 3):
            take(slots, owned, step)
    with SlotSet.create(home, 0, 1, owned, count=2) as slots:
        assert slots.steps == [2, 3]
        assert len(list(home.rglob("*.safetensors"))) == 2
    with SlotSet.create(home, 0, 1, owned, count=3) as slots:
        assert slots.steps == [2, 3]
        assert len(slots.slots) == 3


# -- one job at a time -------------------------------------------------------------------------------------------------


def test_a_directory_in_use_is_refused_until_its_process_dies(home: Path) -> None:
    context = forked()
    here, there = context.Pipe()
    worker = context.Process(target=hold_lock, args=(str(home), there), daemon=True)
    worker.start()
    assert here.recv() == str(home)
    with pytest.raises(SnapshotInUseError, match=f"process {worker.pid}"):
        SlotSet.create(home, 0, 1, pieces())
    worker.kill()
    worker.join()
    with SlotSet.create(home, 0, 1, pieces()) as slots:
        assert len(slots.slots) == 2
        with pytest.raises(SnapshotInUseError, match=f"process {os.getpid()}"):
            SlotSet.create(home, 0, 1, pieces())


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(home: Path) -> None:
    """A data loader's worker may live on for seconds after its trainer was killed."""
    script = (
        "import os, sys, time\n"
        "from tests.snapshot.rigs.slotfill import pieces\n"
        "from ucformat.snapshot.slots.slot_set import SlotSet\n"
        f"slots = SlotSet.create({str(home)!r}, 0, 1, pieces())\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(60)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    trainer.wait()
    try:
        os.kill(child, 0)  # it lives
        SlotSet.create(home, 0, 1, pieces()).close()
    finally:
        os.kill(child, 9)
        trainer.stdout.close()


def test_close_leaves_versions_and_remove_leaves_nothing(home: Path) -> None:
    owned = pieces()
    slots = SlotSet.create(home, 0, 1, owned)
    slot = take(slots, owned, 1)
    assert slot is not None
    view = slot.tensor(0)
    slots.close()
    slots.close()
    assert bool((view == 1).all())
    assert assert_is_step(opened(home)) == 1
    SlotSet.create(home, 0, 1, owned).close(remove=True)
    assert not home.exists()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_too_little_room_is_told_in_bytes_before_anything_is_taken(home: Path) -> None:
    huge = [(TensorSpec("w", "F32", (1 << 40,)), Box.whole((1 << 40,)))]
    with pytest.raises(SnapshotMemoryError) as caught:
        SlotSet.create(home, 0, 1, huge)
    error = caught.value
    assert error.needed == SlotSet.bytes_needed(huge)
    assert error.needed >= 2 << 42
    assert 0 < error.free < error.needed
    assert f"{error.needed:,}" in str(error)
    assert f"{error.free:,}" in str(error)
    assert _files(home) == ["lock", "rank-00000/lock"]


def test_what_other_ranks_are_about_to_take_counts(home: Path) -> None:
    (home / "rank-00001").mkdir(parents=True)
    before = room(str(home)).free
    with open(home / "rank-00001/slot-0.safetensors.part", "wb") as part:
        part.truncate(1 << 40)
    assert room(str(home)).free < before - (1 << 39)


_IN_SMALL_TMPFS = """
import os, sys
from tests.snapshot.rigs.slotfill import pieces, take, opened, assert_is_step
from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.errors import SnapshotMemoryError
from ucformat.snapshot.slots.slot_set import SlotSet
home = sys.argv[1]
def state(mib):
    spec = TensorSpec("w", "U8", (mib << 20,))
    return [(spec, Box.whole(spec.shape))]
try:
    SlotSet.create(home, 0, 1, state(31))
except SnapshotMemoryError as error:
    assert "tmpfs" in error.limit, error
    assert error.free <= 64 << 20 and error.needed > 64 << 20
else:
    raise AssertionError("64 MiB hold no 66")
status = os.statvfs(home)
assert (status.f_blocks - status.f_bfree) * status.f_frsize < 1 << 20
slots = SlotSet.create(home, 0, 1, state(20))
assert not slots.remarks, slots.remarks
for step in range(1, 4):
    slot = slots.begin()
    slot.tensor(0).fill_(step)
    slots.commit(slot, step)
slots.close()
try:  # the old versions take the room that a new layout needs
    SlotSet.create(home, 0, 1, state(25))
except SnapshotMemoryError as error:
    assert "another layout" in str(error), error
else:
    raise AssertionError("no room for a third")
assert opened(home).notes.step == 3
SlotSet.create(home, 0, 1, state(20)).close()
print("fine")
"""


def test_a_small_tmpfs_is_used_to_its_limit_and_not_beyond(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=64m none "{tmp_path}" && exec "{sys.executable}" -c "$0" "{tmp_path}/job"'
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no mounts of its own for this user")
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount, _IN_SMALL_TMPFS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_the_file_system_is_known_and_remarked_on(home: Path) -> None:
    assert filesystem("/proc") == "proc"
    with SlotSet.create(home, 0, 1, pieces()) as slots:
        assert bool(slots.remarks) != room(str(home)).is_memory


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_and_files_stay_flat_over_many_versions(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        for step in range(1, 21):
            take(slots, owned, step)
        resident, files = _resident(), _files(home)
        blocks = sum(os.stat(slot.path).st_blocks for slot in slots.slots)
        descriptors = len(os.listdir("/proc/self/fd"))
        for step in range(21, 221):
            take(slots, owned, step)
        assert _resident() - resident < 2 << 20
        assert sum(os.stat(slot.path).st_blocks for slot in slots.slots) == blocks
        assert _files(home) == files
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert assert_is_step(opened(home)) == 220


# -- checksums ---------------------------------------------------------------------------------------------------------


def test_a_table_is_only_attached_to_the_version_whose_bytes_were_hashed(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        slot = take(slots, owned, 1)
        assert slot is not None
        record = slots.record(slot)
        assert record is not None
        assert holds(str(home), record, slot.index)
        table = np.ones(record.size - record.table_start, dtype=np.uint8)
        take(slots, owned, 2)
        again = slots.begin()
        assert again is slot
        before = Path(slot.path).read_bytes()
        assert not holds(str(home), record, slot.index)
        assert attach_table(str(home), slot.index, record, table) is None  # begun
        slots.commit(slot, 1)
        assert attach_table(str(home), slot.index, record, table) is None  # the same step, taken again
        assert Path(slot.path).read_bytes() == before
        fresh = slots.record(slot)
        assert fresh is not None
        done = attach_table(str(home), slot.index, fresh, table)
        assert done is not None
        assert slots.record(slot) == done
        assert done.table_digest is not None
        slots.begin()
        take(slots, owned, 3)
        slots.begin()
        assert not slot.image[record.table_start :].any()


def test_a_slot_under_a_keepers_lock_is_passed_over(home: Path) -> None:
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        slot = take(slots, owned, 1)
        assert slot is not None
        take(slots, owned, 2)
        with open(slot.path, "rb") as keeper:
            fcntl.flock(keeper, fcntl.LOCK_EX)
            assert slots.begin() is None
            assert slots.steps == [1, 2]
        assert slots.begin() is slot


def test_versions_of_two_starts_are_never_read_as_one(home: Path) -> None:
    both = [pieces(rank, 2) for rank in (0, 1)]
    for rank, run in ((0, "a"), (1, "b")):
        with SlotSet.create(home, rank, 2, both[rank], run=run) as slots:
            take(slots, both[rank], 3)
    with pytest.raises(NotACheckpointError, match="incomplete"):
        opened(home)
    assert complete_steps(open_store(str(home))) == []


def test_senseless_requests_are_refused(home: Path) -> None:
    for count, rank, world in ((1, 0, 1), (2, 1, 1), (2, -1, 1)):
        with pytest.raises(ValueError):
            SlotSet.create(home, rank, world, pieces(), count)
    with pytest.raises(UcformatError):
        SlotSet.create("/proc/self/nowhere", 0, 1, pieces())


@pytest.mark.gpu
def test_pinned_slots_take_device_copies(home: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    owned = pieces()
    with SlotSet.create(home, 0, 1, owned) as slots:
        assert slots.pin()
        assert slots.pin()
        slot = slots.begin()
        assert slot is not None
        assert slot.tensor(0).is_pinned()
        live = torch.randn(W.shape, device="cuda")
        slot.tensor(0).copy_(live, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(slot.tensor(0), live.cpu())


def test_without_cuda_nothing_is_pinned(home: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with SlotSet.create(home, 0, 1, pieces()) as slots:
        assert not slots.pin()
