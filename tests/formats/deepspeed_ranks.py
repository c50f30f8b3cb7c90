"""Run under torchrun with the real DeepSpeed: loads checkpoints that we wrote, says what the engines hold, and trains on.

The argument is a JSON list of `Case`s; rank 0 writes a list of results beside it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load_file
from torch import nn

KEYS = ("exp_avg", "exp_avg_sq")
LR = 0.5  # of the script: whatever is loaded has another one


@dataclass
class Case:
    """One checkpoint and how to load it."""

    run: str
    stage: int
    truth: str = ""
    """What every state must be; empty to skip."""
    universal: bool = True
    dtype: str = "fp32"
    accumulate_fp32: bool = False
    groups: int = 1
    sub_group: int = 0
    frozen: bool = False
    tied: bool = False
    steps: int = 2


class Net(nn.Module):
    """The model of tests/data/deepspeed, with other weights."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 7)
        self.fc1 = nn.Linear(7, 11)
        self.ln = nn.LayerNorm(11)
        self.fc2 = nn.Linear(11, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.register_buffer("scale", torch.tensor([9.0]))
        if case.tied:
            self.head.weight = self.emb.weight
        if case.frozen:
            self.fc1.requires_grad_(requires_grad=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        h = h + self.fc2(torch.tanh(self.ln(self.fc1(h)))) * self.scale.to(h.dtype)
        return nn.functional.cross_entropy(self.head(h).float(), labels)


def configuration(case: Case) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.stage}
    if case.stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0} | ({"sub_group_size": case.sub_group} if case.sub_group else {})
    config = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 1000, "zero_optimization": zero}
    config |= {"gradient_clipping": 1.0, "checkpoint": {"load_universal": case.universal}}
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.accumulate_fp32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def groups(net: Net, case: Case) -> list[dict[str, Any]]:
    trained = [p for p in net.parameters() if p.requires_grad]
    if case.groups == 1:
        return [{"params": trained, "weight_decay": 0.3}]
    return [{"params": [p for p in trained if (p.dim() > 1) == matrices], "weight_decay": 0.3} for matrices in (True, False)]


def state_of(engine: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """All of a parameter's state, of all ranks."""
    if hasattr(parameter, "ds_id"):
        found = {"fp32": safe_get_full_fp32_param(parameter)}
        found |= {key: safe_get_full_optimizer_state(parameter, key) for key in KEYS}
        return {key: tensor.clone().view(parameter.ds_shape) for key, tensor in found.items()}
    link, mine = parameter._hp_mapping, None
    if link is not None:
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        state = inner.state[inner.param_groups[link.param_group_index]["params"][0]]
        at, n = link.hp_fragment_address.start, link.hp_fragment_address.numel
        parts = {"fp32": link.hp_fragment} | {key: state[key].narrow(0, at, n) for key in KEYS}
        mine = (link.lp_fragment_address.start, {key: part.detach().clone() for key, part in parts.items()})
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found = {}
    for key in ("fp32", *KEYS):
        full = torch.full((parameter.numel(),), float("nan"))
        for start, parts in filter(None, every):
            full[start : start + parts[key].numel()] = parts[key]
        found[key] = full.view(parameter.shape)
    return found


def wrong(engine: Any, truth: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not as it should be."""
    odd: list[str] = []
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            odd += [
                f"{name}/{key}" for key, t in state_of(engine, parameter).items() if not torch.equal(t, truth[f"{name}/{key}"])
            ]
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            if parameter.requires_grad or not engine.load_universal_checkpoint():
                expected = truth[f"__lp__/{name}" if f"__lp__/{name}" in truth else f"{name}/fp32"]
                odd += [] if torch.equal(parameter.detach(), expected.to(parameter.dtype)) else [name]
    return odd


def run(case: Case) -> dict[str, Any]:
    torch.manual_seed(77)
    net = Net(case)
    optimizer = torch.optim.AdamW(groups(net, case), lr=LR)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=configuration(case))
    path, client = engine.load_checkpoint(case.run)
    found: dict[str, Any] = {"loaded": path is not None, "steps": engine.global_steps, "client": client.get("my_client")}
    found["wrong"] = wrong(engine, load_file(case.truth)) if case.truth else []
    found["groups"] = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found["state_steps"] = sorted({float(state["step"]) for state in inner.state.values() if "step" in state})
    found["scale"] = float(engine.module.scale)
    found["losses"] = []
    with torch.no_grad():
        engine.module.scale.fill_(1.5)
    for step in range(case.steps):
        generator = torch.Generator().manual_seed(100 + step * 10 + dist.get_rank())
        ids, labels = torch.randint(0, 13, (2, 20), generator=generator)
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        dist.all_reduce(loss := loss.detach().clone())
        found["losses"].append(float(loss))
    return found


def main() -> None:
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # gloo does without: nothing is compiled
    deepspeed.init_distributed(dist_backend="gloo")
    path = Path(sys.argv[1])
    results = [run(Case(**case)) for case in json.loads(path.read_text())]
    if dist.get_rank() == 0:
        path.with_suffix(".out").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


main()
