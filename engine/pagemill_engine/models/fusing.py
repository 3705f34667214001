"""Makes all decoder layers of a loaded model one call, where the device has such: fewer, larger calls, the same bits.

Whether a model's layers are of the kind that the call computes is read off its declaration. `FusedDecoderLayers` takes
the place of the single layers and reads their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from pagemill_engine.models.blocks import MLP, Attention
from pagemill_engine.models.context import ForwardContext
from pagemill_engine.models.decoder import Decoder, DecoderLayer
from pagemill_engine.models.layers import Norm
from pagemill_kernels.decoder_layer.parts import FusedLayers, LayerParts
from pagemill_kernels.registry import Ops
from pagemill_protocol.models.declaration import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec


class FusedDecoderLayers:
    """In the place of `plain`, whose weights are loaded."""

    def __init__(self, plain: list[DecoderLayer], fuse: Callable[[Sequence[LayerParts]], FusedLayers]) -> None:
        self.plain = plain
        parts = [_parts(layer) for layer in plain]
        self._windows = [attention.spec.window for attention, _, _, _ in parts]
        self._call = fuse([_layer_parts(each) for each in parts])

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Adds the layers' contributions to `hidden` in place."""
        plans = [context.attention_plans[window] for window in self._windows]
        cos, sin = context.rotations[0]
        self._call(hidden, plans, cos, sin, context.kv_caches, context.kv_slots)
        return hidden


def fuse_layers(model: Decoder, ops: Ops) -> None:
    """Called once the weights are loaded; does nothing where `ops` has no such call or the model other layers."""
    if ops.fuse_layers is not None and can_fuse(model.spec.decoder):
        model.layers = FusedDecoderLayers(model.layers.plain, ops.fuse_layers)


def can_fuse(decoder: DecoderSpec) -> bool:
    """All layers are of Llama's kind (`LayerParts`) and turn their heads alike."""
    return len(decoder.ropes()) == 1 and all(map(_is_like_llama, decoder.layers))


def _is_like_llama(layer: LayerSpec) -> bool:
    """Attention, then MLP, each behind an RMS norm and added as it is."""
    if len(layer.residuals) != 2:
        return False
    for residual in layer.residuals:
        branch = residual.branches[0]
        is_plain = branch.output_norm is None and branch.scale == 1.0 and residual.norm is None
        if len(residual.branches) != 1 or branch.norm is None or not is_plain:
            return False
    attention, mlp = layer.blocks()
    if not isinstance(attention, AttentionSpec) or not isinstance(mlp, MLPSpec):
        return False
    norms = [*layer.norms(), *_head_norms(attention)]
    alike = all(norm.kind == "rms" and norm.eps == norms[0].eps for norm in norms)
    return alike and _is_plain(attention) and mlp.gated and mlp.activation == "silu"


def _is_plain(attention: AttentionSpec) -> bool:
    """Rotated, perhaps normalised by heads, and nothing else."""
    norms = _head_norms(attention)
    by_heads = len(norms) != 1 and all(norm.size == attention.head_dim for norm in norms)
    has_extras = any(each is not None for each in (attention.soft_cap, attention.alibi_slopes, attention.sinks))
    return attention.rope is not None and by_heads and not has_extras


def _head_norms(attention: AttentionSpec) -> list[NormSpec]:
    return [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]


class _Parts(NamedTuple):
    attention: Attention
    attention_norm: Norm
    mlp: MLP
    mlp_norm: Norm


def _parts(layer: DecoderLayer) -> _Parts:
    (first,), (second,) = (residual.branches for residual in layer.residuals)
    attention, mlp = first.block, second.block
    assert isinstance(attention, Attention)
    assert isinstance(mlp, MLP)
    assert first.norm is not None
    assert second.norm is not None
    return _Parts(attention, first.norm, mlp, second.norm)


def _layer_parts(parts: _Parts) -> LayerParts:
    attention, spec = parts.attention, parts.attention.spec
    return LayerParts(
        attention_norm=parts.attention_norm.weight,
        qkv=attention.qkv.packed,
        query_norm=None if attention.query_norm is None else attention.query_norm.weight,
        key_norm=None if attention.key_norm is None else attention.key_norm.weight,
        output=attention.output.packed,
        mlp_norm=parts.mlp_norm.weight,
        gate_up=parts.mlp.up.packed,
        down=parts.mlp.output.packed,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        eps=parts.attention_norm.eps,
        scale=spec.scale,
    )
