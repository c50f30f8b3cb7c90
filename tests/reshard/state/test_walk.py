from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.reshard.ranks import Held, assert_same, catalog_of, catalog_of_ranks, held, load, on_ranks, same, union
from ucformat import values
from ucformat.errors import RankLocalError, UnrepresentableError, UnsupportedError, ValueConflictError
from ucformat.group import current
from ucformat.reshard.restoring.prepare import prepare
from ucformat.reshard.state import markers
from ucformat.reshard.state.markers import RankLocalItem, rank_local
from ucformat.reshard.state.walk import collect
from ucformat.values import bytes_io

# ---------------------------------------------------------------- plain state, one process


def plain_state() -> dict[str, Any]:
    return {
        "weights": {"a.b": torch.arange(6.0).view(2, 3), "t": torch.arange(12).view(3, 4).t(), "scalar": torch.tensor(2.5)},
        "pair": (torch.ones(2, dtype=torch.bfloat16), 7),
        "list": [1, {"x": torch.zeros(0, 3)}],
        "array": np.arange(4, dtype=np.uint16),
        "step": 3,
        "config": {"lr": 0.1, 0: None, "name": "run", "empty": {}},
        "ordered": OrderedDict(b=1, a=2),
    }


def test_a_plain_state_comes_apart_into_tensors_by_path_and_values() -> None:
    found = held(plain_state())
    assert sorted(spec.name for spec in found.specs) == [
        "array", "list/1/x", "pair/0", "weights/a.b", "weights/scalar", "weights/t",
    ]  # fmt: skip
    tensors = union([found])
    assert same(tensors["weights/t"], torch.arange(12).view(3, 4).t().contiguous())
    assert found.values["step"] == 3
    assert found.values["config"] == {"lr": 0.1, 0: None, "name": "run", "empty": {}}
    assert found.replicated["weights/a.b"]


def test_a_plain_state_is_restored_in_place_and_containers_keep_their_identity(tmp_path: Path) -> None:
    catalog = catalog_of_ranks(tmp_path, [held(plain_state())])
    live = plain_state()
    weight, transposed, config = live["weights"]["a.b"], live["weights"]["t"], live["config"]
    for tensor in (weight, transposed, live["weights"]["scalar"], live["pair"][0]):
        tensor.zero_()
    live["array"][:] = 9
    live.update(step=0, pair=(live["pair"][0], 0), list=[0, live["list"][1]])
    config.clear()
    loading = load(live, catalog)
    assert not loading.unused
    expected = plain_state()
    assert live["weights"]["a.b"] is weight
    assert same(weight, expected["weights"]["a.b"])
    assert torch.equal(transposed, expected["weights"]["t"])
    assert live["config"] is config
    assert config == expected["config"]
    assert live["step"] == 3
    assert live["pair"][1] == 7
    assert torch.equal(live["pair"][0], expected["pair"][0])
    assert live["list"][0] == 1
    assert live["array"].tolist() == [0, 1, 2, 3]


def test_an_empty_container_takes_all_that_was_stored_below_it(tmp_path: Path) -> None:
    catalog = catalog_of_ranks(tmp_path, [held(plain_state())])
    live: dict[str, Any] = {"weights": {}, "config": {}, "pair": (), "list": []}
    loading = load(live, catalog)
    assert torch.equal(live["weights"]["a.b"], torch.arange(6.0).view(2, 3))
    assert live["pair"][1] == 7
    assert live["list"][1]["x"].shape == (0, 3)
    assert sorted(loading.unused) == ["ordered", "step"]


def test_values_that_are_not_stored_are_named(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {"w": torch.ones(2)}, {"a": 1})
    loading = prepare({"w": torch.zeros(2), "a": 0, "b": {"c": 1}}, catalog)
    assert loading.missing == ("b",)


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.empty(2, device="meta"), UnsupportedError),
        (torch.eye(2).to_sparse(), UnrepresentableError),
        (torch.ones(2, dtype=torch.complex64).conj(), UnrepresentableError),
        (object(), UnrepresentableError),
    ],
)
def test_what_has_no_bytes_is_refused_with_its_path(tensor: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="deep/thing"):
        collect({"deep": {"thing": tensor}})


