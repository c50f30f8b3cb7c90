"""The engine with state on a device: the loop runs ahead, versions become valid later, and each is the state after its step.

The device is simulated (`simulated`); a test at the end runs on a real one where there is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ucformat
from tests.reshard.ranks import on_ranks, same
from tests.snapshot.rigs.simulated import SimDevice
from ucformat.snapshot.copying import device as device_module
from ucformat.snapshot.copyplan.plan import Mode
from ucformat.snapshot.snapshotter import Snapshotter

STEPS = 9  # the first plan is made in the fourth


class Momentum(torch.optim.Optimizer):
    """Changes parameters and its own state on the device, in place but for what it replaces."""

    def __init__(self, model: nn.Module, device: SimDevice) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.device, self.done = device, 0

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.done += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state or self.done % 3 == 0:
                    state["momentum"] = self.device.tensor(torch.full(parameter.shape, float(self.done)))
                self.device.launch("momentum", state["momentum"], lambda part: part.mul_(-0.9).add_(1))
                self.device.launch("update", parameter.detach(), lambda part: part.mul_(-1.1).add_(0.5))


class Model(nn.Module):
    running: torch.Tensor

    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self.weight = nn.Parameter(device.tensor(torch.rand(64, 65)))
        self.turned = nn.Parameter(device.tensor(torch.rand(20, 30)).t())
        self.bias = nn.Parameter(device.tensor(torch.rand(7)))
        self.register_buffer("running", device.tensor(torch.rand(300)))


class Training:
    """A loop that never waits for its device."""

    def __init__(self, device: SimDevice, directory: Path, part: str = "", **options: Any) -> None:
        """`part` is what this rank holds of the model, where there are several."""
        torch.manual_seed(len(part))
        self.device, self.directory = device, str(directory / "slots")
        self.model = nn.ModuleDict({part: Model(device)}) if part else Model(device)
        self.buffer = next(self.model.buffers())
        self.optimizer = Momentum(self.model, device)
        self.rng = torch.rand(9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, f"rng{part}": self.rng, "step": 0}
        self.snap = Snapshotter(self.state, directory=self.directory, **{"hash_every": 0, "on_error": "raise", **options})
        self.done = 0
        self.truth: dict[int, dict[str, torch.Tensor]] = {}

    def update(self) -> None:
        for name in ("forward", "backward"):
            with self.snap.compute(name):
                self.device.launch(name, self.buffer, lambda part: part.add_(1))
            self.rng.add_(1)
        self.optimizer.step()
        self.done += 1

    def take(self) -> None:
        """Remember, in the device's order and without waiting, what the state is now; and take it."""
        self.state["step"] = self.done
        self.truth[self.done] = {
            name: tensor.clone() if tensor is self.rng else self.device.clone(self.device.compute, tensor.detach())
            for name, tensor in self.tensors().items()
        }
        self.snap.take(self.done)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            found[f"optimizer/{name}/momentum"] = self.optimizer.state[parameter]["momentum"]
        return {**found, next(name for name in self.state if name.startswith("rng")): self.rng}

    def kept(self) -> int:
        """The newest version's step, after comparing its bits with what they should be."""
        found = ucformat.open(self.directory)
        assert found.step is not None
        truth = self.truth[found.step]
        assert set(truth) <= set(found)
        assert [name for name in truth if not same(found[name][...], truth[name].contiguous())] == []
        assert isinstance(found.values_tree, dict)
        assert found.values_tree["step"] == found.step
        return found.step


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimDevice]:
    made = SimDevice()
    monkeypatch.setattr(device_module, "devices", lambda tensors: [made])
    yield made
    made.stop()


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("mode", ["auto", "bubble", "overlap", "blocking"])
def test_a_snapshot_of_a_device_is_the_state_after_its_step_while_the_host_runs_ahead(
    device: SimDevice, tmp_path: Path, mode: Mode, slots: int
) -> None:
    rng = random.Random(slots)
    training = Training(device, tmp_path, mode=mode, slots=slots)
    for step in range(1, STEPS + 1):
        training.update()
        training.take()
        if step > 3:  # whatever is in flight, the newest version that is valid is whole
            assert training.kept() in sorted(training.truth)[-3:]
        if rng.random() < 0.3:
            training.update()  # a step that is not taken: its update is the deadline
            training.snap.wait()
            assert training.kept() == training.done - 1
            training.take()
    training.snap.close()
    assert training.kept() == training.done
    report = training.snap.report()
    assert (report.skipped, report.failed) == (0, 0)
    assert report.taken == len(training.truth)
    assert report.plan


def test_a_version_in_flight_is_not_valid_and_its_slot_is_not_given_away(device: SimDevice, tmp_path: Path) -> None:
    training = Training(device, tmp_path)
    training.update()
    training.take()
    training.snap.deadline()
    training.snap.wait()
    assert training.kept() == 1
    with device.paused():
        training.update()
        training.take()  # goes into the second slot
        training.update()  # its deadline: the host goes on, the device has not begun
        training.take()  # the one slot is valid, the other in flight
        assert training.kept() == 1
        report = training.snap.report()
        assert (report.taken, report.skipped) == (1, 0)
    training.snap.wait()
    assert training.kept() == 2
    training.update()  # the deadline of the third, whose slot was free in time
    training.snap.wait()
    assert training.kept() == 3
    training.snap.close()
    assert (report.taken, report.skipped, report.failed) == (3, 0, 0)


