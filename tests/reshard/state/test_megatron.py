from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.reshard.ranks import Held, assert_same, catalog_of_ranks, held, load, on_ranks, union
from ucformat.errors import UnsupportedError
from ucformat.reshard.restoring.prepare import prepare
from ucformat.reshard.state.walk import collect

# The attributes of Megatron-core's classes, which the product goes by; checked against megatron-core 0.16.1.


@dataclass
class ShardedTensor:
    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


@dataclass
class ShardedObject:
    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any = 0


@dataclass
class ShardedTensorFactory:
    key: str
    data: torch.Tensor
    build_fn: Callable[..., Any]
    merge_fn: Callable[..., Any]

    def build(self) -> Any:
        return self.build_fn(self.key, self.data)


@dataclass
class LocalNonpersistentObject:
    obj: object


def sharded(key: str, data: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], **more: Any) -> ShardedTensor:
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), shape, offset, **more)


def flattened(data: torch.Tensor, tp: int, part: slice) -> ShardedTensor:
    """A flat part of this rank's box, as older releases keep optimizer state."""
    key = "optimizer.state.fp32_param.layers.w"
    return ShardedTensor(key, data, data.dtype, (4, 3), (8, 3), (4 * tp, 0), flattened_range=part)


LAYERS = torch.arange(2 * 8 * 3.0).view(2, 8, 3)
GATE_UP = torch.arange(8.0).view(8, 1)
EMBED = torch.arange(10.0)


def state(tp: int, *, zero: bool = False, vocab: int = 10) -> dict[str, Any]:
    def live(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) if zero else x.clone()

    def gate_and_up(key: str, data: torch.Tensor) -> list[ShardedTensor]:
        gate, up = data.chunk(2)
        return [sharded(key, gate, (8, 1), (2 * tp, 0)), sharded(key, up, (8, 1), (4 + 2 * tp, 0))]

    half = torch.cat([GATE_UP[:4].chunk(2)[tp], GATE_UP[4:].chunk(2)[tp]])
    embed = torch.arange(float(vocab)).chunk(2)[tp]
    moment = LAYERS[0].chunk(2)[tp]
    return {
        "model": {
            **{
                f"layers.{i}.w": sharded("layers.w", live(LAYERS[i].chunk(2)[tp]), (2, 8, 3), (i, 4 * tp, 0), prepend_axis_num=1)
                for i in range(2)
            },
            "fc1": ShardedTensorFactory("fc1", live(half), gate_and_up, torch.cat),
            "extra": ShardedObject("attn._extra_state", io.BytesIO(b"" if zero else f"x{tp}".encode()), (2,), (tp,)),
            "own": LocalNonpersistentObject(object()),
            "embed": sharded("embed", live(embed), (vocab,), (tp * vocab // 2,), allow_shape_mismatch=True),
        },
        "optimizer": {
            "states": [
                sharded("optimizer.state.exp_avg.layers.w", live(moment + 1), (1, 8, 3), (0, 4 * tp, 0), prepend_axis_num=1),
                flattened(live(moment.reshape(-1)[1:12] * 2), tp, slice(1, 12)),
                flattened(live(moment.reshape(-1)[:1] * 2), tp, slice(0, 1)),
            ]
        },
        "step": 0 if zero else 5,
    }


def test_sharded_tensors_go_by_their_key_and_make_up_the_global_tensor() -> None:
    ranks = [held(state(0)), held(state(1))]
    assert_same(
        union(ranks),
        {
            "model/layers.w": LAYERS,
            "model/fc1": GATE_UP,
            "model/embed": EMBED,
            "optimizer/layers.w/exp_avg": LAYERS[:1] + 1,
            "optimizer/layers.w/fp32": LAYERS[0] * 2,
        },
    )
    assert ranks[1].values == {"step": 5, "model": {"attn._extra_state": {"shard_1_2": b"x1"}}}


@pytest.mark.parametrize("vocab", [10, 14])
def test_sharded_tensors_and_objects_are_loaded_in_place_and_padding_is_zeroed(vocab: int, tmp_path: Path) -> None:
    catalog = catalog_of_ranks(tmp_path, [held(state(0)), held(state(1))])
    for tp in range(2):
        live, expected = state(tp, zero=True, vocab=vocab), state(tp)
        live["model"]["embed"].data.fill_(-1)
        loading = load(live, catalog)
        assert not loading.unused
        for name in ("layers.0.w", "layers.1.w", "fc1"):
            assert torch.equal(live["model"][name].data, expected["model"][name].data)
        assert live["model"]["extra"].data.getvalue() == f"x{tp}".encode()
        assert live["model"]["embed"].data.tolist() == [*EMBED, 0, 0, 0, 0][tp * vocab // 2 :][: vocab // 2]
        for a, b in zip(live["optimizer"]["states"], expected["optimizer"]["states"], strict=True):
            assert torch.equal(a.data, b.data)
        assert live["step"] == 5


def test_what_cannot_be_placed_is_refused() -> None:
    good = sharded("w", torch.ones(2), (4,), (2,))
    for change in ({"data": None}, {"global_offset": (3,)}):
        with pytest.raises(UnsupportedError, match="model/w"):
            collect({"model": {"w": ShardedTensor(**{**vars(good), **change})}})


def test_a_factory_that_copies_is_not_loaded_into(tmp_path: Path) -> None:
    def copy(key: str, data: torch.Tensor) -> list[ShardedTensor]:
        return [sharded(key, data.clone(), (2,), (0,))]

    live: dict[str, Any] = {"model": {"w": ShardedTensorFactory("w", torch.ones(2), copy, torch.cat)}}
    catalog = catalog_of_ranks(tmp_path, [held(live)])
    with pytest.raises(UnsupportedError, match="copies"):
        prepare(live, catalog)


def old_sharded_tensor_worker() -> Held:
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    rank = dist.get_rank()
    full = torch.arange(10.0).view(5, 2)
    local = full.split([3, 2])[rank].contiguous()
    return held({"w": init_from_local_shards([Shard.from_tensor_and_offsets(local, [3 * rank, 0], rank)], 5, 2)})


@pytest.mark.filterwarnings("ignore")
def test_the_older_sharded_tensor_of_torch_is_placed_by_its_metadata() -> None:
    assert_same(union(on_ranks(2, old_sharded_tensor_worker)), {"w": torch.arange(10.0).view(5, 2)})
