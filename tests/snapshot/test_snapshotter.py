"""The engine in real training loops: what it keeps is the state after the step, whatever runs meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ucformat
from benchmarks.snapshot_loop import Loop, Setting
from tests.reshard.ranks import on_ranks, same
from ucformat.containers.file_image import ByteRequest
from ucformat.errors import NotACheckpointError, SnapshotInUseError, SnapshotMemoryError, ValueConflictError
from ucformat.reshard.reading.fill import TensorFill
from ucformat.snapshot.copying.version import Taking
from ucformat.snapshot.copyplan.plan import Mode
from ucformat.snapshot.keeper.handoff import Persist
from ucformat.snapshot.room import Room
from ucformat.snapshot.slots import slot_set
from ucformat.snapshot.slots.free_memory import room
from ucformat.snapshot.snapshotter import Snapshotter

STEPS = 8  # the first plan is made in the fourth


class Training:
    """A loop of one's own in one process: batch norm and dropout change what they keep within the step."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Linear(256, 8))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.rng = torch.get_rng_state()
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "rng": self.rng, "step": 0}
        self.directory = str(directory / "slots")
        self.snap = Snapshotter(self.state, directory=self.directory, **{"hash_every": 0, **options})
        self.done = 0

    def update(self) -> None:
        """Forward, backward and update: the counter and the random state change while the last version is copied."""
        self.state["step"] = -1
        with self.snap.compute("forward"):
            self.rng.fill_(0)
            loss = self.model(torch.randn(16, 64)).square().mean()
        with self.snap.compute("backward"):
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        self.done += 1

    def take(self) -> None:
        self.rng.copy_(torch.get_rng_state())
        self.state["step"] = self.done
        self.snap.take(self.done)

    def truth(self) -> dict[str, torch.Tensor]:
        """A copy of all tensors by canonical name, gathered without ucformat."""
        found = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            found.update((f"optimizer/{name}/{key}", value) for key, value in self.optimizer.state[parameter].items())
        return {name: tensor.detach().clone() for name, tensor in {**found, "rng": self.rng}.items()}

    def kept(self) -> tuple[int | None, dict[str, torch.Tensor]]:
        """The newest version in memory."""
        found = ucformat.open(self.directory)
        return found.step, {name: found[name][...] for name in found}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Small enough for a disk: where slots lie does not matter here."""
    return tmp_path


def assert_kept(training: Training, step: int, truth: dict[str, torch.Tensor]) -> None:
    found, tensors = training.kept()
    assert found == step
    assert sorted(tensors) == sorted(truth)
    assert [name for name in truth if not same(tensors[name], truth[name])] == []
    assert ucformat.load(training.directory)["step"] == step


@pytest.mark.parametrize("mode", ["auto", "bubble", "overlap", "blocking"])
def test_a_snapshot_is_the_state_after_its_step_while_training_goes_on(place: Path, mode: Mode) -> None:
    training = Training(place, mode=mode, on_error="raise")
    for step in range(1, STEPS + 1):
        training.update()
        training.take()
        truth = training.truth()
        training.update()  # its optimizer step is the deadline of the copies
        assert_kept(training, 2 * step - 1, truth)
        training.take()
    report = training.snap.report()
    training.snap.close()
    assert (report.taken, report.skipped, report.failed) == (2 * STEPS, 0, 0)
    assert report.plan


def test_storages_that_the_optimizer_or_the_loop_replaces_are_followed(place: Path) -> None:
    training = Training(place, on_error="raise")
    for step in range(1, STEPS + 1):
        training.update()
        for parameter in training.model.parameters():
            parameter.data = parameter.data.clone() + 1
            training.optimizer.state[parameter]["exp_avg"] = torch.rand_like(parameter)
        training.take()
        truth = training.truth()
        training.snap.deadline()
        assert_kept(training, step, truth)
    training.snap.close()


def change_layout(training: Training, how: str) -> None:
    if how == "another shape":
        training.state["rng"] = torch.zeros(3)
    elif how == "a new tensor":
        training.state["extra"] = torch.zeros(3)
    else:
        del training.state["rng"]


def test_an_optimizer_that_the_state_does_not_hold_is_waited_for(place: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snap = Snapshotter({"model": model}, directory=str(place / "slots"), mode="blocking", hash_every=0, on_error="raise")
    for step in range(1, STEPS):
        model(torch.rand(4, 64)).sum().backward()
        snap.take(step)
        truth = model.weight.detach().clone()
        optimizer.step()
        found = ucformat.open(str(place / "slots"))
        assert found.step == step
        assert same(found["model/weight"][...], truth)
        assert not same(model.weight.detach(), truth)
    snap.close()


def test_a_state_that_changes_unseen_while_it_is_copied_is_never_kept(place: Path) -> None:
    training = Training(place, mode="blocking")
    for _ in range(STEPS):
        training.update()
        training.take()
    training.snap.deadline()
    truth = training.truth()
    training.done += 1
    training.take()
    with torch.no_grad():
        next(training.model.parameters()).add_(1.0)
    training.snap.deadline()
    report = training.snap.report()
    assert "model/0.weight changed while it was copied" in report.failures[-1]
    assert training.kept()[0] == STEPS
    assert_kept(training, STEPS, truth)
    training.done += 1
    training.take()
    training.snap.deadline()
    assert training.kept()[0] == STEPS + 2
    training.snap.close()


class Late:
    """Writes of which the counters rise only after the version was stored: as of a kernel that runs on another thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        stored, self.written = Room.store, threading.Event()

        def store(room: Room, taking: Taking) -> None:
            stored(room, taking)
            if taking.report.step == at:
                with torch.no_grad():
                    taking.boundary.views[taking.boundary.stable.index(True)].add_(1)
                self.written.set()

        monkeypatch.setattr(Room, "store", store)


