"""Restoring says what it did and why, and never takes what is there for nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoints import flip
from tests.reshard.ranks import on_ranks
from ucformat.errors import ChecksumError, NamesMismatchError, NotACheckpointError, ShapeMismatchError, StorageError
from ucformat.formats.native import step_name
from ucformat.formats.snapshot import HeldShard, survey
from ucformat.snapshot.keeper.handoff import Persist
from ucformat.snapshot.restore import Restored
from ucformat.snapshot.snapshotter import Snapshotter
from ucformat.storage.open import open_store


def training(width: int = 8, **more: Any) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(64, width))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    return {"model": {"w": weight}, "optimizer": optimizer, "step": 0, **more}, optimizer


def train(place: Path, steps: int, **options: Any) -> None:
    state, optimizer = training()
    snap = Snapshotter(state, directory=str(place / "slots"), **options)
    for step in range(1, steps + 1):
        state["model"]["w"].grad = torch.ones(64, 8)
        optimizer.step()
        state["step"] = step
        snap.take(step)
    snap.close()
    assert snap.report().failed == 0


def restored(place: Path, state: dict[str, Any], **options: Any) -> Restored | None:
    return Snapshotter(state, directory=str(place / "slots"), **options).restore()


def slots(place: Path) -> list[HeldShard]:
    return [version.held[0] for version in survey(open_store(str(place / "slots")))[0]]


def damage(place: Path, held: HeldShard) -> None:
    flip(place / "slots" / held.path, held.record.data_start + 5)


def test_nothing_is_restored_only_where_nothing_is_there(tmp_path: Path) -> None:
    assert restored(tmp_path, training()[0], persist=Persist(str(tmp_path / "run"))) is None


def test_a_state_that_does_not_fit_raises_and_keeps_the_slots(tmp_path: Path) -> None:
    train(tmp_path, 2)
    with pytest.raises(NamesMismatchError, match="more"):
        restored(tmp_path, training(more=torch.zeros(3))[0])
    with pytest.raises(ShapeMismatchError, match="stored with shape"):
        restored(tmp_path, training(width=4)[0])
    with pytest.raises(NamesMismatchError):
        restored(tmp_path, {"model": nn.Linear(3, 3)})
    found = restored(tmp_path, training()[0])
    assert found is not None
    assert (found.step, found.source, found.verified, found.passed_over) == (2, "memory", True, ())


def test_damage_in_all_slots_raises_when_nothing_else_is_there(tmp_path: Path) -> None:
    train(tmp_path, 4)
    hashed = [held for held in slots(tmp_path) if held.record.table_digest is not None]
    for held in slots(tmp_path):
        if held in hashed:
            damage(tmp_path, held)
        else:
            (tmp_path / "slots" / held.folder / f"slot-{held.index}.json").write_bytes(b"{}")
    with pytest.raises(ChecksumError, match="model/w"):
        restored(tmp_path, training()[0])


def test_records_that_are_all_damaged_raise(tmp_path: Path) -> None:
    train(tmp_path, 2)
    for held in slots(tmp_path):
        (tmp_path / "slots" / held.folder / f"slot-{held.index}.json").write_bytes(b"{}")
    with pytest.raises(NotACheckpointError, match=r"malformed commit record.*to start anew, remove"):
        restored(tmp_path, training()[0])


def test_versions_of_which_a_part_is_elsewhere_raise(tmp_path: Path) -> None:
    on_ranks(2, apart, str(tmp_path))
    (tmp_path / "slots/rank-00001").rename(tmp_path / "lost")
    with pytest.raises(NotACheckpointError, match=r"ranks 1 have no directory here.*remove this directory"):
        restored(tmp_path, training()[0])


def apart(place: str) -> None:
    snap = Snapshotter({"model": {f"w{dist.get_rank()}": torch.zeros(4)}}, directory=f"{place}/slots", hash_every=0)
    snap.take(1)
    snap.close()


def test_damage_falls_back_to_verified_versions_first_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Newest in memory damaged, the one before it without checksums: an older one, in storage or memory, is verified."""
    persist = Persist(str(tmp_path / "run"), every=2)
    train(tmp_path, 4, persist=persist, hash_every=4, slots=3)
    by_step = {held.record.step: held for held in slots(tmp_path)}
    assert (by_step[4].record.table_digest is None, by_step[3].record.table_digest is None) == (False, True)
    damage(tmp_path, by_step[4])
    (tmp_path / "run" / step_name(4) / "ucf.json").unlink()  # storage has an older one only
    state = training()[0]
    with caplog.at_level(logging.WARNING, "ucformat"):
        found = restored(tmp_path, state, persist=persist)
    assert found is not None
    assert (found.step, found.verified) == (2, True)
    assert "step 4 in memory can't be used" in found.passed_over[0]
    assert "step 4 in memory can't be used" in caplog.text
    assert state["step"] == 2


def test_a_version_without_checksums_is_said_to_be_unverified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2, hash_every=0)
    found = restored(tmp_path, training()[0])
    assert found is not None
    assert (found.step, found.verified) == (2, False)
    assert "unverified" in found.why


def broken_storage(place: str) -> str:
    """Only rank 0 looks into the storage, and it is broken."""
    snap = Snapshotter(training()[0], directory=f"{place}/slots", persist=Persist(f"{place}/file/run\0"))
    try:
        snap.restore()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def misfit(place: str) -> str:
    state = training()[0]
    if dist.get_rank():
        state["more"] = torch.zeros(3)
    try:
        Snapshotter(state, directory=f"{place}/slots").restore()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_what_fails_on_one_rank_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    assert len(set(on_ranks(2, broken_storage, str(tmp_path)))) == 1
    assert on_ranks(2, broken_storage, str(tmp_path))[0] != "nothing"
    train(tmp_path, 2)
    assert on_ranks(2, misfit, str(tmp_path)) == ["NamesMismatchError"] * 2


def test_a_directory_that_can_not_be_looked_at_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> list[str]:
        raise StorageError(str(tmp_path), "input/output error")

    train(tmp_path, 2)
    monkeypatch.setattr("ucformat.storage.local.LocalStore.list", refuses)
    with pytest.raises(StorageError, match="input/output"):
        restored(tmp_path, training()[0])
