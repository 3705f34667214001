"""What a forward pass needs besides token ids: built once a step by the runner, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True, frozen=True)
class ForwardContext:
    positions: Tensor
    """int64 [tokens]: of each token in its request."""
    rotations: list[tuple[Tensor, Tensor]]
    """cos and sin of the positions, each [tokens, 1, head_dim / 2], for each rotary embedding of the model."""
    kv_caches: list[Tensor]
    """One a layer; layout in `pagemill_kernels.kv_store`."""
    kv_slots: Tensor
    """Where this step's keys and values go: `ops.plan_slots`."""
    attention_plans: dict[int | None, Any]
    """A plan for each distinct sliding window of the model; `None` is full attention."""
    token_types: Tensor | None = None
    """int64 [tokens]: 1 for those of a pair's second text; only for models that distinguish them."""
