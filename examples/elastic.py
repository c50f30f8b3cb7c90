"""Train the small GPT on several hosts, lose some for good, and go on in the same processes with those that are left.

    python -m examples.elastic --serve :29400                                        # once: where the hosts meet
    python -m examples.elastic --meet head:29400 --hosts 2:4 --directory /dev/shm/gpt # on each host

Every step is kept in the hosts' memory, with parity on other hosts. When a collective fails, the survivors leave their process
group, meet again, lay the model out for as many as they are, and restore the newest protected step: nothing is restarted,
nothing is read from storage. Each process prints a JSON line per event.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.pipelining import Schedule1F1B

import ucformat
from examples.digest import state_digests
from examples.gpt import GPT, GPTConfig, apply_data_parallel, keep_stage, loss_of
from examples.text import TextSampler, load_corpus
from ucformat.errors import RankFailedError

BATCH = 24  # samples per step of the whole job: 2, 3 and 4 data-parallel ranks share it
MICROBATCHES = 2
TIMEOUT = timedelta(seconds=10)  # of a collective: no step of this size takes nearly as long
FAILURES = (RuntimeError, RankFailedError)
"""What is raised where a peer has died: by a collective, or around it. A mistake of one's own may be among them, too."""
ATTEMPTS = 3  # without a step in between: then it is a mistake of one's own


