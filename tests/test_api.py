"""save, load, open: what the user calls, in one process and on real gloo ranks."""

from __future__ import annotations

import os
import resource
import signal
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import ucformat
from tests.checkpoints import bits, shards_of
from tests.reshard.ranks import on_ranks
from tests.scripts import Script
from ucformat.errors import (
    ChecksumError,
    DTypeMismatchError,
    ExistsError,
    MissingFileError,
    NamesMismatchError,
    NotACheckpointError,
    RankLocalError,
    ShapeMismatchError,
    StorageError,
    UnrepresentableError,
    ValueConflictError,
)
from ucformat.values.tree import RankLocal


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(13, 8)
        self.fc = nn.Linear(8, 13, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.fc.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.norm(self.emb(ids)))
        return out


def _trained(seed: int, steps: int = 2) -> dict[str, object]:
    net = Net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for i in range(steps):
        nn.functional.cross_entropy(net(torch.arange(6)), torch.arange(6)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        del i
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": steps,
        "data": {"epoch": 1, 2: (3, torch.ones(2) * seed), "empty": {}},
        "rng": ucformat.rank_local(torch.get_rng_state()),
        "array": np.arange(4) * seed,
    }


def test_a_run_continues_bit_for_bit_after_a_load(tmp_path: Path) -> None:
    saved, fresh = _trained(1), _trained(7, steps=0)
    ucformat.save(str(tmp_path), saved, step=2)
    assert ucformat.load(str(tmp_path), into=fresh).step == 2
    assert fresh["step"] == 2
    assert fresh["data"]["epoch"] == 1  # type: ignore[index]
    assert torch.equal(fresh["data"][2][1], torch.ones(2))  # type: ignore[index]
    assert fresh["data"]["empty"] == {}  # type: ignore[index]
    assert isinstance(fresh["array"], np.ndarray)
    assert fresh["array"].tolist() == [0, 1, 2, 3]
    for state in (saved, fresh):
        net, optimizer = state["model"], state["optimizer"]
        nn.functional.cross_entropy(net(torch.arange(5)), torch.arange(5)).backward()  # type: ignore[operator]
        optimizer.step()  # type: ignore[attr-defined]
    for a, b in zip(saved["model"].state_dict().values(), fresh["model"].state_dict().values(), strict=True):  # type: ignore[attr-defined]
        assert bits(a) == bits(b)
    assert saved["scheduler"].state_dict() == fresh["scheduler"].state_dict()  # type: ignore[attr-defined]


def test_a_whole_state_loads_to_cpu_as_the_nest_it_was(tmp_path: Path) -> None:
    state = _trained(3)
    ucformat.save(str(tmp_path / "ck"), state)
    found = ucformat.load(str(tmp_path / "ck"))
    assert set(found) == set(state)
    model = found["model"]
    assert isinstance(model, dict)
    assert model["fc.weight"] is model["emb.weight"]
    assert found["data"]["empty"] == {}  # type: ignore[index]
    assert isinstance(found["rng"], RankLocal)
    assert found["optimizer"]["param_groups"][0]["params"] == ["emb.weight", "norm.weight", "norm.bias"]  # type: ignore[index]


