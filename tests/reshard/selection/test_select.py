"""What a selection means: names of tensors and paths of values, and nothing is left out without being named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

import ucformat
from tests.checkpoints import write_native
from ucformat import formats
from ucformat.errors import UnsupportedError
from ucformat.reshard.convert import convert, prepare
from ucformat.reshard.selection.select import choose, expect_matches, narrow
from ucformat.values.codec import Opaque, TensorRef

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # what stock DCP says to one process

VALUES = {
    "step": 3,
    "none": None,
    "empty": {},
    "data": [1, 2],
    "optimizer": {"param_groups": [{"lr": 0.1, "params": ["w"]}], "note": "x"},
    "a/b": {"c": 1},
}


class Policy:
    """Pickled by reference and unknown to the reader; holds a tensor."""

    def __init__(self) -> None:
        self.mask = torch.arange(3)


@pytest.fixture
def src(tmp_path: Path) -> str:
    tensors = {"model/w": torch.ones(2), "optimizer/w/exp_avg": torch.zeros(2)}
    write_native(tmp_path / "src", tensors, values=VALUES)
    return str(tmp_path / "src")


@pytest.mark.parametrize("to", ["dcp", "torchsave"])
def test_objects_of_unknown_classes_that_do_not_go_over_are_named_with_their_class(tmp_path: Path, to: str) -> None:
    tree = {"model": {"w": torch.ones(2)}, "args": {"policies": [1, Policy()], "lr": 0.5}, "policy": Policy(), "step": 3}
    torch.save(tree, tmp_path / "src.pt")
    class_name = f"{Policy.__module__}.Policy"
    lost = (f"args/policies/1 ({class_name})", f"policy ({class_name})")
    planned = prepare(str(tmp_path / "src.pt"), str(tmp_path / "out"), to)
    report = convert(str(tmp_path / "src.pt"), str(tmp_path / "out"), to)
    for told in (planned, report):
        assert told.values_left_out == lost
        assert told.left_out == ("args/policies/1/state/mask", "policy/state/mask")  # they have no place without their object
        assert told.remarks[-1] == f"left out, {to} has no place for objects of unknown classes: {', '.join(lost)}"
    assert ucformat.load(str(tmp_path / "out")) == {
        "model": {"w": pytest.approx(torch.ones(2))},
        "args": {"policies": [1, None], "lr": 0.5},
        "step": 3,
    }


def test_native_keeps_objects_of_unknown_classes(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "policy": Policy()}, tmp_path / "src.pt")
    report = convert(str(tmp_path / "src.pt"), str(tmp_path / "out"), "native")
    assert (report.left_out, report.values_left_out) == ((), ())
    policy: Any = ucformat.load(str(tmp_path / "out"))["policy"]
    assert isinstance(policy, Opaque)
    assert torch.equal(policy.state["state"]["mask"], torch.arange(3))  # type: ignore[index]


def test_values_that_a_format_or_a_choice_leaves_out_are_named(src: str) -> None:
    catalog = formats.open_catalog(src)
    assert choose(catalog, formats.writer("hf"), (), (), src).values_left_out == (
        "a%2Fb",
        "data",
        "none",
        "optimizer",
        "step",
    )
    chosen = choose(catalog, formats.writer("native"), (), ("optimizer/note", "data/*", "a%2Fb"), src)
    assert chosen.values_left_out == ("a%2Fb", "data", "optimizer/note")
    assert chosen.catalog.values == {
        "step": 3,
        "none": None,
        "empty": {},
        "optimizer": {"param_groups": [{"lr": 0.1, "params": ["w"]}]},
    }
    chosen = choose(catalog, formats.writer("native"), ("optimizer/*/exp_avg",), (), src)
    assert chosen.catalog.values == {"optimizer": VALUES["optimizer"]}, "states keep their hyper-parameters"
    assert chosen.left_out == ("model/w",)


def test_a_tensor_in_a_list_that_is_not_chosen_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "list": [torch.zeros(1), torch.ones(1), 7]}, tmp_path / "src.pt")
    for to in ("native", "dcp", "torchsave"):
        report = convert(str(tmp_path / "src.pt"), str(tmp_path / to), to, exclude=["list/0"])
        assert report.left_out == ("list/0",)
        found: Any = ucformat.load(str(tmp_path / to))["list"]
        assert (found[0], found[1].tolist(), found[2]) == (None, [1.0], 7)
    live: dict[str, Any] = {"model": {"w": torch.zeros(1)}}
    state_dict_loader.load(live, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert live["model"]["w"].item() == 1


def test_narrowing_chooses_values_by_their_paths(src: str) -> None:
    catalog = formats.open_catalog(src)
    assert narrow(catalog, (), ()).values == VALUES
    assert narrow(catalog, ("optimizer/*",), ("*/note",)).values == {
        "optimizer": {"param_groups": [{"lr": 0.1, "params": ["w"]}]}
    }
    assert narrow(catalog, ("data/*", "none"), ()).values == {"none": None, "data": [1, 2]}
    assert narrow(catalog, ("model",), ()).values == {}


def test_a_pattern_that_means_nothing_on_any_side_is_an_error(src: str) -> None:
    catalog = formats.open_catalog(src)
    expect_matches(["model/*", "optimizer"], [catalog], src)
    expect_matches(["step"], [catalog], src, values=True)
    for pattern, values in (("modle/*", True), ("step", False)):
        with pytest.raises(UnsupportedError, match="no name matches"):
            expect_matches([pattern], [catalog], src, values=values)


def test_placeholders_of_tensors_that_stay_are_kept(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "list": [torch.zeros(1)]}, tmp_path / "src.pt")
    chosen = choose(formats.open_catalog(str(tmp_path / "src.pt")), formats.writer("native"), (), (), "src")
    assert chosen.catalog.values == {"list": [TensorRef("list/0")]}
