"""A change of dtype rounds nothing that the model's library keeps wide, and no scale of a quantised model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ucformat.errors import UnsupportedError
from ucformat.reshard.convert import convert


def model(folder: Path, config: dict[str, object], *names: str, **tensors: torch.Tensor) -> str:
    folder.mkdir(parents=True)
    state = {**{name: torch.full((2, 2), 1 / 3) for name in names}, **tensors}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32", **config}))
    return str(folder)


def wide(folder: Path) -> set[str]:
    """Names that are float32 in what was written."""
    found = load_file(folder / "model.safetensors")
    return {name for name, tensor in found.items() if tensor.dtype == torch.float32}


T5 = ("encoder.block.0.layer.1.DenseReluDense.wo.weight", "encoder.block.0.layer.1.DenseReluDense.wi.weight", "wotan.weight")
DEEPSEEK = (
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.layers.1.mlp.gate_proj.weight",
)
RWKV = ("rwkv.blocks.0.attention.time_decay", "rwkv.blocks.0.attention.key.weight", "rotary.inv_freq")
CASES = [
    ({"model_type": "t5"}, "fp16", T5, {T5[0]}),
    ({"model_type": "t5"}, "bf16", T5, set()),
    ({"architectures": ["T5ForConditionalGeneration"]}, "fp16", T5, {T5[0]}),
    ({"architectures": ["DeepseekV3ForCausalLM"]}, "bf16", DEEPSEEK, set(DEEPSEEK[:2])),
    ({"model_type": "rwkv"}, "fp16", RWKV, {RWKV[0], RWKV[2]}),
    ({}, "bf16", RWKV, {RWKV[2]}),
    ({"architectures": ["NoSuchModel"]}, "bf16", T5, set()),
]


@pytest.mark.parametrize(("config", "dtype", "names", "kept"), CASES)
def test_what_the_library_keeps_wide_is_kept_and_listed(
    config: dict[str, object], dtype: str, names: tuple[str, ...], kept: set[str], tmp_path: Path
) -> None:
    report = convert(model(tmp_path / "in", config, *names), str(tmp_path / "out"), "hf", dtype=dtype)
    assert wide(tmp_path / "out") == kept
    said = [text for text in report.remarks if "kept in their dtype" in text]
    assert all(name in "".join(said) for name in kept)
    assert bool(said) == bool(kept)


def test_parts_of_a_pipeline_are_asked_each(tmp_path: Path) -> None:
    model(tmp_path / "in/text", {"model_type": "t5"}, T5[0])
    model(tmp_path / "in/other", {"model_type": "bert"}, T5[0])
    index = {"_class_name": "P", "text": ["transformers", "T5EncoderModel"], "other": ["transformers", "BertModel"]}
    (tmp_path / "in/model_index.json").write_text(json.dumps(index))
    convert(str(tmp_path / "in"), str(tmp_path / "out"), "hf", dtype="fp16")
    assert (wide(tmp_path / "out/text"), wide(tmp_path / "out/other")) == ({T5[0]}, set())
    assert json.loads((tmp_path / "out/text/config.json").read_text())["torch_dtype"] == "float16"


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {"x.weight": torch.ones(2)}),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, {"x.weight": torch.ones(2)}),
        ({}, {"x.qweight": torch.ones(2, dtype=torch.int32), "x.scales": torch.ones(2)}),
        ({}, {"x.weight": torch.ones(2).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(1)}),
        ({}, {"x.weight": torch.ones(2, dtype=torch.uint8), "x.weight.absmax": torch.ones(1)}),
    ],
)
def test_a_quantised_model_is_refused(config: dict[str, object], tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    source = model(tmp_path / "in", config, "norm", **tensors)
    with pytest.raises(UnsupportedError, match="quantised"):
        convert(source, str(tmp_path / "out"), "hf", dtype="bf16")
    assert not (tmp_path / "out").exists()
    convert(source, str(tmp_path / "out"), "hf", dtype="bf16", keep_dtype=["x.*"])
    assert "norm" not in wide(tmp_path / "out")
    assert all(load_file(tmp_path / "out/model.safetensors")[name].dtype == x.dtype for name, x in tensors.items())


def test_names_that_match_keep_their_dtype_and_a_pattern_without_a_match_is_an_error(tmp_path: Path) -> None:
    source = model(tmp_path / "in", {}, "a.norm", "b.norm", "c")
    convert(source, str(tmp_path / "out"), "hf", dtype="bf16", keep_dtype=["a.*", "model/b*"])
    assert wide(tmp_path / "out") == {"a.norm", "b.norm"}
    with pytest.raises(UnsupportedError, match="no name matches 'nrom'"):
        convert(source, str(tmp_path / "other"), "hf", dtype="bf16", keep_dtype=["nrom"])
    with pytest.raises(UnsupportedError, match="together with dtype"):
        convert(source, str(tmp_path / "other"), "hf", keep_dtype=["a.*"])


def test_a_library_that_fails_to_answer_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    def broken(name: str) -> object:
        raise RuntimeError("no torchvision")

    monkeypatch.setattr(transformers, "__getattr__", broken, raising=False)
    monkeypatch.setattr(type(transformers), "__getattr__", lambda self, name: broken(name), raising=False)
    source = model(tmp_path / "in", {"architectures": ["T5Model2"]}, "a")
    with caplog.at_level(logging.WARNING, "ucformat"):
        convert(source, str(tmp_path / "out"), "hf", dtype="bf16")
    assert "T5Model2" in caplog.text
