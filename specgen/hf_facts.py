"""The attention facts of one published model configuration, each with the key it came from or why it was
inferred.

Pure: takes the parsed JSON, touches no file. A configuration that cannot be a spec raises Refused with the
key and the reason.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .dtypes import DTYPES
from .errors import shown
from .fields import MAX_LAYERS
from .hf_config import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    NESTED,
    POSITIONS,
    Config,
    Facts,
    Layer,
    Refused,
    check_groups,
)
from .hf_layers import layers_of
from .hf_models import (
    ALIBI,
    BIDIRECTIONAL,
    ENCODER_DECODER,
    IMAGE_PREFIX,
    REFUSED,
    SINKS,
    TEXT_TYPES,
    UNKNOWN_KEYS,
    UNSCALED,
)


def read_facts(data: Mapping[str, Any], model_type: str | None = None, dtype: str | None = None) -> Facts:
    """The facts of a parsed config.json. `model_type` and `dtype` stand in where the file has none; raises
    Refused.
    """
    config, outer = _text_config(data, model_type)
    _refuse_other_algorithms(config)
    facts = Facts()
    _dtype(config, outer, dtype, facts)
    if config.model_type in ENCODER_DECODER or config.data.get("is_encoder_decoder") is True:
        _encoder_decoder(config, facts)
        return facts
    _positions(config, facts)
    base = _base(config, facts)
    outer_type = outer.get("model_type")
    if outer_type in IMAGE_PREFIX and config.data is not outer and base.mask == "causal":
        base = replace(base, prefix_ranges=True)
        facts.notes["prefix_ranges"] = f"inferred: image tokens of {outer_type} see each other both ways"
    facts.count, facts.layers = layers_of(config, base, facts)
    return facts


def _text_config(data: Mapping[str, Any], model_type: str | None) -> tuple[Config, Mapping[str, Any]]:
    own = data.get("model_type")
    if own is not None and not isinstance(own, str):
        raise Refused("model_type", f"needs text, got {shown(own)}")
    inner, prefix, kind = data, "", own or model_type
    while not any(inner.get(key) is not None for key in HEADS):
        key = next((key for key in NESTED if isinstance(inner.get(key), Mapping)), None)
        if key is None:
            break
        inner, prefix = inner[key], f"{prefix}{key}."
        named = inner.get("model_type")
        kind = named if isinstance(named, str) else TEXT_TYPES.get(kind or "", kind)
    if kind is None and inner.get("attention_chunk_size") is not None:
        kind = "llama4_text"  # the only type with that key
    return Config(inner, kind, prefix), data


def _refuse_other_algorithms(config: Config) -> None:
    if config.model_type in REFUSED:
        raise Refused("model_type", f"{config.model_type}: {REFUSED[config.model_type]}")
    for key, value in config.data.items():
        if key.startswith("blocksparse_") and value not in (None, False):
            raise Refused(key, "block-sparse attention is another algorithm")
    if config.data.get("kv_lora_rank") is not None:
        raise Refused(
            "kv_lora_rank",
            "multi-head latent attention keeps one latent per token; no template implements it",
        )
    for key in UNKNOWN_KEYS:
        if config.data.get(key) not in (None, False):
            raise Refused(key, f"{shown(config.data[key])}: attention of this kind is not imported")
    position = config.data.get("position_embedding_type")
    if isinstance(position, str) and position.startswith("relative"):
        raise Refused(
            "position_embedding_type",
            f"{shown(position)}: a learned relative position bias is not a spec field",
        )


def _dtype(config: Config, outer: Mapping[str, Any], given: str | None, facts: Facts) -> None:
    for data, prefix in ((config.data, config.prefix), (outer, "")):
        for key in ("dtype", "torch_dtype"):
            value = data.get(key)
            if value is None or value == "auto":
                continue
            name = value.removeprefix("torch.") if isinstance(value, str) else value
            if not isinstance(name, str) or name not in DTYPES:
                raise Refused(prefix + key, f"needs {', '.join(DTYPES)}, got {shown(value)}")
            facts.dtype, facts.notes["dtype"] = name, prefix + key
            return
    if given is not None and given not in DTYPES:
        raise Refused("dtype", f"needs {', '.join(DTYPES)}, got {shown(given)}")
    facts.dtype = given or "bfloat16"
    facts.notes["dtype"] = (
        "given by the caller; the config has none" if given else "inferred: the config has none"
    )


def _positions(config: Config, facts: Facts) -> None:
    value, where = config.integer(*POSITIONS)
    image, patch = config.find("image_size")[0], config.find("patch_size")[0]
    if value is None and isinstance(image, int) and isinstance(patch, int) and 0 < patch <= image:
        value, where = (image // patch) ** 2 + 1, "inferred: patches of one image and a class token"
    if value is None:
        value, where = facts.max_seq_len, "inferred: the config has no limit; set what you serve"
    facts.max_seq_len, facts.notes["max_seq_len"] = min(value, 1 << 24), where


def _base(config: Config, facts: Facts) -> Layer:
    """The layer that the model would have without windows, chunks or per-layer values."""
    notes = facts.notes
    heads, notes["query_heads"] = config.integer(*HEADS)
    if heads is None:
        raise Refused("", f"gives no number of attention heads; needs one of {', '.join(HEADS)}")
    qk_dim, v_dim = _dims(config, heads, facts)
    kv_heads = _kv_heads(config, heads, facts)
    check_groups(heads, kv_heads, notes["kv_heads"])
    layer = Layer("global", heads, kv_heads, qk_dim, v_dim, mask=_mask(config, facts))
    softcap, notes["softcap"] = config.number("attn_logit_softcapping")
    alibi = _alibi(config, facts)
    sinks = config.model_type in SINKS
    if sinks:
        notes["sinks"] = f"inferred: {config.model_type} has them; no config key says so"
    return replace(layer, scale=_scale(config, qk_dim, facts), softcap=softcap, alibi=alibi, sinks=sinks)


def _dims(config: Config, heads: int, facts: Facts) -> tuple[int, int]:
    dim, where = config.integer("head_dim", "kv_channels", "attention_head_dim")
    if dim is None:
        hidden, hidden_key = config.integer(*HIDDEN)
        if hidden is None:
            raise Refused(
                "", f"gives neither head_dim nor a hidden size; needs one of head_dim, {', '.join(HIDDEN)}"
            )
        if hidden % heads:
            raise Refused(
                hidden_key, f"contradiction: {heads} heads do not divide {hidden}, and head_dim is not given"
            )
        dim, where = hidden // heads, f"inferred: {hidden_key} / heads"
    facts.notes["head_dim"] = where
    v_dim, v_where = config.integer("v_head_dim")
    if v_dim is None or v_dim == dim:
        return dim, dim
    facts.notes["head_dim"] = f"{where}, {v_where}"
    return dim, v_dim


def _kv_heads(config: Config, heads: int, facts: Facts) -> int:
    attention, blocks = config.section("attn_config"), config.data.get("block_configs")
    value, where = config.integer(*KV_HEADS)
    multi_query, flag = config.flag("multi_query", "multi_query_attention")
    if (
        config.model_type in ("falcon", "RefinedWeb", "RefinedWebModel")
        and not config.flag("new_decoder_architecture")[0]
    ):
        if config.data.get("n_head_kv") is not None:
            pass  # the first Falcon 40B, before the architecture had a flag
        elif multi_query:  # num_kv_heads counts only in the new decoder architecture
            value, where = 1, flag
        else:
            value, where = heads, "multi_query is false: one per query head"
    elif multi_query and value is None:
        value, where = 1, flag
    elif multi_query is False and config.data.get("multi_query_group_num") is not None:
        value, where = heads, f"{flag} is false: one per query head"
    if value is None:
        value, where = attention.integer("kv_n_heads")
    if value is None and attention.data.get("attn_type") == "multiquery_attention":
        value, where = 1, "attn_config.attn_type"
    if value is None and blocks is not None:
        value, where = heads, "block_configs"  # replaced layer by layer
    if value is None:
        value, where = heads, "inferred: not given, one per query head"
    facts.notes["kv_heads"] = where
    return value


def _mask(config: Config, facts: Facts) -> str:
    said = {
        "is_decoder": {True: "causal"},
        "is_causal": {True: "causal", False: "bidirectional"},
        "use_bidirectional_attention": {True: "bidirectional"},
    }
    for key, masks in said.items():
        value, where = config.flag(key)
        if value in masks:
            facts.notes["mask"] = where
            return masks[value]
    if config.model_type in BIDIRECTIONAL:
        facts.notes["mask"] = f"inferred: {config.model_type} is an encoder"
        return "bidirectional"
    names = config.data.get("architectures")
    if isinstance(names, list) and any(str(name).endswith("ForMaskedLM") for name in names):
        facts.notes["mask"] = "inferred: architectures names a ForMaskedLM"
        return "bidirectional"
    facts.notes["mask"] = "inferred: a decoder"
    return "causal"


def _alibi(config: Config, facts: Facts) -> bool:
    attention = config.section("attn_config")
    value, where = config.flag("alibi", "use_alibi")
    if config.model_type == "mpt" and value is None:
        value, where = attention.flag("alibi")
        if value is None:
            value, where = True, "inferred: attn_config.alibi is not given; the default of mpt"
        if value and attention.data.get("alibi_bias_max", 8) != 8:
            facts.remarks.append(
                "attn_config.alibi_bias_max is not 8: pass the model's own alibi_slopes to attention()."
            )
    if config.model_type in ALIBI:
        value, where = True, f"inferred: {config.model_type} has it; no config key says so"
    if (
        config.data.get("position_embedding_type") == "alibi"
        or config.data.get("position_embedding") == "ALIBI"
    ):
        value, where = True, "position_embedding_type"
    if config.model_type == "baichuan" and value is None and config.data.get("hidden_size") != 4096:
        value, where = True, "inferred: baichuan above 7B has it; no config key says so"
    if value:
        facts.notes["alibi"] = where
        if config.model_type == "falcon":
            facts.remarks.append(
                "falcon scales its ALiBi bias with the logits: pass alibi_slopes times the scale."
            )
    return bool(value)


def _scale(config: Config, qk_dim: int, facts: Facts) -> float | None:
    """The factor of the logits, None where it is 1/sqrt(qk_dim)."""
    scalar, where = config.number("query_pre_attn_scalar")
    value = None if scalar is None else scalar**-0.5
    where = f"1/sqrt({scalar:g}), {where}" if scalar is not None else ""
    if value is None:
        value, where = config.number("attention_multiplier")
    if value is None:
        value, where = config.section("attn_config").number("softmax_scale")
    if config.flag("scale_attn_by_inverse_layer_idx")[0]:
        raise Refused(
            "scale_attn_by_inverse_layer_idx", "a scale that differs from layer to layer is not imported"
        )
    if config.flag("scale_attn_weights")[0] is False:
        value, where = 1.0, "scale_attn_weights is false"
    if config.model_type in UNSCALED:
        value, where = 1.0, f"inferred: {config.model_type} does not scale; no config key says so"
    if value is not None and abs(value - qk_dim**-0.5) <= 1e-12:
        value, where = None, f"{where}: the same as 1/sqrt(head_dim)"
    facts.notes["scale"] = where
    return value


def _encoder_decoder(config: Config, facts: Facts) -> None:
    """Three layer classes; the decoder's layers are numbered after the encoder's."""
    notes = facts.notes
    width, width_key = config.integer(*HIDDEN)
    encoder, encoder_key = config.integer("encoder_attention_heads", "num_attention_heads")
    decoder, decoder_key = config.integer("decoder_attention_heads")
    if encoder is None or width is None:
        raise Refused("", "an encoder-decoder model needs d_model and encoder_attention_heads")
    if decoder is None:
        decoder, decoder_key = encoder, "inferred: decoder_attention_heads is not given, as the encoder"
    for heads, key in ((encoder, encoder_key), (decoder, decoder_key)):
        if width % heads:
            raise Refused(key, f"contradiction: {heads} heads do not divide {width_key} {width}")
    counts = []
    for key in ("encoder_layers", "decoder_layers"):
        count, where = config.integer(key, *LAYERS[:1])
        if count is None or count > MAX_LAYERS // 2:
            raise Refused(
                key, "missing; needed to tell the layers apart" if count is None else "too many layers"
            )
        if where.startswith("inferred"):
            facts.remarks.append(f"{where}.")
        counts.append(count)
    positions = [config.integer(key) for key in ("max_source_positions", "max_target_positions")]
    known = [(value, where) for value, where in positions if value is not None]
    if known:
        facts.max_seq_len, notes["max_seq_len"] = max(known)
    else:
        _positions(config, facts)
    notes["query_heads"] = f"{encoder_key}; {decoder_key}"
    notes["kv_heads"] = "one per query head"
    notes["head_dim"] = f"inferred: {width_key} / heads"
    notes["mask"] = (
        f"inferred: {config.model_type or 'an encoder-decoder'} has encoder, decoder and cross attention"
    )
    notes["layers"] = "encoder_layers, decoder_layers: the decoder's are numbered after the encoder's"
    own = Layer("encoder", encoder, encoder, width // encoder, width // encoder, mask="bidirectional")
    causal = Layer("decoder", decoder, decoder, width // decoder, width // decoder)
    cross = replace(causal, kind="cross", mask="bidirectional", cross=True)
    facts.count = sum(counts)
    behind = range(counts[0], facts.count)
    facts.layers = [(i, own) for i in range(counts[0])] + [
        (i, layer) for layer in (causal, cross) for i in behind
    ]