def test_an_inference_tensor_is_loaded_into(tmp_path: Path) -> None:
    with torch.inference_mode():
        live = torch.zeros(3, 4, dtype=torch.bfloat16).t()
    load({"x": live}, catalog_of(tmp_path, {"x": torch.arange(12, dtype=torch.bfloat16).view(4, 3)}))
    assert live.tolist() == torch.arange(12.0).view(4, 3).tolist()


def test_explicit_shards_and_flat_shards_make_up_their_tensor() -> None:
    full = torch.arange(30.0).view(5, 6)
    flat = full.reshape(-1)
    ranks = [
        held({"s": markers.Shard(full[:, :2], (5, 6), (0, 0)), "f": markers.FlatShard(flat[:13], (5, 6), 0)}),
        held({"s": markers.Shard(full[:, 2:], (5, 6), (0, 2)), "f": markers.FlatShard(flat[13:], (5, 6), 13)}),
    ]
    assert_same(union(ranks), {"s": full, "f": full})
    with pytest.raises(ValueError):
        markers.Shard(full, (5, 6), (1, 0))
    with pytest.raises(ValueError):
        markers.FlatShard(flat, (5, 6), 1)


# ---------------------------------------------------------------- modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.extra = 5

    def get_extra_state(self) -> dict[str, Any]:
        return {"extra": self.extra, "scale": torch.tensor([float(self.extra)])}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]
        assert float(state["scale"]) == self.extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))  # type: ignore[no-any-return]


def test_a_module_gives_parameters_persistent_buffers_extra_state_and_one_of_each_tied_tensor() -> None:
    model = Tied()
    found = held({"model": model})
    names = {"embed.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert {spec.name for spec in found.specs} == {f"model/{name}" for name in names} | {"model/_extra_state/scale"}
    assert found.aliases == {"model/head.weight": "model/embed.weight"}
    assert found.values["model"]["_extra_state"]["extra"] == 5


def test_a_state_dict_gives_the_same_tensors_and_ties_as_its_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    by_module, by_dict = held({"m": model}), held({"m": dict(model.state_dict())})
    assert_same(union([by_module]), union([by_dict]))
    assert by_module.aliases == by_dict.aliases == {"m/1.weight": "m/0.weight"}


def test_a_module_is_restored_in_place_with_its_extra_state(tmp_path: Path) -> None:
    source = Tied()
    source.extra = 8
    nn.init.normal_(source.norm.weight)
    catalog = catalog_of_ranks(tmp_path, [held({"model": source})])
    live = Tied()
    weight = live.head.weight
    load({"model": live}, catalog)
    assert live.extra == 8
    assert live.head.weight is weight is live.embed.weight
    assert_same(live.norm.state_dict(), source.norm.state_dict())
    assert torch.equal(weight, source.embed.weight)


def test_wrappers_leave_no_trace_in_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    assert isinstance(compiled, nn.Module)
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), compiled)
    assert sorted(union([held({"model": model})])) == ["model/0.bias", "model/0.weight", "model/1.bias", "model/1.weight"]


