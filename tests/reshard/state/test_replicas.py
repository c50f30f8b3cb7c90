"""Every replica is written once: by who has least to write, or by the first rank where replicas may differ."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ucformat
from tests.reshard.ranks import on_ranks
from tests.reshard.state.test_megatron import sharded
from tests.world import World, run, run_in
from ucformat.errors import ValueConflictError
from ucformat.group import Group
from ucformat.reshard.state import division, replicas
from ucformat.reshard.state.division import divide
from ucformat.reshard.state.replicas import Offer, Structure, assign_writers, content_digest
from ucformat.reshard.state.walk import collect


def test_replicas_go_to_the_least_loaded_holder_and_drifting_ones_to_the_first() -> None:
    offers = (Offer("large", (0,), (9,), 9), Offer("drifting", (0,), (8,), 8, True), Offer("small", (0,), (1,), 1))
    structures, members = [Structure(offers, {}, {})], [[0, 1]]
    assert assign_writers(structures, members, [0, 0], {})[0].tolist() == [0, 0, 1]
    assert assign_writers(structures, members, [90, 0], {})[0].tolist() == [1, 0, 1]


@given(st.data())
def test_every_shared_box_is_written_once_by_a_holder_and_the_load_is_balanced(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=12))
    size = data.draw(st.integers(1, 9))
    held = [data.draw(st.sets(st.integers(0, len(sizes) - 1))) for _ in range(data.draw(st.integers(1, 4)))]
    structures = [Structure(tuple(Offer(f"t{i}", (0,), (sizes[i],), sizes[i]) for i in sorted(boxes)), {}, {}) for boxes in held]
    kinds = data.draw(st.permutations([n % len(held) for n in range(max(size, len(held)))]))
    members = [[rank for rank, kind in enumerate(kinds) if kind == n] for n in range(len(held))]
    unique = data.draw(st.lists(st.integers(0, 50), min_size=len(kinds), max_size=len(kinds)))
    writers = assign_writers(structures, members, unique, {})
    chosen = {
        (offer.name, int(rank))
        for s, ranks in zip(structures, writers, strict=True)
        for offer, rank in zip(s.offers, ranks, strict=True)
    }
    assert {name for name, _ in chosen} == {f"t{i}" for boxes in held for i in boxes}
    assert len(chosen) == len({name for name, _ in chosen})
    for name, rank in chosen:
        assert int(name[1:]) in held[kinds[rank]]
    if len(held) == 1 and held[0]:  # no rank has more than the least loaded one and its own last box
        load = np.array(unique) + [
            sum(sizes[int(name[1:])] for name, writer in chosen if writer == rank) for rank in range(len(kinds))
        ]
        for rank in range(len(kinds)):
            own = [sizes[int(name[1:])] for name, writer in chosen if writer == rank]
            assert not own or load[rank] - min(own) <= load.min()


def shards(tp: int, of_norm: float = 1.0) -> dict[str, Any]:
    """What a rank of two tensor-parallel ones holds: halves of a matrix, and a norm that both have."""
    return {
        "matrix": ucformat.Shard(torch.full((2, 4), float(tp)), (4, 4), (2 * tp, 0)),
        "norm": torch.full((4,), of_norm),
        "own": tp,
    }


def division_of(group: Group, states: Callable[[int], dict[str, Any]]) -> tuple[list[str], tuple[int, ...]]:
    state = states(group.rank) | {"own": 0}
    found = divide(collect(state, group), group, check_replicas=True)
    return [f"{piece.spec.name}{piece.box}" for piece in found.pieces], found.tree_holders


def test_ranks_of_several_structures_write_each_box_once() -> None:
    found = run(4, lambda group: division_of(group, lambda rank: shards(rank % 2)))
    written = [name for names, _ in found for name in names]
    assert sorted(written) == sorted(set(written))
    assert len(written) == 3
    assert {holders for _, holders in found} == {(0,)}


def test_replicas_of_ranks_with_different_structures_are_compared() -> None:
    with pytest.raises(ValueConflictError, match=r"norm.*different contents") as caught:
        run(4, lambda group: division_of(group, lambda rank: shards(rank % 2, of_norm=1.0 + (rank == 3))))
    assert caught.value.ranks == (0, 3)


def test_a_state_of_the_same_structure_is_divided_as_before_with_a_few_numbers() -> None:
    world = World(2, 2)

    def twice(group: Group) -> tuple[object, object, list[int]]:
        first = division_of(group, shards)
        before = world.sent[group.rank]
        second = division_of(group, shards)
        return first, second, [before, world.sent[group.rank] - before]

    for first, second, sent in run_in(world, twice):
        assert first == second
        assert sent[1] < 2000


def test_what_a_rank_sends_and_receives_does_not_grow_with_alike_ranks() -> None:
    """But for a few numbers of each rank that all get."""
    worlds = [World(2, size) for size in (2, 2000)]
    for world in worlds:
        run_in(world, lambda group: division_of(group, lambda rank: shards(rank % 2)))
    assert worlds[0].sent == worlds[1].sent
    assert max(worlds[1].received) < max(worlds[0].received) + 2000 * 200


def save_drifted(path: str) -> None:
    """The ranks' running statistics differ until the next forward, when DDP broadcasts the first rank's."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64)))
    model(torch.full((8, 4), 1.0 + dist.get_rank()).cumsum(0)).sum().backward()
    ucformat.save(path, {"model": model})
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{path}.pt")


