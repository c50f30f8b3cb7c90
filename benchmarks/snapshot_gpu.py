"""Snapshots of a large state on a CUDA device: rate of pinned copies against the link, and what they cost training.

Beside `dcp.async_save` with its pinned, asynchronous stager on the same state. Every version that is compared was taken
while the optimizer went on. Without a CUDA device there is nothing to measure: it says so, and ends well.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager

import ucformat
from benchmarks.report import GB, Line, Result, arguments
from ucformat.snapshot.snapshotter import Snapshotter

NAME = "snapshot_gpu"
WIDTH = 8192
BLOCK = 6  # steps with, then as many without snapshots; the first of each is dropped
PLANNING = 8  # steps until a plan is in force
LANE_GB_PER_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Of a PCIe lane, by generation."""


class Training:
    """A model of `billions` float32 parameters and Adam's two moments, which computes in bfloat16 on one device."""

    def __init__(self, billions: float, directory: str) -> None:
        torch.manual_seed(0)
        count = max(1, round(billions * 1e9 / WIDTH**2))
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(count)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs = torch.randn(8192, WIDTH, device="cuda")
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.directory, self.done = directory, 0
        self.snap = Snapshotter(self.state, directory=directory, mode="overlap")

    def compute(self) -> None:
        with self.snap.compute():
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = cast(Tensor, self.model(self.inputs)).float().square().mean()
            loss.backward()

    def update(self) -> None:
        self.compute()
        self.optimizer.step()

    def step(self, *, snapshots: bool) -> float:
        """A whole step; its seconds."""
        began = time.perf_counter()
        self.update()
        self.done += 1
        self.state["step"] = self.done
        self.snap.enabled = snapshots
        self.snap.take(self.done)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def tensors(self) -> dict[str, Tensor]:
        found = {f"model/{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer/{name}/{key}"] = self.optimizer.state[parameter][key]
        return found


def pinned_rate(nbytes: int = 1 << 30, rounds: int = 10) -> float:
    """Bytes per second from the device to pinned memory: the best of some copies."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    best = 0.0
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, nbytes / (time.perf_counter() - began))
    return best


def link_limit() -> float | None:
    """Bytes per second of the device's PCIe link, as the driver tells; None when it does not."""
    query = ["nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        generation, width = (int(part) for part in told[torch.cuda.current_device()].split(","))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None
    return LANE_GB_PER_S[generation] * width * GB if generation in LANE_GB_PER_S else None


def overhead(training: Training, pairs: int) -> dict[str, float]:
    """Alternating blocks with and without snapshots, and what the engine says training waited."""
    for _ in range(PLANNING):
        training.step(snapshots=True)
    times: dict[bool, list[float]] = {True: [], False: []}
    steps: set[int] = set()
    for block in range(2 * pairs):
        on = block % 2 == 0
        for at in range(BLOCK):
            seconds = training.step(snapshots=on)
            if at:
                times[on].append(seconds)
                steps |= {training.done - 1} if on else set()
    training.snap.deadline()
    seen = [step for step in training.snap.report().done() if step.step in steps]
    return {
        "overhead": (median(times[True]) / median(times[False]) - 1) * 100,
        "step_ms": median(times[False]) * 1e3,
        "exposed_ms": median(step.exposed_ms for step in seen),
        "boundary_ms": median(step.boundary_ms for step in seen),
        "waited_ms": median(step.waited_ms for step in seen),
        "size_gb": sum(tensor.nbytes for tensor in training.tensors().values()) / GB,
    }


def torn(training: Training, rounds: int) -> float:
    """Versions that differ in any bit from the state they are of, though the optimizer went on at once: must be 0."""
    wrong = 0
    for _ in range(rounds):
        training.step(snapshots=True)
        truth = {name: tensor.clone() for name, tensor in training.tensors().items()}
        training.update()
        found = ucformat.open(training.directory)
        wrong += found.step != training.done or not all(
            torch.equal(found[name][...].to(tensor.device), tensor) for name, tensor in truth.items()
        )
        training.done += 1
        training.snap.take(training.done)
    return float(wrong)


def dcp_pinned(training: Training, rounds: int, place: Path) -> float:
    """Milliseconds that `async_save` with DCP's pinned stager makes training wait, the one before the update included."""
    stager = DefaultStager()
    stalls = []
    for number in range(rounds + 2):
        training.compute()
        training.optimizer.step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        saving: Any = state_dict_saver.async_save(training.tensors(), checkpoint_id=place / str(number), async_stager=stager)
        stall = time.perf_counter() - began
        training.compute()
        torch.cuda.synchronize()
        began = time.perf_counter()
        saving.staging_completion.result()
        stalls.append((stall + time.perf_counter() - began) * 1e3)
        saving.upload_completion.result()  # not counted
        shutil.rmtree(place, ignore_errors=True)
    stager.close()
    return median(stalls[2:])  # the first ones make and pin the memory


def measure(args: argparse.Namespace, place: Path) -> Result:
    rate, limit = pinned_rate(), link_limit()
    training = Training(args.billions, str(place / "slots"))
    values = {"pinned_gb_per_s": rate / GB, **overhead(training, args.rounds), "torn": torn(training, args.rounds)}
    training.snap.enabled = False
    values["dcp_pinned_ms"] = dcp_pinned(training, args.rounds, place / "dcp")
    training.snap.close(remove=True)
    ratios = {"exposed_vs_dcp_pinned": values["dcp_pinned_ms"] / values["waited_ms"]}
    if limit is not None:
        ratios["pinned_vs_limit"] = rate / limit
    device = torch.cuda.get_device_name()
    lines = [
        Line(f"{device}: pinned copies vs the link", f"{rate / GB:.1f} GB/s", "" if limit is None else f"{limit / GB:.1f} GB/s"),
        Line("longer step, than one without", f"{values['overhead']:+.2f} %", f"{values['step_ms']:.0f} ms"),
        Line("wait vs dcp's pinned stager", f"{values['waited_ms']:.2f} ms", f"{values['dcp_pinned_ms']:.1f} ms"),
        Line("torn versions", f"{values['torn']:.0f} of {args.rounds}", ""),
    ]
    return Result(NAME, ratios, values, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--billions", type=float, default=1.0, help="parameters, in billions: 12 bytes of state each")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        Result(NAME, {}, {}, []).publish(args.json)
        return
    memory = args.dir or Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=memory) as place:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{place}/ranks", rank=0, world_size=1)
        measure(args, Path(place)).publish(args.json)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