def test_an_open_checkpoint_is_a_lazy_mapping(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    ucformat.save(str(tmp_path / "ck"), {"model": {"w": tensor, "s": torch.tensor(2)}, "step": 5}, step=None)
    checkpoint = ucformat.open(str(tmp_path / "ck"))
    lazy = checkpoint["model/w"]
    assert list(checkpoint) == ["model/s", "model/w"]
    assert (lazy.shape, lazy.dtype, lazy.nbytes) == ((4, 6), torch.float32, 96)
    for index in (slice(0, 2), (1, 3), (slice(None), slice(1, 6, 2)), (..., -1), (-1, ...), slice(3, 3), (slice(None), 2)):
        assert torch.equal(lazy[index], tensor[index])
    assert torch.equal(checkpoint["model/s"][...], torch.tensor(2))
    assert np.asarray(lazy).tolist() == tensor.tolist()
    for bad in (4, (0, 0, 0), (slice(None, None, -1)), (..., ...)):
        with pytest.raises(IndexError):
            lazy[bad]
    with pytest.raises(KeyError):
        checkpoint["model/absent"]


def test_keep_leaves_the_newest_committed_steps(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    for step in (1, 2, 3, 4):
        ucformat.save(run, {"s": torch.tensor(step)}, step=step, keep=2)
    assert ucformat.steps(run) == [3, 4]
    assert sorted(os.listdir(run)) == ["step-00000003", "step-00000004"]
    assert ucformat.load(run, step=3)["s"] == 3
    with pytest.raises(ValueError, match="keep"):
        ucformat.save(run, {"s": torch.tensor(5)}, step=5, keep=0)


def test_what_was_just_saved_stays_and_is_what_load_gives_after_going_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = str(tmp_path / "run")
    for step in (100, 200, 300, 150):
        assert ucformat.save(run, {"s": torch.tensor(step)}, step=step, keep=3).endswith(f"step-{step:08d}")
    assert "step 150 is the newest one now; higher steps are kept but passed over: 200, 300" in caplog.text
    assert ucformat.steps(run) == [100, 150, 200, 300]
    assert ucformat.load(run)["s"] == 150
    assert ucformat.load(run, step=300)["s"] == 300
    ucformat.save(run, {"s": torch.tensor(160)}, step=160, keep=2)
    assert ucformat.steps(run) == [150, 160, 200, 300]
    with pytest.raises(ExistsError):
        ucformat.save(run, {"s": torch.tensor(0)}, step=200)
    ucformat.save(run, {"s": torch.tensor(201)}, step=200, keep=2, overwrite=True)
    assert (ucformat.steps(run), ucformat.load(run)["s"]) == ([160, 200, 300], 201)
    ucformat.save(run, {"s": torch.tensor(310)}, step=310, keep=2)
    assert (ucformat.steps(run), ucformat.load(run)["s"]) == ([200, 300, 310], 310)
    ucformat.save(run, {"s": torch.tensor(320)}, step=320, keep=2)
    assert ucformat.steps(run) == [310, 320]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000310", "step-00000320"]


def test_a_committed_checkpoint_is_only_replaced_on_demand(tmp_path: Path) -> None:
    path = str(tmp_path / "ck")
    ucformat.save(path, {"x": torch.zeros(3)})
    with pytest.raises(ExistsError):
        ucformat.save(path, {"x": torch.ones(3)})
    assert torch.equal(ucformat.load(path)["x"], torch.zeros(3))  # type: ignore[arg-type]
    ucformat.save(path, {"x": torch.ones(3)}, overwrite=True)
    assert torch.equal(ucformat.load(path)["x"], torch.ones(3))  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = str(tmp_path / "ck")
    ucformat.save(path, {"a": torch.ones(3), "b": torch.ones(2, 2), "v": 1})
    live = torch.zeros(3)
    with pytest.raises(NamesMismatchError, match="wanted but not stored: c; stored but not wanted: b"):
        ucformat.load(path, into={"a": live, "c": torch.zeros(1), "v": 0})
    with pytest.raises(ShapeMismatchError, match="'b'"):
        ucformat.load(path, into={"a": live, "b": torch.zeros(4), "v": 0})
    with pytest.raises(DTypeMismatchError, match="F32"):
        ucformat.load(path, into={"a": live, "b": torch.zeros(2, 2).half(), "v": 0})
    assert live.sum() == 0
    into = {"a": torch.zeros(3).half()}
    ucformat.load(path, into=into, strict=False, cast=True)
    assert into["a"].sum() == 3


def test_damage_is_an_error_that_names_tensor_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    ucformat.save(str(path), {"a": torch.ones(3000)})
    shard = shards_of(path) / "00000.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[5000] ^= 4
    shard.write_bytes(raw)
    with pytest.raises(ChecksumError, match=r"bytes 4096-.*damages a"):
        ucformat.load(str(path))


def test_what_cannot_be_stored_exactly_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UnrepresentableError, match="a/b/1"):
        ucformat.save(str(tmp_path / "ck"), {"a": {"b": [1, threading.Lock()]}})
    assert not (tmp_path / "ck").exists()
    with pytest.raises(NotACheckpointError):
        ucformat.load(str(Path(__file__).parent))


# ---------------------------------------------------------------- ranks


def _full(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def _save_placed(path: str) -> None:
    for number, (mesh, placements, shape) in enumerate(LAYOUTS):
        tensor = distribute_tensor(_full(shape), init_device_mesh("cpu", mesh), placements)
        ucformat.save(f"{path}/{number}", {"w": tensor, "plain": torch.arange(5), "step": 1})


def _load_placed(path: str, mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> list[int]:
    """Numbers of the layouts from which something else was loaded."""
    wrong = []
    for number, (*_, shape) in enumerate(LAYOUTS):
        live = distribute_tensor(torch.zeros(shape), init_device_mesh("cpu", mesh), placements)
        state: dict[str, object] = {"w": live, "plain": torch.zeros(5, dtype=torch.int64), "step": 0}
        ucformat.load(f"{path}/{number}", into=state)
        if not torch.equal(live.full_tensor(), _full(shape)) or state["step"] != 1:
            wrong.append(number)
    return wrong


LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]] = [
    ((4,), (Shard(0),), (1023, 6)),
    ((4,), (Shard(0),), (2, 3)),
    ((2, 2), (Shard(0), Shard(0)), (256, 8)),
    ((2, 2), (Shard(1), Shard(0)), (7, 9)),
    ((2, 2), (Replicate(), Shard(1)), (6, 5)),
]
TARGETS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((3,), (Shard(0),)),
    ((1,), (Replicate(),)),
    ((2, 1), (Shard(1), Shard(0))),
]


