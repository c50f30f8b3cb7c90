"""Directories of `.bin` weights are read like those of safetensors, and nothing in them is run."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints import bits, flip
from tests.cli.calls import Program
from ucformat import formats
from ucformat.cli.app import run
from ucformat.errors import ChecksumError, FormatError, MissingFileError, UnsafePickleError, UnsupportedError
from ucformat.formats import hf_bin
from ucformat.formats.source import locate
from ucformat.reshard.convert import convert
from ucformat.reshard.diff import diff
from ucformat.reshard.reading.lazy import read

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model with tied weights, in `bin` as transformers 4 wrote it and in `st` as it writes it now."""
    path = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, tie_word_embeddings=True
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(path / "st", max_shard_size="8KB")
    (path / "bin").mkdir()
    config.save_pretrained(path / "bin")
    state = model.state_dict()
    split = split_torch_state_dict_into_shards(state, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=8000)
    assert len(split.filename_to_tensors) > 2
    for file, names in split.filename_to_tensors.items():
        torch.save({name: state[name] for name in names}, path / "bin" / file)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (path / "bin/pytorch_model.bin.index.json").write_text(json.dumps(index))
    loaded = LlamaForCausalLM.from_pretrained(path / "bin").state_dict()  # it is what the library takes
    assert all(bits(loaded[name]) == bits(tensor) for name, tensor in state.items())
    return path


@pytest.fixture
def sharded(both: Path, tmp_path: Path) -> Path:
    shutil.copytree(both / "bin", tmp_path / "bin")
    return tmp_path / "bin"


@pytest.fixture
def ucconvert(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


def test_sharded_bins_equal_the_safetensors_of_the_same_model(both: Path, ucconvert: Program) -> None:
    answer = ucconvert("diff", both / "bin", both / "st")
    assert (answer.status, answer.out.split(":")[0]) == (0, "equal"), answer.out
    assert formats.open_named(str(both / "bin"))[0] == "hf-bin"
    answer = ucconvert("inspect", both / "bin")
    assert answer.status == 0
    assert "model.embed_tokens.weight" in answer.out


def test_they_convert_with_their_companions_and_load_again(both: Path, tmp_path: Path) -> None:
    convert(str(both / "bin"), str(tmp_path / "native"), "native")
    convert(str(tmp_path / "native"), str(tmp_path / "out"), "hf")
    assert diff(formats.open_catalog(str(both / "bin")), formats.open_catalog(str(tmp_path / "native"))).equal
    wanted = LlamaForCausalLM.from_pretrained(both / "st").state_dict()
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert {name: bits(tensor) for name, tensor in again.items()} == {name: bits(tensor) for name, tensor in wanted.items()}


def test_a_single_bin_an_index_by_name_and_shards_without_an_index_are_read(sharded: Path) -> None:
    by_directory = formats.open_catalog(str(sharded))
    by_index = formats.open_catalog(str(sharded / "pytorch_model.bin.index.json"))
    assert by_index.names == by_directory.names
    (sharded / "pytorch_model.bin.index.json").unlink()
    torch.save({"x": 1}, sharded / "training_args.bin")
    without = formats.open_catalog(str(sharded))
    assert without.names == by_directory.names
    assert without.notes.remarks == ("no index: names are taken from the shards",)
    state = {name.removeprefix("model/"): read(without, name) for name in without.names}
    torch.save(state, sharded / "pytorch_model.bin")
    single = formats.open_catalog(str(sharded))
    assert [file.path for file in single.files] == ["pytorch_model.bin"]
    assert diff(single, by_directory).equal


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard_is_named(sharded: Path, indexed: bool) -> None:
    first = min(path.name for path in sharded.glob("pytorch_model-*.bin"))
    (sharded / first).unlink()
    if not indexed:
        (sharded / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(MissingFileError, match=first):
        formats.open_catalog(str(sharded))


def _edit_index(path: Path, edit: Any) -> None:
    index = json.loads((path / "pytorch_model.bin.index.json").read_text())
    edit(index["weight_map"])
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def test_an_index_that_disagrees_with_the_shards_is_refused(sharded: Path) -> None:
    name, right = "model.norm.weight", ""

    def elsewhere(weights: dict[str, str]) -> None:
        nonlocal right
        right = weights[name]
        weights[name] = next(file for file in weights.values() if file != right)

    _edit_index(sharded, elsewhere)
    with pytest.raises(FormatError, match=f"{name}.*but in {right}"):
        formats.open_catalog(str(sharded))
    _edit_index(sharded, lambda weights: weights.update({name: right, "ghost": right}))
    with pytest.raises(FormatError, match=r"'ghost' is not in .* nor in any other file"):
        formats.open_catalog(str(sharded))
    _edit_index(sharded, lambda weights: (weights.pop("ghost"), weights.pop(name)))
    assert "taken all the same: model.norm.weight" in formats.open_catalog(str(sharded)).notes.remarks[0]
    _edit_index(sharded, lambda weights: weights.update({name: "../pytorch_model-00001-of-00002.bin"}))
    with pytest.raises(FormatError):
        formats.open_catalog(str(sharded))


def test_a_name_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("pytorch_model-*.bin"))[:2]
    held = torch.load(second, weights_only=True)
    torch.save({**held, next(iter(torch.load(first, weights_only=True))): torch.ones(1)}, second)
    with pytest.raises(FormatError, match="which one is right"):
        formats.open_catalog(str(sharded))


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self.marker}",)


def test_hostile_legacy_and_damaged_shards_are_one_typed_error(sharded: Path, tmp_path: Path) -> None:
    shard = max(sharded.glob("pytorch_model-*.bin"))
    good = shard.read_bytes()
    torch.save({"x": Evil(tmp_path / "marker")}, shard)
    with pytest.raises(UnsafePickleError):
        formats.open_catalog(str(sharded))
    assert not (tmp_path / "marker").exists()
    torch.save({"x": torch.ones(1)}, shard, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="legacy"):
        formats.open_catalog(str(sharded))
    torch.save([torch.ones(1)], shard)
    with pytest.raises(FormatError, match="no state dict"):
        formats.open_catalog(str(sharded))
    shard.write_bytes(pickle.dumps({"x": 1}))
    assert run(["inspect", str(sharded)]) == 1
    shard.write_bytes(good)
    catalog = formats.open_catalog(str(sharded))
    number = next(i for i, file in enumerate(catalog.files) if file.path == shard.name)
    row = next(i for i, file in enumerate(catalog.fragments.file) if file == number)
    flip(shard, int(catalog.fragments.start[row]))
    with pytest.raises(ChecksumError, match=shard.name):
        convert(str(sharded), str(tmp_path / "out"), "native")


def test_other_directories_are_not_taken_for_it(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "training_args.bin")
    assert not hf_bin.detect(locate(str(tmp_path)))
