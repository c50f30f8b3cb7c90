"""Snapshots of a large state on a CUDA device: rate of pinned copies against the link, and what they cost training.

Beside `dcp.async_save` with its pinned, asynchronous stager on the same state. What training waits is told by events on the
device. Every version that is compared was taken while the optimizer went on. Checksums, which are the keeper's work on
other cores, are left out. Without a CUDA device there is nothing to measure: it says so, and ends well.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ucformat
from benchmarks.report import GB, Line, Result, arguments
from ucformat.snapshot.slots.free_memory import room
from ucformat.snapshot.snapshotter import Snapshotter

NAME = "snapshot_gpu"
WIDTH = 8192
TOKENS = 8192  # of a microbatch
BLOCK = 6  # steps with, then as many without snapshots; the first two of each are dropped
DROPPED = 2  # the first one's copies began in another block, and its optimizer step may have waited for them
PLANNING = 8  # steps until a plan is in force
STATE_BYTES = 12  # of a parameter: itself and Adam's two moments, float32
SLOTS = 2
PINNED_BYTES = 1 << 30  # of the copies that tell the link's rate
LANE_GB_PER_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Of a PCIe lane, by generation."""


def layers(billions: float) -> int:
    return max(1, round(billions * 1e9 / WIDTH**2))


class Training:
    """A model of `billions` float32 parameters and Adam's two moments, which computes in bfloat16 on one device."""

    def __init__(self, billions: float, microbatches: int, directory: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(layers(billions))))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs = torch.randn(TOKENS, WIDTH, device="cuda")
        self.microbatches = microbatches
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.directory, self.done = directory, 0
        self.snap = Snapshotter(self.state, directory=directory, mode="overlap", slots=SLOTS, hash_every=0)

    def compute(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.microbatches):
            with self.snap.compute(), torch.autocast("cuda", torch.bfloat16):
                cast(Tensor, self.model(self.inputs)).float().square().mean().backward()

    def update(self) -> None:
        self.compute()
        self.optimizer.step()

    def step(self, *, snapshots: bool) -> None:
        """A whole step. Nothing waits for the device."""
        self.update()
        self.done += 1
        self.state["step"] = self.done
        self.snap.enabled = snapshots
        self.snap.take(self.done)

    def tensors(self) -> dict[str, Tensor]:
        found = {f"model/{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer/{name}/{key}"] = self.optimizer.state[parameter][key]
        return found


def pinned_rate(rounds: int = 10) -> float:
    """Bytes per second from the device to pinned memory: the best of some copies."""
    source = torch.zeros(PINNED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    best = 0.0
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, PINNED_BYTES / (time.perf_counter() - began))
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


def mark() -> torch.cuda.Event:
    """An event on the computing stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def overhead(training: Training, pairs: int) -> dict[str, float]:
    """Alternating blocks with and without snapshots, and what the engine says training waited."""
    for _ in range(PLANNING):
        training.step(snapshots=True)
    marks: dict[bool, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {True: [], False: []}
    steps: set[int] = set()
    for block in range(2 * pairs):
        on = block % 2 == 0
        for at in range(BLOCK):
            began = mark()
            training.step(snapshots=on)
            if at >= DROPPED:
                marks[on].append((began, mark()))
                steps |= {training.done - 1} if on else set()
    training.snap.deadline()
    training.snap.wait()
    torch.cuda.synchronize()
    times = {on: median(began.elapsed_time(ended) for began, ended in found) for on, found in marks.items()}
    seen = [step for step in training.snap.report().done() if step.step in steps]
    return {
        "overhead": (times[True] / times[False] - 1) * 100,
        "step_ms": times[False],
        "exposed_ms": median(step.exposed_ms for step in seen),
        "boundary_ms": median(step.boundary_ms for step in seen),
        "beside": median(step.beside / (step.beside + step.windowed + step.exposed) for step in seen),
        "taken": float(len(seen)),
        "size_gb": sum(tensor.nbytes for tensor in training.tensors().values()) / GB,
    }


def torn(training: Training, rounds: int) -> float:
    """Versions that differ in any bit from the state they are of, though the optimizer went on at once: must be 0."""
    wrong = 0
    for _ in range(rounds):
        training.step(snapshots=True)
        truth = {name: tensor.clone() for name, tensor in training.tensors().items()}
        training.update()
        training.snap.wait()
        found = ucformat.open(training.directory)
        wrong += found.step != training.done or not all(
            torch.equal(found[name][...].to(tensor.device), tensor) for name, tensor in truth.items()
        )
        training.done += 1
        training.state["step"] = training.done
        training.snap.take(training.done)
    training.snap.deadline()
    training.snap.wait()
    return float(wrong)


def dcp_stalls(training: Training, rounds: int, place: Path) -> Iterator[float]:
    """Milliseconds that `async_save` with DCP's pinned stager makes training wait, the one before the update included."""
    stager = DefaultStager(StagingOptions(use_shared_memory=False))  # shared memory is for uploads by another process
    for number in range(rounds + 2):
        training.compute()
        training.optimizer.step()
        torch.cuda.synchronize()  # the stager's stream is not ordered behind the update: not counted
        began = time.perf_counter()
        saving: Any = state_dict_saver.async_save(training.tensors(), checkpoint_id=place / str(number), async_stager=stager)
        stall = time.perf_counter() - began
        training.compute()
        torch.cuda.current_stream().synchronize()  # the copies may still run
        began = time.perf_counter()
        saving.staging_completion.result()
        if number >= 2:  # the first ones make and pin the memory
            yield (stall + time.perf_counter() - began) * 1e3
        saving.upload_completion.result()  # not counted
        shutil.rmtree(place, ignore_errors=True)
    stager.close()


