"""Tiny random configurations of common architectures: three layers each, with every kind of linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers as hf

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
GEMMA3_TEXT = {**GROUPED, "head_dim": 16}


@dataclass(frozen=True)
class Architecture:
    """One model class, its configuration, and what a test expects."""

    model: type
    config: Any
    layers: str
    """Name of the list of decoder layers."""
    switched: int
    """8-bit modules per layer."""
    bias: bool = False
    """Whether some of them have a bias."""
    tied: bool = False
    """Whether the output head is the embedding."""
    experts: str | None = None
    """Class of a layer's fused experts, which bitsandbytes does not quantise."""
    targets: Any = "all-linear"
    """LoRA targets."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED), "model.layers", 7),
    "mistral": Architecture(hf.MistralForCausalLM, hf.MistralConfig(**GROUPED), "model.layers", 7),
    "qwen2": Architecture(hf.Qwen2ForCausalLM, hf.Qwen2Config(**GROUPED), "model.layers", 7, bias=True),
    "qwen3": Architecture(hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED, head_dim=16), "model.layers", 7),
    "gemma2": Architecture(
        hf.Gemma2ForCausalLM, hf.Gemma2Config(**GROUPED, head_dim=16, query_pre_attn_scalar=16), "model.layers", 7, tied=True
    ),
    "gemma3 text": Architecture(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**GEMMA3_TEXT), "model.layers", 7, tied=True),
    "gemma3 multimodal": Architecture(
        hf.Gemma3ForConditionalGeneration,
        hf.Gemma3Config(
            text_config=GEMMA3_TEXT,
            mm_tokens_per_image=4,
            image_token_index=127,
            boi_token_index=126,
            eoi_token_index=125,
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "image_size": 28,
                "patch_size": 14,
            },
        ),
        "model.language_model.layers",
        7,
        tied=True,
    ),
    "phi3": Architecture(hf.Phi3ForCausalLM, hf.Phi3Config(**GROUPED), "model.layers", 4),
    "gpt2": Architecture(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=128,
            n_embd=64,
            n_layer=3,
            n_head=4,
            n_positions=32,
            bos_token_id=1,
            eos_token_id=2,
            attn_pdrop=0,
            resid_pdrop=0,
            embd_pdrop=0,
        ),
        "transformer.h",
        4,
        bias=True,
        tied=True,
        targets=["c_attn", "c_proj", "c_fc"],
    ),
    "opt": Architecture(
        hf.OPTForCausalLM,
        hf.OPTConfig(
            **{k: v for k, v in SMALL.items() if k != "intermediate_size"},
            ffn_dim=96,
            word_embed_proj_dim=64,
            max_position_embeddings=32,
            dropout=0,
        ),
        "model.decoder.layers",
        6,
        bias=True,
        tied=True,
    ),
    "bloom": Architecture(
        hf.BloomForCausalLM,
        hf.BloomConfig(vocab_size=128, hidden_size=64, n_layer=3, n_head=4),
        "transformer.h",
        4,
        bias=True,
        tied=True,
    ),
    "gpt-neox": Architecture(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**SMALL), "gpt_neox.layers", 4, bias=True),
    "mixtral": Architecture(
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
        "model.layers",
        4,
        experts="MixtralExperts",
        targets=["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "qwen2-moe": Architecture(
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig(
            **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64
        ),
        "model.layers",
        8,
        bias=True,
        experts="Qwen2MoeExperts",
        targets=["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "qwen3-moe": Architecture(
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig(**GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        "model.layers",
        4,
        experts="Qwen3MoeExperts",
        targets=["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "starcoder2": Architecture(
        hf.Starcoder2ForCausalLM, hf.Starcoder2Config(**GROUPED), "model.layers", 6, bias=True, tied=True
    ),
    "stablelm": Architecture(hf.StableLmForCausalLM, hf.StableLmConfig(**GROUPED), "model.layers", 7),
    "olmo2": Architecture(hf.Olmo2ForCausalLM, hf.Olmo2Config(**GROUPED), "model.layers", 7),
    "glm4": Architecture(hf.Glm4ForCausalLM, hf.Glm4Config(**GROUPED, head_dim=16), "model.layers", 6, bias=True),
}
