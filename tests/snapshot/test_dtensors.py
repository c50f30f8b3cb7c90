"""DTensors count what is written through them themselves; their local tensors don't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ucformat
from tests.reshard.ranks import on_ranks
from ucformat.snapshot.snapshotter import Snapshotter


def written_unseen(directory: str, whole: bool) -> tuple[list[int], list[str], int | None]:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
    model.register_buffer("free", distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    if whole:  # a state that is looked at in full every time
        state["optimizer"].register_state_dict_post_hook(lambda *_: None)
    model.weight.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    state["optimizer"].step()
    with Snapshotter(state, directory=directory, hash_every=0, mode="blocking") as snap, torch.no_grad():
        for step in range(1, 7):
            snap.take(step)
            model.get_buffer("free").add_(1)  # copied in `take`
            if step == 3:
                model.weight.add_(1)
            if step == 5:
                state["optimizer"].state[model.weight]["momentum_buffer"].mul_(2)
            snap.deadline()
    return [line.step for line in snap.report().done()], list(snap.report().failures), ucformat.open(directory).step


def test_writes_through_dtensors_between_take_and_deadline_are_seen(tmp_path: Path) -> None:
    for whole in (False, True):
        ((taken, failures, newest),) = on_ranks(1, written_unseen, str(tmp_path / f"slots-{whole}"), whole)
        assert (taken, newest) == ([1, 2, 4, 6], 6)
        assert ["model/weight changed" in failures[0], "momentum_buffer changed" in failures[1]] == [True, True]
