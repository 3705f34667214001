"""Attention over the paged cache with transformers' interface, registered under `NAME`.

transformers finds it by its global name and passes the attention module; the rest of a forward pass's inputs is in
`AttentionStep`, which every attention module of a model refers to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pagemill_execution.decoders.on_torch.context import ForwardContext
from pagemill_kernels.registry import Ops

NAME = "pagemill"
_STEP = "pagemill_step"
WITHOUT_EFFECT = ("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions")
"""Arguments without effect: positions are in the queries, and every context is causal."""


class AttentionCall(NamedTuple):
    """Properties of one layer's attention call."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    extras: tuple[str, ...]
    """Arguments that this attention does not support."""


@dataclass(slots=True)
class AttentionStep:
    ops: Ops
    context: ForwardContext | None = None
    """Context of the running step; None during the trial, in which layers only record their calls."""
    seen: list[AttentionCall] | None = None


def register() -> None:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def give_step(model: nn.Module, step: AttentionStep) -> None:
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _STEP, step)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention. query, key, value: [1, heads, tokens, head_dim]. Returns [1, tokens, heads, head_dim]."""
    step: AttentionStep = getattr(module, _STEP)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    num_heads, head_dim = query.shape[1], query.shape[3]
    if step.context is None:
        assert step.seen is not None
        asked = tuple(name for name, each in extras.items() if each is not None and name not in WITHOUT_EFFECT)
        step.seen.append(AttentionCall(layer, num_heads, key.shape[1], head_dim, asked))
        return query.transpose(1, 2), None
    heads = torch.cat([each[0].transpose(0, 1) for each in (query, key, value)], dim=1)
    cache = step.context.vectors(layer)
    step.ops.store(heads, num_heads, cache, step.context.kv_slots[None])
    scale = head_dim**-0.5 if scaling is None else scaling
    plan = step.context.attention_plans[None]
    return step.ops.paged_attention(heads[:, :num_heads], cache, plan, scale)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None
