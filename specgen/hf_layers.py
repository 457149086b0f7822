"""Which layers of a model have a window, a chunk, other head counts, or no attention at all.

Pure: takes a Config and the layer that the model would have without any of these; raises Refused with the key
and the reason.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .errors import shown
from .fields import MAX_LAYERS
from .hf_config import LAYERS, Config, Facts, Layer, Refused, check_groups
from .hf_models import NEED_LAYER_TYPES

Layers = tuple[
    int | None, list[tuple[int, Layer]]
]  # number of layers, None for one that stands for all; index and attention

# What `layer_types` may say. "none" has no softmax attention.
KINDS = {
    "full_attention": "global",
    "attention": "global",
    "global_attention": "global",
    "global": "global",
    "sliding_attention": "sliding",
    "sliding_window_attention": "sliding",
    "local_attention": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "none",
    "mamba": "none",
    "mamba2": "none",
    "recurrent": "none",
    "conv": "none",
    "moe": "none",
    "mlp": "none",
}


def layers_of(config: Config, base: Layer, facts: Facts) -> Layers:
    """The attention of every layer; adds notes on windows, chunks and layers to `facts`."""
    if config.data.get("block_configs") is not None:
        return _blocks(config, base, facts)
    window, chunk = _window(config, facts), _chunk(config, facts)
    kinds = _kinds(config, window, chunk, facts)
    if kinds is None:
        layer = replace(base, window=window, kind="sliding") if window else base
        return None, [(0, _two_sided(layer, facts))]
    if "sliding" in kinds and window is None and "window_off" not in facts.notes:
        raise Refused("sliding_window", "missing, but layers are said to be sliding")
    if "chunked" in kinds and chunk is None and "chunk_off" not in facts.notes:
        raise Refused("attention_chunk_size", "missing, but layers are said to be chunked")
    made = {
        "global": base,
        "sliding": replace(base, window=window, kind="sliding") if window else base,
        "chunked": replace(base, chunk=chunk, kind="chunked") if chunk else base,
    }
    layers = [(i, _two_sided(made[kind], facts)) for i, kind in enumerate(kinds) if kind != "none"]
    if not layers:
        raise Refused("layer_types", "names no layer with attention")
    if len(layers) == len(kinds) and len({layer for _, layer in layers}) == 1:
        return None, layers[:1]
    if skipped := len(kinds) - len(layers):
        facts.remarks.append(f"{skipped} of {len(kinds)} layers have no softmax attention and are left out.")
    return len(kinds), layers


def _two_sided(layer: Layer, facts: Facts) -> Layer:
    if layer.mask == "bidirectional" and (layer.window or layer.chunk):
        raise Refused(
            facts.notes.get("sliding_window", "sliding_window"),
            "a two-sided sliding window is not a spec field",
        )
    return layer


def _window(config: Config, facts: Facts) -> int | None:
    """The window that binds, or None; notes say where it is from or why it is off."""
    notes = facts.notes
    if "use_sliding_window" in config.data or "use_sliding_window" in config.defaults:
        used, where = config.flag("use_sliding_window")
        if not used:
            if config.data.get("sliding_window") is not None:
                reason = where if where.startswith("inferred") else f"{where} is false"
                notes["sliding_window"] = f"{config.prefix}sliding_window is given and off: {reason}"
            notes["window_off"] = where
            return None
    window, where = config.integer(
        "sliding_window", "window_size" if config.model_type == "gpt_neo" else "sliding_window"
    )
    if window is None:
        return None
    notes["sliding_window"] = where
    if window >= facts.max_seq_len and not notes["max_seq_len"].startswith(
        "inferred: the config has no limit"
    ):
        notes["sliding_window"] = f"{where} {window} never binds: sequences have at most {facts.max_seq_len}"
        notes["window_off"] = where
        return None
    return window


def _chunk(config: Config, facts: Facts) -> int | None:
    chunk, where = config.integer("attention_chunk_size")
    if chunk is None:
        return None
    facts.notes["chunk"] = where
    if chunk >= facts.max_seq_len and not facts.notes["max_seq_len"].startswith(
        "inferred: the config has no limit"
    ):
        facts.notes["chunk"] = f"{where} {chunk} never binds: sequences have at most {facts.max_seq_len}"
        facts.notes["chunk_off"] = where
        return None
    return chunk


def _count(config: Config, facts: Facts, why: str) -> int:
    count, where = config.integer(*LAYERS)
    if count is None:
        raise Refused("num_hidden_layers", f"missing; needed because of {why}")
    if count > MAX_LAYERS:
        raise Refused(where, f"needs at most {MAX_LAYERS} layers, got {count}")
    if where.startswith("inferred"):
        facts.remarks.append(f"{where}.")
    return count


def _kinds(config: Config, window: int | None, chunk: int | None, facts: Facts) -> list[str] | None:
    """One of "global", "sliding", "chunked" or "none" per layer, or None where all layers are alike."""
    for key in ("layer_types", "layers_block_type", "block_types", "attention_layers"):
        if config.data.get(key) is not None:
            return _listed(config, key, facts)
    if config.model_type in NEED_LAYER_TYPES:
        raise Refused("layer_types", f"missing; needed for {config.model_type}")
    if hybrid := _hybrid(config, facts):
        return hybrid
    if chunk is not None:
        return _chunked(config, facts)
    if window is None:
        return None
    if config.data.get("attention_types") is not None:
        return _gpt_neo(config, facts)
    pattern, where = config.find("sliding_window_pattern", "_sliding_window_pattern")
    if pattern is not None:
        return _patterned(config, pattern, where, facts)
    every, where = config.integer("global_attn_every_n_layers")
    if every is not None:
        facts.notes["layers"] = where
        return _every(_count(config, facts, where), every)
    if config.data.get("max_window_layers") is not None or "max_window_layers" in config.defaults:
        first = config.data.get("max_window_layers", config.defaults.get("max_window_layers"))
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise Refused("max_window_layers", f"needs an integer of at least 0, got {shown(first)}")
        facts.notes["layers"] = f"{config.prefix}max_window_layers: layers below {first} have no window"
        return [
            "global" if i < first else "sliding" for i in range(_count(config, facts, "max_window_layers"))
        ]
    return None


def _listed(config: Config, key: str, facts: Facts) -> list[str]:
    names, where = config.data[key], config.prefix + key
    if not isinstance(names, list) or not names or len(names) > MAX_LAYERS:
        raise Refused(where, f"needs a list with one name per layer, got {shown(names)}")
    for name in names:
        if not isinstance(name, str) or name not in KINDS:
            raise Refused(where, f"{shown(name)}: attention of this kind is not imported")
    given = next((config.data[name] for name in LAYERS if config.data.get(name) is not None), None)
    if given is not None and given != len(names):
        raise Refused(
            where, f"contradiction: {len(names)} layers are listed, num_hidden_layers is {shown(given)}"
        )
    facts.notes["layers"] = where
    return [KINDS[name] for name in names]


def _hybrid(config: Config, facts: Facts) -> list[str] | None:
    """Layers of a model where only some have attention, as said by the keys of such models; None where none
    is given.
    """
    kinds = None
    if (period := config.integer("attn_layer_period")[0]) is not None:
        offset, key = config.find("attn_layer_offset")[0], "attn_layer_period"
        kinds = [
            "global" if i % period == (offset or 0) else "none" for i in range(_count(config, facts, key))
        ]
    elif (interval := config.integer("full_attention_interval")[0]) is not None:
        key = "full_attention_interval"
        kinds = ["none" if (i + 1) % interval else "global" for i in range(_count(config, facts, key))]
    elif isinstance(chosen := config.data.get("attn_layer_indices"), list):
        key = "attn_layer_indices"
        kinds = ["global" if i in chosen else "none" for i in range(_count(config, facts, key))]
    elif (
        isinstance(pattern := config.data.get("hybrid_override_pattern"), str) and len(pattern) <= MAX_LAYERS
    ):
        key = "hybrid_override_pattern"
        kinds = ["global" if letter == "*" else "none" for letter in pattern]
    if kinds is not None:
        facts.notes["layers"] = config.prefix + key
    return kinds


def _chunked(config: Config, facts: Facts) -> list[str]:
    count, flags = _count(config, facts, "attention_chunk_size"), config.data.get("no_rope_layers")
    if flags:
        if not isinstance(flags, list) or len(flags) != count or any(flag not in (0, 1) for flag in flags):
            raise Refused(
                config.prefix + "no_rope_layers",
                f"needs a list of {count} zeros and ones, got {shown(flags)}",
            )
        facts.notes["layers"] = config.prefix + "no_rope_layers: 1 is chunked"
        return ["chunked" if flag else "global" for flag in flags]
    every, where = config.integer("no_rope_layer_interval")
    every, where = (
        (every, where) if every else (4, "inferred: no_rope_layer_interval is not given; Llama 4's 4")
    )
    facts.notes["layers"] = f"{where}: layers without rotary embedding see all keys"
    return ["global" if (i + 1) % every == 0 else "chunked" for i in range(count)]


def _patterned(config: Config, pattern: Any, where: str, facts: Facts) -> list[str]:
    facts.notes["layers"] = where
    count = _count(config, facts, "sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:  # local and global, repeated
        return ["sliding" if pattern[i % len(pattern)] == "L" else "global" for i in range(count)]
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise Refused(
            "sliding_window_pattern", f"needs a positive integer or letters L and G, got {shown(pattern)}"
        )
    return _every(count, pattern)


def _every(count: int, every: int) -> list[str]:
    return ["sliding" if (i + 1) % every else "global" for i in range(count)]


def _gpt_neo(config: Config, facts: Facts) -> list[str]:
    where, kinds = config.prefix + "attention_types", []
    try:
        for names, times in config.data["attention_types"]:
            kinds += [KINDS[name] for name in names] * min(times, MAX_LAYERS)
    except (TypeError, ValueError, KeyError):
        raise Refused(where, "needs a list of [[names], times]") from None
    facts.notes["layers"] = where
    return kinds[:MAX_LAYERS]


def _blocks(config: Config, base: Layer, facts: Facts) -> Layers:
    """NVIDIA's searched models: `block_configs` says for each layer whether it has attention and with how
    many KV heads.
    """
    blocks, where = config.data["block_configs"], config.prefix + "block_configs"
    if not isinstance(blocks, list) or not blocks or len(blocks) > MAX_LAYERS:
        raise Refused(
            where, f"needs a list with one block per layer, which gives the KV heads; got {shown(blocks)}"
        )
    layers = []
    for i, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise Refused(f"{where}.{i}.attention", f"needs a mapping, got {shown(attention)}")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            continue
        section = Config(attention, None, f"{where}.{i}.attention.")
        group, key = section.integer("n_heads_in_group")
        kv_heads, kv_key = section.integer("num_key_value_heads")
        if kv_heads is None:
            if group is None or base.query_heads % group:
                needed = f"a divisor of {base.query_heads} query heads"
                raise Refused(
                    key or f"{where}.{i}.attention.n_heads_in_group", f"needs {needed}, got {shown(group)}"
                )
            kv_heads, kv_key = base.query_heads // group, key
        check_groups(base.query_heads, kv_heads, kv_key)
        if attention.get("num_sink_tokens") or attention.get("sparsify"):
            raise Refused(
                f"{where}.{i}.attention", "window with sink tokens: attention of this kind is not imported"
            )
        window, _ = section.integer("window_length")
        kind = "sliding" if window else base.kind
        layers.append((i, replace(base, kv_heads=kv_heads, window=window, kind=kind)))
    if not layers:
        raise Refused(where, "names no layer with attention")
    facts.notes["kv_heads"] = facts.notes["layers"] = f"{where}, per layer"
    if len(layers) < len(blocks):
        facts.remarks.append(
            f"{len(blocks) - len(layers)} of {len(blocks)} layers have no attention and are left out."
        )
    elif len({layer for _, layer in layers}) == 1:
        return None, layers[:1]
    return len(blocks), layers
