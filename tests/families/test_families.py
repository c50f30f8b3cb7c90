"""The same model under Megatron's names and under Hugging Face's: real models go over and back, and say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

import ucformat
from tests.formats.megatron_fixtures import catalog_of, folder, tensors
from ucformat import formats
from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.errors import CoverageError, UnsupportedError
from ucformat.families import family as files
from ucformat.families import translate
from ucformat.families.joints import JOINTS
from ucformat.reshard.reading.lazy import read

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=16)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**{**SIZES, "intermediate_size": 64}),
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=40)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A tiny random model of a kind, and where it is saved."""
    known: dict[str, tuple[Any, Path]] = {}

    def make(kind: str) -> tuple[Any, Path]:
        if kind not in known:
            torch.manual_seed(0)
            model, path = MODELS[kind]().eval(), tmp_path_factory.mktemp(kind)
            model.save_pretrained(path)
            known[kind] = model, path
        return known[kind]

    return make


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_says_the_same_after_going_to_megatron_and_back(
    kind: str, saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, source = saved(kind)
    ucformat.convert(source, tmp_path / "megatron", "native", family="auto")
    there = ucformat.open(tmp_path / "megatron")
    assert "model/embedding.word_embeddings.weight" in there
    assert ("model/output_layer.weight" in there) == (kind not in ("qwen2", "gpt2"))
    ucformat.convert(tmp_path / "megatron", tmp_path / "back", "hf", family=kind, companions=source)
    back = type(model).from_pretrained(tmp_path / "back").eval()
    ids = torch.arange(24).reshape(2, 12) % 64
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)


def test_few_groups_of_keys_are_cut_for_many_ranks_by_ranges_of_rows(saved: Callable[[str], tuple[Any, Path]]) -> None:
    """8 heads in 2 groups over 8 tensor ranks: some ranks get rows of keys or values, most only rows of queries."""
    model, source = saved("llama")
    catalog = translate(formats.open_catalog(str(source)), "llama:heads=8,groups=2,head_dim=4")
    name = "model/decoder.layers.0.self_attention.linear_qkv.weight"
    layer = model.model.layers[0].self_attn
    q, k, v = (part.weight.detach().view(2, -1, 4, 32) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    whole = torch.cat([q, k, v], 1).reshape(48, 32)
    for rank in range(8):
        assert torch.equal(read(catalog, name, Box((rank * 6, 0), (6, 32))), whole[rank * 6 : rank * 6 + 6])


def test_optimizer_state_and_groups_go_along_and_back() -> None:
    source = catalog_of("tp2dp2", "legacy")
    there = translate(source, "llama:vocab=32")
    found = tensors(there)
    state = found["optimizer/model.layers.1.self_attn.k_proj.weight/fp32"]
    assert torch.equal(state.bfloat16(), found["model/model.layers.1.self_attn.k_proj.weight"])
    assert found["optimizer/model.layers.1.self_attn.v_proj.weight/step"].shape == ()
    assert isinstance(there.values, dict)
    groups = there.values["optimizer"]["param_groups"]
    assert sorted(name for group in groups for name in group["params"]) == sorted(
        {name.split("/")[1] for name in there.names if name.startswith("optimizer/")}
    )
    back = translate(there, "llama:heads=4,groups=2,head_dim=4")
    expected = tensors(source)
    assert set(back.names) == set(expected)
    for name, tensor in tensors(back).items():
        assert torch.equal(tensor, expected[name]), name


def test_rows_that_fill_the_vocabulary_up_are_cut_by_the_arguments() -> None:
    there = translate(catalog_of("tp2dp2", "legacy"), "auto")
    assert there.spec("model/model.embed_tokens.weight").shape == (29, 16)
    assert there.spec("optimizer/lm_head.weight/exp_avg").shape == (29, 16)


def test_megatron_goes_straight_to_hugging_face(tmp_path: Path) -> None:
    report = ucformat.convert(folder("tp2dp2", "dp_reshardable"), tmp_path / "out", "hf", dtype="fp32", family="auto")
    assert any("lm_head.weight" in name for name in report.left_out)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=29)
    config.save_pretrained(tmp_path / "out")
    model = hf.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    masters = tensors(catalog_of("tp2dp2", "legacy"))
    assert torch.equal(model.lm_head.weight, masters["optimizer/output_layer.weight/fp32"][:29])


def test_a_megatron_run_goes_on_as_a_model_of_transformers_without_conversion() -> None:
    """Weights from the master weights, and the optimizer's state by parameter, straight from buckets of two tensor ranks."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=29))
    vectors = [param for param in model.parameters() if param.dim() == 1]
    matrices = [param for param in model.parameters() if param.dim() > 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    report = ucformat.load(folder("tp2dp2", "dp_reshardable"), into=state, family="auto", allow_unexpected=["scheduler"])
    assert report.step == 10
    expected = tensors(translate(catalog_of("tp2dp2", "legacy"), "auto"))
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[f"optimizer/{name}/fp32"]), name
        assert torch.equal(optimizer.state[param]["exp_avg_sq"], expected[f"optimizer/{name}/exp_avg_sq"]), name
        assert optimizer.state[param]["step"] == 1
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.001]


def small(tmp_path: Path, names: list[str]) -> Catalog:
    save_file({name: torch.zeros(4, 4) for name in names}, tmp_path / "model.safetensors")
    return formats.open_catalog(str(tmp_path / "model.safetensors"))


def test_what_the_family_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"model\.odd\.weight"):
        translate(small(tmp_path, ["model.embed_tokens.weight", "model.odd.weight"]), "llama")
    with pytest.raises(UnsupportedError, match="no model family knows"):
        translate(small(tmp_path, ["model.odd.weight"]), "auto")
    with pytest.raises(UnsupportedError, match="called 'lama'"):
        translate(small(tmp_path, ["model.norm.weight"]), "lama")


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        translate(small(tmp_path, ["model.layers.0.mlp.gate_proj.weight"]), "llama")


def test_numbers_that_nothing_says_are_asked_for(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    with pytest.raises(UnsupportedError, match="head_dim"):
        translate(small(tmp_path, names), "llama")
    with pytest.raises(UnsupportedError, match="no number"):
        translate(small(tmp_path, names), "llama:heads=x")


def test_optimizer_state_by_number_is_refused() -> None:
    source = catalog_of("tp2dp2", "legacy")
    odd = source.rename(lambda name: name.replace("optimizer/output_layer.weight", "optimizer/state/3"))
    with pytest.raises(UnsupportedError, match="by number"):
        translate(replace(odd, values={"args": source.values["args"]} if isinstance(source.values, dict) else {}), "llama")


def test_family_files_use_known_words_and_each_name_once() -> None:
    for family in files.known().values():
        assert all(rule.how in JOINTS for rule in family.rules)
        for names in ([rule.megatron for rule in family.rules], [part for rule in family.rules for part in rule.hf]):
            assert len(set(names)) == len(names)
