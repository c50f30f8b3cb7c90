"""DCP's distributed Hugging Face form: real shards of stock DCP read by range, holes and lost shards noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.errors import CoverageError, FormatError, UcformatError
from ucformat.formats import dcp_hf, open_named
from ucformat.formats.source import Source
from ucformat.reshard.reading.lazy import read
from ucformat.storage.open import open_store

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")


def shard(path: Path, rank: int, tensors: dict[str, torch.Tensor], offsets: dict[str, list[int]], files: int = 1) -> None:
    """A shard as stock DCP writes it for one rank."""
    info = json.dumps({name: {"saved_offsets": at} for name, at in offsets.items()})
    path.mkdir(exist_ok=True)
    name = path / f"shard-{rank:05d}-model-00001-of-{files:05d}.safetensors"
    save_file(tensors, name, {"format": "pt", "DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"})


def opened(path: Path) -> Catalog:
    source = Source(open_store(str(path)))
    assert dcp_hf.detect(source)
    return dcp_hf.open_catalog(source)


def two_ranks(path: Path) -> torch.Tensor:
    weight = torch.randn(5, 4)
    shard(path, 0, {"w": weight[:3].contiguous(), "b": torch.ones(2)}, {"w": [0, 0], "b": [0]})
    shard(path, 1, {"w": weight[3:].contiguous(), "b": torch.ones(2)}, {"w": [3, 0], "b": [0]})
    return weight


def test_shards_of_the_stock_writer_are_read(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "a.w": torch.randn(4, 3),
        "a.s": torch.tensor(3.5),
        "a.n": torch.tensor(7),
        "a.h": torch.randn(2).bfloat16(),
    }
    save(tree, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "x"), save_distributed=True), no_dist=True)
    name, catalog = open_named(str(tmp_path / "x"))
    assert name == "dcp-hf"
    assert catalog.names == sorted(f"model/{name}" for name in tree)
    for key, tensor in tree.items():
        assert torch.equal(read(catalog, f"model/{key}"), tensor)


def test_boxes_of_several_ranks_make_the_tensor_and_replicas_count_once(tmp_path: Path) -> None:
    weight = two_ranks(tmp_path / "x")
    catalog = opened(tmp_path / "x")
    assert torch.equal(read(catalog, "model/w"), weight)
    assert torch.equal(read(catalog, "model/w", Box((2, 1), (2, 2))), weight[2:4, 1:3])
    assert torch.equal(read(catalog, "model/b"), torch.ones(2))
    assert len(catalog.fragments) == 3


def test_hole_is_a_coverage_error(tmp_path: Path) -> None:
    shard(tmp_path / "x", 0, {"w": torch.ones(2, 4)}, {"w": [0, 0]})
    shard(tmp_path / "x", 1, {"w": torch.ones(2, 4)}, {"w": [4, 0]})
    with pytest.raises(CoverageError, match=r"model/w.*2:4"):
        read(opened(tmp_path / "x"), "model/w")


def test_missing_shard_numbers_are_remarked_and_the_hole_refused(tmp_path: Path) -> None:
    for rank in (1, 3):
        shard(tmp_path / "x", rank, {"w": torch.ones(2), f"b{rank}": torch.ones(1)}, {"w": [2 * (rank - 1)], f"b{rank}": [0]})
    catalog = opened(tmp_path / "x")
    assert any("shards 2" in remark for remark in catalog.notes.remarks)
    assert read(catalog, "model/b3").item() == 1
    with pytest.raises(CoverageError, match=r"model/w.*2:4"):
        read(catalog, "model/w")


def test_offsets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for number, offsets in enumerate(([0], [0, -1], [0, 1 << 63], ["x", 0])):
        path = tmp_path / str(number)
        shard(path, 0, {"w": torch.ones(2, 4)}, {"w": offsets})  # type: ignore[dict-item]
        with pytest.raises(FormatError):
            opened(path)


def test_shards_that_disagree_are_refused(tmp_path: Path) -> None:
    shard(tmp_path / "x", 0, {"w": torch.ones(2)}, {"w": [0]})
    shard(tmp_path / "x", 1, {"w": torch.ones(2).half()}, {"w": [2]})
    with pytest.raises(FormatError, match="another dtype"):
        opened(tmp_path / "x")


def test_foreign_file_beside_the_shards_is_refused(tmp_path: Path) -> None:
    two_ranks(tmp_path / "x")
    save_file({"z": torch.ones(1)}, tmp_path / "x" / "z.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match="DCP_SHARDING_INFO"):
        opened(tmp_path / "x")


def test_malformed_sharding_info_is_refused(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]", "{", '{"w": 5}', '{"w": {}}', '{"w": {"saved_offsets": null}}', "[" * 5000)):
        path = tmp_path / str(number)
        path.mkdir()
        save_file({"w": torch.ones(1)}, path / "shard-00000-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": text})
        with pytest.raises(UcformatError):
            opened(path)


def test_plain_hugging_face_directory_is_not_claimed(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert not dcp_hf.detect(Source(open_store(str(tmp_path))))
    assert load_file(tmp_path / "model.safetensors")["w"].item() == 1
