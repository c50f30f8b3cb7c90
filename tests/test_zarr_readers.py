"""dask and xarray on top of `zarr_store`: lazily, in parts, and by other processes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if sys.version_info < (3, 11):
    pytest.skip("zarr with data types of other packages needs Python 3.11", allow_module_level=True)
import dask.array
import ml_dtypes
import xarray
import zarr

import ucformat
from tests.checkpoints import CountingStore, split_evenly, write_native
from ucformat.formats.native import open_catalog
from ucformat.formats.source import Source
from ucformat.reshard.reading.lazy import Checkpoint

WEIGHTS = torch.arange(4 << 20, dtype=torch.float32).reshape(4096, 1024)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zarr") / "ck"
    tensors = {"model/w": WEIGHTS, "model/b": torch.arange(1000).to(torch.bfloat16)}
    write_native(folder, tensors, {"model/w": split_evenly((4096, 1024), 0, 4)}, shards=2)
    return folder


def test_dask_computes_on_a_checkpoint_along_its_chunks(place: Path) -> None:
    store = CountingStore(str(place))
    root = zarr.open_group(ucformat.zarr_store(Checkpoint(open_catalog(Source(store)))), mode="r")
    array = dask.array.from_zarr(root["model/w"])  # type: ignore[no-untyped-call]
    assert array.chunksize == root["model/w"].chunks  # type: ignore[union-attr]
    store.read_bytes.clear()
    part = array[100:120].sum().compute(scheduler="threads")
    assert part == WEIGHTS[100:120].numpy().sum(dtype=np.float64)
    assert store.total < WEIGHTS.nbytes // 10
    assert float(array.max().compute(scheduler="threads")) == WEIGHTS.nbytes // 4 - 1


def test_dask_keeps_bfloat16(place: Path) -> None:
    root = zarr.open_group(ucformat.zarr_store(place), mode="r")
    array = dask.array.from_zarr(root["model/b"])  # type: ignore[no-untyped-call]
    assert array.dtype == ml_dtypes.bfloat16
    expected = torch.arange(1000).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(array.compute(scheduler="synchronous").view(np.int16), expected)


@pytest.mark.parametrize("chunks", [None, {}])
def test_xarray_opens_a_group_lazily(place: Path, chunks: dict[str, int] | None) -> None:
    store = CountingStore(str(place))
    opened = ucformat.zarr_store(Checkpoint(open_catalog(Source(store))))
    found = xarray.open_zarr(opened, group="model", consolidated=False, chunks=chunks)
    assert set(found) == {"w", "b"}
    assert found["w"].dims == ("w[0]", "w[1]")
    assert (found["w"].dtype, found["b"].dtype) == (np.float32, ml_dtypes.bfloat16)
    store.read_bytes.clear()
    np.testing.assert_array_equal(found["w"][7:9, 3].values, WEIGHTS[7:9, 3].numpy())
    assert store.total < WEIGHTS.nbytes // 10
    np.testing.assert_array_equal(
        found["b"].values.view(np.int16), torch.arange(1000).to(torch.bfloat16).view(torch.int16).numpy()
    )
