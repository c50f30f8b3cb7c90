"""Views of stored tensors equal what numpy makes of the tensors themselves, whatever is done to them and whatever is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file

from ucformat import formats
from ucformat.box import Box, flaw
from ucformat.catalog import Catalog
from ucformat.reshard.reading.lazy import read
from ucformat.views import Rewrite, View, concat, stack

Array = NDArray[np.float32]
SHAPES = {"a": (6, 4), "b": (6, 4), "c": (12,), "d": (2, 3, 4), "e": ()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    path = tmp_path_factory.mktemp("views") / "model.safetensors"
    tensors = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    save_file(tensors, path)
    return formats.open_catalog(str(path))


def truth(catalog: Catalog, name: str) -> Array:
    array: Array = read(catalog, name).numpy()
    return array


def name_of(catalog: Catalog, short: str) -> str:
    return next(name for name in catalog.names if name.rsplit("/", 1)[-1] == short)


class Step:
    """One operation on a view, and on the array that it stands for."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], rewrite: Rewrite) -> None:
        self.draw, self.rewrite = draw, rewrite

    def narrow(self, view: View, array: Array) -> tuple[View, Array]:
        axis = self.draw(st.integers(0, view.ndim - 1))
        start = self.draw(st.integers(0, view.shape[axis]))
        length = self.draw(st.integers(0, view.shape[axis] - start))
        return view.narrow(axis, start, length), np.take(array, range(start, start + length), axis)

    def permute(self, view: View, array: Array) -> tuple[View, Array]:
        axes = self.draw(st.permutations(range(view.ndim)))
        return view.permute(*axes), array.transpose(axes)

    def reshape(self, view: View, array: Array) -> tuple[View, Array]:
        shape = [*view.shape]
        if view.numel and self.draw(st.booleans()):
            outer = self.draw(st.sampled_from([n for n in range(1, view.numel + 1) if view.numel % n == 0]))
            shape = [outer, view.numel // outer]
        return view.reshape(*shape), array.reshape(shape)

    def unflatten(self, view: View, array: Array) -> tuple[View, Array]:
        axis = self.draw(st.integers(0, view.ndim - 1))
        n = view.shape[axis]
        outer = self.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) if n else 1
        sizes = (outer, n // outer)
        return view.unflatten(axis, sizes), array.reshape(*array.shape[:axis], *sizes, *array.shape[axis + 1 :])

    def flatten(self, view: View, array: Array) -> tuple[View, Array]:
        if view.ndim < 2:
            return view, array
        axis = self.draw(st.integers(0, view.ndim - 2))
        shape = (*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])
        return view.flatten(axis), array.reshape(shape)

    def joined(self, view: View, array: Array) -> tuple[View, Array]:
        axis = self.draw(st.integers(0, view.ndim - 1))
        return concat([view, view.narrow(axis, 0, view.shape[axis] // 2), view], axis), np.concatenate(
            [array, np.take(array, range(array.shape[axis] // 2), axis), array], axis
        )

    def stacked(self, view: View, array: Array) -> tuple[View, Array]:
        axis = self.draw(st.integers(0, view.ndim))
        return stack([view, view], axis), np.stack([array, array], axis)

    def padded(self, view: View, array: Array) -> tuple[View, Array]:
        axis = self.draw(st.integers(0, view.ndim - 1))
        more = self.draw(st.integers(0, 3))
        widths = [(0, more if i == axis else 0) for i in range(view.ndim)]
        return self.rewrite.padded(view, axis, view.shape[axis] + more), np.pad(array, widths)

    def swapped_halves(self, view: View, array: Array) -> tuple[View, Array]:
        half = view.shape[0] // 2
        parts = view.split([half, view.shape[0] - half])
        return concat(parts[::-1]), np.concatenate([array[half:], array[:half]])

    def repeated(self, view: View, array: Array) -> tuple[View, Array]:
        if not view.shape[0]:
            return view, array
        last = view.narrow(0, view.shape[0] - 1, 1)
        return concat([view, last.repeat(0, 2)]), np.concatenate([array, np.repeat(array[-1:], 2, 0)])


STEPS: list[Callable[..., tuple[View, Array]]] = [
    *(Step.narrow, Step.permute, Step.reshape, Step.unflatten, Step.flatten),
    *(Step.joined, Step.stacked, Step.padded, Step.swapped_halves, Step.repeated),
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_chain_of_operations_equals_numpys_box_by_box(data: st.DataObject, source: Catalog) -> None:
    rewrite = Rewrite(source)
    name = name_of(source, data.draw(st.sampled_from(["a", "c", "d"])))
    view, array = rewrite.view(name), truth(source, name)
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=5)):
        if view.numel > 2000 or view.ndim > 5:
            break
        view, array = step(Step(data.draw, rewrite), view, array)
        assert view.shape == array.shape
    made = rewrite.build({"x": view})
    assert flaw(Box.whole(view.shape), made.fragments.offset, made.fragments.length) is None or not view.numel
    assert np.array_equal(read(made, "x").numpy(), array)
    offset = [data.draw(st.integers(0, n)) for n in view.shape]
    box = Box(tuple(offset), tuple(data.draw(st.integers(0, n - o)) for n, o in zip(view.shape, offset, strict=True)))
    assert np.array_equal(read(made, "x", box).numpy(), array[box.slices])


def test_fused_queries_keys_and_values_come_apart_and_together_again(source: Catalog) -> None:
    rewrite = Rewrite(source)
    view, array = rewrite.view(name_of(source, "a")), truth(source, name_of(source, "a"))  # 2 groups of q, k, v rows
    groups = view.unflatten(0, (2, 3))
    apart = [groups.narrow(1, i, 1).flatten(0) for i in range(3)]
    again = concat([part.unflatten(0, (2, 1)) for part in apart], 1).flatten(0)
    made = rewrite.build({"k": apart[1], "again": again})
    assert np.array_equal(read(made, "k").numpy(), array[[1, 4]])
    assert np.array_equal(read(made, "again").numpy(), array)
    assert made.fragments.rows(0).stop == 6  # as many as there are stretches of rows


def test_a_scalar_and_an_empty_tensor_are_views_too(source: Catalog) -> None:
    rewrite = Rewrite(source)
    scalar = rewrite.view(name_of(source, "e"))
    empty = rewrite.view(name_of(source, "c")).narrow(0, 5, 0)
    made = rewrite.build(
        {"scalar": scalar, "row": stack([scalar, scalar]), "empty": empty, "zeros": rewrite.zeros("I64", (2, 0))}
    )
    value = float(truth(source, name_of(source, "e")))
    assert read(made, "scalar").item() == value
    assert read(made, "row").tolist() == [value, value]
    assert read(made, "empty").shape == (0,)
    assert read(made, "zeros").shape == (2, 0)


def test_what_can_mean_nothing_is_refused(source: Catalog) -> None:
    view = Rewrite(source).view(name_of(source, "a"))
    other = Rewrite(source).view(name_of(source, "c"))
    tries: list[Callable[[], object]] = [
        lambda: view.narrow(0, 4, 3),
        lambda: view.unflatten(0, (4, 2)),
        lambda: view.split([1, 2]),
        lambda: view.permute(0, 0),
        lambda: view.reshape(5),
        lambda: view.repeat(0, 2),
        lambda: concat([view, other]),
        lambda: concat([]),
        lambda: Rewrite(source).padded(view, 0, 3),
    ]
    for attempt in tries:
        with pytest.raises(ValueError):
            attempt()


def test_the_number_of_fragments_does_not_depend_on_the_number_of_rows(source: Catalog) -> None:
    view = Rewrite(source).view(name_of(source, "a"))
    assert len(view.permute(1, 0).unflatten(1, (2, 3)).start) == 1
    assert len(concat([view, view]).narrow(0, 3, 6).start) == 2
    assert math.prod(view.shape) == view.numel
