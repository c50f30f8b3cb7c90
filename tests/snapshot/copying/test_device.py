"""Copies from a device are ordered on the device: shown with a simulated one, whose streams run beside each other."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from tests.snapshot.rigs.rigs import Piece, columns
from tests.snapshot.rigs.simulated import SimDevice, position
from ucformat.errors import UnsupportedError
from ucformat.snapshot.copying.device import DeviceCopier, copier_for, known
from ucformat.snapshot.copying.device_version import DeviceWork, LateOutcome
from ucformat.snapshot.copying.host import HostCopier
from ucformat.snapshot.copyplan.plan import EXPOSED, OVERLAP, CopyPlan, Mode, Pieces, Rates, plan_copies
from ucformat.snapshot.schedule.replay import Track
from ucformat.storage.store import Bytes

MODES: tuple[Mode, ...] = ("auto", "bubble", "overlap", "blocking")
CHUNK = 256


@pytest.fixture
def device() -> Iterator[SimDevice]:
    made = SimDevice()
    yield made
    made.stop()


@dataclass(slots=True)
class Loop:
    """Training steps on a device: state that the update changes in place, and a buffer that the forward pass changes."""

    device: SimDevice
    track: Track
    state: list[torch.Tensor] = field(default_factory=list)
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    truth: list[torch.Tensor] = field(default_factory=list)
    places: list[Bytes] = field(default_factory=list)
    at_done: list[bool] = field(default_factory=list)
    """For each version declared valid, whether its bytes were right at that moment."""
    free: bool = True
    """Whether there is a place for the next version."""

    def __post_init__(self) -> None:
        sizes = [1, 40, 700, 2500]
        self.state = [self.device.tensor(torch.rand(size)) for size in sizes]
        self.state.append(self.device.tensor(torch.rand(30, 20)).t())  # gathered on the device
        self.buffer = self.device.tensor(torch.rand(300))

    def update(self) -> None:
        for at, tensor in enumerate(self.state):
            self.device.launch(f"update {at}", tensor, lambda part: part.mul_(-1.5).add_(1))

    def work(self, plan: CopyPlan) -> DeviceWork:
        tensors = [*self.state, self.buffer]
        clones = [self.device.clone(self.device.compute, tensor) for tensor in tensors]
        self.truth = [self.device.raw(clone) for clone in clones]
        self._kept = clones
        self.places = [np.zeros(tensor.nbytes, dtype=np.uint8) for tensor in tensors]
        return DeviceWork(plan, tuple(self.state), [self.buffer], lambda: self.places if self.free else None, self.check)

    _kept: list[torch.Tensor] = field(default_factory=list)

    def check(self) -> None:
        self.at_done.append(self.right())

    def right(self) -> bool:
        return all(
            place.tobytes() == truth.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for place, truth in zip(self.places, self.truth, strict=True)
        )

    def plan(self, mode: Mode, rate: float = 1e5) -> CopyPlan:
        pieces = Pieces.lasting(np.array([tensor.nbytes for tensor in self.state]))
        return plan_copies(self.track, pieces, Rates(alone=rate, beside=rate), mode, chunk_bytes=CHUNK)

    def compute(self, copier: DeviceCopier, *, slow: bool = False) -> None:
        """The actions of a step, each of which changes the buffer; `slow` ones leave copies time to come too early."""
        copier.opened(0)
        for at in range(len(self.track.start)):
            copier.closed()
            self.device.launch(f"action {at}", self.buffer, lambda part: part.add_(1))
            if slow:
                self.device.compute.ask("slow", lambda: time.sleep(0.02))
            self.device.compute.ask(f"end {at}", lambda: None)
            copier.opened(at + 1)
        copier.closed()


def track(actions: int) -> Track:
    """Actions of 10 ms with as much between them."""
    start = np.arange(actions, dtype=np.float64) * 0.02 + 0.01
    return Track(start, start + 0.01, float(actions) * 0.02 + 0.01)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_a_version_from_a_device_is_the_state_after_its_step_whatever_the_streams_do(
    device: SimDevice, mode: Mode, seed: int
) -> None:
    rng = random.Random(seed)
    loop = Loop(device, track(rng.randrange(5)))
    copier = DeviceCopier([device])
    for _ in range(4):
        loop.update()
        copier.begin(loop.work(loop.plan(mode, 10 ** rng.uniform(4, 6))))
        if rng.random() < 0.5:  # what is snapshot is replaced, and its memory freed
            loop.state[2:4] = [device.tensor(torch.rand(700)), device.tensor(torch.rand(2500))]
            loop.buffer = device.tensor(torch.rand(300))
        loop.compute(copier)
        outcome = copier.finish()
        loop.update()  # at once: the device has to wait, the host does not
        assert known(outcome, wait=True)
        assert (outcome.finished, outcome.failure) == (True, None)
        assert outcome.nbytes == outcome.windowed + outcome.beside + outcome.exposed == sum(t.nbytes for t in loop.state)
    copier.stop()
    assert loop.at_done == [True] * 4


def test_copies_keep_their_windows_on_the_device_and_the_exposed_ones_come_after_the_deadline(device: SimDevice) -> None:
    loop = Loop(device, track(4))
    copier = DeviceCopier([device])
    plan = loop.plan("bubble")
    assert {EXPOSED, 0, 1, 2, 3} <= set(plan.window.tolist())
    work = loop.work(plan)
    copier.begin(work)
    loop.compute(copier, slow=True)
    device.compute.ask("deadline", lambda: None)
    outcome = copier.finish()
    assert known(outcome, wait=True)
    device.idle()
    log = list(device.log)
    gates = [-1, *(position(log, f"end {at}") for at in range(4)), position(log, "deadline")]
    copied: dict[int, list[tuple[int, int]]] = {}
    for at, (_, deed) in enumerate(log):
        if not deed.startswith("copy to"):
            continue
        first, nbytes = map(int, deed.removeprefix("copy to ").split("+"))
        piece = next(i for i, place in enumerate(loop.places) if 0 <= first - place.ctypes.data < len(place))
        start = first - loop.places[piece].ctypes.data
        copied.setdefault(piece, []).append((start, start + nbytes))
        for chunk in np.flatnonzero((plan.piece == piece) & (plan.start >= start) & (plan.stop <= start + nbytes)).tolist():
            window = int(plan.window[chunk])
            after = 5 if window == EXPOSED else 0 if (opens := plan.windows[window].after) is None else opens + 1
            assert at > gates[after], f"a chunk of window {window} was copied before it opened"
    for piece, ranges in copied.items():  # every byte once
        edges = sorted(ranges)
        assert [edges[0][0], *(stop for _, stop in edges)] == [*(start for start, _ in edges), len(loop.places[piece])]
    assert sorted(copied) == list(range(6))
    copier.stop()


def test_copies_beside_compute_are_spread_over_the_actions_that_were_measured(device: SimDevice) -> None:
    loop = Loop(device, track(4))
    copier = DeviceCopier([device])
    outcomes: list[LateOutcome] = []
    for _ in range(3):  # the third is planned when the first one's times are known
        copier.begin(loop.work(loop.plan("overlap", 1e6)))
        loop.compute(copier)
        outcome = copier.finish()
        assert known(outcome, wait=True)
        assert isinstance(outcome, LateOutcome)
        outcomes.append(outcome)
    assert set(loop.plan("overlap", 1e6).window.tolist()) == {OVERLAP}
    assert [len(outcome.track.start) for outcome in outcomes if outcome.track is not None] == [4, 4, 4]
    assert [len(outcome.spans) for outcome in outcomes[:2]] == [2, 2]  # what is cloned, and all else behind the first gate
    assert len(outcomes[2].spans) > 3
    copier.stop()


def test_the_host_never_waits_for_the_copies(device: SimDevice) -> None:
    loop = Loop(device, track(2))
    copier = DeviceCopier([device])
    with device.paused():
        copier.begin(loop.work(loop.plan("auto")))
        loop.compute(copier)
        outcome = copier.finish()
        loop.update()
        assert not known(outcome)
        assert loop.at_done == []
        assert not any(place.any() for place in loop.places)
    assert known(outcome, wait=True)
    assert loop.at_done == [True]
    copier.stop()


def test_a_version_is_valid_only_when_its_last_byte_is_there(device: SimDevice) -> None:
    loop = Loop(device, track(2))
    copier = DeviceCopier([device])
    copier.begin(loop.work(loop.plan("blocking")))
    loop.compute(copier)
    with device.paused():  # the deadline itself lies behind
        outcome = copier.finish()
        assert not known(outcome)
        assert loop.at_done == []
    assert known(outcome, wait=True)
    assert loop.at_done == [True]
    assert isinstance(outcome, LateOutcome)
    assert outcome.exposed == sum(tensor.nbytes for tensor in loop.state)
    copier.stop()


def test_without_a_place_until_the_deadline_nothing_is_copied(device: SimDevice) -> None:
    loop = Loop(device, track(2))
    copier = DeviceCopier([device])
    for free in (False, True):
        loop.free = free
        copier.begin(loop.work(loop.plan("auto")))
        loop.compute(copier)
        outcome = copier.finish()
        assert known(outcome, wait=True)
        assert (outcome.refused, outcome.finished, outcome.failure) == (not free, free, None)
        assert isinstance(outcome, LateOutcome)
        assert outcome.track is not None  # the step is measured all the same
    assert loop.at_done == [True]
    copier.stop()


def test_a_place_that_gets_free_late_takes_what_earlier_windows_could_not(device: SimDevice) -> None:
    loop = Loop(device, track(3))
    copier = DeviceCopier([device])
    loop.free = False
    copier.begin(loop.work(loop.plan("bubble", 1e6)))
    loop.compute(copier)
    loop.free = True
    outcome = copier.finish()
    loop.update()
    assert known(outcome, wait=True)
    assert loop.at_done == [True]
    copier.stop()


@pytest.mark.parametrize("rate", [1e4, 1e5, 1e7])
@pytest.mark.parametrize("mode", MODES)
def test_a_piece_is_copied_between_the_action_that_makes_it_and_the_one_that_changes_it(
    device: SimDevice, mode: Mode, rate: float
) -> None:
    times = track(5)
    made = device.tensor(torch.rand(600))
    copier = DeviceCopier([device])
    pieces = columns([Piece(made.nbytes, ready=2, deadline=4)])
    plan = plan_copies(times, pieces, Rates(alone=rate, beside=rate), mode, chunk_bytes=CHUNK)
    place = np.zeros(made.nbytes, dtype=np.uint8)
    right: list[bool] = []
    copier.begin(DeviceWork(plan, [made], [], lambda: [place], lambda: right.append(place.tobytes() == truth.numpy().tobytes())))
    copier.opened(0)
    for at in range(5):
        copier.closed()
        device.launch(f"action {at}", made, (lambda part: part.add_(1)) if at in (0, 1, 4) else (lambda part: None))
        copier.opened(at + 1)
        if at == 1:
            clone = device.clone(device.compute, made)
            truth = device.raw(clone)
    copier.closed()
    outcome = copier.finish()
    assert known(outcome, wait=True)
    assert (outcome.failure, right) == (None, [True])
    assert outcome.nbytes == made.nbytes
    copier.stop()


def test_each_device_orders_the_copies_of_its_own_pieces(device: SimDevice) -> None:
    second = SimDevice()
    loop = Loop(device, track(2))
    elsewhere = Loop(second, track(2))

    def both_checked() -> None:
        loop.check()
        elsewhere.check()

    copier = DeviceCopier([device, second])
    for mode in MODES:
        plan = plan_copies(
            loop.track,
            Pieces.lasting(np.array([tensor.nbytes for tensor in (*loop.state, *elsewhere.state)])),
            Rates(alone=1e5, beside=1e5),
            mode,
            chunk_bytes=CHUNK,
        )
        both = loop.work(plan), elsewhere.work(plan)
        count = len(loop.state)
        places = [*loop.places[:count], *elsewhere.places[:count], loop.places[count], elsewhere.places[count]]
        views = [view for work in both for view in work.views]
        buffers = [buffer for work in both for buffer in work.changing]
        copier.begin(DeviceWork(plan, views, buffers, partial(list, places), both_checked))
        loop.compute(copier)
        with second.paused():  # one lags behind: the version is valid when both are done
            outcome = copier.finish()
            loop.update()
            elsewhere.update()
            device.idle()
            assert not known(outcome)
        assert known(outcome, wait=True)
        assert outcome.failure is None
    copier.stop()
    second.stop()
    assert loop.at_done == elsewhere.at_done == [True] * len(MODES)


def test_progress_is_told_up_to_the_last_byte(device: SimDevice) -> None:
    loop = Loop(device, track(2))
    copier = DeviceCopier([device])
    told: list[int] = []
    work = loop.work(loop.plan("overlap"))
    copier.begin(DeviceWork(work.plan, work.views, work.changing, work.open, work.done, told=told.append))
    loop.compute(copier)
    assert known(copier.finish(), wait=True)
    copier.stop()
    assert told == sorted(told)
    assert told[-1] == sum(tensor.nbytes for tensor in loop.state)


@pytest.mark.parametrize("method", ["record", "wait", "copy", "clone", "synchronise", "elapsed"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_whatever_a_device_refuses_ends_in_an_outcome_and_the_next_version_is_right(
    device: SimDevice, method: str, after: int
) -> None:
    loop = Loop(device, track(2))
    copier = DeviceCopier([device])
    loop.update()
    work = loop.work(loop.plan("auto"))
    device.refuse = method, after
    copier.begin(work)
    loop.compute(copier)
    outcome = copier.finish()
    assert isinstance(outcome, LateOutcome)
    assert known(outcome, wait=True)
    assert outcome.finished == (outcome.failure is None)
    assert outcome.quiet or method == "synchronise"
    device.refuse = None
    device.idle()
    loop.update()
    copier.begin(loop.work(loop.plan("auto")))
    loop.compute(copier)
    last = copier.finish()
    loop.update()
    assert known(last, wait=True)
    copier.stop()
    assert loop.at_done == [True] * (1 + outcome.finished)


def test_a_version_given_up_is_not_valid_and_its_copies_are_over(device: SimDevice) -> None:
    loop = Loop(device, track(2))
    copier = DeviceCopier([device])
    ended: list[LateOutcome] = []
    work = loop.work(loop.plan("overlap"))
    copier.begin(DeviceWork(work.plan, work.views, work.changing, work.open, work.done, ended.append))
    loop.compute(copier)
    copier.stop()
    assert loop.at_done == []
    assert [outcome.quiet for outcome in ended] == [True]


def test_a_tensor_that_has_left_the_devices_fails_its_version_alone(device: SimDevice) -> None:
    loop = Loop(device, track(1))
    copier = DeviceCopier([device])
    work = loop.work(loop.plan("auto"))
    copier.begin(DeviceWork(work.plan, [torch.zeros(1), *work.views[1:]], work.changing, work.open, work.done))
    loop.compute(copier)
    outcome = copier.finish()
    assert known(outcome, wait=True)
    assert "has moved" in str(outcome.failure)
    assert loop.at_done == []
    copier.stop()


def test_state_on_a_device_whose_order_is_unknown_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="meta"):
        copier_for([torch.zeros(3), torch.zeros(3, device="meta")])


def test_state_on_the_host_is_copied_by_the_host() -> None:
    copier = copier_for([torch.zeros(3)])
    assert isinstance(copier, HostCopier)
    copier.stop()
