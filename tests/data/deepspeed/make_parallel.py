"""Writes the checkpoints with pipeline, tensor and expert parallelism of this folder, and the truth beside each; see README.md.

torchrun --standalone --nproc_per_node=N make_parallel.py OUT {pipe,tensor,experts} [--pp P] [--tp T] [--ep E] …
"""  # noqa: INP001  # a script, run where DeepSpeed is installed

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups as ds_groups
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

KEYS = ("exp_avg", "exp_avg_sq")
HIDDEN = 16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=["pipe", "tensor", "experts"])
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    for axis in ("pp", "tp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    for flag in ("tied", "frozen", "groups", "data-first", "gqa", "accumulate-fp32"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


# --- models --------------------------------------------------------------------------------------------------------


class Emb(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(13, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(ids)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(7, 11), nn.Linear(11, 7)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.fc2(torch.tanh(self.fc1(h))) * self.scale.to(h.dtype)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 13, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.lin(h)


def tied_head(module: Emb, h: torch.Tensor) -> torch.Tensor:
    return F.linear(h, module.word_embeddings.weight)


def pipe(options: argparse.Namespace) -> PipelineModule:
    tied = {"typename": Emb, "tied_weight_attr": "word_embeddings.weight"}
    first = TiedLayerSpec("embed", **tied) if options.tied else LayerSpec(Emb)
    last = TiedLayerSpec("embed", forward_fn=tied_head, **tied) if options.tied else LayerSpec(Head)
    layers = [first, LayerSpec(Block), torch.nn.Tanh(), LayerSpec(Block), LayerSpec(nn.LayerNorm, 7), last]
    data = dist.get_world_size() // options.pp // options.tp
    topology = PipeModelDataParallelTopology(num_pp=options.pp, num_mp=options.tp, num_dp=data)
    return PipelineModule(layers=layers, topology=topology, partition_method="uniform", loss_fn=pipe_loss)


def pipe_loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.reshape(-1, 13).float(), labels.reshape(-1))


class Attention(nn.Module):
    """With `gqa`, a fused projection of 4 query heads and 2 key and value heads."""

    def __init__(self, *, gqa: bool) -> None:
        super().__init__()
        self.parts = [HIDDEN, HIDDEN // 2, HIDDEN // 2] if gqa else [HIDDEN] * 3
        self.qkv, self.o_proj = nn.Linear(HIDDEN, sum(self.parts)), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        cut = self.qkv(h)
        share = sum(self.parts) // cut.shape[-1]
        q, k, v = cut.split([part // share for part in self.parts], dim=-1)
        times = q.shape[-1] // k.shape[-1]
        return self.o_proj(torch.sigmoid(q) * torch.tanh(k.repeat(1, times)) * v.repeat(1, times))


class Layer(nn.Module):
    def __init__(self, *, gqa: bool) -> None:
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(HIDDEN), Attention(gqa=gqa)
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.attn(self.ln(h))
        return h + self.down_proj(torch.tanh(self.up_proj(h)))


class Tensor(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, HIDDEN)
        self.layers = nn.ModuleList([Layer(gqa=options.gqa)])
        self.head = nn.Linear(HIDDEN, 13, bias=False)
        self.register_buffer("scale", torch.tensor([1.5]))
        if options.frozen:
            self.layers[0].up_proj.requires_grad_(requires_grad=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).float(), labels)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class Experts(nn.Module):
    """Two layers of experts of different numbers."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        made = {"ep_size": options.ep, "k": 1, "min_capacity": 4}
        self.first = MoE(8, Expert(), num_experts=4, **made)
        self.second = MoE(8, Expert(), num_experts=2, **made)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        y, one, _counts = self.first(self.inp(x))
        y, two, _counts = self.second(y)
        return self.out(y).float().pow(2).mean() + 0.01 * (one + two).float()


# --- training ------------------------------------------------------------------------------------------------------


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 1000, "gradient_clipping": 1.0}
    config["zero_optimization"] = {"stage": options.stage}
    if options.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if options.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if options.accumulate_fp32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if options.data_first:
        config["use_data_before_expert_parallelism"] = True
    if options.kind == "pipe":
        config["gradient_accumulation_steps"] = 2
    if options.kind == "tensor":
        parts = [(HIDDEN, HIDDEN // 2, HIDDEN // 2), -1] if options.gqa else [3, -1]
        specs = [
            {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
            {"patterns": [r".*\.up_proj\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": parts, "partition_dim": 0},
        ]
        config["tensor_parallel"] = {
            "autotp_size": options.tp,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        }
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    return config


def trained(net: nn.Module, options: argparse.Namespace) -> list[Any]:
    params = [p for p in net.parameters() if p.requires_grad]
    if options.kind == "experts":
        return split_params_into_different_moe_groups_for_optimizer({"params": params, "name": "params"})
    if options.groups:
        matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]
    return params


def train(engine: Any, options: argparse.Namespace) -> None:
    if options.kind == "pipe":
        generator = torch.Generator().manual_seed(7)

        def batches() -> Any:
            while True:
                ids, labels = torch.randint(0, 13, (2, 4, 5), generator=generator)
                yield ids, labels

        feed = batches()
        for _ in range(options.steps):
            engine.train_batch(feed)
        return
    for step in range(options.steps):
        generator = torch.Generator().manual_seed(100 + step * 10 + dist.get_rank() // options.tp)
        if options.kind == "tensor":
            loss = engine(*torch.randint(0, 13, (2, 20), generator=generator))
        else:
            batch = torch.randn(16, 8, generator=generator).to(next(engine.module.parameters()).dtype)
            loss = engine(batch, batch)
        engine.backward(loss)
        engine.step()


# --- truth ---------------------------------------------------------------------------------------------------------


def local_state(engine: Any, parameter: torch.Tensor, group: Any) -> dict[str, torch.Tensor]:
    """This model-parallel rank's whole tensors of one parameter, put together of fragments of its data-parallel group."""
    if hasattr(parameter, "ds_id"):  # ZeRO-3: DeepSpeed's own gathering
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
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    found = {}
    for key in ("fp32", *KEYS):
        full = torch.full((parameter.numel(),), float("nan"))
        for start, parts in filter(None, every):
            full[start : start + parts[key].numel()] = parts[key]
        assert not full.isnan().any()
        found[key] = full.view(parameter.shape)
    return found


def local_truth(engine: Any, options: argparse.Namespace) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        moe = hasattr(parameter, "group_name")
        if options.kind == "pipe":
            group = engine.grid.get_data_parallel_group()
        else:
            group = (
                ds_groups._get_expert_data_parallel_group(parameter.group_name) if moe else ds_groups._get_data_parallel_group()
            )
        if moe:
            rank = ds_groups._get_expert_parallel_rank(parameter.group_name)
            before, _, rest = name.partition("deepspeed_experts.")
            index, _, after = rest.partition(".")
            local = engine.module.get_submodule(before + "deepspeed_experts")
            name = f"{before}deepspeed_experts.{rank * len(local) + int(index)}.{after}"
        if parameter.requires_grad:
            found |= {f"{name}/{key}": tensor for key, tensor in local_state(engine, parameter, group).items()}
        with deepspeed.zero.GatheredParameters([parameter], enabled=options.stage == 3):
            found[f"__lp__/{name}"] = parameter.detach().clone().float()
    return found


def whole(name: str, shards: list[torch.Tensor], options: argparse.Namespace) -> torch.Tensor:
    """What tensor-parallel shards are of, by what `configuration` says."""
    if ".qkv." in name:
        parts = [HIDDEN, HIDDEN // 2, HIDDEN // 2] if options.gqa else [HIDDEN] * 3
        cut = [shard.split([part // options.tp for part in parts]) for shard in shards]
        return torch.cat([shares[p] for p in range(3) for shares in cut])
    if ".up_proj." in name:
        return torch.cat(shards)
    if "_proj.weight" in name:
        return torch.cat(shards, dim=1)
    assert all(torch.equal(shards[0], shard) for shard in shards), name
    return shards[0]


def truth(engine: Any, options: argparse.Namespace) -> dict[str, torch.Tensor]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, local_truth(engine, options))
    if options.kind != "tensor":
        found: dict[str, torch.Tensor] = {}
        for local in every:
            for name, tensor in local.items():
                assert torch.equal(found.setdefault(name, tensor), tensor), name
        return found
    return {name: whole(name, [every[rank][name] for rank in range(options.tp)], options) for name in every[0]}


def main() -> None:
    options = parse()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # gloo does without, and nothing needs to be compiled
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(1234)
    net = {"pipe": pipe, "tensor": Tensor, "experts": Experts}[options.kind](options)
    given: dict[str, Any] = {"config": configuration(options)}
    if options.kind == "tensor":
        given["model_parameters"] = trained(net, options)
    else:
        given["optimizer"] = torch.optim.AdamW(trained(net, options), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, **given)
    train(engine, options)
    live = truth(engine, options)
    client: dict[str, Any] = {"iteration": options.steps}
    if options.kind == "pipe":
        tied = [r"tied_modules.embed.word_embeddings.weight"] if options.tied else []
        client["universal_checkpoint_info"] = {
            "universal_checkpoint_version": 0.2,
            "pipeline_replicated_parameter_patterns": tied,
        }
    engine.save_checkpoint(str(options.out), client_state=client)
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in live.items()}, options.out / "truth.safetensors")
    dist.barrier()
    dist.destroy_process_group()


main()