def test_closing_waits_for_what_is_in_flight(device: SimDevice, tmp_path: Path) -> None:
    training = Training(device, tmp_path)
    training.update()
    training.take()
    training.snap.close()
    assert training.kept() == 1


def test_the_report_accounts_for_every_byte_and_for_times_that_the_device_tells(device: SimDevice, tmp_path: Path) -> None:
    training = Training(device, tmp_path)
    for _ in range(STEPS):
        training.update()
        training.take()
    training.snap.close()
    report = training.snap.report()
    boundary = training.buffer.nbytes + training.rng.nbytes
    assert [step.step for step in report.done()] == list(range(1, STEPS + 1))
    for step in report.done():
        assert step.windowed + step.beside + step.exposed == step.nbytes - boundary
        assert step.step_ms > 0
        assert step.exposed_ms >= 0
    training.snap.trace(str(tmp_path / "trace.json"))
    text = (tmp_path / "trace.json").read_text()
    assert all(f'"name": "{name}"' in text for name in ("forward", "backward", "idle", "deadline", "boundary"))


@pytest.mark.parametrize("method", ["record", "wait", "copy", "clone", "synchronise", "elapsed"])
def test_a_device_that_refuses_costs_a_version_and_training_goes_on(device: SimDevice, tmp_path: Path, method: str) -> None:
    training = Training(device, tmp_path, on_error="skip", slots=3)
    for step in range(1, STEPS + 1):
        training.update()
        device.idle()
        training.snap.wait()
        if step == 5:
            clones = len(training.tensors()) - 1 if method == "clone" else 0  # those of the test itself come first
            device.refuse = method, clones
        training.take()
    training.snap.close()
    report = training.snap.report()
    assert report.taken + report.failed + report.skipped == STEPS
    assert report.failed <= 1
    assert report.taken >= STEPS - 1
    assert device.refuse is None
    assert training.kept() == STEPS


def test_a_slot_into_which_copies_may_still_run_is_not_used_again(device: SimDevice, tmp_path: Path) -> None:
    training = Training(device, tmp_path, on_error="skip")
    for step in range(1, STEPS + 1):
        training.update()
        training.snap.wait()
        if step == 5:
            device.refuse = "synchronise", 0
        training.take()
    training.snap.deadline()  # `close` alone would wait for a slot
    training.snap.close()
    assert training.kept() == 4
    report = training.snap.report()
    assert (report.taken, report.failed, report.skipped) == (4, 1, STEPS - 5)


def test_a_device_that_refuses_raises_if_asked_when_it_is_known(device: SimDevice, tmp_path: Path) -> None:
    training = Training(device, tmp_path)
    training.update()
    device.refuse = "copy", 0
    training.take()
    with pytest.raises(RuntimeError, match="refuses to copy"):
        training.update()  # this early if the device is that quick
        training.snap.wait()
    training.done = 2
    training.take()
    training.snap.close()
    assert training.kept() == 2
    assert training.snap.report().failed == 1


def pipelined(slots: int, directory: str) -> tuple[int, int, int]:
    """Two ranks, each with a device that lags behind as it likes; one of them fails once."""
    made = SimDevice()
    pytest.MonkeyPatch().setattr(device_module, "devices", lambda tensors: [made])
    rank = dist.get_rank()
    training = Training(made, Path(directory), "first" if rank == 0 else "2nd", slots=slots, on_error="skip")
    for step in range(1, STEPS + 1):
        training.update()
        dist.barrier()  # in place of what passes between the ranks in a step
        if (step, rank) == (6, 1):
            training.snap.wait()
            made.refuse = "copy", 0
        training.take()
        dist.barrier()
        if step > 4:  # the first whole version is there, and it is of one step on both ranks
            training.kept()
    training.snap.close()
    dist.barrier()
    training.kept()
    made.stop()
    report = training.snap.report()
    return report.taken, report.skipped, report.failed


@pytest.mark.parametrize("slots", [2, 3])
def test_ranks_whose_devices_lag_keep_a_version_that_all_have(tmp_path: Path, slots: int) -> None:
    counts = on_ranks(2, pipelined, slots, str(tmp_path))
    assert [sum(count) for count in counts] == [STEPS, STEPS]
    assert all(taken > 0 for taken, _, _ in counts)
    assert [failed for _, _, failed in counts] == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["auto", "blocking"])
def test_on_a_real_device_no_snapshot_is_torn(tmp_path: Path, mode: Mode) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 512)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    directory = str(tmp_path / "slots")
    snap = Snapshotter(state, directory=directory, mode=mode, hash_every=0, on_error="raise")
    for step in range(1, 21):
        with snap.compute():
            optimizer.zero_grad()
            model(torch.randn(256, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        state["step"] = step
        snap.take(step)
        truth = {f"model/{name}": tensor.clone() for name, tensor in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            truth.update((f"optimizer/{name}/{key}", value.clone()) for key, value in optimizer.state[parameter].items())
        model(torch.randn(256, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        snap.wait()
        found = ucformat.open(directory)
        assert found.step == step
        assert [name for name in truth if not same(found[name][...], truth[name].cpu())] == []
    snap.close()
    assert snap.report().failed == 0
