"""Phi-1, Phi-1.5 and Phi-2 (arXiv 2306.11644): parallel blocks after one layer norm, biases also on the head."""

from __future__ import annotations

from pagemill_models.declaration.changes import (
    changed_head,
    replace,
    side_by_side,
    with_attention,
    with_head_norms,
    with_layer_norms,
    with_mlp,
)
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, MLPSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import layer_norm, linear, plain_mlp
from pagemill_models.families.llama_like import decoder, gguf_names, numbers_from_config


def read_config(config: ConfigValues) -> DecoderSpec:
    numbers = numbers_from_config(
        config,
        default_context=2048,
        epsilon=("layer_norm_eps", 1e-5),
        default_activation="gelu_new",
        partial_rotary=("partial_rotary_factor", 0.5),
    )
    plain, size, inner = decoder(replace(numbers, attention_bias=True)), numbers.hidden_size, numbers.intermediate_size

    def attention(index: int, spec: AttentionSpec) -> AttentionSpec:
        name = f"{plain.layers[index].name}.self_attn.dense"
        return replace(spec, output=linear(spec.output.in_features, (name, size), bias=True))

    def mlp(name: str, gated: MLPSpec) -> MLPSpec:
        up, down = (
            linear(size, (f"{name}.mlp.fc1", inner), bias=True),
            linear(inner, (f"{name}.mlp.fc2", size), bias=True),
        )
        return plain_mlp(up, down, gated.activation)

    changed = side_by_side(with_layer_norms(with_mlp(with_attention(plain, attention), mlp)))
    if config.flag("qk_layernorm", False):
        changed = with_head_norms(changed, ("q_layernorm", "k_layernorm"), numbers.rms_norm_eps, bias=True)
    norm = layer_norm("model.final_layernorm", size, numbers.rms_norm_eps)
    return replace(changed, norm=norm, head=changed_head(plain, bias=True))


def read_gguf(values: GGUFValues) -> DecoderSpec:
    if values.has("blk.0.attn_qkv.weight"):
        raise values.unsupported("queries, keys and values in one matrix (convert the model again)")
    return read_config(GGUFConfig(values))


_NAMES = gguf_names(interleaved=False)
_OWN = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_OUTER = {f"output_norm.{part}": f"model.final_layernorm.{part}" for part in ("weight", "bias")}
FAMILY = Family(
    read_config,
    read_gguf,
    _NAMES._replace(in_layer=_NAMES.in_layer | _OWN, outside_layers=_NAMES.outside_layers | _OUTER),
)
