"""The quick look at a state is the full one, whatever was done to the state since the last."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import ucformat
from tests.reshard.ranks import on_ranks
from tests.snapshot.rigs.worlds import (
    MUTATIONS,
    Mutation,
    World,
    advance,
    count,
    refresh_many,
    replace_scratch,
    schedule,
    tell,
    train,
)
from ucformat.errors import UcformatError
from ucformat.group import Group, current
from ucformat.snapshot.source.revisit import Watch
from ucformat.snapshot.source.share import Boundary, MovedError, Share, agree, look


def outcome(act: Callable[[], Boundary]) -> object:
    """What a look tells: where every view lies, values, or what is wrong."""
    try:
        found = act()
    except MovedError as error:
        return frozenset(error.moved)
    except UcformatError as error:
        return type(error), str(error)
    where = [(v.data_ptr(), v.shape, v.stride(), v.dtype, v.device, v.is_neg(), v.requires_grad) for v in found.views]
    return where, found.stable, found.tree


def assert_agrees(watch: Watch, state: dict[str, Any], share: Share, told: object) -> None:
    assert outcome(lambda: watch.look(state)) == outcome(lambda: look(state, share, Group())), told


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_look_after_any_one_change_is_the_full_one(mutation: Mutation) -> None:
    for seed in range(3):
        world = World()
        share = agree(world.state, Group())
        watch = Watch(share, Group())
        watch.look(world.state)
        for i in range(2):
            try:
                mutation(world, Random(seed))
            except (KeyError, RuntimeError, AttributeError):
                assert i == 1  # some changes can be made once only
                break
            assert_agrees(watch, world.state, share, mutation)
            assert_agrees(watch, world.state, share, "once more")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=6), st.integers(0, 1000))
def test_a_look_after_any_changes_is_the_full_one(mutations: list[Mutation], seed: int) -> None:
    world, random = World(), Random(seed)
    share = agree(world.state, Group())
    watch = Watch(share, Group())
    for mutation in mutations:
        try:
            mutation(world, random)
        except (KeyError, RuntimeError, AttributeError, TypeError, IndexError, ValueError, AssertionError):
            continue  # not after what was done before
        assert_agrees(watch, world.state, share, mutations)


def test_a_state_that_did_not_move_is_not_walked_in_full_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    share = agree(world.state, Group())
    watch = Watch(share, Group())
    watch.look(world.state)
    monkeypatch.setattr(Watch, "_in_full", lambda *_: pytest.fail("walked in full"))
    for mutation in (train, advance, schedule, count, tell, refresh_many, replace_scratch, train):
        mutation(world, Random(0))
        assert_agrees(watch, world.state, share, mutation)


def test_states_under_keys_that_are_no_text_leave_their_marks_in_the_values() -> None:
    world = World()
    world.adam.state[world.free][7] = torch.rand(2)
    share = agree(world.state, Group())
    watch = Watch(share, Group())
    for _ in range(2):
        assert_agrees(watch, world.state, share, "a number")


def test_what_is_remembered_keeps_no_tensor_alive() -> None:
    world = World()
    share = agree(world.state, Group())
    watch = Watch(share, Group())
    for _ in range(2):
        watch.look(world.state)
    states = next(iter(world.adam.state.values()))
    memory: Any = states["exp_avg"].untyped_storage()._weak_ref()
    assert not torch.UntypedStorage._expired(memory)
    del states["exp_avg"]
    assert torch.UntypedStorage._expired(memory)
    torch.UntypedStorage._free_weak_ref(memory)


def on_two_ranks(kind: str) -> list[tuple[str, bool, bool]]:
    """For each thing done, whether the looks agreed and whether the state was walked in full."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.rand(2, 8)).sum().backward()
        optimizer.step()

    step()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": ucformat.rank_local(torch.get_rng_state()), "n": 0}
    share = agree(state, current())
    watch = Watch(share, current())
    first = next(model.parameters())

    def gather() -> None:
        model(torch.rand(2, 8))  # leaves the outer parameters gathered

    def advance() -> None:
        state["n"] += 1

    def reseat() -> None:
        if isinstance(first, DTensor):
            first._local_tensor = first._local_tensor.clone()
        else:
            first.data = first.data.clone()

    def replace() -> None:
        optimizer.state[first]["exp_avg"] = torch.zeros_like(first)

    def repeat() -> None:
        """Sharded before, whole on every rank from now on."""
        if isinstance(first, DTensor):
            zeros: Any = torch.zeros_like(first)
            optimizer.state[first]["exp_avg"] = zeros.redistribute(mesh, [Replicate()])

    def reframe() -> None:
        """The same memory, which is another part of another tensor from now on."""
        old = optimizer.state[first]["exp_avg_sq"]
        if isinstance(old, DTensor):
            optimizer.state[first]["exp_avg_sq"] = DTensor.from_local(old.to_local(), mesh, [Replicate()])

    told = []
    for act in (advance, step, gather, reseat, replace, advance, reframe, repeat):
        act()
        before = watch._known
        found = outcome(lambda: watch.look(state))
        told.append((act.__name__, found == outcome(lambda: look(state, share, current())), watch._known is not before))
    return told


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_look_at_a_wrapped_or_sharded_model_is_the_full_one(kind: str) -> None:
    for told in on_ranks(2, on_two_ranks, kind):
        assert [name for name, agrees, _ in told if not agrees] == []
        moved = {"advance": [True, False], "step": [False], "gather": [False], "reseat": [True], "replace": [True]}
        assert {name: [full for at, _, full in told if at == name] for name in moved} == moved


def strided() -> tuple[int, bool, bool]:
    """Of a tensor of which each rank holds two boxes that lie in one local tensor: boxes, and as above."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(3, 8, bias=False)
    local = torch.rand(4, 3)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)], run_check=False))
    state: dict[str, Any] = {"model": model, "n": 0}
    share = agree(state, current())
    watch = Watch(share, current())
    watch.look(state)
    known = watch._known
    state["n"] = 1
    agrees = outcome(lambda: watch.look(state)) == outcome(lambda: look(state, share, current()))
    return share.pieces, agrees, watch._known is known


def test_boxes_within_one_tensor_are_looked_at_one_by_one() -> None:
    assert on_ranks(2, strided) == [(2, True, True)] * 2


def uneven() -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    state = {"x": DTensor.from_local(torch.rand(1 + rank, 2), mesh, [ShardOf(0)], shape=torch.Size([3, 2]), stride=(2, 1))}
    share = agree(state, current())
    watch = Watch(share, current())
    return share.together, all(outcome(lambda: watch.look(state)) == outcome(lambda: look(state, share, current())) for _ in "ab")


def test_uneven_shards_are_looked_at_together() -> None:
    assert on_ranks(2, uneven) == [(True, True)] * 2
