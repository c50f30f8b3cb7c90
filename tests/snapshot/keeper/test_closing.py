"""The end of a run: the last version is kept, hashed and persisted, though nobody was ready for it when the loop ended."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ucformat
from tests.reshard.ranks import on_ranks
from tests.snapshot.rigs.gated import GatedFileSystem
from tests.snapshot.rigs.keeping import until
from ucformat.formats.snapshot import survey
from ucformat.snapshot.cadence import EARLY
from ucformat.snapshot.keeper.handoff import Persist
from ucformat.snapshot.snapshotter import Snapshotter
from ucformat.storage.open import open_store


class Counting:
    """A weight that counts the steps."""

    def __init__(self, directory: str, **options: Any) -> None:
        self.weight = nn.Parameter(torch.zeros(512, 256))
        self.name = f"w{dist.get_rank()}" if dist.is_initialized() else "w0"
        optimizer = self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.state: dict[str, Any] = {"model": {self.name: self.weight}, "optimizer": optimizer, "step": 0}
        self.snap = Snapshotter(self.state, directory=directory, on_error="raise", **options)

    def step(self) -> None:
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer.step()
        self.state["step"] += 1
        self.snap.take(self.state["step"])


def assert_holds(where: str, step: int, ranks: int) -> None:
    found = ucformat.open(where)
    assert found.step == step
    for rank in range(ranks):
        assert bool((found[f"model/w{rank}"][...] == -step).all())


def close_early(directory: str, url: str) -> list[int]:
    """Rank 0 closes while the other has not even kept the version before."""
    training = Counting(directory, mode="blocking", persist=Persist(url, every=3))
    for _ in range(EARLY):  # takes in which ranks wait for each other
        training.step()
        training.snap.deadline()
        dist.barrier()
    time.sleep(0.2)  # that both hold the last step is known by now on both, as a rule: then the next one finds a slot
    flag = Path(directory) / "closing"
    training.step()  # a blocking copy is made at the next deadline
    if dist.get_rank() == 0:
        training.step()
        flag.touch()
    else:
        until(flag.exists)
        time.sleep(0.3)
        training.step()
    training.snap.close()
    report = training.snap.report()
    assert report.failures == type(report.failures)()
    return [line.step for line in report.done()]


def test_the_last_version_waits_for_ranks_that_are_late(tmp_path: Path) -> None:
    slots, run = tmp_path / "slots", tmp_path / "run"
    assert [steps[-1] for steps in on_ranks(2, close_early, str(slots), str(run))] == [6, 6]
    assert_holds(str(slots), 6, 2)
    assert ucformat.steps(str(run)) == [3, 6]
    assert_holds(str(run), 6, 2)
    hashed = [held.record.table_digest is not None for held in survey(open_store(str(slots)))[0][0].held]
    assert hashed == [True, True]


@pytest.mark.parametrize("slots", [2, 3])
def test_the_last_version_waits_for_a_keeper_that_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """With two slots both are being persisted when the loop ends; with three, there is a slot, but a queue as well."""
    gate = tmp_path / "gate"
    gate.mkdir()
    monkeypatch.setenv("GATE", str(gate))
    (gate / "hold").touch()
    persist = Persist(f"gated://{tmp_path}/run", every=1, imports=(GatedFileSystem.__module__,))
    training = Counting(str(tmp_path / "slots"), slots=slots, persist=persist)
    for _ in range(3):
        training.step()
    until((gate / "reached").exists)
    opener = threading.Timer(0.5, (gate / "hold").unlink)
    opener.start()
    training.snap.close()
    opener.join()
    assert_holds(str(tmp_path / "slots"), 3, 1)
    assert ucformat.steps(str(tmp_path / "run")) == [1, 2, 3]
    assert_holds(str(tmp_path / "run"), 3, 1)
    report = training.snap.report()
    assert (report.taken, report.skipped, report.persist_failed) == (3, 0, 0)


def test_a_close_without_anything_in_hand_is_a_close(tmp_path: Path) -> None:
    training = Counting(str(tmp_path / "slots"))
    training.snap.close()
    training = Counting(str(tmp_path / "slots"))
    training.step()
    training.snap.close()
    training.snap.close()
    assert_holds(str(tmp_path / "slots"), 1, 1)
