"""Storage that is slow or hangs costs versions in storage, which are counted and logged, and no snapshots in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ucformat
from tests.snapshot.keeper.test_closing import Counting, assert_holds
from tests.snapshot.rigs.gated import GatedFileSystem
from tests.snapshot.rigs.keeping import until
from ucformat.snapshot.keeper import handoff
from ucformat.snapshot.keeper.client import Keeper
from ucformat.snapshot.keeper.handoff import Persist

EVERY = 20


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "gate"
    folder.mkdir()
    monkeypatch.setenv("GATE", str(folder))
    (folder / "hold").touch()
    return folder


def start(tmp_path: Path, slots: int) -> Counting:
    persist = Persist(f"gated://{tmp_path}/run", every=EVERY, imports=(GatedFileSystem.__module__,))
    return Counting(str(tmp_path / "slots"), slots=slots, persist=persist, hash_every=0, mode="blocking")


def keeper(training: Counting) -> Keeper:
    room = training.snap._room
    assert room is not None
    assert room.keeper is not None
    return room.keeper._keeper


def train(training: Counting, steps: int, after: Callable[[], object] = lambda: None) -> None:
    while training.state["step"] < steps:
        training.step()
        training.snap.deadline()
        if training.state["step"] == EVERY:
            after()


@pytest.mark.parametrize("slots", [2, 3])
def test_storage_that_hangs_does_not_stop_snapshots_in_memory(
    tmp_path: Path, gate: Path, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    training, url = start(tmp_path, slots), f"gated://{tmp_path}/run"
    train(training, 5 * EVERY, lambda: until((gate / "reached").exists))
    report = training.snap.report()
    assert_holds(str(tmp_path / "slots"), 5 * EVERY, 1)
    # with two slots, the version that is being written gives way after it has held up as many steps as lie half way to the next
    assert (report.taken, report.skipped, report.failed) == ((100, 0, 0) if slots == 3 else (89, 11, 0))
    assert report.persist_failed == (4 if slots == 3 else 5)
    assert any("step 40: not persisted: its slot was needed for step 42" in why for why in report.failures)
    assert caplog.text.count("is not in storage") == 1
    assert caplog.text.count("step 20 is being persisted from one of 2 slots") == int(slots == 2)

    (gate / "hold").unlink()
    until(lambda: not keeper(training)._taken, keeper(training))
    train(training, 6 * EVERY)
    training.snap.close()
    assert ucformat.steps(url) == ([20, 120] if slots == 3 else [120])
    assert_holds(url, 120, 1)
    assert_holds(str(tmp_path / "slots"), 120, 1)


def test_close_does_not_wait_for_a_version_that_gave_way(tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = start(tmp_path, 2)
    train(training, 2 * EVERY - 1, lambda: until((gate / "reached").exists))
    monkeypatch.setattr(handoff, "STOP_S", 0.1)
    training.snap.close()  # with the version that is being written, it would take half an hour
    report = training.snap.report()
    assert (report.persist_failed, report.persisted) == (1, [])
    assert ucformat.steps(f"gated://{tmp_path}/run") == []
