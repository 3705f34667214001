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
from pagemill_engine.models.decoder import Branch, Decoder, DecoderLayer
from pagemill_engine.models.experts import MoE
from pagemill_engine.models.layers import Norm
from pagemill_kernels.decoder_layer.parts import FusedLayers, LayerParts, MLPParts, MoEParts, NormParts
from pagemill_kernels.registry import Ops
from pagemill_protocol.models.declaration import (
    AttentionSpec,
    BranchSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    RopeSpec,
)


class FusedDecoderLayers:
    """In the place of `plain`, whose weights are loaded."""

    def __init__(
        self,
        plain: list[DecoderLayer],
        ropes: list[RopeSpec],
        fuse: Callable[[Sequence[LayerParts]], FusedLayers],
    ) -> None:
        """`ropes`: the model's, in the order of `ForwardContext.rotations`."""
        self.plain = plain
        attentions = [_blocks(layer).attention.spec for layer in plain]
        self._windows = [spec.window for spec in attentions]
        self._rotations = [None if spec.rope is None else ropes.index(spec.rope) for spec in attentions]
        self._call = fuse([_layer_parts(layer) for layer in plain])

    def __call__(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Adds the layers' contributions to `hidden` in place."""
        plans = [context.attention_plans[window] for window in self._windows]
        rotations = [None if index is None else context.rotations[index] for index in self._rotations]
        self._call(hidden, plans, rotations, context.kv_caches, context.kv_slots)
        return hidden


def fuse_layers(model: Decoder, ops: Ops) -> None:
    """Called once the weights are loaded; does nothing where `ops` has no such call or the model other layers."""
    declared = model.spec.decoder
    if ops.fuse_layers is not None and can_fuse(declared):
        model.layers = FusedDecoderLayers(model.layers.plain, declared.ropes(), ops.fuse_layers)


def can_fuse(decoder: DecoderSpec) -> bool:
    """All layers are what `LayerParts` can say."""
    return all(map(_has_parts, decoder.layers))


def _has_parts(layer: LayerSpec) -> bool:
    """Attention, then an MLP or experts, one after the other or side by side, and no norm behind their sum."""
    branches = _branches(layer)
    blocks = [branch.block for branch in branches]
    if len(blocks) != 2 or any(residual.norm is not None for residual in layer.residuals):
        return False
    # Side by side they must not read what the other has added, so that their input is a copy.
    if len(layer.residuals) == 1 and any(branch.norm is None for branch in branches):
        return False
    return branches[0].scale == branches[1].scale and _is_plain_attention(blocks[0]) and _is_plain_mlp(blocks[1])


def _branches(layer: LayerSpec) -> list[BranchSpec]:
    return [branch for residual in layer.residuals for branch in residual.branches]


def _is_plain_attention(block: object) -> bool:
    """Over keys and values of a cache, perhaps normalised or with sinks, and nothing else."""
    if not isinstance(block, AttentionSpec):
        return False
    return block.causal and block.soft_cap is None and block.alibi_slopes is None


def _is_plain_mlp(block: object) -> bool:
    return isinstance(block, MLPSpec) or (isinstance(block, MoESpec) and block.shared is None and block.gating is None)


class _Blocks(NamedTuple):
    """A layer's two branches and what they compute."""

    first: Branch
    second: Branch
    attention: Attention
    mlp: MLP | MoE


def _blocks(layer: DecoderLayer) -> _Blocks:
    first, second = (branch for residual in layer.residuals for branch in residual.branches)
    assert isinstance(first.block, Attention)
    assert isinstance(second.block, MLP | MoE)
    return _Blocks(first, second, first.block, second.block)


def _layer_parts(layer: DecoderLayer) -> LayerParts:
    first, second, attention, mlp = _blocks(layer)
    spec = attention.spec
    return LayerParts(
        qkv=attention.qkv.packed,
        output=attention.output.packed,
        mlp=_mlp_parts(mlp) if isinstance(mlp, MLP) else _moe_parts(mlp),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        attention_norm=_norm_parts(first.norm),
        mlp_norm=_norm_parts(second.norm),
        query_norm=_norm_parts(attention.query_norm),
        key_norm=_norm_parts(attention.key_norm),
        attention_output_norm=_norm_parts(first.output_norm),
        mlp_output_norm=_norm_parts(second.output_norm),
        residual_scale=first.scale,
        parallel=len(layer.residuals) == 1,
        sinks=None if attention.sinks is None else attention.sinks.values,
    )


def _mlp_parts(mlp: MLP) -> MLPParts:
    spec = mlp.spec
    return MLPParts(mlp.up.packed, mlp.output.packed, spec.activation, spec.gated, spec.limit)


def _moe_parts(moe: MoE) -> MoEParts:
    return MoEParts(moe.router.packed, moe.experts.packed, moe.spec.top_k, moe.spec.renormalized)


def _norm_parts(norm: Norm | None) -> NormParts | None:
    return None if norm is None else NormParts(norm.weight, norm.bias, norm.eps, norm.spec.kind == "layer")
