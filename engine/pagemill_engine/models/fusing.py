"""Makes each decoder layer of a loaded model one call, where the device has such: fewer, larger calls, the same bits.

The models know nothing of it: a `FusedDecoderLayer` takes a layer's place in their list and reads its weights.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pagemill_engine.models.blocks import CausalLM
from pagemill_engine.models.context import ForwardContext
from pagemill_engine.models.llama import LlamaDecoderLayer, LlamaModel
from pagemill_kernels.decoder_layer.parts import FusedLayer, LayerParts
from pagemill_kernels.registry import Ops


class FusedDecoderLayer(nn.Module):
    """In the place of `plain`, whose weights are loaded."""

    def __init__(self, plain: LlamaDecoderLayer, fuse: Callable[[LayerParts], FusedLayer]) -> None:
        super().__init__()
        self.plain = plain
        self.layer, self.sliding_window = plain.self_attn.layer, plain.self_attn.sliding_window
        self._call = fuse(_parts(plain))

    def forward(self, hidden: Tensor, context: ForwardContext) -> None:
        """Adds this layer's contribution to `hidden` in place."""
        plan, cache = context.attention_plans[self.sliding_window], context.kv_caches[self.layer]
        self._call(hidden, plan, context.cos, context.sin, cache, context.kv_slots)


def fuse_layers(model: CausalLM, ops: Ops) -> None:
    """Called once the weights are loaded; does nothing where `ops` has no such call or the model other layers."""
    if ops.fuse_layer is None or not isinstance(model.model, LlamaModel):
        return
    layers = model.model.layers
    for index, layer in enumerate(layers):
        if isinstance(layer, LlamaDecoderLayer):
            layers[index] = FusedDecoderLayer(layer, ops.fuse_layer)


def _parts(plain: LlamaDecoderLayer) -> LayerParts:
    attention, mlp = plain.self_attn, plain.mlp
    return LayerParts(
        attention_norm=plain.input_layernorm.weight,
        qkv=attention.qkv_proj.packed,
        query_norm=attention.q_norm.weight if attention.has_qk_norm else None,
        key_norm=attention.k_norm.weight if attention.has_qk_norm else None,
        output=attention.o_proj.packed,
        mlp_norm=plain.post_attention_layernorm.weight,
        gate_up=mlp.gate_up_proj.packed,
        down=mlp.down_proj.packed,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        eps=plain.input_layernorm.eps,
        scale=attention.scale,
    )
