"""StableLM (Stability AI, 2024): Llama with layer norms and a partial rotary embedding; some blocks are parallel."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, side_by_side, with_head_norms, with_layer_norms
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues, stored: str = "norms.{head}.weight") -> DecoderSpec:
    """Declare the decoder. `stored`: the end of the name of a head's norm."""
    numbers = numbers_from_config(
        config,
        default_context=4096,
        epsilon=("layer_norm_eps", 1e-5),
        partial_rotary=("partial_rotary_factor", 0.25),
    )
    plain = with_layer_norms(decoder(replace(numbers, attention_bias=config.flag("use_qkv_bias", False))))
    if config.flag("qk_layernorm", False):
        plain = with_head_norms(plain, _NORMS, numbers.rms_norm_eps, stored=stored, of_each_head=True)
    return side_by_side(plain) if config.flag("use_parallel_residual", False) else plain


def read_gguf(values: GGUFValues) -> DecoderSpec:
    config = GGUFConfig(
        values,
        use_qkv_bias=values.has("blk.0.attn_q.bias"),
        qk_layernorm=values.has("blk.0.attn_q_norm.weight"),
        use_parallel_residual=not values.has("blk.0.ffn_norm.weight"),
    )
    return read_config(config, "weight")


_NORMS = ("q_layernorm", "k_layernorm")
_NAMES = gguf_names(interleaved=False)
_OWN = {f"attn_{name[0]}_norm": f"self_attn.{name}" for name in _NORMS}
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | _OWN))
