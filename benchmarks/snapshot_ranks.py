"""One rank of `benchmarks.snapshot`: blocks of steps with and without snapshots, DCP's stalls, and long runs."""

from __future__ import annotations

import gc
import json
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ucformat
from benchmarks.snapshot_loop import Loop, Setting

BLOCK = 6  # steps with, then as many without snapshots; the first of each is dropped
PLANNING = 8  # steps from the first one until a plan is in force, and corrected once
SETTLING = 32  # steps until plans have met what they change themselves: waiting ranks make longer windows for others
VERIFY_EVERY = 20  # snapshots of the long run
SETTLED = 5  # a fifth of the snapshots are taken until memory must not grow: allocators have what they need
Told = dict[str, float]


def all_ranks(value: float) -> list[float]:
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def overhead(loop: Loop, pairs: int) -> Told:
    """Alternating blocks: step times, and what the engine says training waited."""
    for _ in range(PLANNING):
        loop.step()
    times: dict[bool, list[float]] = {True: [], False: []}
    steps: list[int] = []
    for block in range(2 * pairs):
        on = block % 2 == 0
        for at in range(BLOCK):
            seconds = loop.step(snapshots=on)
            if at:
                times[on].append(seconds)
                steps += [loop.done - 1] * on  # the snapshot that this step completed
    loop.snap.deadline()
    report = loop.snap.report()
    seen = [step for step in report.done() if step.step in set(steps)]
    mean = {on: [sum(all_ranks(t)) / dist.get_world_size() for t in times[on]] for on in times}  # ranks' periods are one
    waits = all_ranks(median(step.waited_ms for step in seen))
    worst = waits.index(max(waits))
    return {
        "overhead": (median(mean[True]) / median(mean[False]) - 1) * 100,
        "step_ms": median(mean[False]) * 1e3,
        "waited_ms": waits[worst],
        "exposed_ms": all_ranks(median(step.exposed_ms for step in seen))[worst],
        "boundary_ms": all_ranks(median(step.boundary_ms for step in seen))[worst],
        "skipped": sum(all_ranks(report.skipped + report.failed)),
        "in_windows": min(all_ranks(sum(s.windowed for s in seen) / max(1, sum(s.nbytes for s in seen)))),
        "gib": loop.nbytes / 2**30,
    }


def dcp_async(loop: Loop, rounds: int, place: Path, group: Any) -> float:
    """Milliseconds for which `async_save` with its default stager keeps training waiting."""
    stalls = []
    for number in range(rounds + 1):
        loop.step(snapshots=False)
        began = time.perf_counter()
        upload: Any = state_dict_saver.async_save(dict(loop.tensors()), checkpoint_id=place / str(number), process_group=group)
        stalls.append((time.perf_counter() - began) * 1e3)
        upload.result()  # not counted
        _clear(place)
    return median(stalls[1:])


