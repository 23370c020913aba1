"""Tiny models of the families of `transformers`, made without a download, and what to call them with."""

import torch
import transformers as t

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ALL_HEADS = {**SIZES, **TOKENS}
GROUPED = {**ALL_HEADS, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PIXELS = {"image_size": 16, "patch_size": 4}
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.0}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
DEEPSEEK = {**ALL_HEADS, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "dropout_rate": 0.0, "decoder_start_token_id": 0}
WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
WHISPER |= {"vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "dropout": 0.0, "decoder_start_token_id": 1, **TOKENS}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4, **TOKENS}

# Name: model, configuration, its arguments. All but those named in `inputs` take tokens.
DECODERS = {
    "Llama": (t.LlamaForCausalLM, t.LlamaConfig, GROUPED),
    "Qwen 3": (t.Qwen3ForCausalLM, t.Qwen3Config, WIDE),
    "Mistral": (t.MistralForCausalLM, t.MistralConfig, GROUPED),
    "Gemma 2": (t.Gemma2ForCausalLM, t.Gemma2Config, WIDE),
    "Gemma 3": (t.Gemma3ForCausalLM, t.Gemma3TextConfig, WIDE),
    "Phi-3": (t.Phi3ForCausalLM, t.Phi3Config, GROUPED),
    "GPT-2": (t.GPT2LMHeadModel, t.GPT2Config, GPT2),
    "GPT-NeoX": (t.GPTNeoXForCausalLM, t.GPTNeoXConfig, ALL_HEADS),
    "OPT": (t.OPTForCausalLM, t.OPTConfig, OPT),
    "Falcon": (t.FalconForCausalLM, t.FalconConfig, ALL_HEADS),
    "StarCoder 2": (t.Starcoder2ForCausalLM, t.Starcoder2Config, {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "Cohere": (t.CohereForCausalLM, t.CohereConfig, GROUPED),
    "OLMo 2": (t.Olmo2ForCausalLM, t.Olmo2Config, GROUPED),
    "SmolLM 3": (t.SmolLM3ForCausalLM, t.SmolLM3Config, GROUPED),
    "Mixtral": (t.MixtralForCausalLM, t.MixtralConfig, {**GROUPED, "num_local_experts": 4}),
    "Qwen 3 MoE": (t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig, {**WIDE, **EXPERTS, "num_experts": 4}),
    "DeepSeek V3": (t.DeepseekV3ForCausalLM, t.DeepseekV3Config, DEEPSEEK),
    "Mamba 2": (t.Mamba2ForCausalLM, t.Mamba2Config, MAMBA),
}
OTHERS = {
    "BERT": (t.BertForMaskedLM, t.BertConfig, {**SIZES, **NO_DROPOUT, "pad_token_id": 0}),
    "RoBERTa": (t.RobertaForMaskedLM, t.RobertaConfig, {**ALL_HEADS, **NO_DROPOUT}),
    "T5": (t.T5ForConditionalGeneration, t.T5Config, T5),
    "ViT": (t.ViTForImageClassification, t.ViTConfig, {**LAYERS, **PIXELS, **NO_DROPOUT}),
    "CLIP": (t.CLIPModel, t.CLIPConfig, {"text_config": {**SIZES, "max_position_embeddings": 16, "eos_token_id": 2}, "vision_config": {**LAYERS, **PIXELS}, "projection_dim": 16}),
    "Whisper": (t.WhisperForConditionalGeneration, t.WhisperConfig, WHISPER),
}
FAMILIES = DECODERS | OTHERS


def made(name):
    """A model of random values and its inputs, the same at each call."""
    torch.manual_seed(0)
    model, config, arguments = FAMILIES[name]
    ids = torch.randint(3, 64, (2, 8))
    pixels = torch.randn(2, 3, 16, 16)
    inputs = {
        "ViT": {"pixel_values": pixels, "labels": torch.tensor([0, 1])},
        "CLIP": {"input_ids": ids, "pixel_values": pixels, "return_loss": True},
        "Whisper": {"input_features": torch.randn(2, 8, 16), "labels": ids},
    }
    return model(config(**arguments)).train(), inputs.get(name, {"input_ids": ids, "labels": ids})
