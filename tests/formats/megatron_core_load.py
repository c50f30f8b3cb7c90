"""Run by torchrun, with megatron-core on the CPU: its own model and distributed optimizer load a checkpoint that we wrote.

    torchrun --nproc-per-node 2 megatron_core_load.py CHECKPOINT OUT TP

Each rank writes what it then holds to OUT/<rank>.pt, in the legacy layout.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where Megatron asks for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def pretend() -> None:
    """What Megatron calls without asking whether there is a GPU."""
    original = torch.Tensor.type

    def kind(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) and "cuda" not in found else found

    patched: Any = torch
    patched.cuda.synchronize = lambda *args: None
    patched.cuda.current_device = lambda: "cpu"
    patched.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    patched.Tensor.type = kind


def pass_steps_by() -> None:
    """Torch's Adam keeps a step for each parameter, which Megatron's own (Transformer Engine's) does not, nor its files."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        held = self._get_main_param_and_optimizer_states(param)
        original(self, param, {"step": held["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def main(checkpoint: Path, out: Path, tp: int) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    pass_steps_by()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=16,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).bfloat16()
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    for param in ddp.parameters():
        param.main_grad.zero_()
    optimizer.step()  # so that there is state to load into
    about = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    wanted: dict[str, Any] = {"model": model.sharded_state_dict(metadata=dict(about))}
    wanted["optimizer"] = optimizer.sharded_state_dict(dict(wanted), is_loading=True, metadata=dict(about))
    loaded = dist_checkpointing.load(wanted, str(checkpoint))
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    loaded["args"].tensor_model_parallel_size = tp
    rank = out / f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    first = parallel_state.get_data_parallel_rank() == 0
    if first:
        rank.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "checkpoint_version": 3.0}
        torch.save({**state, "iteration": loaded["iteration"], "args": loaded["args"]}, rank / "model_optim_rng.pt")
    dist.barrier()
    optimizer.save_parameter_state(str(rank / "distrib_optim.pt"))
    dist.barrier()


if __name__ == "__main__":
    pretend()
    dist.init_process_group("gloo")
    with OnCpu(), contextlib.suppress(SystemExit):
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    dist.destroy_process_group()
