"""Small randomly initialised models of the transformers classes whose attention tests/gpu/models.py checks.

A model is a configuration, and what its attention module needs to call a function in place of its own
softmax. Weights come from a fixed seed: the same on every machine. Imports transformers and torch; reads no
file.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType

import torch
from torch import Tensor, nn

SEED = 20
VOCABULARY = 512
# attend(module, query, key, value, scaling) -> [batch, tokens, query_heads, v_dim]; query, key and value
# [batch, heads, tokens, dim], keys and values of at least the new tokens, those last.
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Model:
    """`make(transformers)` gives the configuration. `forward(attention module, attend)` is a replacement for
    the forward of classes that do not call transformers' attention interface. `slopes(heads)` are the
    model's ALiBi slopes, by its own code. `decodes_batches`: positions are arguments, not the cache's length,
    so that sequences of different lengths can go on together.
    """

    name: str
    make: Callable
    forward: Callable[[nn.Module, Attend], Callable] | None = None
    slopes: Callable[[int], Tensor] | None = None
    decodes_batches: bool = True

    def config(self):
        """The configuration, with the dtype that config.json states."""
        import transformers

        config = self.make(transformers)
        config.dtype = torch.bfloat16
        return config


COMMON = dict(
    vocab_size=VOCABULARY,
    num_hidden_layers=4,
    max_position_embeddings=512,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)


def _gemma2(transformers):
    """Window on even layers, scores capped where they bite, a scale that is not 1/sqrt(head_dim)."""
    return transformers.Gemma2Config(
        **COMMON, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, query_pre_attn_scalar=24, attn_logit_softcapping=2.0, sliding_window=40,
    )  # fmt: skip


def _gemma3(transformers):
    """Two window layers, one global; q and k normalised; one key/value head; head_dim 64, the scale of 48."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(
        **COMMON, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=1,
        head_dim=64, query_pre_attn_scalar=48, sliding_window=48, layer_types=kinds,
    )  # fmt: skip


def _gpt_oss(transformers):
    """Sinks everywhere, window on even layers; both experts are always chosen, so rounding cannot change
    which.
    """
    return transformers.GptOssConfig(
        **COMMON, hidden_size=192, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, sliding_window=32, num_local_experts=2, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    )  # fmt: skip


def _mistral(transformers):
    """Window on every layer, one past two pages wide."""
    return transformers.MistralConfig(
        **COMMON, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, sliding_window=33,
    )  # fmt: skip


def _llama4(transformers):
    """Chunks of 32 with rotary embedding and q/k norm; every other layer global without either, its queries
    scaled by position. Dense MLPs.
    """
    return transformers.Llama4TextConfig(
        **COMMON, hidden_size=192, intermediate_size=256, intermediate_size_mlp=512, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, attention_chunk_size=32, no_rope_layer_interval=2,
        attn_temperature_tuning=True, floor_scale=64, attn_scale=0.5, moe_layers=[], num_local_experts=2,
    )  # fmt: skip


def _bloom(transformers):
    """ALiBi over 12 heads, no power of two."""
    return transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=384, n_layer=4, n_head=12, bos_token_id=1, eos_token_id=2,
        seq_length=512,
    )  # fmt: skip


def _mpt(transformers):
    """ALiBi over 6 heads by another formula than BLOOM's, to the same slopes."""
    return transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=192, n_layers=4, n_heads=6, expansion_ratio=2, max_seq_len=512
    )


def _falcon(transformers):
    """Rotary, 7 query heads over one key/value head."""
    return transformers.FalconConfig(
        **COMMON, hidden_size=224, num_attention_heads=7, multi_query=True, ffn_hidden_size=448
    )


def _bloom_forward(module: nn.Module, attend: Attend) -> Callable:
    def forward(self, hidden_states, residual, alibi, attention_mask, **kwargs):
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        out = attend(self, query, key, value, self.inv_norm_factor)
        return residual + self.dense(out.flatten(2)), None

    return MethodType(forward, module)


def _mpt_forward(module: nn.Module, attend: Attend) -> Callable:
    def forward(self, hidden_states, **kwargs):
        packed = self.Wqkv(hidden_states).unflatten(2, (3, self.n_heads, self.head_dim))
        query, key, value = (x.transpose(1, 2) for x in packed.unbind(2))
        return self.out_proj(attend(self, query, key, value, self.softmax_scale).flatten(2)), None

    return MethodType(forward, module)


def _falcon_forward(module: nn.Module, attend: Attend) -> Callable:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    def forward(self, hidden_states, alibi, attention_mask, position_embeddings=None, **kwargs):
        query, key, value = (
            x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states))
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return self.dense(attend(self, query, key, value, self.inv_norm_factor).flatten(2)), None

    return MethodType(forward, module)


def _bloom_slopes(heads: int) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    return build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]


def _mpt_slopes(heads: int) -> Tensor:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    return -build_mpt_alibi_tensor(heads, 2)[:, 0, 0].float()


MODELS = (
    Model("gemma2", _gemma2),
    Model("gemma3", _gemma3),
    Model("gpt_oss", _gpt_oss),
    Model("mistral", _mistral),
    Model("llama4", _llama4, decodes_batches=False),
    Model("bloom", _bloom, _bloom_forward, _bloom_slopes),
    Model("mpt", _mpt, _mpt_forward, _mpt_slopes),
    Model("falcon", _falcon, _falcon_forward),
)


def build(
    model: Model, dtype: torch.dtype, compute: torch.dtype, device: torch.device, attention: str = "eager"
) -> nn.Module:
    """The model with seeded weights rounded to `dtype` and held in `compute`; buffers (rotary frequencies)
    stay as they are, as in a model that transformers loads. `attention` is the name in transformers'
    attention interface.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)  # for what a class draws itself; `_initialise` draws the rest again
    config = deepcopy(model.config())
    config.dtype = torch.float32
    made = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if model.forward else attention
    )
    _initialise(made)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype).to(compute)
    return made.eval().to(device)


def replace_attention(model: Model, made: nn.Module, attend: Attend) -> None:
    """Make the attention modules of a class without the attention interface call `attend`."""
    name = type(made).__name__.removesuffix("ForCausalLM") + "Attention"
    for module in [module for module in made.modules() if type(module).__name__ == name]:
        module.forward = model.forward(module, attend)


def _initialise(made: nn.Module) -> None:
    """Weights that keep the size of what goes through them, so that attention is far from uniform and most of
    what a layer adds; norms and biases off their defaults; sinks as large as a score.
    """
    random = torch.Generator().manual_seed(SEED)
    for name, parameter in made.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.ndim > 1:  # [out, in], stacked experts [expert, in, out], embeddings [token, hidden]
            fan_in = parameter.shape[-1] if parameter.ndim == 2 else parameter.shape[-2]
            parameter.data = noise / math.sqrt(fan_in)
        elif name.endswith("sinks"):
            parameter.data = 2.0 + noise
        else:
            parameter.data = (1.0 if _is_one(name, parameter) else 0.0) + 0.1 * noise


def _is_one(name: str, parameter: nn.Parameter) -> bool:
    """True for the weights of a norm that starts as the identity; Gemma's start at 0 and add 1."""
    return name.endswith("weight") and bool((parameter == 1).all())
