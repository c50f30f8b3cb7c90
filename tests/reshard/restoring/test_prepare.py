"""Loading into a live state of another world size: what each rank had of its own goes where the policy says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ucformat
from tests.reshard.ranks import on_ranks
from ucformat.errors import NamesMismatchError

SAVED = 3


def own(rank: int) -> dict[str, Any]:
    """What rank `rank` has of its own: tensors in place and in lists, of a size that differs from rank to rank."""
    return {
        "rng": ucformat.rank_local(torch.full((4,), rank, dtype=torch.uint8), on_resize="modulo"),
        "seen": ucformat.rank_local({"at": rank, "items": [torch.full((rank + 1,), float(rank))]}, on_resize="modulo"),
        "kept": ucformat.rank_local([torch.full((2,), rank)], on_resize="keep"),
        "all": ucformat.rank_local({"n": torch.tensor(rank)}, on_resize="gather"),
        "w": torch.arange(3.0),
    }


def saving(path: str) -> None:
    ucformat.save(path, own(dist.get_rank()))


def loading(path: str) -> dict[str, Any]:
    state = own(90 + dist.get_rank())
    ucformat.load(path, into=state)
    return {key: item.value if isinstance(item, ucformat.RankLocalItem) else item for key, item in state.items()}


def refused(path: str) -> str:
    state = {"rng": ucformat.rank_local(torch.zeros(4, dtype=torch.uint8))}
    with pytest.raises(NamesMismatchError) as caught:
        ucformat.load(path, into=state)
    assert state["rng"].value.tolist() == [0, 0, 0, 0]
    return str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("own") / "ck")
    on_ranks(SAVED, saving, path)
    return path


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rank_local_items_load_strictly_onto_fewer_and_more_ranks(saved: str, ranks: int) -> None:
    """Items of ranks that are not there any more are no leftovers."""
    for rank, found in enumerate(on_ranks(ranks, loading, saved)):
        source = rank % SAVED
        assert found["rng"].tolist() == [source] * 4
        assert found["seen"]["at"] == source
        assert found["seen"]["items"][0].tolist() == [source] * (source + 1)
        assert found["kept"][0].tolist() == [rank if ranks == SAVED else 90 + rank] * 2
        gathered = found["all"] if ranks != SAVED else [found["all"]]
        assert [int(item["n"]) for item in gathered] == (list(range(SAVED)) if ranks != SAVED else [rank])
        assert found["w"].tolist() == [0, 1, 2]


def test_without_the_items_in_the_state_they_are_leftovers(saved: str) -> None:
    """Strict loading still names an item that nobody asks for."""
    for told in on_ranks(2, refused, saved):
        assert "stored but not wanted" in told
        assert "seen" in told
        assert "kept" in told


def test_loaded_without_a_state_every_ranks_own_is_there(saved: str) -> None:
    found = ucformat.load(saved)["rng"]
    assert isinstance(found, ucformat.RankLocal)
    assert (found.policy, len(found.coords)) == ("modulo", SAVED)
    assert [item.tolist() for item in found.values] == [[rank] * 4 for rank in range(SAVED)]  # type: ignore[attr-defined]
