"""A slot is hashed and copied as one version or not at all, whatever the trainer does to it meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ucformat
from tests.checkpoints import flip
from tests.snapshot.rigs.keeping import hashed, make_slots, take
from tests.snapshot.rigs.slotfill import assert_is_step, opened
from ucformat import formats
from ucformat.containers.checksums import BLOCK_BYTES
from ucformat.errors import ChecksumError, FormatError, MissingFileError, StorageError
from ucformat.snapshot.keeper import slot_copy
from ucformat.snapshot.keeper.slot_copy import copy_slot, find_slot, hash_slot
from ucformat.snapshot.slots.slot_set import SlotSet
from ucformat.storage.open import open_store
from ucformat.storage.store import Store


@pytest.fixture
def slots() -> Iterator[SlotSet]:
    """Two slots, on tmpfs where there is one."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, make_slots(Path(folder)) as made:
        yield made


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "local" else f"memory://{tmp_path}")


def nothing() -> None:
    pass


def test_a_hashed_slot_can_be_verified_and_is_hashed_once(slots: SlotSet) -> None:
    slot = take(slots, 3)
    assert opened(slots.directory).files[0].checks is None
    held = find_slot(slots.directory, 0, slot.index, 3)
    done = hash_slot(held)
    catalog = opened(slots.directory)
    assert catalog.files[0].checks is not None
    assert not [remark for remark in catalog.notes.remarks if "not hashed" in remark]
    assert_is_step(catalog)
    assert hash_slot(done) is done
    assert hash_slot(find_slot(slots.directory, 0, slot.index, 3)).record == done.record


def test_a_byte_that_flips_after_hashing_is_detected_on_open(slots: SlotSet) -> None:
    held = hashed(slots, 3)
    flip(held.file, held.record.data_start + 100)
    with pytest.raises(ChecksumError) as caught:
        assert_is_step(opened(slots.directory))
    assert caught.value.start <= held.record.data_start + 100 < caught.value.stop


def test_a_slot_of_another_step_is_not_hashed(slots: SlotSet) -> None:
    slot = take(slots, 3)
    with pytest.raises(MissingFileError, match="holds step 3, no longer step 2"):
        find_slot(slots.directory, 0, slot.index, 2)
    with pytest.raises(MissingFileError):
        find_slot(slots.directory, 0, 1 - slot.index, 3)


def test_a_slot_taken_while_it_is_hashed_gets_no_checksums(slots: SlotSet) -> None:
    first = take(slots, 1)
    held = find_slot(slots.directory, 0, first.index, 1)
    take(slots, 2)
    assert take(slots, 3) is first
    with pytest.raises(MissingFileError, match="given to another version while step 1"):
        hash_slot(held)
    record = slots.record(first)
    assert record is not None
    assert record.table_digest is None
    assert not first.image[held.record.table_start :].any()


def test_a_damaged_header_is_not_vouched_for(slots: SlotSet) -> None:
    slot = take(slots, 3)
    flip(slot.path, 20)
    with pytest.raises(ChecksumError, match="header of the slot"):
        hash_slot(find_slot(slots.directory, 0, slot.index, 3))


def test_a_slot_that_was_cut_short_is_refused_and_not_mapped(slots: SlotSet, tmp_path: Path) -> None:
    held = hashed(slots, 3)
    copy = tmp_path / "rank-00000"
    copy.mkdir()
    (copy / "slot-0.json").write_bytes(Path(held.file).with_suffix(".json").read_bytes())
    (copy / "slot-0.safetensors").write_bytes(Path(held.file).read_bytes()[:-1])
    with pytest.raises(FormatError, match="was committed with"):
        find_slot(str(tmp_path), 0, 0, 3)


def test_a_copy_is_the_slot_byte_for_byte(slots: SlotSet, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_copy, "CHUNK_BYTES", BLOCK_BYTES)
    held = hashed(slots, 3)
    copy_slot(held, store, "shards/a", nothing)
    assert store.read("shards/a") == Path(held.file).read_bytes()
    assert held.record.table_start - held.record.data_start > BLOCK_BYTES  # several chunks


def test_damage_in_memory_is_found_before_it_is_persisted(slots: SlotSet, store: Store) -> None:
    held = hashed(slots, 3)
    for at in (held.record.data_start + 5, held.record.table_start - 1, held.record.table_start + 3, 30):
        flip(held.file, at)
        with pytest.raises(ChecksumError) as caught:
            copy_slot(held, store, "shards/a", nothing)
        assert caught.value.start <= at < caught.value.stop
        assert caught.value.file == held.file
        assert not store.exists("shards/a")
        flip(held.file, at)
    copy_slot(held, store, "shards/a", nothing)
    assert store.exists("shards/a")


@pytest.mark.parametrize("refilled", [False, True])
def test_a_slot_taken_in_mid_copy_is_not_persisted(slots: SlotSet, store: Store, refilled: bool) -> None:
    held = hashed(slots, 1)

    def take_it() -> None:
        if slots.record(slots.slot(held.index)) == held.record:
            take(slots, 2)
            assert slots.begin() is slots.slot(held.index)
            if refilled:
                take(slots, 3)

    with pytest.raises(MissingFileError, match="given to another version while step 1"):
        copy_slot(held, store, "shards/a", take_it)
    assert not store.exists("shards/a")


def test_a_copy_stops_when_its_time_is_over(slots: SlotSet, store: Store) -> None:
    def over() -> None:
        raise StorageError(store.url, "not written within 1 s")

    with pytest.raises(StorageError, match="not written within 1 s"):
        copy_slot(hashed(slots, 3), store, "shards/a", over)
    assert not store.exists("shards/a")
    assert [name for name in store.list("shards") if "part" in name] == []


def test_a_snapshot_directory_opens_like_any_checkpoint(slots: SlotSet) -> None:
    hashed(slots, 3)
    assert formats.open_named(slots.directory)[0] == "snapshot"
    assert np.isclose(float(ucformat.open(slots.directory)["model/w"][0, 0]), 3.0)
