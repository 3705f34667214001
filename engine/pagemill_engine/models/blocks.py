"""Building blocks shared by all Llama-like models: fused projections, attention over the paged cache, gated MLP.

Submodules are named as in Hugging Face checkpoints. A fused layer declares the parts it is made of, so that a
checkpoint's tensors land in their rows without a copy (`weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagemill_engine.models.context import ForwardContext
from pagemill_kernels.registry import Ops
from pagemill_protocol.model_spec import ModelSpec


class Linear(nn.Module):
    """One matrix made of one or several checkpoint matrices stacked by rows; packed for the device after loading.

    `parts`: {checkpoint name beside this module, or "" for the module's own name: rows}.
    """

    def __init__(self, ops: Ops, in_features: int, parts: dict[str, int], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = parts
        self.weight: Tensor | None = torch.empty(sum(parts.values()), in_features, dtype=dtype)
        self.bias = torch.empty(sum(parts.values()), dtype=dtype) if bias else None
        self._pack = ops.pack_linear
        self._apply_packed: Callable[[Tensor], Tensor]

    def weight_views(self, name: str) -> Iterator[tuple[str, Tensor]]:
        parent = name.rpartition(".")[0]
        start = 0
        for part, rows in self.parts.items():
            full_name = f"{parent}.{part}" if part else name
            assert self.weight is not None, "weights are loaded before packing"
            yield f"{full_name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{full_name}.bias", self.bias[start : start + rows]
            start += rows

    def pack(self) -> None:
        """Bring the weight into the device's layout; the plain one is dropped."""
        assert self.weight is not None, "packed twice"
        self._apply_packed = self._pack(self.weight, self.bias)
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_packed(x)


class RMSNorm(nn.Module):
    def __init__(self, ops: Ops, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(size, dtype=dtype)
        self.eps = eps
        self._rms_norm = ops.rms_norm

    def weight_views(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)  # type: ignore[no-any-return]


class Embedding(nn.Module):
    def __init__(self, num_rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(num_rows, size, dtype=dtype)

    def weight_views(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class Attention(nn.Module):
    """Grouped-query attention over the paged cache; `qk_norm` normalises queries and keys per head before rotation."""

    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.sliding_window = spec.layer_sliding_window(layer)
        rows = {
            "q_proj": spec.num_heads * spec.head_dim,
            "k_proj": spec.num_kv_heads * spec.head_dim,
            "v_proj": spec.num_kv_heads * spec.head_dim,
        }
        self.qkv_proj = Linear(ops, spec.hidden_size, rows, spec.attention_bias, dtype)
        self.o_proj = Linear(
            ops, spec.num_heads * spec.head_dim, {"": spec.hidden_size}, spec.attention_output_bias, dtype
        )
        if spec.qk_norm:
            self.q_norm = RMSNorm(ops, spec.head_dim, spec.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(ops, spec.head_dim, spec.rms_norm_eps, dtype)
        self.has_qk_norm = spec.qk_norm
        self.ops = ops

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        query, key_value = heads[:, : self.num_heads], heads[:, self.num_heads :]
        if self.has_qk_norm:
            query.copy_(self.q_norm(query))
            key = key_value[:, : self.num_kv_heads]
            key.copy_(self.k_norm(key))
        self.ops.apply_rope(heads[:, : self.num_heads + self.num_kv_heads], context.cos, context.sin)
        cache = context.kv_caches[self.layer]
        # The whole step's keys and values are stored first, so that a prefix hit within the step reads them.
        self.ops.store_kv(key_value, cache, context.kv_slots)
        plan = context.attention_plans[self.sliding_window]
        attended = self.ops.paged_attention(query, cache, plan, self.scale)
        return self.o_proj(attended.view(x.shape[0], -1))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        rows = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = Linear(ops, spec.hidden_size, rows, spec.mlp_bias, dtype)
        self.down_proj = Linear(ops, spec.intermediate_size, {"": spec.hidden_size}, spec.mlp_bias, dtype)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class CausalLM(nn.Module):
    """A decoder stack under a head: the face that the runner sees. Subclasses set `self.model`."""

    model: nn.Module

    def __init__(self, spec: ModelSpec, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.lm_head = Linear(ops, spec.hidden_size, {"": spec.vocab_size}, bias=False, dtype=dtype)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """token_ids: int64 [tokens]. Returns normalised hidden states [tokens, hidden]."""
        return self.model(token_ids, context)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden]. Returns float32 [rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits.float()
