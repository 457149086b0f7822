"""A small spec with any field switched on: what tests of the rules and the generated tables are made of."""

from specgen.load import loads
from specgen.spec import Spec

# Each field of an attention entry switched on, with what it needs to be legal alone.
FEATURES: dict[str, dict[str, str]] = {
    "mask": {"mask": "bidirectional"},
    "scale": {"scale": "0.05"},
    "head_dim": {"head_dim": "{qk: 512, v: 16}"},
    "sliding_window": {"sliding_window": "20"},
    "chunk": {"chunk": "20"},
    "softcap": {"softcap": "50.0"},
    "sinks": {"sinks": "true"},
    "alibi": {"alibi": "true"},
    "rotary": {"rotary": "{dim: 16, style: half}"},
    "interleaved": {"rotary": "{dim: 6, style: interleaved}"},
    "prefix_ranges": {"prefix_ranges": "true"},
    "cross": {"cross": "true", "mask": "bidirectional"},
}


def spec_of(
    fields=None, dtype="bfloat16", cache="{dtype: bfloat16, page_size: 16}", degrees="[1]", more=""
) -> Spec:
    """The spec of one layer class; `fields` are YAML texts that replace or join the entry's."""
    entry = {"name": "a", "query_heads": "8", "kv_heads": "2", "head_dim": "64"} | (fields or {})
    body = ", ".join(f"{key}: {value}" for key, value in entry.items())
    return loads(
        f"version: 1\nname: tiny\ndtype: {dtype}\nattention:\n  - {{{body}}}\nkv_cache: {cache}\n"
        f"tensor_parallel: {degrees}\ntargets: [h200, mi300x]\n"
        f"limits: {{max_seqs: 4, max_seq_len: 64, max_tokens: 20, max_spec_tokens: 4}}\n{more}"
    ).spec