def test_any_layout_loads_into_any_other_bit_for_bit(tmp_path: Path) -> None:
    """Uneven and empty shards, both mesh dimensions on one tensor dimension, replicas; onto 3, 1 and 2 ranks."""
    on_ranks(4, _save_placed, str(tmp_path))
    for number, (*_, shape) in enumerate(LAYOUTS):
        assert torch.equal(ucformat.load(str(tmp_path / str(number)))["w"], _full(shape))  # type: ignore[arg-type]
    for mesh, placements in TARGETS:
        assert on_ranks(int(np.prod(mesh)), _load_placed, str(tmp_path), mesh, placements) == [[]] * int(np.prod(mesh))


def _uneven(path: str) -> None:
    """An explicit 3 + 1 split of 4 rows, which torch itself records as 2 + 2."""
    rank = dist.get_rank()
    local = _full((4, 2))[:3] if rank == 0 else _full((4, 2))[3:]
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(local.clone(), mesh, (Shard(0),), shape=torch.Size((4, 2)), stride=(2, 1))
    ucformat.save(path, {"w": tensor})


def test_an_uneven_split_is_recorded_as_it_is(tmp_path: Path) -> None:
    on_ranks(2, _uneven, str(tmp_path / "ck"))
    assert torch.equal(ucformat.load(str(tmp_path / "ck"))["w"], _full((4, 2)))  # type: ignore[arg-type]


def _differing(path: str) -> list[str]:
    told = []
    mine = torch.tensor([2.0, 3.0]) if dist.get_rank() else torch.tensor([0.0, 1.0])
    for state in ({"state": mine}, {"value": dist.get_rank()}):
        try:
            ucformat.save(path, state)
        except ValueConflictError as error:
            told.append(str(error))
    ucformat.save(path, {"state": ucformat.rank_local(mine), "value": ucformat.rank_local(dist.get_rank())})
    return told


def _rank_local(path: str, policy: str) -> object:
    item = ucformat.rank_local(torch.zeros(2), on_resize=policy)  # type: ignore[arg-type]
    value = ucformat.rank_local(-1, on_resize=policy)  # type: ignore[arg-type]
    try:
        ucformat.load(path, into={"state": item, "value": value})
    except RankLocalError as error:
        return f"{type(error).__name__}: {error}"
    tensors = item.value if isinstance(item.value, list) else [item.value]
    return [t.tolist() for t in tensors], value.value


def test_per_rank_state_is_kept_apart_and_never_silently_rank_0s(tmp_path: Path) -> None:
    path = str(tmp_path / "ck")
    for told in on_ranks(2, _differing, path):
        assert len(told) == 2
        assert all("rank_local" in message for message in told)
    assert on_ranks(2, _rank_local, path, "error") == [([[0.0, 1.0]], 0), ([[2.0, 3.0]], 1)]
    for told in on_ranks(3, _rank_local, path, "error"):
        assert "saved by 2 ranks and wanted by 3" in told
    assert on_ranks(3, _rank_local, path, "modulo") == [([[0.0, 1.0]], 0), ([[2.0, 3.0]], 1), ([[0.0, 1.0]], 0)]
    assert on_ranks(1, _rank_local, path, "gather") == [([[0.0, 1.0], [2.0, 3.0]], [0, 1])]
    assert on_ranks(1, _rank_local, path, "keep") == [([[0.0, 0.0]], -1)]


