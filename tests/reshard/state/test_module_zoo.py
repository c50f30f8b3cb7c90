"""Modules of every kind are after a load what `fresh.load_state_dict(saved.state_dict())` makes of them, or are refused by name.

Each is saved, and loaded into a fresh one of the same kind that has been in use; states and outputs are compared with those of a
third one that torch's own `load_state_dict` filled. The same for some of them under DDP, FSDP1, FSDP2 and tensor parallelism.
"""
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations as typed_parametrizations
from torch.nn.utils import parametrize, prune

import ucformat
from tests.reshard.ranks import on_ranks
from ucformat.errors import UcformatError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.emb.weight
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.emb(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.layers = nn.ModuleList([self.a, nn.Linear(4, 4)])
        self.table = nn.ParameterDict({"x": nn.Parameter(torch.randn(2)), "z": nn.Parameter(torch.randn(()))})

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[1](self.b(x)) * self.table["z"]


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Hooked(nn.Linear):
    """Keeps its weight transposed in files."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        hooks: Any = self
        hooks._register_state_dict_hook(lambda module, state, prefix, _: self._turn(state, prefix))
        hooks.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: self._turn(state, prefix))

    @staticmethod
    def _turn(state: Any, prefix: str) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t().contiguous()


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def _parametrized() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Doubling())
    return layer


def _fake_quantize() -> nn.Module:
    from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

    return FakeQuantize(
        MovingAveragePerChannelMinMaxObserver,
        dtype=torch.qint8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
    )


def _observer(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torch.ao import quantization

        made: nn.Module = getattr(quantization, name)()
        return made

    return make


def _metric(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        metric: Any = getattr(pytest.importorskip("torchmetrics"), name)()
        metric.persistent(True)
        return nn.Sequential(metric)

    return make


def _transformer(kind: str, **sizes: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{kind}Config")(**sizes)
        made: nn.Module = getattr(transformers, f"{kind}Model")(config)
        return made.eval()

    return make


def _lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made: nn.Module = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    return made


def _bitsandbytes(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made: nn.Module = getattr(pytest.importorskip("bitsandbytes").nn, name)(64, 64).to("cpu")
        return made

    return make


utils: Any = nn.utils  # not typed
parametrizations: Any = typed_parametrizations
_adaptive: Any = nn.AdaptiveLogSoftmaxWithLoss
_F, _I = torch.randn, lambda *shape: torch.randint(0, 4, shape)
_B = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 11}
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (_F(2, 4),)),
    "no bias": (lambda: nn.Linear(4, 3, bias=False), (_F(2, 4),)),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), (_F(2, 4), _F(2, 4))),
    "bfloat16": (lambda: nn.Linear(4, 3).bfloat16(), (_F(2, 4).bfloat16(),)),
    "double": (lambda: nn.Linear(4, 3).double(), (_F(2, 4).double(),)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 2, groups=2), (_F(1, 4, 5),)),
    "conv2d channels last": (lambda: nn.Conv2d(4, 6, 2).to(memory_format=torch.channels_last), (_F(1, 4, 5, 5),)),  # type: ignore[call-overload]
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (_F(1, 2, 3, 3, 3),)),
    "transposed conv": (lambda: nn.ConvTranspose2d(4, 6, 2), (_F(1, 4, 5, 5),)),
    "embedding": (lambda: nn.Embedding(5, 4, padding_idx=0), (_I(3),)),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 4), (_I(2, 3),)),
    "lstm": (lambda: nn.LSTM(4, 3, 2, bidirectional=True), (_F(2, 1, 4),)),
    "projected lstm": (lambda: nn.LSTM(4, 3, proj_size=2), (_F(2, 1, 4),)),
    "gru": (lambda: nn.GRU(4, 3), (_F(2, 1, 4),)),
    "rnn cell": (lambda: nn.RNNCell(4, 3), (_F(2, 4),)),
    "attention": (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), (_F(3, 1, 4), _F(3, 1, 4), _F(3, 1, 4))),
    "other attention": (lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=3), (_F(3, 1, 4), _F(3, 1, 3), _F(3, 1, 3))),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (_F(3, 1, 4),)),
    "transformer": (lambda: nn.Transformer(4, 2, 1, 1, 8, dropout=0.0), (_F(3, 1, 4), _F(2, 1, 4))),
    "batch norm": (lambda: nn.BatchNorm1d(4), (_F(3, 4),)),
    "batch norm without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (_F(2, 4, 2, 2),)),
    "synchronised batch norm": (lambda: nn.SyncBatchNorm(4).eval(), (_F(3, 4),)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (_F(2, 4, 3),)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (_F(2, 4, 3),)),
    "layer norm": (lambda: nn.LayerNorm(4), (_F(2, 4),)),
    "rms norm": (lambda: nn.RMSNorm(4), (_F(2, 4),)),
    "prelu": (lambda: nn.PReLU(4), (_F(2, 4),)),
    "adaptive softmax": (lambda: _adaptive(4, 6, [2, 4]), (_F(3, 4), _I(3))),
    "no parameters": (nn.ReLU, (_F(2, 4),)),
    "tied": (Tied, (_I(3),)),
    "shared": (Shared, (_F(2, 4),)),
    "extra state": (Extra, (_F(2, 4),)),
    "hooks": (Hooked, (_F(2, 4),)),
    "parametrization": (_parametrized, (_F(2, 4),)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), (_F(2, 4),)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), (_F(2, 4),)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (_F(2, 4),)),
    "older weight norm": (lambda: utils.weight_norm(nn.Linear(4, 4)), (_F(2, 4),)),
    "older spectral norm": (lambda: utils.spectral_norm(nn.Linear(4, 4)), (_F(2, 4),)),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), (_F(2, 4),)),
    "lazy, after its first batch": (lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), (_F(2, 4),)),
    "compiled": (lambda: torch.compile(nn.Linear(4, 4), backend="eager"), (_F(2, 4),)),  # type: ignore[dict-item,return-value]
    "min-max observer": (_observer("MinMaxObserver"), (_F(4, 3),)),
    "observer per channel": (_observer("PerChannelMinMaxObserver"), (_F(4, 3),)),
    "histogram observer": (_observer("HistogramObserver"), (_F(4, 3),)),
    "fake quantiser": (_fake_quantize, (_F(4, 3),)),
    "mean metric": (_metric("MeanMetric"), (_F(3),)),
    "metric with a list": (_metric("CatMetric"), (_F(3),)),
    "gpt2": (_transformer("GPT2", n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8), (_I(1, 3),)),
    "llama": (_transformer("Llama", **_B, num_key_value_heads=1), (_I(1, 3),)),
    "bert": (_transformer("Bert", **_B, max_position_embeddings=8), (_I(1, 3),)),
    "mixtral": (_transformer("Mixtral", **_B, num_key_value_heads=1, num_local_experts=2), (_I(1, 3),)),
    "t5": (_transformer("T5", d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=11), (_I(1, 3), None, _I(1, 3))),
    "lora": (_lora, (_F(2, 4),)),
    "8 bit linear": (_bitsandbytes("Linear8bitLt"), (_F(2, 64),)),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.LazyLinear(3), "lazy parameter"),
    "4 bit linear": (_bitsandbytes("Linear4bit"), "takes it back"),
    "quantised linear": (lambda: torch.ao.nn.quantized.Linear(4, 4), "quantised"),
}


def _used(make: Callable[[], nn.Module], inputs: tuple[Any, ...], seed: int) -> nn.Module:
    """A module that has seen a batch."""
    torch.manual_seed(seed)
    module = make()
    for _ in range(seed):
        _call(module, inputs)
    return module


def _call(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        out = module(inputs[0], decoder_input_ids=inputs[2]) if len(inputs) == 3 and inputs[1] is None else module(*inputs)
    return getattr(out, "last_hidden_state", out)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ZOO)
def test_a_module_is_what_torch_would_have_made_of_it(name: str, tmp_path: Path) -> None:
    make, inputs = ZOO[name]
    saved, fresh, torchs = (_used(make, inputs, seed) for seed in (1, 2, 2))
    ucformat.save(str(tmp_path / "ck"), {"model": saved})
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh})
    torchs.load_state_dict(saved.state_dict())
    assert _equal(dict(fresh.state_dict()), dict(torchs.state_dict()))
    for seed in (3, 4):
        outputs = []
        for module in (fresh, torchs):
            torch.manual_seed(seed)
            outputs.append(_call(module, inputs))
        assert _equal(*outputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_restored_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, why = REFUSED[name]
    with pytest.raises(UcformatError, match=rf"model/(?s:.)*{why}"):
        ucformat.save(str(tmp_path / "ck"), {"model": nn.ModuleDict({"odd": make()})})
        ucformat.load(str(tmp_path / "ck"), into={"model": nn.ModuleDict({"odd": make()})})


# ---------------------------------------------------------------- on two ranks

SHARDED = [
    *(
        "linear",
        "conv2d channels last",
        "embedding",
        "lstm",
        "encoder",
        "batch norm",
        "layer norm",
        "tied",
        "extra state",
        "hooks",
    ),
    *("weight norm", "parametrization", "older spectral norm", "fake quantiser", "gpt2", "llama"),
]


class Holder(nn.Module):
    """Gives every wrapper a parameter of its own, beside the module that is looked at."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(4, 4)


def _wrap(how: str, module: nn.Module) -> nn.Module:
    holder = Holder(module)
    if how == "ddp":
        return DistributedDataParallel(holder) if list(holder.parameters()) else holder
    if how == "fsdp2":
        if list(module.parameters()):
            fully_shard(holder.inner)
        fully_shard(holder)
        return holder
    if how in {"fsdp1", "fsdp1 flat"}:
        return FullyShardedDataParallel(holder, use_orig_params=how == "fsdp1", device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {"own": RowwiseParallel()}
    if type(module) in {nn.Linear, Hooked}:
        plan["inner"] = ColwiseParallel()
    return parallelize_module(holder, mesh, plan)


def _full(module: nn.Module) -> dict[str, Any]:
    """The wrapped model's whole state, as its library gives it."""
    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            return {name.replace("_fsdp_wrapped_module.", ""): x.clone() for name, x in module.named_parameters()}
    return {
        name: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() if isinstance(x, torch.Tensor) else x
        for name, x in module.state_dict().items()
    }


def _one(how: str, name: str, folder: str) -> str:
    """What went wrong, or nothing."""
    make, inputs = ZOO[name]
    path = f"{folder}/{how} {name}"
    try:
        saved, fresh = (_wrap(how, _used(make, inputs, seed)) for seed in (1, 2))
    except NotImplementedError:  # channels last under FSDP2
        return "can't be wrapped"
    try:
        ucformat.save(path, {"model": saved})
        ucformat.load(path, into={"model": fresh})
    except UcformatError as error:
        return f"refused: {error}"
    return "" if _equal(_full(saved), _full(fresh)) else "differs"


def _all(folder: str) -> dict[str, str]:
    found = {}
    for how in ("ddp", "fsdp2", "fsdp1", "fsdp1 flat", "tp"):
        for name in SHARDED:
            try:
                found[f"{how}: {name}"] = _one(how, name, folder)
            except Exception as error:
                found[f"{how}: {name}"] = f"{type(error).__name__}: {error}"
                raise RuntimeError(f"{how}: {name}") from error
    dist.barrier()
    return found


def test_modules_under_every_wrapper_come_back_or_are_refused_by_name() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in on_ranks(2, _all, folder):
            wrong = {case: why for case, why in found.items() if why}
            refused = {case for case, why in wrong.items() if why.startswith("refused") and "inner" in why}
            unwrapped = {case for case, why in wrong.items() if why == "can't be wrapped"}
            assert len(unwrapped) < 3
            assert wrong.keys() - refused - unwrapped == set(), wrong
            assert {case.partition(":")[0] for case in refused} <= {"fsdp1", "fsdp1 flat"}, wrong
