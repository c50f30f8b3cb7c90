"""A run of DeepSpeed goes on in another layout straight from its own files: bit for bit, and with its own next losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ucformat
from tests.formats.deepspeed_fixtures import MORE
from tests.reshard.going_on import groups_of, outcome, whole
from tests.reshard.ranks import on_ranks, same


class Net(nn.Module):
    """The model of tests/data/deepspeed with `--wide`, and other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.fc1 = nn.Linear(8, 12)
        self.ln = nn.LayerNorm(12)
        self.fc2 = nn.Linear(12, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor([9.0]))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        h = h + self.fc2(torch.tanh(self.ln(self.fc1(h)))) * self.scale
        return nn.functional.cross_entropy(self.head(h), labels)


def clip(model: nn.Module) -> None:
    """As DeepSpeed's `gradient_clipping` of 1; torch's own takes one mesh only."""
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    norm = torch.stack([whole(grad).norm() for grad in gradients]).norm()
    for grad in gradients:
        grad.mul_(float((1.0 / (norm + 1e-6)).clamp(max=1.0)))


def go_on_from_deepspeed(path: str, first: int, steps: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    columns, rows = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"emb": rows, "fc1": columns, "fc2": rows, "head": columns})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(groups_of(model))
    report = ucformat.load(path, into={"model": model, "optimizer": optimizer}, allow_unexpected=["client"])
    found, losses = outcome(model, optimizer, report), []
    for step in range(first, first + steps):
        loss = torch.zeros(())
        for rank in range(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2):
            generator = torch.Generator().manual_seed(100 + step * 10 + rank)  # what this rank of DeepSpeed saw
            ids, labels = torch.randint(0, 13, (2, 20), generator=generator)
            loss = loss + model(ids, labels) / 2
        optimizer.zero_grad()
        loss.backward()
        clip(model)
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(float(mean) / dist.get_world_size())
    return {**found, "losses": losses, "scale": float(model.scale)}


def test_a_zero_3_run_of_4_ranks_goes_on_as_fsdp2_and_tensor_parallel() -> None:
    truth = load_file(MORE / "z3n4" / "truth.safetensors")
    expected = truth.pop("__loss__").tolist()
    for found in on_ranks(4, go_on_from_deepspeed, str(MORE / "z3n4"), 3, len(expected)):
        assert (found["missing"], found["step"], found["steps"], found["scale"]) == ((), 3, {3.0}, 1.5)
        assert found["groups"] == [(0.01, 0.1, (0.9, 0.999)), (0.005, 0.0, (0.9, 0.999))]
        assert {name for name in truth if not name.startswith("__lp__/")} == set(found["held"])
        for name, tensor in found["held"].items():
            assert same(tensor, truth[name]), name
        assert found["losses"] == pytest.approx(expected, rel=1e-5)
