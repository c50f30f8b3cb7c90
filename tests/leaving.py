"""A rank that joins a group, uses ucformat for the first time, and leaves: `torchrun -m tests.leaving PART DIRECTORY`.

Prints how many threads gloo has before the group is left, and after. Nothing here may import ucformat, or
torch.distributed.fsdp and the like, before the group is there. But optimizers, DDP and DTensors import that themselves when
the first is made (torch 2.13), and it keeps the group that is alive by then: parts in `AHEAD` import it first, as the
documentation advises.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    part, directory = sys.argv[1:]
    if part in AHEAD:
        import_module("torch.distributed.fsdp")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    PARTS[part](directory)
    gc.collect()  # ahead of the group: what DDP leaves behind, were it the last to let go of it, would wait for gloo with the GIL
    dist.barrier()
    before = gloo_threads()
    dist.destroy_process_group()
    print(f"{before} {gloo_threads()}\n", end="", flush=True)  # in one piece: both ranks write to the same pipe


def gloo_threads() -> int:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop")


def saved(directory: str) -> None:
    import ucformat

    model = nn.Linear(4, 4)
    ucformat.save(directory, {"model": model, "step": 1}, step=1)
    assert ucformat.load(directory, into={"model": model, "step": 0}).step == 1


def later(directory: str) -> None:
    import ucformat

    model = nn.Linear(4, 4)
    ucformat.save(directory, {"model": model, "step": 1}, step=1, wait=False).wait()


def sharded(directory: str) -> None:
    import ucformat

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    rows, columns = (distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(dim)]) for dim in (0, 1))
    ucformat.save(directory, {"weight": rows}, step=1)
    assert ucformat.load(directory, into={"weight": columns}).step == 1


def foreign(directory: str) -> None:
    import ucformat

    source, out = f"{directory}/source", f"{directory}/out"
    if dist.get_rank() == 0:
        Path(directory).mkdir()
        torch.save({"model": {"weight": torch.ones(2)}}, source)
    dist.barrier()
    ucformat.convert(source, out, to="hf")
    for path in (source, out):
        ucformat.load(path, into={"model": {"weight": torch.zeros(2)}})


def snapshots(directory: str) -> None:
    import ucformat

    model = nn.Linear(4, 4)
    snap = ucformat.Snapshotter({"model": model}, directory=directory, on_error="raise")
    for step in (1, 2, 3):
        with snap.compute():
            gradients = torch.autograd.grad(model(torch.rand(2, 4)).sum(), list(model.parameters()))
        snap.deadline()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient)
        snap.take(step)
    snap.close()
    assert snap.report().failed == 0


def trained(directory: str) -> None:
    import ucformat

    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    snap = ucformat.Snapshotter(state, directory=f"{directory}/slots", on_error="raise")
    for step in (1, 2, 3):
        with snap.compute():
            model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        snap.take(step)
    snap.close()
    assert snap.report().failed == 0
    ucformat.save(f"{directory}/run", state, step=3)
    assert ucformat.load(f"{directory}/run", into=state).step == 3


PARTS = {f.__name__: f for f in (saved, later, foreign, snapshots, sharded, trained)}
AHEAD = ("sharded", "trained")

if __name__ == "__main__":
    main()
