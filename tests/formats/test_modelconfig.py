"""A converted model's configuration names the dtype that its weights have, and is otherwise what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ucformat.formats.modelconfig import with_dtype
from ucformat.reshard.convert import convert


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"a":1E-5,\n "torch_dtype" : "float32", "b": "é\\u00e9"}', '{"a":1E-5,\n "torch_dtype" : "bfloat16", "b": "é\\u00e9"}'),
        ('{"dtype": "torch.float16"}', '{"dtype": "torch.bfloat16"}'),
        (
            '{"text_config": {"dtype": "float32", "x": 0.10}, "dtype": "half"}',
            '{"text_config": {"dtype": "bfloat16", "x": 0.10}, "dtype": "bfloat16"}',
        ),
        ('{"dtype": "float8_e4m3fn"}', '{"dtype": "float8_e4m3fn"}'),
        ('{"dtype": null, "note": "\\"dtype\\": \\"float32\\""}', '{"dtype": null, "note": "\\"dtype\\": \\"float32\\""}'),
        ('["dtype"]', '["dtype"]'),
        ("{", "{"),
    ],
)
def test_only_the_dtype_of_the_weights_changes_byte_for_byte(before: str, after: str) -> None:
    assert with_dtype(before.encode(), "BF16") == after.encode()


def test_dtypes_that_mean_something_else_stay() -> None:
    before = {"dtype": "float32", "quantization_config": {"dtype": "float16"}, "head": {"dtype": "float32"}}
    assert json.loads(with_dtype(json.dumps(before).encode(), "BF16")) == {**before, "dtype": "bfloat16"}


@pytest.mark.parametrize("between", ["native", "dcp"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_converted_to_another_dtype_loads_in_it(tmp_path: Path, between: str, dtype: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "src")
    convert(str(tmp_path / "src"), str(tmp_path / "mid"), between, dtype=dtype)
    convert(str(tmp_path / "mid"), str(tmp_path / "out"), "hf")
    convert(str(tmp_path / "src"), str(tmp_path / "straight"), "hf", dtype=dtype)
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "straight/config.json").read_bytes()
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("src", "out"))
    assert after == before.replace('"float32"', f'"{dtype}"') != before
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == getattr(torch, dtype)
    wanted = {name: tensor.to(again.dtype) for name, tensor in model.state_dict().items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
