"""Train the small GPT under torchrun in any layout, save with ucformat, resume in any other layout.

    torchrun --standalone --nproc-per-node 4 -m examples.train --mesh dp=2,tp=2 --steps 8 --save-to runs/a --save-every 4
    torchrun --standalone --nproc-per-node 3 -m examples.train --mesh dp=3 --steps 12 --resume-from runs/a

One rank prints a JSON line per event. Mesh axes: `pp` (pipeline stages), `dp` (FSDP2), `tp` (tensor parallel).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ucformat
from examples.digest import state_digests
from examples.gpt import GPT, GPTConfig, apply_data_parallel, apply_tensor_parallel, keep_stage, loss_of
from examples.text import TextSampler, load_corpus
from ucformat.reshard.state.markers import RankLocalItem

BATCH = 12  # samples per step of the whole job: 2 and 3 data-parallel ranks both divide it
MICROBATCHES = 4  # per step of a pipeline
AXES = ("pp", "dp", "tp")  # outermost first: tensor parallel ranks are neighbours
TIMEOUT = timedelta(seconds=60)  # no step or save of this size takes nearly as long


@dataclass(frozen=True, slots=True)
class Layout:
    """The device mesh and this rank's place in it. Axes that the mesh lacks have size 1."""

    mesh: DeviceMesh
    sizes: dict[str, int]

    @staticmethod
    def parse(text: str) -> Layout:
        """A mesh over all ranks from `dp=2,tp=2`. Raises ValueError when it does not match the number of ranks."""
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
        if not set(sizes) <= set(AXES) or math.prod(sizes.values()) != dist.get_world_size():
            raise ValueError(f"{text!r} is no mesh of {dist.get_world_size()} ranks over the axes {', '.join(AXES)}")
        names = [axis for axis in AXES if axis in sizes]
        mesh = init_device_mesh("cpu", tuple(sizes[n] for n in names), mesh_dim_names=tuple(names))
        return Layout(mesh, sizes)

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def rank(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis) if axis in self.sizes else 0

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh[axis].get_group()

    @property
    def reports(self) -> bool:
        """Whether this rank prints: it has the loss (last stage) and is the first of its peers."""
        return self.rank("pp") == self.size("pp") - 1 and self.rank("dp") == self.rank("tp") == 0


class Trainer:
    """Model, optimizer, schedule and data of one rank."""

    def __init__(self, layout: Layout, seed: int) -> None:
        torch.manual_seed(seed)  # the same weights on all ranks, which each then keeps its part of
        config = GPTConfig()
        self.layout = layout
        self.model = GPT(config)
        if "pp" in layout.sizes:
            keep_stage(self.model, layout.rank("pp"), layout.size("pp"))
        if "tp" in layout.sizes:
            apply_tensor_parallel(self.model, layout.mesh["tp"])
        if "dp" in layout.sizes:
            apply_data_parallel(self.model, layout.mesh["dp"])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=0.1, total_iters=20)
        self.sampler = TextSampler(load_corpus(), config.context)
        self.pipeline = self._pipeline() if "pp" in layout.sizes else None

    def _pipeline(self) -> Schedule1F1B:
        stage = PipelineStage(
            self.model,
            self.layout.rank("pp"),
            self.layout.size("pp"),
            torch.device("cpu"),
            group=self.layout.group("pp"),
        )
        return Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def state(self, rng: RankLocalItem | None = None) -> dict[str, object]:
        """What a checkpoint holds: handed to save, and filled in place by load. `rng` is this rank's own by default."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.sampler,
            "rng": rng or rank_rng(),
        }

    def backward(self) -> Tensor:
        """Forward and backward of the next global batch; its mean loss (NaN on stages that don't see it)."""
        inputs, targets = self.sampler.next_batch(BATCH, self.layout.rank("dp"), self.layout.size("dp"))
        self.optimizer.zero_grad()
        if self.pipeline is None:
            loss = loss_of(self.model(inputs), targets)
            loss.backward()
            loss = loss.detach().clone()
        else:
            loss = self._pipelined(self.pipeline, inputs, targets)
        if self.layout.size("dp") > 1:
            dist.all_reduce(loss, group=self.layout.group("dp"))
        return loss / self.layout.size("dp")

    def _pipelined(self, pipeline: Schedule1F1B, inputs: Tensor, targets: Tensor) -> Tensor:
        first = self.layout.rank("pp") == 0
        last = self.layout.rank("pp") == self.layout.size("pp") - 1
        losses: list[Tensor] = []
        pipeline.step(*((inputs,) if first else ()), target=targets if last else None, losses=losses)
        return torch.stack(losses).mean().detach() if last else torch.tensor(math.nan)

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()


def rank_rng() -> RankLocalItem:
    """The random state, of which each rank has its own; other numbers of ranks take over what there is in turn."""
    return ucformat.rank_local(torch.get_rng_state(), on_resize="modulo")


def train(args: argparse.Namespace) -> None:
    """Resume if asked, then train to step `args.steps`, saving on the way."""
    trainer = Trainer(Layout.parse(args.mesh), args.seed)
    step = 0
    if args.resume_from:
        step = resume(trainer, args)
    while step < args.steps:
        began = time.perf_counter()
        step += 1
        if step == args.at_step and dist.get_rank() == args.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = trainer.backward()
        trainer.update()
        report(trainer, "step", step=step, loss=loss.item(), seconds=round(time.perf_counter() - began, 3))
        if args.save_to and step % args.save_every == 0:
            began = time.perf_counter()
            ucformat.save(args.save_to, trainer.state(), step=step, keep=3)
            report(trainer, "saved", step=step, seconds=round(time.perf_counter() - began, 3))
            if args.digests:
                tell_digests(trainer, step)


def resume(trainer: Trainer, args: argparse.Namespace) -> int:
    """Load the newest checkpoint onto this layout; the step it was saved at."""
    rng = rank_rng()
    began = time.perf_counter()
    step = ucformat.load(args.resume_from, into=trainer.state(rng)).step or 0
    torch.set_rng_state(rng.value)
    report(trainer, "resumed", step=step, seconds=round(time.perf_counter() - began, 3))
    if args.digests:
        tell_digests(trainer, step)
    if args.resave_to:
        ucformat.save(args.resave_to, trainer.state(), step=step)
    return step


def tell_digests(trainer: Trainer, step: int) -> None:
    """Report the state as torch itself sees it (see `digest`)."""
    tensors = state_digests(trainer.model, trainer.optimizer)
    rates = trainer.scheduler.get_last_lr()
    report(trainer, "state", step=step, position=trainer.sampler.position, learning_rate=rates, tensors=tensors)


def report(trainer: Trainer, event: str, **facts: object) -> None:
    """Print one JSON line, on one rank."""
    if trainer.layout.reports:
        print(json.dumps({"event": event, **facts}), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", required=True, help="axes and sizes, e.g. dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=20, help="train up to this step")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--save-to", help="run directory for checkpoints")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--resume-from", help="run directory or checkpoint to start from")
    parser.add_argument("--resave-to", help="save again at once after resuming, to compare")
    parser.add_argument("--digests", action="store_true", help="report digests of the state after each save and load")
    parser.add_argument("--kill-rank", type=int, default=-1, help="this rank kills itself (SIGKILL) …")
    parser.add_argument("--at-step", type=int, default=-1, help="… in this step, while the others wait for it")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # FSDP warns of in-place operations on the model's output; nothing here does any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