class Job:
    """The part of this rank in the job, for as long as its process group lasts."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)  # the same weights on all ranks, which each then keeps its part of
        config = GPTConfig(width=args.width)
        self.stages, self.stage = mesh["pp"].size(), mesh["pp"].get_local_rank()
        self.replicas, self.replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
        self.model = GPT(config)
        keep_stage(self.model, self.stage, self.stages)
        apply_data_parallel(self.model, mesh["dp"])  # FSDP2: no rank has a twin of what another one holds
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.sampler = TextSampler(load_corpus(), config.context)
        self.state = {"model": self.model, "optimizer": self.optimizer, "data": self.sampler}
        self.snap = ucformat.Snapshotter(
            self.state, directory=args.directory, mesh=mesh, protect=args.protect, interface=args.address or None
        )
        stage = self.snap.stage(self.model, self.stage, self.stages, torch.device("cpu"), group=mesh["pp"].get_group())
        self.schedule = self.snap.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def step(self) -> float:
        """Forward, backward and update with the next batch; its mean loss, on the ranks of the last stage, else 0."""
        inputs, targets = self.sampler.next_batch(BATCH, self.replica, self.replicas)
        losses: list[torch.Tensor] = []
        first, last = self.stage == 0, self.stage == self.stages - 1
        self.optimizer.zero_grad()
        self.schedule.step(*((inputs,) if first else ()), target=targets if last else None, losses=losses)
        self.optimizer.step()
        return torch.stack(losses).mean().item() if last else 0.0


def layout(ranks: int) -> tuple[int, int]:
    """Pipeline stages and data-parallel ranks of a job of as many ranks."""
    return (2, ranks // 2) if ranks % 2 == 0 else (1, ranks)


def make_mesh(stages: int, replicas: int) -> DeviceMesh:
    """Groups of `init_device_mesh` wait for half an hour; these notice within seconds that a peer is gone."""
    ranks = torch.arange(stages * replicas).view(stages, replicas)
    pp, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=TIMEOUT)
    dp, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=TIMEOUT)
    return DeviceMesh.from_group([pp, dp], "cpu", mesh=ranks, mesh_dim_names=("pp", "dp"))


def train(args: argparse.Namespace, tell: Tell) -> None:
    """Go on to step `args.steps`. What refers to the process group is local to this."""
    stages, replicas = layout(dist.get_world_size())
    job = Job(args, make_mesh(stages, replicas))
    whole = False
    try:
        restored = job.snap.restore()
        step = restored.step if restored else 0
        tell("resumed", step=step, layout=f"PP{stages}×DP{replicas}", tensors=_digests(args, job), **_sources(restored))
        while step < args.steps:
            first, loss = job.sampler.position, job.step()
            step += 1
            samples = [first, job.sampler.position]
            tell("step", step=step, loss=_mean(loss, stages), samples=samples, tensors=_digests(args, job))
            job.snap.take(step)
        whole = True
    finally:
        job.snap.close(wait=whole)
        tell("left", restorable=job.snap.report().restorable)
    tell("snapshots", text=str(job.snap.report()))


def _digests(args: argparse.Namespace, job: Job) -> dict[str, str]:
    return state_digests(job.model, job.optimizer) if args.digests else {}


def _sources(restored: ucformat.Restored | None) -> dict[str, object]:
    if restored is None:
        return {"source": "none"}
    return {
        "source": restored.source,
        "served": dict(restored.served),
        "computed": list(restored.computed),
        "passed": restored.passed_over,
    }


def _mean(loss: float, stages: int) -> float:
    """The loss of the whole batch, on every rank."""
    total = torch.tensor(loss)
    dist.all_reduce(total)
    return total.item() * stages / dist.get_world_size()


def meet(handler: RendezvousHandler) -> None:
    """Form a process group of all hosts that are there."""
    found = handler.next_rendezvous()
    dist.init_process_group("gloo", store=found.store, rank=found.rank, world_size=found.world_size, timeout=TIMEOUT)


def run(args: argparse.Namespace) -> None:
    handler, tell = _handler(args), Tell()
    failed_at: list[int] = []
    while True:
        meet(handler)
        tell("met", rank=dist.get_rank(), ranks=dist.get_world_size())
        try:
            train(args, tell)
            dist.barrier()
            return
        except FAILURES as error:
            failed_at.append(tell.steps)
            if failed_at[-ATTEMPTS:] == [tell.steps] * ATTEMPTS:
                raise
            tell("failed", why=f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])
        finally:
            gc.collect()  # models and schedules refer to each other, and to the group
            dist.destroy_process_group()


class Tell:
    """Prints a JSON line per event, with the time."""

    def __init__(self) -> None:
        self.steps = 0
        """That were trained so far."""

    def __call__(self, event: str, **facts: object) -> None:
        self.steps += event == "step"
        print(json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **facts}), flush=True)


def _handler(args: argparse.Namespace) -> RendezvousHandler:
    """The rendezvous of torchrun, used in the training process: a host that says nothing for three seconds is out."""
    fewest, _, most = args.hosts.partition(":")
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=args.meet,
            run_id="elastic",
            min_nodes=int(fewest),
            max_nodes=int(most or fewest),
            local_addr=args.address or None,
            is_host="false",
            last_call_timeout=4,
            keep_alive_interval=1,
            keep_alive_max_attempt=3,
        )
    )


def serve(endpoint: str) -> None:
    """The store that hosts meet in, until this is killed: a host of its own, as its loss would end the job."""
    host, _, port = endpoint.rpartition(":")
    store = dist.TCPStore(host or "0.0.0.0", int(port), is_master=True, wait_for_workers=False)
    print(json.dumps({"event": "serving", "port": store.port}), flush=True)
    signal.pause()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="[HOST]:PORT", help="be the place where hosts meet, and nothing else")
    parser.add_argument("--meet", metavar="HOST:PORT", help="where the hosts meet")
    parser.add_argument("--hosts", default="2:4", metavar="MIN:MAX", help="train with as many")
    parser.add_argument("--address", default="", help="of this host, as the others reach it")
    parser.add_argument("--directory", help="where snapshots live, on tmpfs")
    parser.add_argument("--protect", default="xor", help="as for Snapshotter")
    parser.add_argument("--steps", type=int, default=20, help="train up to this step")
    parser.add_argument("--digests", action="store_true", help="report digests of the state after each step")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.serve:
        with suppress(KeyboardInterrupt):
            serve(args.serve)
        return
    if not args.meet or not args.directory:
        sys.exit("elastic: give --meet and --directory, or --serve (see --help)")
    run(args)


if __name__ == "__main__":
    main()
