"""No shard has a header that safetensors tools refuse, however many fragments a writer has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import ucformat
from tests.checkpoints import open_native, shards_of, split_evenly
from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.containers.envelope import VERSION
from ucformat.containers.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES
from ucformat.errors import UnrepresentableError
from ucformat.formats import native
from ucformat.formats.native.shard import lay_out, lay_out_all
from ucformat.storage.open import open_store

LONG = "n" * 400_000  # 270 such names are above the limit


def test_a_save_with_more_names_than_one_header_holds_is_several_shards_that_any_tool_opens(tmp_path: Path) -> None:
    state = {"model": {f"{i:03d}{LONG}": torch.full((3,), float(i)) for i in range(270)}, "empty": torch.empty(0, 2)}
    ucformat.save(str(tmp_path / "a"), state)
    store = open_store(str(tmp_path / "a"))
    catalog = open_native(store)
    assert [Path(file.path).name for file in catalog.files] == ["00000.safetensors", "00000-1.safetensors"]
    for file in catalog.files:
        with safe_open(tmp_path / "a" / file.path, "pt") as shard:
            assert len(shard.keys()) in (137, 138)
    loaded = ucformat.load(str(tmp_path / "a"))
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in state["model"].items())  # type: ignore[index, attr-defined]
    index = (shards_of(tmp_path / "a") / "index.safetensors").read_bytes()
    (shards_of(tmp_path / "a") / "index.safetensors").unlink()
    assert native.reindex(store) == 270
    assert (shards_of(tmp_path / "a") / "index.safetensors").read_bytes() == index
    ucformat.convert(str(tmp_path / "a"), str(tmp_path / "b"), "native")
    assert sorted(path.name for path in shards_of(tmp_path / "b").glob("0*")) == ["00000-1.safetensors", "00000.safetensors"]
    ucformat.save(str(tmp_path / "a"), {"x": 1}, overwrite=True)
    assert [path.name for path in shards_of(tmp_path / "a").glob("0*")] == ["00000.safetensors"], "all parts are swept away"


def test_pieces_are_spread_in_order_over_as_many_shards_as_their_headers_need() -> None:
    spec = TensorSpec("model/w", "F32", (1000, 3))
    pieces = [(spec, box) for box in split_evenly((1000, 3), 0, 1000)]
    assert [run for run, _ in lay_out_all(pieces, VERSION)] == [range(1000)]
    shards = lay_out_all(pieces, VERSION, max_header_bytes=30_000)
    assert len(shards) > 3
    assert [i for run, _ in shards for i in run] == list(range(1000))
    assert all(layout.data_start - LENGTH_BYTES <= 30_000 for _, layout in shards)
    assert lay_out_all([], VERSION)[0][0] == range(0)


def test_one_shard_with_too_long_a_header_is_refused_before_it_is_written() -> None:
    def named(name: str) -> tuple[TensorSpec, Box]:
        return TensorSpec(name, "F32", (1,)), Box.whole((1,))

    with pytest.raises(UnrepresentableError, match="270 pieces"):
        lay_out([named(f"{i:03d}{LONG}") for i in range(270)], VERSION)
    with pytest.raises(UnrepresentableError, match="its name takes"):
        lay_out_all([named("x" * (MAX_HEADER_BYTES + 1))], VERSION)