def test_buffers_that_drift_under_ddp_are_those_of_the_first_rank(tmp_path: Path) -> None:
    on_ranks(2, save_drifted, str(tmp_path / "ck"))
    truth, found = torch.load(tmp_path / "ck.pt", weights_only=True), ucformat.open(str(tmp_path / "ck"))
    assert dict.fromkeys(truth, True) == {name: torch.equal(found[f"model/{name}"][...], truth[name]) for name in truth}


# ---------------------------------------------------------------- replicas that differ


WIDE = 200  # 160 KB of float32: a sample of its ends and middle would miss one element


def touch(tensor: torch.Tensor, drift: bool) -> torch.Tensor:
    """On rank 1, if asked for, one element apart from the ends and the middle differs."""
    if drift and dist.get_rank() == 1:
        with torch.no_grad():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.view(-1)[local.numel() // 3] += 1
    return tensor


def plain(drift: bool) -> dict[str, Any]:
    return {"x": touch(torch.ones(WIDE, WIDE), drift)}


def transposed(drift: bool) -> dict[str, Any]:
    return {"x": touch(torch.ones(WIDE, WIDE), drift).t()}


def under_ddp(drift: bool) -> dict[str, Any]:
    model = DistributedDataParallel(nn.Linear(WIDE, WIDE))
    touch(model.module.weight, drift)
    return {"model": model}


def moments(drift: bool) -> dict[str, Any]:
    model = DistributedDataParallel(nn.Linear(WIDE, WIDE))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, WIDE)).sum().backward()
    optimizer.step()
    touch(optimizer.state[model.module.weight]["exp_avg"], drift)
    return {"model": model, "optimizer": optimizer}


