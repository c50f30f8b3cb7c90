"""Fingerprints are those of the specification, and the same in every format, layout and number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import ucformat
from tests.reshard.ranks import on_ranks
from ucformat.errors import ChecksumError, UnsupportedError
from ucformat.reshard.fingerprint import BLOCK_BYTES

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "big": torch.randn(3, 700_001, generator=generator),  # several blocks, the last one short
        "edge": torch.arange(BLOCK_BYTES // 2, dtype=torch.int16),  # one block to the byte
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=BF16),
        "small": torch.ones(3, 5).to(F8),
    }


def by_the_specification(tensor: torch.Tensor, dtype: str) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    blocks = [xxhash.xxh3_128_digest(data[at : at + 1_048_576]) for at in range(0, len(data), 1_048_576)]
    head = f"ucf-tensor-1\n{dtype}\n{','.join(map(str, tensor.shape))}\n".encode()
    return xxhash.xxh3_128_hexdigest(head + b"".join(blocks))


def test_a_fingerprint_is_what_the_specification_says(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "a", {"model": model()})
    dtypes = {"big": "F32", "edge": "I16", "empty": "F32", "scalar": "BF16", "small": "F8_E4M3"}
    expected = {f"model/{name}": by_the_specification(tensor, dtypes[name]) for name, tensor in model().items()}
    found = ucformat.fingerprint(tmp_path / "a")
    assert found.tensors == expected
    lines = "".join(f"{name}\t{digest}\n" for name, digest in sorted(expected.items()))
    assert found.digest == xxhash.xxh3_128_hexdigest(f"ucf-checkpoint-1\n{lines}".encode())
    assert found.nbytes == sum(tensor.nbytes for tensor in model().values())


@pytest.mark.parametrize("to", ["hf", "dcp", "torchsave"])
def test_a_fingerprint_does_not_depend_on_the_format(tmp_path: Path, to: str) -> None:
    ucformat.save(tmp_path / "a", {"model": model()})
    out = tmp_path / ("b.pt" if to == "torchsave" else "b")
    ucformat.convert(tmp_path / "a", out, to)
    assert ucformat.fingerprint(out) == ucformat.fingerprint(tmp_path / "a")


def _save_and_take(folder: str) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    whole = {name: tensor for name, tensor in model().items() if tensor.dim()}
    cut = {name: distribute_tensor(tensor, mesh, [Shard(tensor.dim() - 1)], src_data_rank=None) for name, tensor in whole.items()}
    ucformat.save(f"{folder}/cut", {"model": {**cut, "scalar": model()["scalar"]}})
    return dict(ucformat.fingerprint(f"{folder}/cut").tensors)


def test_a_fingerprint_does_not_depend_on_the_layout_nor_on_who_reads(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "whole", {"model": model()})
    expected = ucformat.fingerprint(tmp_path / "whole")
    assert on_ranks(3, _save_and_take, str(tmp_path)) == [expected.tensors] * 3
    assert ucformat.fingerprint(tmp_path / "cut") == expected


def test_tied_names_have_one_fingerprint_each(tmp_path: Path) -> None:
    w = torch.ones(4)
    ucformat.save(tmp_path / "tied", {"model": {"a": w, "b": w}})
    ucformat.save(tmp_path / "two", {"model": {"a": w, "b": w.clone()}})
    assert ucformat.fingerprint(tmp_path / "tied").tensors == ucformat.fingerprint(tmp_path / "two").tensors


def test_any_change_of_a_tensor_changes_its_fingerprint_and_no_other(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "a", {"model": model()})
    before = ucformat.fingerprint(tmp_path / "a")
    for number, (name, changed) in enumerate(
        {
            "big": model()["big"].index_put((torch.tensor([2]), torch.tensor([700_000])), torch.tensor(9.0)),
            "edge": model()["edge"].reshape(2, -1),
            "empty": torch.empty(4, 0),
            "scalar": model()["scalar"].to(torch.float16),
        }.items()
    ):
        ucformat.save(tmp_path / str(number), {"model": {**model(), name: changed}})
        after = ucformat.fingerprint(tmp_path / str(number))
        assert after.differences(before.tensors) == [f"model/{name}"]
        assert after.digest != before.digest


def test_damage_is_an_error_and_no_fingerprint(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "a", {"model": {"w": torch.ones(1000)}})
    shard = next((tmp_path / "a").glob("shards.*/00000.safetensors"))
    data = np.fromfile(shard, dtype=np.uint8)
    data[5000] ^= 1
    data.tofile(shard)
    with pytest.raises(ChecksumError, match="model/w"):
        ucformat.fingerprint(tmp_path / "a")


def run(*args: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ucformat.cli", "fingerprint", *args], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_the_command_compares_with_what_it_printed_elsewhere(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        ucformat.save(tmp_path / name, {"model": {"v": torch.zeros(3), "w": torch.full((3,), value)}})
    code, text = run(str(tmp_path / "a"), "--json")
    assert (code, json.loads(text)["tensors"]) == (0, ucformat.fingerprint(tmp_path / "a").tensors)
    (tmp_path / "a.json").write_text(text)
    assert run(str(tmp_path / "b"), "--against", str(tmp_path / "a.json"))[0] == 0
    code, text = run(str(tmp_path / "c"), "--against", str(tmp_path / "a.json"))
    assert code == 1
    assert "model/w: differs" in text
    assert "model/v" not in text
    (tmp_path / "a.json").write_text("{}")
    assert run(str(tmp_path / "b"), "--against", str(tmp_path / "a.json"))[0] == 2


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    ucformat.save(tmp_path / "a", {"model": {"w": torch.ones(2)}})
    with pytest.raises(UnsupportedError, match="modle"):
        ucformat.fingerprint(tmp_path / "a", select=["modle/*"])
