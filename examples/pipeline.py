"""Train the small GPT in pipeline stages (1F1B), with a snapshot of every step taken in the pipeline's bubbles.

    torchrun --standalone --nproc-per-node 2 -m examples.pipeline --directory /dev/shm/gpt --steps 20

Start it again after it was killed, and it goes on from the newest step that every rank holds in memory. `--kill-rank 1
--at-step 9` kills a rank while it copies that step. The last stage prints a JSON line per event.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

import ucformat
from examples.digest import state_digests
from examples.gpt import GPT, GPTConfig, keep_stage, loss_of
from examples.text import TextSampler, load_corpus

BATCH = 16  # samples per step
MICROBATCHES = 4
TIMEOUT = timedelta(seconds=60)  # no step of this size takes nearly as long


class Pipeline:
    """One rank: its stage of the model, optimizer, data, and the engine that snapshots them."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        torch.manual_seed(args.seed)  # the same weights on all ranks, which each then keeps its stage of
        config = GPTConfig(width=args.width)
        self.rank, self.ranks = mesh.get_rank(), mesh.size()
        self.model = GPT(config)
        keep_stage(self.model, self.rank, self.ranks)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=0.1, total_iters=20)
        self.sampler = TextSampler(load_corpus(), config.context)
        self.rng = ucformat.rank_local(torch.get_rng_state(), on_resize="modulo")
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.sampler,
            "rng": self.rng,
        }
        self.snap = ucformat.Snapshotter(self.state, directory=args.directory, mesh=mesh)
        stage = self.snap.stage(self.model, self.rank, self.ranks, torch.device("cpu"))
        self.schedule = self.snap.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.ranks - 1

    def step(self) -> float:
        """Forward, backward and update with the next batch; its mean loss where it is known, else 0."""
        inputs, targets = self.sampler.next_batch(BATCH)
        losses: list[torch.Tensor] = []
        self.optimizer.zero_grad()
        self.schedule.step(*((inputs,) if self.first else ()), target=targets if self.last else None, losses=losses)
        self.optimizer.step()  # waits for what is left of the last step's copies
        self.scheduler.step()
        return torch.stack(losses).mean().item() if self.last else 0.0

    def take(self, step: int) -> None:
        """Begin to snapshot the state as it is now."""
        self.rng.value = torch.get_rng_state()
        self.snap.take(step)

    def restore(self) -> int:
        """Go back to the newest step that all ranks hold; 0 when there is none."""
        restored = self.snap.restore()
        torch.set_rng_state(self.rng.value)
        return restored.step if restored else 0

    def tell(self, event: str, **facts: object) -> None:
        """Print one JSON line, on the last stage."""
        if self.last:
            print(json.dumps({"event": event, **facts}), flush=True)


def train(args: argparse.Namespace, run: Pipeline) -> None:
    """Go on to step `args.steps`, with a snapshot of every step."""
    step = run.restore()
    if run.rank == args.kill_rank:
        run.snap.on_copied = lambda at, copied, total: die_in_mid_copy(at, copied, total, args.at_step)
    tell_state(args, run, "resumed", step)
    while step < args.steps:
        began = time.perf_counter()
        step += 1
        loss = run.step()
        run.tell("step", step=step, loss=loss, seconds=round(time.perf_counter() - began, 3))
        tell_state(args, run, "state", step)
        run.take(step)


def tell_state(args: argparse.Namespace, run: Pipeline, event: str, step: int) -> None:
    tensors = state_digests(run.model, run.optimizer) if args.digests else {}
    run.tell(event, step=step, position=run.sampler.position, tensors=tensors)


def die_in_mid_copy(step: int, copied: int, total: int, victim: int) -> None:
    """SIGKILL this process when a part of version `victim` is copied, and a part is not."""
    if step == victim and copied < total:
        told = json.dumps({"event": "killed", "step": step, "copied": copied, "total": total})
        os.write(sys.stdout.fileno(), f"{told}\n".encode())  # past Python's buffer: nothing is flushed any more
        os.kill(os.getpid(), signal.SIGKILL)


def run_all(args: argparse.Namespace) -> None:
    """Train, and report what became of the snapshots. What refers to the process group is local to this."""
    run = Pipeline(args, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",)))
    train(args, run)
    run.snap.close()
    report = run.snap.report()
    run.tell("snapshots", taken=report.taken, skipped=report.skipped, failed=report.failed, text=str(report))
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)
        run.snap.trace(str(args.traces / f"rank{run.rank}.json"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="where snapshots live, on tmpfs")
    parser.add_argument("--steps", type=int, default=20, help="train up to this step")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--digests", action="store_true", help="report digests of the state after each step")
    parser.add_argument("--kill-rank", type=int, default=-1, help="this rank kills itself (SIGKILL) …")
    parser.add_argument("--at-step", type=int, default=-1, help="… while it copies the state after this step")
    parser.add_argument("--traces", type=Path, help="write each rank's timeline into this directory at the end")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        run_all(args)
    finally:
        gc.collect()  # models and schedulers refer to each other, and to the group: it has to end before the interpreter does
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
