"""Loading into tensors whose elements share memory, and into arrays that can't be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ucformat
from ucformat.errors import UnsupportedError


class Expanded(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.register_buffer("scale", torch.full((1,), value).expand(4))
        self.register_buffer("grid", torch.full((3, 1, 2), value).expand(3, 5, 2))


@pytest.mark.parametrize("to", [None, "torchsave"])
def test_an_expanded_buffer_loads_into_itself_and_stays_expanded(tmp_path: Path, to: str | None) -> None:
    ucformat.save(tmp_path / "ck", {"model": Expanded(float("nan")), "plain": torch.arange(2.0).expand(3, 2)})
    if to is not None:
        ucformat.convert(tmp_path / "ck", tmp_path / "to", to=to)
    live, plain = Expanded(1.0), torch.zeros(2).expand(3, 2)
    ucformat.load(tmp_path / ("ck" if to is None else "to"), into={"model": live, "plain": plain})
    assert live.get_buffer("scale").isnan().all()
    assert live.get_buffer("grid").isnan().all()
    assert (live.get_buffer("scale").stride(), live.get_buffer("grid").stride()) == ((0,), (2, 0, 1))
    assert plain.tolist() == [[0, 1]] * 3


def test_a_single_element_of_any_stride_is_saved_and_loaded(tmp_path: Path) -> None:
    def single(n: float) -> dict[str, Any]:
        return {
            "expanded": torch.full((), n).expand(1),
            "sliced": torch.full((8,), n)[::4][1:],
            "rows": torch.full((3,), n).expand(1, 3),
        }

    ucformat.save(tmp_path / "ck", single(2.0))
    live = single(0.0)
    ucformat.load(tmp_path / "ck", into=dict(live))
    assert [x.flatten().tolist() for x in live.values()] == [[2], [2], [2, 2, 2]]


def test_values_that_differ_along_an_expanded_dimension_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "ck", {"w": torch.ones(2), "x": torch.tensor([[1.0, 2.0], [1.0, 2.5]])})
    live = {"w": torch.zeros(2), "x": torch.zeros(2).expand(2, 2)}
    with pytest.raises(UnsupportedError, match="x: expanded along dimension 0, where the stored values differ"):
        ucformat.load(tmp_path / "ck", into=dict(live))
    assert live["w"].tolist() == [0, 0]
    assert live["x"].tolist() == [[0, 0], [0, 0]]


def test_elements_that_share_memory_otherwise_are_refused_and_unusual_strides_are_not(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "ck", {"x": torch.arange(6.0).view(3, 2)})
    with pytest.raises(UnsupportedError, match="x: elements share memory"):
        ucformat.load(tmp_path / "ck", into={"x": torch.zeros(4).unfold(0, 2, 1)})
    apart = torch.zeros(8).as_strided((3, 2), (2, 3))
    ucformat.load(tmp_path / "ck", into={"x": apart})
    assert apart.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_an_array_that_can_not_be_written_is_refused_and_never_left_as_it_was(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "ck", {"a": np.arange(4)})
    frozen = np.zeros(4, dtype=np.int64)
    frozen.flags.writeable = False
    cases: list[tuple[Any, str]] = [(frozen, "read-only"), (np.zeros(4, dtype=np.int64)[::-1], "negative strides")]
    for array, why in cases:
        with pytest.raises(UnsupportedError, match=why):
            ucformat.load(tmp_path / "ck", into={"a": array})
    ucformat.save(tmp_path / "own", {"a": ucformat.rank_local(np.arange(4))})
    item = ucformat.rank_local(frozen)  # one's own is replaced
    ucformat.load(tmp_path / "own", into={"a": item})
    assert isinstance(item, ucformat.RankLocalItem)
    assert item.value.tolist() == [0, 1, 2, 3]