def test_a_version_that_turns_out_to_be_torn_is_withdrawn(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch, 3)
    training = Training(place, mode="overlap")
    truth: dict[str, torch.Tensor] = {}
    for step in range(1, 4):
        training.update()
        training.take()
        if step == 3:
            assert late.written.wait(60)
            assert training.kept()[0] == 3
        else:
            truth = training.truth()
        training.snap.deadline()
    assert "changed while it was copied" in training.snap.report().failures[-1]
    assert_kept(training, 2, truth)
    training.update()
    training.take()
    truth = training.truth()
    training.snap.close()
    assert_kept(training, 4, truth)
    assert (training.snap.report().taken, training.snap.report().failed) == (3, 1)


def test_inference_tensors_may_change_at_once(place: Path) -> None:
    with torch.inference_mode():
        model = nn.Linear(8, 8)
    snap = Snapshotter({"model": model}, directory=str(place / "slots"), mode="blocking", hash_every=0, on_error="raise")
    truth = model.weight.clone()
    with snap:
        snap.take(1)
        with torch.inference_mode():
            model.weight.add_(1)
    assert same(ucformat.open(str(place / "slots"))["model/weight"][...], truth)


@pytest.mark.parametrize("how", ["another shape", "a new tensor", "one less"])
def test_slots_are_laid_out_anew_when_the_state_has_changed_its_layout(
    place: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(place, mode="blocking", on_error="raise")
    for _ in range(3):
        training.update()
        training.take()
    training.snap.deadline()
    change_layout(training, how)
    for step in (4, 5):
        training.update()
        if how == "one less":
            training.state["step"] = training.done = step
            training.snap.take(step)
        else:
            training.take()
        training.snap.deadline()
        assert ucformat.open(training.directory).step == step
    training.snap.close()
    assert (training.snap.report().taken, training.snap.report().failed) == (5, 0)
    assert caplog.text.count("laid out anew") == 1


def test_a_first_take_before_the_optimizer_has_state_costs_no_later_version(place: Path) -> None:
    """As when a GradScaler skips the first steps, or gradients are accumulated."""
    training = Training(place, on_error="raise", mode="blocking")
    for step in (1, 2):
        training.done = step
        training.take()
    training.update()
    training.take()
    truth = training.truth()
    training.snap.close()
    assert_kept(training, 3, truth)
    assert (training.snap.report().taken, training.snap.report().failed) == (3, 0)


class Broken:
    """Copies until it shall not."""

    def __init__(self) -> None:
        self.works = True
        self.real = TensorFill.__call__

    def __call__(self, fill: TensorFill, parts: Sequence[ByteRequest]) -> None:
        if not self.works:
            raise OSError("the memory is gone")
        self.real(fill, parts)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    copier = Broken()

    def call(fill: TensorFill, parts: Sequence[ByteRequest]) -> None:
        copier(fill, parts)

    monkeypatch.setattr(TensorFill, "__call__", call)
    return copier


@pytest.mark.parametrize("mode", ["auto", "blocking"])
def test_a_copy_that_fails_is_counted_and_the_version_before_stays(place: Path, broken: Broken, mode: Mode) -> None:
    training = Training(place, mode=mode)
    training.update()
    training.take()
    truth = training.truth()
    training.update()
    broken.works = False
    training.take()
    training.update()
    assert_kept(training, 1, truth)
    broken.works = True
    training.take()
    truth = training.truth()
    training.snap.close()
    assert_kept(training, 3, truth)
    report = training.snap.report()
    assert (report.taken, report.failed) == (2, 1)
    assert "step 2: OSError: the memory is gone" in report.failures[0]


def test_a_copy_that_fails_raises_if_asked(place: Path, broken: Broken) -> None:
    training = Training(place, on_error="raise")
    training.update()
    training.take()
    training.update()
    broken.works = False
    with pytest.raises(OSError, match="the memory is gone"):  # at the boundary, or at the deadline of its optimizer step
        for _ in range(2):
            training.take()
            training.update()
    training.snap.close()


def test_every_third_step_is_taken_if_asked(place: Path) -> None:
    training = Training(place, every=3, on_error="raise")
    for _ in range(10):
        training.update()
        training.take()
    training.snap.close()
    report = training.snap.report()
    assert [step.step for step in report.done()] == [3, 6, 9]
    assert report.taken == 3
    assert training.kept()[0] == 9


def test_an_engine_that_is_switched_off_copies_nothing_until_it_is_on_again(place: Path) -> None:
    training = Training(place, on_error="raise")
    for _ in range(6):
        training.update()
        training.snap.enabled = training.done not in (3, 4)
        training.take()
    training.snap.close()
    assert [step.step for step in training.snap.report().done()] == [1, 2, 5, 6]
    assert training.kept()[0] == 6


def test_the_report_accounts_for_every_byte_and_tells_the_plan(place: Path) -> None:
    training = Training(place, on_error="raise")
    for _ in range(STEPS):
        training.update()
        training.take()
    training.snap.close()
    report = training.snap.report()
    assert [step.step for step in report.steps] == list(range(1, STEPS + 1))
    boundary = sum(t.nbytes for name, t in training.truth().items() if "running" in name or "num" in name or name == "rng")
    for step in report.done():
        assert step.windowed + step.beside + step.exposed == step.nbytes - boundary
        assert step.waited_ms == step.boundary_ms + step.exposed_ms >= 0
    assert f"snapshots: {STEPS} taken, 0 skipped, 0 failed" in str(report)
    assert report.plan in str(report)


def test_the_trace_shows_compute_idle_time_copies_and_waits(place: Path) -> None:
    training = Training(place, on_error="raise")
    for _ in range(STEPS):
        training.update()
        training.take()
    training.snap.close()
    training.snap.trace(str(place / "trace.json"))
    events = json.loads((place / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    drawn = [(lanes[e["tid"]], e["name"]) for e in events if e["ph"] == "X"]
    assert {("compute", "forward"), ("compute", "backward"), ("wait", "boundary"), ("wait", "deadline")} <= set(drawn)
    assert {lane for lane, _ in drawn} >= {"idle", "copy"}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_slots_outlive_the_engine_unless_they_are_removed(place: Path) -> None:
    training = Training(place, on_error="raise")
    training.update()
    training.take()
    truth = training.truth()
    training.snap.close()
    assert_kept(training, 1, truth)

    again = Snapshotter(training.state, directory=training.directory, hash_every=0, on_error="raise")
    again.take(2)
    again.close(remove=True)
    assert not Path(training.directory).exists()


def test_memory_that_is_too_small_is_told_before_anything_is_taken(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_set, "room", lambda directory: replace(room(directory), free=1000))
    training = Training(place)
    training.update()
    for _ in range(2):
        with pytest.raises(SnapshotMemoryError):
            training.take()
    with pytest.raises(NotACheckpointError):
        ucformat.open(training.directory)
    monkeypatch.undo()
    training.take()  # what failed was undone, and is tried again
    truth = training.truth()
    training.snap.close()
    assert_kept(training, 1, truth)


def test_a_directory_in_use_is_an_error_at_the_first_take(place: Path) -> None:
    first, second = Training(place), Training(place)
    first.take()
    with pytest.raises(SnapshotInUseError):
        second.take()
    first.snap.close()
    second.take()
    second.snap.close()
    assert second.snap.report().taken == 1


def test_the_first_failure_of_each_kind_is_logged(place: Path, broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
    with Training(place, mode="blocking").snap as snap:
        for step in range(1, 4):
            snap.take(step)
            broken.works = step < 2
        snap.deadline()
    assert snap.report().failed == 2
    assert caplog.text.count("the memory is gone") == 1


def test_versions_are_taken_and_persisted_at_or_after_each_multiple(place: Path) -> None:
    persist = Persist(str(place / "run"), every=4)
    training = Training(place, every=3, persist=persist, on_error="raise", slots=3)
    for training.done in range(1, 14):
        training.take()
        training.snap.deadline()
        while training.snap._room is not None and training.snap._room.keeper is not None and training.snap._room.keeper.busy:
            time.sleep(0.01)
    training.snap.close()
    assert [line.step for line in training.snap.report().done()] == [3, 6, 9, 12]
    assert ucformat.steps(persist.url) == [6, 9, 12]
    with pytest.raises(ValueError, match="multiple of every"):
        Training(place, every=3, persist=Persist("x", every=4, keep_every=8))
    with pytest.raises(ValueError, match="multiple of every"):
        Persist("x", every=4, keep_every=6)


# -- on two ranks --------------------------------------------------------------------------------------------------------


def pipeline(setting: Setting, directory: str) -> tuple[int, int, int, str]:
    """Train, and compare every other version with a copy of the state; what the engine says of it."""
    loop = Loop(setting, directory)
    loop.snap.on_error = "raise"
    for _ in range(STEPS):
        loop.step()
        truth = {name: tensor.clone() for name, tensor in loop.tensors().items()}
        loop.compute()
        loop.update()
        dist.barrier()
        found = ucformat.open(directory)
        assert found.step == loop.done - 1
        assert [name for name, tensor in truth.items() if not same(found[name][...], tensor)] == []
        assert ucformat.load(directory)["step"] == loop.done - 1
        dist.barrier()
        loop.snap.take(loop.done)
    loop.snap.close()
    report = loop.snap.report()
    return report.taken, report.skipped, report.failed, report.strategy


@pytest.mark.parametrize("mode", ["auto", "bubble"])
@pytest.mark.parametrize("compute", ["timed", "matmul"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_every_snapshot_of_a_pipeline_is_the_state_of_one_step_on_all_ranks(
    place: Path, schedule: Any, compute: Any, mode: Mode
) -> None:
    setting = Setting(schedule, compute, 6, 0.005, mode, hash_every=int(mode == "auto"), whole_update=True)
    ranks = on_ranks(2, pipeline, setting, str(place / "slots"))
    for rank, (taken, skipped, failed, strategy) in enumerate(ranks):
        assert (taken, skipped, failed) == (2 * STEPS, 0, 0)
        assert strategy.startswith("pp 2: ")
        assert f"rank {rank} holds" in strategy


def ahead(directory: str) -> list[int]:
    """Ranks that do not wait for each other at the boundary: each keeps what the slower one still needs."""
    torch.manual_seed(dist.get_rank())
    weight = nn.Parameter(torch.rand(512, 512))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    snap = Snapshotter(
        {"model": {f"w{dist.get_rank()}": weight}, "optimizer": optimizer}, directory=directory, hash_every=0, on_error="raise"
    )
    seen = []
    for step in range(1, 7):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        snap.take(step)
        if step > 1:  # both ranks have begun this step, so both have the one before: it is there at any moment
            found = ucformat.open(directory).step
            assert found is not None
            seen.append(found)
        dist.barrier()
    snap.close()
    return seen


def test_at_every_moment_a_version_is_there_that_all_ranks_have(place: Path) -> None:
    for seen in on_ranks(2, ahead, str(place / "slots")):
        assert len(seen) == 5
        assert seen == sorted(seen)


def replicated(directory: str) -> tuple[int, int, bool]:
    """The same weights on both ranks."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters())
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "rng": ucformat.rank_local(torch.full((4,), dist.get_rank())),
    }
    snap = Snapshotter(state, directory=directory, hash_every=0, on_error="raise")
    for step in range(1, 4):
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        dist.barrier()  # in place of an all-reduce: a rank that runs ahead finds its slots still needed, and skips
        snap.take(step)
    truth = model.weight.detach().clone()
    snap.close()
    dist.barrier()
    whole = sum(t.nbytes for t in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())))
    return snap.report().slot_bytes, whole + 4 * 8 * 2, same(ucformat.open(directory)["model/weight"][...], truth)


def test_replicas_are_kept_once(place: Path) -> None:
    ranks = on_ranks(2, replicated, str(place / "slots"))
    assert sum(mine for mine, _, _ in ranks) == ranks[0][1]
    assert all(equal for _, _, equal in ranks)


def torn_on_one(directory: str) -> tuple[list[int | None], int, list[int]]:
    torch.manual_seed(0)
    newest: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch:
        late = Late(patch, 2) if dist.get_rank() else None
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        with Snapshotter({"model": model, "optimizer": optimizer}, directory=directory, hash_every=0, mode="overlap") as snap:
            for step in range(1, 4):
                snap.take(step)
                if late is not None and step == 2:
                    late.written.wait(60)
                snap.deadline()
                dist.barrier()
                newest.append(ucformat.open(directory).step)
                dist.barrier()
    return newest, snap.report().taken, [line.step for line in snap.report().done()]


def test_a_version_that_is_torn_on_one_rank_counts_as_taken_on_none(place: Path) -> None:
    for newest, taken, steps in on_ranks(2, torn_on_one, str(place / "slots")):
        assert newest == [1, 1, 3]  # what all ranks have stays until all have the next
        assert (taken, steps) == (2, [1, 3])


def grown_on_one(directory: str) -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with Snapshotter(state, directory=directory, hash_every=0, mode="blocking", on_error="raise") as snap:
        snap.take(1)
        snap.deadline()
        dist.barrier()
        if dist.get_rank():
            state["more"] = torch.full((3,), 7.0)
        for step in range(2, 4):
            snap.take(step)
            snap.deadline()
            dist.barrier()  # with two slots, a version of a rank that is ahead is skipped
    return snap.report().taken, snap.report().failed


def test_slots_are_laid_out_anew_on_all_ranks_when_one_has_changed(place: Path) -> None:
    for taken, failed in on_ranks(2, grown_on_one, str(place / "slots")):
        assert (taken, failed) == (3, 0)
    found = ucformat.open(str(place / "slots"))
    assert found.step == 3
    assert same(found["more"][...], torch.full((3,), 7.0))


def crowded(directory: str) -> tuple[str, list[str], int]:
    """One rank has no memory for its slots; then it has."""
    snap = Snapshotter({"model": nn.Linear(4, 4), "rank": torch.zeros(0)}, directory=directory, hash_every=0, mode="blocking")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(slot_set, "room", lambda directory: replace(room(directory), free=10))
        with pytest.raises(SnapshotMemoryError) as raised:
            snap.take(1)
        dist.barrier()  # what other ranks made is gone when they have left `take`
        left = [path.name for path in Path(directory).rglob("slot-*")]
        dist.barrier()
    with snap:
        snap.take(2)
    return str(raised.value), left, snap.report().taken


def test_what_one_rank_cannot_set_up_is_undone_on_all_and_tried_again(place: Path) -> None:
    for why, left, taken in on_ranks(2, crowded, str(place / "slots")):
        assert "10" in why
        assert (left, taken) == ([], 1)
    assert ucformat.open(str(place / "slots")).step == 2


def clash(directory: str) -> str:
    """Two stages whose parameters have one name: they must not be taken for replicas."""
    torch.manual_seed(dist.get_rank())
    snap = Snapshotter({"model": nn.Linear(4, 4)}, directory=directory, hash_every=0)
    with pytest.raises(ValueConflictError) as raised:
        snap.take(1)
    snap.close()
    return str(raised.value)


def test_different_tensors_of_one_name_are_not_taken_for_replicas(place: Path) -> None:
    for why in on_ranks(2, clash, str(place / "slots")):
        assert "different contents" in why
