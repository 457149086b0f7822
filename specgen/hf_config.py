"""A published model configuration as hf_facts.py and hf_layers.py read it: typed look-ups, and the facts they
collect.

Nouns only: takes the parsed JSON, touches no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from .errors import shown
from .hf_models import DEFAULTS

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "dim", "model_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "n_ctx",
)


class Refused(Exception):
    """A configuration that cannot become a spec: `key` of the file ("" for the whole) and the reason."""

    def __init__(self, key: str, reason: str):
        super().__init__(reason)
        self.key = key


@dataclass(frozen=True)
class Layer:
    """The attention of one layer. `kind` names its class; None scale, window, chunk and softcap are off or
    the default.
    """

    kind: str
    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float | None = None
    mask: str = "causal"
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    prefix_ranges: bool = False
    cross: bool = False


@dataclass
class Facts:
    """What a configuration says.

    `layers` are pairs of index and attention; layers without attention are absent, and one with cross
    attention comes twice. `count` is the number of layers; None where the one entry of `layers` stands for
    all of them. `notes` gives for each spec field where its value is from, `remarks` are sentences for the
    reader of the spec.
    """

    dtype: str = "bfloat16"
    max_seq_len: int = 32768
    count: int | None = None
    layers: list[tuple[int, Layer]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


class Config:
    """A configuration with the defaults of its model type behind it."""

    def __init__(self, data: Mapping[str, Any], model_type: str | None, prefix: str = ""):
        self.data, self.model_type, self.prefix = data, model_type, prefix
        self.defaults = DEFAULTS.get(model_type or "", {})

    def find(self, *keys: str) -> tuple[Any, str]:
        """(value, where from) of the first key that is given and not null, else of the model type's default,
        else (None, "").
        """
        for key in keys:
            if self.data.get(key) is not None:
                return self.data[key], self.prefix + key
        for key in keys:
            if self.defaults.get(key) is not None and key not in self.data:
                return self.defaults[key], f"inferred: {key} is not given; the default of {self.model_type}"
        return None, ""

    def integer(self, *keys: str) -> tuple[int | None, str]:
        """A positive integer or None; Refused where the value is anything else."""
        value, where = self.find(*keys)
        if value is None:
            return None, ""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
            raise Refused(where, f"needs a positive integer, got {shown(value)}")
        return value, where

    def number(self, *keys: str) -> tuple[float | None, str]:
        """A positive finite number or None; Refused where the value is anything else."""
        value, where = self.find(*keys)
        if value is None:
            return None, ""
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not (0 < value < 1e30 and isfinite(value))
        ):
            raise Refused(where, f"needs a positive finite number, got {shown(value)}")
        return float(value), where

    def flag(self, *keys: str) -> tuple[bool | None, str]:
        """true, false or None; Refused where the value is anything else."""
        value, where = self.find(*keys)
        if value is not None and not isinstance(value, bool):
            raise Refused(where, f"needs true or false, got {shown(value)}")
        return value, where

    def section(self, key: str) -> "Config":
        """The nested mapping `key`, empty where it is not given."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise Refused(self.prefix + key, f"needs a mapping, got {shown(value)}")
        return Config(value or {}, None, f"{self.prefix}{key}.")


def check_groups(heads: int, kv_heads: int, where: str) -> None:
    """Refused, with the key `where`, unless every KV head serves the same number of query heads."""
    if heads % kv_heads:
        raise Refused(where, f"contradiction: {kv_heads} KV heads do not divide {heads} query heads")