def _stages(path: str) -> None:
    """Two pipeline stages; the head on the last is tied to the embedding on the first, and a copy of it there."""
    torch.manual_seed(0)
    emb = nn.Embedding(6, 4)
    if dist.get_rank() == 0:
        model = nn.ModuleDict({"emb": emb, "layers": nn.ModuleDict({"0": nn.Linear(4, 4)})})
    else:
        model = nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.Linear(4, 4)}), "norm": nn.LayerNorm(4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ucformat.save(path, {"model": model, "optimizer": optimizer, "step": 4}, step=4)


def test_pipeline_stages_unite_to_one_model(tmp_path: Path) -> None:
    on_ranks(2, _stages, str(tmp_path))
    found = ucformat.load(str(tmp_path))
    names = ["emb.weight", "layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight", "norm.bias", "norm.weight"]
    assert sorted(found["model"]) == names  # type: ignore[call-overload]
    (group,) = found["optimizer"]["param_groups"]  # type: ignore[index]
    assert sorted(group["params"]) == names
    assert group["momentum"] == 0.9


def _short_of_space(path: str) -> str:
    state = {"w": distribute_tensor(torch.ones(2, 100_000), init_device_mesh("cpu", (2,)), (Shard(0),))}
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        ucformat.save(path, state, step=2)
    except StorageError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "saved"


def test_no_space_on_one_rank_fails_the_save_on_every_rank_and_commits_nothing(tmp_path: Path) -> None:
    on_ranks(2, _save_step, str(tmp_path), 1)
    told = on_ranks(2, _short_of_space, str(tmp_path))
    assert told[0].startswith("StorageError: rank 1")
    assert told[1].startswith("StorageError")
    assert "00001.safetensors" in told[1]
    assert ucformat.steps(str(tmp_path)) == [1]
    on_ranks(2, _save_step, str(tmp_path), 2)
    assert ucformat.steps(str(tmp_path)) == [1, 2]


def _save_step(path: str, step: int) -> None:
    ucformat.save(path, {"w": distribute_tensor(torch.ones(2, 8) * step, init_device_mesh("cpu", (2,)), (Shard(0),))}, step=step)


TORN = """
    import os, signal, sys
    import torch, torch.distributed as dist
    from datetime import timedelta
    import ucformat
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    step, victim, after = map(int, sys.argv[2:])
    seen = 0
    def on_bytes(n):
        global seen
        seen += n
        if rank == victim and seen > after:
            os.kill(os.getpid(), signal.SIGKILL)
    state = {"w": ucformat.Shard(torch.full((6_000_000,), float(step)), (12_000_000,), (rank * 6_000_000,))}
    ucformat.save(sys.argv[1], state, step=step, on_bytes=on_bytes)
    dist.barrier()  # a rank that leaves early would break the other's last collective
    dist.destroy_process_group()
"""


def _torn(path: Path, step: int, victim: int, after: int) -> list[int]:
    from tests.test_group import free_port

    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [Script(textwrap.dedent(TORN), path, step, victim, after, env={**env, "RANK": str(r)}) for r in range(2)]
    return [rank.wait() for rank in ranks]


def test_a_torn_save_is_never_loadable(tmp_path: Path) -> None:
    """A rank killed in mid write: the other one fails, the run still loads its last step, and the next save works."""
    assert _torn(tmp_path, 1, -1, 0) == [0, 0]
    for victim in (0, 1):
        codes = _torn(tmp_path, 2, victim, 8_000_000)
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] != 0
        with pytest.raises((NotACheckpointError, MissingFileError)):  # a survivor removes what was written
            ucformat.open(str(tmp_path / "step-00000002"))
        assert ucformat.steps(str(tmp_path)) == [1]
        assert ucformat.open(str(tmp_path))["w"][0:1].item() == 1
    assert _torn(tmp_path, 2, -1, 0) == [0, 0]
    assert ucformat.open(str(tmp_path))["w"][11_999_999:].item() == 2
    files = [p for p in (tmp_path / "step-00000002").rglob("*") if p.is_file()]
    assert len(files) == 4


def _subset(path: str) -> object:
    half = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    shard = ucformat.Shard(torch.ones(2) * dist.get_rank(), (4,), (2 * (dist.get_rank() - 1),))
    ucformat.save(path, {"w": shard}, process_group=half)
    live = ucformat.FlatShard(torch.zeros(1 if dist.get_rank() == 1 else 3), (4,), 0 if dist.get_rank() == 1 else 1)
    ucformat.load(path, into={"w": live}, process_group=half)
    return live.tensor.tolist()


def test_a_process_group_of_some_ranks_saves_and_loads_alone(tmp_path: Path) -> None:
    assert on_ranks(3, _subset, str(tmp_path / "ck")) == [None, [1.0], [1.0, 2.0, 2.0]]


def _replicas(path: str) -> list[int]:
    seen: list[int] = []
    state = {f"w{i}": torch.ones(1000 * (i + 1)) for i in range(6)}
    ucformat.save(path, state, on_bytes=seen.append)
    return seen


def test_replicas_are_written_once_and_shared_out_by_bytes(tmp_path: Path) -> None:
    written = [sum(seen) for seen in on_ranks(3, _replicas, str(tmp_path / "ck"))]
    assert sum(written) == 4 * 21_000
    assert max(written) - min(written) <= 4 * 1000
