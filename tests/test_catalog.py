"""The catalog: what its builder refuses, and that filters and renames keep every fragment with its tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from ucformat.box import Box
from ucformat.catalog import Catalog, CatalogBuilder, File, TensorSpec, row_major
from ucformat.errors import FormatError
from ucformat.storage.open import open_store


@pytest.fixture
def builder(tmp_path: Path) -> CatalogBuilder:
    """A builder with one tensor `w`, F32 [4, 6], and one file of 96 bytes, just enough for it."""
    out = CatalogBuilder(open_store(str(tmp_path)))
    out.file(File("a.bin", 96))
    out.tensor("w", "F32", [4, 6])
    return out


def small_catalog(tmp_path: Path) -> Catalog:
    """Tensors `a` 1-D in two fragments, `b` 2-D in one, `c` 0-d; `tied` and `tied2` are aliases of `b`."""
    out = CatalogBuilder(open_store(str(tmp_path)))
    file = out.file(File("f", 1000))
    out.tensor("b", "BF16", [2, 3])
    out.tensor("a", "F32", [8])
    out.tensor("c", "I64", [])
    out.fragment("a", file, 100, Box((4,), (4,)))
    out.fragment("b", file, 0)
    out.fragment("a", file, 200, Box((0,), (4,)))
    out.fragment("c", file, 300)
    out.alias("tied", "b")
    out.alias("tied2", "tied")
    return out.build({"step": 1})


def where(catalog: Catalog, name: str) -> list[tuple[int, str]]:
    """(byte offset, box) of each fragment of a tensor."""
    index = catalog.find(name)
    ndim = len(catalog.tensors[index].shape)
    rows = range(*catalog.fragments.rows(index).indices(len(catalog.fragments)))
    return [(int(catalog.fragments.start[row]), str(catalog.fragments.box(row, ndim))) for row in rows]


def test_tensors_are_sorted_and_keep_their_fragments(tmp_path: Path) -> None:
    catalog = small_catalog(tmp_path)
    assert [spec.name for spec in catalog.tensors] == ["a", "b", "c"]
    assert where(catalog, "a") == [(100, "[4:8]"), (200, "[0:4]")]
    assert where(catalog, "b") == [(0, "[0:2, 0:3]")]
    assert where(catalog, "c") == [(300, "[]")]
    assert catalog.nbytes == 32 + 12 + 8
    assert catalog.spec("b") == TensorSpec("b", "BF16", (2, 3))


def test_an_alias_is_its_tensor_also_through_another_alias(tmp_path: Path) -> None:
    catalog = small_catalog(tmp_path)
    assert catalog.names == ["a", "b", "c", "tied", "tied2"]
    assert catalog.spec("tied2") == catalog.spec("b")
    with pytest.raises(KeyError):
        catalog.find("nothing")


def test_a_filter_keeps_fragments_with_their_tensors(tmp_path: Path) -> None:
    catalog = small_catalog(tmp_path).filter(lambda name: name in {"c", "a"})
    assert catalog.names == ["a", "c"]
    assert where(catalog, "a") == [(100, "[4:8]"), (200, "[0:4]")]
    assert where(catalog, "c") == [(300, "[]")]
    assert catalog.values == {"step": 1}


def test_a_filter_that_keeps_only_an_alias_keeps_the_tensor_under_that_name(tmp_path: Path) -> None:
    catalog = small_catalog(tmp_path).filter(lambda name: name.startswith("tied"))
    assert catalog.names == ["tied", "tied2"]
    assert [spec.name for spec in catalog.tensors] == ["tied"]
    assert where(catalog, "tied2") == [(0, "[0:2, 0:3]")]


def test_a_filter_that_keeps_nothing_leaves_an_empty_catalog(tmp_path: Path) -> None:
    catalog = small_catalog(tmp_path).filter(lambda _: False)
    assert catalog.names == []
    assert len(catalog.fragments) == 0


def test_a_rename_that_changes_the_order_keeps_fragments_with_their_tensors(tmp_path: Path) -> None:
    names = {"a": "z", "b": "y", "c": "x", "tied": "t", "tied2": "u"}
    catalog = small_catalog(tmp_path).rename(names.__getitem__)
    assert [spec.name for spec in catalog.tensors] == ["x", "y", "z"]
    assert (np.diff(catalog.fragments.tensor) >= 0).all()
    assert where(catalog, "z") == [(100, "[4:8]"), (200, "[0:4]")]
    assert where(catalog, "y") == where(catalog, "t") == [(0, "[0:2, 0:3]")]
    assert where(catalog, "x") == [(300, "[]")]


@pytest.mark.parametrize(
    "new",
    [lambda _: "same", {"a": "b", "b": "b", "c": "c", "tied": "t", "tied2": "u"}.__getitem__, lambda name: name[:1]],
    ids=["all one name", "two tensors", "alias onto alias"],
)
def test_a_rename_that_throws_names_together_is_refused(tmp_path: Path, new: Callable[[str], str]) -> None:
    with pytest.raises(FormatError, match="would both get the name"):
        small_catalog(tmp_path).rename(new)


def test_declaring_a_tensor_twice_must_agree(builder: CatalogBuilder) -> None:
    builder.tensor("w", "F32", (4, 6))
    with pytest.raises(FormatError, match=r"'w' is F32 \[4, 6\] in one place and BF16 \[4, 6\]"):
        builder.tensor("w", "BF16", [4, 6])
    with pytest.raises(FormatError, match=r"\[6, 4\] in another"):
        builder.tensor("w", "F32", [6, 4])


@pytest.mark.parametrize("dtype", ["F33", "", "float32"])
def test_an_unknown_dtype_is_refused(builder: CatalogBuilder, dtype: str) -> None:
    with pytest.raises(FormatError, match="dtype"):
        builder.tensor("x", dtype, [1])


@pytest.mark.parametrize("shape", [[-1], [2, -3], [1 << 62, 1 << 62]], ids=str)
def test_an_impossible_shape_is_refused(builder: CatalogBuilder, shape: list[int]) -> None:
    with pytest.raises(FormatError, match="shape"):
        builder.tensor("x", "F32", shape)


@pytest.mark.parametrize(
    ("start", "box", "stride", "why"),
    [
        (0, Box((0, 0), (5, 6)), None, "not inside"),
        (0, Box((-1, 0), (1, 6)), None, "not inside"),
        (0, Box((0,), (4,)), None, "not inside"),
        (-4, None, None, "outside the file"),
        (4, None, None, "outside the file"),
        (1 << 62, None, None, "outside the file"),
        (0, None, [-6, 1], "negative stride"),
        (0, None, [7, 1], "outside the file"),
        (0, None, [1, 1, 1], "stride"),
    ],
    ids=str,
)
def test_a_fragment_outside_its_tensor_or_file_is_refused(
    builder: CatalogBuilder, start: int, box: Box | None, stride: Sequence[int] | None, why: str
) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        builder.fragment("w", 0, start, box, stride)
    assert caught.value.file == "a.bin"


def test_an_alias_of_nothing_or_over_a_tensor_is_refused(builder: CatalogBuilder) -> None:
    builder.alias("tied", "nothing")
    with pytest.raises(FormatError, match="'tied' is said to be 'nothing'"):
        builder.build()
    builder.aliases.clear()
    builder.tensor("v", "F32", [1])
    builder.alias("v", "w")
    with pytest.raises(FormatError, match="'v' is a tensor of its own"):
        builder.build()


def test_empty_fragments_are_dropped_wherever_they_point(builder: CatalogBuilder) -> None:
    builder.fragment("w", 0, 96, Box((4, 0), (0, 6)))
    builder.fragment("w", 0, 0)
    assert len(builder.build().fragments) == 1


def test_strides_are_kept_and_others_are_row_major(builder: CatalogBuilder) -> None:
    builder.tensor("v", "F32", [3])
    builder.fragment("v", 0, 0)
    builder.fragment("w", 0, 0, stride=[1, 4])
    catalog = builder.build()
    assert catalog.fragments.stride is not None
    assert catalog.fragments.stride[catalog.fragments.rows(catalog.find("w"))].tolist() == [[1, 4]]
    assert catalog.fragments.stride[catalog.fragments.rows(catalog.find("v"))].tolist()[0][0] == 1


def test_an_empty_catalog_can_be_built(tmp_path: Path) -> None:
    catalog = CatalogBuilder(open_store(str(tmp_path))).build()
    assert (catalog.names, catalog.nbytes, catalog.values) == ([], 0, {})


def test_row_major_strides_agree_with_numpy() -> None:
    length = np.array([[2, 3, 4], [5, 1, 1], [1, 1, 7]], dtype=np.int64)
    expected = [[stride // 8 for stride in np.empty(row, dtype=np.int64).strides] for row in length]
    assert row_major(length).tolist() == expected
    assert row_major(np.ones((2, 0), dtype=np.int64)).shape == (2, 0)