def test_pipeline_stages_in_a_list_are_one_model(tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    stages = [nn.ModuleDict({"0": whole[0]}), nn.ModuleDict({"1": whole[1]})]
    found = held({"model": stages})
    assert_same(union([found]), {f"model/{k}": v for k, v in whole.state_dict().items()})
    with pytest.raises(UnsupportedError, match="model/weight"):
        collect({"model": [nn.Linear(2, 2), nn.Linear(2, 2)]})
    fresh = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    load({"model": fresh}, catalog_of_ranks(tmp_path, [found]))
    assert_same(fresh.state_dict(), whole.state_dict())


def test_weights_tied_here_and_stored_apart_must_be_equal(tmp_path: Path) -> None:
    weight = torch.randn(7, 4)
    tensors = {**union([held({"model": Tied()})]), "model/embed.weight": weight, "model/head.weight": weight.clone()}
    tree = held({"model": Tied()}).values
    live = Tied()
    load({"model": live}, catalog_of(tmp_path, tensors, tree))
    assert torch.equal(live.embed.weight, weight)
    tensors["model/head.weight"] += 1
    with pytest.raises(ValueConflictError, match="head"):
        load({"model": Tied()}, catalog_of(tmp_path, tensors, tree))


def test_a_tied_tensor_that_is_stored_under_its_other_name_alone_is_found(tmp_path: Path) -> None:
    found = held({"model": Tied()})
    tensors = union([found])
    tensors["model/head.weight"] = tensors.pop("model/embed.weight")
    live = Tied()
    loading = load({"model": live}, catalog_of(tmp_path, tensors, found.values))
    assert torch.equal(live.embed.weight, tensors["model/head.weight"])
    assert {"model/head.weight", "model/embed.weight"} <= loading.names


# ---------------------------------------------------------------- objects with state, rank-local items


def test_schedulers_and_samplers_get_their_state_back(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        return optimizer, steps, torch.optim.lr_scheduler.LinearLR(optimizer)

    optimizer, steps, linear = make()
    for _ in range(3):
        optimizer.step()
        steps.step()
        linear.step()
    catalog = catalog_of_ranks(tmp_path, [held({"steps": steps, "linear": linear})])
    _, fresh_steps, fresh_linear = make()
    load({"steps": fresh_steps, "linear": fresh_linear}, catalog)
    assert fresh_steps.state_dict() == steps.state_dict()
    assert type(fresh_steps.milestones) is type(steps.milestones)
    assert fresh_linear.state_dict() == linear.state_dict()


class Buffered:
    """A loader whose state has tensors, of any shape."""

    def __init__(self, buffer: torch.Tensor, at: int) -> None:
        self.buffer, self.at = buffer, at

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": [self.buffer], "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer, self.at = state["buffer"][0], state["at"]


def test_an_object_may_get_back_tensors_of_another_shape_than_it_has(tmp_path: Path) -> None:
    catalog = catalog_of_ranks(tmp_path, [held({"data": Buffered(torch.arange(5), 3)})])
    live = Buffered(torch.zeros(1), 0)
    load({"data": live}, catalog)
    assert live.at == 3
    assert live.buffer.tolist() == [0, 1, 2, 3, 4]


def rank_local_items(rank: int) -> dict[str, Any]:
    return {
        "rng": rank_local(torch.tensor([rank, rank + 1], dtype=torch.uint8)),
        "data": rank_local({"at": rank * 10, "seen": [torch.full((rank + 1,), rank)]}, on_resize="modulo"),
        "loader": rank_local(Buffered(torch.full((rank,), rank), rank), on_resize="keep"),
        "same": rank_local(1, on_resize="gather"),
    }


def rank_local_worker(folder: str) -> tuple[Held, list[Any]]:
    rank = dist.get_rank()
    mine = held(rank_local_items(rank))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if rank == 0:
        catalog_of_ranks(Path(folder), ranks)
    dist.barrier()
    live = rank_local_items(7)
    rng = live["rng"].value
    tree = values.merge([r.values for r in ranks])
    directory = Path(folder) / str(rank)
    directory.mkdir()
    load(live, catalog_of(directory, union(ranks), values.decode(values.encode(tree), "")))
    assert live["rng"].value is rng
    return mine, [rng.tolist(), live["data"].value["at"], live["data"].value["seen"][0].tolist(), live["loader"].value.at]


def test_each_rank_gets_its_own_item_back_and_a_resized_world_follows_the_policy(tmp_path: Path) -> None:
    results = on_ranks(2, rank_local_worker, str(tmp_path))
    assert [got for _, got in results] == [[[0, 1], 0, [0], 0], [[1, 2], 10, [1, 1], 1]]
    ranks = [mine for mine, _ in results]
    assert sorted(union(ranks)) == [
        "data/0/seen/0", "data/1/seen/0", "loader/0/buffer/0", "loader/1/buffer/0", "rng/0", "rng/1",
    ]  # fmt: skip
    catalog = catalog_of_ranks(tmp_path, ranks)
    live = rank_local_items(5)
    with pytest.raises(RankLocalError, match="rng"):
        prepare(live, catalog)
    rng: RankLocalItem = live["rng"]
    rng.on_resize = "gather"
    load(live, catalog)
    assert [item.tolist() for item in rng.value] == [[0, 1], [1, 2]]
    assert live["data"].value["at"] == 0
    assert live["loader"].value.at == 5
    assert live["same"].value == [1, 1]


# ---------------------------------------------------------------- DTensors on real ranks

FULL = {
    "rows": torch.arange(1023 * 2).view(1023, 2),
    "columns": torch.arange(40.0).view(4, 10),
    "few": torch.arange(2),
    "both": torch.arange(35).view(7, 5),
    "twice": torch.arange(22).view(11, 2),
    "copy": torch.arange(3),
    "half": torch.arange(12).view(6, 2),
    "mixed": torch.arange(12).view(6, 2),
    "odd": torch.arange(24).view(8, 3),
    "blind": torch.arange(20).view(10, 2),
}


def dtensors(*, zero: bool = False) -> dict[str, Any]:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = {name: torch.zeros_like(t) if zero else t for name, t in FULL.items()}
    rank = dist.get_rank()
    odd = full["odd"].split([3, 2, 2, 1])[rank].contiguous()  # rank 1's and 2's sizes are the regular ones
    blind = full["blind"].split([4, 1, 5, 0])[rank].contiguous()
    return {
        "rows": distribute_tensor(full["rows"], line, [Shard(0)]),
        "columns": distribute_tensor(full["columns"], line, [Shard(1)]),
        "few": distribute_tensor(full["few"], line, [Shard(0)]),
        "both": distribute_tensor(full["both"], mesh, [Shard(1), Shard(0)]),
        "twice": distribute_tensor(full["twice"], mesh, [Shard(0), Shard(0)]),
        "copy": distribute_tensor(full["copy"], mesh, [Replicate(), Replicate()]),
        "half": distribute_tensor(full["half"], mesh["tp"], [Shard(0)]),
        "mixed": distribute_tensor(full["mixed"], mesh, [Replicate(), Shard(0)]),
        "odd": DTensor.from_local(odd, line, [Shard(0)], shape=torch.Size((8, 3)), stride=(3, 1)),
        "blind": DTensor.from_local(blind, line, [Shard(0)]),
    }


def dtensor_worker(folder: str) -> Held:
    found = held(dtensors())
    directory = Path(folder) / str(dist.get_rank())
    directory.mkdir()
    live = dtensors(zero=True)
    load(live, catalog_of(directory, FULL))
    again = held(live)
    assert [b.tolist() for _, _, b in again.pieces] == [b.tolist() for _, _, b in found.pieces]
    mesh = init_device_mesh("cpu", (4,))
    bad = {"sum": DTensor.from_local(torch.ones(2), mesh, [Partial()])} if dist.get_rank() == 1 else {"step": 1}
    with pytest.raises(UnsupportedError, match="pending sum"):
        collect(bad, current())
    short = {"short": DTensor.from_local(torch.ones(1), mesh, [Shard(0)], shape=torch.Size((9,)), stride=(1,))}
    with pytest.raises(UnsupportedError, match="short"):
        collect(short, current())
    return found


def test_dtensors_of_any_placement_are_saved_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    ranks = on_ranks(4, dtensor_worker, str(tmp_path))
    assert_same(union(ranks), FULL)
    assert ranks[2].mesh == {"all": 4, "dp": 2, "tp": 2}
    assert ranks[2].coords == {"all": 2, "dp": 1, "tp": 0}
    assert ranks[0].replicated["mixed"]
    assert ranks[0].replicated["half"], "other ranks hold the same box, though the DTensor's mesh does not know them"
    assert not ranks[0].replicated["rows"]
    assert not any(name == "few" for name, _, _ in ranks[3].pieces)


def ddp_worker() -> Held:
    model = DistributedDataParallel(Tied())
    return held({"model": model})


def test_ddp_replicas_are_named_as_the_model_and_agree() -> None:
    ranks = on_ranks(2, ddp_worker)
    assert sorted(union(ranks)) == sorted(union([held({"model": Tied()})]))
    assert all(ranks[0].replicated.values())


# ---------------------------------------------------------------- the older ShardedTensor, Megatron


def test_bytes_io_extra_state_is_kept(tmp_path: Path) -> None:
    class Fp8(nn.Linear):
        state = b"abc"

        def get_extra_state(self) -> Any:
            return io.BytesIO(self.state)

        def set_extra_state(self, state: Any) -> None:
            self.state = state.getvalue()

    found = held({"model": Fp8(1, 1)})
    assert bytes_io.is_one(found.values["model"]["_extra_state"])
    live = Fp8(1, 1)
    live.state = b""
    load({"model": live}, catalog_of_ranks(tmp_path, [found]))
    assert live.state == b"abc"
