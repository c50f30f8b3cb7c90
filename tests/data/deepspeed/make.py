"""Writes the checkpoints of this folder with DeepSpeed on CPU, and the truth beside each; see README.md.

torchrun --standalone --nproc_per_node=N make.py OUT --stage S [--dtype bf16] [--groups 2] …
"""  # noqa: INP001  # a script, run where DeepSpeed is installed

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import nn


class Net(nn.Module):
    """376 parameters in odd sizes, so that every kind of padding is there, and a buffer. In even ones for tensor parallelism."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        vocab, width, hidden = (16, 8, 12) if options.wide else (13, 7, 11)
        self.emb = nn.Embedding(vocab, width)
        self.fc1 = nn.Linear(width, hidden)
        self.ln = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.head = nn.Linear(width, vocab, bias=False)
        if options.unused:
            self.dead = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor([1.5]))
        if options.tied:
            self.head.weight = self.emb.weight
        if options.frozen:
            self.fc1.requires_grad_(requires_grad=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        h = h + self.fc2(torch.tanh(self.ln(self.fc1(h)))) * self.scale.to(h.dtype)
        return nn.functional.cross_entropy(self.head(h).float(), labels)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--groups", type=int, choices=[1, 2], default=1)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--sub-group", type=int)
    parser.add_argument("--persist", type=int, default=0)
    parser.add_argument("--more", type=int, default=0, help="steps after saving, whose losses are part of the truth")
    flags = (
        "tied",
        "frozen",
        "exclude-frozen",
        "unused",
        "round-robin",
        "elastic",
        "align",
        "accumulate-fp32",
        "fused",
        "offload",
        "wide",
    )
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": options.stage, "contiguous_gradients": True}
    if options.stage == 3:
        zero["stage3_param_persistence_threshold"] = options.persist
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if options.sub_group:
        zero["sub_group_size"] = options.sub_group
    for flag, key in (
        ("round_robin", "round_robin_gradients"),
        ("align", "parameter_alignment"),
        ("elastic", "elastic_checkpoint"),
    ):
        if getattr(options, flag):
            zero[key] = True
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "steps_per_print": 1000}
    config |= {"gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    config["zero_force_ds_cpu_optimizer"] = False
    if options.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if options.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if options.accumulate_fp32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def optimizer(net: Net, options: argparse.Namespace) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    matrices = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "lr": 1e-2}
    vectors = {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-3}
    groups = [matrices, vectors] if options.groups == 2 else [{**matrices, "params": trained}]
    more = {"momentum": 0.9} if options.optimizer == "SGD" else {}
    return getattr(torch.optim, options.optimizer)(groups, lr=1e-2, **more)


def sliced_state(engine: Any, parameter: torch.Tensor, keys: list[str]) -> dict[str, torch.Tensor]:
    """ZeRO-3: DeepSpeed's own gathering."""
    found = {"fp32": safe_get_full_fp32_param(parameter)}
    if engine.global_steps:
        found |= {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
    return {key: tensor.clone() for key, tensor in found.items()}


def even_state(engine: Any, parameter: torch.Tensor, keys: list[str]) -> dict[str, torch.Tensor]:
    """ZeRO-1, 2, BF16_Optimizer: every rank's fragment, put together (DeepSpeed's own gathering has holes)."""
    link, mine = parameter._hp_mapping, None  # where DeepSpeed keeps it
    if link is not None:
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        state = inner.state.get(inner.param_groups[link.param_group_index]["params"][0], {})
        at, n = link.hp_fragment_address.start, link.hp_fragment_address.numel
        parts = {"fp32": link.hp_fragment} | {key: state[key].narrow(0, at, n) for key in keys if key in state}
        mine = (link.lp_fragment_address.start, {key: part.detach().clone() for key, part in parts.items()})
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found = {}
    for key in ("fp32", *keys):
        full = torch.full((parameter.numel(),), float("nan"))
        for start, parts in filter(None, every):
            if key in parts:
                full[start : start + parts[key].numel()] = parts[key]
        if not full.isnan().any():
            found[key] = full.view(parameter.shape)
    return found


def whole_state(engine: Any, keys: list[str]) -> dict[int, dict[str, torch.Tensor]]:
    """ZeRO-0 in fp16: by identity of the parameter, its part of the fused buffers or its own tensors."""
    outer, found = engine.optimizer, {}
    for g, parameters in enumerate(outer.fp16_groups):
        at = 0
        for i, parameter in enumerate(parameters):
            flat = hasattr(outer, "fp32_groups_flat")
            master = outer.fp32_groups_flat[g] if flat else outer.fp32_groups[g][i]
            held = {"fp32": master} | {key: outer.optimizer.state[master][key] for key in keys}
            where = slice(at, at + parameter.numel()) if flat else slice(None)
            found[id(parameter)] = {k: v.detach().flatten()[where].view(parameter.shape).clone() for k, v in held.items()}
            at += parameter.numel()
    return found


def truth(engine: Any, options: argparse.Namespace) -> dict[str, torch.Tensor]:
    keys = {"SGD": ["momentum_buffer"]}.get(options.optimizer, ["exp_avg", "exp_avg_sq"])
    found: dict[str, torch.Tensor] = {}
    whole = whole_state(engine, keys) if options.dtype == "fp16" and not options.stage else {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and options.stage and not options.round_robin:
            gather = sliced_state if options.stage == 3 else even_state
            found |= {f"{name}/{key}": tensor for key, tensor in gather(engine, parameter, keys).items()}
        found |= {f"{name}/{key}": tensor for key, tensor in whole.get(id(parameter), {}).items()}
        with deepspeed.zero.GatheredParameters([parameter], enabled=options.stage == 3):
            found[f"__lp__/{name}"] = parameter.detach().clone().float()
    return found


def allow(options: argparse.Namespace) -> None:
    """Have DeepSpeed do on a CPU what it thinks possible on GPUs only."""
    if options.dtype == "fp16":
        known = [*CPU_Accelerator().supported_dtypes(), torch.float16]
        CPU_Accelerator.is_fp16_supported = lambda self: True
        CPU_Accelerator.supported_dtypes = lambda self: known
    if options.fused:
        deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW  # whose masters are then one flat buffer per group


def train(engine: Any, step: int) -> torch.Tensor:
    """One step; the loss, averaged over the ranks."""
    generator = torch.Generator().manual_seed(100 + step * 10 + dist.get_rank())
    ids, labels = torch.randint(0, 13, (2, 20), generator=generator)
    loss = engine(ids, labels)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def main() -> None:
    options = parse()
    allow(options)
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234)
    net = Net(options)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer(net, options), config=configuration(options))
    for step in range(options.steps):
        train(engine, step)
    live = truth(engine, options)
    client = {"iteration": options.steps, "my_client": {"hello": 1}}
    engine.save_checkpoint(str(options.out), client_state=client, exclude_frozen_parameters=options.exclude_frozen)
    if options.more:
        live["__loss__"] = torch.stack([train(engine, options.steps + step) for step in range(options.more)])
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in live.items()}, options.out / "truth.safetensors")
    dist.barrier()
    dist.destroy_process_group()


main()
