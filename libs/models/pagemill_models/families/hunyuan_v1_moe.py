"""Hunyuan's mixtures (Tencent, 2025), such as A13B: Hunyuan with experts in every layer beside one shared MLP."""

from __future__ import annotations

from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, LayerSpec, MoESpec, SharedExpertSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear
from pagemill_models.families import hunyuan_v1_dense
from pagemill_models.families.moe import GGUF_IN_LAYER, gated_mlp, mixture, mixture_from_config, with_experts
from pagemill_models.families.qwen2_moe import PARTS


def read_config(config: ConfigValues) -> DecoderSpec:
    return _sparse(config, size_key="intermediate_size")


def _sparse(config: ConfigValues, size_key: str) -> DecoderSpec:
    """Declare the decoder. `size_key`: of an expert's inner values."""
    experts, shared_size = (
        mixture_from_config(config, size_key=size_key, renormalized=True),
        config.size("intermediate_size"),
    )

    def block(_: int, layer: LayerSpec) -> MoESpec:
        name, size = f"{layer.name}.mlp", experts.hidden_size
        shared = gated_mlp(f"{name}.shared_mlp", size, shared_size, experts.activation, PARTS)
        return replace(
            mixture(experts, name, PARTS),
            router=linear(size, (f"{name}.gate.wg", experts.num_experts)),
            shared=SharedExpertSpec(mlp=shared),
        )

    return with_experts(hunyuan_v1_dense.read_config(config), block)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    of_experts = values.integer("expert_feed_forward_length", values.integer("feed_forward_length"))
    shared = values.integer("expert_shared_feed_forward_length", of_experts)
    config = GGUFConfig(
        values,
        intermediate_size=values.rows("intermediate_size", "blk.0.ffn_up_shexp.weight", default=shared),
        moe_intermediate_size=of_experts,
        num_experts=values.integer("expert_count"),
        num_experts_per_tok=values.integer("expert_used_count"),
    )
    return _sparse(config, size_key="moe_intermediate_size")


_IN_LAYER = {name: each.replace(".shared_expert.", ".shared_mlp.") for name, each in GGUF_IN_LAYER.items()}
_NAMES = hunyuan_v1_dense.GGUF_NAMES
FAMILY = Family(
    read_config,
    read_gguf,
    _NAMES._replace(in_layer=_NAMES.in_layer | _IN_LAYER | {"ffn_gate_inp": "mlp.gate.wg"}),
)
