"""GLM-4 (Zhipu AI, 2025): norms before and behind each block, half of each head rotated, one matrix of gate and up."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace, with_mlp, with_output_norms
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, MLPSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(
        config,
        default_context=131_072,
        default_head_dim=128,
        epsilon=("rms_norm_eps", 1.5625e-7),
        partial_rotary=("partial_rotary_factor", 0.5),
    )
    rope = replace(numbers.rope, interleaved=True)
    numbers = replace(numbers, rope=rope, attention_bias=config.flag("attention_bias", True))

    def fused(name: str, spec: MLPSpec) -> MLPSpec:
        return replace(spec, up=linear(numbers.hidden_size, (f"{name}.mlp.gate_up_proj", 2 * spec.intermediate_size)))

    return with_output_norms(with_mlp(decoder(numbers), fused), "post_self_attn_layernorm", "post_mlp_layernorm")


def read_gguf(values: GGUFValues) -> DecoderSpec:
    return read_config(GGUFConfig(values))


_OWN = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_NAMES = gguf_names(interleaved=False)
FAMILY = Family(read_config, read_gguf, _NAMES._replace(in_layer=_NAMES.in_layer | _OWN))
