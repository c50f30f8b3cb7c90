"""A run of Megatron goes on in another layout straight from its own files: bit for bit, and with its own next losses."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ucformat
from tests.formats.megatron_fixtures import catalog_of, folder, forms, tensors
from tests.reshard.going_on import groups_of, outcome
from tests.reshard.ranks import on_ranks, same
from ucformat.families import translate

LOSSES = (3.5143167972564697, 3.4489572048187256)  # of Megatron itself: see tests/formats/megatron_core_save.py


def go_on_from_megatron(paths: list[str], first: int, steps: int) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return [_go_on_from_megatron(path, mesh, first, steps) for path in paths]


def _go_on_from_megatron(path: str, mesh: DeviceMesh, first: int, steps: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=32, rms_norm_eps=1e-5)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups_of(model))
    state = {"model": model, "optimizer": optimizer}
    report = ucformat.load(path, into=state, family="llama", allow_unexpected=["scheduler"])
    found, losses = outcome(model, optimizer, report), []
    for step in range(first, first + steps):
        ids = torch.randint(0, 32, (2, 13), generator=torch.Generator().manual_seed(step))
        logits = model(ids[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {**found, "losses": losses}


def test_a_megatron_run_of_two_tensor_ranks_and_two_stages_goes_on_as_fsdp2() -> None:
    expected = tensors(translate(catalog_of("tp2pp2", "legacy"), "llama"))
    paths = [str(folder("tp2pp2", form)) for form in forms("tp2pp2")]
    for found in chain(*on_ranks(2, go_on_from_megatron, paths, 3, len(LOSSES))):
        assert (found["missing"], found["step"], found["steps"]) == ((), 3, {3.0})
        assert [group[:2] for group in found["groups"]] == [(0.01, 0.1), (0.01, 0.0)]
        for name, tensor in found["held"].items():
            assert same(tensor, expected[f"optimizer/{name}"]), name
        assert found["losses"] == pytest.approx(LOSSES, rel=1e-5)
