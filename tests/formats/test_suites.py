"""Every reader and writer of ours passes the public suites, on checkpoints of stock programs where there are any."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ucformat
from tests.formats import megatron_fixtures
from tests.formats.deepspeed_fixtures import DATA
from ucformat.formats import dcp, dcp_hf, deepspeed, hf, hf_bin, megatron, native, torchsave
from ucformat.testing import ReaderTests, Sample, WriterTests
from ucformat.testing.writers import VALUES as VALUES_OF_WRITERS
from ucformat.testing.writers import samples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
TENSORS = {name: tensor for name, tensor in samples(["F32", "BF16", "I64"]).items() if tensor.numel()}
VALUES = {"step": 3, "betas": (0.9, 0.95)}
SAFETENSORS = [name for name in WriterTests.dtypes if name not in ("C32", "C128")]


def bare() -> dict[str, torch.Tensor]:
    """The tensors by the names that a model gives them."""
    return {name.removeprefix("model/"): tensor for name, tensor in TENSORS.items()}


class TestNativeReader(ReaderTests):
    reader = native.READER
    checks_every_byte = True

    def make(self, folder: Path) -> Sample:
        ucformat.save(str(folder / "ck"), {"model": bare(), **VALUES})
        return Sample(folder / "ck", TENSORS, VALUES)


class TestHfReader(ReaderTests):
    reader = hf.READER

    def make(self, folder: Path) -> Sample:
        """Two shards, with an index."""
        (folder / "ck").mkdir()
        names = sorted(bare())
        files = {name: f"model-0000{1 + (name > names[3])}-of-00002.safetensors" for name in names}
        for file in set(files.values()):
            held = {name: tensor for name, tensor in bare().items() if files[name] == file}
            save_file(held, folder / "ck" / file, {"format": "pt"})
        index = {"metadata": {"total_size": sum(t.nbytes for t in TENSORS.values())}, "weight_map": files}
        (folder / "ck" / "model.safetensors.index.json").write_text(json.dumps(index))
        return Sample(folder / "ck", TENSORS)


class TestHfFileReader(ReaderTests):
    reader = hf.READER

    def make(self, folder: Path) -> Sample:
        save_file(bare(), folder / "model.safetensors", {"format": "pt"})
        return Sample(folder / "model.safetensors", TENSORS)


class TestHfBinReader(ReaderTests):
    reader = hf_bin.READER
    checks_every_byte = True

    def make(self, folder: Path) -> Sample:
        (folder / "ck").mkdir()
        torch.save(bare(), folder / "ck" / "pytorch_model.bin")
        return Sample(folder / "ck", TENSORS)


class TestTorchsaveReader(ReaderTests):
    reader = torchsave.READER
    checks_every_byte = True

    def make(self, folder: Path) -> Sample:
        torch.save({"model": bare(), **VALUES}, folder / "ck.pt")
        return Sample(folder / "ck.pt", TENSORS, VALUES)


class TestDcpReader(ReaderTests):
    reader = dcp.READER  # its metadata has no checksum

    def make(self, folder: Path) -> Sample:
        save_dcp({"model": bare(), **VALUES}, storage_writer=FileSystemWriter(folder / "ck"), no_dist=True)
        return Sample(folder / "ck", TENSORS, VALUES)


class TestDcpHfReader(ReaderTests):
    reader = dcp_hf.READER

    def make(self, folder: Path) -> Sample:
        (folder / "ck").mkdir()
        info = json.dumps({name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in bare().items()})
        file = folder / "ck" / "shard-00001-model-00001-of-00001.safetensors"  # of a lost one among several nothing tells
        save_file(bare(), file, {"format": "pt", "DCP_SHARDING_INFO": info})
        return Sample(folder / "ck", TENSORS)


class TestDeepSpeedReader(ReaderTests):
    reader = deepspeed.READER
    flips = 12  # of files of some 100 KB

    def make(self, folder: Path) -> Sample:
        """What DeepSpeed has written; that its tensors are the engine's is tested in `test_deepspeed`."""
        shutil.copytree(DATA / "z0", folder / "ck")
        return Sample(folder / "ck", {name: lazy.read() for name, lazy in ucformat.open(folder / "ck").items()})


class TestMegatronReader(ReaderTests):
    reader = megatron.READER
    flips = 12  # of files of some 50 KB

    def make(self, folder: Path) -> Sample:
        """What Megatron has written; that its tensors are right is tested in `test_megatron`."""
        shutil.copytree(megatron_fixtures.folder("nodist", "legacy"), folder / "ck")
        return Sample(folder / "ck", megatron_fixtures.tensors_of("nodist", "legacy"))


class TestMegatronDistributedReader(ReaderTests):
    reader = megatron.READER
    flips = 12  # as above

    def make(self, folder: Path) -> Sample:
        shutil.copytree(megatron_fixtures.folder("single"), folder / "ck")
        return Sample(folder / "ck", megatron_fixtures.tensors_of("single"))


class TestNativeWriter(WriterTests):
    writer, reader = native.WRITER, native.READER


class TestHfWriter(WriterTests):
    writer, reader = hf.WRITER, hf.READER
    dtypes = SAFETENSORS


class TestTorchsaveWriter(WriterTests):
    writer, reader = torchsave.WRITER, torchsave.READER


class TestDcpWriter(WriterTests):
    writer, reader = dcp.WRITER, dcp.READER
    # its paths know keys that are text only
    values: ClassVar[dict[str, object]] = {**VALUES_OF_WRITERS, "keys": {"one": 1, "a/b": True, "": {}}}
