"""Containers that are more than lists and dicts: a live one keeps what makes it so, and the rest says what to store."""

from __future__ import annotations

import argparse
import enum
from collections import Counter, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ucformat
from ucformat.errors import UnrepresentableError, UnsupportedError

Pair = namedtuple("Pair", "a b")  # noqa: PYI024  # the kind without annotations is what users have


class Phase(enum.Enum):
    WARMUP = 1


class Level(enum.IntEnum):
    HIGH = 1


@dataclass
class Config:
    lr: float = 0.1


def fresh(n: int) -> dict[str, Any]:
    return {
        "losses": deque([0.5 * n, n, [n]], maxlen=5),
        "seen": Counter(a=2 * n, b=n),
        "lists": defaultdict(list, {"x": [n], 3: [n, n]}),
        "tensors": deque([torch.full((2,), float(n)), torch.full((3,), float(n))]),
        "by_name": defaultdict(list, {"w": torch.full((2,), float(n)), "deep": deque([np.full(2, n)])}),
    }


@pytest.mark.parametrize("local", [False, True])
def test_a_live_container_gets_its_items_back_and_stays_what_it_is(tmp_path: Path, local: bool) -> None:
    def wrap(state: dict[str, Any]) -> dict[str, Any]:
        return {key: ucformat.rank_local(item) for key, item in state.items()} if local else dict(state)

    saved, live = fresh(3), fresh(4)
    ucformat.save(tmp_path / "ck", wrap(saved))
    held = dict(live)
    tensors = [*live["tensors"], live["by_name"]["w"]]
    into = wrap(live)
    ucformat.load(tmp_path / "ck", into=into)
    for key, item in held.items():
        assert (into[key].value if local else into[key]) is item
        assert type(item) is type(saved[key])
    assert live["losses"] == saved["losses"]
    assert live["losses"].maxlen == 5
    assert live["seen"] == saved["seen"]
    assert live["seen"].most_common(1) == [("a", 6)]
    assert live["lists"] == saved["lists"]
    assert live["lists"]["new"] == []
    assert [x.tolist() for x in live["tensors"]] == [[3, 3], [3, 3, 3]]
    assert [a is b for a, b in zip([*live["tensors"], live["by_name"]["w"]], tensors, strict=True)] == [True] * 3
    assert live["by_name"]["deep"][0].tolist() == [3, 3]
    assert isinstance(live["by_name"]["deep"][0], np.ndarray)


def test_a_deque_of_another_length_gets_all_that_is_stored_or_refuses(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "ck", {"window": {"losses": deque([1, 2, 3])}, "w": torch.ones(1)})
    live: dict[str, Any] = {"window": {"losses": deque([9], maxlen=3)}, "w": torch.zeros(1)}
    ucformat.load(tmp_path / "ck", into=live)
    assert live["window"]["losses"] == deque([1, 2, 3])
    short: dict[str, Any] = {"window": {"losses": deque([9], maxlen=2)}, "w": torch.zeros(1)}
    with pytest.raises(UnsupportedError, match="window/losses: a deque of at most 2 items here, 3 are stored"):
        ucformat.load(tmp_path / "ck", into=short)
    assert short["w"].tolist() == [0]
    assert list(short["window"]["losses"]) == [9]


def test_arrays_in_a_namespace_are_read_into_the_live_one(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "ck", {"args": argparse.Namespace(a=np.arange(3), more=[np.ones(2)], lr=0.5)})
    array = np.zeros(3, dtype=np.int64)
    live: dict[str, Any] = {"args": argparse.Namespace(a=array)}
    ucformat.load(tmp_path / "ck", into=live)
    assert live["args"].a is array
    assert array.tolist() == [0, 1, 2]
    assert (live["args"].more[0].tolist(), live["args"].lr) == ([1, 1], 0.5)


def test_modules_in_such_containers_are_saved_and_loaded(tmp_path: Path) -> None:
    def models() -> dict[str, Any]:
        return {"of": defaultdict(list, {"gen": nn.Linear(2, 2)}), "stages": deque([nn.Linear(2, 3)])}

    saved, live = models(), models()
    ucformat.save(tmp_path / "ck", saved)
    ucformat.load(tmp_path / "ck", into=live)
    for a, b in ((saved["of"]["gen"], live["of"]["gen"]), (saved["stages"][0], live["stages"][0])):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.bias, b.bias)


@pytest.mark.parametrize(
    ("thing", "hint"),
    [
        (slice(1, 2), r"store \(x.start, x.stop, x.step\)"),
        (range(3), r"store \(x.start, x.stop, x.step\)"),
        (Pair(1, 2), r"store x._asdict\(\)"),
        (Phase.WARMUP, "store its .name or .value"),
        (Level.HIGH, "store its .name or .value"),
        (Config(), r"store dataclasses.asdict\(x\), or give its class methods state_dict and load_state_dict"),
        (np.str_("a"), "store it as str"),
        (object(), "convert it to plain values or leave it out"),
    ],
)
def test_what_can_not_be_stored_exactly_is_refused_by_path_and_says_what_to_store(
    tmp_path: Path, thing: object, hint: str
) -> None:
    with pytest.raises(UnrepresentableError, match=rf"state at run/thing: a {type(thing).__qualname__} can't be stored: {hint}"):
        ucformat.save(tmp_path / "ck", {"run": {"thing": thing}})
    assert not (tmp_path / "ck").exists()