def replicate(drift: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {"x": touch(distribute_tensor(torch.ones(WIDE, WIDE), mesh, [Replicate()]), drift)}


def hsdp(drift: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(WIDE, WIDE)
    fully_shard(model, mesh=mesh)
    touch(model.weight, drift)
    return {"model": model}


def no_shard(drift: bool) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated
        model = FullyShardedDataParallel(
            nn.Linear(WIDE, WIDE),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    touch(next(model.parameters()), drift)
    return {"model": model}


def megatron(drift: bool) -> dict[str, Any]:
    return {"model": {"w": sharded("w", touch(torch.ones(WIDE, WIDE), drift), (WIDE, WIDE), (0, 0), replica_id=dist.get_rank())}}


def marked(drift: bool) -> dict[str, Any]:
    return {"x": ucformat.Shard(touch(torch.ones(WIDE, WIDE), drift), (WIDE, WIDE), (0, 0))}


def marked_flat(drift: bool) -> dict[str, Any]:
    return {"x": ucformat.FlatShard(touch(torch.ones(WIDE * WIDE), drift), (WIDE, WIDE), 0)}


def tied_on_one_rank(drift: bool) -> dict[str, Any]:
    """Rank 0 ties what rank 1 keeps apart."""
    x = torch.ones(WIDE, WIDE)
    return {"x": x, "y": x if dist.get_rank() == 0 else touch(x.clone(), drift)}


class Experts(nn.Module):
    """Two of four experts, numbered from 0 on every rank."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank() if own else 0)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def experts_fsdp2(drift: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "dp"))
    model = Experts(own=drift)
    fully_shard(model, mesh=mesh["dp"])
    return {"model": model}


def experts_fsdp1(drift: bool) -> dict[str, Any]:
    groups = [dist.new_group([rank]) for rank in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a group of one rank is not sharded
        model = FullyShardedDataParallel(
            Experts(own=drift), process_group=groups[dist.get_rank()], device_id=torch.device("cpu"), use_orig_params=True
        )
    return {"model": model}


KINDS = (
    plain, transposed, under_ddp, moments, replicate, hsdp, no_shard, megatron, marked, marked_flat, tied_on_one_rank,
    experts_fsdp2, experts_fsdp1,
)  # fmt: skip


def try_all(folder: str) -> dict[str, tuple[str, str, str]]:
    """What became of saving each kind: as it is, with a difference, with a difference and no comparison."""
    out = {}
    for kind in KINDS:
        results = []
        for drift, check in ((False, True), (True, True), (True, False)):
            path = f"{folder}/{kind.__name__}-{drift}-{check}"
            try:
                ucformat.save(path, kind(drift), check_replicas=check)
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
                assert not Path(path, "ucf.json").exists()
            else:
                results.append("saved")
        out[kind.__name__] = (results[0], results[1], results[2])
    return out


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str, str]]]:
    return on_ranks(2, try_all, str(tmp_path_factory.mktemp("replicas")))


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_replicas_that_differ_anywhere_are_refused_on_every_rank(
    kind: str, outcomes: list[dict[str, tuple[str, str, str]]]
) -> None:
    for rank in outcomes:
        equal, different, unchecked = rank[kind]
        assert (equal, unchecked) == ("saved", "saved")
        assert different.startswith("ValueConflictError")
        assert "on ranks 0, 1" in different
        assert "mesh that covers these ranks" in different


def test_the_digest_is_that_of_the_elements_whatever_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(7 * 5 * 3, dtype=torch.float32).view(7, 5, 3)
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    whole = content_digest(x)
    for limit in (4, 16, 64, 200, 1 << 20):
        monkeypatch.setattr(replicas, "CHUNK_BYTES", limit)
        assert content_digest(x) == content_digest(strided) == content_digest(x.to(torch.float64).to(torch.float32)) == whole
    assert content_digest(x.bfloat16()) != whole
    assert content_digest(torch.empty(0, 3)) == content_digest(torch.empty(0))


def test_a_single_process_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "content_digest", pytest.fail)
    ucformat.save(str(tmp_path / "ck"), {"model": nn.Linear(4, 4)})


def buffers_of_an_expert() -> list[str]:
    """No wrapper says that rank 0's buffers count."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ucformat").addHandler(handler)
    model = nn.BatchNorm1d(4)
    model.running_mean.fill_(dist.get_rank())  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        for at in (Path(folder, "a"), Path(folder, "b")):
            paths = [str(at)]
            dist.broadcast_object_list(paths)
            ucformat.save(paths[0], {"model": model})
    return records


def test_buffers_that_differ_are_named_in_one_warning() -> None:
    first, second = on_ranks(2, buffers_of_an_expert)
    assert len(first) == 1
    assert "model/running_mean" in first[0]
    assert not second
