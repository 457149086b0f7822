"""What a config.json leaves unsaid: facts that live in the code of a model type, not in its configuration
file.

Pure data, used by hf.py; read from the configuration and modeling classes of Hugging Face transformers 5.17.
"""

# Attention keys that the configuration class of a model type fills in where a file omits them.
DEFAULTS: dict[str, dict[str, object]] = {
    "afmoe": {"head_dim": 128, "sliding_window": 1024, "global_attn_every_n_layers": 4},
    "bert": {"max_position_embeddings": 512},
    "bloom": {"max_position_embeddings": 2048},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4, "num_hidden_layers": 40},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4, "num_hidden_layers": 32},
    "falcon": {
        "multi_query": True,
        "new_decoder_architecture": False,
        "alibi": False,
        "max_position_embeddings": 2048,
    },
    "gemma": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "num_hidden_layers": 26,
        "max_position_embeddings": 8192,
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "num_hidden_layers": 26,
        "max_position_embeddings": 131072,
    },
    "glm": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128},
    "gpt2": {"n_positions": 1024},
    "gpt_bigcode": {"multi_query": True},
    "gpt_neox": {"max_position_embeddings": 2048},
    "gpt_oss": {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "num_hidden_layers": 36,
        "max_position_embeddings": 131072,
    },
    "granite": {"attention_multiplier": 1.0},
    "granitemoe": {"attention_multiplier": 1.0},
    "granitemoeshared": {"attention_multiplier": 1.0},
    "helium": {"head_dim": 128},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4, "num_hidden_layers": 32},
    "llama4_text": {
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "num_hidden_layers": 48,
        "max_position_embeddings": 131072,
    },
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "mixtral": {"num_key_value_heads": 8},
    "mpt": {"max_seq_len": 2048},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4, "num_hidden_layers": 32},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28, "num_hidden_layers": 32},
    "qwen2_moe": {"use_sliding_window": False, "max_window_layers": 28, "num_hidden_layers": 24},
    "qwen2_5_vl_text": {"use_sliding_window": False, "max_window_layers": 80, "num_hidden_layers": 80},
    "qwen2_vl_text": {"use_sliding_window": False, "max_window_layers": 80, "num_hidden_layers": 80},
    "qwen3": {"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28, "num_hidden_layers": 32},
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": {"head_dim": 256, "full_attention_interval": 4, "num_hidden_layers": 48},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "use_sliding_window": False},
    "starcoder2": {"num_key_value_heads": 2},
    "vit": {"image_size": 224, "patch_size": 16},
    "whisper": {
        "encoder_layers": 4,
        "decoder_layers": 4,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    },
}
DEFAULTS["gpt-sw3"] = DEFAULTS["gpt2"]
DEFAULTS["vaultgemma"] = DEFAULTS["gemma2"]
DEFAULTS["RefinedWebModel"] = DEFAULTS["RefinedWeb"] = DEFAULTS["falcon"]

# Multimodal types whose text part, where it names no type of its own, is of this type.
TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
}

# Models that let image tokens see each other both ways inside a causal text.
IMAGE_PREFIX = frozenset({"gemma3", "paligemma"})

# Every token sees every token. `is_decoder: true` in the file makes these causal.
BIDIRECTIONAL = frozenset(
    "albert beit bert bert-generation camembert clip_vision_model data2vec-text deit dinov2 "
    "dinov2_with_registers distilbert electra ernie esm eurobert hubert ijepa "
    "nomic_bert pixtral roformer roberta roberta-prelayernorm siglip siglip2 siglip_text_model "
    "siglip_vision_model videomae visual_bert vit vit_mae vit_msn wav2vec2 xlm-roberta xlm-roberta-xl "
    "xmod".split()
)

# Encoder and decoder with plain scaled dot products: three masks.
ENCODER_DECODER = frozenset(
    "bart blenderbot blenderbot-small m2m_100 marian mbart mvp nllb-moe pegasus plbart speech_to_text "
    "whisper".split()
)

# Types whose code places windows or attention in a pattern of its own; imported only where the file lists it.
NEED_LAYER_TYPES = frozenset(
    {"cwm", "granite_swa", "granitemoe_swa", "granitemoehybrid", "lfm2", "ministral"}
)

# One learned logit per query head; the weights tell, the configuration does not.
SINKS = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa"})

ALIBI = frozenset({"bloom"})

# Types whose logits are not scaled at all.
UNSCALED = frozenset({"gpt_neo"})

# Types whose attention is another algorithm than a masked softmax of scaled dot products.
REFUSED: dict[str, str] = {
    "phi3small": "block-sparse attention is another algorithm",
    "big_bird": "block-sparse attention is another algorithm",
    "bigbird_pegasus": "block-sparse attention is another algorithm",
    "longformer": "global tokens beside a two-sided window are another algorithm",
    "led": "global tokens beside a two-sided window are another algorithm",
    "modernbert": "a two-sided sliding window is not a spec field",
    "modernbert-decoder": "half windows are not imported",
    "mimo_v2_flash": "its window layers have other heads and sinks; they are not imported",
    "mobilebert": "its bottleneck heads are not imported",
    "nezha": "a learned relative position bias is not a spec field",
    "reformer": "hashed attention is another algorithm",
    "xlnet": "two-stream relative attention is another algorithm",
    "swin": "shifted two-dimensional windows are another algorithm",
    "swinv2": "shifted two-dimensional windows and cosine logits are another algorithm",
}
REFUSED |= dict.fromkeys(
    "t5 mt5 umt5 longt5 switch_transformers udop pop2piano mpnet".split(),
    "a learned relative position bias is not a spec field",
)
REFUSED |= dict.fromkeys("deberta deberta-v2 sew-d".split(), "disentangled attention is another algorithm")

# Keys that change attention in a way that this importer does not know; a value that is not null or false is
# refused.
UNKNOWN_KEYS = (
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "add_swa_attention_sink_bias",
    "add_full_attention_sink_bias",
    "global_head_dim",
    "num_global_key_value_heads",
    "index_topk",
    "num_kv_shared_layers",
    "cross_attention_layers",
    "add_cross_attention",
    "use_relative_position_bias",
    "use_shared_relative_position_bias",
    "prefix_lm",
    "sparse_attention",
)
