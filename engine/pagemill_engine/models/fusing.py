"""Makes all decoder layers of a loaded model one call, where the device has such: fewer, larger calls, the same bits.

The models know nothing of it: `FusedDecoderLayers` takes the place of their list and reads its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from pagemill_engine.models.blocks import CausalLM
from pagemill_engine.models.context import ForwardContext
from pagemill_engine.models.llama import LlamaDecoderLayer, LlamaModel
from pagemill_kernels.decoder_layer.parts import FusedLayers, LayerParts
from pagemill_kernels.registry import Ops


class FusedDecoderLayers(nn.Module):
    """In the place of `plain`, whose weights are loaded."""

    def __init__(self, plain: list[LlamaDecoderLayer], fuse: Callable[[Sequence[LayerParts]], FusedLayers]) -> None:
        super().__init__()
        self.plain = nn.ModuleList(plain)
        self._windows = [layer.self_attn.sliding_window for layer in plain]
        self._call = fuse([_parts(layer) for layer in plain])

    def forward(self, hidden: Tensor, context: ForwardContext) -> None:
        """Adds the layers' contributions to `hidden` in place."""
        plans = [context.attention_plans[window] for window in self._windows]
        self._call(hidden, plans, context.cos, context.sin, context.kv_caches, context.kv_slots)


def fuse_layers(model: CausalLM, ops: Ops) -> None:
    """Called once the weights are loaded; does nothing where `ops` has no such call or the model other layers."""
    if ops.fuse_layers is None or not isinstance(model.model, LlamaModel):
        return
    layers = [layer for layer in model.model.layers if isinstance(layer, LlamaDecoderLayer)]
    if len(layers) == len(model.model.layers):
        model.model.layers = nn.ModuleList([FusedDecoderLayers(layers, ops.fuse_layers)])


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
