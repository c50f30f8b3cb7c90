"""Run by torchrun, with megatron-core on the CPU: makes the run `tp2pp2` of tests/data/megatron, and prints its next losses.

    PYTHONPATH=. torchrun --nproc-per-node 4 tests/formats/megatron_core_save.py OUT

Two tensor ranks × two stages train three steps in fp32 with the distributed optimizer and save both forms of checkpoint. Then
they train two steps more; what they print are the losses that whoever goes on from the checkpoint must see.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.formats.megatron_core_load import OnCpu, pretend

STEPS, MORE = 3, 2
VOCAB, LENGTH, BATCH = 32, 12, 2
ITERATION = 3


def arguments() -> argparse.Namespace:
    """What Megatron would keep of its command line."""
    return argparse.Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        virtual_pipeline_model_parallel_size=None,
        num_layers=4,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        group_query_attention=True,
        kv_channels=4,
        untie_embeddings_and_output_weights=True,
        padded_vocab_size=VOCAB,
        vocab_size=VOCAB,
        make_vocab_size_divisible_by=8,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=False,
        num_experts=None,
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        max_position_embeddings=16,
        seq_length=16,
        bf16=False,
        params_dtype=torch.float32,
        qk_layernorm=False,
        iteration=ITERATION,
    )


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a step, on every rank alike."""
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


class Training:
    """A stage of the model, and its optimizer."""

    def __init__(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        self.states = parallel_state
        args = arguments()
        config = TransformerConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups,
            ffn_hidden_size=args.ffn_hidden_size,
            use_cpu_initialization=True,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layernorm_epsilon=1e-5,
            normalization="RMSNorm",
        )
        self.first, self.last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=VOCAB,
            max_sequence_length=16,
            pre_process=self.first,
            post_process=self.last,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), self.model)
        settings = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, use_distributed_optimizer=True, clip_grad=0.0)
        self.optimizer = get_megatron_optimizer(settings, [self.ddp])
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= group["wd_mult"]  # as Megatron's scheduler does

    def step(self, number: int) -> float:
        """One step of training, stage by stage; the mean loss of the tokens."""
        ids, labels = tokens(number)
        other = self.states.get_pipeline_model_parallel_next_rank()
        position = torch.arange(LENGTH).expand(BATCH, -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        if self.first:
            hidden = self.ddp(ids, position, mask)
            dist.send(hidden.detach().contiguous(), other)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, other)
            hidden.backward(gradient)
        else:
            arrived = torch.empty(LENGTH, BATCH, 16)
            dist.recv(arrived, other)
            self.model.set_input_tensor([arrived.requires_grad_()])
            loss = self.ddp(ids, position, mask, labels=labels).mean()
            loss.backward()
            assert arrived.grad is not None
            dist.send(arrived.grad, other)
        self.ddp.finish_grad_sync()
        assert self.optimizer.step()[0]
        return float(loss.detach())


def common() -> dict[str, Any]:
    scheduler = {"max_lr": 1e-2, "num_steps": ITERATION, "lr_decay_style": "constant"}
    about = {"iteration": ITERATION, "checkpoint_version": 3.0, "num_floating_point_operations_so_far": 5}
    return {**about, "opt_param_scheduler": scheduler, "args": arguments()}


def save_both(run: Training, out: Path) -> None:
    from megatron.core import dist_checkpointing

    states, folder = run.states, f"iter_{ITERATION:07d}"
    about = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": states.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {"model": run.model.sharded_state_dict(metadata=dict(about))}
    state["optimizer"] = run.optimizer.sharded_state_dict(dict(state), metadata=dict(about))
    for form in ("dp_reshardable", "legacy"):
        (out / f"tp2pp2_{form}" / folder).mkdir(parents=True, exist_ok=True)
        (out / f"tp2pp2_{form}" / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    dist_checkpointing.save({**state, **common()}, str(out / "tp2pp2_dp_reshardable" / folder))
    tp, pp = states.get_tensor_model_parallel_rank(), states.get_pipeline_model_parallel_rank()
    rank = out / "tp2pp2_legacy" / folder / f"mp_rank_{tp:02d}_{pp:03d}"
    rank.mkdir(exist_ok=True)
    legacy = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    torch.save({**common(), **legacy}, rank / "model_optim_rng.pt")
    run.optimizer.save_parameter_state(str(rank / "distrib_optim.pt"))
    dist.barrier()


def main(out: Path) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # nothing is drawn: there is no dropout
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    torch.manual_seed(1234)
    run = Training()
    for step in range(STEPS):
        run.step(step)
    save_both(run, out)
    losses = [run.step(STEPS + step) for step in range(MORE)]
    if run.last and run.states.get_tensor_model_parallel_rank() == 0:
        print("next losses:", losses)  # what it was run for


if __name__ == "__main__":
    pretend()
    dist.init_process_group("gloo")
    with OnCpu():
        main(Path(sys.argv[1]))
    dist.destroy_process_group()
