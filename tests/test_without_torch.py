"""Looking into checkpoints needs no torch: they are opened, read in slices, inspected, verified, compared without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import ucformat
from specs.run_conformance import GOLDEN
from ucformat.dtypes import DTYPES
from ucformat.errors import DTypeMismatchError
from ucformat.reshard.reading.lazy import read, read_bits
from ucformat.reshard.reading.numbers import widened

ROOT = Path(__file__).parents[1]
BLOCKED = """
import sys
from pathlib import Path
from specs.readers.ours import Blocked
assert "torch" not in sys.modules
sys.meta_path.insert(0, Blocked())
"""


def run(program: str, *arguments: object) -> str:
    """Run a program that can't import torch."""
    command = [sys.executable, "-c", BLOCKED + program, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_verbs_that_look_work_where_torch_is_not_installed(tmp_path: Path) -> None:
    model = {
        "w": torch.arange(12.0).reshape(3, 4).to(torch.bfloat16),
        "v": torch.arange(5),
        "f": torch.ones(3).to(torch.float8_e5m2),
    }
    for step in (1, 2):
        ucformat.save(tmp_path / "run", {"model": model, "size": torch.Size([2]), "lr": 0.1}, step=step)
    safetensors.torch.save_file(model, tmp_path / "model.safetensors", {"format": "pt"})
    torch.save(model, tmp_path / "model.pt")
    program = """
import numpy, ml_dtypes, ucformat
from ucformat.cli.app import run
from ucformat.errors import UnsupportedError
path = sys.argv[1]
opened = ucformat.open(path + "/run")
rows = opened["model/w"].numpy[1:, ::2]
assert rows.dtype == ml_dtypes.bfloat16 and rows.tolist() == [[4, 6], [8, 10]]
assert opened["model/w"].numpy.shape == (3, 4) and opened["model/w"].numpy.dtype == ml_dtypes.bfloat16
assert numpy.asarray(opened["model/w"], dtype=numpy.float32)[2, 3] == 11
assert numpy.asarray(opened["model/v"]).tolist() == [0, 1, 2, 3, 4]
assert opened["model/f"].numpy[...].tolist() == [1, 1, 1]
assert ucformat.steps(path + "/run") == [1, 2] and ucformat.latest(path + "/run") == 2
assert ucformat.verify(path + "/run").ok
assert [one.name for one in ucformat.inspect(path + "/run").tensors] == ["model/f", "model/v", "model/w"]
assert ucformat.diff(path + "/run/step-00000001", path + "/run/step-00000002").equal
assert ucformat.diff(path + "/run", path + "/model.safetensors", rtol=0.1, values=False).tensors == 3
assert run(["inspect", path + "/run", "--values"]) == run(["verify", path + "/run"]) == run(["validate", path + "/run"]) == 0
for refused in (lambda: opened["model/w"][0], lambda: ucformat.open(path + "/model.pt")):
    try:
        refused()
    except UnsupportedError as error:
        assert "pip install torch" in str(error)
    else:
        raise AssertionError
assert "torch" not in sys.modules
"""
    out = run(program, tmp_path)
    assert "lr = 0.1" in out
    assert "ok: 3 tensors" in out


def test_between_hugging_face_and_native_nothing_is_imported_that_the_pair_does_not_need(tmp_path: Path) -> None:
    model = {"w": torch.arange(12.0).reshape(3, 4).to(torch.bfloat16)}
    safetensors.torch.save_file(model, tmp_path / "model.safetensors", {"format": "pt"})
    program = """
from ucformat.cli.app import run
path = sys.argv[1]
assert run([path + "/model.safetensors", path + "/native", "--to", "native"]) == 0
assert run([path + "/native", path + "/hf", "--to", "hf"]) == 0
others = {"torch", "fsspec", "asyncio", "ucformat.formats.deepspeed.reader", "ucformat.formats.megatron.distributed"}
assert not others & set(sys.modules), others & set(sys.modules)
"""
    run(program, tmp_path)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")["w"], model["w"])


def test_arrays_hold_the_bits_that_tensors_hold_and_the_same_numbers() -> None:
    catalog = ucformat.open(GOLDEN / "dtypes" / "checkpoint").catalog
    for spec in catalog.tensors:
        (bits,), tensor = read_bits(catalog, [(spec.name, None)]), read(catalog, spec.name)
        flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        assert bits.tobytes() == flat.numpy().tobytes()
        assert bits.shape == spec.shape
        if spec.kind.group == (1, 1) and spec.dtype not in {"C32", "BOOL"}:
            wide = tensor.to(torch.float32) if spec.dtype.startswith("F8") or spec.dtype == "BF16" else tensor
            np.testing.assert_array_equal(widened(bits, spec.dtype), wide.numpy())


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name.startswith("F8")])
def test_every_float8_has_the_number_that_torch_gives_it(dtype: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(bits.copy()).view(DTYPES[dtype].torch).to(torch.float32).numpy()
    np.testing.assert_array_equal(widened(bits, dtype), expected)


def test_arrays_of_another_width_are_refused() -> None:
    from ucformat.reshard.reading.execute import execute
    from ucformat.reshard.reading.plan import plan, wants

    catalog = ucformat.open(GOLDEN / "basic" / "checkpoint").catalog
    with pytest.raises(DTypeMismatchError):
        execute(plan(catalog, wants(catalog, [("model/b", None)])), [np.empty(5, dtype=np.uint32)])
