"""Every replica is written once: by who has least to write, or by the first rank where replicas may differ."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ucformat
from tests.reshard.ranks import on_ranks
from tests.reshard.state.test_megatron import sharded
from ucformat.reshard import save
from ucformat.reshard.state import replicas
from ucformat.reshard.state.replicas import Offer, Offers, assign_writers, content_digest


def test_replicas_go_to_the_least_loaded_holder_and_drifting_ones_to_the_first() -> None:
    offers = (
        Offer("large", (0,), (9,), 9, None),
        Offer("drifting", (0,), (8,), 8, None, first_rank_wins=True),
        Offer("small", (0,), (1,), 1, None),
    )
    assert assign_writers([Offers(0, offers), Offers(0, offers)]).writes == ((True, True, False), (False, False, True))
    assert assign_writers([Offers(90, offers), Offers(0, offers)]).writes == ((False, True, False), (True, False, True))


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
    monkeypatch.setattr(save, "content_digest", pytest.fail)
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