def dcp_best(loop: Loop, rounds: int, place: Path, group: Any) -> float:
    """The same with a stager that is kept and copies on a thread, to memory that it has: a wait before the update is left."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)  # pinned memory and asynchronous copies need CUDA
    stalls = []
    for number in range(rounds + 2):
        began = time.perf_counter()
        saving: Any = state_dict_saver.async_save(
            dict(loop.tensors()), checkpoint_id=place / str(number), process_group=group, async_stager=stager
        )
        stall = time.perf_counter() - began
        loop.compute()
        began = time.perf_counter()
        saving.staging_completion.result()
        stalls.append((stall + time.perf_counter() - began) * 1e3)
        loop.update()
        saving.upload_completion.result()  # not counted
        _clear(place)
    stager.close()
    return median(stalls[2:])  # the first ones make the memory


def _clear(place: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place, ignore_errors=True)
    dist.barrier()


def spill(loop: Loop, steps: int) -> Told:
    """Bubbles smaller than the state, which may not be copied beside compute: predicted and measured waits."""
    for _ in range(SETTLING + steps):
        loop.step()
    loop.snap.deadline()
    seen = loop.snap.report().done()[-steps - 1 : -1]  # the last one met no bubble
    predicted = all_ranks(median(step.predicted_ms for step in seen))
    measured = all_ranks(median(step.exposed_ms for step in seen))
    worst = measured.index(max(measured))
    return {"exposed_predicted_ms": predicted[worst], "exposed_measured_ms": measured[worst]}


def long_run(loop: Loop, directory: str, count: int) -> Told:
    """Many snapshots in a row: memory stays flat, and every so many are compared bit for bit with a copy of the state."""
    verified, resident, files = 0, [0.0, 0.0], [0.0, 0.0]
    for number in range(1, count + 1):
        loop.step()
        if number in (count // SETTLED, count):
            gc.collect()
            at = int(number == count)
            resident[at], files[at] = _resident_mb(), _files_mb(directory)
        if number % VERIFY_EVERY == 0:
            truth = {name: tensor.clone() for name, tensor in loop.tensors().items()}
            loop.compute()
            loop.update()  # completes the snapshot of the state before
            dist.barrier()
            found = ucformat.open(directory)
            same = all(torch.equal(found[name][...], tensor) for name, tensor in truth.items())
            verified += all(all_ranks(float(same and found.step == loop.done - 1)))
            dist.barrier()
            loop.snap.take(loop.done)
    report = loop.snap.report()
    return {
        "snapshots": float(report.taken),
        "snapshots_skipped": float(report.skipped + report.failed),
        "verified": float(verified),
        "rss_growth_mb": max(all_ranks(resident[1] - resident[0])),
        "tmpfs_growth_mb": max(all_ranks(files[1] - files[0])),
    }


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmRSS")


def _files_mb(directory: str) -> float:
    return sum(os.stat(f"{at}/{name}").st_blocks for at, _, names in os.walk(directory) for name in names) * 512 / 1e6


def measure(mib: float, rounds: int, count: int, directory: Path) -> None:
    """Called on every rank under torchrun; rank 0 prints all values as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    group = dist.new_group(backend="gloo")  # DCP's, which works beside the pipeline
    told: Told = {}
    small = mib < 256
    wait = 0.005 if small else 0.1

    def with_loop(name: str, setting: Setting, work: Callable[[Loop, str], Told]) -> None:
        place = str(directory / name)
        loop = Loop(setting, place)
        found = work(loop, place)
        told.update({f"{key}_{name}" if name else key: value for key, value in found.items()})
        loop.close()
        del loop
        gc.collect()
        dist.barrier()

    def beside_dcp(loop: Loop, place: str) -> Told:
        found = overhead(loop, rounds)
        found["dcp_async_ms"] = dcp_async(loop, rounds, directory / "dcp", group)
        found["dcp_best_ms"] = dcp_best(loop, rounds, directory / "dcp", group)
        return found

    with_loop("1f1b_timed", Setting("1f1b", "timed", mib, wait), beside_dcp)
    with_loop("interleaved_timed", Setting("interleaved", "timed", mib, wait), lambda loop, _: overhead(loop, rounds))
    with_loop("1f1b_matmul", Setting("1f1b", "matmul", mib), lambda loop, _: overhead(loop, rounds))
    with_loop("interleaved_matmul", Setting("interleaved", "matmul", mib), lambda loop, _: overhead(loop, rounds))
    # without checksums: two keepers on two cores would be what is measured
    small_bubbles = Setting("1f1b", "timed", 2 * mib, wait / 5, "bubble", hash_every=0)
    with_loop("spill", small_bubbles, lambda loop, _: spill(loop, 4 * rounds))
    long = Setting("1f1b", "timed", mib / 8, wait / 10, whole_update=True)
    with_loop("long", long, lambda loop, place: long_run(loop, place, count))
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()