def lacking(billions: float, directory: Path) -> str:
    """What there is too little of, in words; empty when all fits."""
    state = layers(billions) * WIDTH**2 * STATE_BYTES
    found = room(str(directory))
    written, staged = (SLOTS + 1) * state, state + PINNED_BYTES  # slots and dcp's checkpoint; dcp's stager
    if found.free < written + (staged if found.is_memory else 0):
        more = f" and {staged / GB:.1f} GB of memory" if found.is_memory else ""
        return (
            f"{SLOTS} slots and a checkpoint of {state / GB:.1f} GB each take {written / GB:.1f} GB{more}, but {directory} has "
            f"{found.free / GB:.1f} GB {found.limit}: give a larger tmpfs with --dir, or less --billions"
        )
    free, needed = torch.cuda.mem_get_info()[0], 2.7 * state  # with gradients, activations and a copy to compare with
    if free < needed:
        return f"the device has {free / GB:.1f} GB free, {needed / GB:.1f} GB are needed: try less --billions"
    return ""


def measure(args: argparse.Namespace, place: Path) -> Result:
    rate, limit = pinned_rate(), link_limit()
    training = Training(args.billions, args.microbatches, str(place / "slots"))
    values = {"pinned_gb_per_s": rate / GB, **overhead(training, args.rounds)}
    compared = min(args.rounds, 3)
    values["torn"] = torn(training, compared)
    training.snap.enabled = False
    values["dcp_pinned_ms"] = median(dcp_stalls(training, args.rounds, place / "dcp"))
    report = training.snap.report()
    values |= {"skipped": float(report.skipped), "failed": float(report.failed)}
    for remark in report.remarks:
        print(remark, file=sys.stderr)
    training.snap.close(remove=True)
    ratios = {"exposed_vs_dcp_pinned": values["dcp_pinned_ms"] / max(values["exposed_ms"], 1e-3)}  # events tell no less
    if limit is not None:
        ratios["pinned_vs_limit"] = rate / limit
    device = torch.cuda.get_device_name()
    size = f"{values['size_gb']:.1f} GB"
    lines = [
        Line(f"{device}: pinned copies vs the link", f"{rate / GB:.1f} GB/s", "" if limit is None else f"{limit / GB:.1f} GB/s"),
        Line(f"longer step with {size} every step, than without", f"{values['overhead']:+.2f} %", f"{values['step_ms']:.0f} ms"),
        Line("wait on the device vs dcp's pinned stager", f"{values['exposed_ms']:.3f} ms", f"{values['dcp_pinned_ms']:.1f} ms"),
        Line("host busy in take", f"{values['boundary_ms']:.2f} ms", ""),
        Line("versions measured, skipped, failed", f"{values['taken']:.0f}, {report.skipped}, {report.failed}", ""),
        Line("torn versions", f"{values['torn']:.0f} of {compared}", ""),
    ]
    return Result(NAME, ratios, values, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--billions", type=float, default=1.0, help="parameters, in billions: 12 bytes of state each")
    parser.add_argument("--microbatches", type=int, default=6, help="of 8192 tokens, in a step")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        Result(NAME, {}, {}, []).publish(args.json)
        return
    memory = args.dir or Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    if why := lacking(args.billions, memory):
        sys.exit(why)
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=memory) as place:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{place}/ranks", rank=0, world_size=1)
        measure(args, Path(place)).publish(args.json)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
