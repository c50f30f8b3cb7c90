"""What a run holds after a foreign checkpoint was loaded straight into it, and the groups that it starts with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import ucformat

STATES = ("exp_avg", "exp_avg_sq")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`<parameter>/<state>` of all ranks together."""
    found: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        found |= {f"{name}/fp32": whole(param)} | {f"{name}/{key}": whole(optimizer.state[param][key]) for key in STATES}
    return found


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors, as the frameworks had them, with hyper-parameters that are neither's."""
    split = [[p for p in model.parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
    return [{"params": params, "lr": 7.0, "weight_decay": 7.0} for params in split]


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer, report: ucformat.LoadReport) -> dict[str, Any]:
    return {
        "held": held(model, optimizer),
        "groups": [(group["lr"], group["weight_decay"], tuple(group["betas"])) for group in optimizer.param_groups],
        "steps": {float(state["step"]) for state in optimizer.state.values()},
        "missing": report.missing,
        "unexpected": report.unexpected,
        "step": report.step,
    }
