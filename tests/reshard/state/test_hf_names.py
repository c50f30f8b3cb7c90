"""A live transformers model loads from its files in place, whatever names these have, and is saved under the files' names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from safetensors.torch import load_file, save_file

import ucformat
from tests.checkpoints import bits
from tests.reshard.ranks import on_ranks
from ucformat.errors import NamesMismatchError, UnsupportedError
from ucformat.reshard.convert import convert

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def llava() -> Any:
    config = tr.LlavaConfig(vision_config=tr.CLIPVisionConfig(**VISION), text_config=tr.LlamaConfig(**GROUPED))
    return tr.LlavaForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "stacked experts": lambda: tr.MixtralForCausalLM(tr.MixtralConfig(**GROUPED, num_local_experts=4)),
    "stacked experts beside a shared one": lambda: tr.Qwen2MoeForCausalLM(
        tr.Qwen2MoeConfig(**GROUPED, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8)
    ),
    "other prefixes": llava,
    "other names of layers": lambda: tr.ViTForImageClassification(tr.ViTConfig(**VISION)),
    "head beside the model": lambda: tr.GPTNeoXForCausalLM(tr.GPTNeoXConfig(**SMALL)),
    "the same names": lambda: tr.LlamaForCausalLM(tr.LlamaConfig(**GROUPED)),
}


def made(make: Callable[[], Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return make()


def state(model: Any) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", MODELS)
def test_files_load_into_the_live_model_in_place(kind: str, tmp_path: Path) -> None:
    model, other = made(MODELS[kind], 0), made(MODELS[kind], 1)
    model.save_pretrained(tmp_path / "files")
    if kind != "the same names":
        with pytest.raises(NamesMismatchError, match="hf_state"):
            ucformat.load(str(tmp_path / "files"), into={"model": other})
    ucformat.load(str(tmp_path / "files"), into={"model": ucformat.hf_state(other, str(tmp_path / "files"))})
    assert state(other) == state(model)


@pytest.mark.parametrize("kind", ["stacked experts", "other prefixes"])
def test_a_live_model_saved_by_the_names_of_files_is_exported_for_its_library(kind: str, tmp_path: Path) -> None:
    model = made(MODELS[kind], 0)
    model.save_pretrained(tmp_path / "files")
    ucformat.save(str(tmp_path / "run"), {"model": ucformat.hf_state(model, str(tmp_path / "files"))})
    convert(str(tmp_path / "run"), str(tmp_path / "out"), "hf", companions=str(tmp_path / "files"))
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(tmp_path / "files/model.safetensors").keys()
    assert state(type(model).from_pretrained(tmp_path / "out")) == state(model)


def test_old_names_of_parameters_are_found(tmp_path: Path) -> None:
    model, other = (made(lambda: tr.BertModel(tr.BertConfig(**SMALL)), seed) for seed in (0, 1))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    ucformat.load(str(tmp_path), into={"model": ucformat.hf_state(other, str(tmp_path))})
    assert state(other) == state(model)


def test_the_model_without_its_head_takes_its_part(tmp_path: Path) -> None:
    config = tr.BertConfig(**SMALL)
    model, other = made(lambda: tr.BertForMaskedLM(config), 0), made(lambda: tr.BertModel(config, add_pooling_layer=False), 1)
    model.save_pretrained(tmp_path)
    names = ucformat.hf_state(other, str(tmp_path))
    assert names.keys() == {name for name in load_file(tmp_path / "model.safetensors") if name.startswith("bert.")}
    ucformat.load(str(tmp_path), into={"model": names}, strict=False)
    assert state(other) == state(model.bert)


def _sharded(folder: str) -> dict[str, bytes]:
    """On each rank: the files loaded into a model under FSDP2, gathered again."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = made(llava, 1)
    fully_shard(model)
    ucformat.load(folder, into={"model": ucformat.hf_state(model, folder)})
    full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
    experts = made(MODELS["stacked experts"], 1)
    fully_shard(experts)
    with pytest.raises(UnsupportedError, match="distributed"):
        ucformat.hf_state(experts)
    dist.barrier()
    return {name: bits(x) for name, x in full.items()}


def test_a_model_under_fsdp2_takes_its_shards_and_stacked_experts_are_refused(tmp_path: Path) -> None:
    model = made(llava, 0)
    model.save_pretrained(tmp_path)
    for rank in on_ranks(2, _sharded, str(tmp_path)):
        assert rank == state(model)


def test_what_is_no_part_of_one_live_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    model = made(MODELS["stacked experts"], 0)

    def permuted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"file.{name}": tensor.flip(-1) if "experts" in name else tensor for name, tensor in tensors.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", permuted)
    with pytest.raises(UnsupportedError, match=r"experts.*from_pretrained"):
        ucformat.hf_state(model)

    def merged(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        qkv = [tensors[name] for name in tensors if "layers.0.self_attn" in name and "o_proj" not in name]
        return {"qkv": torch.cat(qkv)} if qkv else tensors

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", merged)
    with pytest.raises(UnsupportedError, match="merge it with other tensors"):
        ucformat.hf_state(model)
