"""Tiny models of many classes of transformers, each of them made from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LLM = {**BASE, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEAD = {**LLM, "head_dim": 8}
IMAGE = {**BASE, "image_size": 8, "patch_size": 4}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
MLA = {
    **LLM,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

CLASSES: dict[str, tuple[str, Mapping[str, Any]]] = {
    # class of the model → class of its configuration, and what to make it of
    "LlamaForCausalLM": ("LlamaConfig", LLM),
    "MistralForCausalLM": ("MistralConfig", HEAD),
    "Qwen2ForCausalLM": ("Qwen2Config", {**LLM, "tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("Qwen3Config", HEAD),
    "GemmaForCausalLM": ("GemmaConfig", HEAD),
    "Gemma2ForCausalLM": ("Gemma2Config", HEAD),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", HEAD),
    "PhiForCausalLM": ("PhiConfig", LLM),
    "Phi3ForCausalLM": ("Phi3Config", LLM),
    "FalconForCausalLM": ("FalconConfig", LLM),
    "StableLmForCausalLM": ("StableLmConfig", LLM),
    "Starcoder2ForCausalLM": ("Starcoder2Config", LLM),
    "OlmoForCausalLM": ("OlmoConfig", LLM),
    "Olmo2ForCausalLM": ("Olmo2Config", LLM),
    "CohereForCausalLM": ("CohereConfig", LLM),
    "GraniteForCausalLM": ("GraniteConfig", LLM),
    "SmolLM3ForCausalLM": ("SmolLM3Config", LLM),
    "GlmForCausalLM": ("GlmConfig", {**HEAD, "partial_rotary_factor": 0.5}),
    "Glm4ForCausalLM": ("Glm4Config", {**HEAD, "partial_rotary_factor": 0.5}),
    "NemotronForCausalLM": ("NemotronConfig", HEAD),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", BASE),
    "GPTJForCausalLM": (
        "GPTJConfig",
        {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "rotary_dim": 4},
    ),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "OPTForCausalLM": (
        "OPTConfig",
        {**BASE, "ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 16, "intermediate_size": None},
    ),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "MptForCausalLM": ("MptConfig", {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 16}),
    "MambaForCausalLM": ("MambaConfig", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "Mamba2ForCausalLM": (
        "Mamba2Config",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 1,
        },
    ),
    "RwkvForCausalLM": ("RwkvConfig", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16}),
    # experts
    "MixtralForCausalLM": ("MixtralConfig", {**LLM, "num_local_experts": 4}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {**LLM, **EXPERTS, "shared_expert_intermediate_size": 8}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**HEAD, **EXPERTS}),
    "OlmoeForCausalLM": ("OlmoeConfig", {**LLM, "num_experts": 4}),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", MLA),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", MLA),
    "GptOssForCausalLM": ("GptOssConfig", {**HEAD, "num_local_experts": 4}),
    # encoders
    "BertForMaskedLM": ("BertConfig", BASE),
    "BertForSequenceClassification": ("BertConfig", BASE),
    "RobertaForMaskedLM": ("RobertaConfig", {**BASE, "max_position_embeddings": 20}),
    "XLMRobertaModel": ("XLMRobertaConfig", {**BASE, "max_position_embeddings": 20}),
    "DistilBertForMaskedLM": ("DistilBertConfig", {"vocab_size": 64, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}),
    "AlbertForMaskedLM": ("AlbertConfig", {**BASE, "embedding_size": 8}),
    "ElectraForPreTraining": ("ElectraConfig", {**BASE, "embedding_size": 8}),
    "DebertaV2ForMaskedLM": ("DebertaV2Config", {**BASE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "ModernBertForMaskedLM": ("ModernBertConfig", {**BASE, "pad_token_id": 0}),
    "LongformerForMaskedLM": ("LongformerConfig", {**BASE, "attention_window": 4, "max_position_embeddings": 20}),
    "MPNetForMaskedLM": ("MPNetConfig", {**BASE, "max_position_embeddings": 20}),
    # sequence to sequence
    "T5ForConditionalGeneration": ("T5Config", T5),
    "MT5ForConditionalGeneration": ("MT5Config", T5),
    "UMT5ForConditionalGeneration": ("UMT5Config", T5),
    "BartForConditionalGeneration": ("BartConfig", SEQ2SEQ),
    "MBartForConditionalGeneration": ("MBartConfig", SEQ2SEQ),
    "PegasusForConditionalGeneration": ("PegasusConfig", SEQ2SEQ),
    "MarianMTModel": ("MarianConfig", SEQ2SEQ),
    "M2M100ForConditionalGeneration": ("M2M100Config", SEQ2SEQ),
    "WhisperForConditionalGeneration": ("WhisperConfig", {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 8}),
    # pictures and sound
    "ViTForImageClassification": ("ViTConfig", IMAGE),
    "DeiTForImageClassification": ("DeiTConfig", IMAGE),
    "BeitForImageClassification": ("BeitConfig", IMAGE),
    "Dinov2Model": ("Dinov2Config", IMAGE),
    "ConvNextForImageClassification": ("ConvNextConfig", {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2}),
    "ResNetForImageClassification": ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "CLIPModel": ("CLIPConfig", {"text_config": BASE, "vision_config": IMAGE, "projection_dim": 8}),
    "SiglipModel": ("SiglipConfig", {"text_config": BASE, "vision_config": IMAGE}),
    "Wav2Vec2ForCTC": (
        "Wav2Vec2Config",
        {**BASE, "conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_conv_pos_embeddings": 4},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {"vision_config": {**IMAGE, "model_type": "clip_vision_model"}, "text_config": {**LLM, "model_type": "llama"}},
    ),
}


def build(name: str) -> Any:
    """A model of that class with random weights."""
    config_name, values = CLASSES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{key: value for key, value in values.items() if value is not None})
    return getattr(transformers, name)(config).eval()
