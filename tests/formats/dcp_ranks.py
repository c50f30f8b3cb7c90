"""What the ranks of the DCP tests run: stock saves of sharded state, and our writer read back by stock DCP.

Started as `python dcp_ranks.py ACTION FOLDER`, one process per rank over gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.containers.file_image import ByteRequest
from ucformat.formats import dcp as our_dcp
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.group import current
from ucformat.storage.open import open_store

UNEVEN = {"rows": (1023, 4), "two": (2, 3), "thirty": (31,), "columns": (3, 10), "empty": (0, 5)}


def full(name: str, *shape: int) -> torch.Tensor:
    """The truth: equal on every rank and in the test."""
    seed = sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 36, bias=True)
        self.down = torch.nn.Linear(36, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def save_stock(folder: Path) -> None:
    """Stock DCP saves: uneven shards of 4 ranks, two mesh dimensions on one tensor dimension, a trained FSDP2×TP model."""
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    uneven: dict[str, Any] = {
        name: distribute_tensor(full(name, *shape), line, [Shard(1 if name == "columns" else 0)])
        for name, shape in UNEVEN.items()
    }
    uneven["replicated"] = distribute_tensor(full("replicated", 5), line, [Replicate()])
    uneven["mine"] = {"rank": 7, "list": [1, 2]}
    save({"model": uneven}, checkpoint_id=folder / "uneven")
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    square = distribute_tensor(full("square", 10, 7), grid, [Shard(0), Shard(0)])
    save({"model": {"square": square}}, checkpoint_id=folder / "grid")
    torch.manual_seed(0)
    model = Block()
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optim": states}, checkpoint_id=folder / "fsdp_tp")
    truth = {f"model/{name}": whole(tensor) for name, tensor in weights.items()}
    by_name: Any = states["state"]
    for name, held in by_name.items():
        truth.update({f"optimizer/{name}/{key}": whole(value) for key, value in held.items()})
    if dist.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")


def whole(tensor: Any) -> torch.Tensor:
    out: torch.Tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return out


def write_ours(folder: Path) -> None:
    """Our writer under a group of ranks; then stock DCP loads what it wrote, onto shards."""
    tensors = {"model/w": full("w", 9, 4), "model/b": full("b", 9), "optimizer/w/exp_avg": full("exp_avg", 9, 4)}
    targets: list[OutputBox] = []
    for name, tensor in tensors.items():
        spec = TensorSpec(name, "F32", tuple(tensor.shape))
        rest = spec.shape[1:]
        targets += [OutputBox(spec, Box((at, *(0 for _ in rest)), (3, *rest))) for at in (0, 3, 6)]
    values = {"optimizer": {"param_groups": [{"lr": 0.5, "params": ["w"]}]}, "step": 3}

    def fill(parts: Sequence[ByteRequest]) -> None:
        for part in parts:
            target = targets[part.piece]
            image = tensors[target.name][target.box.slices].contiguous().numpy().tobytes()
            part.out[:] = np.frombuffer(image, dtype=np.uint8)[part.start : part.stop]

    store = open_store(str(folder / "ours"))
    our_dcp.write(WriteJob(store, targets, fill, values, {"model/tied": "model/w"}, group=current()))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        "model": {
            "w": distribute_tensor(torch.zeros(9, 4), mesh, [Shard(1)]),
            "b": torch.zeros(9),
            "tied": distribute_tensor(torch.zeros(9, 4), mesh, [Shard(0)]),
        },
        "optimizer": {
            "state": {"w": {"exp_avg": distribute_tensor(torch.zeros(9, 4), mesh, [Shard(0)])}},
            "param_groups": [{"lr": 0.0, "params": [], "param_names": []}],
        },
        "step": 0,
    }
    load(state, checkpoint_id=folder / "ours")
    assert torch.equal(whole(state["model"]["w"]), tensors["model/w"])
    assert torch.equal(whole(state["model"]["tied"]), tensors["model/w"])
    assert torch.equal(state["model"]["b"], tensors["model/b"])
    assert torch.equal(whole(state["optimizer"]["state"]["w"]["exp_avg"]), tensors["optimizer/w/exp_avg"])
    assert state["optimizer"]["param_groups"] == [{"lr": 0.5, "params": ["w"], "param_names": ["w"]}]
    assert state["step"] == 3


def fail_in_one_rank(folder: Path) -> None:
    """One rank can't get its bytes: every rank must raise, and nothing may be there."""
    spec = TensorSpec("model/w", "F32", (8, 4))
    targets = [OutputBox(spec, Box((at, 0), (4, 4))) for at in (0, 4)]

    def fill(parts: Sequence[ByteRequest]) -> None:
        if dist.get_rank() == 1:
            raise OSError("no space left on device")

    try:
        our_dcp.write(WriteJob(open_store(str(folder / "failed")), targets, fill, group=current()))
    except Exception as error:
        (folder / f"failed.{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")


ACTIONS: dict[str, Callable[[Path], None]] = {"save_stock": save_stock, "write_ours": write_ours, "fail": fail_in_one_rank}

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for action in sys.argv[2:]:
        ACTIONS[action](Path(sys.argv[1]))
    dist.destroy_process_group()
