"""torch's nests of training state ↔ the canonical nest: what is recognised, what is left alone, and back."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np
import pytest

from ucformat.errors import UnrepresentableError
from ucformat.formats.torchstate import plain, to_canonical, to_torch
from ucformat.values.codec import Opaque, RankLocal


class Leaf:
    """Stands for a tensor."""


T = Leaf()
GROUPS = [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c"]}]


def canonical(tree: dict[str, Any]) -> dict[str, Any]:
    """The canonical nest, after making sure that the way back leads to the same tree."""
    found, outer = to_canonical(tree, lambda x: isinstance(x, Leaf))
    again, same = to_canonical(to_torch(found, outer), lambda x: isinstance(x, Leaf))
    assert (again, same) == (found, outer)
    return found


@pytest.mark.parametrize("key", ["optimizer", "optim", "optim_state", "optimizer_state_dict", "optim_state_dict"])
def test_optimizer_by_name_is_recognised_under_its_usual_keys(key: str) -> None:
    found = canonical({"model": {"a": T}, key: {"state": {"a": {"m": T}}, "param_groups": GROUPS}})
    assert found == {"model": {"a": T}, "optimizer": {"a": {"m": T}, "param_groups": GROUPS}}


def test_two_optimizers_are_left_alone() -> None:
    tree = {"optim": {"state": {}, "param_groups": GROUPS}, "optimizer": {"state": {}, "param_groups": GROUPS}}
    assert canonical(tree) == tree


def test_optimizer_by_index_needs_the_names_of_its_parameters() -> None:
    unnamed: dict[str, Any] = {"optimizer": {"state": {0: {"m": T}}, "param_groups": [{"lr": 0.1, "params": [0]}]}}
    assert canonical(unnamed) == unnamed
    named = {"state": {0: {"m": T}, 1: {"m": T}}, "param_groups": [{"params": [0, 1], "param_names": ["a", "b"]}]}
    wanted = {"optimizer": {"a": {"m": T}, "b": {"m": T}, "param_groups": [{"params": ["a", "b"]}]}}
    assert canonical({"optimizer": named}) == wanted
    as_text = {"state": {"0": {"m": T}, "1": {"m": T}}, "param_groups": named["param_groups"]}
    assert canonical({"optimizer": as_text}) == wanted


def test_state_under_a_tied_name_is_state_by_name_too() -> None:
    """A tied parameter has state under both its names, and one of them is in no group."""
    tree = {"optimizer": {"state": {"a": {"m": T}, "tied": {"m": T}}, "param_groups": GROUPS}}
    assert canonical(tree) == {"optimizer": {"a": {"m": T}, "tied": {"m": T}, "param_groups": GROUPS}}


def test_state_of_an_unknown_number_is_left_alone() -> None:
    tree = {"optimizer": {"state": {7: {"m": T}}, "param_groups": GROUPS}}
    assert canonical(tree) == tree


def test_flattened_optimizer_gets_its_groups_back() -> None:
    flat: dict[str, Any] = {"state.l.0.w.m": T, "state.l.0.b.m": T}
    flat |= {"param_groups.l.0.w.lr": 1, "param_groups.l.0.b.lr": 1, "param_groups.l.1.w.lr": 2}
    assert canonical({"optim": flat}) == {
        "optimizer": {
            "l.0.w": {"m": T},
            "l.0.b": {"m": T},
            "param_groups": [{"lr": 1, "params": ["l.0.w", "l.0.b"]}, {"lr": 2, "params": ["l.1.w"]}],
        }
    }


def test_bare_state_dict_is_the_model_only_when_that_is_clear() -> None:
    assert canonical({"l.0.w": T, "l.0.b": T}) == {"model": {"l.0.w": T, "l.0.b": T}}
    for tree in ({"w": T, "b": T}, {"l.0.w": T, "epoch": 3}, {"l.0.w": T, "model": {"x": T}}):
        assert canonical(tree) == tree
    beside: dict[str, Any] = {"w": T, "epoch": 3, "optim": {"state": {"w": {"m": T}}, "param_groups": [{"params": ["w"]}]}}
    assert canonical(beside)["model"] == {"w": T}
    stranger = {**beside, "optim": {"state": {"v": {"m": T}}, "param_groups": [{"params": ["v"]}]}}
    assert canonical(stranger)["w"] is T


def test_usual_keys_of_models_are_recognised() -> None:
    assert canonical({"model_state_dict": {"w": T}, "epoch": 1}) == {"model": {"w": T}, "epoch": 1}
    assert canonical({"state_dict": {"w": T}}) == {"model": {"w": T}}


def test_app_around_both_is_opened() -> None:
    tree = {"app": {"model": {"a": T}, "optim": {"state": {"a": {"m": T}}, "param_groups": GROUPS}}}
    assert canonical(tree) == {"model": {"a": T}, "optimizer": {"a": {"m": T}, "param_groups": GROUPS}}


NUMBERED: dict[str, Any] = {"state": {0: {"m": T}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
NAMED: dict[str, Any] = {"a": {"m": T}, "param_groups": [{"lr": 1, "params": ["a"]}]}
FLAT = {"state.a.m": T, "param_groups.a.lr": 1, "param_groups.a.param_names": ["a"]}


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        ({"optimizer_state_dict": NUMBERED}, {"optimizer": NUMBERED}),
        (
            {"optimizer_states": [NUMBERED], "state_dict": {"a": T}, "epoch": 1},
            {"optimizer": NUMBERED, "model": {"a": T}, "epoch": 1},
        ),
        (
            {"optim": FLAT, "a": T},
            {"optimizer": {"a": {"m": T}, "param_groups": [{"lr": 1, "params": ["a"]}]}, "model": {"a": T}},
        ),
        ({"l.0.w": T, "l.0.b": T}, {"model": {"l.0.w": T, "l.0.b": T}}),
        ({"app": {"model": {"a": T}, "optim": FLAT}}, None),
        ({"model_state_dict": {"a": T}, "optimizer_states": [NUMBERED, NUMBERED]}, None),
    ],
)
def test_what_was_moved_goes_back_to_its_place(tree: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    found, outer = to_canonical(tree, lambda x: isinstance(x, Leaf))
    assert wanted is None or found == wanted
    assert to_torch(found, outer) == tree


def test_numbers_that_became_text_are_numbers_again() -> None:
    """DCP writes keys as text."""
    assert canonical({"optimizer": {**NUMBERED, "state": {"0": {"m": T}}}}) == {"optimizer": NUMBERED}


def test_a_place_that_is_taken_is_an_error() -> None:
    with pytest.raises(UnrepresentableError, match="'epoch' is taken"):
        to_torch({"model": {"epoch": T}, "epoch": 3}, {"model": ""})


def test_canonical_form_is_left_alone_and_converts_back() -> None:
    held = {"model": {"a": T}, "optimizer": {"a": {"m": T}, "param_groups": GROUPS}, "step": 1}
    assert canonical(held) == held
    nested = to_torch(held)
    assert nested["optimizer"] == {"state": {"a": {"m": T}}, "param_groups": GROUPS}
    assert canonical(nested) == held
    assert to_torch(held, param_names=True)["optimizer"]["param_groups"][1]["param_names"] == ["c"]


@pytest.mark.parametrize("optimizer", [None, 5, {}, {"x": 5}, {"state": {}, "param_groups": []}, {"param_groups": 5}])
def test_what_is_no_canonical_optimizer_is_written_as_it_is(optimizer: Any) -> None:
    assert to_torch({"optimizer": optimizer}) == {"optimizer": optimizer}


def test_what_an_optimizer_adds_to_its_state_dict_stays_beside_it() -> None:
    stored = {"optimizer": {"state": {"w": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["w"]}], "averaged": 7}}
    found = canonical(stored)
    assert found["optimizer"]["_extra_state"] == {"averaged": 7}
    assert to_torch(found) == stored


def test_plain_values_are_what_weights_only_accepts() -> None:
    tree = {
        "a": [1, {"k": 2}],
        "n": np.float32(1.5),
        "s": frozenset([1]),
        "p": pathlib.PurePosixPath("x"),
        "args": argparse.Namespace(q=(np.int64(3),)),
        "r": RankLocal("keep", (None,), (5,)),
    }
    assert plain(tree, exact=False) == {
        "a": [1, {"k": 2}],
        "n": 1.5,
        "s": {1},
        "p": "x",
        "args": {"q": (3,)},
        "r": {"ucf.rank_local": "keep", "coords": [None], "values": [5]},
    }
    exact = plain(tree, exact=True)
    assert canonical(exact)["r"] == tree["r"]
    assert type(exact["n"]) is np.float32
    assert type(exact["s"]) is frozenset
    assert exact["args"] == argparse.Namespace(q=(np.int64(3),))


@pytest.mark.parametrize("exact", [True, False])
def test_a_stand_in_of_an_unknown_class_is_never_pickled(exact: bool) -> None:
    with pytest.raises(UnrepresentableError, match=r"a/1/o: a x\.Z can't be stored"):
        plain({"a": [1, {"o": Opaque("x.Z", {})}]}, exact=exact)
